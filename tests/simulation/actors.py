# SPDX-License-Identifier: Apache-2.0
"""The actors around the state machines: replicas, environments, scores, prompts, with virtual time and no model.

A token is a number that says which version of the weights sampled it, at which position, and a hash of the request's
key and of the weights themselves; so each token can be checked wherever it is found.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whet.data.loader import PromptSource
from whet.environments.protocol import Observation
from whet.rollout.fleet import Give
from whet.rollout.protocol import Completion, Event, Failed, Finished, Partial, Request, Status
from whet.types import Failure, Media, Message, Outcome, Prompt, RewardResult, Trajectory, Turn

if TYPE_CHECKING:
    from tests.simulation.world import World

END = 0  # of the twelve bits that are drawn
CONNECTIONS = 1 << 20  # of a trainer, at most
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 40)  # heavy-tailed


class Ends(tuple[int, ...]):
    """The stop tokens: as many as there are versions and positions."""

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and token & 0xFFF == END


def token_at(key: int, position: int, version: int, weights: int) -> int:
    """The token of a response at a position."""
    is_last = position + 1 == LENGTHS[key % len(LENGTHS)]
    drawn = END if is_last else 1 + hash((key, position, weights)) % 4095
    return version << 24 | position << 12 | drawn


def version_of(token: int) -> int:
    """The version of the weights that sampled a token."""
    return token >> 24


def position_of(token: int) -> int:
    """The position of a token in its response."""
    return token >> 12 & 0xFFF


def runs_of(tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The runs of versions that an honest engine stamps."""
    runs = list[tuple[int, int]]()
    for token in tokens:
        if runs and runs[-1][0] == version_of(token):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((version_of(token), 1))
    return tuple(runs)


def log_probs_of(tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probs that follow from the tokens."""
    return tuple(-(token % 997) / 997 for token in tokens)


class Letters:
    """A codec without a tokenizer, and the tokenizer that rewards ask."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids if token & 0xFFF != END)

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[()]:
        return ()

    def read(self, observation: Observation) -> Observation:
        return observation

    def opening(self, messages: Sequence[Message], media: Sequence[Media]) -> list[int]:
        return [ord(letter) for message in messages for letter in str(message.content)]

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media]
    ) -> list[int]:
        return [ord(letter) for message in new for letter in str(message.content)]


