# SPDX-License-Identifier: Apache-2.0
"""Runs environments of every form by `Running.call`, in the run's process or in environment processes (`prepare`).

Every form of environment is called through `reset`, `step` and `close` of the long form:

| form | reset | step |
|---|---|---|
| long | `reset(prompt, seed)` returns an Observation | `step(answer)` gets an Answer, returns an Observation |
| short | | `step(text)` returns an Observation |
| gymnasium, GEM | `reset(seed=)` returns (text, info) | `step(text)` returns (text, reward, ended, truncated, info) |
| function | | is the step: gets the text; returns a reply, None for the end, or (reply, reward) |

Methods may be async. A `reset` or `step` with one more parameter, `context`, can run tasks of sub-agents.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from whet.environments.protocol import (
    ENDS,
    GOES_ON,
    Answer,
    Closes,
    Environment,
    Observation,
    Resets,
    Result,
    Task,
    read_observation,
)
from whet.errors import ConfigError, EnvError, SandboxError, ToolError, describe
from whet.processes.template import Caller, Serve, sendable, serve_tasks
from whet.registry import ENVIRONMENTS
from whet.types import Failure, Message, Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = Observation | Failure
PROBE = Prompt("probe", 0, (Message("user", ""),), (0,), "probe", None)  # its reset only creates the environment
_FORMS: dict[type, Form] = {}  # by class


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a run (a registered name, a path or the class itself) and its options."""

    target: str | Callable[..., Environment]
    options: Mapping[str, object]

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that creates the object of one episode.  Raises: RegistryError, any error of the
        import."""
        entry = ENVIRONMENTS[self.target]
        make, options, parameters = entry.load(), dict(self.options), entry.parameters
        if inspect.isfunction(make) and parameters and parameters[0] != "prompt":
            return lambda prompt: StepFunction(make, options)
        return lambda prompt: make(prompt, **options) if parameters else make(**options)


@dataclass(frozen=True)
class Refusal(Failure):
    """The failure of an environment that refuses its options. It occurs only as outcome of "reset" for `PROBE`."""

    error: ConfigError = field(kw_only=True)


class FailedError(Exception):
    """Raised in an environment that is wrapped around another one, with the failure of the inner environment."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class Running:
    """The environment of one episode. Any exception of its code becomes a Failure."""

    def __init__(self, make: Callable[[Prompt], Environment]) -> None:
        self._make = make
        self._environment: Any = None
        self._context: Context | None = None
        self._call: asyncio.Future[Any] | None = None  # of a method that may run tasks
        self._is_over = False

    async def call(self, verb: str, *arguments: Any) -> Outcome:
        """Runs "reset" (prompt, seed), "step" (Answer) or "close" ().  Returns an Observation or a Failure."""
        methods: dict[str, Callable[..., Any]]
        methods = {"reset": self._reset, "step": self._step, "close": self._close}
        try:
            result: Any = methods[verb](*arguments)
            if result is GOES_ON or result is ENDS:
                self._is_over = result is ENDS
                return result
            observation = read_observation(await awaited(result))
            self._is_over = observation.done or observation.truncated
            return observation
        except KeyboardInterrupt:  # a signal that stops the run
            raise
        except ToolError as error:
            return Failure("tool", str(error))
        except SandboxError as error:
            return Failure("sandbox", str(error))
        except FailedError as error:
            return error.failure
        except EnvError as error:
            return Failure("environment", str(error), key=error.key)
        except BaseException as error:  # the user's code may raise anything: SystemExit, CancelledError
            if isinstance(error, ConfigError) and verb == "reset" and arguments[0] == PROBE:
                return Refusal("environment", str(error), error=sendable(ConfigError, error))
            return Failure("environment", describe(error))

    def take(self, environment: Environment) -> None:
        """Uses an environment that has already been created and reset, instead of a call of "reset"."""
        self._environment = environment

    @property
    def needs_close(self) -> bool:
        """Tells whether "close" does anything: the environment exists and has a method of that name."""
        return self._environment is not None and _form(self._environment).has_close

    def _reset(self, prompt: Prompt, seed: int) -> Any:
        made = self._make(prompt)
        if not callable(getattr(made, "step", None)):
            expected, change = "step(answer), or step(text) in the short form", "add it, or name another environment"
            raise ConfigError(f"environment {type(made).__name__}", "no method step", expected, change)
        self._environment, self._is_over = made, False
        if prompt == PROBE:
            return GOES_ON
        form = _form(self._environment)
        if form.resets is None:
            return GOES_ON
        return self._called(form, 0, partial(form.resets, self._environment, prompt, seed))

    def _step(self, answer: Answer) -> Any:
        assert self._environment is not None
        if answer.results and self._context is not None and self._call is not None:
            self._context.give(answer.results)
            return self._context.until_asked(self._call)
        form = _form(self._environment)
        if self._is_over and form.reads is not same:  # the long form checks this itself
            raise RuntimeError("step was called after the end of the episode")
        return self._called(form, 1, partial(self._environment.step, form.reads(answer)))

    def _called(self, form: Form, number: int, method: Callable[..., Any]) -> Any:
        if form.contexts[number]:
            self._context = self._context or Context()
            self._call = asyncio.ensure_future(_converted(form, method(context=self._context)))
            return self._context.until_asked(self._call)
        result = method()
        if form.converts is same or isinstance(result, Observation):
            return result
        return _converted(form, result)

    async def _close(self) -> Any:
        environment, self._environment = self._environment, None
        if self._call is not None:
            self._call.cancel()
        if environment is not None and _form(environment).has_close:
            await awaited(environment.close())
        return Observation(done=True)


