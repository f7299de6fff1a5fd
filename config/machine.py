"""Where a program runs: device, precision, other processes, signals to stop, its own folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

# --- device and precision ------------------------------------------------------


@dataclass
class Precision:
    """How to compute: resolved from the settings and the machine."""

    device: str
    dtype: str
    scaler: bool  # float16 gradients underflow unless the loss is scaled up
    compile: bool
    flash: bool  # attention by a fused kernel alone (arXiv:2307.08691)


def choose(
    device: str, dtype: str, compile: str, capability: tuple | None, has_mps: bool, can_build: bool
) -> Precision:
    """The settings as resolved here. capability is that of the GPU in CUDA, None without one."""
    if device == "auto":
        device = "cuda" if capability else "mps" if has_mps else "cpu"
    if (device == "cuda" and not capability) or (device == "mps" and not has_mps):
        raise ValueError(f"device={device} is not available here: use device=cpu or auto")
    new = device == "cuda" and capability >= (8, 0)
    if dtype == "auto":  # a CPU without bfloat16 units would be some 100 times slower with it
        dtype = "bfloat16" if new else "float16" if device == "cuda" else "float32"
    if dtype == "bfloat16" and device == "cuda" and not new:
        raise ValueError("this GPU has no bfloat16: use dtype=float16, float32 or auto")
    if dtype == "float16" and device != "cuda":
        raise ValueError(f"dtype=float16 needs a CUDA device, not {device}: use float32 or auto")
    can_compile = can_build and (device == "cpu" or (device == "cuda" and capability >= (7, 0)))
    if compile == "True" and not can_compile:
        raise ValueError("compile=True needs a C++ compiler, and a GPU, if any, of capability 7.0")
    compiled = can_compile and (compile == "True" or (compile == "auto" and device == "cuda"))
    flash = new and dtype != "float32"
    return Precision(device, dtype, scaler=dtype == "float16", compile=compiled, flash=flash)


def has_compiler() -> bool:
    """Whether the C++ compiler that torch.compile would call is there and starts."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        return subprocess.run([name, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


# --- processes -----------------------------------------------------------------


@dataclass
class Runtime:
    """This process among the others, and its device."""

    precision: Precision
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def log(self, text: str) -> None:
        if self.rank == 0:
            try:
                tqdm.write(text)
                sys.stdout.flush()
            except BrokenPipeError:  # who read along has left; the run goes on
                sys.stdout = open(os.devnull, "w")

    def bar(self, *args, **kwargs) -> tqdm:  # on the first rank, and only on a terminal
        return tqdm(*args, disable=None if self.rank == 0 else True, **kwargs)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: int) -> bool:  # what all ranks must decide alike
        return self.sum(float(flag != 0))[0] > 0

    def gather(self, items: list) -> list:
        """The lists of all ranks, joined in the order of the ranks."""
        if self.world_size == 1:
            return items
        lists = [None] * self.world_size
        dist.all_gather_object(lists, items)
        return [item for one in lists for item in one]

    def on_first(self, work: Callable, *args) -> None:
        """Call work(*args) on rank 0; all ranks wait, and raise its ValueError or OSError."""
        problems = []
        if self.rank == 0:
            try:
                work(*args)
            except (ValueError, OSError) as error:
                problems = [error]
        for error in self.gather(problems):
            raise error

    def autocast(self) -> contextlib.AbstractContextManager:
        """How the model's forward pass runs: its matrix products in the chosen precision."""
        if self.precision.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision.dtype))

    def check_agreement(self, own: dict) -> None:
        """Raises ValueError, on all ranks, with what a rank was given that rank 0 was not."""
        first, *others = self.gather([own])
        for rank, other in enumerate(others, start=1):
            differ = [key for key in first if other[key] != first[key]]
            if differ:
                what = ", ".join(f"{key} ({other[key]}, not {first[key]})" for key in differ)
                raise ValueError(f"rank {rank} differs from rank 0 in {what}: start all alike")


