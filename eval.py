"""
Measure trained runs, sample from them, and compare the arms.

    python eval.py out/canonical_toy                                   loss on the validation split
    python eval.py out/canonical_toy --prompt="The function returns"   a sample
    python eval.py out/learned_toy out/canonical_toy out/gf2_toy       a table, and compare.png
    python eval.py out/canonical_1p7b --tasks=paper                    benchmarks (data/benchmarks.py)
    python eval.py out/canonical_1p7b --export=DIR                     a Hugging Face folder

    loss            mean of -log p(token | tokens before), over every validation token once, in nats
    perplexity      e^loss
    bits per byte   the same code length, in bits, over the bytes of the scored text: unlike the loss,
                    it can be compared between tokenizers

Beside the runs stands a bigram model of the same training tokens, which needs no training at all.
Every number also goes to eval.json in the run's folder.

Letters: B batch, T time, V vocabulary.
"""

import hashlib
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from config import Settings, help_text, load_config, run_cli, split_args, try_json
from config.checkpoints import load_checkpoint
from config.machine import Runtime, leave, setup_runtime
from data.benchmarks import PAPER, Item, Task, find_tasks, read_items, score_items, task_metrics
from data.bigram import bigram_losses, counted_tokens
from data.hugging_face import export, model_card
from data.shards import Shards, identity
from data.tokenizers import digest, load_encoding, read_spec, token_lengths
from model import GPT, build_model

# Settings of a run that do not change what it computes, but for dtype, which belongs to the machine.
UNCOUNTED = {
    "run_name", "out_dir", "data_dir", "batch_size", "log_interval", "eval_interval", "eval_tokens",
    "save_interval", "eval_tasks", "eval_tasks_interval", "eval_tasks_items", "benchmark_dir", "device",
    "dtype", "compile", "resume", "keep_checkpoints", "shard_optimizer", "activation_checkpointing", "plan",
}  # fmt: skip


@dataclass
class EvalConfig(Settings):
    prompt: str = ""             # text to continue; empty = start a document
    max_new_tokens: int = 200    # length of a sample
    n_samples: int = 1           # samples of the prompt
    temperature: float = 0.8     # 0 = the likeliest token; 1 = as the model says
    top_k: int = 50              # sample from the k likeliest; 0 = from all
    seed: int = 1                # draws the samples
    tasks: str = ""              # benchmarks to score, separated by commas, or "paper" or "all"
    benchmark_dir: str = ""      # folder with TASK.jsonl files; empty = the Hugging Face hub
    limit: int = -1              # first items of each benchmark; -1 = all
    save_items: bool = False     # write the log-probabilities of every item
    data_dir: str = ""           # where the run's dataset lies now; empty = where training found it
    export: str = ""             # folder to write the run to as a Hugging Face Llama
    batch_size: int = 16         # windows at a time
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    out_dir: str = "out"         # where compare.png and tasks.png go

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "max_new_tokens temperature top_k seed")
        self.at_least(1, "n_samples batch_size")
        if self.limit == 0 or self.limit < -1:
            raise ValueError(f"limit must be at least 1, or -1 for all items, got {self.limit}")


# -------------------------------------------------------------------------------
# loss


