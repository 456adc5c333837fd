# SPDX-License-Identifier: Apache-2.0
"""whet's Batch to two Ray actors and back."""

from __future__ import annotations

from benchmarks.workers.ragged_columns import columns_of, size_of
from benchmarks.workers.turns import Turns
from whet.batch import Batch
from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.launch import launch_roles
from whet.controller.worker import Worker, WorkerSpec


class Echo(Worker):
    """Returns its arguments."""

    @register(Dispatch.DP_COMPUTE)
    def echo(self, batch: Batch) -> Batch:
        """The same rows."""
        return batch


def main() -> None:
    """A turn is one call."""
    turns = Turns()
    columns = columns_of(turns.settings["rows"], turns.settings["positions"])
    batch = Batch.of(columns)
    cluster = ClusterConfig(backend="ray", address="local", processes=2)
    group = launch_roles([WorkerSpec("actor", Echo)], cluster)["actor"]
    turns.ready("ray", batch_bytes=size_of(columns))
    while True:
        turns.wait()
        back = group.echo(batch)
        turns.done()
        assert back["input_ids"].equal(batch["input_ids"])
        del back


if __name__ == "__main__":
    main()
