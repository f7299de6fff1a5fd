"""The inputs that are ours: trained, saved and loaded like the paper's, with the same weights behind them."""

import pytest
import torch
from conftest import make_model, model_config

from data.runs import load_checkpoint
from data.tokenizers import read_spec, spelled
from eval import main as evaluate
from model import GPT, build_model
from train import main as train

TOKENS = [b"%d" % t for t in range(512)]


@pytest.mark.parametrize("mode", ["random", "spelling"])
def test_a_frozen_table_has_no_parameters_and_the_same_model_behind_it(mode):
    model, canonical = GPT(model_config(input_mode=mode), tokens=TOKENS), make_model()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in canonical.named_parameters()]
    for p, expected in zip(model.parameters(), canonical.parameters()):
        assert torch.equal(p, expected)
    ids = torch.arange(512).view(16, 32)
    assert model(ids, ids).isfinite() and model.flops_per_token() == canonical.flops_per_token()
    assert len(model.wte(torch.arange(512)).unique(dim=0)) == 512


def test_a_table_starts_at_its_own_scale():
    for scale in (0.02, 0.5):
        model = make_model(input_mode="learned", table_scale=scale)
        assert model.wte.weight.std().item() == pytest.approx(scale, rel=0.02)
        assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_a_run_that_reads_spelling_is_saved_evaluated_and_becomes_a_trained_table(tiny_argv, tmp_path, dataset, capsys):
    args = ("--input_mode=spelling", "--code_scale=0.1", "--code_own")
    for max_iters in (10, 20):  # the second continues the first
        assert train(tiny_argv("run", *args, f"--max_iters={max_iters}")) == 0
    saved = load_checkpoint(tmp_path / "run")
    tokens = spelled(read_spec(dataset))
    assert len(tokens) == 512 and tokens[65:67] == [b"A", b"B"] and tokens[-1] == b"<|endoftext|>"
    made = GPT(model_config(input_mode="spelling", code_scale=0.1, code_own=True), tokens=tokens).wte.weight
    assert torch.equal(build_model(saved).wte.weight, made)  # as at the start, whatever was trained
    evaluate([str(tmp_path / "run")])
    assert "| spelling scale=0.1 own=True |" in capsys.readouterr().out

    start = tiny_argv("table", f"--init_from={tmp_path / 'run'}", "--input_mode=learned", "--learning_rate=0")
    assert train(start) == 0
    table = build_model(load_checkpoint(tmp_path / "table"))
    assert torch.equal(table.wte.weight, made) and table.wte.weight.requires_grad
