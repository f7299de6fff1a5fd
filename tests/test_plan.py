"""The plan's arithmetic against the model, traces of its memory, and a calculation by hand."""

from dataclasses import replace

import pytest
import torch
from conftest import ARMS, ROOT
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from config import load_config
from config.plan import flops_per_token, memory, n_params, parameters, peak_flops
from model import GPT
from train import TrainConfig, main


def config(name: str, **changes) -> TrainConfig:
    return replace(load_config(TrainConfig, {}, [str(ROOT / "config" / f"{name}.py")]), **changes)


@pytest.mark.parametrize(
    "name, total, in_input",
    [
        # 24 (4 C^2 + 3 C F + 2 C) + C + V C with C = 2048, F = 8192, V = 49152; the table is V C again
        ("canonical_1p7b", 1_711_376_384, 0),
        ("gf2_1p7b", 1_711_376_384, 0),
        ("learned_1p7b", 1_812_039_680, 100_663_296),
        ("canonical_135m", 147_786_048, 0),
        # 6 (4 C^2 + 3 C F + 2 C) + C + V C with C = 88, F = 352, V = 2048
        ("canonical_toy", 924_792, 0),
        ("gf2_toy", 924_792, 0),
        ("learned_toy", 1_105_016, 180_224),
        ("tiny", 60_084, 0),
    ],
)
def test_the_plans_parameters_and_flops_are_the_models(name, total, in_input):
    cfg = config(name)
    with torch.device("meta"):
        model = GPT(cfg)
    assert n_params(cfg) == model.n_params() == total
    assert parameters(cfg)["input"] == sum(p.numel() for p in model.wte.parameters()) == in_input
    assert flops_per_token(cfg) == model.flops_per_token()


@pytest.mark.parametrize(
    "compiled, recompute, traced_gb",
    [(False, False, 85.8), (False, True, 39.1), (True, False, 69.6), (True, True, 32.4)],
)
def test_the_memory_of_the_large_run_is_that_of_a_trace(compiled, recompute, traced_gb):
    # A step with fake tensors in PyTorch 2.13, bfloat16: the largest sum of all live storages;
    # compiled, what is kept after the forward pass and the gradient of the logits.
    cfg = config("canonical_1p7b", batch_size=8, activation_checkpointing=recompute)
    parts = memory(cfg, half=True, compiled=compiled)
    assert sum(parts.values()) / 1e9 == pytest.approx(traced_gb, rel=0.05)
    N = 1_711_376_384
    assert [parts[key] for key in ("weights", "gradients", "AdamW's means")] == [4 * N, 4 * N, 8 * N]
    assert memory(config("learned_1p7b"), True, compiled)["16-bit weights"] == 2 * N  # no table


def plan(capsys, *args: str) -> str:
    main([str(ROOT / "config" / "learned_1p7b.py"), "--plan", "--data_dir=no/such", *args])
    return capsys.readouterr().out


def test_the_plan_of_eight_gpus_by_hand(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    out = plan(capsys)
    # 47,684 steps of 2^21 tokens; 11,476,217,856 FLOPs per token; 8 x 989e12 x 0.4 FLOP/s.
    for words in (
        "1,812,039,680",
        "8 in all, batch_size 8, 16-bit products, compiled",
        "100,000,595,968 tokens",
        "8 x H100        100.7 hours at 40%",
        "200.0 GB of tokens, 2 checkpoints of 21.74 GB",
    ):
        assert words in out, (words, out)
    assert len(out.splitlines()) <= 24
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "1 x H100      1,074.4 hours" in plan(capsys, "--activation_checkpointing")  # a third more than 805.8
    assert "hours" not in plan(capsys, "--device=cpu")


def test_peaks_are_found_by_the_gpus_name(monkeypatch):
    cuda, peaks = torch.device("cuda"), {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L40S": 362e12, "NVIDIA L40": 181e12}
    for name, peak in (peaks | {"A new card": None}).items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, "bfloat16") == peak, name
        assert peak_flops(cuda, "float32") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None


@pytest.mark.parametrize("arm", ARMS)
def test_the_16_bit_step_is_one_graph_without_float32_products(arm):
    # The large run's step in small, as AOTAutograd hands it to the compiler; two layers, 1,024 tokens.
    graphs, attention = [], "scaled_dot_product"

    def record(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    changes = dict(input_mode=arm, vocab_size=4096, block_size=256, n_layer=2, n_head=2, n_embd=96, n_inner=384)
    model = GPT(config("learned_1p7b", **changes))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=record))
    x, y = torch.randint(4096, (2, 4, 256), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = compiled(x, y)
    loss.backward()
    assert loss.dtype == torch.float32 and len(graphs) == 2  # forward and backward
    products = [node for graph in graphs for node in graph.graph.nodes
                if any(name in str(node.target) for name in ("mm.", "linear", attention))]  # fmt: skip
    # Forward: 6 a layer (qkv, proj, gate, up, down, attention) and the head; backward: twice 5, 1, and twice 1,
    # without a gradient of a fixed input, but with its code's product.
    assert len(products) >= (2 * 6 + 1) + (2 * 11 + 2) - (arm != "learned"), products
    for node in products:
        kinds = {a.meta["val"].dtype for a in node.args[:3] if isinstance(a, torch.fx.Node)}
        assert torch.float32 not in kinds or attention in str(node.target) and kinds == {torch.bfloat16}, node
