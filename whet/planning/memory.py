# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in memory, by what it is and by phase, from its config and its models' configs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from whet.config.schema import RolloutConfig, SFTConfig, TrainConfig
from whet.engines.micro_batches import micro_batches
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.planning.outline import FLOAT32, Outline, Row
from whet.registry import ENGINES, ROLLOUT_ENGINES
from whet.rollout.planned import Decoding, Lengths, PlansMemory, RolloutBytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Fitted to measured runs: tokenizer, rows, libraries' own memory; and what the heap takes for each byte of tensors,
# more where sampling between updates leaves holes in it.
PROCESS_BYTES, HEAP, HEAP_WITH_SAMPLING = 110 * 2**20, 1.05, 1.25


@dataclass(frozen=True)
class Item:
    """Bytes of one kind by phase; a phase without it is not named."""

    name: str
    by_phase: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """The plan: items by phase, and what of them is only reserved."""

    items: tuple[Item, ...]
    phases: tuple[str, ...]
    untouched_bytes: int  # reserved in every phase, but no memory before it is written to
    weights: Mapping[str, int]  # parameters by role
    micro_batch_tokens: Mapping[str, int]  # by trained role
    checkpoint_bytes: int  # on disk

    def total(self, phase: str) -> int:
        """All tensors of a phase."""
        return sum(item.by_phase.get(phase, 0) for item in self.items)

    @property
    def tensor_bytes(self) -> int:
        """The most that tensors take."""
        return max(self.total(phase) for phase in self.phases)

    @property
    def touched_bytes(self) -> int:
        """The same without what is reserved and never written to."""
        return self.tensor_bytes - self.untouched_bytes

    @property
    def resident_bytes(self) -> int:
        """What the operating system counts beyond the imports."""
        return PROCESS_BYTES + round((HEAP_WITH_SAMPLING if "rollout" in self.phases else HEAP) * self.touched_bytes)

    @property
    def largest_phase(self) -> str:
        """Where that is."""
        return max(self.phases, key=self.total)


@dataclass(frozen=True)
class Setup:
    """A config and what follows from it."""

    config: TrainConfig | SFTConfig
    roles: Mapping[str, RoleSettings]  # those with a model, the actor among them
    objectives: Mapping[str, Objective]  # the losses of those that are trained
    lengths: Lengths
    passes: tuple[str, ...] = ()  # roles that read a step's rows before the update, once for each time

    @cached_property
    def outlines(self) -> dict[str, Outline]:
        """The roles' models in shapes only.  Raises: ModelError."""
        return {name: Outline(role) for name, role in self.roles.items()}


