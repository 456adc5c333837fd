# SPDX-License-Identifier: Apache-2.0
"""Workers whose weights can be looked at: in a module of their own, as worker processes import them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.batch import Batch
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.engines.role import RoleSettings
from whet.models.outputs import ForwardSettings, model_outputs
from whet.roles.rollout_worker import RolloutWorker
from whet.roles.workers import TrainWorker
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Event, Request
from whet.weight_sync.buckets import HEADER_BYTES, Outlet
from whet.weight_sync.routes import RankSite, Route, Way


def log_probs(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The module's own forward over the whole batch."""
    settings = ForwardSettings(packing=False, dtype=next(module.parameters()).dtype)
    with torch.no_grad():
        return model_outputs(module.eval(), batch.tensors(), frozenset({"log_probs"}), settings)["log_probs"]


class Sharded:
    """An engine that keeps a stretch of every weight and makes whole ones with the other ranks, one at a time."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.group, self.model = group, model
        rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.dp_rank, self.dp_size, self.is_reporting = rank, self.size, True
        self.shards: dict[str, tuple[torch.Size, torch.Tensor]] = {}
        for name, weight in model.named_parameters():
            flat = nn.functional.pad(weight.detach().flatten(), (0, -weight.numel() % self.size))
            self.shards[name] = weight.shape, flat.chunk(self.size)[rank].clone()
            weight.detach().fill_(float("nan"))  # whoever read it would know

    def whole_module(self) -> None:
        return None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (shape, shard) in self.shards.items():
            parts = [torch.empty_like(shard) for _ in range(self.size)]
            if self.group is None:
                parts = [shard]
            else:
                dist.all_gather(parts, shard, group=self.group)
            yield name, torch.cat(parts)[: shape.numel()].view(shape)

    def change(self, version: int) -> None:
        """An update."""
        for _, shard in self.shards.values():
            shard.mul_(1 + version / 64)


class Trainer(TrainWorker):
    """An actor of either kind, `sharded` or not."""

    posted = 0

    def __init__(self, placement: Placement, settings: RoleSettings, sharded: bool) -> None:
        super().__init__(placement, settings)
        if sharded:
            self.engine: Any = Sharded(self.engine.model, self.process_group)

    @register(Dispatch.ONE_TO_ALL)
    def change(self, version: int) -> None:
        """An update: every weight becomes 1 + version / 64 times itself."""
        if isinstance(self.engine, Sharded):
            self.engine.change(version)
            return
        with torch.no_grad():
            for weight in self.engine.model.parameters():
                weight.mul_(1 + version / 64)

    @register(Dispatch.ONE_TO_ALL)
    def change_some(self, version: int) -> None:
        """An update of every 40th element of all weights; it changes their bits in bfloat16 too."""
        with torch.no_grad():
            for weight in self.engine.model.parameters():
                weight.view(-1)[version::40] += 1.0

    @register(Dispatch.ONE_TO_ALL)
    def sent_bytes(self) -> int:
        """The bytes behind the headers of all buckets since the last call."""
        count, self.posted = self.posted, 0
        return count

    def open_outlets(self, routes: Sequence[Route], deadline_seconds: float) -> dict[Way, str]:
        """Counts the bytes sent from now on."""
        found = super().open_outlets(routes, deadline_seconds)
        for outlet in self._outlets.values():
            self._count(outlet)
        return found

    def _count(self, outlet: Outlet) -> None:
        plain = outlet.post

        def post(used: int) -> None:
            self.posted += used - HEADER_BYTES
            plain(used)

        outlet.post = post  # type: ignore[method-assign]

    @register(Dispatch.ONE_TO_ALL)
    def break_off(self) -> None:
        """From now on the weights break off in the middle."""
        weights = list(self.engine.named_weights())

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights[:5]
            raise ValueError("no such shard")

        self.engine.named_weights = broken

    @register(Dispatch.ONE_TO_ALL)
    def slow_down(self, seconds: float) -> None:
        """Makes every weight take so long from now on."""
        plain = self.engine.named_weights

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            for each in plain():
                time.sleep(seconds)
                yield each

        self.engine.named_weights = slow

    @register(Dispatch.ONE_TO_ALL)
    def damage(self) -> None:
        """From now on a bit of every bucket changes on its way."""
        for outlet in self._outlets.values():
            self._flip(outlet)

    def _flip(self, outlet: Outlet) -> None:
        plain_buffer, plain_post, last = outlet.buffer, outlet.post, list[torch.Tensor]()

        def buffer() -> torch.Tensor:
            last[:] = [plain_buffer()]
            return last[0]

        def post(used: int) -> None:
            last[0][used - 1] ^= 1
            plain_post(used)

        outlet.buffer, outlet.post = buffer, post  # type: ignore[method-assign]

    @register(Dispatch.ONE_TO_ALL)
    def whole(self) -> dict[str, torch.Tensor]:
        """All weights."""
        return {name: weight.clone() for name, weight in self.engine.named_weights()}


class Rollout(RolloutWorker):
    """Reports the outputs of its module."""

    machines: tuple[str, ...] = ()
    count = 0

    @register(Dispatch.ONE_TO_ALL)
    def move_to(self, machines: tuple[str, ...]) -> None:
        """From now on the ranks say that they run on these machines; an empty name is the truth."""
        self.machines = machines

    def site(self) -> RankSite:
        """Where this rank says that it runs."""
        machine = self.machines[self.rank] if self.machines else ""
        return replace(super().site(), machine=machine) if machine else super().site()

    @register(Dispatch.ONE_TO_ALL)
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """The forward of the module that it samples from."""
        assert isinstance(self.engine, NativeEngine)
        return log_probs(self.engine.policy.require_whole(), batch)

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the module that it samples from."""
        assert isinstance(self.engine, NativeEngine)
        return {name: weight.detach().clone() for name, weight in self.engine.policy.require_whole().named_parameters()}

    @register(Dispatch.ONE_TO_ALL)
    def delay(self, seconds: Sequence[float]) -> None:
        """Makes each rank this much slower whenever it is asked for events."""
        plain = self.engine.poll

        def late(timeout_seconds: float) -> list[Event]:
            time.sleep(seconds[self.rank])
            return plain(timeout_seconds)

        self.engine.poll = late  # type: ignore[method-assign]

    def serve(
        self, requests: Sequence[Request], aborted: Sequence[str], timeout_seconds: float, gathers: bool
    ) -> list[Event]:
        """Counts the requests."""
        self.count += len(requests)
        return super().serve(requests, aborted, timeout_seconds, gathers)

    @register(Dispatch.ONE_TO_ALL)
    def taken(self) -> int:
        """The number of requests that this rank was given since the last call."""
        count, self.count = self.count, 0
        return count
