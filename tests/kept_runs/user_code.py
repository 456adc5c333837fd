# SPDX-License-Identifier: Apache-2.0
"""The reward functions and the estimator of the kept runs, as a user's file."""

from __future__ import annotations

import time

import torch

PAUSE_SECONDS = 2.0


def early_digit(solution_str: str) -> float:
    """1 if one of the first three characters is a digit, as in half of the texts of random weights."""
    return float(any(each.isdigit() for each in solution_str[:3]))


def even_length(solution_str: str) -> float:
    """1 for an even number of characters, 0 for an odd one."""
    return float(len(solution_str) % 2 == 0)


def patient_mean(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, uid: torch.Tensor) -> torch.Tensor:
    """A = s - mean of the group, after a pause, in which responses sampled ahead end before the weights change, so that
    the same weights sample each token on every machine."""
    time.sleep(PAUSE_SECONDS)
    scores = token_level_rewards.sum(-1)
    same = (uid[:, None] == uid[None, :]).to(scores)
    return scores - same @ scores / same.sum(-1)
