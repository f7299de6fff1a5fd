"""
FineWeb-Edu: educational pages of the web, the corpus of the large run. As many tokens as wished.

    python -m data.fineweb_edu --tokens=1e7                      20 MB, to try it
    python -m data.fineweb_edu --tokens=100e9                    200 GB, the data of config/*_1p7b.py
    python -m data.fineweb_edu --tokens=1e9 --source=PATH        local parquet or JSONL with `text` and `id`
    python -m data.fineweb_edu --verify                          read it all again, compare with meta.json

    read       the smallest sample on the Hugging Face hub that is large enough, at a fixed revision
    split      by a hash of the document's id: its side depends on nothing else, so a small dataset's
               validation documents are never in a large one's training files
    write      a file of 100 million tokens at a time; after each one, progress.json notes the place
               in the source

Stop it however you like, kill -9 included: the same command goes on behind the last complete file and
writes the same bytes as an undisturbed run. meta.json comes last; without it, it is no dataset yet.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from tqdm import tqdm

from config import Settings, help_text, load_config, run_cli, split_args, try_json
from config.machine import claim
from data import shards, tokenizers
from data.prepare import (
    OURS,
    ShardWriter,
    clean,
    command_of,
    content_hash,
    meta_of,
    report,
    tokenize,
    write_file,
)

REPO, REVISION = "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
SAMPLES = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}  # nominal GPT-2 tokens
KINDS = {".parquet": "parquet", ".jsonl": "json"}  # what `datasets` calls them
ROWS = 1000   # of a source that are read at a time
TRIES = 10    # to read on from one place of a remote source; to begin, half of them
MAX_WAIT = 60  # seconds between two of them


@dataclass
class FinewebConfig(Settings):
    data_dir: str = "data/fineweb_edu"  # folder to write
    tokens: int = 100_000_000_000  # training tokens wished; 100e9 can be written
    source: str = ""               # parquet or JSONL: a file, a folder or a URL; empty = the hub
    val_fraction: float = 0.001    # share of the documents that is kept for validation
    threads: int = 0               # tokenizing threads; 0 = one a core
    verify: bool = False           # write nothing: compare the dataset in data_dir with its meta.json

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "tokens")
        self.at_least(0, "threads")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")


# -------------------------------------------------------------------------------
# reading


def sample_for(tokens: int) -> str:
    """The smallest configuration on the hub that has so many tokens. 1e9 -> "sample-10BT" """
    return next((name for name, size in SAMPLES.items() if tokens <= size), "default")


def is_remote(source: str) -> bool:
    return not source or source.startswith(("http://", "https://"))


def list_source(source: str) -> list[str]:
    """The files that --source stands for, in the order of their names. Raises ValueError."""
    if is_remote(source):
        files = [source]
    elif os.path.isdir(source):
        below = sorted(p for p in Path(source).rglob("*") if p.suffix in KINDS and p.is_file() and p.stat().st_size)
        files = [str(p) for p in below if not any(part[0] == "." for part in p.relative_to(source).parts)]
        if not files:
            raise ValueError(f"source {source} has no files that end in {' or '.join(KINDS)}")
    elif os.path.exists(source):
        files = [source]
    else:
        raise ValueError(f"source {source} does not exist: name a file or a folder, or none for the hub")
    kinds = {Path(urlparse(file).path).suffix for file in files}
    if len(kinds) > 1 or not kinds <= set(KINDS):
        has = ", ".join(sorted(kinds)) or "another"
        raise ValueError(f"source {source} must be of one kind, {' or '.join(KINDS)}, got {has}")
    return files


def name_of(source: str, file: int) -> str:
    """The file of that index, as one finds it in messages and in progress.json."""
    files = list_source(source) if source else []
    return files[file] if file < len(files) else f"{source or REPO}, file {file}"


def open_source(cfg: FinewebConfig):
    """The source as a datasets.IterableDataset, one shard for each of its files."""
    import datasets
    import pyarrow.dataset

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() says what goes wrong, once
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    for name in ("OPEN", "READ"):  # and waits: here, one try is enough
        setattr(datasets.config, f"STREAMING_{name}_MAX_RETRIES", 1)
        setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0)
    files = list_source(cfg.source) if cfg.source else []
    kind = KINDS[Path(urlparse(files[0]).path).suffix] if files else "parquet"
    options = {"split": "train", "streaming": True}
    if kind == "parquet":
        # Arrow's pre_buffer would keep all it has read of a file, gigabytes of it, until the file's end.
        options["fragment_scan_options"] = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
    if files:
        return datasets.load_dataset(kind, data_files=files, **options)
    return datasets.load_dataset(REPO, sample_for(cfg.tokens), revision=REVISION, **options)


def read_tables(cfg: FinewebConfig, file: int, row: int) -> Iterator[tuple]:
    """(file, row, table of rows) from a row of a file on."""
    source = open_source(cfg)
    n_files = source.num_shards
    for i in range(file, n_files):
        at = row if i == file else 0
        part = source.shard(num_shards=n_files, index=i).with_format("arrow")
        for table in part.skip(at).iter(batch_size=ROWS):
            yield i, at, table
            at += len(table)


def documents(cfg: FinewebConfig, file: int, row: int) -> Iterator[tuple[tuple, str]]:
    """
    ((is_val, file, row behind it), text) of every document from a row of a file on, empty ones left out.

    A remote source that breaks is opened again where the last table ended, after 1, 2, 4, ... seconds;
    TRIES failures in a row are too many.
    """
    tables, failures, started = read_tables(cfg, file, row), 0, file + row > 0
    limit = cfg.val_fraction * 2**64
    while True:
        try:
            file, row, table = next(tables)
        except StopIteration:
            return
        except Exception as error:  # hub, HTTP and parquet readers all raise kinds of their own
            failures += 1
            what = f"cannot read {cfg.source or REPO} ({type(error).__name__}: {str(error)[:200]})"
            if not is_remote(cfg.source):
                raise ValueError(
                    f"{what}: mend {name_of(cfg.source, file)} behind row {row}, or the file after it"
                ) from error
            if failures == (TRIES if started else TRIES // 2):
                raise ValueError(
                    f"{what}, {failures} times: check the network; the same command goes on from what is done"
                ) from error
            wait = min(2 ** (failures - 1), MAX_WAIT)
            tqdm.write(f"{' '.join(what.split())}: trying again in {wait} s")
            time.sleep(wait)
            tables = read_tables(cfg, file, row)
            continue
        failures, started = 0, True
        for text, name in rows_of(table, name_of(cfg.source, file), row):
            row += 1
            text = clean(text)
            if text and not text.isspace():
                yield (content_hash(name) < limit, file, row), text


def rows_of(table, source: str, row: int) -> Iterator[tuple[str, str]]:
    """(text, id) of each row. Raises ValueError for what is missing."""
    missing = {"text", "id"} - set(table.column_names)
    if missing:
        lacks, has = (", ".join(sorted(names)) for names in (missing, table.column_names))
        raise ValueError(f"{source} has no column {lacks}, but needs text and id (it has: {has})")
    for i, (text, name) in enumerate(zip(table["text"].to_pylist(), table["id"].to_pylist()), start=row):
        if not isinstance(text, str) or name in (None, ""):
            key, value = ("text", text) if not isinstance(text, str) else ("id", name)
            raise ValueError(
                f"{source}: row {i} (from 0) has the {key} {value!r}: every document needs a text, and an id "
                "that decides its split"
            )
        yield text, str(name)


# -------------------------------------------------------------------------------
# writing


def is_finished(folder: Path, wish: dict) -> bool:
    """Whether the dataset is there. Raises ValueError if the folder holds another, or anything else."""
    noted = [folder / name for name in ("meta.json", "progress.json") if (folder / name).exists()]
    if not noted:
        foreign = [p for p in folder.glob("*") if p.name != "lock" and not re.match(OURS, p.name)]
        if foreign or (folder.exists() and not folder.is_dir()):
            raise ValueError(f"{folder} is in the way: it is no dataset; choose another --data_dir")
        return False
    held = try_json(noted[0].read_text(encoding="utf-8"))
    if not isinstance(held, dict) or held.get("wish") != wish:
        has = held.get("wish") if isinstance(held, dict) else "a damaged " + noted[0].name
        raise ValueError(
            f"{folder} holds another dataset ({has}, not {wish}): delete it, or choose another --data_dir"
        )
    check_sizes(folder, held)
    return noted[0].name == "meta.json"


def check_sizes(folder: Path, held: dict) -> None:
    for entry in held.get("files", []) + held.get("train", []) + held.get("val", []):
        path, size = folder / entry["name"], 2 * entry["tokens"]
        if "sha256" in entry and not (path.is_file() and path.stat().st_size == size):
            raise ValueError(
                f"{path} is missing or has not {size} bytes: copy it anew, or delete {folder} and begin anew"
            )


def read_progress(folder: Path, source: str) -> dict:
    """What is done: the entries of both splits, and the place behind the last document of them."""
    path = folder / "progress.json"
    if not path.exists():
        return {"file": 0, "row": 0, "train": [], "val": []}
    progress = json.loads(path.read_text(encoding="utf-8"))
    if progress["name"] != name_of(source, progress["file"]):
        raise ValueError(
            f"file {progress['file']} of {source} is not {progress['name']} any more: put the files back, or "
            f"delete {folder} and begin anew"
        )
    return progress


def save_json(path: Path, content: dict) -> None:
    """All of it or nothing, whenever the power fails."""
    partial = path.with_name(f".partial-{path.name}")
    write_file(partial, json.dumps(content, indent=2).encode())
    os.replace(partial, path)


def remove_useless(folder: Path) -> None:
    """What a run leaves that ended before its first file was complete."""
    if not any((folder / name).exists() for name in ("meta.json", "progress.json", "lock")):
        for path in [p for p in folder.glob(".partial-*") if p.is_file()]:
            path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_disk(folder: Path, needed: int) -> None:
    place = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed / 1e9:.1f} GB more of disk, {free / 1e9:.1f} GB are free: free some, "
            "choose another --data_dir, or lower --tokens"
        )


def write_splits(cfg: FinewebConfig, folder: Path, wish: dict, encoding) -> list[dict]:
    """Tokenize the source into both splits, from where progress.json ends; meta.json's entries."""
    progress = read_progress(folder, cfg.source)
    train, val = (ShardWriter(folder, split, progress[split]) for split in ("train", "val"))
    threads, t0, before = cfg.threads or os.cpu_count() or 1, time.perf_counter(), train.tokens
    source = documents(cfg, progress["file"], progress["row"])
    bar = tqdm(total=cfg.tokens, initial=before, unit="tok", unit_scale=True, disable=None)
    with bar, contextlib.closing(tokenize(source, encoding, threads)) as stream:
        for (is_val, file, row), ids, n_bytes in stream:
            if is_val:
                val.add(ids, n_bytes)
                continue
            completed = train.add(ids, n_bytes)
            bar.update(len(ids))
            if train.tokens >= cfg.tokens:
                break
            if completed:
                val.sync()
                progress |= {"wish": wish, "name": name_of(cfg.source, file), "file": file, "row": row}
                save_json(folder / "progress.json", progress | {"train": train.entries, "val": val.entries})
                if bar.disable:
                    rate = (train.tokens - before) / (time.perf_counter() - t0)
                    left = tqdm.format_interval((cfg.tokens - train.tokens) / rate)
                    done = f"{train.tokens:,} of {cfg.tokens:,} tokens"
                    print(f"{done}, {rate:,.0f} tok/s, {left} left", flush=True)
    if not train.tokens or not val.tokens:
        raise ValueError(
            f"{train.tokens} tokens are for training and {val.tokens} for validation, but both are needed: "
            "use more --tokens or another --val_fraction"
        )
    train.finish()
    val.finish()
    if train.tokens < cfg.tokens:
        print(f"the source ends after {train.tokens:,} of the {cfg.tokens:,} tokens wished")
    return train.entries + val.entries


