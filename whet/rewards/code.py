# SPDX-License-Identifier: Apache-2.0
"""Programs, scored by tests that run in a sandbox."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from whet.errors import SandboxError
from whet.options import Count, Positive
from whet.registry import register_reward
from whet.sandbox.inside import whet_peer
from whet.sandbox.protocol import Limits, Program, Ran, Sandbox

# A fenced block: its language, and its text. An unclosed one counts: the response was cut, or ended without the fence.
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# The tests' side of a program; the local sandbox has it loaded, a service gets it along.
_SOURCE = Path(whet_peer.__file__).read_text(encoding="utf-8")
PEER = f"try:\n    from whet_peer import main\nexcept ImportError:\n    exec({_SOURCE!r})\nmain()\n"
_SHOWN = 200  # characters of a message


FENCED_AS = {
    "": "python",
    "py": "python",
    "python3": "python",
    "c++": "cpp",
    "cc": "cpp",
    "js": "javascript",
    "sh": "bash",
}


@dataclass(frozen=True)
class Suite:
    """The tests of a program. `kind`: "stdin" (cases are pairs of input and output), "call" (arguments and value),
    "code" (statements with assertions), "pytest" (a file)."""

    kind: Literal["stdin", "call", "code", "pytest"]
    cases: Sequence[Any]
    entry: str = ""  # the function that is tested: its name, or Class.method
    setup: str = ""  # statements before each case
    prompt: str = ""  # code that a response may complete
    defines: str = ""  # the function or class of the prompt


@register_reward(
    "code",
    checked_by="whet.rewards.code:check_options",
    rows_checked_by="whet.rewards.code:check_row",
    examples=(
        ("```python\nprint(2 * int(input()))\n```", {"inputs": ["3"], "outputs": ["6"]}, 1.0),
        ("```python\nprint(6)\n```", {"inputs": ["3", "4"], "outputs": ["6", "8"]}, 0.0),
    ),
)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    score: Literal["binary", "fraction", "fraction4"] = "binary",
    language: str | None = None,
    seconds: Positive = 10.0,
    memory_mb: Positive = 512.0,
    most_tests: Count | None = None,
    sandbox: str = "bubblewrap",
    python: str | None = None,
    languages: Mapping[str, Mapping[str, Any]] | None = None,
    paths: Sequence[str] = (),
) -> dict[str, Any]:
    """The share of tests that the last fenced block of code passes: 1 where it passes all (`binary`), the share, or its
    fourth power (`fraction4`).

    Tests in the ground truth, or as JSON text: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls of a
    function; `[{"input", "output", "testtype"}]` as in LiveCodeBench; `{"test", "entry_point"}` as in HumanEval; a list
    of assertions, or text with them; a pytest file. A response that completes the code in `prompt`, which defines
    `entry_point`, is put behind it; both are read from the ground truth or from `extra_info`. Each test has `seconds`
    and `memory_mb`; a program that was too late for one input is not run for the next. `most_tests` takes the first
    ones. Tests of a function are for Python: code in another language fails them. `sandbox` is bubblewrap, an address
    of a SandboxFusion service, or unisolated. `languages` adds languages:
    `{"rust": {"file": "a.rs", "compile": [...], "compiled": "a", "run": ["./a"]}}`; programs see the folders `paths`,
    read-only, and find commands there.
    Parts: `tests` (their number), `passed` (the share). `pred` is the code.
    Raises: ValueError for a ground truth without tests, and for a language without a toolchain; SandboxError where the
    sandbox, a compiler, an interpreter or pytest is not there.
    """
    from whet.sandbox.open import open_sandbox

    tests = read_tests(ground_truth, extra_info or {})
    if most_tests:
        tests = replace(tests, cases=tests.cases[:most_tests])
    box = open_sandbox(sandbox, python, json.dumps(languages or {}, sort_keys=True), tuple(paths))
    name, source = extract_code(solution_str, language, box.languages)
    if name not in box.languages:
        raise ValueError(_without(name, box))
    if tests.kind != "stdin" and language not in (None, "python"):
        raise ValueError(
            f"language={language!r}, and the ground truth has tests of a function ({tests.kind}), which call Python; "
            "expected tests of standard input and output; unset language, or leave the row out"
        )
    if tests.kind != "stdin" and name != "python":
        source = ""  # the tests call Python: code in another language fails them
    elif tests.kind != "stdin":
        source = _completed(source, tests)
    limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_bytes=int(memory_mb * 2**20))
    results = [(False, "no code")] * len(tests.cases)
    if source.strip():
        results = run_tests(box, name, source, tests, limits)
    passed = sum(ok for ok, _ in results) / len(results)
    reward = {"binary": float(passed == 1.0), "fraction": passed, "fraction4": passed**4}[score]
    return {"reward": reward, "accuracy": float(passed == 1.0), "tests": len(results), "passed": passed, "pred": source}


def check_options(
    *,
    sandbox: str = "bubblewrap",
    language: str | None = None,
    python: str | None = None,
    languages: Mapping[str, Any] | None = None,
    paths: Sequence[str] = (),
    **_: Any,
) -> None:
    """Raises: SandboxError where the sandbox is not there, or has no such language."""
    from whet.sandbox.open import open_sandbox

    box = open_sandbox(sandbox, python, json.dumps(languages or {}, sort_keys=True), tuple(paths))
    if language is not None and language not in box.languages:
        raise SandboxError(_without(language, box))


def check_row(truth: Any, extra_info: Mapping[str, Any], data_source: str) -> None:
    """Raises: ValueError for a ground truth that has no tests."""
    read_tests(truth, extra_info)


def _without(language: str, box: Sandbox) -> str:
    return f"language={language!r} is not in the sandbox, which has {', '.join(box.languages)}; add it in languages"


def extract_code(text: str, language: str | None, known: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (language, source) of the last fenced block in a known language, or in `language`; the text after
    `</think>` counts. Without any fence the whole text is the source."""
    text = text.rpartition("</think>")[2]
    found = [(FENCED_AS.get(tag.lower(), tag.lower()), block) for tag, block in _FENCE.findall(text)]
    wanted = [each for each in found if (each[0] == language if language else each[0] in known)]
    if wanted:
        return wanted[-1]
    return language or "python", "" if found else text


