# SPDX-License-Identifier: Apache-2.0
"""The synchronous loop with the parts of the simulation: whet's own `Rollouts` on an engine that answers at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.simulation.actors import END, Letters, Prompts, log_probs_of, observation, outcome_of, runs_of, token_at
from whet.environments.protocol import Answer, Observation
from whet.rollout.driver import Driver
from whet.rollout.episode import Episode
from whet.rollout.protocol import Completion, Event, Finished, Request, Status
from whet.rollout.rollouts import Rollouts
from whet.types import Failure, Group, Outcome, Outcomes, Prompt, Trajectory

if TYPE_CHECKING:
    from tests.simulation.plan import Plan


class AtOnce:
    """An engine that answers at once."""

    def __init__(self, weights: int) -> None:
        self.weights, self.version = weights, 0
        self._events = list[Event]()

    def submit(self, request: Request) -> bool:
        tokens = list[int]()
        while len(tokens) < request.params.max_new_tokens and (not tokens or tokens[-1] & 0xFFF != END):
            tokens.append(token_at(request.key, len(tokens), self.version, self.weights))
        reason = "stop" if tokens[-1] & 0xFFF == END else "length"
        whole = Completion(tuple(tokens), log_probs_of(tokens), reason, runs_of(tokens))  # type: ignore[arg-type]
        self._events.append(Finished(request.uid, request.attempt, whole))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None: ...

    def status(self) -> Status:
        return Status(self.version, 0, 0)


class EnvironmentsAtOnce:
    """Environments that answer at once."""

    def __init__(self) -> None:
        self._results, self._turns = list[tuple[str, Observation | Failure]](), dict[str, int]()

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._turns[uid] = 0
        self._results.append((uid, observation(uid, 0, "")))

    def step(self, uid: str, answer: Answer) -> None:
        self._turns[uid] += 1
        self._results.append((uid, observation(uid, self._turns[uid], answer.text)))

    def close(self, uid: str) -> None: ...

    def begun(self) -> list[str]:
        return []  # no episode has a deadline

    def poll(self, timeout_seconds: float) -> list[tuple[str, Observation | Failure]]:
        results, self._results = self._results, []
        return results


class Synchronous(Rollouts):
    """whet's rollouts, with the episodes and scores of the simulation."""

    plan: Plan

    def episodes(self, prompts: Sequence[Prompt], n: int, *given: Any, step: int, **named: Any) -> list[Episode]:
        from tests.simulation.world import episodes_of

        return episodes_of(replace(self.plan, episode_seconds=1e9), prompts, step)

    def _submit(self, trajectories: Sequence[Trajectory], scorers: Any) -> list[Outcomes]:
        scored: Future[list[Outcome]] = Future()
        scored.set_result([outcome_of(each) for each in trajectories if each.failure is None])
        return [scored]


def synchronous_steps(plan: Plan) -> list[tuple[list[Group], int]]:
    """For each step its groups and the weights that sampled them."""
    equal: dict[str, Any] = {"replicas": 1, "most": 1, "capacity": 1, "twice": 0.0, "stalls": 0.0, "aborts": False}
    return _steps(replace(plan, seed=0, faults=(), **equal))


@cache
def _steps(plan: Plan) -> list[tuple[list[Group], int]]:
    from tests.simulation.world import SEED, filter_of, params_of, trained_weights

    engine = AtOnce(SEED)
    rollouts = Synchronous(
        Prompts(),
        Driver(engine, {"": EnvironmentsAtOnce()}, 60.0),  # type: ignore[arg-type,dict-item]
        {},
        None,
        Letters(),  # type: ignore[arg-type]
        n=plan.n,
        params=params_of(plan),
        group_filter=filter_of(plan),
    )
    rollouts.plan, steps = plan, []
    for step in range(1, plan.steps + 1):
        taken = rollouts.start(plan.batch_size, step=step).result()
        steps.append((taken.groups, engine.weights))
        engine.weights = trained_weights(engine.weights, taken.kept)
        engine.version = step
        rollouts.on_weights(step)
    return steps
