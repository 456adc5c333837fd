# SPDX-License-Identifier: Apache-2.0
"""Chooses rows by the values of fields: `data.filter` has a value, a list of values, `{min: , max: }` or `{not: }` for
a field, and `data.difficulty_window` excludes prompts that are too easy or too hard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whet.errors import ConfigError, DataError, did_you_mean
from whet.types import Prompt

log = logging.getLogger(__name__)
Test = Callable[[Any, int], bool]  # of a field's value and the row number
BOUNDS = ("min", "max")


def matching(rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> list[int]:
    """The numbers of the rows that meet all conditions. A field may be nested: `extra_info.level`.

    A missing field is null: it equals only null, and lies within no bounds.
    Raises: ConfigError for an invalid condition; DataError for a field that no row has, and if no row is left.
    """
    left = list(range(len(rows)))
    for field, condition in where.items():
        test = _test(field, condition)
        if rows and not any(field in _names(row) for row in rows):
            names = sorted({name for row in rows for name in _names(row)})
            hint = did_you_mean(field, names, f"name one of {', '.join(names)}", quoted=False, most=3)
            raise DataError(f"data.filter.{field}", "no row has this field", "", hint)
        met = [number for number in left if test(_value(rows[number], field), number)]
        if left and not met:
            found = Counter(repr(_value(rows[number], field)) for number in left).most_common(5)
            problem = f"none of {len(left)} rows has {field} {_show(condition)}"
            values = ", ".join(value for value, _ in found)
            raise DataError(f"data.filter.{field}", problem, f"a value that some rows have, most often {values}")
        left = met
    return left


def _test(field: str, condition: object) -> Test:
    if isinstance(condition, Mapping):
        if set(condition) == {"not"}:
            denied = _test(field, condition["not"])
            return lambda value, number: not denied(value, number)
        if condition and set(condition) <= set(BOUNDS) and all(_is_number(bound) for bound in condition.values()):
            low, high = condition.get("min", float("-inf")), condition.get("max", float("inf"))
            return lambda value, number: value is not None and low <= _number(field, value, number) <= high
        expected = "a value, a list of values, {min: number, max: number} (either may be left out) or {not: ...}"
        raise ConfigError(f"data.filter.{field}", dict(condition), expected)
    if isinstance(condition, Sequence) and not isinstance(condition, str):
        tests = [_test(field, each) for each in condition]
        return lambda value, number: any(test(value, number) for test in tests)
    return lambda value, number: bool(value == condition and isinstance(value, bool) == isinstance(condition, bool))


def _value(row: Mapping[str, Any], field: str) -> Any:
    outer, dot, inner = field.partition(".")
    if field in row or not dot:
        return row.get(field)
    return _value(row[outer], inner) if isinstance(row.get(outer), Mapping) else None


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the fields of a row, also those in fields: `extra_info`, `extra_info.level`."""
    for outer, value in row.items():
        yield outer
        yield from (f"{outer}.{inner}" for inner in _names(value if isinstance(value, Mapping) else {}))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(field: str, value: Any, number: int) -> float:
    if not _is_number(value):
        expected = f"a number, as data.filter.{field} has bounds"
        raise DataError(f"row {number}: field {field!r}", f"is {value!r}", expected)
    return float(value)


def _show(condition: object) -> str:
    return f"= {condition!r}" if not isinstance(condition, Mapping) else f"within {dict(condition)}"


def within_window(prompts: Sequence[Prompt], key: str, low: float, high: float) -> tuple[Prompt, ...]:
    """The prompts with low < `extra_info[key]` < high, for instance the accuracy from an earlier `whet eval`.

    He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.  Raises: DataError for a row without such a number,
    and if no prompt is left.
    """
    kept = tuple(prompt for prompt in prompts if low < difficulty(prompt, key, "data.difficulty_key") < high)
    if not kept:
        problem = f"none of {len(prompts)} prompts has {low} < {key} < {high}"
        raise DataError("data.difficulty_window", problem, "", "widen it, or unset data.difficulty_key")
    if len(kept) < len(prompts):
        log.info("%d of %d prompts are outside %g < %s < %g", len(prompts) - len(kept), len(prompts), low, key, high)
    return kept


def difficulty(prompt: Prompt, key: str, option: str) -> float:
    """`extra_info[key]`; `option` is the config key that named it.  Raises: DataError if it is not a number."""
    value = prompt.extra_info.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = f"is {value!r}; the row has {', '.join(prompt.extra_info) or 'no further fields'}"
        raise DataError(f"row {prompt.index}: {option}={key}", found, "a number")
    return float(value)
