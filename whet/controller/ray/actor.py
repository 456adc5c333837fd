# SPDX-License-Identifier: Apache-2.0
"""Actors, one a rank: each hosts the workers of all roles of its pool."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import ray

from whet import devices
from whet.controller.hosted import Hosted, Seat
from whet.controller.ray.user_code import UserCode
from whet.errors import WorkerError


class Message:
    """Frames that travel as buffers of a pickle: Ray copies them into its object store once, and on the other side they
    are read where they lie there."""

    def __init__(self, frames: Sequence[Any]) -> None:
        self.frames = [memoryview(frame) for frame in frames]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(frame.nbytes for frame in self.frames)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return Message, ([pickle.PickleBuffer(frame) for frame in self.frames],)


@dataclass(frozen=True)
class Site:
    """The place of an actor."""

    address: str
    node_id: str
    store_port: int | None  # of the pool's store, where this actor opened it


BESIDE = "beside"
is_rank = False  # whether this process is one


class RankActor:
    """A process of a pool. Its methods run one at a time, in the order of the calls, but for `serve_beside`."""

    def __init__(self, name: str) -> None:
        global is_rank
        is_rank = True
        self._name = name
        self._workers: Hosted | None = None
        self._store: Any = None

    def __repr__(self) -> str:  # what Ray writes before each line of its output
        return self._name

    def arrive(self, code: UserCode, opens_store: bool, deadline_seconds: float) -> Site:
        """Says where it is; from here on the user's code is found."""
        address = ray.util.get_node_ip_address()
        if opens_store:
            self._store = devices.open_store(address, deadline_seconds)
        code.settle()
        return Site(address, ray.get_runtime_context().get_node_id(), self._store.port if opens_store else None)

    def sit(self, seat: Seat) -> None:
        """Takes its place among the ranks."""
        self._workers = Hosted(seat, f" on {seat.address}")

    def serve(self, header: bytes, payload: Message) -> Message:
        """Serves a call of a worker's method."""
        if self._workers is None:
            raise WorkerError(f"{self._name} was called before it had a seat")
        return Message(self._workers.answer([memoryview(header), *payload.frames]))

    @ray.method(concurrency_group=BESIDE)
    def serve_beside(self, header: bytes, payload: Message) -> Message:
        """Serves a call beside others."""
        return self.serve(header, payload)

    def ping(self) -> None:
        """A sign of life."""

    def leave(self) -> None:
        """Lets the workers close."""
        if self._workers is not None:
            self._workers.close()
