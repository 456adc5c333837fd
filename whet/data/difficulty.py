# SPDX-License-Identifier: Apache-2.0
"""Offline difficulty filter: excludes prompts that are too easy or too hard."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from whet.errors import DataError
from whet.types import Prompt

log = logging.getLogger(__name__)


def within_window(prompts: Sequence[Prompt], key: str, low: float, high: float) -> tuple[Prompt, ...]:
    """The prompts with low < `extra_info[key]` < high, for instance the accuracy from an earlier `whet eval`.

    He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.  Raises: DataError for a row without such a number,
    and if no prompt is left.
    """
    kept = tuple(prompt for prompt in prompts if low < difficulty(prompt, key, "data.difficulty_key") < high)
    if not kept:
        raise DataError(
            f"none of {len(prompts)} prompts has {low} < {key} < {high}; widen data.difficulty_window, or unset "
            "data.difficulty_key"
        )
    if len(kept) < len(prompts):
        log.info("%d of %d prompts are outside %g < %s < %g", len(prompts) - len(kept), len(prompts), low, key, high)
    return kept


def difficulty(prompt: Prompt, key: str, option: str) -> float:
    """`extra_info[key]`; `option` is the config key that named it.  Raises: DataError if it is not a number."""
    value = prompt.extra_info.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(
            f"row {prompt.index}: {option}={key} is {value!r}, expected a number; the row has "
            f"{', '.join(prompt.extra_info) or 'no further fields'}"
        )
    return float(value)
