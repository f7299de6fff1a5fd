"""data/: what is written, in which order it is read, and what is said of a damaged dataset."""

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from codes import bits_to_ids, token_bits
from conftest import ROOT, TINY, assert_clean_error, run, texts
from data import prepare as prepare_module
from data.prepare import PrepareConfig, content_hash, prepare
from data.pydocs import documents as pydocs
from data.shards import Shards, shuffled, window_numbers
from data.text import cut_into_parts
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
    meta = {"tokenizer": "by hand", "tokenizer_sha256": digest, "vocab_size": vocab_size,
            "eot_id": 0, "command": "python -m data.text", "files": entries}  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


THREE = {"train_00000.bin": range(100, 110), "train_00001.bin": range(200, 204),
         "train_00002.bin": range(300, 309), "val_00000.bin": range(400, 411)}  # fmt: skip


@pytest.fixture
def three(tmp_path):
    return write_dataset(tmp_path / "three", THREE)


# -------------------------------------------------------------------------------
# reading


def test_windows_of_three_uneven_files_by_hand(three):
    data = Shards(three, "train", 512, block_size=3)
    # 10 tokens hold 3 windows of 3 + 1, 4 hold 1, 9 hold 2; neighbours share a token
    by_hand = [[100, 101, 102, 103], [103, 104, 105, 106], [106, 107, 108, 109],
               [200, 201, 202, 203],
               [300, 301, 302, 303], [303, 304, 305, 306]]  # fmt: skip
    assert data.n_windows == 6 and data.n_tokens == 23
    assert data.windows(np.arange(6)).tolist() == by_hand
    assert data.windows(np.array([5, 0, 3])).tolist() == [by_hand[5], by_hand[0], by_hand[3]]


def test_validation_has_every_token_once_by_hand(three):
    data = Shards(three, "val", 512, block_size=4)
    batches = list(data.every_token_once(batch_size=2))
    assert [x.tolist() for x, _ in batches] == [
        [[0, 400, 401, 402], [403, 404, 405, 406]], [[407, 408, 409, 0]],
    ]  # fmt: skip
    assert [y.tolist() for _, y in batches] == [
        [[400, 401, 402, 403], [404, 405, 406, 407]], [[408, 409, 410, -1]],
    ]  # fmt: skip
    train = Shards(three, "train", 512, block_size=4)
    for limit in (0, 5, 12):
        targets = np.concatenate([y[y >= 0] for _, y in train.every_token_once(2, limit)])
        assert targets.tolist() == [*range(100, 110), *range(200, 204), *range(300, 309)][: limit or 23]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_every_epoch_is_another_shuffle_of_all_windows(n):
    epochs = [shuffled(np.arange(n), n, 5, epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in epochs)
    if n > 10:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(n))
        assert shuffled(np.arange(n), n, 6, 0).tolist() != epochs[0]


def test_a_shuffle_looks_random():
    # The mean of n draws without replacement from 0..N-1, in units of its standard deviation.
    N, n = 100_000, 2_000
    order = shuffled(np.arange(N), N, 1, 0)
    for first in range(0, N, 20_000):
        part = order[first : first + n]
        z = (part.mean() - (N - 1) / 2) / (N / np.sqrt(12 * n))
        assert abs(z) < 4, (first, z)
    steps = np.diff(order)
    assert np.abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02 and (steps == 1).mean() < 0.001


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
    assert bits_to_ids(token_bits(torch.from_numpy(window), 16)).tolist() == ids


# -------------------------------------------------------------------------------
# damaged datasets


def damage_nothing(folder):
    folder.rename(folder.with_name("elsewhere"))


def damage_empty(folder):
    (folder / "train_00001.bin").write_bytes(b"")


def damage_odd(folder):
    with open(folder / "train_00001.bin", "ab") as f:
        f.write(b"x")


def damage_missing(folder):
    (folder / "train_00001.bin").unlink()


def damage_id(folder):
    np.array([200, 201, 600, 203], dtype="<u2").tofile(folder / "train_00001.bin")


def damage_json(folder):
    (folder / "meta.json").write_text('{"tokenizer": ')


def damage_tokenizer(folder):
    text = (folder / "tiktoken.json").read_text()
    (folder / "tiktoken.json").write_text(text.replace("by hand", "another"))


