# SPDX-License-Identifier: Apache-2.0
"""Preference losses: by hand on a row, as plain arithmetic, and as gradients that are 0 where the theory says so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.algorithms.calls import Bound
from whet.registry import PREFERENCE_LOSSES

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])
DRAWS = torch.Generator().manual_seed(7)
L, B = (-torch.rand(4, 4, generator=DRAWS).double() - 0.05 for _ in range(2))
SUM_PI_SQUARED = torch.rand(4, 4, generator=DRAWS).double().clamp(0.05, 0.9)
S = [sum(x for x, m in zip(row, mask, strict=True) if m) for row, mask in zip(L.tolist(), MASK.tolist(), strict=True)]
T = [sum(x for x, m in zip(row, mask, strict=True) if m) for row, mask in zip(B.tolist(), MASK.tolist(), strict=True)]
N = MASK.sum(1).tolist()


def compute(name: str, columns: dict[str, Tensor] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    entry = PREFERENCE_LOSSES[name]
    given = {"log_probs": L, "ref_log_probs": B, "response_mask": MASK, "sum_pi_squared": SUM_PI_SQUARED}
    losses, rewards = Bound(entry, entry.resolve_options(options, "loss_options"))({**given, **(columns or {})})
    return losses, rewards


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigma(x: float) -> float:
    return -math.log1p(math.exp(-x))


def odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def likeness(row: int) -> float:
    pairs = zip(L[row].tolist(), SUM_PI_SQUARED[row].tolist(), MASK[row].tolist(), strict=True)
    return sum(l - math.log(p) for l, p, m in pairs if m) / N[row]  # noqa: E741


def plain_dpo(h: float, e: float = 0.0) -> float:
    return -(1 - e) * log_sigma(h) - e * log_sigma(-h)


PAIRS: dict[str, tuple[dict[str, Any], Callable[[int, int], float]]] = {
    "dpo": ({"beta": 0.3}, lambda w, v: plain_dpo(0.3 * (S[w] - T[w] - S[v] + T[v]))),
    "dpo, smoothed": (
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda w, v: plain_dpo(0.3 * (S[w] - T[w] - S[v] + T[v]), 0.2),
    ),
    "rpo": ({"beta": 0.3}, lambda w, v: plain_dpo(0.3 * (S[w] - T[w] - S[v] + T[v])) - S[w] / N[w]),
    "robust_dpo": (
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda w, v: (-0.8 * log_sigma(h := 0.3 * (S[w] - T[w] - S[v] + T[v])) + 0.2 * log_sigma(-h)) / 0.6,
    ),
    "ipo": ({"beta": 0.3}, lambda w, v: ((S[w] - T[w]) / N[w] - (S[v] - T[v]) / N[v] - 1 / 0.6) ** 2),
    "ipo, sums": ({"beta": 0.3, "per_token": False}, lambda w, v: (S[w] - T[w] - S[v] + T[v] - 1 / 0.6) ** 2),
    "hinge": ({"beta": 0.3}, lambda w, v: max(0.0, 1 - 0.3 * (S[w] - T[w] - S[v] + T[v]))),
    "simpo": ({"beta": 2.5, "gamma": 0.7}, lambda w, v: plain_dpo(2.5 * (S[w] / N[w] - S[v] / N[v]) - 0.7)),
    "orpo": ({"beta": 0.3}, lambda w, v: -S[w] / N[w] - 0.3 * log_sigma(odds(S[w] / N[w]) - odds(S[v] / N[v]))),
    "cpo": ({"beta": 0.3, "sft_coef": 0.5}, lambda w, v: plain_dpo(0.3 * (S[w] - S[v])) - 0.5 * S[w] / N[w]),
    "apo_zero": ({"beta": 0.3}, lambda w, v: 1 - sigma(0.3 * (S[w] - T[w])) + sigma(0.3 * (S[v] - T[v]))),
    "apo_down": (
        {"beta": 0.3},
        lambda w, v: sigma(0.3 * (S[w] - T[w])) + 1 - sigma(0.3 * (S[w] - T[w] - S[v] + T[v])),
    ),
    "exo": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda w, v: (
            sigma(h := 0.3 * (S[w] - T[w] - S[v] + T[v])) * (log_sigma(h) - math.log(0.9))
            + sigma(-h) * (log_sigma(-h) - math.log(0.1))
        ),
    ),
    "wpo": (
        {"beta": 0.3},
        lambda w, v: plain_dpo(0.3 * (S[w] - T[w] - S[v] + T[v])) * min(1.0, math.exp(likeness(w) + likeness(v))),
    ),
}


def test_a_row_by_hand() -> None:
    """l - b is 0.5 + 0.5 for the better, -1 for the worse response: h = 0.1 (1 + 1) = 0.2, -log sigma(0.2) = 0.5981."""
    columns = {
        "log_probs": torch.tensor([[-0.5, -0.5], [-2.0, -9.0]]),
        "ref_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -9.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    losses, rewards = compute("dpo", columns)
    assert losses.tolist() == pytest.approx([0.598139], abs=1e-6)
    assert rewards.tolist() == pytest.approx([0.1, -0.1])
    assert compute("hinge", columns)[0].tolist() == pytest.approx([0.8])
    assert compute("ipo", columns)[0].tolist() == pytest.approx([(0.5 + 1 - 5) ** 2])


@pytest.mark.parametrize("case", PAIRS)
def test_losses_of_pairs_are_their_formula(case: str) -> None:
    options, formula = PAIRS[case]
    losses, rewards = compute(case.partition(",")[0], **options)
    assert losses.tolist() == pytest.approx([formula(0, 1), formula(2, 3)], rel=1e-6)
    assert rewards.shape == (4,)


def test_losses_of_labels_are_their_formula() -> None:
    label = torch.tensor([1.0, 0.0, 0.0, 1.0])
    point = torch.full((4,), 0.4).double()
    columns = {"label": label, "reference_point": point, "mean_log_ratio": point}
    r, z = [0.3 * (s - t) for s, t in zip(S, T, strict=True)], 0.3 * 0.4
    losses, _ = compute("kto", columns, beta=0.3, good_weight=1.5, bad_weight=0.5)
    expected = [
        1.5 * (1 - sigma(x - z)) if good else 0.5 * (1 - sigma(z - x)) for x, good in zip(r, label, strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    losses, _ = compute("bco", columns, beta=0.3)
    expected = [-log_sigma(x - z) if good else -log_sigma(z - x) for x, good in zip(r, label, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_lists_are_the_probability_of_their_order() -> None:
    """Three responses and an empty row, in any order of rows; and a list of two, which is DPO."""
    mask = MASK.clone()
    mask[2] = 0
    columns = {"response_mask": mask, "uid": torch.zeros(4).long(), "scores": torch.tensor([1.0, 3.0, 9.0, 2.0])}
    losses, rewards = compute("plackett_luce", columns, beta=0.3)
    r = rewards.exp().tolist()
    probability = r[1] / (r[0] + r[1] + r[3]) * r[3] / (r[0] + r[3])
    assert losses.sum().item() == pytest.approx(-math.log(probability)) and losses[2] == 0
    pairs = {"uid": torch.tensor([0, 0, 1, 1]), "scores": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    losses, _ = compute("plackett_luce", pairs, beta=0.3)
    torch.testing.assert_close(losses.view(2, 2).sum(1), compute("dpo", beta=0.3)[0])


# -- certificates: a policy over six responses of one token, whose rewards are known

REWARDS = torch.tensor([1.0, 0.3, -0.4, 0.0, 2.0, -1.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, -0.1, 0.5, 0.0, -0.7, 0.3], dtype=torch.float64).log_softmax(0)


def expected_gradient(logits: Tensor, name: str, comparisons: list[tuple[float, list[int]]], **options: Any) -> Tensor:
    """The gradient of the loss, expected over comparisons: each a probability and responses, the best first."""
    logits = logits.clone().requires_grad_()
    size = len(comparisons[0][1])
    chosen = torch.tensor([number for _, numbers in comparisons for number in numbers])
    columns = {
        "log_probs": logits.log_softmax(0)[chosen][:, None],
        "ref_log_probs": REFERENCE[chosen][:, None],
        "response_mask": torch.ones(len(chosen), 1),
        "uid": torch.arange(len(comparisons)).repeat_interleave(size),
        "scores": torch.arange(size, 0, -1.0).repeat(len(comparisons)),
    }
    losses, _ = compute(name, columns, **options)
    weights = torch.tensor([probability for probability, _ in comparisons], dtype=torch.float64)
    total = (losses.view(len(comparisons), -1).sum(1) * weights).sum()
    [gradient] = torch.autograd.grad(total, logits)
    return gradient


def by_bradley_terry(flipped: float = 0.0) -> list[tuple[float, list[int]]]:
    pairs = itertools.permutations(range(len(REWARDS)), 2)
    better = {(w, v): sigma(float(REWARDS[w] - REWARDS[v])) for w, v in pairs}
    return [((1 - flipped) * p + flipped * better[v, w], [w, v]) for (w, v), p in better.items()]


@pytest.mark.parametrize("name", ["dpo", "plackett_luce", "exo", "robust_dpo"])
def test_the_gradient_is_zero_at_the_policy_that_the_theory_names(name: str) -> None:
    """Preferences by Bradley-Terry with rewards r: the optimum is ref exp(r / beta), and no other policy near it."""
    comparisons, options = by_bradley_terry(), {"beta": 0.5}
    if name == "plackett_luce":
        comparisons = [
            (math.prod(float(REWARDS[a].exp() / REWARDS[list(o[n:])].exp().sum()) for n, a in enumerate(o)), list(o))
            for o in itertools.permutations(range(5), 3)
        ]
    if name == "robust_dpo":
        comparisons, options = by_bradley_terry(0.2), {"beta": 0.5, "label_smoothing": 0.2}
    if name == "exo":  # its target is of one pair: a preference that is certain but for the smoothing
        margin = math.log(0.9 / 0.1)
        optimum = REFERENCE + margin / 0.5 * torch.eye(6).double()[0]
        assert expected_gradient(optimum, name, [(1.0, [0, 1])], beta=0.5, label_smoothing=0.1).abs().max() < 1e-12
        return
    optimum = REFERENCE + REWARDS / 0.5
    assert expected_gradient(optimum, name, comparisons, **options).abs().max() < 1e-12
    assert expected_gradient(optimum + torch.eye(6)[0] / 10, name, comparisons, **options).abs().max() > 1e-3


def test_ipo_regresses_to_its_margin() -> None:
    """One pair, certain: the difference of the log ratios becomes 1 / (2 beta)."""
    optimum = REFERENCE + torch.eye(6).double()[0] / 0.6
    assert expected_gradient(optimum, "ipo", [(1.0, [0, 1])], beta=0.3).abs().max() < 1e-12


def test_robust_dpo_is_dpo_on_clean_pairs_in_expectation() -> None:
    logits = torch.tensor([0.3, -0.2, 0.1, 0.9, -1.0, 0.0], dtype=torch.float64)
    clean = expected_gradient(logits, "dpo", by_bradley_terry(), beta=0.5)
    noisy = expected_gradient(logits, "robust_dpo", by_bradley_terry(0.3), beta=0.5, label_smoothing=0.3)
    torch.testing.assert_close(noisy, clean)
    assert (expected_gradient(logits, "dpo", by_bradley_terry(0.3), beta=0.5) - clean).abs().max() > 1e-3


def test_simpo_and_orpo_read_no_reference() -> None:
    for name in ("simpo", "orpo", "cpo"):
        assert "ref_log_probs" not in PREFERENCE_LOSSES[name].columns
