"""
Results of runs side by side: groups of seeds, their gaps to a reference, tables and figures.

A result is a plain dict, made by eval.py from a run, or read from a file of data/results/.
"""

import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from config import try_json
from data.benchmarks import PAPER, Task
from data.runs import INPUT_SETTINGS

# Student's t for n values: 95 % lie within +-T95[n - 2]. For more than 10, as for 10.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def read_results(path: str | Path) -> list[dict]:
    """Results that eval.py has stored, a line per run."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not there: eval.py RUN ... --results={path} writes it")
    found = [try_json(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if not found or not all(found):
        raise ValueError(f"{path} is damaged or empty: get it or write it anew")
    return found


@dataclass
class Group:
    """Runs that differ in their seed alone, the first of each seed."""

    input: str
    other: str  # what else tells it from other groups
    runs: dict[int, dict]  # {seed: result}
    reference: "Group | None" = None

    @property
    def name(self) -> str:
        return self.input + self.other

    def mean(self) -> float:
        return statistics.mean(self.losses().values())

    def losses(self, k: int | None = None) -> dict[int, float]:
        """{seed: loss}, or the loss in range k of by_frequency."""
        rows = {s: r if k is None else r["by_frequency"][k] for s, r in self.runs.items()}
        return {seed: row["loss"] for seed, row in rows.items()}

    def gap(self, k: int | None = None) -> tuple[float, float, int]:
        """
        These losses minus the reference's, paired by seed: the mean, half of its 95 % interval
        (Student's t; infinite for one pair), and the number of pairs.
        """
        mine, theirs = self.losses(k), self.reference.losses(k)
        pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        n = len(pairs)
        error = statistics.stdev(pairs) / math.sqrt(n) if n > 1 else math.inf
        return statistics.mean(pairs or [math.nan]), T95[min(max(n, 2), 10) - 2] * error, n

    def describe_gap(self) -> str:
        if self is self.reference:
            return "reference"
        gap, half, n = self.gap()
        if n < 2:
            return f"{gap:+.3f} ({n} pair)"
        return ("" if abs(gap) > half else "not told apart: ") + f"{gap:+.3f} ± {half:.3f}"


def compare(results: list[dict], against: str) -> list[Group]:
    """
    The groups. Each is compared with the group whose input (or name) is `against`, of the same
    other settings if there is one; "" stands for the first group.
    """
    settings = [result["settings"] | {"dataset": result["dataset"]} for result in results]
    told = {"seed", "input_mode", *INPUT_SETTINGS}
    differ = [k for k in settings[0] if k not in told and len({s.get(k) for s in settings}) > 1]
    groups = {}
    for result, own in zip(results, settings):
        other = "".join(f" {key}={own[key]}" for key in differ if own.get(key) not in ("", None))
        mode, seed = result["input"].split()[0], result["seed"]
        other = other.replace(f"_seed{seed}", "").replace(f"{mode}_", "")  # starts alike
        key = (result["input"], other, result["step"], json.dumps(result["data"]))
        group = groups.setdefault(key, Group(result["input"], other, {}))
        group.runs.setdefault(result["seed"], result)  # a copy of a run counts once
    groups = list(groups.values())
    named = [group for group in groups if against in ("", group.input, group.name)]
    if not named:
        known = ", ".join(group.name for group in groups)
        raise ValueError(f"against must be one of {known}, got {against!r}")
    for group in groups:
        alike = [g for g in named if (g.input, g.other) == (named[0].input, group.other)]
        group.reference = (alike or named)[0]
    return groups


# --- tables --------------------------------------------------------------------


def print_rows(lines: list[list[str]]) -> None:
    """A Markdown table; the first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def mean_sd(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def print_losses(groups: list[Group]) -> None:
    """A line per group: mean ± standard deviation over its seeds, and its gap to the reference."""
    head = "model,seeds,parameters,in the input,training tokens,validation loss,perplexity"
    lines = [[*head.split(","), "bits per byte", "gap to the reference"]]
    for group in groups:
        results = list(group.runs.values())
        line = [group.name, str(len(results))]
        line += [f"{results[0][key]:,}" for key in ("n_params", "n_input_params", "train_tokens")]
        for key, digits in (("loss", 3), ("perplexity", 1), ("bits_per_byte", 3)):
            line.append(mean_sd([r[key] for r in results], digits))
        lines.append([*line, group.describe_gap()])
    bigrams = {tuple(r["bigram"].values()): 0 for g in groups for r in g.runs.values()}
    for loss, perplexity, bits in bigrams:
        cells = [f"{loss:.3f}", f"{perplexity:.1f}", f"{bits:.3f}", ""]
        lines.append(["bigram model", "", "", "", "", *cells])
    print_rows(lines)


def print_tasks(results: list[dict], tasks: list[Task]) -> None:
    """A line per group, then the paper's scores, where it gives some for these tasks."""
    columns = [(task.name, metric) for task in tasks for metric in task.metrics]
    head = ["model", "seeds"]
    for task, metric in columns:
        one = results[0]["tasks"][task]
        head.append(f"{task} {metric}" + (f" (first {one['n']} items)" if one["limited"] else ""))
    lines = [head]
    for name, group in [(g.name, list(g.runs.values())) for g in compare(results, "")]:
        line = [name, str(len(group))]
        for task, metric in columns:
            unit = 1 if metric == "perplexity" else 100  # accuracies in percent
            error = group[0]["tasks"][task][metric + "_stderr"]
            cell = mean_sd([unit * run["tasks"][task][metric] for run in group], 2)
            if len(group) == 1 and error is not None:
                cell += f" ± {unit * error:.2f}"
            line.append(cell)
        lines.append(line)
    if set(columns) & set(PAPER):
        cells = [f"{100 * PAPER[column]:.2f}" if column in PAPER else "" for column in columns]
        lines.append(["canonical, the paper's 1.7B", "1", *cells])
    print_rows(lines)
    print("accuracies in percent; ± is the standard error over items, or the deviation over seeds")


# --- figures -------------------------------------------------------------------


def draw(path: Path, n_panels: int, plot: Callable, data: object) -> None:
    """Call plot(axis, ..., data) and save the figure. Whatever goes wrong is no reason to stop."""
    os.environ["MPLBACKEND"] = "agg"  # needs no display, and no notebook
    try:
        from matplotlib.figure import Figure

        figure = Figure((6 * n_panels, 4.5), layout="constrained")
        plot(*figure.subplots(1, n_panels, squeeze=False)[0], data)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        print(f"drawn: {path}")
    except Exception as error:
        print(f"warning: {path} could not be drawn ({error})")


def plot_training(axis: object, curves: dict[str, list[list[dict]]]) -> None:
    """{label: [rows of metrics, ...]}: loss over tokens, that of training (if there) faint."""
    for i, (label, histories) in enumerate(curves.items()):
        for rows in histories:
            steps = [row for row in rows if "loss" in row]
            n = max(1, len(steps) // 100)  # steps per point of the training loss
            points = [steps[k : k + n] for k in range(0, len(steps) - n + 1, n)]
            losses = [statistics.mean(row["loss"] for row in point) for point in points]
            tokens = [point[-1]["tokens"] / 1e6 for point in points]
            axis.plot(tokens, losses, color=f"C{i}", alpha=0.35, linewidth=1)
            val = [row for row in rows if "val_loss" in row]
            losses = [row["val_loss"] for row in val]
            tokens = [row["tokens"] / 1e6 for row in val]
            name = label if rows is histories[0] else None  # one entry in the legend
            axis.plot(tokens, losses, "o-", color=f"C{i}", markersize=3, label=name)
    axis.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(title="points: validation", fontsize=min(10, 160 / len(curves)))


def plot_frequencies(axis: object, groups: list[Group]) -> None:
    """Each group minus its reference, by how often the input token was seen in training."""
    for i, group in enumerate(groups):
        bins = next(iter(group.runs.values()))["by_frequency"]
        gaps = [group.gap(k) for k in range(len(bins))]
        seen = [max(row["from"], 0.5) for row in bins]
        error = [half if n > 1 else 0 for _, half, n in gaps]
        axis.errorbar(seen, [gap[0] for gap in gaps], error, fmt="o-", color=f"C{i}", capsize=3)
    axis.set(xscale="log", xlabel="occurrences of the input token in the training text, at least")
    axis.set_ylabel("validation loss of the next token - reference (nats)")
    axis.grid(alpha=0.3)


def plot_comparison(left: object, right: object, groups: list[Group]) -> None:
    """Training curves, and the gap by frequency."""
    plot_training(left, {g.name: [r["curve"] for r in g.runs.values()] for g in groups})
    plot_frequencies(right, groups)


def plot_gaps(axis: object, groups: list[Group]) -> None:
    """The gap of each group to its reference, the line at 0, with 95 % intervals."""
    groups = [group for group in groups if group is not group.reference][::-1]  # best on top
    for y, group in enumerate(groups):
        gap, half, n = group.gap()
        axis.errorbar(gap, y, xerr=half if n > 1 else 0, fmt="o" if n > 1 else "x", color="C0")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(groups)), [f"{g.name} (n = {g.gap()[2]})" for g in groups])
    names = {group.reference.input: 0 for group in groups}
    axis.set_xlabel(f"validation loss - {' or '.join(names)} (nats, 95 % interval)")
    axis.grid(alpha=0.3, axis="x")
    axis.figure.set_size_inches(11, 2 + 0.25 * len(groups))


def show(results: list[dict], against: str, name: str, out_dir: str) -> None:
    """The table and the figures of some runs."""
    groups = sorted(compare(results, against), key=lambda group: group.mean())
    print_losses(groups)
    if len(groups) > 1:
        draw(Path(out_dir, f"{name}compare.png"), 2, plot_comparison, groups)
        draw(Path(out_dir, f"{name}gap.png"), 1, plot_gaps, groups)
