"""
Benchmarks: items of HellaSwag, PIQA, LAMBADA and their kin -> what a model is asked.

Zero-shot and word for word as lm-evaluation-harness 0.4.13 asks, so that the numbers can stand beside
published ones. Every item becomes pairs of a context and a continuation, whose log-probabilities
eval.py compares:

    hellaswag      "Pole vault: ... a few women"  + " " + each of four endings, cleaned of WikiHow's marks
    piqa           "Question: GOAL\\nAnswer:"      + " " + each of two solutions
    arc_*          "Question: QUESTION\\nAnswer:"  + " " + each of three to five choices
    openbookqa     QUESTION                       + " " + each of four choices
    winogrande     the sentence up to the blank, filled with each of two names + " " + the rest
    lambada_*      the text without its last word + " " + that word

Items come from the hub, by id and revision and without running code of theirs, or from
benchmark_dir/TASK.jsonl with the hub's columns.
"""

import difflib
import hashlib
import json
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import try_json
from config.machine import Runtime
from model import GPT


@dataclass
class Item:
    """One question: pairs (context, continuation), the right one, and the length of each choice."""

    pairs: list[tuple[str, str]]
    gold: int
    lengths: list[int]  # characters of the choices' text, by which acc_norm divides


# -------------------------------------------------------------------------------
# one function a task: a row with the hub's columns -> Item


def multiple_choice(context: str, choices: list[str], gold: int) -> Item:
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


def keyed(row: dict) -> int:
    """The position of the answer's key among the keys, which are A-E in most items and 1-4 in others."""
    return [str(key) for key in row["choices"]["label"]].index(str(row["answerKey"]).lstrip())


def arc(row: dict) -> Item:
    return multiple_choice(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], keyed(row))


def openbookqa(row: dict) -> Item:
    return multiple_choice(row["question_stem"], row["choices"]["text"], keyed(row))


def winogrande(row: dict) -> Item:
    """The names are the contexts' ends, and what comes after the blank is scored."""
    blank = row["sentence"].index("_")
    rest = " " + row["sentence"][blank + 1 :].strip()
    options = [row["option1"], row["option2"]]
    pairs = [(row["sentence"][:blank] + option, rest) for option in options]
    return Item(pairs, {"1": 0, "2": 1}[str(row["answer"])], [len(rest) - 1] * 2)


def lambada(row: dict) -> Item:
    words = row["text"].split(" ")  # single spaces only: line ends stay inside of words
    return Item([(" ".join(words[:-1]), " " + words[-1])], 0, [len(words[-1])])


# -------------------------------------------------------------------------------
# the tasks


@dataclass
class Task:
    name: str
    hub_id: str
    hub_config: str | None
    revision: str
    split: str
    to_item: Callable[[dict], Item]
    columns: tuple[str, ...]
    size: int                 # items of the split
    metrics: tuple[str, ...]  # the one that is usually reported first
    chance: float             # accuracy of guessing


ARC = ("question", "choices", "answerKey")
ARC_REVISION = "210d026faf9955653af8916fad021475a3f00453"
TASKS = {
    task.name: task
    for task in (
        Task("hellaswag", "Rowan/hellaswag", None, "218ec52e09a7e7462a5400043bb9a69a41d06b76",
             "validation", hellaswag, ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
             10042, ("acc_norm", "acc"), 0.25),
        Task("piqa", "baber/piqa", None, "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
             "validation", piqa, ("goal", "sol1", "sol2", "label"),
             1838, ("acc", "acc_norm"), 0.5),
        Task("lambada_openai", "EleutherAI/lambada_openai", "default",
             "900124bf3b8235c6daf21033af9948b3f07346c4", "test", lambada, ("text",),
             5153, ("acc", "perplexity"), 0.0),
        Task("lambada_standard", "cimec/lambada", None, "main", "test", lambada, ("text",),
             5153, ("acc", "perplexity"), 0.0),
        Task("arc_easy", "allenai/ai2_arc", "ARC-Easy", ARC_REVISION, "test", arc, ARC,
             2376, ("acc", "acc_norm"), 0.25),
        Task("arc_challenge", "allenai/ai2_arc", "ARC-Challenge", ARC_REVISION, "test", arc, ARC,
             1172, ("acc_norm", "acc"), 0.25),
        Task("openbookqa", "allenai/openbookqa", "main", "388097ea7776314e93a529163e0fea805b8a6454",
             "test", openbookqa, ("question_stem", "choices", "answerKey"), 500, ("acc_norm", "acc"), 0.25),
        Task("winogrande", "allenai/winogrande", "winogrande_xl",
             "01e74176c63542e6b0bcb004dcdea22d94fb67b5", "validation", winogrande,
             ("sentence", "option1", "option2", "answer"), 1267, ("acc",), 0.5),
    )
}  # fmt: skip

