"""
Documents -> a dataset folder (its format is in shards.py), the same bytes on every run.

    clean      no byte-order mark, line ends as \\n; empty documents are left out
    split      by a hash of the content: a document, and any copy of it, is on one side only
    tokenize   as ordinary text (a literal <|endoftext|> is text), then one end-of-text id each
    write      into a hidden folder inside the target; files move to their place when all are on disk,
               meta.json last

So a killed run leaves nothing that could be mistaken for a dataset; run the command again.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from config import Settings, try_json
from config.machine import is_at_work, owner
from data import shards, tokenizers

SHARD_TOKENS = 100_000_000  # a file is closed after the document that reaches this
BATCH_BYTES = 1_000_000     # text that one thread tokenizes at a time: bounds the memory
WRITE_TOKENS = 500_000      # ids that are written at a time
BPE_BYTES = 50_000_000      # text that a trained tokenizer looks at
OURS = r"(train|val)_\d+\.bin|meta\.json|tiktoken\.json|\.partial-"  # names in a dataset's folder


@dataclass
class PrepareConfig(Settings):
    data_dir: str = ""           # folder to write; empty = data/<name of the corpus>
    tokenizer: Literal["bpe", "gpt2-49152"] = "bpe"  # trained on the corpus, or GPT-2's first 49,151
    vocab_size: int = 2048       # ids of a trained tokenizer, end-of-text included
    val_fraction: float = 0.05   # share of the text that is kept for validation
    threads: int = 0             # tokenizing threads; 0 = one a core

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "threads")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if self.tokenizer == "gpt2-49152":
            self.vocab_size = 49152
        if not 257 <= self.vocab_size <= 65536:
            raise ValueError(f"vocab_size must be from 257 to 65536, got {self.vocab_size}")


def clean(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def content_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def survey(documents: Iterable[str], val_fraction: float) -> dict:
    """
    One look at a corpus: the hash up to which documents are for validation, the bytes of all, and a
    digest of their contents. Validation takes the smallest hashes, as many as make up val_fraction of
    the text, at least one and never all. Memory: 16 bytes a document.
    """
    hashes, sizes = array("Q"), array("Q")
    for text in documents:
        hashes.append(content_hash(text))
        sizes.append(len(text.encode()))
    values = np.array(hashes, dtype=np.uint64)
    distinct = np.unique(values)
    if len(distinct) < 2:
        raise ValueError(f"found {len(distinct)} different documents, but a split needs at least two")
    order = np.argsort(values, kind="stable")
    share = np.cumsum(np.array(sizes)[order]) / sum(sizes)
    last = values[order][np.searchsorted(share, val_fraction)]
    return {
        "last_val": int(min(last, distinct[-2])),
        "bytes": sum(sizes),
        "digest": hashlib.sha256(values.tobytes()).hexdigest()[:16],
    }


def write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


# -------------------------------------------------------------------------------
# text -> ids -> files


def batches(documents: Iterable[tuple[object, str]]) -> Iterator[list[tuple[object, str]]]:
    """The documents in lists of about BATCH_BYTES."""
    batch, size = [], 0
    for key, text in documents:
        batch.append((key, text))
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenize(
    documents: Iterable[tuple[object, str]], encoding, threads: int
) -> Iterator[tuple[object, np.ndarray, int]]:
    """
    (key, text) -> (key, ids, bytes of the text), in the order of the documents; ids are uint16 and end
    with end-of-text. The key is the caller's: it comes back as it was.

    tiktoken works without Python's lock, so that threads are enough to use every core; they need it for
    an instant after each document, and must not wait for the 5 ms that the reader may keep it. About two
    batches a thread are under way at a time: nobody waits for the reader, and memory stays bounded.
    """

    def encode(batch: list) -> list:
        done = []
        for key, text in batch:
            ids = encoding.encode_to_numpy(text, disallowed_special=())  # nothing is special: all is text
            row = np.full(len(ids) + 1, encoding.eot_token, dtype="<u2")
            row[:-1] = ids
            done.append((key, row, len(text.encode())))
        return done

    waiting, pool, interval = deque(), ThreadPoolExecutor(threads), sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        for batch in batches(documents):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * threads + 2:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        sys.setswitchinterval(interval)
        pool.shutdown(cancel_futures=True)  # who stops early, or Ctrl-C, waits for no batch in the queue


class ShardWriter:
    """
    Writes one split into split_00000.bin, ..., each under a temporary name until it is complete.

    entries holds what meta.json says of each file. The last one has no sha256 while its file is open;
    a writer that is made with such entries goes on behind the tokens that they count.
    """

    def __init__(self, folder: Path, split: str, entries: Iterable[dict] = ()):
        self.folder, self.split, self.file = folder, split, None
        self.waiting, self.n_waiting = [], 0
        self.entries = [dict(entry) for entry in entries]
        self.tokens = sum(entry["tokens"] for entry in self.entries)
        if self.entries and "sha256" not in self.entries[-1]:
            self.reopen()

    def partial(self) -> Path:
        return self.folder / f".partial-{self.entries[-1]['name']}"

    def reopen(self) -> None:
        """Cut the open file back to what its entry counts: a kill may have left more."""
        final, path = self.folder / self.entries[-1]["name"], self.partial()
        size = 2 * self.entries[-1]["tokens"]
        if final.exists():  # completed, and killed before anything was noted
            os.replace(final, path)
        if not path.exists() or path.stat().st_size < size:
            raise ValueError(f"{path} is missing or cut short: delete {self.folder} and begin anew")
        os.truncate(path, size)
        self.sha256, self.file = shards.hash_file(path), open(path, "ab")

    def add(self, ids: np.ndarray, n_bytes: int) -> bool:
        """Append a document of n_bytes of text. True if that completed a file."""
        if self.file is None:
            name = f"{self.split}_{len(self.entries):05d}.bin"
            self.entries.append({"name": name, "tokens": 0, "documents": 0, "bytes": 0})
            self.sha256, self.file = hashlib.sha256(), open(self.partial(), "wb")
        self.waiting.append(ids)
        self.n_waiting += len(ids)
        if self.n_waiting >= WRITE_TOKENS:
            self.write()
        self.tokens += len(ids)
        for key, n in (("tokens", len(ids)), ("documents", 1), ("bytes", n_bytes)):
            self.entries[-1][key] += n
        if self.entries[-1]["tokens"] < SHARD_TOKENS:
            return False
        self.finish()
        return True

    def write(self) -> None:
        """Hash and write many documents at once, which takes less time than one by one."""
        block = np.concatenate([*self.waiting, np.empty(0, dtype="<u2")])
        self.waiting, self.n_waiting = [], 0
        self.sha256.update(block)
        self.file.write(block)

    def sync(self) -> None:
        """Have on disk what was added."""
        if self.file is not None:
            self.write()
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Complete the open file, if there is one."""
        if self.file is not None:
            self.sync()
            self.file.close()
            os.replace(self.partial(), self.folder / self.entries[-1]["name"])
            self.entries[-1]["sha256"], self.file = self.sha256.hexdigest(), None


