# SPDX-License-Identifier: Apache-2.0
"""Samples, scores and filters groups for the loop; in parallel with training if `rollout.max_staleness` allows it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from whet.data.loader import PromptSource
from whet.errors import DataError
from whet.keyed import key
from whet.metrics import Metrics
from whet.phases import phase, watching
from whet.rollout.batch import row_of
from whet.rollout.driver import Driver
from whet.rollout.episode import Episode, Rules, Stage
from whet.rollout.flow import Chosen, Command, Filter, Flow, HandOut, RunEpisodes, Score
from whet.rollout.protocol import SamplingParams
from whet.rollout.reports import FailureWatch, count_failures, measure_filter, measure_staleness
from whet.rollout.snapshot import restore, snapshot
from whet.rounding import reaches
from whet.types import Failure, Group, Outcome, Outcomes, Prompt, RewardItem, RewardResult, Scorer, Trajectory

log = logging.getLogger(__name__)
HELP = {  # by bottleneck of a run
    "sampling": "more rollout ranks, a higher rollout.max_batch_size, or rollout.max_staleness=1 where it is below",
    "environments": "a pool for environments (cluster.placement)",
    "rewards": "a higher reward.num_workers, or a faster reward function",
    "training": "more ranks of the actor, a higher actor.max_tokens_per_micro_batch, or fewer actor.epochs",
    "saving": "a higher trainer.save_freq, or a faster disk",
    "sync": "a higher data.train_batch_size, which brings new weights less often",
}
DOES = {"save": "saving", "time/sync": "sync"}  # by phase of the loop; all other phases count as training
T = TypeVar("T")


@dataclass(frozen=True)
class SampledTrajectories:
    """Groups whose trajectories are sampled; `result` waits for their scores."""

    groups: list[Group]  # with rewards only if they are known
    result: Callable[[], HandOut]  # waits for the scores and returns the same trajectories with them; to be called once


@dataclass
class Asked:
    """A flow that is asked for groups. `chosen` completes when they are sampled, `handed_out` when they are scored."""

    flow: Flow
    scorers: Sequence[Scorer]  # the reward, then the function of the accuracy, if it is another one
    is_scored: bool = True  # else only sampled
    chosen: Future[list[Group]] = field(default_factory=Future)
    handed_out: Future[HandOut] = field(default_factory=Future)


class Rollouts:
    """Samples, scores and filters groups for the loop.

    Produces: `start(n)`, n groups in the order of their admission; fewer if the filter drops too many within its limit
    of refills. If it drops all, the dropped groups are returned, not trained on, so that the run continues. With
    `max_staleness` above 0, groups are sampled ahead, by a driver in a thread. Consumes: prompts, an engine and
    environments through the driver, a scorer.  Waits: on each of them, within their deadlines. Without a scorer the
    score is the environment's reward, which counts as correct from `correct_threshold` on."""

    def __init__(
        self,
        prompts: PromptSource,
        driver: Driver,
        stages: Mapping[str, Stage],
        scorer: Scorer | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        n: int,
        params: SamplingParams,
        seed: int = 0,
        batch_size: int = 0,
        max_staleness: float = 0.0,
        last_step: float = math.inf,
        group_filter: Filter | None = None,
        correct_threshold: float = 1.0,
        length_stages: Mapping[int, int] | None = None,
        sampling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`stages` are the settings of each agent's episodes. `batch_size` is the number of groups of each step with
        `max_staleness`; without it `start` sets it."""
        self.driver, self.stages, self.seed, self.length_stages = driver, stages, seed, dict(length_stages or {})
        self.scorer, self.tokenizer = scorer, tokenizer
        self.n, self.params, self.correct_threshold = n, params, correct_threshold
        self.sampling = sampling  # entered while the engine is to sample
        self.val_scorer: Scorer | None = None  # accuracy function of validation, if it has its own
        self.judge: Rollouts | None = None  # samples verdicts of the judge instead of the policy's responses
        self.failures, self.held_out = FailureWatch(), FailureWatch()  # of training, of validation
        self.spent: dict[str, float] = {}  # by judges, since the run began
        self._kept_some = True
        self.may_stop: Callable[[], None] = lambda: None  # called in waits that may be abandoned; may raise
        self.prompts = prompts
        self._restored: Sequence[Mapping[str, Any]] | None = ()  # of a checkpoint, until the first weights come
        self._watched, self._idle_seconds = ExitStack(), 0.0  # phases of the loop; the engine's idle time so far
        self._noted = Future[None]()  # done once the flow knows the last version
        self._noted.set_result(None)
        self.flow = Flow(
            n,
            batch_size,
            self.prompts,
            lambda prompts, step: self.episodes(prompts, n, self.params_at(step), step=step),
            max_staleness,
            group_filter,
            scorer is not None and scorer.scores_alone,
            last_step=last_step,
        )
        self._training = Asked(self.flow, [] if scorer is None else [scorer])

    def start(self, n: int, *, step: int, metrics: Metrics | None = None) -> SampledTrajectories:
        """Samples `n` groups for `step`; returns once they are sampled and, if there is a filter, scored."""
        flow, metrics = self.flow, Metrics() if metrics is None else metrics
        if not flow.is_ahead:
            flow.batch_size = n
        elif n != flow.batch_size:
            expected = f"data.train_batch_size={flow.batch_size}, because groups are sampled ahead"
            raise DataError("groups of a step", n, expected)
        # without staleness no checkpoint has the groups of an unfinished step, so it is not abandoned
        between = self.may_stop if flow.is_ahead else None
        begun = self._begin(self._training, step, metrics, between)
        return replace(begun, result=lambda: self._measured(begun.result(), metrics))

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        step: int,
        purpose: str = "rollout",
        is_scored: bool = True,
    ) -> list[Group]:
        """Returns `n` trajectories of each prompt, in order; without scores unless `is_scored`.

        Raises: DeadlineError; errors of the engine and of scorers."""

        def episodes(prompts: Sequence[Prompt], step: int) -> list[Episode]:
            return self.episodes(prompts, n, params, step=step, purpose=purpose)

        strict = self.val_scorer if purpose == "validation" else None
        scorers = [each for each in (self.scorer, strict) if each is not None]
        scores_alone = self.scorer is not None and all(each.scores_alone for each in scorers)
        flow = Flow(n, len(prompts), PromptSource(first=prompts), episodes, scores_alone=scores_alone)
        between = self.may_stop if purpose == "validation" else None
        begun = self._begin(asked := Asked(flow, scorers, is_scored), step, Metrics(), between)
        if not is_scored:
            asked.handed_out.cancel()  # nobody waits for it
            return begun.groups
        groups = begun.result().kept
        count_failures(groups, Metrics(), self.spent)
        return groups

    def episodes(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[Episode]:
        """Makes `n` episodes of each prompt, in order. `step` and `purpose` are in the keys of random draws."""
        rules = Rules(self.stages, params, self.seed, step, purpose)
        seeds = [key(self.seed, "environment", purpose, step, prompt.uid) for prompt in prompts]
        own = ((prompt, sample, seed) for prompt, seed in zip(prompts, seeds, strict=True) for sample in range(n))
        return [Episode(prompt, sample, rules, seed) for prompt, sample, seed in own]

    def on_weights(self, version: int) -> None:
        """Records that the engine has a step's weights, so that groups of later steps may be sampled with them."""
        if self._restored is not None:
            if self.flow.is_ahead:
                self._watched.enter_context(watching(self._watch))
            again = partial(restore, self.flow, self.prompts, version, self._restored)
            self._restored = None
            self.driver.finish(lambda: self._carry_out(self._training, again()))
        # Training does not wait for the thread, which runs later calls after this one.
        self._noted = self.driver.submit(lambda: self._carry_out(self._training, self.flow.on_version(version)))

    def state(self) -> Mapping[str, Any]:
        """Returns the position in the prompts for the next step, and under `stream` every group that was sampled ahead.
        Without staleness the position stays before the current step until the step is trained on."""
        if self._restored:
            return {**self.prompts.state(), "stream": list(self._restored)}
        return self.driver.finish(self._snapshot)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state; its groups continue at the first call of `on_weights`."""
        self.prompts.load_state(state)
        self._restored = state.get("stream", ())

    def close(self) -> None:
        """Ends the driver and the processes of environments and rewards. Logs the bottleneck of asynchronous runs."""
        self._watched.close()
        self.driver.close()
        for scorer in filter(None, (self.scorer, self.val_scorer)):
            scorer.close()
        if self.judge is not None:
            self.judge.close()
        seconds = {part: self.driver.limit_seconds[part] for part in HELP}
        slowest = max(seconds, key=lambda part: seconds[part])
        if self.flow.is_ahead and seconds[slowest] > 0:
            shown = ", ".join(f"{part} {seconds[part]:.1f} s" for part in HELP)
            log.info("%s limited the run (others waited for %s); what would help: %s", slowest, shown, HELP[slowest])

    def params_at(self, step: int) -> SamplingParams:
        """Returns the sampling parameters of a step, with the length limit that `length_stages` sets for it."""
        begun = [start for start in self.length_stages if start <= step]
        if not begun:
            return self.params
        return replace(self.params, max_new_tokens=min(self.length_stages[max(begun)], self.params.max_new_tokens))

    def _begin(
        self, asked: Asked, step: int, metrics: Metrics, between: Callable[[], None] | None = None
    ) -> SampledTrajectories:
        """Asks a flow for the groups of a step. Waits until they are sampled and, with a filter, scored."""
        asked.chosen, asked.handed_out = self.driver.promise(), self.driver.promise()

        def wait(name: str, future: Future[T]) -> T:
            began, of_rewards = time.monotonic(), self.driver.limit_seconds["rewards"]
            try:
                with phase(name):
                    return self.driver.wait(future, lambda: asked.flow.progress, between)
            finally:
                of_rewards = self.driver.limit_seconds["rewards"] - of_rewards
                metrics.seconds("time/reward", of_rewards)
                metrics.seconds("time/rollout", time.monotonic() - began - of_rewards)

        with self.sampling():
            self.driver.finish(lambda: self._carry_out(asked, asked.flow.ask(step)))
            self._noted.result()  # has run, or failed, before the flow was asked
            groups = wait("time/rollout", asked.chosen)
        return SampledTrajectories(groups, lambda: wait("time/reward", asked.handed_out))

    def _carry_out(self, asked: Asked, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case RunEpisodes():
                    self.driver.add(command.episodes, lambda each: self._carry_out(asked, asked.flow.on_sampled(each)))
                case Score() if asked.is_scored:
                    ended = command.trajectories
                    submit = partial(self._submit, ended, asked.scorers)
                    self.driver.score(submit, partial(self._on_scored, asked, ended))
                case Chosen():
                    asked.chosen.set_result(command.groups)
                case HandOut():
                    if command.aborted:
                        self.driver.abandon_prompts(command.aborted)
                    if not asked.chosen.done():
                        asked.chosen.set_result(command.groups)
                    asked.handed_out.set_result(command)

    def _on_scored(self, asked: Asked, trajectories: Sequence[Trajectory], found: Sequence[Sequence[Outcome]]) -> None:
        """Passes the outcomes of scorers to the flow. A separate accuracy function, if any, sets the accuracy."""
        outcomes = found[0] if len(found) == 1 else list(map(_with_accuracy, *found))
        self._carry_out(asked, asked.flow.on_scored(with_outcomes(trajectories, outcomes)))

    def _submit(self, trajectories: Sequence[Trajectory], scorers: Sequence[Scorer]) -> list[Outcomes]:
        """Starts to score the trajectories that did not fail, with each scorer. Without a scorer the outcomes come from
        the environment's rewards, immediately."""
        alive = [trajectory for trajectory in trajectories if trajectory.failure is None]
        if alive and scorers:
            items = [self._item(trajectory) for trajectory in alive]
            return [each.submit_batch(items) for each in scorers]
        paid: Future[list[Outcome]] = Future()
        correct = [reaches(each.score, self.correct_threshold) for each in alive]
        paid.set_result([RewardResult(0.0, float(each)) for each in correct])
        return [paid]

    def _item(self, trajectory: Trajectory) -> RewardItem:
        prompt = trajectory.prompt
        if len(trajectory.turns) == 1 and len(trajectory.messages) == 1:  # decoded already, for its environment
            response_ids, text = trajectory.turns[0].token_ids, trajectory.messages[0].content
        else:
            response_ids, text = self._last_row(trajectory)
        has_more = trajectory.messages[1:] or trajectory.fields or trajectory.turns[0].reward
        return reward_item(prompt, str(text), response_ids, trajectory.to_dict() if has_more else {})

    def _last_row(self, trajectory: Trajectory) -> tuple[tuple[int, ...], str]:
        last = trajectory.rows[-1:]  # none if no turn is trained on
        response_ids = row_of(trajectory, *last).response_ids if last else []
        return tuple(response_ids), str(self.tokenizer.decode(response_ids, skip_special_tokens=True))

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        """Tells the driver the phase of the loop during the block, so that it can record the bottleneck."""
        before, self.driver.does = self.driver.does, DOES.get(phase, self.driver.does)
        try:
            yield
        finally:
            self.driver.does = before

    def _measured(self, found: HandOut, metrics: Metrics) -> HandOut:
        """Records metrics of the groups of a step."""
        count_failures((*found.kept, *found.dropped), metrics, self.spent)
        if self.flow.is_ahead:
            measure_staleness(found, metrics)
            metrics.mean("rollout/outstanding_groups", self.flow.outstanding)
            metrics.mean("rollout/ready_groups", self.flow.ready)
            metrics.seconds("time/rollout_idle", self.driver.idle_seconds - self._idle_seconds)
            self._idle_seconds = self.driver.idle_seconds
        if self.flow.group_filter is not None:
            measure_filter(found, metrics, warns=self._kept_some)
            self._kept_some = bool(found.kept)
        return found

    def _snapshot(self) -> Mapping[str, Any]:
        if not self.flow.is_ahead:
            return self.flow.place()
        self.driver.note_partials()
        return {**self.flow.place(), "stream": snapshot(self.flow, self.driver.episodes)}


def reward_item(prompt: Prompt, text: str, response_ids: Sequence[int], trajectory: Mapping[str, Any]) -> RewardItem:
    """Makes the input of reward functions from a prompt and a response."""
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
    """Adds scores to the trajectories. `outcomes` has one for each trajectory that did not fail."""
    left = iter(outcomes)
    return [_with(next(left), each) if each.failure is None else each for each in trajectories]


def _with_accuracy(outcome: Outcome, strict: Outcome) -> Outcome:
    """Replaces the accuracy of the outcome by the accuracy in `strict`; a failure if either failed."""
    if isinstance(outcome, Failure) or isinstance(strict, Failure):
        return outcome if isinstance(outcome, Failure) else strict
    return replace(outcome, accuracy=strict.accuracy)


def _with(outcome: Outcome, trajectory: Trajectory) -> Trajectory:
    """Adds all fields of a RewardResult, or a failure, to the trajectory."""
    return replace(trajectory, **({"failure": outcome} if isinstance(outcome, Failure) else vars(outcome)))
