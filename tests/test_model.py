"""model.py: sizes, arms that differ in the input alone, causality, loss, sampling."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import ARMS, make_model, model_config

from model import GPT, KVCache, build_model, head_loss, rotary_table
from train import TrainConfig, make_optimizer

IDS = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))


def test_backbones_are_equal_bit_by_bit_and_seeds_differ():
    weights = {arm: dict(make_model(input_mode=arm).named_parameters()) for arm in ARMS}
    deeper, other = make_model(n_layer=3).state_dict(), make_model(seed=2).state_dict()
    assert set(weights["learned"]) == {"wte.weight", *weights["canonical"]}
    for name, p in weights["canonical"].items():
        assert torch.equal(p, weights["learned"][name]) and torch.equal(p, weights["gf2"][name]), name
        assert torch.equal(p, other[name]) == ("norm" in name), name
    name = "blocks.0.attn.qkv.weight"  # its draw does not depend on the layers around it
    assert torch.equal(weights["canonical"][name], deeper[name])


def test_the_start_is_normal_and_smaller_into_the_residual():
    model = make_model(vocab_size=4096, n_embd=96, n_layer=8)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[3].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.blocks[3].attn.proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(model.norm_f.weight, torch.ones(96))


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype, n, V", [(torch.float32, 900, 49152), (torch.bfloat16, 600, 512)])
def test_chunked_loss_equals_logits_then_cross_entropy(dtype, n, V, reduction):
    """n = 900 makes two chunks. The loss is float32 whatever the precision of the products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, 16, generator=generator).mul(0.1 if V > 512 else 0.3).requires_grad_()
    targets = torch.randint(V, (n,), generator=generator)
    targets[::7] = -1  # these do not count
    grads = []
    for loss in (
        head_loss(x, weight, targets, reduction),
        F.cross_entropy(x.float() @ weight.T, targets, reduction=reduction, ignore_index=-1),
    ):
        x.grad = weight.grad = None
        assert loss.dtype == torch.float32
        loss.sum().backward()
        grads.append((loss.detach(), x.grad.float(), weight.grad))
    if dtype == torch.float32:
        torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grads[0][1:], grads[1][1:], rtol=1e-4, atol=1e-6)
        return
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
def test_one_batch_can_be_memorised_from_a_loss_near_log_v(arm):
    model = make_model(input_mode=arm)
    assert model(IDS, IDS).item() == pytest.approx(math.log(512), abs=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(80):
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
    for temperature in (0, 1e-6, 1e-40, 1e-320):  # near zero is greedy, too
        assert torch.equal(model.generate(IDS[:1, :4], 40, temperature=temperature), ids)


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


def test_nonsense_is_refused():
    for bad in (dict(temperature=-1), dict(top_k=-1), dict(max_new_tokens=-1)):
        with pytest.raises(ValueError, match="must be at least 0"):
            make_model().generate(IDS, **({"max_new_tokens": 1} | bad))
    with pytest.raises(ValueError, match="33 tokens do not fit in block_size=32"):
        make_model()(torch.zeros(1, 33, dtype=torch.long))


def test_a_checkpoint_with_a_missing_or_foreign_key_is_refused():
    model = make_model()
    config, weights = dataclasses.asdict(model.cfg), model.state_dict()
    rebuilt = build_model(copy.deepcopy({"config": config, "model": weights}))
    assert torch.equal(rebuilt(IDS), model(IDS))
    for changes, others, words in [
        ({}, {k: v for k, v in weights.items() if k != "norm_f.weight"}, "norm_f.weight"),
        ({}, {f"module.{k}": v for k, v in weights.items()}, "does not fit"),
        ({"n_layer": 1}, weights, "blocks.1"),
    ]:
        with pytest.raises(ValueError, match=words):
            build_model({"config": config | changes, "model": others})


def test_activation_checkpointing_changes_no_gradient():
    ids = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(0))
    grads = []
    for on in (False, True):
        model = GPT(model_config(input_mode="learned"), activation_checkpointing=on)
        model(ids[:, :-1], ids[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_norms_keep_the_dtype_of_their_input_and_the_precision_of_their_gain():
    norm, x = make_model().norm_f, torch.randn(4, 36).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(1.001)  # 1.0 in bfloat16
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * 1.001
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x), exact.bfloat16())
