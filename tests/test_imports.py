# SPDX-License-Identifier: Apache-2.0
"""Names that a file takes from another one are there: mypy reads no tests, benchmarks and examples, and an import in
a function is first read when it runs."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.parsed import tree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("whet", "tests", "benchmarks", "docs", "examples")
IMPORT = re.compile(r"^[ \t]*from ((?:whet|tests|benchmarks|docs)(?:\.\w+)*) import (?:\(([^)]*)\)|([^\n(]+))$", re.M)
REPLACED = re.compile(r"\bsetattr\(\s*\"(whet(?:\.\w+)*)\.(\w+)\"")


def taken(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import of ours in a text, and of each name of whet that a test replaces."""
    for module, several, one in IMPORT.findall(text):
        for each in re.sub(r"#.*", "", several or one).split(","):
            if name := each.split(" as ")[0].strip():
                yield module, name
    yield from REPLACED.findall(text)


def has(module: str, name: str) -> bool:
    """Tells whether a module, or else a class, has a name."""
    place = ROOT.joinpath(*module.split("."))
    if place.joinpath(name).is_dir() or place.joinpath(f"{name}.py").is_file():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if file.is_file():
        found = defined(file)
        return name in found or ("__getattr__" in found and hasattr(importlib.import_module(module), name))
    owner, _, inner = module.rpartition(".")
    return bool(owner) and has(owner, inner)


@cache
def defined(file: Path) -> set[str]:
    """Names that a file defines or imports outside of functions and classes."""
    return set(_names(tree(file).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from ((each.asname or each.name).partition(".")[0] for each in node.names)
            case ast.Assign() | ast.AnnAssign() | ast.For() | ast.With() | ast.If() | ast.Try():
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
                parts = ("body", "orelse", "finalbody", "handlers")
                inner = [each for part in parts for each in getattr(node, part, [])]
                yield from _names([each for each in inner if isinstance(each, ast.stmt)])


@pytest.mark.shipped
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_or_replaced_is_there(folder: str) -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / folder).rglob("*.py"))}
    missing = [
        f"{file.relative_to(ROOT)}: {module} has no {name}"
        for file, text in texts.items()
        for module, name in taken(text)
        if not has(module, name)
    ]
    assert not missing, "\n".join(missing)


def test_missing_names_are_found() -> None:
    text = (
        "from whet.batch import (\n    Batch,  # rows\n    Bath as B,\n)\n    from whet import devices, nothing\n"
        'monkeypatch.setattr("OF.http.MOST", 1)\nmonkeypatch.setattr("OF.batch.Batch.columns", 1)\n'
    ).replace("OF", "whet")
    told = list(taken(text))
    assert [name for _, name in told] == ["Batch", "Bath", "devices", "nothing", "MOST", "columns"]
    assert [name for module, name in told if not has(module, name)] == ["Bath", "nothing", "MOST"]


def test_folders_that_tests_put_on_the_path_are_there() -> None:
    place = re.compile(r"(?:sys\.path\.\w+|syspath_prepend)\(.*?Path\(__file__\)\.parents\[(\d)\]((?: / \"\w+\")*)")
    found = [
        (file, file.parents[int(up)].joinpath(*re.findall(r"\w+", names)))
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for up, names in place.findall(file.read_text(encoding="utf-8"))
    ]
    assert found and not [f"{file.relative_to(ROOT)}: no {each}" for file, each in found if not each.is_dir()]
