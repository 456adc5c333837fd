# SPDX-License-Identifier: Apache-2.0
"""The pool against functions that stall, crash, print, and bring children of their own. All processes are real."""

import asyncio
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.raising import check_fields, raises
from whet.errors import RegistryError, RewardError
from whet.registry import PARTS, REWARDS, load_target, register_reward
from whet.rewards.pool import RewardPool
from whet.rewards.result import RESULT
from whet.rewards.worker import prepare
from whet.types import Failure, RewardItem, RewardResult

RIGHT, WRONG = RewardResult(1.0, 1.0), RewardResult(0.0, 0.0)

BEHAVIOURS = '''
import ctypes, os, re, signal, subprocess, sys, time

def compute_score(solution_str, ground_truth):
    """What an answer says is done."""
    verb, _, rest = solution_str.partition(" ")
    if verb == "spin":
        while True: pass
    if verb == "sleep": time.sleep(float(rest))
    if verb == "regex": re.match("(a+)+$", "a" * 60 + "b")
    if verb == "exit": os._exit(3)
    if verb == "segv": ctypes.string_at(0)
    if verb == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if verb == "raise": raise ValueError(rest)
    if verb == "pid": return float(os.getpid())
    if verb == "print":
        print("from python")
        os.write(1, b"from the file descriptor\\n")
        subprocess.run(["echo", "from a child"])
    if verb == "child": return float(subprocess.Popen(["sleep", "1000"]).pid)
    if verb == "child_and_hang":
        with open(rest, "w") as file: file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)
    if verb == "torch": return float("torch" in sys.modules)
    if verb == "stdin": return float(len(sys.stdin.read()))
    return float(solution_str == ground_truth)

def every(reward_inputs):
    return [compute_score(each["response"], each["ground_truth"]) for each in reward_inputs]
'''


@pytest.fixture
def behaviours(tmp_path: Path) -> str:
    (tmp_path / "behaviours.py").write_text(BEHAVIOURS)
    return str(tmp_path / "behaviours.py")


def item(solution_str: str, ground_truth: object = "1", **fields: object) -> RewardItem:
    return RewardItem("test", solution_str, ground_truth, **fields)


def make_pool(function, *, num_workers=1, timeout_seconds=10.0, **kwargs) -> RewardPool:
    return RewardPool(
        function, num_workers=num_workers, timeout_seconds=timeout_seconds, correct_threshold=1.0, kwargs=kwargs
    )


