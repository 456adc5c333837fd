# SPDX-License-Identifier: Apache-2.0
"""Trackers that send metrics to a service: they need its library, and usually a server.

Each tracker is registered by name (`@register_tracker`) and runs in a thread: training does not wait for a service, and
does not fail with it. `trackers.json` in the run folder keeps the service's id of the run: a run that resumes continues
its curves, and a new run gets new curves."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from whet import files
from whet.errors import ConfigError, WhetError
from whet.processes.background import Background
from whet.registry import TRACKERS
from whet.tracking.runs import read_steps
from whet.tracking.tracker import NO_TABLES, Tables, Tracker

log = logging.getLogger(__name__)
START_SECONDS = 120.0
CLOSE_SECONDS = 60.0
RUN_IDS = "trackers.json"


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a service needs."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, object]
    steps_done: int = -1  # the last finished step; -1 for a new run, whose step 0 is a validation
    run_id: str | None = None  # if the run resumes: its id in the service

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that have the same names in the `init` of W&B and of SwanLab."""
        resume = "allow" if self.run_id is not None else None
        return {
            "project": self.project,
            "name": self.name,
            "id": self.run_id,
            "resume": resume,
            "config": dict(self.config),
        }


def no_key(name: str) -> ConfigError:
    """Returns the error for a service that finds no API key. Without it the service's library would prompt and wait."""
    otherwise = f"write to the run's folder with {name.upper()}_MODE=offline"
    change = f"run `{name} login`, set {name.upper()}_API_KEY, or {otherwise}"
    return ConfigError("trainer.logger", f"{name} finds no API key", change=change)


class Service(Tracker, Protocol):
    """A tracker of a service, which `open_services` builds from a `TrackedRun`."""

    run_id: str
    last_step: int  # the last step that the service already has


def open_services(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Starts the named services. If a run resumes, sends them the steps that they lack.

    Raises: ConfigError if a service does not start."""
    path = run.folder / RUN_IDS
    run_ids = _read_ids(path) if run.steps_done >= 0 and path.exists() else {}
    with ExitStack() as on_error:
        services: list[Tracker] = []
        for name in names:
            named = replace(run, run_id=run_ids.get(name))
            service = BackgroundTracker(name, partial(_make, name, named))
            on_error.callback(service.close, failed=True)
            for record in read_steps(run.folder) if service.last_step < run.steps_done else ():
                service.log(int(record.pop("step")), {k: v for k, v in record.items() if not math.isnan(v)})
            services.append(service)
            run_ids[name] = service.run_id
            files.write(path, json.dumps(run_ids, indent=1))
        on_error.pop_all()
    return services


class BackgroundTracker:
    """Runs a service in a thread.

    If it cannot start, the run does not start. Later failures are counted; the first one gives a warning.
    Produces: the logged steps, in order, for the thread.  Waits: for start and close, within deadlines."""

    def __init__(self, name: str, make: Callable[[], Service], close_seconds: float = CLOSE_SECONDS) -> None:
        self._name, self._close_seconds = name, close_seconds
        self._num_calls, self._num_failures = 0, 0
        self._thread = Background(f"tracker {name}")
        started = self._thread.submit(make)
        is_late = not wait([started], START_SECONDS).done
        error = None if is_late else started.exception()
        if is_late or error is not None:
            self._thread.close()
            if isinstance(error, WhetError):
                raise error
            found = f"no response in {START_SECONDS:.0f} s" if is_late else f"{type(error).__name__}: {error}"
            change = "correct its settings, or remove it from trainer.logger"
            raise ConfigError("trainer.logger", f"{name} does not start ({found})", change=change) from error
        self._service = started.result()
        self.run_id, self.last_step = self._service.run_id, self._service.last_step

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Passes a step to the thread, unless the service already has it."""
        if step > self.last_step:
            self._thread.submit(partial(self._call, partial(self._service.log, step, metrics, tables)))

    def close(self, failed: bool = False) -> None:
        """Waits until all steps are written, or until the deadline. Logs the failures, if any."""
        closed = self._thread.submit(partial(self._call, partial(self._service.close, failed)))
        self._thread.close()
        if not wait([closed], self._close_seconds).done:
            log.warning("%s did not finish in %.0f s; its last metrics may be missing", self._name, self._close_seconds)
        if self._num_failures:
            log.warning("%s failed in %d of %d calls", self._name, self._num_failures, self._num_calls)

    def _call(self, call: Callable[[], None]) -> None:
        self._num_calls += 1
        try:
            call()
        except Exception as error:
            if not self._num_failures:
                log.warning("%s: %s: %s; training goes on without it", self._name, type(error).__name__, error)
            self._num_failures += 1


def _read_ids(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(run_id) for name, run_id in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be read (%r): the run gets new curves in the services", path, error)
        return {}


def _make(name: str, run: TrackedRun) -> Service:
    service: Service = TRACKERS[name].load()(run)
    return service
