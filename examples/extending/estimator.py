# SPDX-License-Identifier: Apache-2.0
"""An advantage estimator of your own.

whet train ... algorithm.adv_estimator=examples/extending/estimator.py:over_median

Parameters before `*` are columns of the batch, by name; those after it are options (`algorithm.adv_options.scale=2`).
"""

from torch import Tensor

from whet.algorithms.statistics import row_sums


def over_median(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, *, scale: float = 1.0) -> Tensor:
    """A = scale (s - median of the group's s).   -> [B], one number a row"""
    scores = row_sums(token_level_rewards, response_mask)
    advantages = scores.clone()
    for group in uid.unique():
        advantages[uid == group] -= scores[uid == group].median()
    return scale * advantages
