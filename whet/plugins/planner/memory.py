# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run by kind and phase, from its config and the configs of its models."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from whet.config.schema import RolloutConfig, RunConfig, TrainConfig
from whet.devices import needed_for_tensors, room_for_tensors
from whet.engines.micro_batches import micro_batches
from whet.engines.protocol import Spread, TrainEngine
from whet.engines.role import RoleSettings
from whet.models.caches import sequence_bytes, token_bytes
from whet.planning.machine import FreeMemory
from whet.planning.planner import Setup
from whet.plugins.planner.first import tokens_within
from whet.plugins.planner.outline import FLOAT32, Outline, RowLength, inner_size, tokens_of
from whet.registry import ENGINES, ROLLOUT_ENGINES, load_target
from whet.rollout.protocol import SharesModule
from whet.rollout.requirements import CacheRoom, Decoding, Lengths, RolloutBytes, requirement

log = logging.getLogger(__name__)
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Fitted to measured runs: memory of tokenizer, rows and libraries; and heap bytes for each byte of tensors, more where
# sampling between updates fragments the heap.
PROCESS_BYTES, HEAP, HEAP_WITH_SAMPLING = 110 * 2**20, 1.05, 1.25
DEVICE_PROCESS_BYTES = 2 * 2**30  # of an accelerator's libraries on the host (not measured yet)
CACHE = "rollout: KV cache"
_OUTLINES = WeakKeyDictionary[Setup, dict[str, Outline]]()
MARGIN = 1.2  # formulas of activations are within 20 % of traced plans


@dataclass(frozen=True)
class Item:
    """An item of memory: its name, and its bytes in each phase that needs it."""

    name: str
    by_phase: Mapping[str, int]
    on_device: bool = False


@dataclass(frozen=True)
class Memory:
    """The memory plan of one process: its items, with the bytes of each in each phase."""

    items: tuple[Item, ...]
    phases: tuple[str, ...]
    untouched_bytes: int  # reserved on the host but never written, so that the system gives no memory for it
    weights: Mapping[str, int]  # parameters by role
    micro_batch_tokens: Mapping[str, int]  # by trained role
    checkpoint_bytes: int  # on disk

    def total(self, phase: str, *, on_device: bool = False) -> int:
        """Bytes of all tensors in a phase, on the host or on the accelerator."""
        return sum(item.by_phase.get(phase, 0) for item in self.items if item.on_device == on_device)

    @property
    def tensor_bytes(self) -> int:
        """Peak bytes of tensors on the host."""
        return max(self.total(phase) for phase in self.phases)

    @property
    def touched_bytes(self) -> int:
        """Peak bytes of tensors on the host, without tensors that are never written."""
        return self.tensor_bytes - self.untouched_bytes

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of the process, without the memory of imports."""
        heap = HEAP_WITH_SAMPLING if "rollout" in self.phases else HEAP
        own = PROCESS_BYTES + (DEVICE_PROCESS_BYTES if self.device_tensor_bytes else 0)
        return own + round(heap * self.touched_bytes)

    @property
    def device_tensor_bytes(self) -> int:
        """Peak bytes of tensors on the accelerator; 0 without one."""
        return max(self.total(phase, on_device=True) for phase in self.phases)

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the accelerator, including the allocator's and libraries' own."""
        tensors = self.device_tensor_bytes
        return needed_for_tensors(tensors) if tensors else 0


def outlines_of(setup: Setup) -> dict[str, Outline]:
    """Returns an outline of each role's model, with shapes instead of values.  Raises: ModelError."""
    if setup not in _OUTLINES:
        each = setup.device is not None, setup.media_share
        _OUTLINES[setup] = {name: Outline(role, *each) for name, role in setup.roles.items()}
    return _OUTLINES[setup]


def device_of(setup: Setup, pool: str) -> FreeMemory | None:
    """Returns the accelerator of each process of a pool, or the process's share of one; None on the host."""
    share, whole = setup.config.cluster.pools[pool].share, setup.device
    if whole is None or not setup.config.cluster.needs_device(pool):
        return None
    if share == 1:
        return whole
    return FreeMemory(round(whole.bytes * share), f"{share:g} of {whole.bound}", round(whole.total * share))


