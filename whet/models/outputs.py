# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model for the sampled tokens of a batch, by name. Objectives and columns read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from whet.columns import POLICY_OUTPUTS, SCORE_OUTPUTS, VALUE_OUTPUTS
from whet.errors import EngineError
from whet.kernels.log_probs import LogitForm, token_statistics, vocab_log_probs
from whet.kernels.varlen_attention import TOKENS_STEP, rounded
from whet.models import general
from whet.models.encoders.base import body_of as language_body
from whet.models.encoders.load import encoders_of
from whet.models.load import RewardModel, ValueModel, body_of
from whet.models.lora import head_weight
from whet.models.packing import LATER_MEDIA, MEDIA, ROUTED, Layout, layout, with_routed
from whet.models.routers import (
    CHOICES,
    LOADS,
    PROBS,
    ROUTER_OUTPUTS,
    Recorded,
    loads,
    mean_choices,
    mean_probs,
    recorded,
)
from whet.models.routing import ARGUMENT
from whet.models.sequence_parallel import TokenShare
from whet.models.supported import support_of

PromptLogProbs = tuple[list[float], list[list[tuple[int, float]]]]


@dataclass(frozen=True)
class ForwardSettings:
    """The settings of a forward pass. They change its results only by rounding."""

    packing: bool = True
    share_prompts: bool = True  # with packing, the prompt of several rows is computed once
    chunk_tokens: int = 1024
    dtype: torch.dtype = torch.float32  # of matrix products; weights stay as they are
    token_share: TokenShare | None = None  # splits the tokens of packed rows over ranks
    replays: bool = False  # routers choose the experts in the column `routed_experts`, if the batch has it
    is_sharded: bool = False  # every rank must run every module in every pass, also the vision tower
    in_stretches: bool = False  # attention in one kernel call over all packed rows, on devices with such a kernel
    both_ways: bool = False  # media attend in both directions, which this kernel does not support
    tile: int = 0  # tokens of a tile of attention; the output layer then also has fixed tiles. 0: no fixed tiles


def model_outputs(
    model: nn.Module,
    batch: Mapping[str, Any],
    needs: frozenset[str],
    settings: ForwardSettings,
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Computes the outputs in `needs`, each [B, R] float32 (`vocab_log_probs` [B, R, V]). They are 0 where
    `response_mask` is 0, and differentiable.

    `batch` has the columns that `packing.layout` reads. `model` is a causal language model for `log_probs`, `entropy`,
    `sum_pi_squared` and `vocab_log_probs`. It is a ValueModel for `values`. A RewardModel gives `scores`, one a row at
    its last sampled token, or `values`, before each token.  Raises: EngineError naming an output that the model
    lacks."""
    where = layout_of(batch, settings, needs)
    return outputs_of(model, where.to(next(model.parameters()).device), needs, settings, temperature)


def layout_of(batch: Mapping[str, Any], settings: ForwardSettings, needs: Collection[str] | None = None) -> Layout:
    """Builds the layout of a batch on its device, for passes with these settings that compute the outputs `needs` (by
    default any outputs).  Raises: DataError."""
    packing, share = settings.packing, settings.token_share
    ring = share.ring if share is not None and share.rings > 1 else None
    has_runs = settings.both_ways and any(map(len, chain(*(batch.get(name, ()) for name in (MEDIA, LATER_MEDIA)))))
    in_stretches = packing and settings.in_stretches and not has_runs
    ends = needs is None or not SCORE_OUTPUTS.isdisjoint(needs)  # a reward model reads the state of a row's last token
    where = layout(batch, packing and settings.share_prompts, in_stretches, settings.tile, ring, ends)
    return with_routed(where, batch[ROUTED]) if settings.replays and ROUTED in batch else where


def outputs_of(
    model: nn.Module, where: Layout, needs: frozenset[str], settings: ForwardSettings, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Computes `model_outputs` for a batch whose layout is already on the model's device."""
    offered = POLICY_OUTPUTS | ROUTER_OUTPUTS
    if isinstance(model, ValueModel):
        offered = VALUE_OUTPUTS
    elif isinstance(model, RewardModel):
        offered = SCORE_OUTPUTS | VALUE_OUTPUTS
        if "values" not in needs:
            where = where.at_ends(body_of(model).config.get_text_config().pad_token_id)
    if not needs <= offered:
        missing = ", ".join(sorted(needs - offered))
        raise EngineError(type(model).__name__, f"gives {', '.join(sorted(offered))}", missing)
    body = body_of(model)
    device_type, is_narrow = where.input_ids.device.type, settings.dtype == torch.bfloat16
    at = SampledPlaces.of(where, settings)
    routing = needs & ROUTER_OUTPUTS
    with (
        torch.autocast(device_type, dtype=torch.bfloat16, enabled=is_narrow),
        _wide_states(body),
        recorded(body, bool(routing)) as found,
    ):
        hidden = hidden_states(body, where, settings).index_select(0, at.states)
        if isinstance(model, ValueModel):
            return {"values": at.to_columns(model.values(hidden))}
        if isinstance(model, RewardModel):
            return dict.fromkeys(needs, at.to_columns(model.get_submodule("score")(hidden).squeeze(-1).float()))
    outputs = _of_routers(found, at, routing, settings)
    if needs == routing:
        return outputs
    head, form = body.get_output_embeddings(), LogitForm.of(body.config.get_text_config())
    return outputs | statistics_of(hidden, head_weight(head), head.bias, at, needs, settings, temperature, form)


def statistics_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    at: SampledPlaces,
    needs: frozenset[str],
    settings: ForwardSettings,
    temperature: float,
    form: LogitForm = LogitForm(),  # noqa: B008  # immutable
) -> dict[str, torch.Tensor]:
    """Computes `POLICY_OUTPUTS` from hidden states [n, H] at the sampled tokens and the output layer."""
    hidden = hidden.to(settings.dtype)
    statistics = token_statistics(
        hidden,
        weight,
        bias,
        at.targets,
        temperature=temperature,
        chunk_tokens=settings.chunk_tokens,
        entropy="entropy" in needs,
        sum_pi_squared="sum_pi_squared" in needs,
        form=form,
        fixed=settings.tile > 0,
    )
    outputs = {name: at.to_columns(value) for name, value in statistics._asdict().items() if name in needs}
    if "vocab_log_probs" in needs:
        outputs["vocab_log_probs"] = at.to_columns(vocab_log_probs(hidden[: at.count], weight, bias, temperature, form))
    return outputs


