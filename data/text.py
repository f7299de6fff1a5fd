"""
Your own text as a dataset: text files, JSON lines, parquet files, and folders of them.

    python -m data.text --input=PATH [PATH ...] [--data_dir=data/text] [--tokenizer=gpt2-49152]

A folder stands for every file below it that is not hidden, in the order of their names.

    *.jsonl, *.ndjson   one document per line, its "text" field
    *.parquet           one document per row, its "text" column
    other files         UTF-8 text, in parts of up to 16,384 characters

Whatever is longer than 1/512 of the input is cut into parts, at a blank line if there is one, else
at the end of a line or a word, so that a single short book, too, has text for both sides.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import load_config, run_cli, split_args
from data.prepare import PrepareConfig, command_of, prepare

LONGEST, SHORTEST = 16384, 40  # characters of a part


@dataclass
class TextConfig(PrepareConfig):
    data_dir: str = "data/text"  # folder to write
    input: str = ""  # file or folder to read; more may follow, separated by spaces
    errors: Literal["strict", "replace"] = "strict"  # stop at bytes that are not UTF-8, or replace


def list_files(inputs: list[str]) -> list[Path]:
    """The files that the inputs stand for, each once. Raises ValueError."""
    files, left_out = {}, []
    for top in map(Path, inputs):
        if not top.exists():
            raise ValueError(f"input {top} does not exist: name a text file or a folder of them")
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if any(part[0] == "." for part in path.relative_to(top).parts):
                continue
            if path.is_file():
                files[path] = True
            elif path.is_symlink() or not path.is_dir():
                left_out.append(str(path))
    if left_out:
        print(f"left out, a link to a folder or to nothing, or no file: {', '.join(left_out)}")
    if not files:
        raise ValueError(f"input {', '.join(inputs)} has no files to read: write --input=PATH")
    return list(files)


def read_lines(path: Path, errors: str, longest: int = -1) -> Iterator[str]:
    """The lines of a text file, the longer ones in pieces. Raises ValueError if it is not UTF-8."""
    with open(path, "rb") as f:
        head = f.read(2**16)
    if b"\0" in head:
        raise ValueError(f"{path} is no text but binary, say an archive or a picture: leave it out")
    if path.suffix.lower() == ".json":
        raise ValueError(f"{path} is JSON as a whole: write one document per line to a .jsonl file")
    # Python's universal newlines turn \r\n into \n; utf-8-sig takes a byte-order mark away.
    with open(path, encoding="utf-8-sig", errors=errors) as f:
        try:
            yield from iter(lambda: f.readline(longest), "")
        except UnicodeDecodeError as error:
            at = f.buffer.tell() - len(error.object) + error.start
            what = f"byte 0x{error.object[error.start]:02x} at offset {at}; convert the file"
            if head.decode("utf-8", "replace").count("\ufffd") <= 10:
                what += ", or --errors=replace writes a replacement character"
            raise ValueError(f"{path} is not UTF-8: {what}") from None


def read_rows(path: Path, errors: str) -> Iterator[tuple[int, str]]:
    """(line or row, text) of a file of documents. Raises ValueError if one has no text."""
    import pyarrow.parquet

    i = 0
    try:
        rows = read_lines(path, errors)
        if path.suffix.lower() == ".parquet":
            tables = pyarrow.parquet.ParquetFile(path).iter_batches(1000, columns=["text"])
            rows = (row for table in tables for row in table.to_pylist())
        for i, row in enumerate(rows, start=1):
            if isinstance(row, str):
                row = json.loads(row) if row.strip() else {"text": ""}
            yield i, row["text"].encode("utf-8", errors).decode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, line {i} has no text field to read ({what}): fix it") from error


def cut(lines: Iterable[str], longest: int) -> Iterator[str]:
    """The text in parts of at most so many characters, cut at the best place of the second half."""
    text, half = "", longest // 2
    for line in lines:
        text += line
        while len(text) > longest:
            ends = [text.rfind(end, half, longest) + len(end) for end in ("\n\n", "\n", " ")]
            at = next((end for end in ends if end > half), longest)
            yield text[:at]
            text = text[at:]
    yield text


def documents(files: list, longest: int, errors: str, place: list | None) -> Iterator[tuple]:
    """(place, None, text) of every part of every document; a place is [file, line, part]."""
    names = [str(path) for path in files]
    for path in files[names.index(place[0]) if place else 0 :]:
        if path.suffix.lower() in (".jsonl", ".ndjson", ".parquet"):
            found = ((i, cut([text], longest)) for i, text in read_rows(path, errors))
        else:
            found = [(0, cut(read_lines(path, errors, 2**20), min(longest, LONGEST)))]
        for line, parts in found:
            for k, text in enumerate(parts):
                here = [str(path), line, k]
                if not place or here[0] != place[0] or here > place:
                    yield here, None, text


def main(argv: list[str]) -> None:
    words, given = split_args(argv, TextConfig, __doc__)
    cfg = load_config(TextConfig, given)
    inputs = [name for name in [cfg.input, *words] if name]
    files = list_files(inputs)
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    size = sum(n_bytes for _, n_bytes, _ in stats)
    prepare(
        cfg,
        lambda place: documents(files, max(size // 512, SHORTEST), cfg.errors, place),
        f"{', '.join(inputs)}: {len(files)} files, {size} bytes, {digest}, errors={cfg.errors}",
        command_of("data.text", cfg, words),
        size,
    )


if __name__ == "__main__":
    run_cli(main, "data.text")