def is_running(pid: float) -> bool:
    """Whether the process is there and no zombie."""
    stat = Path(f"/proc/{int(pid)}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# The normal run.


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_outcomes_are_in_order(behaviours, num_workers):
    items = [item(str(i % 7), str(i % 5)) for i in range(500)]
    with make_pool(f"{behaviours}:compute_score", num_workers=num_workers) as pool:
        assert pool.score(items) == [RIGHT if i % 7 == i % 5 else WRONG for i in range(500)]
        assert pool.score([]) == []
        assert pool.score(items[:1]) == [RIGHT]


@pytest.mark.slow
def test_shipped_functions_by_name_with_options():
    with make_pool("gsm8k", method="strict", format_score=0.1) as pool:
        answers = ["#### 72", "#### 71", "72"]
        assert [outcome.reward for outcome in pool.score([item(a, "72") for a in answers])] == [1.0, 0.1, 0.0]
    with make_pool("math_verify") as pool:
        assert pool.score([item(r"\boxed{0.5}", r"\frac12"), item("2", "3")]) == [
            RewardResult(1.0, 1.0, extracted="0.5"),
            RewardResult(0.0, 0.0, extracted="2"),
        ]


@pytest.mark.slow
def test_a_sympy_call_that_stalls_is_killed():
    with make_pool("math", timeout_seconds=3.0) as pool:
        stalled, fine = pool.score(
            [item(r"\boxed{f(x)+(w+x+y+z)^{90}}", "f(x)+x^2"), item(r"\boxed{\frac{6}{2}}", "3")]
        )
    assert stalled == Failure("reward", "timed out after 3 s", timed_out=True)
    assert fine == RewardResult(1.0, 1.0, extracted=r"\frac{6}{2}")


def test_a_batch_does_not_wait_for_one_before_it(behaviours):
    with make_pool(f"{behaviours}:compute_score", num_workers=2) as pool:
        slow, quick = pool.submit_batch([item("sleep 0.5")]), pool.submit_batch([item("1")])
        assert quick.result(timeout=10) == [RIGHT]
        assert not slow.done()
        assert slow.result(timeout=10) == [WRONG]


@pytest.mark.slow
def test_threads_may_score_at_the_same_time(behaviours):
    results = {}
    with make_pool(f"{behaviours}:compute_score", num_workers=2) as pool:

        def score(i):
            results[i] = pool.score([item(str(j), str(i)) for j in range(50)])

        threads = [threading.Thread(target=score, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {i: [RIGHT if j == i else WRONG for j in range(50)] for i in range(8)}


def test_a_worker_has_no_torch_and_no_stdin(behaviours):
    with make_pool(f"{behaviours}:compute_score") as pool:
        assert pool.score([item("torch"), item("stdin")]) == [WRONG, WRONG]


def test_what_a_function_prints_goes_to_stderr(behaviours, capfd):
    with make_pool(f"{behaviours}:compute_score") as pool:
        assert pool.score([item("print"), item("1")]) == [WRONG, RIGHT]
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("from")] == [
        "from python",
        "from the file descriptor",
        "from a child",
    ]


@pytest.mark.slow
def test_trivial_items_are_scored_at_five_thousand_a_second(behaviours):
    items = [item("1")] * 5000
    with make_pool(f"{behaviours}:compute_score", num_workers=2) as pool:
        seconds = []
        for _ in range(10):  # on a busy machine one of them has the processor
            start = time.perf_counter()
            assert pool.score(items) == [RIGHT] * len(items)
            seconds.append(time.perf_counter() - start)
            if seconds[-1] < 1.0:
                break
    assert min(seconds) < 1.0, f"{len(items) / min(seconds):.0f} items a second"


# Items that go wrong.


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["spin", "sleep 1000", "regex"])
def test_a_late_item_is_killed_in_time_and_harms_no_other(behaviours, verb):
    with make_pool(f"{behaviours}:compute_score", num_workers=2, timeout_seconds=0.5) as pool:
        pool.score([item("1")] * 200)  # quick items are sent several to a message by now
        start = time.monotonic()
        outcomes = pool.score([item("1")] * 20 + [item(verb)] + [item("1")] * 20)
        assert time.monotonic() - start < 5.0
    assert outcomes == [RIGHT] * 20 + [Failure("reward", "timed out after 0.5 s", timed_out=True)] + [RIGHT] * 20


@pytest.mark.slow
def test_an_answer_in_time_counts_however_late_it_is_read(behaviours):
    """While this thread holds the interpreter lock past the deadline, the one that owns the processes cannot look."""
    interval = sys.getswitchinterval()
    with make_pool(f"{behaviours}:compute_score", timeout_seconds=0.5) as pool:
        future = pool.submit_batch([item("sleep 0.2", "sleep 0.2")])
        time.sleep(0.1)  # the item is on its way
        sys.setswitchinterval(10.0)
        try:
            end = time.monotonic() + 0.8
            while time.monotonic() < end:
                pass
        finally:
            sys.setswitchinterval(interval)
        assert future.result(timeout=10) == [RIGHT]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "ended"), [("exit", "exit code 3"), ("segv", "SIGSEGV"), ("killed", "SIGKILL")])
def test_a_worker_that_dies_is_noticed_at_once_and_harms_no_other_item(behaviours, verb, ended):
    with make_pool(f"{behaviours}:compute_score", num_workers=2, timeout_seconds=60.0) as pool:
        pool.score([item("1")] * 200)
        start = time.monotonic()
        outcomes = pool.score([item("1")] * 20 + [item(verb), item("1"), item(verb)] + [item("1")] * 20)
        assert time.monotonic() - start < 10.0
    bad = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert outcomes == [RIGHT] * 20 + [bad[0], RIGHT, bad[1]] + [RIGHT] * 20
    for failure in bad:
        assert failure.source == "reward" and ended in failure.message


@pytest.mark.slow
def test_an_exception_in_one_item_of_a_thousand_fails_that_one(behaviours):
    items = [item("raise no good" if i == 617 else "1") for i in range(1000)]
    with make_pool(f"{behaviours}:compute_score", num_workers=2) as pool:
        outcomes = pool.score(items)
    assert [i for i, outcome in enumerate(outcomes) if outcome != RIGHT] == [617]
    assert outcomes[617].source == "reward"
    assert outcomes[617].message.startswith("ValueError: no good (") and "behaviours.py:" in outcomes[617].message


def test_what_a_late_function_started_ends_with_it(behaviours, tmp_path):
    with make_pool(f"{behaviours}:compute_score", timeout_seconds=0.5) as pool:
        (outcome,) = pool.score([item(f"child_and_hang {tmp_path / 'pid'}")])
    assert outcome == Failure("reward", "timed out after 0.5 s", timed_out=True)
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(child))


