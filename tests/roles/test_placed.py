# SPDX-License-Identifier: Apache-2.0
"""Environments in a pool of their own change none of a run's numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.config.environment import EnvironmentConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.environments.protocol import Answer, Observation
from whet.errors import LostWorkerError
from whet.roles.placed import ENVIRONMENT, EnvironmentWorker, PlacedHost, placed_hosts
from whet.trainers.build import train
from whet.types import Failure, Message, Prompt

MakeConfig = Callable[..., TrainConfig]
WORLDS = """
import os, random, time
from whet.environments.protocol import Observation
from whet.types import Message

class World:
    def reset(self, prompt, seed):
        self.draws, self.turns = random.Random(seed), 0
        return self.say(0.0)
    def step(self, answer):
        self.turns += 1
        if answer.text == "hang": time.sleep(100)
        if answer.text == "die": os._exit(3)
        if answer.text == "raise": raise ValueError("no")
        if self.turns == 3: return Observation(done=True, reward=float("7" in answer.text), fields={"pid": os.getpid()})
        return self.say(0.125)
    def say(self, reward):
        return Observation(False, (Message("user", f"{self.draws.randint(0, 9)}+"),), reward=reward, max_tokens=2)

class Counts:
    def reset(self, prompt, seed):
        self.sum = seed
        return self.say()
    def step(self, answer):
        if answer.text == "slow": time.sleep(1.0)
        self.sum = 10 * self.sum + len(answer.text) + int(answer.text) if answer.text != "slow" else self.sum + 7
        return self.say()
    def say(self):
        return Observation(False, (Message("user", str(self.sum)),), fields={"pid": os.getpid()})

class Manager:
    def reset(self, prompt, seed): return Observation(False)
    async def step(self, answer, context):
        found = await context.run("1+", "world")
        return Observation(done=True, reward=found.reward)
