"""
Hugging Face folders: a run written as a Llama that transformers, and what builds on it, can open, and
a Llama's weights read into the learned arm.

    embed_tokens    the table, or the fixed code of every id written out as one (V, C)
    q, k, v_proj    rows of our qkv;  gate, up_proj    rows of our gate_up
    tokenizer.json  our byte-pair encoding as a list of merges
"""

import base64
import json
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from config import try_json
from data.tokenizers import END_OF_TEXT
from model import GPT, GPTConfig

# -------------------------------------------------------------------------------
# weights


def llama_names(cfg: GPTConfig) -> dict[str, list[str]]:
    """Our parameters, and Llama's that lie in them one above the other."""
    names = {"norm_f.weight": ["model.norm.weight"], "lm_head.weight": ["lm_head.weight"]}
    for i in range(cfg.n_layer):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        names |= {
            ours + "norm_1.weight": [theirs + "input_layernorm.weight"],
            ours + "attn.qkv.weight": [f"{theirs}self_attn.{x}_proj.weight" for x in "qkv"],
            ours + "attn.proj.weight": [theirs + "self_attn.o_proj.weight"],
            ours + "norm_2.weight": [theirs + "post_attention_layernorm.weight"],
            ours + "mlp.gate_up.weight": [f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up")],
            ours + "mlp.down.weight": [theirs + "mlp.down_proj.weight"],
        }
    return names


def to_llama(model: GPT) -> tuple[dict, dict[str, Tensor]]:
    """Llama's config.json and weights. A fixed code is written out as the table embed_tokens (V, C)."""
    cfg, own = model.cfg, model.state_dict()
    ids = torch.arange(cfg.vocab_size, device=model.lm_head.weight.device)
    weights = {"model.embed_tokens.weight": model.wte(ids).detach()}
    for ours, theirs in llama_names(cfg).items():
        weights |= dict(zip(theirs, own[ours].chunk(len(theirs))))
    return to_llama_config(cfg), {name: w.cpu().contiguous().clone() for name, w in weights.items()}


def to_llama_config(cfg: GPTConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": cfg.vocab_size, "hidden_size": cfg.n_embd, "num_hidden_layers": cfg.n_layer,
        "intermediate_size": cfg.n_inner or 4 * cfg.n_embd, "hidden_act": "silu",
        "num_attention_heads": cfg.n_head, "num_key_value_heads": cfg.n_head,
        "max_position_embeddings": cfg.block_size, "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta, "attention_bias": False, "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip


def from_llama(model: GPT, folder: str | Path) -> None:
    """
    Fill a model of the learned arm with the weights of a Llama folder. A head that is tied to the
    table is copied from it. Raises ValueError where the folder's network is not of the model's shape.
    """
    cfg, path = model.cfg, Path(folder) / "config.json"
    if cfg.input_mode != "learned":
        raise ValueError(f"init_from needs input_mode=learned, got {cfg.input_mode}: it brings a table")
    if not path.is_file():
        raise ValueError(f"init_from: {path} is missing, {folder} is no Hugging Face folder")
    theirs = try_json(path.read_text(encoding="utf-8"))
    if not isinstance(theirs, dict):
        raise ValueError(f"init_from: {path} is damaged: fetch the folder again")
    check_config(theirs, cfg, folder)
    weights = read_weights(Path(folder))
    if theirs.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights.get("model.embed_tokens.weight")
    names = llama_names(cfg) | {"wte.weight": ["model.embed_tokens.weight"]}
    wanted = {name for group in names.values() for name in group}
    found = {name for name, w in weights.items() if w is not None and not name.endswith("inv_freq")}
    for what, some in (("lacks", wanted - found), ("has unknown", found - wanted)):
        if some:
            raise ValueError(f"init_from: {folder} {what} weights, {min(some)} among {len(some)}")
    for name in wanted:
        if not weights[name].is_floating_point() or not weights[name].isfinite().all():
            raise ValueError(f"init_from: {name} in {folder} holds no finite numbers (quantized or damaged)")
    try:
        model.load_state_dict({ours: torch.cat([weights[n] for n in group]) for ours, group in names.items()})
    except RuntimeError as error:
        raise ValueError(f"init_from: the weights in {folder} are of another shape: {error}") from error


def check_config(theirs: dict, cfg: GPTConfig, folder: str | Path) -> None:
    """Raise ValueError if a config.json is of another network than ours with the settings cfg."""
    own = {"head_dim": cfg.n_embd // cfg.n_head, "rope_scaling": None, "rope_type": "default"}
    wanted, rope = to_llama_config(cfg) | own, theirs.get("rope_parameters") or {}
    filled = own | {
        "rope_theta": rope.get("rope_theta", 1e4), "rope_type": rope.get("rope_type", "default"),
        "num_key_value_heads": theirs.get("num_attention_heads"), "attention_bias": False, "mlp_bias": False,
    } | theirs  # fmt: skip
    keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act",
            "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_type",
            "rope_scaling", "attention_bias", "mlp_bias")  # fmt: skip
    differ = [f"{key}={filled.get(key)} there, {wanted[key]} here" for key in keys if filled.get(key) != wanted[key]]
    if differ:
        raise ValueError(f"init_from: {folder} is of another shape: {'; '.join(differ)}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the files that its index names."""
    load, files, weights = safetensors_torch().load_file, ["model.safetensors"], {}
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for file in files:
            weights |= load(folder / file)
    except Exception as error:  # missing, cut short or something else
        raise ValueError(
            f"init_from: cannot read the weights in {folder} ({type(error).__name__}: {error})"
        ) from error
    return weights


def safetensors_torch():
    """The safetensors package, which is needed here alone."""
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("Hugging Face folders need one more package: pip install safetensors") from None
    return safetensors.torch


# -------------------------------------------------------------------------------
# tokenizer


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
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for token, i in spec["special_tokens"].items()
    ]  # fmt: skip
    bytes_as_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                        "use_regex": False}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_as_letters]},
        "decoder": bytes_as_letters,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {text(token): i for i, token in enumerate(tokens)} | spec["special_tokens"],
            "merges": merges,
        },
    }  # fmt: skip


