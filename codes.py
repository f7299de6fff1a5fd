"""
Fixed token codes: from a token id to the vector that a Transformer reads, with nothing to learn.

    id          t = 5                                          of a vocabulary of V = 16 tokens
    bits        c = (1, 0, 1, 0)                               K = 4 bits, least significant first
    recoded     A c + b  (mod 2)                               A in GL(K, 2): nothing gets lost
    tiled       (1, 0, 1, 0,  1, 0, 1, 0,  1, 0, 1, 0)         repeated to width C = 12

In the "canonical" arm A is the identity, so the bits enter as they are. In the "gf2" arm A is drawn
from all invertible K x K matrices over GF(2), the field of the two numbers 0 and 1, where addition
is XOR and multiplication is AND.

Letters: B batch, T time, C width, V vocabulary, K code bits, R recodings.

The codes are the paper's (arXiv:2610.04002); the shift b is its predecessor's (arXiv:2605.09751);
the symbols -1/+1, the scale and more than one recoding are our own knobs, off by default.

    python codes.py [ID ...]     follows tokens from id to vector and draws out/codes.png
"""

import os

import torch
from torch import Tensor, nn

from config import convert, run_cli

# -------------------------------------------------------------------------------
# bits


def min_bits(vocab_size: int) -> int:
    """ceil(log2 V): the least K with 2^K >= V. Example: 49,152 -> 16."""
    return max(1, (vocab_size - 1).bit_length())


def token_bits(ids: Tensor, n_bits: int) -> Tensor:
    """
    The canonical code of a token is its own id, written in binary:

        c_k(t) = floor(t / 2^k) mod 2,    k = 0 .. K-1    (least significant bit first)

    Integer ids (...) -> integer bits (..., K). Example: token_bits(tensor([5]), 4) -> [[1, 0, 1, 0]]
    """
    shifts = torch.arange(n_bits, device=ids.device)  # (K,)
    return (ids.unsqueeze(-1) >> shifts) & 1          # (..., K), values 0 or 1


def bits_to_ids(bits: Tensor) -> Tensor:
    """The way back, t = sum_k c_k 2^k. Bits (..., K) -> int64 ids (...)."""
    powers = 2 ** torch.arange(bits.size(-1), device=bits.device)  # (K,)
    return (bits.long() * powers).sum(-1)


# -------------------------------------------------------------------------------
# algebra over GF(2), in exact integer arithmetic


def gf2_eliminate(M: Tensor, n_cols: int) -> tuple[Tensor, int]:
    """
    Gauss-Jordan elimination of M's first n_cols columns. Returns the reduced matrix and their rank.
    Over GF(2) there is nothing to divide by: adding a row to another is XOR.
    """
    M, rank = M.clone().bool(), 0
    for col in range(n_cols):
        below = M[rank:, col].nonzero()
        if len(below) == 0:
            continue  # no pivot in this column
        pivot = rank + int(below[0])
        M[[rank, pivot]] = M[[pivot, rank]]
        others = M[:, col].clone()
        others[rank] = False
        M[others] ^= M[rank]  # clears the column in every other row
        rank += 1
    return M, rank


def gf2_rank(A: Tensor) -> int:
    """The rank of a 0/1 matrix over GF(2). It may be less than over the real numbers."""
    return gf2_eliminate(A, A.size(1))[1]


def gf2_inverse(A: Tensor) -> Tensor:
    """A^-1 over GF(2), from [A | I] -> [I | A^-1]. (K, K) -> (K, K). Raises ValueError if singular."""
    K = A.size(0)
    reduced, rank = gf2_eliminate(torch.cat([A.bool(), torch.eye(K, dtype=torch.bool)], 1), K)
    if rank < K:
        raise ValueError(f"matrix of rank {rank} has no inverse over GF(2), it needs rank {K}")
    return reduced[:, K:].to(A.dtype)


def random_invertible(K: int, generator: torch.Generator) -> Tensor:
    """
    A uniform draw from GL(K, 2), by rejection. A random 0/1 matrix is invertible with probability
    (1 - 1/2)(1 - 1/4) ... (1 - 1/2^K), about 0.29 for large K, so a few draws are enough.
    """
    while True:
        A = torch.randint(0, 2, (K, K), generator=generator, device="cpu")
        if gf2_rank(A) == K:
            return A


