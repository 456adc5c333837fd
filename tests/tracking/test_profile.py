# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from whet.metrics import Metrics
from whet.processes.children import Children, Reply
from whet.processes.template import short_name
from whet.roles import telemetry
from whet.tracking import profile
from whet.tracking.profile import SystemMeter, observed

MEBIBYTE = 2**20


def test_chosen_steps_leave_a_trace_by_phase_and_a_memory_timeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps_done = 0
    with caplog.at_level(logging.INFO, "whet"), observed(tmp_path, [2], lambda: steps_done + 1):
        for _ in range(3):
            metrics = Metrics()
            with metrics.time("time/step"), metrics.time("time/update"):
                kept = torch.zeros(MEBIBYTE)  # 4 MiB
                made = kept + 1
                del made
            steps_done += 1
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step_000002.memory.json",
        "step_000002.memory.png",
        "step_000002.trace.json.gz",
    ]
    with gzip.open(tmp_path / "profile" / "step_000002.trace.json.gz", "rt") as file:
        events = {event.get("name"): event for event in json.load(file)["traceEvents"]}
    add, update, step = events["aten::add"], events["update"], events["step"]
    for outer, inner in ((step, update), (update, add)):
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]

    memory = json.loads((tmp_path / "profile" / "step_000002.memory.json").read_text())
    sizes = memory["tensors"]["bytes"]
    assert 8 * MEBIBYTE <= max(sizes) < 8 * MEBIBYTE + 4096  # and a few numbers
    seconds = memory["samples"]["seconds"]
    assert len(seconds) == len(memory["samples"]["resident_bytes"]) >= 2 and seconds == sorted(seconds)
    (phase,) = (each for each in memory["phases"] if each["name"] == "update")
    assert seconds[0] <= phase["from"] < phase["to"]
    in_phase = [at for at, size in zip(memory["tensors"]["seconds"], sizes, strict=True) if size >= 8 * MEBIBYTE]
    assert all(phase["from"] - 0.01 <= at <= phase["to"] + 0.01 for at in in_phase)  # one clock
    table = next(record.message for record in caplog.records if record.message.startswith("where the time went"))
    assert {line.split("  ")[0] for line in table.splitlines()[1:]} >= {"update", "rest of the steps", "profile", "all"}


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    with observed(tmp_path, [], lambda: 1), Metrics().time("time/step"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_and_cores_of_this_process_and_of_those_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {pid for pid, _ in profile._descendants(os.getpid(), "")}  # of tests before this one
    below = profile._descendants
    monkeypatch.setattr(
        profile, "_descendants", lambda pid, name: (each for each in below(pid, name) if each[0] not in others)
    )
    now = 100.0
    meter, before = SystemMeter(lambda: now), time.process_time()
    held = torch.ones(2**26)  # 0.25 GiB
    began = time.process_time()
    while time.process_time() < began + 0.5:
        pass
    now = 102.0
    first = meter.measure()
    assert first.keys() == {"system/driver/memory_gib", "system/driver/cpu_cores"}
    spent = time.process_time() - before  # half a second and the tensor, in two
    assert spent > 0.5 and first["system/driver/cpu_cores"] == pytest.approx(spent / 2, abs=0.05)
    code = (
        "import time; held = b'x' * 2**27; began = time.process_time()\nwhile time.process_time() < began + 0.3: pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code + "print(time.process_time(), flush=True); input()"], stdin=-1, stdout=-1
    ) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        spent = float(worker.stdout.readline())
        now = 103.0
        second = meter.measure()
        worker.stdin.write(b"\n")
    assert second["system/driver/memory_gib"] > 0.25 and held[0] == 1
    assert 0.125 < second["system/workers/memory_gib"] < 0.25
    assert spent > 0.3 and second["system/workers/cpu_cores"] == pytest.approx(spent, abs=0.05)
    now = 103.0 + profile.LEAST_SECONDS / 2
    assert meter.measure() == second
    now = 104.0
    assert "system/workers/memory_gib" not in meter.measure()


def test_a_rank_of_a_pool_with_a_long_name_keeps_its_number() -> None:
    assert [short_name(name) for name in ("main 0", "generation 0", "generation 12", "environments", "a b 3")] == [
        "main 0", "generati 0", "generat 12", "environmen", "a b 3"
    ]  # fmt: skip
    assert telemetry._named("generation", 12) == "generat_12"


def test_processes_are_measured_under_the_names_that_ps_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "processes"), *sys.path])
    kit = Children("kit_targets:prepare", b"given", replies=(str,), name="a b of many words")
    child = kit.start()
    kit.call(child, "pid", b"pid", 100.0)
    while not (events := kit.poll(1.0)):
        pass
    assert isinstance(events[0], Reply)
    pid, given = int(events[0].value), "whet a b of man"  # the kernel keeps 15 bytes
    assert Path(f"/proc/{pid}/comm").read_text() == f"{given}\n"
    shown = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == given
    named = [name for each, name in profile._descendants(os.getpid(), "workers") if name == "a_b_of_man"]
    assert len(named) == 3  # the template, a guard and the child
    assert SystemMeter().measure()["system/a_b_of_man/memory_gib"] > 0.005
    kit.close()
    assert "system/a_b_of_man/memory_gib" not in SystemMeter().measure()
