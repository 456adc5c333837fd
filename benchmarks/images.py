# SPDX-License-Identifier: Apache-2.0
"""Rows with images: the native engine against `transformers.generate`, and a GRPO step against TRL's trainer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.competitor import Entry
from benchmarks.grpo_step import LEARNING_RATE, TRL_VARIANTS, step_table
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers

TITLE = "Images"
NOTE = """\
A random Qwen2.5-VL whose prompts show an image each, of 16 to 100 tokens, new ones in every turn. Both sides begin with
PNG files: decoding and the processor are in their times. Lengths of responses are forced as above.
`transformers.generate` gets one left-padded batch of the prompts, and repeats it for the responses of each. The last
line says how long whet's step waited for pixel values, which threads prepare while it samples.
"""
LARGE = '"Large" has images of 512 to 1,024 pixels, and a cache of pixel values that holds half of a step.'
SIDES = (112, 168, 224, 280)  # pixels of the images, in patches of 14 of which 2 x 2 make a token
LARGE_SIDES = {True: (512, 768, 1024), False: (512,)}  # whether it is thorough
PIXEL_BYTES = 24  # of the processor's output: three colours, twice for a time of two frames, in float32
BASELINE = "transformers.generate"
PHASES = ("rollout", "reward", "advantage", "update", "sync", "rest")


def run(setting: Setting) -> dict[str, Any]:
    """The rollout, then the step."""
    from whet.plugins.lessons.init_model import init_model

    scale = setting.scale
    model = init_model(
        setting.scratch / "seeing", "qwen2.5_vl", scale.size, num_layers=scale.num_layers, vocab_size=512
    )
    turns = scale.warm_up + scale.rounds
    answers = scale.rollout["ragged"]
    files = write_images(setting.scratch / "images", turns * answers.prompts)
    told = {"model": str(model), "images": files, "n": answers.n, "lengths": answers.lengths}
    engines = {BASELINE: "transformers", "whet": "native"}
    rollouts = {name: setting.whet("rollout_images", **told, engine=engine) for name, engine in engines.items()}
    step, sides = scale.step["ragged"], LARGE_SIDES[scale.is_thorough]
    few = replace(step, prompts=max(2, step.prompts // 2))
    large = write_images(setting.scratch / "large", turns * few.prompts, sides)
    held = few.prompts * fmean(side**2 for side in sides) * PIXEL_BYTES / 2
    small_cache = {"model.media_cache_gib": held / 2**30, "data.max_prompt_length": 2048}
    return {
        "rollout": _section(answers, setting, rollouts),
        "step": _section(step, setting, _steps(setting, str(model), files, step)),
        "large": _section(few, setting, _steps(setting, str(model), large, few, small_cache)),
    }


def _section(answers: Answers, setting: Setting, entries: Mapping[str, Entry]) -> dict[str, Any]:
    records = setting.take_turns(entries)
    return {"answers": asdict(answers), "records": {name: asdict(record) for name, record in records.items()}}


def _steps(
    setting: Setting, model: str, files: list[str], answers: Answers, changes: Mapping[str, Any] | None = None
) -> dict[str, Entry]:
    """The steps of TRL and of whet; with `changes` to its config whet's alone."""
    told = {
        "model": model,
        "texts": ["How many figures are there?"] * len(files),
        "images": files,
        "prompts": answers.prompts,
        "n": answers.n,
        "lengths": answers.lengths,
        "lr": LEARNING_RATE,
    }

    def run_dir(name: str) -> str:
        return str(setting.scratch / "runs" / f"images{len(changes or {})}" / name.replace(" ", "_"))

    entries = {}
    if setting.trl_python is not None and changes is None:
        for name, (weights, micro_batches) in TRL_VARIANTS.items():
            options = {"weights": weights, "micro_batches": micro_batches, "run_dir": run_dir(name)}
            entries[name] = setting.trl("trl_step", **{**told, **options})
            if not setting.scale.is_thorough:
                break
    told |= {"compile": False, "run_dir": run_dir("whet"), "changes": changes or {}}
    entries["whet"] = setting.whet("whet_step", **told)
    return entries


def write_images(folder: Path, count: int, sides: Sequence[int] = SIDES) -> list[str]:
    """Writes PNG files of different sizes, and returns their paths."""
    from whet.plugins.lessons.drawn.canvas import to_png
    from whet.plugins.lessons.drawn.figures import scatter

    folder.mkdir()
    draws = random.Random(0)
    paths = []
    for number in range(count):
        path = folder / f"{number:04}.png"
        path.write_bytes(to_png(scatter(draws, draws.randint(1, 9), draws.choice(sides), 4)))
        paths.append(str(path))
    return paths


def report(results: Mapping[str, Any]) -> list[str]:
    """A table of the rollout, a table of the step, and its time spent waiting for pixel values."""
    lines = [LARGE, ""] if "large" in results["images"] else []
    for name, section in results["images"].items():
        answers = Answers(**section["answers"])
        records = {each: Record(**record) for each, record in section["records"].items()}
        tokens = sum(answers.lengths)
        lines += [
            f"{name.capitalize()}: {answers.prompts} prompts x {answers.n} responses of {min(answers.lengths)} to "
            f"{answers.longest} tokens ({tokens:,} in all), bfloat16:",
            "",
            *(_rollout_table(records, tokens) if name == "rollout" else _step_lines(records)),
            "",
        ]
    return lines


def _rollout_table(records: Mapping[str, Record], tokens: int) -> list[str]:
    lines = ["| | useful tokens/s | seconds | against generate |", "|---|---|---|---|"]
    for name, record in records.items():
        against = "" if name == BASELINE else str(speed_up(records[BASELINE], record))
        lines.append(f"| {name} | {tokens / record.seconds:,.0f} | {record.seconds:.2f} | {against} |")
    return lines


def _step_lines(records: Mapping[str, Record]) -> list[str]:
    lines = [*step_table(records), "", "| seconds | " + " | ".join(records) + " |", "|---" * (len(records) + 1) + "|"]
    phases = {name: record.phases() for name, record in records.items()}
    for phase in PHASES:
        cells = [f"{each[phase]:.3f}" if phase in each else "" for each in phases.values()]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    waited = median(turn["waited_seconds"] / turn["seconds"] for turn in records["whet"].rounds)
    return [*lines, "", f"whet waited for pixel values in {waited:.1%} of a step."]