"""
PROMPT = Prompt("0:0", 0, (Message("user", "1+"),), (1,), "s", None)


def stage(tmp_path: Path, name: str = "World", **more: Any) -> dict[str, Any]:
    (tmp_path / "worlds.py").write_text(WORLDS)
    return {"name": f"{tmp_path}/worlds.py:{name}", **more}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Mapping[str, PlacedHost]]]:
    """Environments on ranks, 0 of them for a rank in this process."""
    groups: list[Any] = []

    def placed(
        processes: int = 0, name: str = "World", deadline_seconds: float = 60.0, **more: Any
    ) -> Mapping[str, PlacedHost]:
        config = EnvironmentConfig.model_validate(stage(tmp_path, name, **more))
        pools = [ResourcePool(max(1, processes), (ENVIRONMENT,), "games")]
        if processes == 1:
            pools = [ResourcePool(1, (ENVIRONMENT,), "games"), ResourcePool(1, ("other",), "others")]
        specs = [WorkerSpec(role, EnvironmentWorker, (config,)) for pool in pools for role in pool.roles]
        groups.append(launch(specs, pools, 300.0)[ENVIRONMENT])
        groups[-1]._deadline_seconds = deadline_seconds  # of calls: processes start slowly on a busy machine
        return placed_hosts(groups[-1], config)

    yield placed
    for group in groups:
        group.close()


def results(host: Any, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    until = time.monotonic() + 60.0
    while len(found) < count and time.monotonic() < until:
        found.update(host.poll(0.5))
    return found


def stepped(on: Any, names: Iterable[str], text: str) -> dict[str, Any]:
    for name in (names := list(names)):
        on.step(name, Answer(text))
    return results(on, len(names))


def test_results_and_failures_of_episodes(place: Callable[..., Mapping[str, PlacedHost]]) -> None:
    host = place(step_seconds=1.0)[""]
    names = ["a", "b", "hang", "die", "raise"]
    for name in names:
        host.start(name, PROMPT, 5)
    begun = results(host, 5)
    assert {str(each.messages[0].content) for each in begun.values()} == {"9+"}  # of seed 5
    for name in names:
        host.step(name, Answer(name))
    found = results(host, 5)
    assert all(isinstance(found[name], Observation) and found[name].reward == 0.125 for name in "ab")
    failures = {name: found[name] for name in names[2:]}
    assert all(isinstance(each, Failure) and each.source == "environment" for each in failures.values())
    assert failures["hang"].timed_out and "step took longer than 1 s" in failures["hang"].message
    assert "ValueError: no" in failures["raise"].message
    host.step("a", Answer("1"))
    host.close("a")  # while its step runs: no result follows
    host.start("a", PROMPT, 7)  # the same id again
    [again] = results(host, 1).values()
    assert again.messages[0].content != "9+" and again.reward == 0.0
    for name in names:
        host.close(name)
    assert host.poll(0.1) == []


def test_an_episode_begins_when_its_rank_has_a_place(place: Callable[..., Mapping[str, PlacedHost]]) -> None:
    host = place(max_episodes=1)[""]
    host.start("a", PROMPT, 5)
    host.start("b", PROMPT, 5)
    assert results(host, 1).keys() == {"a"} and host.begun() == ["a"]
    host.close("a")
    assert results(host, 1).keys() == {"b"} and host.begun() == ["b"]
    host.close("b")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_episodes_spread_over_ranks_and_stay_there(
    place: Callable[..., Mapping[str, PlacedHost]], processes: int, tmp_path: Path
) -> None:
    placed = place(processes)
    host = placed[""]
    names = [str(number) for number in range(6)]
    for name in names:
        host.start(name, PROMPT, 5)
    results(host, 6)
    assert sorted(ranks_of(host)) == sorted(n % processes for n in range(6))
    for said in ("1", "2", "7"):
        for name in names:
            host.step(name, Answer(said))
        found = results(host, 6)
    assert all(each.done and each.reward == 1.0 for each in found.values())
    assert len({each.fields["pid"] for each in found.values()}) == 6  # a process each
    for name in names:
        host.close(name)


def ranks_of(host: PlacedHost) -> list[int | None]:
    return [flight.rank for flight in host._ranks.fleet.flights.values()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.slow
def test_episodes_of_a_lost_rank_begin_again_on_others(
    place: Callable[..., Mapping[str, PlacedHost]], caplog: pytest.LogCaptureFixture
) -> None:
    """An environment is a grandchild of the process that a rank starts."""
    placed, alone = place(3, "Counts"), place(0, "Counts")[""]
    host, names = placed[""], [str(number) for number in range(6)]
    for each in (host, alone):
        for name in names:
            each.start(name, PROMPT, int(name))
        results(each, 6)

    pids = [int(each.fields["pid"]) for each in stepped(host, names, "3").values()]
    expected = stepped(alone, names, "3")
    ranks = sorted({parent(parent(parent(pid))) for pid in pids}, key=name_of)
    assert [name_of(pid) for pid in ranks] == ["whet games 0", "whet games 1", "whet games 2"]
    os.kill(ranks[0], signal.SIGKILL)  # while nothing runs
    time.sleep(1.0)
    expected, found = stepped(alone, names, "4"), stepped(host, names, "4")
    assert {name: each.messages for name, each in found.items()} == {n: each.messages for n, each in expected.items()}
    assert "environment rank 0: died" in caplog.text
    assert " 2 tasks" in caplog.text
    for name in names:
        host.step(name, Answer("slow"))
    host.poll(0.1)
    os.kill(ranks[1], signal.SIGKILL)  # while steps run
    expected = stepped(alone, names, "slow")
    found = results(host, 6)
    assert {name: each.messages for name, each in found.items()} == {n: each.messages for n, each in expected.items()}
    host.close("0")
    host.start("0", PROMPT, 9)  # the same id again
    assert results(host, 1)["0"].messages != found["0"].messages
    os.kill(ranks[2], signal.SIGKILL)
    host.step("1", Answer("5"))
    with pytest.raises(LostWorkerError, match=r"environment rank 2: died"):
        results(host, 1)


@pytest.mark.slow
def test_episodes_of_a_rank_that_hangs_begin_again_on_others(
    place: Callable[..., Mapping[str, PlacedHost]], caplog: pytest.LogCaptureFixture
) -> None:
    host, alone = place(2, "Counts", 12.0)[""], place(0, "Counts")[""]
    for each in (host, alone):
        for name in "0123":
            each.start(name, PROMPT, int(name))
        results(each, 4)
    first = stepped(host, "0123", "3")["0"]
    stepped(alone, "0123", "3")
    hung = parent(parent(parent(int(first.fields["pid"]))))
    os.kill(hung, signal.SIGSTOP)
    try:
        expected, found = stepped(alone, "0123", "4"), stepped(host, "0123", "4")
    finally:
        with suppress(ProcessLookupError):
            os.kill(hung, signal.SIGCONT)
    assert {name: each.messages for name, each in found.items()} == {n: each.messages for n, each in expected.items()}
    assert re.search(r"environment rank \d, serve: .*\b12 s", caplog.text) and " 2 tasks" in caplog.text


@pytest.mark.slow
def test_a_loss_that_ends_the_launch_starts_no_episode_again(
    place: Callable[..., Mapping[str, PlacedHost]], caplog: pytest.LogCaptureFixture
) -> None:
    placed = place(2, "Counts")
    host = placed[""]
    host.start("0", PROMPT, 0)
    results(host, 1)
    host.step("0", Answer("slow"))
    host.poll(0.1)
    host._ranks._group._transport.abort(LostWorkerError("actor rank 0", "died in update"))
    with raises(LostWorkerError, found=re.compile("actor rank 0: died in update")):
        results(host, 1)
    assert "other ranks" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["World", "Manager"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_environments_in_a_pool_computes_the_same(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, name: str, staleness: int
) -> None:
    values: dict[str, Any] = {
        "environment": {**stage(tmp_path, name), "agents": {"world": stage(tmp_path)}},
        "data.max_response_length": 24,
        "trainer.total_steps": 2,
    }

    def trained(folder: str, **more: Any) -> list[dict[str, Any]]:
        config = train_config({**values, "trainer.run_dir": str(tmp_path / folder), **more})
        train(config, data=additions)
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if "pid" not in key} for line in lines]

    here = {"train": {"roles": ["actor", "rollout"]}}
    apart = {**here, "games": {"processes": 2, "roles": ["environment"]}}
    if staleness == 0:
        same_process = {"all": {"roles": ["actor", "rollout", "environment"]}}
        assert trained("here") == trained("apart", **{"cluster.placement": apart})
        assert trained("here") == trained("all", **{"cluster.placement": same_process})
    else:
        split = {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}
        corrected = {"algorithm.correction.weight": "importance"}
        games = {**split, "games": {"roles": ["environment"]}}
        found = trained("apart", **{"cluster.placement": games, "rollout.max_staleness": 1, **corrected})
        assert [each["step"] for each in found if "actor/pg_loss" in each] == [1, 2]
        assert all(each.get("failures/environment", 0) == 0 for each in found)
