# SPDX-License-Identifier: Apache-2.0
"""A training engine of your own: whet train ... actor.engine.name=examples/extending/training_engine.py:Pulled \\
actor.engine.options.pull=0.01

The parameters before `*` are whet's. The conformance suite of the shipped engines runs with it as well:
python -m pytest -m "slow or not slow" tests/engines/test_conformance.py \\
--engine examples/extending/training_engine.py:Pulled"""

import torch
from torch import distributed as dist

from whet.devices import HOST
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.metrics import Metrics
from whet.options import Share


class Pulled(SingleEngine):
    """`single`, whose weights move the share `pull` of the way back to the start after each update."""

    def __init__(
        self,
        role: RoleSettings,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device = HOST,
        *,
        pull: Share = 0.0,
    ) -> None:
        super().__init__(role, process_group, device)
        self.pull = pull
        self.start = [weight.detach().clone() for weight in self.model.parameters()] if pull else []

    @torch.no_grad()
    def step(self) -> Metrics:
        """Takes the step, then goes back a part of the way."""
        metrics = super().step()
        for weight, start in zip(self.model.parameters(), self.start, strict=bool(self.pull)):
            weight.lerp_(start, self.pull)
        return metrics
