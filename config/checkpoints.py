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
import time
from dataclasses import asdict
from pathlib import Path

import torch

from config.machine import Runtime
from data.shards import Shards, identity

# -------------------------------------------------------------------------------
# files

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
        raise OSError(f"cannot write {folder}, is the disk full? ({error})") from error
    for old in [path for path in checkpoints(run_dir) if path != folder][: -keep + 1 or None]:
        shutil.rmtree(old, ignore_errors=True)


# -------------------------------------------------------------------------------
# of a run that is at work: many ranks, one of which writes


def save(run, must: bool) -> None:
    """
    Write a checkpoint of a train.Run. Raises ValueError if a number in it is not finite, so that a good
    one is never replaced by a bad. If the disk does not take it, the run goes on with the last one,
    unless it must. All ranks hold the same weights, and the first one writes.
    """
    t0, cfg, rt = time.perf_counter(), run.cfg, run.rt
    if run.sharded:
        run.optimizer.consolidate_state_dict(to=0)
    state = run.optimizer.state_dict() if rt.rank == 0 else {"state": {}}
    tensors = [*run.raw_model.parameters()]
    tensors += [t for moments in state["state"].values() for t in moments.values()]
    if rt.any(not all(bool(t.isfinite().all()) for t in tensors)):
        raise ValueError(
            f"the weights after iteration {run.it} are not finite; the last checkpoint of {cfg.out_dir} is "
            "kept as it was: lower learning_rate"
        )
    problem = []
    if rt.rank == 0:
        saved = {
            "model": run.raw_model.state_dict(),
            "optimizer": state["state"],
            "scaler": run.scaler.state_dict(),
            "iter": run.it,
            "row": run.row,
            "config": asdict(cfg),
            "data": identity(run.train_data.meta),
            "rng": torch.get_rng_state(),
        }
        try:
            write_checkpoint(cfg.out_dir, saved, cfg.keep_checkpoints)
        except OSError as error:
            problem = [f"{error}: the last checkpoint, {run.last_saved()}, is kept"]
    if run.sharded:
        run.optimizer._all_state_dicts.clear()  # PyTorch would keep the collected parts
    if problem := rt.gather(problem):
        if must:
            raise OSError(f"{problem[0]}; make room, and the same command goes on from there")
        rt.log(f"{problem[0]}, and the run goes on: make room")
    else:
        run.saved_at, run.row["save_ms"] = run.it, 1000 * (time.perf_counter() - t0)


def load_optimizer(run, saved: dict) -> None:
    """
    AdamW's state from a checkpoint, on any number of ranks: a sharded one takes its part and no more,
    and every tensor is copied from the disk to its place once.
    """
    own = run.optimizer.optim if run.sharded else run.optimizer
    mine = {p for group in own.param_groups for p in group["params"]}
    for i, p in enumerate(p for group in run.optimizer.param_groups for p in group["params"]):
        if p in mine:
            own.state[p] = {key: t.to(p.device, copy=True) for key, t in saved[i].items()}


def find_checkpoint(cfg, data: Shards, rt: Runtime, may_change: set[str]) -> dict | None:
    """
    The checkpoint to continue from. Raises ValueError if out_dir holds another run, one that differs in
    more than the settings of may_change.
    """
    found = checkpoints(cfg.out_dir)
    for path in Path(cfg.out_dir).glob("ckpt_*[0-9]"):
        if not found or path > found[-1]:
            rt.log(f"{path} lacks a file and is left out")
    saved = load_checkpoint(cfg.out_dir, training=True) if found else None
    shared = f"the checkpoint in {cfg.out_dir}, which must be on a disk that all machines share"
    content = f"{data.n_tokens:,} tokens, tokenizer {data.meta['tokenizer_sha256'][:8]}"
    rt.check_agreement({shared: saved["iter"] if saved else None, f"what {cfg.data_dir} holds": content})
    if saved is None:
        return None
    own = asdict(cfg)
    differ = [key for key in own if key not in may_change and saved["config"].get(key) != own[key]]
    if differ:
        what = ", ".join(f"{key}={saved['config'].get(key)} there, {own[key]} here" for key in differ)
        raise ValueError(
            f"{cfg.out_dir} holds a run with other settings ({what}): use the same settings, or "
            "another run_name or out_dir"
        )
    if saved["data"] != identity(data.meta):
        raise ValueError(
            f"{cfg.out_dir} holds a run on other data ({saved['data']['tokenizer']}) than "
            f"{cfg.data_dir}: use the same data, or another run_name or out_dir"
        )
    if cfg.resume == "never":
        raise ValueError(f"{cfg.out_dir} holds a run: choose another run_name, or resume=auto")
    return saved
