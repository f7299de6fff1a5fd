"""data/fineweb_edu.py: what it writes, whatever happens to the network and the process."""

import hashlib
import itertools
import json
import re
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import texts
from test_data import contents, read_documents

from config import load_config
from data import fineweb_edu, tokenizers
from data import prepare as prepare_module
from data.fineweb_edu import REPO, REVISION, FinewebConfig, main, sample_for

SHARD = 2000  # tokens
SPEC = tokenizers.bpe_spec(tokenizers.count_words(texts(50)), 340)  # stands for GPT-2's


def make_text(i: int) -> str:
    """Documents of all sizes; every tenth has something odd in it."""
    odd = ["", "  \n", f"<|endoftext|> as text {i}", f"{i}\r\nline\r\n", f"{i} caf\u00e9", f"\ufeff{i}"]
    words = " ".join(f"word{(i * k) % 97} and" for k in range(5 + i % 50))
    return f"Document {i}: {words}" if i % 10 else odd[i // 10 % len(odd)]


DOCUMENTS = [{"text": make_text(i), "id": f"<urn:uuid:{i}>", "score": i / 7} for i in range(300)]
FILES = [DOCUMENTS[:120], DOCUMENTS[120:121], DOCUMENTS[121:]]


@pytest.fixture
def hub(source, monkeypatch) -> list[tuple]:
    """Local files, GPT-2's stand-in and small sizes; what the hub is asked for."""
    real, asked = datasets.load_dataset, []

    def load_dataset(repo: str, name: str, revision: str, **options) -> datasets.IterableDataset:
        asked.append((repo, name, revision))
        files = sorted(map(str, source.glob("*.parquet")))
        return real("parquet", data_files=files, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(tokenizers, "gpt2_spec", lambda: SPEC)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", SHARD)
    monkeypatch.setattr(prepare_module, "BATCH_CHARS", 1500)
    monkeypatch.setattr(fineweb_edu, "ROWS", 30)
    return asked


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for i, rows in enumerate(FILES):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{i:03}.parquet", row_group_size=40)
    return folder


def expected(tokens: int, val_fraction: float = 0.2) -> dict[str, bytes]:
    """The files by a plain loop."""
    encoding = tokenizers.load_encoding(SPEC)
    splits, written = {"train": [[]], "val": [[]]}, 0
    for row in DOCUMENTS:
        text = row["text"].removeprefix("\ufeff").replace("\r\n", "\n")
        if not text.strip():
            continue
        if written >= tokens:
            break
        number = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "little")
        split = "val" if number < val_fraction * 2**64 else "train"
        if len(splits[split][-1]) >= SHARD:
            splits[split].append([])
        ids = encoding.encode_ordinary(text) + [339]
        splits[split][-1] += ids
        written += len(ids) if split == "train" else 0
    return {
        f"{split}_{i:05}.bin": np.array(ids, dtype="<u2").tobytes()
        for split, files in splits.items()
        for i, ids in enumerate(files)
    }


def argv(out: Path, tokens: int = 15_000) -> list[str]:
    return [f"--data_dir={out}", f"--tokens={tokens}", "--val_fraction=0.2"]


def assert_same(out: Path, tokens: int = 15_000) -> None:
    found, files = contents(out), expected(tokens)
    assert set(found) == {*files, "meta.json", "tiktoken.json", "SHA256SUMS"}
    for name in files:
        assert found[name] == files[name], name


def test_the_bytes_are_those_of_a_plain_loop_for_any_amount(hub, tmp_path, capsys):
    files = expected(15_000)
    assert len(files) > 8 and "val_00001.bin" in files
    exact = sum(len(files[name]) // 2 for name in files if "train" in name)  # no token more
    sides = []
    for tokens in (exact, 10**6):
        main(argv(tmp_path / str(tokens), tokens))
        assert_same(tmp_path / str(tokens), tokens)
        sides += [set(read_documents(tmp_path / str(tokens), split)) for split in ("train", "val")]
    assert sides[0] < sides[2] and sides[1] < sides[3] and not sides[2] & sides[3]
    assert {"<|endoftext|> as text 20", "30\nline\n", "40 caf\u00e9", "50"} <= sides[0] | sides[1]
    assert hub == [(REPO, "sample-10BT", REVISION)] * 2
    assert "of 1,000,000 training tokens" in capsys.readouterr().out


def test_the_smallest_sample_that_fits_is_read(tmp_path):
    samples = {1: "10BT", 10**10: "10BT", 10**10 + 1: "100BT", 10**11: "100BT", 3 * 10**11: "350BT"}
    assert {n: sample_for(n) for n in samples} == {n: f"sample-{s}" for n, s in samples.items()}
    assert sample_for(10**12) == "default"
    assert load_config(FinewebConfig, {"tokens": "100e9"}).tokens == 10**11
    for given in ({"tokens": "0"}, {"val_fraction": "1"}, {"threads": "-1"}, {"tokens": "1.5"}):
        with pytest.raises(ValueError, match=next(iter(given))):
            load_config(FinewebConfig, given)
    with pytest.raises(ValueError, match="needs up to 200000.0 GB of disk, .* make room"):
        main([f"--data_dir={tmp_path / 'x'}", "--tokens=1e14"])


def test_a_connection_that_breaks_changes_no_byte(hub, tmp_path, monkeypatch, capsys):
    waits, real, left = [], fineweb_edu.read, [0, 0, 1, 60, 20]
    monkeypatch.setattr(time, "sleep", waits.append)

    def read(tokens: int, file: int, row: int):
        for n, document in enumerate(real(tokens, file, row)):
            if left and n == left[0]:
                raise ConnectionError(f"broken off after {left.pop(0)}\nrows")
            yield document

    monkeypatch.setattr(fineweb_edu, "read", read)
    main(argv(tmp_path / "out"))
    assert_same(tmp_path / "out")
    printed = rf"cannot read {REPO} \(ConnectionError: 'broken off after \d+\\nrows'\)"  # in one line
    assert len(re.findall(printed, capsys.readouterr().out)) == 5
    assert [s for s in waits if s >= 1] == [1, 2, 1, 1, 1], "after progress the count begins anew"


def test_a_network_that_does_not_come_back_is_one_sentence(hub, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(datasets, "load_dataset", None)  # every call fails
    with pytest.raises(ValueError, match="check the network; the same command continues"):
        main(argv(tmp_path / "out"))
    assert waits == [1, 2, 4] and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="check the network"):  # once begun, it is more patient
        next(fineweb_edu.documents(1000, [0, 5]))
    assert waits[3:] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_command_that_was_interrupted_continues(hub, tmp_path, monkeypatch):
    out, real = tmp_path / "out", fineweb_edu.read

    def read(*args):
        yield from itertools.islice(real(*args), 60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fineweb_edu, "read", read)
        with pytest.raises(KeyboardInterrupt):
            main(argv(out))
    assert json.loads((out / "progress.json").read_text())["place"][1] > 0
    with pytest.raises(ValueError, match="holds another dataset or a part of it"):
        main(argv(out, 10_000))
    done = (out / "train_00000.bin").stat().st_mtime_ns
    main(argv(out))
    assert_same(out)
    assert (out / "train_00000.bin").stat().st_mtime_ns == done
