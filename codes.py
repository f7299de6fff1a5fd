"""
Fixed token codes: from a token id to the vector that a Transformer reads, with nothing to learn.

    id          t = 5                            of a vocabulary of V = 8 tokens
    bits        c = (1, 0, 1)                    K = 3 bits, least significant first: 1 + 0 + 4

                    1 1 0
    recoded     A = 0 1 0    A c = (1, 0, 0)     row by row: 1 + 0, 0, 1 + 1 = 0 (mod 2)
                    1 0 1

    repeated    canonical    (1, 0, 1,  1, 0, 1,  1, 0, 1)    to width C = 9
                gf2          (1, 0, 0,  1, 0, 0,  1, 0, 0)

"canonical" leaves the bits as they are: A is the identity. "gf2" draws A from GL(K, 2), all
invertible K x K matrices over GF(2), the field of the two numbers 0 and 1, where addition is XOR
and multiplication is AND. No two tokens share a vector, and token 0 reads a zero vector (unless a
shift b is added, or symbols="pm1" writes each 0 as -1).

Letters: V vocabulary, K code bits, R recodings, C width. The codes are the paper's
(arXiv:2610.04002), the shift b its predecessor's (arXiv:2605.09751). Our own, and off by default,
are the symbols -1/+1, the scale, more than one recoding, and two tables that are never trained:
"random", where tokens share nothing, and "spelling", where they share their letters.

    python codes.py [ID ...]     follows tokens from id to vector and draws out/codes.png
"""

import functools
import hashlib
import os
import sys

import torch
from torch import Tensor, nn


def min_bits(vocab_size: int) -> int:
    """ceil(log2 V): the least K with 2^K >= V. Example: 49,152 -> 16."""
    return max(1, (vocab_size - 1).bit_length())


def token_bits(ids: Tensor, n_bits: int) -> Tensor:
    """
    The canonical code of a token is its own id, written in binary:

        c_k(t) = floor(t / 2^k) mod 2,    k = 0 .. K-1    (least significant bit first)

    Integer ids (...) -> integer bits (..., K). Example: token_bits(tensor([5]), 3) -> [[1, 0, 1]]
    """
    shifts = torch.arange(n_bits, device=ids.device)  # (K,)
    return (ids.unsqueeze(-1) >> shifts) & 1  # (..., K), values 0 or 1


def gf2_inverse(A: Tensor) -> Tensor:
    """
    A^-1 over GF(2) by Gauss-Jordan elimination in exact integers, [A | I] -> [I | A^-1], (K, K).
    There is nothing to divide by, and subtracting a row is XOR. Raises ValueError if A is singular.
    """
    K = len(A)
    rows = torch.cat([A, torch.eye(K, dtype=A.dtype)], dim=1)  # (K, 2 K)
    for col in range(K):
        pivot = next((row for row in range(col, K) if rows[row, col]), None)
        if pivot is None:
            raise ValueError("the matrix has no inverse over GF(2)")
        rows[[col, pivot]] = rows[[pivot, col]]  # swap two rows
        for row in range(K):
            if row != col and rows[row, col]:
                rows[row] ^= rows[col]  # now 0 in this column
    return rows[:, K:]


def random_invertible(K: int, generator: torch.Generator) -> Tensor:
    """A uniform draw from GL(K, 2): about 0.29 of all large 0/1 matrices have an inverse."""
    while True:
        A = torch.randint(0, 2, (K, K), generator=generator)
        try:
            gf2_inverse(A)
            return A
        except ValueError:
            continue


def make_code(
    input_mode: str, n_bits: int, seed: int = 0, shift: bool = False, recodings: int = 1
) -> tuple[Tensor, Tensor]:
    """
    A (R K, K) and b (R K,) of the code c -> A c + b (mod 2), drawn from the seed.

    A is the identity for "canonical" and random for "gf2"; more recodings are more random matrices
    stacked below. b is 0 without shift. Raises ValueError for any other input_mode.
    """
    if input_mode not in ("canonical", "gf2"):
        raise ValueError(f"input_mode of a fixed code must be canonical or gf2, got {input_mode!r}")
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = [torch.eye(n_bits, dtype=torch.int64)] if input_mode == "canonical" else []
    while len(blocks) < recodings:
        blocks.append(random_invertible(n_bits, generator))
    b = torch.randint(0, 2, (recodings * n_bits,), generator=generator)
    return torch.cat(blocks), (b if shift else torch.zeros_like(b))


