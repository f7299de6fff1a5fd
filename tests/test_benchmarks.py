"""data/benchmarks.py: what is asked, how it is scored, and the metrics, by hand."""

import json
import math
import os
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_clean_error, make_model, run

import eval as eval_module
from config.machine import Precision, Runtime
from data.benchmarks import TASKS, Item, find_tasks, make_requests, pair_to_ids, read_items, task_metrics
from data.tokenizers import load_encoding, read_spec
from eval import score, score_batch
from train import main as train

RT = Runtime(Precision("cpu", "float32", scaler=False, compile=False, flash=True))


# -------------------------------------------------------------------------------
# what is asked


def item(task: str, **row) -> Item:
    return TASKS[task].to_item(row)


def test_hellaswag_by_hand():
    got = item("hellaswag", activity_label="Baking", ctx_a="[header] How to bake [title] Mix it.",
               ctx_b="THE Dough", endings=["[step] Knead it.", "a [x]b   c", "[title] d", " [title] e"], label="3")  # fmt: skip
    # Marks go, spaces that stood beside them stay; two spaces become one, three become two.
    assert [p[0] for p in got.pairs] == ["Baking: How to bake. Mix it. The dough"] * 4
    assert [p[1] for p in got.pairs] == ["  Knead it.", " a b  c", "  d", "  e"]
    assert got.gold == 3 and got.lengths == [len(p[1]) - 1 for p in got.pairs]
    assert item("hellaswag", activity_label="a", ctx_a="b", ctx_b="", endings=["x"], label=0).gold == 0


def test_the_other_tasks_by_hand():
    got = item("piqa", goal="Open it ", sol1="pull", sol2="push ", label=1)
    assert got == Item([("Question: Open it \nAnswer:", " pull"), ("Question: Open it \nAnswer:", " push ")], 1, [4, 5])
    row = {"question": "Q?", "choices": {"text": ["a", "bb", "c"], "label": ["1", "2", "3"]}}
    for key in ("3", 3):
        got = item("arc_easy", **row, answerKey=key)
        assert got == Item([("Question: Q?\nAnswer:", f" {c}") for c in ("a", "bb", "c")], 2, [1, 2, 1])
    row = {"question_stem": "The sun", "choices": {"text": ["is", "was"], "label": ["A", "B"]}}
    assert item("openbookqa", **row, answerKey=" B") == Item([("The sun", " is"), ("The sun", " was")], 1, [2, 3])
    got = item("winogrande", sentence="I saw _'s dog, _ ran. ", option1="Ann", option2="Bob", answer="2")
    assert got.pairs == [("I saw Ann", " 's dog, _ ran."), ("I saw Bob", " 's dog, _ ran.")] and got.gold == 1
    assert item("lambada_openai", text="a  b\nc d").pairs == [("a  b\nc", " d")]
    assert item("lambada_standard", text="x of\n\nPower").pairs == [("x", " of\n\nPower")]
    assert item("lambada_openai", text="ends in a space ").pairs == [("ends in a space", " ")]


def test_tasks_are_found_by_name_group_and_near_miss():
    assert [t.name for t in find_tasks("paper")] == ["hellaswag", "piqa", "lambada_openai"]
    assert len(find_tasks("all")) == 8 and len(find_tasks("piqa,paper,piqa")) == 3
    with pytest.raises(ValueError, match="unknown task 'helaswag', did you mean 'hellaswag'"):
        find_tasks("piqa,helaswag")


def test_text_becomes_ids_together_and_spaces_move_to_the_continuation(dataset):
    encoding = load_encoding(read_spec(dataset))
    for context, continuation in [("Document 1:", " two three"), ("Document  ", "two"), ("a\u00a0\u2003", " b")]:
        ids = pair_to_ids(encoding, context, continuation)
        assert ids[0] == encoding.encode_ordinary(context.rstrip())
        assert ids[0] + ids[1] == encoding.encode_ordinary(context + continuation)
    assert pair_to_ids(encoding, "", "two") == ([encoding.eot_token], encoding.encode_ordinary("two"))
    context, continuation = pair_to_ids(encoding, "text ends in ", " ")
    assert encoding.decode(continuation) == "  "


