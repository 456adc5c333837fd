# SPDX-License-Identifier: Apache-2.0
"""GRPO steps of TRL on one card: `SIZE MODEL FOLDER STEPS`. Runs in TRL's own environment."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # of another environment

from benchmarks.workers.card_models import PROMPTS, SAMPLES, longest, rows_of, score


class Clock(TrainerCallback):
    """Seconds from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step begins."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main(size: str, model: str, folder: str, steps: int) -> None:
    """Trains, and prints seconds a step."""
    clock, rows, on_card = Clock(), PROMPTS.get(size, 64) * SAMPLES, torch.cuda.is_available()
    has_vllm = on_card and importlib.util.find_spec("vllm") is not None
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if has_vllm else {}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [score(each) for each in completions],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=not on_card,
            bf16=on_card,
            model_init_kwargs={"dtype": "float32"},
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            num_generations=SAMPLES,
            max_completion_length=longest(size),
            per_device_train_batch_size=min(rows, 32),
            gradient_accumulation_steps=max(1, rows // 32),
            gradient_checkpointing=False,
            shuffle_dataset=False,
            max_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **engine,
        ),
        train_dataset=Dataset.from_list(rows_of(size) * (steps + 1)),
        callbacks=[clock],
    )
    trainer.train()
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"engine": "vllm, colocated" if has_vllm else "generate", "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
