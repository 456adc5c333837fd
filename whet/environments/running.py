# SPDX-License-Identifier: Apache-2.0
"""Running environments: one method for both forms, and the main function of environment processes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whet.environments.forms import Context, Form, StepFunction, awaited, same
from whet.environments.protocol import ENDS, GOES_ON, Answer, Environment, Observation, read_observation
from whet.errors import ConfigError, EnvError, SandboxError, ToolError, describe
from whet.processes.template import Caller, Serve, sendable, serve_tasks
from whet.registry import ENVIRONMENTS
from whet.types import Failure, Message, Prompt

log = logging.getLogger(__name__)
Outcome = Observation | Failure
PROBE = Prompt("probe", 0, (Message("user", ""),), (0,), "probe", None)  # its episode makes the environment, no more
_FORMS: dict[type, Form] = {}  # by class


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a run: a registered name, a path or the class itself, with its options."""

    target: str | Callable[..., Environment]
    options: Mapping[str, Any]

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that makes the object of one episode.  Raises: RegistryError, any error of the import."""
        entry = ENVIRONMENTS[self.target]
        make, options, parameters = entry.load(), dict(self.options), entry.parameters
        if inspect.isfunction(make) and parameters and parameters[0] != "prompt":
            return lambda prompt: StepFunction(make, options)
        return lambda prompt: make(prompt, **options) if parameters else make(**options)


@dataclass(frozen=True)
class Refusal(Failure):
    """The failure of an environment that refuses its options: the outcome of "reset" for `PROBE`, and of that alone."""

    error: ConfigError = field(kw_only=True)


class FailedError(Exception):
    """Carries the failure of an environment through another one that has it inside."""

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

    def take(self, environment: Any) -> None:
        """Goes on with an environment that was reset elsewhere."""
        self._environment = environment

    @property
    def needs_close(self) -> bool:
        """Tells whether "close" does something: the environment was made, and has a method of that name."""
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
        if self._is_over and form.reads is not same:  # the long form tells so by itself
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


async def _converted(form: Form, result: Any) -> Any:
    return form.converts(await awaited(result))


def _form(environment: Any) -> Form:
    """The form of an environment, cached by class: isinstance of a protocol is slower than a step."""
    kind = type(environment)
    if kind not in _FORMS:
        _FORMS[kind] = Form.of(environment)
    return _FORMS[kind]


def at_once(call: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Runs a call that never waits, without an event loop: this costs only microseconds."""
    try:
        call.send(None)
    except StopIteration as ended:
        outcome: Outcome = ended.value
        return outcome
    call.close()
    return Failure("environment", "it waits, but it is registered with pure=True; register it without pure=True")


def prepare(argument: bytes) -> Serve:
    """Loads the class once for all processes of a host.  Returns their main function.

    `argument` pickles (pickled EnvironmentSpec, whether episodes share a process). If the class cannot be loaded, each
    episode fails with that error."""
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
    """Seeds the process's random generators: forks of one template would all draw the same numbers."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
