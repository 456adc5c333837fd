# SPDX-License-Identifier: Apache-2.0
"""Rows end to end against rows with padding: what `PACKING_BY_DEVICE` in whet/trainers/workers.py is set by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers

TITLE = "Packed or padded"
NOTE = """\
The update alone. The default of `actor.engine.packing` on each device follows from this table.
"""
MAX_TOKENS_PER_MICRO_BATCH = 16_384  # the default of actor.max_tokens_per_micro_batch


def run(setting: Setting) -> dict[str, Any]:
    """The update of the GRPO step, both ways, in both dtypes, on ragged and on equal rows."""
    found = {}
    for case, answers in setting.scale.step.items():
        for dtype in ("bfloat16", "float32") if setting.scale.is_thorough else ("bfloat16",):
            entries = {
                layout: setting.whet(
                    "packing",
                    packing=layout == "packed",
                    dtype=dtype,
                    requests=setting.workload.requests(answers),
                    max_tokens_per_micro_batch=MAX_TOKENS_PER_MICRO_BATCH,
                )
                for layout in ("padded", "packed")
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
        "| update of | padded | packed | packed against padded | memory, padded | memory, packed |",
        "|---|---|---|---|---|---|",
    ]
    for case, section in results["packing"].items():
        answers = Answers(**section["answers"])
        padded, packed = (Record(**section["records"][name]) for name in ("padded", "packed"))
        lines.append(
            f"| {len(answers.lengths)} rows, {case} ({min(answers.lengths)} to {answers.longest} tokens) "
            f"| {padded.seconds:.3f} s | {packed.seconds:.3f} s | {speed_up(padded, packed)} "
            f"| {padded.peak_bytes / 2**20:,.0f} MiB | {packed.peak_bytes / 2**20:,.0f} MiB |"
        )
    return lines
