# SPDX-License-Identifier: Apache-2.0
"""The messages of docs/bad-input.md, which tests/test_bad_input.py provokes: a run of these tests collects them.

In the page `...` stands for text that varies. A message that still fits stays as it is; any other is written anew, with
`...` for paths, sizes, digests and the rest of a long list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "test_bad_input.py"
COLLECT = "WHET_BAD_INPUT"  # in the environment of the tests: the file into which they write what was said
LINE = re.compile(r"^\| (?P<situation>[^|]+) \| `(?P<message>[^|`]+)` \|", re.MULTILINE)
MAX_CHARACTERS = 400
VARIES = (
    (re.compile(r"(?<![\w./:-])(?:/[\w.@+~-]+){2,}/?"), "..."),  # a path
    (re.compile(r"\.\.\.(?::/[\w./-]+)+"), "..."),  # the rest of a list of folders
    (re.compile(r"(?<=127\.0\.0\.1:)\d{3,}"), "..."),
    (re.compile(r"\(\S+:\d+\)"), "(...:...)"),  # file and line
    (re.compile(r"\b[\d,.]+ (?=[KMG]i?B\b)"), "... "),
    (re.compile(r"\b(?:0x)?[0-9a-f]{10,}\b"), "..."),
    (re.compile(r"\bprocess \d+ on [^\s:;]+"), "process ... on ..."),
    (re.compile(r"((?:[\w'+-]+, ){2})(?:[\w'+-]+, ){4,}[\w'+-]+\b(?![.:])"), r"\1..."),
    (re.compile(r"\.{4,}"), "..."),
)


def messages(page: str) -> dict[str, str]:
    """Returns the message of each situation of the page."""
    return {line["situation"].strip(): line["message"] for line in LINE.finditer(page)}


def plain(said: str) -> str:
    """Returns a message on one line, without the marks that end a cell or a piece of code in it."""
    return " ".join(said.split()).replace("`", "'").replace("|", "/")


def fits(message: str, said: str) -> bool:
    """Tells whether a message of the page is part of a printed message."""
    return re.search(".*".join(map(re.escape, message.split("..."))), plain(said)) is not None


def shortened(said: str) -> str:
    """Returns a message with `...` for varying parts, and for text that is too long for a table."""
    text = plain(said)
    for pattern, instead in VARIES:
        text = pattern.sub(instead, text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS].rpartition(' ')[0]} ..."


def with_messages(page: str, said: Mapping[str, str]) -> str:
    """Returns the page with a new message for each situation in which something else is said now."""

    def line(found: re.Match[str]) -> str:
        situation, message = found["situation"].strip(), found["message"]
        if situation not in said or fits(message, said[situation]):
            return found[0]
        return f"| {found['situation']} | `{shortened(said[situation])}` |"

    return LINE.sub(line, page)


def collected() -> dict[str, str]:
    """Runs the tests; returns the messages by situation.  Raises: CalledProcessError if a provocation fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "said.jsonl")
        words = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", str(TESTS)]
        subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, COLLECT: str(file)})
        return dict(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def page(text: str) -> str:
    """Returns the page with the messages of now."""
    return with_messages(text, collected())
