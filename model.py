"""
A compact Llama-shaped GPT whose input is the question: a learned table or a fixed code.

    ids -> wte -> [ x + attention(norm(x)),  x + SwiGLU(norm(x)) ] x n_layer -> norm -> lm_head -> logits

- wte is nn.Embedding ("learned") or codes.FixedTokenCode ("canonical", "gf2"): nothing else differs
- RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU (arXiv:2002.05202)
- no biases, no dropout, an output head of its own (untied)
- every parameter comes from a random generator of its own, so the arms share their backbone's start

Letters: B batch, T time, C width, H heads, D head width, F hidden width of the MLP, V vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from codes import FixedTokenCode, compute_dtype
from config import Settings

IGNORE = -1  # a target that does not count
CHUNK_BYTES = 2**27  # float32 logits that are there at a time


@dataclass
class GPTConfig(Settings):
    input_mode: Literal["learned", "canonical", "gf2"] = "canonical"  # what the model reads
    vocab_size: int = 49152    # V, the number of token ids
    block_size: int = 2048     # T, the longest context in tokens
    n_layer: int = 24          # Transformer blocks
    n_head: int = 32           # attention heads a block
    n_embd: int = 2048         # C, the width
    n_inner: int = 0           # F, the hidden width of the MLP; 0 = 4 C
    rope_theta: float = 1e4    # base of the rotary frequencies
    norm_eps: float = 1e-5     # keeps RMSNorm from dividing by zero
    code_bits: int = 0         # K, bits of a code; 0 = the minimum, ceil(log2 V)
    code_seed: int = 0         # draws the recoding of gf2
    code_symbols: Literal["01", "pm1"] = "01"  # write bits as 0 and 1, or as -1 and +1
    code_scale: float = 1.0    # times this
    code_shift: bool = False   # add a drawn shift b: affine instead of linear
    code_recodings: int = 1    # R different recodings side by side before repeating
    seed: int = 1              # draws the weights and the data order

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "block_size n_layer n_head n_embd code_recodings rope_theta")
        self.at_least(2, "vocab_size")
        self.at_least(0, "n_inner code_bits code_seed seed norm_eps")
        if self.n_embd % (2 * self.n_head) != 0:
            raise ValueError(
                f"n_embd must be a multiple of 2 x n_head = {2 * self.n_head} "
                f"(rotary positions turn pairs), got {self.n_embd}"
            )


# -------------------------------------------------------------------------------
# the input: the only place that input_mode reaches


def make_input(cfg: GPTConfig) -> nn.Module:
    """The module that turns ids (B, T) into vectors (B, T, C)."""
    if cfg.input_mode == "learned":
        return nn.Embedding(cfg.vocab_size, cfg.n_embd)  # V C parameters
    return FixedTokenCode(                               # none
        cfg.vocab_size, cfg.n_embd, cfg.input_mode, cfg.code_bits, cfg.code_seed,
        cfg.code_symbols, cfg.code_scale, cfg.code_shift, cfg.code_recodings,
    )


# -------------------------------------------------------------------------------
# matrix products

# A CPU build of PyTorch multiplies float32 matrices with MKL, which keeps to AVX2 on other makers'
# processors. oneDNN, in the same build, uses AVX-512 everywhere (tests/bench.py has the ratio).
FAST_CPU = (
    torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
)


@torch.library.custom_op("codes::linear", mutates_args=())  # so that torch.compile calls it as it is
def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., I), weight (O, I) -> x weight^T (..., O), in float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def onednn_backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of y = x W^T: dx = dy W, dW = dy^T x."""
    x, weight = ctx.saved_tensors
    dx = onednn_linear(dy, weight.T)
    return dx, onednn_linear(dy.flatten(0, -2).T, x.flatten(0, -2).T)


onednn_linear.register_autograd(
    onednn_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Linear(nn.Linear):
    """nn.Linear without a bias, on whichever library is fastest here."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        plain = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if FAST_CPU and plain and x.dtype == torch.float32:
            return onednn_linear(x, self.weight)
        return F.linear(x, self.weight)


# -------------------------------------------------------------------------------
# attention


def rotary_table(block_size: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of t theta^(-2 i / D) for position t and pair i, both (T, D), halves repeated."""
    # Computed on the CPU, so that every device gets the same numbers.
    freq = theta ** (-torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)   # (D / 2,)
    angle = torch.outer(torch.arange(block_size, device="cpu").float(), freq)          # (T, D / 2)
    angle = torch.cat([angle, angle], dim=-1)                                          # (T, D)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Turn each pair (x_i, x_{i + D/2}) by its position's angle (arXiv:2104.09864, equation 34).
    The product q k then depends on positions only through their difference.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)  # each pair turned by a right angle
    return (x * cos + turned * sin).to(x.dtype)


