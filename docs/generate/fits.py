# SPDX-License-Identifier: Apache-2.0
"""docs/fits.md, a table of plans by model size: `python -m docs.generate.fits`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.config import TrainConfig, load_config
from whet.planning.machine import FreeMemory
from whet.planning.memory import Memory, plan_memory
from whet.trainers import build

PAGE = Path(__file__).parents[1] / "fits.md"
# Qwen3 as published: layers, hidden size, inner size, heads, heads of keys and values, whether the head is tied.
SIZES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "0.6B": (28, 1024, 3072, 16, 8, True),
    "1.7B": (28, 2048, 6144, 16, 8, True),
    "4B": (36, 2560, 9728, 32, 8, True),
    "8B": (36, 4096, 12288, 32, 8, False),
    "14B": (40, 5120, 17408, 40, 8, False),
    "32B": (64, 5120, 25600, 64, 8, False),
}
COMMON = {
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "data.train_batch_size": 32,
    "rollout.n": 8,
    "rollout.free_cache_engine": True,
    "rollout.engine.options.kv_cache_bytes": 8 * 2**30,
}
SHARDS = {"cluster.processes": 8, "actor.engine.name": "fsdp"}
COMPACT = {"actor.optim.state_dtype": "int8", "actor.optim.weight_rounding": "stochastic"}
ADAPTER = {"model.lora.rank": 32}
COLUMNS: Mapping[str, dict[str, Any]] = {  # on accelerators
    "all weights": {},
    "all weights, compact": COMPACT,
    "adapter": ADAPTER,
    "all weights on 8": SHARDS,
    "all weights on 8, compact": SHARDS | COMPACT,
}
HOST = {**ADAPTER, "model.dtype": "float32", "rollout.engine.options.kv_cache_bytes": 2**30}
ACCELERATORS = (24, 48, 80, 141)  # GiB that are common
HEAD = """\
# What fits

Plans of GRPO for Qwen3 by size. `python -m docs.generate.fits` writes this page with the estimates of `whet plan`
([how they are made](planning.md)): prompts of 512 tokens, responses of 1,024, 32 prompts a step with 8 responses each,
no reference model, `model.gradient_checkpointing=true`, `rollout.free_cache_engine=true` (the KV cache is freed while
models train), and a KV cache of 8 GiB. A plan is not a measurement: nothing was measured on accelerators yet.

A cell has the memory that one accelerator needs; in brackets is the smallest accelerator that has it, of 24, 48,
80 and 141 GiB.

"""
FOOT = """\

- all weights: `model.dtype=bfloat16`, float32 master weights and AdamW's two moments in float32
- compact: `actor.optim.weight_rounding=stochastic actor.optim.state_dtype=int8`
- adapter: `model.lora.rank=32`
- on 8: `cluster.processes=8 actor.engine.name=fsdp`; every process holds an eighth of weights, gradients and moments
- on a host: `model.lora.rank=32` in float32, one process without an accelerator, a KV cache of 1 GiB

`whet plan ... --device-memory 80` makes such a plan for your own model, data and settings.
"""


def page(_: str = "") -> str:
    """The whole page."""
    titles = ["model", *(f"{name}, an accelerator" for name in COLUMNS), "adapter, on a host"]
    lines = [titles, ["---"] * len(titles), *([name, *cells(name)] for name in SIZES)]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + FOOT


def cells(name: str) -> list[str]:
    """A row of the table."""
    there = [plan(name, changes, FreeMemory(2**40, "an accelerator")).device_bytes for changes in COLUMNS.values()]
    return [*map(on_accelerator, there), gib(plan(name, HOST, None).resident_bytes)]


def plan(name: str, changes: Mapping[str, Any], device: FreeMemory | None) -> Memory:
    """One process of the run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape(name)))
        values = {**COMMON, **changes, "model.path": folder, "reward.function": "math"}
        config = load_config(TrainConfig, None, values, given={"data"}, checked=False).config
        return plan_memory(replace(build.setup(config), device=device))


def shape(name: str) -> dict[str, Any]:
    """The config.json of a model."""
    layers, hidden, inner, heads, kv_heads, tied = SIZES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


def on_accelerator(count: int) -> str:
    """Bytes, and the smallest accelerator that has them."""
    enough = next((each for each in ACCELERATORS if count <= each * 2**30), None)
    return f"{gib(count)} ({enough or 'none'})"


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.0f} GiB"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
