# SPDX-License-Identifier: Apache-2.0
"""A filter of groups: whet train ... algorithm.filter.name=examples/extending/filter.py:hard

It gets `algorithm.filter.metric` of each trajectory of a group; other prompts replace those that it drops."""

from collections.abc import Sequence


def hard(values: Sequence[float], *, most: float = 0.5) -> bool:
    """Keeps a group that some solved, and at most the share `most`."""
    return 0 < sum(values) / len(values) <= most