# -------------------------------------------------------------------------------
# the code of an arm


def make_code(
    input_mode: str, n_bits: int, seed: int = 0, shift: bool = False, recodings: int = 1
) -> tuple[Tensor, Tensor]:
    """
    The A (R K, K) and b (R K,) of c -> A c + b (mod 2): R invertible blocks, one above the other.

    "canonical" has A = I; "gf2" draws it. With R > 1 the further blocks are drawn for both, all
    different. b is 0 unless shift is on, then it is drawn too. Raises ValueError on any other mode.
    """
    if input_mode not in ("canonical", "gf2"):
        raise ValueError(f"input_mode of a fixed code must be canonical or gf2, got {input_mode!r}")
    K, R = n_bits, recodings
    n_matrices = 1
    for i in range(K):
        n_matrices *= 2**K - 2**i  # row i avoids the span of the rows above
    if not 1 <= R <= n_matrices:
        raise ValueError(f"code_recodings must be from 1 to {n_matrices} for {K} bits, got {R}")
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = [torch.eye(K, dtype=torch.int64, device="cpu")] if input_mode == "canonical" else []
    while len(blocks) < R:
        A = random_invertible(K, generator)
        if not any(torch.equal(A, other) for other in blocks):
            blocks.append(A)
    b = torch.zeros(R * K, dtype=torch.int64, device="cpu")
    if shift:
        b = torch.randint(0, 2, (R * K,), generator=generator, device="cpu")
    return torch.cat(blocks), b


def recode(bits: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """
    Affine recoding over GF(2), where addition is XOR and multiplication is AND (arXiv:2605.09751):

        c~ = A c + b  (mod 2),    A in GL(K, 2),    b in {0, 1}^K

    A is invertible, so two tokens share a code only if they are the same token.
    Bits (..., K), A (R K, K), b (R K,), all of one dtype -> (..., R K).
    """
    # Tokens are rows, so A c is written c A^T. Sums are at most K + 1: exact even in bfloat16.
    return (bits @ A.T + b) % 2


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on for x's device, else x's own."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype


class FixedTokenCode(nn.Module):
    """
    A drop-in for nn.Embedding(vocab_size, n_embd) without a single parameter.

    Integer ids of any shape (...) -> vectors (..., C), in the module's dtype or autocast's:

        bits of t  ->  recoded to R K bits  ->  written with two symbols  ->  repeated C / (R K) times

    The symbols are 0 and 1, or -1 and +1 ("pm1"), times `scale`. A, b and the symbols are buffers:
    they are saved with a checkpoint, and loading one with another code is an error.
    Raises ValueError for a code that does not separate V tokens or does not fit the width.
    """

    def __init__(
        self,
        vocab_size: int,
        n_embd: int,
        input_mode: str = "canonical",
        n_bits: int = 0,        # 0 = the minimum, ceil(log2 V)
        seed: int = 0,
        symbols: str = "01",
        scale: float = 1.0,
        shift: bool = False,
        recodings: int = 1,
    ):
        super().__init__()
        K = n_bits or min_bits(vocab_size)
        if not min_bits(vocab_size) <= K <= 62:
            raise ValueError(
                f"code_bits must be 0 or from {min_bits(vocab_size)} to 62 for "
                f"vocab_size={vocab_size}, got {n_bits}"
            )
        if symbols not in ("01", "pm1"):
            raise ValueError(f"code_symbols must be 01 or pm1, got {symbols!r}")
        if not 0 < scale <= 1e6:
            raise ValueError(f"code_scale must be above 0 and at most 1e6, got {scale}")
        period = max(recodings, 1) * K
        if n_embd % period != 0:
            below, above = n_embd // period * period, (n_embd // period + 1) * period
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"n_embd must be a multiple of {period} ({recodings} x {K} code bits), "
                f"got {n_embd}; the nearest are {near}"
            )
        A, b = make_code(input_mode, K, seed, shift, recodings)
        self.num_embeddings, self.embedding_dim = vocab_size, n_embd
        low = 0.0 if symbols == "01" else -scale
        # A and b are integers, so that .half() or .to(bfloat16) turns the symbols alone.
        device = torch.get_default_device()
        self.register_buffer("A", A.to(device, torch.uint8))        # (R K, K)
        self.register_buffer("b", b.to(device, torch.uint8))        # (R K,)
        self.register_buffer("levels", torch.tensor([low, scale]))  # what 0 and 1 are written as

    def forward(self, ids: Tensor) -> Tensor:
        dtype = compute_dtype(self.levels)
        bits = token_bits(ids, self.A.size(1)).to(dtype)              # (..., K)
        code = recode(bits, self.A.to(dtype), self.b.to(dtype))       # (..., R K)
        low, high = self.levels.to(dtype)
        code = torch.lerp(low, high, code)                            # 0 -> low, 1 -> high
        return code.repeat(*[1] * ids.dim(), self.embedding_dim // len(self.b))  # (..., C)

    def decode(self, vectors: Tensor) -> Tensor:
        """The way back, c = A^-1 (c~ + b): vectors (..., C) -> ids (...)."""
        K = self.A.size(1)
        ones = (vectors[..., :K] > self.levels.float().mean()).long().cpu()
        A, b = self.A[:K].long().cpu(), self.b[:K].long().cpu()
        return bits_to_ids(recode(ones ^ b, gf2_inverse(A), torch.zeros_like(b)))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # PyTorch calls this for every module; the last argument collects what load_state_dict raises.
        for name, own in self.named_buffers():
            saved = state_dict.get(prefix + name)
            if saved is not None and not own.is_meta:
                same = saved.shape == own.shape and torch.equal(saved.to(own), own)
                if not same:
                    args[-1].append(
                        f"the checkpoint was trained with another token code ({prefix}{name} differs);"
                        " use its input_mode and code_* settings"
                    )
                    return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.A.size(1)}"


