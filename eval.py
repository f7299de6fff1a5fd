"""
Measure trained runs, sample from them, and compare them.

    python eval.py out/canonical_toy                                   loss on the validation split
    python eval.py out/canonical_toy --prompt="The function returns"   a sample
    python eval.py out/learned_toy out/canonical_toy out/gf2_toy       a table, and compare.png
    python eval.py out/canonical_1p7b --tasks=paper                    benchmarks (data/benchmarks.py)
    python eval.py out/canonical_1p7b --export=DIR                     a Hugging Face folder

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
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from config import Settings, load_config, run_cli, split_args, try_json
from config.machine import Runtime, close_processes, setup_runtime, write_atomically
from data.benchmarks import PAPER, Item, Task, find_tasks, pair_to_ids, read_items, task_metrics
from data.bigram import bigram_losses, counted_tokens
from data.hugging_face import export, model_card
from data.runs import load_checkpoint, read_metrics
from data.shards import Shards, identity
from data.tokenizers import digest, load_encoding, read_spec, token_bytes
from model import GPT, build_model


@dataclass
class EvalConfig(Settings):
    prompt: str = ""  # text to continue; empty = start a document
    max_new_tokens: int = 200  # length of a sample
    n_samples: int = 1  # samples of the prompt
    temperature: float = 0.8  # 0 = the likeliest token; 1 = as the model says
    top_k: int = 50  # sample from the k likeliest; 0 = from all
    seed: int = 1  # draws the samples
    tasks: str = ""  # benchmarks to score, separated by commas, or "paper" or "all"
    benchmark_dir: str = ""  # folder with TASK.jsonl files; empty = the Hugging Face hub
    limit: int = -1  # first items of each benchmark; -1 = all
    save_items: bool = False  # write the log-probabilities of every item
    data_dir: str = ""  # where the run's dataset lies now; empty = where training found it
    export: str = ""  # folder to write the run to as a Hugging Face Llama
    batch_size: int = 16  # windows at a time
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # tasks: auto = float32
    out_dir: str = "out"  # where compare.png and tasks.png go

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "max_new_tokens temperature top_k seed")
        self.at_least(1, "n_samples batch_size")
        if self.limit == 0 or self.limit < -1:
            raise ValueError(f"limit must be at least 1, or -1 for all items, got {self.limit}")


# --- loss ----------------------------------------------------------------------


@torch.no_grad()
def token_losses(
    model: GPT, batches: Iterator[tuple[np.ndarray, np.ndarray]], rt: Runtime
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs, targets and -log p(target) of every token that counts, each (n,), batch by batch."""
    for x, y in batches:
        if len(x) == 0:  # this rank has no share in the last batch
            continue
        ids, targets = torch.from_numpy(x).to(rt.device), torch.from_numpy(y).to(rt.device)
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


def by_frequency(seen: np.ndarray, losses: np.ndarray) -> list[dict]:
    """Mean loss of the tokens that follow an input seen 0, 1-9, 10-99, ... times in training."""
    n_digits = np.char.str_len(seen.astype(str)) * (seen > 0)  # 0 for 0, 1 for 1-9, 2 for 10-99
    rows = []
    for n in np.unique(n_digits):
        here = losses[n_digits == n]
        low, high = (10 ** (n - 1), 10**n - 1) if n else (0, 0)
        mean = float(here.mean(dtype=np.float64))
        rows.append({"from": int(low), "to": int(high), "n": len(here), "loss": mean})
    return rows


# --- benchmarks ----------------------------------------------------------------


def make_requests(
    items: list[Item], name: str, encoding: object, block_size: int
) -> tuple[list[tuple[list[int], list[int]]], int]:
    """
    The token ids (context, continuation) of every request of a task's items, and how many contexts
    were cut: block_size inputs are the most, and the end counts. Raises ValueError for a
    continuation that does not fit.
    """
    requests, n_cut = [], 0
    for i, item in enumerate(items):
        for pair in item.pairs:
            context, continuation = pair_to_ids(encoding, *pair)
            room = block_size + 1 - len(continuation)
            if not 1 <= room <= block_size:
                raise ValueError(
                    f"item {i} (from 0) of {name} has a continuation of {len(continuation)} tokens, "
                    f"but a model of block_size={block_size} scores 1 to {block_size}: leave the "
                    "task out, or train with a longer block_size"
                )
            n_cut += len(context) > room
            requests.append((context[-room:], continuation))
    return requests, n_cut


