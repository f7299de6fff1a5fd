"""
A dataset on disk, and the order in which training reads it.

A dataset is a folder that data/prepare.py writes:

    train_00000.bin ...   token ids as raw little-endian uint16, documents one after the other,
    val_00000.bin ...     each ended by the end-of-text id
    meta.json             vocabulary, counts of every file, where it all comes from
    tiktoken.json         the tokenizer

A window is T inputs and the T tokens that follow each of them, so it takes T + 1 tokens of one file,
and neighbours share one:

    tokens     0 1 2 3 4 5 6 7 8
    T = 4      [x x x x y]
                       [x x x x y]

Letters: B batch, T time (block_size), N windows of a split.
"""

import hashlib
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import try_json
from data import tokenizers

SCAN_TOKENS = 2**24  # up to this size every id is checked on opening; beyond, when it is read


class Shards:
    """
    One split ("train" or "val") of a dataset. Only the tokens asked for are ever read, and no file is
    kept open: thousands of files cost no more than one, in memory and in time.
    """

    def __init__(self, folder: str | Path, split: str, vocab_size: int, block_size: int):
        self.folder, self.vocab_size, self.block_size = Path(folder), vocab_size, block_size
        self.meta = read_meta(folder)
        if self.meta["vocab_size"] != vocab_size:
            raise ValueError(
                f"{self.folder / 'meta.json'} has a vocabulary of {self.meta['vocab_size']} "
                f"({self.meta['tokenizer']}), but vocab_size={vocab_size}: change one of them; "
                f"`{self.meta['command']}` made this dataset"
            )
        self.files = [file for file in self.meta["files"] if file["name"].startswith(split + "_")]
        self.paths = [self.folder / file["name"] for file in self.files]
        for path, file in zip(self.paths, self.files):
            check_size(path, file["tokens"], self.meta["command"])
        self.sizes = np.array([file["tokens"] for file in self.files], dtype=np.int64)
        per_file = np.maximum(self.sizes - 1, 0) // block_size
        self.first_window = np.concatenate([[0], np.cumsum(per_file)])  # of each file, and the total
        self.n_windows, self.n_tokens = int(self.first_window[-1]), int(self.sizes.sum())
        if self.n_windows == 0:
            raise ValueError(
                f"{self.folder}: the {split} files hold {self.n_tokens} tokens, fewer than "
                f"block_size + 1 = {block_size + 1} in a row: use more text or a smaller block_size"
            )
        if self.n_tokens <= SCAN_TOKENS:
            for i, size in enumerate(self.sizes):
                self.read(i, 0, size)

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of file i, at most to its end: (n,) uint16, every id checked."""
        # Not a memory map: every page that one has touched counts as this process's memory.
        tokens = np.fromfile(self.paths[i], dtype="<u2", count=max(0, stop - start), offset=2 * start)
        wanted = min(stop, int(self.sizes[i])) - start
        if len(tokens) < wanted:
            raise ValueError(
                f"{self.paths[i]} ends after {self.paths[i].stat().st_size // 2} of {self.sizes[i]} tokens: "
                f"it was cut while in use; prepare the dataset again with `{self.meta['command']}`"
            )
        if len(tokens) and tokens.max() >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            raise ValueError(
                f"{self.paths[i]}: id {tokens[at]} at token {start + at} is outside the vocabulary "
                f"of {self.vocab_size}: prepare it again with `{self.meta['command']}`"
            )
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
        The rest of a row behind the file's end has target -1, which does not count.
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


def identity(meta: dict) -> dict:
    """What makes two datasets the same for a run: the tokenizer and the size of every file."""
    return {
        "tokenizer": meta["tokenizer"],
        "tokenizer_sha256": meta["tokenizer_sha256"],
        "files": [[file["name"], file["tokens"]] for file in meta["files"]],
    }


def read_meta(folder: str | Path) -> dict:
    """meta.json, checked against the tokenizer beside it. Raises ValueError with the remedy."""
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.is_file():
        corpora = ("pydocs", "fineweb_edu")  # those that need no --input
        command = f"data.{folder.name}" if folder.name in corpora else "data.text --input=PATH"
        if (folder / "progress.json").exists():
            command = "data.fineweb_edu"
        raise ValueError(
            f"dataset {folder} is not there (no {path}): prepare it with "
            f"`python -m {command} --data_dir={folder}`, or see data/ for other corpora"
        )
    meta = try_json(path.read_text(encoding="utf-8"))
    wanted = {"tokenizer", "tokenizer_sha256", "vocab_size", "eot_id", "files", "command"}
    missing = wanted - set(meta) if isinstance(meta, dict) else {"valid JSON"}
    if not missing and not all({"name", "tokens"} <= set(file) for file in meta["files"]):
        missing = {"the name or the tokens of a file"}
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: prepare the dataset again")
    spec = tokenizers.read_spec(folder)
    if tokenizers.digest(spec) != meta["tokenizer_sha256"]:
        raise ValueError(
            f"{folder / tokenizers.FILE_NAME} is not the tokenizer of {path} ({meta['tokenizer']}): "
            f"prepare the dataset again with `{meta['command']}`"
        )
    # The command that repairs it writes where it lies now, not where it was made.
    words = [word for word in shlex.split(meta["command"]) if not word.startswith("--data_dir=")]
    return meta | {"command": shlex.join([*words, f"--data_dir={folder}"])}


def check_size(path: Path, n_tokens: int, command: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: prepare the dataset again with `{command}`")
    size = path.stat().st_size
    if size != 2 * n_tokens or size == 0:
        raise ValueError(
            f"{path} has {size} bytes, but should have {2 * n_tokens} (2 for each token): it is damaged, "
            f"prepare the dataset again with `{command}`"
        )


def hash_file(path: Path):
    """The SHA-256 object of a file, read block by block."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**20):
            sha256.update(block)
    return sha256