def prepare(cfg: FinewebConfig) -> Path:
    """Write the dataset, or the rest of it, and return its folder."""
    folder = Path(cfg.data_dir)
    source = cfg.source or f"{REPO} {sample_for(cfg.tokens)} at {REVISION}"
    wish = {"source": source, "tokens": cfg.tokens, "val_fraction": cfg.val_fraction}
    if is_finished(folder, wish):
        (folder / "progress.json").unlink(missing_ok=True)  # a kill may have come between the two
        print(f"{folder} is there already; delete it to prepare it again")
        return folder
    if cfg.source:
        list_source(cfg.source)
    spec = tokenizers.gpt2_spec()
    encoding = tokenizers.load_encoding(spec)
    done = sum(p.stat().st_size for p in folder.glob("*.bin"))
    check_disk(folder, 2 * cfg.tokens - done)
    try:
        with claim(folder):
            if is_finished(folder, wish):  # another process has just finished it
                return folder
            files = write_splits(cfg, folder, wish, encoding)
            write_file(folder / tokenizers.FILE_NAME, tokenizers.spec_bytes(spec))
            meta = {"source": source, "command": command_of("data.fineweb_edu", cfg), "wish": wish}
            save_json(folder / "meta.json", meta | meta_of(spec, encoding, files))
            (folder / "progress.json").unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"the disk of {folder} is full: free some, and the same command goes on from what is done"
        ) from error
    finally:
        remove_useless(folder)
    report(folder, files)
    return folder


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(help_text(FinewebConfig, __doc__.strip()))
        return
    words, given = split_args(argv)
    if words:
        raise ValueError(f"cannot read {words[0]!r}: settings are written --key=value")
    cfg = load_config(FinewebConfig, [], given)
    if cfg.verify:
        print(f"{cfg.data_dir}: {shards.verify(cfg.data_dir)} files are intact")
        return
    prepare(cfg)


if __name__ == "__main__":
    run_cli(main, "data.fineweb_edu")
