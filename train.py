"""
Train a model, from a laptop to a cluster. The same command again continues a run.

    python train.py                                                                the toy, minutes
    python train.py config/canonical_1p7b.py                                       one GPU
    torchrun --standalone --nproc_per_node=8 train.py config/canonical_1p7b.py     eight GPUs
    python train.py config/canonical_1p7b.py --plan                                what it will take

A step is one update of the weights on tokens_per_iter tokens, however many ranks share them:

    tokens_per_iter = batch_size x block_size x accumulation x ranks

Which tokens they are depends on the step alone (data/shards.py), so ranks, micro-batches and
restarts change the result by no more than float rounding.

The run's folder gets checkpoints, metrics.jsonl (a row per step), config.json and loss.png.
"""

import contextlib
import itertools
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from config import convert, load_config, run_cli, split_args
from config.machine import Runtime, Stop, close_processes, folder_lock, setup_runtime
from config.plan import peak_flops, print_plan
from data import runs, tokenizers
from data.compare import draw, plot_training
from data.pydocs import prepare_pydocs
from data.shards import Shards, identity, window_numbers
from eval import EvalConfig, sample, validate
from model import GPT, GPTConfig, load_weights

DEFAULT_DATA = "data/pydocs"


@dataclass
class Recipe(GPTConfig):
    """With the data, all that decides the result of a run."""

    tokens_per_iter: int = 1024  # tokens per step, over all ranks
    max_iters: int = 3000  # steps of the run
    learning_rate: float = 3e-3  # its peak, after warm-up
    warmup_iters: int = 200  # steps of linear warm-up
    decay_iters: int = 1500  # last steps, of linear decay to zero
    weight_decay: float = 0.1  # AdamW's, on matrices only
    beta1: float = 0.9  # AdamW's mean of gradients
    beta2: float = 0.95  # AdamW's mean of squares
    grad_clip: float = 1.0  # largest norm of the gradient; 0 = no clipping
    init_from: str = ""  # a run whose weights are the start; empty = random weights


@dataclass
class TrainConfig(Recipe):
    """Where, how and how often: all of this may change when a run continues."""

    run_name: str = "toy"  # names the run's folder
    out_dir: str = ""  # the run's folder; empty = out/<input_mode>_<run_name>
    data_dir: str = DEFAULT_DATA  # dataset, a folder that python -m data.NAME writes
    batch_size: int = 8  # windows that a rank takes at a time (a micro-batch)
    log_interval: int = 100  # steps between log lines
    eval_interval: int = 500  # steps between validations; 0 = only the last
    eval_tokens: int = 0  # validation tokens looked at; 0 = all
    save_interval: int = 500  # steps between checkpoints; 0 = only the last
    keep_checkpoints: int = 1  # newest checkpoints that stay on the disk
    activation_checkpointing: bool = False  # save memory: compute each block twice
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of the products
    compile: Literal["auto", "True", "False"] = "auto"  # torch.compile training; auto = on a GPU

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "tokens_per_iter batch_size max_iters log_interval keep_checkpoints")
        self.at_least(0, "learning_rate warmup_iters decay_iters weight_decay beta1 beta2")
        self.at_least(0, "grad_clip eval_interval eval_tokens save_interval")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1 and beta2 must be below 1, got {self.beta1} and {self.beta2}")
        if not self.run_name or set(self.run_name) & set("/\\"):
            raise ValueError(f"run_name must be the name of a folder, got {self.run_name!r}")
        self.out_dir = self.out_dir or f"out/{self.input_mode}_{self.run_name}"


# --- batches, schedule, step ---------------------------------------------------


def accumulation(cfg: TrainConfig, world_size: int) -> int:
    """Micro-batches that a rank takes per step. Raises ValueError with the nearest legal sizes."""
    unit = cfg.batch_size * cfg.block_size * world_size
    if cfg.tokens_per_iter % unit:
        below = cfg.tokens_per_iter // unit * unit
        product = f"{cfg.batch_size} x {cfg.block_size} x {world_size} = {unit}"
        remedy = f"use {f'{below}, ' if below else ''}{below + unit} or another batch_size"
        raise ValueError(
            f"tokens_per_iter must be a multiple of batch_size x block_size x ranks = {product}, "
            f"got {cfg.tokens_per_iter}: {remedy}"
        )
    return cfg.tokens_per_iter // unit


