# SPDX-License-Identifier: Apache-2.0
"""Rows end to end against rows with padding: why packing is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers
from whet.engines.role import MICRO_BATCH_TOKENS

TITLE = "Packed or padded"
NOTE = """\
The update alone, in micro-batches of the default size. The defaults of `actor.engine.packing` and `share_prompts`
follow from this table.
"""
LAYOUTS = {"padded": (False, False), "packed": (True, False), "prompts shared": (True, True)}


def run(setting: Setting) -> dict[str, Any]:
    """The update of the GRPO step, both ways, in both dtypes, on ragged and on equal rows."""
    found = {}
    for case, answers in setting.scale.step.items():
        for dtype in ("bfloat16", "float32") if setting.scale.is_thorough else ("bfloat16",):
            entries = {
                layout: setting.whet(
                    "packing",
                    packing=packing,
                    share_prompts=share_prompts,
                    dtype=dtype,
                    requests=setting.workload.requests(answers),
                    max_tokens_per_micro_batch=MICRO_BATCH_TOKENS["cpu"],
                )
                for layout, (packing, share_prompts) in LAYOUTS.items()
            }
            records = setting.take_turns(entries)
            found[f"{case} {dtype}"] = {
                "answers": asdict(answers),
                "records": {layout: asdict(record) for layout, record in records.items()},
            }
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    lines = [
        "| update of | " + " | ".join(LAYOUTS) + " | packed against padded | shared against packed | memory |",
        "|---" * (len(LAYOUTS) + 4) + "|",
    ]
    for case, section in results["packing"].items():
        answers = Answers(**section["answers"])
        records = [Record(**section["records"][name]) for name in LAYOUTS]
        padded, packed, shared = records
        lines.append(
            f"| {len(answers.lengths)} rows, {case} ({min(answers.lengths)} to {answers.longest} tokens) "
            f"| {' | '.join(f'{record.seconds:.3f} s' for record in records)} "
            f"| {speed_up(padded, packed)} | {speed_up(packed, shared)} "
            f"| {', '.join(f'{record.peak_bytes / 2**20:,.0f}' for record in records)} MiB |"
        )
    return lines
