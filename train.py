"""
Train one arm, from a laptop to a cluster. The same command again continues a run.

    python train.py config/canonical_toy.py                                        a laptop, minutes
    python train.py config/canonical_1p7b.py --batch_size=8                        one GPU
    torchrun --standalone --nproc_per_node=8 train.py config/canonical_1p7b.py     eight GPUs

An iteration is one optimizer step on tokens_per_iter tokens, however many ranks share them:

    tokens_per_iter = batch_size x block_size x accumulation x ranks

Which tokens they are depends on the iteration alone (data/shards.py), so ranks, micro-batches and
restarts change nothing but the speed.

The run's folder gets ckpt.pt, metrics.jsonl (one row an iteration), config.json and loss.png.
"""

import json
import math
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from config import help_text, load_config, run_cli, split_args
from config.machine import Runtime, leave, setup_runtime
from data.benchmarks import sample_tasks, score_subsets
from data.hugging_face import from_llama
from data.shards import Shards, window_numbers
from data.tokenizers import FILE_NAME as TOKENIZER_FILE
from data.tokenizers import load_encoding, read_spec, token_lengths
from eval import UNCOUNTED, draw_loss, read_metrics, sample, validate
from model import CHECKPOINT, GPT, GPTConfig, load_checkpoint, load_weights

DEFAULT_DATA = "data/pydocs"


@dataclass
class TrainConfig(GPTConfig):
    run_name: str = "run"           # names the run's folder
    out_dir: str = ""               # the run's folder; empty = out/<input_mode>_<run_name>
    data_dir: str = DEFAULT_DATA    # dataset, a folder that python -m data.NAME writes
    tokens_per_iter: int = 2**21    # tokens an optimizer step, over all ranks
    batch_size: int = 16            # windows a rank takes at a time (a micro-batch)
    max_iters: int = 47684          # optimizer steps of the run
    learning_rate: float = 5e-4     # its peak, after warm-up
    warmup_iters: int = 2000        # steps of linear warm-up
    decay_iters: int = 9537         # last steps, of linear decay to zero
    weight_decay: float = 0.1       # AdamW's, on matrices only
    beta1: float = 0.9              # AdamW's mean of gradients
    beta2: float = 0.95             # AdamW's mean of squares
    grad_clip: float = 1.0          # largest norm of the gradient; 0 = no clipping
    log_interval: int = 10          # iterations between log lines
    eval_interval: int = 1000       # iterations between validations; 0 = only the last
    eval_tokens: int = 0            # validation tokens looked at; 0 = all
    save_interval: int = 1000       # iterations between checkpoints; 0 = only the last
    eval_tasks: str = ""            # benchmarks to score as training goes, separated by commas
    eval_tasks_interval: int = 5000 # iterations between their scores; 0 = only the last
    eval_tasks_items: int = 200     # items of each that are scored
    benchmark_dir: str = ""         # folder with TASK.jsonl files; empty = the Hugging Face hub
    init_from: str = ""             # Hugging Face Llama folder whose weights the learned arm starts from
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of the products
    compile: Literal["auto", "True", "False"] = "auto"  # torch.compile the training step
    resume: Literal["auto", "never"] = "auto"  # continue the run in out_dir, or refuse to

    def __post_init__(self):
        if str(self.compile).lower() in ("0", "1", "false", "true"):
            self.compile = str(str(self.compile).lower() in ("1", "true"))
        super().__post_init__()
        self.at_least(1, "tokens_per_iter batch_size max_iters log_interval")
        self.at_least(0, "learning_rate warmup_iters decay_iters weight_decay beta1 beta2 grad_clip")
        self.at_least(0, "eval_interval eval_tokens save_interval eval_tasks_interval")
        self.at_least(1, "eval_tasks_items")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1 and beta2 must be below 1, got {self.beta1} and {self.beta2}")
        if not self.run_name or set(self.run_name) & set("/\\"):
            raise ValueError(f"run_name must be the name of a folder, got {self.run_name!r}")
        self.out_dir = self.out_dir or f"out/{self.input_mode}_{self.run_name}"


MAY_CHANGE = UNCOUNTED | {"max_iters"}  # when a run continues; more iterations prolong it

# -------------------------------------------------------------------------------
# stopping


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
# batches, schedule, step


def accumulation(cfg: TrainConfig, world_size: int) -> int:
    """Micro-batches a rank takes for an iteration. Raises ValueError with the nearest legal sizes."""
    unit = cfg.batch_size * cfg.block_size * world_size
    if cfg.tokens_per_iter % unit != 0:
        below, above = cfg.tokens_per_iter // unit * unit, (cfg.tokens_per_iter // unit + 1) * unit
        raise ValueError(
            f"tokens_per_iter must be a multiple of batch_size x block_size x ranks = "
            f"{cfg.batch_size} x {cfg.block_size} x {world_size} = {unit}, got "
            f"{cfg.tokens_per_iter}; the nearest are {f'{below} and ' if below else ''}{above}"
        )
    return cfg.tokens_per_iter // unit


