"""
Where a program runs: device, precision, and this process among the others that torchrun started;
when it is asked to stop, and which folder is its own.

What "auto" means is decided once, by pure functions that a table in tests/ holds to their word.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

# -------------------------------------------------------------------------------
# choices


@dataclass
class Choice:
    """How to compute: resolved from the settings and the machine."""

    device: str
    dtype: str
    scaler: bool   # float16 gradients underflow unless the loss is scaled up
    compile: bool
    flash: bool    # attention by the flash kernel (arXiv:2307.08691), and by no other


def choose(
    device: str, dtype: str, compile: str, capability: tuple | None, has_mps: bool, has_compiler: bool
) -> Choice:
    """
    The settings as resolved here. capability is the GPU's CUDA compute capability, None without one.
    Raises ValueError for what this machine cannot do.
    """
    if device == "auto":
        device = "cuda" if capability else "mps" if has_mps else "cpu"
    if (device == "cuda" and not capability) or (device == "mps" and not has_mps):
        raise ValueError(f"device={device} is not available on this machine: use device=cpu or auto")
    if dtype == "auto":
        dtype = "float32"  # a CPU without bfloat16 units would be some 100 times slower with it
        if device == "cuda":
            dtype = "bfloat16" if capability >= (8, 0) else "float16"
    if dtype == "bfloat16" and device == "cuda" and capability < (8, 0):
        raise ValueError("this GPU has no bfloat16: use dtype=float16, float32 or auto")
    if dtype == "float16" and device != "cuda":
        raise ValueError(f"dtype=float16 needs a CUDA device, not {device}: use float32 or auto")
    can_compile = capability >= (7, 0) if device == "cuda" else device == "cpu" and has_compiler
    if compile == "True" and not can_compile:
        raise ValueError("torch.compile does not work on this machine: use compile=False or auto")
    compiled = compile == "True" or (compile == "auto" and device == "cuda" and can_compile)
    flash = device == "cpu" or (device == "cuda" and capability >= (8, 0) and dtype != "float32")
    return Choice(device, dtype, scaler=dtype == "float16", compile=compiled, flash=flash)


# -------------------------------------------------------------------------------
# processes


@dataclass
class Runtime:
    """This process among the others, and its device."""

    choice: Choice
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

    def bar(self, *args, **kwargs) -> tqdm:
        """A progress bar: on the first rank, and only on a terminal."""
        return tqdm(*args, disable=None if self.rank == 0 else True, **kwargs)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        if self.world_size == 1:
            return list(values)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        total = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: int) -> bool:
        """Whether the flag is up on some rank: what all ranks must decide alike."""
        return self.sum(float(flag != 0))[0] > 0

    def gather(self, items: list) -> list:
        """The lists of all ranks, one after the other."""
        if self.world_size == 1:
            return items
        lists = [None] * self.world_size
        dist.all_gather_object(lists, items)
        return [item for one in lists for item in one]

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """How the model's forward pass runs: its products in the chosen precision, and flash attention."""
        with contextlib.ExitStack() as stack:
            if self.choice.dtype != "float32":
                stack.enter_context(torch.autocast(self.device.type, getattr(torch, self.choice.dtype)))
            if self.choice.flash:
                stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            yield

    def check_attention(self, head_dim: int) -> None:
        """Try the flash kernel once. Raises ValueError if it does not take this width, D."""
        q = torch.zeros(1, 1, 8, head_dim, device=self.device, dtype=getattr(torch, self.choice.dtype))
        try:
            with self.compute():
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
        except RuntimeError as error:
            raise ValueError(
                f"flash attention does not work on this {self.device.type} with heads of width {head_dim} in "
                f"{self.choice.dtype}: choose n_head so that n_embd / n_head is a multiple of 8 and at most "
                "256, or dtype=float32"
            ) from error

    def peak_memory_gb(self) -> float | None:
        """The most that this process has held at a time, of the GPU's memory or of the machine's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        if os.name != "posix":
            return None
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

    def check_agreement(self, own: dict) -> None:
        """Raises ValueError, on all ranks, with what a rank was given that the first one was not."""
        first, *others = self.gather([own])
        for rank, other in enumerate(others, start=1):
            differ = [f"{key} ({other.get(key)}, not {first[key]})" for key in first if other.get(key) != first[key]]
            if differ:
                raise ValueError(
                    f"rank {rank} differs from rank 0 in {', '.join(differ)}: start all of them with the same "
                    "code, settings and files"
                )


def join(backend: str) -> None:
    """
    Meet the processes that torchrun started. It keeps one store of addresses for all attempts of
    --max-restarts, where a restarted process would find those of processes that are gone, so that each
    attempt needs a corner of its own. Their number is known on one machine only; on several, torchrun
    can be told to make a new store for each.
    """
    env = os.environ
    shared = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"]:
        raise ValueError(
            "on several machines --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
            "environment of every torchrun, or restarted processes wait for those that are gone"
        )
    store, rank, world_size = next(dist.rendezvous("env://"))
    if shared:
        store = dist.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store)
    timeout = timedelta(minutes=30)  # the others wait while the first one writes a checkpoint
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def setup_runtime(device: str, dtype: str = "float32", compile: str = "False") -> Runtime:
    """Join the other processes, if torchrun started some, and take this one's device."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++", "cl"]
    has_compiler = any(shutil.which(name) for name in compilers if name)
    has_mps = torch.backends.mps.is_available()
    choice = choose(device, dtype, compile, capability, has_mps, has_compiler)
    place = torch.device(choice.device)
    if choice.device == "cuda":
        n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if n_local > torch.cuda.device_count():
            raise ValueError(
                f"{n_local} processes need as many GPUs, this machine has "
                f"{torch.cuda.device_count()}: lower --nproc_per_node, or use device=cpu"
            )
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
        if choice.dtype != "float32":
            torch.set_float32_matmul_precision("high")  # TF32 for the float32 products that remain
    if world_size > 1:
        if choice.device == "mps":
            raise ValueError("several processes cannot share device=mps: use one, or device=cpu")
        join("nccl" if choice.device == "cuda" else "gloo")
    return Runtime(choice, rank, world_size, place)


