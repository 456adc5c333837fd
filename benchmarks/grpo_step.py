# SPDX-License-Identifier: Apache-2.0
"""A whole GRPO step, rollout, reward and update: whet's loop against TRL's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from benchmarks.competitor import Entry
from benchmarks.floors import Machine, Reading, Shape, rollout, update
from benchmarks.machine import machine_of
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers
from whet.devices import bfloat16_instructions

TITLE = "A GRPO step"
NOTE = """\
The whole step of whet's shipped loop and of TRL's `GRPOTrainer`: rollout, reward, advantages, update, logging. Answers
have the same forced lengths: whet by a limit of each request, TRL by a logits processor that ends a row when it is due.
TRL runs without gradient checkpointing, in bfloat16 autocast, with four choices of weights and micro-batches; ratios
are against the fastest of them (bold). On a processor without bfloat16 instructions all is float32. In brackets, how
many times its floor a phase takes. `rest` is the time outside of all phases, in TRL's columns the optimizer's step too.
"""
LEARNING_RATE = 1e-6
# TRL's weights, and in how many micro-batches it takes a step: it is compared at its fastest.
TRL_VARIANTS = {
    "TRL, float32 weights": ("float32", 1),
    "TRL, float32 weights, 4 micro-batches": ("float32", 4),
    "TRL, bfloat16 weights": ("bfloat16", 1),
    "TRL, bfloat16 weights, 4 micro-batches": ("bfloat16", 4),
}


def run(setting: Setting) -> dict[str, Any]:
    """Ragged and equal lengths."""
    return {case: _case(setting, case, answers) for case, answers in setting.scale.step.items()}


def _case(setting: Setting, case: str, answers: Answers) -> dict[str, Any]:
    records = setting.take_turns(_entries(setting, case, answers))
    return {
        "answers": asdict(answers),
        "dtype": dtype(),
        "prompt_lengths": setting.workload.prompt_lengths(answers),
        "records": {name: asdict(record) for name, record in records.items()},
    }


def _entries(setting: Setting, case: str, answers: Answers) -> dict[str, Entry]:
    told = given(setting, answers)

    def run_dir(name: str) -> str:
        return str(setting.scratch / "runs" / case / name.replace(" ", "_"))

    entries = {}
    if setting.trl_python is not None:
        variants = {name: each for name, each in TRL_VARIANTS.items() if each[0] in ("float32", dtype())}
        variants = variants if setting.scale.is_thorough else dict(islice(variants.items(), 1))
        for name, (weights, micro_batches) in variants.items():
            options = {"weights": weights, "micro_batches": micro_batches, "run_dir": run_dir(name)}
            entries[name] = setting.trl("trl_step", **told, **options)
    entries["whet"] = setting.whet("whet_step", **told, compile=False, run_dir=run_dir("whet"))
    if setting.scale.is_thorough:
        entries["whet compiled"] = setting.whet("whet_step", **told, compile=True, run_dir=run_dir("whet compiled"))
    return entries


def given(setting: Setting, answers: Answers) -> dict[str, Any]:
    """The arguments of each worker of a step: the prompts, the lengths of their responses, the learning rate."""
    return {
        "texts": setting.workload.texts[: answers.prompts],
        "prompts": answers.prompts,
        "n": answers.n,
        "lengths": answers.lengths,
        "lr": LEARNING_RATE,
        "dtype": dtype(),
    }


def dtype() -> str:
    """The dtype in which both sides compute: the one that the processor multiplies."""
    return "bfloat16" if bfloat16_instructions() else "float32"


def report(results: Mapping[str, Any]) -> list[str]:
    """For each case: steps against TRL's fastest, then the phases against their floors."""
    shape, machine = Shape(**results["machine"]["shape"]), machine_of(results)
    lines = []
    for section in results["grpo_step"].values():
        answers = Answers(**section["answers"])
        records = {name: Record(**record) for name, record in section["records"].items()}
        lines += [
            f"{answers.prompts} prompts x {answers.n} answers of {min(answers.lengths)} to {answers.longest} tokens "
            f"({sum(answers.lengths):,} in all), {section.get('dtype', 'bfloat16')}, "
            f"learning rate {LEARNING_RATE:g}, no KL:",
            "",
            *step_table(records),
            "",
            *_phase_table(records, shape, machine, section["prompt_lengths"], answers),
            "",
        ]
    return lines


def step_table(records: Mapping[str, Record]) -> list[str]:
    """Steps against TRL's fastest."""
    fastest = min((name for name in records if name in TRL_VARIANTS), key=lambda n: records[n].seconds, default=None)
    lines = [
        "| | seconds a step | against TRL's fastest | peak memory | first step beyond a warm one |",
        "|---|---|---|---|---|",
    ]
    for name, record in records.items():
        against = "" if fastest is None or name in TRL_VARIANTS else str(speed_up(records[fastest], record))
        shown = f"**{name}**" if name == fastest else name
        lines.append(
            f"| {shown} | {record.seconds:.3f} | {against} | {record.peak_bytes / 2**20:,.0f} MiB "
            f"| {record.start_seconds:.1f} s |"
        )
    return lines


def _phase_table(
    records: Mapping[str, Record], shape: Shape, machine: Machine, prompts: list[int], answers: Answers
) -> list[str]:
    reading = Reading(prompts, answers.lengths)
    floors = {"rollout": rollout(shape, reading), "update": update(shape, reading)}
    shown = {name: record.phases() for name, record in records.items()}
    phases = list(dict.fromkeys(phase for by_phase in shown.values() for phase in by_phase))
    lines = ["| seconds | " + " | ".join(shown) + " | floor |", "|---" * (len(shown) + 2) + "|"]
    for phase in phases:
        floor = floors[phase].seconds(machine) if phase in floors else None
        cells = [_cell(by_phase.get(phase), floor) for by_phase in shown.values()]
        lines.append(f"| {phase} | " + " | ".join(cells) + f" | {'' if floor is None else f'{floor:.3f}'} |")
    return lines


def _cell(seconds: float | None, floor: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3f}" if floor is None else f"{seconds:.3f} ({seconds / floor:.1f}x)"
