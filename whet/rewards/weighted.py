# SPDX-License-Identifier: Apache-2.0
"""Several reward functions as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from whet.rewards.adapter import RewardItem
from whet.rewards.pool import RewardPool
from whet.rewards.result import Outcome, RewardResult
from whet.types import Failure


@dataclass(frozen=True)
class Combined:
    """Judgements of several functions, to come."""

    pending: Sequence[Future[list[Outcome]]]  # by function
    combine: Callable[[Sequence[Outcome]], Outcome]

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order; waits for the functions."""
        by_function = [future.result() for future in self.pending]
        return [self.combine(outcomes) for outcomes in zip(*by_function, strict=True)]


class WeightedRewards:
    """reward = sum of weight * reward; accuracy and answer are those of the first function; parts are named
    `<function>/<part>`.

    An answer that one function failed on has failed. The functions judge at the same time, each in its own processes.
    """

    def __init__(self, pools: Sequence[tuple[str, RewardPool, float]]) -> None:
        self._pools = pools

    def submit_batch(self, items: Sequence[RewardItem]) -> Combined:
        """Returns the outcomes to come, in order."""
        return Combined([pool.submit_batch(items) for _, pool, _ in self._pools], self._combine)

    def close(self) -> None:
        """Ends all processes."""
        for _, pool, _ in self._pools:
            pool.close()

    def _combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        reward, parts, results = 0.0, dict[str, float](), list[RewardResult]()
        for (name, _, weight), outcome in zip(self._pools, outcomes, strict=True):
            if isinstance(outcome, Failure):
                return replace(outcome, message=f"{name}: {outcome.message}")
            results.append(outcome)
            reward += weight * outcome.reward
            parts[name] = outcome.reward
            parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
        return RewardResult(reward, results[0].accuracy, parts, extracted=results[0].extracted)