# What the paper reports (arXiv:2610.04002): its three tasks, and its canonical arm's scores.
PAPER_TASKS = ("hellaswag", "piqa", "lambada_openai")
PAPER = {
    ("canonical", "hellaswag", "acc_norm"): 0.5240,
    ("canonical", "piqa", "acc"): 0.7051,
    ("canonical", "lambada_openai", "acc"): 0.4275,
}


def find_tasks(names: str) -> list[Task]:
    """ "piqa,hellaswag" -> their Tasks; "paper" is the paper's three, "all" all. Each once."""
    found = {}
    for name in names.split(","):
        for one in {"paper": PAPER_TASKS, "all": tuple(TASKS)}.get(name.strip(), (name.strip(),)):
            if one not in TASKS:
                near = difflib.get_close_matches(one, [*TASKS, "paper", "all"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown task {one!r}, {hint or 'known are: ' + ', '.join(TASKS)}")
            found[one] = TASKS[one]
    return list(found.values())


# -------------------------------------------------------------------------------
# reading


def read_items(task: Task, benchmark_dir: str = "", limit: int = 0) -> list[Item]:
    """The items of a task in file order, the first `limit` of them (0 = all). Errors name the row."""
    items = []
    for place, row in rows_of_file(task, benchmark_dir) if benchmark_dir else rows_of_hub(task):
        missing = [column for column in task.columns if column not in row]
        if missing:
            raise ValueError(
                f"{place} lacks {', '.join(missing)} (it has: {', '.join(row)}): {task.name} needs the "
                f"columns of {task.hub_id}"
            )
        try:
            check_columns(task, row)
            item = task.to_item(row)
            if not 0 <= item.gold < len(item.pairs):
                raise ValueError(f"there is no choice {item.gold}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            label = {key: row.get(key) for key in ("label", "answerKey", "answer") if key in row}
            raise ValueError(f"{place} is no item of {task.name} ({error}; label: {label})") from error
        items.append(item)
        if len(items) == limit:
            break
    if not items:
        raise ValueError(f"{task.name} has no items in {benchmark_dir or task.hub_id}")
    return items


def check_columns(task: Task, row: dict) -> None:
    """Raise ValueError if a column that is there holds something of another kind than the hub's."""
    for column in task.columns:
        value, kind = row[column], {"endings": list, "choices": dict}.get(column, str)
        if column in ("label", "answer", "answerKey"):
            kind = (str, int)  # "3" on the hub, 3 in some original files
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{column} is {value!r}")
        if kind is dict:
            texts, labels = value["text"], value["label"]
            if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
                raise ValueError(f"{column} has no list of texts with as many labels")
            value = texts
        if isinstance(value, list) and not all(isinstance(text, str) for text in value):
            raise ValueError(f"{column} holds something that is no text")
    if "text" in task.columns and " " not in row["text"]:
        raise ValueError("text has no last word to predict")


def rows_of_file(task: Task, benchmark_dir: str) -> Iterator[tuple[str, dict]]:
    path = Path(benchmark_dir) / f"{task.name}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: put {task.name} there, with the columns of {task.hub_id}")
    with open(path, "rb") as f:
        for i, line in enumerate(f, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError too
                raise ValueError(f"{path}, line {i} is not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {i} is no JSON object")
            yield f"{path}, line {i}", row


def rows_of_hub(task: Task) -> Iterator[tuple[str, dict]]:
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            task.hub_id, task.hub_config, split=task.split, revision=task.revision
        )
    except Exception as error:  # whatever the network, the hub or a cache raises
        raise ValueError(
            f"cannot read {task.name} from the hub's {task.hub_id} ({type(error).__name__}): connect to "
            f"the network, or put {task.name}.jsonl into a folder and name it with --benchmark_dir"
        ) from error
    for i, row in enumerate(rows):
        yield f"{task.hub_id}, row {i}", row


# -------------------------------------------------------------------------------
# from text to rows of token ids


def pair_to_ids(encoding, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """
    Token ids of a context and its continuation. They are encoded together, as the model would read
    them; spaces that end the context belong to the continuation, as a token's space comes first.
    """
    if context == "":
        ids = encoding.encode_ordinary(continuation)
        return [encoding.eot_token], ids
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole = encoding.encode_ordinary(kept + continuation)
    n = len(encoding.encode_ordinary(kept))
    return whole[:n], whole[n:]


@dataclass
class Row:
    """
    A context and the continuations that share it, computed as one sequence:

        row        c0 c1 c2 | a0 a1 | b0          continuations (a0 a1 a2) and (b0 b1)
        position    0  1  2    3  4    3          each goes on from the context
        predicts   a0,b0 ^   a1 a2    b1          and sees the context and itself alone
    """

    context: list[int]
    continuations: list[list[int]]
    requests: list[int]  # whose they are

    def __len__(self) -> int:
        return len(self.context) + sum(len(c) - 1 for c in self.continuations)


def make_rows(pairs: list[tuple], item_of: list[int], block_size: int) -> tuple[list[Row], int]:
    """
    Rows of the (context ids, continuation ids) of all requests, those of an item with one context
    sharing a row, and how many contexts were cut: the last block_size + 1 tokens of a pair count.
    Raises ValueError for a continuation that is empty or longer than block_size, and for a context of
    white space alone, which leaves nothing to predict from.
    """
    rows, n_cut = {}, 0
    for i, ((context, continuation), item) in enumerate(zip(pairs, item_of)):
        m = len(continuation)
        if not 1 <= m <= block_size:
            raise ValueError(
                f"item {item} (from 0) has a continuation of {m} tokens, but a model of block_size="
                f"{block_size} scores 1 to {block_size}: leave the task out, or train with a longer block_size"
            )
        if not context:
            raise ValueError(f"item {item} (from 0) has a context of white space alone: mend it")
        room = block_size + 1 - m
        n_cut += len(context) > room
        context = context[-room:]
        row = rows.setdefault((item, tuple(context)), Row(context, [], []))
        row.continuations.append(continuation)
        row.requests.append(i)
    return list(rows.values()), n_cut


def make_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of similar length together: at most a tenth of a batch is padding."""
    batches = []
    for row in sorted(rows, key=len, reverse=True):
        longest = len(batches[-1][0]) if batches else 0
        full = (len(batches[-1]) + 1) * longest > max_tokens if batches else True
        if full or len(row) < 0.9 * longest:
            batches.append([])
        batches[-1].append(row)
    return batches


# -------------------------------------------------------------------------------
# scores


@torch.no_grad()
def score_batch(model: GPT, batch: list[Row]) -> list[tuple[int, float, bool]]:
    """
    (request, log p(continuation | context), whether each of its tokens is the likeliest one), for
    every continuation of a batch. The head is computed where a token is predicted, nowhere else.
    """
    T, device = max(map(len, batch)), model.lm_head.weight.device
    ids, positions = np.zeros((2, len(batch), T), dtype=np.int64)
    segment = np.full((len(batch), T), -1)  # 0 the context, 1 .. its continuations, -1 padding
    at, targets, owner = [], [], []         # where a token is predicted, which one, whose it is
    for b, row in enumerate(batch):
        c = end = len(row.context)
        ids[b, :c], positions[b, :c], segment[b, :c] = row.context, range(c), 0
        for k, (continuation, request) in enumerate(zip(row.continuations, row.requests), start=1):
            start, end = end, end + len(continuation) - 1
            ids[b, start:end], segment[b, start:end] = continuation[:-1], k
            positions[b, start:end] = range(c, c + end - start)
            at += [b * T + c - 1, *range(b * T + start, b * T + end)]
            targets += continuation
            owner += [request] * len(continuation)
    segment = torch.from_numpy(segment).to(device)
    same = segment[:, :, None] == segment[:, None, :]              # (B, T, T)
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    mask = (causal & (same | (segment == 0)[:, None, :]))[:, None]  # (B, 1, T, T)
    x = model.hidden(
        torch.from_numpy(ids).to(device), positions=torch.from_numpy(positions).to(device), mask=mask
    ).flatten(0, 1)[torch.tensor(at, device=device)]               # (n, C)
    targets, total, greedy = torch.tensor(targets, device=device), defaultdict(float), {}
    logp, best, n = [], [], 2**25 // model.cfg.vocab_size          # rows of logits at a time
    for part, target in zip(x.split(n), targets.split(n)):
        logits = model.lm_head(part).float()                       # (n, V)
        logp += (logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
        best += (logits.argmax(-1) == target).tolist()
    for request, lp, is_best in zip(owner, logp, best):
        total[request] += lp
        greedy[request] = greedy.get(request, True) and is_best
    return [(request, total[request], greedy[request]) for request in total]


def pack_items(
    encoding, items: list[Item], name: str, block_size: int
) -> tuple[list[Row], list[str], list[int], int]:
    """Rows of all items, a key for every request, the item it belongs to, and how many contexts are cut."""
    pairs = [pair_to_ids(encoding, *pair) for item in items for pair in item.pairs]
    item_of = [i for i, item in enumerate(items) for _ in item.pairs]
    try:
        rows, n_cut = make_rows(pairs, item_of, block_size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return rows, [hashlib.sha1(repr(pair).encode()).hexdigest() for pair in pairs], item_of, n_cut


def score_items(
    model: GPT, encoding, items: list[Item], name: str, rt: Runtime, cache: Path | None = None
) -> tuple[list[list[float]], list[list[bool]], int]:
    """
    For every item the log-probabilities of its continuations and their greedy flags, and the number of
    contexts that were cut. The ranks share the work. With a cache, a file of scores by token ids, an
    interrupted evaluation continues.
    """
    rows, keys, item_of, n_cut = pack_items(encoding, items, name, model.cfg.block_size)
    known = rt.gather([read_scores(cache)] if rt.rank == 0 else [])[0]
    rows = [row for row in rows if any(keys[i] not in known for i in row.requests)]
    found = {}
    with rt.bar(total=len(rows), unit="item", desc=name) as bar:
        for i, batch in enumerate(make_batches(rows, max_tokens=8192)):
            if i % rt.world_size == rt.rank:
                scores = {keys[r]: (lp, best) for r, lp, best in score_batch(model, batch)}
                found |= scores
                if cache is not None:
                    with open(cache.with_suffix(f".{rt.rank}"), "a", encoding="utf-8") as f:
                        f.writelines(json.dumps([key, *score]) + "\n" for key, score in scores.items())
            bar.update(len(batch))
    for key, *score in rt.gather([(key, *score) for key, score in found.items()]):
        known[key] = score
    results = [[] for _ in items]
    for i, key in zip(item_of, keys):
        results[i].append(known[key])
    return [[lp for lp, _ in r] for r in results], [[best for _, best in r] for r in results], n_cut


def read_scores(cache: Path | None) -> dict:
    """What an interrupted evaluation left behind: key -> (log-probability, greedy)."""
    lines = []
    for path in cache.parent.glob(cache.stem + ".*") if cache else []:
        lines += path.read_text(encoding="utf-8").splitlines()
    return {row[0]: tuple(row[1:]) for row in map(try_json, lines) if row}


# -------------------------------------------------------------------------------
# metrics


def task_metrics(
    task: Task, items: list[Item], lls: list[list[float]], greedy: list[list[bool]], errors: bool = True
) -> dict:
    """The task's metrics and, with errors, their standard errors by lm-evaluation-harness's formulas."""
    per_item = {
        "acc": [pick(ll) == item.gold for item, ll in zip(items, lls)],
        "acc_norm": [pick(normed(ll, item.lengths)) == item.gold for item, ll in zip(items, lls)],
    }
    if "perplexity" in task.metrics:  # one word, right if every token of it is the likeliest
        per_item["acc"] = [flags[0] for flags in greedy]
    out, n = {"n": len(items)}, len(items)
    for metric in task.metrics:
        if metric == "perplexity":
            scores = np.array([ll[0] for ll in lls])
            out[metric] = math.exp(-scores.mean()) if scores.mean() > -700 else math.inf
            error = bootstrap_stderr(scores) if errors else None
        else:
            p = out[metric] = statistics.mean(map(float, per_item[metric]))
            error = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
        if errors:
            out[metric + "_stderr"] = error
    return out


def sample_tasks(names: str, benchmark_dir: str, n: int) -> list[tuple[Task, list[Item]]]:
    """n items of each task, the same ones for every run: to look at while training goes on."""
    subsets = []
    for task in find_tasks(names) if names else []:
        items = read_items(task, benchmark_dir)
        chosen = sorted(random.Random(0).sample(range(len(items)), min(n, len(items))))
        subsets.append((task, [items[i] for i in chosen]))
    return subsets


def score_subsets(model: GPT, encoding, subsets: list[tuple[Task, list[Item]]], rt: Runtime) -> dict:
    """{"hellaswag_acc_norm": ..., ...} of sampled tasks."""
    out = {}
    for task, items in subsets:
        lls, greedy, _ = score_items(model, encoding, items, task.name, rt)
        metrics = task_metrics(task, items, lls, greedy, errors=False)
        out |= {f"{task.name}_{metric}": metrics[metric] for metric in task.metrics}
    return out


def pick(scores: list[float]) -> int:
    return scores.index(max(scores))  # a tie goes to the first


def normed(ll: list[float], lengths: list[int]) -> list[float]:
    """Log-probability a character of the choice; an empty choice is never picked."""
    return [x / n if n else -math.inf for x, n in zip(ll, lengths)]


def bootstrap_stderr(scores: np.ndarray) -> float | None:
    """
    The standard deviation of exp(-mean) over 100,000 resamples, drawn as the harness draws them with
    Python's random.choices. numpy's Mersenne Twister gives the same numbers from the same state.
    """
    n, values = len(scores), []
    if n < 2:
        return None
    for seed in range(100):
        _, state, _ = random.Random(seed).getstate()
        twister = np.random.RandomState()
        twister.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
        for _ in range(1000):
            values.append(-scores[(twister.random_sample(n) * n).astype(np.int64)].mean())
    with np.errstate(over="ignore", invalid="ignore"):  # no number where the perplexity is past all numbers
        return float(np.std(np.exp(values), ddof=1))
