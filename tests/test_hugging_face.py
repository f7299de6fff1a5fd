"""data/hugging_face.py: transformers opens an export and computes the same."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ARMS, TINY, make_model, texts
from test_tokenizers import ODD, random_unicode

import eval as eval_module
from data.hugging_face import export, llama_weights, model_card
from data.runs import load_checkpoint, write_checkpoint
from data.tokenizers import gpt2_spec, load_encoding, read_spec
from model import build_model
from train import main as train

transformers = pytest.importorskip("transformers", reason="tests/requirements.txt is not installed")
IDS = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exports(dataset, tmp_path_factory) -> Path:
    """A short run of each arm, with its export beside it, as a user makes them."""
    out = tmp_path_factory.mktemp("exports")
    for arm in ARMS:
        setting = [] if arm == "learned" else ["--code_symbols=pm1", "--code_shift=1"]
        train([TINY, f"--data_dir={dataset}", f"--out_dir={out}/{arm}", f"--input_mode={arm}", *setting])
        saved = load_checkpoint(out / arm, training=True)
        for name, p in saved["model"].items():  # gains other than 1, and weights large enough to matter
            if "norm" in name:
                p.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
            elif "wte" not in name:
                p.mul_(3)
        write_checkpoint(out / arm, saved, keep=1)
        eval_module.main([f"{out}/{arm}", f"--export={out}/{arm}_hf"])
    return out


@pytest.mark.parametrize("arm", ARMS)
def test_logits_gradients_and_greedy_tokens_equal(exports, arm):
    ours = build_model(load_checkpoint(exports / arm))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exports / f"{arm}_hf", dtype=torch.float32)
    table = theirs.get_input_embeddings().weight
    assert torch.equal(table, ours.wte(torch.arange(512)))
    assert arm == "learned" or set(table.unique().tolist()) == {-1.0, 1.0}
    logits, targets = theirs(IDS).logits, IDS.roll(-1, 1)
    torch.testing.assert_close(logits, ours(IDS), atol=1e-5, rtol=1e-5)
    ours(IDS, targets).backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {"wte.weight": table.grad} | {name: p.grad for name, p in ours.named_parameters()}
    for name, grad in llama_weights(grads, 2).items():
        torch.testing.assert_close(theirs.get_parameter(name).grad, grad, atol=1e-4, rtol=1e-4)
    assert sum(p.numel() for p in theirs.parameters()) == ours.n_params() + (0 if arm == "learned" else 512 * 36)
    prompt = IDS[:1, :5]
    theirs_ids = theirs.generate(prompt, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompt))
    ours_ids = ours.generate(prompt, 20, temperature=0, stop_id=511)
    assert theirs_ids.tolist() == ours_ids.tolist()


def odd_texts() -> list[str]:
    draw = random.Random(0)
    runs = ["".join(draw.choice("=-#*a ") * draw.randrange(1, 40) for _ in range(6)) for _ in range(200)]
    found = [*texts(20), ODD.replace("<|endoftext|>", ""), *runs, *(random_unicode(seed) for seed in range(100))]
    folder = os.environ.get("BENCHMARK_DIR")
    for path in sorted(Path(folder).glob("*.jsonl")) if folder else []:
        found += path.read_text(encoding="utf-8").splitlines()
    return found


def same_tokens(tokenizer, encoding) -> None:
    for text in odd_texts():
        ids = encoding.encode_ordinary(text)
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == encoding.eot_token == len(tokenizer) - 1


def test_the_exported_tokenizer_equals_ours(exports):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports / "canonical_hf")
    same_tokens(tokenizer, load_encoding(read_spec(exports / "canonical")))


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="TIKTOKEN_CACHE_DIR is not set")
def test_the_exported_gpt2_tokenizer_equals_ours(tmp_path):
    spec = gpt2_spec()
    model = make_model(input_mode="learned", vocab_size=49152, n_embd=64)
    export(model.state_dict(), vars(model.cfg), spec, "", str(tmp_path / "hf"))
    same_tokens(transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), load_encoding(spec))


def test_the_card_names_input_and_data_and_mistakes_are_named(dataset, exports, tmp_path, monkeypatch):
    card = (exports / "gf2_hf" / "README.md").read_text()
    for words in ("gf2 symbols=pm1 shift=True, 5,120 training tokens", "bpe-512", str(dataset)):
        assert words in card, words
    assert "is fixed, never trained" in card
    saved = load_checkpoint(exports / "learned")
    saved["config"]["table_scale"] = 0.1
    assert "is a learned table" in model_card("learned scale=0.1", saved)
    learned, gf2, free = str(exports / "learned"), str(exports / "gf2"), f"--export={tmp_path / 'x'}"
    with pytest.raises(ValueError, match="is not empty"):
        eval_module.main([learned, f"--export={exports / 'learned_hf'}"])
    with pytest.raises(ValueError, match="one run at a time"):
        eval_module.main([learned, gf2, free])
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # as if it were not installed
    with pytest.raises(ValueError, match="pip install safetensors"):
        eval_module.main([gf2, free])
    assert not (tmp_path / "x").exists()


def test_another_tokenizer_beside_the_checkpoint_is_refused(exports, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(exports / "gf2", run_dir)
    spec = read_spec(exports / "gf2") | {"name": "another"}
    (run_dir / "tiktoken.json").write_text(json.dumps(spec, indent=0))
    (tmp_path / "piqa.jsonl").write_text('{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}\n')
    for args in (["--prompt=x"], [f"--export={tmp_path / 'x'}"], ["--tasks=piqa", f"--benchmark_dir={tmp_path}"]):
        with pytest.raises(ValueError, match="was trained with tokenizer bpe-512, but holds another"):
            eval_module.main([str(run_dir), *args])