def leave(rt: Runtime) -> None:
    """Part from the other processes."""
    if rt.world_size > 1:
        dist.destroy_process_group()


def code_digest() -> str:
    """SHA-256 of this repository's Python files, to tell whether all machines run the same."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("config/*.py"), *root.glob("data/*.py")]):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


class Stop:
    """
    SIGTERM or Ctrl-C: the run ends after the iteration at work, saved. A second Ctrl-C ends it now.
    """

    def __init__(self):
        self.signal = 0
        self.before = {s: signal.signal(s, self.handle) for s in (signal.SIGTERM, signal.SIGINT)}

    def handle(self, number: int, frame) -> None:
        # torchrun passes a Ctrl-C on to processes that the terminal has told already.
        if self.signal and number == signal.SIGINT and "WORLD_SIZE" not in os.environ:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------
# folders that one process writes at a time


def owner() -> str:
    """Who this process is: "host-1234"."""
    return f"{socket.gethostname()}-{os.getpid()}"


def is_at_work(name: str) -> bool:
    """Whether the process of that name, one of this machine, still runs."""
    host, _, pid = name.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit() or os.name != "posix":
        return False
    try:
        os.kill(int(pid), 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make a folder and hold it while the block runs. Raises ValueError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    holder = lock.read_text(encoding="utf-8") if lock.exists() else ""
    if holder != owner() and is_at_work(holder):
        raise ValueError(
            f"process {holder.rpartition('-')[2]} is at work in {folder}: wait for it, or choose another "
            f"run_name (if it is something else, delete {lock})"
        )
    lock.write_text(owner(), encoding="utf-8")
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
