# SPDX-License-Identifier: Apache-2.0
"""Ranks of environments and of rewards in virtual time, which die and are not replaced, around whet's own fleet."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.simulation import actors
from whet.environments.protocol import Answer
from whet.roles.placed import PlacedHost
from whet.rollout.fleet import Done, Fleet, FleetTask, Give
from whet.types import Prompt

if TYPE_CHECKING:
    from tests.simulation.world import World


class PlacedRanks:
    """The ranks of one kind, which stand for `Ranks` without processes. Messages are late, and arrive twice."""

    kind = ""

    def __init__(self, world: World, ranks: int, *, has_parts: bool) -> None:
        self.world, self.fleet = world, Fleet(has_parts=has_parts, generations=world.incarnation * actors.CONNECTIONS)
        self.rng = random.Random(f"{self.kind} {world.plan.seed} {world.incarnation}")
        self.alive, self.events, self._arrives = set(range(ranks)), list[Any](), dict[int, float]()
        for rank in range(ranks):
            self.fleet.on_join(rank, 0)

    def submit(self, task: FleetTask) -> bool:
        """Takes a task."""
        self.fleet.submit(task)
        self.send()
        return True

    def abort(self, uids: Collection[str], *, silently: bool = False) -> None:
        """Ends tasks."""
        self.events += self.fleet.abort(uids, silently=silently)
        self.send()

    def turn(self, timeout_seconds: float) -> list[Any]:
        """Returns the events that arrived."""
        events, self.events = self.events, []
        return events

    def send(self) -> None:
        """Gives tasks to ranks, over one ordered connection to each."""
        for give in self.fleet.give():
            at = max(self.world.now + self.rng.random() * 0.2, self._arrives.get(give.rank, 0.0))
            self._arrives[give.rank] = at
            self._post(at - self.world.now, "given", give)

    def answer(self, rank: int, generation: int, event: Done, delay: float) -> None:
        """Lets a rank say something of a task, if it still lives then."""
        self._post(delay, "answers", rank, generation, event)

    def _post(self, delay: float, what: str, *arguments: Any) -> None:
        self.world.post(delay, "placed", self.world.incarnation, self.kind, what, arguments)

    def on(self, what: str, arguments: Iterable[Any]) -> None:
        """Something happens to these ranks."""
        getattr(self, f"on_{what}")(*arguments)
        self.send()

    def on_given(self, give: Give) -> None:
        """A rank gets tasks."""
        if give.rank in self.alive:
            for uid in give.ended:
                self.end(give.rank, uid)
            for task in give.tasks:
                self.begin(give, task)

    def on_answers(self, rank: int, generation: int, event: Done) -> None:
        """A rank has done a task, and its word is on the way."""
        if rank in self.alive:
            for _ in range(1 + (self.rng.random() < self.world.plan.twice)):
                self._post(self.rng.random() * 0.3, "heard", rank, generation, event)

    def on_heard(self, rank: int, generation: int, event: Done) -> None:
        """The trainer hears a rank."""
        self.events += self.fleet.on_events(rank, generation, [event])

    def die(self, number: int) -> None:
        """Ends the process of a rank; the trainer finds out later."""
        if self.alive and (rank := sorted(self.alive)[number % len(self.alive)]) is not None:
            self.alive.discard(rank)
            self._post(self.rng.random() * 4, "lost", rank)

    def on_lost(self, rank: int) -> None:
        """The trainer misses a rank; without any it begins again from its checkpoint."""
        self.events += self.fleet.on_lost(rank, self.fleet.ranks[rank].generation)
        try:
            assert self.fleet.on_death(rank, RuntimeError(), is_last=True) == 0
        except RuntimeError:
            self.world.restart()

    def begin(self, give: Give, task: FleetTask) -> None:
        """A rank begins a task."""
        raise NotImplementedError

    def end(self, rank: int, uid: str) -> None:
        """A rank ends a task."""


class EnvironmentRanks(PlacedRanks):
    """Ranks with the environments of episodes."""

    kind = "environments"

    def __init__(self, world: World) -> None:
        super().__init__(world, world.plan.environment_ranks, has_parts=True)
        self.turns = dict[tuple[int, str], int]()  # by rank and episode

    def begin(self, give: Give, task: FleetTask) -> None:
        """Resets or steps an environment."""
        agent, method, *arguments = task.what
        place = give.rank, task.uid
        self.world.check("play", self.turns.get(place), method)
        self.turns[place] = turn = 0 if method == "start" else self.turns[place] + 1
        text = "" if method == "start" else arguments[0].text
        if method == "start":
            self.answer(*place[:1], give.generation, Done(task.uid, (agent, None), task.attempt, is_last=False), 0.0)
        delay = 30.0 if actors.hangs(task.uid, turn) else self.rng.random() ** 3 * 5
        outcome = actors.observation(task.uid, turn, text)
        self.answer(give.rank, give.generation, Done(task.uid, (agent, outcome), task.attempt), delay)

    def end(self, rank: int, uid: str) -> None:
        """Closes an environment."""
        self.turns.pop((rank, uid), None)


class RewardRanks(PlacedRanks):
    """Ranks that score trajectories."""

    kind = "rewards"

    def __init__(self, world: World) -> None:
        super().__init__(world, world.plan.reward_ranks, has_parts=False)

    def begin(self, give: Give, task: FleetTask) -> None:
        """Scores trajectories, all at a time."""
        outcomes = [actors.outcome_of(each) for each in task.what if each.failure is None]
        is_late = any(getattr(outcome, "timed_out", False) for outcome in outcomes)
        self.answer(
            give.rank,
            give.generation,
            Done(task.uid, outcomes, task.attempt),
            self.rng.random() * 3 + 20 * is_late,
        )


class Environments(PlacedHost):
    """The host of the episodes, whose turns are counted."""

    def __init__(self, world: World, ranks: EnvironmentRanks) -> None:
        super().__init__("", ranks, {}, count())  # type: ignore[arg-type]
        self._world, self._steps = world, dict[str, int]()

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._steps[uid] = 0
        super().start(uid, prompt, seed)

    def step(self, uid: str, answer: Answer) -> None:
        self._steps[uid] += 1
        self._world.on_step(uid, self._steps[uid])
        super().step(uid, answer)
