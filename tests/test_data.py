"""data/: what is written, in which order it is read, and what is said of a damaged dataset."""

import gzip
import hashlib
import inspect
import json
import multiprocessing
import os
import random
import shlex
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, run, texts

from codes import token_bits
from data import bigram
from data import prepare as prepare_module
from data.prepare import PrepareConfig, content_hash, prepare, tokenize
from data.shards import Shards, window_numbers
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


# --- reading ------------------------------------------------------------------


def test_windows_of_three_uneven_files_by_hand(three):
    data = Shards(three, "train", 512, block_size=3)
    # 10 tokens hold 3 windows of 3 + 1, 4 hold 1, 9 hold 2; neighbours share a token
    by_hand = [[100, 101, 102, 103], [103, 104, 105, 106], [106, 107, 108, 109]]
    by_hand += [[200, 201, 202, 203], [300, 301, 302, 303], [303, 304, 305, 306]]
    assert data.n_windows == 6 and data.n_tokens == 23
    assert data.windows(np.arange(6)).tolist() == by_hand
    assert data.windows(np.array([5, 0, 3])).tolist() == [by_hand[5], by_hand[0], by_hand[3]]


def test_the_bigram_model_counts_the_first_tokens(three, monkeypatch):
    data = Shards(three, "train", 512, block_size=3)
    everything = [*range(100, 110), *range(200, 204), *range(300, 309)]
    assert bigram.counted_tokens(data).tolist() == everything
    for n in (7, 10, 12):
        monkeypatch.setattr(bigram, "COUNTED_TOKENS", n)
        assert bigram.counted_tokens(data).tolist() == everything[:n]


def test_validation_has_every_token_once_by_hand(three):
    data = Shards(three, "val", 512, block_size=4)
    (x1, y1), (x2, y2) = data.every_token_once(batch_size=2)
    assert x1.tolist() == [[0, 400, 401, 402], [403, 404, 405, 406]]
    assert y1.tolist() == [[400, 401, 402, 403], [404, 405, 406, 407]]
    assert (x2.tolist(), y2.tolist()) == ([[407, 408, 409, 0]], [[408, 409, 410, -1]])
    train = Shards(three, "train", 512, block_size=4)
    tokens = [*range(100, 110), *range(200, 204), *range(300, 309)]
    for limit, n_ranks in ((0, 1), (5, 1), (12, 2), (0, 2), (0, 3)):
        ranks = [list(train.every_token_once(2, limit, rank, n_ranks)) for rank in range(n_ranks)]
        assert len({len(batches) for batches in ranks}) == 1  # or a rank would wait forever
        targets = [y[y >= 0] for step in zip(*ranks) for _, y in step]
        assert np.concatenate(targets).tolist() == tokens[: limit or 23]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_every_epoch_is_another_shuffle_of_all_windows(n):
    epochs = window_numbers(0, 3 * n, n, seed=5).reshape(3, n).tolist()
    assert all(sorted(order) == list(range(n)) for order in epochs)
    if n > 10:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(n))
        assert window_numbers(0, n, n, seed=6).tolist() != epochs[0]
    across = window_numbers(n - 1, n + 1, n, seed=5).tolist()  # positions alone decide
    assert across == epochs[0][-1:] + epochs[1]


def test_ids_survive_from_file_to_bits_and_back(tmp_path):
    ids = [0, 1, 32767, 32768, 49150, 49151, 65535, 0]
    folder = write_dataset(tmp_path / "ids", {"train_00000.bin": ids, "val_00000.bin": ids}, 65536)
    window = Shards(folder, "train", 65536, 7).windows(np.array([0]))[0]
    assert window.tolist() == ids
    bits = token_bits(torch.from_numpy(window), 16).long()
    assert (bits * 2 ** torch.arange(16)).sum(-1).tolist() == ids


