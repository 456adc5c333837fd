# SPDX-License-Identifier: Apache-2.0
"""A reward of your own: whet train ... reward.function=examples/extending/reward.py:near reward.kwargs.scale=5

It runs in processes of its own. docs/rewards.md has all parameters and results."""

from typing import Any


def near(solution_str: str, ground_truth: Any, *, scale: float = 10.0) -> dict[str, float]:
    """max(0, 1 - |response - truth| / scale); 0 for a response that is no number."""
    try:
        distance = abs(int(solution_str) - int(ground_truth))
    except ValueError:
        return {"reward": 0.0, "accuracy": 0.0, "is_number": 0.0}
    return {"reward": max(0.0, 1 - distance / scale), "accuracy": float(distance == 0), "is_number": 1.0}