@torch.no_grad()
def score_batch(
    model: GPT, batch: list[tuple[list[int], list[int]]], rt: Runtime
) -> list[tuple[float, bool]]:
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
        x = model.hidden(ids.to(rt.device)).flatten(0, 1)[places]  # (n, C)
        chunk = 2**25 // model.cfg.vocab_size  # rows of logits at a time
        for part, target in zip(x.split(chunk), torch.tensor(targets).split(chunk)):
            logits, target = model.lm_head(part).float(), target.to(rt.device)  # (n, V), (n,)
            logp.append(logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1))
            likeliest.append(logits.argmax(-1) == target)
    lengths = [len(continuation) for _, continuation in batch]
    logp, likeliest = torch.cat(logp).cpu().double(), torch.cat(likeliest).cpu()
    parts = zip(logp.split(lengths), likeliest.split(lengths))
    return [(float(lp.sum()), bool(best.all())) for lp, best in parts]


def score(
    model: GPT, requests: list[tuple[list[int], list[int]]], name: str, rt: Runtime
) -> list[tuple[float, bool]]:
    """Scores of all requests, in their order. Those of similar length go together, over all ranks."""
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    batches = [[]]
    for i in order:
        longest = sum(map(len, requests[batches[-1][0]])) if batches[-1] else 0
        if (len(batches[-1]) + 1) * longest > 8192 or sum(map(len, requests[i])) < 0.9 * longest:
            batches.append([])
        batches[-1].append(i)
    found = []
    for batch in rt.bar(batches[rt.rank :: rt.world_size], desc=name):
        found += zip(batch, score_batch(model, [requests[i] for i in batch], rt))
    scores = dict(rt.gather(found))
    return [scores[i] for i in range(len(requests))]


# --- samples -------------------------------------------------------------------


