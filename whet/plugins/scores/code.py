# SPDX-License-Identifier: Apache-2.0
"""Scores programs by tests that run in a sandbox."""

from __future__ import annotations

import ast
import builtins
import json
import re
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from whet.errors import DataError, SandboxError
from whet.options import Count, Positive, Share
from whet.programs.inside import whet_peer
from whet.programs.protocol import Limits, Program, Ran, Sandbox, open_sandbox
from whet.registry import register_reward
from whet.rewards.result import truth_error

# A fenced block: indentation, marks, language, text. An unclosed one counts: the response was cut, or ended without it.
_FENCE = re.compile(
    r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:^[ \t]*\2|\Z)",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io"
_MODULES += " sys json"
# Imports that graders put before programs and called functions, as in verl's prime_code and LiveCodeBench.
IMPORTS = "".join(f"from {name} import *\n" for name in (*_MODULES.split(), "builtins", "typing"))
IMPORTS += f"import {', '.join(_MODULES.split())}\n"
# The tests' side of a program; the local sandbox has it loaded, a service gets it along.
_SOURCES = {
    name: Path(whet_peer.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for name in ("whet_peer", "whet_tester")
}
PEER = f"""try:
    from whet_tester import main
except ImportError:
    import sys, types
    for name, source in {_SOURCES!r}.items():
        sys.modules[name] = types.ModuleType(name)
        exec(source, vars(sys.modules[name]))
    from whet_tester import main
main()
"""
_PYTEST = re.compile(r"^def test_|^import pytest|^class (?:Test|\w+\(.*TestCase\))", re.MULTILINE)
_SHOWN = 200  # characters of a message
N = TypeVar("N", bound=ast.AST)
Fields = Mapping[str, Any]  # of a row, or of a ground truth
_NULLS = ("", "null", "none", "nan", "nat", "<na>")

FENCED_AS = {"py": "python", "python3": "python", "c++": "cpp", "cc": "cpp", "js": "javascript", "sh": "bash"}


@dataclass(frozen=True)
class Suite:
    """The tests of a program, by `kind`: "stdin" (pairs of input and output), "call" (arguments and value), "code"
    (statements with assertions), "pytest" (a file)."""

    kind: Literal["stdin", "call", "code", "pytest"]
    cases: Sequence[Any]
    entry: str = ""  # the function that is tested: its name, or Class.method
    setup: str = ""  # statements before each case
    imports: str = ""  # statements before the code
    prompt: str = ""  # code that a response may complete
    defines: str = ""  # the function or class of the prompt


@register_reward(
    "code", checked_by="whet.plugins.scores.code:check_options", rows_checked_by="whet.plugins.scores.code:check_row"
)
def compute_score(
    solution_str: str,
    ground_truth: object,
    extra_info: Fields | None = None,
    *,
    score: Literal["binary", "fraction", "fraction4"] = "binary",
    language: str | None = None,
    seconds: Positive = 10.0,
    memory_mb: Positive = 512.0,
    most_tests: Count | None = None,
    sandbox: str = "bubblewrap",
    python: str | None = None,
    languages: Mapping[str, Mapping[str, object]] | None = None,
    paths: Sequence[str] = (),
    tolerance: Share = 0.0,
) -> dict[str, float | str]:
    """Tests the last fenced code block: 1 if all pass (`binary`), the passed share, or its 4th power (`fraction4`).

    The ground truth has tests, also as JSON text: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls of a
    function; `[{"input", "output", "testtype"}]` as in LiveCodeBench; `{"test", "entry_point"}` as in HumanEval; a list
    of assertions, or text with them; a pytest file. A response that completes the code in `prompt`, which defines
    `entry_point`, is appended to it; both are read from the ground truth or from `extra_info`. Each test has `seconds`
    and `memory_mb`; a program that was too late for one input is not run for the next. `most_tests` limits the tests to
    the first ones. Numbers may differ by a relative `tolerance`, unless both are whole. Tests of a function are for
    Python: code in another language fails them. `sandbox` is bubblewrap, an address of a SandboxFusion service, or
    unisolated. `languages` adds languages: `{"rust": {"file": "a.rs", "compile": [...], "compiled": "a", "run":
    ["./a"]}}`; programs see the folders `paths`, read-only, and find commands there. Parts: `tests` (their number),
    `passed` (the share). `pred` is the code.  Raises: ValueError for a ground truth without tests, and for a language
    without a toolchain; SandboxError if the sandbox, a compiler, an interpreter or pytest is missing."""
    tests = read_tests(ground_truth, extra_info or {})
    if most_tests:
        tests = replace(tests, cases=tests.cases[:most_tests])
    box = open_sandbox(sandbox, python, json.dumps(languages or {}, sort_keys=True), tuple(paths))
    name, source = extract_code(solution_str, language, box.languages)
    if name not in box.languages:
        raise _without(name, box)
    if tests.kind != "stdin" and language not in (None, "python"):
        found = f"{language!r} for tests of a function ({tests.kind}), which call Python"
        raise DataError("language", found, "tests of standard input", "unset language, or leave the row out")
    if tests.kind != "stdin" and name != "python":
        source = ""  # the tests call Python: code in another language fails them
    elif tests.kind != "stdin":
        imports, source = _completed(source, tests)
        tests = replace(tests, imports=imports)
    limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_bytes=int(memory_mb * 2**20))
    results = [(False, "no code")] * len(tests.cases)
    if source.strip():
        results = run_tests(box, name, source, tests, limits, tolerance)
    passed = sum(ok for ok, _ in results) / len(results)
    reward = {"binary": float(passed == 1.0), "fraction": passed, "fraction4": passed**4}[score]
    return {"reward": reward, "accuracy": float(passed == 1.0), "tests": len(results), "passed": passed, "pred": source}


