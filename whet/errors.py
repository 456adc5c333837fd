# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on. All others are bugs, or a library's own.

WhetError
├── ConfigError (ValueError)     a key, a value, or two values that do not go together
├── DataError (ValueError)       a file, a row, a field, a template; column sizes of a batch
├── RegistryError (LookupError)  a name or path that no registered function has; a signature that cannot be served
├── RewardError (RuntimeError)   a reward function whose form or result cannot be used
├── ModelError (RuntimeError)    a model folder, tokenizer or weight that does not fit
├── EngineError (RuntimeError)   a training or rollout engine that cannot go on
├── WeightSyncError (RuntimeError) weights that did not reach the rollout as they left the trainer
├── WorkerError (RuntimeError)   a worker that raised or died; names role, rank and method
│   └── LostWorkerError          its process, its node or the way there is gone: started again it may well run
├── DeadlineError (TimeoutError) a wait that reached its deadline; names who waited for whom
├── CheckpointError (RuntimeError)
├── StorageError (OSError)       a disk that is full or cannot be written; names the file
└── SandboxError (RuntimeError)

A bad rollout is none of these: it is data, and travels in `Trajectory.failure`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_DESCRIBED_CHARACTERS = 500
CHECKOUT = Path(__file__).parents[1]  # or site-packages, which has no pyproject.toml


class WhetError(Exception):
    """The root of every error that whet raises on purpose."""


class ConfigError(WhetError, ValueError):
    """A config key or value, or a combination of values, that cannot work."""


class DataError(WhetError, ValueError):
    """A data file, row, field or batch column that is not as it must be."""


class RegistryError(WhetError, LookupError):
    """A registered name or function path that cannot be found or served."""


class RewardError(WhetError, RuntimeError):
    """A reward function whose form or result cannot be used at all (a failed item is data instead)."""


class ModelError(WhetError, RuntimeError):
    """A model folder, tokenizer or weight that does not fit."""


class EngineError(WhetError, RuntimeError):
    """A training or rollout engine that cannot go on."""


class WeightSyncError(WhetError, RuntimeError):
    """Weights that did not reach the rollout as they left the trainer; the message names version and weight."""


class WorkerError(WhetError, RuntimeError):
    """A worker that raised or died; the message names role, rank and method."""


class LostWorkerError(WorkerError):
    """A worker whose process died, or whose node is gone or cannot be reached."""


class DeadlineError(WhetError, TimeoutError):
    """A wait that reached its deadline; the message names who waited for what, and for how long."""


class CheckpointError(WhetError, RuntimeError):
    """A checkpoint that is missing, damaged or of another run."""


class StorageError(WhetError, OSError):
    """A disk that is full, read-only or failing; the message names the file."""


class SandboxError(WhetError, RuntimeError):
    """A sandbox that cannot start or cannot be trusted."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Marks a call in which nothing may end the process.  Raises: WhetError where a user's code does, naming it."""
    try:
        yield
    except SystemExit as error:
        raise exit_error(error) from error


def exit_error(error: SystemExit) -> WhetError:
    """Returns what to say of code that ended the process in the middle of a command."""
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    file, line = last_line(error)
    name = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_name} at "
    return WhetError(
        f"{name}{file}:{line} ends the process (SystemExit: {error.code}) in the middle of the command; expected "
        "code that returns or raises another error: take the exit out"
    )


def describe(error: BaseException) -> str:
    """Type, message and place of an exception, on one line of bounded length."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    if len(text) > MAX_DESCRIBED_CHARACTERS:
        text = text[:MAX_DESCRIBED_CHARACTERS] + " ..."
    file, line = last_line(error)
    return f"{text} ({file}:{line})"


def last_line(error: BaseException) -> tuple[str, int]:
    """File and line where an exception was raised."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return lines[-1] if lines else ("?", 0)


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra of whet: from the checkout, where whet runs from one."""
    if not (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install 'whet[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == CHECKOUT else CHECKOUT}[{extra}]'"