def damage_no_tokenizer(folder):
    (folder / "tiktoken.json").unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_nothing, "three is not there .* `python -m data.text"),
        (damage_empty, "train_00001.bin has 0 bytes, but should have 8 .* `python -m data.text --data_dir="),
        (damage_odd, "train_00001.bin has 9 bytes, but should have 8"),
        (damage_missing, "train_00001.bin is missing"),
        (damage_id, "train_00001.bin: id 600 at token 2 is outside the vocabulary of 512"),
        (damage_json, "meta.json lacks valid JSON"),
        (damage_tokenizer, "tiktoken.json is not the tokenizer of .*meta.json"),
        (damage_no_tokenizer, "tiktoken.json is missing"),
    ],
)
def test_a_damaged_dataset_is_named_with_the_remedy(three, damage, message):
    damage(three)
    with pytest.raises(ValueError, match=message):
        Shards(three, "train", 512, 3).windows(np.arange(6))


def test_an_id_outside_the_vocabulary_is_found_when_read_from_a_large_file(three, monkeypatch):
    monkeypatch.setattr("data.shards.SCAN_TOKENS", 0)
    damage_id(three)
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


def test_train_names_a_missing_dataset_and_the_command(tmp_path):
    result = run("train.py", TINY, f"--data_dir={tmp_path}/no", f"--out_dir={tmp_path}/out")
    assert_clean_error(result, f"{tmp_path}/no", "python -m data.text")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------
# writing