def write_split(
    folder: Path, split: str, documents: Iterator[str], encoding, threads: int, bar
) -> list[dict]:
    """Tokenize documents into the files of a split; the meta.json entry of each."""
    writer = ShardWriter(folder, split)
    with closing(tokenize(((None, text) for text in documents), encoding, threads)) as stream:
        for _, ids, n_bytes in stream:
            writer.add(ids, n_bytes)
            bar.update(n_bytes)
    writer.finish()
    return writer.entries


def take(documents: Iterator[str], n_bytes: int) -> Iterator[str]:
    """The next documents, until they make n_bytes."""
    for text in documents:
        yield text
        n_bytes -= len(text)
        if n_bytes <= 0:
            return


# -------------------------------------------------------------------------------
# a dataset and its meta.json


def command_of(module: str, cfg: Settings) -> str:
    """The command line that makes this dataset again."""
    changed = [f for f in fields(cfg) if getattr(cfg, f.name) != f.default and f.name != "threads"]
    return shlex.join(["python", "-m", module, *(f"--{f.name}={getattr(cfg, f.name)}" for f in changed)])


def meta_of(spec: dict, encoding, files: list[dict]) -> dict:
    """What meta.json says of a dataset with this tokenizer and these files."""
    return {
        "tokenizer": spec["name"],
        "tokenizer_sha256": tokenizers.digest(spec),
        "vocab_size": encoding.n_vocab,
        "eot_id": encoding.eot_token,
        "files": files,
    }


