# SPDX-License-Identifier: Apache-2.0
"""Runs of two rollout ranks, one or both of which are killed or hang: the result equals an undisturbed run's."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from whet.config import TrainConfig
from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import LostWorkerError
from whet.rollout.replicas import Replicas
from whet.trainers.build import train
from whet.weight_sync import routes
from whet.weight_sync.routes import RankSite, Route

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
Fault = Callable[[int], None]  # strikes a rank that was just given requests
APART = {"train": {"roles": ["actor"]}, "sample": {"processes": 2, "roles": ["rollout"]}}
RUN: dict[str, Any] = {
    "cluster.placement": APART,
    "data.max_response_length": 48,
    "trainer.log_rollouts": 1,
    "trainer.total_steps": 6,
    "actor.optim.lr": 1e-2,
}
# Equal weights in all versions: so tokens are equal however far a rank is ahead.
AHEAD = {**RUN, "rollout.max_staleness": 1, "algorithm.correction.weight": "importance", "actor.optim.lr": 0.0}
HANG_SECONDS = 3.0
RACES = ("rollout/", "staleness/")  # what an undisturbed run that samples ahead does not repeat


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def pid_of(rank: int, pool: str = "sample") -> int:
    """The process of a rank: a guard, which has its name, and the child of the guard."""
    named = [each for each in psutil.Process().children(recursive=True) if each.name() == f"whet {pool} {rank}"]
    return named[-1].pid


def send(number: signal.Signals, *ranks: int) -> Fault:
    """Sends a signal to ranks, by default to the one that was given requests."""

    def strike(rank: int) -> None:
        for each in ranks or (rank,):
            os.kill(pid_of(each), number)

    return strike


class Faults:
    """Strikes ranks that have just been given requests: `at` has the fault by the number of such a call to rank 1; by
    minus a version the fault before its weights are sent. A weight sync waits for new processes: a short run has room
    for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, Fault] = {}
        self.calls, self.waits = 0, True
        plain, plain_sync = WorkerGroup.start_on, Replicas.sync

        def start_on(group: WorkerGroup, rank: int, method: str, *arguments: Any) -> PendingCall:
            call = plain(group, rank, method, *arguments)
            if (method, rank) == ("serve", 1) and arguments[0]:
                self.calls += 1
                if self.calls in self.at:
                    self.at[self.calls](rank)
                    return replace(call, deadline_seconds=min(call.deadline_seconds, HANG_SECONDS))
            return call

        def sync(replicas: Replicas, version: int) -> str:
            if self.waits:
                starts = [call for call in replicas._calls if call.method == "start"]
                wait([reply for call in starts for reply in call.replies.values()], timeout=120)
                with replicas._turn:
                    for call in [each for each in starts if each in replicas._calls]:
                        replicas._take(call)
            self.at.get(-version, lambda rank: None)(1)
            return plain_sync(replicas, version)

        monkeypatch.setattr(WorkerGroup, "start_on", start_on)
        monkeypatch.setattr(Replicas, "sync", sync)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def result(config: TrainConfig, additions: Rows, races: tuple[str, ...] = ()) -> tuple[list[Any], list[Any], float]:
    """Tokens and rewards of all steps, the metrics of each, and the number of lost ranks."""
    train(config, reward=pays_for_sevens, data=additions)
    folder = Path(str(config.trainer.run_dir))
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    rows = [[json.loads(line) for line in file.open()] for file in files]
    steps = [[(row["uid"], row["response"], row["reward"]) for row in step] for step in rows]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    lost = max(line.pop("rollout/lost_ranks", 0) for line in lines)
    kept = [{name: line[name] for name in line if not name.startswith(races)} for line in lines]
    assert len(steps) == len(kept) == config.trainer.total_steps
    return steps, kept, lost


@pytest.fixture(scope="module")
def undisturbed() -> dict[bool, Any]:
    """Results of runs that nothing happens to, once there are some."""
    return {}


