"""What the large run stands on: reading, ranks, checkpoints, memory, the plan, one compiled graph."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train as train_module
from bench import resident
from config import load_config, read_config_file
from config.checkpoints import checkpoints, find_checkpoint, load_checkpoint, write_checkpoint
from config.machine import Runtime, join
from config.plan import block_activations, largest_batch, memory, parameters, peak_flops
from conftest import ARMS, ROOT, make_model, model_config, run
from data.shards import Shards
from model import GPT, GPTConfig
from test_train import (
    RT,
    TWO_RANKS,
    assert_same_run,
    processes_with,
    rows_of,
    two_ranks,
    wait_for_row,
)  # noqa: F401
from train import Batches, TrainConfig, get_batch, main

# -------------------------------------------------------------------------------
# reading


def many_files(dataset: Path, folder: Path, sizes: list[int]) -> list[np.ndarray]:
    """A dataset of training files of the given sizes, and their tokens."""
    shutil.copytree(dataset, folder)
    meta = json.loads((folder / "meta.json").read_text())
    files = [
        np.random.default_rng(i).integers(0, 512, n).astype("<u2") for i, n in enumerate(sizes)
    ]
    entries = []
    for i, tokens in enumerate(files):
        tokens.tofile(folder / f"train_{i:05d}.bin")
        entries.append({"name": f"train_{i:05d}.bin", "tokens": len(tokens)})
    meta["files"] = entries + [e for e in meta["files"] if e["name"].startswith("val")]
    (folder / "meta.json").write_text(json.dumps(meta))
    return files


def test_a_thousand_files_cost_no_more_than_one(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("data.shards.SCAN_TOKENS", 0)  # as if they were large
    reads = []
    real = np.fromfile
    monkeypatch.setattr(
        np, "fromfile", lambda *a, **k: (reads.append(k["count"]), real(*a, **k))[1]
    )
    files = many_files(dataset, tmp_path / "many", [70 + i % 60 for i in range(1000)])
    data = Shards(tmp_path / "many", "train", 512, 32)
    assert reads == []  # nothing is opened before it is needed
    slow = [tokens[at : at + 33] for tokens in files for at in range(0, len(tokens) - 32, 32)]
    numbers = np.array([0, 1, len(slow) - 1, len(slow) // 2, 777])
    assert np.array_equal(data.windows(numbers), np.stack([slow[i] for i in numbers]))
    assert data.n_windows == len(slow) and reads == [33] * 5


def test_memory_stays_flat_over_twenty_thousand_batches(dataset, tmp_path):
    folder = tmp_path / "large"
    shutil.copytree(dataset, folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"] = [e for e in meta["files"] if e["name"].startswith("val")]
    for i in range(10):  # 2 GB; the file system keeps no block of zeros
        (folder / f"train_{i:05d}.bin").touch()
        os.truncate(folder / f"train_{i:05d}.bin", 2 * 10**8)
        meta["files"].append({"name": f"train_{i:05d}.bin", "tokens": 10**8})
    (folder / "meta.json").write_text(json.dumps(meta))
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]
from data.shards import Shards, window_numbers
def status():
    lines = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("RssAnon", "VmRSS")))
    return [int(lines[key].split()[0]) for key in ("RssAnon", "VmRSS")]
data = Shards({str(folder)!r}, "train", 512, 1024)
for i in range(20000):
    data.windows(window_numbers(2 * i, 2, data.n_windows, 1))
    if i == 100:
        before = status()
print(*[b - a for a, b in zip(before, status())])
"""
    result = run("-c", code)
    grown_kb = [int(word) for word in result.stdout.split()]
    assert len(grown_kb) == 2 and max(grown_kb) < 4000, (grown_kb, result.stderr)