class Prompts(PromptSource):
    """Prompts without an end, in the order of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0

    def draw(self, n: int) -> list[Prompt]:
        taken = [self.prompt(number) for number in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return taken

    def prompt(self, number: int) -> Prompt:
        ids = (number % 7, 1, 2)
        return Prompt(f"0:{number}", number, (Message("user", "?"),), ids, "test", None)

    def find(self, uid: str) -> Prompt:
        return self.prompt(int(uid.partition(":")[2]))

    def position(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def move_to(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]


def observation(uid: str, turn: int, text: str) -> Observation | Failure:
    """The reply of an environment, which follows from the episode and the text; `turn` 0 is its reset."""
    draw = random.Random(f"{uid} {turn} {text}")
    if draw.random() < 0.03:
        return Failure("environment", f"broke on {text!r}")
    if hangs(uid, turn):
        return Failure("environment", "its deadline passed", timed_out=True)
    if not turn:
        return Observation(done=False, max_tokens=draw.choice([None, None, 4]))
    if draw.random() < 0.4:
        return Observation(done=True, reward=draw.random())
    if draw.random() < 0.2:
        return Observation(done=False, messages=(Message("user", f"new {text[:2]}"),), context="replace")
    return Observation(done=False, messages=(Message("tool", "xyz"[: draw.randint(1, 3)]),), reward=0.5)


def hangs(uid: str, turn: int) -> bool:
    """Tells whether an environment does not answer."""
    return random.Random(f"hang {uid} {turn}").random() < 0.02


def outcome_of(trajectory: Trajectory) -> Outcome:
    """The score, which follows from the trajectory; some rewards fail and some hang until their deadline."""
    text = "".join(str(message.content) for message in trajectory.messages)
    draw = random.Random(f"score {trajectory.uid} {text}").random()
    if draw < 0.05:
        return Failure("reward", "late" if draw < 0.02 else "broken", timed_out=draw < 0.02)
    return RewardResult(draw, float(draw < 0.5))


def mixed(values: Sequence[float]) -> bool:
    """A filter that drops groups of equal accuracy."""
    return len(values) == 1 or 0 < sum(values) < len(values)


@dataclass(frozen=True)
class Load:
    """Weights for a replica."""

    generation: int
    version: int


@dataclass(frozen=True)
class Pause:
    """The begin or the end of a pause of a replica."""

    generation: int
    is_paused: bool


class RoutedEngine:
    """The router as a rollout engine: it stands for `Replicas` without ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.events = list[Event]()

    def submit(self, request: Request) -> bool:
        router = self._world.router
        if len(router.flights) >= self._world.plan.capacity:
            return False
        router.submit(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def abort(self, uids: Sequence[str]) -> None:
        self.events += self._world.router.abort(uids)

    def pause(self) -> None:
        self._world.pause(is_paused=True)

    def resume(self) -> None:
        self._world.pause(is_paused=False)

    def status(self) -> Status:
        router = self._world.router
        return Status(router.version, len(router.flights) - len(router.waiting), len(router.waiting))

    def load(self, weights: object, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Running:
    """A request on a replica."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    told: int = 0  # tokens that a chunk had
    while_loading: bool = False  # it was given while weights were replaced, and starts at once
    cache: int = 0  # version of the keys and values of its prefix


@dataclass
class Replica:
    """An engine in a process of its own, at the other end of an unreliable connection."""

    number: int
    process: int  # counts its restarts
    world: World = field(repr=False)
    generation: int = 0
    version: int | None = None
    version_incarnation: int = 0  # of the trainer that it is from
    weights: int = 0
    is_loading: bool = False
    is_paused: bool = False
    is_alive: bool = True
    hung_until: float = 0.0
    slow_until: float = 0.0
    failing_loads: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    prefixes: dict[tuple[int, ...], int] = field(default_factory=dict)  # version of the cache, by prompt

    def on_command(self, command: Give | Load | Pause) -> None:
        """Handles a command of the trainer; commands of an earlier generation are ignored, a later generation starts
        anew."""
        if command.generation < self.generation:
            return
        if command.generation > self.generation:
            self.generation, self.is_paused = command.generation, False
            self.running.clear()
        if isinstance(command, Give):
            for uid in command.ended:
                self._abort(uid)
            for request in command.tasks:
                self._begin(request)
        elif isinstance(command, Load):
            self.is_loading = True
            self._make_way()
            stall = 9 * self.world.draw() if self.world.draw() < self.world.plan.stalls else 0
            self.world.post(0.2 + stall + self.world.draw(), "load_ends", self.number, self.process, command)
        else:
            self.is_paused = command.is_paused
            if self.is_paused:
                self._make_way()
                for each in self.running.values():
                    self._tell_partial(each, whole=True)

    def _make_way(self) -> None:
        """Ends running requests, if the engine does so; the caller continues after their tokens."""
        for uid in list(self.running) if self.world.plan.aborts else ():
            self._abort(uid)

    def on_load_ends(self, load: Load) -> None:
        """The weights have arrived, or not."""
        if load.generation != self.generation:
            return
        self.is_loading = False
        if self.failing_loads:
            self.failing_loads -= 1
            self.version = None
            self.world.tell(self, "load_failed", load.version)
            return
        self.world.on_loads(self, load)
        self.version, self.weights = load.version, self.world.published[load.generation // CONNECTIONS, load.version]
        self.version_incarnation = load.generation // CONNECTIONS
        self._forget()
        self.world.tell(self, "loaded", load.version)

    def _forget(self) -> None:
        """Computes keys and values again under the new weights."""
        self.prefixes.clear()
        for each in self.running.values():
            each.cache = self.version or 0

    def _begin(self, request: Request) -> None:
        there = self.running.get(request.uid)
        if there is not None and there.request.attempt >= request.attempt:
            return
        is_whole = request.sampled_ids and request.sampled_ids[-1] in request.params.stop_token_ids
        if is_whole or len(request.sampled_ids) >= request.params.max_new_tokens:
            self.world.on_refused(request)
            return
        cache = self.prefixes.setdefault(request.prompt_ids, self.version or 0)
        self.running[request.uid] = Running(request, while_loading=self.is_loading, cache=cache)
        self.world.decode_later(self, request)

    def _abort(self, uid: str) -> None:
        each = self.running.pop(uid, None)
        if each is not None:
            self._tell(Finished(uid, each.request.attempt, self._completion(each, "abort")))

    def on_decode(self, uid: str, attempt: int) -> None:
        """Samples a few tokens of a request."""
        each = self.running.get(uid)
        if each is None or each.request.attempt != attempt:
            return
        if self.is_paused or (self.is_loading and not each.while_loading) or self.version is None:
            self.world.decode_later(self, each.request)
            return
        request = each.request
        self.world.on_samples(self, each)
        if self.world.plan.staleness and self.world.draw() < 0.005:
            del self.running[uid]
            self._tell(Failed(uid, attempt, Failure("engine", "out of blocks")))
            return
        if self.world.plan.aborts and self.world.draw() < 0.05:
            self._abort(uid)
            return
        for _ in range(self.world.rng.randint(1, 3)):
            position = len(request.sampled_ids) + len(each.tokens)
            token = token_at(request.key, position, self.version, self.weights)
            each.tokens.append(token)
            if token & 0xFFF == END or position + 1 == request.params.max_new_tokens:
                self._tell_partial(each, whole=self.world.draw() < 0.5)
                del self.running[uid]
                reason = "stop" if token & 0xFFF == END else "length"
                self._tell(Finished(uid, attempt, self._completion(each, reason)))
                return
        if self.world.draw() < 0.5:
            self._tell_partial(each, whole=self.world.draw() < 0.5)
        self.world.decode_later(self, request)

    def _tell_partial(self, each: Running, *, whole: bool) -> None:
        """Sends all tokens of the attempt, or the new ones."""
        start = 0 if whole else each.told
        tokens = each.tokens[start:]
        each.told = len(each.tokens)
        if tokens:
            request = each.request
            offset = len(request.sampled_ids) + start
            told = Partial(
                request.uid, request.attempt, offset, tuple(tokens), log_probs_of(tokens), self.stamp(tokens)
            )
            self._tell(told)

    def _completion(self, each: Running, reason: Any) -> Completion:
        return Completion(tuple(each.tokens), log_probs_of(each.tokens), reason, self.stamp(each.tokens))

    def stamp(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The versions of tokens."""
        return runs_of(tokens)

    def _tell(self, event: Event) -> None:
        self.world.tell(self, "event", event)


def restarted(replica: Replica) -> Replica:
    """The replica in a new process."""
    made = type(replica)(replica.number, replica.process + 1, replica.world)
    return replace(made, generation=0)
