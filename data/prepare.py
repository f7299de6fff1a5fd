"""
Documents -> a dataset folder (its format is in shards.py), the same bytes on every run.

    clean      no byte-order mark, line ends as \\n; empty documents are left out
    split      a document is for validation if its hash is below val_fraction of the largest hash
    tokenize   as ordinary text (a literal <|endoftext|> is text), then one end-of-text id each
    write      files of 100 million tokens; after each one, progress.json notes what is done

A corpus is a function: documents(place) gives (place, key, text) of every document after a place,
from the first on for None. A place is small JSON. The key decides the side: the document's id in
the corpus, or None for its content, so that copies of a document are on one side.

After any stop, kill -9 included, the same command continues after what is noted, and writes the
same bytes as an undisturbed run. At the end progress.json becomes meta.json.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from config import Settings, try_json
from config.machine import folder_lock, write_atomically
from data import shards, tokenizers

SHARD_TOKENS = 100_000_000  # a file is closed after the document that reaches this
BATCH_CHARS = 1_000_000  # text that one thread tokenizes at a time: bounds the memory
BPE_CHARS = 20_000_000  # text that a trained tokenizer looks at
OURS = r"((train|val)_\d+\.bin|(meta|progress|tiktoken)\.json.*|SHA256SUMS.*|lock)$"


@dataclass
class PrepareConfig(Settings):
    data_dir: str = ""  # folder to write
    tokenizer: Literal["bpe", "gpt2-49152"] = "bpe"  # trained here, or GPT-2's first 49,151
    vocab_size: int = 2048  # ids of a trained tokenizer, end-of-text included
    tokens: int = 0  # training tokens to write; 0 = all there are
    val_fraction: float = 0.05  # share of the documents that is kept for validation
    threads: int = 0  # tokenizing threads; 0 = one per core

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "threads tokens")
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


def split(documents: Iterable[tuple], val_fraction: float) -> Iterator[tuple[object, bool, str]]:
    """(place, is for validation, text) of each document that is not empty."""
    for place, key, text in documents:
        text = clean(text)
        if text and not text.isspace():
            yield place, content_hash(key or text) < val_fraction * 2**64, text


def batches(documents: Iterable[tuple]) -> Iterator[list[tuple]]:
    """The documents in lists of about BATCH_CHARS."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[-1])
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch


def tokenize(documents: Iterable[tuple], encoding: object, threads: int) -> Iterator[tuple]:
    """
    (place, is_val, text) -> (place, is_val, ids, bytes of the text), in the order of the documents;
    ids are uint16 and end with end-of-text.

    tiktoken works without Python's lock, so threads use every core; they need it for an instant
    after each document, and must not wait for the 5 ms that the reader may keep it.
    """

    def encode(batch: list[tuple]) -> list[tuple]:
        done = []
        for place, is_val, text in batch:
            try:
                ids = tokenizers.encode(encoding, text)
            except Exception as error:
                raise ValueError(f"cannot encode the document at {place}: {error}") from error
            ids = np.append(ids, encoding.eot_token).astype("<u2")
            done.append((place, is_val, ids, len(text.encode())))
        return done

    waiting, pool, interval = deque(), ThreadPoolExecutor(threads), sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        for batch in batches(documents):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * threads + 2:  # bounds the memory
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        sys.setswitchinterval(interval)
        pool.shutdown(cancel_futures=True)


