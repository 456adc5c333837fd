# SPDX-License-Identifier: Apache-2.0
"""Builds a stage of Megatron-Core's GPTModel from a transformers config, and computes its outputs for sampled tokens.

The layers are Megatron-Core's own, without TransformerEngine, but with whet's attention over packed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from whet.devices import HOST
from whet.engines.role import RoleSettings
from whet.errors import ConfigError
from whet.models.attention import attention
from whet.models.outputs import ForwardSettings, SampledPlaces, statistics_of
from whet.models.packing import Layout
from whet.models.sequence_parallel import TokenShare
from whet.plugins.megatron import core
from whet.plugins.megatron.ranks import MeshGroups
from whet.plugins.megatron.sizes import Sizes

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "perform_initialization": False,  # weights are read
    "calculate_per_token_loss": True,  # losses are divided by counts of all ranks, and gradients summed
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    # Kernels of Apex and TransformerEngine.
    **dict.fromkeys(("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("masked_softmax_fusion", "apply_rope_fusion", "persist_layer_norm"), False),
    "deallocate_pipeline_outputs": False,
}


@dataclass(kw_only=True)
class Packed(core.PackedSeqParams):  # type: ignore[misc]
    """The layout of packed rows, as the layers read it."""

    where: Layout
    turns: tuple[torch.Tensor, torch.Tensor]  # [1, T, D] cosines and sines of rotary positions
    share: TokenShare | None  # splits the tokens over ranks
    places: torch.Tensor | None = None  # [T] of the tokens, where they come in another order


class PackedAttention(nn.Module):
    """Applies rotary positions and causal attention to packed rows, in place of Megatron-Core's core attention.

    With Megatron-Core's context parallelism it calls TransformerEngine's attention, the only one that supports it."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__()
        # In vars, not as a submodule: it has no weights, and a state must not depend on the mesh.
        vars(self)["inner"] = None
        if config.context_parallel_size > 1:
            vars(self)["inner"] = core.transformer_engine.TEDotProductAttention(config, **settings)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> torch.Tensor:
        """Computes attention of packed tokens: [T, H, D], [T, KV, D], [T, KV, D] -> [T, H D]."""
        packed, inner = packed_seq_params, vars(self)["inner"]
        query, key = apply_rotary_pos_emb(query, key, *(turn[0].to(query.dtype) for turn in packed.turns))
        if inner is not None:
            kind = core.AttnMaskType.padding_causal
            out: torch.Tensor = inner(query, key, value, None, kind, packed_seq_params=packed)
            return out
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return attention(self, query, key, value, None, packed=packed.where, token_share=packed.share)[0][0].flatten(1)


class Norm(nn.RMSNorm):
    """torch's RMSNorm, with gradients summed over ranks. Megatron-Core's local norm does not support split tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class MegatronStage(core.GPTModel):  # type: ignore[misc]
    """A pipeline stage: some of the layers. It returns hidden states. A `head` for scores replaces the output layer."""

    head: nn.Linear | None
    pad_token_id: int | None

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    @property
    def layers_before(self) -> int:
        """The number of layers in earlier stages."""
        first: int = self.decoder.layers[0].layer_number
        return first - 1


def config_of(model: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype, recomputes: bool) -> Any:
    """Converts transformers' config to Megatron-Core's.  Raises: ConfigError for sizes that do not divide the model."""
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    experts = getattr(model, "num_local_experts", None) or getattr(model, "num_experts", None)
    width = getattr(model, "moe_intermediate_size", model.intermediate_size) if experts else model.intermediate_size
    stages = sizes.pipeline * sizes.virtual
    for name, size, count, what in (
        ("tensor", sizes.tensor, groups, "key-value heads"),
        ("tensor", sizes.tensor, model.vocab_size, "rows of the vocabulary"),
        ("tensor", sizes.tensor, width, "inner dimensions of an MLP"),
        ("expert", sizes.expert, experts or 1, "experts"),
        ("pipeline", stages, model.num_hidden_layers, "layers (the size is pipeline x virtual)"),
    ):
        if count % size:
            raise ConfigError(f"engine.options.{name}", size, f"a divisor of the model's {count} {what}", "lower it")
    return core.TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=getattr(model, "head_dim", None) or model.hidden_size // heads,
        ffn_hidden_size=width,  # of an expert too
        num_moe_experts=experts,
        moe_router_topk=getattr(model, "num_experts_per_tok", 2),
        moe_router_pre_softmax=not getattr(model, "norm_topk_prob", True),
        moe_router_dtype="fp32" if dtype != torch.float32 else None,
        layernorm_epsilon=model.rms_norm_eps,
        add_qkv_bias=model.model_type == "qwen2",
        qk_layernorm=model.model_type.startswith("qwen3"),
        use_cpu_initialization=device == HOST,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context if sizes.halves else 1,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        sequence_parallel=sizes.tensor > 1,
        # With both settings, interleaved stages get gradients of other micro-batches, without an error.
        batch_p2p_comm=sizes.virtual == 1,
        overlap_p2p_comm=sizes.virtual > 1,
        **FIXED,
        **(RECOMPUTED if recomputes else {}),
    )


def stage_of(config: Any, model: Any, part: int, role: RoleSettings) -> MegatronStage:
    """Makes this rank's `part`-th stage without weight values; `config` is Megatron-Core's, `model` transformers'."""
    spec = core.get_gpt_layer_local_spec(config.num_moe_experts, False, config.qk_layernorm, normalization="RMSNorm")
    own = spec.submodules
    own.input_layernorm = own.pre_mlp_layernorm = Norm
    own.self_attention.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        own.self_attention.submodules.q_layernorm = own.self_attention.submodules.k_layernorm = Norm
    virtual = config.virtual_pipeline_model_parallel_size
    ends = {"ignore_virtual": virtual is None, "vp_stage": part if virtual else None}
    is_last, has_head = core.parallel_state.is_pipeline_last_stage(**ends), role.is_value_model or role.is_reward_model
    layers = config.num_layers // config.pipeline_model_parallel_size // (virtual or 1)
    made = MegatronStage(
        config,
        core.TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=core.parallel_state.is_pipeline_first_stage(**ends),
        post_process=is_last,
        share_embeddings_and_output_weights=model.tie_word_embeddings and not has_head,
        position_embedding_type="none",  # PackedAttention applies rotary positions
        vp_stage=part if virtual else None,
    )
    made.head, made.pad_token_id = None, model.pad_token_id
    if has_head and is_last:
        made.output_layer = None
        made.head = nn.Linear(model.hidden_size, 1, bias=role.is_value_model, dtype=config.params_dtype)
        for weight in made.head.parameters():  # ranks have different tokens
            vars(weight)["sequence_parallel"] = config.sequence_parallel
    return made


