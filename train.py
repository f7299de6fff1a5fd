"""
Train one arm, from a laptop to a cluster. The same command again continues a run.

    python train.py config/canonical_toy.py                                        a laptop, minutes
    python train.py config/canonical_1p7b.py --batch_size=8                        one GPU
    torchrun --standalone --nproc_per_node=8 train.py config/canonical_1p7b.py     eight GPUs

An iteration is one optimizer step on tokens_per_iter tokens, however many ranks share them:

    tokens_per_iter = batch_size x block_size x accumulation x ranks

Which tokens they are depends on the iteration alone (data/shards.py), so ranks, micro-batches and
restarts change nothing but the speed.

The run's folder gets checkpoints, metrics.jsonl (one row an iteration), config.json and loss.png.
"""

import contextlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from config import convert, help_text, load_config, run_cli, split_args
from config.checkpoints import checkpoints, find_checkpoint, load_optimizer, save
from config.machine import Runtime, Stop, claim, code_digest, leave, setup_runtime
from config.plan import peak_flops, print_plan
from data.benchmarks import pack_items, sample_tasks, score_subsets
from data.hugging_face import from_llama
from data.pydocs import PydocsConfig, prepare_pydocs
from data.shards import Shards, window_numbers
from data.tokenizers import FILE_NAME as TOKENIZER_FILE
from data.tokenizers import load_encoding, read_spec, token_lengths
from eval import UNCOUNTED, draw_loss, read_metrics, sample, validate, write_text
from model import GPT, GPTConfig, load_weights

DEFAULT_DATA = "data/pydocs"
METRICS = "metrics.jsonl"


@dataclass
class TrainConfig(GPTConfig):
    run_name: str = "run"           # names the run's folder
    out_dir: str = ""               # the run's folder; empty = out/<input_mode>_<run_name>
    data_dir: str = DEFAULT_DATA    # dataset, a folder that python -m data.NAME writes
    tokens_per_iter: int = 2**21    # tokens an optimizer step, over all ranks
    batch_size: int = 8             # windows a rank takes at a time (a micro-batch)
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
    keep_checkpoints: int = 1       # newest checkpoints that stay on the disk
    eval_tasks: str = ""            # benchmarks to score as training goes, separated by commas
    eval_tasks_interval: int = 5000 # iterations between their scores; 0 = only the last
    eval_tasks_items: int = 200     # items of each that are scored
    benchmark_dir: str = ""         # folder with TASK.jsonl files; empty = the Hugging Face hub
    shard_optimizer: bool = False   # each rank keeps a part of AdamW's state, not all (arXiv:1910.02054)
    activation_checkpointing: bool = False  # save memory: compute each block again in the backward pass
    init_from: str = ""             # Hugging Face Llama folder whose weights the learned arm starts from
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of the products
    compile: Literal["auto", "True", "False"] = "auto"  # torch.compile the training step
    resume: Literal["auto", "never"] = "auto"  # continue the run in out_dir, or refuse to
    plan: bool = False  # only print memory, time and disk of the run; the variable WORLD_SIZE says how many ranks

    def __post_init__(self):
        if str(self.compile).lower() in ("0", "1", "false", "true"):
            self.compile = str(str(self.compile).lower() in ("1", "true"))
        super().__post_init__()
        self.at_least(1, "tokens_per_iter batch_size max_iters log_interval")
        self.at_least(0, "learning_rate warmup_iters decay_iters weight_decay beta1 beta2 grad_clip")
        self.at_least(0, "eval_interval eval_tokens save_interval eval_tasks_interval")
        self.at_least(1, "eval_tasks_items keep_checkpoints")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1 and beta2 must be below 1, got {self.beta1} and {self.beta2}")
        if not self.run_name or set(self.run_name) & set("/\\"):
            raise ValueError(f"run_name must be the name of a folder, got {self.run_name!r}")
        self.out_dir = self.out_dir or f"out/{self.input_mode}_{self.run_name}"


MAY_CHANGE = UNCOUNTED | {"max_iters"}  # when a run continues; more iterations prolong it

# -------------------------------------------------------------------------------
# batches, schedule, step