def recode(bits: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """
    Affine recoding over GF(2) (arXiv:2605.09751):

        c~ = A c + b  (mod 2),    A in GL(K, 2), or R such matrices stacked

    Bits (..., K), A (R K, K), b (R K,) of one dtype -> (..., R K).
    """
    return (bits @ A.T + b) % 2  # a token is a row. Sums up to K + 1: exact even in bfloat16


class FixedTokenCode(nn.Module):
    """
    A drop-in for nn.Embedding(vocab_size, n_embd) without a single parameter.

        ids (...)  ->  bits (..., K)  ->  recoded (..., R K)  ->  repeated C / (R K) times (..., C)

    Bits are written as 0 and 1, or -1 and +1 ("pm1"), times `scale`. n_bits = 0: ceil(log2 V).
    A and b are buffers, so a checkpoint holds them. Raises ValueError for a code that does not fit.
    """

    def __init__(
        self, vocab_size: int, n_embd: int, input_mode: str = "canonical", n_bits: int = 0,
        seed: int = 0, symbols: str = "01", scale: float = 1.0, shift: bool = False,
        recodings: int = 1,
    ):  # fmt: skip
        super().__init__()
        least = min_bits(vocab_size)
        K = n_bits or least
        if not least <= K <= 62:  # ids are int64
            legal = f"0 or {least} to 62 for {vocab_size} ids"
            raise ValueError(f"n_bits must be {legal}, got {n_bits}")
        if symbols not in ("01", "pm1") or not 0 < scale <= 1e6 or recodings < 1:
            legal = "symbols 01 or pm1, scale above 0 up to 1e6, recodings of at least 1"
            raise ValueError(f"a code has {legal}, got {symbols!r}, {scale} and {recodings}")
        period = recodings * K
        if n_embd % period:
            near = sorted({max(1, n_embd // period) * period, (n_embd // period + 1) * period})
            legal = f"a multiple of {period} (recodings x bits)"
            raise ValueError(
                f"n_embd must be {legal}, got {n_embd}: use {' or '.join(map(str, near))}"
            )
        with torch.device("cpu"):  # the generator is there, even if the model is built on a GPU
            A, b = make_code(input_mode, K, seed, shift, recodings)
            low = 0.0 if symbols == "01" else -scale
            self.register_buffer("A", A.to(torch.uint8))  # (R K, K)
            self.register_buffer("b", b.to(torch.uint8))  # (R K,)
            self.register_buffer("symbols", torch.tensor([low, scale]))  # how 0 and 1 are written
        self.num_embeddings, self.embedding_dim = vocab_size, n_embd

    def forward(self, ids: Tensor) -> Tensor:
        zero, one = self.symbols  # in the dtype that .to(dtype) has given the module
        A, b = self.A.to(one.dtype), self.b.to(one.dtype)
        bits = token_bits(ids, A.size(1)).to(one.dtype)  # (..., K)
        x = zero + (one - zero) * recode(bits, A, b)  # (..., R K)
        return torch.cat([x] * (self.embedding_dim // len(b)), dim=-1)  # (..., C)

    def decode(self, vectors: Tensor) -> Tensor:
        """The way back, c = A^-1 (c~ + b) and t = sum_k c_k 2^k: vectors (..., C) -> ids (...)."""
        K = self.A.size(1)  # the first recoding alone tells tokens apart
        A, b = self.A[:K].long().cpu(), self.b[:K].long().cpu()
        code = (vectors[..., :K] > self.symbols.float().mean()).long().cpu()
        bits = recode(code ^ b, gf2_inverse(A), torch.zeros_like(b))
        return (bits << torch.arange(K)).sum(-1)


def normal(seed: int, name: str, shape: tuple) -> Tensor:
    """Numbers from N(0, 1), drawn from (seed, name): what one name gets depends on no other."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device="cpu").normal_(generator=generator)


class FrozenTable(nn.Module):
    """
    A table (V, C) that is never trained. Each token's vector is a sum of random ones, one for each
    of its n parts, times scale / sqrt(n). In "random" a token is its own and only part. In
    "spelling" all runs of 1, 2 and 3 of its bytes, ends included, are; `own` adds itself.

        "cat"  ->  c a t   <c ca at t>   <ca cat at>        "scatter" shares c a t ca at cat
    """

    def __init__(self, tokens: list, n_embd: int, input_mode: str, scale=1.0, seed=0, own=False):
        super().__init__()
        table = torch.zeros(len(tokens), n_embd, device="cpu")
        vector = functools.cache(lambda part: normal(seed, part, (n_embd,)))
        for t, token in enumerate(tokens):
            text = "\u0100" + token.decode("latin-1") + "\u0101"  # a character per byte; two ends
            runs = [text[i : i + n] for n in (2, 3) for i in range(len(text) - n + 1)]
            parts = [*text[1:-1], *runs] if input_mode == "spelling" else []
            parts += [f"token {t}"] if own or not parts else []
            table[t] = scale * len(parts) ** -0.5 * sum(map(vector, parts))
        self.register_buffer("weight", table)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)  # (...) -> (..., C)


def main(argv: list[str]) -> None:
    """Print what ids become on their way to the Transformer, and draw the first 64 codes."""
    ids = [int(text) if text.isdecimal() else -1 for text in argv] or [0, 1, 5, 49151]
    if not all(0 <= t < 49152 for t in ids):  # -1 stands for what is no number
        sys.exit(f"codes.py: error: token ids go from 0 to 49151, got {' '.join(argv)}")
    modes = {mode: FixedTokenCode(49152, 3 * 16, mode) for mode in ("canonical", "gf2")}
    for t in ids:
        print(f"token {t}")
        for mode, code in modes.items():
            x = code(torch.tensor(t))  # (C,)
            copies = ["".join(str(int(bit)) for bit in copy) for copy in x.split(16)]
            print(f"  {mode:9}  {' '.join(copies)}  ->  {int(code.decode(x))}")
    os.environ["MPLBACKEND"] = "agg"  # a notebook names a backend that may not exist here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    for axis, (mode, code) in zip(figure.subplots(1, 2), modes.items()):
        axis.imshow(code(torch.arange(64))[:, :16].numpy(), cmap="Greys", aspect="auto")
        axis.set(title=mode, xlabel="bit of the code", ylabel="token id")
    os.makedirs("out", exist_ok=True)
    figure.savefig("out/codes.png", dpi=150)
    print("drawn: out/codes.png")


if __name__ == "__main__":
    main(sys.argv[1:])

# python codes.py 5 prints:
# token 5
#   canonical  1010000000000000 1010000000000000 1010000000000000  ->  5
#   gf2        1101000001100001 1101000001100001 1101000001100001  ->  5
# drawn: out/codes.png
