"""
Measure trained runs, sample from them, and compare them.

    python eval.py out/canonical_toy                                   loss on the validation split
    python eval.py out/canonical_toy --prompt="The function"           a sample
    python eval.py out/learned_toy out/canonical_toy out/gf2_toy       a table and two figures
    python eval.py out/canonical_1p7b --tasks=paper                    benchmarks
    python eval.py out/canonical_1p7b --export=DIR                     a Hugging Face folder
    python eval.py --published                                         the README's tables

    loss            mean of -log p(token | tokens before), over every validation token once, in nats
    perplexity      e^loss
    bits per byte   the same code length, in bits, over the bytes of the scored text: unlike the
                    loss, it can be compared between tokenizers

Beside the runs stands a bigram model of the same training tokens, which needs no training at all.
Every number also goes to eval.json in the run's folder.

Letters: B batch, T time, C width, V vocabulary.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from config import Settings, load_config, run_cli, split_args
from config.machine import Runtime, close_processes, setup_runtime
from data import benchmarks, runs
from data.benchmarks import Item, Request
from data.bigram import bigram_losses, counted_tokens
from data.compare import compare, print_tasks, read_results, show
from data.hugging_face import export, model_card
from data.shards import Shards, identity
from data.tokenizers import load_encoding, read_spec, token_bytes
from model import GPT, build_model


@dataclass
class EvalConfig(Settings):
    prompt: str = ""  # text to continue; empty = start a document
    max_new_tokens: int = 200  # length of a sample
    temperature: float = 0.8  # 0 = the likeliest token; 1 = as the model says
    top_k: int = 50  # sample from the k likeliest; 0 = from all
    seed: int = 1  # draws the samples
    tasks: str = ""  # benchmarks to score, separated by commas, or "paper" or "all"
    benchmark_dir: str = ""  # folder with TASK.jsonl files; empty = the Hugging Face hub
    limit: int = 0  # first items of each benchmark; 0 = all
    save_items: bool = False  # write the log-probabilities of every item
    after_id: int = 0  # measure only what follows a token from this id on, end-of-text aside
    against: str = ""  # compare with this input or model; empty = that of the first run
    results: str = ""  # file of the losses, a line per run, that is read in place of runs
    data_dir: str = ""  # where the run's dataset lies now; empty = where training found it
    export: str = ""  # folder to write the run to as a Hugging Face Llama
    batch_size: int = 16  # windows at a time
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # tasks: auto = float32
    out_dir: str = "out"  # where the figures go

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "max_new_tokens temperature top_k seed limit after_id")
        self.at_least(1, "batch_size")


# --- loss ----------------------------------------------------------------------


@torch.no_grad()
def token_losses(
    model: GPT, batches: Iterator[tuple[np.ndarray, np.ndarray]], rt: Runtime
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs, targets and -log p(target) of every token that counts, each (n,), batch by batch."""
    for x, y in batches:
        if len(x) == 0:  # this rank has no share in the last batch
            continue
        ids = torch.from_numpy(x).to(rt.device)  # (B, T)
        targets = torch.from_numpy(y).to(rt.device)  # (B, T)
        with rt.autocast():
            losses = model(ids, targets, "none").cpu().numpy()  # (B, T)
        counts = y >= 0
        yield x[counts], y[counts], losses[counts]


def validate(
    model: GPT,
    data: Shards,
    n_bytes: np.ndarray,
    rt: Runtime,
    batch_size: int,
    limit: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """
    The loss in nats and the bits per byte of the first `limit` validation tokens (0 = all), shared
    among the ranks. n_bytes (V,) has the bytes of each token. Empty if stopped() says so meanwhile.
    """
    total = np.zeros(3)  # nats, tokens, bytes
    for batch in data.every_token_once(batch_size, limit, rt.rank, rt.world_size):
        if stopped():
            return {}
        for _, y, losses in token_losses(model, [batch], rt):
            total += [losses.sum(dtype=np.float64), len(y), n_bytes[y].sum()]
    nats, tokens, text = rt.sum(*total)
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / text}


def measures(losses: np.ndarray, n_bytes: int) -> dict[str, float]:
    """Loss, perplexity and bits per byte of tokens (n,) that stand for so many bytes."""
    nats = float(losses.sum(dtype=np.float64))
    loss = nats / len(losses)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": nats / math.log(2) / n_bytes}


def by_frequency(seen: np.ndarray, losses: np.ndarray, least: int = 200) -> list[dict]:
    """
    Mean loss of the tokens that follow an input seen 0, 1-9, 10-99, ... times in training. A range
    with fewer than `least` tokens is joined to the next one, the last to the one before.
    """
    rows, low, high = [], 0, 1
    while low <= seen.max():
        here = losses[(seen >= low) & (seen < high)]
        if len(here) < least and high > seen.max() and rows:
            low = rows.pop()["from"]
            continue
        if len(here) >= least or high > seen.max():
            mean = float(here.mean(dtype=np.float64))
            rows.append({"from": low, "to": high - 1, "n": len(here), "loss": mean})
            low = high
        high *= 10
    return rows


# --- benchmarks ----------------------------------------------------------------


