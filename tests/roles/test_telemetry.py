# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whet import devices
from whet.compiled import compiler
from whet.config import SFTConfig, load_config
from whet.config.cluster import ClusterConfig, PoolConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import Placement, WorkerSpec
from whet.errors import LostReplicaError
from whet.roles import telemetry
from whet.roles.telemetry import MeasuredWorker, asked_of_trained, shares_of_peak, use_of_ranks
from whet.tracking import profile
from whet.trainers.sft import train_sft

POOLS = {"train": PoolConfig(processes=2, roles=["actor"]), "sample": PoolConfig(processes=1, roles=["rollout"])}


def group(*answers: dict[str, float] | Exception | None) -> Any:
    """A worker group whose ranks give these answers; None: none at all."""

    def start_on(rank: int, method: str, whole: bool) -> Any:
        assert method == "system_use"
        reply: Future[Any] = Future()
        answer = answers[rank]
        if isinstance(answer, dict) and not whole:
            answer = {name: value for name, value in answer.items() if name.startswith("accelerator")}
        if isinstance(answer, Exception):
            reply.set_exception(answer)
        elif answer is not None:
            reply.set_result(answer)
        return SimpleNamespace(replies={rank: reply})

    return SimpleNamespace(world_size=len(answers), start_on=start_on)


def test_every_pool_is_asked_once_and_nothing_waits_for_a_rank_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 0.1)
    use = {"memory_gib": 2.0, "cpu_cores": 1.5, "accelerator_gib": 30.0}
    roles = {"actor": group(use, LostReplicaError("gone")), "rollout": group(use), "ref": group(use, None)}
    remote = ClusterConfig(backend="ray", placement=POOLS)
    began = time.monotonic()
    named = {f"system/sample_0/{name}": value for name, value in use.items()}
    assert use_of_ranks(roles, remote) == {f"system/train_0/{name}": value for name, value in use.items()} | named
    assert time.monotonic() - began < 5
    here = ClusterConfig(placement=POOLS)  # the meter of the loop has memory and cores
    assert use_of_ranks(roles, here) == {}  # no rank is asked where there is no accelerator
    monkeypatch.setattr(devices, "count", lambda: 2)
    assert use_of_ranks(roles, here) == {
        "system/train_0/accelerator_gib": 30.0,
        "system/sample_0/accelerator_gib": 30.0,
    }


def test_shares_of_the_peak_by_process_and_in_all() -> None:
    answers = {"actor": [6e12, 2e12], "critic": [2e12, 2e12], "ref": [1e12]}
    roles: Any = {role: SimpleNamespace(call={"f": found}.__getitem__) for role, found in answers.items()}
    remote = ClusterConfig(placement={"train": PoolConfig(processes=2, roles=["actor", "critic", "rollout"])})
    assert asked_of_trained(roles, remote, "f") == {"train_0": [6e12, 2e12], "train_1": [2e12, 2e12]}
    here: Any = {"actor": SimpleNamespace(call={"f": [3.0]}.__getitem__)}
    assert asked_of_trained(here, ClusterConfig(), "f") == {"driver": [3.0]}
    assert shares_of_peak({"train_0": 8e12, "train_1": 4e12}, {"train_0": 4e12, "train_1": 2e12}, 4.0) == {
        "system/train_0/mfu": 0.5,
        "system/train_1/mfu": 0.5,
        "perf/mfu": 0.5,
    }


class Busy(MeasuredWorker):
    """A rank with a program of its own, which has memory and works."""

    is_replica = True

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        code = "held = b'x' * 2**28\nfor _ in range(10**7): pass\nprint(1, flush=True); input()"
        self._program = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
        assert self._program.stdout is not None and self._program.stdout.readline() == b"1\n"

    def close(self) -> None:
        self._program.communicate(b"\n")


