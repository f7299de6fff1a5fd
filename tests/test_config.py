"""The loader: precedence, types, and what it says of a mistake."""

import dataclasses

import pytest

from config import help_text, load_config, split_args
from conftest import ARMS, ROOT, TINY, assert_clean_error, run, values
from train import TrainConfig


def load(*argv: str) -> TrainConfig:
    return load_config(TrainConfig, *split_args(list(argv)))


def test_the_command_line_goes_before_the_file_wherever_it_stands():
    assert TrainConfig().n_layer == 24 and load(TINY).n_layer == 2
    assert load(TINY, "--n_layer=3").n_layer == load("--n_layer=3", TINY).n_layer == 3


def test_text_becomes_the_type_of_its_setting():
    cfg = load("--learning_rate=1", "--compile=false", "--run_name=a=b", "--max_iters=1e3",
               "--code_shift=1", "--tokens_per_iter=4_096", "--batch_size=2")  # fmt: skip
    assert (cfg.learning_rate, cfg.compile, cfg.run_name, cfg.max_iters) == (1.0, "False", "a=b", 1000)
    assert isinstance(cfg.learning_rate, float) and isinstance(cfg.max_iters, int)
    assert cfg.code_shift is True and cfg.tokens_per_iter == 4096
    assert load("--compile=0").compile == "False" and load("--compile=True").compile == "True"
    assert cfg.out_dir == "out/canonical_a=b"


def test_a_switch_may_stand_alone():
    assert load("--plan").plan is True and load("--plan=False").plan is False and load("--seed=2").plan is False


def test_large_whole_numbers_stay_exact():
    assert load("--seed=9007199254740993").seed == 2**53 + 1


@pytest.mark.parametrize(
    "arg, message",
    [
        ("--learing_rate=1e-3", "unknown setting 'learing_rate', did you mean 'learning_rate'"),
        ("--max_iter=10", "did you mean 'max_iters'"),
        ("--seed", "written --seed=value"),
        ("-seed=3", "written --seed=value"),
        ("--n_layer=0", "n_layer must be at least 1, got 0"),
        ("--batch_size=2.5", "batch_size must be a whole number, got '2.5'"),
        ("--warmup_iters=-1", "warmup_iters must be at least 0, got -1"),
        ("--dtype=bf16", "dtype must be one of auto, float32, bfloat16, float16, got 'bf16'"),
        ("--input_mode=binary", "input_mode must be one of learned, canonical, gf2, got 'binary'"),
        ("--code_shift=maybe", "code_shift must be True or False, got 'maybe'"),
        ("--learning_rate=nan", "learning_rate must be finite"),
        ("--learning_rate=fast", "learning_rate must be a number, got 'fast'"),
        ("--max_iters=inf", "max_iters must be a whole number"),
        ("--seed=100000000000000000000", "seed must be a whole number (and below 2^63)"),
        ("--max_iters=1" + "0" * 400, "max_iters must be a whole number (and below 2^63)"),
        ("--rope_theta=1e-300", "rope_theta must be at least 1"),
        ("--run_name=a/b", "run_name must be the name of a folder"),
        ("--beta2=1", "beta1 and beta2 must be below 1"),
        ("--n_embd=100", "n_embd must be a multiple of 2 x n_head = 64"),
        ("--eval_interval=-5", "eval_interval must be at least 0"),
    ],
)
def test_a_wrong_setting_is_named_with_the_remedy(arg, message):
    with pytest.raises(ValueError) as caught:
        load(arg)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ("learing_rate = 1e-3", "unknown setting 'learing_rate', did you mean 'learning_rate'"),
        ("n_layer = 2.5", "n_layer must be a whole number, got 2.5"),
        ("n_layer = True", "n_layer must be a whole number, got True"),
        ("n_layer = None", "n_layer must be a whole number, got None"),
        ("run_name = 3", "run_name must be text, got 3"),
        ("n_layer = = 2", "SyntaxError"),
        ("n_layer = two", "NameError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("from config.no_such import *", "no_such"),
    ],
)
def test_a_wrong_line_in_a_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad.py"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        load(str(path))
    assert message in str(caught.value)


def test_a_config_file_may_compute_and_import(tmp_path):
    path = tmp_path / "good.py"
    path.write_text("import math\n_k = 4\nn_layer = int(math.sqrt(_k))\nlearning_rate = 1\ncompile = False\n")
    cfg = load(str(path))
    assert cfg.n_layer == 2 and cfg.learning_rate == 1.0 and cfg.compile == "False"


def test_a_missing_config_file_is_a_clean_error():
    assert_clean_error(run("train.py", "config/nothing.py"), "config/nothing.py", "does not exist")


def test_mistakes_on_the_command_line_end_cleanly():
    assert_clean_error(run("train.py", TINY, "--learing_rate=1"), "did you mean 'learning_rate'")
    assert_clean_error(run("train.py", TINY, "--seed", "3"), "--seed=value")
    assert_clean_error(run("eval.py"), "name at least one run")
    assert_clean_error(run("eval.py", "out/x", "--temprature=1"), "did you mean 'temperature'")


def test_ctrl_c_is_told_in_one_sentence():
    code = "from config import run_cli\ndef main(argv): raise KeyboardInterrupt\nrun_cli(main, 'x.py')"
    result = run("-c", code)
    assert result.returncode == 130
    assert_clean_error(result, "x.py: interrupted: the same command goes on")


@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_help_lists_every_setting_with_default_and_meaning(program):
    result = run(program, "--help")
    assert result.returncode == 0 and result.stderr == ""
    cls = {"train.py": TrainConfig, "eval.py": __import__("eval").EvalConfig}[program]
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    for field in dataclasses.fields(cls):
        assert repr(field.default) in lines[field.name], field.name
        assert len(lines[field.name].split()) > 3, f"{field.name} has no meaning"


def test_every_default_of_help_comes_from_the_dataclass():
    assert "max_iters        47684" in help_text(TrainConfig, "")


@pytest.mark.parametrize("name", ["toy", "1p7b"])
def test_the_arms_differ_in_the_input_alone(name):
    settings = {arm: values(load(str(ROOT / "config" / f"{arm}_{name}.py"))) for arm in ARMS}
    for arm in ARMS:
        assert settings[arm].pop("input_mode") == arm
        assert settings[arm].pop("out_dir") == f"out/{arm}_{name}"
    assert settings["learned"] == settings["canonical"] == settings["gf2"]


def test_importing_a_module_does_nothing(tmp_path):
    modules = "train, eval, codes, model, data.pydocs, data.text, data.prepare, data.shards"
    modules += ", data.fineweb_edu"
    code = f"import sys; sys.argv = ['x', '--nonsense']; sys.path.insert(0, {str(ROOT)!r})\nimport {modules}"
    code += "\nassert not {'matplotlib', 'tiktoken', 'datasets', 'pyarrow', 'transformers'} & set(sys.modules)"
    result = run("-W", "error", "-c", code, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
