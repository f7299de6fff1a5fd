"""
A compact Llama-shaped GPT whose input is the question: a learned table or a fixed code.

    ids -> wte -> n_layer x [ x + attention(norm(x)), x + SwiGLU(norm(x)) ] -> norm -> lm_head

- wte is nn.Embedding ("learned") or a fixed input of codes.py: nothing else differs
- RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU (arXiv:2002.05202)
- no biases, no dropout, an output head of its own (untied)
- every parameter has its own random generator, so models of one seed share their initial weights

Letters: B batch, T time, C width, H heads, D head width, F hidden width of the MLP, V vocabulary.
"""

from __future__ import annotations  # so that a signature may name what comes below

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from codes import FixedTokenCode, FrozenTable, normal
from config import Settings


@dataclass
class GPTConfig(Settings):  # which checks the types; at_least() raises ValueError
    input_mode: Literal["learned", "canonical", "gf2", "random", "spelling"] = "canonical"  # input
    vocab_size: int = 2048  # V, the number of token ids
    block_size: int = 128  # T, the longest context in tokens
    n_layer: int = 6  # Transformer blocks
    n_head: int = 2  # attention heads per block
    n_embd: int = 88  # C, the width
    n_inner: int = 0  # F, the hidden width of the MLP; 0 = 4 C
    rope_theta: float = 1e4  # base of the rotary frequencies
    norm_eps: float = 1e-5  # keeps RMSNorm from dividing by zero
    code_bits: int = 0  # K, bits of a code; 0 = the minimum, ceil(log2 V)
    code_seed: int = 0  # draws the recoding of gf2, the vectors of random and spelling
    code_symbols: Literal["01", "pm1"] = "01"  # write bits as 0 and 1, or as -1 and +1
    code_scale: float = 1.0  # size of a fixed input: its symbols are multiplied by it
    code_shift: bool = False  # add a random shift b: affine instead of linear
    code_recodings: int = 1  # R different recodings side by side before repeating
    code_own: bool = False  # spelling: add to each token a random vector of its own
    table_scale: float = 0.02  # standard deviation with which a learned table starts
    seed: int = 1  # draws the weights and the data order

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "vocab_size block_size n_layer n_head n_embd code_recodings rope_theta")
        self.at_least(1e-6, "code_scale")  # 0 would make all tokens alike
        self.at_least(0, "n_inner code_bits code_seed seed norm_eps table_scale")
        self.n_inner = self.n_inner or 4 * self.n_embd
        if self.n_embd % (2 * self.n_head) != 0:
            raise ValueError(
                f"n_embd must be a multiple of 2 x n_head = {2 * self.n_head} "
                f"(rotary positions turn pairs), got {self.n_embd}"
            )


def make_input(cfg: GPTConfig, tokens: list[bytes]) -> nn.Module:
    """ids (B, T) -> (B, T, C), all that input_mode decides. "spelling" needs the tokens' bytes."""
    V, C = cfg.vocab_size, cfg.n_embd
    mode = cfg.input_mode
    scale, seed = cfg.code_scale, cfg.code_seed
    if mode == "learned":
        return nn.Embedding(V, C)
    if mode in ("random", "spelling"):
        tokens = tokens or [b""] * V  # to be loaded from a checkpoint
        return FrozenTable(tokens, C, mode, scale, seed, cfg.code_own)
    code = (cfg.code_bits, seed, cfg.code_symbols, scale, cfg.code_shift, cfg.code_recodings)
    return FixedTokenCode(V, C, mode, *code)


def rotary_table(block_size: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """
    cos and sin of the angle t theta^(-2 i / D) by which position t turns pair i, both (T, D). Pair
    i is (x_i, x_{i + D/2}): each cosine and sine stands twice, the sine first with a minus.
    """
    exponent = torch.arange(0, head_dim, 2).float() / head_dim  # (D / 2,), 2 i / D
    t = torch.arange(block_size).float()
    angle = torch.outer(t, theta**-exponent)  # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Turn each pair (x_i, x_{i + D/2}) by its position's angle (arXiv:2104.09864, equation 34).
    The product q k then depends on positions only through their difference.
    """
    swapped = x.roll(x.size(-1) // 2, dims=-1)  # x_i and x_{i + D/2} have changed places
    return (x * cos + swapped * sin).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Every position reads from itself and the positions before it."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head = cfg.n_head
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        H = self.n_head
        qkv = self.qkv(x).view(B, T, 3 * H, C // H)
        qkv = qkv.transpose(1, 2)  # (B, 3 H, T, D)
        qk, v = qkv.split([2 * H, H], dim=1)
        q, k = rotate(qk, cos, sin).chunk(2, dim=1)  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.append(k, v)
        # softmax(q k^T / sqrt(D)) v over the past. T = 1 is a new token that sees all of a cache.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * gain, computed in float32 and returned in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_inner, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_inner, bias=False)
        self.down = nn.Linear(cfg.n_inner, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # (B, T, C)


class Block(nn.Module):
    """Both halves read a normalised x and add to it."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.norm_1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn = CausalSelfAttention(cfg)
        self.norm_2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin, cache)
        return x + self.mlp(self.norm_2(x))


# --- the model -----------------------------------------------------------------


