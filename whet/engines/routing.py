# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts routers during an update: their auxiliary loss, their biases, metrics of the load of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from whet.config.schema import OptimConfig
from whet.engines.protocol import Columns, Objective
from whet.errors import EngineError
from whet.kernels.compact_adamw import own_part
from whet.metrics import Metrics
from whet.models.load import RewardModel, TrainedModel, ValueModel, body_of, router_biases
from whet.models.routers import LOADS, PROBS, auxiliary_coefficient, routers_of
from whet.models.sharded import part_of


@dataclass
class Routing:
    """The auxiliary loss E sum_e f_e P_e, times the coefficient in the model's config. f_e is the frequency with which
    tokens choose expert e, P_e its mean probability, both over layers and the mini-batch's tokens that the loss reads.

    Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4 to 6, as in transformers, which takes both over the
    tokens of a forward pass. Here f and the divisor of P cover the whole mini-batch, all ranks included: a pass without
    gradient counts f first. So the gradient is the same for any micro-batches, packing and ranks. If a caller splits a
    mini-batch into parts, f covers a part."""

    name: str  # area of its metrics
    needs: frozenset[str]  # model outputs, including the objective's
    coefficient: float  # 0: there is no auxiliary loss
    experts: int
    group: dist.ProcessGroup | None
    rows_group: dist.ProcessGroup | None
    found: torch.Tensor  # [L, E + 2] `LOADS` so far
    factors: torch.Tensor | None = None  # [E] f
    tokens: torch.Tensor | None = None  # of the mini-batch

    @classmethod
    def of(
        cls,
        model: TrainedModel,
        objective: Objective,
        group: dist.ProcessGroup | None,
        rows_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> Self | None:
        """Returns the routers of a policy; None for a dense model, a value model and a reward model."""
        if isinstance(model, ValueModel | RewardModel) or not (routers := routers_of(model)):
            return None
        config = body_of(model).config
        coefficient = auxiliary_coefficient(config)
        needs = objective.needs | {LOADS} | ({PROBS} if coefficient else frozenset())
        weight = next(each for each in routers[0][0].parameters() if each.dim() == 2)  # [E, H]
        found = torch.zeros(len(routers), len(weight) + 2, device=device)
        return cls(objective.name, needs, coefficient, len(weight), group, rows_group, found)

    def begin(self, columns: Columns, counts: Columns, choices: torch.Tensor) -> None:
        """Computes f from `choices` [E], how often this rank's tokens choose each expert. All ranks call it."""
        own = trained(columns).sum().to(choices)
        chosen = summed(torch.cat([choices, own[None]]), self.rows_group)
        self.factors = chosen[:-1] / chosen[-1].clamp(min=1e-12)
        self.tokens = counts["num_tokens"].to(choices) if "num_tokens" in counts else chosen[-1]

    def loss(self, outputs: Columns, part: Columns, metrics: Metrics) -> torch.Tensor | float:
        """Returns a micro-batch's share of the auxiliary loss, and records it."""
        self.found = self.found + outputs[LOADS]
        if self.factors is None or self.tokens is None:
            return 0.0
        mask = trained(part)
        probs = (outputs[PROBS] * mask[..., None]).sum((0, 1))
        total = self.coefficient * len(self.factors) * (self.factors * probs).sum()
        metrics.mean(f"{self.name}/router_aux_loss", total.detach() / mask.sum().clamp(min=1e-12), mask.sum())
        return total / self.tokens.clamp(min=1e-12)

    def measure(self, metrics: Metrics) -> torch.Tensor:
        """Records metrics of the routers.  Returns the choices per expert, of all ranks [L, E]. All ranks call it.
        `router_load` is the tokens of the fullest expert over the mean of all experts, in the worst layer: 1 if all
        experts get as many tokens, E if one expert gets all."""
        counts, ends = summed(self.found, self.group).split([self.experts, 2], -1)
        load = counts.amax(1) / counts.mean(1).clamp(min=1e-12)
        metrics.mean(f"{self.name}/router_load", load.amax())
        metrics.mean(f"{self.name}/router_entropy", ends[:, 0].sum() / ends[:, 1].sum().clamp(min=1))
        return counts


def check_biases(model: TrainedModel, optim: OptimConfig, rate: float) -> None:
    """Checks that updates can move the biases of the model's routers.  Raises: EngineError."""
    biases, name = router_biases(model), type(model).__name__
    if isinstance(model, ValueModel | RewardModel) or not biases or len(biases) != len(routers_of(model)):
        expected = f"0, as {name} is no policy with a bias for each router"
    elif optim.weight_rounding is not None and isinstance(biases[0], nn.Parameter):
        expected = "0 with optim.weight_rounding, as bfloat16 loses small steps of biases"
    else:
        return
    raise EngineError("engine.options.router_bias_rate", rate, expected, "set it to 0")


@torch.no_grad()
def move_biases(model: nn.Module, loads: torch.Tensor, rate: float) -> None:
    """Moves the bias of each expert by rate * sign(mean load - its load) in its layer. `loads` [L, E] are the same on
    all ranks.

    Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1."""
    moves = rate * (loads.sum(1, keepdim=True) - loads.shape[1] * loads).sign()  # of whole numbers, without rounding
    for bias, move in zip(router_biases(model), moves, strict=True):
        own = own_part(bias)
        own.add_(part_of(move.view(bias.shape), bias).to(own))


def summed(number: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums a number over the ranks of `group`, in place."""
    if group is not None:
        dist.all_reduce(number, group=group)
    return number


def trained(columns: Columns) -> torch.Tensor:
    """Returns the weights of tokens in the loss: 0 if it does not read them, else 1 or the example's.  [B, R]"""
    mask: torch.Tensor = columns.get("loss_mask", columns["response_mask"])
    return mask * columns["example_weights"][:, None] if "example_weights" in columns else mask
