# SPDX-License-Identifier: Apache-2.0
"""verl's DataProto to two Ray actors and back, as its worker groups send it."""

from __future__ import annotations

from typing import Any

import ray  # type: ignore[import-not-found,unused-ignore]
from verl.protocol import DataProto  # type: ignore[import-not-found]  # of another environment

from benchmarks.workers.ragged_columns import columns_of, size_of
from benchmarks.workers.turns import Turns


@ray.remote(num_cpus=1)
class Echo:
    """Returns its arguments."""

    def echo(self, batch: Any) -> Any:
        """The same rows."""
        return batch


def main() -> None:
    """A turn is one call of both."""
    turns = Turns()
    columns = columns_of(turns.settings["rows"], turns.settings["positions"])
    batch = DataProto.from_dict(columns)
    ray.init("local", num_cpus=2)
    actors = [Echo.remote() for _ in range(2)]  # type: ignore[attr-defined,unused-ignore]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    turns.ready("verl", "ray", batch_bytes=size_of(columns))
    while True:
        turns.wait()
        parts = ray.get([actor.echo.remote(part) for actor, part in zip(actors, batch.chunk(2), strict=True)])
        back = DataProto.concat(parts)
        turns.done()
        assert back.batch["input_ids"].equal(batch.batch["input_ids"])
        del parts, back


if __name__ == "__main__":
    main()