def plan_memory(setup: Setup) -> Memory:
    """What one training process takes. Every answer is taken to be as long as it may be.  Raises: ModelError."""
    config, roles, outlines, lengths = setup.config, setup.roles, setup.outlines, setup.lengths
    objectives = setup.objectives
    updates = tuple(f"{name} update" for name in objectives)
    phases = (*(("rollout",) if isinstance(config, TrainConfig) else ()), *updates)
    kept: dict[str, Counter[str]] = {}

    def keep(name: str, size: int, during: Sequence[str] = phases) -> None:
        if size:
            kept.setdefault(name, Counter()).update(dict.fromkeys(during, size))

    shards = {name: _shards(role, config.cluster.processes) for name, role in roles.items()}
    for name, model in outlines.items():
        keep(f"{name}: weights", model.weight_bytes // shards[name])
        if shards[name] > 1:
            keep(f"{name}: gathered weights", model.gathered_bytes, updates)
        keep(f"{name}: optimizer", model.moment_bytes // shards[name])
        if name in objectives:  # they stay until the role's next update begins
            others = [each for each in phases if each != f"{name} update"]
            keep(f"{name}: gradients", model.gradient_bytes // shards[name], others)
    sizes: dict[str, int] = {}
    for name, objective in objectives.items():
        split = _micro_batches(config, name, roles[name], lengths)
        sizes[name] = max(_tokens(rows, roles[name]) for rows in split)
        taken = _update_bytes(outlines[name], split, objective.needs)
        for kind in ("activations", "logits", "weights in bfloat16", "gradients"):
            parts = shards[name] if kind == "gradients" else 1
            keep(f"{name}: {kind}", taken[kind] // parts, (f"{name} update",))
    untouched = 0
    if isinstance(config, TrainConfig):
        actor, dtype = outlines["actor"], config.rollout.dtype or config.model.dtype
        if actor.is_adapted or (dtype, config.model.dtype) != ("float32", "float32"):
            keep("rollout: weights", actor.num_weights * ITEM_BYTES[dtype])
        planned = rollout_bytes(config, actor.config, lengths)
        untouched = planned.cache - planned.written
        keep("rollout: KV cache", planned.cache, phases if planned.is_kept else ("rollout",))
        keep("rollout: logits", sampling_bytes(config, actor.config, planned), ("rollout",))
        keep("batch columns", column_bytes(config, lengths, outlines), updates)
    items = tuple(Item(name, dict(by_phase)) for name, by_phase in kept.items())
    checkpoint = sum(outlines[name].checkpoint_bytes for name in objectives)
    weights = {name: each.num_weights for name, each in outlines.items()}
    return Memory(items, phases, untouched, weights, sizes, checkpoint)


def _update_bytes(model: Outline, split: Sequence[list[Row]], needs: frozenset[str]) -> Counter[str]:
    """At the height of an update: in its first micro-batch, or in the largest of those that find gradients there."""
    first, *later = split
    if not later:
        return model.update_bytes(first, needs, accumulates=False)
    largest = max(later, key=lambda rows: _tokens(rows, model.role))
    taken = model.update_bytes(largest, needs, accumulates=True)
    if _tokens(largest, model.role) < 0.9 * _tokens(first, model.role):
        taken = max(taken, model.update_bytes(first, needs, accumulates=False), key=Counter.total)
    return taken


def _micro_batches(config: TrainConfig | SFTConfig, name: str, role: RoleSettings, lengths: Lengths) -> list[list[Row]]:
    """Of one mini-batch, as the engine splits it."""
    rows = mini_batch(config, name, lengths)
    shares = role.forward.packing and role.forward.share_prompts
    split = micro_batches(
        [row.tokens for row in rows],
        role.micro_batch_tokens("cpu"),
        packing=role.forward.packing,
        prompts=[(row.prompt, row.prompt_tokens) for row in rows] if shares else None,
    )
    return [[rows[index] for index in chosen] for chosen in split]


def mini_batch(config: TrainConfig | SFTConfig, name: str, lengths: Lengths) -> list[Row]:
    """The rows of an optimizer step in one process."""
    if isinstance(config, SFTConfig):
        count = -(-config.data.train_batch_size // config.cluster.processes_of("actor"))
        return [Row(index, 1, tokens - 1) for index, tokens in enumerate(lengths.spread(count), 1)]
    role = config.critic if name == "critic" else config.actor
    prompts = lengths.spread(role.mini_batch_size or config.data.train_batch_size)
    every = [Row(number, tokens, lengths.response) for number, tokens in enumerate(prompts, 1)]
    count = -(-len(prompts) * config.rollout.n // config.cluster.processes_of(name))
    return [row for row in every for _ in range(config.rollout.n)][:count]


def _tokens(rows: Sequence[Row], role: RoleSettings) -> int:
    """What the model reads of a micro-batch."""
    if not role.forward.packing:
        return len(rows) * max(row.tokens for row in rows)
    if not role.forward.share_prompts:
        return sum(row.tokens for row in rows)
    return sum(row.response_tokens for row in rows) + sum({row.prompt: row.prompt_tokens for row in rows}.values())


def _shards(role: RoleSettings, processes: int) -> int:
    entry = ENGINES[role.engine.name]
    engine: Any = entry.load()
    shards: int = engine.shards(processes, entry.resolve_options(role.engine.options, "engine.options"))
    return shards


def rollout_bytes(config: TrainConfig, model: Any, lengths: Lengths) -> RolloutBytes:
    """What the rollout engine says of its memory; nothing where it cannot tell."""
    entry, rows = ROLLOUT_ENGINES[config.rollout.engine.name], decoded_together(config)
    dtype = config.rollout.dtype or config.model.dtype
    decoding = Decoding(rows, config.rollout.n, lengths, token_bytes(model, dtype), int(model.num_hidden_layers))
    engine = entry.load()
    if not isinstance(engine, PlansMemory):
        return RolloutBytes(0, 0, False, rows, 0)
    return engine.planned_bytes(
        decoding, entry.resolve_options(config.rollout.engine.options, "rollout.engine.options")
    )


def token_bytes(model: Any, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    heads = model.to_dict().get("num_key_value_heads") or model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * head_size(model) * ITEM_BYTES[dtype])


def head_size(model: Any) -> int:
    """Numbers of one head."""
    return int(model.to_dict().get("head_dim") or model.hidden_size // model.num_attention_heads)


def inner_size(model: Any) -> int:
    """Numbers of a state between the matrices of a layer's MLP."""
    return int(model.to_dict().get("intermediate_size") or 4 * model.hidden_size)


def decoded_together(config: TrainConfig) -> int:
    """Sequences that one process decodes side by side."""
    requests = -(-config.data.train_batch_size * config.rollout.n // config.cluster.processes_of("rollout"))
    return min(config.rollout.max_batch_size, requests)


def sampling_bytes(config: TrainConfig, model: Any, planned: RolloutBytes) -> int:
    """What a decode or prefill step holds beside the cache: logits, their softmax and sums, or a layer's states."""
    rollout = config.rollout
    item = ITEM_BYTES[rollout.dtype or config.model.dtype]
    logits = decoded_together(config) * bytes_per_logit(rollout, item)
    logits += planned.prompt_rows * item  # after the prompts
    states = planned.prompt_tokens * 3 * (inner_size(model) + model.hidden_size) * item
    return int(max(logits * model.vocab_size, states))


def bytes_per_logit(rollout: RolloutConfig, item: int) -> int:
    """What sampling holds for each entry of the logits: as they come, in float32, log-softmax, probabilities, sums."""
    penalties = rollout.repetition_penalty, rollout.presence_penalty, rollout.frequency_penalty
    is_constrained = penalties != (1, 0, 0) or bool(rollout.bad_words) or rollout.allowed_token_ids is not None
    is_cut = rollout.top_p < 1 or rollout.top_k > 0  # sorted with their order, and cut by it
    beside = max(20 * is_constrained, 17 * is_cut, 4 * (rollout.min_p > 0))
    return item + (FLOAT32 if item < FLOAT32 else 0) + 3 * FLOAT32 + beside


def column_bytes(config: TrainConfig, lengths: Lengths, roles: Mapping[str, object]) -> int:
    """The step's batch and the mini-batch taken from it."""
    prompts, response = config.data.train_batch_size, lengths.response
    numbers = 7 + 3 * ("critic" in roles) + ("ref" in roles)  # scores, rewards, advantages, log-probs, ...
    step = prompts * config.rollout.n * (8 * (4 * max(lengths.prompts) + 6 * response) + 4 * numbers * response)
    mini_batch_size = config.actor.mini_batch_size or prompts
    return step if mini_batch_size == prompts else step + step * mini_batch_size // prompts
