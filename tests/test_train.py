"""train.py: the same training whatever the ranks, the micro-batches and the interruptions."""

import copy
import itertools
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ARMS, ROOT, RT, TINY, assert_clean_error, make_dataset, make_model, run
from torch._dynamo.utils import counters

import train as train_module
from config import explain
from config.machine import Precision, Runtime, folder_lock
from data.runs import checkpoints, load_checkpoint, read_metrics, write_checkpoint
from data.shards import Shards, window_numbers
from model import build_model
from train import TrainConfig, accumulation, get_batches, lr_at, main, train, train_step

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
X, Y = torch.randint(512, (2, 4, 32), generator=torch.Generator().manual_seed(0))
TIMES = {"dt_ms", "tok_per_s", "memory_gb"}


def rows_of(folder: Path, *but: str) -> list[dict]:
    """The metrics of a run without the clock's."""
    return [{key: value for key, value in row.items() if key not in TIMES | set(but)} for row in read_metrics(folder)]


def assert_same_run(a: Path, b: Path, but: tuple = ()) -> None:
    """To the last bit: metrics, weights, optimizer state."""
    assert rows_of(a, *but) == rows_of(b, *but)
    one, two = load_checkpoint(a, training=True), load_checkpoint(b, training=True)
    assert one["step"] == two["step"]
    for key in one["model"]:
        assert torch.equal(one["model"][key], two["model"][key]), key
    for key, state in one["optimizer"].items():
        assert all(torch.equal(state[k], two["optimizer"][key][k]) for k in state), key


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def changed_dataset(dataset: Path, folder: Path, **changes) -> Path:
    """A copy of a dataset that says other things of itself."""
    shutil.copytree(dataset, folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return folder


@pytest.fixture
def stop_after(monkeypatch):
    """stop_after(7): this process gets a SIGTERM while step 7 is at work."""

    def set_stop(n: int) -> None:
        def lr_and_signal(step: int, cfg: TrainConfig) -> float:
            if step == n - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return lr_at(step, cfg)

        monkeypatch.setattr(train_module, "lr_at", lr_and_signal)

    return set_stop


# --- schedule, batches, steps ---------------------------------------------------


def test_accumulation_follows_from_the_rest(tiny_argv, tmp_path):
    cfg = TrainConfig(tokens_per_iter=2**21, batch_size=16, block_size=2048)
    assert [accumulation(cfg, ranks) for ranks in (1, 8, 64)] == [64, 8, 1]
    with pytest.raises(ValueError, match="16 x 2048 x 3 = 98304, got 2097152: use 2064384, 2162688 "):
        accumulation(cfg, 3)
    with pytest.raises(ValueError, match="got 2097152: use 4194304 or another batch_size$"):
        accumulation(cfg, 128)
    with pytest.raises(ValueError, match="4 x 32 x 1 = 128, got 200: use 128, 256 or"):
        main(tiny_argv("run", "--tokens_per_iter=200"))
    assert not (tmp_path / "run").exists()


def test_the_rate_by_hand_and_within_bounds_for_every_legal_pair():
    cfg = TrainConfig(learning_rate=1.0, max_iters=10, warmup_iters=4, decay_iters=3)
    rates = [lr_at(step, cfg) for step in range(10)]
    assert rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])
    for warmup, decay in itertools.product(range(16), range(16)):
        cfg = TrainConfig(learning_rate=3e-3, max_iters=10, warmup_iters=warmup, decay_iters=decay)
        rates = [lr_at(step, cfg) for step in range(10)]
        assert all(0 < r <= 3e-3 and math.isfinite(r) for r in rates), (warmup, decay, rates)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("world_size, batch_size", [(1, 8), (1, 2), (2, 2), (2, 4), (4, 1)])
def test_every_arm_and_every_split_of_a_step_reads_the_same_windows(tiny, world_size, batch_size, arm):
    cfg = tiny(batch_size=batch_size, input_mode=arm)
    data = Shards(cfg.data_dir, "train", cfg.vocab_size, cfg.block_size)
    ranks = [Runtime(RT.precision, rank, world_size) for rank in range(world_size)]
    streams = [get_batches(data, cfg, 3, rt) for rt in ranks]
    got = [next(stream)[1] for _ in range(accumulation(cfg, world_size)) for stream in streams]
    numbers = window_numbers(3 * 8, 8, data.n_windows, cfg.seed)  # other seeds read others
    assert torch.cat(got).tolist() == data.windows(numbers)[:, 1:].tolist()


