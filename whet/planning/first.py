# SPDX-License-Identifier: Apache-2.0
"""The first answer of `whet plan`, from formulas alone: it loads no torch, and takes less than two seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from whet.compiled import instruction_set
from whet.config.schema import KV_CACHE_BYTES, MICRO_BATCH_TOKENS, ExamplesConfig, TrainConfig
from whet.planning.machine import free_memory
from whet.planning.units import size
from whet.registry import ADV_ESTIMATORS, ROLLOUT_ENGINES

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # instructions with which `dtype: auto` is bfloat16 on processors
CARDS = (24, 48, 80, 141, 180)  # GiB that accelerators have
MOMENTS = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.03}  # bytes of AdamW's two moments, of a weight
# Fitted to traced plans (docs/fits.md): numbers that a layer keeps of a token for the backward pass, times its hidden
# and its inner size; with checkpointing its input alone, and all of one layer; bytes of a logit.
OF_HIDDEN, OF_INNER, LOGIT_BYTES = 14, 4, 24


def first_answer(
    config: TrainConfig | ExamplesConfig, device_gib: float | None, host_gib: float | None
) -> Iterator[str]:
    """Yields whether a run fits, the smallest accelerator for it, and three settings that help; nothing where the
    model's config.json is not on this machine. Without stated sizes those of this machine count."""
    shape = _shape(str(config.model.path))
    if shape is None:
        return
    gib = _accelerator_gib() if device_gib is None and host_gib is None else device_gib
    found = free_memory() if gib is None and host_gib is None else None
    free = gib or host_gib or (None if found is None else found.bytes / 2**30)
    count = 1 if gib else config.cluster.devices_here  # processes in this memory
    needed = bytes_of(config, shape, gib is not None) * count
    card = next((each for each in CARDS if bytes_of(config, shape, True) <= each * 2**30), None)
    where = "a node" if gib is None else "each accelerator"
    is_too_large = free is not None and needed > free * 2**30
    fits = "" if free is None else f" of {free:.3g} GiB: {'it does not fit' if is_too_large else 'it fits'}"
    more = f"it needs more than {CARDS[-1]} GiB on one"
    smallest = f"the smallest accelerator for it has {card} GiB" if card else more
    yield f"by formulas, to a fifth: about {size(needed)} on {where}{fits}; {smallest}"
    less = {each: bytes_of(changed(config, dict([each])), shape, gib is not None) * count for each in _settings(config)}
    helpful = sorted((each for each in less if less[each] < 0.98 * needed), key=lambda each: less[each])
    listed = ", ".join(f"{key}={str(value).lower()} ({size(less[key, value])})" for key, value in helpful[:3])
    yield f"settings that help most: {listed or 'none of the usual ones' + '; choose a smaller model' * is_too_large}"
    yield "docs/fits.md has such numbers by size of model; the plan that follows traces the model's own passes"