def get_batch(data: Shards, cfg: TrainConfig, it: int, micro: int, rt: Runtime):
    """Inputs and targets (B, T) of one micro-batch: the ranks' share of iteration it's windows."""
    first = it * (cfg.tokens_per_iter // cfg.block_size)
    first += (micro * rt.world_size + rt.rank) * cfg.batch_size
    windows = data.windows(window_numbers(first, cfg.batch_size, data.n_windows, cfg.seed))
    tokens = torch.from_numpy(windows)  # (B, T + 1)
    if rt.device.type == "cuda":
        tokens = tokens.pin_memory().to(rt.device, non_blocking=True)
    else:
        tokens = tokens.to(rt.device)
    return tokens[:, :-1], tokens[:, 1:]


def lr_at(it: int, cfg: TrainConfig) -> float:
    """
    The rate of iteration it = 0 .. max_iters-1: up in a line, flat, down in a line to zero.

        peak x min((it + 1) / warmup_iters, 1, (max_iters - it) / decay_iters)
    """
    up = (it + 1) / cfg.warmup_iters if cfg.warmup_iters else 1.0
    down = (cfg.max_iters - it) / cfg.decay_iters if cfg.decay_iters else 1.0
    return cfg.learning_rate * min(up, 1.0, down)


def train_step(
    model: nn.Module, optimizer, scaler, batches: list, clip: float, rt: Runtime
) -> tuple[float, float]:
    """
    One optimizer step from the micro-batches of an iteration, functions that return (x, y).
    Returns the mean loss over all ranks and the gradient's norm; if either is not finite, nothing is
    updated. With float16, a norm that is not finite is the scaler's business: it skips the step.
    """
    total = torch.zeros((), device=rt.device)
    for i, get in enumerate(batches):
        if isinstance(model, DistributedDataParallel):
            # DDP reads this flag from the forward pass on, so it is set first: one all-reduce a step.
            model.require_backward_grad_sync = i == len(batches) - 1
        x, y = get()                             # (B, T), (B, T)
        with rt.autocast():
            loss = model(x, y) / len(batches)    # gradients add up; dividing makes their sum a mean
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    mean = rt.sum(total.item())[0] / rt.world_size
    if math.isfinite(mean) and (norm.isfinite() or scaler.is_enabled()):
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm.item()


# -------------------------------------------------------------------------------
# what a run leaves on disk


def state(model: GPT, optimizer, scaler, it: int, row: dict, cfg: TrainConfig, data: Shards) -> dict:
    """All that a run needs to continue as if it had never stopped."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "iter": it,
        "row": row,
        "config": asdict(cfg),
        "data": data_identity(data),
        "rng": torch.get_rng_state(),
    }


def save(path: Path, saved: dict, rt: Runtime) -> None:
    """
    Write a checkpoint whole or not at all: the last one stays until the new one is on the disk.
    Raises ValueError if a number in it is not finite, so that a good one is never replaced by a bad.
    All ranks hold the same weights; the first one writes.
    """
    tensors = list(saved["model"].values())
    tensors += [t for state in saved["optimizer"]["state"].values() for t in state.values()]
    if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
        raise ValueError(
            f"the weights after iteration {saved['iter']} are not finite; {path} is kept as it was: "
            "lower learning_rate"
        )
    if rt.rank != 0:
        return
    unfinished = path.with_suffix(".tmp")
    try:
        with open(unfinished, "wb") as f:
            torch.save(saved, f)
            f.flush()
            os.fsync(f.fileno())
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({error}): the last checkpoint is kept") from error
    os.replace(unfinished, path)


def check_same_run(saved: dict, cfg: TrainConfig, data: Shards) -> None:
    """Raise ValueError if the checkpoint in out_dir is not of this very run."""
    own = asdict(cfg)
    differ = [key for key in own if key not in MAY_CHANGE and saved["config"].get(key) != own[key]]
    if differ:
        what = ", ".join(f"{key}={saved['config'].get(key)} there, {own[key]} here" for key in differ)
        raise ValueError(
            f"{cfg.out_dir} holds a run with other settings ({what}): use the same settings, or "
            "another run_name or out_dir"
        )
    if saved["data"] != data_identity(data):
        raise ValueError(
            f"{cfg.out_dir} holds a run on other data ({saved['data']['tokenizer']}) than "
            f"{cfg.data_dir}: use the same data, or another run_name or out_dir"
        )


def data_identity(data: Shards) -> dict:
    """What makes two datasets the same for a run: the tokenizer and the size of every file."""
    return {
        "tokenizer": data.meta["tokenizer"],
        "tokenizer_sha256": data.meta["tokenizer_sha256"],
        "files": [[file["name"], file["tokens"]] for file in data.meta["files"]],
    }


def cut_metrics(path: Path, it: int) -> None:
    """Keep the rows before iteration it; the checkpoint holds row it itself."""
    rows = [row for row in read_metrics(path) if row["iter"] < it] if it else []
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(unfinished, path)


# -------------------------------------------------------------------------------
# the run


def due(it: int, interval: int, cfg: TrainConfig) -> bool:
    return it == cfg.max_iters or (interval > 0 and it % interval == 0)


def open_data(cfg: TrainConfig, rt: Runtime) -> tuple[Shards, Shards]:
    """The training and validation splits. The default corpus is prepared when it is missing."""
    if cfg.data_dir == DEFAULT_DATA and not Path(cfg.data_dir, "meta.json").exists():
        if rt.rank == 0:
            from data.pydocs import PydocsConfig, prepare_pydocs

            rt.log(f"preparing {cfg.data_dir}, the documentation that comes with Python")
            prepare_pydocs(PydocsConfig(data_dir=cfg.data_dir, vocab_size=cfg.vocab_size))
        if rt.world_size > 1:
            dist.barrier()
    splits = [Shards(cfg.data_dir, name, cfg.vocab_size, cfg.block_size) for name in ("train", "val")]
    return splits[0], splits[1]


def print_header(cfg: TrainConfig, model: GPT, accum: int, train_data: Shards, rt: Runtime) -> None:
    changed = {f.name for f in fields(cfg) if getattr(cfg, f.name) != f.default}
    rt.log("settings (* = not the default)")
    for key, value in asdict(cfg).items():
        rt.log(f"  {'*' if key in changed else ' '} {key} = {value}")
    choice = rt.choice
    epochs = cfg.max_iters * cfg.tokens_per_iter / train_data.n_tokens
    rt.log(
        f"{cfg.input_mode}: {model.n_params():,} parameters, {sum(p.numel() for p in model.wte.parameters()):,} "
        f"of them in the input; {model.flops_per_token():,} FLOPs a token\n"
        f"device {choice.device}, {choice.dtype}, {'compiled' if choice.compile else 'eager'}\n"
        f"tokens/iter = {cfg.batch_size} micro x {cfg.block_size} block x {accum} accumulation "
        f"x {rt.world_size} ranks = {cfg.tokens_per_iter:,}\n"
        f"{cfg.max_iters:,} iterations = {cfg.max_iters * cfg.tokens_per_iter:,} tokens, "
        f"{epochs:.2f} times the {train_data.n_tokens:,} of {cfg.data_dir}"
    )


def train(cfg: TrainConfig, rt: Runtime) -> int:
    """Train from wherever the run stands to max_iters. Returns the process's exit status."""
    # data
    accum = accumulation(cfg, rt.world_size)
    train_data, val_data = open_data(cfg, rt)
    spec = read_spec(cfg.data_dir)
    lengths, encoding = token_lengths(spec), load_encoding(spec)  # bytes of text a token
    subsets = sample_tasks(cfg.eval_tasks, cfg.benchmark_dir, cfg.eval_tasks_items)
    out_dir = Path(cfg.out_dir)
    ckpt_path, metrics_path = out_dir / CHECKPOINT, out_dir / "metrics.jsonl"
    saved = load_checkpoint(out_dir) if ckpt_path.exists() else None
    if saved:
        check_same_run(saved, cfg, train_data)
        if cfg.resume == "never":
            raise ValueError(f"{out_dir} holds a run: choose another run_name, or resume=auto")
        last = (read_metrics(metrics_path) or [{}])[-1]
        if saved["iter"] >= cfg.max_iters and "val_loss" in last:
            rt.log(
                f"{out_dir} is finished ({saved['iter']} iterations, validation loss "
                f"{last['val_loss']:.4f}): python eval.py {out_dir}"
            )
            return 0

    # model and optimizer
    raw_model = GPT(cfg)
    if saved:
        load_weights(raw_model, saved)
    elif cfg.init_from:
        from_llama(raw_model, cfg.init_from)
    raw_model.to(rt.device)
    optimizer = raw_model.optimizer(cfg.learning_rate, (cfg.beta1, cfg.beta2), cfg.weight_decay)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.choice.scaler)
    model = raw_model
    if rt.choice.compile:
        model = torch.compile(model)  # evaluation, sampling and saving use raw_model
    if rt.world_size > 1:
        model = DistributedDataParallel(model)
    it, row = 0, {}  # updates done; metrics of the last one, until they are written
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"])
        it, row = saved["iter"], saved["row"]
    if rt.rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        cut_metrics(metrics_path, it)
        shutil.copy(Path(cfg.data_dir) / TOKENIZER_FILE, out_dir)
        (out_dir / "config.json").write_text(json.dumps(asdict(cfg), indent=2), encoding="utf-8")
    print_header(cfg, raw_model, accum, train_data, rt)
    if saved:
        rt.log(f"continuing {out_dir} after iteration {it}")

    # loop
    stop = Stop()
    bar = tqdm(total=cfg.max_iters, initial=it, unit="iter", disable=None if rt.rank == 0 else True)
    saved_at = it if saved else -1
    try:
        while True:
            # evaluate and record the weights after iteration it
            stopping = rt.any(stop.signal)
            if row and not stopping and due(it, cfg.eval_interval, cfg):
                t0 = time.perf_counter()
                row |= validate(
                    raw_model, val_data, lengths, cfg.batch_size, rt, cfg.eval_tokens, stop
                )
                row["eval_ms"] = 1000 * (time.perf_counter() - t0)
                stopping = rt.any(stop.signal)
                if "val_loss" in row:
                    loss, bpb = row["val_loss"], row["val_bpb"]
                    rt.log(f"iter {it}: validation loss {loss:.4f}, {bpb:.4f} bits per byte")
            if row and not stopping and subsets and due(it, cfg.eval_tasks_interval, cfg):
                scores = score_subsets(raw_model, encoding, subsets, rt)
                row |= scores
                rt.log(f"iter {it}: {', '.join(f'{k} {v:.4g}' for k, v in scores.items())}")
            if row and rt.rank == 0:
                with open(metrics_path, "a", encoding="utf-8") as f:
                    f.write(json.dumps(row) + "\n")

            # stop
            if stopping and it != saved_at and it > 0:
                save(ckpt_path, state(raw_model, optimizer, scaler, it, row, cfg, train_data), rt)
            if stopping or it >= cfg.max_iters:
                break

            # step
            t0 = time.perf_counter()
            lr = lr_at(it, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            batches = [partial(get_batch, train_data, cfg, it, i, rt) for i in range(accum)]
            loss, norm = train_step(model, optimizer, scaler, batches, cfg.grad_clip, rt)
            it += 1
            if not math.isfinite(loss) or not (math.isfinite(norm) or scaler.is_enabled()):
                raise ValueError(
                    f"iteration {it} has loss {loss} and gradient norm {norm}: training stops, the "
                    f"last checkpoint ({f'iteration {saved_at}' if saved_at > 0 else 'none yet'}) is "
                    "kept; lower learning_rate or raise warmup_iters"
                )
            dt = time.perf_counter() - t0
            row = {
                "iter": it, "tokens": it * cfg.tokens_per_iter, "loss": loss, "lr": lr,
                "grad_norm": norm, "dt_ms": 1000 * dt, "tok_per_s": cfg.tokens_per_iter / dt,
            }  # fmt: skip

            # save, before any long evaluation
            if due(it, cfg.save_interval, cfg):
                t0 = time.perf_counter()
                save(ckpt_path, state(raw_model, optimizer, scaler, it, row, cfg, train_data), rt)
                row["save_ms"], saved_at = 1000 * (time.perf_counter() - t0), it

            # log
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if bar.disable and (it % cfg.log_interval == 0 or it == cfg.max_iters):
                left = (cfg.max_iters - it) * dt
                rt.log(
                    f"iter {it}/{cfg.max_iters}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, "
                    f"{row['tok_per_s']:,.0f} tok/s, {left / 60:.1f} min left"
                )
    finally:
        bar.close()
        stop.restore()

    # end
    if stopping:
        kept = "saved: the same command continues" if it else "there is nothing to save"
        rt.log(f"stopped after iteration {it}, {kept}")
        return 128 + (stop.signal or signal.SIGTERM)
    if rt.rank == 0:
        draw_loss(out_dir / "loss.png", {cfg.input_mode: [read_metrics(metrics_path)]})
        text = sample(raw_model, encoding, "", 100, seed=cfg.seed)
        rt.log(f"a sample:\n{text}\n\nin {out_dir}: {CHECKPOINT}, metrics.jsonl, loss.png")
        rt.log(f'next: python eval.py {out_dir} --prompt="The function returns"')
    return 0


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(help_text(TrainConfig, __doc__.strip()))
        return 0
    files, given = split_args(argv)
    cfg = load_config(TrainConfig, files, given)
    rt = setup_runtime(cfg.device, cfg.dtype, cfg.compile)
    try:
        return train(cfg, rt)
    finally:
        leave(rt)


if __name__ == "__main__":
    run_cli(main, "train.py")
