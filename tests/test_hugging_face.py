"""data/hugging_face.py: transformers opens an export and computes the same, and we read a Llama back."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval as eval_module
from conftest import ARMS, ROOT, TINY, assert_clean_error, make_model, run, texts
from data.hugging_face import export, from_llama, hugging_face_json
from data.tokenizers import gpt2_spec, load_encoding, read_spec
from config.checkpoints import load_checkpoint
from model import build_model
from test_tokenizers import ODD, random_unicode
from train import main as train

transformers = pytest.importorskip("transformers", reason="tests/requirements.txt is not installed")
IDS = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))


def open_export(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def exports(dataset, tmp_path_factory) -> Path:
    """A short run of each arm, with its export beside it, as a user makes them."""
    out = tmp_path_factory.mktemp("exports")
    for arm in ARMS:
        setting = [] if arm == "learned" else ["--code_symbols=pm1", "--code_shift=1"]
        train(
            [
                TINY,
                f"--data_dir={dataset}",
                f"--out_dir={out}/{arm}",
                f"--input_mode={arm}",
                *setting,
            ]
        )
        eval_module.main([f"{out}/{arm}", f"--export={out}/{arm}_hf"])
    return out


@pytest.mark.parametrize("arm", ARMS)
def test_logits_and_greedy_tokens_equal(exports, arm):
    ours, theirs = build_model(load_checkpoint(exports / arm)), open_export(exports / f"{arm}_hf")
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS), atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in theirs.parameters()) == ours.n_params() + (
        0 if arm == "learned" else 512 * 36
    )
    prompt = IDS[:1, :5]
    theirs_ids = theirs.generate(
        prompt, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    ours_ids = ours.generate(prompt, 20, temperature=0, stop_id=511)
    assert theirs_ids.tolist() == ours_ids.tolist()


def test_the_table_of_an_export_is_the_code(exports):
    ours, theirs = build_model(load_checkpoint(exports / "gf2")), open_export(exports / "gf2_hf")
    table = theirs.get_input_embeddings().weight
    assert torch.equal(table, ours.wte(torch.arange(512))) and set(table.unique().tolist()) == {
        -1.0,
        1.0,
    }


def odd_texts() -> list[str]:
    draw = random.Random(0)
    runs = [
        "".join(draw.choice("=-#*a ") * draw.randrange(1, 40) for _ in range(6)) for _ in range(200)
    ]
    found = [
        *texts(20),
        ODD.replace("<|endoftext|>", ""),
        *runs,
        *(random_unicode(seed) for seed in range(100)),
    ]
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
    export(make_model(vocab_size=49152, n_embd=64), spec, "", str(tmp_path / "hf"))
    same_tokens(transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), load_encoding(spec))


def test_the_card_names_arm_code_data_and_scores(dataset, exports, tmp_path):
    eval_module.main([str(exports / "gf2")])
    eval_module.main([str(exports / "gf2"), f"--export={tmp_path / 'again'}"])
    card = (tmp_path / "again" / "README.md").read_text()
    loss = json.loads((exports / "gf2" / "eval.json").read_text())["loss"]
    for words in ("gf2 symbols=pm1 shift=True, 5,120 training tokens", "code_seed | 0", str(dataset), "bpe-512",
                  f"validation loss | {loss:.4f}"):  # fmt: skip
        assert words in card, words


def test_a_round_trip_gives_the_same_logits(exports):
    ours = build_model(load_checkpoint(exports / "learned"))
    back = make_model(input_mode="learned", seed=9)
    from_llama(back, exports / "learned_hf")
    assert torch.equal(back(IDS), ours(IDS))
    # A fixed code comes back as a table, which is what it is to others.
    back = make_model(input_mode="learned", seed=9)
    from_llama(back, exports / "gf2_hf")
    assert torch.equal(back(IDS), build_model(load_checkpoint(exports / "gf2"))(IDS))


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_transformers_own_is_read(tmp_path, tied):
    # SmolLM-1.7B's shape in small: as many key and value heads as heads, the head tied to the table.
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=36, intermediate_size=144, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained(tmp_path / "llama", max_shard_size="40KB")  # several files
    model = make_model(input_mode="learned")
    from_llama(model, tmp_path / "llama")
    torch.testing.assert_close(model(IDS), llama(IDS).logits, atol=1e-5, rtol=1e-5)


def change(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(attention_bias=True), "attention_bias=True there, False here"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (
            dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
            "rope_type=llama3 there",
        ),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling="),
        (dict(head_dim=36), "head_dim=36 there, 18 here"),
        (dict(num_key_value_heads=1), "num_key_value_heads=1 there, 2 here"),
        (dict(model_type="qwen2"), "model_type=qwen2"),
    ],
)
def test_a_network_of_another_kind_is_refused(exports, tmp_path, changes, message):
    shutil.copytree(exports / "learned_hf", tmp_path / "hf")
    change(tmp_path / "hf", **changes)
    with pytest.raises(ValueError, match=message):
        from_llama(make_model(input_mode="learned"), tmp_path / "hf")


def test_weights_that_do_not_fit_are_named(exports, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, model = tmp_path / "hf", make_model(input_mode="learned")
    shutil.copytree(exports / "learned_hf", folder)
    whole = load_file(folder / "model.safetensors")
    save_file({"other": torch.ones(3)}, folder / "zz_other.safetensors")
    from_llama(model, folder)  # another file beside the model is none of its weights
    gate = "model.layers.0.mlp.gate_proj.weight"
    for weights, message in [
        (
            whole | {"model.layers.0.self_attn.q_proj.bias": torch.ones(36)},
            "unknown weights, .*q_proj.bias",
        ),
        (
            {k: v for k, v in whole.items() if k != "lm_head.weight"},
            "lacks weights, lm_head.weight",
        ),
        (whole | {gate: whole[gate].to(torch.int8)}, "gate_proj.weight .* no finite numbers"),
        (whole | {gate: whole[gate] * float("nan")}, "gate_proj.weight .* no finite numbers"),
        (whole | {gate: torch.ones(5, 36)}, "of another shape"),
    ]:
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            from_llama(model, folder)
    for content in (b"", b"garbage" * 100):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="cannot read the weights in"):
            from_llama(model, folder)
    for content in ("[1]", '{"model_type": '):
        (folder / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json is damaged"):
            from_llama(model, folder)


def test_training_starts_from_a_llama(exports, dataset, tmp_path):
    argv = [TINY, f"--data_dir={dataset}", f"--out_dir={tmp_path / 'run'}", "--input_mode=learned", "--max_iters=1",
            "--learning_rate=0", f"--init_from={exports / 'learned_hf'}"]  # fmt: skip
    assert train(argv) == 0
    started, source = load_checkpoint(tmp_path / "run"), load_checkpoint(exports / "learned")
    assert all(torch.equal(started["model"][key], source["model"][key]) for key in source["model"])


def test_mistakes_are_named(exports, dataset, tmp_path):
    argv = ["train.py", TINY, f"--data_dir={dataset}", f"--out_dir={tmp_path / 'run'}"]
    source = f"--init_from={exports / 'learned_hf'}"
    assert_clean_error(run(*argv, source), "init_from needs input_mode=learned, got canonical")
    assert_clean_error(
        run(*argv, source, "--input_mode=learned", "--n_layer=3"),
        "num_hidden_layers=2 there, 3 here",
    )
    assert_clean_error(
        run(*argv, "--init_from=no/such", "--input_mode=learned"),
        "no/such",
        "config.json is missing",
    )
    assert not (tmp_path / "run").exists()
    folder = str(exports / "learned_hf")
    assert_clean_error(
        run("eval.py", str(exports / "learned"), f"--export={folder}"), "is not empty"
    )
    both = [str(exports / arm) for arm in ("learned", "gf2")]
    assert_clean_error(run("eval.py", *both, f"--export={tmp_path / 'x'}"), "one run at a time")


def test_without_safetensors_the_package_is_named(exports, tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['safetensors'] = None\n"
            f"sys.argv = ['eval.py', {str(exports / 'gf2')!r}, '--export={tmp_path / 'x'}']\n"
            "from config import run_cli; from eval import main; run_cli(main, 'eval.py')")  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert_clean_error(result, "pip install safetensors")
    assert not (tmp_path / "x").exists()


def test_another_tokenizer_beside_the_checkpoint_is_refused(exports, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(exports / "gf2", run_dir)
    spec = read_spec(exports / "gf2") | {"name": "another"}
    (run_dir / "tiktoken.json").write_text(json.dumps(spec, indent=0))
    for args in (
        ["--prompt=x"],
        [f"--export={tmp_path / 'x'}"],
        ["--tasks=piqa", f"--benchmark_dir={tmp_path}"],
    ):
        if args[0].startswith("--tasks"):
            (tmp_path / "piqa.jsonl").write_text(
                '{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}\n'
            )
        with pytest.raises(ValueError, match="was trained with tokenizer bpe-512, .* is another"):
            eval_module.main([str(run_dir), *args])


def test_merges_of_the_export_are_in_the_order_of_the_ranks(dataset):
    spec = read_spec(dataset)
    model = hugging_face_json(spec)["model"]
    ranks = [model["vocab"][a + b] for a, b in model["merges"]]
    assert ranks == sorted(ranks) and set(ranks) == set(range(256, 511))
