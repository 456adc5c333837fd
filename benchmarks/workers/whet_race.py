# SPDX-License-Identifier: Apache-2.0
"""The RL stage of `whet quickstart`, by its recipe, until the target."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.workers.race import Race
from benchmarks.workers.turns import Turns
from whet.config import TrainConfig, load_config
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit, validate
from whet.trainers.run import Run


def main() -> None:
    """Trains once."""
    turns = Turns()
    settings = turns.settings
    overrides = {
        "model.path": settings["model"],
        "data.train_files": [settings["train_file"]],
        "data.val_files": [settings["held_out_file"]],
        "trainer.seed": settings["seed"],
        "trainer.val_freq": -1,  # the race evaluates
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
        "trainer.run_dir": settings["run_dir"],
    }
    config = load_config(TrainConfig, "quickstart", overrides).config
    run = build(config, build_scorer(config.reward))
    turns.settings["max_steps"] = run.total_steps  # the recipe's own, which its schedule is made for
    race = Race(turns, lambda: validate(run, run.step).reduce()["val/accuracy"])

    def after_step(run: Run, step: int, numbers: Mapping[str, float]) -> None:
        race.after_step(step)

    run.callbacks = [after_step]
    turns.ready()
    race.start()
    fit(run)


if __name__ == "__main__":
    main()