def test_the_order_is_the_one_of_earlier_runs():
    """Computed by the first release: a resumed run must read what it would have read."""
    assert window_numbers(0, 8, 1000, seed=1).tolist() == [379, 185, 335, 440, 506, 793, 748, 942]
    assert window_numbers(997, 6, 1000, seed=2).tolist() == [420, 280, 350, 598, 11, 832]
    assert window_numbers(10**12, 3, 5 * 10**10, seed=7).tolist() == [19461536949, 2677719143, 25007130741]


def change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


FILE = "train_00001.bin"
DAMAGE = [
    (lambda d: d.rename(d / "../x"), "three is not there .*`python -m data.text --input=PATH --data"),
    (lambda d: os.truncate(d / FILE, 0), f"{FILE} has 0 bytes, .* have 8: delete .*three and .*`python -m"),
    (lambda d: (d / FILE).write_bytes(b"x" * 9), f"{FILE} has 9 bytes, but should have 8"),
    (lambda d: (d / FILE).unlink(), f"{FILE} is missing: delete"),
    (
        lambda d: np.array([0, 1, 600, 2], "<u2").tofile(d / FILE),
        f"{FILE} has id 600 at token 2, the vocabulary 512 ids",
    ),
    (lambda d: change(d / "meta.json", "}", ""), "meta.json is damaged"),
    (lambda d: change(d / "meta.json", "eot_id", "x"), "meta.json is damaged"),
    (lambda d: change(d / "tiktoken.json", "by hand", "x"), "json is not the tokenizer of .*meta.js"),
    (lambda d: (d / "tiktoken.json").unlink(), "tiktoken.json is missing"),
]


@pytest.mark.parametrize("scan", [0, 2**24])  # ids are checked when they are read, or all at first
@pytest.mark.parametrize("damage, message", DAMAGE)
def test_a_damaged_dataset_is_named_with_the_remedy(three, damage, message, scan, monkeypatch):
    monkeypatch.setattr("data.shards.SCAN_TOKENS", scan)
    damage(three)
    with pytest.raises(ValueError, match=message):
        Shards(three, "train", 512, 3).windows(np.arange(6))


MISFITS = [
    ("three", "val", 512, 11, "val files hold 11 tokens, fewer than block_size . 1 = 12"),
    ("three", "train", 4096, 3, "vocabulary of 512 .* but vocab_size=4096"),
    ("fineweb_edu", "train", 49152, 8, "downloads 200 GB; add --tokens=1e9 .2 GB. to begin with"),
    ("pydocs", "train", 2048, 8, "`python -m data.pydocs --data_dir=.*/pydocs`"),
]


def test_a_dataset_that_does_not_fit_is_refused(three):
    for name, split, vocab_size, block_size, message in MISFITS:
        with pytest.raises(ValueError, match=message):
            Shards(three.parent / name, split, vocab_size, block_size)


# --- writing ------------------------------------------------------------------


