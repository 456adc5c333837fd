# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.raising import raises
from whet.data.prompts import Template
from whet.errors import DataError


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ content | upper }}: é")
    for text in ("{{ content | upper }}: é", str(tmp_path / "mine.jinja")):
        assert Template("key", text).render({"content": "a", "n": 1}) == "A: é"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            r"access to attribute '__class__' of 'str' object is unsafe$",
        ),
        ("{{ fields.append(1) }}", r"access to attribute 'append' of 'list' object is unsafe$"),
        ("{{ content * 10 ** 10 }}", r"\b1 GiB\b"),
        ("{{ 1 / fields | length }}", r"division by zero$"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"maximum recursion depth exceeded"),
        ("{% import 'os' as os %}", r"no loader for this environment"),
    ],
)
def test_a_template_runs_no_code_and_stays_within_limits(text: str, said: str) -> None:
    template = Template("data.key", text)
    with raises(DataError, key="data.key", found=re.compile(said)):
        template.render({"content": "a", "fields": []})


def test_a_template_that_cannot_be_made_is_named() -> None:
    with raises(DataError, key="key: line 2", found=re.compile("Expected an expression")):
        Template("key", "\n{% if %}")
    with raises(DataError, key="key", found=re.compile("too many statically nested blocks")):
        Template("key", "{% for i in x %}" * 30 + "{% endfor %}" * 30)
