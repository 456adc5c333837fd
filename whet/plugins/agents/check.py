# SPDX-License-Identifier: Apache-2.0
"""`whet env check`: plays an environment in separate processes and looks for faults. Each call has a deadline.

A probe is a function that runs in a child process; this process evaluates its result. The children are forked from two
template processes (`prepare`) with different hash seeds, so results that depend on a hash or a set's order differ."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import mul
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from whet.environments.protocol import Answer, Closes, Environment, Observation, Result, unpaid
from whet.environments.running import EnvironmentSpec, Running
from whet.errors import describe
from whet.files import shipped_yaml
from whet.keyed import key
from whet.processes.children import Callee, Children, Reply
from whet.processes.template import Caller, Serve
from whet.processes.user_code import pickle_code
from whet.registry import ENVIRONMENTS
from whet.types import Failure, Media, Prompt

SHOWN = 50  # characters of an answer or a message
NUM_SEEDS = 8  # seeds that the check "another seed" compares
SPEED_SECONDS = 0.3
START_SECONDS = 120.0  # to load the environment
MAX_MEDIA_BYTES = 16 * 2**20  # of the images and videos of an observation
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
Found = dict[str, Any]  # what a probe returns
Make = Callable[[Prompt], Environment]  # makes the environment of an episode
Probe = Callable[..., Coroutine[object, None, Found]]  # gets a function that makes the environment, and the plan
Parts = dict[str, str]  # the fields of an observation as texts, by name
WORDS = ("Up", "Down", "Left", "Right", "1", "1+1")
ORDINARY = (*"udlr012", "yes", "select(0)", "<calc>1+1</calc>", *(f"<answer>{word}</answer>" for word in WORDS))
STRANGE: Mapping[str, str] = {
    name: text if isinstance(text, str) else "".join(map(mul, text[::2], text[1::2]))
    for name, text in shipped_yaml("plugins/agents/strange_answers.yaml").items()
} | {"random characters": "".join(random.Random(0).choices([chr(code) for code in range(1, 0x2FF)], k=500))}


@dataclass(frozen=True)
class EnvironmentFinding:
    """The result of one check: its name, `is_ok` (None: the check does not apply), and `what`, the text to print."""

    name: str
    is_ok: bool | None
    what: str


@dataclass(frozen=True)
class Plan:
    """The settings of a check. It plays `answers`, else the environment's `choices()`, else built-in answers."""

    prompt: Prompt
    answers: Sequence[str] = ()
    seed: int = 0
    max_turns: int = 50
    seconds: float = 10.0  # for one probe
    max_characters: int = 100_000  # of an observation


@runtime_checkable
class Offers(Protocol):
    """An environment that lists its valid answers, for programs that play it."""

    def choices(self) -> Sequence[str]:
        """Returns the answers that the environment's current state allows."""
        ...


def check(environment: str, options: Mapping[str, object], plan: Plan) -> Iterator[EnvironmentFinding]:
    """Yields the result of each check in a fixed order, as soon as it is known.

    Raises: RegistryError; ConfigError for an option that the environment does not have; any error of the import."""
    entry = ENVIRONMENTS[environment]
    resolved = entry.resolve_options(options, "--option")
    target = environment if ":" in environment else entry.function or environment
    code = pickle_code(EnvironmentSpec(target, resolved), target)
    with _Children(code, plan) as first, _Children(code, plan) as second:
        yield from _EnvironmentCheck(plan, first, second).run()