def test_the_next_batch_is_read_while_this_one_is_at_work(tiny, monkeypatch):
    cfg = tiny(batch_size=2)
    data, reads = Shards(cfg.data_dir, "train", cfg.vocab_size, cfg.block_size), queue.Queue()
    real = data.windows
    monkeypatch.setattr(data, "windows", lambda numbers: (reads.put(1), real(numbers))[1])
    stream = get_batches(data, cfg, 5, RT)
    next(stream)
    for _ in range(2):  # after one batch
        reads.get(timeout=2)


def test_two_half_batches_equal_one_whole():
    whole, halves, results = make_model(), make_model(), []
    for model, parts in ((whole, [(X, Y)]), (halves, [(X[:2], Y[:2]), (X[2:], Y[2:])])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append(train_step(model, optimizer, NO_SCALER, iter(parts), len(parts), 1.0, RT))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    for p, q in zip(whole.parameters(), halves.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_step_clips_the_gradient_and_zero_means_no_clipping():
    for clip in (1e-3, 0):
        model = make_model()
        model.lm_head.weight.data.mul_(20)  # so that the norm is above 1
        before = copy.deepcopy(model)
        loss = before(X, Y)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in before.parameters()]).norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        got = train_step(model, optimizer, NO_SCALER, iter([(X, Y)]), 1, clip, RT)
        assert got == pytest.approx((loss.item(), norm.item()), rel=1e-5)
        moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before.parameters())])
        assert moved.norm().item() == pytest.approx(clip or norm.item(), rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(what):
    model = make_model()
    if what == "loss":
        model.lm_head.weight.data[0, 0] = math.inf
    else:
        model.norm_f.weight.register_hook(lambda grad: grad * math.inf)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loss, _ = train_step(model, optimizer, NO_SCALER, iter([(X, Y)]), 1, 1.0, RT)
    assert math.isnan(loss)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


# --- whole runs, in this process ----------------------------------------------


def test_a_run_leaves_what_it_should(tiny_argv, tmp_path, capsys):
    assert main(tiny_argv()) == 0
    out, folder = capsys.readouterr().out, tmp_path / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        "ckpt_000020", "config.json", "loss.png", "metrics.jsonl", "tiktoken.json",
    ]  # fmt: skip
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["tokens"] for row in rows] == list(range(256, 20 * 256 + 1, 256))
    assert [row["step"] for row in rows if "val_loss" in row] == [10, 20]
    assert rows[-1]["loss"] < rows[0]["loss"] and load_checkpoint(folder)["step"] == 20
    assert "tokens/iter = 4 micro x 32 block x 2 accumulation x 1 ranks = 256" in out
    assert "* n_layer = 2" in out and f"next: python eval.py {folder}" in out
    assert json.loads((folder / "config.json").read_text())["n_embd"] == 36
    saved = load_checkpoint(folder)
    assert not [key for key in saved["model"] if "_orig_mod" in key or key.startswith("module.")]
    # the same command again: nothing to do, nothing changed
    before = content(folder)
    assert main(tiny_argv()) == 0 and "is finished: 20 steps" in capsys.readouterr().out
    assert before == content(folder)


def test_the_printed_validation_loss_is_that_of_the_saved_weights(finished, tiny):
    model, cfg = build_model(load_checkpoint(finished)), tiny()
    # A slow loop over the whole split, a row at a time, without padding.
    ids = np.fromfile(Path(cfg.data_dir) / "val_00000.bin", dtype="<u2").astype(np.int64)
    stream, nats = np.concatenate([[511], ids]), 0.0
    for start in range(0, len(ids), 32):
        x, y = stream[start : start + 32], ids[start : start + 32]
        logp = model(torch.tensor(x[None, : len(y)])).log_softmax(-1)[0]
        nats -= logp[range(len(y)), y].double().sum().item()
    last = rows_of(finished)[-1]
    assert last["val_loss"] == pytest.approx(nats / len(ids), rel=1e-5)
    meta = json.loads((Path(cfg.data_dir) / "meta.json").read_text())
    n_bytes = sum(e["bytes"] for e in meta["files"] if e["name"].startswith("val"))
    assert last["val_bpb"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)


