"""What the README says is true: drawings, file sizes, commands, settings."""

import json
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ARMS, ROOT

from codes import FixedTokenCode
from config import load_config, split_args
from data.fineweb_edu import FinewebConfig
from data.pydocs import PydocsConfig
from data.text import TextConfig
from eval import EvalConfig
from eval import main as evaluate
from train import TrainConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "data" / "results").glob("*.jsonl"))
SETTINGS = {"train.py": TrainConfig, "eval.py": EvalConfig, "data.text": TextConfig, "data.pydocs": PydocsConfig,
            "data.fineweb_edu": FinewebConfig}  # fmt: skip


def commands() -> list[list[str]]:
    """Every python or torchrun command in the README's shell blocks."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    for name, value in {"${arm}": "gf2", "$seed": "1", "$scale": "0.1"}.items():
        lines = lines.replace(name, value)
    parts = [part.split("#")[0].strip() for line in lines.splitlines() for part in line.split("&&")]
    parts = [part.split("WORLD_SIZE=8 ")[-1].split("DISABLE_SHARE_RDZV_TCP_STORE=1 ")[-1] for part in parts]
    return [shlex.split(part) for part in parts if part.startswith(("python ", "torchrun "))]


def test_there_are_commands():
    assert len(commands()) >= 12
    assert len(re.findall(r"^pip install ", README, re.MULTILINE)) == 2


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_names_files_and_settings_that_exist(command):
    words = [word for word in command[1:] if word != "-m"]
    if command[0] == "torchrun":
        words = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    program = words[0]
    if program in SETTINGS:
        words = [word for word in words[1:] if word not in ("--help", "--plan", "--published")]
        files, given = split_args(words, SETTINGS[program], "")
        configs = [path for path in files if path.startswith("config/")]
        assert all((ROOT / path).exists() for path in configs)
        load_config(SETTINGS[program], given, configs)
    else:
        assert program in ("pytest", "codes.py", "tests/bench.py") and (
            program == "pytest" or (ROOT / program).exists()
        )


def test_the_drawing_shows_real_codes():
    for mode, bits in (("canonical", "10100101100"), ("gf2", "10111001001")):
        code = FixedTokenCode(2048, 88, mode)(torch.tensor(421))
        assert "".join(str(int(v)) for v in code) == bits * 8
        assert bits in README


def test_line_counts_are_true_to_the_nearest_ten():
    table = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.MULTILINE)
    assert {"codes.py", "model.py", "train.py", "eval.py"} <= {name for name, _ in table}
    for name, lines in table:
        n = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert abs(n - int(lines)) <= 10, f"{name} has {n} lines, the README says {lines}"


def test_the_numbers_are_those_of_the_stored_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    start = time.perf_counter()
    evaluate(["--published", f"--out_dir={tmp_path}"])
    assert time.perf_counter() - start < 20
    printed = re.sub(" +", " ", capsys.readouterr().out)
    rows = re.findall(r"^\| .* ± .*\|$", README, re.MULTILINE)
    stored = [json.loads(line) for path in RESULTS for line in path.read_text().splitlines()]
    for row in rows:
        assert re.sub(" +", " ", row) in printed
    arms = [json.loads(line) for line in RESULTS[0].read_text().splitlines()]
    loss = {arm: np.array([run["loss"] for run in arms if run["input"] == arm]) for arm in ARMS}
    for arm in ARMS:  # again, without the program that prints them; seeds 1, 2, 3 in order
        assert [run["seed"] for run in arms if run["input"] == arm] == [1, 2, 3]
        row = next(row for row in rows if row.startswith(f"| {arm} "))
        assert f" {loss[arm].mean():.3f} ± {loss[arm].std(ddof=1):.3f} " in row
        gap = loss[arm] - loss["learned"]
        half = 4.303 * gap.std(ddof=1) / 3**0.5  # Student's t, two degrees of freedom
        assert arm == "learned" or f" {gap.mean():+.3f} ± {half:.3f} " in row
    claims = re.findall(r"[+-]\d\.\d{3} ± \d\.\d{3}", prose())
    assert len(claims) >= 5 and not [claim for claim in claims if claim not in printed]
    assert sum(path.stat().st_size for path in RESULTS) < 500_000 and len(stored) > 50


def test_every_exercise_names_a_test_that_exists():
    named = re.findall(r"`(tests/\w+\.py) -k (\w+)`", README)
    assert len(named) == 7 and README.count("\n| 7 |") == 1
    for path, word in named:
        assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), word


def prose() -> str:
    return re.sub(r"```.*?```|^\|[^\n]*$", "", README, flags=re.DOTALL | re.MULTILINE)


def test_it_is_short_and_complete():
    assert 600 < len(prose().split()) <= 1200, len(prose().split())
    assert not re.search(r"TODO|@[A-Z]+@", README)
    pictures = re.findall(r"!\[[^\]]+\]\((.+?)\)", README)
    assert len(pictures) == 3 and all((ROOT / path).stat().st_size < 300_000 for path in pictures)


def test_nothing_else_lies_at_the_top_level():
    allowed = {*"README.md requirements.txt model.py codes.py train.py eval.py data config tests".split()}
    found = {path.name for path in Path(ROOT).iterdir() if not path.name.startswith((".", "__"))}
    assert found - {"out"} <= allowed, found - allowed