def report(folder: Path, files: list[dict]) -> None:
    for split in ("train", "val"):
        entries = [file for file in files if file["name"].startswith(split)]
        tokens, docs = (sum(file[key] for file in entries) for key in ("tokens", "documents"))
        print(f"{folder}: {split:5} {tokens:>12,} tokens in {docs:,} documents")


def is_intact(folder: Path) -> bool:
    try:
        meta = shards.read_meta(folder)
        for file in meta["files"]:
            shards.check_size(folder / file["name"], file["tokens"], "")
            if np.memmap(folder / file["name"], dtype="<u2", mode="r").max() >= meta["vocab_size"]:
                return False
    except ValueError:
        return False
    return True


def prepare(
    cfg: PrepareConfig, corpus: Callable[[], Iterable[str]], source: str, command: str
) -> Path:
    """
    Write the dataset of a corpus, a function that returns its documents anew at each call, and
    return the folder. One that is there already is kept if it was made the same way and is intact,
    made anew if it is damaged, and refused if it is another.
    """
    folder = Path(cfg.data_dir)
    seen = survey(corpus(), cfg.val_fraction)
    wish = {"digest": seen["digest"], "tokenizer": cfg.tokenizer, "vocab_size": cfg.vocab_size,
            "val_fraction": cfg.val_fraction}  # fmt: skip
    if (folder / "meta.json").exists():
        meta = try_json((folder / "meta.json").read_text(encoding="utf-8")) or {}
        if meta.get("wish", wish) != wish:
            raise ValueError(
                f"{folder} holds another dataset ({meta.get('tokenizer')} from {meta.get('source')}): "
                "delete it, or choose another --data_dir"
            )
        if is_intact(folder):
            print(f"{folder} is there already; delete it to prepare it again")
            return folder
    foreign = [p.name for p in folder.iterdir() if not re.match(OURS, p.name)] if folder.is_dir() else []
    if foreign or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is in the way: it is no dataset; choose another --data_dir")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if seen["bytes"] > free:  # 2 bytes a token, and a token stands for 2 bytes or more on average
        raise ValueError(
            f"{folder} needs up to {seen['bytes'] / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free: "
            "free some, or choose another --data_dir"
        )
    remove_leftovers(folder)
    partial = folder / f".partial-{owner()}"
    partial.mkdir()
    try:
        meta = {"source": source, "command": command, "wish": wish}
        meta |= write_dataset(partial, cfg, corpus, seen)
        # The same bytes whoever writes them: another process may do so at the same time.
        for name in [tokenizers.FILE_NAME, *(file["name"] for file in meta["files"])]:
            os.replace(partial / name, folder / name)
        write_file(partial / "meta.json", json.dumps(meta, indent=2).encode())
        os.replace(partial / "meta.json", folder / "meta.json")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    report(folder, meta["files"])
    return folder


def write_dataset(folder: Path, cfg: PrepareConfig, corpus: Callable, seen: dict) -> dict:
    """The tokenizer and both splits into a folder; what meta.json says of them."""

    def documents(val: bool) -> Iterator[str]:
        return (t for t in corpus() if (content_hash(t) <= seen["last_val"]) == val)

    if cfg.tokenizer == "bpe":
        print(f"training a tokenizer of {cfg.vocab_size} tokens")
        words = tokenizers.count_words(take(documents(val=False), BPE_BYTES))
        spec = tokenizers.bpe_spec(words, cfg.vocab_size)
    else:
        spec = tokenizers.gpt2_spec()
    encoding = tokenizers.load_encoding(spec)
    write_file(folder / tokenizers.FILE_NAME, tokenizers.spec_bytes(spec))
    files, threads = [], cfg.threads or os.cpu_count() or 1
    with tqdm(total=seen["bytes"], unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for split in ("train", "val"):
            files += write_split(folder, split, documents(split == "val"), encoding, threads, bar)
    return meta_of(spec, encoding, files)


def remove_leftovers(folder: Path, age_s: float = 24 * 3600) -> None:
    """What killed runs left behind: those of this machine at once, others when they are old."""
    for path in folder.glob(".partial-*"):
        name = path.name.removeprefix(".partial-")
        here = name.rpartition("-")[0] == owner().rpartition("-")[0]
        newest = max(p.stat().st_mtime for p in [path, *path.rglob("*")])
        if (here and not is_at_work(name)) or time.time() - newest > age_s:
            shutil.rmtree(path, ignore_errors=True)