def check_options(
    *,
    sandbox: str = "bubblewrap",
    language: str | None = None,
    python: str | None = None,
    languages: Mapping[str, object] | None = None,
    paths: Sequence[str] = (),
    **_: object,
) -> None:
    """Raises: SandboxError if the sandbox is missing, or does not support the language."""
    box = open_sandbox(sandbox, python, json.dumps(languages or {}, sort_keys=True), tuple(paths))
    if language is not None and language not in box.languages:
        raise SandboxError.joined([_without(language, box)])


def check_row(truth: object, extra_info: Fields, data_source: str) -> None:
    """Raises: ValueError for a ground truth without tests."""
    read_tests(truth, extra_info)


def _without(language: str, box: Sandbox) -> DataError:
    expected = f"a language of the sandbox: {', '.join(box.languages)}"
    return DataError("language", language, expected, "add it in languages")


def extract_code(text: str, language: str | None, known: Container[str]) -> tuple[str, str]:
    """Returns (language, source) of the last fenced block in `language`, or in any known language; without one, of the
    last block that names no language. It reads only the text after `</think>`. A text without fences is the source
    itself. Code of a fence in a list loses the fence's indentation, as in CommonMark."""
    text = text.rpartition("</think>")[2]
    found = [
        (FENCED_AS.get(tag.lower(), tag.lower()), re.sub(rf"^[ \t]{{0,{len(space)}}}", "", block, flags=re.MULTILINE))
        for space, _, tag, block in _FENCE.findall(text)
    ]
    named = [each for each in found if (each[0] == language if language else each[0] in known)]
    if named:
        return named[-1]
    default = language or "python"
    return next(((default, block) for tag, block in reversed(found) if not tag), (default, "" if found else text))


