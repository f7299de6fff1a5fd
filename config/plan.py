"""
What a run takes, before it starts: memory, hours and disk, by arithmetic from its settings.

    python train.py config/canonical_1p7b.py --plan                     one GPU
    WORLD_SIZE=8 python train.py config/canonical_1p7b.py --plan        one of eight

Letters: B batch, T time, C width, F hidden width of the MLP, V vocabulary, L layers, N parameters.
"""

import torch

from config import Settings

# Dense 16-bit FLOP/s from the makers' data sheets; the first name that is part of CUDA's counts.
PEAK = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
UTILISATION = 0.4  # share of the peak that the hours below assume


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The GPU's 16-bit peak in FLOP/s; None if it is unknown or the products are in float32."""
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def parameters(cfg: Settings) -> dict[str, int]:
    """How many parameters each part of a GPT has."""
    C, F, L, V = cfg.n_embd, cfg.n_inner, cfg.n_layer, cfg.vocab_size
    return {
        "input": V * C if cfg.input_mode == "learned" else 0,
        "attention": L * 4 * C * C,
        "MLP": L * 3 * C * F,
        "norms": (2 * L + 1) * C,
        "output head": V * C,
    }


def n_params(cfg: Settings) -> int:
    return sum(parameters(cfg).values())


def flops_per_token(cfg: Settings) -> int:
    """Forward plus backward: 6 per weight that multiplies, 12 L C T for attention."""
    weights = n_params(cfg) - parameters(cfg)["input"]
    return 6 * weights + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


def memory(cfg: Settings, half: bool, compiled: bool) -> dict[str, int]:
    """Bytes of a rank at its peak, early in the backward pass. half: products in 16 bits."""
    C, F, L, V = cfg.n_embd, cfg.n_inner, cfg.n_layer, cfg.vocab_size
    N, size, tokens = n_params(cfg), 2 if half else 4, cfg.batch_size * cfg.block_size
    recompute = cfg.activation_checkpointing
    frozen = V * C if cfg.input_mode in ("random", "spelling") else 0
    # Numbers that a block keeps per token: inputs and outputs of its norms, q, k, v and what they
    # were cut from, attention's output (10 C), gate, up and their product (3 F). Without compile
    # also what the norms scale (2 C) and silu of the gate (F).
    block = 10 * C + 3 * F if compiled else 12 * C + 4 * F
    copies = 2 * (N - parameters(cfg)["input"]) if half else 0
    if half and compiled:
        loss = 4 * tokens * V  # 16-bit logits and their gradient
    elif half:  # log-probabilities and two gradients in float32, or two before checkpoints let go
        loss = max(12 * tokens * V, 8 * tokens * V + (copies if recompute else 0))
    else:
        loss = 4 * min(tokens, 512) * V * (2 if compiled else 1) + 4 * (V + tokens) * C
    mlp = size * tokens * (C + 4 * F + (block if recompute else 0))  # the last block's gradients
    return {
        "weights": 4 * (N + frozen),
        "gradients": 4 * N,
        "AdamW's means": 8 * N,
        "16-bit weights": 0 if recompute else copies,  # a recomputed block makes its own again
        "activations": size * tokens * L * (C if recompute else block),
        "working space": max(loss, mlp),
    }


def print_plan(cfg: Settings, ranks: int) -> None:
    """The plan of a TrainConfig on so many GPUs, which is one screen."""

    def table(title: str, parts: dict[str, float], form: str) -> None:
        print(title)
        for part, value in (parts | {"in all": sum(parts.values())}).items():
            print(f"  {part:16} {value:>15{form}}")

    half = cfg.device != "cpu" and cfg.dtype != "float32"
    compiled = cfg.compile == "True" or (cfg.compile == "auto" and cfg.device != "cpu")
    N, tokens, flops = n_params(cfg), cfg.max_iters * cfg.tokens_per_iter, flops_per_token(cfg)
    table(f"parameters, {cfg.input_mode}", parameters(cfg), ",")
    way = f"{'16-bit products' if half else 'float32'}, {'compiled' if compiled else 'eager'}"
    parts = {part: n / 1e9 for part, n in memory(cfg, half, compiled).items()}
    table(f"GB per rank, {ranks} in all, batch_size {cfg.batch_size}, {way}", parts, ".2f")
    print(f"{cfg.max_iters:,} steps of {cfg.tokens_per_iter:,} tokens = {tokens:,} tokens")
    print(f"{flops:,} FLOPs per token, {flops * tokens:.3g} in all")
    if half:
        # Blocks that are computed again add a forward pass, a third of the work.
        work = flops * tokens * (4 / 3 if cfg.activation_checkpointing else 1)
        for name in ("A100", "H100", "B200"):
            n_hours = work / (ranks * PEAK[name] * UTILISATION) / 3600
            print(f"  {ranks} x {name} {n_hours:>12,.1f} hours at {UTILISATION:.0%} of the peak")
    size = f"{12 * N / 1e9:.2f} GB and room for one more"
    print(
        f"disk: {2 * tokens / 1e9:.1f} GB of tokens, {cfg.keep_checkpoints} checkpoints of {size}"
    )