async def _converted(form: Form, result: object) -> Observation:
    return form.converts(await awaited(result))


def _form(environment: object) -> Form:
    """Finds the form of an environment. Cached by class, because isinstance of a protocol is slower than a step."""
    kind = type(environment)
    if kind not in _FORMS:
        _FORMS[kind] = Form.of(environment)
    return _FORMS[kind]


def at_once(call: Coroutine[object, None, Outcome]) -> Outcome:
    """Runs a call that never waits, without an event loop. This costs only microseconds."""
    try:
        call.send(None)
    except StopIteration as ended:
        outcome: Outcome = ended.value
        return outcome
    call.close()
    return Failure("environment", "a method waits, but the class is registered with pure=True; register it without")


def prepare(argument: bytes) -> Serve:
    """Loads the environment's class once for all processes of a host.  Returns the main function of these processes.

    `argument` is the pickled pair (pickled EnvironmentSpec, True if episodes share a process). If the class cannot be
    loaded, each episode fails with that error."""
    spec_bytes, is_shared = pickle.loads(argument)
    try:
        make = pickle.loads(spec_bytes).load()
    except Exception as error:
        unloadable = error

        def make(prompt: Prompt) -> Environment:
            raise unloadable

    if threading.active_count() > 1:
        log.warning(
            "loading the environment started threads, which do not exist in its forked processes; start them in reset"
        )
    return lambda caller: asyncio.run(_serve(caller, make, is_shared))


async def _serve(caller: Caller, make: Callable[[Prompt], Environment], is_shared: bool) -> None:
    """Serves calls (verb, number of the episode, arguments) until the caller closes the connection. Each reply carries
    the number of its call. Calls of one episode run in order, calls of different episodes at the same time."""
    episodes: dict[int, tuple[Running, asyncio.Lock]] = {}

    async def reply(number: int, content: bytes) -> None:
        try:
            verb, episode, arguments = pickle.loads(content)
        except Exception as error:  # an object whose class this process cannot import
            what = f"the prompt cannot be read in the environment's process: {describe(error)}"
            caller.send(number, pickle.dumps(Failure("environment", what)))
            return
        if verb == "reset" and not is_shared:
            _seed_generators(arguments[1])
        running, lock = episodes.setdefault(episode, (Running(make), asyncio.Lock()))
        try:
            async with lock:
                outcome = await running.call(verb, *arguments)
        except KeyboardInterrupt as error:  # raised by the user's code: signals of the run do not reach this process
            outcome = Failure("environment", describe(error))
        if verb == "close":
            del episodes[episode]
        with suppress(ConnectionError):  # the owner gave this process up while a large message was on its way
            caller.send(number, _pickled(outcome))

    await serve_tasks(caller, reply)


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # an object of the user in the observation
        failure = Failure("environment", f"the observation cannot leave the environment's process: {describe(error)}")
        return pickle.dumps(failure)


