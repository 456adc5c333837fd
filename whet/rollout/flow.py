# SPDX-License-Identifier: Apache-2.0
"""The flow of groups as a state machine: trajectories, scores and versions of the weights go in; episodes to run,
trajectories to score and groups to train on come out.

It has no clock, thread or socket. Groups are handed out in the order of their admission, whatever the order in which
trajectories come in. Its snapshot has every group that was admitted and not trained on.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

from whet.errors import DataError
from whet.rollout.episode import Episode
from whet.types import Group, Prompt, Trajectory

log = logging.getLogger(__name__)


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
    """A source that gives prompts that were put back before its own; without a source, these alone."""

    def __init__(self, source: PromptSource | None, first: Sequence[Prompt] = ()) -> None:
        self.source, self._returned = source, list(first)

    def put_back(self, uids: Sequence[str]) -> None:
        """Lets these prompts come first, and says so.  Raises: DataError for one that is not among the data."""
        if uids:
            log.warning("%d prompts that were sampled ahead begin again, as the next that are sampled", len(uids))
        self._returned = [*map(self.find, uids), *self._returned]

    def take(self, n: int) -> list[Prompt]:
        first, self._returned = self._returned[:n], self._returned[n:]
        return first if self.source is None else [*first, *self.source.take(n - len(first))]

    def find(self, uid: str) -> Prompt:
        if self.source is None:
            raise DataError("source of prompts", None, "one that finds a prompt by its uid", "pass a data loader")
        return self.source.find(uid)

    def observe(self, groups: Sequence[Group]) -> None:
        if self.source is not None:
            self.source.observe(groups)

    def state(self) -> dict[str, Any]:
        """The place of the source; under `first` the uids that were put back, if there are any."""
        state = {} if self.source is None else {**self.source.state()}
        return {**state, **({"first": [each.uid for each in self._returned]} if self._returned else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.source is not None:
            self.source.load_state(state)
        self._returned = [self.find(uid) for uid in state.get("first", ())]


@dataclass(frozen=True)
class Filter:
    """The choice of groups to train on: `keeps` reads the `metric` of a group's trajectories that did not fail.
    Prompts of some domains may have a filter of their own."""

    keeps: Callable[..., bool]
    options: Mapping[str, Any]
    metric: str = "accuracy"
    max_refills: int = 4
    of_domain: Mapping[str, Filter] = field(default_factory=dict)

    def keep(self, group: Group) -> bool:
        """Tells whether a group is trained on.  Raises: DataError for a metric that the reward does not report."""
        own = self.of_domain.get(group.prompt.domain)
        if own is not None:
            return own.keep(group)
        values = [
            [_metric(each, self.metric) for each in player.trajectories if not each.failure]
            for player in by_player([group])
        ]
        return any(self.keeps(each, **self.options) for each in values)


@dataclass(frozen=True)
class Run:
    """Run episodes, and tell `on_sampled` the trajectory of each."""

    episodes: list[Episode]


@dataclass(frozen=True)
class Score:
    """Score trajectories together, and tell `on_scored`."""

    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Chosen:
    """Names the groups of the step, which are sampled and not scored yet; no filter reads their scores."""

    groups: list[Group]


@dataclass(frozen=True)
class HandOut:
    """The step has its groups: those that were kept and, in the order of admission, all that were `dropped`."""

    step: int
    wanted: int
    kept: list[Group]
    dropped: list[Group]

    @property
    def groups(self) -> list[Group]:
        """Groups for a batch: the kept ones or, where the filter kept none, dropped ones, which keep the run going."""
        return self.kept or self.dropped[: self.wanted]


Command = Run | Score | Chosen | HandOut


@dataclass
class Admitted:
    """A prompt that was started and is not handed out."""

    prompt: Prompt
    step: int  # names its random draws: the one that it was admitted for
    samples: dict[int, Trajectory] = field(default_factory=dict)  # those that are scored
    is_kept: bool | None = None  # unknown until all are scored
    sampled: dict[int, Trajectory] = field(default_factory=dict)  # those that ended, as they were sampled

    @property
    def group(self) -> Group:
        """The group of its scored samples."""
        return Group(self.prompt, tuple(self.samples[sample] for sample in sorted(self.samples)))

    @property
    def as_sampled(self) -> Group:
        """The group of its samples without scores."""
        return Group(self.prompt, tuple(self.sampled[sample] for sample in sorted(self.sampled)))


SAMPLED, SCORED = attrgetter("sampled"), attrgetter("samples")


@dataclass
class Flow:
    """Groups for one step after the other, sampled ahead as far as `max_staleness` allows.

    With k = `max_staleness` at most B + floor(k B) groups (B = `batch_size`) are outstanding: admitted, not dropped,
    and not yet part of the weights that sample. Then no token is more than ceil(k) versions older than the weights that
    are trained with it, and of a fractional k at most that share of a batch is at the last version allowed.

    With k = 0 prompts are started when a step asks for them: B and, while the filter drops groups, up to `max_refills`
    times as many as are short, in rounds; what a step that was left had begun is forgotten. With k > 0 they are started
    as soon as there is room, and a step takes the first B groups that are kept, of the next (1 + `max_refills`) B
    admitted ones at most. In both, a step gets fewer than B groups only where so many came to nothing.
    """

    n: int  # trajectories of a prompt
    batch_size: int  # groups of a step
    source: ReturnedFirst
    episodes: Callable[[Sequence[Prompt], int], list[Episode]]  # of prompts, n each in their order, for a step
    max_staleness: float = 0.0
    group_filter: Filter | None = None
    scores_alone: bool = False  # a trajectory is scored when it ends; else with its group or, with k = 0, its round
    version: int = 0  # of the weights that sample: that of the last step whose weights every replica has
    last_step: float = math.inf  # no prompt is started for a later one
    queue: dict[str, Admitted] = field(default_factory=dict)  # by uid of the prompt, in the order of admission
    untrained: list[HandOut] = field(default_factory=list)  # handed out for weights that do not sample yet
    _asked: int | None = None  # the step that waits for groups
    _is_chosen: bool = False  # its groups were named
    _rounds: list[int] = field(default_factory=list)  # prompts that were started for it at a time
    _before: Mapping[str, Any] | None = None  # with k = 0: state of the source before the step

    @property
    def next_step(self) -> int:
        """The step for which groups are handed out next."""
        return (self.untrained[-1].step if self.untrained else self.version) + 1

    @property
    def outstanding(self) -> int:
        """Groups that are admitted, not dropped, and not yet part of the weights that sample."""
        return self._live + sum(len(each.kept) for each in self.untrained)

    @property
    def most_outstanding(self) -> int:
        """Groups that may be outstanding."""
        return self.batch_size + math.floor(self.max_staleness * self.batch_size)

    @property
    def room(self) -> int:
        """Groups of a checkpoint that can go on: with k = 0 a step begins with nothing."""
        return 0 if self._samples_in_rounds else self.most_outstanding

    @property
    def ready(self) -> int:
        """Groups that wait to be handed out."""
        return sum(each.is_kept is True for each in list(self.queue.values()))  # other threads ask too

    @property
    def progress(self) -> tuple[int, int]:
        """Trajectories of the next step that have ended, and all of them."""
        first = islice(list(self.queue.values()), self.batch_size)
        ended = sum(self.n if each.is_kept is not None else len(each.sampled) for each in first)
        return ended, self.batch_size * self.n

    def ask(self, step: int) -> list[Command]:
        """Asks for the groups of a step; the answer is a HandOut, now or later."""
        if self._samples_in_rounds:
            self._before = copy.deepcopy(dict(self.source.state()))
            self.restart(step - 1, [])
        assert step == self.next_step, f"step {step} asks for groups, expected step {self.next_step}"
        self._asked, self._is_chosen, self._rounds = step, False, []
        return [*self._choose(), *self._advance()]

    def on_sampled(self, trajectory: Trajectory) -> list[Command]:
        """Notes the end of an episode."""
        admitted = self.queue.get(trajectory.prompt.uid)
        if admitted is None:  # of a step that was left
            return []
        admitted.sampled[trajectory.sample] = trajectory
        score: list[Command] = [Score([trajectory])] if self.scores_alone else []
        if not (together := self._together(admitted, SAMPLED)):
            return score
        if not self.scores_alone:
            score = [Score([each for one in together for each in one.as_sampled.trajectories])]
        return [*score, *self._choose()]

    def on_scored(self, trajectories: Sequence[Trajectory]) -> list[Command]:
        """Notes scored trajectories, or with a failure; one that is there already changes nothing."""
        return [command for each in trajectories for command in self._on_scored(each)]

    def on_version(self, version: int) -> list[Command]:
        """Notes that every replica samples with these weights."""
        self.version, self._before = version, None
        self.untrained = [each for each in self.untrained if each.step > version]
        return self._advance()

    def restart(self, version: int, queue: Sequence[Admitted]) -> None:
        """Begins again behind `version`, with the groups of a checkpoint in the order of their admission."""
        self.version, self.untrained, self._asked = version, [], None
        self.queue = {each.prompt.uid: each for each in queue}

    def place(self) -> Mapping[str, Any]:
        """Returns the place of the next prompt; with k = 0, before groups are trained on, the place of their step."""
        return self._before or dict(self.source.state())

    def most_age(self, place: int) -> int:
        """Versions that tokens at a place of the queue may be old: a batch is trained on for each. A filter may leave a
        step fewer groups, so that those behind it wait for longer."""
        most = self.batch_size * (1 + math.ceil(self.max_staleness)) if self.group_filter else self.most_outstanding
        return (most - 1 - place) // self.batch_size

    @property
    def _samples_in_rounds(self) -> bool:
        return self.max_staleness == 0

    @property
    def _undecided(self) -> list[Admitted]:
        """Groups of which not all trajectories are scored."""
        return [each for each in self.queue.values() if each.is_kept is None]

    @property
    def _most_read(self) -> float:
        """Groups that a step takes from the queue, dropped ones included."""
        if self.group_filter is None or self._samples_in_rounds:
            return math.inf
        return (1 + self.group_filter.max_refills) * self.batch_size

    @property
    def _most_admitted(self) -> float:
        """Groups in the queue, dropped ones included: behind them a group would wait for too many steps."""
        ahead = math.floor(self.max_staleness * self.batch_size) - self.batch_size * len(self.untrained)
        return min(self._most_read + ahead, self._most_read * max(1, self.last_step + 1 - self.next_step))

    @property
    def _live(self) -> int:
        """Groups in the queue that are not dropped."""
        return sum(each.is_kept is not False for each in list(self.queue.values()))

    def _choose(self) -> list[Command]:
        """The groups that are asked for, once all are sampled, where no filter reads scores."""
        if self.group_filter is not None or self._asked is None or self._is_chosen:
            return []
        first = list(islice(self.queue.values(), self.batch_size))
        if len(first) < self.batch_size or any(len(each.sampled) < self.n for each in first):
            return []
        self._is_chosen = True
        return [Chosen([each.as_sampled for each in first])]

    def _on_scored(self, trajectory: Trajectory) -> list[Command]:
        admitted = self.queue.get(trajectory.prompt.uid)
        if admitted is None or admitted.is_kept is not None or trajectory.sample in admitted.samples:
            return []
        admitted.samples[trajectory.sample] = trajectory
        if not (together := self._together(admitted, SCORED)):
            return []
        groups = [each.group for each in together]
        self.source.observe(groups)
        for each, group in zip(together, groups, strict=True):
            each.is_kept = self.group_filter is None or self.group_filter.keep(group)
        return self._advance()

    def _together(self, admitted: Admitted, ended: Callable[[Admitted], Sized]) -> list[Admitted]:
        """The groups that are scored and decided together, with k = 0 a round; none before all have ended."""
        if len(ended(admitted)) < self.n:
            return []
        together = self._undecided if self._samples_in_rounds else [admitted]
        return together if all(len(ended(each)) == self.n for each in together) else []

    def _advance(self) -> list[Command]:
        handed_out = self._hand_out()
        return [*handed_out, *self._start()]

    def _start(self) -> list[Command]:
        """Fills the room: takes prompts, and names their draws by the step that will read them."""
        live, wanted = self._live, self.batch_size
        taken = wanted * len(self.untrained)  # a step takes its place even with fewer groups
        room = int(min(self.most_outstanding - taken - live, self._most_admitted - len(self.queue)))
        if self._samples_in_rounds and (self._asked is None or self._undecided):
            room = 0
        steps = Counter(self.next_step + place // wanted for place in range(live, live + room))
        return [self._begin(self.source.take(n), step) for step, n in steps.items() if step <= self.last_step]

    def _begin(self, prompts: Sequence[Prompt], step: int) -> Command:
        self.queue |= {prompt.uid: Admitted(prompt, step) for prompt in prompts}
        self._rounds.append(len(prompts))
        return Run(self.episodes(prompts, step))

    def _hand_out(self) -> list[Command]:
        """The groups that are asked for, as soon as nothing in front of them is undecided."""
        if self._asked is None:
            return []
        read: list[Admitted] = []
        kept = 0
        for each in self.queue.values():
            if each.is_kept is None or kept == self.batch_size or len(read) == self._most_read:
                break
            read.append(each)
            kept += each.is_kept
        if kept < self.batch_size and len(read) < self._most_read and not self._is_exhausted:
            return []
        for each in read:
            del self.queue[each.prompt.uid]
        sorted_ = {keeps: [each.group for each in read if each.is_kept is keeps] for keeps in (True, False)}
        handed_out = HandOut(self._asked, self.batch_size, sorted_[True], sorted_[False])
        self.untrained.append(handed_out)
        self._asked = None
        return [handed_out]

    @property
    def _is_exhausted(self) -> bool:
        """Tells whether a step that samples in rounds goes on with fewer groups than it wants."""
        if self.group_filter is None or not self.queue or self._undecided or not self._samples_in_rounds:
            return False
        last_round = [*self.queue.values()][-self._rounds[-1] :]
        scored = [trajectory for each in last_round for trajectory in each.samples.values()]
        return len(self._rounds) > self.group_filter.max_refills or all(each.failure is not None for each in scored)


def by_player(groups: Sequence[Group]) -> list[Group]:
    """Splits episodes of several players: each player that is trained has a group of its own turns. Other groups stay
    as they are."""
    split = list[Group]()
    for group in groups:
        trained = {turn.player for each in group.trajectories for turn in each.turns if turn.is_trained}
        split += [group] if trained <= {""} else [_of_player(group, player) for player in sorted(trained)]
    return split


def _of_player(group: Group, player: str) -> Group:
    prompt = replace(group.prompt, uid=f"{group.prompt.uid}/{player}")
    own = []
    for each in group.trajectories:
        turns = tuple(turn for turn in each.turns if turn.player == player)
        own.append(replace(each, uid=f"{each.uid}/{player}", prompt=prompt, turns=turns))
    return Group(prompt, tuple(own))


def keep_all(values: Sequence[float]) -> bool:
    """Keeps every group."""
    return True


def _metric(trajectory: Trajectory, name: str) -> float:
    """A number of a trajectory; a part also by its name without that of the domain."""
    numbers = {**trajectory.parts, "accuracy": trajectory.accuracy or 0.0, "reward": trajectory.score}
    found = numbers.get(name, numbers.get(f"{trajectory.prompt.domain}/{name}"))
    if found is None:
        expected = f"a number that the reward reports for {trajectory.uid}: {', '.join(sorted(numbers))}"
        raise DataError("algorithm.filter.metric", name, expected)
    return found