class Unpicklable:
    def __reduce__(self):
        raise TypeError("stays here")


class NotFoundThere:
    """Pickled under a name that no other process can import."""


NotFoundThere.__module__ = "no_such_module"


def test_an_item_that_cannot_travel_is_a_failure_and_harms_no_other(behaviours, monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_module", sys.modules[__name__])
    items = [item("1"), item("1", extra_info={"x": Unpicklable()}), item("1", NotFoundThere()), item("1")]
    with make_pool(f"{behaviours}:compute_score") as pool:
        outcomes = pool.score(items)
    assert [outcome == RIGHT for outcome in outcomes] == [True, False, False, True]
    assert "TypeError: stays here" in outcomes[1].message
    assert "ModuleNotFoundError" in outcomes[2].message


def test_results_that_are_no_numbers_are_failures(tmp_path):
    (tmp_path / "odd.py").write_text(
        "def f(solution_str): return {'none': None, 'nan': float('nan')}.get(solution_str, 1)"
    )
    with make_pool(f"{tmp_path}/odd.py:f") as pool:
        none, nan, fine = pool.score([item("none"), item("nan"), item("x")])
    assert "None (NoneType)" in none.message and fine == RIGHT
    assert "=nan;" in nan.message and none.key == nan.key == RESULT


# Functions of all answers at once.


def test_a_function_of_all_answers_gets_one_score_call_whole(tmp_path):
    (tmp_path / "ranks.py").write_text(
        "def f(solution_strs): return [sorted(solution_strs).index(s) for s in solution_strs]"
    )
    with make_pool(f"{tmp_path}/ranks.py:f", num_workers=2) as pool:
        assert [outcome.reward for outcome in pool.score([item(s) for s in "dacb"])] == [3.0, 0.0, 2.0, 1.0]
        assert pool.submit_batch([item("d")]).result(timeout=10) == [WRONG]
        assert pool.score([]) == []


def test_its_deadline_counts_the_answers_and_it_fails_as_a_whole(behaviours):
    with make_pool(f"{behaviours}:every", timeout_seconds=0.4) as pool:
        assert pool.score([item("sleep 0.5"), item("1"), item("1")]) == [WRONG, RIGHT, RIGHT]
        assert (
            pool.score([item("1"), item("sleep 1000")])
            == [Failure("reward", "timed out after 0.8 s", timed_out=True)] * 2
        )
        assert pool.score([item("1")]) == [RIGHT]


@pytest.mark.slow
def test_a_data_proto_function_in_a_process(tmp_path):
    (tmp_path / "tensors.py").write_text(
        "import torch\n"
        "def compute_score(data):\n"
        "    truth = torch.tensor([float(each) for each in data.ground_truth])\n"
        "    return (data.batch['responses'] == 2) * truth[:, None]\n"
    )
    items = [item("a", 1, response_ids=(2, 3)), item("b", 3, response_ids=(4, 2, 2))]
    with make_pool(f"{tmp_path}/tensors.py:compute_score", timeout_seconds=60.0) as pool:
        assert pool.score(items) == [
            RewardResult(1.0, 1.0, {}, (1.0, 0.0)),
            RewardResult(6.0, 1.0, {}, (0.0, 3.0, 3.0)),
        ]


# How a function gets to the processes.


def test_a_closure_travels(tmp_path):
    table = {"a": 1.0}
    with make_pool(lambda solution_str: table[solution_str] + (os.getpid() != parent)) as pool:
        parent_differs = pool.score([item("a")])
    assert parent_differs == [RewardResult(2.0, 1.0)]


parent = os.getpid()


def test_a_function_from_a_file_travels_as_itself(behaviours):
    function = load_target(f"{behaviours}:compute_score")
    with make_pool(function) as pool:
        assert pool.score([item("1"), item("2")]) == [RIGHT, WRONG]


@pytest.mark.slow
def test_a_name_registered_in_this_process_travels(monkeypatch):
    monkeypatch.setattr(REWARDS, "_live", dict(REWARDS._live))

    @register_reward("test_half", aliases={"test_third": {"share": 3.0}})
    def share_of(solution_str, extra_info=None, share=2.0):
        return float(solution_str) / share

    with make_pool("test_half") as pool:
        assert pool.score([item("6")]) == [RewardResult(3.0, 1.0)]
    with make_pool("test_third") as pool:
        assert pool.score([item("6")]) == [RewardResult(2.0, 1.0)]
    with make_pool("test_third", share=6.0) as pool:
        assert pool.score([item("6")]) == [RewardResult(1.0, 1.0)]


def test_a_relative_path_is_relative_to_where_the_pool_was_made(behaviours, monkeypatch):
    monkeypatch.chdir(Path(behaviours).parent)
    with make_pool("behaviours.py:compute_score") as pool:
        monkeypatch.chdir("/")
        pool.score([item("exit")])
        assert pool.score([item("1")]) == [RIGHT]


def test_a_module_on_the_python_path_of_this_process_is_found(behaviours, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(behaviours).parent))
    with make_pool("behaviours:compute_score") as pool:
        assert pool.score([item("1")]) == [RIGHT]