def get_batches(data: Shards, cfg: TrainConfig, step: int, rt: Runtime) -> Iterator[tuple]:
    """
    Inputs and targets (B, T), micro-batch after micro-batch, beginning with those of `step`: B is
    batch_size, T block_size. A thread reads one ahead, so that the step need not wait for the disk.
    """

    def read(micro: int) -> Tensor:
        """This rank's part (B, T + 1) of micro-batch number `micro` of the run."""
        position = (micro * rt.world_size + rt.rank) * cfg.batch_size  # in the shuffled windows
        numbers = window_numbers(position, cfg.batch_size, data.n_windows, cfg.seed)
        return torch.from_numpy(data.windows(numbers))

    first = step * accumulation(cfg, rt.world_size)
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, first)
        for upcoming in itertools.count(first + 1):
            tokens, ahead = ahead.result(), reader.submit(read, upcoming)
            if rt.device.type == "cuda":
                tokens = tokens.pin_memory()  # so that copying it need not be waited for
            tokens = tokens.to(rt.device, non_blocking=True)
            yield tokens[:, :-1], tokens[:, 1:]


def lr_at(step: int, cfg: Recipe) -> float:
    """
    The learning rate of step 0 .. max_iters-1: up in a line, flat, down in a line to zero.

        peak x min((step + 1) / warmup_iters, 1, (max_iters - step) / decay_iters)
    """
    up = (step + 1) / cfg.warmup_iters if cfg.warmup_iters else 1.0
    down = (cfg.max_iters - step) / cfg.decay_iters if cfg.decay_iters else 1.0
    return cfg.learning_rate * min(up, 1.0, down)


