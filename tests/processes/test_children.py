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

from whet.processes.children import Children, Event, Gone, Said, Talker


@pytest.fixture(autouse=True)
def targets_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children("kit_targets:prepare", b"given")
    yield made
    made.close()


def wait_for(children: Children, count: int, seconds: float = 20.0) -> list[Event]:
    """The next events, that many or more."""
    events: list[Event] = []
    until = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < until:
        events += children.poll(0.5)
    return events


def ask(children: Children, child: Talker, what: str) -> str:
    children.send(child, 3, what.encode())
    (event,) = wait_for(children, 1)
    assert isinstance(event, Said) and event.child is child and event.number == 3
    return event.content.decode()


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
    assert 0.19 < time.monotonic() - start < 2.0
    children.wake()
    assert children.poll() == []
    children.send(child, 1, b"sleep 0.3")
    children.send(child, 2, b"next")
    assert children.poll(0.0) == []
    assert [event.number for event in wait_for(children, 2) if isinstance(event, Said)] == [1, 2]


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
    for number, message in enumerate(["one", "big", deed]):
        children.send(child, number, message.encode())
    one, big, gone = wait_for(children, 3)
    assert isinstance(one, Said) and isinstance(big, Said)
    assert (one.number, big.number, len(big.content)) == (0, 1, 10**6)
    assert gone == Gone(child, why)
    assert ask(children, other, "still here") == "still"


def test_a_child_is_killed_at_its_deadline_and_no_other(children: Children) -> None:
    child, other = children.start(), children.start()
    pid = int(ask(children, child, "pid"))
    children.send(child, 1, b"sleep 1000")
    child.deadline = time.monotonic() + 0.3
    assert ask(children, other, "meanwhile") == "meanwhile"
    assert wait_for(children, 1) == [Gone(child, "is late", is_late=True)]
    assert wait_until_gone([pid])
    assert ask(children, other, "still here") == "still"
    children.send(child, 2, b"to nobody")
    assert children.poll(0.1) == []


def test_a_message_that_came_in_time_counts_however_late_it_is_read(children: Children) -> None:
    child = children.start()
    ask(children, child, "ready")
    children.send(child, 1, b"answer")
    select.select([child.connection], [], [], 20.0)
    child.deadline = time.monotonic() - 0.1
    assert children.poll() == [Said(child, 1, b"answer")]


def test_a_killed_guard_or_template_is_no_end_of_the_others(children: Children) -> None:
    child, other = children.start(), children.start()
    pids = [int(ask(children, child, "pid")), int(ask(children, other, "pid"))]
    os.kill(int(ask(children, child, "parent")), signal.SIGKILL)  # its guard
    assert wait_for(children, 1) == [Gone(child, "died: SIGKILL (out of memory, or killed by hand)")]
    template = int(ask(children, other, "template"))
    os.kill(template, signal.SIGKILL)
    assert wait_for(children, 1) == [Gone(other, "died: SIGKILL (out of memory, or killed by hand)")]
    assert wait_until_gone(pids)
    third = children.start()
    assert ask(children, third, "argument") == "given"
    assert int(ask(children, third, "template")) != template


def test_a_target_that_ends_its_process_is_the_end_of_each_child() -> None:
    children = Children("kit_targets:broken")
    first = children.start()
    assert wait_for(children, 1) == [Gone(first, "died: exit code 9")]
    second = children.start()
    assert wait_for(children, 1) == [Gone(second, "died: exit code 9")]
    children.close()


def test_closing_ends_all_and_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    children = Children("kit_targets:prepare")
    idle, busy = children.start(), children.start()
    pids = [int(ask(children, each, name)) for each in (idle, busy) for name in ("pid", "parent", "template")]
    children.send(busy, 1, b"sleep 1000")
    start = time.monotonic()
    children.close([idle])
    assert time.monotonic() - start < 3.0
    assert wait_until_gone(pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
