# SPDX-License-Identifier: Apache-2.0
"""Random schedules of asynchronous rollouts hold all invariants; a failing one is kept, replayed and shrunk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.first import first
from tests.simulation.__main__ import main
from tests.simulation.failing import KEPT, failure, failures, keep, read, shrink
from tests.simulation.plan import Plan
from tests.simulation.synchronous import synchronous_steps
from tests.simulation.world import World
from whet.rollout.fleet import Router
from whet.rollout.flow import Flow


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Leaves out the lines that the restored flow logs a thousand times."""
    caplog.set_level(logging.ERROR, "whet")


def show(seeds: range) -> str:
    return "\n".join(
        f"seed {plan.seed}: {error}; replay it with: python -m tests.simulation --file {keep(plan, error)} --shrink"
        for plan, error in failures(seeds)
    )


def test_schedules_hold_all_invariants() -> None:
    assert not show(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3200, 400))
def test_more_schedules_hold_all_invariants(first: int) -> None:
    assert not show(range(first, first + 400))


@pytest.mark.slow
def test_two_hundred_killed_trainers_lose_nothing_and_double_nothing() -> None:
    """All invariants hold after each restore, including the ones about prompts that are nowhere or in two places."""
    kills, seeds = 0, iter(range(3200, 5200))
    while kills < 200:
        world = World(Plan.of(next(seeds)))
        world.run()
        kills += world.incarnation - 1


def test_schedules_that_failed_once_hold_all_invariants() -> None:
    kept = sorted(KEPT.glob("*.json"))
    assert kept
    for path in kept:
        assert failure(read(path)) is None, path.name


@pytest.mark.slow
def test_schedules_cover_what_can_happen() -> None:
    """Kills, retries, lost tokens, dropped groups, several turns and all bounds of staleness are in the first seeds."""
    plans = [Plan.of(seed) for seed in range(200)]
    kinds = {fault.kind for plan in plans for fault in plan.faults}
    assert {"environments", "rewards"} <= kinds
    assert {"die", "hang", "cut", "leave", "join", "load_fails", "all_die", "kill", "crash", "save", "slow"} <= kinds
    assert {plan.staleness for plan in plans} == {0, 0.5, 1, 1.5, 2, 4}
    restored = retried = versions = dropped = turns = failed = 0
    for plan in plans[:60]:
        world = World(plan, checks=())
        restored += world.incarnation
        world.run()
        restored += world.incarnation > 1 and bool(world.saved.entries)
        retried += world.retries > 0
        for batch in world.batches.values():
            dropped += len(batch.dropped)
            trajectories = [each for group in batch.kept for each in group.trajectories]
            versions += any(len(turn.versions) > 1 for each in trajectories for turn in each.turns)
            turns += any(len(each.turns) > 1 for each in trajectories)
            failed += any(each.failure is not None for each in trajectories)
    assert min(restored, retried, versions, dropped, turns, failed) > 3


@pytest.mark.parametrize("seed", first(3, range(12), others=pytest.mark.slow))
def test_without_staleness_groups_are_those_of_the_synchronous_loop(seed: int) -> None:
    plan = replace(Plan.of(seed, staleness=0.0), extra=0.0)
    world = World(plan)
    world.run()
    steps = synchronous_steps(plan)
    for step, batch in world.batches.items():
        kept, weights = steps[step - 1]
        assert (batch.kept or batch.dropped[: batch.wanted]) == kept and world.weights[step - 1] == weights
    assert len(world.batches) == plan.steps


def test_machines_forget_what_is_over() -> None:
    world = World(Plan.of(3))
    world.run()
    assert isinstance(world.router, Router) and isinstance(world.flow, Flow)
    assert not world.flow.queue or world.plan.filters
    assert len(world.router.flights) <= sum(len(each.given) for each in world.router.ranks.values())


def test_a_failing_schedule_is_kept_replayed_and_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Router.on_lost

    def forgets(self: Router, rank: int, generation: int) -> object:
        told = plain(self, rank, generation)
        self.waiting = {}
        return told

    with monkeypatch.context() as planted:
        planted.setattr(Router, "on_lost", forgets)
        plan, error = next(failures(range(200)))
        path = keep(plan, error, tmp_path)
        assert read(path) == plan and failure(read(path)) == error, "replayed to the same error"
        smaller, found = shrink(plan, error)
        assert (
            len(smaller.faults) <= 1 and smaller.steps <= plan.steps and found.partition(":")[0] == error.split(":")[0]
        )
        monkeypatch.setattr("tests.simulation.failing.FOLDER", tmp_path)
        monkeypatch.setattr("sys.argv", ["simulation", "--file", str(path), "--shrink"])
        assert main() == 1 and "smaller: " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["simulation", "--seed", str(plan.seed)])
    assert main() == 0 and "all invariants hold" in capsys.readouterr().out
