# SPDX-License-Identifier: Apache-2.0
"""The stream of scored groups that the loop takes from: sample, score, filter, refill within a bound."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from whet.errors import DataError, EngineError, RewardError, SandboxError, ToolError, WhetError
from whet.metrics import Metrics
from whet.rollout.batch import rows_of
from whet.rollout.collect import Collector
from whet.rollout.groups import Command, Filter, HandOut, Start, Stream
from whet.rollout.protocol import SamplingParams
from whet.rounding import reaches
from whet.types import (
    Failure,
    FailureSource,
    Group,
    Outcome,
    Outcomes,
    Prompt,
    RewardItem,
    RewardResult,
    Scorer,
    Trajectory,
)

log = logging.getLogger(__name__)
PATIENCE = 3  # batches in a row that may fail as a whole: what worked before may be away for a while
OF_ENVIRONMENT = ("environment", "tool", "sandbox")  # whatever the responses are, these should work
RECENT = 8  # batches of which more than half of all trajectories may not fail in the environment
ERRORS: dict[FailureSource, type[WhetError]] = {"reward": RewardError, "sandbox": SandboxError, "tool": ToolError}
T = TypeVar("T")


class PromptSource(Protocol):
    """The data loader, or another source of prompts."""

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        ...

    def find(self, uid: str) -> Prompt:
        """The prompt that `take` gave under this uid.  Raises: DataError."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Reads all groups that were sampled, with those that a filter drops."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Returns the place where the next `take` starts."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from that place."""
        ...


