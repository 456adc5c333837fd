# SPDX-License-Identifier: Apache-2.0
"""Children of a template, and each way in which one can end."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.processes.children import BROKEN, Callee, Children, Ended, Event, Reply
from whet.processes.fork_server import exit_text
from whet.processes.template import ORPHANED


@pytest.fixture(autouse=True)
def targets_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture(params=[False, True], ids=["side by side", "in turn"])
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    made = Children("kit_targets:prepare", b"given", replies=(str,), in_turn=request.param)
    yield made
    made.close()


def wait_for(children: Children, count: int, seconds: float = 20.0) -> list[Event]:
    """The next events, that many or more."""
    events: list[Event] = []
    until = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < until:
        events += children.poll(0.5)
    return events


def call(children: Children, child: Callee, what: str, seconds: float = 100.0) -> None:
    """The call is about its own first word."""
    children.call(child, what.partition(" ")[0], what.encode(), seconds)


def ask(children: Children, child: Callee, what: str) -> str:
    call(children, child, what)
    (event,) = wait_for(children, 1)
    assert isinstance(event, Reply) and event.child is child and event.task == what.partition(" ")[0]
    return str(event.value)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_children_have_what_the_template_loaded(children: Children) -> None:
    first, second = children.start(), children.start()
    assert ask(children, first, "argument") == "given"
    assert ask(children, first, "template") == ask(children, second, "template")
    assert ask(children, first, "pid") == ask(children, first, "group") != ask(children, second, "pid")
    assert ask(children, first, "big") == "x" * 10**6
    assert ask(children, first, f"length {'x' * 10**6}") == str(10**6)


def test_poll_returns_when_it_is_told_to(children: Children) -> None:
    child = children.start()
    ask(children, child, "ready")
    start = time.monotonic()
    assert children.poll(0.2) == []
    assert 0.19 < time.monotonic() - start < 60.0
    children.wake()
    assert children.poll() == []
    call(children, child, "sleep 0.3")
    call(children, child, "next")
    assert children.poll(0.0) == []
    assert [event.value for event in wait_for(children, 2) if isinstance(event, Reply)] == ["sleep", "next"]


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("exit 3", "died: exit code 3"),
        ("exit 0", "died: exit code 0"),
        ("kill 0", "died: SIGKILL (out of memory, or killed by hand)"),
    ],
)
def test_how_a_child_ended_is_told_after_what_it_said(children: Children, deed: str, why: str) -> None:
    child, other = children.start(), children.start()
    for message in ("one", "big", deed, "two", "three"):
        call(children, child, message)
    one, big, gone = wait_for(children, 3)
    assert isinstance(one, Reply) and isinstance(big, Reply)
    assert (one.value, len(big.value)) == ("one", 10**6)
    assert gone == Ended(child, why, deed.partition(" ")[0], ("two", "three"))
    assert ask(children, other, "still here") == "still"


@pytest.mark.parametrize("deed", ["raw x", "number 1000", "bytes"])
def test_a_child_that_sends_no_answer_is_ended(children: Children, deed: str) -> None:
    """No pickle; the number of no call; an object of another type."""
    child, other = children.start(), children.start()
    pid = int(ask(children, child, "pid"))
    call(children, child, deed)
    assert wait_for(children, 1) == [Ended(child, BROKEN, deed.partition(" ")[0])]
    assert wait_until_gone([pid])
    assert ask(children, other, "still here") == "still"


def test_calls_in_turn_have_their_time_one_after_the_other() -> None:
    for in_turn in (True, False):
        children = Children("kit_targets:prepare", in_turn=in_turn)
        child = children.start()
        ask(children, child, "ready")
        call(children, child, "sleep 0.4", 5.0)
        call(children, child, "sleep 0.4", 0.6)
        first, second = wait_for(children, 2) if in_turn else [*wait_for(children, 1), *wait_for(children, 1)]
        assert isinstance(first, Reply)
        assert isinstance(second, Reply) if in_turn else second == Ended(child, "is late", "sleep", is_late=True)
        children.close()


def test_a_child_is_killed_at_its_deadline_and_no_other(children: Children) -> None:
    child, other = children.start(), children.start()
    pid = int(ask(children, child, "pid"))
    call(children, child, "sleep 1000", 0.3)
    assert ask(children, other, "meanwhile") == "meanwhile"
    assert wait_for(children, 1) == [Ended(child, "is late", "sleep", is_late=True)]
    assert wait_until_gone([pid])
    assert ask(children, other, "still here") == "still"
    call(children, child, "to nobody", 0.05)
    assert children.poll(0.1) == []


def test_an_answer_that_came_in_time_counts_however_late_it_is_read(children: Children) -> None:
    child = children.start()
    ask(children, child, "ready")
    call(children, child, "answer", 0.5)
    select.select([child.connection], [], [], 20.0)
    time.sleep(0.6)
    assert children.poll() == [Reply(child, "answer", "answer")]


def test_a_killed_guard_or_template_is_no_end_of_the_others(children: Children) -> None:
    child, other = children.start(), children.start()
    pids = [int(ask(children, child, "pid")), int(ask(children, other, "pid"))]
    os.kill(int(ask(children, child, "parent")), signal.SIGKILL)  # its guard
    assert wait_for(children, 1) == [Ended(child, f"died: {exit_text(ORPHANED)}")]
    template = int(ask(children, other, "template"))
    os.kill(template, signal.SIGKILL)
    assert wait_for(children, 1) == [Ended(other, f"died: {exit_text(ORPHANED)}")]
    assert wait_until_gone(pids)
    third = children.start()
    assert ask(children, third, "argument") == "given"
    assert int(ask(children, third, "template")) != template


def test_a_target_that_ends_its_process_is_the_end_of_each_child() -> None:
    children = Children("kit_targets:broken")
    first = children.start()
    assert wait_for(children, 1) == [Ended(first, "died: exit code 9")]
    second = children.start()
    assert wait_for(children, 1) == [Ended(second, "died: exit code 9")]
    children.close()


def test_closing_ends_all_and_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    children = Children("kit_targets:prepare")
    idle, busy = children.start(), children.start()
    pids = [int(ask(children, each, name)) for each in (idle, busy) for name in ("pid", "parent", "template")]
    call(children, busy, "sleep 1000")
    start = time.monotonic()
    children.close([idle])
    assert time.monotonic() - start < 60.0  # not the 1,000 that one sleeps
    assert wait_until_gone(pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
