# SPDX-License-Identifier: Apache-2.0
"""Docstrings: every public name has one, or implements a method that has one; each begins with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.parsed import blocks, tree

ROOT = Path(__file__).resolve().parents[1]
# A first word that leaves open what the sentence is about.
VAGUE = re.compile(
    "what|who|whose|whom|where|when|which|whether|how|why|that|this|these|those|such|so|as|if|one|all|each|every|only|no|"
    "none|nothing|from|of|to|in|for|with|without|by|at|on|up|again|here|both"
)
# Words of earlier versions, and words of no field: the glossary (docs/glossary.md) has another for each.
FORMER_WORDS = re.compile(r"\b(judge?ments?|settle[ds]?|settlements?|settling|seats?|payouts?)\b", re.I)
# Words that stand for a thing without naming it. Code between backticks is left out.
UNNAMED = re.compile(r"\b(what|those|that of|told)\b", re.I)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        place for place, definition, is_public in definitions() if is_public and ast.get_docstring(definition) is None
    ]
    assert not missing, "\n".join(missing)


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    vague = [
        f"{place}: {docstring.splitlines()[0]}"
        for place, definition, _ in definitions()
        if (docstring := ast.get_docstring(definition)) and VAGUE.fullmatch(first_word(docstring))
    ]
    assert not vague, "\n".join(vague)


def test_a_first_sentence_names_its_subject_and_object() -> None:
    unnamed = [
        f"{place}: {sentence}"
        for place, definition, _ in definitions()
        if (docstring := ast.get_docstring(definition))
        and UNNAMED.search(re.sub("`[^`]*`", "", sentence := first_sentence(docstring)))
    ]
    assert not unnamed, "\n".join(unnamed)


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "tests"])
def test_first_sentences_outside_the_package_do_too(folder: str) -> None:
    unnamed = [
        f"{file}: {sentence}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in blocks(file)
        if isinstance(node, Definition | ast.Module) and (docstring := ast.get_docstring(node))
        if UNNAMED.search(re.sub("`[^`]*`", "", sentence := first_sentence(docstring)))
    ]
    assert not unnamed, "\n".join(unnamed)


def test_pages_and_code_keep_to_the_glossary() -> None:
    files = [*(ROOT / "whet").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    used = [f"{path}: {found[0]}" for path in files for found in FORMER_WORDS.finditer(path.read_text())]
    assert not used, "\n".join(used)


def first_word(docstring: str) -> str:
    """The first word in small letters; "" where the docstring begins with a formula or a name in code."""
    found = re.match(r"[\"(\[]?([A-Za-z]+)(?![\w.(=^/])", docstring)
    return "" if found is None else found.group(1).lower()


def first_sentence(docstring: str) -> str:
    """The text up to the first full stop before white space, or up to the end of the first paragraph."""
    return re.split(r"(?<=[.!?])\s", docstring.split("\n\n")[0], maxsplit=1)[0]


@cache
def definitions() -> list[tuple[str, Definition | ast.Module, bool]]:
    """Place, node, and whether the name is public, of every module, class and function of whet."""
    found: list[tuple[str, Definition | ast.Module, bool]] = []
    for file, module in modules().items():
        found += [(f"{file.relative_to(ROOT)}:1", module, True), *_inside(module, file, is_public=True)]
    return found


@cache
def modules() -> dict[Path, ast.Module]:
    """The files of whet, parsed."""
    return {file: tree(file) for file in sorted((ROOT / "whet").rglob("*.py"))}


def _inside(parent: ast.AST, file: Path, *, is_public: bool) -> Iterator[tuple[str, Definition, bool]]:
    # The methods of an autograd function have torch's meaning, and a setting that a protocol names has the config's.
    is_told_elsewhere = isinstance(parent, ast.ClassDef) and any(
        ast.unparse(base) in ("torch.autograd.Function", "Protocol") for base in parent.bases
    )
    told = implemented(parent) if isinstance(parent, ast.ClassDef) else set()
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            public = is_public and not node.name.startswith("_")
            needs_its_own = public and not is_told_elsewhere and node.name not in told
            yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node, needs_its_own
            if isinstance(node, ast.ClassDef):
                yield from _inside(node, file, is_public=public)


def implemented(node: ast.ClassDef) -> set[str]:
    """The methods that a class above this one documents, or a protocol of several methods that the class has all of."""
    above = [each for base in node.bases for each in classes().get(name_of(base), [])]
    own = set(methods(node))
    met = [protocol for protocol in protocols() if len(protocol) > 1 and protocol.keys() <= own]
    return {name for each in [*map(methods, above), *met] for name, is_documented in each.items() if is_documented}


@cache
def protocols() -> list[dict[str, bool]]:
    """The methods of each protocol."""
    return [methods(each) for found in classes().values() for each in found if is_protocol(each)]


@cache
def methods(node: ast.ClassDef) -> dict[str, bool]:
    """The public methods of a class and of its bases, each with whether one of these classes documents it."""
    found: dict[str, bool] = {}
    for base in node.bases:
        for each in classes().get(name_of(base), []):
            found |= methods(each)
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            found[method.name] = found.get(method.name, False) or ast.get_docstring(method) is not None
    return found


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of whet by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for file in modules():
        for node in blocks(file):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def name_of(base: ast.expr) -> str:
    """The last name of a base class: `Base` of `module.Base[int]`."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in map(name_of, node.bases)


def test_first_words() -> None:
    docstrings = ["Returns the rows.", "What it is.", "exp(d) - d - 1 with d = x", "top_p of the rest", "(One of them)"]
    assert [first_word(each) for each in docstrings] == ["returns", "what", "", "", "one"]


def test_first_sentences() -> None:
    assert first_sentence("Returns 1.5\nof x.  Raises: those.") == "Returns 1.5\nof x."
    assert first_sentence("A title without a full stop\n\nwhat follows") == "A title without a full stop"
    assert UNNAMED.search("Reads what a run wrote.") and not UNNAMED.search("Whatever comes, somewhat later.")


def test_a_method_is_told_by_the_class_above_it_or_by_its_protocol() -> None:
    [engine], [tracker], [frame] = (classes()[name] for name in ("FSDPEngine", "JsonlTracker", "RunDir"))
    assert "dp_rank" in implemented(engine) and "spread" in implemented(engine)
    assert implemented(tracker) == {"log", "close"}
    assert implemented(frame) == set()  # its close is of no protocol of several methods
