# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import estimate, policy_loss
from tests.raising import raises
from whet.errors import RegistryError
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]
BATCH = {
    "token_level_rewards": torch.tensor([[0.0, 1.0, 2.0], [4.0, torch.nan, torch.nan]]),
    "values": torch.tensor([[0.5, 0.5, 0.5], [1.0, torch.nan, torch.nan]]),
    "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    "uid": torch.tensor([3, 3]),
}


def of(function: Callable[..., Any], options: dict[str, Any] | None = None, **supplied: Any) -> Any:
    return estimate(ADV_ESTIMATORS[function], BATCH, options or {}, supplied)


# ---- the forms of an estimator


def test_one_number_a_row_is_spread_over_its_sampled_tokens() -> None:
    def constant(response_mask: Tensor) -> Tensor:
        return torch.tensor([2, -1])

    result = of(constant)
    assert result.advantages.tolist() == [[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]
    assert result.advantages.dtype == torch.float32
    assert result.returns is None
    assert result.metrics == {}


def test_what_an_estimator_leaves_in_masked_places_is_removed() -> None:
    def careless(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        everywhere = (token_level_rewards + 1.0).masked_fill(response_mask == 0, torch.nan)
        return everywhere.requires_grad_(), everywhere

    result = of(careless)
    assert result.advantages.tolist() == result.returns.tolist() == [[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]
    assert not result.advantages.requires_grad


USER_FILE = '''
import torch
from collections import defaultdict


def my_advantage_estimator(returns, values, gamma=1.0):
    """Returns minus values."""
    return gamma * (returns - values), {"my/return": returns.sum(), "my/gamma": gamma}


def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    per_token = -advantages * torch.exp(log_prob - old_log_prob)
    loss = (per_token * response_mask).sum() / response_mask.sum()
    by_token = float(loss_agg_mode == "token-mean")
    return loss, {"actor/mode": by_token, "actor/eps": config.clip_ratio, "actor/loss": loss}


def outcome(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
    """GRPO as frameworks with a dict of groups write it."""
    scores = token_level_rewards.sum(dim=-1)
    groups = defaultdict(list)
    with torch.no_grad():
        for i in range(scores.shape[0]):
            groups[index[i]].append(scores[i])
        groups = {name: torch.stack(members) for name, members in groups.items()}
        for i in range(scores.shape[0]):
            members = groups[index[i]]
            scores[i] = (scores[i] - members.mean()) / (members.std() + epsilon) if len(members) > 1 else 0.0
        if config is not None and config.double:
            scores = 2 * scores
        scores = scores.unsqueeze(-1) * response_mask
    return scores, scores
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_a_users_estimator_works_unchanged(user_file: Path) -> None:
    entry = ADV_ESTIMATORS[f"{user_file}:my_advantage_estimator"]
    assert entry.columns == ("returns", "values")
    result = estimate(entry, BATCH, entry.resolve_options({"gamma": 2.0}, "algorithm.adv_options"))
    # reward-to-go 3, 3, 2 and 4, less the values, times 2
    assert result.advantages.tolist() == [[5.0, 5.0, 3.0], [6.0, 0.0, 0.0]]
    assert {name: value.tolist() for name, value in result.metrics.items()} == {"my/return": 12.0, "my/gamma": 2.0}
    assert result.returns is None


def test_a_critic_learns_the_reward_to_go_where_an_estimator_gives_no_returns(user_file: Path) -> None:
    for name in (f"{user_file}:my_advantage_estimator", "grpo"):
        result = estimate(ADV_ESTIMATORS[name], BATCH, {}, with_returns=True)
        assert result.returns is not None
        assert result.returns.tolist() == [[3.0, 3.0, 2.0], [4.0, 0.0, 0.0]]
    own = estimate(ADV_ESTIMATORS["gae"], BATCH, {"gamma": 0.0}, with_returns=True)
    assert own.returns is not None
    assert own.returns.tolist() == [[0.0, 1.0, 2.0], [4.0, 0.0, 0.0]]  # its own, discounted


def test_returns_of_the_batch_are_taken_where_there_are_some(user_file: Path) -> None:
    entry = ADV_ESTIMATORS[f"{user_file}:my_advantage_estimator"]
    result = estimate(entry, {**BATCH, "returns": torch.ones(2, 3)}, {})
    assert result.advantages.tolist() == [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_verls_form_of_a_group_estimator_works_unchanged(user_file: Path, make_batch: MakeBatch) -> None:
    entry = ADV_ESTIMATORS[f"{user_file}:outcome"]
    assert "uid" in entry.columns
    batch = make_batch(3, rows=20)
    batch["response_mask"][0, 0] = 1  # such a function counts a failed row, ours does not
    options = entry.resolve_options({"epsilon": 1e-6}, "algorithm.adv_options")
    ours = estimate(ADV_ESTIMATORS["grpo"], batch, {})
    theirs = estimate(entry, batch, options, {"config": SimpleNamespace(double=False)})
    torch.testing.assert_close(theirs.advantages, ours.advantages)
    doubled = estimate(entry, batch, options, {"config": SimpleNamespace(double=True)})
    torch.testing.assert_close(doubled.advantages, 2 * ours.advantages)
    assert doubled.returns is not None
    assert torch.equal(doubled.returns, doubled.advantages)


def test_advantages_returns_and_metrics_together() -> None:
    def everything(token_level_rewards: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        metrics = {"a": np.float32(0.5), "b": True, "c": torch.tensor([2.0])}
        return token_level_rewards, torch.tensor([1.0, 2.0]), metrics

    result = of(everything)
    assert result.returns.tolist() == [[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]]
    assert {name: value.tolist() for name, value in result.metrics.items()} == {"a": 0.5, "b": 1.0, "c": 2.0}


# ---- results that cannot be used


@pytest.mark.parametrize(
    ("returned", "part", "found", "expected"),
    [
        (torch.ones(3), "advantages", "[3]", "[2, 3], or [2]"),
        (torch.ones(2, 1), "advantages", "[2, 1]", ""),
        ([1.0, 2.0], "advantages", "list", ""),
        ((torch.ones(2, 3), torch.ones(3, 2)), "returns", "[3, 2]", ""),
        ((torch.ones(2, 3), "text"), "result", "[2, 3], a str)", "advantages, (advantages, returns)"),
        ((torch.ones(2, 3), {"m": torch.ones(2)}), "m", "[2]", "one number"),
        ((torch.ones(2, 3), {"m": "high"}), "m", "str", "one number"),
        (torch.tensor([1.0, torch.inf]), "advantages", "row 1, position 0", ""),
    ],
)
def test_a_result_that_cannot_be_used_is_refused(returned: Any, part: str, found: str, expected: str) -> None:
    def bad(token_level_rewards: Tensor) -> Any:
        return returned

    with raises(RegistryError, f"advantage estimator 'bad': {part}") as caught:
        of(bad)
    assert found in str(caught.value.found) and expected in caught.value.expected


def test_a_nan_reward_is_refused_with_the_columns_that_were_read() -> None:
    poisoned = {**BATCH, "token_level_rewards": torch.tensor([[0.0, torch.nan, 2.0], [4.0, 0.0, 0.0]])}
    read = re.compile("token_level_rewards, response_mask, uid$")
    with raises(RegistryError, re.compile("'rloo'"), found=re.compile("at 4 .* row 0, position 0$"), change=read):
        estimate(ADV_ESTIMATORS["rloo"], poisoned, {})


def test_a_column_that_is_not_there_is_named() -> None:
    without = {name: column for name, column in BATCH.items() if name != "values"}
    present = re.compile("token_level_rewards, response_mask, uid$")
    with raises(RegistryError, "advantage estimator 'gae'", found=re.compile("'values'"), expected=present):
        estimate(ADV_ESTIMATORS["gae"], without, {})


# ---- trajectories of several rows


def split_in_rows(batch: Batch, at: int) -> Batch:
    """Every row cut in two at a position, the second halves after all first ones."""
    cut = {}
    for name, column in batch.items():
        if column.ndim == 2 and name != "reward_parts":
            tail = torch.zeros_like(column)
            tail[:, : column.shape[1] - at] = column[:, at:]
            head = column.clone()
            head[:, at:] = 0
            cut[name] = torch.cat([head, tail])
        else:
            cut[name] = torch.cat([column, column])
    cut["trajectory_uid"] = torch.arange(len(batch["uid"])).repeat(2)
    return cut


@pytest.mark.parametrize("name", [entry.name for entry in ADV_ESTIMATORS])
@pytest.mark.parametrize("seed", range(3))
def test_a_trajectory_in_two_rows_is_one_trajectory(make_batch: MakeBatch, name: str, seed: int) -> None:
    entry, batch = ADV_ESTIMATORS[name], make_batch(seed)
    if name == "max_rl":
        batch = {**batch, "token_level_rewards": batch["token_level_rewards"].abs()}
    options = {"gamma": 0.9} if "gamma" in entry.options else {}
    whole = estimate(entry, batch, options)
    parts = estimate(entry, split_in_rows(batch, 4), options)
    expected = split_in_rows({"advantages": whole.advantages, "uid": batch["uid"]}, 4)["advantages"]
    torch.testing.assert_close(parts.advantages, expected)


def test_rows_of_one_trajectory_count_once_by_hand() -> None:
    # trajectory 0 earned 1 + 2 in two rows, trajectory 1 earned 1: mean 2
    batch = {
        "token_level_rewards": torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]),
        "response_mask": torch.tensor([[1, 0], [1, 1], [1, 1]]),
        "uid": torch.tensor([5, 5, 5]),
        "trajectory_uid": torch.tensor([0, 1, 0]),
    }
    result = estimate(ADV_ESTIMATORS["dr_grpo"], batch, {})
    assert result.advantages.tolist() == [[1.0, 0.0], [-1.0, -1.0], [1.0, 1.0]]


def test_trajectory_names_that_do_not_repeat_change_nothing(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    named = {**batch, "trajectory_uid": torch.randperm(12)}
    plain, result = (estimate(ADV_ESTIMATORS["gae"], each, {}) for each in (batch, named))
    assert torch.equal(result.advantages, plain.advantages)


def test_an_estimator_that_takes_the_batch_cannot_see_trajectories() -> None:
    def reads_batch(token_level_rewards: Tensor, response_mask: Tensor, batch: Any) -> Tensor:
        return token_level_rewards

    twice = {**BATCH, "trajectory_uid": torch.tensor([1, 1])}
    with raises(RegistryError, "advantage estimator 'reads_batch'", found=re.compile("'batch'")):
        estimate(ADV_ESTIMATORS[reads_batch], twice, {}, {"batch": object()})
    assert estimate(ADV_ESTIMATORS[reads_batch], BATCH, {}, {"batch": object()}).advantages[0].tolist() == [0, 1, 2]


# ---- losses


def loss_batch() -> Batch:
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, torch.nan, torch.nan]], requires_grad=True)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() + torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]),
        "advantages": torch.ones(2, 3),
        "response_mask": BATCH["response_mask"],
    }


def test_a_loss_per_token() -> None:
    batch = loss_batch()
    result = policy_loss(POLICY_LOSSES["ppo_clip"], batch, {})
    assert result.per_token is not None
    assert result.aggregated is None
    torch.testing.assert_close(
        result.per_token.detach(), torch.tensor([[-1.0, -1.0, -1.0], [-0.60653, 0, 0]]), rtol=0, atol=1e-5
    )
    assert set(result.diagnostics) == {"pg_clipfrac"}
    assert result.metrics == {}
    result.per_token.sum().backward()
    assert batch["log_probs"].grad is not None
    assert batch["log_probs"].grad[1, 1:].tolist() == [0.0, 0.0]


def test_a_users_loss_works_unchanged(user_file: Path) -> None:
    entry = POLICY_LOSSES[f"{user_file}:my_loss"]
    assert entry.columns == ("old_log_probs", "log_probs", "advantages", "response_mask")
    batch = loss_batch()
    supplied = {"loss_agg_mode": "token-mean", "config": SimpleNamespace(clip_ratio=0.2)}
    result = policy_loss(entry, batch, entry.resolve_options({}, "algorithm.loss_options"), supplied)
    assert result.per_token is None
    assert result.aggregated is not None
    torch.testing.assert_close(result.aggregated.detach(), torch.tensor(-(3 + 0.60653) / 4), rtol=0, atol=1e-5)
    assert {name: round(value.tolist(), 4) for name, value in result.metrics.items()} == {
        "actor/mode": 1.0,
        "actor/eps": 0.2,
        "actor/loss": -0.9016,
    }
    result.aggregated.backward()
    torch.testing.assert_close(batch["log_probs"].grad[0], torch.full((3,), -0.25))
    assert not result.metrics["actor/loss"].requires_grad


def test_what_a_loss_needs_and_nobody_supplies_is_named(user_file: Path) -> None:
    key = f"policy loss '{user_file}:my_loss'"
    with raises(RegistryError, key, found=re.compile("'loss_agg_mode'"), expected=re.compile("none")):
        policy_loss(POLICY_LOSSES[f"{user_file}:my_loss"], loss_batch(), {})


def test_a_value_loss_has_the_same_form() -> None:
    batch = {"old_values": BATCH["values"], "returns": torch.zeros(2, 3), **BATCH}
    result = policy_loss(VALUE_LOSSES["clipped"], batch, {})
    assert result.per_token is not None
    assert result.per_token.tolist() == [[0.125, 0.125, 0.125], [0.5, 0.0, 0.0]]


def test_a_loss_alone_and_with_scalars() -> None:
    def alone(log_probs: Tensor) -> Tensor:
        return -log_probs

    def with_scalars(log_probs: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return -log_probs, {"share": 0.5, "of_token": log_probs * 2}

    assert policy_loss(POLICY_LOSSES[alone], loss_batch(), {}).diagnostics == {}
    result = policy_loss(POLICY_LOSSES[with_scalars], loss_batch(), {})
    assert result.metrics["share"].tolist() == 0.5
    assert result.diagnostics["of_token"].tolist() == [[-2.0, -4.0, -6.0], [-1.0, 0.0, 0.0]]
    assert not result.diagnostics["of_token"].requires_grad


@pytest.mark.parametrize("returned", [torch.ones(2), torch.ones(1, 3), 1.0, (torch.ones(2, 3), torch.ones(2, 3))])
def test_a_loss_of_another_shape_is_refused(returned: Any) -> None:
    def bad(log_probs: Tensor) -> Any:
        return returned

    with raises(RegistryError, "policy loss 'bad': result", expected=re.compile(r"\[2, 3\]")):
        policy_loss(POLICY_LOSSES[bad], loss_batch(), {})
