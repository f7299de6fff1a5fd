"""What the README says is true: drawings, file sizes, commands, settings."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from codes import FixedTokenCode
from config import load_config, split_args
from data.fineweb_edu import FinewebConfig
from data.pydocs import PydocsConfig
from data.text import TextConfig
from eval import EvalConfig
from train import TrainConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = {"train.py": TrainConfig, "eval.py": EvalConfig, "data.text": TextConfig, "data.pydocs": PydocsConfig,
            "data.fineweb_edu": FinewebConfig}  # fmt: skip


def commands() -> list[list[str]]:
    """Every python or torchrun command in the README's shell blocks."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    lines = re.sub(r"\$\{arm\}", "gf2", lines).replace("$seed", "1")
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
        words = [word for word in words[1:] if word not in ("--help", "--plan")]
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


def test_it_is_short_and_complete():
    prose = re.sub(r"```.*?```|^\|.*$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 900, len(prose.split())
    assert not re.search(r"TODO|TOYTABLE|TASKTABLE|BENCH\b|FILES\b", README)


def test_nothing_else_lies_at_the_top_level():
    allowed = {*"README.md requirements.txt model.py codes.py train.py eval.py data config tests".split()}
    found = {path.name for path in Path(ROOT).iterdir() if not path.name.startswith((".", "__"))}
    assert found - {"out"} <= allowed, found - allowed
