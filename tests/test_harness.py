"""
Our scores equal lm-evaluation-harness's, item by item: the harness runs on the exported model, with
its own prompts and its own code, on the same rows.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import RT

from data.benchmarks import TASKS, make_requests, read_items, task_metrics
from data.hugging_face import export
from data.tokenizers import END_OF_TEXT, gpt2_spec, load_encoding, read_spec
from eval import score
from model import GPT, GPTConfig

lm_eval = pytest.importorskip("lm_eval", reason="tests/requirements.txt is not installed")
pytestmark = pytest.mark.skipif(
    not {"BENCHMARK_DIR", "TIKTOKEN_CACHE_DIR"} <= set(os.environ),
    reason="BENCHMARK_DIR or TIKTOKEN_CACHE_DIR is not set",
)

REAL = ("hellaswag", "piqa", "lambada_openai", "arc_easy", "arc_challenge", "openbookqa", "winogrande")
FOLDERS = ("hellaswag", "piqa", "lambada", "arc", "openbookqa", "winogrande")  # where the harness has them
# What the real files do not have, in the hub's columns.
MADE_UP = {
    "hellaswag": [
        {"activity_label": "Cooking", "ctx_a": " A man [title] stirs  the pot.", "ctx_b": "HE then Adds SALT",
         "endings": ["[header] and [nested [brackets]] stir.", "an unclosed [bracket.", "three   spaces    four.",
                     " caf\u00e9 \u65e5\u672c\u8a9e \U0001f600."], "label": "2"},
        {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["same.", "same.", "same.", "same."],
         "label": "0"},
        {"activity_label": "A", "ctx_a": "line\nbreak [a\nb] c", "ctx_b": "x", "endings": ["", "b", "c", "d"],
         "label": "3"},
        {"activity_label": "Long", "ctx_a": "word " * 200, "ctx_b": "and", "endings": ["one.", "a longer one here.",
         "two", "three words here"], "label": "1"},
    ],
    "piqa": [
        {"goal": "caf\u00e9", "sol1": " leading", "sol2": "trailing  ", "label": 1},
        {"goal": "ends in spaces   ", "sol1": "\u00e9\u00e9\u00e9\u00e9 x", "sol2": "eeee x", "label": 0},
    ],
    "arc_easy": [
        {"id": "a", "question": "Five?", "choices": {"text": ["a", "b", "c", "d", "e"],
         "label": ["A", "B", "C", "D", "E"]}, "answerKey": "E"},
        {"id": "b", "question": "Numbers?", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
         "answerKey": "3"},
        {"id": "c", "question": "Equal?", "choices": {"text": ["same", "same", "other"],
         "label": ["A", "B", "C"]}, "answerKey": "B"},
    ],
    "openbookqa": [
        {"id": "a", "question_stem": "The sun is", "choices": {"text": ["hot", "cold", "wet", "dry"],
         "label": ["A", "B", "C", "D"]}, "answerKey": " A"},
    ],
    "winogrande": [
        {"sentence": "The dog saw _'s bone and _ left.", "option1": "Ann", "option2": "Bob", "answer": "2"},
        {"sentence": "It was _.", "option1": "caf\u00e9 au lait", "option2": "tea", "answer": "1"},
    ],
    "lambada_openai": [
        {"text": "two  spaces and a line\nend of\n\nPower"},
        {"text": "a target of a single space after "},
        {"text": "He said \u201cna\u00efve"},
        {"text": "word"},
    ],
}  # fmt: skip


def local_rows(task: str) -> list[dict]:
    path = Path(os.environ["BENCHMARK_DIR"]) / f"{task}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def harness_scores(folder: Path, block_size: int, rows: dict[str, list[dict]], monkeypatch) -> dict:
    """What the harness says of a model: task -> (metrics, samples), with rows in place of the hub."""
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    by_hub = {(TASKS[name].hub_id, TASKS[name].hub_config): name for name in rows}

    def load(path, name=None, **kwargs):
        task = TASKS[by_hub[path, name]]
        table = datasets.Dataset.from_list(rows[task.name])
        splits = {task.split: table, "train": table, "validation": table}
        return datasets.DatasetDict(splits | ({"test": table} if task.split == "test" else {}))

    monkeypatch.setattr(datasets, "load_dataset", load)
    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8, max_length=block_size)
    folders = [str(Path(lm_eval.__file__).parent / "tasks" / name) for name in FOLDERS]
    manager = TaskManager(include_path=folders, include_defaults=False)  # thousands of other tasks take longer
    out = simple_evaluate(lm, tasks=list(rows), task_manager=manager, log_samples=True, bootstrap_iters=0)
    return {name: (out["results"][name], sorted(out["samples"][name], key=lambda s: s["doc_id"])) for name in rows}


def compare(model: GPT, spec: dict, folder: Path, rows: dict[str, list[dict]], monkeypatch, tmp_path) -> None:
    table = {"wte.weight": model.wte(torch.arange(model.cfg.vocab_size))}
    export(model.state_dict() | table, vars(model.cfg), spec, "a test", str(folder))
    theirs = harness_scores(folder, model.cfg.block_size, rows, monkeypatch)
    encoding = load_encoding(spec)
    for name, task_rows in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task_rows))
        items = read_items(TASKS[name], str(tmp_path))
        requests, _ = make_requests(items, name, encoding, model.cfg.block_size)
        scores = iter(score(model, requests, name, RT))
        pairs = [[next(scores) for _ in item.pairs] for item in items]
        lls, greedy = ([[pair[k] for pair in item] for item in pairs] for k in (0, 1))
        metrics = task_metrics(TASKS[name], items, lls, greedy)
        results, samples = theirs[name]
        assert len(samples) == len(items) == metrics["n"]
        for i, (sample, item) in enumerate(zip(samples, items)):
            expected = [(float(r[0][0]), str(r[0][1]) == "True") for r in sample["resps"]]
            where = f"{name}, item {i}: {sample['arguments']}"
            for ll, (their_ll, _) in zip(lls[i], expected, strict=True):
                assert ll == pytest.approx(their_ll, abs=1e-3, rel=1e-5), where
            assert greedy[i] == [flag for _, flag in expected], where
            one = task_metrics(TASKS[name], [item], [lls[i]], [greedy[i]])
            for metric in {"acc", "acc_norm"} & set(one):
                assert one[metric] == sample[metric], where
        for metric in TASKS[name].metrics:
            assert metrics[metric] == pytest.approx(results[f"{metric},none"], rel=1e-5), (name, metric)
            stderr = results.get(f"{metric}_stderr,none")
            if metric != "perplexity" and isinstance(stderr, float):
                assert metrics[f"{metric}_stderr"] == pytest.approx(stderr, rel=1e-6), (name, metric)


def sharp_model(spec_size: int, **changes) -> GPT:
    """A random model whose predictions are far from uniform."""
    small = dict(vocab_size=spec_size, block_size=256, n_layer=2, n_head=2, n_embd=32, n_inner=64)
    model = GPT(GPTConfig(**(small | changes)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return model


@pytest.mark.parametrize("tokenizer, n", [("GPT-2's", 200), ("our own", 50)])
def test_a_random_model_on_real_items(dataset, tmp_path, monkeypatch, tokenizer, n):
    rows = {name: local_rows(name)[:n] for name in REAL}
    model, spec = sharp_model(512, block_size=512, n_embd=36), read_spec(dataset)
    if tokenizer == "GPT-2's":  # its first tokens, as the harness computes every position's logits
        spec = gpt2_spec()
        spec |= {"mergeable_ranks": spec["mergeable_ranks"][:4095], "special_tokens": {END_OF_TEXT: 4095}}
        model = sharp_model(4096, input_mode="gf2", n_embd=48)
    compare(model, spec, tmp_path / "hf", rows, monkeypatch, tmp_path)


def test_made_up_items_that_real_data_do_not_have(tmp_path, monkeypatch):
    compare(sharp_model(49152, block_size=64), gpt2_spec(), tmp_path / "hf", MADE_UP, monkeypatch, tmp_path)
