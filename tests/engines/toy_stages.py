# SPDX-License-Identifier: Apache-2.0
"""A pipeline in one file: two stages in one process, each with half of the layers.

While the second stage works on a micro-batch, the first has passed on the next one, as where each has a device of its
own: an order that `schedule` chooses. All else is `single`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.config.algorithm_checks import EngineUse
from whet.devices import HOST
from whet.engines.protocol import Columns, Objective
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.models.load import body_of
from whet.models.outputs import hidden_states, layout_of, outputs_of
from whet.models.packing import Layout
from whet.registry import register_engine


class Sends(nn.Module):
    """The end of the first stage, in the place of the last norm: keeps the hidden states."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        return hidden


class Receives(nn.Module):
    """The start of the second stage, in the place of the embedding: gives hidden states for any tokens."""

    hidden: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hidden


@register_engine("stages")
class Stages(SingleEngine):
    """Two stages with half of the layers each."""

    def __init__(
        self, role: RoleSettings, process_group: dist.ProcessGroup | None = None, device: torch.device = HOST
    ) -> None:
        super().__init__(role, process_group, device)
        body = body_of(self.model).base_model
        [path] = [name for name, module in self.model.named_modules() if module is body]
        half = len(body.layers) // 2
        self.sends, self.receives = Sends(), Receives()
        first, second = {"layers": body.layers[:half], "norm": self.sends}, {"layers": body.layers[half:]}
        self.first = with_module(self.model, path, with_modules(body, first))
        embedding = next(name for name, each in body.named_children() if each is body.get_input_embeddings())
        self.second = with_module(self.model, path, with_modules(body, {**second, embedding: self.receives}))
        self.order: list[tuple[int, int]] = []  # (stage, micro-batch) as they ran

    @classmethod
    def refuses(cls, use: EngineUse) -> Iterator[ConfigError]:
        """Yields an error for rows with media, which no stage passes on."""
        if use.media:
            yield ConfigError(f"{use.key}.name", use.engine.name, f"an engine that reads the media of {use.media}")

    def schedule(self, columns: Columns, objective: Objective, counts: Columns, metrics: Metrics) -> torch.Tensor:
        """The first stage is one micro-batch ahead of the second; gradients go back through both."""
        total, ahead, numbers = torch.zeros((), device=self.device), deque[Any](), count()
        for rows in (*self.passes(columns, objective.block), None):
            if rows is not None:
                part = {name: column[rows] for name, column in columns.items()}
                where = layout_of(part, self.forward_settings).to(self.device)
                number = next(numbers)
                ahead.append((number, part, where, self.pass_first(where)))
                self.order.append((0, number))
            if len(ahead) == 2 or (rows is None and ahead):
                number, part, where, sent = ahead.popleft()
                received = sent.detach().requires_grad_()
                outputs = self.pass_second(where, received, objective.needs, objective.temperature)
                self.order.append((1, number))
                loss, measured = objective.loss(outputs, self.to_device(part), counts)
                loss.backward()  # type: ignore[no-untyped-call]
                if sent.requires_grad:
                    sent.backward(received.grad)
                total += loss.detach()
                metrics.merge(measured)
        return total

    def pass_first(self, where: Layout) -> torch.Tensor:
        """The hidden states between the stages."""
        hidden_states(body_of(self.first), where, self.forward_settings)
        return self.sends.hidden

    def pass_second(
        self, where: Layout, received: torch.Tensor, needs: frozenset[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """Outputs from these hidden states."""
        self.receives.hidden = received
        return outputs_of(self.second, where, needs, self.forward_settings, temperature)

    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        return self.pass_second(where, self.pass_first(where), needs, temperature)


def with_modules(module: Any, changed: dict[str, nn.Module]) -> Any:
    """A module with the same weights, but for some of its own modules."""
    made = copy.copy(module)
    made._modules = {**module._modules, **changed}
    return made


def with_module(module: Any, path: str, new: nn.Module) -> Any:
    """A module with the same weights, but for the one at a path."""
    name, _, rest = path.partition(".")
    return with_modules(module, {name: with_module(module._modules[name], rest, new) if rest else new})