# -------------------------------------------------------------------------------
# run me: a worked example and a picture


def show(ids: list[int], vocab_size: int = 49152, n_embd: int = 48) -> None:
    """Print what each id becomes on its way to the Transformer, in both arms."""
    for t in ids:
        if not 0 <= t < vocab_size:
            raise ValueError(f"token ids go from 0 to {vocab_size - 1}, got {t}")
        print(f"token {t} of {vocab_size}")
        for mode in ("canonical", "gf2"):
            code = FixedTokenCode(vocab_size, n_embd, mode)
            x = code(torch.tensor(t))
            written = ["".join(str(int(v)) for v in part) for part in x.split(16)]
            print(f"  {mode:9}  code {written[0]}   vector {' '.join(written)}")
            assert int(code.decode(x)) == t, f"{mode}: the code of {t} decodes to {code.decode(x)}"


def draw(path: str, vocab_size: int = 49152, n_show: int = 64, n_sample: int = 2048) -> None:
    """The codes of the first ids as pictures, and how far apart the codes of two tokens are."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    K = min_bits(vocab_size)
    sample = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:n_sample]
    figure, axes = plt.subplots(1, 3, figsize=(10, 4), width_ratios=[1, 1, 2], layout="constrained")
    for i, (axis, mode) in enumerate(zip(axes, ("canonical", "gf2"))):
        code = FixedTokenCode(vocab_size, K, mode)
        picture = code(torch.arange(n_show)).numpy()
        axis.imshow(picture, cmap="Greys", aspect="auto", interpolation="none")
        axis.set(title=f"{mode}: ids 0 to {n_show - 1}", xlabel="bit of the code", ylabel="token id")
        # 0/1 codes differ in as many places as the sum of their absolute differences.
        distance = torch.cdist(code(sample), code(sample), p=1)
        first, second = torch.triu_indices(n_sample, n_sample, offset=1)  # every pair once
        counts = torch.bincount(distance[first, second].long(), minlength=K + 1)
        positions = torch.arange(K + 1) + 0.4 * (i - 0.5)
        axes[2].bar(positions.numpy(), (counts / counts.sum()).numpy(), width=0.4, label=mode)
    axes[2].set(title=f"pairs of {n_sample:,} random tokens", ylabel="share of pairs")
    axes[2].set(xlabel="Hamming distance: bits in which two codes differ", xticks=range(0, K + 1, 2))
    axes[2].legend()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__.strip())
        return
    show([convert("a token id", text, int) for text in argv] or [0, 1, 5, 49151])
    draw("out/codes.png")
    print("drawn: out/codes.png")


if __name__ == "__main__":
    run_cli(main, "codes.py")
