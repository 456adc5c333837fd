# SPDX-License-Identifier: Apache-2.0
"""Results of score functions, and the rule that reads them.

A result is a number or a dict. In a dict, the reward is `reward`, else `score`, else `overall`. The 0/1 metric is
`accuracy`, else `acc`; without both it is 1 if the reward reaches the threshold. `pred` is the extracted answer, for
majority votes. All other numbers are parts. A list of numbers is one reward for each response token. An unreadable
result is a Failure, so no row is trained on a default of 0."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from whet.errors import DataError, RewardError
from whet.rounding import reaches
from whet.types import Failure, Outcome, RewardResult

REWARD_KEYS = ("reward", "score", "overall")
ACCURACY_KEYS = ("accuracy", "acc")
EXTRACTED_KEY = "pred"  # as in verl
QUOTED = 40  # characters that are no coincidence
RESULT = "result"


@runtime_checkable
class _Array(Protocol):
    """A tensor of any library. `tolist` reads it without an import of the library."""

    def tolist(self) -> Any: ...


def read_result(raw: object, *, correct_threshold: float, num_response_tokens: int) -> Outcome:
    """Converts the return value `raw` of a score function.  Returns a RewardResult, or a Failure with the reason."""
    try:
        if isinstance(raw, Mapping):
            return _read_mapping(raw, correct_threshold, num_response_tokens)
        reward, token_rewards = _read_reward(RESULT, raw, num_response_tokens)
        return RewardResult(reward, float(reaches(reward, correct_threshold)), {}, token_rewards)
    except RewardError as error:
        return Failure("reward", str(error), key=error.key)


def split_rows(raw: object, count: int) -> list[Any]:
    """Splits the result of a function of all items into one result per item: a sequence or tensor by position, a dict
    of columns by row; a number in the dict is in every row.  Raises: RewardError if rows are missing."""
    if isinstance(raw, Mapping):
        found = {name: entries(value) for name, value in raw.items()}
        columns = {name: _split_column(str(name), each, count) for name, each in found.items() if each is not None}
        numbers = {name: value for name, value in raw.items() if name not in columns and as_number(value) is not None}
        if uncolumned := [name for name in REWARD_KEYS if name in numbers]:
            raise RewardError(uncolumned[0], f"one number for {count} responses", "a number for each response")
        return [{**numbers, **{name: column[row] for name, column in columns.items()}} for row in range(count)]
    if (listed := entries(raw)) is None:
        raise RewardError(RESULT, f"{_show(raw)} for {count} responses", "a list of one result per response")
    return _split_column(RESULT, listed, count)


def as_number(value: object) -> float | None:
    """Returns `value` as a float if it is a number of any library (0-dimensional tensors too); else None."""
    if type(value) is float:
        return value
    # isinstance with a protocol is a hundred times slower than a comparison of types.
    if type(value) not in (int, bool) and not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def number_text(value: Decimal) -> str:
    """Formats a number as the text of a `pred`, so that equal numbers give equal texts: 72, not 72.0, 072 or 7.2e1."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def after_thought(text: str) -> str:
    """Returns the text after the last `</think>`, in which the answer is; without this tag the whole text."""
    return text.rpartition("</think>")[2]


def is_repeated(text: str, start: int, prompt: str) -> bool:
    """Tells whether a response from `start` on copies the prompt, and so is no answer: if `QUOTED` characters of the
    prompt precede it, or if it is part of a copy of the whole prompt (of two words or more) at the end."""
    before, prompt = text[max(0, start - QUOTED) : start + 1], prompt.strip()
    is_whole = " " in prompt and text.rstrip().endswith(prompt) and start >= len(text.rstrip()) - len(prompt)
    return is_whole or (start >= QUOTED and before in prompt)


def failure(message: str, *, timed_out: bool = False) -> Failure:
    """Makes a Failure with source "reward"."""
    return Failure("reward", message, timed_out)


def truth_error(truth: object, expected: str, change: str = "correct the row") -> DataError:
    """Returns the error for a ground truth that a reward function cannot read."""
    return DataError("ground_truth", None if truth is None else f"{truth!r:.80}", expected, change)


def closed_error() -> RewardError:
    """Returns the error for a call of a closed pool."""
    return RewardError("reward pool", "closed", "a pool that is open", "open another pool")


NOT_SCORED = failure("the function returned None for this response: it does not score it")


def _read_mapping(raw: Mapping[Any, Any], correct_threshold: float, num_response_tokens: int) -> RewardResult:
    if "reward_score" in raw:  # the result of verl's `run_single`
        raw = {**(raw.get("reward_extra_info") or {}), "reward": raw["reward_score"]}
    reward_key = next((key for key in REWARD_KEYS if key in raw), None)
    if reward_key is None:
        raise RewardError(
            RESULT, f"a dict of {', '.join(map(str, raw)) or 'nothing'}", f"one of {', '.join(REWARD_KEYS)}"
        )
    reward, token_rewards = _read_reward(reward_key, raw[reward_key], num_response_tokens)
    accuracy_key = next((key for key in ACCURACY_KEYS if key in raw), None)
    accuracy = float(reaches(reward, correct_threshold))
    if accuracy_key is not None:
        accuracy = finite(accuracy_key, raw[accuracy_key])
    others = {str(key): value for key, value in raw.items() if key not in (reward_key, accuracy_key, EXTRACTED_KEY)}
    parts = {key: finite(key, value) for key, value in others.items() if as_number(value) is not None}
    extracted = raw.get(EXTRACTED_KEY)
    return RewardResult(reward, accuracy, parts, token_rewards, None if extracted is None else str(extracted))


def _read_reward(what: str, value: object, num_response_tokens: int) -> tuple[float, tuple[float, ...] | None]:
    """Returns the total reward, and the token rewards if `value` is a list (which may also cover the padding)."""
    if as_number(value) is not None or (listed := entries(value)) is None:
        return finite(what, value), None
    return _read_tokens(what, listed, num_response_tokens)


def _read_tokens(what: str, listed: list[object], num_response_tokens: int) -> tuple[float, tuple[float, ...]]:
    row = [finite(f"{what}, token {position}", each) for position, each in enumerate(listed)]
    if len(row) < num_response_tokens or not num_response_tokens:
        raise RewardError(what, f"{len(row)} numbers", f"one number, or {num_response_tokens}, one per token")
    late = next((position for position in range(num_response_tokens, len(row)) if row[position] != 0), None)
    if late is not None:
        change = f"give a reward for the whole response to token {num_response_tokens - 1}"
        expected = f"0 in the padding, since the response has {num_response_tokens} tokens"
        raise RewardError(f"{what}, token {late}", row[late], expected, change)
    return math.fsum(row), tuple(row[:num_response_tokens])


def finite(what: str, value: object) -> float:
    """Returns `value` as a finite number.  Raises: RewardError if it is not a number, or not finite."""
    number = as_number(value)
    if number is None:
        raise RewardError(what, _show(value), "a number")
    if not math.isfinite(number):
        raise RewardError(what, number, "a finite number", "leave out, or set to None, a part that does not apply")
    return number


def entries(value: object) -> list[object] | None:
    """Returns the entries of a sequence or tensor; None for other values."""
    found = value.tolist() if isinstance(value, _Array) else value
    return list(found) if isinstance(found, Sequence) and not isinstance(found, (str, bytes)) else None


def _split_column(what: str, column: list[object], count: int) -> list[object]:
    if len(column) != count:
        raise RewardError(what, f"{len(column)} entries for {count} responses", "one entry per response, in order")
    return column


def _show(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
