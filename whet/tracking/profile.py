# SPDX-License-Identifier: Apache-2.0
"""Profiles chosen steps with torch's profiler, records memory over time, and measures processes at each step.

    profile/step_000002.trace.json.gz    every operator, in ranges by phase, for chrome://tracing or ui.perfetto.dev
    profile/step_000002.main_0.trace.json.gz    the same for a process that trains or samples (rank 0 of the pool main)
    profile/step_000002.memory.json      samples: seconds, resident bytes, bytes of tensors; the times of each phase
    profile/step_000002.memory.png       a plot of these

On a GPU the phases of the loop and their parts (forward, backward, optimizer, rollout step, weight sync) are also NVTX
ranges, in all threads of these processes.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from whet import devices
from whet.phases import phase, profiling, watching
from whet.processes.background import every
from whet.processes.template import NAMED

log = logging.getLogger(__name__)
STEP = "time/step"
SAMPLE_SECONDS = 0.01
BETWEEN = "between steps"
NAMES, VALIDATION = {"step": "rest of the steps"}, "validation"
LEAST_SECONDS = 0.1  # between two measurements of processes; a call before that returns the numbers of the last one
STATUS = Path("/proc/self/status")
PROC, GIB, NVML = Path("/proc"), 2**30, "libnvidia-ml.so.1"  # NVML comes with NVIDIA's driver
Around = Callable[[Path], AbstractContextManager[object]]
# Operations a second in bfloat16 without sparsity, from the makers' data sheets, by the first name in a device's name.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H20": 148e12, "MI300X": 1307e12,
    "A100": 312e12, "A800": 312e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "L40": 181e12, "A40": 150e12,
    "A30": 165e12, "A6000": 155e12, "RTX 6000 Ada": 364e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


@contextmanager
def observed(
    run_dir: Path, steps: Collection[int], next_step: Callable[[], int], ranks: Around = nullcontext
) -> Iterator[None]:
    """Profiles the chosen `steps` of the loop inside the block, and logs the time of each phase at the block's end.
    Opens `ranks(path)` around each chosen step, for other processes; `path` is the step's file without ending."""
    clock = PhaseClock()
    try:
        with watching(StepProfile(run_dir / "profile", steps, next_step, ranks).phase), watching(clock.phase):
            yield
    finally:
        log.info(clock.table())


class StepProfile:
    """Profiles `steps`, as a watcher: `phases.watching(StepProfile(...).phase)`. `next_step` returns the next step."""

    def __init__(self, folder: Path, steps: Collection[int], next_step: Callable[[], int], ranks: Around) -> None:
        self._folder, self._steps, self._next_step, self._ranks = folder, set(steps), next_step, ranks
        self._timeline: Timeline | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the block as a phase of the step's profile. For a chosen step itself, runs the profiler."""
        step = self._next_step()
        with ExitStack() as stack:
            if name == STEP and step in self._steps:
                stack.enter_context(self._traced(step))
            if self._timeline is not None:
                stack.enter_context(self._timeline.phase(name.removeprefix("time/")))
            yield

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        base = self._folder / f"step_{step:06}"
        self._timeline = Timeline()
        try:
            with self._ranks(base), recorder() as profiled, profiling(in_range), self._timeline.sampled():
                yield
            with phase("profile"):  # the table of times then has a line for writing the profile
                self._write(profiled, base, step)
        finally:
            self._timeline = None

    def _write(self, profiled: profile, base: Path, step: int) -> None:
        assert self._timeline is not None
        trace = base.with_suffix(".trace.json.gz")
        profiled.export_chrome_trace(str(trace))
        self._timeline.add_tensors(trace)
        base.with_suffix(".memory.json").write_text(json.dumps(self._timeline.as_dict()), encoding="utf-8")
        self._timeline.draw(base.with_suffix(".memory.png"), step)
        log.info("step %d is in %s (chrome://tracing or ui.perfetto.dev shows it), memory beside it", step, trace)


@contextmanager
def in_range(name: str) -> Iterator[None]:
    """Makes the block a range of the profiler's trace, and on a GPU also an NVTX range."""
    short = name.removeprefix("time/")
    with record_function(short), torch.cuda.nvtx.range(short) if has_nvtx() else nullcontext():
        yield


def has_nvtx() -> bool:
    """Tells whether this process can mark ranges for NVIDIA's profilers."""
    return torch.cuda.is_available()


