# SPDX-License-Identifier: Apache-2.0
"""Filters choose the groups to train on. A filter gets the metric of each trajectory of a group, without failed ones,
and returns True to keep the group. The caller decides what replaces dropped groups.

The caller (`rollout/flow.py`) reads an option `extra`: a step begins with (1 + extra) batches of prompts, and aborts
the prompts whose groups have not ended when the batch is full."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from whet.options import Finite, NonNegative
from whet.registry import register_filter
from whet.rounding import alike, all_alike


@register_filter("dynamic_sampling", aliases=("dapo",))
def dynamic_sampling(values: Sequence[float], *, extra: NonNegative = 0.0) -> bool:
    """Keeps a group whose values differ by more than rounding: else its advantages are all 0. `extra`: see above.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
    """
    return not all_alike(values)


@register_filter("mean_window", ordered=("low", "high"))
def mean_window(values: Sequence[float], *, low: Finite = 0.01, high: Finite = 0.99) -> bool:
    """Keeps a group with low < mean < high: neither too hard nor too easy.

    The difficulty window of Skywork-OR1 (He et al. 2025, https://arxiv.org/abs/2505.22312) and EasyR1.
    """
    mean = fmean(values) if values else low
    return low < mean < high and not alike(mean, low) and not alike(mean, high)


@register_filter("first_finished")
def first_finished(values: Sequence[float], *, extra: NonNegative = 0.25) -> bool:
    """Keeps every group; the step starts (1 + extra) batches of prompts and takes the first batch of groups to end.

    Over-sampling, as in ROLL (https://arxiv.org/abs/2506.06122). A group ends with its longest response. Long responses
    are therefore trained on less often than sampled, which biases the gradient towards short responses."""
    return True
