# SPDX-License-Identifier: Apache-2.0
"""What every backend must do, in this process and in two of their own."""

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch
from controller_workers import Actor, Misconfigured, Rollout

from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, DataError, WorkerError
from whet.protocol import DataProto

CORES = len(os.sched_getaffinity(0))
LENGTHS = [3, 90, 1, 40, 41, 7, 60, 2, 33]  # 277 tokens in 9 rows


@pytest.fixture(scope="module", params=[1, 2], ids=["here", "two processes"])
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, WorkerGroup]]:
    world_size, folder = request.param, tmp_path_factory.mktemp("closed")
    specs = [WorkerSpec("actor", Actor, kwargs={"scale": 2}), WorkerSpec("rollout", Rollout, (folder,))]
    groups = launch(specs, ResourcePool(world_size), deadline_seconds=60)
    yield groups
    groups["actor"].close()
    groups["rollout"].close()
    notes = {path.name: path.read_text() for path in folder.iterdir()}
    assert notes == {f"closed by {rank}": "actor" for rank in range(world_size)}  # last built, first closed
    assert not [process for process in multiprocessing.active_children() if process.name.startswith("whet-rank")]
    with pytest.raises(
        WorkerError, match=r"actor.zero: the workers are closed \(close\(\) was called\); launch them again"
    ):
        groups["actor"].zero(name="too late")


@pytest.fixture
def actor(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    return groups["actor"]


def batch(lengths: list[int]) -> DataProto:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return DataProto.from_dict(
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
    answers = actor.ranks(list("aabbccdd"), block=2, workload=[1, 1, 9, 9, 8, 8, 1, 1])
    assert [name for name, _ in answers] == list("aabbccdd")
    assert all(answers[row][1] == answers[row + 1][1] for row in range(0, 8, 2))
    assert {rank for _, rank in answers} == set(range(actor.world_size))


def test_the_other_modes(actor: WorkerGroup) -> None:
    world = actor.world_size
    assert actor.own([f"item {rank}" for rank in range(world)]) == [f"item {r} at {r} of {world}" for r in range(world)]
    assert actor.zero(name="tracker") == "tracker 0"


def test_calls_are_served_in_the_order_in_which_they_were_started(actor: WorkerGroup) -> None:
    calls = [actor.remember(item) for item in range(20)]  # registered with blocking=False
    assert [call.result() for call in calls] == [[list(range(item + 1))] * actor.world_size for item in range(20)]
    assert all(call.done() for call in calls)
    assert actor.start("zero", name="late").result() == "late 0"
    assert actor.call("remember", 20) == [list(range(21))] * actor.world_size


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
    with pytest.raises(WorkerError, match=r"actor.updaet is not registered; Actor offers lengths, total"):
        actor.call("updaet")
    with pytest.raises(DataError, match="3 rows do not split"):
        actor.ranks([1, 2, 3], block=2)
    with pytest.raises(WorkerError, match=r"actor.one_row_too_few returned {'rows': [0-9]} for a shard of"):
        actor.one_row_too_few([1, 2])
    assert actor.zero(name="still here") == "still here 0"


def test_a_message_larger_than_any_buffer(actor: WorkerGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    data = DataProto.from_dict({"x": torch.randint(1 << 40, (64, 50_000), generator=generator)})  # 25 MB
    calls = [actor.start("echo", data) for _ in range(3)]  # answers wait while further calls are sent
    assert all(torch.equal(call.result()["x"], data["x"]) for call in calls)


def test_a_whet_error_of_a_worker_stays_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^actor.mini_batch_size=3 must divide data.train_batch_size=8") as caught:
        launch([WorkerSpec("actor", Misconfigured, (0,))], ResourcePool(1), deadline_seconds=60)
    assert caught.value.__notes__ == ["raised in actor rank 0, __init__"]


def test_an_error_here_has_its_original_as_cause_and_closes_the_group() -> None:
    actor = launch([WorkerSpec("actor", Actor)], ResourcePool(1), deadline_seconds=60)["actor"]
    with pytest.raises(WorkerError, match=r"^actor rank 0: weak_link raised ValueError: no such token: 7$") as caught:
        actor.weak_link(0, "raise")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(WorkerError, match=r"actor.add: the workers are closed \(actor rank 0: weak_link raised"):
        actor.add(1.0)
    actor.close()


def test_every_role_once_and_at_least_one_process() -> None:
    with pytest.raises(
        ConfigError, match=r"launch of roles \['actor', 'actor'\]: expected at least one, and each once"
    ):
        launch([WorkerSpec("actor", Actor)] * 2, ResourcePool(1), deadline_seconds=60)
    with pytest.raises(ConfigError, match=r"a pool of 0 processes: expected at least 1; set cluster.processes"):
        ResourcePool(0)
