# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face weights into stages of Megatron-Core, and yields them as whole weights again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from whet.engines.role import RoleSettings
from whet.models.load import check_finite, new_head
from whet.models.sharded import open_slices
from whet.plugins.megatron.model import MegatronStage
from whet.plugins.megatron.names import Rule, in_memory, rule_of, whole_weight
from whet.plugins.megatron.ranks import MeshGroups


@torch.no_grad()
def fill(stages: Sequence[MegatronStage], config: Any, ranks: MeshGroups, role: RoleSettings) -> None:
    """Reads this rank's parts of the weights. A new head is initialised as in any engine.  Raises: ModelError."""
    with open_slices(role.model_path, role.allow_pickle) as slices:
        files = dict(slices)
        prefix = "model." if "model.embed_tokens.weight" in files else ""
        for stage in stages:
            for name, weight in stage.named_parameters():
                if name.startswith("head."):
                    weight.copy_(_head(weight, files, role))
                    continue
                rule = _rule(stage, name, config, ranks)
                group = ranks.tensor if rule.expert is None else ranks.expert_tensor
                # The gradient norm counts weights that are split over ranks on each rank. These attributes mark them,
                # as Megatron-Core's initialisation, which is left out, would.
                vars(weight).update(tensor_model_parallel=rule.cut is not None, partition_dim=rule.cut or 0)
                whole = whole_weight(rule, files, prefix, role.model_path)
                weight.copy_(rule.share(whole, group.size(), dist.get_rank(group)))
            check_finite(stage, role.model_path)


def _head(weight: torch.Tensor, files: Mapping[str, Any], role: RoleSettings) -> torch.Tensor:
    """Returns a reward model's head from its files, or a new one. A value model's head starts at 0."""
    if role.is_value_model:
        return torch.zeros_like(weight)
    found: torch.Tensor = files["score.weight"][:] if "score.weight" in files else new_head(weight.shape, role.seed)
    return found


@torch.no_grad()
def named(
    stages: Sequence[MegatronStage], config: Any, ranks: MeshGroups, is_value_model: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the whole weights of this rank's stages by Hugging Face name. Tied weights come once. All ranks of a stage
    take part and get them."""
    heads, prefix = config.num_attention_heads // config.num_key_value_heads, "body." if is_value_model else "model."
    for stage in stages:
        rules = [
            (_rule(stage, name, config, ranks), weight)
            for name, weight in stage.named_parameters()
            if not (name == "output_layer.weight" and config.tie_word_embeddings)
        ]
        for rule, weight in rules:
            if rule.expert is None:
                whole = rule.whole(_from_all(weight, ranks.tensor))
                for name, value in rule.split(whole, heads):
                    yield _whole_name(name, prefix), value.contiguous()
        experts = [(rule, weight) for rule, weight in rules if rule.expert is not None]
        for owner in dict.fromkeys(in_memory(rule) for rule, _ in experts):
            own = [rule.whole(_from_all(w, ranks.expert_tensor)) for rule, w in experts if in_memory(rule) == owner]
            yield f"{prefix}{owner}", torch.cat(_from_all(torch.stack(own), ranks.expert))


def _rule(stage: MegatronStage, name: str, config: Any, ranks: MeshGroups) -> Rule:
    experts = (stage.config.num_moe_experts or 0) // ranks.sizes.expert
    return rule_of(name, config, stage.layers_before, dist.get_rank(ranks.expert) * experts)


def _whole_name(name: str, prefix: str) -> str:
    if name.startswith("head."):
        return name.replace("head.", "value_head." if prefix == "body." else "score.")
    return name if name.startswith("lm_head.") else f"{prefix}{name}"


def _from_all(weight: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gathers the parts of all ranks of a group, in order."""
    own = weight.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return parts
