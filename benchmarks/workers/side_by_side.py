# SPDX-License-Identifier: Apache-2.0
"""A loop that samples and trains at the same time, neither knowing of the other: the floor of an asynchronous run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from whet.batch import Batch
from whet.metrics import Metrics
from whet.trainers.rl import add_advantages, sample, update
from whet.trainers.run import Run


def fit(run: Run) -> None:
    """Trains on the first batch again and again while others are sampled and let go. Every step's time is the mean."""
    before = sample(run, 1, Metrics())
    steps, prompts = run.total_steps, run.config.data.train_batch_size
    planned = {column.name for column in run.columns.providers}
    columns = {name: column for name, column in before.tensors().items() if name not in planned}
    kept = Batch.of(columns, before.non_tensor_batch, before.meta_info)
    groups = run.rollouts.start(prompts, step=1).result().groups

    def samples() -> None:
        for step in range(1, steps + 1):
            run.rollouts.start(prompts, step=step).result()

    def trains() -> None:
        for step in range(1, steps + 1):
            batch = run.columns.add(kept, run.sources(groups, step), Metrics())
            update(run, add_advantages(run, batch, step, Metrics()), step, Metrics())
            run.engine.sync(step)

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for side in [threads.submit(samples), threads.submit(trains)]:
            side.result()
    seconds = (time.perf_counter() - began) / steps
    for step in range(1, steps + 1):
        metrics = Metrics()
        metrics.seconds("time/step", seconds)
        run.step = step
        run.log(step, metrics)
