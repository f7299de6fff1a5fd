"""
The default corpus: the documentation that every Python carries, about 2 MB of English.

The docstrings of the standard library, one document a module, the reference topics of pydoc_data,
and what the built-in modules say of themselves. Nothing is downloaded, and no module is imported for
its docstrings but those that are built into the interpreter: source files are parsed.

    python -m data.pydocs [--vocab_size=2048] [--data_dir=data/pydocs]
"""

import ast
import importlib
import inspect
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from config import help_text, load_config, run_cli, split_args
from data.prepare import PrepareConfig, clean, command_of, prepare

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}


@dataclass
class PydocsConfig(PrepareConfig):
    data_dir: str = "data/pydocs"  # folder to write


def source_docstrings(path: Path) -> list[str]:
    """The docstrings of a module, its classes and functions, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files have escapes that newer Pythons complain about
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and files made to fail
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def builtin_docstrings(name: str) -> list[str]:
    """The docstrings of a module written in C, its functions, types and their methods."""
    module = importlib.import_module(name)
    found = [module]
    for key in sorted(vars(module)):
        value = vars(module)[key]
        if callable(value):
            found.append(value)
            if inspect.isclass(value):
                found += [vars(value)[method] for method in sorted(vars(value)) if method[0] != "_"]
    texts = [getattr(item, "__doc__", None) for item in found]
    return [inspect.cleandoc(text) for text in texts if isinstance(text, str)]


def documents() -> Iterator[str]:
    """Every document, in a fixed order; a docstring that occurred before is left out."""
    root = Path(sysconfig.get_path("stdlib"))
    groups = [
        source_docstrings(path)
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(root).parts)
    ]
    groups += [builtin_docstrings(name) for name in sorted(sys.builtin_module_names)]
    topics = importlib.import_module("pydoc_data.topics").topics
    groups += [[topics[name]] for name in sorted(topics)]
    seen = set()
    for group in groups:
        new = [text for text in dict.fromkeys(map(clean, group)) if text not in seen]
        seen.update(new)
        if new:
            yield "\n\n".join(new)


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(help_text(PydocsConfig, __doc__.strip()))
        return
    words, given = split_args(argv)
    if words:
        raise ValueError(f"cannot read {words[0]!r}: settings are written --key=value")
    prepare_pydocs(load_config(PydocsConfig, [], given))


def prepare_pydocs(cfg: PydocsConfig) -> Path:
    """Also what train.py calls when the default corpus is missing."""
    texts = list(documents())
    source = f"pydocs of Python {platform.python_version()}"
    return prepare(cfg, lambda: texts, source, command_of("data.pydocs", cfg))


if __name__ == "__main__":
    run_cli(main, "data.pydocs")
