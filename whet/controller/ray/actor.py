# SPDX-License-Identifier: Apache-2.0
"""Ray actors, one for each rank: each hosts the workers of all roles of its pool."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource

from whet import devices
from whet.controller.local_workers import LocalWorkers, RankSpec
from whet.controller.ray.user_code import UserCode
from whet.errors import WorkerError


class FramedMessage:
    """Frames pickled as out-of-band buffers. Ray copies them once, to its object store, where receivers read them."""

    def __init__(self, frames: Sequence[Any]) -> None:
        self.frames = [memoryview(frame) for frame in frames]

    @property
    def size(self) -> int:
        """Returns the number of bytes of all frames."""
        return sum(frame.nbytes for frame in self.frames)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return FramedMessage, ([pickle.PickleBuffer(frame) for frame in self.frames],)


@dataclass(frozen=True)
class Location:
    """The address and node of an actor."""

    address: str
    node_id: str
    gpu_ids: tuple[str, ...]  # that Ray gave the actor
    store_port: int | None  # of the pool's store; None if this actor did not open it


CONCURRENT = "concurrent"  # concurrency group
is_rank = False  # True in the process of an actor


class RankActor:
    """A process of a pool. Its methods run one at a time, in the order of the calls, except `serve_concurrent`."""

    def __init__(self, name: str) -> None:
        global is_rank
        is_rank = True
        self._name = name
        self._workers: LocalWorkers | None = None
        self._store: Any = None

    def __repr__(self) -> str:  # Ray's prefix for each line of its output
        return self._name

    def prepare(self, code: UserCode, opens_store: bool, deadline_seconds: float) -> Location:
        """Makes the user's code importable; with `opens_store` opens the pool's TCPStore.  Returns the location."""
        address = ray.util.get_node_ip_address()
        if opens_store:
            self._store = devices.open_store(address, deadline_seconds)
        code.install()
        context = ray.get_runtime_context()
        gpu_ids = tuple(context.get_accelerator_ids()["GPU"])
        return Location(address, context.get_node_id(), gpu_ids, self._store.port if opens_store else None)

    def assign(self, spec: RankSpec, gpu_ids: Sequence[str]) -> None:
        """Makes the actor a rank of its pool, which sees the GPUs `gpu_ids`, by default the GPUs that Ray gave it."""
        if gpu_ids:
            manager: Any = get_accelerator_manager_for_resource("GPU")
            manager.set_current_process_visible_accelerator_ids(list(gpu_ids))
        self._workers = LocalWorkers(spec, f" on {spec.address}")

    def serve(self, header: bytes, payload: FramedMessage) -> FramedMessage:
        """Serves a call of a worker's method."""
        if self._workers is None:
            raise WorkerError(self._name, "called before `assign` made this actor a rank", "a call of `assign` first")
        return FramedMessage(self._workers.serve([memoryview(header), *payload.frames]))

    @ray.method(concurrency_group=CONCURRENT)
    def serve_concurrent(self, header: bytes, payload: FramedMessage) -> FramedMessage:
        """Serves a call while other calls run."""
        return self.serve(header, payload)

    def ping(self) -> None:
        """Returns at once, to show that the actor is alive."""

    def close(self) -> None:
        """Closes the workers."""
        if self._workers is not None:
            self._workers.close()
