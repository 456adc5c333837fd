# SPDX-License-Identifier: Apache-2.0
"""A GRPO step with one setting changed at a time, the basis of docs/tuning.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from benchmarks.grpo_step import given
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers

TITLE = "One setting at a time"
NOTE = """\
The step of whet's loop with one setting changed, against the same step without the change; the second column has the
unchanged setting. Less than 1x is slower.
"""
BASE = "as it is"
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {  # by what is changed: the value as it is, and the keys
    "rollout.engine.options.compile=true": ("false", {"rollout.engine.options.compile": True}),
    "model.dtype=float32": ("bfloat16", {"model.dtype": "float32"}),
    "rollout.max_batch_size=16": ("256", {"rollout.max_batch_size": 16}),
    "actor.engine.packing=false": ("true", {"actor.engine.packing": False, "actor.engine.share_prompts": False}),
    "actor.engine.share_prompts=false": ("true", {"actor.engine.share_prompts": False}),
    "actor.max_tokens_per_micro_batch=1024": ("2048", {"actor.max_tokens_per_micro_batch": 1024}),
    "actor.max_tokens_per_micro_batch=16384": ("2048", {"actor.max_tokens_per_micro_batch": 16384}),
    "model.gradient_checkpointing=true": ("false", {"model.gradient_checkpointing": True}),
    "actor.mini_batch_size=2": ("8, one update a step", {"actor.mini_batch_size": 2}),
    "actor.optim.state_dtype=bfloat16": ("float32", {"actor.optim.state_dtype": "bfloat16"}),
    "algorithm.kl.where=loss": ("none", {"algorithm.kl.where": "loss"}),
    "algorithm.adv_estimator=gae": ("grpo", {"algorithm.adv_estimator": "gae"}),
    "model.lora.rank=16": ("all weights", {"model.lora.rank": 16}),
}


def run(setting: Setting) -> dict[str, Any]:
    """The ragged step with each change, in turns."""
    answers = setting.scale.step["ragged"]
    told = {**given(setting, answers), "compile": False}
    chosen = {BASE: ("", {}), **dict(islice(CHANGES.items(), None if setting.scale.is_thorough else 2))}
    entries = {
        name: setting.whet(
            "whet_step", **told, changes=changes, run_dir=str(setting.scratch / "runs" / "tuning" / f"{number}")
        )
        for number, (name, (_, changes)) in enumerate(chosen.items())
    }
    records = setting.take_turns(entries)
    return {"answers": asdict(answers), "records": {name: asdict(record) for name, record in records.items()}}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    section = results["tuning"]
    answers, records = Answers(**section["answers"]), section["records"]
    base = Record(**records[BASE])
    lines = [
        f"{answers.prompts} prompts x {answers.n} answers of {min(answers.lengths)} to {answers.longest} tokens, "
        f"bfloat16. As it is: {base.seconds:.3f} s a step, of which sampling {base.phases()['rollout']:.3f} s and the "
        f"update {base.phases()['update']:.3f} s; {base.peak_bytes / 2**20:,.0f} MiB.",
        "",
        "| changed | from | step | sampling | update | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in records.items():
        if name != BASE:
            record = Record(**found)
            phases = [base.phases()[phase] / record.phases()[phase] for phase in ("rollout", "update")]
            cells = " | ".join(f"{ratio:.2f}x" for ratio in phases)
            memory = (record.peak_bytes - base.peak_bytes) / 2**20
            lines.append(f"| `{name}` | {CHANGES[name][0]} | {speed_up(base, record)} | {cells} | {memory:+,.0f} MiB |")
    return lines
