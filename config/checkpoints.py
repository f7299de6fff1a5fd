"""
Checkpoints: folders inside a run's folder, each there whole or not at all.

    out/canonical_toy/ckpt_003000/model.pt        weights, settings, data: all that eval.py reads
    out/canonical_toy/ckpt_003000/optimizer.pt    the rest of what training needs to go on

One is written under another name, flushed to the disk and renamed, and only then do older ones go: a
kill or a full disk at any moment leaves the last one as it was.

The files hold tensors, numbers, strings, lists and dicts only, so that no code in them is ever run.
They are memory-mapped: a tensor comes from the disk when it is copied to its place, so that loading
takes no memory beyond that of the model, however many processes do it.
"""

import os
import shutil
from pathlib import Path

import torch

CONTENT = {
    "model.pt": {"model", "iter", "config", "data"},
    "optimizer.pt": {"optimizer", "scaler", "row", "rng"},
}


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [path for path in Path(run_dir).glob("ckpt_*") if path.name[5:].isdigit()]
    whole = [path for path in found if all((path / name).is_file() for name in CONTENT)]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def load_checkpoint(run_dir: str | Path, training: bool = False) -> dict:
    """
    The newest checkpoint of a run, on the CPU: the content of model.pt and, for training, that of
    optimizer.pt beside it. Raises ValueError with the remedy.
    """
    found = checkpoints(run_dir)
    if not found:
        raise ValueError(f"no run in {run_dir} (it has no checkpoint): train one first, or fix the path")
    saved = load_file(found[-1] / "model.pt")
    return saved | load_file(found[-1] / "optimizer.pt") if training else saved


def load_file(path: Path) -> dict:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        foreign = not isinstance(saved, dict) or CONTENT[path.name] - set(saved)
    except Exception as error:  # a cut or foreign file fails in many ways
        raise ValueError(
            f"{path} is damaged or no checkpoint of this project ({type(error).__name__}): delete "
            f"{path.parent} to go on from the one before it or from the start, or put back a copy"
        ) from error
    if foreign:
        raise ValueError(f"{path} is no checkpoint of this project: choose another folder")
    return saved


def write_checkpoint(run_dir: str | Path, saved: dict, keep: int) -> None:
    """
    Write a checkpoint and let go of all but the newest `keep`. Raises OSError if the disk does not
    take it; then nothing has changed.
    """
    folder = Path(run_dir) / f"ckpt_{saved['iter']:06d}"
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
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
        raise OSError(f"cannot write {folder} ({error})") from error
    for old in [path for path in checkpoints(run_dir) if path != folder][: -keep + 1 or None]:
        shutil.rmtree(old, ignore_errors=True)
