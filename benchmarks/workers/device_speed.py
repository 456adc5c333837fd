# SPDX-License-Identifier: Apache-2.0
"""Sampling and training on the accelerator at a size that fills more of it, beside transformers: `FOLDER`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.workers.packing import ragged_batch
from benchmarks.workers.rollout import native, transformers_generate
from benchmarks.workload import Answers, make_workload
from whet import devices
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.planning.outline import Outline
from whet.planning.speed import training_flops
from whet.tracking.profile import peak_flops
from whet.trainers.objectives import PolicyObjective

ANSWERS = Answers(prompts=32, n=8, shortest=16, longest=128)
ROUNDS = 2
OBJECTIVE = PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None})


def main(folder: Path, size: str = "base") -> None:
    """Prints two tables: the first turn of each is not counted, and they take turns."""
    workload = make_workload(folder, size=size, num_layers=28, vocab_size=512, prompts=ANSWERS.prompts)
    requests = [(list(prompt), length) for prompt, length in workload.requests(ANSWERS)]
    wanted, path = sum(length for _, length in requests), str(workload.model)
    samplers: dict[str, Callable[[], Any]] = {
        "transformers.generate": transformers_generate(path, requests),
        "whet": native(path, requests, compiled=False),
    }
    print(f"\n{len(requests)} answers of {ANSWERS.shortest} to {ANSWERS.longest} tokens ({wanted:,}), bfloat16:\n")
    print("| sampling | seconds | tokens/s | GiB at the most |\n|---|---|---|---|")
    for name, (seconds, most) in in_turns(samplers).items():
        print(f"| {name} | {seconds:.2f} | {wanted / seconds:,.0f} | {most / 2**30:.1f} |", flush=True)
    samplers.clear()
    devices.release(devices.here())
    batch = ragged_batch(requests)
    tokens = int(batch["attention_mask"].sum())
    print(f"\nOne update of these rows ({tokens:,} tokens):\n")
    print("| training | seconds | tokens/s | share of the peak | GiB at the most |\n|---|---|---|---|---|")
    for name, again in (("bfloat16", False), ("bfloat16, activations computed again", True)):
        role = RoleSettings(
            path, EngineConfig(), "bfloat16", None, OptimConfig(lr=1e-6), 1.0, gradient_checkpointing=again
        )
        engine = SingleEngine(role, device=devices.here())
        [(seconds, most)] = in_turns({name: partial(engine.update, batch, OBJECTIVE)}).values()
        peak, needed = peak_flops(), training_flops(Outline(role), batch)
        share = f"{needed / seconds / peak:.1%}" if peak else "not known"
        print(f"| {name} | {seconds:.2f} | {tokens / seconds:,.0f} | {share} | {most / 2**30:.1f} |", flush=True)
        del engine
        devices.release(devices.here())


def in_turns(works: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, int]]:
    """The median of seconds, and the most memory, of each."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in works}
    is_there = devices.here() != devices.HOST
    for _ in range(1 + ROUNDS):
        for name, work in works.items():
            if is_there:
                torch.accelerator.reset_peak_memory_stats()
            start = time.perf_counter()
            work()
            if is_there:
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - start
            found[name].append((seconds, torch.accelerator.max_memory_allocated() if is_there else 0))
    return {
        name: (median(each for each, _ in turns[1:]), max(most for _, most in turns)) for name, turns in found.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
