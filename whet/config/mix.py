# SPDX-License-Identifier: Apache-2.0
"""Shares of the kinds of rows in a batch, as `data.mix` gives them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

MixShare = float | Mapping[int, float]  # one number, or numbers by step


def shares_at(mix: Mapping[str, MixShare], step: float) -> dict[str, float]:
    """The share of each kind at a step: linear between the steps that are given, constant before and after them."""
    return {name: share if isinstance(share, int | float) else _between(share, step) for name, share in mix.items()}


def _between(shares: Mapping[int, float], step: float) -> float:
    steps = sorted(shares)
    place = bisect_right(steps, step)
    if place in (0, len(steps)):
        return shares[steps[max(0, place - 1)]] if steps else 0.0
    before, after = steps[place - 1], steps[place]
    part = (step - before) / (after - before)
    return (1 - part) * shares[before] + part * shares[after]


def mean_shares(mix: Mapping[str, MixShare], steps: int) -> dict[str, float]:
    """The mean share of each kind over the steps of a run."""
    at = [shares_at(mix, step) for step in range(max(1, steps))]
    return {name: sum(shares[name] for shares in at) / len(at) for name in mix}