def setting_of(ahead: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The changes to the config, and the beginnings of metrics that depend on time."""
    return (AHEAD, RACES) if ahead else (RUN, ("nothing",))


FAULTS: dict[str, dict[int, Fault]] = {
    "killed": {2: send(signal.SIGKILL)},
    "killed twice": {2: send(signal.SIGKILL), 4: send(signal.SIGKILL)},
    "each killed": {2: send(signal.SIGKILL), 4: send(signal.SIGKILL, 0)},
    "killed between two steps": {-2: send(signal.SIGKILL)},
    "hung": {2: send(signal.SIGSTOP)},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_changes_no_result(
    fault: str,
    ahead: bool,
    undisturbed: dict[bool, Any],
    faults: Faults,
    train_config: MakeConfig,
    additions: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, races = setting_of(ahead)
    if ahead not in undisturbed:
        undisturbed[ahead] = result(train_config({**settings, "trainer.run_dir": tmp_path / "alone"}), additions, races)
    faults.calls, faults.at = 0, FAULTS[fault]
    steps, metrics, lost = result(train_config(settings), additions, races)
    assert faults.calls > max(FAULTS[fault]), "a lost rank samples again"
    assert steps == undisturbed[ahead][0]
    assert metrics == undisturbed[ahead][1]
    assert (lost, undisturbed[ahead][2]) == (len(FAULTS[fault]), 0)
    why = rf", serve: .*\b{HANG_SECONDS:g} s" if fault == "hung" else ": .*: SIGKILL"
    assert re.search(rf"rank 1\b.*\b1 of 3\b.*: rollout rank 1{why}", caplog.text)
    assert re.search(r"rank 1\b.* runs again\b.* samples", caplog.text)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_lost_while_weights_are_broadcast_changes_no_result(
    ahead: bool,
    undisturbed: dict[bool, Any],
    faults: Faults,
    train_config: MakeConfig,
    additions: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others, whose group breaks with it, get the weights again."""
    settings, races = setting_of(ahead)
    if ahead not in undisturbed:
        undisturbed[ahead] = result(train_config({**settings, "trainer.run_dir": tmp_path / "alone"}), additions, races)
    plain, plain_start, ways, struck = routes.plan_routes, WorkerGroup.start_on, list[str](), list[int]()

    def elsewhere(senders: Sequence[RankSite], receivers: Sequence[RankSite]) -> list[Route]:
        found = plain(senders, [replace(receiver, machine="another") for receiver in receivers])
        ways.extend(route.way for route in found)
        return found

    def start_on(group: WorkerGroup, rank: int, method: str, *arguments: Any) -> PendingCall:
        strikes = (method, rank) == ("receive", 1) and arguments[0] == 2 and not struck
        if strikes:  # it stands still when the sender begins, and is gone in the middle
            struck.append(pid_of(1))
            os.kill(struck[0], signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (struck[0], signal.SIGKILL)).start()
        return plain_start(group, rank, method, *arguments)

    monkeypatch.setattr(routes, "plan_routes", elsewhere)
    monkeypatch.setattr(WorkerGroup, "start_on", start_on)
    faults.calls, faults.at = 0, {}
    steps, metrics, lost = result(train_config(settings), additions, races)
    assert struck and set(ways) == {"broadcast"} and len(ways) >= 2 + 1 + 2  # two ranks, one, and two again
    assert (steps, metrics, lost) == (*undisturbed[ahead][:2], 1)
    call = "(receive|serve)" if ahead else "receive"  # a run ahead has both calls open, and may hear of either first
    assert re.search(rf"rank 1\b.*\b1 of 3\b.*: rollout rank 1: .*{call}", caplog.text)
    assert re.search(r"rank 1\b.* runs again\b.* samples", caplog.text)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_run_ends_where_no_rank_is_left(
    ahead: bool, faults: Faults, train_config: MakeConfig, additions: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    faults.at, faults.waits = {2: send(signal.SIGKILL, 0, 1)}, False
    with pytest.raises(LostWorkerError, match=r"^rollout rank [01]: .*serve: SIGKILL"):
        train(train_config(AHEAD if ahead else RUN), reward=pays_for_sevens, data=additions)
    assert "samples after" not in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_ends_where_a_rank_is_lost_too_often(
    faults: Faults,
    train_config: MakeConfig,
    additions: Rows,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whet.rollout.replicas.RESTARTS", 1)
    faults.at = {2: send(signal.SIGKILL), 3: send(signal.SIGKILL)}
    with pytest.raises(LostWorkerError, match=r"^rollout rank 1: .*serve: SIGKILL"):
        train(train_config(RUN), reward=pays_for_sevens, data=additions)
    assert re.search(r"rank 1\b.* again .*\b1 of 1\b", caplog.text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_run_itself_starts_again_then(
    faults: Faults, undisturbed: dict[bool, Any], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    """From the newest checkpoint, with the numbers of a run that was never interrupted."""
    expected = result(train_config({**RUN, "trainer.run_dir": tmp_path / "alone"}), additions)
    faults.calls, faults.at = 0, {3: send(signal.SIGKILL, 0, 1)}
    again = {"trainer.max_restarts": 1, "trainer.save_freq": 1, "trainer.resume": "auto"}
    assert result(train_config({**RUN, **again}), additions)[:2] == expected[:2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_beside_the_actor_is_not_replaced(train_config: MakeConfig, additions: Rows, faults: Faults) -> None:
    """Its process group has the ranks of the actor."""
    faults.at = {2: lambda rank: os.kill(pid_of(rank, "main"), signal.SIGKILL)}
    settings = {**RUN, "cluster.placement": {}, "cluster.processes": 2}
    with pytest.raises(LostWorkerError, match=r"^(actor, )?rollout rank 1: .*serve: SIGKILL"):
        train(train_config(settings), reward=pays_for_sevens, data=additions)
