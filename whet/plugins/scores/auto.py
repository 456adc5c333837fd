# SPDX-License-Identifier: Apache-2.0
"""Selects the score function of a row by its `data_source`, with verl's names, or by the form of its ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from whet.errors import RewardError, did_you_mean
from whet.files import shipped_yaml
from whet.registry import REWARDS, Entry, register_reward

# Function and options by data source.
SOURCES: dict[str, tuple[str, Mapping[str, Any]]] = {
    source: next(iter(found.items())) for source, found in shipped_yaml("plugins/scores/sources.yaml").items()
}


@register_reward("auto", rows_checked_by="whet.plugins.scores.auto:check_row")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], prompt_str: str
) -> Any:
    """Scores a response with the function for the row's `data_source`; docs/rewards.md has the table of functions.

    Raises: RewardError for a data source that is not in the table."""
    fields = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
        "prompt_str": prompt_str,
    }
    entry, options = find(data_source)
    return entry.make(fields, options)


def check_row(truth: Any, extra_info: Mapping[str, Any], data_source: str) -> None:
    """Raises: RewardError for an unknown data source; the errors of the source's function for the ground truth."""
    find(data_source)[0].check_row(truth, extra_info, data_source)


@cache
def find(data_source: str) -> tuple[Entry, Mapping[str, Any]]:
    """Returns the function for a data source, and the function's options.  Raises: RewardError."""
    found = next((entry for source, entry in SOURCES.items() if fnmatchcase(data_source, source)), None)
    if found is None:
        hint = did_you_mean(data_source, SOURCES)
        change = "correct it, or name a function in reward.function"
        expected = f"one of {', '.join(SOURCES)}, which have a function of their own"
        raise RewardError("data_source", data_source, expected, f"{hint} {change}".strip())
    name, options = found
    if name not in REWARDS:
        unknown = f"{data_source!r}, whose function {name!r} is not registered"
        change = "name one of them, or your own, in reward.function"
        raise RewardError("data_source", unknown, f"one of {', '.join(REWARDS.names())}", change)
    return REWARDS[name], options


@register_reward("math_or_code", checked_by="whet.plugins.scores.code:check_options")
def score_math_or_code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    prompt_str: str = "",
    *,
    sandbox: str = "bubblewrap",
) -> Any:
    """Scores a response by `code` or `math`, for rows of Skywork-OR1, which use the manager `yr`.

    The word `code` or `math` in `ability`, or else in `data_source`, selects the function; without such a word, tests
    in the ground truth select `code`.  Raises: the errors of `code`."""
    kind = str(extra_info.get("ability") or data_source).lower()
    named = [name for name in ("code", "math") if name in kind]
    if (named or ["code" if _has_tests(ground_truth, extra_info) else "math"])[0] == "math":
        return REWARDS["math"].load()(solution_str, ground_truth, prompt_str)
    return REWARDS["code"].load()(solution_str, ground_truth, extra_info, sandbox=sandbox)


def _has_tests(truth: Any, extra_info: Mapping[str, Any]) -> bool:
    from whet.plugins.scores.code import read_tests

    try:
        return isinstance(truth, str | Mapping) and bool(read_tests(truth, extra_info).cases)
    except ValueError:
        return False
