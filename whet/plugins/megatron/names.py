# SPDX-License-Identifier: Apache-2.0
"""Maps weights of Megatron-Core's GPTModel to weights of Hugging Face models by name, and back.

Megatron-Core keeps queries, keys and values in one weight, ordered by groups of heads, and gate and up in another. A
rank has some rows or columns of a weight. Each expert is a module of its own. Hugging Face's modules stack experts in
one weight [E, ...], while most files store them separately."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from whet.errors import ConfigError, ModelError

FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")  # model types
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
# Names in files of Mixtral, by the usual names: w1 is the gate, w2 down, w3 up.
IN_FILES = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True)
class Rule:
    """The Hugging Face names of a Megatron-Core weight, and the way to convert its form."""

    names: tuple[str, ...]  # of the Hugging Face weights that it consists of
    cut: int | None = None  # dimension that the ranks share out; None: whole on each
    groups: int = 0  # number of groups of heads; queries, keys and values of a group lie together
    expert: int | None = None  # index in the weight of all experts

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins Hugging Face weights into one whole Megatron-Core weight."""
        if self.groups:
            parts = [part.unflatten(0, (self.groups, -1)) for part in parts]
            return torch.cat([*parts], 1).flatten(0, 1)
        return torch.cat([*parts]) if len(parts) > 1 else parts[0]

    def split(self, whole: torch.Tensor, heads: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Splits a whole Megatron-Core weight into Hugging Face weights by name. `heads`: query heads of a group."""
        if self.groups:
            size = whole.shape[0] // self.groups // (heads + 2)
            grouped = whole.unflatten(0, (self.groups, -1)).split([heads * size, size, size], 1)
            yield from zip(self.names, (part.flatten(0, 1) for part in grouped), strict=True)
        else:
            yield from zip(self.names, whole.chunk(len(self.names)), strict=True)

    def share(self, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        """Returns the part of a whole weight for `rank` of `size` ranks."""
        if self.cut is None or size == 1:
            return whole
        return torch.cat([part.chunk(size, self.cut)[rank] for part in whole.chunk(self._blocks)])

    def whole(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins the parts of all ranks into the whole weight."""
        if self.cut is None or len(shares) == 1:
            return shares[0]
        blocks = zip(*(share.chunk(self._blocks) for share in shares), strict=True)
        return torch.cat([torch.cat(block, self.cut) for block in blocks])

    @property
    def _blocks(self) -> int:
        """The number of blocks that are split over ranks separately: gate and up are two, grouped heads are one."""
        return len(self.names) if not self.groups else 1


def rule_of(name: str, config: Any, layers_before: int = 0, experts_before: int = 0) -> Rule:
    """Returns a parameter's rule. Its stage starts at layer `layers_before`, its rank at expert `experts_before`."""
    outside = {
        "embedding.word_embeddings.weight": Rule(("embed_tokens.weight",), 0),
        "output_layer.weight": Rule(("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight",), 0),
        "decoder.final_layernorm.weight": Rule(("norm.weight",)),
        **{name: Rule((name,)) for name in ("head.weight", "head.bias")},
    }
    if name in outside:
        return outside[name]
    found = LAYER.fullmatch(name)
    assert found is not None, name
    layer, rest = f"layers.{int(found[1]) + layers_before}.", found[2]
    attention, groups = f"{layer}self_attn.", config.num_key_value_heads
    if inner := EXPERT.fullmatch(rest):
        number = int(inner[1]) + experts_before
        kinds = ("gate_proj", "up_proj") if inner[2] == "1" else ("down_proj",)
        names = tuple(f"{layer}mlp.experts.{number}.{kind}.weight" for kind in kinds)
        return Rule(names, 0 if inner[2] == "1" else 1, expert=number)
    qkv = [tuple(f"{attention}{each}_proj.{kind}" for each in "qkv") for kind in ("weight", "bias")]
    return {
        "input_layernorm.weight": Rule((f"{layer}input_layernorm.weight",)),
        "self_attention.linear_qkv.weight": Rule(qkv[0], 0, groups),
        "self_attention.linear_qkv.bias": Rule(qkv[1], 0, groups),
        "self_attention.linear_proj.weight": Rule((f"{attention}o_proj.weight",), 1),
        "self_attention.q_layernorm.weight": Rule((f"{attention}q_norm.weight",)),
        "self_attention.k_layernorm.weight": Rule((f"{attention}k_norm.weight",)),
        "pre_mlp_layernorm.weight": Rule((f"{layer}post_attention_layernorm.weight",)),
        "mlp.linear_fc1.weight": Rule((f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"), 0),
        "mlp.linear_fc2.weight": Rule((f"{layer}mlp.down_proj.weight",), 1),
        "mlp.router.weight": Rule((f"{layer}mlp.gate.weight",)),
    }[rest]


def in_memory(rule: Rule) -> str:
    """Returns the name of the stacked weight [E, ...] in Hugging Face's modules that contains this expert's weight."""
    owner = rule.names[0].partition(".experts.")[0]
    return f"{owner}.experts.{'gate_up_proj' if len(rule.names) > 1 else 'down_proj'}"


def whole_weight(rule: Rule, files: Mapping[str, Any], prefix: str, path: str) -> torch.Tensor:
    """Reads and joins Hugging Face weights from files to a whole Megatron-Core weight.  Raises: ModelError."""
    if rule.expert is not None and (stacked := f"{prefix}{in_memory(rule)}") in files:
        found: torch.Tensor = files[stacked][rule.expert]
        return found
    return rule.join([_find(name, files, prefix, path) for name in rule.names])


def _find(name: str, files: Mapping[str, Any], prefix: str, path: str) -> torch.Tensor:
    whole = other = name if name.startswith("lm_head.") else f"{prefix}{name}"
    for old, new in IN_FILES.items():
        other = other.replace(old, new)
    if (found := next((each for each in (whole, other) if each in files), None)) is None:
        raise ModelError(f"{path}", f"lacks the weight {whole}", "", "fetch the folder again, or name another one")
    weight: torch.Tensor = files[found][:]
    return weight


def check_family(config: Any) -> None:
    """Raises: ConfigError for a model family outside `FAMILIES`, or an unsupported variant of one."""
    kind, values, error = config.model_type, config.to_dict(), partial(ConfigError, "engine.name", "megatron")
    if kind not in FAMILIES:
        raise error(f"a model of the types {', '.join(FAMILIES)}, and not {kind}", "set it to fsdp")
    forms = {
        "attention_bias": bool(values.get("attention_bias")),
        "mlp_bias": bool(values.get("mlp_bias")),
        "sliding_window": bool(values.get("sliding_window")) and values.get("use_sliding_window", True),
        "mlp_only_layers": bool(values.get("mlp_only_layers")) or (values.get("decoder_sparse_step") or 1) > 1,
        "output_router_logits": bool(values.get("output_router_logits")),
        "hidden_act": values["hidden_act"] != "silu",
    }
    for name in (each for each, holds in forms.items() if holds):
        raise error(f"a {kind} without {name} in its config.json", "set it to fsdp")
