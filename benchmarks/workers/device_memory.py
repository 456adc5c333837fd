# SPDX-License-Identifier: Apache-2.0
"""Compares a plan's bytes of the accelerator with the count of torch's allocator in small runs: `FOLDER`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whet import devices
from whet.config import TrainConfig, load_config
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import free_accelerator
from whet.planning.units import size
from whet.plugins.lessons.init_model import init_model
from whet.plugins.planner.memory import plan_memory
from whet.trainers import build

ROWS = [{"prompt": f"What is {a} plus {b}? ", "answer": str(a + b)} for a in range(16) for b in range(8)]
COMMON: dict[str, Any] = {
    "data.apply_chat_template": False,
    "data.train_batch_size": 16,
    "data.max_prompt_length": 64,
    "data.max_response_length": 192,
    "rollout.n": 8,
    "rollout.engine.options.kv_cache_bytes": 2**28,
    "reward.num_workers": 0,
    "trainer.total_steps": 2,
    "trainer.val_freq": -1,
    "trainer.logger": ["jsonl"],
    "trainer.save_freq": 0,
    "algorithm.kl.where": "loss",
}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"model.dtype": "float32"},
    "bfloat16, activations computed again": {"model.dtype": "bfloat16", "model.gradient_checkpointing": True},
    "in turns": {"model.dtype": "bfloat16", "rollout.free_cache_engine": True},
    "adapter": {"model.lora.rank": 16, "model.dtype": "bfloat16"},
}


def main(folder: Path) -> None:
    """Prints a table."""
    model = init_model(folder / "model", "qwen3", "small", vocab_size=8192)
    print("| run | planned tensors | measured at the most | planned over measured | held by the allocator |")
    print("|---|---|---|---|---|")
    for number, (name, changes) in enumerate(CASES.items()):
        values = {**COMMON, **changes, "model.path": str(model), "trainer.run_dir": str(folder / str(number))}
        config = with_dtypes(load_config(TrainConfig, None, values, given={"reward", "data"}).config)
        lengths = [len(str(row["prompt"])) for row in ROWS]
        setup = replace(build.setup(config, lengths), device=free_accelerator(config.cluster))
        planned = plan_memory(setup).device_tensor_bytes
        devices.release(devices.here())
        torch.accelerator.reset_peak_memory_stats()
        build.train(config, reward=uneven, data=ROWS)
        found, held = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
        print(f"| {name} | {size(planned)} | {size(found)} | {planned / found:.2f} | {size(held)} |", flush=True)


def uneven(solution_str: str, **_: Any) -> float:
    """A reward that differs between answers."""
    return float(sum(map(ord, solution_str)) % 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
