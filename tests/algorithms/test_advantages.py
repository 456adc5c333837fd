# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.algorithms.calling import estimate
from tests.raising import raises
from whet.algorithms.statistics import whiten
from whet.errors import DataError
from whet.registry import ADV_ESTIMATORS

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]


def advantages(name: str, batch: Batch, **options: Any) -> Tensor:
    return estimate(ADV_ESTIMATORS[name], batch, options).advantages


def scored(scores: list[float], uid: list[int]) -> Batch:
    """Rows of two sampled tokens with one of a tool between them; the score is paid half on each."""
    halves = torch.tensor(scores, dtype=torch.float64)[:, None] / 2
    rewards = torch.cat([halves, torch.full_like(halves, torch.nan), halves], dim=1)
    mask = torch.tensor([[1, 0, 1]]).repeat(len(scores), 1)
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": torch.tensor(uid)}


# ---- gae


def slow_gae(batch: Batch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, values, mask = batch["token_level_rewards"], batch["values"], batch["response_mask"]
    unwhitened, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(len(rewards)):
        next_value = next_advantage = 0.0
        for t in reversed(range(rewards.shape[1])):
            if not mask[row, t]:
                continue
            delta = float(rewards[row, t]) + gamma * next_value - float(values[row, t])
            next_advantage = delta + gamma * lam * next_advantage
            next_value = float(values[row, t])
            unwhitened[row, t], returns[row, t] = next_advantage, next_advantage + next_value
    tokens = unwhitened[mask == 1]
    whitened = (unwhitened - tokens.mean()) / (tokens.var() + 1e-8).sqrt() * mask
    return whitened, returns


def test_gae_by_hand() -> None:
    # gamma = lam = .5. The last token: d = 2 - .25 = 1.75 = L, return 2. The first, whose next state is the last one's
    # since a tool wrote between them: d = 1 + .5 * .25 - .5 = .625, L = .625 + .25 * 1.75 = 1.0625, return 1.5625.
    # Whitened: (1.0625 - 1.40625) / (sqrt 2 * .34375) = -.70711
    batch = {
        "token_level_rewards": torch.tensor([[1.0, torch.nan, 2.0, torch.nan]]),
        "values": torch.tensor([[0.5, torch.nan, 0.25, torch.nan]]),
        "response_mask": torch.tensor([[1, 0, 1, 0]]),
    }
    result = estimate(ADV_ESTIMATORS["gae"], batch, {"gamma": 0.5, "lam": 0.5})
    assert result.returns is not None
    assert result.returns.tolist() == [[1.5625, 0.0, 2.0, 0.0]]
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.70711, 0.0, 0.70711, 0.0]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_the_slow_loop_on_many_rows(make_batch: MakeBatch, gamma: float, lam: float) -> None:
    batch = make_batch(1, rows=20, poison=True)
    result = estimate(ADV_ESTIMATORS["gae"], batch, {"gamma": gamma, "lam": lam})
    expected, returns = slow_gae(batch, gamma, lam)
    assert result.returns is not None
    torch.testing.assert_close(result.advantages, expected)
    torch.testing.assert_close(result.returns, returns)


def test_gae_never_bootstraps_from_what_follows_the_last_token() -> None:
    batch = {
        "token_level_rewards": torch.tensor([[3.0, 0.0]]),
        "values": torch.tensor([[1.0, 500.0]]),
        "response_mask": torch.tensor([[1, 0]]),
    }
    result = estimate(ADV_ESTIMATORS["gae"], batch, {})
    assert result.returns is not None
    assert result.returns.tolist() == [[3.0, 0.0]]


# ---- group estimators


def slow_grpo(scores: list[float], others: list[float], score: float, std_norm: bool) -> float:
    if len(scores) == 1:
        return 0.0
    deviation = score - statistics.fmean(scores)
    return deviation / (statistics.stdev(scores) + 1e-6) if std_norm else deviation


def slow_rloo(scores: list[float], others: list[float], score: float) -> float:
    return score - statistics.fmean(others) if others else 0.0


