# SPDX-License-Identifier: Apache-2.0
"""The quick estimate of `whet plan`, from formulas alone. It loads no torch, and takes less than two seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from whet.compiled import instruction_set
from whet.config.compose import put
from whet.config.schema import KV_CACHE_BYTES, MICRO_BATCH_TOKENS, ActorConfig, ExamplesConfig, RunConfig
from whet.engines.mesh import Mesh
from whet.planning.machine import free_memory
from whet.planning.units import size
from whet.plugins.planner.models import engine_of, frozen_models, trained_models
from whet.registry import ENGINES, ROLLOUT_ENGINES

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # instructions with which `dtype: auto` is bfloat16 on processors
# Usable GiB of accelerators by nominal GB: fewer, because of units, reserved memory and error correction.
CARDS = {24: 22, 48: 44, 80: 78, 141: 139, 180: 178}
MOMENTS = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.03}  # bytes of AdamW's two moments, of a weight

# For micro-batches without a configured size: the share of an accelerator that all tensors fill together; the most
# tokens (a layer's largest tensor has 32-bit indices up to models of 70B); the step between two sizes.
FILLED, MOST_TOKENS, TOKEN_STEP = 0.75, 32_768, 512


class Kept(NamedTuple):
    """The numbers of activations that a forward and backward pass keeps for each token."""

    hidden: float  # numbers that a layer keeps of a token: this times the hidden size
    inner: float  # plus this times the inner size
    layers: float  # layers whose numbers exist at once with recomputation; other layers keep only their input
    logit: int  # bytes of each logit

    def bytes_of_token(self, hidden: float, inner: float, layers: float, item: int, *, recomputes: bool) -> float:
        """Returns the peak bytes of a token's activations, with `item` bytes for each number."""
        kept = self.hidden * hidden + self.inner * inner
        return item * (layers * hidden + self.layers * kept if recomputes else layers * kept)


# Fitted to traced plans: the host, and layers that are not compiled. Fitted to peaks on an H100 and an H200 (LOG.md):
# compiled layers and the head's kernel, in bfloat16.
PLAIN, COMPILED = Kept(14, 4, 2, 24), Kept(4, 2, 3.5, 4)


def is_compiled(engine: str, options: Mapping[str, object]) -> bool:
    """Tells whether a training engine compiles layers in bfloat16 on an accelerator."""
    chosen = options.get("compile")
    return engine == "single" if chosen is None else bool(chosen)


