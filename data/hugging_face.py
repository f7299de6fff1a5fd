"""
Hugging Face folders: a run written as a Llama that transformers, and what builds on it, can open.

    embed_tokens    the table, or the fixed code of every id written out as one (V, C)
    q, k, v_proj    rows of our qkv;  gate, up_proj    rows of our gate_up
    tokenizer.json  our byte-pair encoding as a list of merges
"""

import base64
import json
import re
import tempfile
from pathlib import Path

from torch import Tensor

from data.tokenizers import END_OF_TEXT

# --- weights ------------------------------------------------------------------


def llama_weights(weights: dict[str, Tensor], n_layer: int) -> dict[str, Tensor]:
    """A GPT's weights under Llama's names. weights also has the input as a table (V, C), wte.weight."""
    names = {
        "wte.weight": ["model.embed_tokens.weight"],
        "norm_f.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"],
    }
    for i in range(n_layer):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        names |= {
            ours + "norm_1.weight": [theirs + "input_layernorm.weight"],
            ours + "attn.qkv.weight": [f"{theirs}self_attn.{x}_proj.weight" for x in "qkv"],
            ours + "attn.proj.weight": [theirs + "self_attn.o_proj.weight"],
            ours + "norm_2.weight": [theirs + "post_attention_layernorm.weight"],
            ours + "mlp.gate_up.weight": [f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up")],
            ours + "mlp.down.weight": [theirs + "mlp.down_proj.weight"],
        }
    found = {}
    for ours, theirs in names.items():
        found |= dict(zip(theirs, weights[ours].detach().chunk(len(theirs))))
    return {name: weight.contiguous().clone() for name, weight in found.items()}


def llama_config(config: dict, eot: int) -> dict:
    """Llama's config.json for a run's settings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "intermediate_size": config["n_inner"],
        "hidden_act": "silu",
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_head"],
        "max_position_embeddings": config["block_size"],
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
    }


# --- tokenizer ----------------------------------------------------------------


def hugging_face_json(spec: dict) -> dict:
    """
    The tokenizer.json of a spec, for the tokenizers library: the same ids for every text.

    (A text that spells a special token is that token to the library, and plain text to ours.) It writes
    bytes as printable characters and merges by a list of pairs. A token stands in that list
    with every pair of tokens that spells it, in the order of the ranks, which is when tiktoken merges.
    """
    tokens = [base64.b64decode(token) for token in spec["mergeable_ranks"]]
    known = set(tokens)
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    letter = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def text(token: bytes) -> str:
        return "".join(letter[b] for b in token)

    merges = [
        [text(token[:i]), text(token[i:])]
        for token in tokens
        for i in range(1, len(token))
        if token[:i] in known and token[i:] in known
    ]
    # Our pattern spells its limits as escapes, which this library's regular expressions do not know.
    pattern = re.sub(
        r"\\u[0-9a-f]{4}|\\U[0-9a-f]{8}", lambda m: chr(int(m.group()[2:], 16)), spec["pat_str"]
    )
    special = [
        {
            "id": i,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token, i in spec["special_tokens"].items()
    ]
    bytes_as_letters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_as_letters]},
        "decoder": bytes_as_letters,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text(token): i for i, token in enumerate(tokens)} | spec["special_tokens"],
            "merges": merges,
        },
    }


# --- a whole folder -----------------------------------------------------------


def export(weights: dict[str, Tensor], config: dict, spec: dict, card: str, folder: str) -> None:
    """
    Write a run's weights (with wte.weight as a table), its settings, tokenizer and card. Raises
    ValueError if the folder is not empty, so that nothing is lost.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError("an export needs one more package: pip install safetensors") from None
    eot, out = spec["special_tokens"][END_OF_TEXT], Path(folder).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"export: {folder} is not empty: choose another folder")
    texts = {
        "config.json": llama_config(config, eot),
        "generation_config.json": {"bos_token_id": eot, "eos_token_id": eot, "do_sample": True},
        "tokenizer.json": hugging_face_json(spec),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["block_size"],
            **dict.fromkeys(["bos_token", "eos_token", "pad_token"], END_OF_TEXT),
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there when it is whole.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        partial = Path(name) / out.name
        partial.mkdir()
        tensors = llama_weights(weights, config["n_layer"])
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        for file, content in texts.items():
            (partial / file).write_text(json.dumps(content, indent=2), encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        partial.rename(out)


def model_card(name: str, saved: dict, scores: dict) -> str:
    """What a run is, how its input was made, on what it was trained and how well it does."""
    config = saved["config"]
    made = "a fixed code of the token id; it was never trained and is written out as `embed_tokens`"
    made = "a learned table" if name == "learned" else made
    rows = list(config.items())
    rows += [
        (f"validation {key}", scores[key]) for key in ("loss", "bits_per_byte") if key in scores
    ]
    for task, result in scores.get("tasks", {}).items():
        note = f" (first {result['n']} items)" if result["limited"] else ""
        metrics = [key for key in ("acc", "acc_norm", "perplexity") if key in result]
        rows += [(f"{task} {key}{note}", f"{result[key]:.4f}") for key in metrics]
    table = "".join(f"| {key} | {value} |\n" for key, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}, {saved["step"] * config["tokens_per_iter"]:,} training tokens

The input is {made}.

Data: {config["data_dir"]}, tokenizer {saved["data"]["tokenizer"]}.

| | |
|---|---|
{table}"""