# -------------------------------------------------------------------------------
# scores


def slow_score(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One request alone, all its logits, no padding, no packing."""
    ids = (context + continuation)[-(model.cfg.block_size + 1) :]
    logp = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0, -len(continuation) :]
    target = torch.tensor(continuation)
    return logp[range(len(target)), target].sum().item(), bool((logp.argmax(-1) == target).all())


def test_requests_score_as_each_alone():
    model = make_model(input_mode="gf2")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    draw = torch.Generator().manual_seed(0)
    requests = []
    for i in range(90):
        n = 1 + i % 9
        context = torch.randint(512, (1 + 2 * i % 41,), generator=draw).tolist()[-(33 - n) :]
        best = model(torch.tensor([context]))[0, -1].argmax().item()
        rest = torch.randint(512, (n,), generator=draw).tolist()
        requests.append((context, [best] * (i % 2) + rest[i % 2 :]))
    scores = score(model, requests, "test", RT)
    expected = [slow_score(model, *request) for request in requests]
    lls = [ll for ll, _ in scores]
    assert lls == pytest.approx([ll for ll, _ in expected], rel=1e-5, abs=1e-4)
    assert [flag for _, flag in scores] == [flag for _, flag in expected]
    assert {flag for _, flag in expected} == {True, False}


def test_contexts_are_cut_at_their_start_and_continuations_never(dataset):
    encoding = load_encoding(read_spec(dataset))
    context, word = " ".join(["one two three"] * 9), " four"
    ids, target = pair_to_ids(encoding, context, word)
    (request,), n_cut = make_requests([Item([(context, word)], 0, [4])], "x", encoding, 8)
    assert n_cut == 1 and request == (ids[-(9 - len(target)) :], target)
    (request,), n_cut = make_requests([Item([(context, word)], 0, [4])], "x", encoding, 500)
    assert n_cut == 0 and request == (ids, target)
    long = Item([("a", " one two three four five")], 0, [4])
    with pytest.raises(ValueError, match="item 1 .from 0. of x has a continuation of .* not of 1 to"):
        make_requests([Item([("a", " b")], 0, [1]), long], "x", encoding, 3)


def test_greedy_needs_every_token():
    model = make_model()
    context = [1, 2, 3]
    first = model(torch.tensor([context]))[0, -1].argmax().item()
    second = model(torch.tensor([context + [first]]))[0, -1].argmax().item()
    targets = [[first, second], [first, (second + 1) % 512], [first]]
    scores = score_batch(model, [(context, target) for target in targets], RT)
    assert [flag for _, flag in scores] == [True, False, True]


# -------------------------------------------------------------------------------
# metrics


def metrics(task: str, items: list[Item], lls, greedy=None) -> dict:
    return task_metrics(TASKS[task], items, lls, greedy or [[False] * len(ll) for ll in lls])


def test_acc_norm_divides_by_characters_of_the_choice():
    # a character: -6/6 = -1, -5/4 = -1.25; a byte: -6/12 = -0.5, -5/4; with its space: -6/7, -5/5
    accented = Item([("c", " " + "\u00e9" * 6), ("c", " abcd")], 0, [6, 4])
    assert metrics("piqa", [accented], [[-6.0, -5.0]])["acc_norm"] == 1.0
    assert metrics("piqa", [accented], [[-6.0, -5.0]])["acc"] == 0.0
    # -9/6 = -1.5 against -5/4 = -1.25: the second by characters, the first by bytes (-9/12)
    assert metrics("piqa", [accented], [[-9.0, -5.0]])["acc_norm"] == 0.0
    # 10 characters and 1: by characters -2.0 and -2.1, with the delimiter -1.82 and -1.05
    edge = Item([("c", " " + "x" * 10), ("c", " y")], 0, [10, 1])
    assert metrics("piqa", [edge], [[-20.0, -2.1]])["acc_norm"] == 1.0


def test_ties_go_to_the_first_and_an_empty_choice_is_never_picked():
    two = [Item([("c", " a"), ("c", " a")], gold, [1, 1]) for gold in (0, 1)]
    got = metrics("piqa", two, [[-1.0, -1.0], [-1.0, -1.0]])
    assert got["acc"] == got["acc_norm"] == 0.5
    empty = Item([("c", " "), ("c", " abc")], 1, [0, 3])
    assert metrics("piqa", [empty], [[-0.1, -9.0]])["acc_norm"] == 1.0


def test_standard_errors_by_hand():
    items = [Item([("c", " a"), ("c", " b")], 0, [1, 1])] * 4
    got = metrics("piqa", items, [[-1.0, -2.0]] * 3 + [[-2.0, -1.0]])
    values = [1.0, 1.0, 1.0, 0.0]
    assert got["acc"] == 0.75 and got["n"] == 4
    assert got["acc_stderr"] == pytest.approx(statistics.stdev(values) / math.sqrt(4))
    assert metrics("piqa", items[:1], [[-1.0, -2.0]])["acc_stderr"] is None


def test_lambada_counts_whole_words_and_perplexity_per_word():
    items = [Item([("c", " w")], 0, [1])] * 3
    got = metrics("lambada_openai", items, [[-1.0], [-2.0], [-3.0]], [[True], [False], [True]])
    assert got["acc"] == pytest.approx(2 / 3) and got["perplexity"] == pytest.approx(math.exp(2))
    # The delta method: d exp(-m) = exp(-m) dm, and dm is sd / sqrt(n) = 1 / sqrt(3).
    assert got["perplexity_stderr"] == pytest.approx(math.exp(2) / math.sqrt(3))


# -------------------------------------------------------------------------------
# reading


def write(folder: Path, task: str, *rows) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")


GOOD = {"goal": "g", "sol1": "one two", "sol2": "three", "label": 0}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"goal": "g", "sol1": "a", "label": 0}, "no item of piqa as baber/piqa .*KeyError: 'sol2'"),
        (GOOD | {"label": ""}, "line 2 is no item of piqa"),
        (GOOD | {"label": -1}, "line 2 is no item of piqa .*no choice -1"),
        (GOOD | {"label": 2}, "no choice 2"),
        (GOOD | {"sol1": None}, "line 2 is no item of piqa"),
        ('{"goal": ', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", "line 2 is no item of piqa"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path, row, message):
    write(tmp_path, "piqa", GOOD, row)
    with pytest.raises(ValueError, match=message):
        read_items(TASKS["piqa"], str(tmp_path))
    assert len(read_items(TASKS["piqa"], str(tmp_path), limit=1)) == 1


TEXT = dict(question="q", choices={"text": "abc", "label": ["A", "B", "C"]}, answerKey="A")
NO_KEY = dict(question="q", choices={"text": ["a"], "label": ["A"]}, answerKey="B")
NO_BLANK = dict(sentence="no blank", option1="a", option2="b", answer="1")


@pytest.mark.parametrize("task, row", [("arc_easy", TEXT), ("arc_easy", NO_KEY), ("winogrande", NO_BLANK)])
def test_columns_of_another_kind_are_named(tmp_path, task, row):
    write(tmp_path, task, row)
    with pytest.raises(ValueError, match=f"{task}.jsonl, line 1 is no item of {task}"):
        read_items(TASKS[task], str(tmp_path))


def test_odd_files_are_read_or_named(tmp_path):
    (tmp_path / "piqa.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n")
    assert len(read_items(TASKS["piqa"], str(tmp_path))) == 1
    (tmp_path / "piqa.jsonl").write_bytes(b'{"goal": "\xff"}\n')
    with pytest.raises(ValueError, match="piqa.jsonl, line 1 is not JSON in UTF-8"):
        read_items(TASKS["piqa"], str(tmp_path))


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="hellaswag.jsonl does not exist.*Rowan/hellaswag"):
        read_items(TASKS["hellaswag"], str(tmp_path))
    write(tmp_path, "piqa")
    with pytest.raises(ValueError, match="piqa has no items"):
        read_items(TASKS["piqa"], str(tmp_path))


needs_items = pytest.mark.skipif("BENCHMARK_DIR" not in os.environ, reason="BENCHMARK_DIR is not set")


@needs_items
@pytest.mark.parametrize("task", [name for name in TASKS if name != "lambada_standard"])
def test_the_real_items_are_read_in_order(task):
    items = read_items(TASKS[task], os.environ["BENCHMARK_DIR"])
    assert len(items) == 200 and items[:50] == read_items(TASKS[task], os.environ["BENCHMARK_DIR"], 50)
    n_choices = {"hellaswag": 4, "piqa": 2, "openbookqa": 4, "winogrande": 2, "lambada_openai": 1}
    expected = n_choices.get(task, 4)
    assert statistics.mean(len(i.pairs) for i in items) == pytest.approx(expected, abs=0.05)
    if task == "hellaswag":
        assert any(p[1].startswith("  ") for i in items for p in i.pairs), "an ending lost its second space"
    if task == "piqa":
        assert any(p[1].endswith(" ") for i in items for p in i.pairs), "a solution lost its last space"


# -------------------------------------------------------------------------------
# as a user


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    train([TINY, f"--data_dir={dataset}", f"--out_dir={out}"])
    return out


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    words = "zero one two three four five six seven eight nine".split()
    write(folder, "piqa", *({"goal": f"Count {words[i % 10]}", "sol1": " ".join(words[i % 7 :]),
                             "sol2": words[i % 3] * 2, "label": i % 2} for i in range(40)))  # fmt: skip
    write(folder, "lambada_openai", *({"text": " ".join(words[k % 10] for k in range(i, i + 60))} for i in range(20)))
    return folder


def evaluate(run_dir: Path, questions: Path, out: Path, *args: str) -> subprocess.CompletedProcess:
    return run("-W", "error", "eval.py", str(run_dir), f"--benchmark_dir={questions}", f"--out_dir={out}", *args)


def test_tasks_print_a_table_and_add_to_eval_json(trained, questions, tmp_path):
    eval_module.main([str(trained)])
    result = evaluate(trained, questions, tmp_path, "--tasks=piqa,lambada_openai", "--save_items=1")
    assert result.returncode == 0, result.stderr
    stored = json.loads((trained / "eval.json").read_text())
    piqa, lambada = stored["tasks"]["piqa"], stored["tasks"]["lambada_openai"]
    assert piqa["n"] == 40 and piqa["limited"] and lambada["n"] == 20  # the full sets have thousands
    assert lambada["requests_cut"] == 20 and "loss" in stored  # 60 words do not fit in 32 tokens
    head, _, row = [line for line in result.stdout.splitlines() if line.startswith("|")][:3]
    assert "piqa acc (first 40 items)" in head and "lambada_openai perplexity (first 20 items)" in head
    assert f"{100 * piqa['acc']:.2f} ± {100 * piqa['acc_stderr']:.2f}" in row
    assert "70.51" in result.stdout  # the paper's, beside
    rows = [json.loads(line) for line in (trained / "items_piqa.jsonl").read_text().splitlines()]
    picked = [max(range(2), key=lambda k: row["ll"][k]) == row["gold"] for row in rows]
    assert statistics.mean(picked) == piqa["acc"]


def test_a_limit_is_told_and_one_item_works(trained, questions, tmp_path):
    for n in (1, 7):
        result = evaluate(trained, questions, tmp_path, "--tasks=piqa", f"--limit={n}")
        assert result.returncode == 0 and f"piqa acc (first {n} items)" in result.stdout
        assert ("±" in result.stdout.splitlines()[-3]) == (n > 1)  # one item has no error
        stored = json.loads((trained / "eval.json").read_text())["tasks"]["piqa"]
        assert stored["n"] == n and stored["limited"]
    assert_clean_error(evaluate(trained, questions, tmp_path, "--tasks=piqa", "--limit=0"), "limit must be at least 1")


def test_mistakes_are_named_and_earlier_results_stay(trained, questions, tmp_path):
    evaluate(trained, questions, tmp_path, "--tasks=piqa")
    before = (trained / "eval.json").read_bytes()
    assert_clean_error(evaluate(trained, questions, tmp_path, "--tasks=pica"), "did you mean 'piqa'")
    assert_clean_error(evaluate(trained, questions, tmp_path, "--tasks=piqa,arc_easy"), "arc_easy.jsonl does not exist")
    offline = run("eval.py", str(trained), "--tasks=winogrande", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert_clean_error(offline, "winogrande", "allenai/winogrande", "--benchmark_dir")
    assert before == (trained / "eval.json").read_bytes()


def test_things_that_do_not_go_together_are_named(trained, questions, tmp_path):
    for args, words in [
        (["--tasks=piqa", "--prompt=x"], "ask for one at a time"),
        (["--tasks=piqa,"], "unknown task ''"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            eval_module.main([str(trained), *args])


def test_a_retrained_run_does_not_inherit_scores(dataset, questions, tmp_path):
    argv = [TINY, f"--data_dir={dataset}", f"--out_dir={tmp_path / 'run'}"]
    args = [f"{tmp_path / 'run'}", "--tasks=piqa", f"--benchmark_dir={questions}", f"--out_dir={tmp_path}"]
    train(argv)
    eval_module.main([args[0]])
    eval_module.main(args)
    shutil.rmtree(tmp_path / "run" / "ckpt_000020")
    train([*argv, "--seed=9", "--input_mode=learned"])
    eval_module.main(args)
    assert "loss" not in json.loads((tmp_path / "run" / "eval.json").read_text())


def test_two_ranks_give_the_same_scores(trained, questions, tmp_path):
    args = ["--tasks=piqa,lambada_openai", "--save_items=1"]
    evaluate(trained, questions, tmp_path, *args)
    alone = [json.loads(line) for line in (trained / "items_piqa.jsonl").read_text().splitlines()]
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py", str(trained),
                 f"--benchmark_dir={questions}", f"--out_dir={tmp_path}", *args)  # fmt: skip
    assert result.returncode == 0, result.stderr
    both = [json.loads(line) for line in (trained / "items_piqa.jsonl").read_text().splitlines()]
    for a, b in zip(alone, both, strict=True):
        assert a["ll"] == pytest.approx(b["ll"], abs=1e-4) and a["greedy"] == b["greedy"]


def test_an_item_that_does_not_fit_is_said_before_anything_is_scored(trained, tmp_path, monkeypatch):
    write(tmp_path, "winogrande", dict(sentence="I saw _ go.", option1="A", option2="B", answer="1"))
    write(tmp_path, "piqa", GOOD | {"sol1": "many words " * 60})
    monkeypatch.setattr(eval_module, "score_batch", lambda *args: pytest.fail("scored"))
    with pytest.raises(ValueError, match="item 0 .* of piqa .* leave the task out, or train with"):
        eval_module.main([str(trained), "--tasks=winogrande,piqa", f"--benchmark_dir={tmp_path}"])


def test_a_text_of_one_word_is_scored_from_end_of_text(dataset):
    encoding = load_encoding(read_spec(dataset))
    (request,), _ = make_requests([item("lambada_openai", text="two")], "x", encoding, 32)
    assert request == ([encoding.eot_token], encoding.encode_ordinary(" two"))
