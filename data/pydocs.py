"""
The default corpus: the documentation that every Python carries, about 2 MB of English.

The docstrings of the standard library, one document per module, the reference topics of pydoc_data,
and what the built-in modules say of themselves. Nothing is downloaded, and source files are parsed,
not imported.

    python -m data.pydocs [--vocab_size=2048] [--data_dir=data/pydocs]
"""

import ast
import importlib
import inspect
import platform
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

from config import load_config, run_cli, split_args
from data.prepare import PrepareConfig, clean, command_of, prepare
from data.text import cut

LONGEST = 8192  # characters of a document: a few large ones would make the sides uneven
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
    for name in sorted(vars(module)):
        value = vars(module)[name]
        found += [value] if callable(value) else []
        if inspect.isclass(value):
            found += [vars(value)[method] for method in sorted(vars(value)) if method[0] != "_"]
    texts = [getattr(item, "__doc__", None) for item in found]
    return [inspect.cleandoc(text) for text in texts if isinstance(text, str)]


def read_documents() -> list[str]:
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
    seen, documents = set(), []
    for group in groups:
        new = [text for text in dict.fromkeys(map(clean, group)) if text not in seen]
        seen.update(new)
        documents += cut(["\n\n".join(new)], LONGEST) if new else []
    return documents


def prepare_pydocs(data_dir: str, vocab_size: int, **others: object) -> Path:
    """Also what train.py calls when the default corpus is missing."""
    cfg = PydocsConfig(data_dir=data_dir, vocab_size=vocab_size, **others)
    texts = read_documents()
    size = sum(len(text.encode()) for text in texts)
    return prepare(
        cfg,
        lambda place: ((i + 1, None, texts[i]) for i in range(place or 0, len(texts))),
        f"the documentation in Python {platform.python_version()}, {size} bytes",
        command_of("data.pydocs", cfg),
        size,
    )


def main(argv: list[str]) -> None:
    _, given = split_args(argv, PydocsConfig, __doc__, words_allowed=False)
    prepare_pydocs(**vars(load_config(PydocsConfig, given)))


if __name__ == "__main__":
    run_cli(main, "data.pydocs")
