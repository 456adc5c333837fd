# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from whet.config.compose import read_document
from whet.errors import ConfigError


def test_a_document_is_its_text(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [2, é]}\nb: {<<: *a, z: 3}\nc: [*a, *a]\n"
    (tmp_path / "fine.yaml").write_text(text, encoding="utf-8")
    assert read_document(tmp_path / "fine.yaml") == text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: 1\nb: &b [c, *b]\n", r"mine\.yaml:2: this value expands to more than 100,000 values, or without end"),
        (b"a: " + b"[" * 60 + b"]" * 60, r"mine\.yaml:1: this value is nested more than 50 levels deep"),
        (b"a: &a [0,0,0,0,0,0,0,0,0,0]\n" + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 10))
                                                     for n in range(98, 106)),
         r"mine\.yaml:5: this value expands to more than 100,000 values"),
        (b"a: \xff", r"mine\.yaml cannot be read: 'utf-8' codec .*; save it as UTF-8"),
        (b"a: [", r"mine\.yaml is not valid YAML: .*; correct it there"),
        (b"a" * 2**21, r"mine\.yaml has 2,097,152 bytes; a config has at most 1,048,576"),
    ],
)  # fmt: skip
def test_what_would_never_end_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_document(tmp_path / "mine.yaml")