class KVCache:
    """Keys and values of the positions already seen, so that they are computed once."""

    def __init__(self, cfg: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype):
        shape = (cfg.n_layer, batch_size, cfg.n_head, cfg.block_size, cfg.n_embd // cfg.n_head)
        self.k = torch.empty(shape, device=device, dtype=dtype)  # (L, B, H, T, D)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, H, T_new, D) behind the others and return all of them (B, H, T, D)."""
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class CausalSelfAttention(nn.Module):
    """Every position reads from itself and the positions before it."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim = cfg.n_head, cfg.n_embd // cfg.n_head
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x, cos, sin, mask: Tensor | None = None, cache=None, layer=0) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                      # each (B, H, T, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            assert T == 1 or cache.length == 0, "a cache takes one prompt, then single tokens"
            k, v = cache.append(layer, k, v)
        # softmax(q k^T / sqrt(D)) v over the past; the kernel never stores the T x T matrix.
        # A single new token may see all that is cached.
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))      # (B, T, C)


# -------------------------------------------------------------------------------
# the rest of a block


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * gain. What autocast makes of it, x's precision is what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x), with gate and up in one matrix."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        inner = cfg.n_inner or 4 * cfg.n_embd
        self.gate_up = Linear(cfg.n_embd, 2 * inner)
        self.down = Linear(inner, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, T, F)
        return self.down(F.silu(gate) * up)          # (B, T, C)


class Block(nn.Module):
    """Both halves read a normalised x and add to it."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.norm_1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn = CausalSelfAttention(cfg)
        self.norm_2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, cos, sin, mask: Tensor | None = None, cache=None, layer=0) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin, mask, cache, layer)
        return x + self.mlp(self.norm_2(x))


