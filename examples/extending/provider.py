# SPDX-License-Identifier: Apache-2.0
"""A column of your own, and an estimator that reads it. A run imports the file when one of its functions is named:

whet train ... algorithm.adv_estimator=examples/extending/provider.py:cautious
"""

import torch
from torch import Tensor

from whet.algorithms.advantages import grpo
from whet.batch import Batch
from whet.trainers.columns import Sources, register_provider


@register_provider("prompt_difficulty")
def prompt_difficulty(batch: Batch, sources: Sources) -> Tensor:
    """The share of wrong trajectories in a row's group.   -> [B]"""
    wrong = [
        sum((each.accuracy or 0.0) < 1 for each in group.trajectories) / len(group.trajectories)
        for group in sources.groups
    ]
    return torch.tensor(wrong)[batch["uid"]]


def cautious(token_level_rewards: Tensor, prompt_difficulty: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """GRPO's advantage, with a smaller weight for hard prompts.   -> [B]"""
    return grpo(token_level_rewards, response_mask, uid) * (1 - 0.5 * prompt_difficulty)
