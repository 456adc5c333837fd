# SPDX-License-Identifier: Apache-2.0
"""Ranks that need no other: one that dies or hangs fails its own calls, and another process takes its place."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest
from controller_workers import Actor, Replica, wait_until_gone

from tests.raising import raises
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import DeadlineError, LostWorkerError, WorkerError

Launch = Callable[..., dict[str, WorkerGroup]]
Groups = Mapping[str, WorkerGroup]
POOLS = [ResourcePool(1, ("actor",), "train"), ResourcePool(2, ("rollout",), "sample")]
WHO = re.compile(r"^rollout rank 1( on [\d.]+)?$")


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def groups(request: pytest.FixtureRequest, launch_on: Callable[[str], Launch]) -> Iterator[Groups]:
    """An actor of one process, and two replicas."""
    started = launch_on(request.param)([WorkerSpec("actor", Actor), WorkerSpec("rollout", Replica, (3,))], POOLS)
    pids = pids_of(started["actor"]) + pids_of(started["rollout"])
    yield started
    pids += pids_of(started["rollout"]) if not started["rollout"]._transport.ended.is_set() else []
    started["actor"].close()
    wait_until_gone(pids, 5.0)


def pids_of(group: WorkerGroup) -> list[int]:
    return [pid for pid, _ in group.process()]


def check_replaced(groups: Groups, lost: int) -> None:
    """Another process is rank 1 now, with a new worker; the others are as they were."""
    replicas = groups["rollout"]
    assert replicas.start_on(0, "remember", "b").result() == ["a", "b"]
    assert groups["actor"].say(name="actor") == ["actor 0"]
    replicas.start_again(1).result()
    assert replicas.remember("c") == [["a", "b", "c"], ["c"]]
    assert replicas.own(["x", "y"]) == ["x at 0 of 2", "y at 1 of 2"]
    wait_until_gone([lost], 5.0)
    assert pids_of(replicas)[1] != lost


@pytest.mark.slow
@pytest.mark.parametrize("idle", [False, True])
def test_a_dead_replica_fails_its_own_calls_and_is_replaced(groups: Groups, idle: bool) -> None:
    replicas = groups["rollout"]
    replicas.remember("a")
    lost = pids_of(replicas)[1]
    other = replicas.start_on(0, "wait_for_release", 30.0)
    calls = [] if idle else [replicas.start_on(1, "weak_link", 1, "sleep"), replicas.start_on(1, "say")]
    os.kill(lost, signal.SIGKILL)
    if idle:
        wait_until_gone([lost], 10.0)
        calls = [replicas.start_on(1, "say")]
    for call in calls:
        with raises(LostWorkerError, WHO):
            call.result()
        assert call.is_lost
    with raises(LostWorkerError, WHO):
        replicas.start_on(1, "say").result()
    replicas.start_on(0, "release").result()
    assert other.result() is True
    check_replaced(groups, lost)


@pytest.mark.slow
def test_a_replica_that_hangs_is_ended_and_replaced(groups: Groups) -> None:
    replicas = groups["rollout"]
    replicas.remember("a")
    lost = pids_of(replicas)[1]
    psutil.Process(lost).suspend()
    call = replicas.start_on(1, "remember", "never")
    with raises(DeadlineError, "rollout rank 1, remember", found=re.compile("0.5 s")):
        call.result(0.5)
    assert call.is_lost
    check_replaced(groups, lost)


@pytest.mark.slow
def test_a_replica_that_raises_ends_all(groups: Groups) -> None:
    """It would raise again."""
    call = groups["rollout"].start_on(1, "weak_link", 1, "raise")
    key = re.compile(r"^rollout rank 1( on [\d.]+)?, weak_link$")
    with raises(WorkerError, key, found=re.compile("ValueError: no such token: 7$")):
        call.result()
    assert not call.is_lost
    with raises(WorkerError, "actor.say"):
        groups["actor"].say(name="actor")


@pytest.mark.slow
def test_a_lost_actor_ends_its_replicas(groups: Groups) -> None:
    waiting = groups["rollout"].start_on(1, "weak_link", 1, "sleep")
    os.kill(pids_of(groups["actor"])[0], signal.SIGKILL)
    with raises(LostWorkerError, re.compile(r"^actor rank 0( on [\d.]+)?$")):
        waiting.result(20.0)
    assert not waiting.is_lost
