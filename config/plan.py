"""
What a run will take, before it starts: memory, time and disk, from the settings alone.

    python train.py config/canonical_1p7b.py --plan=True                     one GPU
    WORLD_SIZE=8 python train.py config/canonical_1p7b.py --plan=True        a rank of eight

A rank's memory holds, for N parameters,

    weights              4 N bytes, float32
    gradients            4 N
    AdamW's two means    8 N, or with shard_optimizer the largest rank's part of it
    16-bit weights       2 N, autocast's copies, in bfloat16 or float16
    activations          what the backward pass needs of every token of the micro-batch

Nothing is allocated (the model is built on PyTorch's "meta" device) and no data is looked at.

Letters: B batch, T time, C width, F hidden width of the MLP, V vocabulary, L layers, N parameters.
"""

from collections import defaultdict

import torch

from model import CHUNK_BYTES, GPT

# Peak of the 16-bit matrix units in FLOP/s, dense, from the makers' data sheets; by part of the name
# that CUDA gives a GPU. The first that fits counts.
PEAK = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12,
    "B200": 2250e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
CLUSTERS = [(8, "A100"), (8, "H100"), (8, "H200"), (64, "H100")]
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


def memory(model: GPT, cfg, ranks: int, batch_size: int, half: bool, compiled: bool) -> dict[str, int]:
    """
    Bytes of a rank at the peak, the start of the backward pass, by part. half: 16-bit products.

    A block keeps for each token: both norms' inputs and outputs, q, k, v and the place they were cut
    from, and the attention's output (10 C); gate and up, and the MLP's product (3 F). Without compile
    each norm keeps a float32 or normalized copy more, and SwiGLU the silu (12 C + 4 F).
    """
    C, F, L, V = cfg.n_embd, cfg.n_inner or 4 * cfg.n_embd, cfg.n_layer, cfg.vocab_size
    N, size, tokens = model.n_params(), 2 if half else 4, batch_size * cfg.block_size
    block = 10 * C + 3 * F if compiled else 12 * C + 4 * F
    kept = L * C + block if cfg.activation_checkpointing else L * block
    share = largest_share(model, ranks) if cfg.shard_optimizer else N
    parts = {
        "weights": 4 * N,
        "gradients": 4 * N,
        "AdamW's means": 8 * share,
        "activations": size * tokens * kept,
        # The gradients of x, of the MLP's product and of gate and up are in the making at the peak.
        "working space": size * tokens * (2 * C + 4 * F) + size * V * C + CHUNK_BYTES,
    }
    if half:
        parts["16-bit weights"] = 2 * (N - sum(p.numel() for p in model.wte.parameters()))
    return parts


def largest_batch(model: GPT, cfg, ranks: int, card_gb: int, half: bool, compiled: bool) -> int:
    """The largest legal batch_size that fits a card, 0 if none does."""
    windows = cfg.tokens_per_iter // cfg.block_size // ranks
    fits = [
        B for B in range(1, windows + 1)
        if windows % B == 0
        and sum(memory(model, cfg, ranks, B, half, compiled).values()) <= USABLE * card_gb * 1e9
    ]  # fmt: skip
    return max(fits, default=0)


def print_plan(cfg, ranks: int) -> None:
    """The plan of a TrainConfig."""
    with torch.device("meta"):
        model = GPT(cfg)
    N, tokens = model.n_params(), cfg.max_iters * cfg.tokens_per_iter
    half, compiled = cfg.dtype != "float32" and cfg.device != "cpu", cfg.compile != "False" and cfg.device != "cpu"

    print(f"parameters, {cfg.input_mode}")
    for part, n in (parameters(model) | {"in all": N}).items():
        print(f"  {part:16} {n:>15,}")

    parts = memory(model, cfg, ranks, cfg.batch_size, half, compiled)
    print(f"memory of one of {ranks} ranks in GB, batch_size {cfg.batch_size}, "
          f"{'16-bit products' if half else 'float32'}, {'compiled' if compiled else 'eager'}")  # fmt: skip
    for part, n in (parts | {"in all": sum(parts.values())}).items():
        print(f"  {part:16} {n / 1e9:>15.2f}")

    print("largest batch_size for a card of " + ", ".join(f"{gb} GB" for gb in CARDS_GB))
    kept = cfg.activation_checkpointing, cfg.shard_optimizer
    for cfg.activation_checkpointing in (False, True):
        for cfg.shard_optimizer in (False, True)[: 2 if ranks > 1 else 1]:
            sizes = [largest_batch(model, cfg, ranks, gb, half, compiled) for gb in CARDS_GB]
            names = [key for key in ("activation_checkpointing", "shard_optimizer") if getattr(cfg, key)]
            print(f"  {', '.join(str(n or '-') for n in sizes):16} with {' and '.join(names) or 'neither flag'}")
    cfg.activation_checkpointing, cfg.shard_optimizer = kept

    flops = model.flops_per_token()
    print(f"{cfg.max_iters:,} iterations of {cfg.tokens_per_iter:,} tokens = {tokens:,} tokens\n"
          f"{flops:,} FLOPs a token, {flops * tokens:.3g} in all")  # fmt: skip
    for gpus, name in CLUSTERS:
        print(f"  {gpus} x {name}: {hours(flops * tokens, gpus, name):,.1f} hours, "
              f"{gpus * hours(flops * tokens, gpus, name):,.0f} GPU hours, at {UTILISATION:.0%} of the peak")  # fmt: skip
    print(f"disk: {2 * tokens / 1e9:.1f} GB for tokens that are read once, {12 * N / 1e9:.1f} GB a checkpoint, "
          f"{cfg.keep_checkpoints + 1} of them while one is written")  # fmt: skip


def hours(flops: float, gpus: int, name: str) -> float:
    return flops / (gpus * PEAK[name] * UTILISATION) / 3600