class GPT(nn.Module):
    """
    model(ids)                      (B, T) -> logits (B, T, V)
    model(ids, targets)             mean of -log p(target), in nats; targets of -1 do not count
    model(ids, targets, "none")     the same for every token, (B, T)
    """

    def __init__(self, cfg: GPTConfig, activation_checkpointing=False, tokens: list[bytes] = ()):
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = activation_checkpointing
        self.wte = make_input(cfg, tokens)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm_f = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        with torch.device("cpu"):  # the same numbers on every device
            cos, sin = rotary_table(cfg.block_size, cfg.n_embd // cfg.n_head, cfg.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the norms' gains stay 1
                self.init_matrix(name, p)

    @torch.no_grad()
    def init_matrix(self, name: str, p: nn.Parameter) -> None:
        """
        N(0, 0.02^2), drawn from (seed, name): no other parameter changes it. The 2 n_layer matrices
        that add to x start smaller, so that their sum does not grow with depth.
        """
        std = self.cfg.table_scale if name == "wte.weight" else 0.02
        if name.endswith(("proj.weight", "down.weight")):
            std /= math.sqrt(2 * self.cfg.n_layer)
        if not p.is_meta:  # where only shapes are asked for, there are no numbers
            p.copy_(std * normal(self.cfg.seed, name, p.shape))

    def hidden(self, ids: Tensor, cache: list[KVCache] | None = None) -> Tensor:
        """What the head reads: ids (B, T) -> (B, T, C). With a cache, ids follow what it holds."""
        start = cache[0].length() if cache else 0
        end = start + ids.size(1)
        if end > self.cfg.block_size:
            raise ValueError(f"{end} tokens do not fit in block_size={self.cfg.block_size}")
        x = self.wte(ids)  # (B, T, C)
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # the stream x, the same for table and code
        cos, sin = self.cos[start:end], self.sin[start:end]  # (T, D)
        for i, block in enumerate(self.blocks):
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Keep x alone, and compute the block again in the backward pass (arXiv:1604.06174).
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, cache[i] if cache else None)  # (B, T, C)
        return self.norm_f(x)

    def forward(self, ids: Tensor, targets: Tensor | None = None, reduction="mean") -> Tensor:
        x = self.hidden(ids)
        if targets is None:
            return self.lm_head(x)  # (B, T, V)
        loss = head_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """
        Forward plus backward at full context (arXiv:2204.02311, appendix B): 6 per weight, except
        a table's, which is looked up, and 12 n_layer C T for q k^T and the sum of values.
        """
        cfg = self.cfg
        table = sum(p.numel() for p in self.wte.parameters())
        attention = 12 * cfg.n_layer * cfg.n_embd * cfg.block_size
        return 6 * (self.n_params() - table) + attention

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        stop_id: int = -1,  # no token has this id: never stop
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """
        Continue ids (B, T), T >= 1, by up to max_new_tokens -> (B, T + new). Temperature 0 takes
        the likeliest token; top_k = 0 samples from all. A row that has drawn stop_id is filled
        with it. Past block_size the window slides: positions change, so no cache can be used.
        """
        if min(max_new_tokens, temperature, top_k) < 0:
            raise ValueError("max_new_tokens, temperature and top_k must be at least 0")
        cache = [KVCache() for _ in self.blocks]
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)  # (B,)
        for _ in range(max_new_tokens):
            if use_cache and ids.size(1) <= self.cfg.block_size:
                x = self.hidden(ids[:, cache[0].length() :], cache)
            else:
                x = self.hidden(ids[:, -self.cfg.block_size :])
            logits = self.lm_head(x[:, -1]).float()  # (B, V)
            if temperature < 1e-9:
                new = logits.argmax(-1)  # (B,)
            else:
                # The largest becomes 0, so that no division by a small temperature overflows.
                logits = (logits - logits.amax(-1, keepdim=True)) / temperature
                if 0 < top_k < logits.size(-1):
                    lowest = logits.topk(top_k).values[:, -1:]  # (B, 1)
                    logits = logits.masked_fill(logits < lowest, -math.inf)
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
            new = new.masked_fill(done, stop_id)
            ids = torch.cat([ids, new[:, None]], dim=1)
            done |= new == stop_id
            if done.all():
                break
        return ids


# --- what makes it fast, and loading -------------------------------------------


class KVCache:
    """Keys and values that one block has computed, so that sampling computes them once."""

    def __init__(self):
        self.k = self.v = None  # (B, H, T, D)

    def length(self) -> int:
        return 0 if self.k is None else self.k.size(2)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new positions' k and v (B, H, new, D), and return those of all positions."""
        if self.k is not None:
            assert k.size(2) == 1, "after its prompt, a cache takes one token at a time"
            k = torch.cat([self.k, k], dim=2)  # (B, H, all, D)
            v = torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v
        return k, v


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """
    cross_entropy(x @ weight.T, targets): (N, C), (V, C), (N,) -> a scalar, or (N,) for "none".
    In float32 the logits of 512 tokens at a time come and go, with their gradient. In 16 bits the
    plain way is faster (compiled, it is one pass over the logits).
    """
    if x.dtype != torch.float32:
        logits = F.linear(x, weight.to(x.dtype)).float()  # (N, V)
        return F.cross_entropy(logits, targets, reduction=reduction, ignore_index=-1)
    options = nn.LinearCrossEntropyOptions(
        chunking_method=None,
        batch_chunk_size=min(len(x), 512),
        allow_retain_graph=torch.compiler.is_compiling(),  # the form that compile can trace
    )
    return F.linear_cross_entropy(
        x, weight, targets, reduction=reduction, ignore_index=-1, options=options
    )


def load_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Strict: every name must be there and fit. Raises ValueError."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # PyTorch lists what is missing, extra or of another shape
        raise ValueError(f"the checkpoint does not fit the model's settings: {error}") from error


def build_model(saved: dict, device: str | torch.device = "cpu") -> GPT:
    """The model of a checkpoint (data/runs.py). Settings added since have their defaults."""
    names = {field.name for field in fields(GPTConfig)} & set(saved["config"])
    model = GPT(GPTConfig(**{name: saved["config"][name] for name in names}))
    load_weights(model, saved["model"])
    return model.to(device)