def init_processes(backend: str) -> None:
    """Meet the processes that torchrun started, which wait while rank 0 writes a checkpoint."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # A restarted process would find the addresses of those that are gone, and wait.
        raise ValueError("torchrun's --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    dist.init_process_group(backend, timeout=timedelta(minutes=30))


def setup_runtime(device: str, dtype: str = "float32", compile: str = "False") -> Runtime:
    """Meet the other processes, if torchrun started some, and take this one's device."""
    env = os.environ
    # Fewer gaps in the GPU's memory; set before CUDA starts and reads it.
    env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    world_size = int(env.get("WORLD_SIZE", 1))
    # One process is rank 0, whatever a shell still holds.
    rank, local_rank = (int(env.get(key, 0)) * (world_size > 1) for key in ("RANK", "LOCAL_RANK"))
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    has_mps, can_build = torch.backends.mps.is_available(), compile != "False" and has_compiler()
    precision = choose(device, dtype, compile, capability, has_mps, can_build)
    place = torch.device(precision.device)
    if precision.device == "cuda":
        n_local, n_gpus = int(env.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if n_local > n_gpus:
            raise ValueError(f"--nproc_per_node={n_local} needs as many GPUs, here are {n_gpus}")
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
        if precision.dtype != "float32":
            torch.set_float32_matmul_precision("high")  # TF32 for the float32 products that remain
        # The other ways to compute attention are slower, and one keeps a (T, T) matrix.
        torch.backends.cuda.enable_math_sdp(not precision.flash)
        torch.backends.cuda.enable_mem_efficient_sdp(not precision.flash)
    if world_size > 1:
        init_processes("nccl" if precision.device == "cuda" else "gloo")
    return Runtime(precision, rank, world_size, place)


def close_processes(rt: Runtime) -> None:
    if rt.world_size > 1:
        dist.destroy_process_group()


# --- signals -------------------------------------------------------------------


class Stop:
    """
    `with Stop() as stop:` a signal to end only sets stop.signal to its number, so that the program
    can save. A second Ctrl-C ends it at once. Signals are handled in the main thread alone.
    """

    def __init__(self):
        self.signal = 0
        self.before = {}  # the handlers to put back

    def __enter__(self) -> "Stop":
        in_main = threading.current_thread() is threading.main_thread()
        for number in signal.Signals if in_main else ():
            nohup = number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN
            if number.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") and not nohup:
                self.before[number] = signal.signal(number, self.handle)
        return self

    def handle(self, number: int, frame: object) -> None:
        # torchrun passes a Ctrl-C on to processes that the terminal has told already.
        if self.signal and number == signal.SIGINT and "WORLD_SIZE" not in os.environ:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


# --- files ---------------------------------------------------------------------


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises OSError; the file is then as it was."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        what = f"cannot write {path} ({error.strerror}): make room; it is as it was"
        raise OSError(what) from error


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """
    Make a folder and have it alone while the block runs, or raise ValueError. A thread renews its
    file `lock` every second; one that nobody renews for five seconds is taken over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, ended = folder / "lock", threading.Event()
    own = f"process {os.getpid()} on {socket.gethostname()}, {time.time_ns()}, ".encode()

    def content() -> bytes:
        return lock.read_bytes() if lock.exists() else b""

    def renew() -> None:
        while not ended.wait(1) and content().startswith(own):
            with contextlib.suppress(OSError), open(lock, "r+b") as f:  # takes no space
                f.write(own + str(time.time_ns()).encode())

    try:
        with open(lock, "xb") as f:
            f.write(own)
    except FileExistsError:
        before = content()
        for _ in range(50):
            time.sleep(0.1)
            if content() != before:
                break
        else:
            lock.write_bytes(own)
            time.sleep(0.5)  # of several that take it over at once, the last to write has it
        if content() != own:
            words = f"{folder} is in use, a process renews {lock}: wait, or use another folder"
            raise ValueError(words) from None
    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if content().startswith(own):
            lock.unlink()
