"""data/: what is written, in which order it is read, and what is said of a damaged dataset."""

import gzip
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, assert_clean_error, run, texts

from codes import token_bits
from data import prepare as prepare_module
from data.prepare import PrepareConfig, content_hash, prepare, tokenize
from data.pydocs import read_documents as pydocs
from data.shards import Shards, identity, shuffled, window_numbers
from data.text import cut
from data.text import main as text_main
from data.tokenizers import load_encoding, read_spec


def write_dataset(folder: Path, files: dict[str, list[int]], vocab_size: int = 512) -> Path:
    """A dataset written by hand, file by file, with any tokenizer file beside it."""
    folder.mkdir(parents=True)
    spec = '{\n"name": "by hand",\n"pat_str": "x",\n"special_tokens": {},\n"mergeable_ranks": []\n}'
    (folder / "tiktoken.json").write_text(spec)
    digest = hashlib.sha256(spec.encode()).hexdigest()
    entries = []
    for name, ids in files.items():
        np.array(ids, dtype="<u2").tofile(folder / name)
        entries.append({"name": name, "tokens": len(ids), "documents": 1, "bytes": len(ids)})
    meta = {"tokenizer": "by hand", "tokenizer_sha256": digest, "vocab_size": vocab_size}
    meta |= {"eot_id": 0, "command": "python -m data.text", "files": entries}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def three(tmp_path):
    train = {f"train_0000{i}.bin": range(100 * i + 100, n) for i, n in enumerate((110, 204, 309))}
    return write_dataset(tmp_path / "three", train | {"val_00000.bin": range(400, 411)})


# -------------------------------------------------------------------------------
# reading


def test_windows_of_three_uneven_files_by_hand(three):
    data = Shards(three, "train", 512, block_size=3)
    # 10 tokens hold 3 windows of 3 + 1, 4 hold 1, 9 hold 2; neighbours share a token
    by_hand = [[100, 101, 102, 103], [103, 104, 105, 106], [106, 107, 108, 109]]
    by_hand += [[200, 201, 202, 203], [300, 301, 302, 303], [303, 304, 305, 306]]
    assert data.n_windows == 6 and data.n_tokens == 23
    assert data.windows(np.arange(6)).tolist() == by_hand
    assert data.windows(np.array([5, 0, 3])).tolist() == [by_hand[5], by_hand[0], by_hand[3]]


def test_validation_has_every_token_once_by_hand(three):
    data = Shards(three, "val", 512, block_size=4)
    (x1, y1), (x2, y2) = data.every_token_once(batch_size=2)
    assert x1.tolist() == [[0, 400, 401, 402], [403, 404, 405, 406]]
    assert y1.tolist() == [[400, 401, 402, 403], [404, 405, 406, 407]]
    assert (x2.tolist(), y2.tolist()) == ([[407, 408, 409, 0]], [[408, 409, 410, -1]])
    train = Shards(three, "train", 512, block_size=4)
    tokens = [*range(100, 110), *range(200, 204), *range(300, 309)]
    for limit in (0, 5, 12):
        targets = np.concatenate([y[y >= 0] for _, y in train.every_token_once(2, limit)])
        assert targets.tolist() == tokens[: limit or 23]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_every_epoch_is_another_shuffle_of_all_windows(n):
    epochs = [shuffled(np.arange(n), n, 5, epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in epochs)
    if n > 10:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(n))
        assert shuffled(np.arange(n), n, 6, 0).tolist() != epochs[0]


def test_positions_alone_decide_across_the_end_of_an_epoch():
    whole = window_numbers(0, 30, 12, seed=3)
    pieces = [window_numbers(first, count, 12, 3) for first, count in ((0, 7), (7, 6), (13, 17))]
    assert whole.tolist() == np.concatenate(pieces).tolist()
    assert sorted(whole[:12]) == sorted(whole[12:24]) == list(range(12))


def test_the_order_costs_no_memory_at_any_size():
    tracemalloc.start()
    numbers = window_numbers(10**13, 64, 5 * 10**13, seed=1)  # a list of these would take 400 TB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 and len(set(numbers.tolist())) == 64 and numbers.max() < 5 * 10**13


