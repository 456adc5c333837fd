# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from whet.environments.tools.schema import checked, read_docstring, schema_of
from whet.errors import ConfigError


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
    ("function", "said"),
    [
        (no_type, "the parameter b of the tool f has no type; expected one such as b: str; annotate it"),
        (many, r"has the parameter \*values: .*, which has no schema; expected named parameters with types"),
        (named, r"has the parameter \*\*values: .*, which has no schema"),
        (silent, "the tool f has no docstring, from which the model reads its use; write one"),
        (odd, "a parameter of the tool f has a type without a JSON schema: .*; expected str, int"),
        (lost, "the types of f cannot be read: name 'Missing' is not defined; correct the annotations"),
    ],
)
def test_what_has_no_schema(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.tools\[0\]: .*{said}"):
        schema_of(function, "f", "environment.tools[0]")
