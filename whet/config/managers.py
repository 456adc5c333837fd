# SPDX-License-Identifier: Apache-2.0
"""Presets of `reward` keys under the names of verl's reward managers; the names of the limits of reward calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Manager = Literal["naive", "batch", "prime", "dapo", "yr", "rate_limited"]
# The values of `reward` by manager; a key that is set keeps its value. The adapter requires a function of all responses
# for batch and of one response for the others; dapo also requires algorithm.overlong.
MANAGERS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "naive": {"num_workers": 1, "concurrency": 1},
        "batch": {"num_workers": 1},
        "prime": {},
        "dapo": {},
        "yr": {"function": "math_or_code"},
        "rate_limited": {"num_workers": 1},
    }
)
MANAGER = (
    "preset named like a reward manager of verl: naive (one call at a time), batch (one call for all responses), prime "
    "(in parallel, each with a deadline), dapo (with algorithm.overlong), yr (math or code), rate_limited; unset: none"
)
LIMIT_NAMES = ("requests_per_minute", "tokens_per_minute", "tokens_per_request")
TOKENS_PER_REQUEST = 2000
LIMITS = f"{', '.join(LIMIT_NAMES)} (an estimate of the tokens of a call; unset: {TOKENS_PER_REQUEST})"
