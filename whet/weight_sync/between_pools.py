# SPDX-License-Identifier: Apache-2.0
"""The controller's side of a weight sync: one version to all ranks of the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from whet.controller.worker_group import WorkerGroup
from whet.errors import WeightSyncError
from whet.weight_sync.link import LinkClosedError
from whet.weight_sync.routes import plan_routes, with_addresses

WeightSync = Callable[[int], str]  # sends a version of the weights to the rollout, and returns their digest


def weight_sync(actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> WeightSync:
    """Chooses how weights are sent: `rollout.sync` where each rollout rank has an actor rank in its process, else
    `BetweenPools`. `dtype` is the rollout's."""
    if all(rollout.is_beside_actor()):
        return lambda version: _common(rollout.sync(version), version)
    return BetweenPools(actor, rollout, dtype, deadline_seconds)


class BetweenPools:
    """Sends weights from the ranks of the actor to those of the rollout, which run in other processes.

    Links are opened for the first version and reused. Both sides are called at the same time and wait for each other,
    at most `deadline_seconds` for one bucket.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> None:
        self._actor, self._rollout, self._dtype = actor, rollout, dtype
        self._deadline_seconds = deadline_seconds
        self._is_open = False

    def __call__(self, version: int) -> str:
        """Sends one version.  Raises: WeightSyncError, DeadlineError, WorkerError."""
        if not self._is_open:
            self._open()
        with ThreadPoolExecutor(2) as threads:  # a pool of one process may be this process, where a call blocks
            calls = [
                threads.submit(self._actor.publish, version, self._dtype),
                threads.submit(self._rollout.receive, version),
            ]
        if errors := [error for call in calls if (error := call.exception()) is not None]:
            raise min(errors, key=lambda error: isinstance(error, LinkClosedError))  # the cause before its effect
        return _common([digest for call in calls for digest in call.result()], version)

    def _open(self) -> None:
        routes, seconds = plan_routes(self._actor.site(), self._rollout.site()), self._deadline_seconds
        opened = self._actor.open_outlets(routes, seconds)
        self._rollout.open_inlet(with_addresses(routes, opened), [seconds] * self._rollout.world_size)
        self._is_open = True


def _common(digests: Iterable[str | None], version: int) -> str:
    """The digest of all ranks.  Raises: WeightSyncError where they differ."""
    found = {digest for digest in digests if digest is not None}
    if len(found) != 1:
        raise WeightSyncError(
            f"version {version} of the weights is not the same on all ranks: digests {', '.join(sorted(found))}"
        )
    return found.pop()