def prepared(out: Path, documents: list[str], size: int = 0, **changes) -> Path:
    """Prepare a list; the place after a document is its number, counted from 1."""
    cfg = PrepareConfig(**{"data_dir": str(out), "vocab_size": 300} | changes)
    places = lambda place: ((i, None, t) for i, t in enumerate(documents, 1) if i > (place or 0))
    return prepare(cfg, places, "a test", "no command", size)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset; SHA256SUMS is what sha256sum prints of all others but meta.json."""
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    lines = [line.split("  ") for line in found["SHA256SUMS"].decode().splitlines()]
    assert {name for _, name in lines} == set(found) - {"SHA256SUMS", "meta.json"}
    assert all(hashlib.sha256(found[name]).hexdigest() == sha256 for sha256, name in lines)
    return found


def read_documents(folder: Path, splits: str | tuple = ("train", "val")) -> list[str]:
    """The documents of a split or of both, by cutting its files at every end-of-text id."""
    encoding, meta = (load_encoding(read_spec(folder)), json.loads((folder / "meta.json").read_text()))
    found = []
    for entry in [e for e in meta["files"] if e["name"].startswith(splits)]:
        ids = np.fromfile(folder / entry["name"], dtype="<u2")
        assert len(ids) == entry["tokens"] and ids[-1] == meta["eot_id"]
        ends = np.flatnonzero(ids == meta["eot_id"])
        parts = [encoding.decode(p.tolist()) for p in np.split(ids, ends + 1)[:-1]]
        assert len(parts) == entry["documents"]
        parts = [p.removesuffix("<|endoftext|>") for p in parts]  # the id's own text
        assert sum(len(p.encode()) for p in parts) == entry["bytes"]
        found += parts
    return found


def test_the_hash_alone_decides_not_threads_nor_a_kill_at_any_step(tmp_path, monkeypatch):
    """A kill just before or after a file moves to its place: what is on disk is copied, and continued there."""
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 2000)
    monkeypatch.setattr(prepare_module, "BATCH_CHARS", 1500)
    real, now, kill_at, out, killed = os.replace, 0, 0, tmp_path / "whole", None

    def moment():
        nonlocal now
        now += 1
        if now == kill_at:
            shutil.copytree(out, killed, ignore=shutil.ignore_patterns("lock"))
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", lambda a, b: (moment(), real(a, b), moment()))
    documents = texts(125) * 2
    whole = contents(prepared(out, documents, threads=1, val_fraction=0.2))
    assert now > 12 and "val_00001.bin" in whole
    is_val = [content_hash(text) < 0.2 * 2**64 for text in documents]
    assert read_documents(out, "val") == [t for t, val in zip(documents, is_val) if val]
    assert read_documents(out, "train") == [t for t, val in zip(documents, is_val) if not val]
    for kill_at in range(1, now + 1):
        now, out, killed = 0, tmp_path / f"out{kill_at}", tmp_path / f"killed{kill_at}"
        with pytest.raises(KeyboardInterrupt):
            prepared(out, documents, threads=2, val_fraction=0.2)
        prepared(killed, documents, threads=1 + kill_at % 3, val_fraction=0.2)
        for path in killed.glob("*.tmp"):  # what was being written then
            path.unlink()
        assert contents(killed) == whole, kill_at


def test_a_full_disk_is_noticed_first_and_named_at_any_time(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train_00000.bin").symlink_to("/dev/full")  # every write: no space left
    with pytest.raises(ValueError, match="No space left.*: make room, and the same command continue"):
        prepared(tmp_path / "out", texts(100))
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="up to 2.0 GB of disk, 0.0 GB are free"):
        prepared(tmp_path / "d", texts(99), size=2 * 10**9)
    assert not (tmp_path / "d").exists()


def test_a_document_that_cannot_be_encoded_is_named():
    with pytest.raises(ValueError, match=r"the document at \['a.jsonl', 7, 0\]: 'NoneType' object"):
        list(tokenize([(["a.jsonl", 7, 0], False, "x")], None, 1))  # there is no encoding


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = f"""
import sys, resource; sys.path.insert(0, {str(ROOT)!r})
from data.prepare import *
import data.prepare as p; p.BATCH_CHARS = 100_000
for n in (100, 1500):  # 1 MB and 15 MB
    docs = lambda _: ((i, None, 'document %d ' % i + 'of many words ' * 700) for i in range(n))
    prepare(PrepareConfig(data_dir=sys.argv[1] + str(n), vocab_size=300), docs, '', '', 0)
    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    result = run("-c", code, str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    small, large = (int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("peak"))
    assert large - small < 6_000, f"{small} and {large} KiB: it grew by more than 6 MB"


# --- your own text ------------------------------------------------------------

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


def test_odd_texts_are_kept_as_they_are(folder, tmp_path, capsys):
    (folder / "to").symlink_to(tmp_path)
    (folder / "dangling").symlink_to("nowhere")
    prepare_text(folder, tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"left out, a link to a folder or to nothing, or no file: {folder}/dangling, " in printed
    assert f"{folder}/to\n" in printed
    whole = ["With a mark.\nAnd a second line.\n", "\U0001f600 and <|endoftext|> as text"]
    whole += ["one", "caf\u00e9 <|endoftext|>", "two\nlines", *(f"row {i} of parquet" for i in range(30))]
    found = read_documents(tmp_path / "out")
    assert sorted(t for t in found if t in whole) == sorted(whole)
    parts = "".join(t for t in found if t not in whole)
    assert "" not in found and sorted(parts) == sorted("^" * 10_000 + "\n\n".join(texts(200)))


def test_locale_and_a_second_run_change_no_byte(folder, tmp_path, capsys):
    prepare_text(folder, tmp_path / "a")
    args = [f"--input={folder}", f"--data_dir={tmp_path / 'b'}", "--vocab_size=300", "--threads=1"]
    result = run("-W", "error", "-m", "data.text", *args, LC_ALL="C", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    before, other = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert before == other | {"meta.json": before["meta.json"]}
    prepare_text(folder, tmp_path / "a", "--threads=1")
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(ValueError, match="another dataset or a part of it, .*'val_fraction': 0.05"):
        prepare_text(folder, tmp_path / "a", "--val_fraction=0.1")
    (folder / "new.txt").write_text("something new")
    with pytest.raises(ValueError, match="another dataset or a part of it, .*'source'"):
        prepare_text(folder, tmp_path / "a")
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
    assert {word for t in read_documents(tmp_path / "out") for word in t.split()} <= set(words)


def test_a_text_too_small_or_uneven_is_told_so(tmp_path, capsys):
    (tmp_path / "poem.txt").write_text("Roses are red, violets blue. \n")
    with pytest.raises(ValueError, match="0 for validation, but both are needed: use more text, or"):
        prepared(tmp_path / "o", ["Roses are red, violets blue."], vocab_size=257)
    with pytest.raises(ValueError, match="only enough words for .*: lower vocab_size, or use more"):
        prepare_text(tmp_path / "poem.txt", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    few = sorted(texts(30), key=content_hash)  # the first one alone is for validation
    prepared(tmp_path / "o", [few[0], *few[20:]], val_fraction=0.5)
    assert "of the tokens, not 50.00%: more text comes closer" in capsys.readouterr().out


def test_a_stray_byte_is_named_or_replaced(folder, tmp_path):
    (folder / "stray.txt").write_bytes("é".encode() * 60_000 + b"don\x92t")
    with pytest.raises(ValueError, match="stray.txt is .* 0x92 at offset 120003; .*--errors=replace"):
        prepare_text(folder, tmp_path / "out")
    prepare_text(folder, tmp_path / "out", "--errors=replace")
    assert any("don\ufffdt" in t for t in read_documents(tmp_path / "out"))


LATIN = "Grüße, Ärger, Öl, Maß, für über können müssen dürfen zählen".encode("latin-1")
BAD_INPUTS = {
    "cut.jsonl": (b'{"text": "x"}\n{"text": \n', ["cut.jsonl, line 2", "JSONDecodeError"]),
    "other.jsonl": (b'\n{"content": "x", "id": 3}\n', ["other.jsonl, line 2", "KeyError: 'text'"]),
    "deep.jsonl": (b"[" * 200_000, ["line 1 has no text field"]),
    "number.jsonl": (b'{"text": 3}\n', ["line 1 has no text field"]),
    "half.jsonl": (b'{"text": "\\ud800"}\n', ["half.jsonl, line 1", "surrogate"]),
    "stray.jsonl": (b'{"text": "x"}\n{"text": "\x92"}\n', ["0x92 at offset 24", "--errors=replace"]),
    "docs.json": (b'[{"text": "x"}]', ["docs.json is JSON as a whole", ".jsonl"]),
    "docs.jsonl.gz": (gzip.compress(b"{}" * 99), ["docs.jsonl.gz is no text but binary"]),
    "docs.zip": (b"PK\x03\x04\x14\0\0\0\x08\0", ["docs.zip is no text but binary"]),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["picture.png is no text but binary"]),
    "latin.txt": (LATIN, ["latin.txt is not UTF-8: byte 0xfc", "convert the file"]),
    "docs.parquet": (b"not parquet", ["docs.parquet, line 0", "Arrow"]),
}


def test_input_that_cannot_be_is_named(tmp_path):
    for name, (content, words) in BAD_INPUTS.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            prepare_text(tmp_path / name, tmp_path / "out")
        assert all(word in str(caught.value) for word in words), (name, str(caught.value))
        assert ("errors=replace" in str(caught.value)) == ("stray" in name)
        assert not (tmp_path / "out").exists()


def test_other_mistakes_of_preparing_are_named(folder, tmp_path):
    source, out = f"--input={folder}", f"--data_dir={tmp_path / 'o'}"
    mistakes = [
        ("--input=PATH",),
        ("no/such does not exist", "--input=no/such"),
        ("/dev/zero has no files", "--input=/dev/zero"),
        ("given twice", "--input=a", "--input=b"),
        ("from 257 to 65536", source, out, "--vocab_size=70000"),
        ("between 0 and 1", source, out, "--val_fraction=1"),
        ("is in the way", source, f"--data_dir={folder}"),
    ]
    for words, *args in mistakes:
        with pytest.raises(ValueError, match=words):
            text_main(args)
    assert not (tmp_path / "o").exists() and not (folder / "lock").exists()


def prepare_slowly(folder: Path, out: Path) -> None:
    """With small files, and so slowly that there is time to kill it."""
    add, prepare_module.SHARD_TOKENS = prepare_module.ShardWriter.add, 2000
    prepare_module.ShardWriter.add = lambda *args: time.sleep(0.01) or add(*args)
    prepare_text(folder, out)


def test_kill_9_and_run_again(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(target=prepare_slowly, args=(folder, out))
    process.start()
    while not (out / "train_00002.bin").exists():
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    (out / "lock").unlink()  # or the next process waits until it is sure
    with pytest.raises(ValueError, match="out is not complete: run the command again"):
        Shards(out, "train", 300, 8)
    done = (out / "train_00000.bin").stat().st_mtime_ns
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 2000)
    prepare_text(folder, out)
    assert (out / "train_00000.bin").stat().st_mtime_ns == done
    prepare_text(folder, tmp_path / "whole")
    a, b = contents(tmp_path / "whole"), contents(out)
    assert len(a) > 6 and a == b | {"meta.json": a["meta.json"]}


def test_the_command_of_a_damaged_dataset_makes_it_whole(folder, tmp_path):
    prepare_text(folder, tmp_path / "my data", "--val_fraction=0.2")
    before, out = contents(tmp_path / "my data"), tmp_path / "moved"
    (tmp_path / "my data").rename(out)  # the command goes where the dataset lies
    os.truncate(out / "train_00000.bin", 100)
    with pytest.raises(ValueError, match="has 100 bytes, but .*: delete .*moved and prepare it again") as caught:
        Shards(out, "train", 300, 8)
    shutil.rmtree(out)
    command = shlex.split(str(caught.value).split("`")[1])
    assert command[:3] == ["python", "-m", "data.text"]
    text_main(command[3:])
    assert contents(out) == before | {"meta.json": (out / "meta.json").read_bytes()}


def test_pydocs_are_pythons_documentation_without_copies(pydocs):
    text = "".join(pydocs)
    assert 1.5e6 < len(text.encode()) < 4e6
    assert len(pydocs) == len(set(pydocs)) and max(map(len, pydocs)) <= 8192
    for item in (random.Random, shutil.copytree, len, dict.setdefault):
        assert inspect.getdoc(item) in text, item
    assert 'The "if" statement is used for conditional execution' in text
