"""
Benchmarks: items of HellaSwag, PIQA, LAMBADA and their kin -> what a model is asked.

Zero-shot and word for word as lm-evaluation-harness 0.4.13 asks, so that the numbers can stand
beside published ones. Every item becomes pairs of a context and a continuation, whose
log-probabilities eval.py compares:

    hellaswag      "Pole vault: ... a few women"  + " " + each of four endings, cleaned of marks
    piqa           "Question: GOAL\\nAnswer:"      + " " + each of two solutions
    arc_*          "Question: QUESTION\\nAnswer:"  + " " + each of three to five choices
    openbookqa     QUESTION                       + " " + each of four choices
    winogrande     the sentence up to the blank, filled with each of two names + " " + the rest
    lambada_*      the text without its last word + " " + that word

Items come from the hub, or from benchmark_dir/TASK.jsonl with the hub's columns.
"""

import difflib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Item:
    pairs: list[tuple[str, str]]  # (context, continuation) of each choice
    gold: int  # the right one
    lengths: list[int]  # characters of the choices' text, by which acc_norm divides


# --- one function a task: a row with the hub's columns -> Item ----------------


def multiple_choice(context: str, choices: list[str], gold: int) -> Item:
    if not isinstance(choices, list):
        raise TypeError("the choices are no list")
    return Item([(context, " " + c) for c in choices], gold, [len(c) for c in choices])


