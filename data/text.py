"""
Your own text as a dataset: UTF-8 text files, JSONL files, and folders of them.

    python -m data.text --input=PATH [PATH ...] [--data_dir=data/text] [--tokenizer=gpt2-49152]

A folder stands for every file below it that is not hidden, in the order of their names.

    *.jsonl       one document a line, its "text" field
    other files   one document, or parts of up to 16,384 characters, cut at a blank line if there is
                  one, else at a line's end: so a single book can be split into training and validation

Then: python train.py config/canonical_toy.py --data_dir=data/text --run_name=text
"""

import codecs
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import help_text, load_config, run_cli, split_args
from data.prepare import PrepareConfig, clean, command_of, prepare

PART = 16384  # characters


@dataclass
class TextConfig(PrepareConfig):
    data_dir: str = "data/text"  # folder to write
    input: str = ""              # file or folder to read; more may follow, separated by spaces
    errors: Literal["strict", "replace"] = "strict"  # on bytes that are no UTF-8: stop, or write a replacement character


def list_files(inputs: list[str]) -> list[Path]:
    """The files that the inputs stand for; links to folders are not followed. Raises ValueError."""
    files = []
    for name in inputs:
        if os.path.isfile(name):
            files.append(Path(name))
            continue
        if not os.path.isdir(name):
            what = "is neither a file nor a folder" if os.path.exists(name) else "does not exist"
            raise ValueError(f"input {name} {what}: name a text file, a JSONL file or a folder of them")
        below = []
        for folder, subfolders, names in os.walk(name, onerror=fail):
            subfolders[:] = [sub for sub in subfolders if sub[0] != "."]
            below += [Path(folder, n) for n in names if n[0] != "." and os.path.isfile(Path(folder, n))]
        if not below:
            raise ValueError(f"input {name} has no files (hidden ones and links to folders do not count)")
        files += sorted(below)
    return files


def fail(error: OSError) -> None:
    raise error


def find_bad_byte(path: Path) -> tuple[int, int]:
    """Offset and value of the first byte that is not UTF-8."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as f:
        while True:
            block = f.read(2**20)
            waiting = decoder.getstate()[0]  # the start of a character that the block completes
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return offset - len(waiting) + error.start, (waiting + block)[error.start]
            offset += len(block)


def cut_into_parts(f) -> Iterator[str]:
    """The text of an open file, in parts of up to PART characters."""
    text = ""
    while block := f.read(2**20):
        text += block
        while len(text) > PART:
            cut = PART
            for end in ("\n\n", "\n"):
                found = text.rfind(end, PART // 2, PART)
                if found >= 0:
                    cut = found + len(end)
                    break
            yield text[:cut]
            text = text[cut:]
    yield text


def read_jsonl(f, path: Path, errors: str) -> Iterator[str]:
    for i, line in enumerate(f, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {i} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path}, line {i} has no text field with a string (it has: {has})")
        # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
        try:
            yield row["text"].encode("utf-8", errors).decode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(
                f"{path}, line {i} has half a surrogate pair: mend it, or --errors=replace"
            ) from None


def documents(files: list[Path], errors: str) -> Iterator[str]:
    """Every document of the files; the empty ones are left out."""
    for path in files:
        try:
            # Python's universal newlines turn \r\n into \n; utf-8-sig takes a byte-order mark away.
            with open(path, encoding="utf-8-sig", errors=errors) as f:
                texts = read_jsonl(f, path, errors) if path.suffix == ".jsonl" else cut_into_parts(f)
                yield from (text for text in map(clean, texts) if text.strip())
        except UnicodeDecodeError:
            offset, value = find_bad_byte(path)
            raise ValueError(
                f"{path} is not UTF-8: byte 0x{value:02x} at offset {offset}; convert the file, or "
                "--errors=replace writes a replacement character"
            ) from None


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(help_text(TextConfig, __doc__.strip()))
        return
    more, given = split_args(argv)
    cfg = load_config(TextConfig, [], given)
    inputs = [name for name in [cfg.input, *more] if name]
    if not inputs:
        raise ValueError("name what to read: python -m data.text --input=PATH")
    files = list_files(inputs)
    command = " ".join([command_of("data.text", cfg), *map(shlex.quote, more)])
    prepare(cfg, lambda: documents(files, cfg.errors), ", ".join(inputs), command)


if __name__ == "__main__":
    run_cli(main, "data.text")
