# SPDX-License-Identifier: Apache-2.0
"""Devices that sampling and training take turns on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, Worker
from whet.errors import RewardError
from whet.roles.rollout_worker import Modes, RolloutWorker
from whet.roles.workers import TrainWorker
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit
from whet.trainers.stop import Stopped, StopSignals

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


class Switched:
    def __init__(self) -> None:
        self.calls = ""

    def rollout_mode(self) -> None:
        self.calls += "R"

    def trainer_mode(self) -> None:
        self.calls += "T"


def test_the_outer_block_switches_and_back() -> None:
    group = Switched()
    modes = Modes(group)  # type: ignore[arg-type]
    for calls in ("", "RT"):
        assert group.calls == calls
        with modes.rollout_mode():
            with modes.rollout_mode():
                assert group.calls == calls + "R"
            assert group.calls == calls + "R"
    assert group.calls == "RTRT"


def test_what_ends_the_run_is_what_is_raised() -> None:
    group = Switched()
    modes = Modes(group)  # type: ignore[arg-type]
    with pytest.raises(RewardError), modes.rollout_mode():
        raise RewardError("every answer failed")
    assert group.calls == "R"
    group.calls, modes = "", Modes(group)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), modes.rollout_mode():
        raise KeyboardInterrupt  # a checkpoint may follow
    assert group.calls == "RT"


@pytest.mark.parametrize("during", ["R", "T"])
def test_a_stop_waits_until_models_have_moved(during: str, tmp_path: Path) -> None:
    """In either direction; the step is then finished."""

    class Signalled(Switched):
        def moved(self, name: str) -> None:
            if name == during and name not in self.calls:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)  # a signal is handled between two instructions
            self.calls += name

        def rollout_mode(self) -> None:
            self.moved("R")

        def trainer_mode(self) -> None:
            self.moved("T")

    group, signals, sampled = Signalled(), StopSignals(tmp_path / "stop"), 0
    modes = Modes(group)  # type: ignore[arg-type]
    with signals:
        with signals.at_once(), modes.rollout_mode():
            sampled += 1
        with pytest.raises(Stopped):
            signals.here()
    assert (group.calls, sampled) == ("RT", 1)
    with modes.rollout_mode():
        assert group.calls == "RTR"  # it knows that models are back


def test_a_stop_while_samples_are_drawn_moves_models_back(tmp_path: Path) -> None:
    group, signals = Switched(), StopSignals(tmp_path / "stop")
    with signals, pytest.raises(Stopped), signals.at_once(), Modes(group).rollout_mode():  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
    assert group.calls == "RT"


def test_a_run_that_takes_turns_learns_the_same(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """The run has a reference and validation; memory that only sampling needs is free whenever a model is trained."""

    def trained(**overrides: Any) -> tuple[list[dict[str, float]], list[str]]:
        deeds: list[str] = []
        config = train_config(
            {
                "algorithm.kl.where": "loss",
                "algorithm.kl.coef": 0.1,
                "rollout.engine.options.kv_cache_bytes": 2**22,
                **overrides,
            }
        )
        run = build(config, build_scorer(config.reward, length), additions)
        workers: dict[str, Worker] = run.roles["rollout"]._transport.workers.by_role  # type: ignore[attr-defined]
        rollout = workers["rollout"]
        assert isinstance(rollout, RolloutWorker)
        for role, worker in workers.items():
            if isinstance(worker, TrainWorker):
                for deed in ("offload", "onload", "step"):
                    watched(worker.engine, deed, lambda deed, role=role: deeds.append(f"{role} {deed}"))
        watched(rollout.engine, "sleep", lambda deed: deeds.append(f"{deed}"))
        watched(rollout.engine, "submit", lambda deed: deeds[-1:] == ["generate"] or deeds.append("generate"))
        watched(
            workers["actor"].engine,  # type: ignore[attr-defined]
            "step",
            lambda deed: deeds.append(f"{rollout.engine.cache_bytes > 0}"),  # type: ignore[attr-defined]
        )
        fit(run)
        done = [*deeds]  # the end puts an engine to sleep too
        run.close()
        return run.history, done

    plain, deeds = trained()
    assert set(deeds) == {"generate", "True", "actor step"}
    taking_turns, deeds = trained(**{"rollout.free_cache_engine": True, "trainer.run_dir": str(tmp_path / "turns")})
    assert taking_turns == plain
    away, back = ["actor offload", "ref offload"], ["actor onload", "ref onload"]
    assert deeds == [*away, "generate", "sleep", *back, "False", "actor step"] * 2


def watched(on: Any, name: str, before: Callable[[str], object]) -> None:
    method = getattr(on, name)

    def also(*args: Any, **kwargs: Any) -> Any:
        before(name)
        return method(*args, **kwargs)

    setattr(on, name, also)


def length(solution_str: str) -> float:
    return float(len(solution_str))


def test_an_actor_whose_module_is_not_sampled_from_leaves_too(train_config: MakeConfig) -> None:
    from whet.trainers.build import plan, worker_specs

    config = train_config({"rollout.dtype": "bfloat16"})
    specs = worker_specs(config, plan(config), 1)
    roles = launch(specs, ResourcePool(1), 10.0)
    roles["rollout"].sync(0)
    deeds: list[str] = []
    workers = roles["rollout"]._transport.workers.by_role  # type: ignore[attr-defined]
    for deed in ("offload", "onload"):
        watched(workers["actor"].engine, deed, deeds.append)
    modes = Modes(roles["rollout"])
    with modes.rollout_mode():
        assert deeds == ["offload"]
    assert deeds == ["offload", "onload"]
    roles["rollout"].close()