@pytest.mark.slow
def test_ranks_of_ray_are_measured_with_the_programs_that_they_start() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    pools = {"busy": PoolConfig(processes=2, roles=["busy"])}
    cluster = ClusterConfig(backend="ray", placement=pools)
    roles = launch_roles([WorkerSpec("busy", Busy)], cluster)
    try:
        found = use_of_ranks(roles, cluster)
    finally:
        roles["busy"].close()
    assert set(found) == {f"system/busy_{rank}/{name}" for rank in (0, 1) for name in ("memory_gib", "cpu_cores")}
    for rank in (0, 1):
        assert found[f"system/busy_{rank}/memory_gib"] > 0.25 + 0.1  # of the program, and of Python with torch
        assert found[f"system/busy_{rank}/cpu_cores"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_processes_that_train_are_recorded_and_compute_the_same(
    backend: str, model_folder: Path, tmp_path: Path
) -> None:
    if backend == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(8)]
    common = {"model.path": str(model_folder), "data.apply_chat_template": False, "data.train_batch_size": 4}
    common |= {"data.max_length": 32}
    common |= {
        "cluster.backend": backend,
        "cluster.processes": 2,
        "trainer.total_steps": 2,
        "trainer.logger": ["jsonl"],
    }
    for name, steps in (("plain", []), ("profiled", [2])):
        where = {"trainer.run_dir": str(tmp_path / name), "trainer.profile": steps}
        train_sft(load_config(SFTConfig, None, common | where, given={"data"}).config, data=rows)
    plain, profiled = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("plain", "profiled"))
    assert plain == profiled
    found = sorted(path.name for path in (tmp_path / "profiled/profile").glob("*.trace.json.gz"))
    assert found == [f"step_000002.{name}trace.json.gz" for name in ("main_0.", "main_1.", "")]
    for rank in (0, 1):
        with gzip.open(tmp_path / f"profiled/profile/step_000002.main_{rank}.trace.json.gz", "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert names.count("aten::mm") > 10  # forward and backward passes of one step


def test_a_device_that_only_a_program_below_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    assert profile.accelerator_use(torch.device("cpu")) == profile.accelerator_use() == {}
    monkeypatch.setattr(profile, "by_driver", {device: (0.4, 3 * 2**30), None: (0.5, 4 * 2**30)}.__getitem__)
    assert profile.accelerator_use(device) == {"accelerator_gib": 3.0, "accelerator_use": 0.4}
    assert os.getpid() in profile._processes("rank")["rank"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 2**30)  # it has tensors itself
    assert profile.accelerator_use(device) == {"accelerator_gib": 1.0, "accelerator_use": 0.4}
    assert profile.accelerator_use() == {"accelerator_gib": 1.0, "accelerator_use": 0.5}
    monkeypatch.setattr(profile, "by_driver", {}.__getitem__)  # a driver that does not tell
    assert profile.accelerator_use(device) == {"accelerator_gib": 1.0}


DRIVER = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = (void*)(long)(index + 1); return index > 1; }
int nvmlDeviceGetUtilizationRates(void* handle, unsigned* rates) {
    rates[0] = 36 + (int)(long)handle; rates[1] = 99; return 0; }
int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* bytes) {
    bytes[0] = 80; bytes[1] = 50; bytes[2] = 28 + (int)(long)handle; return 0; }
"""


def test_the_library_of_nvidia_s_driver_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in C with its functions: the handle of device 1 is 2."""
    path = compiler()
    if path is None:
        pytest.skip("there is no compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    made = tmp_path / "libdriver.so"
    subprocess.run([path, "-x", "c", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "driver.c")], check=True)
    monkeypatch.setattr(profile, "NVML", str(made))
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: device.index)
    assert profile.by_driver(torch.device("cuda", 1)) == (0.38, 30)
    assert profile.by_driver(torch.device("cuda", 0)) == (0.37, 29)
    with pytest.raises(OSError, match="2"):
        profile.by_driver(torch.device("cuda", 2))
    monkeypatch.setattr(profile, "NVML", str(tmp_path / "none.so"))
    assert profile.accelerator_use(torch.device("cuda", 0)) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA A10", 125e12),
        ("Tesla T4", 0.0),
    ],
)
def test_the_peak_of_a_card_by_its_name(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, value in {"is_available": True, "is_initialized": True, "get_device_name": name}.items():
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
    assert profile.peak_flops() == peak
