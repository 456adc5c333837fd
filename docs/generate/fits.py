# SPDX-License-Identifier: Apache-2.0
"""docs/fits.md, tables of plans by card and model size: `python -m docs.generate.fits`."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.workers.card import PPO
from benchmarks.workers.card_models import config_of, vocabulary
from docs.generate import gpu
from whet.config import TrainConfig, load_config
from whet.config.schema import EngineConfig, OptimConfig, RolloutConfig
from whet.engines.role import RoleSettings
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import FreeMemory
from whet.planning.planner import Setup
from whet.plugins.planner.first import CARDS
from whet.plugins.planner.memory import bytes_per_logit, cache_room, micro_batch_tokens, outlines_of, plan_memory
from whet.plugins.planner.outline import Outline, RowLength
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
HOST = {**ADAPTER, "model.dtype": "float32"}
SHOWN = (24, 48, 80, 141)  # of the cards
# Peaks of tensors in GiB by `benchmarks.workers.card` at 652f2a6 (LOG.md, 2026-11-26, "an accelerator at work").
MEASURED: Mapping[str, tuple[str, float]] = {
    "update:0.5b": ("H100", 18.33),
    "update:1.5b": ("H200", 46.40),
    "update:0.5b:checkpoints": ("H200", 10.9),
    "sample:0.5b": ("H100", 17.84),
    "sample:1.5b": ("H200", 19.90),
}
HEAD = """\
# What fits

Plans of GRPO for Qwen3 by card and size. `python -m docs.generate.fits` writes this page with the estimates of
`whet plan` ([how they are made](planning.md)): prompts of 512 tokens, responses of 1,024, 32 prompts a step with 8
responses each, no reference model, `model.gradient_checkpointing=true`, and `rollout.free_cache_engine=true` (the KV
cache is freed while models train). No size of micro-batches or cache is set: both follow from the card's memory.

A cell has the memory that each card needs with a cache of 1 GiB, the tokens of a micro-batch, and the cache that the
card has room for; - is a run that does not fit. A card has less memory than its name says; these plans count
{cards} GiB.
{gpus}

- all weights: `model.dtype=bfloat16`, float32 master weights and AdamW's two moments in float32
- compact: `actor.optim.weight_rounding=stochastic actor.optim.state_dtype=int8`
- adapter: `model.lora.rank=32`
- on 8: `cluster.processes=8 actor.engine.name=fsdp`; every process holds an eighth of weights, gradients and moments

"""
ON_HOST = """\
## On a host

An adapter (`model.lora.rank=32`) in float32, one process without an accelerator, a KV cache of 1 GiB, micro-batches of
2,048 tokens.

"""
FOOT = """\

## What was measured, and what is computed alone

The peak of tensors in one process, of Qwen2.5's shapes in bfloat16 ([On a GPU](gpu.md#measured)). `update` is of 128
rows in micro-batches of 16,384 tokens, `sample` of 512 requests with a cache of 16 GiB:

"""
NOTES = """\

- Fitted to the three updates: memory that compiled layers keep for a token (4 numbers times the hidden size and 2 times
  the inner size; with checkpoints 3.5 layers of it), and 4 bytes a logit. The errors are of a fit, not of a prediction.
- Measured on an H100: libraries took 0.5 GiB (1 GiB is counted), and the allocator held 1.05 to 1.13 bytes for each
  byte of tensors (1.1 is counted). Plans of runs without compiled layers were 0.95 to 1.00 times what was measured.
- Only computed, never measured on a card: all runs on 8 cards, adapters, compact moments and weights, models above
  1.5B, cards of 24 and 48 GB, vision-language models, and layers that are not compiled (`fsdp`, float32, caps on
  scores, mixtures of experts), which keep more for a token: `whet plan` traces their passes, and the columns on 8 cards
  have the formula that was fitted to such plans, within a fifth.

