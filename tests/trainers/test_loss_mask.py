# SPDX-License-Identifier: Apache-2.0
"""A rejection takes tokens out of the loss, and out of nothing else: by hand, from `reject` to the gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algorithms.calls import Bound
from whet.batch import Batch
from whet.metrics import Metrics
from whet.registry import POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS, Registry
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.shape import Correction


def rejected(loss: str = "reinforce", weight: str = "importance", **options: Any) -> tuple[Batch, Metrics]:
    """Rows of three tokens and of one; the first has o = -1 and u = -1, -1.2, -2.5, and its last token is rejected: k3
    is e^1.5 - 2.5. The third row is rejected as a whole."""
    rollout = torch.tensor([[-1.0, -1.2, -2.5], [-1.0, 0.0, 0.0], [-9.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    batch = Batch.of(
        {
            "rollout_log_probs": rollout,
            "old_log_probs": torch.tensor([[-1.0], [-1.0], [-0.5]]) * mask,
            "advantages": torch.tensor([[2.0], [3.0], [9.0]]) * mask,
            "token_level_scores": torch.tensor([[0.0, 0.0, 3.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
            "response_mask": mask,
            "draws": 0.5 * mask,
        }
    )
    correction = Correction(
        Bound(POLICY_LOSSES[loss], {}),
        Bound(WEIGHTS[weight], options),
        Bound(REJECTIONS["divergence"], {"form": "k3", "high": 0.5}),
    )
    metrics = Metrics()
    return correction.weigh(correction.reject(batch, metrics), metrics), metrics


def test_the_weight_of_a_sequence_is_of_all_that_was_sampled() -> None:
    weighed, metrics = rejected(level="sequence", cap=100.0)
    assert weighed["loss_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    e = math.exp(1.7)  # 0 + .2 + 1.5, and not e^.2
    torch.testing.assert_close(weighed["token_weights"], torch.tensor([[e, e, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics.reduce()["correction/weight"] == pytest.approx((2 * e + 1) / 3)  # over what is trained on
    # the mean of the weights e^1.7, 1 and e^8.5, cut at 100, as verl takes it: before what was rejected is left out
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
    shown = objective.narrowed(Batch.of(batch))
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
