# SPDX-License-Identifier: Apache-2.0
"""Weights, rejections and what losses settle, in a real run; and what does not go together."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS, Registry
from whet.rollout.batch import to_batch
from whet.trainers.build import build, build_scorer, plan, train
from whet.trainers.objectives import PolicyObjective, ValueObjective, narrowed
from whet.trainers.rl import add_advantages
from whet.trainers.settle import Chosen, Settlement

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def length(solution_str: str) -> float:
    return float(len(solution_str) % 3)


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        ({"algorithm.correction.weight": "importance"}, ["old_log_probs"]),
        ({"algorithm.correction.weight": "top_entropy"}, ["entropy"]),
        ({"algorithm.correction.rejection": "divergence"}, ["old_log_probs"]),
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
    groups = run.rollouts.take(4, step=1).groups
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    apart = torch.zeros(batch["responses"].shape)
    apart[3] = 1.0  # u - o of one row
    batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"] - apart)
    metrics = Metrics()
    batch = add_advantages(run, run.shaper.rewards(batch, metrics), metrics)
    left = run.settlement.reject(batch, metrics)
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


def rejected(loss: str = "reinforce", weight: str = "importance", **options: Any) -> tuple[DataProto, Metrics]:
    """Rows of three tokens and of one; the first has o = -1 and u = -1, -1.2, -2.5, and its last token is rejected: k3
    is e^1.5 - 2.5. The third row is rejected as a whole."""
    rollout = torch.tensor([[-1.0, -1.2, -2.5], [-1.0, 0.0, 0.0], [-9.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    batch = DataProto.from_dict(
        {
            "rollout_log_probs": rollout,
            "old_log_probs": -1.0 * mask,
            "advantages": torch.tensor([[2.0], [3.0], [1.0]]) * mask,
            "token_level_scores": torch.tensor([[0.0, 0.0, 3.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
            "response_mask": mask,
            "draws": 0.5 * mask,
        }
    )
    settlement = Settlement(
        Chosen(POLICY_LOSSES[loss], {}),
        Chosen(WEIGHTS[weight], options),
        Chosen(REJECTIONS["divergence"], {"form": "k3", "high": 0.5}),
    )
    metrics = Metrics()
    return settlement.weigh(settlement.reject(batch, metrics), metrics), metrics


def test_the_weight_of_a_sequence_is_of_all_that_was_sampled() -> None:
    weighed, metrics = rejected(level="sequence", cap=100.0)
    assert weighed["loss_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    e = math.exp(1.7)  # 0 + .2 + 1.5, and not e^.2
    torch.testing.assert_close(weighed["token_weights"], torch.tensor([[e, e, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics.reduce()["correction/weight"] == pytest.approx((2 * e + 1) / 3)  # over what is trained on
    # the mean of the weights e^1.7, 1 and e^8, cut at 100, as verl takes it: before what was rejected is left out
    normalised, _ = rejected(level="sequence", cap=100.0, normalise=True)
    torch.testing.assert_close(normalised["token_weights"][0], torch.tensor([e, e, 0.0]) / ((e + 1 + 100) / 3))
    # scores 3, 1 and 0, though the token that was paid is no longer trained on: squares 9, 1 and 0, mean 10 / 3
    by_score, _ = rejected(weight="pf_ppo")
    torch.testing.assert_close(by_score["token_weights"][:2, 0], torch.tensor([2.7, 0.3]))


def test_what_a_loss_has_settled_is_chosen_among_what_is_trained_on() -> None:
    weighed, _ = rejected(loss="kl_cov", level="token")
    assert (weighed["chosen"].int() <= weighed["loss_mask"]).all() and weighed["chosen"].sum() == 1


def trained_on(name: str, registry: Registry = POLICY_LOSSES) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradient of two rows of log-ratios (.1, .2, .6) and (.4), the last token of the first being rejected;
    and the mask that the model is shown."""
    moved = torch.tensor([[0.1, 0.2, 0.6], [0.4, 0.0, 0.0], [0.7, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    batch = {
        "response_mask": mask,
        "loss_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]),
        "old_log_probs": -1.0 * mask,
        "ref_log_probs": -1.0 * mask,
        "advantages": torch.tensor([[1.0], [2.0], [9.0]]) * mask,
        "accuracy": torch.tensor([0.0, 0.0, 0.0]),
    }
    entry = registry[name]
    kind = PolicyObjective if registry is POLICY_LOSSES else ValueObjective
    objective = kind(name, aggregation=entry.marks.get("aggregation", "token-mean"))
    shown = narrowed(DataProto.from_dict(batch), objective)
    log_probs = ((moved - 1.0) * shown["response_mask"]).requires_grad_()
    outputs = {"log_probs": log_probs, "entropy": torch.ones(3, 3) * shown["response_mask"]}
    columns = shown.tensors()
    loss, metrics = objective.loss(outputs, columns, objective.counts(columns))
    loss.backward()
    assert log_probs.grad is not None and metrics.reduce().get("actor/entropy", 1.0) == 1.0
    assert not log_probs.grad[columns["loss_mask"] == 0].any()
    return loss.item(), log_probs.grad, shown["response_mask"]


def test_a_loss_of_sequences_knows_the_tokens_that_were_rejected() -> None:
    # s = exp(mean of .1, .2, .6) and exp(.4), both above 1.0004; no token has a gradient
    loss, gradient, shown = trained_on("gspo")
    assert loss == pytest.approx((-1.0004 * 1 - 1.0004 * 2) / 2) and not gradient.any()
    assert shown.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]  # a row with nothing to train on is not read
    # TOPR's ratio of the trajectory is e^.9, at most 1
    loss, gradient, _ = trained_on("topr")
    assert loss == pytest.approx(-(1 * (-0.9 - 0.8) + 2 * -0.6) / 3)
    # (sum_t (l - o) - A)^2 has the gradient 2 (.9 - 1) at each token that is trained on; mean over two rows
    loss, gradient, _ = trained_on("sppo")
    assert loss == pytest.approx(((0.9 - 1) ** 2 + (0.4 - 2) ** 2) / 2)
    torch.testing.assert_close(gradient[0], torch.tensor([-0.1, -0.1, 0.0]))
    # the sum of a process reward model's rewards is of the whole answer
    loss, _, _ = trained_on("implicit_reward", VALUE_LOSSES)
    assert loss == pytest.approx((math.log1p(math.exp(0.05 * 0.9)) + math.log1p(math.exp(0.05 * 0.4))) / 2)


def test_a_loss_of_tokens_is_shown_those_that_are_trained_on(tmp_path: Path) -> None:
    loss, _, shown = trained_on("ppo_clip")
    assert loss == pytest.approx(-(math.exp(0.1) + 1.2 + 2 * 1.2) / 3)
    assert shown.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    (tmp_path / "own.py").write_text(  # one that sums up itself does so over what is trained on
        "def own(log_prob, advantages, response_mask, loss_agg_mode):\n"
        "    return -(advantages * log_prob * response_mask).sum() / response_mask.sum(), {}\n"
    )
    own, reinforce = trained_on(f"{tmp_path}/own.py:own"), trained_on("reinforce")
    assert own[0] == pytest.approx(reinforce[0])
    torch.testing.assert_close(own[1], reinforce[1])


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
    ("overrides", "message"),
    [
        ({"algorithm.policy_loss": "decoupled_ppo", "algorithm.correction.weight": "importance"}, "would do it twice"),
        (
            {"algorithm.correction.old_log_probs": "rollout", "algorithm.correction.weight": "importance"},
            "takes the sampler's word for both",
        ),
        ({"algorithm.correction.weight": "importanc"}, "did you mean 'importance'"),
        (
            {"algorithm.correction.rejection_options": {"hig": 1}, "algorithm.correction.rejection": "divergence"},
            "'high'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    overrides: dict[str, Any], message: str, train_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config(overrides)


@pytest.mark.parametrize("mode", ["drop", "zero"])
def test_answers_that_were_cut_off(mode: str, train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"algorithm.truncated": mode, "data.max_response_length": 3})
    run = build(config, build_scorer(config.reward, length), additions)
    batch = to_batch(run.rollouts.take(4, step=1).groups, pad_token_id=run.pad_token_id)
    cut = batch["truncated"]
    assert cut.any() and not cut.all()
    metrics = Metrics()
    whole = add_advantages(run, batch.with_columns(token_level_rewards=batch["token_level_scores"]), metrics)
    shaped = run.shaper.advantages(add_advantages(run, run.shaper.rewards(batch, metrics), metrics), metrics)
    run.close()
    assert not shaped["response_mask"][cut].any()
    assert torch.equal(shaped["response_mask"][~cut], batch["response_mask"][~cut])
    same = torch.equal(shaped["advantages"][~cut], whole["advantages"][~cut])
    assert same == (mode == "zero")  # dropped ones are of no group, zeroed ones were
