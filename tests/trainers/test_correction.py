# SPDX-License-Identifier: Apache-2.0
"""Weights, rejections and columns of losses, in a real run; and conflicting settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.first import first
from tests.raising import raises
from whet.batch import Batch
from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.rollout.batch import to_batch
from whet.trainers.build import build, build_scorer, plan, train
from whet.trainers.rl import estimate_advantages
from whet.trainers.shape import Shaper

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def length(solution_str: str) -> float:
    return float(len(solution_str) % 3)


@pytest.mark.parametrize(
    ("overrides", "columns"),
    first(
        2,
        [
            ({"algorithm.correction.weight": "importance"}, ["old_log_probs"]),
            ({"algorithm.correction.weight": "top_entropy"}, ["entropy"]),
            (
                {
                    "algorithm.correction.rejection": "divergence",
                    "algorithm.correction.rejection_options": {"high": 9.0},
                },
                ["old_log_probs"],
            ),
            (
                {
                    "algorithm.policy_loss": "reinforce",
                    "algorithm.kl.where": "loss",
                    "algorithm.kl.form": "k3_ratio",
                    "actor.mini_batch_size": 2,
                },
                ["old_log_probs", "ref_log_probs"],
            ),
            ({"algorithm.kl.where": "loss", "algorithm.kl.form": "k3_ratio"}, ["ref_log_probs"]),
            (
                {
                    "algorithm.policy_loss": "gspo",
                    "algorithm.correction.rejection": "divergence",
                    "algorithm.correction.rejection_options": {"form": "k1", "high": 1e-9},
                    "trainer.log_tokens": 1,
                },
                ["old_log_probs"],
            ),
            ({"algorithm.policy_loss": "kl_cov"}, ["old_log_probs"]),
            ({"algorithm.policy_loss": "clip_cov"}, ["draws", "old_log_probs"]),
            ({"algorithm.correction.old_log_probs": "rollout"}, ["old_log_probs"]),
            ({"algorithm.adv_estimator": "remax"}, ["reward_baselines"]),
            (
                {"algorithm.adv_estimator": "prime", "critic.value_loss": "implicit_reward"},
                ["process_rewards", "ref_log_probs"],
            ),
            ({"algorithm.adv_estimator": "optimal_token_baseline"}, ["old_log_probs", "sum_pi_squared"]),
        ],
        others=pytest.mark.slow,
    ),
    ids=str,
)
def test_runs_with_the_columns_that_it_needs(
    overrides: dict[str, Any], columns: list[str], train_config: MakeConfig, additions: Rows
) -> None:
    config = train_config(overrides)
    assert sorted(provider.name for provider in plan(config).providers) == columns
    history = train(config, reward=length, data=additions).history
    assert all(step["actor/grad_norm"] > 0 for step in history)


def test_what_is_rejected_is_not_trained_on(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config(
        {
            "algorithm.correction.rejection": "divergence",
            "algorithm.correction.rejection_options": {"form": "k1", "high": 0.5},
        }
    )
    run = build(config, build_scorer(config.reward, length), additions)
    groups = run.rollouts.start(4, step=1).result().groups
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    apart = torch.zeros(batch["responses"].shape)
    apart[3] = 1.0  # u - o of one row
    batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"] - apart)
    metrics = Metrics()
    batch = estimate_advantages(run, run.shaper.rewards(batch, metrics), metrics)
    left = run.correction.reject(batch, metrics)
    run.close()
    assert not left["loss_mask"][3].any()
    others = torch.arange(len(left)) != 3
    assert torch.equal(left["loss_mask"][others], batch["response_mask"][others])
    assert torch.equal(left["response_mask"], batch["response_mask"])  # what was sampled stays
    assert torch.equal(left["advantages"], batch["advantages"])  # the group still knows of it
    sampled = int(batch["response_mask"].sum())
    shown = metrics.reduce()
    assert shown["correction/rejected"] == pytest.approx(int(batch["response_mask"][3].sum()) / sampled)
    assert shown["correction/abs_max"] == pytest.approx(1.0)


def test_weights_scale_the_loss(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """A weight that is 2 everywhere doubles the gradient."""
    (tmp_path / "double.py").write_text(
        "import torch\ndef double(old_log_probs, *, by=2.0):\n    return torch.full_like(old_log_probs, by)\n"
    )
    double = {"algorithm.correction.weight": f"{tmp_path}/double.py:double"}
    once, twice = (
        train(
            train_config({**extra, "trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / str(len(extra)))}),
            reward=length,
            data=additions,
        ).history[-1]
        for extra in ({}, double)
    )
    assert twice["correction/weight"] == 2.0
    assert twice["actor/grad_norm"] == pytest.approx(2 * once["actor/grad_norm"], rel=1e-4)
    assert twice["actor/pg_loss"] == pytest.approx(2 * once["actor/pg_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("overrides", "key", "found", "advice"),
    [
        (
            {"algorithm.policy_loss": "decoupled_ppo", "algorithm.correction.weight": "importance"},
            "weight",
            "importance",
            "'decoupled_ppo'",
        ),
        (
            {"algorithm.correction.old_log_probs": "rollout", "algorithm.correction.weight": "importance"},
            "weight",
            "importance",
            "algorithm.correction.old_log_probs=rollout ",
        ),
        ({"algorithm.correction.weight": "importanc"}, "weight", "importanc", "'importance'"),
        (
            {"algorithm.correction.rejection_options": {"hig": 1}, "algorithm.correction.rejection": "divergence"},
            "rejection_options.hig",
            1,
            "'high'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    overrides: dict[str, Any], key: str, found: object, advice: str, train_config: MakeConfig
) -> None:
    with raises(ConfigError, f"algorithm.correction.{key}", found=found) as caught:
        train_config(overrides)
    assert any(advice in f"{each.expected}; {each.change}" for each in (caught.value, *caught.value.others))


def test_advantages_are_whitened_over_the_tokens_that_remain(train_config: MakeConfig) -> None:
    """Of advantages 1, 1, 2, 2 and a truncated row of 9: mean 1.5, variance 4 * 0.25 / 3, as in ROLL."""
    config = train_config({"algorithm.truncated": "zero", "algorithm.shaping.whiten_advantages": True})
    advantages = torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]])
    columns = {"response_mask": torch.ones(3, 2).long(), "truncated": torch.tensor([False, False, True])}
    shaped = Shaper(config).advantages(Batch.of({"advantages": advantages, **columns}), Metrics())
    expected = torch.tensor([-1.0, 1.0, 0.0])[:, None].expand(3, 2) * 0.75**0.5
    torch.testing.assert_close(shaped["advantages"], expected)


@pytest.mark.parametrize("mode", ["drop", "zero"])
def test_answers_that_were_cut_off(mode: str, train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"algorithm.truncated": mode, "data.max_response_length": 3})
    run = build(config, build_scorer(config.reward, length), additions)
    batch = to_batch(run.rollouts.start(4, step=1).result().groups, pad_token_id=run.pad_token_id)
    cut = batch["truncated"]
    assert cut.any() and not cut.all()
    metrics = Metrics()
    whole = estimate_advantages(run, batch.with_columns(token_level_rewards=batch["token_level_scores"]), metrics)
    shaped = run.shaper.advantages(estimate_advantages(run, run.shaper.rewards(batch, metrics), metrics), metrics)
    run.close()
    assert not shaped["response_mask"][cut].any()
    assert torch.equal(shaped["response_mask"][~cut], batch["response_mask"][~cut])
    same = torch.equal(shaped["advantages"][~cut], whole["advantages"][~cut])
    assert same == (mode == "zero")  # dropped ones are of no group, zeroed ones were
