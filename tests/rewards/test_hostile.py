# SPDX-License-Identifier: Apache-2.0
"""Score functions that attack their caller, usually by accident: an attack costs its own item, and no other."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.raising import raises
from whet.errors import RewardError
from whet.rewards.pool import RewardPool
from whet.types import Failure, RewardItem, RewardResult

pytestmark = pytest.mark.slow
RIGHT, WRONG = RewardResult(1.0, 1.0), RewardResult(0.0, 0.0)

BEHAVIOURS = '''
import ctypes, os, signal, subprocess, sys, threading, time

def descriptors():
    own = {int(each) for each in os.listdir("/proc/self/fd")}
    return sorted(own - {0, 1, 2})

def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        pass

def daemon(file):
    """A grandchild that left the session and the process group, and whose parent is gone."""
    code = (
        "import os, time\\n"
        "os.setsid()\\n"
        "if os.fork(): os._exit(0)\\n"
        f"open({file!r}, 'a').write(str(os.getpid()) + ' ')\\n"
        "time.sleep(1000)\\n"
    )
    subprocess.run([sys.executable, "-c", code])
    while not (os.path.exists(file) and os.path.getsize(file)): time.sleep(0.01)

def compute_score(solution_str, ground_truth):
    """What an answer says is done."""
    verb, _, rest = solution_str.partition(" ")
    if verb == "fork": os.fork()
    if verb == "libc_fork": ctypes.CDLL(None).fork()
    if verb == "fork_and_raise" and os.fork() == 0: raise SystemExit(0)
    if verb == "garbage":
        for each in descriptors(): attempt(os.write, each, b"x" * int(rest))
    if verb == "garbage_and_hang":
        for each in descriptors(): attempt(os.write, each, b"x")
        time.sleep(1000)
    if verb == "close":
        for each in descriptors(): attempt(os.close, each)
    if verb == "read":
        for each in descriptors():
            attempt(os.set_blocking, each, False)
            attempt(os.read, each, 100)
    if verb == "orphan": os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)
    if verb == "daemon": daemon(rest)
    if verb == "daemon_and_exit": daemon(rest); os._exit(0)
    if verb == "pid": return float(os.getpid())
    return float(solution_str == ground_truth)
'''


@pytest.fixture
def behaviours(tmp_path: Path) -> str:
    (tmp_path / "behaviours.py").write_text(BEHAVIOURS)
    return f"{tmp_path / 'behaviours.py'}:compute_score"


def item(solution_str: str, ground_truth: object = "1") -> RewardItem:
    return RewardItem("test", solution_str, ground_truth)


def make_pool(function: str, *, num_workers: int = 1, timeout_seconds: float = 10.0) -> RewardPool:
    return RewardPool(function, num_workers=num_workers, timeout_seconds=timeout_seconds, correct_threshold=1.0)


def is_running(pid: float) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("verb", ["fork", "libc_fork", "fork_and_raise"])
def test_a_copy_that_returns_pays_nobody(behaviours, verb):
    with make_pool(behaviours) as pool:
        pool.score([item("1")] * 200)  # quick items are sent several to a message by now
        outcomes = pool.score([item("1"), item(verb), item("0"), item("1"), item("0"), item("1")])
        assert outcomes == [RIGHT, WRONG, WRONG, RIGHT, WRONG, RIGHT]
        assert pool.score([item("1"), item("0")] * 100) == [RIGHT, WRONG] * 100


@pytest.mark.parametrize("verb", ["garbage 1", "garbage 7", "garbage 5000", "close", "read"])
def test_what_a_function_does_to_descriptors_that_are_not_its_own_costs_one_item(behaviours, verb):
    bad = {}
    with make_pool(behaviours, num_workers=2, timeout_seconds=20.0) as pool:
        for _ in range(3):
            start = time.monotonic()
            outcomes = pool.score([item("1")] * 20 + [item(verb, verb)] + [item("1")] * 20)
            assert time.monotonic() - start < 10.0
            bad |= {number: outcome for number, outcome in enumerate(outcomes) if outcome != RIGHT}
    if verb == "read":  # what it read was for a later item
        assert len(bad) <= 3 and all("died: exit code 1" in outcome.message for outcome in bad.values())
    else:
        [failure] = bad.values()
        assert (
            [*bad] == [20] and isinstance(failure, Failure) and (failure.source, failure.timed_out) == ("reward", False)
        )
        assert ("exit code 1" in failure.message) == (verb == "close")


def test_a_message_cut_short_holds_up_nobody_else(behaviours):
    with make_pool(behaviours, num_workers=2, timeout_seconds=4.0) as pool:
        late = pool.submit_batch([item("garbage_and_hang")])
        time.sleep(0.3)
        assert pool.score([item("1")] * 100) == [RIGHT] * 100
        assert not late.done()  # it waits for its own deadline, the others did not
        assert late.result(timeout=60) == [Failure("reward", "timed out after 4 s", timed_out=True)]


def test_a_function_that_kills_the_parent_of_its_process_costs_its_item_alone(behaviours):
    with make_pool(behaviours) as pool:
        outcomes = pool.score([item("1"), item("orphan"), item("1")])
        assert [outcomes[0], outcomes[2]] == [RIGHT, RIGHT]
        assert outcomes[1].message.startswith(
            "the reward process died: the process that guards it was killed (by the c"
        )


def test_a_process_killed_while_it_starts_is_replaced(tmp_path):
    (tmp_path / "late.py").write_text(
        "import os, pathlib, signal\n"
        "seen = pathlib.Path(__file__).with_name('seen')\n"
        "if not seen.exists(): seen.write_text(''); os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(solution_str): return 1.0\n"
    )
    with make_pool(f"{tmp_path}/late.py:f") as pool:
        assert pool.score([item("x")]) == [RIGHT]


def test_one_that_is_always_killed_while_it_starts_is_an_error(tmp_path):
    (tmp_path / "never.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with raises(RewardError, re.compile(r"never\.py:f"), found=re.compile("SIGKILL")):
        make_pool(f"{tmp_path}/never.py:f")


def test_a_replacement_runs_the_code_that_the_run_started_with(tmp_path):
    """The file, and its imports from its folder on the path, are edited while the run continues."""
    (tmp_path / "amounts.py").write_text("AMOUNT = 1.0\n")
    (tmp_path / "pays.py").write_text(
        f"import os, sys\nsys.path.append({str(tmp_path)!r})\nimport amounts\n"
        "def f(solution_str): os._exit(1) if solution_str == 'exit' else None; return amounts.AMOUNT\n"
    )
    with make_pool(f"{tmp_path}/pays.py:f", num_workers=2) as pool:
        assert pool.score([item("x")] * 4) == [RIGHT] * 4
        (tmp_path / "amounts.py").write_text("AMOUNT = 22.0\n")
        (tmp_path / "pays.py").write_text("def f(solution_str): return 22.0\n")
        died = pool.score([item("exit"), item("exit"), item("exit")])
        assert all("exit code 1" in each.message for each in died)
        assert pool.score([item("x")] * 4) == [RIGHT] * 4


@pytest.mark.parametrize("verb", ["daemon", "daemon_and_exit"])
def test_what_a_function_leaves_behind_ends_with_its_process(behaviours, tmp_path, verb):
    file = tmp_path / "pids"
    with make_pool(behaviours) as pool:
        pool.score([item(f"{verb} {file}")])
        left = [int(pid) for pid in file.read_text().split()]
        assert len(left) == 1
        if verb == "daemon":
            assert is_running(left[0])
        else:
            assert wait_until(lambda: not is_running(left[0]))
    assert wait_until(lambda: not is_running(left[0]))


SCRIPT = """
import sys
from whet.types import RewardItem
from whet.rewards.pool import RewardPool

pool = RewardPool(sys.argv[1], num_workers=2, timeout_seconds=60, correct_threshold=1.0)
print(int(pool.score([RewardItem("t", "pid", "1")])[0].reward), flush=True)
pool.score([RewardItem("t", f"daemon {sys.argv[2]}", "1")])
print("left", flush=True)
sys.stdin.read()
"""


def test_what_a_function_leaves_behind_ends_with_a_killed_program(behaviours, tmp_path):
    file = tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, behaviours, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert process.stdout.readline() == "left\n"
    pids = [worker, *(int(pid) for pid in file.read_text().split())]
    assert len(pids) == 2 and all(map(is_running, pids))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=3.0)
