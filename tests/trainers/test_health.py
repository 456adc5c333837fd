# SPDX-License-Identifier: Apache-2.0
"""Skipped updates, warnings, and the trajectories that they name."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.first import first
from tests.raising import raises
from whet import serialization
from whet.batch import Batch
from whet.checkpoints import checkpoint
from whet.config import TrainConfig
from whet.engines.single import SingleEngine
from whet.errors import EngineError, WeightSyncError
from whet.metrics import Metrics
from whet.roles.rollout_worker import Direct
from whet.rollout.batch import to_batch
from whet.trainers.build import build, build_scorer, train
from whet.trainers.health import Health, sampler_gap
from whet.trainers.rl import add_advantages, fit, sample, update
from whet.weight_sync import buckets

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


class Poisoned:
    """An engine's gradient clipping that gives a norm of NaN, and gradients to match, in some of its calls."""

    def __init__(self, calls: set[int]) -> None:
        self.calls, self.call, self.plain = calls, 0, SingleEngine._clip

    def __call__(self, engine: SingleEngine) -> torch.Tensor:
        self.call += 1
        if self.call in self.calls:
            for parameter in engine.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
        return self.plain(engine)


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    poisoned = Poisoned(calls)
    monkeypatch.setattr(SingleEngine, "_clip", lambda engine: poisoned(engine))


def test_an_update_that_is_not_finite_is_skipped_and_counted(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison(monkeypatch, {2, 3})
    run = train(train_config({"trainer.total_steps": 4, "trainer.save_freq": 1}), reward=sevens, data=additions)
    assert [record["actor/skipped_updates"] for record in run.history] == [0, 1, 2, 2]
    assert [record["actor/skipped_in_a_row"] for record in run.history] == [0, 1, 2, 0]
    assert math.isnan(run.history[1]["actor/grad_norm"]) and "actor/lr" not in run.history[1]
    skipped = [record.args for record in caplog.records if record.name == "whet.trainers.health" and record.args]
    assert skipped[:2] == [("actor", 1), ("actor", 2)]
    states = [serialization.load(run.run_dir / f"checkpoints/global_step_{step}/actor.state") for step in (3, 4)]
    assert [(state["steps_done"], state["skipped"]) for state in states] == [(1, 2), (2, 2)]
    assert all(value.isfinite().all() for value in states[1]["model"].values())


def test_three_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, {3, 4, 5})
    config = train_config({"trainer.total_steps": 9, "trainer.save_freq": 2})
    change = re.compile(r"actor\.optim\.lr;.*global_step_2: trainer\.resume=.*global_step_2 ")
    with raises(EngineError, key="actor", found=re.compile("^3 "), change=change):
        train(config, reward=sevens, data=additions)
    newest = checkpoint.newest(tmp_path / "run")
    assert newest is not None and newest.name == "global_step_4"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5  # of the step that stopped it too


@pytest.mark.slow
def test_three_in_a_row_stop_a_run_that_was_resumed_between_them(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2, 3, 4})
    train(train_config({"trainer.total_steps": 3}), reward=sevens, data=additions)
    with raises(EngineError, key="actor", found=re.compile("^3 ")):
        train(train_config({"trainer.total_steps": 9}), reward=sevens, data=additions)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae", "gdpo"])
def test_a_step_whose_groups_are_all_dropped_trains_on_nothing(
    estimator: str, train_config: MakeConfig, additions: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"algorithm.filter.name": "dapo", "algorithm.adv_estimator": estimator, "trainer.save_freq": 1}
    run = train(train_config(settings), reward=lambda solution_str: {"reward": 1.0, "other": 0.5}, data=additions)
    states = [serialization.load(run.run_dir / f"checkpoints/global_step_{step}/actor.state") for step in (1, 2)]
    start = AutoModelForCausalLM.from_pretrained(run.config.model.path).state_dict()
    for state in states:
        assert state["steps_done"] == 0 and all(torch.equal(start[name], w) for name, w in state["model"].items())
    assert [record["actor/empty_updates"] for record in run.history] == [1, 1]
    assert run.history[0]["critic/score/mean"] == 1.0 and not any(math.isnan(v) for v in run.history[0].values())
    said = [record.args for record in caplog.records if record.name.startswith("whet.rollout")]
    assert [args[0] for args in said if args] == [1]


