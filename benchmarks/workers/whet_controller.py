# SPDX-License-Identifier: Apache-2.0
"""The cost of a call in the calling process, where workers return at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from threading import Event

import torch

from benchmarks.workers.turns import Turns
from whet.batch import Batch
from whet.controller.dispatch import Arguments, Dispatch, register
from whet.controller.worker import RankLayout, Worker
from whet.controller.worker_group import Reply, Transport, WorkerGroup
from whet.errors import WhetError

RANKS = 8


class Zeros(Worker):
    """Returns its result unchanged."""

    @register(Dispatch.DP_COMPUTE)
    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One column."""
        raise NotImplementedError


class AtOnce(Transport):
    """A transport whose workers need no time."""

    ended = Event()

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments]) -> dict[int, Reply]:
        """A column of zeros from each rank."""
        replies: dict[int, Reply] = {}
        for rank, given in arguments.items():
            replies[rank] = Future()
            shape = given.args[0]["response_mask"].shape
            replies[rank].set_result({"log_probs": torch.zeros(shape)})
        return replies

    def abort(self, error: WhetError) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def main() -> None:
    """A turn is one call."""
    turns = Turns()
    rows, tokens = turns.settings["shape"]
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=draw)).long()
    columns = {name: mask.clone() for name in ("input_ids", "attention_mask", "position_ids")}
    columns |= {name: mask[:, tokens // 2 :].float() for name in ("old_log_probs", "advantages", "response_mask")}
    batch = Batch.of(columns, {"uid": [str(row) for row in range(rows)]})
    group = WorkerGroup("actor", Zeros, [RankLayout(rank, RANKS, True) for rank in range(RANKS)], AtOnce(), 60.0)
    turns.ready()
    while True:
        turns.wait()
        group.forward(batch)
        turns.done()


if __name__ == "__main__":
    main()
