# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO trainer on the quickstart's problems, until the target. Runs in TRL's own environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # of another environment

from benchmarks.workers.race import Race
from benchmarks.workers.turns import Turns

MAX_NEW_TOKENS = 5


class AfterStep(TrainerCallback):
    """Tells the race of every step."""

    def __init__(self, race: Race) -> None:
        self.race = race

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer step is done."""
        self.race.after_step(state.global_step)


def main() -> None:
    """Trains once."""
    turns = Turns()
    settings = turns.settings
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    held_out = read_rows(settings["held_out_file"])
    race = Race(turns, lambda: accuracy(model, tokenizer, held_out))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=is_right,
        args=arguments(settings),
        train_dataset=Dataset.from_list(read_rows(settings["train_file"])),
        processing_class=tokenizer,
        callbacks=[AfterStep(race)],
    )
    train(turns, race, trainer)


def train(turns: Turns, race: Race, trainer: Any) -> None:
    """Trains when it is this worker's turn."""
    turns.ready("trl", "accelerate")
    race.start()
    trainer.train()


def arguments(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's defaults, except for batch, learning rate and dtype, and without settings that would slow it down."""
    return GRPOConfig(
        **of_all(settings),
        bf16=settings["bf16"],
        beta=0.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        num_generations=settings["n"],
        max_completion_length=MAX_NEW_TOKENS,
        per_device_train_batch_size=settings["prompts"] * settings["n"],
        gradient_accumulation_steps=1,
    )


def of_all(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of every trainer."""
    return {
        "output_dir": settings["run_dir"],
        "use_cpu": True,
        "learning_rate": settings["lr"],
        "gradient_checkpointing": False,
        "max_steps": settings["max_steps"],
        "seed": settings["seed"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def read_rows(path: str) -> list[dict[str, str]]:
    """Problems: prompt and answer."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Share of problems with a right greedy answer."""
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
    model.train(training)
    texts: list[str] = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    main()