def test_groups_that_are_all_equal_are_said_after_the_third_step(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(train_config({"trainer.total_steps": 4}), reward=lambda solution_str: 0.0, data=additions)
    assert [record.args for record in caplog.records if record.levelname == "WARNING"] == [(3, 3)]
    caplog.clear()
    alone = {"algorithm.adv_estimator": "reinforce_plus_plus", "trainer.run_dir": str(tmp_path / "alone")}
    train(train_config({**alone, "trainer.total_steps": 4}), reward=lambda solution_str: 1.0, data=additions)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("source", first(1, ["trainer", "rollout"], others=pytest.mark.slow))
def test_a_rollout_with_other_weights_than_the_trainer_ends_the_run_before_it_is_trained_on(
    source: str,
    model_folder: Path,
    train_config: MakeConfig,
    additions: Rows,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.get_output_embeddings().weight.data *= 4  # so that it is as sure of its tokens as a trained model
    model.save_pretrained(tmp_path / "sure")
    attach = buckets.attach

    def attach_wrongly(rollout: Any, module: Any, weights: Any, version: int) -> str:
        """The weights of version 2 arrive with a sign lost."""
        other = copy.deepcopy(module)
        if version == 2:
            other.model.norm.weight.data.neg_()
        return attach(rollout, other, weights, version)

    monkeypatch.setattr(buckets, "attach", attach_wrongly)
    monkeypatch.setattr(Direct, "reads_trained_weights", False)
    settings = {
        "model.path": str(tmp_path / "sure"),
        "model.tokenizer_path": str(model_folder),
        "algorithm.correction.old_log_probs": source,
        "trainer.total_steps": 4,
        "trainer.save_freq": 1,
    }
    run = build(train_config(settings), build_scorer(train_config().reward, sevens), additions)
    with contextlib.closing(run), pytest.raises(WeightSyncError) as caught:
        fit(run)
    gaps = run.health.state()["rollout/log_probs"]
    assert len(gaps) == 3 and max(gaps[:2]) < 1e-4
    found, before, *_ = re.findall(r"\d[\de.+-]*\d", str(caught.value.found))
    assert float(found) > 1 and float(before) == pytest.approx(max(gaps[:-1]), rel=0.01)
    newest = checkpoint.newest(tmp_path / "run")
    assert newest is not None and newest.name == "global_step_2" and str(newest) in caught.value.change


class Sampled:
    """Two responses of two tokens, at step 4: one of version 1, one of version 1 and then `newest`."""

    def __init__(self, newest: int, distance: float, known: bool) -> None:
        self.ours = torch.tensor([[-9.0, -9.0], [-9.0, -1.0 - distance]])
        tensors = {
            "response_mask": torch.ones(2, 2, dtype=torch.long),
            "policy_version": torch.tensor([[1, 1], [1, newest]]),
            "rollout_log_probs": torch.full((2, 2), -1.0),
            "row": torch.arange(2),
            **({"old_log_probs": self.ours} if known else {}),
        }
        self.batch = Batch.of(tensors)
        self.asked = list[int]()
        algorithm = SimpleNamespace(correction=SimpleNamespace(old_log_probs="trainer"))
        self.run: Any = SimpleNamespace(
            engine=SimpleNamespace(reads_trained_weights=False),
            config=SimpleNamespace(algorithm=algorithm),
            roles={"actor": SimpleNamespace(dp_size=1, forward=self.forward)},
            policy_objective=SimpleNamespace(temperature=1.0),
            run_dir=Path("nowhere"),
        )

    def forward(self, batch: Batch, needs: tuple[str, ...], temperature: float) -> dict[str, torch.Tensor]:
        self.asked += batch["row"].tolist()
        return {"log_probs": self.ours[batch["row"]]}


@pytest.mark.parametrize("known", [True, False])
def test_only_tokens_of_the_newest_weights_are_compared(known: bool) -> None:
    sampled = Sampled(3, 0.25, known)
    assert sampler_gap(sampled.run, sampled.batch, 4) == (0.25, 0)
    assert sampled.asked == ([] if known else [1])  # the other row is shorter by nothing, and older
    sampled.batch["response_mask"].zero_()
    assert sampler_gap(sampled.run, sampled.batch, 4)[0] == 0.0


def test_a_jump_of_the_shortest_row_is_none_if_the_others_agree() -> None:
    health, sampled = Health(), Sampled(3, 0.25, known=False)
    health.check_sampler(sampled.run, sampled.batch, 4)
    sampled.batch["policy_version"].fill_(3)
    sampled.batch["response_mask"][1, 1] = 0
    sampled.ours.fill_(-1.0)
    sampled.ours[1, 0] = -3.0  # 2 nats in one of three tokens: the limit is 5 times 0.25
    sampled.asked.clear()
    health.check_sampler(sampled.run, sampled.batch, 4)
    assert sampled.asked == [1, 1, 0]
    sampled.ours.fill_(-13.0)
    with pytest.raises(WeightSyncError):
        health.check_sampler(sampled.run, sampled.batch, 4)


def test_a_gap_ends_the_run_under_equal_weights_and_is_told_under_older_ones(caplog: pytest.LogCaptureFixture) -> None:
    """1 nat may be noise in the first step; then 0.3, and five times the largest of the steps before: 5 after 1."""
    health = Health()
    for distance in (1.0, 5.0):
        sampled = Sampled(3, distance, known=True)
        health.check_sampler(sampled.run, sampled.batch, 4)
    for distance, newest in ((25.5, 3), (math.nan, 3)):
        sampled = Sampled(newest, distance, known=True)
        with pytest.raises(WeightSyncError):
            health.check_sampler(sampled.run, sampled.batch, 4)
    assert caplog.records == []
    older = Sampled(2, 1.5, known=True)
    Health().check_sampler(older.run, older.batch, 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    quiet = Health()
    for distance in (0.01, 0.3):
        sampled = Sampled(3, distance, known=True)
        quiet.check_sampler(sampled.run, sampled.batch, 4)
    with pytest.raises(WeightSyncError):
        sampled = Sampled(3, 1.51, known=True)
        quiet.check_sampler(sampled.run, sampled.batch, 4)


def all_weights(model: torch.nn.Module, number: float) -> None:
    for weight in model.parameters():
        weight.data.fill_(number).view(-1)[::3] *= -1


def one_weight(model: torch.nn.Module, number: float) -> None:
    next(model.parameters()).data[0, 0] = number


def one_norm(model: torch.nn.Module, number: float) -> None:
    dict(model.named_parameters())["model.norm.weight"].data.fill_(number)


def the_head(model: torch.nn.Module, number: float) -> None:
    """The square of the number is finite, the logits that it gives are not: the norm before makes it larger."""
    one_norm(model, number)
    all_weights(model.get_submodule("lm_head"), 9 * number)


@pytest.mark.parametrize(
    ("spoil", "number"),
    first(
        1,
        [
            (one_weight, math.inf),
            (one_weight, math.nan),
            (all_weights, 1e38),
            (one_weight, 1e38),
            (one_norm, 1e38),
            (the_head, 1e19),
        ],
        others=pytest.mark.slow,
    ),
)
def test_weights_that_are_not_finite_end_the_run_unsaved(
    spoil: Callable[[torch.nn.Module, float], None],
    number: float,
    train_config: MakeConfig,
    additions: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, updates = SingleEngine.step, 0

    def overflows(engine: SingleEngine, *arguments: object) -> Metrics:
        nonlocal updates
        updates += 1
        metrics = step(engine, *arguments)
        if updates == 3:
            spoil(engine.model, number)
        return metrics

    monkeypatch.setattr(SingleEngine, "step", overflows)
    config = train_config({"trainer.total_steps": 9, "trainer.save_freq": 1, "trainer.save_limit": 1})
    with raises(EngineError, key="actor, step 3", change=re.compile(r"/global_step_2: trainer\.resume=")):
        train(config, reward=sevens, data=additions)
    newest = checkpoint.newest(Path(str(config.trainer.run_dir)), good=True)
    assert newest is not None and newest.name == "global_step_2"


def test_the_newest_good_checkpoint_is_never_deleted(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, {3, 4})
    config = train_config({"trainer.total_steps": 4, "trainer.save_freq": 1, "trainer.save_limit": 1})
    train(config, reward=sevens, data=additions)
    assert {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()} == {"global_step_2", "global_step_4"}


def test_a_jump_is_what_goes_far_beyond_the_steps_before() -> None:
    health = Health()
    assert [health._is_jump("actor/grad_norm", value) for value in (1, 2, 1, 50, 1)] == [False] * 5  # too few before
    assert [health._is_jump("actor/grad_norm", value) for value in (250, 251, 1256)] == [False, False, True]
    assert not health._is_jump("actor/grad_norm", math.nan)
    for value in (0.0, 0.0, 1e-9, 0.0, 0.0, 0.009):  # nothing that small is a jump of the KL
        assert not health._is_jump("actor/ppo_kl", value)
    assert health._is_jump("actor/ppo_kl", 0.046)
    again = Health()
    again.load_state(health.state())
    assert again.state() == health.state() and again._is_jump("actor/ppo_kl", 0.24)


@pytest.mark.parametrize("metric", ["actor/grad_norm", "actor/ppo_kl"])
def test_the_rows_that_caused_a_jump_are_named(
    metric: str, train_config: MakeConfig, additions: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """One answer is paid a thousand times more than all others: without a baseline it moves the policy alone."""
    config = train_config({"algorithm.adv_estimator": "reinforce_plus_plus", "actor.optim.lr": 1e-2})
    run = build(config, build_scorer(config.reward, sevens), additions)
    groups = run.rollouts.start(4, step=1).result().groups

    answers = groups[2].trajectories
    odd = replace(answers[1], reward=1000.0)
    groups[2] = replace(groups[2], trajectories=(answers[0], odd, *answers[2:]))
    metrics = Metrics()
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    batch = add_advantages(run, run.columns.add(batch, run.sources(groups, 1), metrics), 1, metrics)
    update(run, batch, 1, metrics)
    run.health.load_state({name: [1e-6] * 5 for name in ("actor/grad_norm", "actor/ppo_kl")})
    metrics.mean("actor/ppo_kl", 99.0)
    new = run.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
    run.health.check(run, batch, 1, metrics)
    run.close()
    [(*told, rows)] = [record.args for record in caplog.records if record.args and metric in record.args]
    assert (told[0], told[3:]) == (1, [5, 1e-6])
    named = rows.partition(": ")[2].removesuffix(" (uids in rollouts/step_000001.jsonl)").split(", ")
    if metric == "actor/grad_norm":
        assert named[0] == odd.uid and len(set(named)) == 4
    else:
        moved = (new - batch["rollout_log_probs"]).abs().mul(batch["response_mask"]).sum(1).argsort(descending=True)
        assert named == [batch["trajectory_uid_name"][row] for row in moved[:4].tolist()]


@pytest.mark.slow
def test_a_jump_of_a_reward_model_names_no_rows_and_ends_no_run(
    train_config: MakeConfig, additions: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    config = train_config({"algorithm.adv_estimator": "prime", "critic.value_loss": "implicit_reward"})
    run = build(config, build_scorer(config.reward, sevens), additions)
    metrics = Metrics()
    batch = add_advantages(run, sample(run, 1, metrics), 1, metrics)
    update(run, batch, 1, metrics)
    run.health.load_state({"critic/grad_norm": [1e-9] * 5})
    run.health.check(run, batch, 1, metrics)
    run.close()
    [(*told, rows)] = [record.args for record in caplog.records if record.args and "critic/grad_norm" in record.args]
    assert told[3:] == [5, 1e-9] and rows == ""
