# SPDX-License-Identifier: Apache-2.0
"""The stream of scored groups that the loop takes from: sample, score, filter, refill within a bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerBase

from whet.errors import DataError
from whet.metrics import Metrics
from whet.rewards.adapter import RewardItem
from whet.rewards.result import Outcome, RewardResult
from whet.rollout.batch import rows_of
from whet.rollout.collect import Collector
from whet.rollout.failures import FailureWatch
from whet.rollout.protocol import SamplingParams
from whet.types import Failure, Group, Prompt, Trajectory

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """What judges answers: a pool of reward processes."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """One outcome for each item, in order."""
        ...

    def close(self) -> None:
        """Ends what judges."""
        ...


class PromptSource(Protocol):
    """Where prompts come from: the data loader."""

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Is shown how they were answered, those too that a filter drops."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the next `take` starts."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        ...


@dataclass(frozen=True)
class Filter:
    """Which groups are worth training on: `keeps` reads the `metric` of a group's answers that did not fail."""

    keeps: Callable[..., bool]
    options: Mapping[str, Any]
    metric: str = "accuracy"
    max_refills: int = 4


@dataclass(frozen=True)
class Taken:
    """What `take` hands out, and what it has to say about it."""

    groups: list[Group]
    metrics: Metrics


class Rollouts:
    """Complete, scored, filtered groups.

    Produces: `take(n)`, n groups, or fewer where the filter leaves no more within its bound of refills; where it leaves
    none at all, groups that it dropped, which teach nothing but keep the run going.
    Consumes: prompts, an engine through the collector, a scorer.  Waits: on each of them, within their deadlines.
    Without a scorer an answer is worth what its environment paid, and right from `correct_threshold` on.
    """

    def __init__(
        self,
        prompts: PromptSource | None,
        collector: Collector,
        scorer: Scorer | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        n: int,
        params: SamplingParams,
        group_filter: Filter | None = None,
        correct_threshold: float = 1.0,
        length_stages: Mapping[int, int] | None = None,
        sampling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.length_stages = dict(length_stages or {})
        self.prompts, self.collector, self.scorer, self.tokenizer = prompts, collector, scorer, tokenizer
        self.n, self.params, self.group_filter = n, params, group_filter
        self.correct_threshold = correct_threshold
        self.sampling = sampling  # entered while the engine is to sample
        self.failures = FailureWatch()

    def take(self, n: int, *, step: int) -> Taken:
        """n groups for training; `step` names their random draws."""
        if self.prompts is None:
            raise DataError("these rollouts have no source of prompts to take from; sample prompts of your own")
        metrics, params = Metrics(), self.params_at(step)
        kept: list[Group] = []
        dropped: list[Group] = []
        refills = self.group_filter.max_refills if self.group_filter is not None else 0
        with self.sampling():
            for _ in range(1 + refills):
                groups = self.sample(self.prompts.take(n - len(kept)), self.n, params, step=step, metrics=metrics)
                self.prompts.observe(groups)
                for group in groups:
                    (kept if self._is_kept(group) else dropped).append(group)
                if len(kept) == n or not any(answer.failure is None for g in groups for answer in g.trajectories):
                    break
        if self.group_filter is not None:
            metrics.sum("filter/dropped_groups", len(dropped))
            metrics.mean("filter/kept_fraction", len(kept) / (len(kept) + len(dropped)))
        if len(kept) < n:
            log.debug("step %d trains on %d of %d groups: the filter dropped %d", step, len(kept), n, len(dropped))
        return Taken(kept or dropped[:n], metrics)

    def params_at(self, step: int) -> SamplingParams:
        """How a step samples: within the length of its stage."""
        begun = [start for start in self.length_stages if start <= step]
        if not begun:
            return self.params
        return replace(self.params, max_new_tokens=min(self.length_stages[max(begun)], self.params.max_new_tokens))

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        step: int,
        metrics: Metrics,
        purpose: str = "rollout",
    ) -> list[Group]:
        """n scored answers to each prompt; what failed carries its failure and is counted in `failures/<source>`, also
        in `failures/timed_out` where a deadline decided it: there alone a run may differ from its repeat."""
        with metrics.time("time/rollout"), self.sampling():
            answers = self.collector.collect(prompts, n, params, step=step, purpose=purpose)
        turns = [turn for group in answers for trajectory in group for turn in trajectory.turns]
        if preemptions := sum(turn.preemptions for turn in turns):
            metrics.sum("rollout/preemptions", preemptions)
        with metrics.time("time/reward"):
            scored = self._score([trajectory for group in answers for trajectory in group])
        for trajectory in scored:
            if trajectory.failure is not None:
                metrics.sum(f"failures/{trajectory.failure.source}", 1)
                if trajectory.failure.timed_out:
                    metrics.sum("failures/timed_out", 1)
        return [Group(prompt, tuple(scored[i * n : (i + 1) * n])) for i, prompt in enumerate(prompts)]

    def state(self) -> Mapping[str, Any]:
        """Where the next `take` starts."""
        return {} if self.prompts is None else self.prompts.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        if self.prompts is not None:
            self.prompts.load_state(state)

    def _score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        alive = [index for index, trajectory in enumerate(trajectories) if trajectory.failure is None]
        outcomes: Sequence[Outcome]
        if self.scorer is not None:
            outcomes = self.scorer.score([self._item(trajectories[index]) for index in alive])
        else:
            right = [trajectories[index].score >= self.correct_threshold for index in alive]
            outcomes = [RewardResult(0.0, float(each)) for each in right]
        scored = list(trajectories)
        for index, outcome in zip(alive, outcomes, strict=True):
            scored[index] = _judged(scored[index], outcome)
        return scored

    def _item(self, trajectory: Trajectory) -> RewardItem:
        prompt = trajectory.prompt
        if len(trajectory.turns) == 1 and len(trajectory.messages) == 1:  # decoded already, for its environment
            response_ids, text = trajectory.turns[0].token_ids, trajectory.messages[0].content
        else:
            response_ids = tuple(rows_of(trajectory)[-1].response_ids)
            text = self._decode(response_ids)
        last = prompt.messages[-1].content if prompt.messages else ""
        return RewardItem(
            data_source=prompt.data_source,
            solution_str=str(text),
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            prompt_str=last if isinstance(last, str) else str(last),
            prompt_ids=prompt.token_ids,
            response_ids=response_ids,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _is_kept(self, group: Group) -> bool:
        if self.group_filter is None:
            return True
        name = self.group_filter.metric
        values = [_metric(trajectory, name) for trajectory in group.trajectories if trajectory.failure is None]
        return self.group_filter.keeps(values, **self.group_filter.options)


def _judged(trajectory: Trajectory, outcome: Outcome) -> Trajectory:
    if isinstance(outcome, Failure):
        return replace(trajectory, failure=outcome)
    return replace(
        trajectory,
        reward=outcome.reward,
        accuracy=outcome.accuracy,
        parts=outcome.parts,
        token_rewards=outcome.token_rewards,
        extracted=outcome.extracted,
    )


def _metric(trajectory: Trajectory, name: str) -> float:
    numbers = {**trajectory.parts, "accuracy": trajectory.accuracy or 0.0, "reward": trajectory.score}
    if name not in numbers:
        raise DataError(
            f"algorithm.filter.metric={name}, which the reward does not report for {trajectory.uid}; "
            f"it reports {', '.join(sorted(numbers))}"
        )
    return numbers[name]
