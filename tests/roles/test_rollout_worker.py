# SPDX-License-Identifier: Apache-2.0
"""After a sync the rollout computes the same bits as the trainer, wherever the two run."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import check_fields, raises

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
import rollout_conformance as suite
from sync_workers import Rollout, Trainer, log_probs

from whet.batch import Batch
from whet.config import TrainConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import WeightSyncError, WorkerError
from whet.models.load import cast_weights, load_policy
from whet.roles.rollout_worker import Direct, RolloutWorker
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Finished, Request, generate
from whet.rollout.replicas import Replicas
from whet.trainers.build import build, build_scorer, plan, worker_specs
from whet.trainers.rl import fit
from whet.weight_sync.routes import BetweenPools, weight_sync

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
SECONDS = 60.0


@pytest.fixture
def groups() -> Iterator[list[Mapping[str, WorkerGroup]]]:
    """Launches, closed at the end."""
    started: list[Mapping[str, WorkerGroup]] = []
    yield started
    for each in started:
        next(iter(each.values())).close()


def two_roles(
    config: TrainConfig, started: list[Mapping[str, WorkerGroup]], pools: Sequence[int], sharded: bool
) -> tuple[WorkerGroup, WorkerGroup]:
    """An actor and a rollout in one pool of so many processes, or in one each."""
    specs = {spec.role: spec for spec in worker_specs(config, plan(config), 1)}
    actor = WorkerSpec("actor", Trainer, (*specs["actor"].args, sharded))
    rollout = WorkerSpec("rollout", Rollout, specs["rollout"].args)
    if len(pools) == 1:
        started.append(launch([actor, rollout], ResourcePool(pools[0]), SECONDS))
    else:
        started += [launch([spec], ResourcePool(n), SECONDS) for spec, n in zip((actor, rollout), pools, strict=True)]
    merged = {role: group for each in started for role, group in each.items()}
    return merged["actor"], merged["rollout"]


def sampled(rollout: WorkerGroup, made: Sequence[Request], max_batch_size: int = 256) -> list[Completion]:
    return generate(Replicas(rollout, max_batch_size, gathers=rollout.world_size > 1), made)


def batch(rows: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (rows, 24), generator=draw)
    mask = torch.ones(rows, 16, dtype=torch.int64)
    return Batch.of(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(24).expand(rows, 24),
            "response_mask": mask,
        }
    )


def check(config: TrainConfig, actor: WorkerGroup, rollout: WorkerGroup, model_folder: Path) -> None:
    """Checks for versions 0 and 1 that log-probs of the rollout's module, and its samples, belong to the trainer's
    weights."""
    dtype = getattr(torch, config.rollout.dtype or config.model.dtype)
    sync = weight_sync(actor, rollout, config.rollout.dtype or config.model.dtype, SECONDS)
    made, digests = suite.requests(groups=2, n=4), []
    for version in range(2):
        actor.change(version)
        digests.append(sync(version))
        own = load_policy(model_folder)
        with torch.no_grad():
            for name, weight in own.named_parameters():
                weight.copy_(actor.whole()[0][name])
        cast_weights(own, dtype)
        expected = log_probs(own, batch())
        assert bool(expected.any())
        for found in rollout.log_probs(batch()):
            assert torch.equal(found, expected)
        reference = NativeEngine(dtype=dtype)
        reference.attach(own, version)
        assert sampled(rollout, made) == generate(reference, made)
    assert digests[0] != digests[1]


# ---- in this process: one rank each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pools", "sharded", "dtype"),
    [((1,), False, None), ((1,), True, None), ((1,), False, "bfloat16"), ((1, 1), True, "bfloat16")],
    ids=str,
)
def test_one_rank_each(
    pools: tuple[int, ...],
    sharded: bool,
    dtype: str | None,
    train_config: MakeConfig,
    groups: list[Mapping[str, WorkerGroup]],
    model_folder: Path,
) -> None:
    config = train_config({"rollout.dtype": dtype})
    actor, rollout = two_roles(config, groups, pools, sharded)
    assert rollout.is_beside_actor() == [len(pools) == 1]
    check(config, actor, rollout, model_folder)


def test_another_machine(train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], model_folder: Path) -> None:
    config = train_config({"rollout.dtype": "bfloat16"})
    actor, rollout = two_roles(config, groups, (1, 1), sharded=False)
    rollout.move_to(("elsewhere",))
    check(config, actor, rollout, model_folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_changes_are_sent_until_a_link_is_new(
    dtype: str, train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]]
) -> None:
    config = train_config({"rollout.dtype": dtype, "rollout.engine.options": {"weight_delta": True}})
    actor, rollout = two_roles(config, groups, (1, 1), sharded=False)
    sync, sizes = BetweenPools(actor, rollout, dtype, SECONDS), []
    for version in range(4):
        actor.change_some(version)
        sync(version, {0: int(version == 3)})  # at last another process has the rank
        sizes.append(actor.sent_bytes()[0])
        [found], [expected] = rollout.weights(), actor.whole()
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight.to(getattr(torch, dtype))), name
    assert sizes[3] == sizes[0] and max(sizes[1:3]) < sizes[0] / 4


def test_an_adapter_is_added_in_on_the_way(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], model_folder: Path
) -> None:
    config = train_config({"model.lora.rank": 2})
    actor, rollout = two_roles(config, groups, (1, 1), sharded=False)
    check(config, actor, rollout, model_folder)


def test_a_trainer_that_breaks_off_is_named_and_nothing_is_sampled(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]]
) -> None:
    config = train_config()
    actor, rollout = two_roles(config, groups, (1, 1), sharded=False)
    engine = rollout._transport.workers.by_role["rollout"].engine  # type: ignore[attr-defined]
    sync = BetweenPools(actor, rollout, "float32", SECONDS)
    sync(0)
    actor.break_off()
    began = time.monotonic()
    with raises(WorkerError, "actor rank 0, publish", found=re.compile("ValueError: no such shard")):
        sync(1)
    assert time.monotonic() - began < 5
    with raises(WeightSyncError, key=re.compile("^version 1 ")):
        generate(engine, suite.requests(groups=1))


def test_an_engine_of_this_process_is_called_directly_and_its_errors_are_named(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollout = two_roles(train_config(), groups, (1,), sharded=False)
    assert rollout.here is not None
    worker, made = rollout.here.by_role["rollout"], suite.requests(groups=2, n=4)
    assert isinstance(worker, RolloutWorker)
    engine = Direct(worker, rollout.here)
    assert engine.sync(0) == rollout.sync(0)[0]
    assert generate(engine, made) == sampled(rollout, made)

    def broken(module: Any) -> Any:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(worker.engine, "_step", broken)
    with pytest.raises(WorkerError) as raised:
        generate(engine, made)
    check_fields(raised.value, "rollout rank 0, poll", found=re.compile("RuntimeError: no more memory"))
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.slow
def test_a_whole_run_with_the_rollout_elsewhere_is_the_same_run(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    """Metrics, answers, and the digests that say which weights gave them."""

    def trained(folder: str, **pools: Any) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        placement = {"cluster.placement": pools}
        config = train_config({"trainer.run_dir": str(tmp_path / folder), "trainer.total_steps": 3, **placement})
        run = build(config, build_scorer(config.reward, length), additions)
        fit(run)
        run.close()
        files = sorted((tmp_path / folder / "rollouts").glob("step_*.jsonl"))
        return run.history, [json.loads(line) for file in files for line in file.read_text().splitlines()]

    history, answers = trained("together")
    assert trained("apart", train={"roles": ["actor"]}, rollout={"roles": ["rollout"]}) == (history, answers)
    digests = {answer["policy_version"]: answer["policy_digest"] for answer in answers}
    assert list(digests) == [0, 1, 2] and len(set(digests.values())) == 3
    assert all(answer["policy_digest"] == digests[answer["policy_version"]] for answer in answers)


def length(solution_str: str) -> float:
    return float(len(solution_str))


# ---- in processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pools", "sharded"),
    [((2,), True), ((2,), False), ((2, 1), True), ((1, 2), True), ((2, 2), True)],
    ids=lambda value: str(value),
)
def test_several_ranks(
    pools: tuple[int, ...],
    sharded: bool,
    train_config: MakeConfig,
    groups: list[Mapping[str, WorkerGroup]],
    model_folder: Path,
) -> None:
    config = train_config()
    actor, rollout = two_roles(config, groups, pools, sharded)
    check(config, actor, rollout, model_folder)


@pytest.mark.slow
def test_one_machine_and_two_others(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], model_folder: Path
) -> None:
    config = train_config()
    actor, rollout = two_roles(config, groups, (2, 3), sharded=True)
    rollout.move_to(("", "elsewhere", "far away"))
    check(config, actor, rollout, model_folder)


@pytest.mark.slow
def test_a_slow_rank_takes_less_and_changes_nothing(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], model_folder: Path
) -> None:
    config = train_config({"rollout.max_batch_size": 16})
    actor, rollout = two_roles(config, groups, (2,), sharded=False)
    weight_sync(actor, rollout, "float32", SECONDS)(0)
    made = suite.requests(groups=40, n=4, longest=30)
    expected = sampled(rollout, made, 16)
    taken = rollout.taken()
    assert sum(taken) == 160 and min(taken) > 40
    rollout.delay([0.05, 0.0])
    assert sampled(rollout, made, 16) == expected
    taken = rollout.taken()
    assert sum(taken) == 160 and taken[0] < taken[1] / 2
    alone = NativeEngine()
    alone.attach(load_policy(model_folder), 0)
    assert generate(alone, made) == expected


@pytest.mark.slow
def test_requests_are_sampled_while_weights_arrive(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]], model_folder: Path
) -> None:
    actor, rollout = two_roles(train_config({"rollout.max_batch_size": 4}), groups, (1, 2), sharded=False)
    sync = weight_sync(actor, rollout, "float32", SECONDS)
    sync(0)
    made, engine, done = suite.requests(groups=60, n=4, longest=40), Replicas(rollout, 4, gathers=True), []
    alone = NativeEngine()
    alone.attach(load_policy(model_folder), 0)
    expected = dict(zip([request.uid for request in made], generate(alone, made), strict=True))
    actor.change(1)
    actor.slow_down(0.02)
    for request in made:
        engine.submit(request)
    while not done:
        done += engine.poll(1.0)
    with ThreadPoolExecutor(1) as thread:
        before, coming = len(done), thread.submit(sync, 1)
        while not coming.done():
            done += engine.poll(0.05)
        meanwhile = len(done) - before
        coming.result()
    while len(done) < len(made):
        done += engine.poll(1.0)
    assert meanwhile > 10
    found = {event.uid: event.completion for event in done if isinstance(event, Finished)}
    versions = {uid: [version for version, _ in each.versions] for uid, each in found.items()}
    assert {tuple(each) for each in versions.values()} == {(0,), (0, 1), (1,)}
    for uid, completion in found.items():
        count = sum(tokens for version, tokens in completion.versions if version == 0)
        assert completion.token_ids[:count] == expected[uid].token_ids[:count]
        assert completion.log_probs[:count] == expected[uid].log_probs[:count]


@pytest.mark.slow
def test_weights_that_change_on_the_way_are_named_and_nothing_is_sampled(
    train_config: MakeConfig, groups: list[Mapping[str, WorkerGroup]]
) -> None:
    actor, rollout = two_roles(train_config(), groups, (2, 1), sharded=True)
    sync = BetweenPools(actor, rollout, "float32", SECONDS)
    sync(0)
    actor.damage()
    began = time.monotonic()
    checksum = re.compile("^[0-9a-f]{16}")
    with raises(WeightSyncError, re.compile("^version 1: checksum of "), found=checksum, expected=checksum):
        sync(1)
    assert time.monotonic() - began < 10