def accumulation(cfg: TrainConfig, world_size: int) -> int:
    """Micro-batches a rank takes for an iteration. Raises ValueError with the nearest legal sizes."""
    if world_size < 1:
        raise ValueError(f"WORLD_SIZE must be at least 1, got {world_size}")
    unit = cfg.batch_size * cfg.block_size * world_size
    if cfg.tokens_per_iter % unit != 0:
        below, above = cfg.tokens_per_iter // unit * unit, (cfg.tokens_per_iter // unit + 1) * unit
        windows, rest = divmod(cfg.tokens_per_iter, cfg.block_size * world_size)
        fits = [n for n in range(1, cfg.batch_size) if windows % n == 0 and windows and not rest]
        raise ValueError(
            f"tokens_per_iter must be a multiple of batch_size x block_size x ranks = "
            f"{cfg.batch_size} x {cfg.block_size} x {world_size} = {unit}, got "
            f"{cfg.tokens_per_iter}; the nearest are {f'{below} and ' if below else ''}{above}"
            + (f"; or batch_size={fits[-1]}" if fits else "")
        )
    return cfg.tokens_per_iter // unit


def get_batch(data: Shards, cfg: TrainConfig, it: int, micro: int, rt: Runtime) -> Tensor:
    """The windows (B, T + 1) of one micro-batch: this rank's share of iteration it's."""
    first = it * (cfg.tokens_per_iter // cfg.block_size)
    first += (micro * rt.world_size + rt.rank) * cfg.batch_size
    return torch.from_numpy(data.windows(window_numbers(first, cfg.batch_size, data.n_windows, cfg.seed)))


class Batches:
    """
    Inputs and targets (B, T), micro-batch after micro-batch from iteration it on. A thread reads the
    next one while this one is at work, so that a slow disk costs nothing until it is the slowest part.
    """

    def __init__(self, data: Shards, cfg: TrainConfig, it: int, rt: Runtime):
        accum = accumulation(cfg, rt.world_size)
        places = ((i, micro) for i in itertools.count(it) for micro in range(accum))
        reader = ThreadPoolExecutor(1)
        self.submit = lambda: reader.submit(get_batch, data, cfg, *next(places), rt)
        self.ahead, self.rt, self.waited_s = self.submit(), rt, 0.0

    def __next__(self) -> tuple[Tensor, Tensor]:
        t0 = time.perf_counter()
        tokens = self.ahead.result()
        self.waited_s += time.perf_counter() - t0
        self.ahead = self.submit()
        if self.rt.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that copying it need not be waited for
        tokens = tokens.to(self.rt.device, non_blocking=True)  # (B, T + 1)
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
    model: nn.Module, optimizer, scaler, batches: Iterator, accum: int, clip: float, rt: Runtime
) -> tuple[float, float]:
    """
    One optimizer step from the next accum micro-batches. Returns the mean loss over all ranks and the
    gradient's norm; if either is not finite, nothing is updated. With float16, a norm that is not
    finite is the scaler's business: it skips the step.
    """
    total = torch.zeros((), device=rt.device)
    for micro in range(accum):
        if isinstance(model, DistributedDataParallel):
            # DDP reads this flag from the forward pass on, so it is set first: one all-reduce a step.
            model.require_backward_grad_sync = micro == accum - 1
        x, y = next(batches)             # (B, T), (B, T)
        with rt.compute():
            loss = model(x, y) / accum   # gradients add up; dividing makes their sum a mean
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
# a run: what it holds, and what it leaves on disk


@dataclass
class Run:
    """All that a run has in hand while it is at work."""

    cfg: TrainConfig
    rt: Runtime
    train_data: Shards
    val_data: Shards
    encoding: object      # the tokenizer, a tiktoken.Encoding
    lengths: np.ndarray   # bytes of text that each token stands for
    subsets: list         # benchmarks to score as training goes
    raw_model: GPT        # evaluation, sampling and saving use this one
    model: nn.Module      # the same weights, compiled and synchronised among ranks
    optimizer: torch.optim.Optimizer
    sharded: bool         # each rank has a part of the optimizer's state
    scaler: torch.amp.GradScaler
    it: int = 0           # optimizer steps done
    row: dict = field(default_factory=dict)    # the metrics of the last one
    unwritten: list = field(default_factory=list)  # rows that are not in metrics.jsonl yet
    saved_at: int = -1    # the step that the checkpoint on disk is of

    def due(self, interval: int) -> bool:
        return self.it == self.cfg.max_iters or (interval > 0 and self.it % interval == 0)

    def last_saved(self) -> str:
        return f"iteration {self.saved_at}" if self.saved_at > 0 else "none yet"