def slow_group(batch: Batch, one: Callable[[list[float], list[float], float], float]) -> Tensor:
    mask, uid = batch["response_mask"], batch["uid"].tolist()
    scores = [float(row[m == 1].sum()) for row, m in zip(batch["token_level_rewards"], mask, strict=True)]
    alive = [bool(m.any()) for m in mask]
    result = torch.zeros_like(batch["token_level_rewards"])
    for row in range(len(uid)):
        if alive[row]:
            others = [scores[k] for k in range(len(uid)) if uid[k] == uid[row] and alive[k] and k != row]
            result[row] = one([*others, scores[row]], others, scores[row]) * mask[row]
    return result


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 1, 2, 3: mean 2, deviation 1
        ("grpo", [-1 / 1.000001, 0.0, 1 / 1.000001]),
        ("dr_grpo", [-1.0, 0.0, 1.0]),
        # 1 - (2 + 3) / 2, 2 - (1 + 3) / 2, 3 - (1 + 2) / 2
        ("rloo", [-1.5, 0.0, 1.5]),
    ],
)
def test_group_estimators_by_hand(name: str, expected: list[float]) -> None:
    # the fourth row is alone in its group and carries no signal
    result = advantages(name, scored([1.0, 2.0, 3.0, 5.0], [4, 4, 4, 9]))
    rows = torch.tensor([*expected, 0.0], dtype=torch.float64)
    torch.testing.assert_close(result, torch.stack([rows, torch.zeros(4, dtype=torch.float64), rows], dim=1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "win_rate", "max_rl", "lite_ppo")),
        ("grpo", {"eps": 0.0}),
        ("lite_ppo", {"eps": 0.0}),
    ],
)
def test_scores_that_differ_by_rounding_give_no_advantage(name: str, options: dict[str, Any]) -> None:
    scores = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]
    assert advantages(name, scored(scores, [4, 4, 4]), **options).eq(0.0).all()


def test_which_rows_count_does_not_depend_on_rounding() -> None:
    # two best rows, so none alone; a sum of parts that cancel each other is no score
    best, score = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.2], [0.1 + 0.2 - 0.3, 1.0, 0.0]
    assert advantages("grpo_passk", scored(best, [4, 4, 4])).eq(0.0).all()
    # rows that draw with one and beat one: (1/2 + 1) / 2 - 1/2
    assert advantages("win_rate", scored(best, [4, 4, 4]))[:, 0].tolist() == [0.25, 0.25, -0.5]
    # the first of two best rows, though the second has the larger sum
    found = advantages("best_worst", scored([best[1], best[0], 0.2], [4, 4, 4]))[:, 0]
    assert found.tolist() == [1.0, 0.0, -1.0]
    # mean 1/3, of three rows one counts: alpha = 3
    found = advantages("gpg", scored(score, [4, 4, 4]), count="nonzero")[:, 0]
    torch.testing.assert_close(found, torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(6, 20))
def test_group_estimators_equal_the_slow_loops(make_batch: MakeBatch, seed: int, rows: int) -> None:
    batch = make_batch(seed, rows=rows, poison=True)
    for name, one in {
        "grpo": lambda scores, others, score: slow_grpo(scores, others, score, std_norm=True),
        "dr_grpo": lambda scores, others, score: slow_grpo(scores, others, score, std_norm=False),
        "rloo": slow_rloo,
    }.items():
        torch.testing.assert_close(advantages(name, batch), slow_group(batch, one), rtol=1e-6, atol=1e-8)


def test_the_std_switch_is_what_tells_grpo_from_dr_grpo(make_batch: MakeBatch) -> None:
    batch = make_batch(5)
    assert torch.equal(advantages("grpo", batch, std_norm=False), advantages("dr_grpo", batch))
    assert not torch.allclose(advantages("grpo", batch), advantages("dr_grpo", batch))
    assert ADV_ESTIMATORS["dr_grpo"].marks == {"aggregation": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_with_equal_scores_have_no_advantage_at_all(name: str) -> None:
    batch = scored([1000.1] * 7, [3] * 7)
    assert not advantages(name, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}).any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_failed_row_changes_nobody(name: str) -> None:
    whole = scored([1.0, 2.0, 4.0, 100.0], [4, 4, 4, 4])
    whole["response_mask"][3] = 0
    result = advantages(name, whole)
    torch.testing.assert_close(result[:3], advantages(name, scored([1.0, 2.0, 4.0], [4, 4, 4])))
    assert not result[3].any()


def test_mean_and_deviation_are_of_the_same_group() -> None:
    # with the deviation of the batch instead, the second group would be a hundred times the first
    result = advantages("grpo", scored([1.0, 3.0, 100.0, 300.0], [1, 1, 2, 2]))
    torch.testing.assert_close(result[:2], result[2:], rtol=1e-5, atol=0)