def damage_of(path: Path, entry: dict) -> str:
    """What is wrong with a file, compared with its entry in meta.json; empty if nothing is."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != 2 * entry["tokens"]:
        return f"{path.name} has {path.stat().st_size} bytes, but should have {2 * entry['tokens']}"
    if "sha256" not in entry:
        return f"{path.name} has no sha256 in meta.json"
    return "" if hash_file(path).hexdigest() == entry["sha256"] else f"{path.name} has other bytes"


def verify(folder: str | Path) -> int:
    """
    Read every byte of a dataset and compare it with meta.json; the number of files. Raises ValueError
    that names each damaged one. Hashing works without Python's lock, so threads are enough for all cores.
    """
    folder, meta = Path(folder), read_meta(folder)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda entry: damage_of(folder / entry["name"], entry), meta["files"])
        found = list(tqdm(found, total=len(meta["files"]), unit="file", desc="verifying", disable=None))
    if any(found):
        raise ValueError(
            f"{folder} is damaged ({'; '.join(filter(None, found))}): copy these files anew, or delete "
            f"{folder} and run `{meta['command']}`"
        )
    return len(found)


# -------------------------------------------------------------------------------
# the order of training


def window_numbers(first: int, count: int, n_windows: int, seed: int) -> np.ndarray:
    """
    The windows at positions first .. first + count - 1 of a run: (count,) int64.

    Position p is entry p mod N of epoch p // N, and every epoch is a shuffle of all N windows.
    A function of p, N and seed alone: ranks, restarts and arms cannot change it.
    """
    positions = np.arange(first, first + count)
    epochs, entries = positions // n_windows, positions % n_windows
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        numbers[here] = shuffled(entries[here], n_windows, seed, int(epoch))
    return numbers


def shuffled(entries: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """
    A pseudo-random bijection of 0 .. n-1, computed entry by entry, so no list of n is ever stored.

    A Feistel network: cut a number into halves (left, right) and repeat
        left, right = right, left XOR hash(right)
    which can be undone step by step, whatever the hash is. It shuffles 0 .. 2^(2 h) - 1; an entry that
    leaves 0 .. n-1 goes through again until it is back ("cycle walking"), about 4 times at most on
    average, since 2^(2 h) < 4 n.
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


def scramble(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash: shifts and odd multipliers, the finalizer of MurmurHash3."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
