# SPDX-License-Identifier: Apache-2.0
"""Programs whose workers are processes; failures in workers on any backend are in test_failures.py."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from controller_workers import running, wait_until_gone

HERE = Path(__file__).parent

MAIN = """
from controller_workers import Actor
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool
from whet.controller.worker import WorkerSpec

class Own(Actor):
    pass

{guard}
    group = launch([WorkerSpec("actor", {cls})], ResourcePool(2), deadline_seconds=60)["actor"]
    print(*(pid for pid, _ in group.process()), flush=True)
    group.weak_link(0, "{deed}")
"""


def run_main(arguments: Sequence[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def script(folder: Path, guard: str) -> str:
    path = folder / "script.py"
    path.write_text(MAIN.format(guard=guard, cls="Own", deed="sleep"))
    return str(path)


@pytest.mark.slow
def test_workers_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    with run_main([script(tmp_path, 'if __name__ == "__main__":')]) as main:  # a class of the script itself
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 2
        assert running(pids) == pids
        main.kill()
        wait_until_gone(pids, seconds=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("crash", "LostWorkerError: actor rank 0: .*weak_link: exit code 4;.* stderr"),
        ("exit", "WorkerError: actor rank 0, weak_link: .*SystemExit: 3"),
    ],
)
def test_a_command_line_program_ends_with_the_failure_of_its_worker(deed: str, message: str) -> None:
    main = run_main(["-c", MAIN.format(guard="if True:", cls="Actor", deed=deed)])
    stdout, stderr = main.communicate(timeout=60)
    assert re.search(message, stderr)
    assert main.returncode == 1
    assert running([int(pid) for pid in stdout.split()]) == []


@pytest.mark.slow
def test_an_unguarded_script_is_told_so(tmp_path: Path) -> None:
    _, stderr = run_main([script(tmp_path, "if True:")]).communicate(timeout=60)
    assert re.search('__init__: exit code 1;.*`if __name__ == "__main__":`', stderr)


@pytest.mark.slow
def test_a_class_that_cannot_be_imported_is_told_so() -> None:
    _, stderr = run_main(["-c", MAIN.format(guard="if True:", cls="Own", deed="sleep")]).communicate(timeout=60)
    assert "Can't get attribute 'Own'" in stderr
    assert re.search(r"WorkerError: actor rank \d, __init__: arguments: .*expected .*\bmodule", stderr)
