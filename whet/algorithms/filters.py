# SPDX-License-Identifier: Apache-2.0
"""Filters: choose the groups to train on. Each gets the metric of a group's trajectories, without failed ones, and
returns True to keep the group. The caller decides what replaces dropped groups."""

from __future__ import annotations

from collections.abc import Sequence

from whet.options import Finite
from whet.registry import register_filter


@register_filter("dynamic_sampling", aliases=("dapo",))
def dynamic_sampling(values: Sequence[float]) -> bool:
    """Keeps a group whose values differ: where all are equal, the advantage is 0 and nothing is learned.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
    """
    return len(set(values)) > 1


@register_filter("mean_window", ordered=("low", "high"))
def mean_window(values: Sequence[float], *, low: Finite = 0.01, high: Finite = 0.99) -> bool:
    """Keeps a group with low < mean < high: neither too hard nor too easy.

    The difficulty window of Skywork-OR1 (He et al. 2025, https://arxiv.org/abs/2505.22312) and EasyR1.
    """
    return len(values) > 0 and low < sum(values) / len(values) < high
