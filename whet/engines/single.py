# SPDX-License-Identifier: Apache-2.0
"""The reference training engine: one whole model in one process, or one replica of it in each of several."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.engines.micro_batches import micro_batches
from whet.engines.optim import Optimizer, OptimSettings, learning_rate, optimizer_for
from whet.engines.protocol import Columns, Objective
from whet.errors import EngineError
from whet.metrics import Metrics
from whet.models.lora import adapted_layers, merged_weights
from whet.models.outputs import ForwardSettings, model_outputs
from whet.models.packing import same_prompt
from whet.protocol import DataProto


class SingleEngine:
    """A model, its optimizer, and the loop over micro-batches.

    With a `process_group`, every rank holds a replica and its own shard of each mini-batch: counts and gradients are
    summed over the ranks, so that N ranks take the step that one would.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimSettings | None,
        *,
        forward: ForwardSettings,
        max_tokens_per_micro_batch: int,
        grad_clip: float | None = None,
        total_steps: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model.train() if optim is not None else model.eval()
        self.forward_settings = forward
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.grad_clip = grad_clip
        self.total_steps = total_steps
        self.process_group = process_group
        self.steps_done = 0
        self.skipped = self.skipped_in_a_row = 0  # updates whose loss or gradient was not finite
        self._optim_settings = optim
        self.optimizer = optimizer_for(model, optim) if optim is not None else None
        if optim is None:
            model.requires_grad_(False)

    @torch.no_grad()
    def forward(self, batch: DataProto, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R], of the vocabulary [B, R, V], without gradient, in row order."""
        columns = batch.tensors()
        outputs = {name: torch.zeros(columns["response_mask"].shape) for name in needs}
        training = self.model.training
        self.model.eval()
        for rows in self._split(columns, block=1):
            part = _rows(columns, rows)
            for name, value in model_outputs(self.model, part, needs, self.forward_settings, temperature).items():
                if outputs[name].dim() < value.dim():
                    outputs[name] = torch.zeros(*outputs[name].shape, *value.shape[2:])
                outputs[name][rows] = value
        self.model.train(training)
        return outputs

    def update(self, batch: DataProto, objective: Objective) -> Metrics:
        """One optimizer step on the mini-batch `batch`; none where no token counts, as `empty_updates` then says, and
        none where loss or gradient is not finite, as `skipped_updates` does (of the run), and `skipped_in_a_row`."""
        optimizer, columns = self._require_optimizer(), batch.tensors()
        counts = self._sum_over_ranks(objective.counts(columns))
        metrics = Metrics()
        if not any(bool(count > 0) for count in counts.values()):
            metrics.max(f"{objective.name}/empty_updates", 1)
            return metrics
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for rows in self._split(columns, objective.block):
            part = _rows(columns, rows)
            outputs = model_outputs(self.model, part, objective.needs, self.forward_settings, objective.temperature)
            loss, measured = objective.loss(outputs, part, counts)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
            metrics.merge(measured)
        self._sum_gradients()
        norm = self._clip()
        is_finite = bool((self._sum_over_ranks({"loss": total})["loss"] + norm).isfinite())
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        self.skipped += not is_finite
        # Replicas measure the same number, so that the mean over ranks is it.
        metrics.mean(f"{objective.name}/grad_norm", norm)
        metrics.max(f"{objective.name}/skipped_updates", self.skipped)
        metrics.max(f"{objective.name}/skipped_in_a_row", self.skipped_in_a_row)
        if not is_finite:
            optimizer.zero_grad(set_to_none=True)
            return metrics
        rate = learning_rate(self._require_settings(), self.steps_done, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        self.steps_done += 1
        metrics.mean(f"{objective.name}/lr", rate)
        return metrics

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, tied ones once, adapters added in."""
        yield from merged_weights(self.model)

    def state(self) -> dict[str, Any]:
        """Weights, optimizer state and the number of steps taken and skipped; of an adapter its own weights alone."""
        state: dict[str, Any] = {
            "model": {name: parameter.detach() for name, parameter in self._saved().items()},
            "steps_done": self.steps_done,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Puts back what `state` gave.  Raises: EngineError naming weights that are missing, too many or other."""
        own = self._saved()
        if own.keys() != state["model"].keys():
            different = sorted(own.keys() ^ state["model"].keys())
            raise EngineError(f"the state is of another model: {len(different)} weights differ, such as {different[0]}")
        for name, parameter in own.items():
            if (shape := list(state["model"][name].shape)) != list(parameter.shape):
                raise EngineError(
                    f"the state is of another model: its {name} has shape {shape}, this model's {list(parameter.shape)}"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state["model"][name])
        self.steps_done, self.skipped = state["steps_done"], state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.optimizer is not None:
            # torch keeps the tensors it is given, and these lie in the file: it would stay on the disk when deleted.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def _saved(self) -> dict[str, nn.Parameter]:
        named, whole = dict(self.model.named_parameters()), not adapted_layers(self.model)
        return {name: parameter for name, parameter in named.items() if whole or parameter.requires_grad}

    def offload(self) -> None:
        """Does nothing: where this engine runs, the device is the host."""

    def onload(self) -> None:
        """Does nothing: where this engine runs, the device is the host."""

    def _split(self, columns: Columns, block: int) -> list[list[int]]:
        counted = columns["response_mask"].bool().any(1)
        lengths = (columns["attention_mask"].sum(1) * counted).tolist()
        settings, prompts = self.forward_settings, None
        if settings.packing and settings.share_prompts:
            prompt_width = columns["input_ids"].shape[1] - columns["response_mask"].shape[1]
            prompt_lengths = columns["attention_mask"][:, :prompt_width].sum(1)
            prompts = list(zip(same_prompt(columns).tolist(), prompt_lengths.tolist(), strict=True))
        return micro_batches(
            lengths, self.max_tokens_per_micro_batch, packing=settings.packing, block=block, prompts=prompts
        )

    def _sum_over_ranks(self, counts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.process_group is not None:
            for count in counts.values():
                dist.all_reduce(count, group=self.process_group)
        return counts

    def _sum_gradients(self) -> None:
        """Over the ranks, in one flat message. A rank without rows sends zeros."""
        if self.process_group is None:
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat, group=self.process_group)
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter)

    def _clip(self) -> torch.Tensor:
        """The norm of the gradient before it is clipped."""
        with_grad = [p for p in self.model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(with_grad, self.grad_clip if self.grad_clip is not None else float("inf"))

    def _require_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise EngineError("this model is only read: it was built without an optimizer")
        return self.optimizer

    def _require_settings(self) -> OptimSettings:
        assert self._optim_settings is not None
        return self._optim_settings


def _rows(columns: Columns, rows: list[int]) -> Columns:
    """These rows of all columns; no copy where they are all of them in order."""
    if rows == list(range(len(columns["response_mask"]))):
        return columns
    return {name: column[rows] for name, column in columns.items()}
