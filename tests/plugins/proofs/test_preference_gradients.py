# SPDX-License-Identifier: Apache-2.0
"""The exact gradient of every preference loss on a policy whose responses can be listed, against its formula
differentiated by hand.

The expected loss is a sum over all comparisons of the world, each with its probability. By hand its gradient is the sum
of (probability) x (derivative of the loss by the sum of a response's log-probs) x (gradient of that sum: one minus the
probability at each sampled token, minus the probability at the others)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.first import first
from whet.algorithms.calls import Bound
from whet.plugins.proofs.certify import World, certificates, rows_of
from whet.plugins.proofs.comparisons import Comparisons
from whet.registry import PREFERENCE_LOSSES

WORLD = World()
NOW, REFERENCE = WORLD.table(1), WORLD.table(4)
N = [len(response) for response in WORLD.responses]
S, T = (WORLD.log_probs(table).sum(1).tolist() for table in (NOW, REFERENCE))
D = [s - t for s, t in zip(S, T, strict=True)]  # log ratios of whole responses
BETA = 0.3
Slopes = Callable[[int, int], tuple[float, float]]  # by the log-probs of the better and of the worse response


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def bump(x: float) -> float:
    """The derivative of sigma."""
    return sigma(x) * sigma(-x)


def both(slope: float) -> tuple[float, float]:
    return slope, -slope


def dpo(w: int, v: int, smoothing: float = 0.0) -> float:
    """The derivative of DPO by the difference of the log ratios."""
    h = BETA * (D[w] - D[v])
    return BETA * (smoothing * sigma(h) - (1 - smoothing) * sigma(-h))


def ipo(w: int, v: int) -> tuple[float, float]:
    residual = 2 * (D[w] / N[w] - D[v] / N[v] - 0.5 / BETA)
    return residual / N[w], -residual / N[v]


def simpo(w: int, v: int) -> tuple[float, float]:
    slope = -BETA * sigma(0.7 - BETA * (S[w] / N[w] - S[v] / N[v]))
    return slope / N[w], -slope / N[v]


def orpo(w: int, v: int) -> tuple[float, float]:
    """The log odds m - log(1 - e^m) of a mean m have the derivative 1 / (1 - e^m)."""
    means = S[w] / N[w], S[v] / N[v]
    odds = [m - math.log(1 - math.exp(m)) for m in means]
    slope = -BETA * sigma(odds[1] - odds[0])
    better, worse = (1 / (1 - math.exp(m)) for m in means)
    return (slope * better - 1) / N[w], -slope * worse / N[v]


def cpo(w: int, v: int) -> tuple[float, float]:
    slope = -BETA * sigma(-BETA * (S[w] - S[v]))
    return slope - 0.5 / N[w], -slope


def rpo(w: int, v: int) -> tuple[float, float]:
    return dpo(w, v) - 1 / N[w], -dpo(w, v)


def robust(w: int, v: int) -> float:
    h = BETA * (D[w] - D[v])
    return -BETA * (0.8 * sigma(-h) + 0.2 * sigma(h)) / 0.6


def apo_down(w: int, v: int) -> tuple[float, float]:
    of_difference = BETA * bump(BETA * (D[w] - D[v]))
    return BETA * bump(BETA * D[w]) - of_difference, of_difference


def exo(w: int, v: int) -> float:
    """With p = sigma(h): the derivative of p log(p / 0.9) + (1 - p) log((1 - p) / 0.1) is p (1 - p) (h - log 9)."""
    h = BETA * (D[w] - D[v])
    return BETA * bump(h) * (h - math.log(9))


def likeness(row: int) -> float:
    """The mean of log pi(y_t) - log sum_v pi(v)^2 over the tokens of a response."""
    pi = NOW.log_softmax(-1)
    states, tokens = WORLD.states[row, : N[row]], WORLD.tokens[row, : N[row]]
    return float((pi[states, tokens] - pi[states].exp().square().sum(-1).log()).mean())


PAIRS: dict[str, tuple[str, dict[str, Any], Slopes]] = {
    "dpo": ("dpo", {}, lambda w, v: both(dpo(w, v))),
    "dpo, smoothed": ("dpo", {"label_smoothing": 0.2}, lambda w, v: both(dpo(w, v, 0.2))),
    "rpo": ("rpo", {}, rpo),
    "robust_dpo": ("robust_dpo", {"label_smoothing": 0.2}, lambda w, v: both(robust(w, v))),
    "ipo": ("ipo", {}, ipo),
    "ipo, sums": ("ipo", {"per_token": False}, lambda w, v: both(2 * (D[w] - D[v] - 0.5 / BETA))),
    "hinge": ("hinge", {}, lambda w, v: both(-BETA * (BETA * (D[w] - D[v]) < 1))),
    "simpo": ("simpo", {"gamma": 0.7}, simpo),
    "orpo": ("orpo", {}, orpo),
    "cpo": ("cpo", {"sft_coef": 0.5}, cpo),
    "apo_zero": ("apo_zero", {}, lambda w, v: (-BETA * bump(BETA * D[w]), BETA * bump(BETA * D[v]))),
    "apo_down": ("apo_down", {}, apo_down),
    "exo": ("exo", {"label_smoothing": 0.1}, lambda w, v: both(exo(w, v))),
    "wpo": ("wpo", {}, lambda w, v: both(min(1.0, math.exp(likeness(w) + likeness(v))) * dpo(w, v))),
}


def expected(
    name: str, rows: Sequence[int], weights: Sequence[float], columns: dict[str, Tensor], **options: Any
) -> Tensor:
    """The gradient by the logits [S, V] of the sum of the losses, each times its weight."""
    logits, chosen = NOW.clone().requires_grad_(), torch.tensor(rows)
    given = {
        "log_probs": WORLD.log_probs(logits)[chosen],
        "ref_log_probs": WORLD.log_probs(REFERENCE)[chosen],
        "sum_pi_squared": WORLD.statistic(logits, lambda log_pi: log_pi.exp().square().sum(-1))[chosen],
        "response_mask": WORLD.mask[chosen],
        **columns,
    }
    entry = PREFERENCE_LOSSES[name]
    losses, _ = Bound(entry, entry.resolve_options({"beta": BETA, **options}, "loss_options"))(given)
    [gradient] = torch.autograd.grad((losses * torch.tensor(weights, dtype=torch.float64)).sum(), logits)
    return gradient


def by_hand(slopes: Sequence[tuple[int, float]]) -> Tensor:
    """The sum of slope times the gradient of the log-prob of a response, of (response, slope)."""
    gradient, pi = torch.zeros_like(NOW), NOW.softmax(-1)
    for row, slope in slopes:
        for state, token in zip(WORLD.states[row, : N[row]], WORLD.tokens[row, : N[row]], strict=True):
            gradient[state] -= slope * pi[state]
            gradient[state, token] += slope
    return gradient


def by_bradley_terry() -> list[tuple[int, int, float]]:
    """All pairs that the reference may sample, and the probability that the first is preferred."""
    chances, scores = [math.exp(t) for t in T], WORLD.scores.tolist()
    pairs = itertools.permutations(range(len(chances)), 2)
    return [(w, v, chances[w] * chances[v] * sigma(2 * (scores[w] - scores[v]))) for w, v in pairs]


@pytest.mark.parametrize("case", PAIRS)
def test_pairs(case: str) -> None:
    name, options, slopes = PAIRS[case]
    pairs = by_bradley_terry()
    found = expected(name, [row for w, v, _ in pairs for row in (w, v)], [p for *_, p in pairs], {}, **options)
    hand = by_hand([each for w, v, p in pairs for each in zip((w, v), (p * s for s in slopes(w, v)), strict=True)])
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["kto", "bco"])
def test_labels(name: str) -> None:
    """Every response, good and bad, with the probabilities of both."""
    rows = [row for row in range(len(N)) for _ in range(2)]
    good = torch.tensor([1.0, 0.0] * len(N))
    scores = WORLD.scores.tolist()
    weights = [math.exp(T[row]) * sigma(scores[row] * sign) for row, sign in zip(rows, [1, -1] * len(N), strict=True)]
    point = torch.full((len(rows),), 0.4, dtype=torch.float64)
    options = {"good_weight": 1.5, "bad_weight": 0.5} if name == "kto" else {}
    columns = {"label": good, "reference_point": point, "mean_log_ratio": point}
    found = expected(name, rows, weights, columns, **options)

    def slope(row: int, is_good: bool) -> float:
        x = BETA * (D[row] - 0.4)
        if name == "kto":
            return -1.5 * BETA * bump(x) if is_good else 0.5 * BETA * bump(x)
        return -BETA * sigma(-x) if is_good else BETA * sigma(x)

    slopes = [(row, p * slope(row, bool(is_good))) for row, p, is_good in zip(rows, weights, good, strict=True)]
    torch.testing.assert_close(found, by_hand(slopes), rtol=1e-9, atol=1e-12)


def test_lists() -> None:
    """All orders of five responses, with the probabilities of Plackett and Luce."""
    worth = [math.exp(score) for score in WORLD.scores.tolist()]
    orders = list(itertools.permutations((0, 2, 5, 9, 14)))
    chances = [math.prod(worth[a] / sum(worth[b] for b in order[n:]) for n, a in enumerate(order)) for order in orders]
    assert sum(chances) == pytest.approx(1)
    columns = {
        "uid": torch.arange(len(orders)).repeat_interleave(5),
        "scores": torch.arange(5, 0, -1.0).repeat(len(orders)),
    }
    weights = [chance for chance in chances for _ in range(5)]
    found = expected("plackett_luce", [row for order in orders for row in order], weights, columns)
    slopes = list[tuple[int, float]]()
    for order, chance in zip(orders, chances, strict=True):
        ratio = [math.exp(BETA * D[row]) for row in order]
        for place, row in enumerate(order):
            share = sum(ratio[place] / sum(ratio[first:]) for first in range(place + 1))
            slopes.append((row, chance * BETA * (share - 1)))
    torch.testing.assert_close(found, by_hand(slopes), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", first(3, PREFERENCE_LOSSES.names(), others=pytest.mark.slow))
def test_the_certificate_of_every_loss(name: str) -> None:
    """Autograd through the objective agrees with differences of the expected loss, except where weights are held."""
    [row], (found, stale) = (rows := rows_of(PREFERENCE_LOSSES[name])), certificates(rows[0])
    assert stale is None and row.is_exact == (name != "wpo") == (found.relative_error < 1e-8)
    assert (found.cosine > 0.9999999) == row.is_exact and found.variance > 0


@pytest.mark.parametrize("case", first(3, PAIRS, others=pytest.mark.slow))
def test_the_gradient_of_a_certificate_is_that_by_hand(case: str) -> None:
    name, options, slopes = PAIRS[case]
    compared = Comparisons.of(name, {"beta": BETA, **options})
    assert float(compared.probabilities.sum()) == pytest.approx(1)
    chances = {(w, v): p for (w, v), p in zip(compared.rows.tolist(), compared.probabilities.tolist(), strict=True)}
    hand = by_hand([(row, p * s) for pair, p in chances.items() for row, s in zip(pair, slopes(*pair), strict=True)])
    found = compared.probabilities @ compared.gradients()
    torch.testing.assert_close(found, hand.flatten(), rtol=1e-9, atol=1e-12)
    scores = WORLD.scores.tolist()
    for w, v in ((0, 3), (9, 14)):
        assert chances[w, v] / chances[v, w] == pytest.approx(math.exp(scores[w] - scores[v]))
        either = chances[w, v] + chances[v, w]
        assert either / (chances[1, 2] + chances[2, 1]) == pytest.approx(math.exp(T[w] + T[v] - T[1] - T[2]))


def test_the_probabilities_of_lists_and_labels() -> None:
    """Two of the sixty orders of five responses; two of the labels."""
    lists, labels, scores = Comparisons.of("plackett_luce", {}), Comparisons.of("kto", {}), WORLD.scores.tolist()
    chances = dict(zip(map(tuple, lists.rows.tolist()), lists.probabilities.tolist(), strict=True))
    a, b, c = (math.exp(scores[row]) for row in (0, 3, 6))
    assert len(chances) == 60 and chances[0, 3, 6] / chances[6, 3, 0] == pytest.approx(a / (b + c) / (c / (a + b)))
    good, bad = labels.probabilities[:2].tolist()
    assert good / bad == pytest.approx(math.exp(scores[0])) and labels.columns["label"][:4].tolist() == [1, 0, 1, 0]


def test_every_loss_is_here() -> None:
    named = {name for name, *_ in PAIRS.values()} | {"kto", "bco", "plackett_luce"}
    assert named == {entry.name for entry in PREFERENCE_LOSSES}
