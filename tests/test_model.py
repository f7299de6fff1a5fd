"""model.py: sizes, arms that differ in the input alone, causality, loss, sampling."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import ARMS, ROOT, make_model, model_config

from config import load_config
from model import GPT, KVCache, build_model, head_loss, rotary_table, rotate
from train import TrainConfig, make_optimizer

IDS = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))


def meta_model(config: str) -> GPT:
    cfg = load_config(TrainConfig, {}, [str(ROOT / "config" / f"{config}.py")])
    with torch.device("meta"):
        return GPT(cfg)


@pytest.mark.parametrize(
    "config, n_params, n_input",
    [
        ("canonical_1p7b", 1_711_376_384, 0),
        ("gf2_1p7b", 1_711_376_384, 0),
        ("learned_1p7b", 1_812_039_680, 100_663_296),
        # 6 (4 C^2 + 3 C F + 2 C) + C + V C with C = 88, F = 352, V = 2048; the table is V C again
        ("canonical_toy", 924_792, 0),
        ("gf2_toy", 924_792, 0),
        ("learned_toy", 1_105_016, 180_224),
        ("tiny", 60_084, 0),
    ],
)
def test_parameter_counts(config, n_params, n_input):
    model = meta_model(config)
    assert model.n_params() == n_params
    assert sum(p.numel() for p in model.wte.parameters()) == n_input


def test_the_1p7b_arms_have_the_papers_parts():
    model = meta_model("canonical_1p7b")
    C, L, H = 2048, 24, 8192
    assert sum(p.numel() for p in model.blocks.parameters()) + C == L * (4 * C * C + 3 * C * H + 2 * C) + C
    assert model.lm_head.weight.shape == (49152, 2048)


def test_backbones_are_equal_bit_by_bit_and_seeds_differ():
    weights = {arm: dict(make_model(input_mode=arm).named_parameters()) for arm in ARMS}
    assert set(weights["learned"]) - set(weights["canonical"]) == {"wte.weight"}
    assert set(weights["canonical"]) == set(weights["gf2"])
    for name, p in weights["canonical"].items():
        assert torch.equal(p, weights["learned"][name]) and torch.equal(p, weights["gf2"][name]), name
    other = dict(make_model(seed=2).named_parameters())
    same = [name for name in other if torch.equal(other[name], weights["canonical"][name])]
    assert all("norm" in name for name in same), same


def test_a_weights_draw_does_not_depend_on_the_layers_around_it():
    small, large = make_model(n_layer=1), make_model(n_layer=3)
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(small.state_dict()[name], large.state_dict()[name])


def test_the_start_is_normal_and_smaller_into_the_residual():
    model = make_model(vocab_size=4096, n_embd=96, n_layer=8)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[3].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.blocks[3].attn.proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(model.norm_f.weight, torch.ones(96))


@pytest.mark.parametrize("arm", ARMS)
def test_loss_at_the_start_is_near_log_v(arm):
    assert make_model(input_mode=arm)(IDS, IDS).item() == pytest.approx(math.log(512), abs=0.1)


@pytest.mark.parametrize("arm", ARMS)
def test_attention_is_causal(arm):
    model, changed = make_model(input_mode=arm), IDS.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 512
    before, after = model(IDS), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_attention_equals_a_slow_loop():
    attn, cfg = make_model().blocks[0].attn, model_config()
    x = torch.randn(1, 6, 36, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_table(6, 18, cfg.rope_theta)
    q, k, v = (attn.qkv.weight.detach() @ x[0].T).T.split(36, dim=1)  # each (T, C)
    out = torch.zeros(6, 36)
    for h in range(2):
        part = slice(18 * h, 18 * (h + 1))
        for t in range(6):
            weights = []
            for s in range(t + 1):
                score = 0.0
                for i in range(9):  # the pair (i, i + 9) as a complex number, turned by its position
                    angle = (t - s) * cfg.rope_theta ** (-2 * i / 18)
                    a = complex(q[t, part][i], q[t, part][i + 9]) * complex(math.cos(angle), math.sin(angle))
                    b = complex(k[s, part][i], k[s, part][i + 9])
                    score += (a * b.conjugate()).real
                weights.append(score / math.sqrt(18))
            p = torch.tensor(weights).softmax(0)
            out[t, part] = sum(p[s] * v[s, part] for s in range(t + 1))
    expected = out @ attn.proj.weight.T
    torch.testing.assert_close(attn(x, cos, sin)[0], expected, atol=1e-6, rtol=1e-4)


def test_rotation_keeps_lengths_and_depends_on_differences():
    x = torch.randn(8, 18, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_table(8, 18, 1e4)
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    q, k = rotate(x[:1].expand(8, -1), cos, sin), rotate(x[1:2].expand(8, -1), cos, sin)
    torch.testing.assert_close(q[5] @ k[3], q[7] @ k[5])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunked_loss_equals_logits_then_cross_entropy(reduction):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 16, generator=generator, requires_grad=True)
    weight = torch.randn(49152, 16, generator=generator).mul(0.1).requires_grad_()  # 512 rows a chunk
    targets = torch.randint(49152, (900,), generator=generator)
    targets[::7] = -1  # these do not count
    grads = []
    for loss in (
        head_loss(x, weight, targets, reduction),
        F.cross_entropy(x @ weight.T, targets, reduction=reduction, ignore_index=-1),
    ):
        x.grad = weight.grad = None
        loss.sum().backward()
        grads.append((loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grads[0][1:], grads[1][1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_is_float32_whatever_the_precision_of_the_products(reduction):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(512, 16, generator=generator).mul(0.3).requires_grad_()
    targets = torch.randint(512, (600,), generator=generator)
    targets[::7] = -1
    grads = []
    for loss in (
        head_loss(x, weight, targets, reduction),
        F.cross_entropy(x.float() @ weight.T, targets, reduction=reduction, ignore_index=-1),
    ):
        x.grad = weight.grad = None
        assert loss.dtype == torch.float32
        loss.sum().backward()
        grads.append((loss.detach(), x.grad.float(), weight.grad))
    # The logits are rounded to bfloat16, by 1 in 256; the mean is far more exact.
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=3e-4 if reduction == "mean" else 4e-3, atol=0)
    for got, expected in zip(grads[0][1:], grads[1][1:]):
        assert (got - expected).norm() < 0.02 * expected.norm()


def test_the_tokens_losses_average_to_the_loss():
    model, targets = make_model(), IDS.roll(-1, 1)
    losses = model(IDS, targets, "none")
    assert losses.shape == IDS.shape
    expected = F.cross_entropy(model(IDS).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(losses.mean(), model(IDS, targets))


@pytest.mark.parametrize("arm", ARMS)
def test_one_batch_can_be_memorised(arm):
    model = make_model(input_mode=arm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(120):
        loss = model(IDS, IDS.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5


def test_only_matrices_decay():
    cfg = TrainConfig(weight_decay=0.1)
    groups = make_optimizer(make_model(input_mode="learned"), cfg).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.dim() == 2 for p in groups[0]["params"]) and all(p.dim() == 1 for p in groups[1]["params"])
    # 2 layers x (qkv, proj, gate, up, down), head and table; 2 norms per layer and the last
    assert [len(g["params"]) for g in groups] == [12, 5]


def test_every_arm_computes_in_the_same_precision_under_autocast():
    for arm in ARMS:
        seen = []
        model = make_model(input_mode=arm)
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, IDS.roll(-1, 1))
        loss.backward()
        assert seen == [torch.bfloat16] and loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(512), abs=0.1)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_flops_of_a_token_by_hand():
    # 2 layers of (3 + 1) C^2 + 3 C F, and the head; 6 FLOPs per weight; attention 12 L C T
    C, F_, V, L, T = 36, 144, 512, 2, 32
    expected = 6 * (L * (4 * C * C + 3 * C * F_) + 5 * C + V * C) + 12 * L * C * T
    for arm in ARMS:
        assert make_model(input_mode=arm).flops_per_token() == expected


# -------------------------------------------------------------------------------
# sampling


def trained_a_little() -> GPT:
    """A model whose next token is no longer nearly uniform, so that equality says something."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    return model