`whet plan ... --device-memory 80` makes such a plan for your own model, data and settings.
"""


def page(_: str = "") -> str:
    """The whole page."""
    cards = ", ".join(f"{CARDS[name]} of {name}" for name in SHOWN)
    parts = [HEAD.format(cards=cards, gpus=f"<!-- gpu -->{gpu.sentence(gpu.records(), 'fits.md')}<!-- end of gpu -->")]
    for name in SHOWN:
        rows = {size: [cell(size, changes, name) for changes in COLUMNS.values()] for size in SIZES}
        parts += [f"## A card of {name} GB\n\n", table(["model", *COLUMNS], rows), "\n"]
    parts += [ON_HOST, table(["model", "memory"], {size: [on_host(size)] for size in SIZES}), FOOT]
    titles = ["work", "card", "planned", "measured", "error"]
    return "".join([*parts, table(titles, {work: measured(work) for work in MEASURED}), NOTES])


def table(titles: list[str], rows: Mapping[str, list[str]]) -> str:
    """A table in Markdown."""
    lines = [titles, ["---"] * len(titles), *([name, *cells] for name, cells in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(size: str, changes: Mapping[str, Any], name: int) -> str:
    """A run on a card: memory, tokens of a micro-batch, cache."""
    total = round(CARDS[name] * 2**30)
    planned = setup(size, changes, FreeMemory(total, "an accelerator", total))
    for model in outlines_of(planned).values():
        vars(model)["_run"] = model._compute  # a traced plan of layers that are not compiled takes minutes
    plan, room = plan_memory(planned), cache_room(planned)
    assert room is not None
    tokens = micro_batch_tokens(planned, "actor")
    return "-" if plan.device_bytes > total else f"{gib(plan.device_bytes)}, {tokens:,}, {gib(room.bytes(total))}"


def on_host(size: str) -> str:
    """The memory of an adapter's run on a host."""
    return gib(plan_memory(setup(size, HOST, None)).resident_bytes)


@cache
def folder_of(size: str) -> str:
    """A folder with the config.json of a model, one for all plans: they share passes."""
    folder = tempfile.mkdtemp(prefix="whet-fits-")
    atexit.register(shutil.rmtree, folder)
    (Path(folder) / "config.json").write_text(json.dumps(shape(size)))
    return folder


def setup(size: str, changes: Mapping[str, Any], device: FreeMemory | None) -> Setup:
    """The setup from which a run is planned."""
    values = {**COMMON, **changes, "model.path": folder_of(size), "reward.function": "math"}
    config = load_config(TrainConfig, None, values, given={"data"}, checked=False).config
    config = with_dtypes(config, elsewhere=device is not None)
    return replace(build.setup(config), device=device)


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


def measured(work: str) -> list[str]:
    """A row of the table of measurements: card, GiB planned and measured, error."""
    where, found = MEASURED[work]
    planned = on_card(work) / 2**30
    return [where, f"{planned:.2f} GiB", f"{found:.2f} GiB", f"{planned / found - 1:+.1%}"]


def on_card(work: str) -> int:
    """The planned peak of tensors of a part of `benchmarks.workers.card`."""
    kind, size, *rest = work.split(":")
    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        settings = (folder, EngineConfig(), "bfloat16", None, OptimConfig(lr=1e-6), 1.0)
        role = RoleSettings(*settings, gradient_checkpointing="checkpoints" in rest)  # type: ignore[arg-type]
        model = Outline(role, on_device=True)
        if kind == "sample":
            logits = 512 * bytes_per_logit(RolloutConfig(), 2) + 64 * 2
            return 2 * model.num_weights + 16 * 2**30 + int(logits) * vocabulary(size)
        taken = model.update_bytes([RowLength(0, 0, 16_384)], PPO.needs, accumulates=True)
        return model.weight_bytes + model.moment_bytes + taken.total()


def read(page: str) -> dict[str, dict[str, list[str]]]:
    """The cells of a page's tables: by card, on the `host`, and `measured`."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            rows = found[re.sub(r".*\b(\d+) GB", r"\1", line) if "card of" in line else line.split()[-1]] = {}
        elif line.startswith("| ") and not line.startswith(("| model", "| work", "| ---")):
            name, *cells = line.strip("| ").split(" | ")
            rows[name] = cells
    return {"measured" if key == "alone" else key: rows for key, rows in found.items()}


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.0f} GiB"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
