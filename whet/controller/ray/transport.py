# SPDX-License-Identifier: Apache-2.0
"""The caller's side of Ray actors: a thread of the caller takes the answers of each rank.

A process that dies is heard of by the call that it was serving, and between calls by a sign of life that an idle rank
is asked for; a machine that is gone by `Watch`.
"""

from __future__ import annotations

import contextlib
import queue
import re
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from whet.config.cluster import ClusterConfig
from whet.controller import wire
from whet.controller.hosted import Seat
from whet.controller.ray import actor
from whet.controller.ray.actor import BESIDE, Message, RankActor, Site
from whet.controller.ray.session import all_nodes, attempt, connected, head_address, reserve
from whet.controller.ray.user_code import UserCode
from whet.controller.ray.watch import Watch
from whet.controller.remote import Peer, RemoteTransport, Waiting
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import Layout, WorkerSpec
from whet.errors import DeadlineError, LostWorkerError, WhetError, WorkerError

CLOSE_SECONDS = 10.0  # for workers to close in, before their processes are killed
KILL_SECONDS = 1.0  # that a failure waits for Ray to kill; without its head Ray tries for a minute
IDLE_SECONDS = 2.0  # without a call, before a rank is asked for a sign of life
LOOK_SECONDS = 1.0  # how often a wait looks whether the launch has ended
INLINE_BYTES = 64 * 1024  # smaller ones travel with the call; larger ones are put into the object store, once
REASON_LENGTH = 600  # Ray has much to say of a process that ran out of memory
RAISED = re.compile(r"^[\w.]*(?:Error|Exception): .*", re.MULTILINE)  # last line of a traceback
DISCONNECTED = LostWorkerError("the connection to Ray was ended (ray.shutdown)")
HEAD = "the head of the Ray cluster"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Actor(Peer):
    handle: Any
    site: Site | None = None  # unset until it has arrived
    calls: queue.SimpleQueue[tuple[Waiting, Any]] = field(default_factory=queue.SimpleQueue)  # with their answers' refs

    @property
    def where(self) -> str:
        return "" if self.site is None else f" on {self.site.address}"


