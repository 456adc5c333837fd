# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.raising import raises
from whet.config.compose import read_document
from whet.errors import ConfigError


def test_a_document_is_its_text(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [2, é]}\nb: {<<: *a, z: 3}\nc: [*a, *a]\n"
    (tmp_path / "fine.yaml").write_text(text, encoding="utf-8")
    assert read_document(tmp_path / "fine.yaml") == text


@pytest.mark.parametrize(
    ("content", "key", "found", "expected"),
    [
        (b"a: 1\nb: &b [c, *b]\n", "mine.yaml:2", "", "100,000"),
        (b"a: " + b"[" * 60 + b"]" * 60, "mine.yaml:1", "", "50"),
        (b"a: &a [0,0,0,0,0,0,0,0,0,0]\n" + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 10))
                                                     for n in range(98, 106)),
         "mine.yaml:5", "", "100,000"),
        (b"a: \xff", "mine.yaml", "'utf-8' codec", "UTF-8"),
        (b"a: [", "mine.yaml", "line 1", "YAML"),
        (b"a" * 2**21, "mine.yaml", "2,097,152", "1,048,576"),
    ],
)  # fmt: skip
def test_what_would_never_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, key: str, found: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_bytes(content)
    with raises(ConfigError, key, found=re.compile(found), expected=re.compile(expected)):
        read_document(tmp_path / "mine.yaml")