def recorder() -> profile:
    """Builds torch's profiler for the operators of this thread and of the accelerator."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, profile_memory=True)


@dataclass
class Timeline:
    """The memory of this process over the seconds of a step."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, resident bytes, bytes on the GPU
    tensors: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes of tensors made in this step
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, from, to
    started: int = field(default_factory=time.time_ns)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the start and end of a phase."""
        start = self._seconds(time.time_ns())
        try:
            yield
        finally:
            self.phases.append((name, start, self._seconds(time.time_ns())))

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples memory in a thread during the block."""
        self._sample()
        try:
            with every(SAMPLE_SECONDS, self._sample):
                yield
        finally:
            self._sample()

    def add_tensors(self, trace: Path) -> None:
        """Reads the bytes of host tensors over time from the trace. Tensors allocated before the step count as 0."""
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
        base = content.get("baseTimeNanoseconds", 0)
        now = 0
        events = [event for event in content["traceEvents"] if event.get("name") == "[memory]"]
        for event in sorted(events, key=lambda event: float(event["ts"])):
            if event["args"].get("Device Type") == 0:
                now += event["args"]["Bytes"]
                self.tensors.append((self._seconds(base + float(event["ts"]) * 1000), now))

    def as_dict(self) -> dict[str, object]:
        """Returns the content of the JSON file: lists of numbers by column."""
        seconds, resident, on_gpu = (list(column) for column in zip(*self.samples, strict=True))
        return {
            "samples": {"seconds": seconds, "resident_bytes": resident, "gpu_bytes": on_gpu},
            "tensors": {"seconds": [at for at, _ in self.tensors], "bytes": [size for _, size in self.tensors]},
            "phases": [{"name": name, "from": start, "to": end} for name, start, end in self.phases],
        }

    def draw(self, path: Path, step: int) -> None:
        """Plots memory over the step, with phases as bands."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        curves = {"resident": ([at for at, _, _ in self.samples], [size for _, size, _ in self.samples])}
        if any(on_gpu for _, _, on_gpu in self.samples):
            curves["GPU"] = (curves["resident"][0], [size for _, _, size in self.samples])
        if self.tensors:
            curves["tensors made in this step"] = ([at for at, _ in self.tensors], [size for _, size in self.tensors])
        figure = Figure(figsize=(10, 3 * len(curves)), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
        for axes, (label, (seconds, sizes)) in zip(panels, curves.items(), strict=True):
            axes.step(seconds, [size / 2**20 for size in sizes], where="post", color="#3366cc")
            axes.set(ylabel=f"{label}, MiB")
            inner = sorted((each for each in self.phases if each[0] != "step"), key=lambda each: each[1])
            for number, (name, start, end) in enumerate(inner):
                axes.axvspan(start, end, color="#000000", alpha=0.04 + 0.05 * (number % 2), linewidth=0)
                where = axes.get_xaxis_transform()
                axes.text(start, 1.0, f" {name}", transform=where, va="top", rotation=90, fontsize=7)
        panels[0].set(title=f"memory in step {step}")
        panels[-1].set(xlabel="seconds")
        figure.savefig(path)

    def _sample(self) -> None:
        on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        self.samples.append((self._seconds(time.time_ns()), status_bytes("VmRSS"), on_gpu))

    def _seconds(self, nanoseconds: float) -> float:
        return round((nanoseconds - self.started) / 1e9, 6)


class PhaseClock:
    """Measures the time of each phase from its construction on. Use it as `phases.watching(clock.phase)`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._open = [BETWEEN]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`, without the time of inner phases. A validation counts as one phase."""
        short = name.removeprefix("time/")
        self._count()
        self._open.append(VALIDATION if VALIDATION in self._open else NAMES.get(short, short))
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def table(self) -> str:
        """Formats the times: one line for each phase, the longest first."""
        self._count()
        total = sum(self.seconds.values())
        rows = [*sorted(self.seconds.items(), key=lambda row: -row[1]), ("all", total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {each:10,.2f} s  {each / max(total, 1e-9):5.1%}" for name, each in rows]
        return "\n".join(["where the time went:", *lines])

    def _count(self) -> None:
        now = self._clock()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now


def status_bytes(name: str) -> int:
    """Reads a number of bytes from the status file: VmRSS is resident memory, VmHWM its peak; 0 without a file."""
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0


class SystemMeter:
    """Measures memory and processor use of this process and its descendants. This process counts as `driver`, others by
    the name that whet gave them (`reward`, `env`, `main_0`: rank 0 of a pool), or else as `workers`. With `name`, all
    count under this name. Processes on other machines are not measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, name: str = "") -> None:
        self._clock, self._at, self._name, self._found = clock, clock(), name, dict[str, float]()
        self._seconds = {each: sum(map(_cpu_seconds, pids)) for each, pids in _processes(name).items()}

    def measure(self, device: torch.device | None = None) -> dict[str, float]:
        """Returns the metrics `system/...`: resident GiB, cores in use since the last measurement, use of `device`."""
        if (passed := self._clock() - self._at) < LEAST_SECONDS and self._found:
            return self._found
        found = {f"system/{self._name or 'driver'}/{name}": use for name, use in accelerator_use(device).items()}
        self._found, self._at = found, self._at + passed
        for name, pids in _processes(self._name).items():
            seconds, before = sum(map(_cpu_seconds, pids)), self._seconds.get(name, 0.0)
            self._seconds[name] = seconds
            found[f"system/{name}/memory_gib"] = sum(map(_resident_bytes, pids)) / GIB
            found[f"system/{name}/cpu_cores"] = max(0.0, seconds - before) / max(passed, 1e-9)  # fewer if some ended
        return found


def accelerator_use(device: torch.device | None = None) -> dict[str, float]:
    """Measures this process's accelerator: the peak memory of its tensors so far in GiB, and the share of the last
    second in which the accelerator was busy, if its driver reports it. If the process has no tensors, the memory is
    that of all programs on `device` now. Empty without an accelerator."""
    has_own, is_named = torch.accelerator.is_available(), device is not None and device != devices.HOST
    return _use(device, is_named) if has_own or is_named else {}


def _use(device: torch.device | None, is_named: bool) -> dict[str, float]:
    found = dict[str, float]()
    with suppress(RuntimeError):  # MPS does not count
        if torch.accelerator.is_available() and (peak := torch.accelerator.max_memory_allocated()):
            found["accelerator_gib"] = peak / GIB
    if found or is_named:
        with suppress(Exception):  # drivers' libraries may be missing, or raise anything
            busy, used = by_driver(device)
            found = {"accelerator_gib": used / GIB, **found, "accelerator_use": busy}
    return found


def by_driver(device: torch.device | None) -> tuple[float, int]:
    """Returns the share of the last second in which a GPU was busy, and the bytes that all programs hold on it.

    Raises: any error if its driver does not report this; NVIDIA's driver does through a library."""
    if torch.version.hip is not None:
        return torch.cuda.utilization(device) / 100, torch.cuda.device_memory_used(device)
    library, index = ctypes.CDLL(NVML), torch.cuda._get_nvml_device_index(device)
    handle, rates, memory = ctypes.c_void_p(), (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
    calls = (library.nvmlDeviceGetUtilizationRates, rates), (library.nvmlDeviceGetMemoryInfo, memory)
    is_open = not (library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    if not is_open or any(call(handle, into) for call, into in calls):
        raise OSError(f"{NVML} does not report the use of device {index}")
    return rates[0] / 100, memory[2]  # rates: of the device, of its memory; memory: total, free, used


def peak_flops() -> float:
    """Returns the peak speed of this process's accelerator in bfloat16 operations a second; 0.0 if unknown."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), 0.0)


def _processes(name: str = "") -> dict[str, list[int]]:
    found = {name or "driver": [os.getpid()]}
    for pid, given in _descendants(os.getpid(), "workers"):
        found.setdefault(name or given, []).append(pid)
    return found


def _descendants(pid: int, name: str) -> Iterator[tuple[int, str]]:
    """Yields id and name of each descendant of a process. Without a name from whet it gets the name of its parent."""
    with suppress(OSError):  # it has ended
        for thread in (PROC / str(pid) / "task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                given = _given_name(child) or name
                yield child, given
                yield from _descendants(child, given)


def _given_name(pid: int) -> str:
    with suppress(OSError):
        found = re.fullmatch(rf"{NAMED}([\w. -]+)\n", (PROC / str(pid) / "comm").read_text(errors="replace"))
        return found[1].replace(" ", "_") if found else ""
    return ""


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()  # the name before may have spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