def sample(
    model: GPT,
    encoding: object,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1,
) -> str:
    """The prompt and its continuation, up to the end of the document. Starts from end-of-text."""
    device, end = model.lm_head.weight.device, encoding.eot_token
    ids = torch.tensor([[end, *encoding.encode_ordinary(prompt)]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    out = model.generate(ids, max_new_tokens, temperature, top_k, end, generator)[0, 1:].tolist()
    return encoding.decode(out[:-1] if out and out[-1] == end else out)


# --- a run ---------------------------------------------------------------------


def input_name(config: dict) -> str:
    """The input of a run, with the code settings that are not the paper's."""
    paper = {"bits": 0, "symbols": "01", "scale": 1.0, "shift": False, "recodings": 1}
    given = {key: config.get(f"code_{key}", value) for key, value in paper.items()}
    own = [f"{key}={value}" for key, value in given.items() if value != paper[key]]
    return (
        " ".join([config["input_mode"], *own]) if config["input_mode"] != "learned" else "learned"
    )


def describe(run: str, saved: dict) -> dict:
    """Which run a result is of. Runs of one group differ in their seed alone."""
    recipe = {key: value for key, value in saved["recipe"].items() if key != "seed"}
    return {
        "run": run,
        "input": input_name(saved["config"]),
        "seed": saved["config"]["seed"],
        "step": saved["step"],
        "group": json.dumps([recipe, saved["step"], saved["data"]], sort_keys=True),
        "settings": saved["config"],
        "versions": {name: version(name) for name in ("torch", "numpy", "tiktoken")},
    }


def read_results(run: str, saved: dict) -> dict:
    """What eval.json says of this checkpoint."""
    path = Path(run, "eval.json")
    old = try_json(path.read_text(encoding="utf-8")) if path.exists() else None
    known = describe(run, saved)
    same = isinstance(old, dict) and all(old.get(key) == known[key] for key in ("group", "seed"))
    return old if same else {}


def write_results(run: str, saved: dict, result: dict) -> None:
    """Add a result to eval.json. The run may lie where nothing can be written."""
    old = read_results(run, saved)
    tasks = old.get("tasks", {}) | result.get("tasks", {})
    try:
        content = json.dumps(old | result | {"tasks": tasks}, indent=2)
        write_atomically(Path(run, "eval.json"), content)
    except OSError as error:
        print(f"warning: {error}")


def read_run_spec(run: str, saved: dict) -> dict:
    """The tokenizer that a run was trained with, which lies in the run's folder."""
    folder = Path(run).parent if Path(run, "model.pt").exists() else Path(run)
    spec = read_spec(folder)
    if digest(spec) != saved["data"]["tokenizer_sha256"]:
        raise ValueError(
            f"{folder} was trained with tokenizer {saved['data']['tokenizer']}, but holds another "
            f"({spec['name']}): copy the right one from the dataset"
        )
    return spec


def measure(run: str, saved: dict, cfg: EvalConfig, rt: Runtime) -> dict:
    """The losses of a run, and of a bigram model, on its validation split."""
    model = build_model(saved, rt.device)
    data_dir = cfg.data_dir or saved["config"]["data_dir"]
    if not Path(data_dir).exists():
        raise ValueError(f"{data_dir}, the dataset of {run}, is not there: say where by --data_dir")
    V, T = model.cfg.vocab_size, model.cfg.block_size
    train_data, val_data = (Shards(data_dir, split, V, T) for split in ("train", "val"))
    if identity(train_data.meta) != saved["data"]:
        raise ValueError(f"{run} was trained on other data than {data_dir} holds: use --data_dir")
    batches = list(val_data.every_token_once(cfg.batch_size, 0, rt.rank, rt.world_size))
    parts = rt.gather(list(token_losses(model, rt.bar(batches, desc=run), rt)))
    x, y, losses = (np.concatenate(part) for part in zip(*parts))
    train_ids = counted_tokens(train_data)
    n_bytes = int(token_bytes(read_spec(data_dir))[y].sum())
    return {
        "n_params": model.n_params(),
        "n_input_params": sum(p.numel() for p in model.wte.parameters()),
        "train_tokens": saved["step"] * saved["config"]["tokens_per_iter"],
        "val_tokens": len(y),
        "val_bytes": n_bytes,
        **measures(losses, n_bytes),
        "bigram": measures(bigram_losses(train_ids, x, y, V), n_bytes),
        "by_frequency": by_frequency(np.bincount(train_ids, minlength=V)[x], losses),
    }


def benchmark(
    run: str, saved: dict, items: dict[str, list[Item]], cfg: EvalConfig, rt: Runtime
) -> dict:
    """The metrics of a run on each task."""
    model, encoding = build_model(saved, rt.device), load_encoding(read_run_spec(run, saved))
    T = model.cfg.block_size
    requests = {name: make_requests(items[name], name, encoding, T) for name in items}
    results = {}
    for task in find_tasks(",".join(items)):
        scores = iter(score(model, requests[task.name][0], task.name, rt))
        scored = [[next(scores) for _ in item.pairs] for item in items[task.name]]
        lls, greedy = ([[pair[i] for pair in item] for item in scored] for i in (0, 1))
        results[task.name] = task_metrics(task, items[task.name], lls, greedy) | {
            "limited": len(scored) < task.size,
            "requests_cut": requests[task.name][1],
            "source": cfg.benchmark_dir or f"{task.hub_id}@{task.revision}",
        }
        if cfg.save_items and rt.rank == 0:
            rows = zip(items[task.name], lls, greedy)
            rows = [{"gold": item.gold, "ll": ll, "greedy": best} for item, ll, best in rows]
            text = "".join(json.dumps({"item": i} | row) + "\n" for i, row in enumerate(rows))
            write_atomically(Path(run, f"items_{task.name}.jsonl"), text)
    return {"tasks": results}


# --- tables --------------------------------------------------------------------


def print_rows(lines: list[list[str]]) -> None:
    """A Markdown table; the first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def grouped(results: list[dict]) -> list[list[dict]]:
    """Runs that differ in their seed alone together, in the order of the first of each."""
    groups = defaultdict(dict)
    for result in results:
        groups[result["group"]][result["seed"]] = result  # a copy of a run counts once
    return [list(runs.values()) for runs in groups.values()]


def mean_sd(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def print_losses(results: list[dict]) -> None:
    """A line per group, mean and standard deviation over its seeds, the best loss first."""
    head = "model,seeds,parameters,in the input,training tokens,validation loss,perplexity"
    lines = [[*head.split(","), "bits per byte"]]
    for runs in sorted(grouped(results), key=lambda runs: statistics.mean(r["loss"] for r in runs)):
        sizes = [runs[0][key] for key in ("n_params", "n_input_params", "train_tokens")]
        digits = {"loss": 3, "perplexity": 1, "bits_per_byte": 3}
        cells = [mean_sd([r[key] for r in runs], n) for key, n in digits.items()]
        lines.append([runs[0]["input"], str(len(runs)), *(f"{n:,}" for n in sizes), *cells])
    for loss, perplexity, bits in {tuple(r["bigram"].values()): 0 for r in results}:
        cells = [f"{loss:.3f}", f"{perplexity:.1f}", f"{bits:.3f}"]
        lines.append(["bigram model", "", "", "", "", *cells])
    print_rows(lines)


def task_cell(runs: list[dict], task: str, metric: str) -> tuple[float, float | None]:
    """Value and error: one run's standard error over items, several runs' deviation over seeds."""
    values = [r["tasks"][task][metric] for r in runs]
    if len(values) > 1:
        return statistics.mean(values), statistics.stdev(values)
    return values[0], runs[0]["tasks"][task][metric + "_stderr"]


def print_tasks(results: list[dict], tasks: list[Task]) -> None:
    """A line per group, then the paper's scores, where it gives some for a task of these."""
    columns = [(task.name, metric) for task in tasks for metric in task.metrics]
    head = ["model", "seeds"]
    for task, metric in columns:
        one = results[0]["tasks"][task]
        head.append(f"{task} {metric}" + (f" (first {one['n']} items)" if one["limited"] else ""))
    lines = [head]
    for runs in grouped(results):
        line = [runs[0]["input"], str(len(runs))]
        for task, metric in columns:
            value, error = task_cell(runs, task, metric)
            unit = 1 if metric == "perplexity" else 100  # accuracies in percent
            line.append(f"{value * unit:.2f}" + (f" ± {error * unit:.2f}" if error else ""))
        lines.append(line)
    for name in dict.fromkeys(name for name, *_ in PAPER):
        paper = [PAPER.get((name, *column)) for column in columns]
        if any(paper):
            cells = [f"{100 * value:.2f}" if value else "" for value in paper]
            lines.append([f"{name}, the paper's 1.7B", "1", *cells])
    print_rows(lines)
    print("accuracies in percent; ± is the standard error over items, or the deviation over seeds")


# --- figures -------------------------------------------------------------------


def draw(path: Path, figsize: tuple[float, float], plot: Callable, *args) -> None:
    """Call plot(figure, *args) and save the figure. Whatever goes wrong is no reason to stop."""
    from matplotlib.figure import Figure  # needs no display

    try:
        figure = Figure(figsize, layout="constrained")
        plot(figure, *args)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        print(f"drawn: {path}")
    except Exception as error:
        print(f"warning: {path} could not be drawn ({error})")


def plot_training(axis: object, curves: dict[str, list[list[dict]]]) -> None:
    """Loss over tokens, a colour per label, a line per run: training faint, validation strong."""
    for i, (label, runs) in enumerate(curves.items()):
        for j, rows in enumerate(runs):
            n = max(1, len(rows) // 100)  # steps per point of the training loss
            points = [rows[k : k + n] for k in range(0, len(rows) - n + 1, n)]
            losses = [statistics.mean(row["loss"] for row in point) for point in points]
            tokens = [point[-1]["tokens"] / 1e6 for point in points]
            style = {"color": f"C{i}", "label": None if j else f"{label}, training"}
            axis.plot(tokens, losses, alpha=0.35, linewidth=1, **style)
            val = [(row["tokens"] / 1e6, row["val_loss"]) for row in rows if "val_loss" in row]
            style["label"] = None if j else f"{label}, validation"
            axis.plot(*(zip(*val) if val else ([], [])), "o-", markersize=3, **style)
    axis.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()


def draw_loss(path: Path, curves: dict[str, list[list[dict]]]) -> None:
    """loss.png of a run: {label: [the rows of metrics.jsonl, ...]}."""
    draw(path, (7, 4.5), lambda figure: plot_training(figure.subplots(), curves))


def plot_comparison(figure: object, results: list[dict]) -> None:
    """Training curves, and the loss by how often the input token was seen."""
    left, right = figure.subplots(1, 2)
    inputs = defaultdict(list)
    for result in results:
        inputs[result["input"]].append(result)
    curves = {name: [read_metrics(r["run"]) for r in runs] for name, runs in inputs.items()}
    plot_training(left, curves)
    bins = {row["to"]: row for r in results for row in r["by_frequency"]}
    places = {to: i for i, to in enumerate(sorted(bins))}
    for i, (name, runs) in enumerate(inputs.items()):
        for run in runs:
            at = [places[row["to"]] for row in run["by_frequency"]]
            losses = [row["loss"] for row in run["by_frequency"]]
            label = name if run is runs[0] else None
            right.plot(at, losses, "o-", color=f"C{i}", alpha=0.7, label=label)
    names = [f"{bins[to]['from']:,}\nto {to:,}\n\nn = {bins[to]['n']:,}" for to in places]
    right.set_xticks(range(len(places)), names)
    right.set_xlabel("occurrences of the input token in the training text; n validation tokens")
    right.set_ylabel("validation loss of the next token (nats)")
    right.grid(alpha=0.3)
    right.legend()


def plot_tasks(figure: object, results: list[dict], tasks: list[Task]) -> None:
    """Each task's first metric with error bars, a colour per group, and what guessing gives."""
    axis, groups = figure.subplots(), grouped(results)
    width = 0.8 / len(groups)
    for i, runs in enumerate(groups):
        cells = [task_cell(runs, task.name, task.metrics[0]) for task in tasks]
        at = [t + (i + 0.5) * width - 0.4 for t in range(len(tasks))]
        values, errors = [100 * value for value, _ in cells], [100 * (e or 0) for _, e in cells]
        axis.bar(at, values, width, yerr=errors, capsize=3, label=runs[0]["input"])
    for t, task in enumerate(tasks):
        label = None if t else "guessing"
        axis.hlines(100 * task.chance, t - 0.45, t + 0.45, "black", "dashed", label=label)
    axis.set_xticks(range(len(tasks)), [f"{task.name}\n{task.metrics[0]}" for task in tasks])
    axis.set(ylabel="percent", ylim=(0, None))
    axis.legend()


# --- what to do ----------------------------------------------------------------


def print_samples(run: str, saved: dict, cfg: EvalConfig, rt: Runtime) -> None:
    model, encoding = build_model(saved, rt.device), load_encoding(read_run_spec(run, saved))
    prompt = os.fsencode(cfg.prompt).decode("utf-8", errors="replace")  # whatever the locale
    for seed in range(cfg.seed, cfg.seed + cfg.n_samples):
        size = (cfg.max_new_tokens, cfg.temperature, cfg.top_k)
        with rt.autocast():
            print(f"--- {run}, seed {seed}\n{sample(model, encoding, prompt, *size, seed)}")


def export_run(run: str, saved: dict, folder: str) -> None:
    """Write a run as a Hugging Face Llama; a fixed code becomes the table of all its vectors."""
    model = build_model(saved)
    with torch.no_grad():
        table = {"wte.weight": model.wte(torch.arange(model.cfg.vocab_size))}  # (V, C)
    card = model_card(input_name(saved["config"]), saved, read_results(run, saved))
    export(model.state_dict() | table, saved["config"], read_run_spec(run, saved), card, folder)
    print(f"exported: {folder}, for transformers' AutoModelForCausalLM and AutoTokenizer")


def main(argv: list[str]) -> None:
    words, given = split_args(argv, EvalConfig, __doc__)
    cfg, out_dir = load_config(EvalConfig, given), Path(given.get("out_dir") or "out")
    runs = list({Path(run).resolve(): run for run in words}.values())  # each once
    if not runs:
        raise ValueError("name at least one run: python eval.py out/canonical_toy")
    if ("prompt" in given) + bool(cfg.export) + bool(cfg.tasks) > 1:
        raise ValueError("prompt, export and tasks are three things to do: ask for one at a time")
    if not cfg.tasks and {"limit", "save_items", "benchmark_dir"} & set(given):
        raise ValueError(
            "limit, save_items and benchmark_dir belong to benchmarks: add --tasks=NAMES"
        )
    if cfg.export and len(runs) > 1:
        raise ValueError(f"export takes one run at a time, got {len(runs)}")
    rt = setup_runtime(cfg.device, "float32" if cfg.tasks and cfg.dtype == "auto" else cfg.dtype)
    saved = {run: load_checkpoint(run) for run in runs}
    if "prompt" in given or cfg.export:
        for run in runs if rt.rank == 0 else []:
            if cfg.export:
                export_run(run, saved[run], cfg.export)
            else:
                print_samples(run, saved[run], cfg, rt)
    else:
        tasks = find_tasks(cfg.tasks) if cfg.tasks else []
        items = {t.name: read_items(t, cfg.benchmark_dir, max(cfg.limit, 0)) for t in tasks}
        results = []
        for run in runs:
            result = benchmark(run, saved[run], items, cfg, rt) if tasks else None
            result = result or measure(run, saved[run], cfg, rt)
            results.append(describe(run, saved[run]) | result)
        if rt.rank == 0 and tasks:
            print_tasks(results, tasks)
            draw(out_dir / "tasks.png", (2 + 1.4 * len(tasks), 4.5), plot_tasks, results, tasks)
        elif rt.rank == 0:
            print_losses(results)
            if len(runs) > 1:
                draw(out_dir / "compare.png", (12, 4.5), plot_comparison, results)
        for result in results if rt.rank == 0 else []:
            write_results(result["run"], saved[result["run"]], result)
    close_processes(rt)


if __name__ == "__main__":
    run_cli(main, "eval.py")
