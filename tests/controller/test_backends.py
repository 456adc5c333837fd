# SPDX-License-Identifier: Apache-2.0
"""Requirements of every backend: in this process, in two other processes, in two Ray actors."""

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from controller_workers import Actor, Rollout, wait_until_gone

from tests.raising import raises
from whet.batch import Batch
from whet.config.cluster import ClusterConfig
from whet.controller.worker import ResourcePool, WorkerSpec, pools_of, with_roles
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, DataError, WorkerError

Launch = Callable[..., dict[str, WorkerGroup]]
CORES = len(os.sched_getaffinity(0))
LENGTHS = [3, 90, 1, 40, 41, 7, 60, 2, 33]  # 277 tokens in 9 rows
BACKENDS = [("local", 1), ("local", 2), pytest.param(("ray", 2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=BACKENDS, ids=["here", "two processes", "ray"])
def backend(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Name and processes."""
    name, processes = request.param
    return name, processes


@pytest.fixture(scope="module")
def groups(
    backend: tuple[str, int], launch_on: Callable[[str], Launch], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, WorkerGroup]]:
    name, world_size = backend
    folder = tmp_path_factory.mktemp("closed")
    specs = [WorkerSpec("actor", Actor, kwargs={"scale": 2}), WorkerSpec("rollout", Rollout, (folder,))]
    groups = launch_on(name)(specs, [ResourcePool(world_size)])
    yield groups
    groups["actor"].close()
    groups["rollout"].close()
    notes = {path.name: path.read_text() for path in folder.iterdir()}
    assert notes == {f"closed by {rank}": "actor" for rank in range(world_size)}  # last built, first closed
    assert not [process for process in multiprocessing.active_children() if process.name.startswith("whet-")]
    with raises(WorkerError, "actor.say", found=re.compile(r"close\(\)"), change=re.compile("launch")):
        groups["actor"].say(name="too late")


@pytest.fixture
def actor(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    return groups["actor"]


def batch(lengths: list[int]) -> Batch:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Batch.of(
        {"attention_mask": mask.long(), "value": torch.arange(len(lengths))},
        {"name": [f"row {row}" for row in range(len(lengths))]},
    )


def test_ragged_rows_come_back_in_order_with_merged_metrics(actor: WorkerGroup) -> None:
    columns, metrics = actor.lengths(batch(LENGTHS))
    assert columns["tokens"].tolist() == LENGTHS
    assert set(columns["rank"].tolist()) == set(range(actor.world_size))
    assert metrics.reduce() == {"rows/tokens": pytest.approx(277 / 9), "rows/count": 9}
    loads = [
        sum(n for n, r in zip(LENGTHS, columns["rank"], strict=True) if r == rank) for rank in range(actor.dp_size)
    ]
    assert max(loads) <= 277 / actor.dp_size + 2


def test_ranks_reduce_over_their_process_group(actor: WorkerGroup) -> None:
    result = actor.total(batch(LENGTHS))
    assert result["total"].tolist() == [36] * 9  # 0 + 1 + ... + 8
    assert result["name"].tolist() == [f"row {row}" for row in range(9)]


def test_one_row_over_all_ranks(actor: WorkerGroup) -> None:
    assert actor.total(batch([5]))["name"].tolist() == ["row 0"]
    columns, metrics = actor.lengths(batch([5]))
    assert columns["tokens"].tolist() == [5]
    assert metrics.reduce() == {"rows/tokens": 5, "rows/count": 1}  # the mean of no rows is nan, and weighs nothing


def test_blocks_stay_on_one_rank(actor: WorkerGroup) -> None:
    answers = actor.ranks(list("aabbccdd"), block=2)
    assert [name for name, _ in answers] == list("aabbccdd")
    assert all(answers[row][1] == answers[row + 1][1] for row in range(0, 8, 2))
    assert {rank for _, rank in answers} == set(range(actor.world_size))


def test_the_other_modes(actor: WorkerGroup) -> None:
    world = actor.world_size
    assert actor.own([f"item {rank}" for rank in range(world)]) == [f"item {r} at {r} of {world}" for r in range(world)]
    assert actor.say(name="tracker") == [f"tracker {rank}" for rank in range(world)]


def test_calls_are_served_in_the_order_in_which_they_were_started(actor: WorkerGroup) -> None:
    calls = [actor.start("remember", item) for item in range(20)]
    assert [call.result() for call in calls] == [[list(range(item + 1))] * actor.world_size for item in range(20)]
    assert all(call.done() for call in calls)
    assert actor.start("say", name="late").result()[0] == "late 0"
    assert actor.call("remember", 20) == [list(range(21))] * actor.world_size


def test_a_method_may_run_beside_the_calls_in_order(actor: WorkerGroup) -> None:
    waiting = actor.start("wait_for_release", 0.0 if actor.world_size == 1 else 20.0)  # in one process a call is a call
    behind = actor.start("say", name="behind")
    assert actor.call("release") == list(range(actor.world_size))
    assert waiting.result() == [actor.world_size > 1] * actor.world_size
    assert behind.result() == [f"behind {rank}" for rank in range(actor.world_size)]


def test_processes_share_the_cores(actor: WorkerGroup) -> None:
    threads = [torch.get_num_threads()] if actor.world_size == 1 else [max(1, CORES // 2)] * 2
    assert [count for _, count in actor.process()] == threads


def test_roles_of_one_process_share_what_they_own(groups: dict[str, WorkerGroup]) -> None:
    before = groups["rollout"].read()
    groups["actor"].add(0.5)
    assert groups["rollout"].read() == [[weight + 0.5 for weight in weights] for weights in before]


def test_what_is_wrong_before_a_call_leaves_the_group_open(actor: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"worker group 'actor' has no 'not_registered'; it has lengths, total"):
        actor.not_registered()
    with raises(WorkerError, "actor.updaet", expected=re.compile("Actor: lengths, total")):
        actor.call("updaet")
    with raises(DataError, "rows", found=re.compile("^3 rows")):
        actor.ranks([1, 2, 3], block=2)
    with raises(WorkerError, "actor.one_row_too_few", found=re.compile("{'rows': [0-9]}")):
        actor.one_row_too_few([1, 2])
    assert actor.say(name="still here")[0] == "still here 0"


def test_a_message_larger_than_any_buffer(actor: WorkerGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    data = Batch.of({"x": torch.randint(1 << 40, (64, 50_000), generator=generator)})  # 25 MB
    calls = [actor.start("echo", data) for _ in range(3)]  # answers wait while further calls are sent
    assert all(torch.equal(call.result()["x"], data["x"]) for call in calls)


@pytest.mark.slow
def test_pools_have_processes_and_process_groups_of_their_own(
    backend: tuple[str, int], launch_on: Callable[[str], Launch]
) -> None:
    name, processes = backend
    specs = [WorkerSpec(role, Actor) for role in ("actor", "judge", "critic")]
    pools = [ResourcePool(processes, ("actor", "critic"), "train"), ResourcePool(1, ("judge",), "look")]
    groups = launch_on(name)(specs, pools)
    try:
        pids = {role: [pid for pid, _ in group.process()] for role, group in groups.items()}
        assert pids["actor"] == pids["critic"]
        assert len({*pids["actor"], *pids["judge"], os.getpid()}) == processes + 2
        calls = [group.start("total", batch(LENGTHS)) for group in groups.values()]  # at the same time
        assert [call.result()["total"].tolist() for call in calls] == [[36] * 9] * 3
        key = re.compile(r"^judge rank 0( on [\d.]+)?, weak_link$")
        with raises(WorkerError, key, found=re.compile("ValueError: no such token")):
            groups["judge"].weak_link(0, "raise")
        with raises(WorkerError, "actor.add", found=re.compile(r"\(judge rank 0")):
            groups["actor"].add(1.0)
        for pid in {*pids["actor"], *pids["judge"]}:
            wait_until_gone([pid], seconds=10)
    finally:
        groups["actor"].close()


def test_every_role_is_in_one_pool_once() -> None:
    actor, critic = WorkerSpec("actor", Actor), WorkerSpec("critic", Actor)
    with raises(ConfigError, re.compile("^roles"), found=["actor", "actor"]):
        with_roles([actor, actor], [ResourcePool(1)])
    with raises(ConfigError, found=["actor"], expected=re.compile(r"\['actor', 'critic'\]")):
        with_roles([actor, critic], [ResourcePool(1, ("actor",))])
    with raises(ConfigError, "pool main: processes", found=0, change=re.compile("cluster.processes")):
        ResourcePool(0)
    assert with_roles([actor, critic], [ResourcePool(2)]) == [ResourcePool(2, ("actor", "critic"))]


@pytest.mark.slow
def test_the_first_pool_has_what_no_other_names() -> None:
    placement = {
        "train": {"processes": 2, "roles": ["critic"]},
        "judge": {"roles": ["teacher"]},
        "spare": {"roles": ["ref"]},
    }
    cluster = ClusterConfig.model_validate({"placement": placement})
    specs = [WorkerSpec(role, Actor) for role in ("actor", "critic", "teacher:gsm8k", "teacher:*", "rollout")]
    assert pools_of(cluster, specs) == [
        ResourcePool(2, ("actor", "critic", "rollout"), "train"),
        ResourcePool(1, ("teacher:gsm8k", "teacher:*"), "judge"),
    ]  # nothing for spare to host