def has_server(config: RunConfig) -> bool:
    """Tells whether an inference server generates responses, instead of a module in a rollout process."""
    if config.trains_on == "examples":
        return False
    return not isinstance(ROLLOUT_ENGINES[config.rollout.engine.name].load(), SharesModule)


class _Kept:
    """Collects bytes by name, phase and memory (host or device)."""

    def __init__(self, phases: tuple[str, ...], has_device: bool) -> None:
        self.phases, self._has_device = phases, has_device
        self._found: dict[tuple[str, bool], Counter[str]] = {}

    def keep(self, name: str, size: int, during: Sequence[str] | None = None, *, on_host: bool = False) -> None:
        """Counts `size` bytes in some phases (by default all), on the accelerator if there is one."""
        phases = self.phases if during is None else during
        if size and phases:
            place = name, self._has_device and not on_host
            self._found.setdefault(place, Counter()).update(dict.fromkeys(phases, size))

    def on_device(self, phase: str) -> int:
        """Returns the bytes of a phase on the accelerator."""
        return sum(found[phase] for (_, is_there), found in self._found.items() if is_there)

    def items(self) -> tuple[Item, ...]:
        """Returns an item for each name and memory."""
        return tuple(Item(name, dict(found), there) for (name, there), found in self._found.items())


def plan_memory(setup: Setup, pool: str | None = None) -> Memory:
    """Plans the memory of one process of a pool (by default the first), with all responses at their length limit.

    Raises: ModelError."""
    config, cluster = setup.config, setup.config.cluster
    pool = next(iter(cluster.pools)) if pool is None else pool
    kept, planned = _at_rest(setup, pool)
    outlines = {name: each for name, each in outlines_of(setup).items() if cluster.pool_of(name) == pool}
    trained = [name for name in setup.objectives if name in outlines]
    sizes = {name: _keep_update(kept, setup, name, outlines[name]) for name in trained}
    untouched = 0 if planned is None or setup.device is not None else planned.cache - planned.written
    if config.trains_on == "prompts" and "actor" in trained:
        updates = [f"{name} update" for name in trained]
        kept.keep("batch columns", column_bytes(config, setup.lengths, outlines_of(setup)), updates, on_host=True)
    checkpoint = sum(outlines_of(setup)[name].checkpoint_bytes for name in setup.objectives)
    weights = {name: each.num_weights for name, each in outlines.items()}
    return Memory(kept.items(), kept.phases, untouched, weights, sizes, checkpoint)


