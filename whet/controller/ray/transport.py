# SPDX-License-Identifier: Apache-2.0
"""The caller's side of Ray actors. A thread of the caller receives the replies of each rank.

A call in progress detects the death of its process; between calls a regular ping detects it. `Watch` detects the loss
of a machine."""

from __future__ import annotations

import contextlib
import queue
import re
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from whet.config.cluster import ClusterConfig, Slot, processors_of
from whet.controller import wire
from whet.controller.local_workers import PUT_MAIN, RankSpec
from whet.controller.ray import actor
from whet.controller.ray.actor import CONCURRENT, FramedMessage, Location, RankActor
from whet.controller.ray.session import all_nodes, attempt, connected, head_address, reserve
from whet.controller.ray.user_code import UserCode
from whet.controller.ray.watch import Watch
from whet.controller.remote import OpenCall, RemoteTransport, WorkerConnection
from whet.controller.worker import Host, RankLayout, ResourcePool, WorkerSpec
from whet.controller.worker_group import LAUNCH_AGAIN, RAISE_DEADLINE, stopped
from whet.errors import DeadlineError, LostWorkerError, WhetError, WorkerError

CLOSE_SECONDS = 10.0  # for workers to close before their processes are killed
KILL_SECONDS = 1.0  # limit of a wait for Ray to kill actors; if the head is lost, Ray tries for a minute
IDLE_SECONDS = 2.0  # without a call before a rank gets a ping
CHECK_SECONDS = 1.0  # how often a wait checks whether the launch has ended
INLINE_BYTES = 64 * 1024  # smaller payloads go with the call; larger ones into the object store, once
REWARD_THREADS = 64
REASON_LENGTH = 600  # Ray's message for a process that ran out of memory is long
RAISED = re.compile(r"^[\w.]*(?:Error|Exception): .*", re.MULTILINE)  # last line of a traceback
DISCONNECTED = LostWorkerError("connection to Ray", "ended (ray.shutdown)", change=LAUNCH_AGAIN)
HEAD = "head of the Ray cluster"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Actor(WorkerConnection):
    handle: Any
    slot: Slot
    location: Location | None = None  # None until the actor has started
    replies: queue.SimpleQueue[tuple[OpenCall, Any]] = field(default_factory=queue.SimpleQueue)  # Ray's references

    @property
    def where(self) -> str:
        return "" if self.location is None else f" on {self.location.address}"


