"""data/fineweb_edu.py: which bytes it writes, whatever happens to the source, the disk and the process."""

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken

from config import load_config
from conftest import ROOT, assert_clean_error, run
from data import fineweb_edu, shards, tokenizers
from data import prepare as prepare_module
from data.fineweb_edu import REPO, REVISION, FinewebConfig, prepare, sample_for
from test_data import read_documents

SHARD = 2000  # tokens
HUB_FOLDER = "sample/10BT"


def make_text(i: int) -> str:
    """Documents of all sizes; every tenth has something odd in it."""
    odd = ["", "  \n", f"<|endoftext|> as text {i}", f"{i}\r\nline\r\n", f"{i} caf\u00e9 \U0001f600",
           f"\ufeff{i}"]  # fmt: skip
    words = " ".join(f"word{(i * k) % 97} and" for k in range(5 + i % 50))
    return f"Document {i}: {words}" if i % 10 else odd[i // 10 % len(odd)]


ROWS = [{"text": make_text(i), "id": f"<urn:uuid:{i}>", "dump": "x", "score": i / 7} for i in range(400)]
FILES = {f"{i:03}": ROWS[a:b] for i, (a, b) in enumerate([(0, 150), (150, 151), (151, 400)])}


def write_source(folder: Path, files: dict[str, list[dict]] = FILES, kind: str = "parquet") -> Path:
    folder.mkdir(parents=True)
    for name, rows in files.items():
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=40)
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def expected(rows: list[dict], tokens: int, val_fraction: float) -> dict[str, bytes]:
    """The files by a plain loop: GPT-2's own encoding of each document, whose ids above 49,150 are split."""
    encoding = tokenizers.load_encoding(tokenizers.gpt2_spec())
    splits, written = {"train": [[]], "val": [[]]}, 0
    for row in rows:
        text = row["text"].removeprefix("\ufeff").replace("\r\n", "\n")
        if not text.strip():
            continue
        number = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "little")
        split = "val" if number < val_fraction * 2**64 else "train"
        if len(splits[split][-1]) >= SHARD:
            splits[split].append([])
        ids = encoding.encode_ordinary(text) + [49151]
        splits[split][-1] += ids
        written += len(ids) if split == "train" else 0
        if written >= tokens:
            break
    return {
        f"{split}_{i:05}.bin": np.array(ids, dtype="<u2").tobytes()
        for split, files in splits.items() for i, ids in enumerate(files)
    }  # fmt: skip


def bins(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.bin"))}


@pytest.fixture(scope="session")
def spec() -> dict:
    return tokenizers.gpt2_spec()


@pytest.fixture(autouse=True)
def small(monkeypatch, spec):
    """Small files, batches and tables; and the vocabulary is read once."""
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", SHARD)
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 1500)
    monkeypatch.setattr(fineweb_edu, "ROWS", 30)
    encoding = tokenizers.load_encoding(spec)
    monkeypatch.setattr(tokenizers, "gpt2_spec", lambda: spec)
    monkeypatch.setattr(tokenizers, "load_encoding", lambda _: encoding)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "parquet")


@pytest.fixture(scope="session")
def reference() -> dict[str, bytes]:
    return expected(ROWS, 20_000, 0.2)


def config(out: Path, source: Path | str, **changes) -> FinewebConfig:
    values = dict(data_dir=str(out), source=str(source), tokens=20_000, val_fraction=0.2, threads=2)
    return FinewebConfig(**(values | changes))


def assert_same(out: Path, reference: dict[str, bytes]) -> None:
    """The bytes, the counts and the hashes are right, and nothing else is in the folder."""
    found = bins(out)
    assert list(found) == list(reference)
    for name in reference:
        assert found[name] == reference[name], name
    meta = json.loads((out / "meta.json").read_text())
    for entry in meta["files"]:
        ids = np.frombuffer(found[entry["name"]], dtype="<u2")
        assert entry["sha256"] == hashlib.sha256(found[entry["name"]]).hexdigest()
        assert (entry["tokens"], entry["documents"]) == (len(ids), (ids == 49151).sum())
    assert {p.name for p in out.iterdir()} == {*found, "meta.json", "tiktoken.json"}