class _Children:
    """Child processes of one template. `ask` runs a probe, a function of this module, in a new child or in `child`."""

    def __init__(self, code: bytes, plan: Plan) -> None:
        self._children = Children("whet.plugins.agents.check:prepare", pickle.dumps((code, plan)), replies=(dict,))
        self._seconds = plan.seconds

    def __enter__(self) -> _Children:
        self.ask(_load, seconds=START_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        self._children.close()

    def ask(self, probe: Probe, *arguments: object, child: Callee | None = None, seconds: float | None = None) -> Found:
        """Runs a probe and returns its result. Without a reply, the result is the reason in the field `ended`."""
        used, seconds = child or self._children.start(), seconds or self._seconds
        self._children.call(used, None, pickle.dumps((probe, arguments)), seconds)
        while True:
            for event in self._children.poll(seconds):
                if event.child is used:
                    if isinstance(event, Reply):
                        if child is None:
                            self._children.kill(used)
                        return dict(event.value)
                    why = f"no reply within {seconds:g} s" if event.is_late else f"its process {event.why}"
                    return {"ended": why, "is_late": event.is_late}

    def start(self) -> Callee:
        """Starts a child that is kept for several probes."""
        return self._children.start()


class _EnvironmentCheck:
    def __init__(self, plan: Plan, first: _Children, second: _Children) -> None:
        self.plan, self.first, self.second = plan, first, second

    def run(self) -> Iterator[EnvironmentFinding]:
        """Yields the result of each check. Stops early if the first episode fails to start, crashes or hangs."""
        seed = self.plan.seed
        alone = self.first.ask(_play, [seed])
        if "ended" in alone:
            hangs = "for an episode: reset, a step or close hangs; --seconds allows more"
            name, what = ("deadline", f"{alone['ended']} {hangs}") if alone["is_late"] else ("starts", alone["ended"])
            yield EnvironmentFinding(name, False, what)
            return
        faults: dict[str, str] = alone["faults"]
        turns = f"{alone['turns']} turn{'s' * (alone['turns'] != 1)}"
        yield self._of("starts", faults, turns if alone["rewards"] else "reset returns")
        if "starts" in faults:
            return
        if not alone["rewards"]:  # reset returned an unusable observation
            yield from (EnvironmentFinding(name, False, what) for name, what in faults.items())
            return
        yield EnvironmentFinding("deadline", True, f"an episode took {alone['seconds']:.2g} s")
        yield self._of("observations", faults, f"up to {alone['characters']:,} characters")
        yield self._of("rewards", faults, f"{min(alone['rewards']):g} to {max(alone['rewards']):g}")
        yield self._size(alone["characters"], alone["media_bytes"])
        yield self._same("same seed", alone, self.second.ask(_play, [seed]), "in another process")
        beside = self.first.ask(_play, [seed, seed + 1])
        yield self._same("beside another", alone, beside, "while another one runs: it shares state or a generator")
        yield self._other_seeds()
        changed = alone["is_prompt_changed"]
        yield EnvironmentFinding("prompt", not changed, "it changes its prompt; copy it" if changed else "unchanged")
        for name, probe in {"after the end": _after_the_end, "restores": _restores, "close": _close}.items():
            yield self._simple(name, probe)
        yield self._answers()
        yield self._simple("speed", _speed)

    def _of(self, name: str, faults: Mapping[str, str], good: str) -> EnvironmentFinding:
        return EnvironmentFinding(name, name not in faults, faults.get(name, good))

    def _size(self, characters: int, media_bytes: int) -> EnvironmentFinding:
        most, most_bytes = self.plan.max_characters, MAX_MEDIA_BYTES
        expected, found = f"at most {most:,} characters", f"{characters:,} characters"
        if media_bytes:
            expected = f"{expected}, and {most_bytes:,} bytes of media"
            found = f"{found}, and {media_bytes:,} bytes of media"
        is_ok = characters <= most and media_bytes <= most_bytes
        return EnvironmentFinding("observation size", is_ok, expected if is_ok else f"{found}; expected {expected}")

    def _same(self, name: str, alone: Found, other: Found, where: str) -> EnvironmentFinding:
        if "ended" in other:
            return EnvironmentFinding(name, False, other["ended"])
        one, two = alone["transcripts"][0], other["transcripts"][0]
        if one == two:
            return EnvironmentFinding(name, True, f"the same {len(one)} observations")
        return EnvironmentFinding(name, False, _difference(one, two, f"differs {where}"))

    def _other_seeds(self) -> EnvironmentFinding:
        firsts = set()
        for seed in range(self.plan.seed, self.plan.seed + NUM_SEEDS):
            found = self.first.ask(_play, [seed])
            if why := found.get("ended") or found["faults"].get("starts"):
                return EnvironmentFinding("another seed", False, f"seed {seed}: {why}")
            firsts.add(repr(found["transcripts"][0]))
        if len(firsts) == 1:
            return EnvironmentFinding(
                "another seed", None, f"{NUM_SEEDS} seeds give the same episode: it is not random"
            )
        return EnvironmentFinding("another seed", True, f"{len(firsts)} different episodes of {NUM_SEEDS} seeds")

    def _simple(self, name: str, probe: Probe) -> EnvironmentFinding:
        found = self.first.ask(probe)
        return (
            EnvironmentFinding(name, False, found["ended"]) if "ended" in found else EnvironmentFinding(name, **found)
        )

    def _answers(self) -> EnvironmentFinding:
        child, bad = self.first.start(), []
        for name, text in STRANGE.items():
            found = self.first.ask(_answer, text, child=child)
            if "ended" in found:
                child = self.first.start()
            if what := found.get("ended") or found["fault"]:
                bad.append(f"{name}: {what}")
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return EnvironmentFinding("answers", not bad, f"{bad[0]}{more}" if bad else f"{len(STRANGE)} strange ones")


def _difference(one: Sequence[Parts], two: Sequence[Parts], what: str) -> str:
    """Returns a text: the first turn and field in which two transcripts differ, and the values of both."""
    pairs = zip_longest(one, two, fillvalue={"failure": "no observation"})
    turn, (left, right) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    name = next(each for each in ("failure", *left) if left.get(each) != right.get(each))
    values = " and ".join(_short(each.get(name, "an observation")) for each in (left, right))
    return f"turn {turn} {what}: {values if name == 'failure' else f'{name} {values}'}"


def _short(text: object) -> str:
    shown = " ".join(str(text).split())
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def prepare(argument: bytes) -> Serve:
    """Loads the environment in the template process.  Returns the main function of its children."""
    code, plan = pickle.loads(argument)
    make = pickle.loads(code).load()
    return lambda caller: asyncio.run(_serve(caller, make, plan))


async def _serve(caller: Caller, make: Make, plan: Plan) -> None:
    while True:
        number, content = caller.receive()
        probe, arguments = pickle.loads(content)
        random.seed(0)
        caller.send(number, pickle.dumps(await probe(make, plan, *arguments)))


@dataclass
class _Played:
    """An episode that a probe plays, and the record of its observations, rewards and faults."""

    make: Make
    plan: Plan
    seed: int
    transcript: list[Parts] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # tasks since the last observation
    players: list[str] = field(default_factory=list)  # of each turn
    faults: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    characters: int = 0  # of the largest observation
    media_bytes: int = 0
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment: Any = None
        self.prompt = replace(self.plan.prompt, extra_info=copy.deepcopy(dict(self.plan.prompt.extra_info)))
        self.running = Running(self._made)

    def _made(self, prompt: Prompt) -> Environment:
        self.environment = self.make(prompt)
        return self.environment

    async def begin(self) -> None:
        """Resets the environment."""
        await self.call("starts", "reset", self.prompt, self.seed)

    async def turn(self) -> None:
        """Plays one turn; the seed and the turn number determine the answer."""
        if self.is_over:
            return
        offered = self.plan.answers or (
            self.environment.choices() if isinstance(self.environment, Offers) else ORDINARY
        )
        draws = random.Random(key(self.plan.seed, "check", self.seed, len(self.transcript)))
        await self.call("answers", "step", Answer(draws.choice(list(offered))))

    async def call(self, name: str, *arguments: Any) -> Observation | Failure:
        """Calls reset or step, and records the outcome for the check `name`. Tasks get a fixed result at once."""
        outcome, rounds = await self.running.call(*arguments), 0
        while isinstance(outcome, Observation) and outcome.tasks and rounds < self.plan.max_turns:
            self.asked += [str(task) for task in outcome.tasks]
            results = (Result("yes", 0.0, 1),) * len(outcome.tasks)
            outcome, rounds = await self.running.call("step", Answer("", results=results)), rounds + 1
        if isinstance(outcome, Observation) and outcome.tasks:
            outcome = Failure("environment", f"it gave tasks {rounds} times in one {arguments[0]}")
        if isinstance(outcome, Observation) and (why := unpaid(outcome, self.players)):
            outcome = Failure("environment", str(why), key=why.key)
        self._note(name, outcome)
        return outcome

    async def end(self) -> None:
        """Closes the environment."""
        await self.running.call("close")

    def _note(self, name: str, outcome: Observation | Failure) -> None:
        if isinstance(outcome, Failure):
            told, verb = outcome.message, "reset" if name == "starts" else "step"
            at = "rewards" if outcome.key.startswith("Observation.reward") else "observations" if outcome.key else name
            self.faults[at] = f"{verb} {'raised' if at == name else 'returned an unusable observation:'} {told}"
            self.transcript.append({"failure": told, "tasks": repr(self.asked)})
            self.is_over = True
            return
        try:
            pickle.dumps(outcome)
            self.media_bytes = max(self.media_bytes, sum(map(_size, outcome.media)))
        except Exception as error:  # an object of the user, a picture that is not there
            self.faults["observations"] = f"an observation cannot leave the process: {describe(error)}"
        self.transcript.append(_parts(outcome, self.asked))
        self.asked = []
        self.characters = max(self.characters, sum(len(str(message.content)) for message in outcome.messages))
        self.rewards += [outcome.reward, *outcome.rewards.values()]
        self.is_over = outcome.done or outcome.truncated
        self.players += [] if self.is_over else [outcome.player]


def _parts(seen: Observation, asked: Sequence[str]) -> Parts:
    """Returns the fields of an observation as texts, by name. Media become digests; `asked` has the tasks."""
    messages = [message.to_dict() for message in seen.messages]
    media = [(each.kind, each.digest) for each in seen.media]
    parts = {**vars(seen), "messages": messages, "media": media, "tasks": list(asked)}
    return {name: repr(_plain(value)) for name, value in parts.items()}


def _plain(value: object) -> object:
    """Converts a value for comparison: keys and sets in sorted order, other objects as texts without addresses."""
    match value:
        case Mapping():
            return {str(name): _plain(each) for name, each in sorted(value.items(), key=lambda item: str(item[0]))}
        case set() | frozenset():
            return sorted(map(_plain, value), key=repr)
        case list() | tuple():
            return [*map(_plain, value)]
        case str() | int() | float() | None:
            return value
    return ADDRESS.sub("", repr(value))


def _size(media: Media) -> int:
    """Returns the size of a media in bytes: of its file, or of all frames of a video."""
    return sum(len(each) if isinstance(each, bytes) else Path(each).stat().st_size for each in media.sources)


async def _load(make: Make, plan: Plan) -> Found:
    return {}


async def _play(make: Make, plan: Plan, seeds: Sequence[int]) -> Found:
    """Plays an episode for each seed, alternately turn by turn; later seeds go first. Returns all transcripts."""
    start, played = time.perf_counter(), [_Played(make, plan, seed) for seed in seeds]
    for each in reversed(played):
        await each.begin()
    for _ in range(plan.max_turns):
        for each in reversed(played):
            await each.turn()
    for each in played:
        await each.end()
    first = played[0]
    return {
        "transcripts": [each.transcript for each in played],
        "turns": len(first.transcript) - 1,
        "seconds": time.perf_counter() - start,
        "is_prompt_changed": first.prompt != plan.prompt,
        **{name: vars(first)[name] for name in ("faults", "characters", "media_bytes", "rewards")},
    }


async def _after_the_end(make: Make, plan: Plan) -> Found:
    played = _Played(make, plan, plan.seed)
    await played.begin()
    for _ in range(plan.max_turns):
        await played.turn()
    if played.faults or not played.is_over:
        late = f"no episode ended within {plan.max_turns} turns; --answer gives one that ends it"
        return {"is_ok": None, "what": f"not checked: {'an episode failed' if played.faults else late}"}
    for _ in range(2):
        outcome = await played.call("answers", "step", Answer(ORDINARY[0]))
        if isinstance(outcome, Observation) and (
            outcome.reward or outcome.rewards or not (outcome.done or outcome.truncated)
        ):
            what = "pays a reward" if outcome.reward or outcome.rewards else "goes on"
            return {"is_ok": False, "what": f"a step after the end {what}; raise an error, or return done=True"}
    return {"is_ok": True, "what": "raises" if isinstance(outcome, Failure) else "stays at the end"}


async def _restores(make: Make, plan: Plan) -> Found:
    """Copies an environment after a turn, plays the original and then the copy to the end, and compares them."""
    played, copied = (_Played(make, plan, plan.seed) for _ in range(2))
    await played.begin()
    await played.turn()
    try:
        copied.environment = copy.deepcopy(played.environment)
    except Exception as error:  # a process, a lock, a generator
        return {"is_ok": None, "what": f"it cannot be copied: {describe(error)}"}
    copied.running.take(copied.environment)
    copied.transcript, copied.is_over = [*played.transcript], played.is_over
    copied.players = [*played.players]
    for each in (played, copied):
        for _ in range(plan.max_turns):
            await each.turn()
    await played.end()
    await copied.end()
    if played.transcript == copied.transcript:
        return {"is_ok": True, "what": "a copy after a turn goes on alike"}
    return {"is_ok": False, "what": _difference(played.transcript, copied.transcript, "of a copy differs")}


async def _close(make: Make, plan: Plan) -> Found:
    """Calls close twice on an environment after a turn, and twice on another one right after its construction."""
    for num_turns in (1, 0):
        played = _Played(make, plan, plan.seed)
        if num_turns:
            await played.begin()
            await played.turn()
        else:
            played._made(played.prompt)
        if not isinstance(played.environment, Closes):
            return {"is_ok": None, "what": "it has no close"}
        for number in ("first", "second"):
            try:
                closed = played.environment.close()
                if inspect.isawaitable(closed):
                    await closed
            except Exception as error:  # the user's code
                when = "after a turn" if num_turns else "before reset"
                return {"is_ok": False, "what": f"the {number} close {when} raised {describe(error)}"}
    return {"is_ok": True, "what": "may be called twice"}


async def _answer(make: Make, plan: Plan, text: str) -> Found:
    """Plays an answer in a new episode, and once more if it has not ended.  Returns the first fault."""
    played = _Played(make, plan, plan.seed)
    await played.begin()
    for _ in range(2):
        if not played.is_over:
            await played.call("answers", "step", Answer(text))
    await played.end()
    return {"fault": next((f"{name}: {what}" for name, what in played.faults.items()), "")}


async def _speed(make: Make, plan: Plan) -> Found:
    start, steps, seed = time.perf_counter(), 0, plan.seed
    while time.perf_counter() - start < SPEED_SECONDS:
        played = _Played(make, plan, seed)
        await played.begin()
        while not played.is_over and len(played.transcript) <= plan.max_turns:
            await played.turn()
        steps, seed = steps + len(played.transcript) - 1, seed + 1
        await played.end()
    return {"is_ok": True, "what": f"{steps / (time.perf_counter() - start):,.0f} steps a second"}