OTHER_INTERVALS = (["--eval_interval=4", "--log_interval=3", "--save_interval=2"], ["--eval_interval=7"])


@pytest.mark.parametrize("stops, args", [([10], ([], [])), ([7, 13], ([], [], [])), ([9], OTHER_INTERVALS)])
def test_interrupted_runs_equal_an_unbroken_one(finished, tiny_argv, tmp_path, stop_after, capsys, stops, args):
    parts = tmp_path / "parts"
    for n, changes in zip(stops, args):
        stop_after(n)
        assert main(tiny_argv("parts", *changes)) == 128 + signal.SIGTERM
        assert f"stopped after step {n}, saved" in capsys.readouterr().out
        assert load_checkpoint(parts)["step"] == n
    stop_after(0)
    assert main(tiny_argv("parts", *args[-1])) == 0
    assert_same_run(finished, parts, but=("val_loss", "val_bpb") if args == OTHER_INTERVALS else ())
    assert rows_of(finished)[-1] == rows_of(parts)[-1]


def test_resuming_across_the_end_of_an_epoch(tiny, tiny_argv, tmp_path, stop_after):
    cfg = tiny()
    data = Shards(cfg.data_dir, "train", cfg.vocab_size, cfg.block_size)
    n = data.n_windows * 2 // 7 // 16 * 16  # windows of a step
    assert 3 * n < data.n_windows < 4 * n, "an epoch ends inside step 4"
    size = [f"--tokens_per_iter={n * 32}", "--batch_size=16", "--max_iters=6", "--eval_interval=0"]
    main(tiny_argv("whole", *size))
    for n in (3, 4, 5):
        stop_after(n)
        main(tiny_argv("parts", *size))
    stop_after(0)
    main(tiny_argv("parts", *size))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_validation_that_is_cut_short_is_made_again(finished, tiny_argv, tmp_path, monkeypatch):
    real = train_module.validate
    with monkeypatch.context() as patch:
        stop_first = lambda *args, **named: (os.kill(os.getpid(), signal.SIGTERM), real(*args, **named))[1]
        patch.setattr(train_module, "validate", stop_first)
        assert main(tiny_argv("parts", "--save_interval=0")) == 128 + signal.SIGTERM
    assert rows_of(tmp_path / "parts")[-1]["step"] == 9  # row 10 is complete when its loss is known
    assert load_checkpoint(tmp_path / "parts")["step"] == 10  # saved before the evaluation
    main(tiny_argv("parts"))
    assert_same_run(finished, tmp_path / "parts")


def test_a_run_can_be_prolonged_and_says_what_that_does_to_the_rate(finished, tiny_argv, tmp_path, capsys):
    flat = ["--decay_iters=0"]
    main(tiny_argv("whole", *flat))
    main(tiny_argv("parts", *flat, "--max_iters=10"))
    main(tiny_argv("parts", *flat))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    shutil.copytree(finished, tmp_path / "decayed")
    main(tiny_argv("decayed", "--max_iters=30"))  # step 20 ended at 1/5 of the peak of 3e-3
    assert "continuing after step 20, learning rate 6.00e-04 -> 3.00e-03" in capsys.readouterr().out