def pack(body: PreTrainedModel, where: Layout, size: int, ranks: MeshGroups) -> tuple[torch.Tensor, Packed]:
    """Returns this rank's token ids [1, T], padded to `size`, and the layout of the rows for the layers."""
    found: dict[str, Any] = {}
    places = torch.arange(len(where.input_ids), device=where.input_ids.device)
    if ranks.sizes.halves:
        places, begins = in_halves(where, ranks.sizes, size)
        longest = int(begins.diff().max())
        found = {f"cu_seqlens_{each}": begins for each in ("q", "kv", "q_padded", "kv_padded")}
        found |= {"max_seqlen_q": longest, "max_seqlen_kv": longest, "places": places}
    ids, positions = (
        x.new_zeros(1, size).index_copy(1, places, x[None]) for x in (where.input_ids, where.position_ids)
    )
    if (share := ranks.context) is not None:
        ids, positions = share.own(ids), share.own(positions)
    like = torch.empty((), dtype=torch.float32, device=ids.device)
    turns = body.base_model.get_submodule("rotary_emb")(like, positions)
    return ids, Packed(qkv_format="thd", where=where, turns=turns, share=share, **found)


def in_halves(where: Layout, sizes: Sizes, size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token order of Megatron-Core's context parallelism. Each row is padded and cut into 2 x `context`
    chunks. The chunks of rank 0 come first (a row's first and last), then those of rank 1 (its second and second last).

    Returns: places [T] of the tokens; starts [rows + 1] of the padded rows, the last one extended to `size`."""
    ranks, step = sizes.context, 2 * sizes.context * sizes.tensor
    row, within = where.slots // where.width, where.slots % where.width
    lengths = -(-row.bincount() // step) * step
    lengths[-1] += max(0, size - int(lengths.sum()))
    begins = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(int(begins[-1]), device=row.device).split(lengths.tolist())
    order = [each.view(2 * ranks, -1)[[rank, -1 - rank]].flatten() for rank in range(ranks) for each in rows]
    return torch.cat(order).argsort()[begins[row] + within], begins.int()


def outputs_of(
    stage: MegatronStage,
    hidden: torch.Tensor,
    packed: Packed,
    needs: frozenset[str],
    settings: ForwardSettings,
    heat: float,
) -> dict[str, torch.Tensor]:
    """Computes the outputs [B, R] of the last stage from this rank's hidden states [T, 1, H], at temperature `heat`."""
    where = packed.where.at_ends(stage.pad_token_id) if "scores" in needs else packed.where
    if packed.places is not None:
        where = replace(where, states=packed.places[where.states])
    share = settings.token_share
    at = SampledPlaces.of(where, settings, len(hidden) * (1 if share is None else share.size))
    states = hidden[:, 0].index_select(0, at.states)
    if stage.head is not None:
        return {name: at.to_columns(stage.head(states).squeeze(-1).float()) for name in needs}
    is_tied = stage.share_embeddings_and_output_weights
    weight = stage.shared_embedding_or_output_weight() if is_tied else stage.output_layer.weight
    # All rows of the vocabulary: each rank has its own tokens, and gets the gradient of its rows from all ranks.
    whole = core.gather_from_sequence_parallel_region(weight)
    return statistics_of(states, whole, None, at, needs, settings, heat)
