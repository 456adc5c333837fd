# SPDX-License-Identifier: Apache-2.0
"""One recipe trained to its end on the quickstart's problems."""

from __future__ import annotations

from benchmarks.workers.turns import Turns
from whet.config import TrainConfig, load_config
from whet.trainers.build import train


def main() -> None:
    """Trains once."""
    turns = Turns()
    settings = turns.settings
    overrides = {
        "model.path": settings["model"],
        "data.train_files": [settings["train_file"]],
        "data.val_files": [settings["held_out_file"]],
        "trainer.seed": settings["seed"],
        "trainer.val_freq": settings["evaluate_every"],
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
        "trainer.log_rollouts": 0,
        "trainer.run_dir": settings["run_dir"],
    }
    if settings["max_steps"] is not None:
        overrides["trainer.total_steps"] = settings["max_steps"]
    config = load_config(TrainConfig, settings["recipe"], overrides).config
    turns.ready()
    turns.wait()
    history = train(config).history
    accuracies = [(record["step"], record["val/accuracy"]) for record in history if "val/accuracy" in record]
    turns.done(accuracies=accuracies)
    turns.wait()


if __name__ == "__main__":
    main()
