"""What the tests share: a small dataset, tiny settings, and programs run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config import read_config_file
from config.machine import Precision, Runtime
from data.prepare import PrepareConfig, prepare
from data.pydocs import read_documents
from model import GPT, GPTConfig
from train import TrainConfig, main

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "config" / "tiny.py")
ARMS = ("learned", "canonical", "gf2")
RT = Runtime(Precision("cpu", "float32", scaler=False, compile=False, flash=True))

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def texts(n: int = 60) -> list[str]:
    """Small documents with some order in them: counting, forwards and backwards, in words."""
    words = "zero one two three four five six seven eight nine".split()
    return [
        f"Document {i}: " + " ".join(words[(i + k * (1 + i % 3)) % 10] for k in range(40 + i % 7)) + "."
        for i in range(n)
    ]


def make_dataset(folder: Path, vocab_size: int) -> Path:
    """A dataset written by our own pipeline."""
    documents = [f"{text} {chr(97 + i % 26)}{chr(97 + i // 26 % 26)} {i * 7919}" for i, text in enumerate(texts(400))]
    cfg = PrepareConfig(data_dir=str(folder), vocab_size=vocab_size)
    rows = [(i, None, text) for i, text in enumerate(documents)]
    return prepare(cfg, lambda place: rows, "a test", "python -m pytest tests", 10**6)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "small", 512)


@pytest.fixture(scope="session")
def pydocs() -> list[str]:
    return read_documents()


@pytest.fixture(scope="session")
def finished(dataset, tmp_path_factory) -> Path:
    """A finished run of config/tiny.py, to read; a test that changes it copies it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main([TINY, f"--data_dir={dataset}", f"--out_dir={folder}"]) == 0
    return folder


@pytest.fixture
def tiny(dataset, tmp_path):
    """tiny(out="a", max_iters=10) -> the TrainConfig of config/tiny.py with these changes."""

    def make(out: str = "run", **changes) -> TrainConfig:
        values = read_config_file(TINY) | {"data_dir": str(dataset), "out_dir": str(tmp_path / out)}
        return TrainConfig(**(values | changes))

    return make


@pytest.fixture
def tiny_argv(dataset, tmp_path):
    """
    The same as a command line, without the program: tiny_argv("a", "--seed=2"). Of a setting that
    is named several times, the last counts.
    """

    def make(out: str = "run", *args: str) -> list[str]:
        args = [f"--data_dir={dataset}", f"--out_dir={tmp_path / out}", *args]
        return [TINY, *{arg.partition("=")[0]: arg for arg in args}.values()]

    return make


def model_config(**changes) -> GPTConfig:
    small = dict(vocab_size=512, block_size=32, n_layer=2, n_head=2, n_embd=36)
    return GPTConfig(**(small | changes))


def make_model(**changes) -> GPT:
    return GPT(model_config(**changes))


def run(*args: str, cwd: Path = ROOT, timeout: float = 120, **env) -> subprocess.CompletedProcess:
    """Run `python ARGS` as a user would, and wait for it."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=timeout,
        encoding="utf-8", env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )  # fmt: skip


def assert_clean_error(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit code not 0, no traceback, and the last line of stderr is one sentence with these words."""
    assert result.returncode != 0, f"accepted: {result.stdout[-500:]}"
    assert "Traceback" not in result.stderr, result.stderr[-2000:]
    last = result.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, f"{word!r} is not in: {last}"