# -------------------------------------------------------------------------------
# what is written


@pytest.mark.parametrize("kind, threads", [("parquet", 1), ("parquet", 2), ("jsonl", 2)])
def test_the_bytes_are_those_of_a_plain_loop(kind, threads, tmp_path, reference):
    source = write_source(tmp_path / "in", kind=kind)
    assert len(reference) > 10 and sum("val" in name for name in reference) > 1
    prepare(config(tmp_path / "out", source, threads=threads))
    assert_same(tmp_path / "out", reference)
    read = read_documents(tmp_path / "out", "train") + read_documents(tmp_path / "out", "val")
    assert {"<|endoftext|> as text 20", "30\nline\n", "40 caf\u00e9 \U0001f600", "50"} <= set(read)


def test_ids_are_gpt2s_own_wherever_they_exist(source, tmp_path):
    prepare(config(tmp_path / "out", source))
    gpt2 = tiktoken.get_encoding("gpt2")
    files = [content for name, content in bins(tmp_path / "out").items() if "train" in name]
    ids = np.frombuffer(b"".join(files), dtype="<u2")
    documents = read_documents(tmp_path / "out", "train")
    theirs = sum((gpt2.encode_ordinary(text) + [49151] for text in documents), [])
    assert max(theirs) <= 49151 and ids.tolist() == theirs


def test_a_document_is_on_one_side_for_any_amount_and_order(source, tmp_path):
    reordered = write_source(tmp_path / "in", {f"{9 - i}": rows for i, rows in enumerate(FILES.values())})
    sides = {}
    for name, where, tokens in (("a", source, 5000), ("b", source, 20_000), ("c", reordered, 20_000)):
        prepare(config(tmp_path / name, where, tokens=tokens))
        sides[name] = [set(read_documents(tmp_path / name, split)) for split in ("train", "val")]
    for other in ("b", "c"):
        assert not sides["a"][0] & sides[other][1] and not sides["a"][1] & sides[other][0]
        assert len((sides["a"][1] | sides["b"][1]) & sides[other][1]) > 10
    assert sides["a"][0] < sides["b"][0] and sides["a"][1] < sides["b"][1]


def test_it_stops_behind_the_wish_or_where_the_source_ends(source, tmp_path, capsys):
    prepare(config(tmp_path / "a", source, tokens=3000))
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    encoding, documents = tokenizers.load_encoding(None), read_documents(tmp_path / "a", "train")
    last = len(encoding.encode_ordinary(documents[-1])) + 1
    written = sum(entry["tokens"] for entry in meta["files"] if "train" in entry["name"])
    assert written - last < 3000 <= written
    assert "the source ends" not in capsys.readouterr().out
    prepare(config(tmp_path / "b", source, tokens=10**6))
    assert "the source ends after" in capsys.readouterr().out
    assert_same(tmp_path / "b", expected(ROWS, 10**6, 0.2))


def test_the_smallest_sample_that_fits_is_read():
    wishes = {1: "sample-10BT", 10**10: "sample-10BT", 10**10 + 1: "sample-100BT", 10**11: "sample-100BT",
              3 * 10**11: "sample-350BT", 10**12: "default"}  # fmt: skip
    assert {tokens: sample_for(tokens) for tokens in wishes} == wishes
    cfg = load_config(FinewebConfig, [], {"tokens": "100e9"})
    assert cfg.tokens == 10**11
    for given in ({"tokens": "0"}, {"val_fraction": "1"}, {"threads": "-1"}, {"tokens": "1.5"}):
        with pytest.raises(ValueError, match=next(iter(given))):
            load_config(FinewebConfig, [], given)


