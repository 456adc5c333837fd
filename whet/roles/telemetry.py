# SPDX-License-Identifier: Apache-2.0
"""Measurements of ranks in other processes: use of accelerators, memory and cores, and traces of torch operators."""

from __future__ import annotations

import concurrent.futures
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from whet import devices
from whet.checkpoints.checkpoint import TRAINED_ROLES
from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.controller.worker_group import WorkerGroup
from whet.phases import profiling
from whet.processes.template import short_name
from whet.tracking import profile

ANSWER_SECONDS = 2.0  # a rank that takes longer is left out of this step's line
NAME = "rank"


class MeasuredWorker(Worker):
    """A rank that measures its own process and its child processes, and records its torch operators on request."""

    _recorder: profile.profile  # of the step that is profiled

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._meter, self._recording = profile.SystemMeter(name=NAME), ExitStack()

    @register(concurrent=True)
    def system_use(self, whole: bool) -> dict[str, float]:
        """Measures this rank's accelerator (`accelerator_gib`, ...). With `whole`, also measures the memory of its
        processes, and the processor cores used since the last measurement."""
        if not whole:
            return profile.accelerator_use(self.device)
        return {key.rpartition("/")[2]: value for key, value in self._meter.measure(self.device).items()}

    @register(Dispatch.ONE_TO_ALL)
    def start_recording(self) -> None:
        """Starts to record every torch operator of this rank."""
        self._recording.enter_context(profiling(profile.in_range))
        self._recorder = profile.recorder()
        self._recorder.start()

    @register(Dispatch.ONE_TO_ALL)
    def stop_recording(self) -> bytes:
        """Stops recording. Returns the trace in Chrome's format, packed by gzip."""
        self._recording.close()
        self._recorder.stop()
        with tempfile.TemporaryDirectory(prefix="whet-trace-") as folder:
            path = Path(folder, "trace.json.gz")
            self._recorder.export_chrome_trace(str(path))
            return path.read_bytes()


@contextmanager
def recorded(roles: Mapping[str, WorkerGroup], cluster: ClusterConfig, base: Path) -> Iterator[None]:
    """Records operators of ranks in other processes during the block, and writes BASE.POOL_RANK.trace.json.gz files."""
    seen = [role for role in ("rollout", *TRAINED_ROLES) if role in roles]
    found = {} if cluster.stays_here else {cluster.pool_of(role): role for role in seen}
    groups = {pool: roles[role] for pool, role in found.items()}
    for group in groups.values():
        group.call("start_recording")
    yield
    for pool, group in groups.items():
        for rank, trace in enumerate(group.call("stop_recording")):
            base.with_name(f"{base.name}.{pool}_{rank}.trace.json.gz").write_bytes(trace)


def use_of_ranks(roles: Mapping[str, WorkerGroup], cluster: ClusterConfig) -> dict[str, float]:
    """Returns the metrics `system/POOL_RANK/...` of ranks in other processes. Ranks on Ray report all metrics. Ranks on
    this machine report only their accelerator's; the loop measures the rest. A lost or late rank reports nothing."""
    is_ray = cluster.backend == "ray"
    if not (is_ray or devices.count()):
        return {}
    pools = {cluster.pool_of(role): group for role, group in roles.items()}
    calls = {
        (pool, rank): group.start_on(rank, "system_use", is_ray).replies[rank]
        for pool, group in pools.items()
        for rank in range(group.world_size)
    }
    done, _ = concurrent.futures.wait(calls.values(), timeout=ANSWER_SECONDS)
    return {
        f"system/{_named(pool, rank)}/{name}": value
        for (pool, rank), reply in calls.items()
        if reply in done and reply.exception() is None
        for name, value in reply.result().items()
    }


def asked_of_trained(roles: Mapping[str, WorkerGroup], cluster: ClusterConfig, method: str) -> dict[str, list[float]]:
    """Calls `method` on all ranks of trained roles. Returns the replies by process, one for each role in it."""
    found: dict[str, list[float]] = {}
    for role in filter(roles.__contains__, TRAINED_ROLES):
        for rank, number in enumerate(roles[role].call(method)):
            name = "driver" if cluster.stays_here else _named(cluster.pool_of(role), rank)
            found.setdefault(name, []).append(number)
    return found


def _named(pool: str, rank: int) -> str:
    """Returns the name of a rank in metrics, which is its process's name in `ps`."""
    return short_name(f"{pool} {rank}").replace(" ", "_")


def shares_of_peak(flops: Mapping[str, float], peaks: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Computes `perf/mfu` and `system/.../mfu`. `flops` are operations in `seconds`, `peaks` per second, by process."""
    each = {f"system/{name}/mfu": number / seconds / peaks[name] for name, number in flops.items()}
    return each | {"perf/mfu": sum(flops.values()) / seconds / sum(peaks.values())}
