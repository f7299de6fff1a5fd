"""
Settings: one dataclass per program, and the one loader that reads it.

    defaults in the dataclass  <  config file  <  --key=value        (wherever the file stands)

A config file is a short Python file of assignments. It runs in a namespace of its own, and every
name it leaves behind must be a setting of the right type. A setting's help line is the comment
behind it in the dataclass, so each fact about a setting is written once.
"""

import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import runpy
import sys
import time
from types import ModuleType
from typing import Literal, get_args, get_origin, get_type_hints

# -------------------------------------------------------------------------------
# values


def convert(key: str, value: object, kind: type) -> object:
    """
    The value in its setting's type. Text comes from the command line, the rest from Python.

        "1e-3" -> 0.001,  1 -> 1.0 for a float;  "false", "0" -> False;  "2.5" for an int raises
    """
    if get_origin(kind) is Literal:
        legal = get_args(kind)
        if value in legal:
            return value
        raise ValueError(f"{key} must be one of {', '.join(legal)}, got {value!r}")
    if kind is str and isinstance(value, str):
        return value
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ValueError(f"{key} must be True or False, got {value!r}")
    if kind in (int, float) and not isinstance(value, bool):
        try:
            if kind is float:
                return float(value)
            # Not through float, which is exact only up to 2^53; but 1e3 is a whole number too.
            whole = isinstance(value, int) or re.fullmatch(r"[+-]?[\d_]+", str(value))
            number = int(value) if whole else float(value)
            if number == int(number) and abs(number) < 2**63:
                return int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    names = {int: "a whole number", float: "a number", str: "text"}
    limit = " (and below 2^63)" if kind is int and len(str(value)) > 18 else ""
    raise ValueError(f"{key} must be {names[kind]}{limit}, got {value!r}")


class Settings:
    """Base of every config dataclass: types and legal values hold however it is made."""

    def __post_init__(self):
        for key, kind in get_type_hints(type(self)).items():
            value = convert(key, getattr(self, key), kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} must be finite, got {value}")
            setattr(self, key, value)

    def at_least(self, low: float, keys: str) -> None:
        for key in keys.split():
            if getattr(self, key) < low:
                raise ValueError(f"{key} must be at least {low}, got {getattr(self, key)}")


# -------------------------------------------------------------------------------
# command line and config files


def split_args(argv: list[str]) -> tuple[list[str], dict[str, str | None]]:
    """["a.py", "--seed=3", "--plan"] -> ["a.py"], {"seed": "3", "plan": None}"""
    words = [arg for arg in argv if not arg.startswith("-")]
    given = {}
    for arg in [arg for arg in argv if arg.startswith("-")]:
        key, equals, text = arg.lstrip("-").partition("=")
        if not arg.startswith("--") or not key:
            raise ValueError(f"cannot read {arg!r}: settings are written --{key or 'key'}=value")
        given[key] = text if equals else None
    return words, given


def check_names(cls: type, given: dict, source: str) -> None:
    known = get_type_hints(cls)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "--help lists every setting"
            raise ValueError(f"{source}: unknown setting {key!r}, {hint}")


def read_config_file(path: str) -> dict:
    """The assignments of a config file. Imported modules and _names are its own business."""
    try:
        names = runpy.run_path(path)
    except FileNotFoundError as error:
        raise ValueError(f"config file {error.filename!r} does not exist; see config/") from None
    except (Exception, SystemExit) as error:  # whatever goes wrong in it is the user's to read
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return {
        key: value
        for key, value in names.items()
        if not key.startswith("_") and not isinstance(value, ModuleType)
    }


def load_config(cls: type, files: list[str], given: dict[str, str | None]) -> Settings:
    """
    An instance of cls from its defaults, then the config files, then the command line, where a switch
    may stand alone: --plan is --plan=True. Raises ValueError with the name, the value and the remedy.
    """
    check_names(cls, given, source="command line")
    for key in [key for key, text in given.items() if text is None]:
        if get_type_hints(cls)[key] is not bool:
            raise ValueError(f"cannot read '--{key}': settings are written --{key}=value")
        given = given | {key: "True"}
    values = {}
    for path in files:
        names = read_config_file(path)
        check_names(cls, names, source=path)
        values |= names
    return cls(**(values | given))


# -------------------------------------------------------------------------------
# what the user sees


def help_text(cls: type, usage: str) -> str:
    """Usage, then one line for each setting: its name, its default, its meaning, its choices."""
    meaning = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            source = inspect.getsource(base)
            meaning |= dict(re.findall(r"^    (\w+): [^#\n]+# (.+)$", source, re.MULTILINE))
    lines = [usage, "", "settings, written --key=value:"]
    for field in dataclasses.fields(cls):
        kind = get_type_hints(cls)[field.name]
        legal = f" ({' | '.join(get_args(kind))})" if get_origin(kind) is Literal else ""
        lines.append(f"  {field.name:16} {field.default!r:14} {meaning[field.name]}{legal}")
    return "\n".join(lines)


def try_json(text: str):
    """The content of a JSON text, or None if it is damaged, say by a kill."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def run_cli(main, program: str) -> None:
    """
    Run main(argv) and leave with its exit status. What a user can cause (ValueError), a disk
    (OSError) or a lack of memory becomes one sentence on stderr.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # either may be closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):  # any text can be shown, whatever the locale
        stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{program}: interrupted: the same command goes on from what is saved", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        text = str(error)
    except OSError as error:
        text = str(error)
        if error.filename is not None:
            text = f"cannot use {error.filename}: {error.strerror}; check the path, its permissions and the disk"
    except (MemoryError, RuntimeError) as error:
        text = f"not enough memory: lower batch_size or the model's sizes ({error})"
        if "by peer" in str(error) or type(error).__name__.startswith("Dist"):
            text = "the connection to another process is lost: the message of the one that ended first says why"
        elif isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # most mistakes are every rank's: the first one speaks, torchrun ends the rest
    print(f"{program}: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(1)
