# SPDX-License-Identifier: Apache-2.0
"""Training while the next responses are sampled, against waiting for them, and against both sides left alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.competitor import ROOT
from benchmarks.record import Ratio
from benchmarks.setting import Setting

TITLE = "Asynchronous training"
NOTE = """\
One process of one core trains, another samples. *Side by side* is the floor: one process updates on an old batch and
sends its weights, the other samples, and neither waits for the other. All runs compute old log-probs, as two updates a
step and stale tokens need them. Responses of up to k steps may have been sampled before
the time starts, so a short run with a large k may be faster than the floor.
"""
STALENESS = (0.5, 1.0, 2.0, 4.0)
APART = "cluster.placement={train: {processes: 1, roles: [actor]}, sample: {processes: 1, roles: [rollout]}}"
LOOP = f"trainer.loop={ROOT}/benchmarks/workers/side_by_side.py:fit"
WARM_UP_STEPS = 3
ROUNDS = 3  # of one run by mode
AT_ONCE = 8  # sampled at a time, which makes sampling as slow as training
DEADLINE_SECONDS = 1800.0
CORRECTED = "algorithm.correction.weight=importance"
log = logging.getLogger(__name__)


def run(setting: Setting) -> dict[str, Any]:
    """The time of a step by mode, in turns."""
    modes = {"synchronous": [], **{f"{k:g}": stale(k) for k in STALENESS}, "side by side": [LOOP]}
    if not setting.scale.is_thorough:
        modes = {name: modes[name] for name in ("synchronous", "1", "side by side")}
    task = steps_task(setting)
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(ROUNDS if setting.scale.is_thorough else 1):
        for name, words in modes.items():
            log.info("%s, round %d", name, number)
            seconds[name].append(step_seconds(whet_train([*task, *words], setting.scratch)))
    return {"seconds": seconds}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    found = results["asynchronous"]
    seconds: dict[str, list[float]] = found["seconds"]
    lines = ["| `rollout.max_staleness` | a step | of synchronous | of side by side |", "|---|---|---|---|"]
    for name, own in seconds.items():
        shares = [
            str(Ratio([mine / other for mine, other in zip(own, seconds[base], strict=True)]))
            for base in ("synchronous", "side by side")
        ]
        lines.append(f"| {'0' if name == 'synchronous' else name} | {median(own):.3f} s | {' | '.join(shares)} |")
    return lines


def stale(k: float) -> list[str]:
    """The keys of a run with stale samples."""
    return [f"rollout.max_staleness={k:g}", CORRECTED]


def steps_task(setting: Setting) -> list[str]:
    """A task whose responses all have the same length, and whose phases take about as long as each other."""
    scale = setting.scale
    answers = scale.step["equal"] if "equal" in scale.step else next(iter(scale.step.values()))
    data = setting.scratch / "asynchronous.jsonl"
    rows = ({"prompt": text, "answer": ""} for text in setting.workload.texts[: answers.prompts])
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = WARM_UP_STEPS + (12 if scale.is_thorough else 2)
    return [
        *("train", f"model.path={setting.workload.model}", f"data.train_files=[{data}]", APART),
        *("data.prompt_key=prompt", "data.answer_key=answer", "data.apply_chat_template=false"),
        *(f"data.train_batch_size={answers.prompts}", "data.max_prompt_length=64"),
        *(f"data.max_response_length={answers.longest}", "data.overlong_prompts=drop"),
        *(
            f"rollout.n={answers.n}",
            f"rollout.max_batch_size={AT_ONCE}",
            "rollout.allowed_token_ids=[40,41,42,43]",
            "reward.function=exact_match",
        ),
        *("reward.num_workers=0", "algorithm.adv_estimator=grpo", "actor.optim.lr=1e-6"),
        *(f"actor.mini_batch_size={max(1, answers.prompts // 2)}", f"trainer.total_steps={steps}"),
        *("trainer.save_freq=0", "trainer.log_rollouts=0", "trainer.logger=[jsonl]"),
    ]


def whet_train(words: Sequence[str], scratch: Path, threads: int = 1) -> Path:
    """Runs `whet` with one thread a process.  Returns the run's folder.  Raises: RuntimeError with its output."""
    folder = scratch / f"run_{len(list(scratch.glob('run_*')))}"
    done = subprocess.run(
        [sys.executable, "-m", "whet", *words, f"trainer.run_dir={folder}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise RuntimeError(
            f"whet {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return folder


def step_seconds(folder: Path) -> float:
    """The mean time of a step without the first ones: of a pipeline a median would hide who waits."""
    steps = [line["time/step"] for line in lines_of(folder / "timings.jsonl") if line["step"] > WARM_UP_STEPS]
    return sum(steps) / len(steps)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()]
