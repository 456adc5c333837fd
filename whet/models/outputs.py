# SPDX-License-Identifier: Apache-2.0
"""What a model says of the sampled tokens of a batch, by name: the outputs that objectives and columns may need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import EngineError
from whet.models.log_probs import token_statistics
from whet.models.packing import Layout, layout
from whet.models.value_head import ValueModel

POLICY_OUTPUTS = frozenset({"log_probs", "entropy", "sum_pi_squared"})
VALUE_OUTPUTS = frozenset({"values"})


@dataclass(frozen=True)
class ForwardSettings:
    """How a forward pass is computed; none of it changes what is computed beyond rounding."""

    packing: bool = True
    share_prompts: bool = True  # rows with the same prompt read it once, where they are packed
    chunk_tokens: int = 1024
    dtype: torch.dtype = torch.float32  # of matrix products; weights stay as they are


def model_outputs(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    needs: frozenset[str],
    settings: ForwardSettings,
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The outputs in `needs`, each [B, R] float32, zero where `response_mask` is 0; differentiable.

    `batch` has the columns that `packing.layout` reads; `model` is a causal language model for `log_probs`, `entropy`
    and `sum_pi_squared`, a ValueModel for `values`.  Raises: EngineError naming an output that the model does not have.
    """
    offered = VALUE_OUTPUTS if isinstance(model, ValueModel) else POLICY_OUTPUTS
    if not needs <= offered:
        missing = ", ".join(sorted(needs - offered))
        raise EngineError(f"{type(model).__name__} gives {', '.join(sorted(offered))}, not {missing}")
    where = layout(batch, settings.packing and settings.share_prompts)
    body = model.body if isinstance(model, ValueModel) else model
    assert isinstance(body, PreTrainedModel)
    device_type = where.input_ids.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=settings.dtype == torch.bfloat16):
        hidden = hidden_states(body, where, settings.packing).index_select(0, where.states)
        if isinstance(model, ValueModel):
            return {"values": where.to_columns(model.values(hidden))}
    head = body.get_output_embeddings()
    statistics = token_statistics(
        hidden.to(settings.dtype),
        head.weight,
        head.bias,
        where.targets,
        temperature=temperature,
        chunk_tokens=settings.chunk_tokens,
        entropy="entropy" in needs,
        sum_pi_squared="sum_pi_squared" in needs,
    )
    return {name: where.to_columns(value) for name, value in statistics._asdict().items() if name in needs}


def hidden_states(model: PreTrainedModel, where: Layout, packing: bool) -> torch.Tensor:
    """The last hidden state after each of the T real tokens, [T, H]."""
    body = model.base_model
    if packing:
        positions = where.position_ids[..., None, :]  # [1, T], or [3, 1, T]
        out = body(input_ids=where.input_ids[None], position_ids=positions, use_cache=False, packed=where)
        flat: torch.Tensor = out.last_hidden_state[0]
        return flat
    positions = where.position_ids
    grid = where.pad(positions) if positions.dim() == 1 else torch.stack([where.pad(axis) for axis in positions])
    out = body(input_ids=where.pad(where.input_ids), position_ids=grid, use_cache=False)
    return where.unpad(out.last_hidden_state)
