# SPDX-License-Identifier: Apache-2.0
"""Programs that start a Ray of their own: how their code reaches the actors, and how they end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from controller_workers import wait_until_gone

from whet.controller.local_workers import PUT_MAIN

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
from pathlib import Path
from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import register
from whet.controller.launch import launch_roles
from whet.controller.worker import Worker, WorkerSpec
from whet.registry import POLICY_LOSSES, load_target, register_policy_loss

@register_policy_loss("own_loss")
def own_loss(log_probs, advantages, response_mask, *, scale=1.0):
    return -scale * advantages * log_probs

class Own(Worker):
    @register()
    def look(self):
        beside = load_target("beside.py:answer")()  # a relative path, as a config has it
        return os.getpid(), POLICY_LOSSES["own_loss"].columns, beside, str(Path.cwd())

{guard}
    cluster = ClusterConfig(backend="ray", address="{address}", processes=2)
    group = launch_roles([WorkerSpec("actor", Own)], cluster)["actor"]
    found = group.look()
    assert {{each[1:] for each in found}} == {{(("log_probs", "advantages", "response_mask"), 42, os.getcwd())}}, found
    print(*(pid for pid, *_ in found), flush=True)
    {deed}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A project of two files."""
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    yield tmp_path


def environment_of(folder: Path) -> dict[str, str]:
    """Of a user who has set nothing of Ray, and whose home is a folder of the test's own."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, "HOME": str(home)}


def start(folder: Path, guard: str, deed: str, address: str = "local") -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM.format(guard=guard, deed=deed, address=address))
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment_of(folder), "PYTHONPATH": str(ROOT)},
    )


GUARD = 'if __name__ == "__main__":'


def test_own_classes_functions_and_files_are_found_and_an_orderly_end_leaves_nothing(folder: Path) -> None:
    with start(folder, GUARD, "group.close()") as program:
        before = ray_processes_of(program)
        stdout, stderr = program.communicate(timeout=120)
    assert program.returncode == 0, stderr
    wait_until_gone([*map(int, stdout.split()), *before], seconds=20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_however_the_program_ends_nothing_is_left(folder: Path, number: signal.Signals) -> None:
    with start(folder, GUARD, "time.sleep(100)") as program:
        assert program.stdout is not None and program.stderr is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2, program.stderr.read()
        everything = [*pids, *ray_processes_of(program)]
        assert len(everything) > 5  # the control store, a raylet, ...
        program.send_signal(number)
        wait_until_gone(pids, seconds=20)
        if number == signal.SIGKILL:  # Ray's agents look for the control store for a minute before they end
            wait_until_gone(everything, seconds=120)


def test_an_unguarded_script_is_told_so(folder: Path) -> None:
    with start(folder, "if True:", "group.close()") as program:
        _, stderr = program.communicate(timeout=120)
    assert "WorkerError: script: " in stderr and PUT_MAIN in stderr


def ray_processes_of(program: subprocess.Popen[str]) -> list[int]:
    """All below the program: Ray's own and the workers."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, level = [], [program.pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


@contextmanager
def head(folder: Path, port: int, **variables: str) -> Iterator[str]:
    """`ray start --head` of docs/cluster.md, as the same user.  Yields the address."""
    ray = str(Path(sys.executable).with_name("ray"))
    session = tempfile.mkdtemp(dir="/tmp")  # a socket's path has to be short
    command = [ray, "start", "--head", f"--port={port}", "--num-cpus=2", f"--object-store-memory={100 * 2**20}"]
    command += ["--block", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={session}"]
    environment = environment_of(folder) | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as cluster:
        assert cluster.stdout is not None
        while "Ray runtime started" not in cluster.stdout.readline():
            assert cluster.poll() is None
        try:
            yield f"127.0.0.1:{port}"
        finally:
            cluster.terminate()
    shutil.rmtree(session, ignore_errors=True)


@pytest.mark.parametrize("token", ["", "0123456789abcdef" * 4])
def test_a_cluster_of_its_own_and_then_one_by_address(folder: Path, token: str) -> None:
    """Without a variable of Ray's, with and without a token in the home folder; no run leaves or changes one."""
    file = Path(environment_of(folder)["HOME"], ".ray", "auth_token")
    if token:
        file.parent.mkdir()
        file.write_text(token)
    with start(folder, GUARD, "group.close()") as program:
        _, stderr = program.communicate(timeout=120)
    assert program.returncode == 0, stderr
    with head(folder, 6392) as address, start(folder, GUARD, "group.close()", address) as program:
        _, stderr = program.communicate(timeout=120)
    assert program.returncode == 0, stderr
    assert (file.read_text() if file.exists() else "") == token


def test_a_wrong_token_is_told(folder: Path) -> None:
    other = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
    with head(folder, 6393, **other) as address, start(folder, GUARD, "group.close()", address) as program:
        _, stderr = program.communicate(timeout=120)
    assert program.returncode != 0
    assert f"ConfigError: Ray cluster at {address}: " in stderr and "~/.ray/auth_token" in stderr


def test_nodes_without_whet_are_told_so(folder: Path) -> None:
    stand_in = folder / "node" / "whet" / "__init__.py"  # comes before the installed one
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text("raise ModuleNotFoundError(\"No module named 'whet'\")")
    there = {"PYTHONPATH": str(folder / "node")}
    with head(folder, 6391, **there) as address, start(folder, GUARD, "group.close()", address) as program:
        _, stderr = program.communicate(timeout=120)
    assert "ModuleNotFoundError: No module named 'whet'" in stderr