def test_a_slow_disk_is_read_while_the_step_is_at_work(tiny, monkeypatch):
    cfg = tiny(batch_size=2)
    data = Shards(cfg.data_dir, "train", cfg.vocab_size, cfg.block_size)
    expected = [get_batch(data, cfg, it, micro, RT) for it in (5, 6) for micro in range(4)]
    real = data.windows
    monkeypatch.setattr(data, "windows", lambda numbers: (time.sleep(0.04), real(numbers))[1])
    batches = Batches(data, cfg, 5, RT)
    for tokens in expected:
        x, y = next(batches)
        assert torch.equal(x, tokens[:, :-1]) and torch.equal(y, tokens[:, 1:])
        time.sleep(0.06)  # the step
    assert batches.waited_s < 0.5 * 8 * 0.04, batches.waited_s


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_validation_token_counts_once_over_all_ranks(dataset, tmp_path, world_size):
    many_files(
        dataset, tmp_path / "d", [101 * 32 + 5, 40]
    )  # rows of 32: 101, one of 5, one, one of 8
    data = Shards(tmp_path / "d", "train", 512, 32)
    shares = [list(data.every_token_once(4, 0, rank, world_size)) for rank in range(world_size)]
    assert (
        len({len(share) for share in shares}) == 1
    )  # as many batches, or a rank would wait forever
    once = np.concatenate([y[y >= 0] for batch in zip(*shares) for _, y in batch])
    ids = [np.fromfile(tmp_path / "d" / f"train_0000{i}.bin", dtype="<u2") for i in (0, 1)]
    assert np.array_equal(once, np.concatenate(ids))


def test_a_file_cut_while_in_use_is_named(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "d")
    data = Shards(tmp_path / "d", "train", 512, 32)
    os.truncate(tmp_path / "d" / "train_00000.bin", 1000)
    with pytest.raises(
        ValueError,
        match="train_00000.bin ends after 500 of [0-9]+ tokens: it was cut while in use; prepare",
    ):
        data.windows(np.array([data.n_windows - 1, 15]))


# -------------------------------------------------------------------------------
# ranks