def hellaswag(row: dict) -> Item:
    def clean(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return multiple_choice(clean(context), [clean(e) for e in row["endings"]], int(row["label"]))


def piqa(row: dict) -> Item:
    choices = [row["sol1"], row["sol2"]]
    return multiple_choice(f"Question: {row['goal']}\nAnswer:", choices, int(row["label"]))


def keyed(row: dict) -> int:  # the keys are A-E in most items and 1-4 in others
    return [str(key) for key in row["choices"]["label"]].index(str(row["answerKey"]).lstrip())


def arc(row: dict) -> Item:
    context = f"Question: {row['question']}\nAnswer:"
    return multiple_choice(context, row["choices"]["text"], keyed(row))


def openbookqa(row: dict) -> Item:
    return multiple_choice(row["question_stem"], row["choices"]["text"], keyed(row))


def winogrande(row: dict) -> Item:
    """The names are the contexts' ends, and what comes after the blank is scored."""
    start, rest = row["sentence"].split("_", 1)
    rest = " " + rest.strip()
    pairs = [(start + row[name], rest) for name in ("option1", "option2")]
    return Item(pairs, {"1": 0, "2": 1}[str(row["answer"])], [len(rest) - 1] * 2)


def lambada(row: dict) -> Item:
    context, _, word = row["text"].rpartition(" ")  # line ends stay inside of words
    return Item([(context, " " + word)], 0, [len(word)])


# --- the tasks ----------------------------------------------------------------


@dataclass
class Task:
    name: str
    to_item: Callable[[dict], Item]
    size: int  # items of the split
    metrics: tuple[str, ...]  # the one that is usually reported first
    split: str
    hub_id: str
    hub_config: str | None
    revision: str


ARC_REVISION = "210d026faf9955653af8916fad021475a3f00453"
TASKS = [
    Task("hellaswag", hellaswag, 10042, ("acc_norm", "acc"), "validation",
         "Rowan/hellaswag", None, "218ec52e09a7e7462a5400043bb9a69a41d06b76"),
    Task("piqa", piqa, 1838, ("acc", "acc_norm"), "validation",
         "baber/piqa", None, "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1"),
    Task("lambada_openai", lambada, 5153, ("acc", "perplexity"), "test",
         "EleutherAI/lambada_openai", "default", "900124bf3b8235c6daf21033af9948b3f07346c4"),
    Task("lambada_standard", lambada, 5153, ("acc", "perplexity"), "test",
         "cimec/lambada", None, "main"),
    Task("arc_easy", arc, 2376, ("acc", "acc_norm"), "test",
         "allenai/ai2_arc", "ARC-Easy", ARC_REVISION),
    Task("arc_challenge", arc, 1172, ("acc_norm", "acc"), "test",
         "allenai/ai2_arc", "ARC-Challenge", ARC_REVISION),
    Task("openbookqa", openbookqa, 500, ("acc_norm", "acc"), "test",
         "allenai/openbookqa", "main", "388097ea7776314e93a529163e0fea805b8a6454"),
    Task("winogrande", winogrande, 1267, ("acc",), "validation",
         "allenai/winogrande", "winogrande_xl", "01e74176c63542e6b0bcb004dcdea22d94fb67b5"),
]  # fmt: skip
TASKS = {task.name: task for task in TASKS}

# What the paper reports (arXiv:2610.04002): its three tasks, and its canonical arm's scores.
PAPER = {
    ("hellaswag", "acc_norm"): 0.5240,
    ("piqa", "acc"): 0.7051,
    ("lambada_openai", "acc"): 0.4275,
}


def find_tasks(names: str) -> list[Task]:
    """ "piqa,hellaswag" -> their Tasks; "paper" is the paper's three, "all" all. Each once."""
    paper = [name for name, _ in PAPER]
    groups = {name: [name] for name in TASKS} | {"paper": paper, "all": TASKS}
    found = {}
    for name in names.replace(" ", "").split(","):
        if name not in groups:
            near = difflib.get_close_matches(name, groups, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(groups)}"
            raise ValueError(f"unknown task {name!r}, {hint}")
        found |= {one: TASKS[one] for one in groups[name]}
    return list(found.values())


# --- reading ------------------------------------------------------------------


def rows_of_file(task: Task, benchmark_dir: str) -> Iterator[tuple[str, dict]]:
    path = Path(benchmark_dir, f"{task.name}.jsonl")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: put {task.name} there as {task.hub_id} has it")
    for i, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield f"{path}, line {i}", json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {i} is not JSON in UTF-8: {error}") from error


def rows_of_hub(task: Task) -> Iterator[tuple[str, dict]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        where = (task.hub_id, task.hub_config)
        rows = datasets.load_dataset(*where, split=task.split, revision=task.revision)
    except Exception as error:  # whatever the network, the hub or a cache raises
        remedy = f"put {task.name}.jsonl into a folder and name it by --benchmark_dir"
        raise ValueError(f"cannot read {task.hub_id} ({type(error).__name__}): {remedy}") from error
    for i, row in enumerate(rows):
        yield f"{task.hub_id}, row {i}", row


def read_items(task: Task, benchmark_dir: str = "", limit: int = 0) -> list[Item]:
    """The items of a task in order, the first `limit` of them (0 = all). Errors name the row."""
    items = []
    for place, row in rows_of_file(task, benchmark_dir) if benchmark_dir else rows_of_hub(task):
        try:
            item = task.to_item(row)
            if not 0 <= item.gold < len(item.pairs):
                raise ValueError(f"there is no choice {item.gold}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"{task.hub_id} has it ({type(error).__name__}: {error}): {str(row)[:200]}"
            raise ValueError(f"{place} is no item of {task.name} as {what}") from error
        items.append(item)
        if len(items) == limit:
            break
    if not items:
        raise ValueError(f"{task.name} has no items in {benchmark_dir or task.hub_id}")
    return items


# --- from text to rows of token ids -------------------------------------------


def pair_to_ids(encoding: object, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """
    Token ids of a context and its continuation, encoded together. Spaces that end the context
    belong to the continuation. Without a context, end-of-text is the context.
    """
    whole = encoding.encode_ordinary(context + continuation)
    n = len(encoding.encode_ordinary(context.rstrip()))
    return whole[:n] or [encoding.eot_token], whole[n:]


Request = tuple[list[int], list[int]]  # the token ids of a context and of its continuation


def make_requests(items: list[Item], name: str, encoding: object, block_size: int) -> tuple:
    """[Request, ...] of a task's items, and how many contexts were cut at their start to fit."""
    requests, n_cut = [], 0
    for i, item in enumerate(items):
        for pair in item.pairs:
            context, continuation = pair_to_ids(encoding, *pair)
            n = len(continuation)
            room = block_size + 1 - n
            if not 1 <= room <= block_size:
                what = f"a continuation of {n} tokens, not of 1 to block_size={block_size}"
                remedy = "leave the task out, or train with a longer block_size"
                raise ValueError(f"item {i} (from 0) of {name} has {what}: {remedy}")
            n_cut += len(context) > room
            requests.append((context[-room:], continuation))
    return requests, n_cut


# --- metrics -------------------------------------------------------------------


def is_right(item: Item, ll: list[float], per_character: bool) -> bool:
    """Whether the gold choice is the best, the first of equal ones and not empty."""
    if per_character:
        ll = [x / n if n else -math.inf for x, n in zip(ll, item.lengths)]
    return ll.index(max(ll)) == item.gold


def task_metrics(task: Task, items: list[Item], lls: list[list], greedy: list[list]) -> dict:
    """
    The task's metrics with their standard errors, from the log-probability of every continuation of
    every item and whether all its tokens are the likeliest. The error of a perplexity is that of
    the mean log-probability, times the perplexity, where the harness draws a bootstrap.
    """
    n, out = len(items), {"n": len(items)}
    for metric in task.metrics:
        if metric == "perplexity":
            words = [ll[0] for ll in lls]
            mean = statistics.fmean(words)
            value = math.exp(-mean) if mean > -700 else math.inf
            error = value * statistics.stdev(words) / math.sqrt(n) if n > 1 else None
        else:
            if "perplexity" in task.metrics:  # one word, right if every token is the likeliest
                right = [flags[0] for flags in greedy]
            else:
                right = [is_right(*pair, metric == "acc_norm") for pair in zip(items, lls)]
            value = sum(right) / n
            error = math.sqrt(value * (1 - value) / (n - 1)) if n > 1 else None
        out |= {metric: value, metric + "_stderr": error}
    return out
