# SPDX-License-Identifier: Apache-2.0
"""Certificates of preference losses: the expected gradient of the objective of `whet preference`, compared with the
gradient of the expected loss.

Both are sums over all comparisons of some responses of the world, times their probabilities: the reference samples the
responses, and Bradley and Terry (Plackett and Luce) order them by their scores. The objective's gradient comes from
autograd; the gradient of the expected loss comes from its values alone, by differences of fourth order in float64. They
differ if a loss holds a part of its value fixed in the gradient."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whet.plugins.proofs.certify import Certificate, World
from whet.registry import PREFERENCE_LOSSES
from whet.trainers.objectives import ComparisonObjective

STEP, ACCURACY = 1e-3, 1e-9  # of the differences: they know no smaller relative error
SHIFT = 0.4  # `reference_point` and `mean_log_ratio`, which are numbers from before the update
ROWS = {"pair": 2, "label": 1, "list": 3}  # of a comparison


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of a world for a preference loss: C comparisons of n rows each."""

    objective: ComparisonObjective
    world: World = field(default_factory=World)

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Comparisons:
        """Builds the comparisons of a registered loss.  Raises: ConfigError for options that do not fit."""
        entry = PREFERENCE_LOSSES[name]
        of, resolved = str(entry.marks.get("of", "pair")), entry.resolve_options(options, f"loss {name!r}: ")
        return cls(ComparisonObjective(name, resolved, block=ROWS[of], of=of))

    @cached_property
    def rows(self) -> Tensor:
        """The responses of each comparison, the best first; with labels each response twice.   [C, n]"""
        count, of = len(self.world.responses), self.objective.of
        if of == "label":
            return torch.arange(count).repeat_interleave(2)[:, None]
        compared = range(0, count, 1 if of == "pair" else 3)  # of the lists only a part, for time
        return torch.tensor([*itertools.permutations(compared, self.objective.block)])

    @cached_property
    def probabilities(self) -> Tensor:
        """The probability of each comparison.   [C]"""
        scores, sampled = self.world.scores, self.world.log_probs(self.world.table(4)).sum(-1)
        if self.objective.of == "label":
            order = (scores[self.rows[:, 0]] * torch.tensor([1, -1]).repeat(len(scores))).sigmoid().log()
        else:  # each response is the first among itself and the later ones
            worth = scores[self.rows]
            order = (worth - worth.flip(1).logcumsumexp(1).flip(1)).sum(1)
        return (order + sampled[self.rows].sum(1)).softmax(0)

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """The columns of all rows, comparison by comparison.   [C n, ...]"""
        rows, of, size = self.rows.flatten(), self.objective.of, len(self.rows)
        mask, shift = self.world.mask[rows], torch.full((len(rows),), SHIFT, dtype=torch.float64)
        kinds = [1.0, 0.0] * (size // 2) if of == "label" else [1.0, *[0.0] * (self.objective.block - 1)] * size
        return {
            "response_mask": mask,
            "attention_mask": mask,
            "ref_log_probs": self.world.log_probs(self.world.table(4))[rows],
            "label": torch.tensor(kinds),
            "scores": -torch.arange(self.objective.block).repeat(size).double(),
            "uid": torch.arange(size).repeat_interleave(self.objective.block),
            "reference_point": shift,
            "mean_log_ratio": shift,
        }

    def outputs(self, logits: Tensor) -> Tensor:
        """Returns the model's outputs `log_probs` and `sum_pi_squared` for all responses.   [S, V] -> [K, L, 2]"""
        squares = self.world.statistic(logits, lambda log_pi: log_pi.exp().square().sum(-1))
        return torch.stack([self.world.log_probs(logits), squares], -1)

    def gradients(self) -> Tensor:
        """Returns the gradient of the objective for each comparison, by the logits of the policy.   [C, S V]"""
        now, rows = self.world.table(1), self.rows.flatten()
        leaf = self.outputs(now)[rows].requires_grad_()
        given = {"log_probs": leaf[..., 0], "sum_pi_squared": leaf[..., 1]}
        total, _ = self.objective.loss(given, self.columns, {"num_comparisons": torch.tensor(1)})
        [slopes] = torch.autograd.grad(total, leaf)
        jacobian: Tensor = torch.autograd.functional.jacobian(self.outputs, now)  # type: ignore[no-untyped-call]
        by_row = torch.einsum("rlo,rlosv->rsv", slopes, jacobian[rows])
        return by_row.reshape(*self.rows.shape, -1).sum(1)

    def expected_loss(self, logits: Tensor) -> Tensor:
        """Returns the expected loss of a policy."""
        of_rows = self.outputs(logits)[self.rows.flatten()]
        outputs = {"log_probs": of_rows[..., 0], "sum_pi_squared": of_rows[..., 1]}
        losses, _ = self.objective.function({**self.columns, **outputs})
        return self.probabilities @ losses.view(len(self.rows), -1).sum(1)

    def slope(self) -> Tensor:
        """Returns the gradient of the expected loss, by differences of its values.   [S V]"""
        now = self.world.table(1)
        found = torch.zeros(now.numel(), dtype=now.dtype)
        for place, direction in enumerate(torch.eye(now.numel(), dtype=now.dtype)):
            step = STEP * direction.view_as(now)
            near, far = (self.expected_loss(now + n * step) - self.expected_loss(now - n * step) for n in (1, 2))
            found[place] = (8 * near - far) / (12 * STEP)
        return found


def certify_comparisons(name: str) -> Certificate:
    """Computes the certificate of a registered preference loss. The variance is over single comparisons."""
    compared = Comparisons.of(name, {})
    target, gradients = compared.slope(), compared.gradients()
    mean, size = compared.probabilities @ gradients, target.norm()
    return Certificate(
        relative_error=max(ACCURACY, float((mean - target).norm() / size)),
        cosine=float(torch.cosine_similarity(mean, target, dim=0)),
        norm_ratio=float(mean.norm() / size),
        variance=float(compared.probabilities @ (gradients - mean).square().sum(-1) / size.square()),
    )
