# SPDX-License-Identifier: Apache-2.0
"""TRL's DPO or KTO trainer on the quickstart's pairs, to the end. Runs in TRL's own environment."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # type: ignore[import-not-found]  # of another environment

from benchmarks.workers.race import Race
from benchmarks.workers.right_answers import Exam
from benchmarks.workers.trl_race import AfterStep, of_all, read_rows, train
from benchmarks.workers.turns import Turns

CONFIGS, TRAINERS = {"dpo": DPOConfig, "kto": KTOConfig}, {"dpo": DPOTrainer, "kto": KTOTrainer}


def main() -> None:
    """Trains once."""
    turns = Turns()
    settings = turns.settings
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    exam = Exam(tokenizer, read_rows(settings["held_out_file"]))
    race = Race(turns, lambda: exam.accuracy(model))
    race.accuracies.append((0, 0.0, exam.accuracy(model)))
    pairs = read_rows(settings["labelled_file" if settings["loss"] == "kto" else "pairs_file"])
    trainer = TRAINERS[settings["loss"]](
        model=model,
        args=arguments(settings),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        callbacks=[AfterStep(race)],
    )
    train(turns, race, trainer)


def arguments(settings: dict[str, Any]) -> Any:
    """TRL's defaults, except for settings of both sides, and without settings that would slow it down."""
    rows = 2 if settings["loss"] == "kto" else 1  # KTO makes a good and a bad row of a pair
    return CONFIGS[settings["loss"]](
        **of_all(settings),
        bf16=settings["dtype"] == "bfloat16",
        beta=settings["beta"],
        lr_scheduler_type="constant",
        adam_beta2=settings["betas"][1],
        max_length=settings["max_length"],
        train_sampling_strategy="sequential",
        per_device_train_batch_size=settings["batch_size"] * rows,
    )


if __name__ == "__main__":
    main()
