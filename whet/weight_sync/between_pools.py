# SPDX-License-Identifier: Apache-2.0
"""Sends a version of the weights to all ranks of the rollout, as the controller has it done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from whet.controller.worker_group import WorkerGroup
from whet.errors import WeightSyncError
from whet.weight_sync.link import LinkClosedError
from whet.weight_sync.routes import plan, with_addresses

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
        with ThreadPoolExecutor(2) as threads:  # a pool of one process may be this one, where a call returns late
            waiting = [
                threads.submit(self._actor.publish, version, self._dtype),
                threads.submit(self._rollout.receive, version),
            ]
        if errors := [error for each in waiting if (error := each.exception()) is not None]:
            raise min(errors, key=lambda error: isinstance(error, LinkClosedError))  # who only lost the other is last
        return _one([each for call in waiting for each in call.result()], version)

    def _open(self) -> None:
        routes, seconds = plan(self._actor.site(), self._rollout.site()), self._deadline_seconds
        opened = self._actor.open_outlets(routes, seconds)
        self._rollout.open_inlet(with_addresses(routes, opened), [seconds] * self._rollout.world_size)
        self._is_open = True


def _one(digests: Iterable[str | None], version: int) -> str:
    """The digest on which all ranks agree."""
    found = {digest for digest in digests if digest is not None}
    if len(found) != 1:
        raise WeightSyncError(
            f"version {version} of the weights is not the same on all ranks: digests {', '.join(sorted(found))}"
        )
    return found.pop()
