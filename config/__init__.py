"""
Settings: one dataclass per program, and the one loader that reads it.

    defaults in the dataclass  <  config file  <  --key=value        (wherever the file stands)

A config file is a Python file that assigns settings. Their lines in --help are the comments after
them in the dataclass.
"""

import dataclasses
import difflib
import inspect
import io
import json
import math
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Literal, get_args, get_origin, get_type_hints


def convert(key: str, value: object, kind: type) -> object:
    """The value in its setting's type: "1e-3" -> 0.001, "0" -> False; "2.5" for an int raises."""
    names = {bool: "True or False", int: "a whole number < 2^63", float: "a number", str: "text"}
    text, legal = str(value), get_args(kind)
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    switch = words.get(text.lower())
    if get_origin(kind) is Literal and all(isinstance(choice, str) for choice in legal):
        for choice in legal:  # one that is called "False" can be written 0, false or no, as a bool
            if text.lower() == choice.lower() or str(switch) == choice:
                return choice
        raise ValueError(f"{key} must be one of {', '.join(legal)}, got {value!r}")
    if kind not in names:
        raise ValueError(f"{key} is a {kind}: use bool, int, float, str or a Literal of strings")
    if kind is bool and switch is not None:
        return switch
    if kind is str and isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if kind in (int, float):
        try:
            whole = kind is int and re.fullmatch(r"[+-]?[\d_]+", text)
            number = int(text) if whole else float(text)  # a float is exact only up to 2^53
            if abs(number) < (2**63 if kind is int else math.inf) and number == kind(number):
                return kind(number)
        except ValueError:
            pass
    raise ValueError(f"{key} must be {names[kind]}, got {value!r}")


class Settings:
    """Base of every config dataclass: types and legal values hold however it is made."""

    def __post_init__(self):
        kinds = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = convert(field.name, getattr(self, field.name), kinds[field.name])
            setattr(self, field.name, value)

    def at_least(self, low: float, keys: str) -> None:
        """Check several settings, named in one text: at_least(1, "n_layer n_head")."""
        for key in keys.split():
            if getattr(self, key) < low:
                raise ValueError(f"{key} must be at least {low}, got {getattr(self, key)}")


def help_text(cls: type, usage: str | None) -> str:
    """Usage, then a line per setting: name, default, meaning, choices. python -OO has no usage."""
    meaning = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        source = inspect.getsource(base)
        meaning |= dict(re.findall(r"^ +(\w+):.* # *(.+)$", source, re.MULTILINE))
    lines = [(usage or "").strip(), "", "settings, written --key=value:"]
    for field in dataclasses.fields(cls):
        kind = get_type_hints(cls)[field.name]
        legal = f"({' | '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
        words = f"{field.name:16} {field.default!r:14} {meaning.get(field.name, '')} {legal}"
        lines.append(f"  {words.rstrip()}")
    return "\n".join(lines)


def split_args(argv: list[str], cls: type, usage: str | None, words_allowed=True) -> tuple:
    """["a.py", "--seed=3", "--save_items"] -> ["a.py"], {"seed": "3", "save_items": "True"}"""
    if {"-h", "--help"} & set(argv):
        print(help_text(cls, usage))
        raise SystemExit(0)
    words, given = [], {}
    for arg in argv:
        if words_allowed and not arg.startswith(("-", "\u2013", "\u2014")):
            words.append(arg)
            continue
        key, equals, text = arg.lstrip("-\u2013\u2014").partition("=")
        alone = not equals and get_type_hints(cls).get(key, bool) is not bool
        form = f"--{key or 'key'}={text or 'value'}"
        if key in given:
            raise ValueError(f"--{key} is given twice: write {form} once")
        if not arg.startswith("--") or not key or alone:  # a dash may also be a pasted long one
            raise ValueError(f"cannot read {arg!r}: settings are written {form}")
        given[key] = text if equals else "True"
    return words, given


def read_config_file(path: str) -> dict:
    """The assignments of a config file, without its imported modules and _names."""
    if not path.endswith(".py"):
        raise ValueError(f"{path} is no config file (.py); to continue a run, repeat its command")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever goes wrong in it is the user's to read
        raise ValueError(f"config file {path}: {type(error).__name__}: {error}") from error
    return {k: v for k, v in names.items() if k[0] != "_" and not isinstance(v, ModuleType)}


def load_config(cls: type, given: dict[str, str], files: Sequence[str] = ()) -> Settings:
    """An instance of cls from its defaults, the config files and the command line."""
    known, values = get_type_hints(cls), {}
    sources = [*((path, read_config_file(path)) for path in files), ("command line", given)]
    for source, settings in sources:
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "--help lists every setting"
                raise ValueError(f"{source}: unknown setting {key!r}, {hint}")
        values |= settings
    return cls(**values)


def try_json(text: str) -> object:
    """The content of a JSON text, or None if it is damaged, say by a kill."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def explain(error: Exception) -> str | None:
    """One sentence for what a user, a disk, a lack of memory or another process has caused."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}; check the path and the disk"
    if isinstance(error, MemoryError) or re.search("(out of|allocate|enough) memory", text):
        return f"not enough memory: lower batch_size or the model's sizes ({text})"
    if "No available kernel" in text:  # attention's fused ones take heads of up to 256
        return "no fused attention takes this head width: raise n_head, or use dtype=float32"
    if "by peer" in text or type(error).__name__.startswith("Dist"):
        return "the connection to another process is lost: the first one to end says why"
    return text if isinstance(error, (ValueError, OSError)) else None


def run_cli(main: Callable[[list[str]], int | None], program: str) -> None:
    """Run main(argv) and leave with its exit status; see explain() for its errors."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # either may be closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's
            stream.reconfigure(errors="backslashreplace")  # shows any text in any locale
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # most mistakes are every rank's: the first one speaks, torchrun ends all
        print(f"{program}: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(1)
