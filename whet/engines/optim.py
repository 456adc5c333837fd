# SPDX-License-Identifier: Apache-2.0
"""AdamW, Muon, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.config.schema import OptimConfig
from whet.errors import CheckpointError
from whet.kernels.compact_adamw import SMALL, CompactAdamW


def learning_rate(settings: OptimConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate at optimizer step `step` (from 0) of `total_steps`.

    Rises linearly from lr / warmup_steps to lr during the warm-up. Then it is constant, or falls linearly or along half
    a cosine to min_lr_ratio * lr at the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - 1 - settings.warmup_steps))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def optimizer_for(model: nn.Module, settings: OptimConfig, seed: int = 0) -> Optimizer:
    """Builds the configured optimizer for the trainable parameters. `seed` is the seed of stochastic rounding."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.name == "adamw":
        return adamw(trainable, settings, seed)
    inner = {id(p) for p in inner_matrices(model)}
    chosen, rest = ([p for p in trainable if (id(p) in inner) is is_inner] for is_inner in (True, False))
    muon = torch.optim.Muon(
        [{"params": chosen}],  # may be empty: of a stage whose layers are frozen
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return Together([muon, adamw(rest, settings)])


def optimizers_of(optimizer: Optimizer | None) -> Sequence[torch.optim.Optimizer]:
    """Returns the torch optimizers inside an optimizer."""
    return optimizer.optimizers if isinstance(optimizer, Together) else [] if optimizer is None else [optimizer]


def adamw(parameters: Sequence[nn.Parameter], settings: OptimConfig, seed: int = 0) -> torch.optim.Optimizer:
    """Builds AdamW. Biases, norm weights and other vectors get no weight decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.state_dtype == "float32" and settings.weight_rounding is None:
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    return CompactAdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        state_dtype=settings.state_dtype,
        weight_rounding=settings.weight_rounding,
        seed=seed,
    )


def inner_matrices(model: nn.Module) -> list[torch.Tensor]:
    """Lists the weights that Muon trains: of all linear layers except the output layer and a value head."""
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    ends = {
        id(head.weight)
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None
    }
    return [weight for weight in linear if min(weight.shape) > 1 and id(weight) not in ends and weight.requires_grad]


class Together:
    """Several optimizers, each over its own parameters, that are called as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Takes a step of each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each optimizer, by its position in the list, as text."""
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        for place, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(place)])


Optimizer = torch.optim.Optimizer | Together


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restores the state that `state_dict` returned. Hyperparameters stay those of the run."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


Form = Mapping[str, Any]  # name, state_dtype and weight_rounding: they decide which tensors an optimizer's state has


class SavedTensor(NamedTuple):
    """A tensor of a saved optimizer state."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]


def form_of(settings: OptimConfig | None) -> Form:
    """Returns the form of the optimizer's state; empty without an optimizer."""
    return {} if settings is None else settings.model_dump(include={"name", "state_dtype", "weight_rounding"})


def check_form(saved: Form | None, own: Form, state: Sequence[SavedTensor], weights: Iterable[torch.dtype]) -> None:
    """Compares the `saved` form with the run's own. None: an older version wrote the state; then its tensors and the
    dtypes of the weights show the form.  Raises: CheckpointError."""
    for name, value in own.items():
        theirs = (_found_form(state, weights) if saved is None else saved).get(name, value)
        if theirs != value:
            change = "unset it" if theirs is None else f"set it to {theirs}"
            expected = f"{theirs or 'no value'}, as in the run that wrote the checkpoint"
            raise CheckpointError(f"optim.{name}", value, expected, f"{change}, or name another checkpoint")


def _found_form(state: Sequence[SavedTensor], weights: Iterable[torch.dtype]) -> Form:
    """Returns the form that saved tensors show. (int8 keeps the moments of small tensors in float32.)"""
    if not (names := {each.name for each in state}):
        return {}  # of a run before its first step
    rounding = "kahan" if "lost" in names else "stochastic" if torch.bfloat16 in weights else None
    form = {"name": "muon" if "momentum_buffer" in names else "adamw", "weight_rounding": rounding}
    moments = [each for each in state if each.name == "exp_avg"]
    for dtype, word in ((torch.uint8, "int8"), (torch.bfloat16, "bfloat16")):
        if any(each.dtype == dtype for each in moments):
            return {**form, "state_dtype": word}
    is_large = any(len(each.shape) > 1 and math.prod(each.shape) >= SMALL for each in moments)
    return {**form, "state_dtype": "float32"} if is_large else form