class RayTransport(RemoteTransport[_Actor]):
    """The transport to the actors of all pools of a launch, on reserved nodes."""

    ECHO_SECONDS = 2.0

    def __init__(self, pools: Sequence[ResourcePool], cluster: ClusterConfig) -> None:
        if actor.is_rank:
            raise WorkerError(
                "workers are launched inside of a worker, which imports the script that was started: it needs "
                '`if __name__ == "__main__":` around what it runs'
            )
        super().__init__(cluster.deadline_seconds)
        self._watch: Watch | None = None
        self._threads: list[threading.Thread] = []
        everyone = [(pool, rank) for pool in pools for rank in range(pool.processes)]
        with ExitStack() as on_error:
            is_alone = on_error.enter_context(connected(cluster))
            self._reserved = reserve(len(everyone), cluster, is_alone=is_alone)
            self._connection = on_error.pop_all()
        self.peers = [
            _Actor(pool=pool, rank=rank, handle=self._start(pool, rank, number))
            for number, (pool, rank) in enumerate(everyone)
        ]

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[Layout]]:
        """Implements `RemoteTransport.build`; the actors meet first."""
        try:
            self._meet()
            return super().build(specs)
        except BaseException as error:
            self.abort(WorkerError(f"the workers could not be started: {error}"))
            self.close()
            raise

    def _meet(self) -> None:
        """Waits until every actor runs and has the user's code, then tells each its place."""
        code = ray.put(UserCode.of_this_process())
        sites = self._all("start", lambda peer: peer.handle.arrive.remote(code, peer.rank == 0, self.deadline_seconds))
        self.peers = [replace(peer, site=site) for peer, site in zip(self.peers, sites, strict=True)]
        first = {peer.pool.name: site for peer, site in zip(self.peers, sites, strict=True) if peer.rank == 0}
        seats = {
            id(peer): self._seat(peer, site, first[peer.pool.name])
            for peer, site in zip(self.peers, sites, strict=True)
        }
        self._all("take its place", lambda peer: peer.handle.sit.remote(seats[id(peer)]))
        used = {site.node_id for site in sites}
        machines = {node.id: (node.address, node.port) for node in all_nodes() if node.id in used}
        self._watch = Watch({**machines, HEAD: head_address()}, self._lost)
        for peer in self.peers:
            self._threads.append(threading.Thread(target=self._receive, args=(peer,), daemon=True, name=peer.name()))
            self._threads[-1].start()

    def close(self) -> None:
        """Implements `Transport.close`; the connection to Ray ends too, if the launch made it."""
        super().close()
        for thread in self._threads:
            thread.join(2 * LOOK_SECONDS)
        self._connection.close()

    def prepare(self, frames: list[wire.Frame]) -> Any:
        """A message, or where it lies in the object store."""
        message = Message(frames)
        if message.size < INLINE_BYTES:
            return message
        try:
            return ray.put(message)
        except RayError as error:
            raise WorkerError(
                f"{message.size / 2**20:,.0f} MiB do not fit into Ray's object store here: {error}; start the node "
                "with a larger one (`ray start --object-store-memory=...`)"
            ) from error

    def hand_over(self, peer: _Actor, waiting: Waiting, header: bytes, payload: Any) -> None:
        """Submits the call; its name is what Ray's dashboard shows."""
        name = f"{waiting.role}.{waiting.method}"
        if not ray.is_initialized():  # `remote` would start a cluster of its own
            self.abort(DISCONNECTED)
            return
        try:
            method = peer.handle.serve_beside if waiting.is_beside else peer.handle.serve
            call = waiting, method.options(name=name).remote(header, payload)
        except RayError as error:
            self.abort(self._failure(peer, waiting, error))
            return
        if waiting.is_beside:
            threading.Thread(target=self._take, args=(peer, *call), daemon=True).start()
        else:
            peer.calls.put(call)

    def end_processes(self, *, is_orderly: bool) -> None:
        """Lets workers close, then kills all actors and gives their nodes back."""
        if self._watch is not None:
            self._watch.stop()
        if not ray.is_initialized():
            return
        if is_orderly:
            leaving = [peer.handle.leave.remote() for peer in self.peers]
            attempt(CLOSE_SECONDS, lambda: ray.wait(leaving, num_returns=len(leaving), timeout=CLOSE_SECONDS))
        attempt(KILL_SECONDS, self._kill)

    def _kill(self) -> None:
        for peer in self.peers:
            ray.kill(peer.handle)
        remove_placement_group(self._reserved.group)

    def _start(self, pool: ResourcePool, rank: int, number: int) -> Any:
        name = f"{', '.join(pool.roles)} rank {rank}"
        options = {
            "name": name,
            "namespace": self._reserved.name,  # names are taken until Ray has buried an actor
            "num_cpus": self._reserved.cpus,
            "num_gpus": self._reserved.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reserved.group, placement_group_bundle_index=number // self._reserved.processes_here
            ),
        }
        # Threads for calls beside others; all other calls have one.
        remote = ray.remote(concurrency_groups={BESIDE: 4})(RankActor)  # type: ignore[call-overload]
        return remote.options(**options).remote(name)

    def _seat(self, peer: _Actor, site: Site, first: Site) -> Seat:
        assert first.store_port is not None
        return Seat(
            pool=peer.pool,
            rank=peer.rank,
            device_index=0 if self._reserved.gpus else None,  # Ray shows an actor its own GPU only
            processes_here=self._reserved.processes_here,
            store=(first.address, first.store_port),
            address=site.address,
            deadline_seconds=self.deadline_seconds,
        )

    def _all(self, what: str, call: Callable[[_Actor], Any]) -> list[Any]:
        """Returns the answers of the actors, by peer; errors name `what` they are asked to do."""
        pending = {call(peer): peer for peer in self.peers}
        answers: dict[int, Any] = {}
        until = time.monotonic() + self.deadline_seconds
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                late = ", ".join(peer.name() for peer in pending.values())
                raise DeadlineError(f"{late} did not {what} within {self.deadline_seconds:g} s")
            peer = pending.pop(ready[0])
            try:
                answers[id(peer)] = ray.get(ready[0])
            except RayError as error:
                raise self._failure(peer, None, error) from error
        return [answers[id(peer)] for peer in self.peers]

    def _receive(self, peer: _Actor) -> None:
        while not self.ended.is_set():
            try:
                self._take(peer, *peer.calls.get(timeout=IDLE_SECONDS))
            except queue.Empty:
                if not ray.is_initialized():
                    self.abort(DISCONNECTED)
                    return
                self._take(peer, None, peer.handle.ping.remote())

    def _take(self, peer: _Actor, waiting: Waiting | None, answer: Any) -> None:
        """Waits for the answer of a call, or of a ping."""
        try:
            message = self._get(answer)
        except RayError as error:
            self.abort(self._failure(peer, waiting, error))
            return
        if waiting is not None and message is not None:
            self.settle(peer, message.frames, waiting.number)

    def _get(self, answer: Any) -> Any:
        """Returns the object of a reference; None once the launch has ended."""
        while not self.ended.is_set():
            with contextlib.suppress(GetTimeoutError):
                return ray.get(answer, timeout=LOOK_SECONDS)
        return None

    def _failure(self, peer: _Actor, waiting: Waiting | None, error: RayError) -> WhetError:
        """Returns whet's error for Ray's."""
        who = peer.name(waiting.role if waiting else "")
        if isinstance(error, RayTaskError):  # not from a worker's method: those answer with what they raised
            return WorkerError(f"{who}: {type(error.cause).__name__}: {error.cause}".rstrip(": "))
        if peer.site is None and (raised := RAISED.findall(str(error))):
            return WorkerError(
                f"{who} could not be started: {raised[-1]}; whet, and what it needs, must be installed on every node "
                "in the same versions: `whet doctor --cluster` compares them"
            )
        lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
        reason = textwrap.shorten(" ".join(lines[1:] or lines), REASON_LENGTH, placeholder=" ...")
        return self.death(peer, waiting, reason, "between two calls" if peer.site else "at its start")

    def _lost(self, machine: str, reason: str) -> None:
        there = [peer.name() for peer in self.peers if peer.site is not None and peer.site.node_id == machine]
        what = machine if machine == HEAD else f"the node of {'; '.join(there)}"
        self.abort(LostWorkerError(f"{what} is lost: {reason}"))
