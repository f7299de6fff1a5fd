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
while True:
    with Stop() as stop:
        print("ready", flush=True)
        while not stop.signal:
            time.sleep(0.01)
        print(stop.signal, flush=True)
        time.sleep(5 if stop.signal == signal.SIGINT else 0)
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


def test_a_signal_to_end_is_told_and_the_program_goes_on_until_a_second_ctrl_c():
    process = start(WAITING)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
        assert [process.stdout.readline() for _ in range(2)] == [b"%d\n" % number, b"ready\n"]
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"2\n"
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=4)[1]


def test_a_closed_terminal_does_not_stop_a_program_under_nohup():
    process = start(WAITING, before=("nohup",))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"15\n"
    process.kill()
    process.communicate()


# --- files ---------------------------------------------------------------------

HOLDING = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from config.machine import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_one_processs_at_a_time_and_one_others_after_kill_9(tmp_path):
    folder, results = tmp_path / "run", []

    def take() -> None:
        try:
            with folder_lock(folder):
                results.append((folder / "lock").read_text())
                time.sleep(1.5)
        except ValueError as error:
            results.append(str(error))

    first, in_use = start(HOLDING, str(folder)), f"{folder} is in use, a process renews {folder}/lock: "
    t0 = time.monotonic()
    take()
    assert results.pop().startswith(in_use)
    assert time.monotonic() - t0 < 3  # not the five seconds of a lock without a process
    first.kill()
    first.communicate()
    threads = [threading.Thread(target=take) for _ in range(2)]  # both at once
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, taken = sorted(results)
    assert refused.startswith(in_use) and taken.startswith(f"process {os.getpid()} on ")
    assert not list(folder.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "first\n\u00e9")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"cannot write .*a.json \(No space left on device\)"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first\n\xc3\xa9" and list(tmp_path.iterdir()) == [path]
