# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time

import torch

from whet.tracking.system import SystemMeter


def test_memory_and_cores_of_this_process_and_of_those_below_it() -> None:
    now = 100.0
    meter = SystemMeter(lambda: now)
    held = torch.ones(2**26)  # 0.25 GiB
    began = time.process_time()
    while time.process_time() < began + 0.5:
        pass
    now = 102.0
    first = meter.measure()
    assert first.keys() == {"system/driver/memory_gib", "system/driver/cpu_cores"}
    assert 0.2 <= first["system/driver/cpu_cores"] <= 0.6  # half a second and the tensor, in two
    code = (
        "import time; held = b'x' * 2**27; began = time.process_time()\nwhile time.process_time() < began + 0.3: pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", code + "print(flush=True); input()"], stdin=-1, stdout=-1) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        worker.stdout.readline()
        now = 103.0
        second = meter.measure()
        worker.stdin.write(b"\n")
    assert second["system/driver/memory_gib"] > 0.25 and held[0] == 1
    assert 0.125 < second["system/workers/memory_gib"] < 0.25
    assert 0.25 <= second["system/workers/cpu_cores"] <= 0.6
    assert "system/workers/memory_gib" not in meter.measure()