def _seed_generators(seed: int) -> None:
    """Seeds the process's random generators, because all forks of a template would draw the same numbers."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


_text = attrgetter("text")  # of an Answer


class Context:
    """Runs tasks of sub-agents for one episode: the argument `context` of `reset` and `step`."""

    def __init__(self) -> None:
        self._asked: list[tuple[Task, asyncio.Future[Result]]] = []
        self._running: list[asyncio.Future[Result]] = []  # of the tasks in the last observation
        self._is_asked = asyncio.Event()

    async def run(self, task: str | Sequence[Message], agent: str, **given: Any) -> Result:
        """Runs an episode of the sub-agent `agent`. `task` is its conversation, or the text of a user's message.
        `given` may have ground_truth and extra_info. Tasks that are awaited together run concurrently."""
        messages = (Message("user", task),) if isinstance(task, str) else tuple(task)
        future = asyncio.get_running_loop().create_future()
        self._asked.append((Task(agent, messages, **given), future))
        self._is_asked.set()
        return await future

    async def until_asked(self, call: asyncio.Future[Any]) -> Any:
        """Waits for `call`. Returns its result, or an Observation with the sub-agent tasks that it is waiting for."""
        asked = asyncio.ensure_future(self._is_asked.wait())
        try:
            await asyncio.wait({call, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if call.done():
            return call.result()
        tasks, self._asked = self._asked, []
        self._is_asked.clear()
        self._running = [future for _, future in tasks]
        return Observation(done=False, tasks=tuple(task for task, _ in tasks))

    def give(self, results: Sequence[Result]) -> None:
        """Passes the results of the tasks in the last observation to the calls that wait for them."""
        for future, result in zip(self._running, results, strict=True):
            if not future.done():
                future.set_result(result)


@dataclass(frozen=True)
class Form:
    """The calling convention of an environment's class. It is found once, because its methods are called every turn."""

    resets: Callable[..., Any] | None  # called with the environment, the prompt and the seed
    reads: Callable[[Answer], object]  # the argument of `step`
    converts: Callable[[Any], Observation]  # what `reset` and `step` return, to an Observation
    has_close: bool
    contexts: tuple[bool, bool]  # whether `reset` and `step` have the parameter `context`

    @classmethod
    def of(cls, environment: object) -> Form:
        """The form of an environment's class."""
        names = tuple("context" in _parameters(getattr(environment, each, None)) for each in ("reset", "step"))
        contexts = (names[0], names[1])
        has_close = isinstance(environment, Closes)
        if not isinstance(environment, Resets):
            return cls(None, _text, read_reply if isinstance(environment, StepFunction) else same, has_close, contexts)
        if _is_gymnasium(environment.reset):
            return cls(
                lambda made, _, seed, **more: made.reset(seed=seed, **more), _text, read_tuple, has_close, contexts
            )
        return cls(lambda made, *given, **more: made.reset(*given, **more), same, same, has_close, contexts)


@dataclass(frozen=True)
class StepFunction:
    """An environment that calls one function for each step."""

    function: Callable[..., Any]
    options: Mapping[str, object]

    def step(self, text: str) -> Any:
        """Calls the function with the text of the turn, and returns its result."""
        return self.function(text, **self.options)


def read_tuple(raw: object) -> Observation:
    """Reads the result of a gymnasium reset, (text, info), or step, (text, reward, terminated, truncated, info).
    Numbers in `info["metrics"]` become fields. An empty text gives no message.  Raises: TypeError."""
    match raw:
        case tuple((seen, info)):
            reward, terminated, truncated = 0.0, False, False
        case tuple((seen, reward, terminated, truncated, info)):
            pass
        case _:
            raise TypeError(
                f"the environment returned {type(raw).__name__}; expected (observation, info) from reset, and "
                "(observation, reward, terminated, truncated, info) from step"
            )
    metrics = info.get("metrics", {}) if isinstance(info, Mapping) else {}
    return Observation(
        done=bool(terminated),
        truncated=bool(truncated) and not terminated,
        messages=_messages(seen),
        reward=reward,
        fields=metrics,
    )


def read_reply(raw: object) -> Observation:
    """Converts a step function's return value: an Observation, a reply, None (the end), or (reply or None, reward)."""
    match raw:
        case Observation():
            return raw
        case tuple((reply, reward)):
            pass
        case reply:
            reward = 0.0
    if not isinstance(reply, str | None):
        raise TypeError(
            f"the step function returned {type(raw).__name__}; expected a reply as text, None for the end of the "
            "episode, (reply or None, reward), or an Observation"
        )
    return Observation(done=reply is None, messages=_messages(reply), reward=reward)


def _messages(text: object) -> tuple[Message, ...]:
    return () if text is None or (isinstance(text, str) and not text) else (Message("user", str(text)),)


def same(value: T) -> T:
    """Returns the value unchanged: the conversion for forms that need none."""
    return value


def _parameters(method: Callable[..., object] | None) -> Mapping[str, inspect.Parameter]:
    try:
        return {} if method is None else inspect.signature(method).parameters
    except (TypeError, ValueError):  # a method written in C
        return {}


def _is_gymnasium(reset: Callable[..., object]) -> bool:
    """Tells whether `reset(seed=0)` is a valid call of a method that has no prompt parameter, unlike the long form."""
    try:
        signature = inspect.signature(reset)
        signature.bind(seed=0)
    except (TypeError, ValueError):
        return False
    before = itertools.takewhile(lambda each: each.name != "seed", signature.parameters.values())
    return {each.name for each in before if each.kind is each.POSITIONAL_OR_KEYWORD} <= {"options"}


async def awaited(result: Any) -> Any:
    """Returns the result of a method; awaits it if the method is async."""
    is_async = not isinstance(result, Observation) and inspect.isawaitable(result)  # the second test is the slow one
    return await result if is_async else result
