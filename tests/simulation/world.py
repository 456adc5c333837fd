# SPDX-License-Identifier: Apache-2.0
"""A world with virtual time around the real machines: `Flow`, `Driver`, `Episode`, and the fleets of replicas,
environments and rewards.

Replicas, environments, rewards and the trainer are simulated. A seed draws every delay, every message that is heard
twice or late, and every fault. The log of two runs of a seed is equal.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import pickle
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.simulation import actors
from tests.simulation.actors import CONNECTIONS, Ends, Letters, Load, Pause, Prompts, RoutedEngine, Running
from tests.simulation.invariants import ALL, CHECKS, LATEST
from tests.simulation.placed import EnvironmentRanks, Environments, PlacedRanks, RewardRanks
from tests.simulation.plan import PLACED, Fault, Plan
from whet.rollout import flow as flowing, snapshot as saving
from whet.rollout.driver import Driver
from whet.rollout.episode import Episode, EpisodeLimits, Rules, Stage
from whet.rollout.fleet import RETRIES, Done, FleetTask, Give, Router
from whet.rollout.flow import Filter, Flow, HandOut, keep_all
from whet.rollout.protocol import Request, SamplingParams
from whet.rollout.rollouts import with_outcomes
from whet.types import Group, Prompt, Trajectory

PATIENCE = 12.0  # seconds without a word after which a busy replica is given up
WATCH_SECONDS = 4.0
SEED = 5


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the facts that held when it was written."""

    version: int
    weights: dict[int, int]
    source: dict[str, Any]
    entries: list[dict[str, Any]]
    trained: dict[str, int]
    dropped: frozenset[str]
    batches: dict[int, HandOut]
    complete: dict[str, Group] = field(default_factory=dict)  # groups that wait to be trained on


def episodes_of(plan: Plan, prompts: Sequence[Prompt], step: int) -> list[Episode]:
    """The episodes of prompts."""
    limits = EpisodeLimits(max_turns=plan.max_turns, seconds=plan.episode_seconds)
    rules = Rules({"": Stage(Letters(), limits)}, params_of(plan), SEED, step)
    return [Episode(prompt, sample, rules) for prompt in prompts for sample in range(plan.n)]


def params_of(plan: Plan) -> SamplingParams:
    """The sampling parameters of a schedule."""
    return SamplingParams(plan.max_new_tokens, stop_token_ids=Ends())


def filter_of(plan: Plan) -> Filter | None:
    """The filter of a schedule."""
    if not plan.filters and not plan.extra:
        return None
    return Filter(actors.mixed if plan.filters else keep_all, {}, max_refills=2, extra=plan.extra)


def trained_weights(before: int, groups: Iterable[Group]) -> int:
    """The weights after an update: a number that follows from the weights before and from all tokens in their order."""
    tokens = [turn.token_ids for group in groups for each in group.trajectories for turn in each.turns]
    return hash((before, tuple(tokens))) & 0xFFFFFFFF


