"""
A run's folder: what train.py leaves there, and eval.py reads.

    out/canonical_toy/ckpt_003000/model.pt        weights, settings, data: all that eval.py needs
    out/canonical_toy/ckpt_003000/optimizer.pt    the rest of what training needs to go on
    out/canonical_toy/metrics.jsonl               a row per step

A kill or a full disk at any moment leaves the last checkpoint as it was. The files hold tensors and
plain values only, so that no code in them is ever run.
"""

import json
import os
import shutil
from pathlib import Path

import torch

from config import try_json
from config.machine import write_atomically
from data import tokenizers

CONTENT = {
    "model.pt": {"model", "step", "config", "recipe", "data"},
    "optimizer.pt": {"optimizer", "scaler", "metrics"},
}


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path.parent for path in Path(run_dir).glob("ckpt_*/model.pt")]
    found = [path for path in found if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def load_file(path: Path) -> dict:
    """The content of one file of a checkpoint, on the CPU."""
    folder = path.parent
    if not path.is_file():
        raise ValueError(f"{path} is missing: put it back, or delete {folder} to do without it")
    try:
        # Mapped: a tensor is read from the disk when it is copied to its place, and never twice.
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a cut or foreign file fails in many ways
        words = f"damaged or no checkpoint: put back a copy, or delete {folder} to go on without it"
        raise ValueError(f"{path} is {words}") from error
    if not isinstance(saved, dict) or CONTENT[path.name] - set(saved):
        raise ValueError(f"{path} is no checkpoint of this project: choose another folder")
    return saved


def load_checkpoint(run_dir: str | Path, training: bool = False) -> dict:
    """The newest checkpoint of a run, or the one that run_dir is; with all files for training."""
    found = [Path(run_dir)] if Path(run_dir, "model.pt").is_file() else checkpoints(run_dir)
    if not found:
        raise ValueError(f"{run_dir} holds no checkpoint: train a run first, or fix the path")
    saved = load_file(found[-1] / "model.pt")
    return saved | load_file(found[-1] / "optimizer.pt") if training else saved


def write_checkpoint(run_dir: str | Path, saved: dict, keep: int) -> None:
    """Write a checkpoint, remove all but the newest `keep`. Raises OSError with nothing lost."""
    folder = Path(run_dir) / f"ckpt_{saved['step']:06d}"
    unfinished = folder.with_suffix(".tmp")
    for leftover in Path(run_dir).glob("ckpt_*.tmp"):  # of a kill
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        unfinished.mkdir()
        for name, keys in CONTENT.items():
            with open(unfinished / name, "wb") as f:
                torch.save({key: saved[key] for key in keys}, f)
                f.flush()
                os.fsync(f.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one, or half of one
        os.replace(unfinished, folder)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        shutil.rmtree(unfinished, ignore_errors=True)
        remedy = "make room, and the same command continues from the checkpoint before it"
        raise OSError(f"cannot write {folder}, is the disk full? ({error}): {remedy}") from error
    for old in checkpoints(run_dir)[:-keep]:
        os.replace(old, old.with_suffix(".tmp"))  # so that a kill leaves no half of it
        shutil.rmtree(old.with_suffix(".tmp"), ignore_errors=True)


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The rows of metrics.jsonl. A last line that a kill cut short is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list(filter(None, map(try_json, lines)))


def start_metrics(run_dir: str | Path, step: int, settings: dict) -> None:
    """Keep the rows up to a step, as a killed run may have gone past its last checkpoint."""
    rows = [row for row in read_metrics(run_dir) if row["step"] <= step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(Path(run_dir, "metrics.jsonl"), text)
    write_atomically(Path(run_dir, "config.json"), json.dumps(settings, indent=2))


def append_metrics(run_dir: str | Path, row: dict) -> None:
    with open(Path(run_dir, "metrics.jsonl"), "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


INPUT_SETTINGS = {  # all that is said of an input if it is not so
    "table_scale": 0.02,
    "code_bits": 0,
    "code_symbols": "01",
    "code_scale": 1.0,
    "code_shift": False,
    "code_recodings": 1,
    "code_own": False,
}


def input_name(settings: dict) -> str:
    """The input of a run, with the settings of it that are not the paper's."""
    name = settings["input_mode"]
    for key, paper in INPUT_SETTINGS.items():
        own = settings.get(key, paper)
        if own != paper and (key == "table_scale") == (settings["input_mode"] == "learned"):
            name += f" {key.partition('_')[2]}={own}"
    return name


def describe(run: str, saved: dict) -> dict:
    """Which run a result is of, and all that decided it."""
    return {
        "run": run,
        "input": input_name(saved["recipe"]),
        "seed": saved["recipe"]["seed"],
        "step": saved["step"],
        "settings": saved["recipe"],
        "dataset": Path(saved["config"]["data_dir"]).name,
        "data": saved["data"],
    }


def read_tokenizer(run_dir: str, saved: dict) -> dict:
    """The spec of the tokenizer that a run was trained with, which lies in its folder."""
    folder = Path(run_dir).parent if Path(run_dir, "model.pt").exists() else Path(run_dir)
    spec = tokenizers.read_spec(folder)
    if tokenizers.digest(spec) != saved["data"]["tokenizer_sha256"]:
        words = f"was trained with tokenizer {saved['data']['tokenizer']}, but holds another"
        raise ValueError(f"{folder} {words}: copy the right one from the dataset")
    return spec


def write_or_warn(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        print(f"warning: {error}")  # what is printed is worth more than the file


def write_results(run_dir: str, result: dict) -> None:
    """Add a result to eval.json, unless that is of another checkpoint; then replace it."""
    path = Path(run_dir, "eval.json")
    old = (try_json(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}
    if any(old.get(key) != result[key] for key in ("settings", "step")):
        old = {}
    old |= result | {"tasks": old.get("tasks", {}) | result.get("tasks", {})}
    write_or_warn(path, json.dumps(old, indent=2))
