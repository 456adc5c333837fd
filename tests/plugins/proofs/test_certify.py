# SPDX-License-Identifier: Apache-2.0
"""The enumeration is right, exact claims are exact, and the observed step is the loop's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.first import first
from whet.batch import Batch
from whet.config.algorithm import AlgorithmConfig, CorrectionConfig, FilterConfig, KLConfig, ShapingConfig
from whet.plugins.proofs.certify import (
    GAP,
    STALENESS,
    SUMS,
    Certified,
    CertifiedStep,
    World,
    certify,
    columns_of,
    jacobian,
    kept_first,
    kl_error,
    multiplicity,
    objective_gradient,
    outputs_of,
    plain,
    rows,
    rows_of,
)
from whet.registry import ADV_ESTIMATORS, KINDS, KL_FORMS, POLICY_LOSSES, PREFERENCE_LOSSES
from whet.trainers.shape import Shaper

SMALL = World(length=2)  # the whole table, of answers of up to three tokens, is docs/algorithms.md's
FUNCTIONS = [entry for kind in KINDS for entry in kind]
CLAIMS = [
    pytest.param(row, id=f"{row.kind} {row.name}")
    for entry in FUNCTIONS
    for row in rows_of(entry)
    if row.is_exact and row.kind != PREFERENCE_LOSSES.kind
]


def test_all_answers_are_there_and_their_probabilities_sum_to_one() -> None:
    world = World()
    # the end at once; two tokens and the end; four and the end; eight that were cut off
    assert len(world.responses) == len(set(world.responses)) == 1 + 2 + 4 + 8
    assert world.num_states == 1 + 2 + 4
    assert float(world.log_probs(world.table(1)).sum(-1).exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert World(vocabulary=2, length=3).responses == [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


def test_groups_are_counted_once_in_every_order() -> None:
    groups = list(itertools.combinations_with_replacement(range(4), 3))
    assert sum(multiplicity(group) for group in groups) == 4**3
    assert (multiplicity((1, 1, 2)), multiplicity((0, 1, 2)), multiplicity((3, 3, 3))) == (3, 6, 1)


def test_the_objectives_gradient_is_that_of_finite_differences() -> None:
    world, logits = World(vocabulary=2, length=2), World(vocabulary=2, length=2).table(1)

    def value(at: torch.Tensor) -> float:
        log_pi, log_ref = (world.log_probs(table).sum(-1) for table in (at, world.table(4)))
        return float((log_pi.exp() * (world.scores - 0.3 * (log_pi - log_ref))).sum())

    found = objective_gradient(world, world.scores, logits.clone().requires_grad_(), 0.3)
    for place in range(logits.numel()):
        step = torch.zeros(logits.numel(), dtype=torch.float64)
        step[place] = 1e-6
        up, down = (value(logits + sign * step.view_as(logits)) for sign in (1, -1))
        assert float(found[place]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("row", first(4, CLAIMS, others=pytest.mark.slow))
def test_what_claims_to_be_exact_is(row: Certified) -> None:
    assert certify(row.algorithm, SMALL, mode=row.mode, gap=row.gap).relative_error < 1e-8


@pytest.mark.slow
def test_the_step_is_the_loops_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a config says of rewards, tokens and losses is in its certificate, and so is a change of the loop."""
    for changed in (
        {"shaping": ShapingConfig(reward_clip=0.5)},
        {"shaping": ShapingConfig(advantage_clip=0.1)},
        {"truncated": "drop"},
        {"correction": CorrectionConfig(rejection="divergence", rejection_options={"form": "k1", "high": 0.05})},
    ):
        assert certify(plain(**changed), SMALL, mode=SUMS, gap=GAP) != certify(plain(), SMALL, mode=SUMS, gap=GAP)
    rewards = Shaper.rewards
    monkeypatch.setattr(Shaper, "rewards", lambda *given: _doubled(rewards(*given)))
    assert certify(plain(), SMALL, mode=SUMS).norm_ratio == pytest.approx(2.0)


def _doubled(batch: Batch) -> Batch:
    return batch.with_columns(token_level_rewards=2 * batch["token_level_rewards"])


@pytest.mark.parametrize("form", first(3, [entry.name for entry in KL_FORMS], others=pytest.mark.slow))
def test_a_kl_as_a_loss_on_samples_of_an_older_policy(form: str) -> None:
    fresh, stale = (kl_error(form, SMALL, staleness=each) for each in (0.0, STALENESS))
    if form == "full" or form.endswith("_ratio"):
        assert fresh < 1e-12 and stale < 1e-12
    elif form.endswith("+") or form == "k2":
        assert fresh < 1e-12 and stale > 0.1
    else:
        assert fresh > 0.05 and stale > 0.05


@pytest.mark.parametrize("n", [3, 4])
def test_rloo_is_exact_in_larger_groups_too(n: int) -> None:
    assert certify(plain(), World(vocabulary=2, length=3, seed=n), n=n, mode=SUMS).relative_error < 1e-8


