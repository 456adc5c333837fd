# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in worker processes: each failure is named at once, and no process stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from controller_workers import Actor, Misconfigured, Rollout

from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, DeadlineError, WorkerError

HERE = Path(__file__).parent
ACTOR = WorkerSpec("actor", Actor)


def start() -> tuple[WorkerGroup, list[int]]:
    actor = launch([ACTOR, WorkerSpec("rollout", Rollout)], ResourcePool(2), deadline_seconds=60)["actor"]
    return actor, [pid for pid, _ in actor.process()]


def running(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # ended, not yet waited for
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids: Sequence[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := running(pids):
        assert time.monotonic() < until, f"{left} still run after {seconds} s"
        time.sleep(0.02)


def test_an_exception_arrives_while_the_other_rank_waits_in_a_collective() -> None:
    actor, pids = start()
    with pytest.raises(WorkerError, match=r"^actor.add: what it is given cannot travel to another process"):
        actor.add(lambda: 1.0)
    assert running(pids) == pids  # nothing was sent, so nothing is lost
    waiting = [actor.start("weak_link", 1, "raise"), actor.start("zero", name="never reached")]
    for call in waiting:
        with pytest.raises(WorkerError) as caught:
            call.result(deadline_seconds=10)
        assert str(caught.value) == "actor rank 1: weak_link raised ValueError: no such token: 7"
        assert 'raise ValueError("no such token: 7")' in caught.value.__notes__[0]  # the traceback of over there
    assert running(pids) == []
    with pytest.raises(WorkerError, match=r"actor.add: the workers are closed \(actor rank 1: weak_link raised"):
        actor.add(1.0)
    actor.close()


def test_a_death_is_named_within_a_second() -> None:
    actor, pids = start()
    call = actor.start("weak_link", 1, "sleep")
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^actor rank 1 died by SIGKILL in weak_link; if nobody killed it"):
        call.result()
    assert time.monotonic() - began < 1
    assert running(pids) == []


def test_a_deadline_names_who_is_late_and_ends_all() -> None:
    actor, pids = start()
    call = actor.start("weak_link", 1, "sleep")
    with pytest.raises(DeadlineError, match=r"^actor rank 0, 1 did not answer weak_link within 0.3 s"):
        call.result(deadline_seconds=0.3)
    assert running(pids) == []


def test_an_error_in_a_constructor_stays_readable_and_leaves_nothing() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        launch([ACTOR, WorkerSpec("critic", Misconfigured, (1,))], ResourcePool(2), deadline_seconds=60)
    assert str(caught.value) == "actor.mini_batch_size=3 must divide data.train_batch_size=8"
    assert caught.value.__notes__[0] == "raised in critic rank 1, __init__"
    until = time.monotonic() + 2
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() == threads


MAIN = """
from controller_workers import Actor
from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
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
        ("crash", "WorkerError: actor rank 0 died with exit code 4 in weak_link; what it wrote to stderr says why"),
        ("exit", "WorkerError: actor rank 0: weak_link raised SystemExit: 3"),
    ],
)
def test_a_command_line_program_ends_with_the_failure_of_its_worker(deed: str, message: str) -> None:
    main = run_main(["-c", MAIN.format(guard="if True:", cls="Actor", deed=deed)])
    stdout, stderr = main.communicate(timeout=60)
    assert message in stderr
    assert main.returncode == 1
    assert running([int(pid) for pid in stdout.split()]) == []


@pytest.mark.slow
def test_an_unguarded_script_is_told_so(tmp_path: Path) -> None:
    _, stderr = run_main([script(tmp_path, "if True:")]).communicate(timeout=60)
    assert "died with exit code 1 in __init__" in stderr
    assert 'A script that launches workers needs `if __name__ == "__main__":`' in stderr


@pytest.mark.slow
def test_a_class_that_cannot_be_imported_is_told_so() -> None:
    _, stderr = run_main(["-c", MAIN.format(guard="if True:", cls="Own", deed="sleep")]).communicate(timeout=60)
    assert "Can't get attribute 'Own'" in stderr
    assert "must stand in a module that other processes can import" in stderr


@pytest.mark.slow
def test_a_death_between_two_calls_is_named_by_the_next() -> None:
    actor, pids = start()
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids, seconds=2)
    with pytest.raises(WorkerError, match=r"actor.add: .* closed \(rank 0 died by SIGKILL between two calls\)"):
        actor.add(1.0)


@pytest.mark.slow
def test_a_result_that_cannot_travel_is_an_error_of_the_call() -> None:
    actor, pids = start()
    with pytest.raises(WorkerError, match=r"^its result, a function, cannot travel to another process"):
        actor.unloadable()
    assert running(pids) == []
