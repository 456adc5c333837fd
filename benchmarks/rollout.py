# SPDX-License-Identifier: Apache-2.0
"""Useful tokens a second while sampling: the native engine against one call of `transformers.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.floors import Reading, Shape, rollout
from benchmarks.machine import machine_of
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers

TITLE = "Rollout"
NOTE = """\
Useful tokens are the requested ones. `transformers.generate` gets one left-padded batch and continues with all rows
until the longest is done. whet returns log-probs as well.
"""
BASELINE = "transformers.generate"


def run(setting: Setting) -> dict[str, Any]:
    """Ragged and equal lengths."""
    return {case: _case(setting, answers) for case, answers in setting.scale.rollout.items()}


def _case(setting: Setting, answers: Answers) -> dict[str, Any]:
    requests = setting.workload.requests(answers)
    engines = {BASELINE: ("transformers", False), "whet": ("native", False), "whet compiled": ("native", True)}
    entries = {
        name: setting.whet("rollout", engine=engine, compile=compiled, requests=requests)
        for name, (engine, compiled) in engines.items()
        if setting.scale.is_thorough or not compiled
    }
    records = setting.take_turns(entries)
    return {
        "answers": asdict(answers),
        "prompt_lengths": setting.workload.prompt_lengths(answers),
        "records": {name: asdict(record) for name, record in records.items()},
    }


def report(results: Mapping[str, Any]) -> list[str]:
    """A table for each case, and its floor."""
    shape, machine = Shape(**results["machine"]["shape"]), machine_of(results)
    lines = []
    for section in results["rollout"].values():
        answers = Answers(**section["answers"])
        records = {name: Record(**record) for name, record in section["records"].items()}
        tokens, prompt_lengths = sum(answers.lengths), section["prompt_lengths"]
        work = rollout(shape, Reading(prompt_lengths, answers.lengths))
        floor = work.seconds(machine)
        lines += [
            f"{len(answers.lengths)} requests of {min(answers.lengths)} to {answers.longest} new tokens "
            f"({tokens:,} in all), {answers.prompts} prompts of {min(prompt_lengths)} to {max(prompt_lengths)} tokens "
            f"with {answers.n} answers each, bfloat16:",
            "",
            "| | useful tokens/s | seconds | against generate | first turn beyond a warm one | of the floor |",
            "|---|---|---|---|---|---|",
        ]
        for name, record in records.items():
            against = "" if name == BASELINE else str(speed_up(records[BASELINE], record))
            lines.append(
                f"| {name} | {tokens / record.seconds:,.0f} | {record.seconds:.2f} | {against} "
                f"| {record.start_seconds:.1f} s | {record.seconds / floor:.1f}x |"
            )
        lines += [
            "",
            f"The floor is {floor:.3f} s: {work.flops / 1e9:,.0f} GFLOP take "
            f"{work.flops / machine.bfloat16_flops:.3f} s, {work.bytes / 1e9:.1f} GB take "
            f"{work.bytes / machine.bytes_per_second:.3f} s.",
            "",
        ]
    return lines
