# SPDX-License-Identifier: Apache-2.0
"""Workers that the controller's tests launch: in a module of their own, as worker processes import them."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from whet.batch import Batch
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.errors import ConfigError, DataError, WhetError
from whet.metrics import Metrics


class Actor(Worker):
    """Records rank, method and rows of each call."""

    def __init__(self, placement: Placement, scale: int = 1) -> None:
        super().__init__(placement)
        self.weight = torch.full((3,), float(scale))
        self.seen: list[Any] = []
        self.released = threading.Event()

    @register(Dispatch.DP_COMPUTE)
    def lengths(self, batch: Batch) -> tuple[dict[str, torch.Tensor], Metrics]:
        """The tokens of each row, on which rank, and their mean."""
        tokens = batch["attention_mask"].sum(-1)
        metrics = Metrics()
        metrics.mean("rows/tokens", tokens.double().mean(), weight=len(batch))
        metrics.sum("rows/count", len(batch))
        return {"tokens": tokens, "rank": torch.full_like(tokens, self.rank)}, metrics

    @register(Dispatch.DP_COMPUTE)
    def total(self, batch: Batch) -> Batch:
        """The global sum of `value`, repeated for every row, beside the row's own name."""
        total = batch["value"].sum()
        if self.process_group is not None:
            torch.distributed.all_reduce(total, group=self.process_group)
        return Batch.of({"total": total.repeat(len(batch))}, {"name": batch["name"]})

    @register(Dispatch.DP_COMPUTE)
    def ranks(self, rows: list[Any]) -> list[tuple[Any, int]]:
        return [(row, self.rank) for row in rows]

    @register(Dispatch.DP_COMPUTE)
    def echo(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.DP_COMPUTE)
    def one_row_too_few(self, rows: list[Any]) -> list[Any]:
        return rows[1:]

    @register(Dispatch.ALL_TO_ALL)
    def own(self, item: str) -> str:
        return f"{item} at {self.rank} of {self.world_size}"

    @register()
    def say(self, *, name: str) -> str:
        return f"{name} {self.rank}"

    @register()
    def remember(self, item: Any) -> list[Any]:
        self.seen.append(item)
        return list(self.seen)

    @register()
    def wait_for_release(self, seconds: float) -> bool:
        """Whether `release` was called in time."""
        return self.released.wait(seconds)

    @register(concurrent=True)
    def release(self) -> int:
        self.released.set()
        return self.rank

    @register()
    def add(self, amount: float) -> None:
        self.weight += amount

    @register()
    def process(self) -> tuple[int, int]:
        return os.getpid(), torch.get_num_threads()

    @register()
    def where(self) -> str:
        """Under which others reach this rank."""
        return self.address

    @register()
    def weak_link(self, rank: int, deed: str) -> None:
        """`rank` does the deed, the others wait for it in a collective."""
        if self.rank == rank:
            if deed == "raise":
                raise ValueError("no such token: 7")
            if deed == "refuse":
                raise OwnError(7)
            if deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if deed == "exit":
                sys.exit(3)
            if deed == "crash":
                os._exit(4)
            time.sleep(60)
        if self.process_group is not None:
            torch.distributed.all_reduce(torch.zeros(1), group=self.process_group)

    @register()
    def unloadable(self) -> Any:
        return lambda: None

    def not_registered(self) -> None:
        raise AssertionError("a method without @register was called")


class Rollout(Worker):
    """Reads the actor's weight where it lies, and leaves a note at an orderly end."""

    def __init__(self, placement: Placement, folder: Path | None = None) -> None:
        super().__init__(placement)
        self.folder = folder
        actor = self.neighbours["actor"]
        assert isinstance(actor, Actor)
        self.weight = actor.weight

    @register()
    def read(self) -> list[float]:
        return self.weight.tolist()

    def close(self) -> None:
        if self.folder is not None:
            time.sleep(0.3 * self.rank)  # the end of one process is not the end of the other
            (self.folder / f"closed by {self.rank}").write_text(" ".join(self.neighbours))


class Replica(Actor):
    """A rank that needs no other."""

    is_replica = True


class Misconfigured(Worker):
    """A worker whose config is wrong on one rank."""

    def __init__(self, placement: Placement, rank: int) -> None:
        super().__init__(placement)
        if self.rank == rank:
            raise ConfigError.joined(
                [
                    ConfigError("actor.mini_batch_size", 3, "a divisor of data.train_batch_size=8", "set it to 4"),
                    DataError("a.jsonl, row 2", None, "a prompt"),
                ]
            )


def check_misconfigured(error: WhetError) -> None:
    """Checks that the error of Misconfigured arrived as it was raised."""
    from tests.raising import check_fields  # not for the workers

    expected, change = re.compile(r"data\.train_batch_size=8$"), re.compile(r"\b4$")
    check_fields(error, "actor.mini_batch_size", found=3, expected=expected, change=change)
    assert type(error) is ConfigError
    [other] = error.others
    check_fields(other, "a.jsonl, row 2", found=None, expected="a prompt", change="")


class OwnError(ConfigError):
    """An error of a user: its constructor takes something else, and its value cannot be pickled."""

    def __init__(self, size: int) -> None:
        super().__init__("size", lambda: size, "at most 3", "lower it")


def running(pids: Sequence[int]) -> list[int]:
    """The processes that have not ended."""
    return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # ended, not yet waited for
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids: Sequence[int], seconds: float) -> None:
    """Fails if one still runs after so long."""
    until = time.monotonic() + seconds
    while left := running(pids):
        assert time.monotonic() < until, f"{left} still run after {seconds} s"
        time.sleep(0.02)