ODD_TEXTS = {
    "bom.txt": b"\xef\xbb\xbfWith a mark.\r\nAnd a second line.\r\n",
    "emoji.txt": "\U0001f600 and <|endoftext|> as text".encode(),  # no final newline
    "empty.txt": b"",
    "carets.txt": b"^" * 100_000,
    "rows.jsonl": b'{"text": "one"}\n\n{"text": "", "id": 1}\n{"text": "caf\\u00e9 <|endoftext|>"}\n',
    "sub/more.txt": ("\n\n".join(texts(300))).encode(),
    ".hidden": b"\xff\xfe not text",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in ODD_TEXTS.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    return tmp_path / "in"


def prepare_text(folder: Path, out: Path, *args: str, **env: str):
    return run("-W", "error", "-m", "data.text", f"--input={folder}", f"--data_dir={out}",
               "--vocab_size=300", *args, **env)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; of meta.json all but the command, which says --threads."""
    found = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
    meta = json.loads(found["meta.json"])
    meta.pop("command")
    return found | {"meta.json": json.dumps(meta).encode()}


def read_documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, by cutting its files at every end-of-text id."""
    encoding, meta = load_encoding(read_spec(folder)), json.loads((folder / "meta.json").read_text())
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


def test_odd_texts_are_kept_as_they_are(folder, tmp_path):
    assert prepare_text(folder, tmp_path / "out").returncode == 0
    train, val = (read_documents(tmp_path / "out", split) for split in ("train", "val"))
    found = train + val
    assert "With a mark.\nAnd a second line.\n" in found
    assert "\U0001f600 and <|endoftext|> as text" in found
    assert "one" in found and "caf\u00e9 <|endoftext|>" in found and "" not in found
    assert "".join(t for t in found if "^" in t) == "^" * 100_000
    assert sorted("".join(t for t in found if "Document" in t)) == sorted("\n\n".join(texts(300)))
    assert not set(train) & set(val) and val
    size = sum(len(t.encode()) for t in found)
    assert len("".join(val).encode()) >= 0.05 * size


def test_threads_locale_and_a_second_run_change_no_byte(folder, tmp_path):
    for name, args, env in [("a", ["--threads=1"], {}), ("b", ["--threads=2"], {}),
                            ("c", [], {"LC_ALL": "C", "PYTHONUTF8": "0"})]:  # fmt: skip
        result = prepare_text(folder, tmp_path / name, *args, **env)
        assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    again = prepare_text(folder, tmp_path / "a", "--threads=1")
    assert again.returncode == 0 and "is there already" in again.stdout


def test_documents_and_shards_do_not_depend_on_batches(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 3000)
    for name, batch in (("a", 100), ("b", 10**6)):
        monkeypatch.setattr(prepare_module, "BATCH_BYTES", batch)
        cfg = PrepareConfig(data_dir=str(tmp_path / name), vocab_size=300)
        prepare(cfg, lambda: texts(300), "a test", "no command")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    assert len(meta["files"]) > 3
    assert sorted(read_documents(tmp_path / "a", "train") + read_documents(tmp_path / "a", "val")) == sorted(
        texts(300)
    )


def test_copies_of_a_document_stay_on_one_side(tmp_path):
    cfg = PrepareConfig(data_dir=str(tmp_path / "d"), vocab_size=300, val_fraction=0.3)
    prepare(cfg, lambda: texts(100) * 3, "a test", "no command")
    sides = [read_documents(tmp_path / "d", split) for split in ("train", "val")]
    assert not set(sides[0]) & set(sides[1])
    assert max(map(content_hash, sides[1])) < min(map(content_hash, sides[0]))


def test_a_stray_byte_is_named_or_replaced(folder, tmp_path):
    (folder / "stray.txt").write_bytes("é".encode() * 600_000 + b"don\x92t")
    result = prepare_text(folder, tmp_path / "out")
    assert_clean_error(result, "stray.txt", "0x92", "offset 1200003", "--errors=replace")
    assert not (tmp_path / "out").exists()
    assert prepare_text(folder, tmp_path / "out", "--errors=replace").returncode == 0
    both = read_documents(tmp_path / "out", "train") + read_documents(tmp_path / "out", "val")
    assert any("don\ufffdt" in t for t in both)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl, line 2", "not JSON"]),
        ("a.jsonl", b'{"content": "x", "id": 3}\n', ["a.jsonl, line 1", "no text field", "content, id"]),
        ("a.jsonl", b"[" * 200_000, ["line 1", "not JSON"]),
        ("a.jsonl", b'{"text": 3}\n', ["line 1", "no text field"]),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["line 1", "surrogate", "--errors=replace"]),
        ("a.txt", b"short", ["found 1 different documents", "at least two"]),
        ("a.txt", b"", ["found 0 different documents"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_input_that_cannot_be_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    assert_clean_error(prepare_text(tmp_path / name, tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_other_mistakes_of_preparing_are_named(folder, tmp_path):
    assert_clean_error(run("-m", "data.text"), "--input=PATH")
    assert_clean_error(run("-m", "data.text", "--input=no/such"), "no/such does not exist")
    assert_clean_error(run("-m", "data.text", "--input=/dev/zero"), "neither a file nor a folder")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "to").symlink_to(folder)
    assert_clean_error(run("-m", "data.text", f"--input={tmp_path / 'links'}"), "has no files")
    assert_clean_error(prepare_text(folder, tmp_path / "o", "--vocab_size=70000"), "from 257 to 65536")
    assert_clean_error(prepare_text(folder, tmp_path / "o", "--vocab_size=30000"), "only enough words for")
    assert_clean_error(prepare_text(folder, tmp_path / "o", "--val_fraction=1"), "between 0 and 1")
    assert_clean_error(prepare_text(folder, folder), "is in the way")
    assert prepare_text(folder, tmp_path / "o").returncode == 0
    before = contents(tmp_path / "o")
    assert_clean_error(prepare_text(folder, tmp_path / "o", "--vocab_size=280"), "another dataset")
    (folder / "new.txt").write_text("something new")
    assert_clean_error(prepare_text(folder, tmp_path / "o"), "another dataset")
    assert contents(tmp_path / "o") == before


def test_a_full_disk_is_noticed_first(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="of disk, 0.0 GB are free"):
        prepare(PrepareConfig(data_dir=str(tmp_path / "d"), vocab_size=300), lambda: texts(99), "", "")
    assert list(tmp_path.glob("d/*")) == []


def start_text(folder: Path, out: Path, *args: str) -> subprocess.Popen:
    args = [f"--input={folder}", f"--data_dir={out}", "--vocab_size=300", *args]
    return subprocess.Popen([sys.executable, "-m", "data.text", *args], cwd=ROOT, stdout=subprocess.DEVNULL)


def test_killed_and_run_again_gives_the_same_bytes(folder, tmp_path):
    (folder / "large.txt").write_text("\n\n".join(texts(3000)))
    prepare_text(folder, tmp_path / "a")
    kills = 0
    for _ in range(3):
        process = start_text(folder, tmp_path / "b")
        while process.poll() is None and not list(tmp_path.glob("b/.partial-*/*.bin")):
            time.sleep(0.001)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        if (tmp_path / "b" / "meta.json").exists():
            break  # it was faster than the kill
    assert prepare_text(folder, tmp_path / "b").returncode == 0
    assert kills > 0 and contents(tmp_path / "a") == contents(tmp_path / "b")


def test_two_processes_at_once_give_the_same_bytes(folder, tmp_path):
    (folder / "large.txt").write_text("\n\n".join(texts(3000)))
    both = [start_text(folder, tmp_path / "b", f"--threads={n}") for n in (1, 2)]
    assert [process.wait() for process in both] == [0, 0]
    prepare_text(folder, tmp_path / "a")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_leftovers_of_killed_runs_go_and_nothing_else_does(tmp_path):
    cfg, host = PrepareConfig(data_dir=str(tmp_path / "d"), vocab_size=300), socket.gethostname()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    names = {f".partial-{host}-{process.pid}": 0, f".partial-{host}-{os.getppid()}": 0,
             ".partial-elsewhere-1": 0, ".partial-elsewhere-2": 48 * 3600}  # fmt: skip
    for name, age in names.items():
        (tmp_path / "d" / name).mkdir(parents=True)
        os.utime(tmp_path / "d" / name, (time.time() - age,) * 2)
    (tmp_path / ".d.mine").mkdir()  # a folder of the user's beside it
    os.utime(tmp_path / ".d.mine", (0, 0))
    prepare(cfg, lambda: texts(99), "", "")
    left = {p.name for p in (tmp_path / "d").iterdir() if p.is_dir()}
    assert left == {f".partial-{host}-{os.getppid()}", ".partial-elsewhere-1"}
    assert (tmp_path / ".d.mine").exists()


def test_a_link_to_a_folder_can_be_the_target(folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert prepare_text(folder, tmp_path / "link").returncode == 0
    assert (tmp_path / "real" / "meta.json").exists() and (tmp_path / "link").is_symlink()


def test_the_command_of_a_damaged_dataset_makes_it_whole(folder, tmp_path):
    out = tmp_path / "my data"
    assert prepare_text(folder, out, "--val_fraction=0.2").returncode == 0
    before = contents(out)
    with open(out / "train_00000.bin", "r+b") as f:
        f.truncate(100)
    with pytest.raises(ValueError) as caught:
        Shards(out, "train", 300, 8)
    assert_repaired(caught, out, before)
    ids = np.fromfile(out / "train_00000.bin", dtype="<u2")
    ids[7] = 60000
    ids.tofile(out / "train_00000.bin")
    out.rename(tmp_path / "moved")  # the command goes where the dataset lies
    with pytest.raises(ValueError) as caught:
        Shards(tmp_path / "moved", "train", 300, 8).windows(np.array([0]))
    assert_repaired(caught, tmp_path / "moved", before)


def assert_repaired(caught, out: Path, before: dict) -> None:
    command = str(caught.value).split("`")[1]
    assert shlex.split(command)[:3] == ["python", "-m", "data.text"]
    assert run(*shlex.split(command)[1:]).returncode == 0
    assert contents(out) == before


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = (
        "import sys, resource; sys.path.insert(0, {root!r})\n"
        "from data.prepare import *\n"
        "import data.prepare as p; p.BATCH_BYTES = 100_000\n"
        "docs = lambda: ('document %d ' % i + 'of many words ' * 700 for i in range({n}))\n"
        "prepare(PrepareConfig(data_dir={out!r}, vocab_size=300), docs, '', '')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peak = {}
    for n in (100, 2000):  # 1 MB and 20 MB
        result = run("-c", code.format(root=str(ROOT), n=n, out=str(tmp_path / str(n))))
        assert result.returncode == 0, result.stderr
        peak[n] = int(result.stdout.split()[-1])
    assert peak[2000] - peak[100] < 8_000, f"{peak} KiB: it grew by more than 8 MB"


def test_parts_of_a_long_text():
    import io

    text = ("line\n" * 1000 + "\n") * 20  # blank lines every 5,001 characters
    parts = list(cut_into_parts(io.StringIO(text)))
    assert "".join(parts) == text and all(p.endswith("\n\n") for p in parts if p)
    assert max(map(len, parts)) <= 16384
    assert [len(p) for p in cut_into_parts(io.StringIO("^" * 40000))] == [16384, 16384, 7232]


# -------------------------------------------------------------------------------
# the default corpus


def test_pydocs_are_pythons_documentation_without_copies():
    found = list(pydocs())
    text = "\n\n".join(found)
    assert 1.5e6 < len(text.encode()) < 4e6
    assert len(found) == len(set(found)) and found == list(pydocs())
    import argparse
    import bisect
    import inspect

    for item in (argparse.ArgumentParser, bisect.insort_left, len, dict.setdefault):
        assert inspect.getdoc(item) in text, item
    assert "The \"if\" statement is used for conditional execution" in text