def read_tests(truth: Any, extra: Fields) -> Suite:
    """Reads the tests in a ground truth.  Raises: ValueError."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            if not re.search(r"\bassert\b|\bdef (check|test_)", truth):
                forms = "inputs and outputs as JSON, or assertions, a check function or a pytest file in Python"
                raise truth_error(truth, f"{forms} (docs/rewards.md)") from None
    if isinstance(truth, str):
        truth = {"test": truth}
    extra, truth = _given(extra), _given(truth)
    match truth:
        case Mapping():
            tests = _tests_of_mapping(truth, extra)
        case [str(), *others] if all(isinstance(each, str) for each in others):
            tests = Suite("code", truth)
        case [{"input": _}, *others] if all(isinstance(each, Mapping) and "input" in each for each in others):
            pairs = {"inputs": [each["input"] for each in truth], "outputs": [each.get("output") for each in truth]}
            tests = _tests_of_mapping({**pairs, "testtype": truth[0].get("testtype")}, extra)
        case _:
            change = "correct the row, or set data.answer_key to the field that has them"
            raise truth_error(truth, "a dict, a list or text with tests", change)
    if not tests.cases:
        raise truth_error(truth, "one test or more", "leave the row out")
    if tests.kind in ("code", "pytest") and not _asserts(tests):
        found = f"{tests.cases[0][:80]!r} asserts nothing that is run, so every program would pass"
        asserts = "assertions about the code, with entry_point where a function check has them"
        raise DataError("tests", found, asserts, "correct the row")
    said = {**extra, **truth} if isinstance(truth, Mapping) else extra
    prompt = str(said.get("prompt") or "")
    name = (tests.entry or str(said.get("entry_point") or "")).replace("()", "").partition(".")[0]
    return replace(tests, prompt=prompt, defines=name, setup=f"{_helpers(prompt, name)}\n{tests.setup}")


def _is_null(value: object) -> bool:
    """Tells whether a value is the null of arrow, pandas or JSON for an unused column: None, NaN, or these as text."""
    return not isinstance(value, list | dict) and str(value).strip().lower() in _NULLS


def _given(fields: Any) -> Any:
    """Removes null values from a dict or list; returns any other value unchanged."""
    if isinstance(fields, Mapping):
        return {name: value for name, value in fields.items() if not _is_null(value)}
    return [each for each in fields if not _is_null(each)] if isinstance(fields, list | tuple) else fields


def _asserts(tests: Suite) -> bool:
    """Tells whether Python tests can fail on purpose: code that runs asserts something not constant, raises, or calls a
    function such as assertEqual. Functions that are never called do not count. Unparsable tests count: they fail."""
    tree = parsed("\n".join([tests.setup, *tests.cases]))
    if tree is None:
        return True
    body = tree.body
    if tests.kind == "code":
        body = [each for each in body if not (isinstance(each, ast.If) and "__name__" in ast.unparse(each.test))]
        used = {each.id for each in nodes_of(body, ast.Name)} | ({"check"} if tests.entry else set())
        body = [each for each in body if not isinstance(each, ast.FunctionDef | ast.ClassDef) or each.name in used]
    called = [ast.unparse(each.func) for each in nodes_of(body, ast.Call)]
    conditions = [each.test for each in nodes_of(body, ast.Assert) if not isinstance(each.test, ast.Tuple)]
    is_constant = not nodes_of(conditions, ast.Name) and not nodes_of(conditions, ast.Call)
    says_so = any(re.search(r"(?i)assert|raises|warns|fail|exit|testmod", each) for each in called)
    return not is_constant or says_so or bool(nodes_of(body, ast.Raise))


def _helpers(prompt: str, name: str) -> str:
    """Returns the imports of a code prompt, and its functions other than `name`. Tests use these versions, not
    replacements in the response's code."""
    body = tree.body if (tree := parsed(prompt)) and name else []
    kept = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    return "\n".join(ast.unparse(each) for each in kept if getattr(each, "name", "") != name)