@torch.no_grad()
def score_batch(model: GPT, batch: list[Request], rt: Runtime) -> list[tuple[float, bool]]:
    """
    log p(continuation | context) of each request, and whether each of its tokens is the likeliest.
    The head is computed only where a token of a continuation is predicted:

        position     0    1    2    3    4
        token        c0   c1   c2   a0   (a1)     the last token is only predicted
        predicts     c1   c2   a0   a1            positions 2 and 3 count
    """
    T = max(len(context) + len(continuation) for context, continuation in batch) - 1
    ids = torch.zeros(len(batch), T, dtype=torch.int64)  # attention never looks at padding after it
    places, targets = [], []
    for i, (context, continuation) in enumerate(batch):
        inputs = context + continuation[:-1]
        ids[i, : len(inputs)] = torch.tensor(inputs)
        places += range(i * T + len(context) - 1, i * T + len(inputs))
        targets += continuation
    logp, likeliest = [], []
    with rt.autocast():
        x = model.hidden(ids.to(rt.device)).flatten(0, 1)  # (B T, C)
        for part, target in zip(x[places].split(128), torch.tensor(targets).split(128)):
            target = target.to(rt.device)  # (n,), n at most 128: their logits stay small
            logits = model.lm_head(part).float().log_softmax(-1)  # (n, V)
            logp += logits.gather(1, target[:, None])[:, 0].tolist()
            likeliest += (logits.max(-1).indices == target).tolist()  # the first of equal ones
    scores, end = [], 0
    for _, continuation in batch:
        start, end = end, end + len(continuation)
        greedy = all(likeliest[start:end])
        scores.append((sum(logp[start:end]), greedy))
    return scores


def score(model: GPT, requests: list[Request], name: str, rt: Runtime) -> list[tuple]:
    """The score of each request. Those of similar length go together, and the ranks share them."""
    length = [len(context) + len(continuation) for context, continuation in requests]
    order = sorted(range(len(requests)), key=lambda i: -length[i])
    batches = [order[i : i + 32] for i in range(0, len(order), 32)]
    found = []
    for batch in rt.bar(batches[rt.rank :: rt.world_size], desc=name):
        scores = score_batch(model, [requests[i] for i in batch], rt)
        found += zip(batch, scores)
    return [scores for _, scores in sorted(rt.gather(found))]


# --- samples -------------------------------------------------------------------


def sample(model: GPT, encoding: object, prompt: str, cfg: EvalConfig) -> str:
    """The prompt and its continuation, up to the end of the document. Starts from end-of-text."""
    device, end = model.lm_head.weight.device, encoding.eot_token
    ids = torch.tensor([[end, *encoding.encode_ordinary(prompt)]], device=device)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    options = (cfg.max_new_tokens, cfg.temperature, cfg.top_k, end, generator)
    out = model.generate(ids, *options)[0, 1:].tolist()
    if out and out[-1] == end:
        out.pop()
    return encoding.decode(out)


# --- a run ---------------------------------------------------------------------


def measure(run: str, saved: dict, cfg: EvalConfig, rt: Runtime) -> dict:
    """The losses of a run, and of a bigram model, on its validation split."""
    model = build_model(saved, rt.device)
    data_dir = cfg.data_dir or saved["config"]["data_dir"]
    if not Path(data_dir).exists():
        raise ValueError(f"{data_dir}, the dataset of {run}, is not there: say where by --data_dir")
    V, T = model.cfg.vocab_size, model.cfg.block_size
    train_data = Shards(data_dir, "train", V, T)
    val_data = Shards(data_dir, "val", V, T)
    if identity(train_data.meta) != saved["data"]:
        raise ValueError(f"{run} was trained on other data than {data_dir} holds: use --data_dir")
    batches = val_data.every_token_once(cfg.batch_size, 0, rt.rank, rt.world_size)
    scored = list(token_losses(model, rt.bar(batches, desc=run), rt))
    parts = rt.gather(scored)
    x, y, losses = (np.concatenate(part) for part in zip(*parts))
    if cfg.after_id:
        here = (x >= cfg.after_id) & (x < V - 1)
        if not here.any():
            raise ValueError(f"no validation token follows an id from {cfg.after_id} to {V - 2}")
        x, y, losses = x[here], y[here], losses[here]
    train_ids = counted_tokens(train_data)
    n_bytes = int(token_bytes(read_spec(data_dir))[y].sum())
    rows = [row for row in runs.read_metrics(run) if "val_loss" in row]
    return {
        "n_params": model.n_params(),
        "n_input_params": sum(p.numel() for p in model.wte.parameters()),
        "train_tokens": saved["step"] * saved["config"]["tokens_per_iter"],
        "val_tokens": len(y),
        **measures(losses, n_bytes),
        "bigram": measures(bigram_losses(train_ids, x, y, V), n_bytes),
        "by_frequency": by_frequency(np.bincount(train_ids, minlength=V)[x], losses),
        "curve": [{key: row[key] for key in ("step", "tokens", "val_loss")} for row in rows],
    }


