"""
Hugging Face folders: a run written as a Llama that transformers, and what builds on it, can open.

    embed_tokens    the table, or the fixed code of every id written out as one (V, C)
    q, k, v_proj    rows of our qkv
    tokenizer.json  our byte-pair encoding as a list of merges
"""

import base64
import json
import re
import tempfile
from pathlib import Path

from torch import Tensor

from data.tokenizers import END_OF_TEXT


def llama_weights(weights: dict[str, Tensor], n_layer: int) -> dict[str, Tensor]:
    """A GPT's weights, the input among them as a table (V, C), under Llama's names."""
    names = {"wte": ["model.embed_tokens"], "norm_f": ["model.norm"], "lm_head": ["lm_head"]}
    parts = {
        "norm_1": ["input_layernorm"],
        "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.proj": ["self_attn.o_proj"],
        "norm_2": ["post_attention_layernorm"],
        "mlp.gate": ["mlp.gate_proj"],
        "mlp.up": ["mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    for i in range(n_layer):
        for ours, theirs in parts.items():
            names[f"blocks.{i}.{ours}"] = [f"model.layers.{i}.{name}" for name in theirs]
    found = {}
    for ours, theirs in names.items():
        found |= dict(zip(theirs, weights[ours + ".weight"].detach().chunk(len(theirs))))
    return {name + ".weight": weight.contiguous().clone() for name, weight in found.items()}


def llama_config(config: dict, eot: int) -> dict:
    """Llama's config.json for a run's settings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["n_embd"],
        "intermediate_size": config["n_inner"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_head"],
        "max_position_embeddings": config["block_size"],
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "tie_word_embeddings": False,
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], eot),
    }


def hugging_face_json(spec: dict) -> dict:
    """
    The tokenizer.json of a spec, for the tokenizers library: the same ids for every text that does
    not spell a special token. The library writes bytes as printable characters, and merges as
    pairs: all that spell a token, in the order of the ranks, which is when tiktoken merges.
    """
    tokens = [base64.b64decode(token) for token in spec["mergeable_ranks"]]
    known = set(tokens)
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    letter = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def text(token: bytes) -> str:
        return "".join(letter[b] for b in token)

    merges = []
    for token in tokens:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [[text(a), text(b)] for a, b in pairs if a in known and b in known]
    # Our pattern has escapes that this library's regular expressions do not know.
    escapes = r"\\u[0-9a-f]{4}|\\U[0-9a-f]{8}"
    pattern = re.sub(escapes, lambda match: chr(int(match.group()[2:], 16)), spec["pat_str"])
    words = {"type": "Split", "behavior": "Isolated", "invert": False}
    words["pattern"] = {"Regex": pattern}
    letters = dict.fromkeys(["add_prefix_space", "trim_offsets", "use_regex"], False)
    letters["type"] = "ByteLevel"
    plain = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    special = spec["special_tokens"]
    added = [{"id": i, "content": token, "special": True} | plain for token, i in special.items()]
    vocab = {text(token): i for i, token in enumerate(tokens)} | special
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, letters]},
        "decoder": letters,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


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
    tokenizer = dict.fromkeys(["bos_token", "eos_token", "pad_token"], END_OF_TEXT)
    tokenizer |= {"clean_up_tokenization_spaces": False, "model_max_length": config["block_size"]}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    texts = {
        "config.json": llama_config(config, eot),
        "generation_config.json": {"bos_token_id": eot, "eos_token_id": eot, "do_sample": True},
        "tokenizer.json": hugging_face_json(spec),
        "tokenizer_config.json": tokenizer,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there when it is whole.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        partial = Path(name) / out.name
        partial.mkdir()
        tensors = llama_weights(weights, config["n_layer"])
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        (partial / "README.md").write_text(card, encoding="utf-8")
        for file, content in texts.items():
            (partial / file).write_text(json.dumps(content, indent=2), encoding="utf-8")
        if out.exists():
            out.rmdir()
        partial.rename(out)


def model_card(name: str, saved: dict) -> str:
    """What a run is, how its input was made and on what it was trained."""
    config = saved["config"]
    made = "a learned table" if config["input_mode"] == "learned" else "fixed, never trained"
    return f"""# {name}, {saved["step"] * config["tokens_per_iter"]:,} training tokens

The input, written out as `embed_tokens`, is {made}.
Data: {config["data_dir"]}, tokenizer {saved["data"]["tokenizer"]}. All settings:

    {json.dumps(config)}
"""