# -------------------------------------------------------------------------------
# a whole folder


def export(model: GPT, spec: dict, card: str, folder: str) -> None:
    """
    Write a model, its tokenizer and its card. Raises ValueError if the folder is not empty, so that
    nothing is lost.
    """
    eot, out = spec["special_tokens"][END_OF_TEXT], Path(folder).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"export: {folder} is not empty: choose another folder")
    config, weights = to_llama(model)
    ends = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": model.cfg.block_size}  # fmt: skip
    texts = {
        "config.json": config | ends, "generation_config.json": ends | {"do_sample": True},
        "tokenizer.json": hugging_face_json(spec), "tokenizer_config.json": names | kind,
    }  # fmt: skip
    save_file = safetensors_torch().save_file
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there when it is whole.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        partial = Path(name) / out.name
        partial.mkdir()
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        for file, content in texts.items():
            (partial / file).write_text(json.dumps(content, indent=2), encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        partial.rename(out)


def model_card(title: str, saved: dict, scores: dict) -> str:
    """What a run is, how its input was made, on what it was trained and how well it does."""
    config = saved["config"]
    made = "a fixed code of the token id; it was never trained and is written out as `embed_tokens`"
    made = "a learned table" if config["input_mode"] == "learned" else made
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", "---", "",
        f"# {title}, {saved['iter'] * config['tokens_per_iter']:,} training tokens", "",
        f"The input is {made}.", "",
        f"Data: {config['data_dir']}, tokenizer {saved['data']['tokenizer']}.", "",
        "| setting | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in config.items()),
        "", "| measure | value |", "|---|---|",
    ]  # fmt: skip
    if "loss" in scores:
        lines += [f"| validation {key} | {scores[key]:.4f} |" for key in ("loss", "bits_per_byte")]
    for task, result in scores.get("tasks", {}).items():
        note = f" (first {result['n']} items)" if result["limited"] else ""
        metrics = [key for key in ("acc", "acc_norm", "perplexity") if key in result]
        lines += [f"| {task} {key}{note} | {result[key]:.4f} |" for key in metrics]
    return "\n".join(lines) + "\n"