@torch.no_grad()
def prompt_log_probs(model: nn.Module, prompt: Sequence[int], count: int, settings: ForwardSettings) -> PromptLogProbs:
    """Computes the log-probs of all tokens of a prompt except the first. Also returns, for each of these positions, the
    `count` most probable tokens with their log-probs, most probable first; computed `chunk_tokens` rows at a time."""
    if len(prompt) < 2:
        return [], []
    ids = torch.tensor([prompt])
    real = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": real, "position_ids": real.cumsum(1) - 1, "response_mask": real[:, 1:]}
    if not count:
        return model_outputs(model, batch, frozenset({"log_probs"}), settings)["log_probs"][0].tolist(), []
    where, most = layout_of(batch, settings).to(next(model.parameters()).device), settings.chunk_tokens
    head, form = body_of(model).get_output_embeddings(), LogitForm.of(body_of(model).config.get_text_config())
    states = states_of(model, where, settings)[where.states].to(settings.dtype)
    own, likeliest = list[float](), list[list[tuple[int, float]]]()
    for part, targets in zip(states.split(most), where.targets.split(most), strict=True):
        table = vocab_log_probs(part, head_weight(head), head.bias, form=form)
        own += table.gather(1, targets[:, None])[:, 0].tolist()
        values, tokens = (each.tolist() for each in table.topk(min(count, table.shape[1]), dim=1))
        likeliest += [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
    return own, likeliest


def states_of(model: nn.Module, where: Layout, settings: ForwardSettings) -> torch.Tensor:
    """Computes the hidden states [T, H] after the model's layers, for the tokens of this rank."""
    body, is_narrow = body_of(model), settings.dtype == torch.bfloat16
    with torch.autocast(where.input_ids.device.type, dtype=torch.bfloat16, enabled=is_narrow), _wide_states(body):
        return hidden_states(body, where, settings)


def tokens_of(where: Layout, settings: ForwardSettings) -> int:
    """Returns the number of packed tokens of a rank, padding included."""
    share = settings.token_share
    return where.size if share is None else share.padded(where.size) // share.size


def _of_routers(
    found: Recorded, at: SampledPlaces, names: frozenset[str], settings: ForwardSettings
) -> dict[str, torch.Tensor]:
    """Computes `PROBS` and `CHOICES` [B, R, E], and `LOADS` [L, E + 2] summed over the tokens of this rank."""
    tokens = at.states[: at.count]
    if not settings.packing:  # routers read the padded grid
        tokens = at.where.slots.index_select(0, tokens)
    kinds = {PROBS: mean_probs, CHOICES: mean_choices}
    outputs = {name: at.to_columns(kinds[name](found, tokens)) for name in names & kinds.keys()}
    return {**outputs, LOADS: loads(found, tokens)} if LOADS in names else outputs


@dataclass(frozen=True)
class SampledPlaces:
    """The sampled tokens for which this rank computes outputs. If tokens are split over ranks: sampled tokens whose
    preceding token is on this rank."""

    states: torch.Tensor  # [n] index of the preceding token among this rank's tokens; padded
    targets: torch.Tensor  # [n] the sampled tokens; padded
    count: int  # n without padding
    owner: torch.Tensor | None  # [N] the rank that computes each token; None if tokens are not split over ranks
    where: Layout
    share: TokenShare | None

    @classmethod
    def of(cls, where: Layout, settings: ForwardSettings, total: int | None = None) -> SampledPlaces:
        """Finds the sampled tokens of a batch. If tokens are split over ranks, `total` is the number of all tokens with
        padding, by default from `share.padded`."""
        states, targets, share, owner = where.states, where.targets, settings.token_share, None
        if share is not None:
            total = total or share.padded(where.size)
            places, part = share.places(total, states.device)[states], total // share.size
            owner = places // part
            states, targets = places[owner == share.rank] - share.rank * part, targets[owner == share.rank]
        count = len(states)
        padding = (0, rounded(count, TOKENS_STEP) - count)
        return cls(F.pad(states, padding), F.pad(targets, padding), count, owner, where, share)

    def to_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Puts values into columns that are complete on every rank: [n, ...] -> [B, R, ...]."""
        own = values[: self.count]
        if self.share is not None and self.owner is not None:
            own = self.share.gather(own, self.owner)
        return self.where.to_columns(own)


@contextmanager
def _wide_states(model: PreTrainedModel) -> Iterator[None]:
    """Makes embeddings return float32 inside the block, even if their weights have fewer bits. So the residual stream,
    and rotary positions, which have its dtype, are the same as with float32 weights."""

    def widen(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        return out.to(torch.promote_types(out.dtype, torch.float32))

    handle = model.get_input_embeddings().register_forward_hook(widen)
    try:
        yield
    finally:
        handle.remove()


def hidden_states(model: PreTrainedModel, where: Layout, settings: ForwardSettings) -> torch.Tensor:
    """Computes the last hidden states [T, H] of the T real tokens. With packing, rows of padding follow. If tokens are
    split over ranks, only this rank's tokens are computed."""
    body, share = cast(PreTrainedModel, language_body(model)), settings.token_share
    extra, unseen = _media(body, where, settings)
    routed, packing, encoders = where.routed, settings.packing, encoders_of(body)
    if where.media and encoders is not None and encoders.both_ways:  # padded rows have no mask for this
        where, packing = where.with_runs(encoders.both_ways), True
    if packing:
        num_tokens = where.size if share is None else share.padded(where.size)
        if routed is not None:
            routed = F.pad(routed, (0, 0, 0, 0, 0, num_tokens - len(routed)), value=-1)
            extra = {**extra, ARGUMENT: routed if share is None else share.own(routed.movedim(0, -1)).movedim(-1, 0)}
        ids, positions = (F.pad(x, (0, num_tokens - x.shape[-1])) for x in (where.input_ids, where.position_ids))
        if share is not None:
            ids, positions, extra = share.own(ids), share.own(positions), {**extra, "token_share": share}
        # [1, T], or [3, 1, T]
        out = body(input_ids=ids[None], position_ids=positions[..., None, :], use_cache=False, packed=where, **extra)
        flat: torch.Tensor = out.last_hidden_state[0]
        return flat if unseen is None else flat + unseen
    if routed is not None:
        extra = {**extra, ARGUMENT: where.pad(routed).flatten(0, 1)}
    positions = where.position_ids
    grid = where.pad(positions) if positions.dim() == 1 else torch.stack([where.pad(axis) for axis in positions])
    if not support_of(model).is_own:
        extra = {"attention_mask": where.pad(torch.ones_like(where.input_ids)), **extra}
    out = general.forward(body, input_ids=where.pad(where.input_ids), position_ids=grid, use_cache=False, **extra)
    flat = where.unpad(out.last_hidden_state)
    return flat if unseen is None else flat + unseen


def _media(
    body: PreTrainedModel, where: Layout, settings: ForwardSettings
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Returns the arguments of the forward pass for the rows' media, and a number to add to its result: for a sharded
    model without media, the 0 of `Encoders.dummy`; else None."""
    encoders = encoders_of(body)
    if where.media and encoders is None:
        found = f"reads text, and a row has {where.media[0].kind}s"
        raise EngineError(type(body).__name__, found, "", "use a model that reads images")
    if where.media and settings.token_share is not None:
        found, change = "rows with images or videos cannot be split over ranks by tokens", "set it to 1 in the options"
        raise EngineError("mesh.context", found, "", f"{change} of the engine")
    if encoders is None or (not where.media and not settings.is_sharded):
        return {}, None
    if not where.media:
        return {}, encoders.dummy(body)
    # All ranks of a sharded model must run the tower: without a version, no rank uses cached features.
    version = None if settings.is_sharded else encoders.frozen_version(body)
    return encoders.encode(body, where.media, version), None