def _at_rest(setup: Setup, pool: str) -> tuple[_Kept, RolloutBytes | None]:
    """Counts the bytes of a pool's process by phase, without model passes.  Returns them, and the rollout's plan."""
    config, cluster = setup.config, setup.config.cluster
    outlines = {name: each for name, each in outlines_of(setup).items() if cluster.pool_of(name) == pool}
    samples = config.trains_on == "prompts" and cluster.pool_of("rollout") == pool
    updates = tuple(f"{name} update" for name in setup.objectives if name in outlines)
    phases = (*(("rollout",) if samples else ()), *updates) or ("columns",)
    turns = config.trains_on == "prompts" and samples and config.rollout.free_cache_engine
    kept = _Kept(phases, setup.device is not None)
    for name, model in outlines.items():
        _keep_role(kept, setup, name, model, away=("rollout",) if turns and setup.device is not None else ())
    if config.trains_on == "prompts" and config.rollout.engine.options.get("weight_delta") is True:
        size = outlines_of(setup)["actor"].num_weights * ITEM_BYTES[config.rollout.dtype]
        if samples or "actor" in outlines:  # one of the actor's ranks on each node sends
            ranks = Counter(slot.node for slot in cluster.slots() if slot.pool.name == pool)
            parts = 1 if samples else min(ranks.values())
            kept.keep("weights of the last version", size // parts, phases, on_host=True)
    return kept, _keep_rollout(kept, setup, turns) if samples else None


def micro_batch_tokens(setup: Setup, name: str) -> int:
    """Returns the largest number of tokens in a role's forward pass: the configured number; else the number that fits
    into an accelerator of known memory, beside the other tensors of an update; else the default of the device."""
    role, model = setup.roles[name], outlines_of(setup)[name]
    device = device_of(setup, setup.config.cluster.pool_of(name))
    if role.max_tokens_per_micro_batch is not None or device is None or not device.total:
        return role.micro_batch_tokens(model.device_type)
    return tokens_within(room_for_tensors(device.total), *_pass_bytes(setup, name))


def _pass_bytes(setup: Setup, name: str) -> tuple[int, float]:
    """Returns a role's bytes on an accelerator by formulas: all but activations, and one token's activations."""
    model, spread, trains = outlines_of(setup)[name], spread_of(setup, name), name in setup.objectives
    kept, _ = _at_rest(setup, setup.config.cluster.pool_of(name))
    phases = [f"{name} update"] if trains else [each for each in kept.phases if each != "rollout"] or kept.phases
    held = max(map(kept.on_device, phases))
    gradients = model.gradient_bytes // spread.shards if trains and not spread.on_host else 0
    held += max(model.logit_bytes // spread.token_shares, gradients)  # the first logits are there before gradients
    held += model.copy_bytes * (spread.shards == 1)
    seen = model.vision_bytes([RowLength(0, 1024, 0)]) / 1024
    return held, model.bytes_of_token(trains) / spread.token_shares + seen


def sized(settings: RoleSettings, setup: Setup, name: str) -> RoleSettings:
    """Returns a role's settings in a run. On an accelerator of known memory, `max_tokens_per_micro_batch` becomes the
    planner's number."""
    if setup.device is None or not setup.device.total:
        return settings
    tokens = micro_batch_tokens(setup, name)
    log.info("%s: micro-batches of up to %d tokens", name, tokens)
    return replace(settings, max_tokens_per_micro_batch=tokens)


def cache_room(setup: Setup) -> CacheRoom | None:
    """Returns the room for the KV cache beside the other tensors of its process on an accelerator; None on a host, and
    for a cache of fixed size. It uses formulas, as a traced plan would delay the start of a run."""
    config = setup.config
    if config.trains_on == "examples" or setup.device is None:
        return None
    engine = ROLLOUT_ENGINES[config.rollout.engine.name]
    if engine.resolve_options(config.rollout.engine.options, "options").get("kv_cache_bytes") != "auto":
        return None
    pool, model = config.cluster.pool_of("rollout"), outlines_of(setup)["actor"].config
    kept, planned = _at_rest(setup, pool)
    assert planned is not None
    peaks = [kept.on_device("rollout")]
    for name in () if config.rollout.free_cache_engine else setup.objectives:
        if config.cluster.pool_of(name) == pool:
            (held, of_token), role = _pass_bytes(setup, name), outlines_of(setup)[name].role
            tokens = max(tokens_of(rows, role.forward) for rows in _micro_batches(setup, name))
            peaks.append(held + round(MARGIN * of_token * tokens))
    longest = max(setup.lengths.prompts) + setup.lengths.response
    beside = max(peaks) - planned.cache
    return CacheRoom(beside, outstanding(config) * longest * token_bytes(model, ITEM_BYTES[config.rollout.dtype]))


def _keep_role(kept: _Kept, setup: Setup, name: str, model: Outline, away: tuple[str, ...]) -> None:
    """Counts a model's weights, moments and gradients. In the phases `away` they are on the host."""
    spread = spread_of(setup, name)
    here = [phase for phase in kept.phases if phase not in away]
    shared = name == "actor" and _samples_from_the_actor(setup)
    for what, size in (("weights", model.weight_bytes), ("optimizer", model.moment_bytes)):
        there = kept.phases if what == "weights" and shared else here
        part = size // spread.shards
        kept.keep(f"{name}: {what}", part, there, on_host=spread.on_host)
        kept.keep(f"{name}: {what}", part, [phase for phase in kept.phases if phase not in there], on_host=True)
    if spread.shards > 1:
        kept.keep(f"{name}: gathered weights", model.gathered_bytes, [p for p in here if p.endswith("update")])
    if name in setup.objectives:  # gradients stay until the role's next update
        others = [phase for phase in here if phase != f"{name} update"]
        kept.keep(f"{name}: gradients", model.gradient_bytes // spread.shards, others, on_host=spread.on_host)


def _keep_update(kept: _Kept, setup: Setup, name: str, model: Outline) -> int:
    """Counts the memory of an update.  Returns the tokens of its largest micro-batch."""
    split, spread = _micro_batches(setup, name), spread_of(setup, name)
    parts = {"activations": spread.token_shares, "logits": spread.token_shares, "vision activations": 1}
    if spread.shards == 1:
        parts["weights in bfloat16"] = 1
    parts["gradients"] = spread.shards
    for kind, size in _update_bytes(model, split, setup.objectives[name].needs, parts).items():
        on_host = kind == "gradients" and spread.on_host
        kept.keep(f"{name}: {kind}", size, (f"{name} update",), on_host=on_host)
    return max(tokens_of(rows, model.role.forward) for rows in split)


def _keep_rollout(kept: _Kept, setup: Setup, turns: bool) -> RolloutBytes:
    """Counts the memory of sampling: a copy of the weights, the KV cache, the logits of a decode step."""
    config, model = setup.config, outlines_of(setup)["actor"]
    assert config.trains_on == "prompts"
    others = [phase for phase in kept.phases if phase != "rollout"]
    planned = rollout_bytes(config, model.config, setup.lengths)
    devices = config.cluster.replica_devices(config.rollout.engine.options)
    if not _samples_from_the_actor(setup):
        size = model.num_weights * ITEM_BYTES[config.rollout.dtype]
        kept.keep("rollout: weights", size // devices, ("rollout",))
        kept.keep("rollout: weights", size if turns else size // devices, others, on_host=turns)
        if config.rollout.max_staleness > 0:  # gathered while requests are sampled
            kept.keep("rollout: weights that arrive", size // devices, ("rollout",))
        if planned.host_copies:
            kept.keep("rollout: weights that are sent", size, ("rollout",), on_host=True)
            kept.keep("rollout: weights for restarts", size * (planned.host_copies - 1), kept.phases, on_host=True)
    kept.keep(CACHE, planned.cache, kept.phases if planned.is_kept and not turns else ("rollout",))
    kept.keep("rollout: logits", sampling_bytes(config, model.config, planned), ("rollout",))
    return planned


def _samples_from_the_actor(setup: Setup) -> bool:
    """Tells whether the rollout samples from the actor's own module. This needs an engine that can share the module,
    one pool and dtype for both, and no adapter."""
    config = setup.config
    if config.trains_on == "examples" or config.cluster.pool_of("rollout") != config.cluster.pool_of("actor"):
        return False
    if has_server(config):
        return False
    dtypes = config.rollout.dtype, config.model.dtype
    return not outlines_of(setup)["actor"].is_adapted and dtypes == ("float32", "float32")


def _update_bytes(
    model: Outline, split: Sequence[list[RowLength]], needs: frozenset[str], parts: Mapping[str, int]
) -> Counter[str]:
    """Returns the peak bytes of an update in a process: of its first micro-batch, or of the largest later one, which
    also holds gradients. `parts` has the number of processes that share each kind of bytes."""

    def taken(rows: list[RowLength], *, accumulates: bool) -> Counter[str]:
        whole = model.update_bytes(rows, needs, accumulates=accumulates)
        return Counter({kind: whole[kind] // number for kind, number in parts.items()})

    first, *later = split
    if not later:
        return taken(first, accumulates=False)
    largest = max(later, key=lambda rows: tokens_of(rows, model.role.forward))
    found = taken(largest, accumulates=True)
    if tokens_of(largest, model.role.forward) < 0.9 * tokens_of(first, model.role.forward):
        found = max(found, taken(first, accumulates=False), key=Counter.total)
    return found


def _micro_batches(setup: Setup, name: str) -> list[list[RowLength]]:
    """Returns the micro-batches into which the engine splits a mini-batch."""
    rows = mini_batch(setup.config, name, setup.lengths, spread_of(setup, name).row_ranks)
    role = outlines_of(setup)[name].role
    shares = role.forward.packing and role.forward.share_prompts
    split = micro_batches(
        [row.tokens for row in rows],
        micro_batch_tokens(setup, name),
        packing=role.forward.packing,
        prompts=[(row.prompt, row.prompt_tokens) for row in rows] if shares else None,
    )
    return [[rows[index] for index in chosen] for chosen in split]


def mini_batch(config: RunConfig, name: str, lengths: Lengths, row_ranks: int = 1) -> list[RowLength]:
    """Returns the rows of an optimizer step in one process, or in `row_ranks` processes that share these rows."""
    if config.trains_on == "examples":
        count = -(-config.data.train_batch_size * row_ranks // config.cluster.processes_of("actor"))
        rows = [RowLength(index, 1, tokens - 1) for index, tokens in enumerate(lengths.spread(count), 1)]
        return [row for row in rows for _ in range(config.rows_an_example)]
    role = config.critic if name == "critic" else config.actor
    prompts = lengths.spread(role.mini_batch_size or config.data.train_batch_size)
    every = [RowLength(number, tokens, lengths.response) for number, tokens in enumerate(prompts, 1)]
    count = -(-len(prompts) * config.rollout.n * row_ranks // config.cluster.processes_of(name))
    return [row for row in every for _ in range(config.rollout.n)][:count]


def spread_of(setup: Setup, name: str, engine: str | None = None) -> Spread:
    """Returns how a model is sharded over its role's processes, by its engine, or by `engine` with default options."""
    settings = setup.roles[name].engine
    entry = ENGINES[settings.name if engine is None else engine]
    options = entry.resolve_options({} if engine is not None else settings.options, "engine.options")
    engine_class: type[TrainEngine] = load_target(entry.target)
    return engine_class.spread(setup.config.cluster.processes_of(name), options)


def rollout_bytes(config: TrainConfig, model: Any, lengths: Lengths) -> RolloutBytes:
    """Returns the rollout engine's own plan of its memory; zero bytes if the engine has no plan."""
    entry, rows = ROLLOUT_ENGINES[config.rollout.engine.name], decoded_together(config)
    of_token = token_bytes(model, ITEM_BYTES[config.rollout.dtype])
    layers, states = int(model.num_hidden_layers), sequence_bytes(model)
    decoding = Decoding(rows, config.rollout.n, lengths, of_token, layers, states, config.rollout.max_batch_size)
    planned = requirement(entry, "planned_by")
    if planned is None:
        return RolloutBytes(0, 0, False, rows, 0)
    options = entry.resolve_options(config.rollout.engine.options, "rollout.engine.options")
    found: RolloutBytes = planned(decoding, options)
    return found


def outstanding(config: TrainConfig) -> int:
    """Returns the number of sequences of a step that one process samples."""
    sequences = config.data.train_batch_size * (1 + config.rollout.max_staleness) * config.rollout.n
    return -(-int(sequences) // config.cluster.processes_of("rollout"))


def decoded_together(config: TrainConfig) -> int:
    """Returns the number of sequences that one process decodes together."""
    return min(config.rollout.max_batch_size, outstanding(config))


def sampling_bytes(config: TrainConfig, model: Any, planned: RolloutBytes) -> int:
    """Returns the bytes of a decode or prefill step without the cache: logits, softmax and sums, or layer states."""
    rollout = config.rollout
    item = ITEM_BYTES[rollout.dtype]
    logits = decoded_together(config) * bytes_per_logit(rollout, item)
    logits += planned.prompt_rows * item  # after the prompts
    states = planned.prompt_tokens * 3 * (inner_size(model) + model.hidden_size) * item
    return int(max(logits * model.vocab_size, states))


def bytes_per_logit(rollout: RolloutConfig, item: int) -> int:
    """Returns the bytes of sampling for each logit: the logit, its float32 copy, log-softmax, probabilities, sums."""
    penalties = rollout.repetition_penalty, rollout.presence_penalty, rollout.frequency_penalty
    is_constrained = penalties != (1, 0, 0) or bool(rollout.bad_words) or rollout.allowed_token_ids is not None
    is_cut = rollout.top_p < 1 or rollout.top_k > 0  # sorted with their order, and cut by it
    beside = max(20 * is_constrained, 17 * is_cut, 4 * (rollout.min_p > 0))
    return item + (FLOAT32 if item < FLOAT32 else 0) + 3 * FLOAT32 + beside


def column_bytes(config: TrainConfig, lengths: Lengths, roles: Mapping[str, object]) -> int:
    """Returns the bytes of the batch of a step, plus a mini-batch taken from it."""
    prompts, response = config.data.train_batch_size, lengths.response
    numbers = 7 + 3 * ("critic" in roles) + ("ref" in roles)  # scores, rewards, advantages, log-probs, ...
    step = prompts * config.rollout.n * (8 * (4 * max(lengths.prompts) + 6 * response) + 4 * numbers * response)
    mini_batch_size = config.actor.mini_batch_size or prompts
    return step if mini_batch_size == prompts else step + step * mini_batch_size // prompts
