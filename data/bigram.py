"""A bigram model of the training tokens: what counting alone can do, and no training."""

import numpy as np

from data.shards import Shards

COUNTED_TOKENS = 2**27  # training tokens that are counted


def bigram_losses(train: np.ndarray, x: np.ndarray, y: np.ndarray, vocab_size: int) -> np.ndarray:
    """
    -log p(y | x) of a bigram model with backoff to unigrams, counted on the training ids: (n,).

        p(y | x) = max(n(x, y) - d, 0) / n(x)  +  d r(x) / n(x) p(y),    d = 0.75
        p(y)     = (n(y) + 1) / (n + V)

    Absolute discounting (Ney, Essen and Kneser, 1994): every seen pair gives up d of a count, and
    what the r(x) different followers of x give up is shared out by frequency. An x that was never
    seen leaves p(y) alone.
    """
    V, d = vocab_size, 0.75
    unigram = (np.bincount(train, minlength=V) + 1) / (len(train) + V)
    pairs, n_pair = np.unique(train[:-1].astype(np.int64) * V + train[1:], return_counts=True)
    n_first = np.bincount(train[:-1], minlength=V)  # n(x), as the first of a pair
    n_kinds = np.bincount(pairs // V, minlength=V)  # r(x)
    wanted = x.astype(np.int64) * V + y
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    n_xy = np.where(pairs[at] == wanted, n_pair[at], 0)
    n_x = np.maximum(n_first[x], 1)
    backoff = np.where(n_first[x] > 0, d * n_kinds[x] / n_x, 1.0)
    return -np.log(np.maximum(n_xy - d, 0) / n_x + backoff * unigram[y])


def counted_tokens(data: Shards) -> np.ndarray:
    """The training split, up to COUNTED_TOKENS of it."""
    ends = np.minimum(np.cumsum(data.sizes), COUNTED_TOKENS)
    counts = np.diff(ends, prepend=0)  # tokens of each file
    return np.concatenate([data.read(i, 0, n) for i, n in enumerate(counts) if n])
