# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on. Other exceptions are bugs, or come from a library.

WhetError
├── ConfigError (ValueError)     a config key, a value, or inconsistent values
├── DataError (ValueError)       a file, a row, a field, a template; column sizes of a batch
│   └── TextError                a text that is too long, or that the tokenizer rejects
├── RegistryError (LookupError)  an unknown name or path of a function; an unsupported signature
├── RewardError (RuntimeError)   a reward function of unknown form, or with an unusable result
├── ModelError (RuntimeError)    a model folder, tokenizer or weight that is unusable
├── EnvError (ValueError)        an environment that refuses its options, or lacks a program or package
├── EngineError (RuntimeError)   a training or rollout engine that cannot continue
├── WeightSyncError (RuntimeError) weights of the rollout that differ from those of the trainer
├── WorkerError (RuntimeError)   a worker that raised or died; names role, rank and method
│   └── LostWorkerError          a lost process, node or connection: a restart may succeed
├── DeadlineError (TimeoutError) a wait that reached its deadline; names both sides of it
├── CheckpointError (RuntimeError) a checkpoint that is missing, damaged or of another run
├── StorageError (OSError)       a disk that is full or not writable; names the file
├── SandboxError (RuntimeError)  a sandbox that cannot start
└── ToolError (RuntimeError)     a tool whose session cannot start, or is lost

A failed rollout is none of these: it is data, in `Trajectory.failure`.
"""

from __future__ import annotations

import copy
import difflib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from whet.version import DISTRIBUTION

MAX_DESCRIBED_CHARACTERS = 500
CHECKOUT = Path(__file__).parents[1]  # site-packages if whet is installed; that has no pyproject.toml


class WhetError(Exception):
    """The root of every error that whet raises on purpose: four facts as data, which `__str__` turns into words.

    key: the config key, file and row, option, function or worker that is wrong. found: the key's value, None if unset,
    or a fact in words. expected: the values that are valid. change: the correction. Tests and callers read these
    fields; the words may change with every version. `others` are further errors found in the same check."""

    def __init__(self, key: str, found: object = "", expected: str = "", change: str = "") -> None:
        super().__init__(key, found, expected, change)  # pickle restores an exception from its arguments
        self.key, self.found, self.expected, self.change = key, found, expected, change
        self.others: tuple[WhetError, ...] = ()

    def __str__(self) -> str:
        """Returns one line for each error: `key=7; expected ...; change`, or `key: a fact; expected ...; change`."""
        if self.found is None:
            start = f"{self.key} is not set"
        elif isinstance(self.found, str):
            start = ": ".join(filter(None, (self.key, self.found)))
        else:
            start = f"{self.key}={str(self.found).lower() if isinstance(self.found, bool) else self.found}"
        parts = (start, self.expected and f"expected {self.expected}", self.change)
        return "\n".join(("; ".join(filter(None, parts)), *map(str, self.others)))

    def at(self, place: str) -> Self:
        """Returns a copy of the error with `place` before its key: the file of a row, or the argument of a function."""
        moved = copy.copy(self)
        moved.key = ": ".join(filter(None, (place, self.key)))
        moved.others = tuple(other.at(place) for other in self.others)
        moved.args = (moved.key, *self.args[1:])
        return moved.with_traceback(self.__traceback__)

    @classmethod
    def joined(cls, errors: Iterable[WhetError]) -> Self:
        """Returns one error of this class for one or more errors: the fields of the first, then `others`."""
        first, *rest = [each for error in errors for each in (error, *error.others)]
        joined = cls(first.key, first.found, first.expected, first.change)
        joined.others = tuple(rest)
        return joined


class ConfigError(WhetError, ValueError):
    """An invalid config key or value, or inconsistent values."""


class DataError(WhetError, ValueError):
    """An invalid data file, row, field, template or batch column."""


class TextError(DataError):
    """A text that is too long, or that the tokenizer rejects."""


class RegistryError(WhetError, LookupError):
    """An unknown name or path of a function, or an unsupported signature."""


class RewardError(WhetError, RuntimeError):
    """A reward function of unknown form, or with an unusable result (the failure of one trajectory is data instead).
    `parts` are numbers to report about a failed call, such as the tokens that a judge used."""

    parts: Mapping[str, float] = {}


class ModelError(WhetError, RuntimeError):
    """A model folder, tokenizer or weight that is unusable."""


class EnvError(WhetError, ValueError):
    """An environment that refuses its options, or lacks a program or package."""


class EngineError(WhetError, RuntimeError):
    """A training or rollout engine that cannot continue. `option` is set if a request is too long for a rollout engine:
    the bare name of the engine's option that makes room for it."""

    option = ""


