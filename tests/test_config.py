"""Settings, the loader, and what they say of a mistake; the config files."""

import dataclasses
import re
from typing import Literal

import pytest
from conftest import ARMS, ROOT, TINY, assert_clean_error, run

from config import Settings, help_text, load_config, split_args
from train import TrainConfig, main


def load(*argv: str) -> TrainConfig:
    words, given = split_args(list(argv), TrainConfig, "")
    return load_config(TrainConfig, given, words)


def test_the_command_line_wins_over_the_file_which_may_compute_and_import(tmp_path):
    path = tmp_path / "good.py"
    path.write_text("import math\n_k = 4\nn_layer = int(math.sqrt(_k))\ncompile = False\n")
    assert load().n_layer == 6 and (load(str(path)).n_layer, load(str(path)).compile) == (2, "False")
    assert load(TINY, "--n_layer=3").n_layer == load("--n_layer=3", TINY).n_layer == 3


def test_text_becomes_the_type_of_its_setting(monkeypatch):
    cfg = load("--learning_rate=1", "--run_name=a=b", "--max_iters=1e3", "--tokens_per_iter=4_096")
    assert (cfg.learning_rate, cfg.run_name, cfg.max_iters) == (1.0, "a=b", 1000)
    assert isinstance(cfg.learning_rate, float) and isinstance(cfg.max_iters, int)
    assert cfg.tokens_per_iter == 4096 and cfg.out_dir == "out/canonical_a=b"
    assert load("--seed=9007199254740993").seed == 2**53 + 1  # no float holds it
    monkeypatch.setenv("HOME", "/home/ada")
    assert load("--data_dir=~/x").data_dir == "/home/ada/x" and load("--data_dir=a~/x").data_dir == "a~/x"


def test_a_switch_is_spelled_in_any_way_and_may_stand_alone():
    for text in ("1", "true", "True", "yes", "0", "false", "FALSE", "no"):
        value = text in ("1", "true", "True", "yes")
        assert load(f"--code_shift={text}").code_shift is value and load(f"--compile={text}").compile == str(value)
    assert load("--code_shift").code_shift is True
    assert TrainConfig(compile=False).compile == "False" and load().compile == "auto"


@pytest.mark.parametrize(
    "arg, message",
    [
        ("--learing_rate=1e-3", "unknown setting 'learing_rate', did you mean 'learning_rate'"),
        ("--seed 3", "cannot read '--seed': settings are written --seed=value"),
        ("--seed=1 --seed=2", "--seed is given twice: write --seed=2 once"),
        ("\u2013seed=3", "cannot read '\u2013seed=3': settings are written --seed=3"),
        ("--n_layer=0", "n_layer must be at least 1, got 0"),
        ("--batch_size=2.5", "batch_size must be a whole number < 2^63, got '2.5'"),
        ("--warmup_iters=-1", "warmup_iters must be at least 0, got -1"),
        ("--dtype=bf16", "dtype must be one of auto, float32, bfloat16, float16, got 'bf16'"),
        ("--input_mode=binary", "input_mode must be one of learned, canonical, gf2, random, spelling, got 'binary'"),
        ("--code_scale=0", "code_scale must be at least 1e-06, got 0.0"),
        ("--code_shift=maybe", "code_shift must be True or False, got 'maybe'"),
        ("--learning_rate=nan", "learning_rate must be a number, got 'nan'"),
        ("--seed=9223372036854775808", "seed must be a whole number < 2^63"),
        ("--run_name=a/b", "run_name must be the name of a folder"),
        ("--n_embd=90", "n_embd must be a multiple of 2 x n_head = 4"),
        ("out/canonical_toy", "out/canonical_toy is no config file (.py); to continue"),
        ("config/nothing.py", "config file config/nothing.py: FileNotFoundError"),
    ],
)
def test_a_wrong_setting_is_named_with_the_remedy(arg, message):
    with pytest.raises(ValueError) as caught:
        load(*arg.split())
    assert message in str(caught.value)


