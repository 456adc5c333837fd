# SPDX-License-Identifier: Apache-2.0
"""A source of hints for CPO's teacher: whet train ... algorithm.adv_estimator=cpo \\
teacher.hint=examples/extending/hint.py:first_digits

It returns a text, or None for no hint, for each trajectory of each group."""

from collections.abc import Sequence

from whet.types import Group


def first_digits(groups: Sequence[Group], *, count: int = 1) -> list[list[str | None]]:
    """The first `count` characters of the ground truth, for trajectories that are wrong."""
    return [
        [None if (each.accuracy or 0) >= 1 else str(group.prompt.ground_truth)[:count] for each in group.trajectories]
        for group in groups
    ]