def where_time_went(rows: list[dict]) -> str:
    """The shares of the time that rows of metrics.jsonl account for."""
    data, steps, evals, saves = (
        sum(row.get(key) or 0 for row in rows) for key in ("data_ms", "dt_ms", "eval_ms", "save_ms")
    )
    parts = {"steps": steps - data, "waiting for data": data, "evaluation": evals, "checkpoints": saves}
    return ", ".join(f"{part} {ms / (steps + evals + saves):.1%}" for part, ms in parts.items())


def cut_metrics(path: Path, it: int) -> None:
    """Keep the rows before iteration it; the checkpoint holds row it itself."""
    rows = [row for row in read_metrics(path) if row["iter"] < it] if it else []
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows to metrics.jsonl and empty the list. A full disk leaves both as they were."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError:
        os.truncate(path, size)
    else:
        rows.clear()


# -------------------------------------------------------------------------------
# set-up


def open_data(cfg: TrainConfig, rt: Runtime) -> tuple[Shards, Shards]:
    """The training and validation splits. The default corpus is prepared when it is missing."""
    missing = not Path(cfg.data_dir, "meta.json").exists()
    if Path(cfg.data_dir) == Path(DEFAULT_DATA) and any(rt.gather([missing])):
        if rt.rank == 0:
            rt.log(f"preparing {cfg.data_dir}, the documentation that comes with Python")
            prepare_pydocs(PydocsConfig(data_dir=cfg.data_dir, vocab_size=cfg.vocab_size))
        rt.gather([])  # the others wait
    splits = [Shards(cfg.data_dir, name, cfg.vocab_size, cfg.block_size) for name in ("train", "val")]
    return splits[0], splits[1]


