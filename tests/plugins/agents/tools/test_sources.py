# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.raising import raises
from whet.errors import ConfigError
from whet.plugins.agents.tools.sources import checked, read_docstring, schema_of


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None, *, key: str) -> str:
    """Returns the weather of a city.

    It is a forecast.

    Args:
        city (str): the name of the city,
            with its country
        days: from 1 to 7

    Returns:
        a text
    """
    return f"{city} {days} {unit} {tags} {key}"


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    schema, model = schema_of(weather, "weather", "environment.tools[0]")
    assert schema.to_dict() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Returns the weather of a city. It is a forecast.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "the name of the city, with its country"},
                    "days": {"type": "integer", "default": 1, "description": "from 1 to 7"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["city"],
            },
        },
    }  # fmt: skip
    assert checked(model, {"city": "Bern", "days": "3"}) == {"city": "Bern", "days": 3}
    with pytest.raises(ValueError, match=r"wrong arguments: city: Field required; days: Input should be .*; x: Extra"):
        checked(model, {"days": "three", "x": 1})
    with pytest.raises(ValueError, match="unit: Input should be 'C' or 'F'"):
        checked(model, {"city": "Bern", "unit": "K"})


def test_names_that_pydantic_keeps_are_names_of_arguments() -> None:
    def tool(schema: int, _under: int, model_config: int, title: str) -> None:
        """Does something."""

    found, model = schema_of(tool, "tool", "x")
    assert list(found.parameters["properties"]) == ["schema", "_under", "model_config", "title"]
    given = {"schema": 1, "_under": 2, "model_config": 3, "title": "t"}
    assert checked(model, given) == given


def test_a_docstring_without_sections() -> None:
    assert read_docstring("Adds numbers.\nQuickly.") == ("Adds numbers. Quickly.", {})
    assert read_docstring("Adds.\n\nArgs:\n  a: one\n  *b: more: of it\n\nRaises:\n  E: if\n") == (
        "Adds.",
        {"a": "one", "b": "more: of it"},
    )


def no_type(a: int, b) -> None:  # type: ignore[no-untyped-def]
    """Adds."""


def many(*values: int) -> None:
    """Adds."""


def named(**values: int) -> None:
    """Adds."""


def silent(a: int) -> None:
    return None


def odd(a: Callable[[int], int]) -> None:
    """Calls."""


def lost(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Loses."""


@pytest.mark.parametrize(
    ("function", "key", "found", "expected"),
    [
        (no_type, "tool f: b", "type", "b: str"),
        (many, "tool f", r" \*values: ", "types"),
        (named, "tool f", r" \*\*values: ", "types"),
        (silent, "tool f", "docstring", "model"),
        (odd, "tool f", "Callable", "str, int"),
        (lost, "tool f", "'Missing'", "types"),
    ],
)
def test_what_has_no_schema(function: Callable[..., Any], key: str, found: str, expected: str) -> None:
    place = "environment.tools[0]"
    with raises(ConfigError, f"{place}: {key}", found=re.compile(found), expected=re.compile(expected)):
        schema_of(function, "f", place)