def run_tests(
    box: Sandbox, language: str, source: str, tests: Suite, limits: Limits, tolerance: float = 0.0
) -> list[tuple[bool, str]]:
    """Returns for each test whether it passed, and the reason if it failed.  Raises: SandboxError."""
    if tests.kind != "stdin":
        return _run_peer(box, source, tests, limits, tolerance)
    if language == "python" and not re.search(r"^from __future__ ", source, re.MULTILINE):
        source = IMPORTS + source
    results = []
    runs = box.run(Program(language, source, limits), [given.encode() for given, _ in tests.cases])
    for ran, (_, expected) in zip(runs, tests.cases, strict=True):
        if ran.end != "ok":
            results.append((False, f"{ran.end}: {_last(ran)}"))
        else:
            same = same_output(ran.stdout.decode(errors="replace"), expected, tolerance)
            results.append((same, "" if same else f"wrote {ran.stdout[:_SHOWN]!r}"))
    return results


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Tells whether two outputs have the same lines. Space at line ends and empty lines at the end do not count;
    numbers may differ by the relative `tolerance` if one is a float."""
    one, other = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected))
    if one == other or len(one) != len(other):
        return one == other
    pairs = [(line.split(), wanted.split()) for line, wanted in zip(one, other, strict=True)]
    return all(
        len(words) == len(wanted) and all(_same_word(*pair, tolerance) for pair in zip(words, wanted, strict=True))
        for words, wanted in pairs
    )


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    if found == expected or not tolerance:
        return found == expected
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)) or not re.search(r"[.eE]", found + expected):
        return False
    return whet_peer.is_near(float(found), float(expected), tolerance)


def _run_peer(box: Sandbox, source: str, tests: Suite, limits: Limits, tolerance: float) -> list[tuple[bool, str]]:
    word = secrets.token_hex(16)  # which the code cannot know
    imported, modules, tested = _names(tests)
    setup = "".join(f"import {name}\n" for name in modules) + tests.setup
    told = {"kind": tests.kind, "cases": [*tests.cases], "entry": tests.entry, "setup": setup, "tolerance": tolerance}
    told |= {"imported": imported, "tested": tested, "word": word, "seconds": limits.seconds}
    frames = [json.dumps([tests.imports, source]), json.dumps(told)]
    whole = replace(limits, seconds=limits.seconds * len(tests.cases) + 1.0)
    [ran] = box.run(Program("python", PEER, whole), [b"".join(map(whet_peer.frame, frames))])
    _, mark, verdict = ran.stdout.decode(errors="replace").rpartition(f"\n{word}")
    if not mark:
        return [(False, f"{ran.end}: {_last(ran)}")] * len(tests.cases)
    found = [(bool(ok), str(why)) for ok, why in json.loads(verdict)]
    if any(whet_peer.NO_PYTEST in why for _, why in found):
        expected = "an interpreter that has pytest, since the ground truth is a pytest file"
        change = "name one in reward.kwargs.python, or install pytest for the service"
        raise SandboxError(f"sandbox {box.name}", whet_peer.NO_PYTEST, expected, change)
    return found


def _names(tests: Suite) -> tuple[list[str], list[str], str]:
    """Returns the names that Python tests import; the modules that they use, imported or not; and the builtin under
    test, which alone the code may replace.

    `assert str(sum(1, 2)) == str(5)` tests `sum`, the innermost call on the left, as there is no other name; `assert
    abs(f(2)) < 1` does not test `abs`."""
    code = "\n".join([tests.setup, *tests.cases]) if tests.kind in ("code", "pytest") else ""
    trees = [tree] if (tree := parsed(code)) else []
    imported = {(each.asname or each.name).partition(".")[0] for each in nodes_of(trees, ast.alias)}
    names = nodes_of(trees, ast.Name)
    bound = imported | {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    bound |= {each.name for each in nodes_of(trees, ast.FunctionDef)} | {
        each.name for each in nodes_of(trees, ast.ClassDef)
    }
    modules = {*_MODULES.split()} & {
        each.value.id for each in nodes_of(trees, ast.Attribute) if isinstance(each.value, ast.Name)
    }
    asserted = [each.test for each in nodes_of(trees, ast.Assert)]
    called = called_names([each.left if isinstance(each, ast.Compare) else each for each in asserted] or trees)
    others = {each.id for each in names} - bound - modules - {*vars(builtins)}
    return sorted(imported), sorted(modules), tests.defines or "".join(called[-1:] if not others else [])


def _tests_of_mapping(truth: Fields, extra: Fields) -> Suite:
    entry = str(truth.get("fn_name") or truth.get("entry_point") or extra.get("entry_point") or "").replace("()", "")
    imports = str(truth.get("import_prefix") or "")
    setup = "\n".join([imports, str(truth.get("test_setup_code") or ""), *_statements(truth.get("test_imports"))])
    for key in ("assert_case", "test_list"):
        if statements := _statements(truth.get(key)):
            return Suite("code", statements, setup=setup, imports=imports)
    for key in ("test", "test_code", "pytest"):
        if text := "\n".join(_statements(truth.get(key))):
            if key == "pytest" or _PYTEST.search(text):
                return Suite("pytest", [text], imports=imports)
            return Suite("code", [text], entry if re.search(r"\bdef check\(", text) else "", setup, imports)
    if "inputs" not in truth or "outputs" not in truth:
        keys = ", ".join(map(str, truth)) or "none"
        expected = "inputs and outputs, assert_case, test, or pytest"
        raise DataError("keys of ground_truth", keys, expected, "correct the row")
    inputs, outputs = truth["inputs"], truth["outputs"]
    if len(inputs) != len(outputs):
        found = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise DataError("ground_truth", found, "an output for each input", "correct the row")
    if truth.get("fn_name") or truth.get("testtype") == "functional":
        pairs = zip(inputs, outputs, strict=True)
        cases = [{"args": _arguments(given), "expected": _value(expected)} for given, expected in pairs]
        return Suite("call", cases, entry if truth.get("fn_name") else _function(extra), imports=imports)
    if None in outputs:
        raise DataError(f"outputs[{outputs.index(None)}]", None, "the text that a program writes", "correct the row")
    return Suite("stdin", [(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)])


def _statements(value: Any) -> list[str]:
    """Returns the statements of a text or of a list of texts; empty for None."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    return [str(each) for each in (value if is_list else [value]) if not _is_null(each)]