# -------------------------------------------------------------------------------
# the model


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """
    cross_entropy(x @ weight.T, targets) without all the logits at once: rows are taken in chunks,
    and each chunk's gradient is computed while its logits are there. x (N, C), weight (V, C),
    targets (N,) -> a scalar, or (N,) for reduction "none", in float32.
    """
    # PyTorch returns the loss in x's precision. For a low one, the tokens' losses are averaged here, so
    # that the mean does not come in steps of a hundredth.
    low = x.dtype != torch.float32
    options = nn.LinearCrossEntropyOptions(
        chunking_method=None,
        batch_chunk_size=max(1, min(len(x), CHUNK_BYTES // 4 // len(weight))),
        allow_retain_graph=torch.compiler.is_compiling(),            # all that compile can trace
    )
    kind = "none" if low else reduction
    loss = F.linear_cross_entropy(x, weight, targets, reduction=kind, ignore_index=IGNORE, options=options)
    if low and reduction == "mean":
        return loss.float().sum() / (targets != IGNORE).sum()
    return loss.float()


class GPT(nn.Module):
    """
    model(ids)                      (B, T) -> logits (B, T, V)
    model(ids, targets)             mean of -log p(target), in nats; targets of -1 do not count
    model(ids, targets, "none")     the same for every token, (B, T)
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.cfg = cfg
        self.wte = make_input(cfg)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm_f = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = Linear(cfg.n_embd, cfg.vocab_size)
        cos, sin = rotary_table(cfg.block_size, cfg.n_embd // cfg.n_head, cfg.rope_theta)
        device = self.lm_head.weight.device
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)
        self.activation_checkpointing = False  # train.py's setting
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    def init_parameter(self, name: str, p: nn.Parameter) -> None:
        """
        N(0, 0.02), from a generator seeded by (seed, name): no arm and no device changes a draw.
        The 2 n_layer matrices that write into x start smaller, so that their sum does not grow.
        """
        if p.dim() < 2 or p.is_meta:
            return  # the norms' gains stay 1
        digest = hashlib.sha256(f"{self.cfg.seed} {name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = 0.02
        if name.endswith(("proj.weight", "down.weight")):
            std /= math.sqrt(2 * self.cfg.n_layer)
        with torch.no_grad():
            p.copy_(torch.empty(p.shape, device="cpu").normal_(0, std, generator=generator))

    def hidden(
        self, ids: Tensor, cache: KVCache | None = None, positions=None, mask=None
    ) -> Tensor:
        """
        What the head reads: ids (B, T) -> (B, T, C). With a cache, ids continue what it holds. With
        positions (B, T) and a mask (B, 1, T, T), True where a row may look at a column, a row can
        hold several texts; else it is one text from position 0.
        """
        start = cache.length if cache else 0
        end = start + ids.size(1)
        if positions is None and end > self.cfg.block_size:
            raise ValueError(f"{end} tokens do not fit in block_size={self.cfg.block_size}")
        x = self.wte(ids)                                    # (B, T, C)
        x = x.to(compute_dtype(x))                           # the same precision for every arm
        cos, sin = self.cos[start:end], self.sin[start:end]  # (T, D)
        if positions is not None:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # (B, 1, T, D)
        for layer, block in enumerate(self.blocks):
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Keep x alone, and compute the block again when its gradient is due (arXiv:1604.06174).
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, mask, cache, layer)   # (B, T, C)
        if cache is not None:
            cache.length = end
        return self.norm_f(x)

    def forward(self, ids, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        x = self.hidden(ids)
        if targets is None:
            return self.lm_head(x)                          # (B, T, V)
        # The loss takes the head's weight in x's precision, as autocast would.
        weight = self.lm_head.weight.to(x.dtype)
        loss = chunked_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    # ---------------------------------------------------------------------------
    # training

    def optimizer(
        self, learning_rate: float, betas: tuple, weight_decay: float, sharded: bool = False
    ) -> torch.optim.Optimizer:
        """AdamW; matrices decay, the norms' gains do not. Sharded: every rank updates some parameters."""
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = params[0].device.type in ("cpu", "cuda")  # one kernel for all parameters
        options = {"lr": learning_rate, "betas": betas, "fused": fused}
        if not sharded:
            return AdamW(groups, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns when imported

        return ZeroRedundancyOptimizer(groups, optimizer_class=AdamW, **options)

    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """
        Forward plus backward at full context: 6 a weight of the matrices that multiply (2 forward,
        4 backward), and 12 L C T for q k^T and the weighted sum of values (arXiv:2204.02311,
        appendix B). A table is looked up, not multiplied; the causal half is not subtracted.
        """
        cfg = self.cfg
        matrices = sum(p.numel() for name, p in self.named_parameters() if name != "wte.weight")
        return 6 * matrices + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size

    # ---------------------------------------------------------------------------
    # sampling

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        stop_id: int = -1,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """
        Continue ids (B, T), T >= 1, by up to max_new_tokens -> (B, T + new).

        temperature 0 (below 1e-9) takes the likeliest token; top_k = 0 or above V samples from all. A row that
        has drawn stop_id is filled with it, and sampling ends when every row has.

        Every token is predicted from the last block_size tokens before it, no more and no fewer.
        Past block_size the window slides by one a token. All positions then change, so nothing
        cached is valid any more and each window is computed afresh: exact, but as slow as no cache.
        """
        if temperature < 0 or top_k < 0 or max_new_tokens < 0:
            raise ValueError(
                f"temperature, top_k and max_new_tokens must be at least 0, "
                f"got {temperature}, {top_k}, {max_new_tokens}"
            )
        B, T = ids.shape
        if T == 0:
            raise ValueError("generate needs at least one token to start from")
        cache, done = None, torch.zeros(B, dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            window = ids[:, -self.cfg.block_size :]
            if use_cache and ids.size(1) <= self.cfg.block_size:
                if cache is None:
                    cache = KVCache(self.cfg, B, ids.device, self.lm_head.weight.dtype)
                window = ids[:, cache.length :]
            else:
                cache = None
            logits = self.lm_head(self.hidden(window, cache)[:, -1]).float()  # (B, V)
            if temperature < 1e-9:
                new = logits.argmax(-1)                                       # (B,)
            else:
                logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0
                if 0 < top_k < logits.size(-1):
                    least = logits.topk(top_k).values[:, -1:]                 # (B, 1)
                    logits = logits.masked_fill(logits < least, -math.inf)
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
            new = new.masked_fill(done, stop_id)
            ids = torch.cat([ids, new[:, None]], dim=1)
            done |= new == stop_id
            if done.all():
                break
        return ids


# -------------------------------------------------------------------------------
# from a checkpoint (config/checkpoints.py)


def build_model(saved: dict, device: str | torch.device = "cpu") -> GPT:
    """The model of a checkpoint, with its weights. Strict: every key must be there and fit."""
    names = {field.name for field in fields(GPTConfig)}
    model = GPT(GPTConfig(**{key: v for key, v in saved["config"].items() if key in names}))
    load_weights(model, saved)
    return model.to(device)


def load_weights(model: GPT, saved: dict) -> None:
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:  # PyTorch lists every key that is missing, extra or of another shape
        raise ValueError(f"the checkpoint does not fit the model: {error}") from error
