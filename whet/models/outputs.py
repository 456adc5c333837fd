# SPDX-License-Identifier: Apache-2.0
"""What a model says of the sampled tokens of a batch, by name: the outputs that objectives and columns may need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from whet.errors import EngineError
from whet.models.log_probs import LogitForm, token_statistics, vocab_log_probs
from whet.models.packing import TOKENS_STEP, Layout, layout, rounded
from whet.models.value_head import ValueModel

POLICY_OUTPUTS = frozenset({"log_probs", "entropy", "sum_pi_squared", "vocab_log_probs"})
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
    """The outputs in `needs`, each [B, R] float32, `vocab_log_probs` [B, R, V], zero where `response_mask` is 0;
    differentiable.

    `batch` has the columns that `packing.layout` reads; `model` is a causal language model for `log_probs`, `entropy`,
    `sum_pi_squared` and `vocab_log_probs`, a ValueModel for `values`.  Raises: EngineError naming an output that the
    model does not have.
    """
    offered = VALUE_OUTPUTS if isinstance(model, ValueModel) else POLICY_OUTPUTS
    if not needs <= offered:
        missing = ", ".join(sorted(needs - offered))
        raise EngineError(f"{type(model).__name__} gives {', '.join(sorted(offered))}, not {missing}")
    return outputs_of(model, layout(batch, settings.packing and settings.share_prompts), needs, settings, temperature)


def outputs_of(
    model: nn.Module, where: Layout, needs: frozenset[str], settings: ForwardSettings, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """`model_outputs` of a batch that is laid out already."""
    body = model.body if isinstance(model, ValueModel) else model
    assert isinstance(body, PreTrainedModel)
    device_type = where.input_ids.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=settings.dtype == torch.bfloat16):
        num_sampled = len(where.states)
        states, targets = (
            F.pad(x, (0, rounded(num_sampled, TOKENS_STEP) - num_sampled)) for x in (where.states, where.targets)
        )
        hidden = hidden_states(body, where, settings.packing).index_select(0, states)
        if isinstance(model, ValueModel):
            return {"values": where.to_columns(model.values(hidden)[:num_sampled])}
    head, form = body.get_output_embeddings(), LogitForm.of(body.config.get_text_config())
    statistics = token_statistics(
        hidden.to(settings.dtype),
        head.weight,
        head.bias,
        targets,
        temperature=temperature,
        chunk_tokens=settings.chunk_tokens,
        entropy="entropy" in needs,
        sum_pi_squared="sum_pi_squared" in needs,
        form=form,
    )
    outputs = {
        name: where.to_columns(value[:num_sampled]) for name, value in statistics._asdict().items() if name in needs
    }
    if "vocab_log_probs" in needs:
        given = vocab_log_probs(hidden[:num_sampled].to(settings.dtype), head.weight, head.bias, temperature, form)
        outputs["vocab_log_probs"] = where.to_columns(given)
    return outputs


def hidden_states(model: PreTrainedModel, where: Layout, packing: bool) -> torch.Tensor:
    """The last hidden state after each of the T real tokens, [T, H]; packed, with more rows that say nothing."""
    body = model.base_model
    if packing:
        num_tokens = len(where.input_ids)
        ids, positions = (
            F.pad(x, (0, rounded(num_tokens, TOKENS_STEP) - num_tokens)) for x in (where.input_ids, where.position_ids)
        )
        # [1, T], or [3, 1, T]
        out = body(input_ids=ids[None], position_ids=positions[..., None, :], use_cache=False, packed=where)
        flat: torch.Tensor = out.last_hidden_state[0]
        return flat
    positions = where.position_ids
    grid = where.pad(positions) if positions.dim() == 1 else torch.stack([where.pad(axis) for axis in positions])
    out = body(input_ids=where.pad(where.input_ids), position_ids=grid, use_cache=False)
    return where.unpad(out.last_hidden_state)
