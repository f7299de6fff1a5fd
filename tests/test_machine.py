"""Device and precision, processes, signals, and the files that one process has alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
from conftest import ROOT

from config import explain
from config.machine import Precision, choose, folder_lock, init_processes, setup_runtime, write_atomically

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
def test_on_a_gpu_attention_is_fused_and_each_process_needs_one(monkeypatch):
    cuda = {"is_available": True, "get_device_capability": H100, "device_count": 1, "set_device": None}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    backends = torch.backends.cuda
    try:
        for dtype, others in [("bfloat16", False), ("float32", True)]:
            assert setup_runtime("auto", dtype).device == torch.device("cuda", 0)
            assert backends.math_sdp_enabled() == backends.mem_efficient_sdp_enabled() == others
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="--nproc_per_node=2 needs as many GPUs, here are 1"):
            setup_runtime("cuda")
    finally:
        backends.enable_math_sdp(True)
        backends.enable_mem_efficient_sdp(True)
        torch.set_float32_matmul_precision("highest")


def test_a_width_that_fused_attention_does_not_take_is_named():
    error = RuntimeError("No available kernel. Aborting execution.")  # PyTorch's words
    assert "takes this head width: raise n_head" in explain(error)


def test_what_a_shell_and_torchrun_leave_in_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    rt = setup_runtime("cpu")
    assert (rt.rank, rt.world_size) == (0, 1)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match="needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        init_processes("gloo")


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
    assert not list(folder.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "first\n\u00e9")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"cannot write .*a.json \(No space left on device\)"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first\n\xc3\xa9" and list(tmp_path.iterdir()) == [path]


def test_of_two_that_take_over_a_stale_lock_at_once_one_gets_it(tmp_path):
    (tmp_path / "lock").write_text("left by a process that was killed")
    results = []

    def take() -> None:
        try:
            with folder_lock(tmp_path):
                results.append("in")
                time.sleep(1.5)
        except ValueError:
            results.append("refused")

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["in", "refused"]