# -------------------------------------------------------------------------------
# sources that cannot be

BAD_FILES = {
    "no files": ({}, "has no files that end in"),
    "mixed": ({"a.jsonl": b"{}", "b.parquet": b"x"}, "of one kind, .parquet or .jsonl, got .jsonl, .parquet"),
    "no text": ({"a.jsonl": b'{"content": "x", "id": "1"}\n'}, r"no column text, .* \(it has: content, id\)"),
    "no id": ({"a.jsonl": b'{"text": "x"}\n'}, r"no column id, .* \(it has: text\)"),
    "empty id": ({"a.jsonl": b'{"text": "x", "id": "1"}\n{"text": "x", "id": ""}\n'},
                 "a.jsonl: row 1 .* id ''"),
    "null id": ({"a.jsonl": b'{"text": "x", "id": "1"}\n{"text": "x"}\n'}, "a.jsonl: row 1 .* id None"),
    "null text": ({"a.jsonl": b'{"text": null, "id": "1"}\n'}, "a.jsonl: row 0 .* text None"),
    "no parquet": ({"a.parquet": b"not parquet"}, "cannot read .*ArrowInvalid"),
    "no json": ({"a.jsonl": b'{"text": \n'}, "cannot read .*a.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_source_that_cannot_be_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", None)  # errors of local files are not tried again
    (tmp_path / "in").mkdir()
    files, message = BAD_FILES[name]
    for file, content in files.items():
        (tmp_path / "in" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(config(tmp_path / "out", tmp_path / "in"))
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_named_and_change_nothing(source, tmp_path, reference, capsys):
    with pytest.raises(ValueError, match="no/such does not exist"):
        prepare(config(tmp_path / "x", "no/such"))
    with pytest.raises(ValueError, match="both are needed: use more --tokens"):
        prepare(config(tmp_path / "x", source, tokens=100, val_fraction=0.001))
    with pytest.raises(ValueError, match="is in the way"):
        prepare(config(source, source))
    prepare(config(tmp_path / "out", source))
    for change in ({"tokens": 30_000}, {"val_fraction": 0.1}, {"source": str(source / "000.parquet")}):
        with pytest.raises(ValueError, match="holds another dataset"):
            prepare(config(**{"out": tmp_path / "out", "source": source} | change))
    capsys.readouterr()
    prepare(config(tmp_path / "out", source, threads=1))
    assert "is there already" in capsys.readouterr().out
    assert_same(tmp_path / "out", reference)
    (tmp_path / "out" / "train_00001.bin").unlink()
    with pytest.raises(ValueError, match="train_00001.bin is missing"):
        prepare(config(tmp_path / "out", source))


# -------------------------------------------------------------------------------
# interruptions


class Killed(BaseException):
    """Stands for a kill: no code of ours catches it."""


def test_a_kill_at_any_step_changes_no_byte(source, tmp_path, monkeypatch):
    """Every file that is moved to its place is a step; the kill comes just before or just behind it."""
    reference = expected(ROWS, 9000, 0.2)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and no kill undoes what the system has been given
    real, n_steps = os.replace, 0

    def count(a, b):
        nonlocal n_steps
        n_steps += 1
        real(a, b)

    monkeypatch.setattr(os, "replace", count)
    prepare(config(tmp_path / "whole", source, tokens=9000))
    assert n_steps > 10
    out = tmp_path / "out"
    for step in range(2 * n_steps):
        left = [step // 2]

        def replace(a, b, left=left, behind=step % 2):
            left[0] -= 1
            if left[0] == -1:
                if behind:
                    real(a, b)
                raise Killed
            real(a, b)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            prepare(config(out, source, tokens=9000))
        monkeypatch.setattr(os, "replace", real)
        prepare(config(out, source, tokens=9000, threads=1 + step % 3))
        assert_same(out, reference)
        for path in out.iterdir():
            path.unlink()


PROGRAM = (
    "import data.prepare as p; from config import run_cli; from data.fineweb_edu import main\n"
    f"p.SHARD_TOKENS, p.BATCH_BYTES = {SHARD}, 1500\n"
    "{more}\n"
    "run_cli(main, 'data.fineweb_edu')"
)
SLOW = "import time, data.fineweb_edu as f; old = f.clean; f.clean = lambda t: time.sleep(0.005) or old(t)"


def start(out: Path, source: Path | str, more: str = "", **env) -> subprocess.Popen:
    args = [f"--data_dir={out}", f"--source={source}", "--tokens=20000", "--val_fraction=0.2"]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(more=more), *args], cwd=ROOT, text=True, env=os.environ | env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_kill_9_and_ctrl_c_and_a_second_process(source, tmp_path, reference, capsys):
    out = tmp_path / "out"
    process = start(out, source, SLOW)
    wait_for(out / "train_00001.bin", process)
    with pytest.raises(ValueError, match=f"process {process.pid} is at work in"):
        prepare(config(out, source))
    process.kill()
    process.communicate()
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("train_*.bin")}
    assert not (out / "meta.json").exists()
    with pytest.raises(ValueError, match="holds another dataset"):
        prepare(config(out, source, tokens=10_000))

    process = start(out, source, SLOW)
    wait_for(out / f"train_{len(before) + 1:05}.bin", process)
    process.send_signal(signal.SIGINT)
    t0 = time.time()
    text = process.communicate()
    assert process.returncode == 130 and time.time() - t0 < 5
    assert "interrupted: the same command goes on" in text[1] and "Traceback" not in text[1], text
    assert not (out / "lock").exists() and not (out / "meta.json").exists()
    prepare(config(out, source))
    assert_same(out, reference)
    finished = list(before)[:1]
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == {n: before[n] for n in finished}


def test_a_full_disk_is_one_sentence_and_loses_nothing(source, tmp_path, reference, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".partial-train_00002.bin").symlink_to("/dev/full")  # every write says: no space left
    with pytest.raises(ValueError, match="disk of .* is full: .* the same command goes on"):
        prepare(config(out, source))
    assert {"train_00001.bin", "progress.json"} <= {p.name for p in out.iterdir()}
    (out / ".partial-train_00002.bin").unlink()
    prepare(config(out, source))
    assert_same(out, reference)
    usage = type("Usage", (), {"free": 2 * 20_000 - 1})
    monkeypatch.setattr(fineweb_edu.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="needs 0.0 GB more of disk"):
        prepare(config(tmp_path / "new" / "deep", source))
    assert not (tmp_path / "new").exists()


def test_files_that_changed_meanwhile_are_noticed(source, tmp_path, monkeypatch):
    files = write_source(tmp_path / "in")
    real = fineweb_edu.save_json
    monkeypatch.setattr(fineweb_edu, "save_json", lambda *args: real(*args) or stop())

    def stop():
        raise Killed

    with pytest.raises(Killed):
        prepare(config(tmp_path / "out", files))
    (files / "000.parquet").rename(files / "009.parquet")
    with pytest.raises(ValueError, match="file 0 of .* is not .*000.parquet any more"):
        prepare(config(tmp_path / "out", files))


# -------------------------------------------------------------------------------
# the network


class Server:
    """
    Files by HTTP, with ranges, at the addresses of the Hugging Face hub too.
    faults: the first GET with a range that has these words meets "cut", half an answer, or "deny", 403.
    """

    def __init__(self, folder: Path, faults: dict[str, str] = {}, port: int = 0):
        self.folder, self.faults, self.log = folder, dict(faults), []
        handler = type("Handler", (Handler,), {"ours": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def readme(self) -> bytes:
        configs = "".join(f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {path}/*\n"
                          for name, path in [("default", "data/*"), ("sample-10BT", HUB_FOLDER)])  # fmt: skip
        return f"---\nconfigs:\n{configs}---\n".encode()

    def entries(self) -> list[dict]:
        paths = sorted(self.folder.glob("*.parquet"))
        files = [{"type": "file", "path": f"{folder}/{p.name}", "size": p.stat().st_size, "oid": p.name}
                 for folder in ("data/CC", HUB_FOLDER) for p in paths]  # fmt: skip
        folders = ["data", "data/CC", "sample", HUB_FOLDER]
        return [{"type": "directory", "path": path, "oid": path} for path in folders] + files

    def answer(self, path: str, body: bytes) -> bytes | list | dict | None:
        api, files = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/{REVISION}/"
        path = path.replace("%2F", "/")
        if path.startswith(files):
            name = path.removeprefix(files)
            if name == "README.md":
                return self.readme()
            path = name.removeprefix(HUB_FOLDER)
        if path.startswith(f"{api}/revision/{REVISION}"):
            siblings = [{"rfilename": "README.md"}, *({"rfilename": e["path"]} for e in self.entries())]
            return {"id": REPO, "sha": REVISION, "siblings": siblings, "private": False, "tags": []}
        if path.startswith(f"{api}/tree/{REVISION}"):
            below = path.removeprefix(f"{api}/tree/{REVISION}").strip("/")
            return [e for e in self.entries() if below in ("", *map(str, Path(e["path"]).parents))]
        if path.startswith(f"{api}/paths-info/{REVISION}"):
            wanted = body.decode().replace("%2F", "/")
            return [e for e in self.entries() if e["path"] in wanted]
        file = self.folder / path.strip("/")
        return file.read_bytes() if path.strip("/") and file.is_file() else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault, ranged = "", self.headers.get("Range", "")
        for sign in list(self.ours.faults):
            if self.command == "GET" and ranged and sign in f"{self.path} {ranged}":
                fault = self.ours.faults.pop(sign)
        self.ours.log.append(self.path)
        self.close_connection = bool(fault)
        found = None if fault == "deny" else self.ours.answer(self.path.partition("?")[0], body)
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        start, end = 0, len(content)
        if isinstance(found, bytes) and ranged:
            first, last = ranged.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last or end), end - 1) + 1
        code = 206 if end - start < len(content) else 200
        self.send_response(403 if fault == "deny" else 404 if found is None else code)
        self.send_header("Content-Length", end - start)
        kind = "octet-stream" if isinstance(found, bytes) else "json"
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):  # the reader may have left
                self.wfile.write(content[start : (start + end) // 2 if fault == "cut" else end])

    do_HEAD = do_POST = do_GET


@contextmanager
def served(folder: Path, *args):
    server = Server(folder, *args)
    threading.Thread(target=server.server.serve_forever, daemon=True).start()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="session")
def wide(tmp_path_factory) -> Path:
    """One file so large that it is read in many requests, because of a column that nobody asked for."""
    random = np.random.default_rng(0)
    rows = [row | {"ballast": random.bytes(60_000)} for row in ROWS]
    return write_source(tmp_path_factory.mktemp("wide") / "in", {"wide": rows})


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Instead of waiting, the seconds are noted."""
    noted = []
    monkeypatch.setattr(time, "sleep", noted.append)
    return noted


def test_a_broken_network_changes_no_byte(wide, tmp_path, reference, waits, capsys):
    faults = {"bytes=4-": "cut", "bytes=5": "cut", "bytes=12": "cut", "bytes=19": "deny"}
    with served(wide, faults) as server:
        prepare(config(tmp_path / "out", f"{server.url}/wide.parquet"))
    assert_same(tmp_path / "out", reference)
    assert not server.faults
    assert list(filter(None, waits)) == [1, 1, 1, 1], "after progress the count begins anew"
    assert f"cannot read {server.url}/wide.parquet" in capsys.readouterr().out


def test_a_server_that_comes_back_and_one_that_does_not(source, tmp_path, waits, monkeypatch):
    with served(source) as server:
        port = server.server.server_port
    url = f"{server.url}/002.parquet"  # nobody listens there any more
    with pytest.raises(ValueError, match="5 times: check the network; the same command goes on"):
        prepare(config(tmp_path / "out", url))
    assert list(filter(None, waits)) == [1, 2, 4, 8] and not (tmp_path / "out").exists()
    waits.clear()
    with pytest.raises(ValueError, match="10 times: check the network"):  # when something is done, patience pays
        next(fineweb_edu.documents(config(tmp_path / "out", url), 0, 5))
    assert list(filter(None, waits)) == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    back = []
    monkeypatch.setattr(time, "sleep", lambda t: t == 4 and back.append(Server(source, {}, port)))
    threading.Thread(target=lambda: serve_when(back), daemon=True).start()
    prepare(config(tmp_path / "out", url))
    assert_same(tmp_path / "out", expected(FILES["002"], 20_000, 0.2))
    back[0].server.shutdown()
    back[0].server.server_close()


def serve_when(servers: list[Server]) -> None:
    while not servers:
        threading.Event().wait(0.01)
    servers[0].server.serve_forever()


def test_the_hub_is_read_as_it_is_served(source, tmp_path, reference):
    """The whole way: README, configurations, listing, ranges of parquet files; with a break in the middle."""
    with served(source, {"000.parquet": "cut", "002.parquet": "deny"}) as hub:
        process = start(tmp_path / "out", "", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hub"))
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert_same(tmp_path / "out", reference)
    assert f"/datasets/{REPO}/resolve/{REVISION}/{HUB_FOLDER}/002.parquet" in hub.log
    assert f"cannot read {REPO}" in out and "trying again in 1 s" in out and not hub.faults


# -------------------------------------------------------------------------------
# verifying


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def put(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGE = {
    "nothing": (lambda d: None, []),
    "flipped": (lambda d: flip(d / "train_00001.bin"), ["train_00001.bin has other bytes"]),
    "cut": (lambda d: os.truncate(d / "val_00000.bin", 100), ["val_00000.bin has 100 bytes, but should"]),
    "missing": (lambda d: (d / "train_00002.bin").unlink(), ["train_00002.bin is missing"]),
    "three": (lambda d: [flip(d / f"train_0000{i}.bin") for i in (0, 2, 4)],
              [f"train_0000{i}.bin has other bytes" for i in (0, 2, 4)]),
    "tokenizer": (lambda d: put(d / "tiktoken.json", "gpt2-", "gpt-"), ["tiktoken.json is not the tokeni"]),
    "meta": (lambda d: put(d / "meta.json", 'sha256": "', 'sha256": "0'), ["tiktoken.json is not the tokeni"]),
    "no meta": (lambda d: (d / "meta.json").unlink(), ["is not there"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_names_every_damaged_file(name, source, tmp_path, capsys):
    out, (damage, words) = prepare(config(tmp_path / "out", source)), DAMAGE[name]
    damage(out)
    args = [f"--data_dir={out}", "--verify=True"]
    if not words:
        fineweb_edu.main(args)
        assert f"{len(bins(out))} files are intact" in capsys.readouterr().out
        return
    with pytest.raises(ValueError) as caught:
        fineweb_edu.main(args)
    assert all(word in str(caught.value) for word in words), caught.value
    assert str(caught.value).count(" has other bytes") == sum("other" in word for word in words)


def test_the_command_line(source, tmp_path, capsys):
    fineweb_edu.main(["--help"])
    assert "val_fraction     0.001" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot read 'config/tiny.py'"):
        fineweb_edu.main(["config/tiny.py"])
    out = prepare(config(tmp_path / "out", source))
    flip(out / "val_00000.bin")
    result = run("-m", "data.fineweb_edu", f"--data_dir={out}", "--verify=True")
    assert_clean_error(result, f"{out} is damaged (val_00000.bin has other bytes)", "--source=")
    assert result.returncode == 1