class ShardWriter:
    """
    Writes one split into split_00000.bin, ...; entries holds what meta.json says of each file. A
    last one without sha256 is continued after its tokens: a kill may have left more in the file.
    """

    def __init__(self, folder: Path, split: str, files: list[dict]):
        self.folder, self.split, self.file = folder, split, None
        self.entries = [file for file in files if file["name"].startswith(split)]
        self.tokens = sum(entry["tokens"] for entry in self.entries)
        if self.entries and "sha256" not in self.entries[-1]:
            self.file = open(folder / self.entries[-1]["name"], "ab")
            self.file.truncate(2 * self.entries[-1]["tokens"])

    def add(self, ids: np.ndarray, n_bytes: int) -> bool:
        """Append a document of n_bytes of text. True if that completed a file."""
        if self.file is None:
            name = f"{self.split}_{len(self.entries):05d}.bin"
            self.entries.append({"name": name, "tokens": 0, "documents": 0, "bytes": 0})
            self.file = open(self.folder / name, "wb", buffering=2**20)
        self.file.write(ids)
        self.tokens += len(ids)
        for key, n in (("tokens", len(ids)), ("documents", 1), ("bytes", n_bytes)):
            self.entries[-1][key] += n
        return self.entries[-1]["tokens"] >= SHARD_TOKENS

    def sync(self, finish: bool = False) -> None:
        """Have on disk what was added. A file is complete if it is large enough, or to finish."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            if finish or self.entries[-1]["tokens"] >= SHARD_TOKENS:
                self.file.close()
                path, self.file = self.folder / self.entries[-1]["name"], None
                content = np.memmap(path, mode="r")
                self.entries[-1]["sha256"] = hashlib.sha256(content).hexdigest()


def command_of(module: str, cfg: Settings, words: Iterable[str] = ()) -> str:
    """The command line that makes this dataset again."""
    changed = [f.name for f in fields(cfg) if getattr(cfg, f.name) != f.default]
    given = [f"--{name}={getattr(cfg, name)}" for name in changed if name != "threads"]
    return shlex.join(["python", "-m", module, *given, *words])


def read_state(folder: Path, request: dict) -> dict:
    """
    What meta.json or progress.json says of a dataset, {} if it is new. Raises ValueError if another
    one was requested, if a file is damaged, or if the folder holds anything else.
    """
    for path in (folder / "meta.json", folder / "progress.json"):
        if path.exists():
            state = try_json(path.read_text(encoding="utf-8")) or {}
            held = state.get("request", {})
            other = {key: held.get(key) for key in request if held.get(key) != request[key]}
            if other:
                what = f"{folder} holds another dataset or a part of it, {other}"
                raise ValueError(f"{what}: delete it, or choose another --data_dir")
            for file in state["files"]:
                name, size = folder / file["name"], 2 * file["tokens"]
                if "sha256" in file or name.stat().st_size < size:  # more may be left by a kill
                    shards.check_size(name, file["tokens"], state["command"])
            return state
    if folder.exists() and not all(re.match(OURS, path.name) for path in folder.iterdir()):
        raise ValueError(f"{folder} is in the way, it is no dataset: choose another --data_dir")
    return {}


def write_dataset(cfg: PrepareConfig, documents: Callable, state: dict, folder: Path) -> None:
    """Write what is missing of a dataset. state goes into progress.json, at the end meta.json."""
    train, val = (ShardWriter(folder, name, state["files"]) for name in ("train", "val"))

    def note(**news: object) -> None:
        state.update(news, files=train.entries + val.entries)
        write_atomically(folder / "progress.json", json.dumps(state, indent=2))

    if state["place"] is None:
        if cfg.tokenizer != "bpe":
            spec = tokenizers.gpt2_spec()
        else:
            print(f"training a tokenizer of {cfg.vocab_size} tokens")
            sides = split(documents(None), cfg.val_fraction)
            words = tokenizers.count_words((t for _, is_val, t in sides if not is_val), BPE_CHARS)
            spec = tokenizers.bpe_spec(words, cfg.vocab_size)
        write_atomically(folder / tokenizers.FILE_NAME, tokenizers.spec_bytes(spec))
    spec = tokenizers.read_spec(folder)
    encoding, digest = tokenizers.load_encoding(spec), tokenizers.digest(spec)
    source = split(documents(state["place"]), cfg.val_fraction)
    stream = tokenize(source, encoding, cfg.threads or os.cpu_count() or 1)
    size = {"total": cfg.tokens or None, "initial": train.tokens}
    with tqdm(**size, unit="tok", unit_scale=True, disable=None) as bar, closing(stream):
        for place, is_val, ids, n_bytes in stream:
            if cfg.tokens and train.tokens >= cfg.tokens:
                break
            completed = (val if is_val else train).add(ids, n_bytes)
            bar.update(0 if is_val else len(ids))
            state["place"] = place
            if completed:
                train.sync()
                val.sync()
                note()
                if bar.disable:
                    print(f"{train.tokens:,} training tokens", flush=True)
    if not train.tokens or not val.tokens:
        what = f"{train.tokens} tokens are for training and {val.tokens} for validation"
        raise ValueError(f"{what}, but both are needed: use more text, or another --val_fraction")
    train.sync(finish=True)
    val.sync(finish=True)
    files = [*train.entries, *val.entries, {"name": tokenizers.FILE_NAME, "sha256": digest}]
    sums = "".join(f"{file['sha256']}  {file['name']}\n" for file in files)
    write_atomically(folder / "SHA256SUMS", sums)
    about = {"tokenizer": spec["name"], "tokenizer_sha256": digest}
    note(**about, vocab_size=encoding.n_vocab, eot_id=encoding.eot_token)
    os.replace(folder / "progress.json", folder / "meta.json")
    for writer in (train, val):
        n = sum(entry["documents"] for entry in writer.entries)
        print(f"{folder}: {writer.split:5} {writer.tokens:>12,} tokens in {n:,} documents")
    share, asked = val.tokens / (train.tokens + val.tokens), cfg.val_fraction
    if not asked / 2 <= share <= asked * 2:
        print(f"validation has {share:.2%} of the tokens, not {asked:.2%}: more text comes closer")
    if train.tokens < cfg.tokens:
        print(f"the text ends after {train.tokens:,} of {cfg.tokens:,} training tokens")


def prepare(cfg: PrepareConfig, documents: Callable, source: str, command: str, size: int) -> Path:
    """
    Write the dataset of a corpus, or what is missing of it, and return the folder. source is a text
    that changes with the corpus, command makes the dataset again, size is the bytes it may need.
    """
    folder = Path(cfg.data_dir)
    keys = ("tokenizer", "vocab_size", "tokens", "val_fraction")
    request = {"source": source} | {key: getattr(cfg, key) for key in keys}
    read_state(folder, request)
    if (folder / "meta.json").exists():
        print(f"{folder} is there already; delete it to prepare it again")
        return folder
    new = {"request": request, "command": command, "place": None, "files": []}
    try:
        with folder_lock(folder):
            try:
                state = read_state(folder, request) or new
                size -= 2 * sum(entry["tokens"] for entry in state["files"])
                free = shutil.disk_usage(folder).free
                if size > free:
                    what = f"{size / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free"
                    raise ValueError(f"{folder} needs up to {what}: make room")
                write_dataset(cfg, documents, state, folder)
            except OSError as error:
                if error.filename is not None:
                    raise
                remedy = "make room, and the same command continues"
                raise ValueError(f"cannot write {folder} ({error}): {remedy}") from error
            finally:
                if not any((folder / name).exists() for name in ("progress.json", "meta.json")):
                    for path in set(folder.iterdir()) - {folder / "lock"}:
                        path.unlink()
    finally:
        with suppress(OSError):
            folder.rmdir()  # if nothing came of it
    return folder
