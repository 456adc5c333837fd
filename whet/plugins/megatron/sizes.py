# SPDX-License-Identifier: Apache-2.0
"""The mesh of a role's processes in Megatron-Core's order, and checks of its settings. It loads no torch.

pipeline x rows x context x tensor = processes        the first is the outermost"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from whet.config.algorithm_checks import EngineUse, other_kernels
from whet.engines.sizes import uneven_experts, uneven_sizes
from whet.errors import ConfigError, pip_install


@dataclass(frozen=True)
class Sizes:
    """The sizes of the mesh: the number of parts in each dimension."""

    tensor: int = 1  # parts of a layer's heads and inner dimension
    pipeline: int = 1  # parts of the layers, one after another
    virtual: int = 1  # parts of a rank's layers, interleaved with parts of other ranks
    expert: int = 1  # parts of the experts
    context: int = 1  # parts of a row's tokens
    context_by: str = "transformer_engine"

    @property
    def halves(self) -> bool:
        """True if Megatron-Core splits rows over ranks: each rank has a chunk from both halves of a row."""
        return self.context > 1 and self.context_by == "transformer_engine"

    @property
    def expert_tensor(self) -> int:
        """The number of parts of an expert's inner dimension: 1 if the experts are divided over ranks."""
        return 1 if self.expert > 1 else self.tensor


def row_ranks(processes: int, options: Mapping[str, Any]) -> int:
    """Returns the number of ranks that compute the same row together."""
    return int(options["tensor"] * options["pipeline"] * options["context"])


def refuses(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error for each setting with which the engine `megatron` cannot run."""
    yield from other_kernels(use)
    if not is_installed():
        change = f"run `make megatron`, or {pip_install('megatron')}"
        yield ConfigError(f"{use.key}.name", "megatron", "an installation of Megatron-Core", change)
    sizes = Sizes(**{name: use.options[name] for name in Sizes.__dataclass_fields__})
    yield from _sizes(use, sizes)
    if sizes.halves and find_spec("transformer_engine") is None:
        change = "set it to heads, or pip install transformer-engine[pytorch]"
        key = f"{use.key}.options.context_by"
        yield ConfigError(key, sizes.context_by, f"TransformerEngine installed, as context={sizes.context}", change)
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
        yield ConfigError(f"{use.key}.name", "megatron", f"an engine that supports {reason}", "set it to fsdp")


def is_installed() -> bool:
    """Tells whether Megatron-Core can be imported. A folder named `megatron` on the path is not enough."""
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def _sizes(use: EngineUse, sizes: Sizes) -> Iterator[ConfigError]:
    """Yields an error for each size that does not divide the number of processes, or another size."""
    key, given = f"{use.key}.options", {name: getattr(sizes, name) for name in ("tensor", "context", "pipeline")}
    if uneven := list(uneven_sizes(use, key, given)):
        yield from uneven
        return
    stage = use.processes // sizes.pipeline
    yield from uneven_experts(key, sizes.expert, stage, f"the {stage} processes of a stage")
    if sizes.virtual > 1 and sizes.pipeline == 1:
        yield ConfigError(f"{key}.virtual", sizes.virtual, f"1 with {key}.pipeline=1", "raise pipeline, or unset it")
