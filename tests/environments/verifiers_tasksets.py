# SPDX-License-Identifier: Apache-2.0
"""Tasksets in the manner of verifiers' scaffold (`verifiers.v1.cli.init`), for the tests of the adapter."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    """A sum."""

    answer: int


class SumTask(vf.Task[SumData]):
    """Two rewards of different weight, and a metric."""

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the sum."""
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def is_number(self, trace: vf.Trace) -> float:
        """1 for a number."""
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def num_characters(self, trace: vf.Trace) -> float:
        """Characters of the reply."""
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    """How many tasks to build."""

    num_tasks: int = 5


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Sums `i + 2`."""

    def load(self) -> Iterator[SumTask]:
        """Builds them."""
        for i in range(self.config.num_tasks):
            data = SumData(prompt=f"{i} + 2 = ?", system_prompt="Answer with a number.", answer=i + 2, name=f"sum-{i}")
            yield SumTask(data, self.config.task)


class BoxTask(vf.Task[vf.TaskData]):
    """A task whose reward reads a file of its runtime."""

    @vf.reward
    async def file(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """Is never called."""
        raise AssertionError


class BoxTaskset(vf.Taskset[BoxTask]):
    """One task in a box."""

    def load(self) -> list[BoxTask]:
        """Builds it."""
        return [BoxTask(vf.TaskData(prompt="Write a file."))]