class LostReplicaError(EngineError):
    """A rollout engine whose server died or hangs, and can be started again."""


class WeightSyncError(WhetError, RuntimeError):
    """Weights of the rollout that differ from the trainer's; the message names version and weight."""


class WorkerError(WhetError, RuntimeError):
    """A worker that raised or died; the message names role, rank and method."""


class LostWorkerError(WorkerError):
    """A worker whose process died, or whose node is lost."""


class DeadlineError(WhetError, TimeoutError):
    """A wait that reached its deadline; the message names both sides of the wait, and its length."""


class CheckpointError(WhetError, RuntimeError):
    """A checkpoint that is missing, damaged or of another run."""


class StorageError(WhetError, OSError):
    """A disk that is full, read-only or failing; the message names the file."""


class SandboxError(WhetError, RuntimeError):
    """A sandbox that cannot start or cannot be trusted."""


class ToolError(WhetError, RuntimeError):
    """A tool whose session cannot start or is lost, such as an MCP server that died."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Converts a `sys.exit` in the block to an error.  Raises: WhetError naming the user code that called it."""
    try:
        yield
    except SystemExit as error:
        raise exit_error(error) from error


def exit_error(error: SystemExit) -> WhetError:
    """Returns the error for user code that called `sys.exit` during a command."""
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    file, line = last_line(error)
    name = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_name} at "
    called = f"called sys.exit({error.code!r}) while the command was running"
    return WhetError(f"{name}{file}:{line}", called, "code that returns or raises another exception", "remove the call")


def describe(error: BaseException) -> str:
    """Formats type, message, file and line of an exception on one line of bounded length."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    if len(text) > MAX_DESCRIBED_CHARACTERS:
        text = text[:MAX_DESCRIBED_CHARACTERS] + " ..."
    file, line = last_line(error)
    return f"{text} ({file}:{line})"


def last_line(error: BaseException) -> tuple[str, int]:
    """Returns file and line where an exception was raised."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return lines[-1] if lines else ("?", 0)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, quoted: bool = True, most: int = 1) -> str:
    """Returns a hint with up to `most` known names that are nearest to a name, or `otherwise` if none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=most) or [e for e in names if name.startswith(f"{e}_")][:most]
    return f"did you mean {' or '.join(map(repr, near) if quoted else near)}?" if near else otherwise


@contextmanager
def of_extra(extra: str, *modules: str) -> Iterator[None]:
    """Converts a failed import of one of `modules`.  Raises: ConfigError with the command that installs `extra`."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] not in modules:
            raise
        raise ConfigError(str(error.name), "not installed", change=f"run {pip_install(extra)}") from error


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra from the checkout, the folder or the wheel that whet came from.
    The command never names `whet` alone: on PyPI that is another project, and this one is not published."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{'.' if Path.cwd() == CHECKOUT else CHECKOUT}[{extra}]'"
    return f"pip install '{_origin() or 'FOLDER_OR_WHEEL_OF_WHET'}[{extra}]'"


def _origin() -> Path | None:
    """Returns the folder or wheel from which pip installed whet (PEP 610), if it still exists."""
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        told = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, json.JSONDecodeError):
        return None
    url = urlsplit(str(told.get("url", "")))
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None
