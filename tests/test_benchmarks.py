"""data/benchmarks.py: what is asked, how it is scored, and the metrics, by hand."""

import json
import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from conftest import RT, TINY, assert_clean_error, make_model, run

from data.benchmarks import TASKS, Item, find_tasks, make_requests, pair_to_ids, read_items, task_metrics
from data.tokenizers import load_encoding, read_spec
from eval import main, score, score_batch
from model import GPTConfig
from train import main as train

# --- what is asked ------------------------------------------------------------


def item(task: str, **row) -> Item:
    return TASKS[task].to_item(row)


def test_hellaswag_by_hand():
    row = {"activity_label": "Baking", "ctx_a": "[header] How to bake [title] Mix it.", "ctx_b": "THE Dough"}
    endings = ["[step] Knead it.", "a [x]b   c", "[title] d", " [title] e"]
    got = item("hellaswag", **row, endings=endings, label="3")
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
    (request,), _ = make_requests([item("lambada_openai", text="two")], "x", encoding, 32)
    assert request == ([encoding.eot_token], encoding.encode_ordinary(" two"))  # a text of one word
    assert pair_to_ids(encoding, "", "two") == ([encoding.eot_token], encoding.encode_ordinary("two"))
    context, continuation = pair_to_ids(encoding, "text ends in ", " ")
    assert encoding.decode(continuation) == "  "


# --- scores -------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="item 1 .from 0. of x has a continuation of 5 tokens, .*block_size=3"):
        make_requests([Item([("a", " b")], 0, [1]), long], "x", encoding, 3)


class FourTokens(torch.nn.Module):
    """A model of four tokens that looks at the last one alone: row a has p(next | a)."""

    def __init__(self):
        super().__init__()
        p = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.7, 0.1], [0.25, 0.5, 0.125, 0.125], [0.4, 0.3, 0.2, 0.1]]
        self.cfg = GPTConfig(vocab_size=4, n_embd=4, n_head=1)
        self.lm_head = torch.nn.Linear(4, 4, bias=False)
        self.lm_head.weight.data = torch.tensor(p).log().T + 3  # a constant on all logits changes nothing

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, 4).float()  # (B, T, 4)


def test_four_tokens_scored_by_hand():
    requests = [
        ([0, 1], [2, 1]),  # p(2 | 1) p(1 | 2) = 0.7 * 0.5, each the likeliest
        ([3, 3, 3, 1], [2, 3]),  # 0.7 * p(3 | 2) = 0.7 * 0.125: only the first is the likeliest
        ([2], [0]),  # 0.25
        ([1, 2, 0], [3]),  # 0.4
        ([0], [3, 0, 2]),  # 0.4 * 0.4 * 0.3: the last is not
    ]
    scores = score_batch(FourTokens(), requests, RT)
    by_hand = [0.7 * 0.5, 0.7 * 0.125, 0.25, 0.4, 0.4 * 0.4 * 0.3]
    assert [math.exp(ll) for ll, _ in scores] == pytest.approx(by_hand, rel=1e-5)
    assert [flag for _, flag in scores] == [True, False, False, True, False]


# --- metrics ------------------------------------------------------------------


def metrics(task: str, items: list[Item], lls, greedy=None) -> dict:
    return task_metrics(TASKS[task], items, lls, greedy or [[False] * len(ll) for ll in lls])


@pytest.mark.parametrize(
    "choices, lengths, lls, acc, acc_norm",
    [
        # a character: -6/6 = -1, -5/4 = -1.25; a byte: -6/12 = -0.5, -5/4; with its space: -6/7, -5/5
        (["\u00e9" * 6, "abcd"], [6, 4], [-6.0, -5.0], 0, 1),
        # -9/6 = -1.5 against -5/4 = -1.25: the second by characters, the first by bytes (-9/12)
        (["\u00e9" * 6, "abcd"], [6, 4], [-9.0, -5.0], 0, 0),
        # 10 characters and 1: by characters -2.0 and -2.1, with the delimiter -1.82 and -1.05
        (["x" * 10, "y"], [10, 1], [-20.0, -2.1], 0, 1),
        (["a", "a"], [1, 1], [-1.0, -1.0], 1, 1),  # a tie goes to the first
        (["abc", ""], [3, 0], [-9.0, -0.1], 0, 1),  # an empty choice is never picked by its length
    ],
)
def test_acc_norm_divides_by_characters_of_the_choice(choices, lengths, lls, acc, acc_norm):
    one = Item([("c", f" {choice}") for choice in choices], 0, lengths)
    got = metrics("piqa", [one], [lls])
    assert (got["acc"], got["acc_norm"]) == (acc, acc_norm)