def make_optimizer(model: GPT, cfg: Recipe) -> torch.optim.AdamW:
    """AdamW. Matrices decay, the norms' gains do not."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = params[0].device.type in ("cpu", "cuda")  # one kernel for all parameters
    return torch.optim.AdamW(groups, cfg.learning_rate, (cfg.beta1, cfg.beta2), fused=fused)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Iterator[tuple[Tensor, Tensor]],
    accum: int,
    clip: float,
    rt: Runtime,
) -> tuple[float, float]:
    """
    One optimizer step from the next accum micro-batches. Returns the mean loss over all ranks and
    the gradient's norm. If either is not finite, nothing is updated, and the loss returned is nan
    unless only a float16 gradient has overflowed: then the scaler lowers its scale.
    """
    parallel = isinstance(model, DDP)
    total = torch.zeros((), device=rt.device)
    for micro in range(accum):
        if parallel:
            # DDP reads this flag from the forward pass on, so it is set first: one sum per step.
            model.require_backward_grad_sync = micro == accum - 1
        x, y = next(batches)  # (B, T), (B, T)
        with rt.autocast():
            loss = model(x, y) / accum  # gradients add up; dividing makes their sum a mean
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item()
    (loss,) = rt.sum(total.item() / rt.world_size)
    if math.isfinite(loss) and (math.isfinite(norm) or scaler.is_enabled()):
        scaler.step(optimizer)
        scaler.update()
    else:
        loss = math.nan
    optimizer.zero_grad(set_to_none=not parallel)  # DDP's gradients are views of its buckets
    return loss, norm


# --- save and resume -----------------------------------------------------------


def recipe_of(cfg: Recipe) -> dict:
    return {field.name: getattr(cfg, field.name) for field in fields(Recipe)}


def find_checkpoint(cfg: TrainConfig, data: Shards) -> dict | None:
    """
    The checkpoint to continue from, if out_dir holds one. Raises ValueError if it is of another
    run: one with another recipe (except max_iters, which may change) or other data.
    """
    if not runs.checkpoints(cfg.out_dir):
        return None
    saved, own = runs.load_checkpoint(cfg.out_dir, training=True), recipe_of(cfg)
    # A run that is older than a setting was made with the setting's default.
    theirs = {field.name: field.default for field in fields(Recipe)} | saved["recipe"]
    differ = [key for key in own if own[key] != theirs[key] and key != "max_iters"]
    what = [f"{key}={theirs[key]} there, {own[key]} here" for key in differ]
    if saved["data"] != identity(data.meta):
        what.append(f"other data than {cfg.data_dir} has now")
    if what:
        remedy = "use the same, or another run_name or out_dir"
        raise ValueError(f"{cfg.out_dir} holds another run ({', '.join(what)}): {remedy}")
    return saved


def start_from(model: GPT, run_dir: str) -> None:
    """
    Take the weights of another run. Ids that are new here keep the rows drawn for them; end-of-text
    is the last id, then and now.
    """
    weights, own = runs.load_checkpoint(run_dir)["model"], model.state_dict()
    for name in {"wte.weight", "lm_head.weight"} & set(weights) & set(own):
        old = weights[name]  # (V then, C)
        drawn = own[name][len(old) - 1 : -1].cpu()
        weights[name] = torch.cat([old[:-1], drawn, old[-1:]])  # (V now, C)
    load_weights(model, weights)


# --- the run -------------------------------------------------------------------


def is_due(step: int, interval: int, cfg: Recipe) -> bool:
    return step == cfg.max_iters or (interval > 0 and step % interval == 0)


def prepare_default_data(vocab_size: int) -> None:
    if not Path(DEFAULT_DATA, "meta.json").exists():
        prepare_pydocs(DEFAULT_DATA, vocab_size)


def print_header(cfg: TrainConfig, model: GPT, n_tokens: int, rt: Runtime) -> None:
    rt.log("settings (* = not the default)")
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        rt.log(f"  {' ' if value == field.default else '*'} {field.name} = {value}")
    n_input = sum(p.numel() for p in model.wte.parameters())
    tokens = cfg.max_iters * cfg.tokens_per_iter
    way = "compiled" if rt.precision.compile else "eager"
    rt.log(f"""\
{cfg.input_mode}: {model.n_params():,} parameters, {n_input:,} of them in the input
device {rt.device}, {rt.precision.dtype}, {way}; {model.flops_per_token():,} FLOPs per token
tokens/iter = {cfg.batch_size} micro x {cfg.block_size} block x {accumulation(cfg, rt.world_size)} \
accumulation x {rt.world_size} ranks = {cfg.tokens_per_iter:,}
{cfg.max_iters:,} steps = {tokens:,} tokens, {tokens / n_tokens:.2f} epochs of {cfg.data_dir}""")


def train(cfg: TrainConfig, rt: Runtime) -> int:
    """Train from wherever the run stands to max_iters. Returns the process's exit status."""
    accum = accumulation(cfg, rt.world_size)
    rt.check_agreement(asdict(cfg) | {"PyTorch": torch.__version__})  # on all ranks

    # data
    if Path(cfg.data_dir) == Path(DEFAULT_DATA):
        rt.on_first(prepare_default_data, cfg.vocab_size)  # on rank 0; the others wait
    train_data = Shards(cfg.data_dir, "train", cfg.vocab_size, cfg.block_size)
    val_data = Shards(cfg.data_dir, "val", cfg.vocab_size, cfg.block_size)
    spec = tokenizers.read_spec(cfg.data_dir)
    encoding, token_bytes = tokenizers.load_encoding(spec), tokenizers.token_bytes(spec)
    saved = find_checkpoint(cfg, train_data)
    step, metrics = (saved["step"], saved["metrics"]) if saved else (0, {})
    rt.check_agreement({"tokens": train_data.n_tokens, "the step of the last checkpoint": step})

    # model
    with rt.device:  # parameters; .to() moves the buffers too
        spelled = [] if saved else tokenizers.spelled(spec)  # a checkpoint holds its input
        raw_model = GPT(cfg, cfg.activation_checkpointing, spelled).to(rt.device)
    if saved:
        load_weights(raw_model, saved["model"])
    elif cfg.init_from:
        start_from(raw_model, cfg.init_from)
    # One graph of one shape, made at the first call. Evaluation and sampling use raw_model.
    compiled = torch.compile(raw_model, fullgraph=True, dynamic=False)
    model = compiled if rt.precision.compile else raw_model
    if rt.world_size > 1:
        # compile cuts its graph wherever a bucket of gradients is full, so buckets are large (MB).
        model = DDP(model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=512)

    # optimizer
    optimizer = make_optimizer(raw_model, cfg)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.precision.scaler)
    if saved:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])

    # the run's folder
    out_dir = Path(cfg.out_dir)
    recorded = {row["step"] for row in runs.read_metrics(out_dir)}  # all but a killed step
    if step >= cfg.max_iters and step in recorded:
        rt.log(f"{out_dir} is finished: {step} steps; python eval.py {shlex.quote(cfg.out_dir)}")
        return 0
    lock = folder_lock(out_dir) if rt.rank == 0 else contextlib.nullcontext()
    with lock, Stop() as stop:
        print_header(cfg, raw_model, train_data.n_tokens, rt)
        if rt.rank == 0:
            shutil.copy(Path(cfg.data_dir, tokenizers.FILE_NAME), out_dir)
            runs.start_metrics(out_dir, step, asdict(cfg))  # drops rows after this step
        if saved:
            now = lr_at(min(step, cfg.max_iters - 1), cfg)
            rt.log(f"continuing after step {step}, learning rate {metrics['lr']:.2e} -> {now:.2e}")
        to_validate = (raw_model, val_data, token_bytes, rt, cfg.batch_size, cfg.eval_tokens)
        if saved and step not in recorded:  # a kill or stop came before its row
            if is_due(step, cfg.eval_interval, cfg):
                metrics |= validate(*to_validate)
            rt.on_first(runs.append_metrics, out_dir, metrics)

        batches = get_batches(train_data, cfg, step, rt)
        peak = peak_flops(rt.device, rt.precision.dtype)
        first_step, t_first = step, time.perf_counter()
        stopping = False
        while step < cfg.max_iters and not stopping:
            # step
            t0 = time.perf_counter()
            lr = lr_at(step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss, norm = train_step(model, optimizer, scaler, batches, accum, cfg.grad_clip, rt)
            step += 1
            dt = time.perf_counter() - t0
            tok_per_s = cfg.tokens_per_iter / dt
            flops_per_s = raw_model.flops_per_token() * tok_per_s / rt.world_size
            metrics = {
                "step": step,
                "tokens": step * cfg.tokens_per_iter,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "dt_ms": 1000 * dt,
                "tok_per_s": tok_per_s,
                "mfu": flops_per_s / peak if peak else None,
                "memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # 0 without a GPU
            }

            # save; also before an evaluation, which may take long, and when asked to stop
            stopping = rt.any(stop.signal)
            evaluating = is_due(step, cfg.eval_interval, cfg)
            saving = stopping or evaluating or is_due(step, cfg.save_interval, cfg)
            finite = not saving or all(p.isfinite().all() for p in raw_model.parameters())
            if math.isnan(loss) or not finite:
                raise ValueError(
                    f"after step {step} some numbers are not finite (loss {loss}, norm {norm}): "
                    "lower learning_rate or raise warmup_iters; the last checkpoint is kept"
                )
            if saving:
                content = {
                    "model": raw_model.state_dict(),
                    "step": step,
                    "config": asdict(cfg),
                    "recipe": recipe_of(cfg),
                    "data": identity(train_data.meta),
                    "optimizer": optimizer.state_dict()["state"],
                    "scaler": scaler.state_dict(),
                    "metrics": metrics,
                }
                rt.on_first(runs.write_checkpoint, out_dir, content, cfg.keep_checkpoints)

            # evaluate
            if evaluating and not stopping:
                metrics |= validate(*to_validate, stopped=lambda: rt.any(stop.signal))
                stopping = "val_loss" not in metrics  # it was interrupted

            # log; a stopped step's row is written when the run continues
            if not stopping:
                rt.on_first(runs.append_metrics, out_dir, metrics)
                if evaluating or is_due(step, cfg.log_interval, cfg):
                    per_step = (time.perf_counter() - t_first) / (step - first_step)
                    left = per_step * (cfg.max_iters - step)
                    val = f", validation {metrics['val_loss']:.4f}" if evaluating else ""
                    used = f", {metrics['mfu']:.0%} of the peak" if peak else ""
                    rt.log(
                        f"step {step}/{cfg.max_iters}: loss {loss:.4f}{val}, lr {lr:.2e}, norm "
                        f"{norm:.2f}, {tok_per_s:,.0f} tok/s{used}, {left / 60:.1f} min left"
                    )

        if stopping:
            rt.log(f"stopped after step {step}, saved: the same command continues")
            return 128 + (stop.signal or signal.SIGTERM)  # another rank may have got the signal
        if rt.rank == 0:
            curves = {cfg.input_mode: [runs.read_metrics(out_dir)]}
            draw(out_dir / "loss.png", 1, plot_training, curves)
            with rt.autocast():
                short = EvalConfig(max_new_tokens=100, seed=cfg.seed)
                rt.log(f"a sample:\n{sample(raw_model, encoding, '', short)}\n")
            rt.log(f'next: python eval.py {shlex.quote(cfg.out_dir)} --prompt="The function"')
    return 0


def main(argv: list[str]) -> int:
    words, given = split_args([arg for arg in argv if arg != "--plan"], TrainConfig, __doc__)
    cfg = load_config(TrainConfig, given, words)
    if "--plan" in argv:
        ranks = max(1, convert("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), int))
        accumulation(cfg, ranks)  # raises what training would
        print_plan(cfg, ranks)
        return 0
    rt = setup_runtime(cfg.device, cfg.dtype, cfg.compile)
    status = train(cfg, rt)
    close_processes(rt)  # not after an error, when the others may never answer
    return status


if __name__ == "__main__":
    run_cli(main, "train.py")