def test_a_wrong_line_in_a_file_is_named(tmp_path):
    path = tmp_path / "bad.py"
    for content, message in [
        ("learing_rate = 1e-3", "unknown setting 'learing_rate', did you mean 'learning_rate'"),
        ("n_layer = True", "n_layer must be a whole number < 2.63, got True"),
        ("import sys; sys.exit(0)", "SystemExit"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load(str(path))


def test_a_type_that_no_setting_can_have_is_refused_with_those_it_can():
    for kind in (list, int | None, Literal[1, 2]):
        cls = dataclasses.make_dataclass("Odd", [("size", kind, None)], bases=(Settings,))
        with pytest.raises(ValueError, match="size is a .*: use bool, int, float, str or a Literal"):
            load_config(cls, {})


# --- what a program says --------------------------------------------------------


@dataclasses.dataclass
class Odd(Settings):
    silent: int = 4
    sharp: str = "a # b"  # after a sharp sign
    way: Literal["x", "y"] = "x"  # one of two


def test_help_survives_any_default_and_no_comment():
    lines = help_text(Odd, None).splitlines()[-3:]
    words = [["4"], ["'a # b'", "after a sharp sign"], ["'x'", "one of two (x | y)"]]
    assert [re.split("  +", line.strip())[1:] for line in lines] == words


def test_help_lists_every_setting_with_its_default_also_without_docstrings(capsys):
    with pytest.raises(SystemExit):
        main(["--no_such=1", "--help"])
    printed, result = capsys.readouterr().out, run("-OO", "train.py", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "python train.py" in printed and "python train.py" not in result.stdout
    for output in (printed, result.stdout):
        lines = {line.split()[0]: line for line in output.splitlines() if re.match("  [a-z]", line)}
        for field in dataclasses.fields(TrainConfig):
            assert repr(field.default) in lines[field.name], field.name
            assert len(lines[field.name].split()) > 3, f"{field.name} has no meaning"


def program(body: str):
    return run("-c", f"from config import run_cli\ndef main(argv): {body}\nrun_cli(main, 'x.py')")


def test_what_a_user_or_a_machine_causes_is_told_in_one_sentence():
    assert_clean_error(run("train.py", TINY, "--learing_rate=1"), "did you mean 'learning_rate'")
    assert_clean_error(program("raise ValueError('a b')"), "x.py: error: a b")
    assert_clean_error(program("open('no/such')"), "cannot use no/such: No such file")
    assert_clean_error(program("raise MemoryError"), "not enough memory: lower batch_size")
    assert_clean_error(program("raise RuntimeError('Closed by peer')"), "connection to another")
    stopped = program("raise KeyboardInterrupt")
    assert (stopped.returncode, stopped.stderr) == (130, "x.py: interrupted\n")
    assert "Traceback" in program("raise RuntimeError('illegal memory access')").stderr  # a bug


def test_a_program_runs_in_a_notebook_whose_output_is_no_file():
    code = "import io, sys; sys.stdout = io.StringIO(); from config import run_cli\n"
    result = run("-c", code + "run_cli(lambda argv: print(7, file=sys.stderr), 'x.py')")
    assert (result.returncode, result.stderr) == (0, "7\n")


# --- config files --------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "1p7b"])
def test_the_three_models_differ_in_the_input_alone(name):
    settings = {arm: dataclasses.asdict(load(str(ROOT / "config" / f"{arm}_{name}.py"))) for arm in ARMS}
    assert name != "toy" or settings["canonical"] == dataclasses.asdict(TrainConfig())
    for arm in ARMS:
        assert settings[arm].pop("input_mode") == arm
        assert settings[arm].pop("out_dir") == f"out/{arm}_{name}"
    assert settings["learned"] == settings["canonical"] == settings["gf2"]


def test_importing_a_module_does_nothing(tmp_path):
    modules = "train, eval, codes, model, data.pydocs, data.text, data.prepare, data.fineweb_edu"
    code = f"import sys; sys.argv = ['x', '--no']; sys.path.insert(0, {str(ROOT)!r})\nimport {modules}"
    code += "\nassert not {'matplotlib', 'datasets', 'pyarrow'} & set(sys.modules)"
    result = run("-W", "error", "-c", code, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
