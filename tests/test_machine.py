"""Device and precision, processes, signals, and the files that one process has alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run

from config.machine import (
    Precision,
    Runtime,
    Stop,
    choose,
    folder_lock,
    init_processes,
    setup_runtime,
    write_atomically,
)

EAGER = Precision("cpu", "float32", scaler=False, compile=False, flash=False)
H100, V100, P100 = (9, 0), (7, 0), (6, 0)


@pytest.mark.parametrize(
    "device, dtype, compile, gpu, mps, compiler, expected",
    [
        ("auto", "auto", "auto", None, False, True, ("cpu", "float32", False, False, False)),
        ("auto", "auto", "True", None, False, True, ("cpu", "float32", False, True, False)),
        ("auto", "auto", "True", None, False, False, "compile=True needs a C\\+\\+ compiler"),
        ("cpu", "bfloat16", "auto", H100, False, True, ("cpu", "bfloat16", False, False, False)),
        ("cpu", "float16", "auto", None, False, True, "dtype=float16 needs a CUDA device"),
        ("auto", "auto", "auto", None, True, True, ("mps", "float32", False, False, False)),
        ("mps", "auto", "True", None, True, True, "compile=True needs"),
        ("auto", "auto", "auto", H100, False, True, ("cuda", "bfloat16", False, True, True)),
        ("auto", "auto", "auto", H100, False, False, ("cuda", "bfloat16", False, False, True)),
        ("cuda", "float32", "auto", H100, False, True, ("cuda", "float32", False, True, False)),
        ("auto", "auto", "auto", V100, False, True, ("cuda", "float16", True, True, False)),
        ("auto", "bfloat16", "auto", V100, False, True, "this GPU has no bfloat16"),
        ("auto", "auto", "auto", P100, False, True, ("cuda", "float16", True, False, False)),
        ("auto", "auto", "True", P100, False, True, "compile=True needs .* of capability 7.0"),
        ("cuda", "auto", "auto", None, False, True, "device=cuda is not available here"),
    ],
)
def test_what_auto_means_on_every_machine(device, dtype, compile, gpu, mps, compiler, expected):
    if isinstance(expected, tuple):
        assert choose(device, dtype, compile, gpu, mps, compiler) == Precision(*expected)
    else:
        with pytest.raises(ValueError, match=expected):
            choose(device, dtype, compile, gpu, mps, compiler)


def test_a_compiler_that_is_broken_or_missing_is_none(tmp_path, monkeypatch):
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    for path in (broken, tmp_path / "missing"):
        monkeypatch.setenv("CXX", str(path))
        assert setup_runtime("cpu", compile="auto").precision == EAGER
        with pytest.raises(ValueError, match="compile=True needs a C"):
            setup_runtime("cpu", compile="True")
    broken.write_text("#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("CXX", str(broken))
    assert setup_runtime("cpu", compile="True").precision.compile


@mock.patch.dict(os.environ)
def test_on_a_gpu_attention_is_fused_and_memory_grows_in_place(monkeypatch):
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    cuda = {"is_available": True, "get_device_capability": H100, "device_count": 1}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    backends = torch.backends.cuda
    try:
        for dtype, others in [("bfloat16", False), ("float32", True)]:
            assert setup_runtime("auto", dtype).device == torch.device("cuda", 0)
            assert backends.math_sdp_enabled() == backends.mem_efficient_sdp_enabled() == others
            assert backends.flash_sdp_enabled()
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with pytest.raises(ValueError, match="--nproc_per_node=2 needs as many GPUs, here are 1"):
            setup_runtime("cuda")
    finally:
        backends.enable_math_sdp(True)
        backends.enable_mem_efficient_sdp(True)
        torch.set_float32_matmul_precision("highest")


def test_a_width_that_fused_attention_does_not_take_is_refused(monkeypatch):
    rt = Runtime(Precision("cuda", "bfloat16", scaler=False, compile=True, flash=True))
    rt.check_attention(64)

    def no_kernel(*args, **kwargs):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", no_kernel)
    with pytest.raises(ValueError, match="heads of width 300: choose n_head"):
        rt.check_attention(300)
    Runtime(EAGER).check_attention(300)  # every width works without it


# --- processes -----------------------------------------------------------------


def test_what_a_shell_and_torchrun_leave_in_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    rt = setup_runtime("cpu")
    assert (rt.rank, rt.world_size) == (0, 1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match="needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        init_processes("gloo")


def test_two_ranks_sum_gather_and_fail_together(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from config.machine import close_processes, setup_runtime
rt = setup_runtime("cpu")
def work(kind):
    print("WORK", flush=True)
    raise kind("from the first")
lines = [rt.sum(rt.rank + 1, 10), rt.any(rt.rank == 1), rt.any(False), rt.gather([rt.rank] * 2)]
for kind in (ValueError, OSError):
    try:
        rt.on_first(work, kind)
    except kind as error:
        lines.append(str(error))
try:
    rt.check_agreement({{"seed": rt.rank, "code": "a"}})
except ValueError as error:
    lines.append(str(error))
sys.stdout.write(f"LINES {{lines}}\\n")
close_processes(rt)
""")
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script))
    assert result.returncode == 0, result.stderr[-2000:]
    differ = "rank 1 differs from rank 0 in seed (1, not 0): start all alike"
    expected = [[3.0, 20.0], True, False, [0, 0, 1, 1], "from the first", "from the first"]
    expected = f"LINES {expected + [differ]}"
    assert result.stdout.count(expected) == 2, result.stdout
    assert result.stdout.count("WORK") == 2  # once per kind of error, on one rank


# --- signals -------------------------------------------------------------------

WAITING = f"""
import signal, sys, time; sys.path.insert(0, {str(ROOT)!r})
from config.machine import Stop
with Stop() as stop:
    print("ready", flush=True)
    while not stop.signal:
        time.sleep(0.01)
    print(stop.signal, flush=True)
    time.sleep(5 if "wait" in sys.argv else 0)
"""


def start(*args: str, before: tuple = ()) -> subprocess.Popen:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # if nohup runs the tests
    )
    assert process.stdout.readline() == b"ready\n", process.stderr.read()
    return process


@pytest.mark.parametrize(
    "before, sent, told",
    [
        ((), ["SIGTERM"], b"15\n"),
        ((), ["SIGHUP"], b"1\n"),
        ((), ["SIGUSR1"], b"10\n"),
        (("nohup",), ["SIGHUP", "SIGTERM"], b"15\n"),  # a closed terminal does not stop it
    ],
)
def test_a_signal_to_end_is_told_and_the_program_goes_on(before, sent, told):
    process = start(WAITING, before=before)
    for name in sent:
        process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=10)[0] == told and process.returncode == 0


def test_a_second_ctrl_c_ends_a_program_at_once():
    process = start(WAITING, "wait")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"2\n"
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=4)[1]


# --- files ---------------------------------------------------------------------

HOLDING = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from config.machine import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_one_processs_at_a_time_and_free_after_kill_9(tmp_path):
    folder = tmp_path / "run"
    first = start(HOLDING, str(folder))
    t0 = time.monotonic()
    with pytest.raises(ValueError, match=f"{folder} is in use, a process renews {folder}/lock: "):
        with folder_lock(folder):
            pass
    assert time.monotonic() - t0 < 3  # not the five seconds of a lock without a process
    first.kill()
    first.communicate()
    with folder_lock(folder):
        assert f"process {os.getpid()} on ".encode() in (folder / "lock").read_bytes()
    assert list(folder.iterdir()) == []
