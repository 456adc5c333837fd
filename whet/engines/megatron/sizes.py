# SPDX-License-Identifier: Apache-2.0
"""The mesh of a role's processes in Megatron-Core's order, and settings that it refuses; without torch.

pipeline x rows x context x tensor = processes        the first is the outermost
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from whet.config.algorithm_checks import EngineUse, nearest_divisors, other_kernels
from whet.errors import ConfigError

FACTORS = ("tensor", "context", "pipeline")


@dataclass(frozen=True)
class Sizes:
    """Parts of a model."""

    tensor: int = 1  # of a layer's heads and inner numbers
    pipeline: int = 1  # of the layers, one after another
    virtual: int = 1  # of a rank's layers, interleaved with those of other ranks
    expert: int = 1  # of the experts
    context: int = 1  # of a row's tokens

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sizes:
        """The sizes in the options of the engine."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__})

    @property
    def expert_tensor(self) -> int:
        """Parts of an expert's inner numbers: experts that are spread over ranks are whole."""
        return 1 if self.expert > 1 else self.tensor

    @property
    def row_ranks(self) -> int:
        """Ranks that compute a row together."""
        return self.tensor * self.context * self.pipeline


def refuses(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error for each setting that megatron cannot run with."""
    yield from other_kernels(use)
    if _lacks("megatron.core"):
        change = "run `make megatron`, or pip install megatron-core==0.16.1"
        yield ConfigError(f"{use.key}.name", "megatron", "an installation of Megatron-Core", change)
    yield from _sizes(use, Sizes.of(use.options))
    reasons = {
        f"model.lora.rank={use.model.lora.rank}": use.model.lora.rank is not None,
        f"model.lora.path={use.model.lora.path}": use.model.lora.path is not None,
        "model.freeze": bool(use.model.freeze),
        f"{use.key}.packing=false": use.engine.packing is False,
        f"the images or videos of {use.media}": bool(use.media),
    }
    if (optim := use.optim) is not None:
        reasons |= {
            f"{use.optim_key}.name={optim.name}": optim.name != "adamw",
            f"{use.optim_key}.state_dtype={optim.state_dtype}": optim.state_dtype != "float32",
            f"{use.optim_key}.weight_rounding={optim.weight_rounding}": optim.weight_rounding is not None,
        }
    for reason in (each for each, holds in reasons.items() if holds):
        yield ConfigError(f"{use.key}.name", "megatron", f"an engine that knows {reason}", "set it to fsdp")


def _lacks(package: str) -> bool:
    try:
        return find_spec(package) is None
    except ModuleNotFoundError:  # the one around it
        return True


def _sizes(use: EngineUse, sizes: Sizes) -> Iterator[ConfigError]:
    """Sizes that do not divide the processes, or each other."""
    key, left = f"{use.key}.options", use.processes
    for name in FACTORS:
        size = getattr(sizes, name)
        if left % size:
            near = " or ".join(str(each) for each in nearest_divisors(left, size))
            expected = f"a divisor of the {left} processes that are left of {use.processes_key}={use.processes}"
            yield ConfigError(f"{key}.{name}", size, expected, f"try {near}")
            return
        left //= size
    holders = left * sizes.tensor * sizes.context
    if holders % sizes.expert:
        near = " or ".join(str(each) for each in nearest_divisors(holders, sizes.expert))
        expected = f"a divisor of the {holders} processes of a stage"
        yield ConfigError(f"{key}.expert", sizes.expert, expected, f"try {near}")
    if sizes.virtual > 1 and sizes.pipeline == 1:
        yield ConfigError(f"{key}.virtual", sizes.virtual, f"1 with {key}.pipeline=1", "raise pipeline, or unset it")
