# SPDX-License-Identifier: Apache-2.0
"""One version of the weights to all ranks of the rollout, as the controller has it done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from whet.controller.worker_group import WorkerGroup
from whet.errors import WeightSyncError
from whet.weight_sync.buckets import LinkClosedError
from whet.weight_sync.routes import ends_of, plan, with_addresses

WeightSync = Callable[[int], str]  # gives the rollout a version of the weights, and returns their digest


def weight_sync(actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> WeightSync:
    """The way that fits where the two groups run: `sync` of the rollout where each of its ranks is beside one of the
    actor, else a link between two pools of processes. `dtype` is the rollout's."""
    if all(rollout.is_beside_actor()):
        return lambda version: _one(rollout.sync(version), version)
    return BetweenPools(actor, rollout, dtype, deadline_seconds)


class BetweenPools:
    """Weights from the ranks of the actor to those of the rollout, which run in other processes.

    Links are opened with the first version and stay. Both sides are called at once and wait for each other, neither
    longer than `deadline_seconds` for one bucket.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> None:
        self._actor, self._rollout, self._dtype = actor, rollout, dtype
        self._deadline_seconds = deadline_seconds
        self._is_open = False

    def __call__(self, version: int) -> str:
        """Sends one version.  Raises: WeightSyncError, DeadlineError, WorkerError."""
        if not self._is_open:
            self._open()
        calls: list[Callable[[], Any]] = [
            lambda: self._actor.publish(version, self._dtype),
            lambda: self._rollout.receive(version),
        ]
        with ThreadPoolExecutor(
            len(calls)
        ) as threads:  # a pool of one process may be this one, where a call returns late
            waiting = [threads.submit(call) for call in calls]
            errors = [error for each in waiting if (error := each.exception()) is not None]
        if errors:
            raise min(
                errors, key=lambda error: isinstance(error, LinkClosedError)
            )  # who only lost the other comes last
        return _one([each for call in waiting for each in call.result()], version)

    def _open(self) -> None:
        routes = plan(self._actor.site(), self._rollout.site())
        ends, seconds = ends_of(routes, self._actor.world_size), self._deadline_seconds
        opened = self._actor.open_outlets(ends, [seconds] * self._actor.world_size)
        self._rollout.open_inlet(with_addresses(routes, opened), [seconds] * self._rollout.world_size)
        self._is_open = True


def _one(digests: Iterable[str | None], version: int) -> str:
    """What all ranks agree on."""
    found = {digest for digest in digests if digest is not None}
    if len(found) != 1:
        raise WeightSyncError(
            f"version {version} of the weights is not the same on all ranks: digests {', '.join(sorted(found))}"
        )
    return found.pop()
