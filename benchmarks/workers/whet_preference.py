# SPDX-License-Identifier: Apache-2.0
"""`whet preference` on the quickstart's pairs, until the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workers.race import Race
from benchmarks.workers.right_answers import Exam
from benchmarks.workers.turns import Turns
from whet.config import load_config
from whet.config.preference import PreferenceConfig
from whet.roles.workers import TrainWorker
from whet.trainers.preference import PreferenceRun
from whet.trainers.sft import train_on_examples


def main() -> None:
    """Trains once."""
    turns = Turns()
    settings = turns.settings
    config = load_config(PreferenceConfig, None, overrides(settings)).config
    held_out = [json.loads(line) for line in Path(settings["held_out_file"]).read_text().splitlines()]
    exam = Exam(AutoTokenizer.from_pretrained(settings["model"]), held_out)
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"]).float()

    class Racing(PreferenceRun):
        """The run, which waits for its turn."""

        def start(self) -> None:
            turns.ready()
            race.start()
            super().start()

    def accuracy(run: PreferenceRun) -> float:
        here = run.roles["actor"].here
        assert here is not None
        actor = here.by_role["actor"]
        assert isinstance(actor, TrainWorker)
        model.load_state_dict(dict(actor.engine.named_weights()), strict=False)  # the head may be tied
        return exam.accuracy(model)

    runs: list[PreferenceRun] = []
    race = Race(turns, lambda: accuracy(runs[-1]))

    def after_step(run: PreferenceRun) -> None:
        runs[:] = [run]
        race.after_step(run.step)

    train_on_examples(Racing, config, callbacks=[after_step])


def overrides(settings: dict[str, Any]) -> dict[str, Any]:
    """whet's defaults, except for settings of both sides."""
    return {
        "model.path": settings["model"],
        "model.dtype": settings["dtype"],
        "data.train_files": [settings["pairs_file"]],
        "data.apply_chat_template": False,
        "data.train_batch_size": settings["batch_size"],
        "data.max_length": settings["max_length"],
        "data.shuffle": False,
        "loss": settings["loss"],
        "loss_options.beta": settings["beta"],
        "reference.mode": "cached",
        "optim.lr": settings["lr"],
        "optim.betas": settings["betas"],
        "optim.weight_decay": 0.0,
        "grad_clip": 1.0,
        "trainer.total_steps": settings["max_steps"],
        "trainer.seed": settings["seed"],
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
        "trainer.run_dir": settings["run_dir"],
    }


if __name__ == "__main__":
    main()
