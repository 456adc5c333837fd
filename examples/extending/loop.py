# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own: whet train ... trainer.loop=examples/extending/loop.py:fit

Built from the parts of whet/trainers/rl.py; to change a part, copy that file."""

from whet.metrics import Metrics
from whet.trainers.rl import add_advantages, sample, update, validate
from whet.trainers.run import Run
from whet.trainers.schedule import Schedule


def fit(run: Run) -> None:
    """whet's loop, without the update of a step whose advantages are all 0."""
    with Schedule(run, validate) as schedule:
        while run.step < run.total_steps:
            step, metrics = run.step + 1, Metrics()
            with schedule.sampling():
                batch = sample(run, step, metrics)
            with schedule.training():
                batch = add_advantages(run, batch, step, metrics)
                has_signal = bool(batch["advantages"].any())
                metrics.mean("actor/updated", float(has_signal))
                if has_signal:
                    update(run, batch, step, metrics)
            run.sync(step)
            schedule.end_step(batch, metrics)
