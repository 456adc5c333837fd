# SPDX-License-Identifier: Apache-2.0
"""Divergences from a teacher: worked by hand, against sums in a loop, and with top-k."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.raising import raises
from whet.algorithms.divergences import outcomes
from whet.errors import ConfigError
from whet.registry import DIVERGENCES

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("jsd", {"beta": 0.3}),
    ("jsd", {"beta": 0.5}),
]


def divergence(name: str, options: dict[str, Any], student: Tensor, teacher: Tensor) -> Tensor:
    found: Tensor = DIVERGENCES[name].make({"student": student, "teacher": teacher}, options)
    return found


def pair(vocabulary: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 3, 4, vocabulary, generator=draw, dtype=torch.float64).mul(2).log_softmax(-1)
    return student, teacher


def test_numbers_worked_by_hand() -> None:
    """q = (1/2, 1/2), p = (1/4, 3/4). KL(p||q) = log 2 - H(p) with H(p) = log 4 - 3/4 log 3, so 3/4 log 3 - log 2.
    KL(q||p) = -log 2 - (log 1/4 + log 3/4) / 2 = log 2 - log 3 / 2. At beta = 1/2 m = (3/8, 5/8)."""
    student, teacher = torch.tensor([0.5, 0.5]).log().double(), torch.tensor([0.25, 0.75]).double().log()
    by_hand = {"forward_kl": 0.75 * math.log(3) - math.log(2), "reverse_kl": math.log(2) - math.log(3) / 2}
    of_p = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    of_q = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    by_hand["jsd"] = (of_p + of_q) / 2
    for name, expected in by_hand.items():
        assert float(divergence(name, {}, student, teacher)) == pytest.approx(expected, abs=1e-7)
        assert float(divergence(name, {}, teacher, teacher)) == pytest.approx(0.0, abs=1e-12)
    assert by_hand["forward_kl"] == pytest.approx(0.1308, abs=1e-4)


def slow(name: str, options: dict[str, Any], q: list[float], p: list[float]) -> float:
    def kl(one: list[float], other: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(one, other, strict=True))

    if name == "forward_kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    beta = options["beta"]
    mixed = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_sums_in_a_loop_and_their_slopes(name: str, options: dict[str, Any]) -> None:
    """The gradient with respect to the logits, by differences of the loop's own sums."""
    _, teacher = pair()
    logits = torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    p = teacher[0, 0].exp().tolist()

    def of(values: Tensor) -> float:
        return slow(name, options, values.softmax(-1).tolist(), p)

    found = divergence(name, options, logits.log_softmax(-1), teacher[0, 0])
    assert float(found.detach()) == pytest.approx(of(logits.detach()), rel=1e-12)
    (slope,) = torch.autograd.grad(found, logits)
    step = 1e-6
    for place in range(7):
        moved = torch.zeros(7, dtype=torch.float64)
        moved[place] = step
        by_differences = (of(logits.detach() + moved) - of(logits.detach() - moved)) / (2 * step)
        assert float(slope[place]) == pytest.approx(by_differences, abs=1e-8)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_more_tokens_tell_more_and_all_but_one_tell_all(name: str, options: dict[str, Any]) -> None:
    student, teacher = pair()
    whole = divergence(name, options, student, teacher)
    before = torch.zeros_like(whole)
    for size in range(1, 7):
        ids = teacher.topk(size).indices
        of_student, of_teacher = outcomes(student, ids), outcomes(teacher, ids)
        torch.testing.assert_close(of_student.exp().sum(-1), torch.ones(3, 4, dtype=torch.float64))
        found = divergence(name, options, of_student, of_teacher)
        assert bool((found >= before - 1e-12).all())
        before = found
    torch.testing.assert_close(before, whole)


def test_mass_outside_of_the_chosen_tokens_is_paid_for() -> None:
    """Two tokens are compared, of which the teacher gives 0.9; the student moves 0.2 of its mass to the third, or to
    the fourth, which is the same."""
    teacher = torch.tensor([0.6, 0.3, 0.05, 0.05]).log()
    ids = torch.tensor([0, 1])
    students = [
        torch.tensor(each).log() for each in ([0.6, 0.3, 0.1, 1e-9], [0.5, 0.2, 0.3, 1e-9], [0.5, 0.2, 1e-9, 0.3])
    ]
    found = [float(divergence("forward_kl", {}, outcomes(each, ids), outcomes(teacher, ids))) for each in students]
    by_hand = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.3)
    assert found == pytest.approx([0.0, by_hand, by_hand], abs=1e-6)


def test_a_slope_where_the_student_gives_the_others_nothing() -> None:
    """The teacher gives them half; the student's logits are moved to them, however small its mass there is."""
    teacher, ids = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0])
    logits = torch.tensor([40.0, 0.0, 0.0]).requires_grad_()
    divergence("forward_kl", {}, outcomes(logits.log_softmax(-1), ids), outcomes(teacher, ids)).backward()
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx([0.5, -0.25, -0.25], abs=1e-5)


def test_the_ends_of_beta_are_the_two_kls() -> None:
    student, teacher = pair()
    near = {beta: divergence("jsd", {"beta": beta}, student, teacher) for beta in (1e-6, 1 - 1e-6)}
    torch.testing.assert_close(near[1e-6] / 1e-6, divergence("forward_kl", {}, student, teacher), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        near[1 - 1e-6] / 1e-6, divergence("reverse_kl", {}, student, teacher), rtol=1e-3, atol=1e-3
    )
    with raises(ConfigError, "loss_options.beta", found=1.0):
        DIVERGENCES["jsd"].resolve_options({"beta": 1.0}, "loss_options")
