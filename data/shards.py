"""
A dataset on disk, and the order in which training reads it.

A dataset is a folder that data/prepare.py writes:

    train_00000.bin ...   token ids as raw little-endian uint16, documents one after the other,
    val_00000.bin ...     each ended by the end-of-text id
    tiktoken.json         the tokenizer
    SHA256SUMS            of these files: cd FOLDER && sha256sum -c SHA256SUMS
    meta.json             vocabulary, counts of every file, where it all comes from

A window is T inputs and the T tokens that follow each of them, so it takes T + 1 tokens of one
file, and neighbours share one: tokens 0 .. 4, then 4 .. 8 for T = 4.

Letters: B batch, T time (block_size), N windows of a split, V vocabulary.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config import try_json
from data import tokenizers

SCAN_TOKENS = 2**24  # up to this size every id is checked on opening; beyond, when it is read


def damaged(path: Path, what: str, command: str) -> ValueError:
    return ValueError(f"{path} {what}: delete {path.parent} and prepare it again with `{command}`")


def read_meta(folder: str | Path) -> dict:
    """meta.json, checked against the tokenizer beside it. Raises ValueError with the remedy."""
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.is_file():
        if (folder / "progress.json").exists():
            raise ValueError(f"{folder} is not complete: run the command again that prepares it")
        module = folder.name if folder.name in ("pydocs", "fineweb_edu") else "text --input=PATH"
        remedy = f"`python -m data.{module} --data_dir={folder}`"
        if module == "fineweb_edu":
            remedy += ", which downloads 200 GB; add --tokens=1e9 (2 GB) to begin with"
        raise ValueError(f"dataset {folder} is not there (no {path}): prepare it with {remedy}")
    meta = try_json(path.read_text(encoding="utf-8"))
    required = {"tokenizer", "tokenizer_sha256", "vocab_size", "eot_id", "files", "command"}
    if required - set(meta or {}):
        raise ValueError(f"{path} is damaged: delete {folder} and prepare it again")
    # The command that repairs it writes where it lies now, not where it was made.
    words = [word for word in shlex.split(meta["command"]) if not word.startswith("--data_dir=")]
    meta["command"] = shlex.join([*words, f"--data_dir={folder}"])
    if tokenizers.digest(tokenizers.read_spec(folder)) != meta["tokenizer_sha256"]:
        what = f"is not the tokenizer of {path} ({meta['tokenizer']})"
        raise damaged(folder / tokenizers.FILE_NAME, what, meta["command"])
    return meta


def check_size(path: Path, n_tokens: int, command: str) -> None:
    if not path.is_file():
        raise damaged(path, "is missing", command)
    size = path.stat().st_size
    if size != 2 * n_tokens or size == 0:
        raise damaged(path, f"has {size} bytes, but should have {2 * n_tokens}", command)


def identity(meta: dict) -> dict:
    """What makes two datasets the same for a run: the tokenizer and the content of every file."""
    return {
        "tokenizer": meta["tokenizer"],
        "tokenizer_sha256": meta["tokenizer_sha256"],
        "files": [[file["name"], file["tokens"], file.get("sha256")] for file in meta["files"]],
    }


class Shards:
    """
    One split ("train" or "val") of a dataset. Only the tokens asked for are ever read, and no file
    is kept open: thousands of files cost no more than one, in memory and in time.
    """

    def __init__(self, folder: str | Path, split: str, vocab_size: int, block_size: int):
        self.folder, self.vocab_size, self.block_size = Path(folder), vocab_size, block_size
        self.meta = read_meta(folder)
        if self.meta["vocab_size"] != vocab_size:
            path = self.folder / "meta.json"
            what = f"{path} has a vocabulary of {self.meta['vocab_size']} ids, but {vocab_size=}"
            raise ValueError(f"{what}: change one of them (`{self.meta['command']}` made it)")
        self.files = [file for file in self.meta["files"] if file["name"].startswith(split + "_")]
        self.paths = [self.folder / file["name"] for file in self.files]
        for path, file in zip(self.paths, self.files):
            check_size(path, file["tokens"], self.meta["command"])
        self.sizes = np.array([file["tokens"] for file in self.files], dtype=np.int64)
        per_file = np.maximum(self.sizes - 1, 0) // block_size
        self.first_window = np.concatenate([[0], np.cumsum(per_file)])  # of each file; the total
        self.n_windows, self.n_tokens = int(self.first_window[-1]), int(self.sizes.sum())
        if self.n_windows == 0:
            what = f"{self.folder}: the {split} files hold {self.n_tokens} tokens, fewer than"
            remedy = f"use a smaller block_size, or more text in `{self.meta['command']}`"
            raise ValueError(f"{what} block_size + 1 = {block_size + 1} in a row: {remedy}")
        if self.n_tokens <= SCAN_TOKENS:
            for i, size in enumerate(self.sizes):
                self.read(i, 0, size)

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of file i, at most to its end: (n,) uint16, every id checked."""
        # Not a memory map: every page that one has touched counts as this process's memory.
        path, V = self.paths[i], self.vocab_size
        tokens = np.fromfile(path, dtype="<u2", count=stop - start, offset=2 * start)
        if len(tokens) < min(stop, int(self.sizes[i])) - start:
            what = f"was cut while in use, to {path.stat().st_size // 2} of {self.sizes[i]} tokens"
            raise damaged(path, what, self.meta["command"])
        if len(tokens) and tokens.max() >= V:
            at = int(np.argmax(tokens >= V))
            what = f"has id {tokens[at]} at token {start + at}, the vocabulary {V} ids"
            raise damaged(path, what, self.meta["command"])
        return tokens

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """The windows of the given numbers in 0 .. N-1: (B,) -> (B, T + 1) int64."""
        out = np.empty((len(numbers), self.block_size + 1), dtype=np.int64)
        of_file = np.searchsorted(self.first_window, numbers, side="right") - 1
        for row, (number, i) in enumerate(zip(numbers, of_file)):
            start = int(number - self.first_window[i]) * self.block_size
            out[row] = self.read(i, start, start + self.block_size + 1)
        return out

    def every_token_once(
        self, batch_size: int, limit: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """
        Inputs and targets (B, T), int64, in which each token of the split, or each of its first
        `limit` tokens (0 = all), is a target exactly once over all ranks. Every rank gets the same
        number of batches; the last may be smaller than the others, or empty.
        Each file is read after an end-of-text id, so that its first token has something to follow.
        What is left of a row after the file's end has target -1, which does not count.
        """
        T, eot, rows = self.block_size, self.meta["eot_id"], []
        left = limit or self.n_tokens
        for i, size in enumerate(self.sizes):
            size = min(size, left)
            left -= size
            rows += [(i, start, min(start + T, size)) for start in range(0, size, T)]
        for first in range(0, len(rows), batch_size * world_size):
            own = rows[first + rank * batch_size : first + (rank + 1) * batch_size]
            x, y = np.full((len(own), T), eot), np.full((len(own), T), -1)
            for k, (i, start, stop) in enumerate(own):
                tokens = self.read(i, max(start - 1, 0), stop)
                if start == 0:
                    tokens = np.concatenate([[eot], tokens])
                x[k, : stop - start], y[k, : stop - start] = tokens[:-1], tokens[1:]
            yield x, y


def scramble(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash: shifts and odd multipliers, the finalizer of MurmurHash3."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def shuffled(entries: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """
    A pseudo-random bijection of 0 .. n-1, computed entry by entry, so no list of n is ever stored.

    A Feistel network: each step can be undone, whatever the hash is. It shuffles 0 .. 2^(2 h) - 1;
    an entry that leaves 0 .. n-1 goes through again until it is back ("cycle walking"), about 4
    times at most on average, since 2^(2 h) < 4 n.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # h bits
    mask = np.uint64(2**half - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)
    out = entries.astype(np.uint64)
    walking = np.ones(len(out), dtype=bool)
    while walking.any():
        left, right = out[walking] >> np.uint64(half), out[walking] & mask
        for key in keys:
            left, right = right, left ^ (scramble(right ^ key) & mask)
        out[walking] = (left << np.uint64(half)) | right
        walking[walking] = out[walking] >= n
    return out.astype(np.int64)


def window_numbers(first: int, count: int, n_windows: int, seed: int) -> np.ndarray:
    """
    The windows at positions first .. first + count - 1 of a run: (count,) int64.

    Position p is entry p mod N of epoch p // N, and every epoch is a shuffle of all N windows:
    ranks, restarts and the kind of input cannot change it.
    """
    positions = np.arange(first, first + count)
    epochs, entries = positions // n_windows, positions % n_windows
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        numbers[here] = shuffled(entries[here], n_windows, seed, int(epoch))
    return numbers