class RayTransport(RemoteTransport[_Actor]):
    """The transport to the actors of all pools of a launch, on reserved nodes."""

    ECHO_SECONDS = 2.0

    def __init__(self, pools: Sequence[ResourcePool], cluster: ClusterConfig) -> None:
        if actor.is_rank:
            raise WorkerError("script", "imported by a worker, it launches workers again", change=PUT_MAIN)
        super().__init__(cluster.deadline_seconds)
        self._watch: Watch | None = None
        self._threads: list[threading.Thread] = []
        slots, self._has_gpus = cluster.slots(pools), any(cluster.gpus)
        self._processors = processors_of(slots)  # by node
        self._gpu_ids: dict[tuple[int, int], str] = {}  # Ray's, by node and number
        with ExitStack() as on_error:
            is_alone = on_error.enter_context(connected(cluster))
            self._reserved = reserve(slots, cluster, is_alone=is_alone)
            self._connection = on_error.pop_all()
        for slot in slots:
            self.peers.append(_Actor(pool=slot.pool, rank=slot.rank, handle=self._start(slot), slot=slot))

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[RankLayout]]:
        """Implements `RemoteTransport.build`; waits for the actors first."""
        try:
            self._assign_ranks()
            return super().build(specs)
        except BaseException as error:
            self.abort(stopped(f"not started ({error})"))
            self.close()
            raise

    def _assign_ranks(self) -> None:
        """Waits until every actor runs and has the user's code, then sends each its RankSpec."""
        self._code = code = ray.put(UserCode.of_this_process())
        found = self._all("start", lambda peer: peer.handle.prepare.remote(code, peer.rank == 0, self.deadline_seconds))
        self.peers = [self._found(peer, location) for peer, location in zip(self.peers, found, strict=True)]
        self._first = {peer.pool.name: peer.location for peer in self.peers if peer.rank == 0}
        self._all("become a rank", self._assign)
        used = {location.node_id for location in found}
        machines = {node.id: (node.address, node.port) for node in all_nodes() if node.id in used}
        self._watch = Watch({**machines, HEAD: head_address()}, self._lost)
        for peer in self.peers:
            self._listen(peer)

    def open(self, lost: _Actor) -> _Actor:
        again = f", start {1 + len(self._losses)}"
        fresh: dict[str, Any] = {"calls": deque(), "sending": threading.Lock(), "replies": queue.SimpleQueue()}
        peer = replace(lost, handle=self._start(lost.slot, again), location=None, **fresh)
        try:
            arguments = self._code, False, self.deadline_seconds
            [location] = self._all("start", lambda each: each.handle.prepare.remote(*arguments), [peer])
            peer = self._found(peer, location)
            self._all("become a rank", self._assign, [peer])
        except BaseException:
            self.end_process(peer)
            raise
        self._listen(peer)
        return peer

    def _found(self, peer: _Actor, location: Location) -> _Actor:
        """Returns the actor with its location. Records the GPUs that Ray assigned to it."""
        numbers = [(peer.slot.node, device) for device in peer.slot.devices]
        self._gpu_ids |= dict(zip(numbers, location.gpu_ids, strict=False))
        return replace(peer, location=location)

    def _assign(self, peer: _Actor) -> Any:
        """Makes the actor a rank. Ranks that share a GPU use the GPU that the first of them reserved."""
        gpu_ids = [] if peer.slot.is_first else self._gpus_of(peer.slot)
        return peer.handle.assign.remote(self._rank_spec(peer), gpu_ids)

    def _host(self, peer: _Actor) -> Host:
        assert peer.location is not None
        return Host(peer.location.node_id, peer.location.address, ",".join(self._gpus_of(peer.slot)))

    def _gpus_of(self, slot: Slot) -> list[str]:
        return [self._gpu_ids[slot.node, device] for device in slot.devices] if self._has_gpus else []

    def end_process(self, peer: _Actor) -> None:
        """Kills the actor."""
        attempt(KILL_SECONDS, lambda: ray.kill(peer.handle))

    def _listen(self, peer: _Actor) -> None:
        self._threads.append(threading.Thread(target=self._receive, args=(peer,), daemon=True, name=peer.name()))
        self._threads[-1].start()

    def close(self) -> None:
        """Implements `Transport.close`. Also ends the connection to Ray if the launch made it."""
        super().close()
        for thread in self._threads:
            thread.join(2 * CHECK_SECONDS)
        self._connection.close()

    def prepare(self, frames: list[wire.Frame]) -> Any:
        """Returns the message of the frames; if it is large, a reference to it in the object store."""
        message = FramedMessage(frames)
        if message.size < INLINE_BYTES:
            return message
        try:
            return ray.put(message)
        except RayError as error:
            found = f"no room for {message.size / 2**20:,.0f} MiB ({error})"
            change = "start the node with a larger store (`ray start --object-store-memory=...`)"
            raise WorkerError("Ray's object store here", found, change=change) from error

    def start_call(self, peer: _Actor, call: OpenCall, header: bytes, payload: Any) -> None:
        """Submits the call. Ray's dashboard shows it under the name role.method."""
        name = f"{call.role}.{call.method}"
        if not ray.is_initialized():  # `remote` would start a cluster of its own
            self.abort(DISCONNECTED)
            return
        try:
            method = peer.handle.serve_concurrent if call.is_concurrent else peer.handle.serve
            reply = method.options(name=name).remote(header, payload)
        except RayError as error:
            self.lose(peer, self._failure(peer, call, error))
            return
        if call.is_concurrent:
            threading.Thread(target=self._receive_one, args=(peer, call, reply), daemon=True).start()
        else:
            peer.replies.put((call, reply))

    def end_processes(self, *, is_orderly: bool) -> None:
        """Closes the workers if `is_orderly`, then kills all actors and releases their nodes."""
        if self._watch is not None:
            self._watch.stop()
        if not ray.is_initialized():
            return
        if is_orderly:
            closing = [peer.handle.close.remote() for peer in self.peers]
            attempt(CLOSE_SECONDS, lambda: ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS))
        attempt(KILL_SECONDS, self._kill)

    def _kill(self) -> None:
        for peer in self.peers:
            ray.kill(peer.handle)
        remove_placement_group(self._reserved.group)

    def _start(self, slot: Slot, again: str = "") -> Any:
        roles = slot.pool.roles
        name = f"{', '.join(roles)} rank {slot.rank}"
        options = {
            "name": f"{name}{again}",
            "namespace": self._reserved.name,  # a name stays in use until Ray has removed the dead actor
            "num_cpus": self._reserved.cpus * slot.pool.num_devices,
            # Whole GPUs: with fractions, Ray would put two ranks of a pool onto one GPU.
            "num_gpus": len(slot.devices) if self._has_gpus and slot.is_first else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reserved.group, placement_group_bundle_index=slot.node
            ),
        }
        # Threads for concurrent calls; a pool with rewards needs one for each pending batch. Other calls share one.
        threads = REWARD_THREADS if "reward" in roles else 4
        remote = ray.remote(concurrency_groups={CONCURRENT: threads})(RankActor)  # type: ignore[call-overload]
        return remote.options(**options).remote(name)

    def _rank_spec(self, peer: _Actor) -> RankSpec:
        first = self._first[peer.pool.name]
        assert peer.location is not None and first is not None and first.store_port is not None
        return RankSpec(
            pool=peer.pool,
            rank=peer.rank,
            device_index=0 if self._has_gpus and peer.slot.devices else None,  # the actor sees its own GPUs alone
            devices_here=self._processors[peer.slot.node],
            store=(first.address, first.store_port),
            address=peer.location.address,
            deadline_seconds=self.deadline_seconds,
            hosts=tuple(self._host(each) for each in self.peers if each.pool.name == peer.pool.name),
        )

    def _all(self, what: str, call: Callable[[_Actor], Any], peers: Sequence[_Actor] | None = None) -> list[Any]:
        """Calls actors, by default all of them.  Returns their results in order. `what` names the call in errors."""
        peers = self.peers if peers is None else peers
        pending = {call(peer): peer for peer in peers}
        results: dict[int, Any] = {}
        until = time.monotonic() + self.deadline_seconds
        while pending:
            left = until - time.monotonic()
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, min(left, CHECK_SECONDS)))
            if not ready and left > 0 and not self.ended.is_set():
                continue
            if not ready:
                late = ", ".join(peer.name() for peer in pending.values())
                found = f"did not {what} within {self.deadline_seconds:g} s"
                raise DeadlineError(late, found, change=RAISE_DEADLINE)
            peer = pending.pop(ready[0])
            try:
                results[id(peer)] = ray.get(ready[0])
            except RayError as error:
                raise self._failure(peer, None, error) from error
        return [results[id(peer)] for peer in peers]

    def _receive(self, peer: _Actor) -> None:
        while not self.ended.is_set() and peer not in self._losses:
            try:
                self._receive_one(peer, *peer.replies.get(timeout=IDLE_SECONDS))
            except queue.Empty:
                if not ray.is_initialized():
                    self.abort(DISCONNECTED)
                    return
                self._receive_one(peer, None, peer.handle.ping.remote())

    def _receive_one(self, peer: _Actor, call: OpenCall | None, reply: Any) -> None:
        """Waits for the reply to a call; `call` is None for a ping."""
        try:
            message = self._get(reply)
        except RayError as error:
            self.lose(peer, self._failure(peer, call, error))
            return
        if call is not None and message is not None:
            self.complete(peer, message.frames, call.number)

    def _get(self, reference: Any) -> Any:
        """Waits for the object behind a reference. Returns None after the launch has ended."""
        while not self.ended.is_set():
            with contextlib.suppress(GetTimeoutError):
                return ray.get(reference, timeout=CHECK_SECONDS)
        return None

    def _failure(self, peer: _Actor, call: OpenCall | None, error: RayError) -> WhetError:
        """Converts an error of Ray to an error of whet."""
        name = peer.name(call.role if call else "")
        if isinstance(error, RayTaskError):  # not from a worker's method, whose error is in the reply
            found = f"{type(error.cause).__name__}: {error.cause}".rstrip(": ")
            return WorkerError(name, found, change="read the logs of Ray on its node")
        if peer.location is None and (raised := RAISED.findall(str(error))):
            versions = "whet and its dependencies in the same versions on every node"
            found, change = f"could not be started ({raised[-1]})", "compare the versions: `whet doctor --cluster`"
            return WorkerError(name, found, versions, change)
        lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
        reason = textwrap.shorten(" ".join(lines[1:] or lines), REASON_LENGTH, placeholder=" ...")
        return self.death(peer, call, reason, "between two calls" if peer.location else "at its start")

    def _lost(self, machine: str, reason: str) -> None:
        there = [each for each in self.peers if each.location is not None and each.location.node_id == machine]
        what = machine if machine == HEAD else f"node of {'; '.join(each.name() for each in there)}"
        error = LostWorkerError(what, f"lost ({reason})", change=LAUNCH_AGAIN)
        for peer in there:
            self.lose(peer, error)
        if machine == HEAD:
            self.abort(error)
