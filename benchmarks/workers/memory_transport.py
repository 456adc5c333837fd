# SPDX-License-Identifier: Apache-2.0
"""The bytes of a batch into shared memory and out again, there and back."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from benchmarks.workers.ragged_columns import columns_of, size_of
from benchmarks.workers.turns import Turns


def main() -> None:
    """A turn is both ways."""
    turns = Turns()
    columns = columns_of(turns.settings["rows"], turns.settings["positions"])
    memory = SharedMemory(create=True, size=size_of(columns))
    turns.ready(batch_bytes=size_of(columns))
    while True:
        turns.wait()
        back = through(memory, through(memory, columns))
        turns.done()
        assert back["input_ids"].equal(columns["input_ids"])
        del back


def through(memory: SharedMemory, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """One way."""
    shared, start = torch.frombuffer(memory.buf, dtype=torch.uint8), 0
    written = {}
    for name, column in columns.items():
        written[name] = shared[start : start + column.nbytes].view(column.dtype).view(column.shape)
        written[name].copy_(column)
        start += column.nbytes
    return {name: column.clone() for name, column in written.items()}


if __name__ == "__main__":
    main()