class ReturnedFirst:
    """A source whose next prompts are those that were put back, if there are any."""

    def __init__(self, source: PromptSource) -> None:
        self.source, self._returned = source, list[Prompt]()
        self.find, self.observe = source.find, source.observe

    def put_back(self, uids: Sequence[str]) -> None:
        """Lets these prompts come first, and says so.  Raises: DataError for one that is not among the data."""
        if uids:
            log.warning("%d prompts that were sampled ahead begin again, as the next that are sampled", len(uids))
        self._returned = [*map(self.find, uids), *self._returned]

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        first, self._returned = self._returned[:n], self._returned[n:]
        return [*first, *self.source.take(n - len(first))]

    def state(self) -> dict[str, Any]:
        """The place of the source; under `first` the uids that were put back, if there are any."""
        return {**self.source.state(), **({"first": [each.uid for each in self._returned]} if self._returned else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from that place."""
        self.source.load_state(state)
        self._returned = [self.find(uid) for uid in state.get("first", ())]


@dataclass(frozen=True)
class Taken:
    """The groups that `take` hands out, and their metrics."""

    groups: list[Group]
    metrics: Metrics
    is_dropped: bool = False  # the filter kept none of them
    dropped: Sequence[Group] = ()  # the other groups that the filter dropped


@dataclass(frozen=True)
class Sampled(Generic[T]):
    """Sampled trajectories whose scores may still come."""

    groups: list[Group]  # without rewards, unless they are known
    result: Callable[[], T]  # waits for the scores and returns the same trajectories with them; to be called once


class Rollouts:
    """Complete, scored, filtered groups.

    Produces: `take(n)`, n groups, or fewer where the filter leaves no more within its bound of refills; where it leaves
    none at all, groups that it dropped, which are not trained on but keep the run going.
    Consumes: prompts, an engine through the collector, a scorer.  Waits: on each of them, within their deadlines.
    Without a scorer the score is what the environment paid, and correct from `correct_threshold` on.
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
        self.prompts = None if prompts is None else ReturnedFirst(prompts)
        self.collector, self.scorer, self.tokenizer = collector, scorer, tokenizer
        self.n, self.params, self.group_filter = n, params, group_filter
        self.correct_threshold = correct_threshold
        self.sampling = sampling  # entered while the engine is to sample
        self.val_scorer: Scorer | None = None  # gives the accuracy of validation, where it is another function
        self.failures, self.held_out = FailureWatch(), FailureWatch()  # of what is trained on, of validation
        self.spent: dict[str, float] = {}  # by judges, since the run began
        self.may_stop: Callable[[], None] = lambda: None  # called where a step waits and may be left; may raise
        self._kept_some = True
        self._before: Mapping[str, Any] | None = None  # state of the prompts before a step that is not trained yet

    def take(self, n: int, *, step: int) -> Taken:
        """n groups to train on; `step` names their random draws."""
        return self.start(n, step=step).result()

    def start(self, n: int, *, step: int) -> Sampled[Taken]:
        """Begins `take`: all trajectories are sampled. A filter waits here for their scores."""
        if self.prompts is None:
            raise DataError("these rollouts have no source of prompts to take from; sample prompts of your own")
        metrics, prompts, params = Metrics(), self.prompts, self.params_at(step)
        self._before = copy.deepcopy(dict(prompts.state()))
        stream = Stream(self.n, n, 0, self.group_filter, prompts.observe, version=step - 1)

        def sampled(start: Start) -> Sampled[list[Group]]:
            taken = prompts.take(start.count)
            stream.started(taken, step)
            return self.start_sample(taken, self.n, params, step=step, metrics=metrics)

        def scored(groups: Sequence[Group]) -> Command:
            [after] = [then for group in groups for each in group.trajectories for then in stream.on_scored(each)]
            return after

        [after] = stream.ask(step)
        assert isinstance(after, Start)
        if self.group_filter is None:
            begun = sampled(after)
            return Sampled(begun.groups, lambda: self._taken(scored(begun.result()), metrics))
        with self.sampling():
            while isinstance(after, Start):
                after = scored(sampled(after).result())
        taken = self._taken(after, metrics)
        return Sampled(taken.groups, lambda: taken)

    def on_weights(self, version: int) -> None:
        """Notes that the engine samples with the weights of a step: its groups were trained on."""
        self._before = None

    def close(self) -> None:
        """Ends the processes of environments and rewards."""
        self.collector.close()
        for scorer in filter(None, (self.scorer, self.val_scorer)):
            scorer.close()

    def params_at(self, step: int) -> SamplingParams:
        """Returns the sampling parameters of a step, within the length of its stage."""
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
        """n scored trajectories of each prompt; failures are counted in `failures/<source>`, also in
        `failures/timed_out` where a deadline decided: there alone a run may differ from its repeat."""
        return self.start_sample(prompts, n, params, step=step, metrics=metrics, purpose=purpose).result()

    def start_sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        step: int,
        metrics: Metrics,
        purpose: str = "rollout",
    ) -> Sampled[list[Group]]:
        """`sample` without the wait for the scores."""
        alone = self.scorer is not None and self.scorer.scores_alone
        begun: dict[str, Outcomes] = {}  # by uid, where each trajectory is scored while others are sampled

        def begin(trajectory: Trajectory) -> None:
            if alone and trajectory.failure is None:
                begun[trajectory.uid] = self.submit([trajectory])

        with metrics.time("time/rollout"), self.sampling():
            sampled = self.collector.collect(prompts, n, params, step=step, purpose=purpose, on_done=begin)
        trajectories = [trajectory for group in sampled for trajectory in group]
        with metrics.time("time/reward"):
            pending = [begun[each.uid] for each in trajectories if each.uid in begun]
            pending = pending if alone else [self.submit(trajectories)]
            strict = None
            if purpose == "validation" and self.val_scorer is not None:
                alive = [each for each in trajectories if each.failure is None]
                strict = self.val_scorer.submit_batch([self._item(each) for each in alive])

        def groups_of(given: Sequence[Trajectory]) -> list[Group]:
            return [Group(prompt, tuple(given[i * n : (i + 1) * n])) for i, prompt in enumerate(prompts)]

        def result() -> list[Group]:
            with metrics.time("time/reward"):
                found = [outcome for each in pending for outcome in each.result()]
                if strict is not None:
                    found = [_with_accuracy(one, by) for one, by in zip(found, strict.result(), strict=True)]
                scored = with_outcomes(trajectories, found)
            count_failures(scored, metrics)
            count_judges(scored, metrics, self.spent)
            return groups_of(scored)

        return Sampled(groups_of(trajectories), result)

    def state(self) -> Mapping[str, Any]:
        """Returns the place where the next step takes its prompts; before groups are trained on, that of their step."""
        return {} if self.prompts is None else self._before or dict(self.prompts.state())

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from that place. Groups that an asynchronous run had sampled ahead begin again."""
        self._before = None
        if self.prompts is not None:
            self.prompts.load_state(state)
            self.prompts.put_back([entry["uid"] for entry in state.get("stream", ())])

    def _taken(self, handed_out: Command, metrics: Metrics) -> Taken:
        """The groups to train on; where the filter kept none, groups that it dropped: they keep the run going."""
        assert isinstance(handed_out, HandOut)
        if self.group_filter is not None:
            self._report_filter(handed_out, metrics)
        kept = handed_out.kept
        taken = 0 if kept else handed_out.wanted
        groups, others = kept or handed_out.dropped[:taken], handed_out.dropped[taken:]
        return Taken(groups, metrics, is_dropped=not kept, dropped=others)

    def _report_filter(self, handed_out: HandOut, metrics: Metrics) -> None:
        """Measures what was sampled and what was dropped of it, and warns of a step that trains on nothing."""
        kept, dropped = handed_out.kept, handed_out.dropped
        n, step = handed_out.wanted, handed_out.step
        metrics.sum("filter/dropped_groups", len(dropped))
        metrics.mean("filter/kept_fraction", len(kept) / (len(kept) + len(dropped)))
        sampled = [each for group in (*kept, *dropped) for each in group.trajectories if each.failure is None]
        if sampled:
            metrics.mean("filter/sampled_score", fmean(each.score for each in sampled), len(sampled))
            metrics.mean("filter/sampled_accuracy", fmean(each.accuracy or 0.0 for each in sampled), len(sampled))
        if len(kept) < n:
            log.debug("step %d trains on %d of %d groups: the filter dropped %d", step, len(kept), n, len(dropped))
        is_scored = any(each.failure is None for group in dropped for each in group.trajectories)
        if not kept and self._kept_some and is_scored:
            log.warning(
                "step %d trains on nothing: algorithm.filter dropped all %d groups, refills included; this is said "
                "again only after a step that keeps some",
                *(step, len(dropped)),
            )
        self._kept_some = bool(kept)

    def submit(self, trajectories: Sequence[Trajectory]) -> Outcomes:
        """Begins to score the trajectories that did not fail."""
        alive = [trajectory for trajectory in trajectories if trajectory.failure is None]
        if self.scorer is not None:
            return self.scorer.submit_batch([self._item(trajectory) for trajectory in alive])
        paid: Future[list[Outcome]] = Future()
        paid.set_result([RewardResult(0.0, float(reaches(each.score, self.correct_threshold))) for each in alive])
        return paid

    def _item(self, trajectory: Trajectory) -> RewardItem:
        prompt = trajectory.prompt
        if len(trajectory.turns) == 1 and len(trajectory.messages) == 1:  # decoded already, for its environment
            response_ids, text = trajectory.turns[0].token_ids, trajectory.messages[0].content
        else:
            response_ids = tuple(rows_of(trajectory)[-1].response_ids)
            text = str(self.tokenizer.decode(list(response_ids), skip_special_tokens=True))
        has_more = trajectory.messages[1:] or trajectory.fields or trajectory.turns[0].reward
        return reward_item(prompt, str(text), response_ids, trajectory.to_dict() if has_more else {})


def reward_item(prompt: Prompt, text: str, response_ids: Sequence[int], trajectory: Mapping[str, Any]) -> RewardItem:
    """A response as reward functions read it."""
    return RewardItem(
        data_source=prompt.data_source,
        solution_str=text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt_str=str(prompt.messages[-1].content) if prompt.messages else "",
        prompt_ids=prompt.token_ids,
        response_ids=tuple(response_ids),
        trajectory=trajectory,
        messages=() if prompt.is_text else prompt.messages,
    )


def with_outcomes(trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome]) -> list[Trajectory]:
    """The trajectories scored; `outcomes` are of those that did not fail."""
    left = iter(outcomes)
    return [_with(next(left), each) if each.failure is None else each for each in trajectories]


def _with_accuracy(outcome: Outcome, strict: Outcome) -> Outcome:
    """The outcome, with the accuracy of another function; a failure of either is one."""
    if isinstance(outcome, Failure) or isinstance(strict, Failure):
        return outcome if isinstance(outcome, Failure) else strict
    return replace(outcome, accuracy=strict.accuracy)


def _with(outcome: Outcome, trajectory: Trajectory) -> Trajectory:
    """The trajectory scored: a trajectory has all fields of a RewardResult."""
    return replace(trajectory, **({"failure": outcome} if isinstance(outcome, Failure) else vars(outcome)))


def count_failures(trajectories: Sequence[Trajectory], metrics: Metrics) -> None:
    """Counts failures by source, deadlines, and preemptions."""
    if preemptions := sum(turn.preemptions for trajectory in trajectories for turn in trajectory.turns):
        metrics.sum("rollout/preemptions", preemptions)
    for trajectory in trajectories:
        for name in [name for name in trajectory.fields if name.startswith("tools/")]:
            metrics.mean(name, trajectory.fields[name])
        if trajectory.failure is not None:
            metrics.sum(f"failures/{trajectory.failure.source}", 1)
            if trajectory.failure.timed_out:
                metrics.sum("failures/timed_out", 1)


def count_judges(trajectories: Sequence[Trajectory], metrics: Metrics, spent: dict[str, float]) -> None:
    """Adds the tokens and the cost of judges, those of failed calls too, to `spent`, and reports the sums."""
    for trajectory in trajectories:
        reported = trajectory.parts if trajectory.failure is None else trajectory.failure.parts
        for name, value in reported.items():
            if (kind := name.rpartition("/")[2]) in ("judge_tokens", "judge_cost"):
                spent[kind] = spent.get(kind, 0.0) + value
    for kind, total in spent.items():
        metrics.max(f"reward/{kind}_total", total)


class FailureWatch:
    """Reads the scored groups of each step, validation or evaluation, and warns where trajectories failed.

    A batch is bad where all of its trajectories failed, or more than half in `OF_ENVIRONMENT`. As long as there was no
    other in this process, one bad batch ends the run; afterwards `PATIENCE` of them in a row do, or one where more than
    half of the trajectories of it and of the last `RECENT` batches failed there."""

    def __init__(self) -> None:
        self._left = 1
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)  # failures in the environment, trajectories
        self._warned: set[FailureSource] = set()

    def record(self, groups: Sequence[Group]) -> None:
        """Raises: RewardError, SandboxError, ToolError or EngineError, by where the first failure arose."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        failures = [(each.uid, each.failure) for each in trajectories if each.failure is not None]
        of_environment = [(uid, failure) for uid, failure in failures if failure.source in OF_ENVIRONMENT]
        if trajectories:
            self._recent.append((len(of_environment), len(trajectories)))
        if failures and (len(failures) == len(trajectories) or len(of_environment) > len(trajectories) / 2):
            self._count(failures, of_environment, len(trajectories))
        elif trajectories:
            self._left = PATIENCE
            self._warn(failures, len(trajectories))

    def _warn(self, failures: Sequence[tuple[str, Failure]], total: int) -> None:
        for uid, failure in failures:
            if failure.source not in self._warned:
                self._warned.add(failure.source)
                log.warning(
                    "%d of %d trajectories failed and are not trained on, the first in the %s: %s (trajectory %s; "
                    "warned once; failures/%s counts them, rollouts/ has each)",
                    *(len(failures), total, failure.source, failure.message, uid, failure.source),
                )

    def _count(
        self, failures: Sequence[tuple[str, Failure]], of_environment: Sequence[tuple[str, Failure]], total: int
    ) -> None:
        """Counts a bad batch, and ends the run with the last that it may have."""
        self._left -= 1
        is_most = len(of_environment) > total / 2
        failed, played = map(sum, zip(*self._recent, strict=True))
        uid, failure = (of_environment if is_most else failures)[0]
        if is_most and len(self._recent) == RECENT and failed > played / 2:
            self._left = 0
            found = f"{failed} of {played} trajectories of the last {RECENT} batches, more than half, failed"
        elif len(failures) == total:
            found = f"all {total} trajectories failed, so there is nothing to learn from"
        else:
            found = f"{len(of_environment)} of {total} trajectories, more than half, failed"
        found = f"{found}: trajectory {uid} in the {failure.source}: {failure.message}"
        if self._left == 0:
            raise ERRORS.get(failure.source, EngineError)(f"{found}. Fix the {failure.source}, then start again")
        log.warning("%s. The run ends after %d more such batches", found, self._left)
