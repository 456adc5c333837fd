# SPDX-License-Identifier: Apache-2.0
"""Failures in worker processes, on every backend: each is reported soon, and no process stays behind."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from controller_workers import Actor, Misconfigured, Rollout, check_misconfigured, running, wait_until_gone

from tests.raising import check_fields, raises
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, DeadlineError, LostWorkerError, WorkerError

Launch = Callable[..., dict[str, WorkerGroup]]
ACTOR = WorkerSpec("actor", Actor)
HEARD_SECONDS = {"local": 1.0, "ray": 10.0}  # until a death is named
GONE_SECONDS = {"local": 0.0, "ray": 5.0}  # Ray kills, but does not wait


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def started(backend: str, launch_on: Callable[[str], Launch]) -> Iterator[tuple[WorkerGroup, list[int]]]:
    """The actor of two processes, and their ids."""
    actor = launch_on(backend)([ACTOR, WorkerSpec("rollout", Rollout)], [ResourcePool(2)])["actor"]
    pids = [pid for pid, _ in actor.process()]
    yield actor, pids
    actor.close()
    wait_until_gone(pids, GONE_SECONDS[backend])


@pytest.mark.slow
def test_an_exception_arrives_while_the_other_rank_waits_in_a_collective(
    backend: str, started: tuple[WorkerGroup, list[int]]
) -> None:
    actor, pids = started
    with raises(WorkerError, "actor.add: arguments", found=re.compile("lambda"), change=re.compile("module")):
        actor.add(lambda: 1.0)
    assert running(pids) == pids  # nothing was sent, so nothing is lost
    waiting = [actor.start("weak_link", 1, "raise"), actor.start("say", name="never reached")]
    for call in waiting:
        with pytest.raises(WorkerError) as caught:
            call.result(deadline_seconds=10)
        check_fields(caught.value, LINK, found=re.compile("ValueError: no such token: 7$"))
        assert 'raise ValueError("no such token: 7")' in caught.value.__notes__[0]  # the traceback of over there
    wait_until_gone(pids, GONE_SECONDS[backend])
    with raises(WorkerError, "actor.add", found=re.compile(r"\(actor rank 1.*ValueError: no such token: 7")):
        actor.add(1.0)


@pytest.mark.slow
def test_an_error_whose_class_or_value_stays_there_arrives_with_its_fields(
    backend: str, started: tuple[WorkerGroup, list[int]]
) -> None:
    actor, pids = started
    with pytest.raises(WorkerError) as caught:
        actor.weak_link(1, "refuse")
    key = re.compile(r"^actor rank 1( on [\d.]+)?, weak_link: OwnError: size$")
    check_fields(caught.value, key, found=re.compile("lambda"), expected="at most 3", change="lower it")
    assert "raise OwnError(7)" in caught.value.__notes__[0]
    wait_until_gone(pids, GONE_SECONDS[backend])


WHO = re.compile(r"^actor rank 1( on [\d.]+)?$")
LINK = re.compile(r"^actor rank 1( on [\d.]+)?, weak_link$")


@pytest.mark.slow
def test_a_death_is_named_soon(backend: str, started: tuple[WorkerGroup, list[int]]) -> None:
    actor, pids = started
    call = actor.start("weak_link", 1, "sleep")
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with raises(LostWorkerError, WHO, found=re.compile("weak_link.*memory")):
        call.result()
    assert time.monotonic() - began < HEARD_SECONDS[backend]
    wait_until_gone(pids, GONE_SECONDS[backend])


@pytest.mark.slow
def test_a_death_while_the_others_are_sent_to_is_the_error_of_the_call(
    started: tuple[WorkerGroup, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, pids = started
    transport: Any = actor._transport
    start = transport.start_call

    def start_and_die(*arguments: Any) -> None:
        start(*arguments)
        assert transport.ended.wait(30)

    monkeypatch.setattr(transport, "start_call", start_and_die)
    with raises(LostWorkerError, re.compile(r"^actor rank 0( on [\d.]+)?$"), found=re.compile("weak_link")):
        actor.weak_link(0, "crash")
    wait_until_gone(pids, seconds=10)


@pytest.mark.slow
def test_a_death_between_two_calls_is_named_by_the_next(
    backend: str, started: tuple[WorkerGroup, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    actor, pids = started
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids, seconds=HEARD_SECONDS[backend])  # of all ranks: without any call
    with raises(LostWorkerError, "actor.add", found=re.compile(r"\(actor, rollout rank 0( on [\d.]+)?: ")):
        actor.add(1.0)
    [error] = [each.args[0] for each in caplog.records if each.levelno == logging.ERROR and each.args]  # type: ignore[index]
    assert isinstance(error, LostWorkerError)
    check_fields(error, re.compile(r"^actor, rollout rank 0( on [\d.]+)?$"))


@pytest.mark.slow
def test_a_deadline_names_who_is_late_and_ends_all(backend: str, started: tuple[WorkerGroup, list[int]]) -> None:
    actor, pids = started
    call = actor.start("weak_link", 1, "sleep")
    with raises(
        DeadlineError,
        "actor rank 0, 1, weak_link",
        found=re.compile("0.3 s"),
        change=re.compile("cluster.deadline_seconds"),
    ):
        call.result(deadline_seconds=0.3)
    wait_until_gone(pids, GONE_SECONDS[backend])


@pytest.mark.slow
def test_an_error_in_a_constructor_stays_readable_and_leaves_nothing(
    backend: str, launch_on: Callable[[str], Launch]
) -> None:
    launch = launch_on(backend)
    launch([ACTOR], [ResourcePool(1)])["actor"].close()  # Ray keeps threads of its own
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        launch([ACTOR, WorkerSpec("critic", Misconfigured, (1,))], [ResourcePool(2)])
    check_misconfigured(caught.value)
    assert caught.value.__notes__[0].startswith("raised in critic rank 1")
    assert caught.value.__notes__[0].endswith(", __init__")
    until = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= threads


@pytest.mark.slow
def test_a_result_that_cannot_travel_is_an_error_of_the_call(
    backend: str, started: tuple[WorkerGroup, list[int]]
) -> None:
    actor, pids = started
    key = re.compile(r"^actor rank \d( on [\d.]+)?, unloadable: result$")
    with raises(WorkerError, key, found=re.compile("function")):
        actor.unloadable()
    wait_until_gone(pids, GONE_SECONDS[backend])