def read_tests(truth: Any, extra: Mapping[str, Any]) -> Suite:
    """Returns the tests of a ground truth.  Raises: ValueError."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            if not re.search(r"\bassert\b|\bdef (check|test_)", truth):
                raise ValueError(
                    f"the ground truth {truth[:80]!r} is neither JSON nor tests in Python; expected inputs and "
                    "outputs, assertions, a check function or a pytest file (docs/rewards.md); correct the row"
                ) from None
    if isinstance(truth, str):
        truth = {"test": truth}
    if isinstance(truth, Mapping):
        tests = _tests_of_mapping(truth, extra)
    elif isinstance(truth, Sequence) and truth and all(isinstance(each, str) for each in truth):
        tests = Suite("code", [*truth])
    elif isinstance(truth, Sequence) and truth and all(isinstance(each, Mapping) for each in truth):
        calls = truth[0].get("testtype", "stdin") == "functional"
        entry = str(extra.get("fn_name") or extra.get("func_name") or "")
        pairs = {"inputs": [each.get("input") for each in truth], "outputs": [each.get("output") for each in truth]}
        tests = _tests_of_mapping({**pairs, "fn_name": entry if calls else None}, extra)
    else:
        raise ValueError(
            f"the ground truth {str(truth)[:80]!r} has no tests; expected a dict, a list or text with tests; correct "
            "the row, or set data.answer_key to the field that has them"
        )
    if not tests.cases:
        raise ValueError("the ground truth has an empty list of tests; expected one or more, or leave the row out")
    said = {**extra, **truth} if isinstance(truth, Mapping) else extra
    name = tests.entry or str(said.get("entry_point") or "")
    return replace(tests, prompt=str(said.get("prompt") or ""), defines=name.partition(".")[0])


def run_tests(box: Sandbox, language: str, source: str, tests: Suite, limits: Limits) -> list[tuple[bool, str]]:
    """Returns whether each test passed, and why not.  Raises: SandboxError."""
    if tests.kind != "stdin":
        return _run_peer(box, source, tests, limits)
    results = []
    runs = box.run(Program(language, source, limits), [given.encode() for given, _ in tests.cases])
    for ran, (_, expected) in zip(runs, tests.cases, strict=True):
        if ran.end != "ok":
            results.append((False, f"{ran.end}: {_last(ran)}"))
        else:
            same = same_output(ran.stdout.decode(errors="replace"), expected)
            results.append((same, "" if same else f"wrote {ran.stdout[:_SHOWN]!r}"))
    return results


def same_output(found: str, expected: str) -> bool:
    """Tells whether two outputs have the same lines, but for space at the ends and empty lines at the end."""
    one, other = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected))
    return one == other or [line.split() for line in one] == [line.split() for line in other]


def _run_peer(box: Sandbox, source: str, tests: Suite, limits: Limits) -> list[tuple[bool, str]]:
    word = secrets.token_hex(16)  # which the code cannot know
    told = {"kind": tests.kind, "cases": [*tests.cases], "entry": tests.entry, "setup": tests.setup}
    frames = [source, json.dumps({**told, "word": word, "seconds": limits.seconds})]
    whole = replace(limits, seconds=limits.seconds * len(tests.cases) + 1.0)
    [ran] = box.run(Program("python", PEER, whole), [b"".join(map(whet_peer.frame, frames))])
    _, mark, verdict = ran.stdout.decode(errors="replace").rpartition(f"\n{word}")
    if not mark:
        return [(False, f"{ran.end}: {_last(ran)}")] * len(tests.cases)
    found = [(bool(ok), str(why)) for ok, why in json.loads(verdict)]
    if any(whet_peer.NO_PYTEST in why for _, why in found):
        raise SandboxError(
            f"{whet_peer.NO_PYTEST} ({box.name}), and the ground truth is a pytest file; expected an interpreter that "
            "has it; name one in reward.kwargs.python, or install pytest for the service"
        )
    return found


def _tests_of_mapping(truth: Mapping[str, Any], extra: Mapping[str, Any]) -> Suite:
    entry = str(truth.get("fn_name") or truth.get("entry_point") or extra.get("entry_point") or "")
    setup = str(truth.get("test_setup_code") or truth.get("import_prefix") or "")
    for key in ("assert_case", "test_list"):
        if key in truth:
            return Suite("code", [*truth[key]], setup=setup)
    for key in ("test", "test_code", "pytest"):
        if key in truth:
            text = str(truth[key])
            if key == "pytest" or re.search(r"^def test_|^import pytest|^class Test", text, re.MULTILINE):
                return Suite("pytest", [text])
            return Suite("code", [text], entry if re.search(r"\bdef check\(", text) else "", setup)
    if "inputs" not in truth or "outputs" not in truth:
        raise ValueError(
            f"the ground truth has the keys {', '.join(map(str, truth)) or 'none'}; expected inputs and outputs, "
            "assert_case, test, or pytest; correct the row"
        )
    inputs, outputs = truth["inputs"], truth["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs; expected as many; correct the row"
        )
    if truth.get("fn_name"):
        pairs = zip(inputs, outputs, strict=True)
        return Suite(
            "call", [{"args": _arguments(given), "expected": _value(expected)} for given, expected in pairs], entry
        )
    return Suite("stdin", [(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)])


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list of them, or text with one JSON value on each line."""
    return [_value(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else [*given]


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _completed(source: str, tests: Suite) -> str:
    """The source; behind the prompt where it continues it, as in HumanEval."""
    prompt, name = tests.prompt, tests.defines
    defines = re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b|^{re.escape(name)}\s*=", source, re.MULTILINE)
    if not name or not prompt or defines:
        head = prompt[: found.start()] if (found := re.search(r"^(?:def|class) ", prompt, re.MULTILINE)) else ""
        return f"{head}\n{source}" if name and prompt and head.strip() else source
    return f"{prompt}{source}"


def _last(ran: Ran) -> str:
    """The last line that a program wrote to standard error."""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else f"exit code {ran.code}"