def test_a_run_from_before_a_setting_existed_continues_with_its_default(finished, tiny_argv, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    saved = load_checkpoint(finished, training=True)
    del saved["recipe"]["code_shift"], saved["config"]["code_shift"]
    write_checkpoint(tmp_path / "run", saved, keep=1)
    with pytest.raises(ValueError, match="code_shift=False there, True here"):
        main(tiny_argv("run", "--code_shift"))
    assert main(tiny_argv("run", "--max_iters=21")) == 0
    assert build_model(load_checkpoint(tmp_path / "run")).cfg.code_shift is False


def test_a_run_can_start_from_another_with_more_tokens(tiny_argv, tmp_path):
    main(tiny_argv("first", "--vocab_size=512", "--code_bits=12"))
    old = load_checkpoint(tmp_path / "first")["model"]
    folder = make_dataset(tmp_path / "grown", vocab_size=520)  # eight merges more
    args = ["--vocab_size=520", f"--data_dir={folder}", "--code_bits=12", "--max_iters=1"]
    main(tiny_argv("second", *args, f"--init_from={tmp_path / 'first'}", "--learning_rate=0"))
    new = load_checkpoint(tmp_path / "second")["model"]
    drawn = make_model(vocab_size=520, code_bits=12).state_dict()["lm_head.weight"]
    head, was = new.pop("lm_head.weight"), old["lm_head.weight"]  # the last row is end-of-text's, then and now
    assert torch.equal(head, torch.cat([was[:511], drawn[511:519], was[511:]]))
    assert all(torch.equal(new[name], old[name]) for name in new)
    with pytest.raises(ValueError, match="does not fit the model's settings"):
        main(tiny_argv("third", *args, f"--init_from={tmp_path / 'first'}", "--n_layer=3"))


def test_a_run_begun_without_a_loss_scaler_continues_with_one(tiny, tmp_path):
    with_scaler = Runtime(Precision("cpu", "float32", scaler=True, compile=False, flash=True))
    assert train(tiny(max_iters=10), RT) == 0
    assert train(tiny(max_iters=12), with_scaler) == 0
    assert load_checkpoint(tmp_path / "run", training=True)["scaler"]["scale"] > 1


def test_training_works_in_a_thread_as_in_a_notebook(tiny_argv, tmp_path):
    thread = threading.Thread(target=main, args=[tiny_argv("run", "--max_iters=2")])
    thread.start()
    thread.join()
    assert load_checkpoint(tmp_path / "run")["step"] == 2


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile")
def test_compiling_makes_one_graph_once_and_changes_no_loss_and_no_key(tiny_argv, tmp_path):
    short = ["--n_layer=1", "--max_iters=4", "--eval_interval=2"]
    assert main(tiny_argv("eager", *short)) == 0
    torch.compiler.reset()
    counters.clear()
    assert main(tiny_argv("compiled", *short, "--compile=True", "--activation_checkpointing")) == 0
    graphs = counters["stats"]["unique_graphs"]  # compiled again, it would be counted again
    assert graphs == 1 and not counters["graph_break"], (graphs, counters["graph_break"])
    eager, compiled = rows_of(tmp_path / "eager"), rows_of(tmp_path / "compiled")
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in compiled] == pytest.approx([r[key] for r in eager], rel=1e-4)
    assert compiled[-1]["val_loss"] == pytest.approx(eager[-1]["val_loss"], rel=1e-4)
    assert not [key for key in load_checkpoint(tmp_path / "compiled")["model"] if "_orig_mod" in key]


def test_a_second_run_in_the_folder_of_another_is_refused(finished, tiny_argv, tmp_path, dataset):
    before, meta = content(finished), json.loads((dataset / "meta.json").read_text())
    files = [file | {"sha256": "0" * 64} for file in meta["files"]]  # as many tokens, with other contents
    changed = changed_dataset(dataset, tmp_path / "changed", files=files)
    for arg, words in [
        ("--learning_rate=1e-2", "learning_rate=0.003 there, 0.01 here"),
        ("--input_mode=gf2", "input_mode=canonical there, gf2 here"),
        ("--code_shift=1", "code_shift=False there, True here"),
        ("--n_layer=3", "n_layer=2 there, 3 here"),
        ("--seed=2", "seed=1 there, 2 here"),
        (f"--data_dir={changed}", "holds another run .other data than .*changed has now"),
    ]:
        with pytest.raises(ValueError, match=words):
            main(tiny_argv(finished, arg))
    assert before == content(finished)


