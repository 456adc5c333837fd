# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from whet import devices
from whet.config.cluster import ClusterConfig
from whet.devices import MemoryUse
from whet.planning import machine
from whet.planning.machine import FreeMemory, existing, free_accelerator, free_disk, free_memory


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and a /sys/fs/cgroup: 8 kB free."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc" / "meminfo", "MemTotal:   16 kB\nMemAvailable:   8 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def bytes_free() -> int:
    free = free_memory()
    assert free is not None
    return free.bytes


def test_without_control_groups_it_is_the_machines(system: Path) -> None:
    assert bytes_free() == 8192


def test_the_tightest_group_counts_and_file_pages_are_given_back(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "0::/box/job\n")
    for folder, limit in ((system / "cgroup" / "box" / "job", "max"), (system / "cgroup" / "box", "5000")):
        write(folder / "memory.max", f"{limit}\n")
        write(folder / "memory.current", "3000\n")
        write(folder / "memory.stat", "anon 2000\ninactive_file 900\n")
    assert bytes_free() == 5000 - 3000 + 900
    free = free_memory()
    assert free is not None and free.bound.endswith("cgroup/box")


def test_groups_of_the_first_version(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "3:cpuset:/x\n4:cpu,memory:/job\n0::/\n")
    folder = system / "cgroup" / "memory" / "job"
    write(folder / "memory.limit_in_bytes", "4000\n")
    write(folder / "memory.usage_in_bytes", "1000\n")
    assert bytes_free() == 3000


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert free_disk(tmp_path / "a" / "b") > 0


def test_the_accelerator_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator of each process, or none; on a Ray cluster the ones that it reserves, visible here or not."""
    monkeypatch.setattr(devices, "count", lambda: 2)
    both = (MemoryUse(5, 9, 0, 0), MemoryUse(3, 8, 0, 0))
    monkeypatch.setattr(devices, "memory", both.__getitem__)
    assert free_accelerator(ClusterConfig(processes=2)) == FreeMemory(3, "each accelerator", total=8)
    assert free_accelerator(ClusterConfig()) == FreeMemory(5, "each accelerator", total=9)
    monkeypatch.setattr(devices, "memory", lambda index: None)  # such as MPS
    unknown = free_accelerator(ClusterConfig())
    assert unknown is not None and unknown.bytes > 2**60 and unknown.total == 0
    assert free_accelerator(ClusterConfig(processes=3)) is None
    assert free_accelerator(ClusterConfig(backend="ray")) is None
    monkeypatch.setattr(devices, "count", lambda: 0)
    found = free_accelerator(ClusterConfig(backend="ray", n_gpus_per_node=8))
    assert found is not None and found.bytes > 2**60
