# SPDX-License-Identifier: Apache-2.0
"""The enumeration is right, and what claims to be exact is."""

from __future__ import annotations

import pytest
import torch

from whet.algorithms.certify import (
    GAP,
    Choice,
    Row,
    World,
    certify,
    multiplicity,
    multisets,
    objective_gradient,
    rows,
)
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

CLAIMS = [pytest.param(row, id=f"{row.kind} {row.name}") for row in rows() if row.claims_unbiased]


def test_all_answers_are_there_and_their_probabilities_sum_to_one() -> None:
    world = World()
    # the end at once; two tokens and the end; four and the end; eight that were cut off
    assert len(world.answers) == len(set(world.answers)) == 1 + 2 + 4 + 8
    assert world.num_states == 1 + 2 + 4
    assert float(world.log_probs(world.table(1)).sum(-1).exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert World(vocabulary=2, length=3).answers == [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


def test_groups_are_counted_once_in_every_order() -> None:
    groups = list(multisets(4, 3))
    assert sum(multiplicity(group) for group in groups) == 4**3
    assert (multiplicity((1, 1, 2)), multiplicity((0, 1, 2)), multiplicity((3, 3, 3))) == (3, 6, 1)


def test_the_objectives_gradient_is_that_of_finite_differences() -> None:
    world, logits = World(vocabulary=2, length=2), World(vocabulary=2, length=2).table(1)

    def value(at: torch.Tensor) -> float:
        log_pi, log_ref = (world.log_probs(table).sum(-1) for table in (at, world.table(4)))
        return float((log_pi.exp() * (world.scores - 0.3 * (log_pi - log_ref))).sum())

    found = objective_gradient(world, logits.clone().requires_grad_(), 0.3)
    for place in range(logits.numel()):
        step = torch.zeros(logits.numel(), dtype=torch.float64)
        step[place] = 1e-6
        up, down = (value(logits + sign * step.view_as(logits)) for sign in (1, -1))
        assert float(found[place]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("row", CLAIMS)
def test_what_claims_to_be_exact_is(row: Row) -> None:
    assert certify(row.choice, gap=row.gap).relative_error < 1e-8


@pytest.mark.parametrize("n", [3, 4])
def test_rloo_is_exact_in_larger_groups_too(n: int) -> None:
    assert certify(Choice(n=n), World(vocabulary=2, length=3, seed=n)).relative_error < 1e-8


def test_known_biases() -> None:
    """Without the division by the deviation GRPO is (n - 1) / n of RLOO; with it the direction changes."""
    world = World(vocabulary=2, length=3)
    shrunk = certify(Choice("dr_grpo", aggregation="seq-mean-token-sum", n=3), world)
    assert (shrunk.cosine, shrunk.norm_ratio) == (pytest.approx(1.0), pytest.approx(2 / 3))
    assert certify(Choice("grpo")).cosine < 0.99
    # as a loss k1 has no expected gradient: the error is all of the KL's part
    without = certify(Choice(kl_where="loss", kl_form="k1", kl_coef=0.0), world)
    assert without.relative_error < 1e-8
    blind = certify(Choice(kl_where="loss", kl_form="k1", kl_coef=0.5), world)
    target = objective_gradient(world, world.table(1).requires_grad_(), 0.5)
    reward = objective_gradient(world, world.table(1).requires_grad_(), 0.0)
    assert blind.relative_error == pytest.approx(float((reward - target).norm() / target.norm()))


def test_samples_of_another_policy_need_their_weight() -> None:
    exact = {"weight": "importance", "weight_options": {"level": "sequence", "cap": float("inf")}}
    assert certify(Choice(), gap=GAP).relative_error > 0.01
    assert certify(Choice(**exact), gap=GAP).relative_error < 1e-8  # type: ignore[arg-type]


def test_the_table_has_everything() -> None:
    names = {(row.kind, row.name) for row in rows()}
    assert len(names) == len(rows()) >= 65
    for kind in (ADV_ESTIMATORS, POLICY_LOSSES):
        assert {(kind.kind, entry.name) for entry in kind if entry.alias_of is None} <= names