def test_ids_survive_from_file_to_bits_and_back(tmp_path):
    ids = [0, 1, 32767, 32768, 49150, 49151, 65535, 0]
    folder = write_dataset(tmp_path / "ids", {"train_00000.bin": ids, "val_00000.bin": ids}, 65536)
    window = Shards(folder, "train", 65536, 7).windows(np.array([0]))[0]
    assert window.tolist() == ids
    bits = token_bits(torch.from_numpy(window), 16).long()
    assert (bits * 2 ** torch.arange(16)).sum(-1).tolist() == ids


def many_files(folder: Path, sizes: list[int]) -> list[np.ndarray]:
    """A dataset of training files of the given sizes, and their tokens."""
    files = [np.random.default_rng(i).integers(0, 512, n) for i, n in enumerate(sizes)]
    write_dataset(folder, {f"train_{i:05d}.bin": ids for i, ids in enumerate(files)})
    return files


def test_a_thousand_files_cost_no_more_than_one(tmp_path, monkeypatch):
    monkeypatch.setattr("data.shards.SCAN_TOKENS", 0)  # as if they were large
    reads, real = [], np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *a, **k: reads.append(k["count"]) or real(*a, **k))
    files = many_files(tmp_path / "many", [70 + i % 60 for i in range(1000)])
    data = Shards(tmp_path / "many", "train", 512, 32)
    assert reads == []  # nothing is opened before it is needed
    slow = [tokens[at : at + 33] for tokens in files for at in range(0, len(tokens) - 32, 32)]
    numbers = np.array([0, 1, len(slow) - 1, len(slow) // 2, 777])
    assert np.array_equal(data.windows(numbers), np.stack([slow[i] for i in numbers]))
    assert data.n_windows == len(slow) and reads == [33] * 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_validation_token_counts_once_over_all_ranks(tmp_path, world_size):
    ids = many_files(tmp_path / "d", [101 * 32 + 5, 40])  # rows of 32: 101, one of 5, one, one of 8
    data = Shards(tmp_path / "d", "train", 512, 32)
    shares = [list(data.every_token_once(4, 0, rank, world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1  # or a rank would wait forever
    once = np.concatenate([y[y >= 0] for batch in zip(*shares) for _, y in batch])
    assert np.array_equal(once, np.concatenate(ids))


def test_the_order_is_the_one_of_earlier_runs():
    """Computed by the first release: a resumed run must read what it would have read."""
    assert window_numbers(0, 8, 1000, seed=1).tolist() == [379, 185, 335, 440, 506, 793, 748, 942]
    assert window_numbers(997, 6, 1000, seed=2).tolist() == [420, 280, 350, 598, 11, 832]
    assert window_numbers(10**12, 3, 5 * 10**10, seed=7).tolist() == [19461536949, 2677719143, 25007130741]


def test_identity_is_the_tokenizer_and_the_content(three):
    meta = Shards(three, "train", 512, 3).meta
    meta["files"][0]["sha256"] = "a"
    assert identity(meta)["files"][:2] == [["train_00000.bin", 10, "a"], ["train_00001.bin", 4, None]]
    other = json.loads(json.dumps(meta)) | {"command": "another"}
    assert identity(other) == identity(meta)
    other["files"][0]["sha256"] = "b"
    assert identity(other) != identity(meta)


# -------------------------------------------------------------------------------
# damaged datasets


def put(path: Path, ids: list[int]) -> None:
    np.array(ids, dtype="<u2").tofile(path)


def change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


FILE = "train_00001.bin"
DAMAGE = [
    (lambda d: d.rename(d / "../x"), "three is not there .*`python -m data.text --input=PATH --data"),
    (lambda d: put(d / FILE, []), f"{FILE} has 0 bytes, .* have 8: delete .*three and .*`python -m"),
    (lambda d: (d / FILE).write_bytes(b"x" * 9), f"{FILE} has 9 bytes, but should have 8"),
    (lambda d: (d / FILE).unlink(), f"{FILE} is missing: delete"),
    (lambda d: put(d / FILE, [0, 1, 600, 2]), f"{FILE} has id 600 at token 2, the vocabulary 512 ids"),
    (lambda d: change(d / "meta.json", "}", ""), "meta.json lacks valid JSON"),
    (lambda d: change(d / "meta.json", "eot_id", "x"), "meta.json lacks eot_id"),
    (lambda d: change(d / "tiktoken.json", "by hand", "x"), "json is not the tokenizer of .*meta.js"),
    (lambda d: (d / "tiktoken.json").unlink(), "tiktoken.json is missing"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_a_damaged_dataset_is_named_with_the_remedy(three, damage, message):
    damage(three)
    with pytest.raises(ValueError, match=message):
        Shards(three, "train", 512, 3).windows(np.arange(6))


def test_an_id_outside_the_vocabulary_is_found_when_read_from_a_large_file(three, monkeypatch):
    monkeypatch.setattr("data.shards.SCAN_TOKENS", 0)
    put(three / FILE, [0, 1, 600, 2])
    data = Shards(three, "train", 512, 3)
    assert data.windows(np.array([0])).shape == (1, 4)
    with pytest.raises(ValueError, match="id 600 at token 2"):
        data.windows(np.array([3]))
    with pytest.raises(ValueError, match="id 600 at token 2"):
        list(data.every_token_once(2))


def test_too_little_text_and_another_vocabulary_are_refused(three):
    with pytest.raises(ValueError, match="val files hold 11 tokens, fewer than block_size . 1 = 12"):
        Shards(three, "val", 512, 11)
    with pytest.raises(ValueError, match="vocabulary of 512 .* but vocab_size=4096"):
        Shards(three, "train", 4096, 3)


def test_a_file_cut_while_in_use_is_named(three):
    data = Shards(three, "train", 512, 3)
    os.truncate(three / "train_00000.bin", 12)
    with pytest.raises(ValueError, match="train_00000.bin was cut while in use, to 6 of 10 tokens"):
        data.windows(np.arange(3))


def test_the_command_for_the_large_corpus_says_what_it_costs(tmp_path):
    with pytest.raises(ValueError, match="downloads 200 GB; add --tokens=1e9 .2 GB. to begin with"):
        Shards(tmp_path / "fineweb_edu", "train", 49152, 2048)
    with pytest.raises(ValueError, match="`python -m data.pydocs --data_dir=.*/pydocs`"):
        Shards(tmp_path / "pydocs", "train", 2048, 128)


# -------------------------------------------------------------------------------
# writing


def corpus(documents: list[str]) -> Callable:
    """A corpus that is a list; the place after a document is its number, counted from 1."""
    return lambda place: ((i, None, t) for i, t in enumerate(documents, 1) if i > (place or 0))


def prepared(out: Path, documents: list[str], **changes) -> Path:
    cfg = PrepareConfig(**{"data_dir": str(out), "vocab_size": 300} | changes)
    return prepare(cfg, corpus(documents), "a test", "no command", 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, by cutting its files at every end-of-text id."""
    encoding, meta = (load_encoding(read_spec(folder)), json.loads((folder / "meta.json").read_text()))
    found = []
    for entry in [e for e in meta["files"] if e["name"].startswith(split)]:
        ids = np.fromfile(folder / entry["name"], dtype="<u2")
        assert len(ids) == entry["tokens"] and ids[-1] == meta["eot_id"]
        ends = np.flatnonzero(ids == meta["eot_id"])
        parts = [encoding.decode(p.tolist()) for p in np.split(ids, ends + 1)[:-1]]
        assert len(parts) == entry["documents"]
        parts = [p.removesuffix("<|endoftext|>") for p in parts]  # the id's own text
        assert sum(len(p.encode()) for p in parts) == entry["bytes"]
        found += parts
    return found


def both_sides(folder: Path) -> list[str]:
    return read_documents(folder, "train") + read_documents(folder, "val")


def assert_sums(folder: Path) -> None:
    """SHA256SUMS is what sha256sum prints of every file but itself and meta.json."""
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    names = {path.name for path in folder.iterdir()} - {"SHA256SUMS", "meta.json"}
    assert {name for _, name in lines} == names
    for sha256, name in lines:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256


def test_documents_and_files_do_not_depend_on_batches_or_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 3000)
    for name, batch, threads in (("a", 100, 1), ("b", 10**6, 2), ("c", 2000, 3)):
        monkeypatch.setattr(prepare_module, "BATCH_CHARS", batch)
        prepared(tmp_path / name, texts(300), threads=threads)
    found = [contents(tmp_path / name) for name in "abc"]
    assert len(found[0]) > 6
    assert found[0] == found[1] | {"meta.json": found[0]["meta.json"]}
    for name in "abc":
        assert_sums(tmp_path / name)
        assert sorted(both_sides(tmp_path / name)) == sorted(texts(300))
    metas = [json.loads(f["meta.json"]) for f in found]
    assert metas[0] == metas[1] == metas[2]


def test_the_hash_of_the_key_decides_the_side(tmp_path):
    documents = texts(100) * 3
    prepared(tmp_path / "d", documents, val_fraction=0.3)
    train, val = (read_documents(tmp_path / "d", split) for split in ("train", "val"))
    limit = 0.3 * 2**64
    assert val == [t for t in documents if content_hash(t) < limit] and not set(train) & set(val)


class Killed(BaseException):
    """Stands for a kill: what is on disk at that moment is copied, and the run continues there."""


@pytest.mark.parametrize("tokens", [0, 8000])
def test_a_kill_at_any_step_changes_no_byte(tmp_path, monkeypatch, tokens):
    """Every file that moves to its place is a step; the kill comes just before or just after it."""
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 2000)
    monkeypatch.setattr(prepare_module, "BATCH_CHARS", 1500)
    changes = {"tokens": tokens, "val_fraction": 0.2}
    documents, real, n_steps = texts(250), os.replace, 0

    def count(a, b):
        nonlocal n_steps
        n_steps += 1
        real(a, b)

    monkeypatch.setattr(os, "replace", count)
    whole = contents(prepared(tmp_path / "whole", documents, **changes))
    assert n_steps > 6 and sum("val" in name for name in whole) > 1
    for step in range(2 * n_steps):
        left = [step // 2]
        killed, out = tmp_path / f"killed{step}", tmp_path / f"out{step}"

        def replace(a, b, left=left, after=step % 2, killed=killed, out=out):
            left[0] -= 1
            if left[0] != -1:
                return real(a, b)
            if after:
                real(a, b)
            shutil.copytree(out, killed, ignore=shutil.ignore_patterns("lock"))
            raise Killed

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            prepared(out, documents, **changes)
        monkeypatch.setattr(os, "replace", real)
        prepared(killed, documents, threads=1 + step % 3, **changes)
        for path in killed.glob("*.tmp"):  # what was being written then
            path.unlink()
        assert contents(killed) == whole, step
        assert_sums(killed)


def test_a_full_disk_loses_nothing_and_is_noticed_first(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 2000)
    whole = contents(prepared(tmp_path / "whole", texts(100)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "train_00001.bin").symlink_to("/dev/full")  # every write says: no space left
    with pytest.raises(ValueError, match="No space left.*: make room, and the same command continue"):
        prepared(out, texts(100))
    assert {"train_00000.bin", "progress.json"} <= {p.name for p in out.iterdir()}
    with pytest.raises(ValueError, match="out is not complete: run the command again"):
        Shards(out, "train", 300, 8)
    (out / "train_00001.bin").unlink()
    with pytest.raises(ValueError, match="holds another dataset or a part of it, .*0.05"):
        prepared(out, texts(100), val_fraction=0.1)
    prepared(out, texts(100))
    assert contents(out) == whole
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    cfg = PrepareConfig(data_dir=str(tmp_path / "d"), vocab_size=300)
    with pytest.raises(ValueError, match="up to 2.0 GB of disk, 0.0 GB are free"):
        prepare(cfg, corpus(texts(99)), "", "", size=2 * 10**9)
    assert not (tmp_path / "d").exists()


def test_a_document_that_cannot_be_encoded_is_named():
    class Encoding:
        def encode_to_numpy(self, text, disallowed_special):
            raise ValueError("no")

    with pytest.raises(ValueError, match=r"the document at \['a.jsonl', 7, 0\]: no"):
        list(tokenize([(["a.jsonl", 7, 0], False, "x")], Encoding(), 1))


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = f"""
import sys, resource; sys.path.insert(0, {str(ROOT)!r})
from data.prepare import *
import data.prepare as p; p.BATCH_CHARS = 100_000
n, out = int(sys.argv[1]), sys.argv[2]
docs = lambda _: ((i, None, 'document %d ' % i + 'of many words ' * 700) for i in range(n))
prepare(PrepareConfig(data_dir=out, vocab_size=300), docs, '', '', 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peak = {}
    for n in (100, 1500):  # 1 MB and 15 MB
        result = run("-c", code, str(n), str(tmp_path / str(n)))
        assert result.returncode == 0, result.stderr
        peak[n] = int(result.stdout.split()[-1])
    assert peak[1500] - peak[100] < 6_000, f"{peak} KiB: it grew by more than 6 MB"


# -------------------------------------------------------------------------------
# your own text

ODD_TEXTS = {
    "bom.txt": b"\xef\xbb\xbfWith a mark.\r\nAnd a second line.\r\n",
    "emoji.txt": "\U0001f600 and <|endoftext|> as text".encode(),  # no final newline
    "empty.txt": b"",
    "carets.txt": b"^" * 10_000,
    "rows.JSONL": b'{"text": "one"}\n\n{"text": "", "id": 1}\n{"text": "caf\\u00e9 <|endoftext|>"}',
    "rows.ndjson": b'{"text": "two\\r\\nlines"}',
    "sub/more.txt": ("\n\n".join(texts(200))).encode(),
    ".hidden": b"\xff\xfe not text",
}


EXPECTED = [
    "With a mark.\nAnd a second line.\n\U0001f600 and <|endoftext|> as text",
    "^" * 10_000 + "onecaf\u00e9 <|endoftext|>two\nlines" + "\n\n".join(texts(200)),
    *(f"row {i} of parquet" for i in range(30)),
]


@pytest.fixture
def folder(tmp_path):
    for name, content in ODD_TEXTS.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    table = pa.table({"text": [f"row {i} of parquet" for i in range(30)], "id": range(30)})
    pq.write_table(table, tmp_path / "in" / "rows.parquet")
    return tmp_path / "in"


def prepare_text(source: Path, out: Path, *args: str) -> None:
    text_main([f"--input={source}", f"--data_dir={out}", "--vocab_size=300", *args])


def run_text(source: Path, out: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    args = [f"--input={source}", f"--data_dir={out}", "--vocab_size=300", *args]
    return run("-W", "error", "-m", "data.text", *args, **env)


def test_odd_texts_are_kept_as_they_are(folder, tmp_path, capsys):
    (folder / "to").symlink_to(tmp_path)
    (folder / "dangling").symlink_to("nowhere")
    prepare_text(folder, tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"left out, a link to a folder or to nothing, or no file: {folder}/dangling, " in printed
    assert f"{folder}/to\n" in printed
    found = both_sides(tmp_path / "out")
    assert "With a mark.\nAnd a second line.\n" in found
    assert "\U0001f600 and <|endoftext|> as text" in found and "" not in found
    assert {"one", "two\nlines", "caf\u00e9 <|endoftext|>"} < set(found)
    assert {f"row {i} of parquet" for i in range(30)} < set(found)
    assert "".join(t for t in found if "^" in t) == "^" * 10_000
    assert sorted("".join(found)) == sorted("".join(EXPECTED))


def test_locale_and_a_second_run_change_no_byte(folder, tmp_path, capsys):
    for name, env in [("a", {}), ("b", {"LC_ALL": "C", "PYTHONUTF8": "0"})]:
        result = run_text(folder, tmp_path / name, **env)
        assert result.returncode == 0, result.stderr
    before, other = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert before == other | {"meta.json": before["meta.json"]}
    prepare_text(folder, tmp_path / "a", "--threads=1")
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(ValueError, match="another dataset or a part of it, .*'val_fraction': 0.05"):
        prepare_text(folder, tmp_path / "a", "--val_fraction=0.1")
    (folder / "new.txt").write_text("something new")
    assert_clean_error(run_text(folder, tmp_path / "a"), "another dataset", "'source'")
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("size", [20_000, 100_000])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_small_text_has_the_share_for_validation_that_was_requested(tmp_path, size, kind, capsys):
    draw = random.Random(size)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 15))) for _ in range(size // 50)]
    text = "\n".join(lines)
    (tmp_path / f"a.{kind}").write_text(text if kind == "txt" else json.dumps({"text": text}))
    prepare_text(tmp_path / f"a.{kind}", tmp_path / "out")
    assert "comes closer" not in capsys.readouterr().out
    n_val, n_train = (sum(map(len, read_documents(tmp_path / "out", s))) for s in ("val", "train"))
    assert 0.025 < n_val / (n_val + n_train) < 0.1
    assert {word for t in both_sides(tmp_path / "out") for word in t.split()} <= set(words)


def test_a_text_too_small_or_uneven_is_told_so(tmp_path, capsys):
    (tmp_path / "poem.txt").write_text("Roses are red, violets blue. \n")
    with pytest.raises(ValueError, match="0 for validation, but both are needed: use more text, or"):
        prepared(tmp_path / "o", ["Roses are red, violets blue."], vocab_size=257)
    with pytest.raises(ValueError, match="only enough words for .*: lower vocab_size, or use more"):
        prepare_text(tmp_path / "poem.txt", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    few = texts(30)
    few.sort(key=content_hash)  # the first one alone is for validation
    prepared(tmp_path / "o", [few[0], *few[20:]], val_fraction=0.5)
    assert "of the tokens, not 50.00%: more text comes closer" in capsys.readouterr().out


def test_a_stray_byte_is_named_or_replaced(folder, tmp_path):
    (folder / "stray.txt").write_bytes("é".encode() * 60_000 + b"don\x92t")
    with pytest.raises(ValueError, match="stray.txt is .* 0x92 at offset 120003; .*--errors=replace"):
        prepare_text(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prepare_text(folder, tmp_path / "out", "--errors=replace")
    assert any("don\ufffdt" in t for t in both_sides(tmp_path / "out"))
    (folder / "stray.txt").write_bytes("\ufeffa\r\né".encode() + b"\x92")
    with pytest.raises(ValueError, match="0x92 at offset 8"):
        prepare_text(folder, tmp_path / "o")


LATIN = "Grüße, Ärger, Öl, Maß, für über können müssen dürfen zählen".encode("latin-1")
BAD_INPUTS = {
    "cut.jsonl": (b'{"text": "x"}\n{"text": \n', ["cut.jsonl, line 2", "JSONDecodeError"]),
    "other.jsonl": (b'\n{"content": "x", "id": 3}\n', ["other.jsonl, line 2", "KeyError: 'text'"]),
    "deep.jsonl": (b"[" * 200_000, ["line 1 has no text field"]),
    "number.jsonl": (b'{"text": 3}\n', ["line 1 has no text field"]),
    "list.jsonl": (b"[1]\n", ["line 1 has no text field"]),
    "half.jsonl": (b'{"text": "\\ud800"}\n', ["half.jsonl, line 1", "surrogate"]),
    "stray.jsonl": (b'{"text": "x"}\n{"text": "\x92"}\n', ["0x92 at offset 24", "--errors=replace"]),
    "docs.json": (b'[{"text": "x"}]', ["docs.json is JSON as a whole", ".jsonl"]),
    "docs.jsonl.gz": (gzip.compress(b"{}" * 99), ["docs.jsonl.gz is no text but binary"]),
    "docs.zip": (b"PK\x03\x04\x14\0\0\0\x08\0", ["docs.zip is no text but binary"]),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["picture.png is no text but binary"]),
    "latin.txt": (LATIN, ["latin.txt is not UTF-8: byte 0xfc", "convert the file"]),
    "docs.parquet": (b"not parquet", ["docs.parquet, line 0", "Arrow"]),
    "empty.txt": (b"", ["only enough words"]),
}


def test_input_that_cannot_be_is_named(tmp_path):
    for name, (content, words) in BAD_INPUTS.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            prepare_text(tmp_path / name, tmp_path / "out")
        assert all(word in str(caught.value) for word in words), (name, str(caught.value))
        assert ("errors=replace" in str(caught.value)) == ("stray" in name)
        assert not (tmp_path / "out").exists()
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="other.parquet, line 1 has no text field .*KeyError"):
        prepare_text(tmp_path / "other.parquet", tmp_path / "out")


def test_other_mistakes_of_preparing_are_named(folder, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "to").symlink_to(folder)
    source, out = f"--input={folder}", f"--data_dir={tmp_path / 'o'}"
    mistakes = [
        ("--input=PATH",),
        ("no/such does not exist", "--input=no/such"),
        ("/dev/zero has no files", "--input=/dev/zero"),
        ("links has no files", f"--input={tmp_path / 'links'}"),
        ("given twice", "--input=a", "--input=b"),
        ("from 257 to 65536", source, out, "--vocab_size=70000"),
        ("only enough words for", source, out, "--vocab_size=30000"),
        ("between 0 and 1", source, out, "--val_fraction=1"),
        ("is in the way", source, f"--data_dir={folder}"),
    ]
    for words, *args in mistakes:
        with pytest.raises(ValueError, match=words):
            text_main(args)
    assert not (tmp_path / "o").exists() and not (folder / "lock").exists()
    (tmp_path / "real").mkdir()  # a link to a folder can be the target
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prepare_text(folder, tmp_path / "link")
    assert (tmp_path / "real" / "meta.json").exists() and (tmp_path / "link").is_symlink()


def test_runs_of_a_million_spaces_or_signs_are_prepared(tmp_path):
    runs = [f"start{sign * 10**6}end" for sign in " ^\n"]
    prepared(tmp_path / "out", runs + texts(100))
    assert set(runs) < set(both_sides(tmp_path / "out"))


def test_parts_of_a_long_text():
    text = ("line\n" * 1000 + "\n") * 20  # blank lines every 5,001 characters
    parts = list(cut([text[i : i + 9999] for i in range(0, len(text), 9999)], 16384))
    assert "".join(parts) == text and all(p.endswith("\n\n") for p in parts if p)
    assert max(map(len, parts)) <= 16384
    assert [len(p) for p in cut(["^" * 40000], 16384)] == [16384, 16384, 7232]
    assert list(cut(["one two three\nfour"], 9)) == ["one two ", "three\n", "four"]


PROGRAM = """
import sys, time, data.prepare as p
from config import run_cli
from data.text import main
p.SHARD_TOKENS, p.BATCH_CHARS, add = 3000, 3000, p.ShardWriter.add
def slow(self, *args):
    return len(self.entries) > int(sys.argv[1]) and time.sleep(60) or add(self, *args)
p.ShardWriter.add = slow
run_cli(lambda argv: main(argv[1:]), "data.text")
"""


def start_text(source: Path, out: Path, n_files: int) -> subprocess.Popen:
    """Prepare as a user does, with small files, but hang after n_files of a split."""
    args = [str(n_files), f"--input={source}", f"--data_dir={out}", "--vocab_size=300"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *args], cwd=ROOT, text=True, **pipes)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_kill_9_and_ctrl_c_and_a_second_process(folder, tmp_path, monkeypatch):
    out, process = tmp_path / "out", start_text(folder, tmp_path / "out", 1)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 3000)
    prepare_text(folder, tmp_path / "whole")
    wait_for(out / "train_00001.bin", process)
    with pytest.raises(ValueError, match="is in use"):
        prepare_text(folder, out)
    process.kill()
    process.wait()
    assert not (out / "meta.json").exists()
    (out / "lock").unlink()  # or the next process waits until it is sure
    done = (out / "train_00000.bin").stat().st_mtime_ns
    process = start_text(folder, out, 2)
    wait_for(out / "train_00002.bin", process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and "Traceback" not in process.stderr.read()
    assert not (out / "lock").exists()
    prepare_text(folder, out)
    assert (out / "train_00000.bin").stat().st_mtime_ns == done
    assert_sums(out)
    a, b = contents(tmp_path / "whole"), contents(out)
    assert len(a) > 6 and a == b | {"meta.json": a["meta.json"]}


def test_the_command_of_a_damaged_dataset_makes_it_whole(folder, tmp_path):
    prepare_text(folder, tmp_path / "my data", "--val_fraction=0.2")
    before, out = contents(tmp_path / "my data"), tmp_path / "moved"
    (tmp_path / "my data").rename(out)  # the command goes where the dataset lies
    os.truncate(out / "train_00000.bin", 100)
    with pytest.raises(ValueError, match="has 100 bytes, but .*: delete .*moved and prepare it again"):
        prepare_text(folder, out, "--val_fraction=0.2")
    with pytest.raises(ValueError, match="delete .*moved and prepare it again") as caught:
        Shards(out, "train", 300, 8)
    shutil.rmtree(out)
    command = shlex.split(str(caught.value).split("`")[1])
    assert command[:3] == ["python", "-m", "data.text"]
    assert run(*command[1:]).returncode == 0
    assert contents(out) == before | {"meta.json": (out / "meta.json").read_bytes()}


# -------------------------------------------------------------------------------
# the default corpus


def test_pydocs_are_pythons_documentation_without_copies():
    import argparse
    import bisect
    import inspect

    found = pydocs()
    text = "".join(found)
    assert 1.5e6 < len(text.encode()) < 4e6
    assert len(found) == len(set(found)) and max(map(len, found)) <= 4096
    for item in (argparse.ArgumentParser, bisect.insort_left, len, dict.setdefault):
        assert inspect.getdoc(item) in text, item
    assert 'The "if" statement is used for conditional execution' in text