@torch.no_grad()
def token_losses(
    model: GPT, batches: Iterator[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs, targets and -log p(target) of every token that counts, each (n,), batch by batch."""
    device = model.lm_head.weight.device
    for x, y in batches:
        if len(x) == 0:
            continue
        ids, targets = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)  # (B, T)
        losses = model(ids, targets, "none").cpu().numpy()                             # (B, T)
        counts = y >= 0
        yield x[counts], y[counts], losses[counts]


def validate(
    model: GPT, data: Shards, lengths: np.ndarray, batch_size: int, rt: Runtime, limit: int, stop
) -> dict:
    """
    Validation loss over the first `limit` tokens (0 = all), shared among the ranks of rt: the dict
    {"val_loss", "val_bpb"}, or an empty one if stop was asked for on any rank in between.
    """
    total = np.zeros(3)  # nats, tokens, bytes
    for batch in data.every_token_once(batch_size, limit, rt.rank, rt.world_size):
        if rt.any(stop.signal):
            return {}
        with rt.compute():
            for _, y, losses in token_losses(model, [batch]):
                total += [losses.sum(dtype=np.float64), len(y), lengths[y].sum()]
    nats, n_tokens, n_bytes = rt.sum(*total)
    return {"val_loss": nats / n_tokens, "val_bpb": nats / math.log(2) / n_bytes}


# -------------------------------------------------------------------------------
# benchmarks


def run_tasks(
    run_dir: str, tasks: list[Task], items: dict[str, list[Item]], cfg: EvalConfig, rt: Runtime
) -> dict:
    """Score tasks; a dict of their metrics. What is done is kept if a later task fails."""
    saved = load_checkpoint(run_dir)
    model, encoding = build_model(saved, rt.device), load_encoding(run_spec(run_dir, saved))
    results = {}
    for task in tasks:
        cache = Path(run_dir) / f"scores-{task.name}-{fingerprint(saved)}.x"
        lls, greedy, n_cut = score_items(model, encoding, items[task.name], task.name, rt, cache)
        results[task.name] = task_metrics(task, items[task.name], lls, greedy)
        results[task.name] |= {
            "limited": len(items[task.name]) < task.size, "requests_cut": n_cut,
            "source": cfg.benchmark_dir or f"{task.hub_id}@{task.revision}",
        }  # fmt: skip
        if rt.rank == 0:
            kept = read_eval(run_dir, saved).get("tasks", {}).get(task.name, {"n": 0})
            if kept["n"] > len(items[task.name]):
                print(f"{run_dir}/eval.json keeps {task.name} on more items ({kept['n']})")
            else:
                write_eval(run_dir, saved, {"tasks": {task.name: results[task.name]}})
            if cfg.save_items:
                rows = [{"item": i, "gold": item.gold, "ll": ll, "greedy": flags} for i, (item, ll, flags)
                        in enumerate(zip(items[task.name], lls, greedy))]  # fmt: skip
                text = "".join(json.dumps(row) + "\n" for row in rows)
                write_text(Path(run_dir) / f"items_{task.name}.jsonl", text)
            for path in Path(run_dir).glob(f"scores-{task.name}-*"):
                path.unlink()
    return about(run_dir, saved) | {"tasks": results}


# -------------------------------------------------------------------------------
# sampling


def sample(
    model: GPT, encoding, prompt: str, max_new_tokens: int,
    temperature: float = 0.8, top_k: int = 50, seed: int = 1,
) -> str:  # fmt: skip
    """The prompt and its continuation, up to the end of the document. Starts from end-of-text."""
    device = model.lm_head.weight.device
    ids = [encoding.eot_token] + encoding.encode_ordinary(prompt)
    generator = torch.Generator(device).manual_seed(seed)
    out = model.generate(
        torch.tensor([ids], device=device), max_new_tokens, temperature, top_k,
        stop_id=encoding.eot_token, generator=generator,
    )[0, 1:].tolist()  # fmt: skip
    if out and out[-1] == encoding.eot_token:
        out.pop()
    return encoding.decode(out)


# -------------------------------------------------------------------------------
# one run


def evaluate_run(run_dir: str, cfg: EvalConfig, rt: Runtime) -> dict:
    """All that eval.json says of a run: who it is, how well it does, and where."""
    saved = load_checkpoint(run_dir)
    model = build_model(saved, rt.device)
    config = saved["config"]
    data_dir = cfg.data_dir or config["data_dir"]
    if not cfg.data_dir and not Path(data_dir).exists():
        raise ValueError(f"the dataset of {run_dir}, {data_dir}, is not there: say where with --data_dir")
    train_data, val_data = (
        Shards(data_dir, split, model.cfg.vocab_size, model.cfg.block_size) for split in ("train", "val")
    )
    if identity(train_data.meta) != saved["data"]:
        raise ValueError(
            f"{run_dir} was trained on other data ({saved['data']['tokenizer']}) than {data_dir} holds "
            f"({train_data.meta['tokenizer']}): name the right dataset with --data_dir"
        )
    own = val_data.every_token_once(cfg.batch_size, 0, rt.rank, rt.world_size)  # this rank's share
    n_batches = -(-val_data.n_tokens // (cfg.batch_size * model.cfg.block_size * rt.world_size))
    batches = rt.bar(own, total=n_batches, desc=run_dir)
    x, y, losses = (np.concatenate(part) for part in zip(*rt.gather(list(token_losses(model, batches)))))
    train_ids = counted_tokens(train_data)
    bigram = bigram_losses(train_ids, x, y, model.cfg.vocab_size)
    n_bytes = int(token_lengths(read_spec(data_dir))[y].sum())
    seen = np.bincount(train_ids, minlength=model.cfg.vocab_size)[x]  # of each input token
    result = {
        "seed": config["seed"],
        "n_params": model.n_params(),
        "n_input_params": sum(p.numel() for p in model.wte.parameters()),
        "train_tokens": saved["iter"] * config["tokens_per_iter"],
        "val_tokens": len(y),
        "val_bytes": n_bytes,
        **measures(losses, n_bytes),
        "bigram": measures(bigram, n_bytes),
        "by_frequency": by_frequency(seen, losses),
    }
    if rt.rank == 0:
        write_eval(run_dir, saved, result)
    return about(run_dir, saved) | result


def measures(losses: np.ndarray, n_bytes: int) -> dict:
    loss = float(losses.mean(dtype=np.float64))
    bits_per_byte = float(losses.sum(dtype=np.float64)) / math.log(2) / n_bytes
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}


def by_frequency(seen: np.ndarray, losses: np.ndarray) -> list[dict]:
    """Mean loss of the tokens that follow an input seen 0, 1-9, 10-99, ... times in training."""
    edges = [0, 1] + [10**k for k in range(1, len(str(int(seen.max()))) + 1)]
    rows = []
    for low, high in zip(edges, edges[1:]):
        here = (seen >= low) & (seen < high)
        if here.any():
            rows.append({
                "from": low, "to": high - 1, "n": int(here.sum()), "loss": float(losses[here].mean())
            })  # fmt: skip
    return rows


def arm_name(config: dict) -> str:
    """The arm, with the code settings that are not the paper's."""
    paper = {"code_bits": 0, "code_symbols": "01", "code_scale": 1.0, "code_shift": False,
             "code_recodings": 1}  # fmt: skip
    own = [f"{key[5:]}={config[key]}" for key, value in paper.items() if config[key] != value]
    return " ".join([config["input_mode"]] + own * (config["input_mode"] != "learned"))


def group_key(saved: dict) -> str:
    """Runs with the same key differ in their seed alone, so their mean says something."""
    counted = {key: value for key, value in saved["config"].items() if key not in UNCOUNTED | {"seed"}}
    return json.dumps([saved["iter"], saved["data"], counted])


# -------------------------------------------------------------------------------
# tables and figures


def print_rows(lines: list[list[str]]) -> None:
    """A Markdown table; the first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def grouped(results: list[dict]) -> list[list[dict]]:
    """Runs that differ in their seed alone together, in the order of the first of each."""
    groups = defaultdict(dict)
    for result in results:
        groups[result["group"]][result["checkpoint"]] = result  # a copy of a run counts once
    return [list(runs.values()) for runs in groups.values()]


def print_table(results: list[dict]) -> None:
    """A Markdown table: one line an arm, mean and standard deviation over its seeds, best loss first."""
    lines = [["model", "seeds", "parameters", "in the input", "training tokens", "validation loss",
              "perplexity", "bits per byte"]]  # fmt: skip
    for runs in sorted(grouped(results), key=lambda runs: statistics.mean(r["loss"] for r in runs)):
        first = runs[0]
        lines.append([first["arm"], str(len(runs)), f"{first['n_params']:,}",
                      f"{first['n_input_params']:,}", f"{first['train_tokens']:,}"]  # fmt: skip
                     + [mean_sd([r[key] for r in runs], digits) for key, digits in
                        (("loss", 3), ("perplexity", 1), ("bits_per_byte", 3))])  # fmt: skip
    for bigram in {json.dumps(r["bigram"]): r["bigram"] for r in results}.values():
        lines.append(["bigram model", "", "", "", "", f"{bigram['loss']:.3f}",
                      f"{bigram['perplexity']:.1f}", f"{bigram['bits_per_byte']:.3f}"])  # fmt: skip
    print_rows(lines)


def mean_sd(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


def task_cell(results: list[dict], task: str, metric: str) -> tuple[float, float | None]:
    """Value and error: one run's standard error over items, several runs' deviation over seeds."""
    values = [r["tasks"][task][metric] for r in results]
    if len(values) > 1:
        return statistics.mean(values), statistics.stdev(values)
    return values[0], results[0]["tasks"][task][metric + "_stderr"]


def print_tasks(results: list[dict], tasks: list[Task]) -> None:
    """One line an arm, then the paper's scores, where it gives some for a task that was asked for."""
    columns = [(task.name, metric) for task in tasks for metric in task.metrics]
    head = ["model", "seeds"]
    for task, metric in columns:
        one = results[0]["tasks"][task]
        head.append(f"{task} {metric}" + (f" (first {one['n']} items)" if one["limited"] else ""))
    lines = [head]
    for runs in grouped(results):
        cells = [task_cell(runs, *column) for column in columns]
        scale = [1 if metric == "perplexity" else 100 for _, metric in columns]
        texts = [
            f"{value * x:.2f}" + (f" ± {error * x:.2f}" if error is not None else "")
            for (value, error), x in zip(cells, scale)
        ]
        lines.append([runs[0]["arm"], str(len(runs)), *texts])
    for arm in dict.fromkeys(arm for arm, *_ in PAPER):
        paper = [PAPER.get((arm, *column)) for column in columns]
        if any(paper):
            lines.append([f"{arm}, the paper's 1.7B", "1", *(f"{100 * x:.2f}" if x else "" for x in paper)])
    print_rows(lines)
    print("accuracies in percent; ± is the standard error over items, or the deviation over seeds")


def draw_tasks(path: Path, results: list[dict], tasks: list[Task]) -> None:
    """tasks.png: each task's first metric with error bars, an arm a colour, and what guessing gives."""
    figure, axis = pyplot().subplots(figsize=(2 + 1.4 * len(tasks), 4.5), layout="constrained")
    groups = grouped(results)
    width = 0.8 / len(groups)
    for i, runs in enumerate(groups):
        cells = [task_cell(runs, task.name, task.metrics[0]) for task in tasks]
        at = [t + (i + 0.5) * width - 0.4 for t in range(len(tasks))]
        axis.bar(at, [100 * value for value, _ in cells], width, yerr=[100 * (e or 0) for _, e in cells],
                 capsize=3, label=runs[0]["arm"])  # fmt: skip
    for t, task in enumerate(tasks):
        label = "guessing" if t == 0 else None
        axis.hlines(100 * task.chance, t - 0.45, t + 0.45, "black", "dashed", linewidth=1, label=label)
    labels = [f"{task.name}\n{task.metrics[0]}" for task in tasks]
    axis.set_xticks(range(len(tasks)), labels)
    axis.set(ylabel="percent", ylim=(0, None))
    axis.legend()
    save_figure(figure, path)


def read_metrics(path: str | Path) -> list[dict]:
    """The rows of a metrics.jsonl. A last line that a kill cut short is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
    return [row for row in map(try_json, lines) if row]


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({error}): what was there is kept") from error
    os.replace(unfinished, path)


def write_eval(run_dir: str, saved: dict, new: dict) -> None:
    """Add to eval.json beside the checkpoint; results of an earlier checkpoint go, tasks add up."""
    path, old = Path(run_dir) / "eval.json", read_eval(run_dir, saved)
    tasks = old.get("tasks", {}) | new.get("tasks", {})
    write_text(path, json.dumps(old | about(run_dir, saved) | new | {"tasks": tasks}, indent=2))


def read_eval(run_dir: str, saved: dict) -> dict:
    """eval.json, if it is about this checkpoint."""
    path = Path(run_dir) / "eval.json"
    old = try_json(path.read_text(encoding="utf-8")) if path.exists() else None
    return old if old and old.get("checkpoint") == fingerprint(saved) else {}


def fingerprint(saved: dict) -> str:
    """Tells checkpoints apart: settings, data, iteration, and some weights that every step changes."""
    about = json.dumps([saved["config"], saved["data"], saved["iter"]]).encode()
    weights = saved["model"]["norm_f.weight"].numpy().tobytes()
    return hashlib.sha256(about + weights).hexdigest()[:16]


def about(run_dir: str, saved: dict) -> dict:
    return {
        "run": str(run_dir), "arm": arm_name(saved["config"]), "iter": saved["iter"],
        "group": group_key(saved), "checkpoint": fingerprint(saved),
        "settings": saved["config"],
        "versions": {name: version(name) for name in ("torch", "numpy", "tiktoken")},
    }  # fmt: skip


def plot_training(axis, curves: dict[str, list[list[dict]]]) -> None:
    """Loss over tokens, a colour an arm, a line a run: training loss faint, validation loss strong."""
    for i, (label, runs) in enumerate(curves.items()):
        for j, rows in enumerate(runs):
            n = max(1, len(rows) // 100)  # a hundredth of the run is one point of the training loss
            groups = [rows[k : k + n] for k in range(0, len(rows) - n + 1, n)]
            losses = [statistics.mean(row["loss"] for row in group) for group in groups]
            axis.plot([group[-1]["tokens"] / 1e6 for group in groups], losses, color=f"C{i}", alpha=0.35,
                      linewidth=1, label=None if j else f"{label}, training")  # fmt: skip
            val = [row for row in rows if "val_loss" in row]
            axis.plot([row["tokens"] / 1e6 for row in val], [row["val_loss"] for row in val], "o-",
                      color=f"C{i}", markersize=3, label=None if j else f"{label}, validation")  # fmt: skip
    axis.set(xlabel="training tokens (millions)", ylabel="loss (nats a token)")
    axis.grid(alpha=0.3)
    axis.legend()


def draw_loss(path: Path, curves: dict[str, list[list[dict]]]) -> None:
    """loss.png of a run."""
    figure, axis = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    plot_training(axis, curves)
    save_figure(figure, path)


def draw_comparison(path: Path, results: list[dict]) -> None:
    """compare.png: training curves, and the loss by how often the input token was seen."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    arms = defaultdict(list)
    for result in results:
        arms[result["arm"]].append(result)
    plot_training(left, {arm: [read_metrics(Path(r["run"]) / "metrics.jsonl") for r in runs]
                         for arm, runs in arms.items()})  # fmt: skip
    bins = {(row["from"], row["to"]): row["n"] for r in results for row in r["by_frequency"]}
    places = {key: i for i, key in enumerate(sorted(bins))}
    for i, (arm, runs) in enumerate(arms.items()):
        for run in runs:
            loss = {(row["from"], row["to"]): row["loss"] for row in run["by_frequency"]}
            right.plot([places[key] for key in loss], list(loss.values()), "o-", color=f"C{i}",
                       alpha=0.7, label=arm if run is runs[0] else None)  # fmt: skip
    labels = [f"{a:,}" + (f" to\n{b:,}" if b > a else "\n") + f"\nn = {bins[a, b]:,}" for a, b in places]
    right.set_xticks(range(len(places)), labels)
    right.set(xlabel="occurrences of the input token in the training text; n validation tokens",
              ylabel="validation loss of the next token (nats)")  # fmt: skip
    right.grid(alpha=0.3)
    right.legend()
    save_figure(figure, path)


def pyplot():
    """matplotlib on a machine without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
    print(f"drawn: {path}")


# -------------------------------------------------------------------------------
# run me


def run_spec(run_dir: str, saved: dict) -> dict:
    """The tokenizer that a run was trained with, which lies beside its checkpoint."""
    spec = read_spec(run_dir)
    if digest(spec) != saved["data"]["tokenizer_sha256"]:
        raise ValueError(
            f"{run_dir} was trained with tokenizer {saved['data']['tokenizer']}, but the one beside its "
            f"checkpoint is another ({spec.get('name')}): copy the right one from the dataset"
        )
    return spec


def print_samples(run_dir: str, cfg: EvalConfig, rt: Runtime) -> None:
    saved = load_checkpoint(run_dir)
    model, encoding = build_model(saved, rt.device), load_encoding(run_spec(run_dir, saved))
    prompt = os.fsencode(cfg.prompt).decode("utf-8", errors="replace")  # whatever the locale
    for i in range(cfg.n_samples):
        text = sample(
            model, encoding, prompt, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.seed + i
        )
        print(f"--- {run_dir}, seed {cfg.seed + i}\n{text}")


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(help_text(EvalConfig, __doc__.strip()))
        return
    runs, given = split_args(argv)
    cfg = load_config(EvalConfig, [], given)
    if not runs:
        raise ValueError("name at least one run: python eval.py out/canonical_toy")
    runs = list({Path(run).resolve(): run for run in runs}.values())  # each once
    tasks = find_tasks(cfg.tasks) if "tasks" in given else []
    if ("prompt" in given) + bool(cfg.export) + bool(tasks) > 1:
        raise ValueError("prompt, export and tasks are three things to do: ask for one at a time")
    if not tasks and {"limit", "save_items", "benchmark_dir"} & set(given):
        raise ValueError("limit, save_items and benchmark_dir belong to benchmarks: add --tasks=NAMES")
    if cfg.export and len(runs) > 1:
        raise ValueError(f"export takes one run at a time, got {len(runs)}")
    rt = setup_runtime(cfg.device)
    try:
        if "prompt" in given:
            for run in runs if rt.rank == 0 else []:
                print_samples(run, cfg, rt)
        elif cfg.export:
            for run in runs if rt.rank == 0 else []:
                saved = load_checkpoint(run)
                card = model_card(arm_name(saved["config"]), saved, read_eval(run, saved))
                export(build_model(saved), run_spec(run, saved), card, cfg.export)
                print(f"exported: {cfg.export}, for transformers' AutoModelForCausalLM and AutoTokenizer")
        elif tasks:
            items = {t.name: read_items(t, cfg.benchmark_dir, max(cfg.limit, 0)) for t in tasks}
            results = [run_tasks(run, tasks, items, cfg, rt) for run in runs]
            if rt.rank == 0:
                print_tasks(results, tasks)
                draw_tasks(Path(cfg.out_dir) / "tasks.png", results, tasks)
        else:
            results = [evaluate_run(run, cfg, rt) for run in runs]
            if rt.rank == 0:
                print_table(results)
                if len(runs) > 1:
                    draw_comparison(Path(cfg.out_dir) / "compare.png", results)
    finally:
        leave(rt)


if __name__ == "__main__":
    run_cli(main, "eval.py")
