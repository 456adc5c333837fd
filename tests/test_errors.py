# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests import parsed
from tests.test_distribution import installed_by_name
from whet import errors
from whet.errors import ConfigError, DataError, StorageError, pip_install


@dataclass
class Installed:
    """A distribution that says where it was installed from."""

    told: str | None

    def read_text(self, name: str) -> str | None:
        return self.told


def test_an_extra_is_installed_from_where_whet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(told))
    wheel = tmp_path / "a b" / "whet_rl-0.3.0-py3-none-any.whl"
    told = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    assert pip_install("ray") == "pip install 'FOLDER_OR_WHEEL_OF_WHET[ray]'"  # the wheel is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert pip_install("ray") == f"pip install '{wheel}[ray]'"
    for told in (None, "{", json.dumps({"url": "https://files.example.com/whet_rl.whl"})):  # noqa: B007  # `distribution` reads it
        assert not installed_by_name(pip_install("ray"))
    (tmp_path / "pyproject.toml").touch()
    assert pip_install("ray") == "pip install -e '.[ray]'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert pip_install("ray") == f"pip install -e '{tmp_path}[ray]'"


PACKAGE = Path(errors.__file__).parent
ROOT, TESTS = PACKAGE.parent, Path(__file__).parent
FILES = sorted((*PACKAGE.rglob("*.py"), *(ROOT / "examples").rglob("*.py")))
LOGGED = {"debug", "info", "warning", "error"}
# Messages of other kinds: of failures as data, of errors for clients and for models, and functions that make them.
OTHERS = {"ApiError", "CallError", "ConnectionError", "Failure", "RefusedError", "RequestFailure", "TimeoutError"}
OTHERS |= {"ValueError", "refused", "unsupported"}
SKIPS = {"importorskip", "skip", "skipif"}
MAX_SHARED_WORDS = 3  # in a row, of a message of whet and a string of a test
MAX_PHRASE = 2  # in a row, of words alone, of a message and a field that a test expects


@cache
def kinds() -> frozenset[str]:
    """The names of WhetError and of all kinds of it, in the package and in the examples."""
    classes = {
        node.name: {getattr(base, "id", "") for base in node.bases}
        for file in FILES
        for node in parsed.blocks(file)
        if isinstance(node, ast.ClassDef)
    }
    found = {"WhetError"}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return frozenset(found)


def test_fields_survive_pickling_and_gain_a_place() -> None:
    error = ConfigError("data.max_length", 7, "at most 3", "lower it")
    error.others = (DataError("prompt", "no text"),)
    copied = pickle.loads(pickle.dumps(error.at("a.yaml")))
    assert (copied.key, copied.found, copied.expected, copied.change) == (
        "a.yaml: data.max_length",
        7,
        "at most 3",
        "lower it",
    )
    assert [(type(other), other.key, other.found) for other in copied.others] == [
        (DataError, "a.yaml: prompt", "no text")
    ]
    assert str(copied) == "a.yaml: data.max_length=7; expected at most 3; lower it\na.yaml: prompt: no text"


def test_joined_errors_keep_all_fields() -> None:
    first, second = ConfigError("a", None, "a number"), DataError("b", "")
    both = ConfigError.joined([ConfigError.joined([first, second]), StorageError("c", 3)])
    assert type(both) is ConfigError and both.found is None
    assert [each.key for each in (both, *both.others)] == ["a", "b", "c"]
    assert str(both).splitlines() == ["a is not set; expected a number", "b", "c=3"]


def test_every_error_says_what_was_found_and_what_to_do() -> None:
    """At least key, found, and one of expected and change, at each place that makes an error."""
    bare = []
    for file in FILES:
        if file == PACKAGE / "errors.py":
            continue
        for call, _ in _calls(parsed.tree(file), kinds()):
            if len(call.args) + len(call.keywords) < 3 and not any(isinstance(each, ast.Starred) for each in call.args):
                bare.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert not bare


@pytest.mark.slow
def test_no_test_copies_the_words_of_a_message() -> None:
    """Fields and numbers are compared, so that an error or a line of the log can be worded better in one place."""
    messages = [text for file in FILES for text in _messages(parsed.tree(file))]
    said, phrases = (set[tuple[str, ...]]().union(*map(read, messages)) for read in (_runs_of_words, _phrases))
    copied = []
    for file in sorted(TESTS.rglob("*.py")):
        tree = parsed.tree(file)
        others = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings compare nothing
        others |= {node for call, _ in _calls(tree, SKIPS) for node in ast.walk(call)}
        expected = set(_expected(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in others:
                continue
            if _runs_of_words(node.value) & said or (node in expected and _phrases(node.value) & phrases):
                copied.append(f"{file.relative_to(TESTS)}:{node.lineno} {node.value[:60]}")
    assert not copied, "\n".join(copied)


def _expected(tree: ast.AST) -> Iterator[ast.AST]:
    """The fields that a test expects of an error, and patterns of the message of a WhetError."""
    for call, name in _calls(tree, {"check_fields", "raises"}):
        is_ours = name == "check_fields" or any(getattr(each, "id", "") in kinds() for each in ast.walk(call))
        for keyword in call.keywords if is_ours else ():
            yield from ast.walk(keyword.value) if keyword.arg not in (None, "key") else ()


def _calls(tree: ast.AST, names: Collection[str]) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in names:
                yield node, name


def _messages(tree: ast.Module) -> Iterator[str]:
    """The strings inside errors and lines of the log, and strings that the function or file assigns to names in
    them."""
    own = _assigned(statement for statement in tree.body if isinstance(statement, ast.Assign | ast.AnnAssign))
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))):
        named = own if scope is tree else _assigned(scope.body)
        for call, _ in _calls(scope, kinds() | OTHERS | LOGGED):
            yield from _strings(call)
            for node in ast.walk(call):
                if isinstance(node, ast.Name):
                    yield from named.get(node.id, ())


def _assigned(statements: Iterable[ast.stmt]) -> dict[str, list[str]]:
    """The strings in the values of each name that statements assign, nested blocks included."""
    found = dict[str, list[str]]()
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                    found.setdefault(name, []).extend(_strings(node.value))
    return found


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _runs_of_words(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9_'.=]+", text.replace("\\", "").lower())
    size = MAX_SHARED_WORDS + 1
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def _phrases(text: str) -> set[tuple[str, ...]]:
    words, size = [word.strip("`'\"(),.:;?^$") for word in text.lower().split()], MAX_PHRASE + 1
    runs = (tuple(words[start : start + size]) for start in range(len(words) - size + 1))
    return {run for run in runs if all(map(str.isalpha, run))}
