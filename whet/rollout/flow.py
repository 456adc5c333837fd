# SPDX-License-Identifier: Apache-2.0
"""A state machine for the flow of groups. It takes trajectories, scores and weight versions; it returns episodes to
run, trajectories to score and groups to train on.

It has no clock, thread or socket. Groups are handed out in the order of their admission, in whatever order trajectories
end. Its snapshot has every group that was admitted and not yet trained on."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from whet.data.loader import PromptSource
from whet.errors import DataError
from whet.rollout.episode import Episode
from whet.types import Group, Prompt, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filter:
    """Chooses the groups to train on. `keeps` decides by the `metric` of a group's trajectories that did not fail.
    Domains may have their own filter. `extra` is the share of groups that a step starts in addition to its batch."""

    keeps: Callable[..., bool]
    options: Mapping[str, Any]
    metric: str = "accuracy"
    max_refills: int = 4
    extra: float = 0.0
    of_domain: Mapping[str, Filter] = field(default_factory=dict)

    def keep(self, group: Group) -> bool:
        """Tells whether a group is trained on.  Raises: DataError for a metric that the reward does not report."""
        if (own := self.of_domain.get(group.prompt.domain)) is not None:
            return own.keep(group)
        values = [
            [_metric(each, self.metric) for each in player.trajectories if not each.failure]
            for player in by_player([group])
        ]
        return any(self.keeps(each, **self.options) for each in values)


@dataclass(frozen=True)
class RunEpisodes:
    """Command: run episodes, and pass each trajectory to `on_sampled`."""

    episodes: list[Episode]


@dataclass(frozen=True)
class Score:
    """Command: score trajectories together, and call `on_scored`."""

    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Chosen:
    """Command: give the step its groups, which are sampled but not yet scored. Used if no filter reads scores."""

    groups: list[Group]


@dataclass(frozen=True)
class HandOut:
    """Command: give the step its scored groups: kept and `dropped` ones, each in the order of admission. The episodes
    of `aborted` prompts, which are unused `extra` groups, end without results."""

    step: int
    wanted: int
    kept: list[Group]
    dropped: list[Group]
    aborted: list[str] = field(default_factory=list)  # uids

    @property
    def groups(self) -> list[Group]:
        """The groups for a batch. If no group was kept, these are dropped groups, so that the run continues."""
        return self.kept or self.dropped[: self.wanted]

    @property
    def unused(self) -> list[Group]:
        """The dropped groups that are not in the batch."""
        return self.dropped if self.kept else self.dropped[self.wanted :]


Command = RunEpisodes | Score | Chosen | HandOut


@dataclass
class Admitted:
    """A prompt whose episodes have started and whose group is not handed out yet."""

    prompt: Prompt
    step: int  # the step that it was admitted for, a key of its random draws
    scored: dict[int, Trajectory] = field(default_factory=dict)  # by number of the sample
    is_kept: bool | None = None  # unknown until all are scored
    sampled: dict[int, Trajectory] = field(default_factory=dict)  # ended trajectories, without scores
    place: float = math.inf  # position among the groups of its step, in the order in which they ended
    is_observed: bool = False  # by the source

    def group(self, samples: Mapping[int, Trajectory]) -> Group:
        """Makes the group of these samples, scored or unscored."""
        return Group(self.prompt, tuple(samples[number] for number in sorted(samples)))


@dataclass
class Flow:
    """Collects the groups of each step. Samples ahead as far as `max_staleness` allows.

    With k = `max_staleness` at most B + floor(k B) groups (B = `batch_size`) are outstanding: admitted, not dropped,
    and not yet trained into the weights that sample. Then no token is more than ceil(k) versions older than the weights
    that are trained with it. With a fractional k, at most this fraction of a batch is ceil(k) versions old.

    With k = 0 prompts start when a step asks for them: B at first and, while the filter drops groups, as many as are
    missing, in up to `max_refills` further rounds; prompts of an abandoned step are forgotten. With k > 0 they start as
    soon as the limit allows, and a step takes the first B kept groups among the next (1 + `max_refills`) B admitted
    ones. In both cases a step gets fewer than B groups only if too many were dropped or failed.

    With k = 0 the filter may ask for `extra` groups. A step then takes the first B kept groups in the order in which
    they ended, however late their scores come; the others are aborted, and their prompts do not start again."""

    n: int  # trajectories of a prompt
    batch_size: int  # groups of a step
    source: PromptSource
    episodes: Callable[[Sequence[Prompt], int], list[Episode]]  # makes n episodes of each prompt, in order, for a step
    max_staleness: float = 0.0
    group_filter: Filter | None = None
    scores_alone: bool = False  # a trajectory is scored when it ends; else with its group or, with k = 0, its round
    scoring: str = ""  # digest of the settings and the code that scores depend on
    version: int = 0  # of the weights that sample: the last step whose weights every replica has
    last_step: float = math.inf  # no prompt is started for a later one
    queue: dict[str, Admitted] = field(default_factory=dict)  # by uid of the prompt, in the order of admission
    training: HandOut | None = None  # the step whose weights do not sample yet
    _unsampled: set[str] = field(default_factory=set)  # uids of groups with episodes that run
    _undecided: set[str] = field(default_factory=set)  # uids of groups with trajectories that are not scored yet
    _waits_for: type[Command] | None = None  # the next command for the step that asked: Chosen, then HandOut
    _rounds: list[int] = field(default_factory=list)  # numbers of prompts started for the step, by round
    _before: Mapping[str, Any] | None = None  # with k = 0: state of the source before the step

    @property
    def is_ahead(self) -> bool:
        """Tells whether groups are sampled before a step asks for them, which needs `max_staleness` above 0."""
        return self.max_staleness > 0

    @property
    def next_step(self) -> int:
        """The step that the next groups are handed out for."""
        return self.version + 1 + (self.training is not None)

    @property
    def outstanding(self) -> int:
        """The number of groups that are admitted, not dropped, and not yet part of the weights that sample."""
        return self._live + (0 if self.training is None else len(self.training.kept))

    @property
    def most_outstanding(self) -> int:
        """The largest number of outstanding groups."""
        return self.batch_size + math.floor(self.max_staleness * self.batch_size)

    @property
    def ready(self) -> int:
        """The number of groups that wait to be handed out."""
        return sum(each.is_kept is True for each in list(self.queue.values()))  # other threads ask too

    @property
    def progress(self) -> tuple[int, int]:
        """Returns how many of the next step's trajectories have ended, and how many it has."""
        first = islice(list(self.queue.values()), self.batch_size)
        ended = sum(self.n if each.is_kept is not None else len(each.sampled) for each in first)
        return ended, self.batch_size * self.n

    def ask(self, step: int) -> list[Command]:
        """Asks for the groups of a step. The returned commands or later ones contain a HandOut."""
        if not self.is_ahead:
            self._before = copy.deepcopy(dict(self.source.state()))
            self.restart(step - 1, [])
        assert step == self.next_step, f"step {step} asks for groups, expected step {self.next_step}"
        self._waits_for, self._rounds = Chosen if self.group_filter is None else HandOut, []
        return [*self._choose(), *self._advance()]

    def on_sampled(self, trajectory: Trajectory) -> list[Command]:
        """Records the end of an episode."""
        if (admitted := self.queue.get(trajectory.prompt.uid)) is None:  # of an abandoned step
            return []
        admitted.sampled[trajectory.sample] = trajectory
        commands: list[Command] = [Score([trajectory])] if self.scores_alone else []
        if len(admitted.sampled) < self.n or admitted.prompt.uid not in self._unsampled:
            return commands
        self._unsampled.discard(admitted.prompt.uid)
        admitted.place = len(self.queue) - len(self._unsampled)
        if self._in_rounds and self._unsampled:
            return commands
        if not self.scores_alone:
            together = [each for each in self.queue.values() if each.is_kept is None] if self._in_rounds else [admitted]
            commands.append(Score([one for each in together for one in each.group(each.sampled).trajectories]))
        return [*commands, *self._choose()]

    def on_scored(self, trajectories: Sequence[Trajectory]) -> list[Command]:
        """Records trajectories that were scored or could not be scored. A repeated one changes nothing."""
        commands = list[Command]()
        for each in trajectories:
            admitted = self.queue.get(each.prompt.uid)
            if admitted is None or admitted.is_kept is not None or each.sample in admitted.scored:
                continue
            admitted.scored[each.sample] = each
            if len(admitted.scored) == self.n:
                admitted.is_kept = self.group_filter is None or self.group_filter.keep(admitted.group(admitted.scored))
                self._undecided.discard(each.prompt.uid)
                commands += [] if self._in_rounds and self._undecided else self._advance()
        return commands

    def on_version(self, version: int) -> list[Command]:
        """Records that every replica samples with the weights of `version`."""
        self.version, self.training, self._before = version, None, None
        return self._advance()

    def restart(self, version: int, queue: Sequence[Admitted]) -> None:
        """Resumes after step `version`, with the groups of a checkpoint in the order of their admission."""
        self.version, self.training, self._waits_for = version, None, None
        self.queue = {each.prompt.uid: each for each in queue}
        self._undecided = {each.prompt.uid for each in queue if each.is_kept is None}
        self._unsampled = {*self._undecided}

    def place(self) -> Mapping[str, Any]:
        """Returns the position in the prompts. Without staleness it is before the step until the step is trained."""
        return self._before or dict(self.source.state())

    def most_age(self, place: int) -> int:
        """The largest age in versions that tokens at a `place` of the queue may have now: each batch trained before
        them adds one. A filter may leave a step fewer groups; then later groups wait longer."""
        most = self.batch_size * (1 + math.ceil(self.max_staleness)) if self.group_filter else self.most_outstanding
        return (most - 1 - place) // self.batch_size

    @property
    def _live(self) -> int:
        """The number of groups in the queue that are not dropped."""
        return sum(each.is_kept is not False for each in list(self.queue.values()))

    @property
    def _extra(self) -> int:
        """The number of groups that a step starts beyond a batch."""
        return 0 if self.is_ahead or self.group_filter is None else math.ceil(self.group_filter.extra * self.batch_size)

    @property
    def _in_rounds(self) -> bool:
        """Tells whether the groups of a step are scored and filtered together: all of a batch, then of each refill."""
        return not (self.is_ahead or self._extra)

    @property
    def _most_read(self) -> float:
        """The most groups, dropped ones included, that a step reads. Without staleness only refills limit it."""
        if self.group_filter is None or not self.is_ahead:
            return math.inf
        return (1 + self.group_filter.max_refills) * self.batch_size

    def _choose(self) -> list[Command]:
        """Returns a Chosen with the requested groups once all are sampled, if no filter reads scores."""
        first = list(islice(self.queue.values(), self.batch_size)) if self._waits_for is Chosen else []
        if len(first) < self.batch_size or any(len(each.sampled) < self.n for each in first):
            return []
        self._waits_for = HandOut
        return [Chosen([each.group(each.sampled) for each in first])]

    def _advance(self) -> list[Command]:
        return [*self._hand_out(), *self._start()]

    def _start(self) -> list[Command]:
        """Starts as many prompts as the limits allow. Keys of their random draws contain the step that uses them."""
        live, wanted, most, commands = self._live, self.batch_size, self._most_read, list[Command]()
        taken = 0 if self.training is None else wanted  # a step in training counts as a full batch
        most_live = self.most_outstanding + self._extra - taken
        # Dropped groups count too: a group behind too many of them would wait for too many steps.
        most_queued = min(most + most_live - wanted, most * max(1, self.last_step + 1 - self.next_step))
        room = int(min(most_live - live, most_queued - len(self.queue)))
        if not self.is_ahead and (self._waits_for is None or self._undecided):
            room = 0
        steps = Counter(self.next_step + (place // wanted) * self.is_ahead for place in range(live, live + room))
        for step, count in steps.items():
            if step <= self.last_step:
                prompts = self.source.take(count)
                admitted = {prompt.uid: Admitted(prompt, step) for prompt in prompts}
                self.queue |= admitted
                self._unsampled |= admitted.keys()
                self._undecided |= admitted.keys()
                self._rounds.append(len(prompts))
                commands.append(RunEpisodes(self.episodes(prompts, step)))
        return commands

    def _hand_out(self) -> list[Command]:
        """Hands out the requested groups once all earlier groups are kept or dropped. Aborts unused `extra` groups."""
        if self._waits_for is None:
            return []
        read, kept = list[Admitted](), 0
        for each in sorted(self.queue.values(), key=attrgetter("place")) if self._extra else self.queue.values():
            if each.is_kept is None or kept == self.batch_size or len(read) == self._most_read:
                break
            read.append(each)
            kept += each.is_kept
        is_short = kept < self.batch_size and not self._is_exhausted(read)
        new = [] if is_short and self._undecided else [each for each in read if not each.is_observed]
        if new:  # in the order of the step, whenever scores come; the prompts of a refill depend on them
            self.source.observe([each.group(each.scored) for each in new])
        for each in new:
            each.is_observed = True
        if is_short:
            return []
        taken = {each.prompt.uid for each in read}
        read = [each for uid, each in self.queue.items() if uid in taken]
        left = [uid for uid in self.queue if uid not in taken and self._extra]
        for uid in (*taken, *left):
            del self.queue[uid]
            self._unsampled.discard(uid)
            self._undecided.discard(uid)
        found = {keeps: [each.group(each.scored) for each in read if each.is_kept is keeps] for keeps in (True, False)}
        self.training = HandOut(self.next_step, self.batch_size, found[True], found[False], left)
        self._waits_for = None
        return [self.training]

    def _is_exhausted(self, read: Sequence[Admitted]) -> bool:
        """Tells whether the step must continue with fewer groups than it asked for."""
        if self.is_ahead or self.group_filter is None or len(read) < max(1, len(self.queue)):
            return len(read) == self._most_read
        last_round = [trajectory for each in read[-self._rounds[-1] :] for trajectory in each.scored.values()]
        return len(self._rounds) > self.group_filter.max_refills or all(each.failure for each in last_round)


def by_player(groups: Sequence[Group]) -> list[Group]:
    """Splits groups with several players: each trained player gets a group of its own turns. Other groups stay
    unchanged."""
    split = list[Group]()
    for group in groups:
        trained = {turn.player for each in group.trajectories for turn in each.turns if turn.is_trained}
        split += [group] if trained <= {""} else [_of_player(group, player) for player in sorted(trained)]
    return split


def _of_player(group: Group, player: str) -> Group:
    prompt = replace(group.prompt, uid=f"{group.prompt.uid}/{player}")
    own = ((each, tuple(turn for turn in each.turns if turn.player == player)) for each in group.trajectories)
    return Group(prompt, tuple(replace(a, uid=f"{a.uid}/{player}", prompt=prompt, turns=turns) for a, turns in own))


def keep_all(values: Sequence[float]) -> bool:
    """Keeps every group."""
    return True


def _metric(trajectory: Trajectory, name: str) -> float:
    """Finds a number of a trajectory by name. The name of a reward part may omit its domain."""
    numbers = {**trajectory.parts, "accuracy": trajectory.accuracy or 0.0, "reward": trajectory.score}
    found = numbers.get(name, numbers.get(f"{trajectory.prompt.domain}/{name}"))
    if found is None:
        expected = f"a number that the reward reports for {trajectory.uid}: {', '.join(sorted(numbers))}"
        raise DataError("algorithm.filter.metric", name, expected)
    return found