def set_up(cfg: TrainConfig, rt: Runtime) -> Run:
    """Everything in hand, at the start or where the last checkpoint stands. Writes nothing."""
    accumulation(cfg, rt.world_size)
    rt.check_agreement(asdict(cfg) | {"code": code_digest(), "PyTorch": torch.__version__})
    rt.check_attention(cfg.n_embd // cfg.n_head)

    # data
    train_data, val_data = open_data(cfg, rt)
    spec = read_spec(cfg.data_dir)
    encoding, lengths = load_encoding(spec), token_lengths(spec)
    subsets = sample_tasks(cfg.eval_tasks, cfg.benchmark_dir, cfg.eval_tasks_items)
    for task, items in subsets:  # what cannot be scored is said now
        pack_items(encoding, items, task.name, cfg.block_size)
    saved = find_checkpoint(cfg, train_data, rt, MAY_CHANGE)

    # model
    with rt.device:  # built where it computes
        raw_model = GPT(cfg)
    raw_model.activation_checkpointing = cfg.activation_checkpointing
    if saved:
        load_weights(raw_model, saved)
    elif cfg.init_from:
        from_llama(raw_model, cfg.init_from)
    # One graph of one shape: evaluation and sampling use raw_model, which stays as it is.
    model = torch.compile(raw_model, fullgraph=True, dynamic=False) if rt.choice.compile else raw_model
    if rt.world_size > 1:
        model = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)

    # optimizer
    sharded = cfg.shard_optimizer and rt.world_size > 1
    optimizer = raw_model.optimizer(cfg.learning_rate, (cfg.beta1, cfg.beta2), cfg.weight_decay, sharded)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.choice.scaler)
    run = Run(cfg, rt, train_data, val_data, encoding, lengths, subsets,
              raw_model, model, optimizer, sharded, scaler)  # fmt: skip
    if saved:
        load_optimizer(run, saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"])
        run.it, run.row, run.saved_at = saved["iter"], saved["row"], saved["iter"]
    return run


def print_header(run: Run) -> None:
    cfg, model, choice, log = run.cfg, run.raw_model, run.rt.choice, run.rt.log
    log("settings (* = not the default)")
    for setting in fields(cfg):
        value = getattr(cfg, setting.name)
        log(f"  {' ' if value == setting.default else '*'} {setting.name} = {value}")
    n_input, tokens = sum(p.numel() for p in model.wte.parameters()), cfg.max_iters * cfg.tokens_per_iter
    log(f"{cfg.input_mode}: {model.n_params():,} parameters, {n_input:,} of them in the input; "
        f"{model.flops_per_token():,} FLOPs a token")  # fmt: skip
    peak = peak_flops(run.rt.device, choice.dtype)
    log(f"device {choice.device}, {choice.dtype}, {'compiled' if choice.compile else 'eager'}, "
        f"{'flash' if choice.flash else 'any'} attention, peak "
        f"{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}")  # fmt: skip
    log(f"tokens/iter = {cfg.batch_size} micro x {cfg.block_size} block x "
        f"{accumulation(cfg, run.rt.world_size)} accumulation x {run.rt.world_size} ranks "
        f"= {cfg.tokens_per_iter:,}")  # fmt: skip
    log(f"{cfg.max_iters:,} iterations = {tokens:,} tokens, {tokens / run.train_data.n_tokens:.2f} times "
        f"the {run.train_data.n_tokens:,} of {cfg.data_dir}")  # fmt: skip
    if run.it:
        log(f"continuing {cfg.out_dir} after iteration {run.it}")


# -------------------------------------------------------------------------------
# the loop


def evaluate(run: Run, stop: Stop) -> None:
    """Add to the row what is due after iteration it. A stop in between leaves it out."""
    cfg, row, log, t0, n_before = run.cfg, run.row, run.rt.log, time.perf_counter(), len(run.row)
    if run.due(cfg.eval_interval):
        row |= validate(
            run.raw_model, run.val_data, run.lengths, cfg.batch_size, run.rt, cfg.eval_tokens, stop
        )
        if "val_loss" in row:
            log(f"iter {run.it}: validation loss {row['val_loss']:.4f}, {row['val_bpb']:.4f} bits per byte")
    if run.subsets and run.due(cfg.eval_tasks_interval) and not run.rt.any(stop.signal):
        scores = score_subsets(run.raw_model, run.encoding, run.subsets, run.rt)
        row |= scores
        log(f"iter {run.it}: {', '.join(f'{key} {value:.4g}' for key, value in scores.items())}")
    if len(row) > n_before:
        row["eval_ms"] = 1000 * (time.perf_counter() - t0)


def one_iteration(run: Run, batches: Batches) -> None:
    """Iteration it: its rate, its windows, its step; then it is one more, and its row is new."""
    cfg, rt, t0, waited_s = run.cfg, run.rt, time.perf_counter(), batches.waited_s
    lr = lr_at(run.it, cfg)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    accum = accumulation(cfg, rt.world_size)
    loss, norm = train_step(run.model, run.optimizer, run.scaler, batches, accum, cfg.grad_clip, rt)
    run.it += 1
    if not math.isfinite(loss) or not (math.isfinite(norm) or run.scaler.is_enabled()):
        raise ValueError(
            f"iteration {run.it} has loss {loss} and gradient norm {norm}: training stops, the last "
            f"checkpoint ({run.last_saved()}) is kept; lower learning_rate or raise warmup_iters"
        )
    dt, peak = time.perf_counter() - t0, peak_flops(rt.device, rt.choice.dtype)
    flops_per_s = run.raw_model.flops_per_token() * cfg.tokens_per_iter / dt / rt.world_size
    run.row = {
        "iter": run.it, "tokens": run.it * cfg.tokens_per_iter, "loss": loss, "lr": lr,
        "grad_norm": norm, "dt_ms": 1000 * dt, "data_ms": 1000 * (batches.waited_s - waited_s),
        "tok_per_s": cfg.tokens_per_iter / dt, "mfu": flops_per_s / peak if peak else None,
        "memory_gb": rt.peak_memory_gb(),
    }  # fmt: skip


def loop(run: Run, stop: Stop, bar: tqdm) -> bool:
    """Train to max_iters. Returns whether it was asked to stop before."""
    cfg, rt = run.cfg, run.rt
    batches = Batches(run.train_data, cfg, run.it, rt)
    while True:
        # evaluate the weights after iteration it, and record them
        if run.row and not rt.any(stop.signal):
            evaluate(run, stop)
        stopping = rt.any(stop.signal)
        if run.row and rt.rank == 0:
            run.unwritten.append(run.row)
            append_rows(Path(cfg.out_dir, METRICS), run.unwritten)

        # end
        if stopping and run.it > max(run.saved_at, 0):
            save(run, must=True)
        if stopping or run.it >= cfg.max_iters:
            return stopping

        # step
        one_iteration(run, batches)

        # save, before any long evaluation
        if run.due(cfg.save_interval):
            save(run, must=run.it == cfg.max_iters)

        # log
        row = run.row
        bar.update()
        bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        if bar.disable and run.due(cfg.log_interval):
            left = (cfg.max_iters - run.it) * row["dt_ms"] / 60_000
            used = f", {row['mfu']:.0%} of the peak" if row["mfu"] else ""
            rt.log(
                f"iter {run.it}/{cfg.max_iters}: loss {row['loss']:.4f}, lr {row['lr']:.2e}, "
                f"norm {row['grad_norm']:.2f}, {row['tok_per_s']:,.0f} tok/s{used}, {left:.1f} min left"
            )


def train(cfg: TrainConfig, rt: Runtime) -> int:
    """Train from wherever the run stands to max_iters. Returns the process's exit status."""
    run = set_up(cfg, rt)
    out_dir, quoted = Path(cfg.out_dir), shlex.quote(cfg.out_dir)
    with claim(out_dir) if rt.rank == 0 else contextlib.nullcontext():
        last = (read_metrics(out_dir / METRICS) or [{}])[-1]
        if run.it >= cfg.max_iters and "val_loss" in last:
            rt.log(f"{out_dir} is finished ({run.it} iterations, validation loss {last['val_loss']:.4f})")
        else:
            if rt.rank == 0:
                cut_metrics(out_dir / METRICS, run.it)
                shutil.copy(Path(cfg.data_dir) / TOKENIZER_FILE, out_dir)
                write_text(out_dir / "config.json", json.dumps(asdict(cfg), indent=2))
            print_header(run)
            stop = Stop()
            bar = rt.bar(total=cfg.max_iters, initial=run.it, unit="iter")
            try:
                stopped = loop(run, stop, bar)
            finally:
                bar.close()
                stop.restore()
            if stopped:
                kept = "saved: the same command continues" if run.it else "there is nothing to save"
                rt.log(f"stopped after iteration {run.it}, {kept}")
                return 128 + (stop.signal or signal.SIGTERM)
        if rt.rank == 0:
            rows = read_metrics(out_dir / METRICS)
            rt.log(f"time: {where_time_went(rows)}")
            draw_loss(out_dir / "loss.png", {cfg.input_mode: [rows]})
            text = sample(run.raw_model, run.encoding, "", 100, seed=cfg.seed)
            rt.log(f"a sample:\n{text}\n\nin {out_dir}: {checkpoints(out_dir)[-1].name}, {METRICS}, loss.png")
            rt.log(f'next: python eval.py {quoted} --prompt="The function returns"')
    return 0


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(help_text(TrainConfig, __doc__.strip()))
        return 0
    files, given = split_args(argv)
    cfg = load_config(TrainConfig, files, given)
    if cfg.plan:
        ranks = convert("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), int)
        accumulation(cfg, ranks)  # raises what training would
        if os.environ.get("RANK", "0") == "0":
            print_plan(cfg, ranks)
        return 0
    rt = setup_runtime(cfg.device, cfg.dtype, cfg.compile)
    status = train(cfg, rt)
    leave(rt)  # not after an error, when the others may never answer
    return status


if __name__ == "__main__":
    run_cli(main, "train.py")