def task_requests(run: str, saved: dict, items: dict[str, list[Item]]) -> dict[str, tuple]:
    """Of each task, the requests in the run's tokens, and how many contexts were cut."""
    encoding = load_encoding(runs.read_tokenizer(run, saved))
    T = saved["config"]["block_size"]
    return {name: benchmarks.make_requests(items[name], name, encoding, T) for name in items}


def benchmark(
    run: str, saved: dict, items: dict, requests: dict, cfg: EvalConfig, rt: Runtime
) -> dict:
    """The metrics of a run on each task, from its items and task_requests."""
    model, results = build_model(saved, rt.device), {}
    for name, task_items in items.items():
        task, (pairs, n_cut) = benchmarks.TASKS[name], requests[name]
        scores = iter(score(model, pairs, name, rt))
        by_item = [[next(scores) for _ in item.pairs] for item in task_items]
        lls = [[ll for ll, _ in scored] for scored in by_item]
        greedy = [[likeliest for _, likeliest in scored] for scored in by_item]
        results[name] = benchmarks.task_metrics(task, task_items, lls, greedy) | {
            "limited": len(task_items) < task.size,
            "requests_cut": n_cut,
            "source": cfg.benchmark_dir or f"{task.hub_id}@{task.revision}",
        }
        if cfg.save_items and rt.rank == 0:
            text = ""
            for i, item in enumerate(task_items):
                row = {"item": i, "gold": item.gold, "ll": lls[i], "greedy": greedy[i]}
                text += json.dumps(row) + "\n"
            runs.write_or_warn(Path(run, f"items_{name}.jsonl"), text)
    return {"tasks": results}


# --- what to do ----------------------------------------------------------------


def print_sample(run: str, saved: dict, cfg: EvalConfig, rt: Runtime) -> None:
    model = build_model(saved, rt.device)
    encoding = load_encoding(runs.read_tokenizer(run, saved))
    prompt = os.fsencode(cfg.prompt).decode("utf-8", errors="replace")  # whatever the locale
    with rt.autocast():
        print(f"--- {run}, seed {cfg.seed}\n{sample(model, encoding, prompt, cfg)}")


def export_run(run: str, saved: dict, cfg: EvalConfig, rt: Runtime) -> None:
    """Write a run as a Hugging Face Llama; a fixed code becomes the table of all its vectors."""
    model = build_model(saved)
    with torch.no_grad():
        table = {"wte.weight": model.wte(torch.arange(model.cfg.vocab_size))}  # (V, C)
    spec = runs.read_tokenizer(run, saved)
    card = model_card(runs.input_name(saved["config"]), saved)
    export(model.state_dict() | table, saved["config"], spec, card, cfg.export)
    print(f"exported: {cfg.export}, for transformers' AutoModelForCausalLM and AutoTokenizer")


def main(argv: list[str]) -> None:
    words, given = split_args([a for a in argv if a != "--published"], EvalConfig, __doc__)
    cfg = load_config(EvalConfig, given)
    if "--published" in argv:
        words = sorted(map(str, Path("data/results").glob("*.jsonl")))
    if stored := [Path(word) for word in words if word.endswith(".jsonl")]:
        for path in stored:
            print(f"\n{path.stem}\n")
            show(read_results(path), cfg.against, f"{path.stem}_", cfg.out_dir)
        return
    names = list({Path(run).resolve(): run for run in words}.values())  # each once
    if not names:
        raise ValueError("name at least one run: python eval.py out/canonical_toy")
    if ("prompt" in given) + bool(cfg.export) + bool(cfg.tasks) > 1:
        raise ValueError("prompt, export and tasks are three things to do: ask for one at a time")
    if cfg.export and len(names) > 1:
        raise ValueError(f"export takes one run at a time, got {len(names)}")
    tasks = benchmarks.find_tasks(cfg.tasks) if cfg.tasks else []
    rt = setup_runtime(cfg.device, "float32" if tasks and cfg.dtype == "auto" else cfg.dtype)
    saved = {run: runs.load_checkpoint(run) for run in names}
    if "prompt" in given or cfg.export:
        for run in names:
            rt.on_first(export_run if cfg.export else print_sample, run, saved[run], cfg, rt)
        return close_processes(rt)
    results = [runs.describe(run, saved[run]) for run in names]
    compare(results, cfg.against)  # what does not fit is said before anything is scored
    items = {t.name: benchmarks.read_items(t, cfg.benchmark_dir, cfg.limit) for t in tasks}
    requests = {run: task_requests(run, saved[run], items) for run in names if tasks}
    for run, result in zip(names, results):
        if tasks:
            result |= benchmark(run, saved[run], items, requests[run], cfg, rt)
        else:
            result |= measure(run, saved[run], cfg, rt)
    if rt.rank == 0:
        print_tasks(results, tasks) if tasks else show(results, cfg.against, "", cfg.out_dir)
        for result in results if tasks or not cfg.after_id else []:  # eval.json holds no part
            runs.write_results(result["run"], result)
        if cfg.results:
            text = "".join(json.dumps(result) + "\n" for result in results)
            runs.write_or_warn(Path(cfg.results), text)
    close_processes(rt)


if __name__ == "__main__":
    run_cli(main, "eval.py")