def test_async_functions_in_processes(tmp_path):
    (tmp_path / "later.py").write_text(
        textwrap.dedent("""
        import asyncio
        async def one(solution_str):
            await asyncio.sleep(float(solution_str))
            return 1.0
        async def every(solution_strs):
            return await asyncio.gather(*map(one, solution_strs))
        """)
    )
    with make_pool(f"{tmp_path}/later.py:one", timeout_seconds=0.5) as pool:
        assert pool.score([item("0"), item("1000"), item("0")]) == [
            RIGHT,
            Failure("reward", "timed out after 0.5 s", timed_out=True),
            RIGHT,
        ]
    with make_pool(f"{tmp_path}/later.py:every") as pool:
        start = time.monotonic()
        assert pool.score([item("0.2")] * 100) == [RIGHT] * 100
        assert time.monotonic() - start < 5.0


def test_a_function_that_cannot_travel_scores_in_a_thread_and_says_so(caplog):
    lock, stalled = threading.Lock(), threading.Event()

    def holds_a_lock(solution_str, ground_truth):
        with lock:
            calls.append(threading.current_thread())
        if solution_str == "stall":
            stalled.wait(30)
        return float(solution_str == ground_truth)

    calls = []
    with caplog.at_level(logging.WARNING), make_pool(holds_a_lock, timeout_seconds=0.5) as pool:
        assert "holds_a_lock" in caplog.text and "cannot be stopped" in caplog.text and "lock" in caplog.text
        outcomes = pool.score([item("1"), item("stall"), item("1"), item("2")])
        assert pool.score([]) == []
    assert outcomes[1] == Failure("reward", "timed out after 0.5 s (its thread cannot be stopped)", timed_out=True)
    assert [outcomes[0], *outcomes[2:]] == [RIGHT, RIGHT, WRONG]
    assert calls[0] is calls[1] is not calls[2] and calls[2] is calls[3]
    assert threading.main_thread() not in calls
    stalled.set()
    with raises(RewardError, "reward pool"):
        pool.score([item("1")])


def test_an_async_function_goes_on_in_a_thread_after_one_call_was_late():
    lock = threading.Lock()

    async def holds_a_lock(solution_str):
        with lock:
            await asyncio.sleep(float(solution_str))
        return 1.0

    with make_pool(holds_a_lock, timeout_seconds=0.5) as pool:
        quick, late = pool.score([item("0"), item("1")])
        assert quick == RIGHT and "timed out" in late.message
        time.sleep(0.8)  # the late one lets the lock go
        assert pool.score([item("0")]) == [RIGHT]


@pytest.mark.slow
def test_hanging_items_stop_the_others_for_one_deadline_at_most(behaviours):
    verbs = ["spin"] * 4 + ["1"] * 20 + ["spin", "spin"] + ["1"] * 20
    with make_pool(f"{behaviours}:compute_score", num_workers=2, timeout_seconds=1.0) as pool:
        ends, start = [time.monotonic()], time.monotonic()
        pending = [pool.submit_batch([item(each)]) for each in verbs]
        for each in pending:
            each.add_done_callback(lambda _: ends.append(time.monotonic()))
        outcomes = [each.result()[0] for each in pending]
    assert [isinstance(each, Failure) for each in outcomes] == [verb == "spin" for verb in verbs]
    assert max(after - before for before, after in itertools.pairwise(ends)) < 1.0 + 1.5  # and another process
    assert time.monotonic() - start < 3 * (1.0 + 1.5)  # six hang, in two processes


# Starting and ending.


def test_a_file_that_cannot_be_imported_is_an_error_at_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package_anywhere\ndef compute_score(solution_str): return 1.0")
    with pytest.raises(RewardError) as caught:
        make_pool(f"{tmp_path}/broken.py:compute_score", num_workers=2)
    check_fields(caught.value, re.compile(r"loading the reward function .*broken\.py:compute_score"))
    for said in (f"{tmp_path}/broken.py", "no_such_package_anywhere", "PYTHONPATH"):
        assert said in str(caught.value)


