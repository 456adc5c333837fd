# SPDX-License-Identifier: Apache-2.0
"""Ranges of options: the ones named by the issue of a silent run, of every shipped function, of users."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Lt
from torch import Tensor

from tests.algorithms.calling import estimate, policy_loss, with_mini_batch_columns
from tests.conftest import is_installed
from tests.raising import raises
from whet.algorithms.calls import call
from whet.errors import ConfigError
from whet.options import Finite, Share, bounds_of, fits, words
from whet.registry import ADV_ESTIMATORS, KINDS, POLICY_LOSSES, WEIGHTS, Entry, Registry, entry_of
from whet.trainers.teacher import HINTS

FROM_THE_LOOP = {"num_tokens", "num_sequences", "fixed_length"}  # what aggregations are given; no option of a config
BATCH = {
    "log_probs": torch.tensor([[-1.0, -2.0]]),
    "old_log_probs": torch.tensor([[-1.0, -1.5]]),
    "rollout_log_probs": torch.tensor([[-1.5, -1.0]]),
    "advantages": torch.tensor([[1.0, -1.0]]),
    "entropy": torch.tensor([[1.0, 0.5]]),
    "draws": torch.tensor([[0.1, 0.5]]),
    "response_mask": torch.ones(1, 2, dtype=torch.long),
}
SILENT = [  # what would leave tokens, or all of them, without a gradient
    ("policy loss", "ppo_clip", {"clip_ratio_c": 0.5}, 0.5, "a number > 1 or null"),
    ("policy loss", "vanilla", {"clip_ratio_c": 1.0}, 1.0, "a number > 1 or null"),
    ("token weight", "icepop", {"low": 5.0}, 5.0, "a number >= 0 and <= 1"),
    ("token weight", "icepop", {"high": 0.5, "low": 0.5}, 0.5, "a number >= 1"),
    ("token weight", "importance", {"cap": -1.0}, -1.0, "a number > 0"),
    ("token weight", "importance", {"floor": 5.0, "cap": 1.0}, 5.0, "cap=1.0"),
    ("token weight", "top_entropy", {"share": 2.0}, 2.0, "a number > 0 and <= 1"),
    ("token weight", "top_entropy", {"share": -1.0}, -1.0, "a number > 0 and <= 1"),
    ("policy loss", "clip_cov", {"lower": 6.0}, 6.0, "upper=5.0"),
]


@pytest.mark.parametrize(("kind", "name", "options", "found", "expected"), SILENT)  # the first option is wrong
def test_what_would_silence_training_is_refused_at_load_and_from_python(
    kind: str, name: str, options: dict[str, Any], found: float, expected: str
) -> None:
    entry = next(each for each in KINDS if each.kind == kind)[name]
    allowed, option = re.compile(f"{re.escape(expected)}$"), next(iter(options))
    with raises(ConfigError, f"key.{option}", found=found, expected=allowed):
        entry.resolve_options(options, "key")
    with raises(ConfigError, re.compile(rf"{option}$"), found=found, expected=allowed):
        call(entry, {**BATCH, "chosen": BATCH["draws"]}, options)


def test_the_adapters_refuse_too() -> None:
    with raises(ConfigError, re.compile("clip_ratio_c$"), found=0.5):
        policy_loss(POLICY_LOSSES["ppo_clip"], BATCH, {"clip_ratio_c": 0.5})
    with raises(ConfigError, re.compile("share$"), found=-1.0):
        with_mini_batch_columns(POLICY_LOSSES["kl_cov"], BATCH, {"share": -1.0})
    with raises(ConfigError, re.compile("gamma$"), found=1.5, expected="a number >= 0 and <= 1"):
        estimate(
            ADV_ESTIMATORS["reinforce_plus_plus"], {**BATCH, "token_level_rewards": BATCH["draws"]}, {"gamma": 1.5}
        )


# ---- every shipped function


def numeric_options() -> Iterator[tuple[Registry, Entry, str, Any]]:
    """Every option of a shipped function in whose annotation a number stands."""
    for kind in (*KINDS, HINTS):
        for entry in kind:
            if not is_installed(entry):
                continue
            function = entry.load()
            hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
            for name in entry.options:
                if has_number(hints.get(name)) and name not in FROM_THE_LOOP:
                    yield kind, entry, name, hints[name]


def has_number(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return annotation in (int, float) or any(has_number(each) for each in get_args(annotation))


NUMERIC = [
    pytest.param(*found[1:], id=f"{found[0].decorator}-{found[1].name}-{found[2]}") for found in numeric_options()
]


@pytest.mark.parametrize(("entry", "name", "annotation"), NUMERIC)
def test_every_numeric_option_has_a_range_and_refuses_what_is_outside(entry: Entry, name: str, annotation: Any) -> None:
    assert entry.takes[name] == annotation  # as read from the source
    bounds = list(bounds_of(annotation))
    assert bounds, f"{entry.kind} {entry.name!r}: give {name} a range, Annotated[float, Ge(0)] or one of whet.options"
    outside = [just_outside(bound) for bound in bounds]
    is_list = any(get_origin(each) is Sequence for each in (annotation, *get_args(annotation)))
    for value in (*outside, math.nan, "1", True):
        given = [value] if is_list else value
        with raises(ConfigError, f"key.{name}", found=re.compile(f"^{re.escape(str(given))}$")):  # nan is not nan
            entry.check({name: given}, "key.")


def test_every_annotation_of_a_shipped_function_is_read_from_its_source() -> None:
    unread = [
        (entry.name, name) for kind in KINDS for entry in kind for name, takes in entry.takes.items() if takes is Any
    ]
    assert not unread, "use names of whet.options and builtins alone"


def just_outside(bound: Any) -> float:
    match bound:
        case Gt(gt=limit) | Lt(lt=limit):
            return float(limit)
        case Ge(ge=limit):
            return float(limit) - 1
        case Le(le=limit):
            return float(limit) + 1
    raise AssertionError(bound)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_defaults_are_within_their_ranges(kind: Registry) -> None:
    for entry in kind:
        given = {name: value for name, value in entry.options.items() if value is not inspect.Parameter.empty}
        entry.check(given, "defaults")


# ---- functions of users


def mine(
    log_probs: Tensor,
    *,
    cap: Annotated[float, Gt(1)] = 2.0,
    shares: Sequence[Share] | None = None,
    band: Annotated[int, Interval(ge=2, lt=5)] = 3,
    later: NotThereAtAll = None,  # type: ignore[name-defined]  # noqa: F821
) -> Tensor:
    """Mine."""
    return log_probs


def test_a_users_function_says_its_ranges_in_the_same_way() -> None:
    entry = entry_of(mine, "policy loss", "mine", {})
    assert entry.resolve_options({"cap": 3, "shares": [0, 0.5, 1], "band": 4, "later": "x"}, "key")["band"] == 4
    for name, value, expected in (
        ("cap", 1, "a number > 1"),
        ("cap", None, "a number > 1"),
        ("shares", [0.5, 2], "a list, each a number >= 0 and <= 1 or null"),
        ("band", 5, "a whole number >= 2 and < 5"),
        ("band", 2.5, "a whole number >= 2 and < 5"),
    ):
        default = re.compile(f"{entry.options[name]!r}$")
        with raises(ConfigError, f"key.{name}", found=value, expected=expected, change=default):
            entry.resolve_options({name: value}, "key")

    def evaluated(log_probs: Any, *, cap: Any = 2.0) -> Any:
        return log_probs

    evaluated.__annotations__["cap"] = Annotated[float | None, Gt(1)]
    with raises(ConfigError, re.compile("cap$"), found=0.5, expected="a number > 1 or null"):
        call(entry_of(evaluated, "policy loss", "evaluated", {}), BATCH, {"cap": 0.5})
    assert call(entry_of(evaluated, "policy loss", "evaluated", {}), BATCH, {"cap": None}) is BATCH["log_probs"]


def test_what_fits() -> None:
    assert [fits(value, Finite) for value in (0, -1e9, math.inf, math.nan, True, "1", None)] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert fits(math.inf, Annotated[float, Gt(0)]) and not fits(math.nan, float)
    assert fits((1, 2), list[int]) and fits({"a": 1}, Mapping[str, int]) and not fits("ab", Sequence[str])
    assert fits("a", Literal["a"]) and not fits("b", Literal["a"] | None) and fits(None, Literal["a"] | None)
    assert fits(object(), Any) and fits(torch.zeros(1), Tensor)


def test_words() -> None:
    assert words(Finite) == "a finite number"
    assert words(Annotated[float | None, Gt(1)]) == words(Annotated[float, Gt(1)] | None) == "a number > 1 or null"
    assert words(Literal["a", "b"]) == "one of a, b" and words(NoneType) == "null"
    assert words(Annotated[int, Gt(0)] | Literal["auto"]) == "a whole number > 0 or auto"


def test_weights_of_a_sequence_may_have_no_cap() -> None:
    assert call(WEIGHTS["importance"], BATCH, {"level": "sequence", "cap": math.inf})[0, 0] == 1.0