def test_a_sharded_run_that_loses_a_rank_goes_on_to_the_same_weights(
    two_ranks, tiny_argv, tmp_path
):
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "--max-restarts=3",
    ]
    process = subprocess.Popen(
        [sys.executable, *launcher, "train.py", *tiny_argv("killed", *TWO_RANKS, "--shard_optimizer=True")],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for_row(tmp_path / "killed", 25, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(ranks[-1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "after iteration 20" in out, out[-3000:]
    assert_same_run(two_ranks, tmp_path / "killed")
    assert processes_with(str(tmp_path)) == []


def test_restarts_on_several_machines_ask_for_a_store_each(monkeypatch):
    for key, value in {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
                       "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    with pytest.raises(
        ValueError,
        match="several machines --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ):
        join("gloo")


def agreement(first: dict, other: dict) -> None:
    rt = Runtime(RT.choice, 0, 2)
    rt.gather = lambda items: [*items, other]
    rt.check_agreement(first)


def test_what_ranks_must_have_in_common():
    agreement({"seed": 1, "code": "a"}, {"seed": 1, "code": "a"})
    with pytest.raises(
        ValueError,
        match=r"rank 1 differs from rank 0 in seed \(2, not 1\), code \(b, not a\): start",
    ):
        agreement({"seed": 1, "code": "a"}, {"seed": 2, "code": "b"})


def test_ranks_with_other_settings_and_code_are_refused(tiny_argv, tmp_path):
    script = tmp_path / "differ.py"
    script.write_text(f"""
import os, sys; sys.path.insert(0, {str(ROOT)!r})
from config import run_cli
import train
argv = {tiny_argv("run", "--batch_size=2")!r}
if os.environ["RANK"] == "1":
    argv.append("--learning_rate=1e-4")
    train.code_digest = lambda: "another"
sys.argv = ["train.py", *argv]
run_cli(train.main, "train.py")
""")
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script))
    ours = [line for line in result.stderr.splitlines() if line.startswith("train.py: error")]
    assert (
        "rank 1 differs from rank 0 in learning_rate (0.0001, not 0.003), code (another, not"
        in ours[0]
    )
    assert not (tmp_path / "run").exists()


def test_ranks_that_see_different_checkpoints_are_refused(tiny, tiny_argv, tmp_path):
    main(tiny_argv("run", "--max_iters=1"))
    cfg = tiny("run", max_iters=1)
    rt = Runtime(RT.choice, 0, 2)
    rt.gather = lambda items: [*items, items[0] | {key: None for key in items[0] if "share" in key}]
    with pytest.raises(
        ValueError,
        match=r"the checkpoint in .*, which must be on a disk that .* share \(None, not 1\)",
    ):
        find_checkpoint(cfg, Shards(cfg.data_dir, "train", 512, 32), rt, set())


# -------------------------------------------------------------------------------
# checkpoints


def test_the_newest_checkpoints_stay_and_each_can_be_gone_on_from(tiny_argv, tmp_path, capsys):
    args = ["--save_interval=4", "--keep_checkpoints=3"]
    main(tiny_argv("run", *args))
    names = [path.name for path in checkpoints(tmp_path / "run")]
    assert names == ["ckpt_000012", "ckpt_000016", "ckpt_000020"]
    shutil.copytree(tmp_path / "run", tmp_path / "back")
    newest = tmp_path / "back" / "ckpt_000020"
    os.truncate(newest / "optimizer.pt", 1000)
    with pytest.raises(
        ValueError, match="optimizer.pt is damaged .*: delete .*ckpt_000020 to go on"
    ):
        main(tiny_argv("back", *args, "--max_iters=21", "--decay_iters=0"))
    (newest / "optimizer.pt").unlink()
    (tmp_path / "back" / "ckpt_000016" / "optimizer.pt").unlink()
    (tmp_path / "back" / "ckpt_000017.tmp").mkdir()  # a kill while it was being written
    main(tiny_argv("back", *args))
    out = capsys.readouterr().out
    assert f"{newest} lacks a file and is left out" in out and "after iteration 12" in out
    assert_same_run(tmp_path / "run", tmp_path / "back")
    assert not list((tmp_path / "back").glob("*.tmp"))
    assert [path.name for path in checkpoints(tmp_path / "back")] == names


def test_loading_takes_no_memory_before_a_tensor_is_copied(tmp_path):
    big = {"w": torch.ones(20_000_000)}  # 80 MB
    parts = {
        "iter": 7,
        "config": {},
        "data": {},
        "scaler": {},
        "row": {},
        "rng": torch.get_rng_state(),
    }
    write_checkpoint(
        tmp_path, parts | {"model": big, "optimizer": {0: {"exp_avg": big["w"]}}}, keep=1
    )
    before = resident()
    saved = load_checkpoint(tmp_path, training=True)
    total = float(saved["model"]["w"].sum() + saved["optimizer"][0]["exp_avg"].sum())
    assert total == 4e7 and resident() - before < 0.02, resident() - before


def test_a_resumed_run_takes_no_more_memory_than_a_new_one(tiny_argv, tmp_path):
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from bench import peak_of
import train
print("PEAK", peak_of(lambda: train.main(sys.argv[1:]))[1])
"""
    size = [
        "--n_embd=288",
        "--n_layer=3",
        "--eval_interval=0",
        "--decay_iters=0",
        "--eval_tokens=100",
    ]
    peaks = []
    for n in (1, 2):
        result = run(
            "-c",
            code,
            *tiny_argv("run", *size, f"--max_iters={n}"),
            MALLOC_MMAP_THRESHOLD_="131072",
        )
        assert result.returncode == 0, result.stderr[-2000:]
        peaks.append(float(re.search(r"PEAK (\S+)", result.stdout)[1]))
    assert peaks[1] < 1.05 * peaks[0] + 0.01, peaks


# -------------------------------------------------------------------------------
# compile, attention, activations


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile")
def test_the_training_forward_is_one_graph_compiled_once(tiny_argv, tmp_path):
    short = [
        "--n_layer=1",
        "--max_iters=4",
        "--eval_interval=2",
        "--compile=True",
        "--activation_checkpointing",
    ]
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]
from torch._dynamo.utils import counters
import train
train.main(sys.argv[1:])
print("GRAPHS", counters["stats"]["unique_graphs"], len(counters["graph_break"]))
"""
    result = run("-c", code, *tiny_argv("run", *short), TORCH_LOGS="recompiles,graph_breaks")
    assert result.returncode == 0 and "GRAPHS 1 0" in result.stdout, result.stderr[-2000:]
    assert "a sample:" in result.stdout and not re.search(
        "[Rr]ecompil|[Gg]raph break", result.stderr
    ), result.stderr


def test_attention_is_flash_or_refused(monkeypatch):
    with RT.compute():
        flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    assert flags == (True, False) and torch.backends.cuda.math_sdp_enabled()
    RT.check_attention(44)

    def no_kernel(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", no_kernel)
    with pytest.raises(
        ValueError,
        match="flash attention does not work on this cpu with heads of width 300 .*n_head",
    ):
        RT.check_attention(300)


def kept_bytes(model: GPT, forward, ids: torch.Tensor) -> int:
    """What forward's loss keeps for its backward pass, beside parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # keeps it, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), RT.compute():
        loss = forward(ids, ids)
    assert loss.isfinite()
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def test_a_block_keeps_what_the_plan_says():
    C, F_, B, T = 128, 384, 2, 64
    ids = torch.randint(256, (B, T))
    sizes = dict(vocab_size=256, block_size=T, n_head=2, n_embd=C, n_inner=F_)
    models = [GPT(GPTConfig("learned", n_layer=n, **sizes)) for n in (2, 3)]
    small, large = (kept_bytes(m, m, ids) for m in models)
    extra = 2 + 2  # of each token: what a norm divides by, twice, and a head's softmax sum
    assert large - small == 4 * B * T * (block_activations(C, F_, compiled=False) + extra)
    for m in models:
        m.activation_checkpointing = True
    small, large = (kept_bytes(m, m, ids) for m in models)
    assert large - small == 4 * B * T * C
    if shutil.which("g++"):
        model = GPT(GPTConfig("learned", n_layer=2, **sizes))
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        with RT.compute():
            compiled(ids, ids).backward()
        head = (
            4 * B * T * 2 * C + 4 * 256 * C
        )  # the last norm's input, the loss's gradients of x and of its weight
        expected = 2 * 4 * B * T * (block_activations(C, F_, compiled=True) + extra) + head
        assert kept_bytes(model, compiled, ids) == pytest.approx(expected, rel=0.01)


def test_activation_checkpointing_changes_no_gradient():
    ids = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(0))
    grads = []
    for on in (False, True):
        model = make_model(input_mode="learned")
        model.activation_checkpointing = on
        model(ids[:, :-1], ids[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# -------------------------------------------------------------------------------
# the plan, the ladder, utilisation


def planned(path: str, **changes) -> tuple[GPT, TrainConfig]:
    cfg = replace(load_config(TrainConfig, [str(ROOT / "config" / path)], {}), **changes)
    with torch.device("meta"):
        return GPT(cfg), cfg


def test_the_plan_of_the_large_run_by_hand():
    C, F_, L, V, T = 2048, 8192, 24, 49152, 2048
    for arm, table in (("canonical", 0), ("gf2", 0), ("learned", V * C)):
        model, cfg = planned(f"{arm}_1p7b.py")
        parts = {
            "attention": L * 4 * C * C,
            "MLP": L * 3 * C * F_,
            "norms": (2 * L + 1) * C,
            "output head": V * C,
        }
        assert parameters(model) == parts | ({"input": table} if table else {})
        N = sum(parts.values()) + table
        assert N == {0: 1_711_376_384}.get(table, 1_812_039_680)
        assert model.flops_per_token() == 6 * (N - table) + 12 * L * C * T
        got = memory(model, replace(cfg, batch_size=8), ranks=8, half=True, compiled=True)
        assert got["weights"] == got["gradients"] == 4 * N and got["AdamW's means"] == 8 * N
        assert got["16-bit weights"] == 2 * (N - table)
        assert got["activations"] == 2 * 8 * T * L * (10 * C + 3 * F_)
        sharded = memory(
            model, replace(cfg, shard_optimizer=True), ranks=8, half=True, compiled=True
        )
        assert N <= sharded["AdamW's means"] < 1.01 * N  # 8 N over 8 ranks, near enough


def test_the_largest_share_of_a_sharded_optimizer_is_pytorchs(tmp_path):
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]
import torch, torch.distributed as dist
from config.plan import largest_share
from model import GPT, GPTConfig
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
for ranks in (2, 3, 8):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model = GPT(GPTConfig("learned", 512, 32, 3, 2, 36))
    parts = model.optimizer(1e-3, (0.9, 0.95), 0.1, sharded=True)._partition_parameters()
    sizes = [sum(p.numel() for group in part for p in group["params"]) for part in parts]
    print("SHARES", max(sizes) == largest_share(model, ranks), sizes)
    dist.destroy_process_group()
"""
    result = run("-c", code)
    assert result.stdout.count("SHARES True") == 3, result.stdout + result.stderr[-2000:]


def test_the_planned_memory_is_that_of_a_run():
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from dataclasses import replace
import torch
from bench import status_gb
from config.plan import memory
from model import GPT
from test_train import NO_SCALER, RT
from train import TrainConfig, train_step

def peak_gb(cfg):
    before = status_gb("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    model = GPT(cfg)
    model.activation_checkpointing = cfg.activation_checkpointing
    optimizer = model.optimizer(1e-3, (0.9, 0.95), 0.1)
    ids = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.block_size))
    for _ in range(2):
        train_step(model, optimizer, NO_SCALER, iter([(ids, ids)] * 2), 2, 1.0, RT)
    return status_gb("VmHWM") - before, sum(memory(model, cfg, 1, False, False).values()) / 1e9

small = TrainConfig("learned", 256, 16, n_layer=1, n_head=4, n_embd=64, batch_size=2)
peak_gb(small)  # loads all that is needed
large = TrainConfig("learned", 8192, 256, n_layer=4, n_head=4, n_embd=256, batch_size=4)
for recompute in (False, True):
    measured, planned = peak_gb(replace(large, activation_checkpointing=recompute))
    print("RATIO", planned / measured, flush=True)
"""
    # Memory that is freed goes back at once, so that what is measured is what is in use.
    result = run("-c", code, MALLOC_MMAP_THRESHOLD_="131072")
    ratios = [float(ratio) for ratio in re.findall(r"RATIO (\S+)", result.stdout)]
    assert len(ratios) == 2 and all(0.9 < ratio < 1.1 for ratio in ratios), (
        ratios,
        result.stderr[-1000:],
    )


def test_the_plan_needs_no_data_and_no_memory(tmp_path):
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from bench import status_gb
import train
train.main(sys.argv[1:])
print("PEAK", status_gb("VmHWM"))
"""
    result = run("-c", code, "config/learned_1p7b.py", "--plan=True", "--data_dir=no/such", f"--out_dir={tmp_path}/x",
                 "--shard_optimizer=True", WORLD_SIZE="8", RANK="0")  # fmt: skip
    assert result.returncode == 0 and not (tmp_path / "x").exists(), result.stderr
    assert float(re.search(r"PEAK (\S+)", result.stdout)[1]) < 1.0
    for words in ("1,812,039,680", "memory in GB of one of 8 ranks, batch_size 8, 16-bit products, compiled",
                  "100,000,595,968 tokens", "64 x H100", "21.74 GB a checkpoint, 3 of them"):  # fmt: skip
        assert words in result.stdout, words


def test_the_plan_refuses_what_training_would_and_knows_its_limits(monkeypatch, capsys):
    large = [str(ROOT / "config" / "canonical_1p7b.py"), "--plan"]
    for ranks, words in [
        ("3", "8 x 2048 x 3 = 49152, got 2097152"),
        ("0", "at least 1, got 0"),
        ("x", "whole number"),
    ]:
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with pytest.raises(ValueError, match=words):
            main(large)
    monkeypatch.setenv("WORLD_SIZE", "1")
    main([*large, "--device=cpu"])
    assert "hours" not in capsys.readouterr().out  # a CPU's peak is not known
    main([*large, "--activation_checkpointing"])
    assert re.search(r"1 x H100 +1,074.4 hours", capsys.readouterr().out)  # 805.8 x 4 / 3


def test_hours_and_batches_of_the_plan_by_hand():
    from config.plan import USABLE, hours

    assert hours(1e21, 8, "H100") == pytest.approx(1e21 / 8 / 989e12 / 0.4 / 3600)
    model, cfg = planned("canonical_135m.py")
    best = largest_batch(model, cfg, 1, 24, True, True)
    fits = [B for B in range(1, 257) if 256 % B == 0 and USABLE * 24e9 >=
            sum(memory(model, replace(cfg, batch_size=B), 1, True, True).values())]  # fmt: skip
    assert best == max(fits) > 0
    assert largest_batch(model, cfg, 1, 1, True, True) == 0


@pytest.mark.parametrize("size", ["30m", "135m", "360m", "1p7b"])
def test_the_ladders_lines_are_true_and_its_arms_alike(size):
    from config.plan import hours

    arms = {arm: read_config_file(str(ROOT / "config" / f"{arm}_{size}.py")) for arm in ARMS}
    assert all(arms[arm] == arms["canonical"] | {"input_mode": arm} for arm in ARMS)
    model, cfg = planned(f"canonical_{size}.py")
    table, _ = planned(f"learned_{size}.py")
    tokens = cfg.max_iters * cfg.tokens_per_iter
    first = (ROOT / "config" / f"canonical_{size}.py").read_text()
    assert f"= {round(tokens / 1e9)} billion" in first
    assert largest_batch(model, cfg, 1, 80 if size == "1p7b" else 24, True, True) >= cfg.batch_size
    time = hours(tokens * model.flops_per_token(), 1, "H100")
    line = f"| {size} | {model.n_params():,} | {table.n_params():,} | {round(tokens / 1e9)} billion | {time:.1f} |"
    assert line in (ROOT / "README.md").read_text(encoding="utf-8"), line
    if size != "1p7b":
        for words in (f"{model.n_params():,} parameters with a code, {table.n_params():,} with a table",
                      f"{time:.1f} hours on an H100 at 40 %"):  # fmt: skip
            assert words in first, words


def test_peaks_are_found_by_the_gpus_name(monkeypatch):
    cuda = torch.device("cuda")
    for name, peak in [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12),
                       ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
                       ("NVIDIA A10G", 70e12), ("Tesla V100-SXM2-16GB", 125e12), ("A new card", None)]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, "bfloat16") == peak, name
        assert peak_flops(cuda, "float32") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None


def test_a_rows_figures_belong_together(tiny_argv, tmp_path, monkeypatch):
    main(tiny_argv("unknown", "--max_iters=2"))
    assert {row["mfu"] for row in rows_of(tmp_path / "unknown")} == {None}
    monkeypatch.setattr(train_module, "peak_flops", lambda *args: 1e12)
    main(tiny_argv("known", "--max_iters=2", "--eval_interval=1", "--save_interval=1"))
    flops = GPT(model_config()).flops_per_token()
    for line in (tmp_path / "known" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["mfu"] == pytest.approx(flops * row["tok_per_s"] / 1e12)
        assert row["tok_per_s"] == pytest.approx(256 / row["dt_ms"] * 1000)
        assert 0 <= row["data_ms"] < row["dt_ms"] and row["eval_ms"] > 0 and row["save_ms"] > 0
        assert 0.05 < row["memory_gb"] < 50


def test_shares_of_the_time_by_hand():
    rows = [
        {"dt_ms": 40.0, "data_ms": 10.0, "save_ms": 20.0},
        {"dt_ms": 30.0, "data_ms": 0.0, "eval_ms": 10.0},
    ]
    words = train_module.where_time_went(rows)
    assert words == "steps 60.0%, waiting for data 10.0%, evaluation 10.0%, checkpoints 20.0%"
