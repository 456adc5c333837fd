# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import Future

from whet.rewards.pool import WeightedRewards
from whet.rewards.result import NOT_SCORED
from whet.types import Failure, RewardItem, RewardResult


class Said:
    """A pool that returns scripted results."""

    scores_alone = True

    def __init__(self, *outcomes):
        self.outcomes = outcomes

    def submit_batch(self, items):
        future = Future()
        future.set_result(list(self.outcomes[: len(items)]))
        return future


def test_rewards_add_up_and_accuracy_and_answer_are_the_firsts():
    right = Said(RewardResult(1.0, 1.0, {"steps": 3.0}, extracted="72"), RewardResult(0.0, 0.0, extracted="71"))
    style = Said(RewardResult(0.5, 0.0, extracted="?"), Failure("reward", "late"))
    items = [RewardItem("a", "72", "72"), RewardItem("a", "71", "72")]
    outcomes = WeightedRewards([("right", right, 1.0), ("style", style, 0.2)]).submit_batch(items).result()
    parts = {"right": 1.0, "right/steps": 3.0, "style": 0.5}
    assert outcomes == [RewardResult(1.1, 1.0, parts, extracted="72"), Failure("reward", "style: late")]


def test_a_function_that_leaves_an_item_out_adds_nothing():
    first = Said(NOT_SCORED, RewardResult(1.0, 1.0), NOT_SCORED)
    other = Said(RewardResult(0.5, 0.0), RewardResult(0.5, 0.0), NOT_SCORED)
    items = [RewardItem("a", "72", "72")] * 3
    outcomes = WeightedRewards([("first", first, 1.0), ("other", other, 0.2)]).submit_batch(items).result()
    both = RewardResult(1.1, 1.0, {"first": 1.0, "other": 0.5})
    assert outcomes == [RewardResult(0.1, 0.0, {"other": 0.5}), both, NOT_SCORED]