def test_what_a_file_raises_when_it_is_imported_is_shown_as_python_shows_it(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\ndef compute_score(solution_str): return 1.0")
    with pytest.raises(RewardError) as caught:
        make_pool(f"{tmp_path}/broken.py:compute_score", num_workers=2)
    for said in ("Traceback", "line 1", "ZeroDivisionError"):
        assert said in str(caught.value)


def test_a_file_that_kills_its_process_is_an_error_at_the_start(tmp_path):
    (tmp_path / "deadly.py").write_text("import os; os._exit(5)")
    with raises(RewardError, re.compile(r"deadly\.py:f"), found=re.compile("exit code 5")):
        make_pool(f"{tmp_path}/deadly.py:f")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_of_no_known_form_is_an_error_at_the_start(tmp_path, num_workers):
    (tmp_path / "odd.py").write_text("def f(a, b): return 1.0")
    with raises(RewardError, re.compile(r"^(loading .*: )?f\(a, b\)$"), expected=re.compile("solution_str")):
        make_pool(f"{tmp_path}/odd.py:f", num_workers=num_workers)


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with raises(RegistryError, "reward", found="gsm8", change=re.compile("'gsm8k'")):
        make_pool("gsm8")


def test_a_replacement_that_cannot_start_ends_the_pool(tmp_path):
    (tmp_path / "table").write_text("")
    (tmp_path / "reads.py").write_text(
        f"import os\nopen({str(tmp_path / 'table')!r})\n"
        "def f(solution_str): os._exit(1) if solution_str == 'exit' else None; return 1.0"
    )
    with make_pool(f"{tmp_path}/reads.py:f") as pool:
        assert pool.score([item("x")]) == [RIGHT]
        (tmp_path / "table").unlink()
        for text in ("exit", "x"):
            with raises(RewardError, re.compile(r"reads\.py:f"), found=re.compile("FileNotFoundError")):
                pool.score([item(text), item("x")])


def test_closing_leaves_no_process_and_no_waiting_future(behaviours):
    pool = make_pool(f"{behaviours}:compute_score", num_workers=3)
    pids = {outcome.reward for outcome in pool.score([item("pid")] * 200)}
    child = pool.score([item("child")])[0].reward
    assert 1 <= len(pids) <= 3 and all(map(is_running, [*pids, child]))
    waiting = [pool.submit_batch([item("sleep 1000")]) for _ in range(10)]
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 5.0
    assert wait_until(lambda: not any(map(is_running, [*pids, child])))
    for future in waiting:
        with raises(RewardError, "reward pool"):
            future.result(timeout=1)
    with raises(RewardError, "reward pool"):
        pool.submit_batch([item("1")])


def test_a_pool_that_is_forgotten_ends_its_processes(behaviours):
    pool = make_pool(f"{behaviours}:compute_score")
    (outcome,) = pool.score([item("pid")])
    del pool
    assert wait_until(lambda: not is_running(outcome.reward))


SCRIPT = """
import signal, sys, threading
from whet.types import RewardItem
from whet.rewards.pool import RewardPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
pool = RewardPool(sys.argv[1], num_workers=2, timeout_seconds=float(sys.argv[2]), correct_threshold=1.0)
pids = {int(outcome.reward) for outcome in pool.score([RewardItem("t", "pid", "1")] * 400)}
print(*pids, flush=True)
if sys.argv[3] == "busy":
    pool.score([RewardItem("t", "spin", "1")] * 2)
if sys.argv[3] == "idle":
    threading.Event().wait()
"""


def start_script(behaviours: str, timeout_seconds: float, state: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A program with a pool, in a process group of its own as a shell would start it, and the pids of its workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, f"{behaviours}:compute_score", str(timeout_seconds), state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids
    return process, pids


@pytest.mark.slow
def test_a_program_that_ends_takes_its_processes_along(behaviours):
    process, pids = start_script(behaviours, 60, "end")
    assert process.wait(timeout=20) == 0
    assert wait_until(lambda: not any(map(is_running, pids)))
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["busy", "idle"])
def test_ctrl_c_ends_the_program_and_its_processes(behaviours, state):
    process, pids = start_script(behaviours, 60, state)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1  # of the program alone
    assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_processes_end_with_a_killed_program(behaviours, state):
    process, pids = start_script(behaviours, 60, state)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=3.0)


def test_the_template_reads_what_ships_once_for_all_workers(monkeypatch):
    for each in (REWARDS, PARTS):
        monkeypatch.delitem(vars(each), "shipped", raising=False)
    prepare(b"")
    assert all("shipped" in vars(each) for each in (REWARDS, PARTS))