def test_known_biases() -> None:
    """Without the division by the deviation GRPO is (n - 1) / n of RLOO; with it the direction changes."""
    world = World(vocabulary=2, length=3)
    shrunk = certify(plain(adv_estimator="dr_grpo"), world, mode=SUMS, n=3)
    assert (shrunk.cosine, shrunk.norm_ratio) == (pytest.approx(1.0), pytest.approx(2 / 3))
    assert certify(plain(adv_estimator="grpo"), SMALL, mode=SUMS).cosine < 0.99
    # as a loss k1 has no expected gradient: the error is all of the KL's part
    without = certify(plain(kl=KLConfig(where="loss", form="k1", coef=0.0)), world, mode=SUMS)
    assert without.relative_error < 1e-8
    blind = certify(plain(kl=KLConfig(where="loss", form="k1", coef=0.5)), world, mode=SUMS)
    target = objective_gradient(world, world.scores, world.table(1).requires_grad_(), 0.5)
    reward = objective_gradient(world, world.scores, world.table(1).requires_grad_(), 0.0)
    assert blind.relative_error == pytest.approx(float((reward - target).norm() / target.norm()))


def test_the_full_kl_is_what_k2_estimates() -> None:
    """Both follow each token's KL with the states held fixed; the estimate varies more."""
    estimated, full = (
        certify(plain(kl=KLConfig(where="loss", form=form, coef=0.5)), SMALL, mode=SUMS) for form in ("k2", "full")
    )
    assert full.relative_error == pytest.approx(estimated.relative_error, abs=1e-12)
    assert full.variance < estimated.variance


def test_samples_of_another_policy_need_their_weight() -> None:
    exact = CorrectionConfig(weight="importance", weight_options={"level": "sequence", "cap": float("inf")})
    assert certify(plain(), SMALL, gap=GAP, mode=SUMS).relative_error > 0.01
    assert certify(plain(correction=exact), SMALL, gap=GAP, mode=SUMS).relative_error < 1e-8


def test_dynamic_sampling_keeps_the_direction_of_what_differs() -> None:
    """A group whose answers are alike has no advantage: leaving it out scales RLOO's gradient, and no more."""
    kept = certify(plain(filter=FilterConfig(name="dapo")), SMALL, mode=SUMS)
    assert kept.norm_ratio > 1.2
    assert kept.cosine > 0.99  # style is a little of the score, and groups that are equally right differ in it


@pytest.mark.slow
def test_the_table_has_everything() -> None:
    names = {(row.kind, row.name) for row in rows()}
    assert len(names) == len(rows()) >= 80
    assert {("recipe", "gsm8k"), ("recipe", "dapo_gsm8k"), ("recipe", "cpo_quickstart")} <= names
    assert {("KL in the loss", "k3_ratio"), ("KL in the loss", "k3+"), ("KL in the reward", "k1")} <= names
    for kind in (ADV_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES):
        assert {(kind.kind, entry.name) for entry in kind if entry.alias_of is None} <= names


def test_the_first_to_end_by_counting() -> None:
    """The formula agrees with all ways to sample three groups, in all orders of groups that end together."""
    durations, weights = torch.tensor([1, 2, 2, 3]), torch.tensor([0.1, 0.2, 0.3, 0.2], dtype=torch.float64)
    found, kinds = torch.zeros(4, dtype=torch.float64), [*range(4), None]  # None: a group that the filter drops
    for own, *others in itertools.product(kinds, repeat=3):
        if own is None:
            continue
        chance = math.prod(0.2 if each is None else float(weights[each]) for each in others)
        for order in itertools.permutations(range(3)):
            ended = sorted(
                (float(durations[each]), order[i]) for i, each in enumerate([own, *others]) if each is not None
            )
            found[own] += chance / 6 * ((float(durations[own]), order[0]) in ended[:2])
    assert kept_first(durations, weights, 2, 1).tolist() == pytest.approx(found.tolist())
    assert kept_first(durations, weights, 2, 0).tolist() == pytest.approx([1.0] * 4)
    assert float(weights @ kept_first(durations, weights / 0.8, 2, 1) / 0.8) == pytest.approx(2 / 3)


def test_over_sampling_is_biased_towards_short_responses() -> None:
    """Without over-sampling the gradient is exact; with it the gradient favours groups that end early, here by sampling
    batches."""

    def of(extra: float) -> AlgorithmConfig:
        return plain(filter=FilterConfig(name="first_finished", options={"extra": extra}))

    assert certify(of(0.0), SMALL, mode=SUMS).relative_error < 1e-8
    errors = [certify(of(extra), SMALL, mode=SUMS).relative_error for extra in (0.25, 0.5, 1.0)]
    assert errors == sorted(errors) and errors[0] > 0.02
    world, step = SMALL, CertifiedStep.of(of(0.5), SMALL, SUMS)
    mean, _ = step.expected_gradient(2, 0.0, 0.0)
    probabilities, lengths = world.log_probs(world.table(1)).sum(-1).exp(), world.mask.sum(-1)
    columns, outputs = columns_of(world, world.table(1), world.table(1)), outputs_of(world, world.table(1))
    pairs = [*itertools.product(range(len(world.responses)), repeat=2)]
    slopes = -torch.stack([step.slope(pair, columns, outputs) for pair in pairs]) @ jacobian(world, world.table(1))
    draw = torch.Generator().manual_seed(0)
    batches = torch.multinomial(probabilities, 2 * 6 * 200_000, replacement=True, generator=draw).view(-1, 6, 2)
    durations = lengths[batches].amax(-1) + torch.rand(batches.shape[:2], generator=draw)  # ties in any order
    first = batches.gather(1, durations.argsort(-1)[:, :4, None].expand(-1, -1, 2))
    counts = (first[..., 0] * len(world.responses) + first[..., 1]).flatten().bincount(minlength=len(pairs)).double()
    assert ((counts / counts.sum()) @ slopes).tolist() == pytest.approx(mean.tolist(), abs=0.005)