def test_metrics_and_their_standard_errors_by_hand():
    items = [Item([("c", " a"), ("c", " b")], 0, [1, 1])] * 4
    got = metrics("piqa", items, [[-1.0, -2.0]] * 3 + [[-2.0, -1.0]])
    assert got["acc"] == 0.75 and got["n"] == 4
    assert got["acc_stderr"] == pytest.approx(statistics.stdev([1, 1, 1, 0]) / math.sqrt(4))
    assert metrics("piqa", items[:1], [[-1.0, -2.0]])["acc_stderr"] is None
    # LAMBADA counts whole words, and has a perplexity per word.
    items = [Item([("c", " w")], 0, [1])] * 3
    got = metrics("lambada_openai", items, [[-1.0], [-2.0], [-3.0]], [[True], [False], [True]])
    assert got["acc"] == pytest.approx(2 / 3) and got["perplexity"] == pytest.approx(math.exp(2))
    # The delta method: d exp(-m) = exp(-m) dm, and dm is sd / sqrt(n) = 1 / sqrt(3).
    assert got["perplexity_stderr"] == pytest.approx(math.exp(2) / math.sqrt(3))


# --- reading ------------------------------------------------------------------


def write(folder: Path, task: str, *rows) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")


GOOD = {"goal": "g", "sol1": "one two", "sol2": "three", "label": 0}
TEXT = dict(question="q", choices={"text": "abc", "label": ["A", "B", "C"]}, answerKey="A")
NO_KEY = dict(question="q", choices={"text": ["a"], "label": ["A"]}, answerKey="B")
NO_BLANK = dict(sentence="no blank", option1="a", option2="b", answer="1")
TWELVE_LETTERS = dict(question_stem="q", choices={"text": ["qwxzqwxzqwxz"], "label": ["A"]}, answerKey="A")