def _accelerator_gib() -> float | None:
    """The free memory of the fullest NVIDIA accelerator, as its driver says; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return min((int(each) / 1024 for each in said if each.isdecimal()), default=None)


def bytes_of(config: TrainConfig | ExamplesConfig, shape: Mapping[str, Any], on_device: bool) -> int:
    """Bytes of the largest process, on an accelerator or on the host."""
    return max(_bytes_of_pool(config, shape, on_device, pool) for pool in config.cluster.pools)


def _bytes_of_pool(config: TrainConfig | ExamplesConfig, shape: Mapping[str, Any], on_device: bool, pool: str) -> int:
    """Bytes of a process of a pool: the larger of sampling and updates."""
    weights, words, layers = (float(shape[name]) for name in ("weights", "words", "layers"))
    dtypes = [config.model.dtype, *([config.rollout.dtype] if isinstance(config, TrainConfig) else [])]
    narrow = dtypes[0] == "bfloat16" or (
        dtypes[0] == "auto" and (on_device or bool(BFLOAT16 & {*instruction_set().split()}))
    )
    lora, held, update = config.model.lora.rank, 0.0, 0.0
    item = 2 if narrow else 4
    for role in (each for each in _roles(config) if config.cluster.pool_of(each) == pool):
        own = config if isinstance(config, ExamplesConfig) else config[role]
        options, whole = own.engine.options, own.engine.name == "single"
        shards = 1 if whole else int(options.get("shard_size") or config.cluster.processes_of(role))
        gathered = 0 if shards == 1 else 2 * item * ((weights - words) / layers + words)
        if role == "ref":
            held, update = held + weights * item / shards, max(update, gathered)
            continue
        width = own.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS["accelerator" if on_device else "cpu"]
        width = min(width, _tokens(config, role))
        kept, logits = item * width * shape["kept"], own.engine.logits_chunk_tokens * shape["vocabulary"] * LOGIT_BYTES
        recomputed = item * width * layers * shape["hidden"] + 2 * kept
        kept = recomputed if config.model.gradient_checkpointing else layers * kept
        if lora is None:
            master, gradients = 2 if own.optim.weight_rounding == "stochastic" else 4, 4 * weights / shards
            held += weights * (master + MOMENTS[own.optim.state_dtype]) / shards + gradients
            copies = 2 * weights if narrow and whole and master == 4 else 0
            update = max(update, kept + gathered + copies + max(0, logits - gradients))
        else:
            held += weights * item / shards + 2 * words * narrow
            update = max(update, kept + gathered + logits)
    if not isinstance(config, TrainConfig) or config.cluster.pool_of("rollout") != pool:
        return round(2**30 + 1.1 * (held + update)) if on_device else round(1.05 * (held + update))
    engine, sampled = config.rollout.engine, {"float32": 4, "bfloat16": 2}.get(dtypes[-1], item)
    given = ROLLOUT_ENGINES[engine.name].resolve_options(engine.options, "options").get("kv_cache_bytes") or 0
    cache = float(KV_CACHE_BYTES if given == "auto" else given)
    copy = weights * sampled if lora is not None or sampled < 4 or narrow else 0.0
    rows = min(config.rollout.max_batch_size, config.data.train_batch_size * config.rollout.n)
    logits = rows * shape["vocabulary"] * (sampled + 16)
    if not on_device:
        return round(1.25 * (held + copy + max(update, cache + logits)))
    if config.rollout.free_cache_engine:  # each leaves the accelerator to the other
        return round(2**30 + 1.1 * max(held + update, (copy or 4 * weights) + cache + logits))
    return round(2**30 + 1.1 * (held + copy + cache + max(update, logits)))


def _tokens(config: TrainConfig | ExamplesConfig, role: str) -> int:
    """The tokens of a mini-batch in one process, with all rows at their limit."""
    processes = config.cluster.processes_of(role)
    if isinstance(config, ExamplesConfig):
        return -(-config.data.train_batch_size * config.rows_an_example // processes) * config.data.max_length
    data = config.data
    prompts = config[role].mini_batch_size or data.train_batch_size
    longest = data.max_prompt_length + data.max_response_length
    return -(-prompts * config.rollout.n // processes) * longest


def changed(config: TrainConfig | ExamplesConfig, values: Mapping[str, Any]) -> TrainConfig | ExamplesConfig:
    """The config with some values replaced, by dotted key."""
    tree = config.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, tree)[name] = value
    return type(config).model_validate(tree)


def _roles(config: TrainConfig | ExamplesConfig) -> list[str]:
    """The roles with a model: trained ones, and a reference that is no adapter's base."""
    if isinstance(config, ExamplesConfig):
        return ["actor"]
    reads = ADV_ESTIMATORS[config.algorithm.adv_estimator].columns
    has_ref = config.algorithm.kl.where != "none" and config.model.lora.rank is None
    return ["actor", *["critic"] * bool({"values", "process_rewards"} & {*reads}), *["ref"] * has_ref]


def _settings(config: TrainConfig | ExamplesConfig) -> Iterator[tuple[str, Any]]:
    """Settings that reduce memory, where they are not set."""
    role, prefix = (config, "") if isinstance(config, ExamplesConfig) else (config.actor, "actor.")
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    if config.model.lora.rank is None:
        yield "model.lora.rank", 16
        if role.optim.state_dtype == "float32" and role.optim.name == "adamw":
            yield f"{prefix}optim.state_dtype", "int8"
    if role.engine.name == "single" and config.cluster.processes_of("actor") > 1:
        yield f"{prefix}engine.name", "fsdp"
    if isinstance(config, TrainConfig) and not config.rollout.free_cache_engine:
        yield "rollout.free_cache_engine", True


def _shape(path: str) -> dict[str, float] | None:
    """Sizes of the model whose config.json is in the folder `path`, or in the hub's cache; None where there is none."""
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
        "kept": OF_HIDDEN * hidden + OF_INNER * inner,
    }
