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
    """A GPT's weights, the input among them as a table (V, C), under Llama's names."""
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
    same = {
        "vocab_size": "vocab_size", "hidden_size": "n_embd", "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head", "max_position_embeddings": "block_size",
        "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta",
    }  # fmt: skip
    return {theirs: config[ours] for theirs, ours in same.items()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "tie_word_embeddings": False,
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], eot),
    }


# --- tokenizer ----------------------------------------------------------------


def hugging_face_json(spec: dict) -> dict:
    """
    The tokenizer.json of a spec, for the tokenizers library: the same ids for every text.

    (A text that spells a special token is that token to the library, and plain text to ours.) It
    writes bytes as printable characters and merges by a list of pairs. A token stands there with
    every pair of tokens that spells it, in the order of the ranks, which is when tiktoken merges.
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
    # Our pattern has escapes that this library's regular expressions do not know.
    pattern = re.sub(
        r"\\u[0-9a-f]{4}|\\U[0-9a-f]{8}", lambda m: chr(int(m.group()[2:], 16)), spec["pat_str"]
    )
    plain = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    special = [
        {"id": i, "content": token, "special": True} | plain
        for token, i in spec["special_tokens"].items()
    ]
    as_letters = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    as_letters = {"type": "ByteLevel"} | as_letters
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split |= {"invert": False}
    vocab = {text(token): i for i, token in enumerate(tokens)} | spec["special_tokens"]
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_letters]},
        "decoder": as_letters,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
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


def model_card(name: str, saved: dict) -> str:
    """What a run is, how its input was made and on what it was trained."""
    config = saved["config"]
    made = "a fixed code of the token id; it was never trained and is written out as `embed_tokens`"
    made = "a learned table" if name == "learned" else made
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}, {saved["step"] * config["tokens_per_iter"]:,} training tokens

The input is {made}.

Data: {config["data_dir"]}, tokenizer {saved["data"]["tokenizer"]}. All settings:

    {json.dumps(config)}
"""
