"""eval.py: losses scored by hand, the bigram model against a slow loop, tables, figures, samples."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RT, TINY, run

from data.bigram import bigram_losses
from data.compare import T95, compare
from data.runs import load_checkpoint, read_metrics, write_checkpoint
from data.shards import Shards
from data.tokenizers import load_encoding, read_spec, token_bytes
from eval import EvalConfig, by_frequency, main, measure, measures, sample
from model import build_model
from train import main as train


def evaluate_run(run_dir: str, cfg: EvalConfig | None = None) -> dict:
    return measure(run_dir, load_checkpoint(run_dir), cfg or EvalConfig(), RT)


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory) -> Path:
    """A folder of four short runs: two arms, two seeds each."""
    out = tmp_path_factory.mktemp("runs")
    where = [f"--data_dir={dataset}"]
    for arm in ("learned", "canonical"):
        for seed in (1, 2):
            train([TINY, *where, f"--out_dir={out}/{arm}_{seed}", f"--seed={seed}", f"--input_mode={arm}"])
    return out


def test_a_run_is_measured_as_training_measured_it(runs):
    result = evaluate_run(str(runs / "canonical_1"))
    last = read_metrics(runs / "canonical_1")[-1]
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["val_bpb"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-5)
    assert result["train_tokens"] == 20 * 256 and result["n_params"] == 60_084
    assert result["n_input_params"] == 0
    rows = result["by_frequency"]  # they cover every scored token and average to the loss
    assert sum(row["n"] for row in rows) == result["val_tokens"]
    mean = sum(row["n"] * row["loss"] for row in rows) / result["val_tokens"]
    assert mean == pytest.approx(result["loss"], rel=1e-5)


def test_what_follows_new_tokens_is_measured_alone(runs, dataset, tmp_path):
    """A slow loop over the windows; end-of-text, the last id, is never new."""
    run_dir = str(runs / "learned_1")
    model = build_model(load_checkpoint(run_dir), RT.device)
    losses = []
    for x, y in Shards(dataset, "val", 512, 32).every_token_once(1):
        logp = model(torch.from_numpy(x)).detach().log_softmax(-1)
        losses += [-logp[0, i, y[0, i]].item() for i in range(32) if y[0, i] >= 0 and 480 <= x[0, i] < 511]
    result = evaluate_run(run_dir, EvalConfig(after_id=480))
    assert 0 < result["val_tokens"] == len(losses)
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    main([run_dir, "--after_id=480", f"--out_dir={tmp_path}"])
    assert not (runs / "learned_1" / "eval.json").exists()  # it says nothing of a part
    with pytest.raises(ValueError, match="no validation token follows an id from 511 to 510"):
        evaluate_run(run_dir, EvalConfig(after_id=511))


def test_two_ranks_and_another_batch_size_give_the_same_numbers(runs):
    run_dir = str(runs / "canonical_2")
    alone = evaluate_run(run_dir, EvalConfig(batch_size=4))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = run(*torchrun, "eval.py", run_dir, "--batch_size=4")
    assert result.returncode == 0, result.stderr
    both = json.loads((runs / "canonical_2" / "eval.json").read_text())
    assert both["val_tokens"] == alone["val_tokens"]
    other = evaluate_run(run_dir, EvalConfig(batch_size=1))
    assert both["loss"] == pytest.approx(alone["loss"], abs=1e-6) == other["loss"]
    assert [r["n"] for r in other["by_frequency"]] == [r["n"] for r in alone["by_frequency"]]


def test_measures_by_hand():
    # 3 tokens of 1, 2 and 3 bits over 4 bytes
    got = measures(np.log(2) * np.array([1.0, 2.0, 3.0]), 4)
    assert got["bits_per_byte"] == pytest.approx(6 / 4)
    assert got["loss"] == pytest.approx(2 * math.log(2)) and got["perplexity"] == pytest.approx(4)


def test_bytes_are_those_of_the_scored_text_also_across_split_characters(dataset):
    # An emoji is four bytes that a small vocabulary has as four tokens: each counts one byte.
    spec = read_spec(dataset)
    ids = load_encoding(spec).encode_ordinary("a\U0001f600b")
    assert token_bytes(spec)[np.array(ids)].tolist() == [1] * 6
    data = Shards(dataset, "val", 512, 32)
    meta = json.loads((dataset / "meta.json").read_text())
    size = sum(f["bytes"] for f in meta["files"] if f["name"].startswith("val"))
    scored = sum(int(token_bytes(spec)[y[y >= 0]].sum()) for _, y in data.every_token_once(4))
    assert scored == size


def test_the_bigram_model_equals_a_slow_loop():
    draw = np.random.default_rng(0)
    V, train_ids = 12, draw.integers(0, 9, 200)  # ids 9 to 11 never occur
    x, y = draw.integers(0, 12, 60), draw.integers(0, 12, 60)
    pairs, firsts, single = (Counter(zip(train_ids, train_ids[1:])), Counter(train_ids[:-1]), Counter(train_ids))
    expected = []
    for a, b in zip(x, y):
        p_b = (single[b] + 1) / (200 + V)
        if firsts[a] == 0:
            expected.append(-math.log(p_b))
            continue
        kinds = len({second for first, second in pairs if first == a})
        expected.append(-math.log((max(pairs[a, b] - 0.75, 0) + 0.75 * kinds * p_b) / firsts[a]))
    np.testing.assert_allclose(bigram_losses(train_ids.astype("<u2"), x, y, V), expected)
    # and it is a distribution
    for a in (0, 5, 11):
        p = np.exp(-bigram_losses(train_ids, np.full(V, a), np.arange(V), V))
        assert p.sum() == pytest.approx(1)


def test_losses_by_frequency_by_hand():
    seen, losses = np.array([0, 3, 9, 10, 250, 7]), np.array([5.0, 4.0, 3.0, 2.0, 1.0, 2.0])
    expected = [(0, 0, 1, 5.0), (1, 9, 3, 3.0), (10, 99, 1, 2.0), (100, 999, 1, 1.0)]
    assert [tuple(row.values()) for row in by_frequency(seen, losses, least=1)] == expected
    rows = by_frequency(np.array([0, 1000, 999]), np.ones(3), least=1)
    assert [(r["from"], r["to"], r["n"]) for r in rows] == [(0, 0, 1), (1, 999, 1), (1000, 9999, 1)]
    joined = [(0, 9, 4, 3.5), (10, 999, 2, 1.5)]  # 0 alone joins 1-9; 100-999 alone joins 10-99
    assert [tuple(row.values()) for row in by_frequency(seen, losses, least=2)] == joined
    assert [tuple(row.values()) for row in by_frequency(seen, losses)] == [(0, 999, 6, 17 / 6)]


def test_several_runs_give_one_table_and_one_figure(runs, tmp_path, capsys):
    names = [f"{runs}/{arm}_{seed}" for arm in ("learned", "canonical") for seed in (1, 2)]
    main([*names, f"{runs}/../{runs.name}/canonical_1", f"--out_dir={tmp_path}"])  # a run counts once
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) == 5  # head, rule, two arms, the bigram model
    stored = [json.loads((Path(name) / "eval.json").read_text()) for name in names]
    losses = [r["loss"] for r in stored[2:]]
    mean, sd = sum(losses) / 2, abs(losses[0] - losses[1]) / math.sqrt(2)
    row = next(line for line in lines if line.startswith("| canonical"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:6] == ["canonical", "2", "60,084", "0", "5,120", f"{mean:.3f} ± {sd:.3f}"]
    paired = [b["loss"] - a["loss"] for a, b in zip(stored, stored[2:])]
    half = 12.706 * abs(paired[0] - paired[1]) / 2  # t of 2 values; their deviation / sqrt(2)
    told = "" if half < abs(sum(paired) / 2) else "not told apart: "
    assert cells[8] == f"{told}{sum(paired) / 2:+.3f} ± {half:.3f}"
    assert "| bigram model" in lines[-1] and stored[0]["bigram"] == stored[3]["bigram"]
    assert (tmp_path / "compare.png").stat().st_size > 20_000


def test_the_gap_is_paired_by_seed_with_a_95_percent_interval(capsys):
    def runs_of(mode, losses, **settings):
        one = {"input": mode, "dataset": "d", "data": {}, "step": 1}
        one |= dict.fromkeys(("n_params", "n_input_params", "train_tokens"), 1)
        one |= {"perplexity": 1.0, "bits_per_byte": 1.0, "bigram": {"loss": 1.0, "perplexity": 1.0, "bits": 1.0}}
        return [one | {"seed": s, "loss": loss, "settings": {"seed": s, **settings}} for s, loss in losses.items()]

    results = runs_of("learned", {1: 2.0, 2: 3.0, 3: 4.0, 4: 9.0}, n_layer=6)
    results += runs_of("gf2", {3: 4.3, 2: 3.2, 1: 2.1, 7: 0.0}, n_layer=6)  # gaps of 0.1, 0.2 and 0.3
    results += runs_of("random", {1: 1.9, 2: 3.3, 3: 4.1}, n_layer=6)  # -0.1, 0.3, 0.1
    results += runs_of("gf2", {1: 2.5}, n_layer=7) * 2  # a copy counts once
    groups = {group.name: group for group in compare(results, "learned")}
    assert list(groups) == ["learned n_layer=6", "gf2 n_layer=6", "random n_layer=6", "gf2 n_layer=7"]
    mean, half, n = groups["gf2 n_layer=6"].gap()
    assert (mean, half, n) == (pytest.approx(0.2), pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3), 3)
    assert [group.describe_gap() for group in groups.values()] == [
        "reference", "not told apart: +0.200 ± 0.248", "not told apart: +0.100 ± 0.497", "+0.500 (1 pair)"
    ]  # fmt: skip
    assert groups["gf2 n_layer=7"].reference is groups["learned n_layer=6"]  # there is none with 7
    results += runs_of("learned", {1: 2.4}, n_layer=7)
    assert compare(results, "learned")[3].describe_gap() == "+0.100 (1 pair)"  # now there is
    assert compare(results[4:], "")[1].reference.input == "gf2"  # the first
    started = [run for seed in (1, 2) for run in runs_of("learned", {seed: 2.0}, init_from=f"out/learned_a_seed{seed}")]
    groups = compare(started + runs_of("learned", {1: 2.1, 2: 2.1}, init_from=""), "learned")
    assert [(group.name, len(group.runs)) for group in groups] == [("learned init_from=out/a", 2), ("learned", 2)]
    started += runs_of("gf2", {1: 2.5, 2: 2.5}, init_from="out/gf2_a_seed1")[:1]
    started += runs_of("gf2", {2: 2.5}, init_from="out/gf2_a_seed2")
    groups = compare(runs_of("learned", {1: 2.1, 2: 2.1}, init_from="") + started, "learned")
    assert groups[2].reference is groups[1]  # both from a run of their own input
    with pytest.raises(ValueError, match="against must be one of gf2 n_layer=6, random.* got 'canonical'"):
        compare(results[4:], "canonical")


@pytest.mark.parametrize("n", range(2, 11))
def test_students_t_by_integrating_its_density(n):
    t, v = np.linspace(-T95[n - 2], T95[n - 2], 200_001), n - 1
    density = math.gamma(n / 2) / math.sqrt(v * math.pi) / math.gamma(v / 2) * (1 + t * t / v) ** (-n / 2)
    assert np.trapezoid(density, t) == pytest.approx(0.95, abs=1e-4)


def test_stored_results_print_the_same_table_without_the_runs(runs, tmp_path, capsys):
    names = [f"{runs}/{arm}_{seed}" for arm in ("learned", "canonical") for seed in (1, 2)]
    main([*names, f"--out_dir={tmp_path}", f"--results={tmp_path}/arms.jsonl"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    main([f"{tmp_path}/arms.jsonl", f"--out_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("|")] == table and "warning" not in out
    for figure in ("arms_compare.png", "arms_gap.png"):
        assert (tmp_path / figure).stat().st_size > 10_000
    (tmp_path / "arms.jsonl").write_text("{")
    with pytest.raises(ValueError, match="arms.jsonl is damaged"):
        main([f"{tmp_path}/arms.jsonl"])
    with pytest.raises(ValueError, match="none.jsonl"):
        main([f"{tmp_path}/none.jsonl"])


def test_a_dataset_that_has_moved_or_changed_is_named(runs, dataset, tmp_path):
    for part, key, message in [
        ("data", "tokenizer_sha256", "was trained on other data than .* holds: use --data_dir"),
        ("config", "data_dir", "another, the dataset of .* is not there: say where by --data_dir"),
    ]:
        saved = load_checkpoint(runs / "learned_1", training=True)
        saved[part][key] = "another"
        write_checkpoint(tmp_path, saved, keep=1)
        with pytest.raises(ValueError, match=message):
            evaluate_run(str(tmp_path))
    moved = evaluate_run(str(tmp_path), EvalConfig(data_dir=str(dataset)))
    assert moved["loss"] == evaluate_run(str(runs / "learned_1"))["loss"]


# --- sampling ------------------------------------------------------------------


@pytest.fixture
def draw(runs):
    """draw(prompt, n, ...) -> a text by a trained run."""
    model = build_model(load_checkpoint(runs / "canonical_1"))
    encoding = load_encoding(read_spec(runs / "canonical_1"))
    return lambda prompt, n, **changes: sample(model, encoding, prompt, EvalConfig(max_new_tokens=n, **changes))


def test_samples_are_repeatable_and_seeds_differ(draw):
    texts = [draw("Document 1:", 60, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("Document 1:")
    greedy = {draw("Document", 60, temperature=0, seed=seed) for seed in (1, 2)}
    assert len(greedy) == 1
    assert draw("Document", 0) == "Document" and draw("", 0) == ""


def test_any_prompt_can_be_continued(runs, draw):
    for prompt in ("", "日本語 \U0001f600 never seen", "word " * 300, "<|endoftext|>"):
        assert draw(prompt, 20, top_k=100_000).startswith(prompt)
    args = [str(runs / "canonical_1"), "--prompt=caf\u00e9 \U0001f600", "--max_new_tokens=5"]
    result = run("-W", "error", "eval.py", *args, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and result.stderr == ""
    assert "caf" in result.stdout and "\\ufffd" not in result.stdout


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "name at least one run"),
        (["no/such/run"], "no/such/run holds no checkpoint.*train a run first"),
        (["RUN", "--prompt=x", "--temperature=-1"], "temperature must be at least 0, got -1"),
        (["RUN", "--prompt=x", "--max_new_tokens=-1"], "max_new_tokens must be at least 0"),
        (["RUN", "--batch_size=0"], "batch_size must be at least 1"),
        (["RUN", "--device=tpu"], "device must be one of auto, cpu, cuda, mps"),
        (["RUN", "--limit=-1"], "limit must be at least 0"),
    ],
)
def test_mistakes_are_named(runs, args, words):
    with pytest.raises(ValueError, match=words):
        main([str(runs / "learned_1") if arg == "RUN" else arg for arg in args])


def test_a_figure_that_fails_hides_no_table(runs, tmp_path, capsys):
    (tmp_path / "compare.png").mkdir()
    main([f"{runs}/learned_1", f"{runs}/canonical_1", f"--out_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert "| learned" in out and "compare.png could not be drawn" in out


def test_one_checkpoint_of_a_run_can_be_named_and_needs_no_optimizer(runs, tmp_path, capsys):
    shutil.copytree(runs / "canonical_1", tmp_path / "run")
    (tmp_path / "run/ckpt_000020/optimizer.pt").unlink()
    for name in ("run", "run/ckpt_000020"):
        main([str(tmp_path / name)])
        assert "| canonical" in capsys.readouterr().out
        main([str(tmp_path / name), "--prompt=Document", "--max_new_tokens=3"])
        assert "Document" in capsys.readouterr().out