def _function(extra: Fields) -> str:
    """Returns the function name in `extra` for LiveCodeBench's functional tests.  Raises: ValueError."""
    more = _value(extra.get("metadata"))
    for fields in (extra, more if isinstance(more, Mapping) else {}):
        if name := fields.get("fn_name") or fields.get("func_name"):
            return str(name)
    expected = 'fn_name beside tests of testtype "functional", or func_name in the row or in its metadata'
    raise DataError("fn_name", None, expected, "add it, or leave the row out")


def _arguments(given: Any) -> list[Any] | dict[str, Any]:
    """Returns the arguments of a call: a list, a dict by name, or text with one JSON value on each line."""
    if isinstance(given, Mapping):
        return dict(given)
    return [_value(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else [*given]


def _value(text: Any) -> Any:
    for read in (json.loads, ast.literal_eval) if isinstance(text, str) else ():
        with suppress(ValueError, SyntaxError):
            return read(text)
    return text


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _completed(source: str, tests: Suite) -> tuple[str, str]:
    """Returns imports and the source to run. The prompt's code stands before a source that only completes it."""
    prompt, name = tests.prompt, tests.defines
    imports = (IMPORTS if tests.kind == "call" else "") + tests.imports
    defined = rf"^(?:async )?(?:def|class) (?:{re.escape(name)}|Solution)\b|^{re.escape(name)}\s*="
    if not name or not prompt or re.search(defined, source, re.MULTILINE):
        found = re.search(r"^(?:def|class) ", prompt, re.MULTILINE)
        head = prompt[: found.start()] if found and name else ""
        is_prose = parsed(head) is None
        return imports if is_prose else f"{imports}\n{head}", source
    return imports, f"{prompt}{source}"


def parsed(code: str) -> ast.Module | None:
    """Parses Python code; None if it is invalid."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return None


def nodes_of(trees: Iterable[ast.AST], kind: type[N]) -> list[N]:
    """Returns all nodes of the class `kind` in the trees."""
    return [each for tree in trees for each in ast.walk(tree) if isinstance(each, kind)]


def called_names(trees: Iterable[ast.AST]) -> list[str]:
    """Returns the names of functions that the trees call by a plain name."""
    return [each.func.id for each in nodes_of(trees, ast.Call) if isinstance(each.func, ast.Name)]


def _last(ran: Ran) -> str:
    """Returns the last line that a program wrote to standard error."""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else f"exit code {ran.code}"