class World:
    """One schedule."""

    def __init__(self, plan: Plan, checks: Collection[int] = ALL) -> None:
        self.plan, self.checks = plan, frozenset(checks)
        self.rng = random.Random(plan.seed)
        self.now, self._sequence, self._heap = 0.0, 0, list[tuple[float, int, str, tuple[Any, ...]]]()
        self.log, self.events = hashlib.sha256(), 0
        self.incarnation, self.saved = 0, Saved(0, {0: SEED}, {"cursor": 0}, [], {}, frozenset(), {})
        self.restored_cursor = 0
        self.replicas = {number: actors.Replica(number, 0, self) for number in range(plan.replicas)}
        self.compares, self.retries = True, 0
        self.published = dict[tuple[int, int], int]()  # weights by incarnation and version
        self._arrives, self._heard = dict[int, float](), dict[int, float]()
        self.connected = dict[int, int]()  # the process of each replica that joined last
        self._boot(self.saved)
        for fault in plan.faults:
            self.post(fault.at, "fault", fault)
        self.post(WATCH_SECONDS, "watch")

    # ---- time

    def draw(self) -> float:
        """A number from 0 to 1."""
        return self.rng.random()

    def post(self, delay: float, kind: str, *what: Any) -> None:
        """Lets an event happen later."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, kind, what))

    def run(self) -> str:
        """Simulates until the trainer is done.  Returns the digest of the log.  Raises: InvariantError."""
        while self.state != "done":
            self.now, _, kind, what = heapq.heappop(self._heap)
            self.check("time")
            if self.now > LATEST:  # a planted bug, and that it ends is not checked
                return ""
            self.note(kind, what)
            handle = HANDLERS[kind]
            handle(self, *what)
            self.check("event")
        self.check("end")
        return self.log.hexdigest()

    def note(self, kind: str, what: Sequence[Any]) -> None:
        """Writes an event into the log."""
        self.events += 1
        self.log.update(f"{self.now:.6f} {kind} {[_shown(each) for each in what]}\n".encode())

    def check(self, moment: str, *about: Any) -> None:
        """Checks the invariants of a moment."""
        for number, check in CHECKS.get(moment, ()):
            if number in self.checks:
                check(self, *about)

    # ---- the trainer

    def restart(self) -> None:
        """Starts the trainer again from its checkpoint."""
        self._boot(self.saved)

    def _boot(self, saved: Saved) -> None:
        """Starts a trainer from a checkpoint; only replicas survive from before."""
        plan = self.plan
        self.incarnation += 1
        self.version, self.weights = saved.version, dict(saved.weights)
        self.trained, self.dropped, self.batches = dict(saved.trained), set(saved.dropped), dict(saved.batches)
        self.asked, self.homes = 0, (0, set[tuple[int, int]]())
        self.steps = dict[tuple[str, int], int]()  # of environments, by episode and turn
        self.source = Prompts()
        self.source.load_state(saved.source)
        self.restored_cursor = self.source.cursor
        self.router = Router(plan.most, version=self.version, generations=self.incarnation * CONNECTIONS)
        self._loads, self._synced = dict[int, tuple[Any, ...]](), -1
        self.placed: dict[str, PlacedRanks] = {
            "environments": (own := EnvironmentRanks(self)),
            "rewards": RewardRanks(self),
        }
        self.scoring, self.scored = dict[str, list[Trajectory]](), set[str]()  # by uid of the task
        self.engine, self.environments = RoutedEngine(self), Environments(self, own)
        self.driver = Driver(self.engine, {"": self.environments}, clock=lambda: self.now)  # type: ignore[arg-type]
        limits = (plan.staleness, filter_of(plan))
        self.flow = Flow(
            plan.n, plan.batch_size, self.source, partial(episodes_of, plan), *limits, last_step=plan.steps
        )
        self.state = "training"
        for number, replica in self.replicas.items():
            if replica.is_alive:
                self.post(self.draw(), "joins", number, replica.process)
        self.conduct(saving.restore(self.flow, self.source, self.version, saved.entries))
        self.check("restore", saved)
        self.conduct(self.flow.on_version(self.version))
        self._next_step()

    def _next_step(self) -> None:
        if self.version == self.plan.steps:
            self.state = "done"
            return
        if self.plan.staleness == 0:
            self._boundary = self._snapshot()
        self.asked, self.state = self.version + 1, "asking"
        self.conduct(self.flow.ask(self.asked))
        self.settle()

    def conduct(self, commands: Iterable[flowing.Command]) -> None:
        """Carries out the commands of the flow."""
        for command in commands:
            if isinstance(command, flowing.RunEpisodes):
                self.driver.add(command.episodes, self._on_sampled)
            elif isinstance(command, flowing.Score):
                self._score(command.trajectories)
            elif isinstance(command, flowing.HandOut):
                self.driver.abandon_prompts(command.aborted)
                self.dropped |= {*command.aborted}
                self.check("hand_out", command)
                self.batches[command.step] = command
                self.state = "training"
                self.post(0.3 + self.draw() * 2, "trains", self.incarnation, command.step)

    def _on_sampled(self, trajectory: Trajectory) -> None:
        self.check("trajectory", trajectory)
        self.conduct(self.flow.on_sampled(trajectory))

    def _score(self, trajectories: list[Trajectory]) -> None:
        uid = f"{len(self.scored) + len(self.scoring)}"
        self.scoring[uid] = trajectories
        self.placed["rewards"].submit(FleetTask(uid, trajectories, size=len(trajectories)))

    def on_placed(self, incarnation: int, kind: str, what: str, arguments: tuple[Any, ...]) -> None:
        """Something happens to ranks of environments or rewards."""
        if incarnation != self.incarnation:
            return
        self.placed[kind].on(what, arguments)
        for event in self.placed["rewards"].turn(0.0) if incarnation == self.incarnation else ():
            self._on_outcomes(event)
        self.settle()

    def _on_outcomes(self, event: Done) -> None:
        self.check("scored", event.uid)
        trajectories = self.scoring.pop(event.uid)
        self.scored.add(event.uid)
        scored = with_outcomes(trajectories, event.what)
        for _ in range(1 + (self.draw() < self.plan.twice)):
            self.post(self.draw(), "scores", self.incarnation, scored)

    def on_scores(self, incarnation: int, scored: list[Trajectory]) -> None:
        """The rewards of a group have come."""
        if incarnation == self.incarnation:
            self.conduct(self.flow.on_scored(scored))
            self.settle()

    def on_trains(self, incarnation: int, step: int) -> None:
        """An update is done: its weights go to the replicas."""
        if incarnation != self.incarnation:
            return
        kept = self.batches[step].kept
        self.weights[step] = self.updated(kept)
        self.version, self.state = step, "syncing"
        self.trained |= {group.prompt.uid: step for group in kept}
        self.dropped |= {group.prompt.uid for group in self.batches[step].dropped}
        self.router.on_weights(step)
        self.settle()

    def updated(self, kept: Sequence[Group]) -> int:
        """The weights behind an update."""
        return trained_weights(self.weights[self.version], kept)

    def on_synced(self, incarnation: int, version: int) -> None:
        """Every replica that samples has the weights."""
        if incarnation != self.incarnation or version != self.version or self.state != "syncing":
            return
        self.conduct(self.flow.on_version(version))
        self.state = "training"
        if self.plan.faults and self.draw() < 0.4:
            self._save()
        self._next_step()

    def _save(self) -> None:
        self.saved = self._snapshot() if self.plan.staleness else self._boundary
        self.router, self.flow = pickle.loads(pickle.dumps((self.router, self.flow)))
        self.source = self.flow.source  # type: ignore[assignment]

    def _snapshot(self) -> Saved:
        stream = self.flow
        training = [stream.training] if stream.training and stream.training.step > self.version else []
        waiting = [group for each in training for group in each.kept]
        waiting += [each.group(each.scored) for each in stream.queue.values() if each.is_kept]
        dropped = {uid for uid, each in stream.queue.items() if each.is_kept is False}
        dropped |= {group.prompt.uid for each in training for group in each.dropped}
        return Saved(
            version=self.version,
            weights=dict(self.weights),
            source=dict(self.source.state()),
            entries=json.loads(json.dumps(saving.snapshot(self.flow, self.driver.episodes))),
            trained=dict(self.trained),
            dropped=frozenset(self.dropped | dropped),
            batches={step: each for step, each in self.batches.items() if step <= self.version},
            complete={group.prompt.uid: group for group in waiting},
        )

    def on_save_ends(self, incarnation: int) -> None:
        """The partial tokens had time to come."""
        if incarnation == self.incarnation:
            if self.state != "syncing":
                self._save()
            self.pause(is_paused=False)
            self.settle()

    # ---- around the router

    def pause(self, *, is_paused: bool) -> None:
        """Stops all sampling, or lets it go on."""
        self.router.is_paused = is_paused
        for number, each in self.router.ranks.items():
            self._order(number, Pause(each.generation, is_paused))

    def direct(self) -> None:
        """Sends the router's commands to replicas."""
        for number, each in self.router.ranks.items():
            if each.loading is not None and self._loads.get(number) != (each.generation, each.loading):
                self._loads[number] = each.generation, each.loading
                self._order(number, Load(each.generation, each.loading))
        for give in self.router.give():
            self.retries += sum(each.attempt % RETRIES > 0 for each in give.tasks)
            self._order(give.rank, give)
        if self.router.is_synced and self._synced != self.version and self.state == "syncing":
            self._synced = self.version
            self.post(0.0, "synced", self.incarnation, self.version)

    def _order(self, number: int, command: Give | Load | Pause) -> None:
        self.published[self.incarnation, self.version] = self.weights[self.version]
        if number not in self._heard or not self.router.ranks[number].given:
            self._heard[number] = self.now
        self._heard[number] = max(self._heard[number], self.now - PATIENCE / 2)
        self._send(number, command)

    def _send(self, number: int, command: Any) -> None:
        """One ordered connection to each replica."""
        at = max(self.now + self.draw() * 0.2, self._arrives.get(number, 0.0))
        self._arrives[number] = at
        self.post(at - self.now, "command", number, self.connected[number], command)

    def tell(self, replica: actors.Replica, kind: str, what: Any) -> None:
        """Lets the trainer hear a replica: late, out of order, twice."""
        for is_again in range(1 + (self.draw() < self.plan.twice)):
            stalls = 0.3 if is_again else self.plan.stalls
            delay = self.draw() * (8 if self.draw() < stalls else 0.3)
            self.post(delay, "heard", replica.number, replica.generation, kind, what)

    def on_heard(self, number: int, generation: int, kind: str, what: Any) -> None:
        """The trainer hears a replica."""
        each = self.router.ranks.get(number)
        if each is not None and each.generation == generation:
            self._heard[number] = self.now
        if kind == "event":
            self.engine.events += self.router.on_events(number, generation, [what])
        elif kind == "loaded":
            self.router.on_loaded(number, generation, what)
        else:
            self.engine.events += self.router.on_lost(number, generation)
            self.post(self.draw() * 4, "restarts", number)
        self.settle()

    def settle(self) -> None:
        """Lets the driver and the router go on as far as they can without time."""
        while True:
            self.driver.turn(0.0)
            self.direct()
            can_submit = bool(self.driver._unsent) and len(self.router.flights) < self.plan.capacity
            has_events = bool(self.engine.events) and self.driver._sampling
            has_results = bool(self.placed["environments"].events) and bool(self.driver._stepping)
            if not (has_events or has_results or can_submit):
                return

    def on_watch(self) -> None:
        """Looks for replicas that have work and were not heard of, and for episodes whose time is over."""
        for number, each in list(self.router.ranks.items()):
            is_busy = bool(each.given) or each.loading is not None
            if is_busy and self.now - self._heard[number] > PATIENCE and not self.router.is_paused:
                self._give_up(number, each.generation)
        self.settle()
        self.post(WATCH_SECONDS, "watch")

    def _give_up(self, number: int, generation: int) -> None:
        """Ends a replica, or only the connection to it; it joins again later."""
        if self.draw() < 0.5:
            self._die(self.replicas[number])
        self.post(2 + self.draw() * 10, "restarts", number)
        self.engine.events += self.router.on_lost(number, generation)

    def on_joins(self, number: int, process: int) -> None:
        """A replica connects."""
        replica = self.replicas[number]
        if replica.is_alive and replica.process == process:
            self._heard[number], self.connected[number] = self.now, process
            self.engine.events += self.router.on_join(number)
            self.settle()

    def on_lost(self, number: int, generation: int) -> None:
        """The connection to a replica broke."""
        self.engine.events += self.router.on_lost(number, generation)
        self.settle()

    # ---- environments

    def on_step(self, uid: str, turn: int) -> None:
        """An environment is stepped."""
        self.steps[uid, turn] = self.steps.get((uid, turn), 0) + 1
        self.check("step", uid, turn)

    # ---- replicas

    def decode_later(self, replica: actors.Replica, request: Request) -> None:
        """Lets a replica sample."""
        delay = (0.05 + self.draw() * 1.5) * (8 if self.now < replica.slow_until else 1)
        self.post(delay, "decode", replica.number, replica.process, request.uid, request.attempt)

    def _living(self, number: int, process: int, kind: str, *what: Any) -> actors.Replica | None:
        """The replica, if it is the process that was meant; one that hangs does it later."""
        replica = self.replicas[number]
        if not replica.is_alive or replica.process != process:
            return None
        if self.now < replica.hung_until:
            self.post(replica.hung_until - self.now, kind, number, process, *what)
            return None
        return replica

    def on_command(self, number: int, process: int, command: Any) -> None:
        """A command reaches a replica."""
        if (replica := self._living(number, process, "command", command)) is not None:
            replica.on_command(command)

    def on_decode(self, number: int, process: int, uid: str, attempt: int) -> None:
        """A replica samples."""
        if (replica := self._living(number, process, "decode", uid, attempt)) is not None:
            replica.on_decode(uid, attempt)

    def on_load_ends(self, number: int, process: int, load: Load) -> None:
        """Weights have arrived at a replica."""
        if (replica := self._living(number, process, "load_ends", load)) is not None:
            replica.on_load_ends(load)

    def on_samples(self, replica: actors.Replica, each: Running) -> None:
        """A replica is about to sample."""
        self.check("sample", replica, each)

    def on_loads(self, replica: actors.Replica, load: Load) -> None:
        """A replica is about to change its weights."""
        self.check("load", replica, load)

    def on_refused(self, request: Request) -> None:
        """A replica was asked to go on behind the end of a response."""
        self.check("refuse", request)

    # ---- faults

    def _die(self, replica: actors.Replica) -> None:
        replica.is_alive = False

    def on_restarts(self, number: int) -> None:
        """A replica is back, in a new process where it died."""
        replica = self.replicas[number]
        if not replica.is_alive:
            self.replicas[number] = replica = actors.restarted(replica)
        self.post(self.draw(), "joins", number, replica.process)

    def on_fault(self, fault: Fault) -> None:
        """Something happens from outside."""
        if fault.kind == "crash":  # soon after a checkpoint
            if self.state != "syncing":
                self._save()
            self.post(self.draw() * 2, "fault", Fault(self.now, "kill", 0, 0.0))
            return
        if fault.kind == "kill":
            self._boot(self.saved)
            return
        if fault.kind == "save":
            if self.draw() < 0.5:
                self.pause(is_paused=True)
                self.post(self.draw() * 3, "save_ends", self.incarnation)
            elif self.state != "syncing":
                self._save()
            return
        if fault.kind == "join":
            number = len(self.replicas)
            self.replicas[number] = actors.Replica(number, 0, self)
            self.post(self.draw(), "joins", number, 0)
            return
        if fault.kind in PLACED:
            self.placed[fault.kind].die(fault.replica)
            return
        for replica in self.replicas.values():
            if fault.kind == "all_die" or replica.number == fault.replica % len(self.replicas):
                self._strike(replica, fault)

    def _strike(self, replica: actors.Replica, fault: Fault) -> None:
        number, connected = replica.number, self.router.ranks.get(replica.number)
        if fault.kind == "hang":
            replica.hung_until = self.now + fault.seconds
        elif fault.kind == "slow":
            replica.slow_until = self.now + fault.seconds
        elif fault.kind == "load_fails":
            replica.failing_loads += 1
        elif fault.kind == "leave":
            if connected is not None:
                self._give_up(number, connected.generation)
        else:
            if fault.kind != "cut":
                self._die(replica)
            if connected is not None and self.draw() < 0.6:
                self.post(self.draw(), "lost", number, connected.generation)
            self.post(fault.seconds / 2, "restarts", number)


HANDLERS = {
    "command": World.on_command,
    "decode": World.on_decode,
    "fault": World.on_fault,
    "heard": World.on_heard,
    "joins": World.on_joins,
    "load_ends": World.on_load_ends,
    "lost": World.on_lost,
    "placed": World.on_placed,
    "restarts": World.on_restarts,
    "save_ends": World.on_save_ends,
    "scores": World.on_scores,
    "synced": World.on_synced,
    "trains": World.on_trains,
    "watch": World.on_watch,
}


def _shown(what: Any) -> Any:
    """A value in the log's form: its names and its length."""
    if isinstance(what, list):
        return [each.uid for each in what]
    if isinstance(what, tuple) and what and isinstance(what[-1], Give):
        return [(each.uid, each.attempt) for each in what[-1].tasks], what[-1].ended
    if isinstance(what, Give):
        return [(each.uid, each.attempt, len(each.sampled_ids)) for each in what.tasks], what.ended
    completion = getattr(what, "completion", what)
    tokens = getattr(completion, "token_ids", None)
    return what if tokens is None else (type(what).__name__, what.uid, what.attempt, tokens)