# ---- reinforce_plus_plus


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma .5, one step over the tool's text: R = 0 + .5 * 1, 1 and, in the second row, 2. Mean 7/6, deviations
    # -2/3, -1/6, 5/6, variance (16 + 1 + 25) / 36 / 2 = 7/12: -.87287, -.21822, 1.09109
    batch = {
        "token_level_rewards": torch.tensor([[0.0, torch.nan, 1.0], [2.0, torch.nan, torch.nan]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
    }
    result = estimate(ADV_ESTIMATORS["reinforce_plus_plus"], batch, {"gamma": 0.5})
    assert result.returns is not None
    assert result.returns.tolist() == [[0.5, 0.0, 1.0], [2.0, 0.0, 0.0]]
    expected = torch.tensor([[-0.87287, 0.0, -0.21822], [1.09109, 0.0, 0.0]])
    torch.testing.assert_close(result.advantages, expected, rtol=0, atol=1e-5)


def test_reinforce_plus_plus_equals_the_slow_loop(make_batch: MakeBatch) -> None:
    batch = make_batch(2, rows=20)
    # without values and with lam 1, L of generalised advantage estimation is the return
    expected, _ = slow_gae({**batch, "values": torch.zeros_like(batch["values"])}, gamma=0.9, lam=1.0)
    torch.testing.assert_close(advantages("reinforce_plus_plus", batch, gamma=0.9), expected)


# ---- more baselines


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # deviations -1, 1 and -2, 2, each on two tokens: mean 0, variance 2 (1 + 1 + 4 + 4) / 7 = 20 / 7
    batch = scored([0.0, 2.0, 0.0, 4.0], [1, 1, 2, 2])
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=torch.float64) / (20 / 7) ** 0.5
    for position in (0, 2):
        torch.testing.assert_close(advantages("reinforce_plus_plus_baseline", batch)[:, position], expected)


def test_remax_takes_the_greedy_score_from_every_reward_to_go() -> None:
    batch = {
        "token_level_rewards": torch.tensor([[1.0, torch.nan, 2.0], [4.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
        "reward_baselines": torch.tensor([2.5, 1.0]),
    }
    assert advantages("remax", batch).tolist() == [[0.5, 0.0, -0.5], [3.0, -1.0, 0.0]]


def lengths_and_scores(lengths: list[int], scores: list[float], uid: list[int]) -> Batch:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[:, 0] = torch.tensor(scores, dtype=torch.float64)
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": torch.tensor(uid)}


def test_opo_weighs_the_baseline_by_length() -> None:
    # (3 * 2 + 1 * 0) / 4 = 1.5; the third row is alone
    batch = lengths_and_scores([3, 1, 2], [2.0, 0.0, 1.0], [7, 7, 8])
    assert advantages("opo", batch)[:, 0].tolist() == [0.5, -1.5, 0.0]


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    # groups (0, 1), (1, 1), (0, 0): B = 6; two rows differ: alpha 3; three rows have a score: alpha 2
    batch = scored([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1, 1, 2, 2, 3, 3])
    assert advantages("gpg", batch)[:, 0].tolist() == [-1.5, 1.5, 0, 0, 0, 0]
    assert advantages("gpg", batch, count="nonzero")[:, 0].tolist() == [-1, 1, 0, 0, 0, 0]


def test_max_rl_divides_by_the_mean_and_refuses_negative_scores() -> None:
    batch = scored([1.0, 7.0, 0.0, 0.0, 1.0], [1, 1, 2, 2, 3])
    assert advantages("max_rl", batch)[:, 0].tolist() == [-0.75, 0.75, 0.0, 0.0, 0.0]
    with raises(DataError, re.compile("max_rl"), found=-1.0):
        advantages("max_rl", scored([-1.0, 2.0], [1, 1]))


def test_lite_ppo_takes_mean_of_the_group_and_deviation_of_the_batch() -> None:
    batch = scored([0.0, 2.0, 4.0, 10.0], [1, 1, 2, 2])
    deviation = statistics.stdev([0.0, 2.0, 4.0, 10.0]) + 1e-6
    expected = [each / deviation for each in (-1.0, 1.0, -3.0, 3.0)]
    assert advantages("lite_ppo", batch)[:, 0].tolist() == pytest.approx(expected)


def test_raft_imitates_right_answers_alone() -> None:
    batch = {"accuracy": torch.tensor([1.0, 0.0, 0.5]), "response_mask": torch.ones(3, 2, dtype=torch.long)}
    assert advantages("raft", batch).tolist() == [[1, 1], [0, 0], [0, 0]]


def test_grpo_passk_pays_the_best_row_its_lead() -> None:
    # leads: 3 over 1; a tie; alone
    batch = scored([0.0, 1.0, 3.0, 2.0, 2.0, 5.0], [1, 1, 1, 2, 2, 3])
    assert advantages("grpo_passk", batch, std_norm=False)[:, 0].tolist() == [0, 0, 2, 0, 0, 0]
    deviation = statistics.stdev([0.0, 1.0, 3.0]) + 1e-6
    assert float(advantages("grpo_passk", batch)[2, 0]) == pytest.approx(2 / deviation)


def test_gdpo_reads_all_parts_of_a_row_however_short_its_answer() -> None:
    """Two parts and two positions: the second part is no padding."""
    batch = {
        "response_mask": torch.tensor([[1, 0], [1, 1], [1, 0]]),
        "reward_parts": torch.tensor([[0.0, 4.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
        "token_level_rewards": torch.zeros(3, 2, dtype=torch.float64),
        "uid": torch.tensor([1, 1, 1]),
    }
    # the second part: 2, -1, -1 and a deviation of sqrt(3)
    expected = torch.tensor([[2.0, 0.0], [-1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64) / 3**0.5
    torch.testing.assert_close(advantages("gdpo", batch), expected, rtol=1e-5, atol=1e-5)


def test_gdpo_compares_rows_whatever_their_lengths() -> None:
    # summed and normalised parts are 2c, -2c, c, -c in rows of 4, 1, 1, 1 tokens: mean 0, deviation c sqrt(10 / 3)
    batch = {
        "reward_parts": torch.tensor([[3.0, 1.0], [0.0, 0.0], [1.0, 5.0], [0.0, 5.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 1, 1], *3 * [[1, 0, 0, 0]]]),
        "token_level_rewards": torch.zeros(4, 4, dtype=torch.float64),
        "uid": torch.tensor([1, 1, 2, 2]),
    }
    expected = torch.tensor([1.095, -1.095, 0.548, -0.548], dtype=torch.float64)
    rows = advantages("gdpo", batch)
    torch.testing.assert_close(rows[:, 0], expected, atol=5e-4, rtol=0)
    assert torch.equal(rows, rows[:, :1] * batch["response_mask"])
    # over tokens, as verl has it: 2 four times, -2, 1, -1: mean 6 / 7, squares (4 * 8^2 + 20^2 + 1 + 13^2) / 49
    tokens = advantages("gdpo", batch, over="tokens")[:, 0]
    over = torch.tensor([8.0, -20.0, 1.0, -13.0], dtype=torch.float64) / 7
    torch.testing.assert_close(tokens, over / (826 / 49 / 6) ** 0.5, atol=5e-4, rtol=0)


def test_gdpo_normalises_each_part_before_it_is_weighed() -> None:
    # part 0 is 0 and 1, part 1 is 0 and 100 the other way round: after normalisation they cancel, or not with weights
    batch = {
        "reward_parts": torch.tensor([[0.0, 100.0], [1.0, 0.0]], dtype=torch.float64),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
        "uid": torch.tensor([4, 4]),
    }
    torch.testing.assert_close(advantages("gdpo", batch), torch.zeros(2, 2, dtype=torch.float64), atol=1e-2, rtol=0)
    # one sign a row, two rows: the variance with n - 1 is twice the square
    weighed = advantages("gdpo", batch, weights=[3.0, 1.0])
    root = 0.5**0.5
    expected = torch.tensor([[-root, -root], [root, root]], dtype=torch.float64)
    torch.testing.assert_close(weighed, expected, atol=1e-6, rtol=0)


def test_win_rate_is_the_share_of_the_others_that_a_row_beats() -> None:
    batch = scored([1.0, 2.0, 2.0, 9.0], [1, 1, 1, 2])
    assert advantages("win_rate", batch)[:, 0].tolist() == [-0.5, 0.25, 0.25, 0.0]


def test_optimal_token_baseline_by_hand() -> None:
    # two rows of two tokens, p = 1/2 and sum_v pi^2 = 1/2 in the first state of both: w = 1 - 1 + 1/2. In the second
    # p = 1/4, sum 3/8 in row 0 (w = 7/8) and p = 1, sum 1 in row 1 (w = 0). W: .5, 1.375 and .5, .5.
    # R: 3, 2 and 1, 1. B_0 = (1.5 + .5) / 1 = 2, B_1 = (2.75 + .5) / 1.875 = 1.7333
    batch = {
        "token_level_rewards": torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64),
        "old_log_probs": torch.tensor([[0.5, 0.25], [0.5, 1.0]], dtype=torch.float64).log(),
        "rollout_log_probs": torch.tensor([[0.5, 0.25], [0.25, 1.0]], dtype=torch.float64).log(),
        "sum_pi_squared": torch.tensor([[0.5, 0.375], [0.5, 1.0]], dtype=torch.float64),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
        "uid": torch.tensor([3, 3]),
    }
    expected = torch.tensor([[1.0, 2 - 26 / 15], [-1.0, 1 - 26 / 15]], dtype=torch.float64)
    torch.testing.assert_close(advantages("optimal_token_baseline", batch), expected, atol=1e-7, rtol=0)
    # the first token of row 1 is twice as likely as it was to the sampler, capped at 1.5: w = .5 * 2.25, W 1.125 twice.
    # B_0 = (1.5 + 1.125) / 1.625, B_1 = (2.75 + 1.125) / 2.5
    weighed = torch.tensor([[3 - 2.625 / 1.625, 0.45], [1 - 2.625 / 1.625, -0.55]], dtype=torch.float64)
    torch.testing.assert_close(advantages("optimal_token_baseline", batch, cap=1.5), weighed, atol=1e-7, rtol=0)
    shorter = {**batch, "response_mask": torch.tensor([[1, 1], [1, 0]])}
    # R of row 1 is 0 now; position 1 is reached by row 0 alone: no baseline
    expected = torch.tensor([[1.5, 2.0], [-1.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages("optimal_token_baseline", shorter), expected, atol=1e-7, rtol=0)


# ---- prime


def test_prime_by_hand() -> None:
    # outcome 1 and 0 in a group of two: RLOO 1 and -1. Process: row 0 has (2, 0), mean 1, row 1 has (3), mean 3.
    # Row 0: (2 - 3) + (0 - 3) = -4, then -3. Row 1: 3 - 1 = 2.
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        "process_rewards": torch.tensor([[2.0, 0.0], [3.0, torch.nan]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "uid": torch.tensor([0, 0]),
    }
    raw = torch.tensor([1.0 - 4.0, 1.0 - 3.0, -1.0 + 2.0], dtype=torch.float64)
    got = advantages("prime", batch, beta=1.0)
    torch.testing.assert_close(got[batch["response_mask"] == 1], (raw - raw.mean()) / raw.std())
    raw = torch.tensor([2.0 - 2.0, 2.0 - 1.5, -2.0 + 1.0], dtype=torch.float64)
    got = advantages("prime", batch, beta=0.5, outcome_weight=2.0, process_weight=1.0)
    torch.testing.assert_close(got[batch["response_mask"] == 1], (raw - raw.mean()) / raw.std())


# ---- teachers


def test_distillation_pulls_towards_the_teacher() -> None:
    batch = scored([0.0, 2.0], [1, 1])
    batch["old_log_probs"] = torch.full(batch["token_level_rewards"].shape, -2.0, dtype=torch.float64)
    batch["teacher_log_probs"] = batch["old_log_probs"] + 0.5  # likelier for the teacher: more of it
    assert advantages("on_policy_distillation", batch, coef=4.0)[:, 0].tolist() == [2.0, 2.0]
    both = advantages("grpo_distillation", batch, coef=4.0, std_norm=False)
    assert both[:, 0].tolist() == [1.0, 3.0]


# ---- vapo, and what is not whitened


def test_vapo_by_hand() -> None:
    # deltas: (0 + 1/2 - 1, 0 + 1/4 - 1/2, 1 - 1/4) = (-1/2, -1/4, 3/4); l = 3, alpha = 2/3: lambda = 1 - 1/2 = 1/2
    # A: 3/4; -1/4 + 3/8 = 1/8; -1/2 + 1/16 = -7/16.    lambda of the critic 1: 3/4, 1/2, 0, plus V: 1, 1, 1
    # the row of one token: lambda max(0, 1 - 3/2) = 0, delta 2 - 1 = 1; its return is 2
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]], dtype=torch.float64),
        "values": torch.tensor([[1.0, 0.5, 0.25], [1.0, 9.0, 9.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }
    result = estimate(ADV_ESTIMATORS["vapo"], batch, {"alpha": 2 / 3, "whiten": False})
    assert result.advantages.tolist() == [pytest.approx([-7 / 16, 1 / 8, 3 / 4]), [1, 0, 0]]
    assert result.returns is not None and result.returns.tolist() == [[1, 1, 1], [2, 0, 0]]


@pytest.mark.parametrize(("alpha", "gamma", "lam_critic"), [(0.3, 1.0, 1.0), (0.5, 0.9, 0.7), (0.05, 1.0, 0.95)])
def test_vapo_is_gae_row_by_row(make_batch: MakeBatch, alpha: float, gamma: float, lam_critic: float) -> None:
    """With the slow loop's lambda of each row for the policy, and one for the critic."""
    batch = make_batch(5, rows=40)
    options = {"alpha": alpha, "gamma": gamma, "lam_critic": lam_critic, "whiten": False}
    result = estimate(ADV_ESTIMATORS["vapo"], batch, options)
    assert result.returns is not None
    plain = {"gamma": gamma, "whiten": False}
    for row in range(40):
        one = {name: column[row : row + 1] for name, column in batch.items()}
        length = int(one["response_mask"].sum())
        lam = max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        policy = estimate(ADV_ESTIMATORS["gae"], one, {**plain, "lam": lam}).advantages
        torch.testing.assert_close(result.advantages[row : row + 1], policy)
    critic = estimate(ADV_ESTIMATORS["gae"], batch, {**plain, "lam": lam_critic}).returns
    torch.testing.assert_close(result.returns, critic)
    whole = estimate(ADV_ESTIMATORS["vapo"], batch, {**options, "whiten": True}).advantages
    torch.testing.assert_close(whole, whiten(result.advantages, batch["response_mask"]))
    fixed = estimate(ADV_ESTIMATORS["vapo"], batch, {**options, "lam_policy": 0.8})
    torch.testing.assert_close(
        fixed.advantages, estimate(ADV_ESTIMATORS["gae"], batch, {**plain, "lam": 0.8}).advantages
    )
    torch.testing.assert_close(fixed.returns, critic)


def test_what_is_not_whitened_is_the_same_before_it(make_batch: MakeBatch) -> None:
    batch = make_batch(6, rows=30)
    for name, options in (("gae", {"gamma": 0.9, "lam": 0.8}), ("reinforce_plus_plus", {"gamma": 0.9})):
        raw = estimate(ADV_ESTIMATORS[name], batch, {**options, "whiten": False})
        usual = estimate(ADV_ESTIMATORS[name], batch, options)
        torch.testing.assert_close(whiten(raw.advantages, batch["response_mask"]), usual.advantages)
        assert usual.returns is not None and raw.returns is not None and torch.equal(usual.returns, raw.returns)
    # r = (0, 1), gamma 1/2: the return itself
    two = {"token_level_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.ones(1, 2).long()}
    plain = estimate(ADV_ESTIMATORS["reinforce_plus_plus"], two, {"gamma": 0.5, "whiten": False})
    assert plain.advantages.tolist() == [[0.5, 1.0]]


def test_the_number_added_to_a_deviation_may_be_another() -> None:
    # scores 0 and 2: deviation sqrt(2); with 1 added 1 / (1 + sqrt(2)); all four: sample deviation sqrt(4 / 3)
    batch = {
        "token_level_rewards": torch.tensor([[0.0], [2.0], [0.0], [2.0]], dtype=torch.float64),
        "response_mask": torch.ones(4, 1).long(),
        "uid": torch.tensor([0, 0, 1, 1]),
    }
    for name, deviation in (("grpo", 2**0.5), ("lite_ppo", (4 / 3) ** 0.5)):
        found = estimate(ADV_ESTIMATORS[name], batch, {"eps": 1.0}).advantages[:, 0]
        assert found.tolist() == pytest.approx([each / (deviation + 1) for each in (-1, 1, -1, 1)])
