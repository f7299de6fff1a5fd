"""
What a run will take, before it starts: memory, time and disk, from the settings alone.

    python train.py config/canonical_135m.py --plan                     one GPU
    WORLD_SIZE=8 python train.py config/canonical_1p7b.py --plan        a rank of eight

A rank's memory holds, for N parameters,

    weights              4 N bytes, float32
    gradients            4 N
    AdamW's two means    8 N, or with shard_optimizer the largest rank's part of it
    16-bit weights       2 N, autocast's copies, in bfloat16 or float16
    activations          what the backward pass needs of every token of the micro-batch
    working space        the largest tensors that are in the making

Nothing is allocated (the model is built on PyTorch's "meta" device) and no data is looked at.

Letters: B batch, T time, C width, F hidden width of the MLP, V vocabulary, L layers, N parameters.
"""

from collections import defaultdict
from dataclasses import replace

import torch

from model import CHUNK_BYTES, GPT

# Peak of the 16-bit matrix units in FLOP/s, dense, from the makers' data sheets; by part of the name
# that CUDA gives a GPU. The first that fits counts.
PEAK = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12,
    "B200": 2250e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
CLUSTERS = [(1, "H100"), (8, "A100"), (8, "H100"), (8, "H200"), (64, "H100")]
CARDS_GB = (24, 40, 80, 141)
UTILISATION = 0.4  # share of the peak that the hours below assume
USABLE = 0.92      # share of a card's memory that tensors can have: the rest is CUDA's, and gaps


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The GPU's 16-bit peak in FLOP/s; None if it is unknown or the products are in float32."""
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def parameters(model: GPT) -> dict[str, int]:
    """How many parameters each part has."""
    kinds = {"wte": "input", "attn": "attention", "mlp": "MLP", "lm_head": "output head"}
    counts = defaultdict(int)
    for name, p in model.named_parameters():
        counts[next((kind for key, kind in kinds.items() if key in name), "norms")] += p.numel()
    return dict(counts)


def largest_share(model: GPT, ranks: int) -> int:
    """The most parameters a rank has of a sharded optimizer: each goes, largest first, where fewest are."""
    loads = [0] * ranks
    for n in sorted((p.numel() for p in model.parameters()), reverse=True):
        loads[loads.index(min(loads))] += n
    return max(loads)


def block_activations(C: int, F: int, compiled: bool) -> int:
    """
    Numbers that a block keeps of each token for the backward pass: the inputs and outputs of its two
    norms, q, k, v and what they were cut from, the attention's output (10 C), gate, up and their
    product (3 F). Without compile also what the norms scale (2 C) and silu of the gate (F).
    """
    return 10 * C + 3 * F if compiled else 12 * C + 4 * F


def memory(model: GPT, cfg, ranks: int, half: bool, compiled: bool) -> dict[str, int]:
    """Bytes of a rank at its peak, between the forward and the backward pass. half: 16-bit products."""
    C, F, L, V = cfg.n_embd, cfg.n_inner or 4 * cfg.n_embd, cfg.n_layer, cfg.vocab_size
    N, size, tokens = model.n_params(), 2 if half else 4, cfg.batch_size * cfg.block_size
    block = block_activations(C, F, compiled)
    kept, again = (L * C, block) if cfg.activation_checkpointing else (L * block, 0)
    logits = min(4 * tokens * V, CHUNK_BYTES) * (2 if compiled else 1)
    parts = {
        "weights": 4 * N,
        "gradients": 4 * N,
        "AdamW's means": 8 * (largest_share(model, ranks) if cfg.shard_optimizer else N),
        "activations": size * tokens * kept,
        # In the making at the peak: logits, gradients of the head and of x; or those of the last block's
        # MLP, behind what it computes again.
        "working space": max(logits + size * (V + tokens) * C, size * tokens * (C + 4 * F + again)),
    }
    if half:
        parts["16-bit weights"] = 2 * (N - parameters(model).get("input", 0))
    return parts


def largest_batch(model: GPT, cfg, ranks: int, card_gb: int, half: bool, compiled: bool) -> int:
    """The largest legal batch_size that fits a card, 0 if none does."""
    windows = cfg.tokens_per_iter // cfg.block_size // ranks
    for B in [B for B in range(windows, 0, -1) if windows % B == 0]:
        parts = memory(model, replace(cfg, batch_size=B), ranks, half, compiled)
        if sum(parts.values()) <= USABLE * card_gb * 1e9:
            return B
    return 0


def hours(flops: float, gpus: int, name: str) -> float:
    return flops / (gpus * PEAK[name] * UTILISATION) / 3600


def print_plan(cfg, ranks: int) -> None:
    """The plan of a TrainConfig on so many ranks."""
    with torch.device("meta"):
        model = GPT(cfg)
    on_gpu = cfg.device != "cpu"
    half, compiled = on_gpu and cfg.dtype != "float32", cfg.compile == "True" or (on_gpu and cfg.compile == "auto")
    N, tokens, flops = model.n_params(), cfg.max_iters * cfg.tokens_per_iter, model.flops_per_token()

    print(f"parameters, {cfg.input_mode}")
    for part, n in (parameters(model) | {"in all": N}).items():
        print(f"  {part:16} {n:>15,}")

    parts = memory(model, cfg, ranks, half, compiled)
    print(f"memory in GB of one of {ranks} ranks, batch_size {cfg.batch_size}, "
          f"{'16-bit products' if half else 'float32'}, {'compiled' if compiled else 'eager'}")  # fmt: skip
    for part, n in (parts | {"in all": sum(parts.values())}).items():
        print(f"  {part:16} {n / 1e9:>15.2f}")

    print(f"largest batch_size for cards of {', '.join(map(str, CARDS_GB))} GB (- = none)")
    for sharded in (False, True)[:ranks]:
        for recomputed in (False, True):
            way = replace(cfg, activation_checkpointing=recomputed, shard_optimizer=sharded)
            sizes = [largest_batch(model, way, ranks, gb, half, compiled) for gb in CARDS_GB]
            print("  " + " ".join(f"{n or '-':>4}" for n in sizes)
                  + f"   activation_checkpointing={recomputed}, shard_optimizer={sharded}")  # fmt: skip

    print(f"{cfg.max_iters:,} iterations of {cfg.tokens_per_iter:,} tokens = {tokens:,} tokens\n"
          f"{flops:,} FLOPs a token, {flops * tokens:.3g} in all")  # fmt: skip
    if half:
        # Computing the blocks again adds a forward pass to a forward and a backward one, which is two.
        work = flops * tokens * (4 / 3 if cfg.activation_checkpointing else 1)
        print(f"hours at {UTILISATION:.0%} of the peak of 16-bit products")
        for gpus, name in CLUSTERS:
            time = hours(work, gpus, name)
            print(f"  {gpus:2} x {name}   {time:>10,.1f} hours {gpus * time:>10,.0f} GPU hours")
    print(f"disk: {2 * tokens / 1e9:.1f} GB for as many tokens, {12 * N / 1e9:.2f} GB a checkpoint, "
          f"{cfg.keep_checkpoints + 1} of them while one is written")  # fmt: skip