def test_a_damaged_checkpoint_is_named_and_no_code_in_it_runs(finished, tiny_argv, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "ckpt_000020" / "model.pt"
    whole = path.read_bytes()

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.pt is damaged .* delete .*ckpt_000020 to go on"):
        main(tiny_argv())
    for content, words in [(Evil(), "damaged or no checkpoint"), ({"model": {}}, "no checkpoint of this"),
                           ([1, 2], "no checkpoint of this")]:  # fmt: skip
        torch.save(content, path)
        with pytest.raises(ValueError, match=words):
            main(tiny_argv())
    assert not (tmp_path / "ran").exists()
    path.write_bytes(whole)
    saved = load_checkpoint(tmp_path / "run", training=True)
    del saved["model"]["norm_f.weight"]
    write_checkpoint(tmp_path / "run", saved, keep=1)
    with pytest.raises(ValueError, match="norm_f.weight"):
        main(tiny_argv("run", "--max_iters=30"))


def test_a_full_disk_is_one_sentence_and_the_same_command_continues(finished, tiny_argv, tmp_path, monkeypatch):
    out, real_save = tmp_path / "run", torch.save

    def full_save(saved, f):
        if saved.get("step") == 15:
            f.write(b"some bytes")
            raise RuntimeError("PytorchStreamWriter failed writing file: no space left")
        real_save(saved, f)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_save)
        words = "cannot write .*ckpt_000015, is the disk full.*no space left.* same command continues"
        with pytest.raises(OSError, match=words):
            main(tiny_argv("run", "--save_interval=5"))
    assert load_checkpoint(out)["step"] == 10 and not list(out.glob("*.tmp"))
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 1')  # a row that did not fit
    main(tiny_argv("run"))
    assert_same_run(finished, out)


def test_the_newest_checkpoints_stay_and_a_kill_leaves_no_half_of_one(tiny_argv, tmp_path):
    args = ["--save_interval=4", "--eval_interval=0", "--keep_checkpoints=3"]
    main(tiny_argv("run", *args))
    names = [path.name for path in checkpoints(tmp_path / "run")]
    assert names == ["ckpt_000012", "ckpt_000016", "ckpt_000020"]
    shutil.copytree(tmp_path / "run", tmp_path / "back")
    newest = tmp_path / "back" / "ckpt_000020"
    (newest / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="optimizer.pt is missing: put it back, or delete .*000020 "):
        main(tiny_argv("back", *args, "--max_iters=21"))
    assert load_checkpoint(tmp_path / "back")["step"] == 20  # enough to evaluate and to sample
    shutil.rmtree(newest)
    (tmp_path / "back" / "ckpt_000008.tmp").mkdir()  # a kill while it was removed
    main(tiny_argv("back", *args))
    assert_same_run(tmp_path / "run", tmp_path / "back")
    assert not list((tmp_path / "back").glob("*.tmp"))
    assert load_checkpoint(tmp_path / "run" / "ckpt_000012")["step"] == 12


@pytest.mark.parametrize("rate", ["1e9", "1e38"])
def test_a_rate_too_high_stops_early_and_the_checkpoint_is_finite(tiny_argv, tmp_path, rate):
    high = ["--warmup_iters=0", "--save_interval=1", "--grad_clip=0", "--max_iters=200"]
    with pytest.raises(ValueError, match="after step .* not finite .*lower learning_rate"):
        main(tiny_argv("run", f"--learning_rate={rate}", *high))
    if checkpoints(tmp_path / "run"):
        saved = load_checkpoint(tmp_path / "run", training=True)
        for tensors in (saved["model"], *saved["optimizer"].values()):
            assert all(t.isfinite().all() for t in tensors.values())


def test_the_default_corpus_is_prepared_when_it_is_missing(pydocs, tmp_path, monkeypatch):
    monkeypatch.setattr("data.pydocs.read_documents", lambda: pydocs)  # read once for all tests
    monkeypatch.chdir(tmp_path)
    argv = [TINY, "--vocab_size=300", "--max_iters=2", "--n_embd=36", "--eval_tokens=500"]
    assert main(argv) == 0
    assert (tmp_path / "data/pydocs/meta.json").exists()
    assert checkpoints(tmp_path / "out/canonical_tiny")


# --- whole runs, as a user starts them ----------------------------------------