@pytest.mark.parametrize(
    "task, row, message",
    [
        ("piqa", {"goal": "g", "sol1": "a", "label": 0}, "no item of piqa as baber/piqa .*KeyError: 'sol2'"),
        ("piqa", GOOD | {"label": ""}, "line 2 is no item of piqa"),
        ("piqa", GOOD | {"label": -1}, "line 2 is no item of piqa .*no choice -1"),
        ("piqa", GOOD | {"label": 2}, "no choice 2"),
        ("piqa", GOOD | {"sol1": None}, "line 2 is no item of piqa"),
        ("piqa", '{"goal": ', "line 2 is not JSON"),
        ("piqa", "[" * 100_000, "line 2 is not JSON"),
        ("piqa", "[1]", "line 2 is no item of piqa"),
        ("arc_easy", TEXT, "arc_easy.jsonl, line 1 is no item of arc_easy"),
        ("arc_easy", NO_KEY, "arc_easy.jsonl, line 1 is no item of arc_easy"),
        ("winogrande", NO_BLANK, "winogrande.jsonl, line 1 is no item of winogrande"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path, task, row, message):
    write(tmp_path, task, *[GOOD] * (task == "piqa"), row)
    with pytest.raises(ValueError, match=message):
        read_items(TASKS[task], str(tmp_path))
    assert task != "piqa" or len(read_items(TASKS[task], str(tmp_path), limit=1)) == 1


def test_odd_files_are_read_or_named(tmp_path):
    with pytest.raises(ValueError, match="piqa.jsonl does not exist.*baber/piqa"):
        read_items(TASKS["piqa"], str(tmp_path))
    write(tmp_path, "piqa")
    with pytest.raises(ValueError, match="piqa has no items"):
        read_items(TASKS["piqa"], str(tmp_path))
    (tmp_path / "piqa.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n")
    assert len(read_items(TASKS["piqa"], str(tmp_path))) == 1
    (tmp_path / "piqa.jsonl").write_bytes(b'{"goal": "\xff"}\n')
    with pytest.raises(ValueError, match="piqa.jsonl, line 1 is not JSON in UTF-8"):
        read_items(TASKS["piqa"], str(tmp_path))


# --- as a user ----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory) -> Path:
    return shutil.copytree(finished, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    words, rows = "zero one two three four five six seven eight nine".split(), []
    for i in range(40):
        row = {"goal": f"Count {words[i % 10]}", "sol1": " ".join(words[i % 7 :])}
        rows.append(row | {"sol2": words[i % 3] * 2, "label": i % 2})
    write(folder, "piqa", *rows)
    write(folder, "lambada_openai", *({"text": " ".join(words[k % 10] for k in range(i, i + 60))} for i in range(20)))
    return folder


def scored(folder: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"items_{task}.jsonl").read_text().splitlines()]


def test_tasks_print_a_table_and_add_to_eval_json(trained, questions, capsys):
    main([str(trained)])
    args = [str(trained), "--tasks=piqa,lambada_openai", f"--benchmark_dir={questions}", "--save_items"]
    capsys.readouterr()
    main(args)
    out, stored = capsys.readouterr().out, json.loads((trained / "eval.json").read_text())
    piqa, lambada = stored["tasks"]["piqa"], stored["tasks"]["lambada_openai"]
    assert piqa["n"] == 40 and piqa["limited"] and lambada["n"] == 20  # the full sets have thousands
    assert lambada["requests_cut"] == 20 and "loss" in stored  # 60 words do not fit in 32 tokens
    head, _, row = [line for line in out.splitlines() if line.startswith("|")][:3]
    assert "piqa acc (first 40 items)" in head and "lambada_openai perplexity (first 20 items)" in head
    assert f"{100 * piqa['acc']:.2f} ± {100 * piqa['acc_stderr']:.2f}" in row
    assert "70.51" in out  # the paper's, beside
    alone = scored(trained, "piqa")
    assert statistics.mean(row["ll"].index(max(row["ll"])) == row["gold"] for row in alone) == piqa["acc"]
    # two ranks give the same scores
    result = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py", *args)
    assert result.returncode == 0, result.stderr
    for a, b in zip(alone, scored(trained, "piqa"), strict=True):
        assert a["ll"] == pytest.approx(b["ll"], abs=1e-4) and a["greedy"] == b["greedy"]


def test_one_item_works_and_mistakes_change_no_result(trained, questions, tmp_path, capsys):
    main([str(trained), "--tasks=piqa", f"--benchmark_dir={questions}", "--limit=1"])
    out, stored = capsys.readouterr().out, json.loads((trained / "eval.json").read_text())["tasks"]["piqa"]
    assert "piqa acc (first 1 items)" in out and "±" not in out.splitlines()[-3]  # one item has no error
    assert stored["n"] == 1 and stored["limited"]
    before = (trained / "eval.json").read_bytes()
    for args, words in [
        (["--tasks=piqa,"], "unknown task ''"),
        (["--tasks=piqa,arc_easy"], "arc_easy.jsonl does not exist"),
        (["--tasks=piqa", "--prompt=x"], "ask for one at a time"),
    ]:
        with pytest.raises(ValueError, match=words):
            main([str(trained), *args, f"--benchmark_dir={questions}"])
    offline = run("eval.py", str(trained), "--tasks=winogrande", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert_clean_error(offline, "winogrande", "allenai/winogrande", "--benchmark_dir")
    assert before == (trained / "eval.json").read_bytes()


def test_a_retrained_run_does_not_inherit_scores(dataset, finished, questions, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    main([str(folder)])
    shutil.rmtree(folder / "ckpt_000020")
    train([TINY, f"--data_dir={dataset}", f"--out_dir={folder}", "--seed=9", "--input_mode=learned"])
    main([str(folder), "--tasks=piqa", f"--benchmark_dir={questions}"])
    assert "loss" not in json.loads((folder / "eval.json").read_text())


def test_results_are_printed_also_where_nothing_can_be_written(finished, questions, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    for name in ("eval.json", "items_piqa.jsonl"):
        (folder / name).mkdir()
    for args in ([], ["--tasks=piqa", f"--benchmark_dir={questions}", "--save_items"]):
        main([str(folder), *args])
        out = capsys.readouterr().out
        assert "| canonical" in out and "warning: cannot write" in out and ("items_piqa.jsonl" in out) == bool(args)


def test_what_does_not_fit_is_said_before_anything_is_scored(trained, dataset, tmp_path, monkeypatch):
    write(tmp_path, "winogrande", dict(sentence="I saw _ go.", option1="A", option2="B", answer="1"))
    write(tmp_path, "piqa", GOOD | {"sol1": "many words " * 60})
    write(tmp_path, "openbookqa", TWELVE_LETTERS)
    train([TINY, f"--data_dir={dataset}", f"--out_dir={tmp_path / 'short'}", "--block_size=8", "--max_iters=1"])
    monkeypatch.setattr("eval.score_batch", lambda *args: pytest.fail("scored"))
    with pytest.raises(ValueError, match="item 0 .* of piqa .* leave the task out, or train with"):
        main([str(trained), "--tasks=winogrande,piqa", f"--benchmark_dir={tmp_path}"])
    with pytest.raises(ValueError, match="item 0 .* of openbookqa .* block_size=8"):  # the second run
        main([str(trained), f"{tmp_path / 'short'}", "--tasks=openbookqa", f"--benchmark_dir={tmp_path}"])