def tokens_within(room: float, held: float, of_token: float) -> int:
    """Returns how many tokens a micro-batch may have in `room` bytes, of which other tensors take `held`. A token takes
    `of_token` bytes. All tensors fill three quarters of `room`; tokens get at least half of the bytes beside `held`."""
    left = max(FILLED * room - held, (room - held) / 2)
    return min(MOST_TOKENS, max(TOKEN_STEP, int(left / of_token) // TOKEN_STEP * TOKEN_STEP))


def first_answer(config: RunConfig, device_gib: float | None, host_gib: float | None) -> Iterator[str]:
    """Yields lines: whether a run fits, the smallest accelerator for it, and three settings that help. Yields nothing
    if the model's config.json is not on this machine. A memory that is not given is this machine's."""
    shape = shape_of(str(config.model.path))
    if shape is None:
        return
    gib = _accelerator_gib() if device_gib is None and host_gib is None else device_gib
    found = free_memory() if gib is None and host_gib is None else None
    free = gib or host_gib or (None if found is None else found.bytes / 2**30)
    count = 1 if gib else config.cluster.devices_here  # processes in this memory
    needed = bytes_of(config, shape, gib is not None, gib) * count
    card = next((name for name, each in CARDS.items() if bytes_of(config, shape, True, each) <= each * 2**30), None)
    where = "a node" if gib is None else "each accelerator"
    is_too_large = free is not None and needed > free * 2**30
    fits = "" if free is None else f" of {free:.3g} GiB: {'it does not fit' if is_too_large else 'it fits'}"
    more = f"it needs more than {max(CARDS)} GB on one"
    smallest = f"the smallest accelerator for it has {card} GB" if card else more
    yield f"by formulas, {accuracy(config)}: about {size(needed)} on {where}{fits}; {smallest}"
    others = {each: changed(config, dict([each])) for each in _settings(config)}
    less = {each: bytes_of(other, shape, gib is not None, gib) * count for each, other in others.items()}
    helpful = sorted((each for each in less if less[each] < 0.98 * needed), key=lambda each: less[each])
    listed = ", ".join(f"{key}={str(value).lower()} ({size(less[key, value])})" for key, value in helpful[:3])
    yield f"settings that help most: {listed or 'none of the usual ones' + '; choose a smaller model' * is_too_large}"
    yield "docs/fits.md has such numbers by size of model; the plan that follows traces the model's own passes"


def accuracy(config: RunConfig) -> str:
    """Returns the accuracy of `bytes_of` in words. A model whose config.json is not here counts as one like the
    policy."""
    unknown = [role for role, path in {**trained_models(config), **frozen_models(config)}.items() if not shape_of(path)]
    return (
        f"with the size of the policy for {', '.join(unknown)} (no config.json here)" if unknown else "accurate to 20 %"
    )


def _accelerator_gib() -> float | None:
    """Returns the free GiB of the fullest NVIDIA accelerator, as its driver reports; None without an accelerator."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return min((int(each) / 1024 for each in said if each.isdecimal()), default=None)


def bytes_of(config: RunConfig, shape: Mapping[str, float], on_device: bool, gib: float | None = None) -> int:
    """Returns the bytes of the largest process on the host, or on the fullest accelerator, with `gib` if known."""
    shares = {name: pool.share if on_device else 1.0 for name, pool in config.cluster.pools.items()}
    of_pool = ((name, share, None if gib is None else gib * share) for name, share in shares.items())
    return max(round(_bytes_of_pool(config, shape, on_device, name, own) / share) for name, share, own in of_pool)


def host_bytes(config: RunConfig, shape: Mapping[str, float]) -> int:
    """Returns the bytes that the actor's ranks on one node keep on the host with `cpu_offload`."""
    own, _ = section_of(config, "actor")
    if not own.engine.options.get("cpu_offload"):
        return 0
    mesh, of_weight = mesh_of(config, "actor"), 4.0
    if config.model.lora.rank is None:
        master = 2 if own.optim.weight_rounding == "stochastic" else 4
        of_weight = 4 + master + MOMENTS[own.optim.state_dtype]
    ranks = min(config.cluster.processes_of("actor"), config.cluster.devices_here)
    return round(shape["weights"] * of_weight / mesh.shards * ranks)


def mesh_of(config: RunConfig, role: str) -> Mesh:
    """Returns the mesh of a role's processes. The engine `single` has only data-parallel copies."""
    (engine, key), processes = engine_of(config, role), config.cluster.processes_of(role)
    given = ENGINES[engine.name].resolve_options(engine.options, key).get("mesh")
    return Mesh.of(processes, {"shard": 1} if engine.name == "single" else given)


def _bytes_of_pool(config: RunConfig, shape: Mapping[str, float], on_device: bool, pool: str, gib: float | None) -> int:
    """Returns the peak bytes of a process of a pool, over its sampling and its updates."""
    narrow = config.model.dtype == "bfloat16" or (
        config.model.dtype == "auto" and (on_device or bool(BFLOAT16 & {*instruction_set().split()}))
    )
    lora, item = config.model.lora.rank, 2 if narrow else 4
    held, update = _frozen_bytes(config, shape, on_device, pool, item)
    beside, kinds = dict[str, float](), dict[str, Kept]()  # by trained role: bytes of an update without activations
    models = {each: path for each, path in trained_models(config).items() if config.cluster.pool_of(each) == pool}
    shapes = {each: _shape(config, shape, path) for each, path in models.items()}
    meshes = {each: mesh_of(config, each) for each in models}
    for role, mesh in meshes.items():
        own, _ = section_of(config, role)
        options, whole = own.engine.options, own.engine.name == "single"
        weights, words, shards = shapes[role]["weights"], shapes[role]["words"], mesh.shards
        gathered = _gathered(shapes[role], mesh, item)
        on_host = on_device and bool(options.get("cpu_offload"))  # weights, gradients and moments
        kinds[role] = COMPILED if on_device and narrow and is_compiled(own.engine.name, options) else PLAIN
        logits = own.engine.logits_chunk_tokens * shapes[role]["vocabulary"] * kinds[role].logit
        if lora is None:
            master, gradients = 2 if own.optim.weight_rounding == "stochastic" else 4, 4 * weights / shards
            held += (weights * (master + MOMENTS[own.optim.state_dtype]) / shards + gradients) * (not on_host)
            copies = 2 * weights if narrow and whole and master == 4 else 0
            beside[role] = gathered + copies + max(0, logits - gradients * (not on_host))
        else:
            held += weights * item / shards + 2 * words * narrow
            beside[role] = gathered + logits
    samples = config.trains_on == "prompts" and config.cluster.pool_of("rollout") == pool
    copy, cache, logits = _sampling(config, shape, item, narrow) if samples else (0.0, 0.0, 0.0)
    turns = config.trains_on == "prompts" and config.rollout.free_cache_engine
    for role, others in beside.items():
        own, _ = section_of(config, role)
        hidden, inner, layers = (shapes[role][name] for name in ("hidden", "inner", "layers"))
        recomputes = config.model.gradient_checkpointing
        of_token = kinds[role].bytes_of_token(hidden, inner, layers, item, recomputes=recomputes)
        width = own.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS["accelerator" if on_device else "cpu"]
        if on_device and gib is not None and own.max_tokens_per_micro_batch is None:
            stays = held + others + (0 if turns else copy + cache)
            width = tokens_within((gib - 1) * 2**30 / 1.1, stays, of_token)
        width //= meshes[role].context
        update = max(update, others + of_token * min(width, _tokens(config, role)))
    if not samples:
        return round(2**30 + 1.1 * (held + update)) if on_device else round(1.05 * (held + update))
    if not on_device:
        return round(1.25 * (held + copy + max(update, cache + logits)))
    if turns:  # each leaves the accelerator to the other
        return round(2**30 + 1.1 * max(held + update, (copy or 4 * shape["weights"]) + cache + logits))
    return round(2**30 + 1.1 * (held + copy + cache + max(update, logits)))


def _frozen_bytes(
    config: RunConfig, shape: Mapping[str, float], on_device: bool, pool: str, item: int
) -> tuple[float, float]:
    """Returns the bytes that frozen models keep in a process of a pool, and the bytes that a pass gathers."""
    held, gathered = 0.0, 0.0
    for role, path in frozen_models(config).items():
        if config.cluster.pool_of(role) == pool:
            mesh, own = mesh_of(config, role), _shape(config, shape, path)
            on_host = on_device and bool(engine_of(config, role)[0].options.get("cpu_offload"))
            held += own["weights"] * item / mesh.shards * (not on_host)
            gathered = max(gathered, _gathered(own, mesh, item))
    return held, gathered


def _shape(config: RunConfig, shape: Mapping[str, float], path: str) -> Mapping[str, float]:
    """Returns the sizes of the model at `path`. A model without config.json here counts as the policy, `shape`."""
    return shape if path == str(config.model.path) else shape_of(path) or shape


def _gathered(shape: Mapping[str, float], mesh: Mesh, item: int) -> float:
    """Returns the bytes that a sharding engine gathers at once: two layers, and all weights outside of layers."""
    experts = shape["in_experts"]
    layer = (shape["weights"] - shape["words"] - experts + experts / mesh.expert) / shape["layers"]
    return 0 if mesh.shards == 1 else 2 * item * (layer + shape["words"]) / mesh.tensor


def _sampling(config: RunConfig, shape: Mapping[str, float], item: int, narrow: bool) -> tuple[float, float, float]:
    """Returns the bytes of the rollout's own weights, of its KV cache, and of its logits."""
    assert config.trains_on == "prompts"
    engine, sampled = config.rollout.engine, {"float32": 4, "bfloat16": 2}.get(config.rollout.dtype, item)
    given = (
        ROLLOUT_ENGINES[engine.name].resolve_options(engine.options, "rollout.engine.options").get("kv_cache_bytes")
        or 0
    )
    cache = float(KV_CACHE_BYTES if given == "auto" else given)
    has_copy = config.model.lora.rank is not None or sampled < 4 or narrow
    rows = min(config.rollout.max_batch_size, config.data.train_batch_size * config.rollout.n)
    devices = config.cluster.replica_devices(engine.options)
    copies = 2 if config.rollout.max_staleness > 0 else 1  # new weights arrive while it samples
    return copies * shape["weights"] * sampled * has_copy / devices, cache, rows * shape["vocabulary"] * (sampled + 16)


def _tokens(config: RunConfig, role: str) -> int:
    """Returns the tokens of a mini-batch in one process, if all rows reach their length limit."""
    processes = config.cluster.processes_of(role)
    if config.trains_on == "examples":
        return -(-config.data.train_batch_size * config.rows_an_example // processes) * config.data.max_length
    data = config.data
    prompts = config[role].mini_batch_size or data.train_batch_size
    longest = data.max_prompt_length + data.max_response_length
    return -(-prompts * config.rollout.n // processes) * longest


def section_of(config: RunConfig, role: str) -> tuple[ExamplesConfig | ActorConfig, str]:
    """Returns the config section with a role's engine and optimizer, and the prefix of the section's keys."""
    return (config, "") if config.trains_on == "examples" else (config[role], f"{role}.")


def changed(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Returns the config with some values replaced; `values` has them by dotted key."""
    tree = config.model_dump()
    for key, value in values.items():
        put(tree, key, value)
    return type(config).model_validate(tree)


def _settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yields settings that reduce memory and are not set yet."""
    role, prefix = section_of(config, "actor")
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    if config.model.lora.rank is None:
        yield "model.lora.rank", 16
        if role.optim.state_dtype == "float32" and role.optim.name == "adamw":
            yield f"{prefix}optim.state_dtype", "int8"
    if role.engine.name == "single" and config.cluster.processes_of("actor") > 1:
        yield f"{prefix}engine.name", "fsdp"
    if config.trains_on == "prompts" and not config.rollout.free_cache_engine:
        yield "rollout.free_cache_engine", True


def shape_of(path: str) -> dict[str, float] | None:
    """Returns the model's sizes from config.json in the folder `path`, or in the hub's cache; None without it."""
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    files = [Path(path) / "config.json", *hub.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json")]
    try:
        found = json.loads(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))
        found = {**found, **found.get("text_config", {})}
        hidden, layers, vocabulary = (int(found[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = int(found["num_attention_heads"])
        inner = int(found.get("intermediate_size") or 4 * hidden)
        experts = int(next((found[key] for key in ("num_experts", "num_local_experts") if found.get(key)), 1))
        of_expert = int(found.get("moe_intermediate_size") or inner) if experts > 1 else inner
        keys = int(found.get("num_key_value_heads") or heads) / heads
        attention = hidden * int(found.get("head_dim") or hidden // heads) * heads * (2 + 2 * keys)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, AttributeError, ZeroDivisionError):
        return None
    words = vocabulary * hidden * (1 if found.get("tie_word_embeddings") else 2)
    return {
        "weights": layers * (attention + 3 * hidden * of_expert * experts) + words,
        "words": words,
        "layers": layers,
        "hidden": hidden,
        "vocabulary": vocabulary,
        "inner": inner,
        "in_experts": layers * 3 * hidden * of_expert * experts if experts > 1 else 0,
        "experts": experts,
        "heads_of_keys": int(found.get("num_key_value_heads") or heads),
    }