def test_the_toy_runs_without_a_warning_display_or_second_core(tiny_argv, tmp_path):
    env = {"DISPLAY": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/nowhere"}
    env["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # a notebook's
    result = run("-W", "error", "train.py", *tiny_argv(), **env)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "step 20/20: loss" in result.stdout and ", validation" in result.stdout
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000


def test_a_folder_is_one_runs_at_a_time(tiny_argv, tmp_path):
    with folder_lock(tmp_path / "run"), pytest.raises(ValueError, match="run is in use"):
        main(tiny_argv())
    assert main(tiny_argv("run", "--max_iters=1")) == 0
    assert not (tmp_path / "run" / "lock").exists()


def test_too_large_a_model_and_a_file_in_the_way_are_explained(tiny_argv, tmp_path):
    (tmp_path / "file").write_text("mine")
    for args, words in [
        (["run", "--n_inner=1000000000000"], "not enough memory: lower batch_size or the model's sizes"),
        (["file"], f"cannot use {tmp_path / 'file'}: File exists; check the path"),
    ]:
        with pytest.raises((RuntimeError, OSError)) as caught:
            main(tiny_argv(*args))
        assert words in explain(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_reader_who_leaves_is_no_reason_to_stop(tiny_argv, tmp_path):
    command = f"{sys.executable} train.py {' '.join(tiny_argv())} | head -1"
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "settings (* = not the default)\n" and "Traceback" not in result.stderr
    assert load_checkpoint(tmp_path / "run")["step"] == 20


def test_a_device_that_is_not_there_is_a_clean_error(tiny_argv, tmp_path):
    assert_clean_error(run("train.py", *tiny_argv("run", "--device=cuda"), CUDA_VISIBLE_DEVICES=""),
                       "device=cuda is not available", "device=cpu")  # fmt: skip
    assert not (tmp_path / "run").exists()


def start(args: list[str], ranks: int = 1, *options: str) -> subprocess.Popen:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        launcher += options
    return subprocess.Popen(
        [*launcher, "train.py", *args], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip


def wait_for_row(folder: Path, n: int, process: subprocess.Popen) -> None:
    for _ in range(3000):
        if len(read_metrics(folder)) >= n or process.poll() is not None:
            return
        time.sleep(0.02)
    raise AssertionError(f"no row {n} in a minute")


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in text and "pytest" not in text:
            found.append(text)
    return found


LONG = ["--max_iters=2000", "--save_interval=5", "--decay_iters=0", "--eval_interval=0"]


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGHUP), (2, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_saves_and_leaves_no_process(tiny_argv, tmp_path, ranks, number):
    process = start(tiny_argv("run", *LONG), ranks, "--signals-to-handle=SIGTERM,SIGUSR1")
    wait_for_row(tmp_path / "run", 7, process)
    t0 = time.time()
    process.send_signal(number)
    out, err = process.communicate(timeout=25)
    assert time.time() - t0 < 25 and process.returncode != 0
    assert "stopped after step" in out, err[-2000:]
    saved, rows = load_checkpoint(tmp_path / "run"), rows_of(tmp_path / "run")
    assert saved["step"] == rows[-1]["step"] + 1  # its row is written when the run continues
    assert processes_with(str(tmp_path)) == []


def test_kill_9_at_any_moment_changes_nothing(tiny_argv, tmp_path):
    size = ["--max_iters=30", "--save_interval=1", "--eval_interval=5"]
    main(tiny_argv("whole", *size))
    for n in (2, 10, 21):
        process = start(tiny_argv("parts", *size))
        wait_for_row(tmp_path / "parts", n, process)
        process.kill()
        process.communicate()
        (tmp_path / "parts" / "lock").unlink()  # or the next process waits until it is sure
    main(tiny_argv("parts", *size))
    assert [r["step"] for r in rows_of(tmp_path / "parts")] == list(range(1, 31))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


FLAT = ["--decay_iters=0", "--batch_size=2"]
TWO_RANKS = [*FLAT, "--max_iters=60", "--save_interval=10", "--keep_checkpoints=6"]


@pytest.fixture(scope="module")
def two_ranks(dataset, tmp_path_factory) -> Path:
    """An undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("two") / "run"
    process = start([TINY, f"--data_dir={dataset}", f"--out_dir={folder}", *TWO_RANKS], ranks=2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    assert "tokens/iter = 2 micro x 32 block x 2 accumulation x 2 ranks = 256" in out
    return folder


@pytest.fixture(scope="module")
def one_rank(dataset, tmp_path_factory) -> Path:
    """20 steps of four micro-batches each."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert main([TINY, f"--data_dir={dataset}", f"--out_dir={folder}", *FLAT]) == 0
    return folder


def assert_same_losses(one: Path, other: Path) -> None:
    """20 steps with sums in another order; more may follow in the other run."""
    rows, expected = rows_of(other)[:20], rows_of(one)
    assert [r["step"] for r in rows] == [r["step"] for r in expected] == list(range(1, 21))
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in rows] == pytest.approx([r[key] for r in expected], abs=1e-5, rel=1e-4)
    for key in ("val_loss", "val_bpb"):
        assert rows[-1][key] == pytest.approx(expected[-1][key], abs=1e-5)
    assert not [key for key in load_checkpoint(other)["model"] if "module." in key or "_orig_mod" in key]


def test_two_ranks_and_no_accumulation_train_as_one_that_accumulates(one_rank, two_ranks, tiny_argv, tmp_path):
    assert main(tiny_argv("whole", "--decay_iters=0", "--batch_size=8")) == 0
    shutil.copytree(two_ranks, tmp_path / "continued")
    for path in checkpoints(tmp_path / "continued")[1:]:
        shutil.rmtree(path)
    assert main(tiny_argv("continued", *FLAT)) == 0  # one rank, after step 10 of two
    for folder in (tmp_path / "whole", two_ranks, tmp_path / "continued"):
        assert_same_losses(one_rank, folder)


def test_a_run_that_loses_a_rank_goes_on_to_the_same_weights(two_ranks, tiny_argv, tmp_path):
    process = start(tiny_argv("killed", *TWO_RANKS), 2, "--max-restarts=3")
    wait_for_row(tmp_path / "killed", 25, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(ranks[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "after step 20" in out, err[-3000:]
    assert_same_run(two_ranks, tmp_path / "killed")
    assert processes_with(str(tmp_path)) == []


def test_two_ranks_continue_one_hold_equal_weights_and_synchronise_once_per_step(one_rank, tiny_argv, tmp_path):
    assert main(tiny_argv("run", *FLAT, "--max_iters=10")) == 0
    script = tmp_path / "check.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist
import train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
calls, models = [], []
class DDP(train.DDP):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        models.append(model)
        self.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(state, bucket))[1])
train.DDP = DDP
train.close_processes = lambda rt: None
assert train.main({tiny_argv("run", *FLAT, "--batch_size=1")!r}) == 0
flat = torch.cat([p.detach().flatten() for p in models[0].parameters()])
other = flat.clone()
dist.broadcast(other, 0)
assert torch.equal(flat, other), "ranks differ"
assert not any(p.grad.any() for p in models[0].parameters()), "set to 0, not freed: they are the buckets"
assert len(calls) == 10, f"{{len(calls)}} all-reduces in 10 steps of 4 micro-batches, one bucket"
dist.destroy_process_group()
print("ranks agree")
""")
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script))
    assert result.stdout.count("ranks agree") == 2, result.stderr[-3000:]
    assert_same_losses(one_rank, tmp_path / "run")


def test_a_rows_figures_belong_together(finished, tiny_argv, tmp_path, monkeypatch):
    assert {row["mfu"] for row in rows_of(finished)} == {None}  # the peak is not known
    monkeypatch.setattr(train_module, "peak_flops", lambda *args: 1e12)
    main(tiny_argv("known", "--max_iters=2"))
    for row in read_metrics(tmp_path / "known"):
        flops = make_model().flops_per_token() * row["tok_per_s"]
        assert row["mfu"] == pytest.approx(flops / 1e12)
        assert row["tok_per_s"] == pytest.approx(256 / row["dt_ms"] * 1000)
        assert row["memory_gb"] == 0  # the GPU's
