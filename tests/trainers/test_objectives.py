# SPDX-License-Identifier: Apache-2.0
"""Objectives of engines: numbers worked by hand, and a user's own functions from loss to optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.algorithms.calling import with_mini_batch_columns
from tests.engines.engine_conformance import update
from whet.batch import Batch
from whet.config import TrainConfig
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.metrics import Metrics
from whet.registry import POLICY_LOSSES
from whet.trainers.build import train
from whet.trainers.objectives import ImitationObjective, PolicyObjective, ValueObjective, interpolated

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
Columns = dict[str, torch.Tensor]
# Two rows of three and of one sampled token; the third failed.
MASK = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
BATCH = {
    "response_mask": MASK,
    "advantages": torch.tensor([[2.0, 9.0, 2.0, 2.0], [-1.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]),
    "ref_log_probs": torch.tensor([[-1.0, 0.0, -2.0, -2.0], [-0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
}
LOG_PROBS = torch.tensor([[-1.0, 0.0, -2.0, -3.0], [-0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
ENTROPY = torch.tensor([[0.5, 0.0, 1.0, 1.5], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
OUTPUTS = {"log_probs": LOG_PROBS, "entropy": ENTROPY}
USER_FUNCTIONS = '''
import torch


def my_advantage_estimator(returns, values, gamma=1.0):
    """Returns minus values."""
    return gamma * (returns - values), {"my/return": returns.sum()}


def my_aggregation(values, response_mask, *, num_sequences, power=2.0):
    return (values.sum(-1) ** power).sum() / num_sequences


def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    per_token = -advantages * torch.exp(log_prob - old_log_prob)
    loss = (per_token * response_mask).sum() / response_mask.sum()
    return loss, {"actor/mode": float(loss_agg_mode == "token-mean"), "actor/prompts": config.data.train_batch_size}
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(USER_FUNCTIONS)
    return str(path)


def of(
    objective: PolicyObjective | ValueObjective | ImitationObjective, outputs: Columns, batch: Columns, *rows: list[int]
) -> tuple[float, dict[str, float]]:
    """The loss and the metrics over micro-batches of these rows."""
    counts, metrics, total = objective.counts(batch), Metrics(), 0.0
    for chosen in rows:
        part = {name: column[chosen] for name, column in batch.items()}
        share, measured = objective.loss({name: column[chosen] for name, column in outputs.items()}, part, counts)
        metrics.merge(measured)
        total += share.item()
    return total, metrics.reduce()


SPLITS = [[[0, 1, 2]], [[0], [1]], [[1], [0, 2]]]


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_reinforce_by_hand(rows: list[list[int]]) -> None:
    # -A l: 2 + 4 + 6 in the first row, -0.5 in the second
    loss, metrics = of(PolicyObjective("reinforce"), OUTPUTS, BATCH, *rows)
    assert loss == pytest.approx(11.5 / 4)
    assert metrics == pytest.approx({"actor/pg_loss": 11.5 / 4, "actor/entropy": 6.0 / 4})
    loss, metrics = of(PolicyObjective("reinforce", aggregation="seq-mean-token-mean"), OUTPUTS, BATCH, *rows)
    assert loss == metrics["actor/pg_loss"] == pytest.approx((12 / 3 - 0.5) / 2)
    loss, _ = of(PolicyObjective("reinforce", aggregation="seq-mean-token-sum"), OUTPUTS, BATCH, *rows)
    assert loss == pytest.approx((12 - 0.5) / 2)
    loss, _ = of(
        PolicyObjective("reinforce", aggregation="seq-mean-token-sum-norm", fixed_length=8), OUTPUTS, BATCH, *rows
    )
    assert loss == pytest.approx((12 - 0.5) / 2 / 8)
    loss, _ = of(PolicyObjective("reinforce", aggregation="token-sum"), OUTPUTS, BATCH, *rows)
    assert loss == pytest.approx(11.5)


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_a_users_aggregation_is_given_what_it_names(functions: str, rows: list[list[int]]) -> None:
    # sums of -A l by row: 12 and -0.5
    loss, metrics = of(PolicyObjective("reinforce", aggregation=f"{functions}:my_aggregation"), OUTPUTS, BATCH, *rows)
    assert loss == metrics["actor/pg_loss"] == pytest.approx((144 + 0.25) / 2)


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_entropy_bonus_and_kl_are_added_to_the_loss(rows: list[list[int]]) -> None:
    objective = PolicyObjective("reinforce", entropy_coef=0.1, kl_form="k2", kl_coef=0.5)
    # k2 is d^2 / 2: only the last token of the first row is away from the reference, by 1
    loss, metrics = of(objective, OUTPUTS, BATCH, *rows)
    assert loss == pytest.approx((11.5 - 0.1 * 6.0 + 0.5 * 0.5) / 4)
    assert metrics == pytest.approx({"actor/pg_loss": 11.5 / 4, "actor/entropy": 1.5, "actor/kl_loss": 0.5 / 4})


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_diagnostics_are_means_over_sampled_tokens(rows: list[list[int]]) -> None:
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    shift = torch.tensor([[0.0, 5.0, 1.0, -0.1], [1.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]])
    loss, metrics = of(
        PolicyObjective("ppo_clip", options), OUTPUTS, {**BATCH, "old_log_probs": LOG_PROBS - shift}, *rows
    )
    # ratios 1, e, e^-0.1 with A = 2: e is clipped to 1.2; ratio e with A = -1: not clipped
    ratio = torch.tensor(1.0).exp().item()
    expected = (-2 - 2.4 - 2 * 0.904837418 + ratio) / 4
    assert loss == metrics["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
    assert metrics["actor/ppo_kl"] == pytest.approx(-(1.0 - 0.1 + 1.0) / 4)


@pytest.mark.parametrize("name", [entry.name for entry in POLICY_LOSSES if "old_log_probs" in entry.columns])
@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_ppo_kl_is_the_k1_estimate_of_every_loss(name: str, rows: list[list[int]]) -> None:
    # l - o of the four sampled tokens: -30, 0, 1, 25; no loss cuts what is reported
    moved = torch.tensor([[-30.0, 9.0, 0.0, 1.0], [25.0, 9.0, 9.0, 9.0], [9.0] * 4])
    others = {"rollout_log_probs": LOG_PROBS, "draws": MASK / 2, "accuracy": torch.tensor([1.0, 0.0, 0.0])}
    batch = {**BATCH, **others, "old_log_probs": LOG_PROBS - moved}
    _, metrics = of(PolicyObjective(name), OUTPUTS, with_mini_batch_columns(POLICY_LOSSES[name], batch, {}), *rows)
    assert metrics["actor/ppo_kl"] == pytest.approx((30 + 0 - 1 - 25) / 4)


def test_a_ppo_kl_that_a_users_loss_reports_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def own(log_probs, old_log_probs):\n    return log_probs, {'actor/ppo_kl': old_log_probs.sum() * 0 + 7}\n"
    )
    batch = {**BATCH, "old_log_probs": LOG_PROBS}
    assert of(PolicyObjective(f"{tmp_path}/own.py:own"), OUTPUTS, batch, [0, 1, 2])[1]["actor/ppo_kl"] == 7.0


def test_without_old_log_probs_they_are_the_current_ones() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    objective = PolicyObjective("ppo_clip", options)
    loss, metrics = objective.loss({**OUTPUTS, "log_probs": log_probs}, BATCH, objective.counts(BATCH))
    loss.backward()
    assert metrics.reduce()["actor/ppo_kl"] == 0.0
    assert log_probs.grad is not None  # the policy gradient: -A / 4 tokens
    torch.testing.assert_close(log_probs.grad, -BATCH["advantages"] * MASK / 4)


def test_interpolated_old_log_probs_by_hand() -> None:
    """l - u = 0.6 for tokens sampled by the weights before the update, by the weights one version and two versions
    earlier."""
    log_probs, sampler = torch.full((1, 3), -1.0), torch.full((1, 3), -1.6)
    old = interpolated(log_probs, sampler, torch.tensor([[0, 1, 2]]))
    assert torch.allclose(old, torch.tensor([[-1.6, -1.3, -1.2]]))

    objective = PolicyObjective("ppo_clip", interpolates=True)
    batch = {
        "response_mask": torch.ones(1, 3, dtype=torch.int64),
        "advantages": torch.ones(1, 3),
        "rollout_log_probs": sampler,
        "policy_version": torch.tensor([[7, 6, 5]], dtype=torch.int32),
    }
    outputs = {"log_probs": log_probs, "entropy": torch.zeros(1, 3)}
    counts = objective.counts(batch)
    loss, _ = replace(objective, version=7).loss(outputs, batch, counts)
    ratios = torch.tensor([0.6, 0.3, 0.2]).exp().clamp(max=1.2)  # ppo_clip's default bound
    assert loss.item() == pytest.approx(-ratios.mean().item(), abs=1e-6)


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_value_loss_by_hand(rows: list[list[int]]) -> None:
    batch = {
        "response_mask": MASK,
        "values": torch.tensor([[0.0, 9.0, 1.0, 0.0], [2.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]),
        "returns": torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
    }
    now = {"values": torch.tensor([[0.25, 0.0, 2.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])}
    # clip 0.5: values seen are (.25, 1.5, .5) and 1.5; the larger square counts: .5625, 1, .25 and 2.25, halved
    loss, metrics = of(ValueObjective("clipped", {"cliprange_value": 0.5}), now, batch, *rows)
    assert loss == metrics["critic/vf_loss"] == pytest.approx(0.5 * (0.5625 + 1.0 + 0.25 + 2.25) / 4)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(2 / 4)
    assert metrics["critic/vpred_mean"] == pytest.approx(4.25 / 4)


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_imitation_is_cross_entropy_over_the_mask(rows: list[list[int]]) -> None:
    loss, metrics = of(ImitationObjective(), OUTPUTS, BATCH, *rows)
    assert loss == pytest.approx(6.5 / 4)
    assert metrics == pytest.approx({"sft/loss": 6.5 / 4, "sft/tokens": 4.0})


def test_a_loss_that_sums_up_itself_is_weighed_by_what_it_was_taken_over(functions: str) -> None:
    class Config:
        data = type("Data", (), {"train_batch_size": 32})

    batch = {**BATCH, "old_log_probs": LOG_PROBS + 0.5}
    objective = PolicyObjective(f"{functions}:my_loss", supplied=Config)
    whole, metrics = of(objective, OUTPUTS, batch, [0, 1, 2])
    # -A exp(-0.5): three times 2 and once -1
    assert whole == pytest.approx(-5 * 0.60653066 / 4)
    ratios = dict.fromkeys(("actor/ratio_mean", "actor/ratio_min", "actor/ratio_max"), 0.60653066)
    named = {"actor/pg_loss": whole, "actor/mode": 1.0, "actor/prompts": 32.0}
    assert metrics == pytest.approx({**named, "actor/entropy": 1.5, "actor/ppo_kl": 0.5, **ratios})
    for rows in SPLITS[1:]:
        split, metrics = of(objective, OUTPUTS, batch, *rows)
        assert split == metrics["actor/pg_loss"] == pytest.approx(whole)
    by_rows = PolicyObjective(f"{functions}:my_loss", aggregation="seq-mean-token-mean", supplied=Config)
    split, metrics = of(by_rows, OUTPUTS, batch, [0], [1])
    assert split == pytest.approx((-2 + 1) / 2 * 0.60653066) and metrics["actor/mode"] == 0.0


def test_pg_loss_of_an_update_in_several_micro_batches_is_the_hand_value(model_folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < torch.tensor([6, 1, 4, 3, 5])[:, None]).long()
    attention_mask = torch.cat([torch.ones(5, 3, dtype=torch.long), mask], 1)
    batch = Batch.of(
        {
            "input_ids": torch.randint(3, 50, (5, 9), generator=draw),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "advantages": torch.randn(5, 1, generator=draw) * mask,
        }
    )
    engine = SingleEngine(RoleSettings(str(model_folder), EngineConfig(), "float32", 10, OptimConfig(lr=0.0)))
    log_probs = engine.forward(batch, frozenset({"log_probs"}))["log_probs"]
    expected = (-batch["advantages"] * log_probs * mask).sum() / 19
    measured = update(engine, batch, PolicyObjective("reinforce")).reduce()
    assert measured["actor/pg_loss"] == pytest.approx(expected.item(), rel=1e-5)


# ---- a user's functions, unchanged, through a whole run


def test_a_users_aggregation_is_chosen_by_config(functions: str, train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"algorithm.loss_agg_mode": f"{functions}:my_aggregation", "trainer.total_steps": 1})
    run = train(config, reward=lambda solution_str: float(len(solution_str)), data=additions)
    assert run.history[0]["actor/pg_loss"] > 0 and run.history[0]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_users_estimator_starts_a_critic_that_learns_returns(
    functions: str, train_config: MakeConfig, additions: Rows
) -> None:
    config = train_config(
        {
            "algorithm.adv_estimator": f"{functions}:my_advantage_estimator",
            "algorithm.adv_options": {"gamma": 0.5},
            "critic.optim.lr": 3e-3,
            "critic.value_loss": "mse",
            "critic.epochs": 4,
            "trainer.total_steps": 6,
            "actor.optim.lr": 0.0,
        }
    )
    run = train(config, reward=lambda solution_str: 2.0, data=additions)
    assert set(run.roles) == {"actor", "critic", "rollout"}
    first, last = run.history[0], run.history[-1]
    # undiscounted reward-to-go is 2 everywhere, a fresh critic says 0, and the estimator halves the difference
    assert first["critic/returns/min"] == first["critic/returns/max"] == 2.0
    assert first["critic/advantages/mean"] == pytest.approx(1.0)
    assert first["my/return"] == 2 * first["response_length/mean"] * 16
    assert first["critic/values/max"] == 0.0 and last["critic/values/mean"] > 0.5
    assert last["critic/vf_loss"] < first["critic/vf_loss"]


@pytest.mark.slow
def test_a_users_loss_gives_the_steps_of_the_same_loss_of_ours(
    functions: str, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    def final_loss(name: str) -> tuple[list[float], list[float]]:
        config = train_config(
            {
                "algorithm.policy_loss": name,
                "actor.mini_batch_size": 2,
                "actor.max_tokens_per_micro_batch": 30,
                "trainer.total_steps": 2,
                "trainer.run_dir": str(tmp_path / Path(name).name),
                **(
                    {"algorithm.loss_options": {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9}}
                    if ":" not in name
                    else {}
                ),
            }
        )
        run = train(config, reward=lambda solution_str: float(len(solution_str)), data=additions)
        return [r["actor/pg_loss"] for r in run.history], [r["actor/grad_norm"] for r in run.history]

    theirs, ours = final_loss(f"{functions}:my_loss"), final_loss("ppo_clip")
    assert theirs[0] == pytest.approx(ours[0], abs=1e-5) and theirs[1] == pytest.approx(ours[1], rel=1e-3)