def test_the_cache_changes_neither_logits_nor_tokens():
    model = trained_a_little()
    cache = [KVCache() for _ in model.blocks]
    steps = [model.hidden(IDS[:, :5], cache)] + [model.hidden(IDS[:, t : t + 1], cache) for t in range(5, 32)]
    logits = model.lm_head(torch.cat(steps, dim=1))
    torch.testing.assert_close(logits, model(IDS), atol=1e-5, rtol=1e-5)
    for temperature in (0.0, 1.0):  # 60 tokens: also past block_size, where the window slides
        a, b = (
            model.generate(
                IDS[:, :3], 60, temperature, top_k=20, use_cache=use_cache, generator=torch.Generator().manual_seed(1)
            )  # fmt: skip
            for use_cache in (True, False)
        )
        assert torch.equal(a, b) and a.shape == (2, 63)


def test_greedy_equals_a_loop_over_the_last_block_size_tokens():
    model, ids = trained_a_little(), IDS[:1, :4]
    for _ in range(40):
        ids = torch.cat([ids, model(ids[:, -32:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(IDS[:1, :4], 40, temperature=0), ids)


def test_top_k_draws_from_the_k_likeliest_with_their_probabilities():
    model, prompt = trained_a_little(), IDS[:1, :4].expand(4000, 4)
    p = model(IDS[:1, :4])[0, -1].div(0.7).softmax(-1)
    best = p.topk(3)
    out = model.generate(prompt, 1, temperature=0.7, top_k=3, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(out[:, -1], minlength=512)
    assert set(counts.nonzero().flatten().tolist()) <= set(best.indices.tolist())
    expected = best.values / best.values.sum()
    torch.testing.assert_close(counts[best.indices] / 4000, expected, atol=0.03, rtol=0)


def test_top_k_above_v_is_no_limit_and_no_tokens_is_the_prompt():
    model = trained_a_little()
    draw = dict(temperature=1.0, generator=None)
    outs = []
    for k in (0, 512, 100_000):
        draw["generator"] = torch.Generator().manual_seed(3)
        outs.append(model.generate(IDS, 5, top_k=k, **draw))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(model.generate(IDS, 0), IDS)


def test_sampling_stops_at_end_of_text():
    model = trained_a_little()
    free = model.generate(IDS[:1, :4], 20, temperature=0)[0, 4:].tolist()
    stop = free[6]
    first = free.index(stop)
    out = model.generate(IDS[:1, :4], 20, temperature=0, stop_id=stop)
    assert out[0, 4:].tolist() == free[: first + 1]
    both = model.generate(IDS[:, :4], 20, temperature=0, stop_id=stop)  # one row may end first
    assert both[0, 4:].tolist()[: first + 1] == free[: first + 1]
    assert set(both[0, 4 + first :].tolist()) == {stop}


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(top_k=-1), dict(max_new_tokens=-1)])
def test_sampling_refuses_nonsense(bad):
    with pytest.raises(ValueError, match="must be at least 0"):
        make_model().generate(IDS, **({"max_new_tokens": 1} | bad))


def test_a_temperature_near_zero_is_greedy():
    model = trained_a_little()
    greedy = model.generate(IDS, 10, temperature=0)
    for temperature in (1e-6, 1e-40, 1e-320):
        assert torch.equal(model.generate(IDS, 10, temperature=temperature), greedy)


def test_too_long_an_input_is_refused():
    with pytest.raises(ValueError, match="33 tokens do not fit in block_size=32"):
        make_model()(torch.zeros(1, 33, dtype=torch.long))


def test_a_checkpoint_with_a_missing_or_foreign_key_is_refused():
    model = make_model()
    saved = {"config": dataclasses.asdict(model.cfg), "model": model.state_dict()}
    rebuilt = build_model(copy.deepcopy(saved))
    assert torch.equal(rebuilt(IDS), model(IDS))
    broken = copy.deepcopy(saved)
    del broken["model"]["norm_f.weight"]
    with pytest.raises(ValueError, match="norm_f.weight"):
        build_model(broken)
    renamed = {"config": saved["config"], "model": {f"module.{k}": v for k, v in saved["model"].items()}}
    with pytest.raises(ValueError, match="does not fit"):
        build_model(renamed)
    other = {"config": saved["config"] | {"n_layer": 1}, "model": saved["model"]}
    with pytest.raises(ValueError, match="blocks.1"):
        build_model(other)


def test_activation_checkpointing_changes_no_gradient():
    ids = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(0))
    grads = []
    for on in (False, True):
        model = GPT(model_config(input_mode="learned"), activation_checkpointing=on)
        model(ids[:, :-1], ids[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_the_hidden_width_of_the_mlp_is_derived_once():
    assert model_config().n_inner == 4 * 36 and model_config(n_inner=50).n_inner == 50
    assert make_model().blocks[0].mlp.down.weight.shape == (36, 144)


def test_norms_keep_the_dtype_of_their_input_and_the_precision_of_their_gain():
    norm, x = make_model().norm_f, torch.randn(4, 36).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(1.001)  # 1.0 in bfloat16
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * 1.001
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x), exact.bfloat16())
