# SPDX-License-Identifier: Apache-2.0
"""Routes of weights: who sends them to whom, and how."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from whet.weight_sync.collective import CollectiveInlet, CollectiveOutlet, spans
from whet.weight_sync.link import Inlet, Outlet
from whet.weight_sync.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

Way = Literal["memory", "broadcast"]


@dataclass(frozen=True)
class Site:
    """The place of a rank."""

    machine: str  # equal where processes can share memory
    address: str  # under which other machines reach it
    accelerator: str | None = None  # what tells the rank's device from all others

    @classmethod
    def here(cls, address: str, device: torch.device) -> Site:
        """The site of a worker that computes on `device` and that others reach at `address`."""
        folder = Path(tempfile.gettempdir()).stat()  # containers of one machine that share no files share no sockets
        accelerator = str(torch.get_device_module(device).get_device_properties(device).uuid) if spans(device) else None
        return cls(f"{socket.gethostname()} {folder.st_dev} {folder.st_ino}", address, accelerator)


@dataclass(frozen=True)
class Route:
    """The way of the weights to one rank of the rollout; `address` is known once the sender has opened its end."""

    sender: int  # rank
    way: Way
    rank: int  # in the broadcast, whose rank 0 is the sender
    size: int
    on_accelerator: bool
    address: str = ""


def plan(senders: Sequence[Site], receivers: Sequence[Site]) -> list[Route]:
    """A route for each receiver.

    Between accelerators that are all different: one broadcast from rank 0. Else from memory, where a training rank is
    on the receiver's machine (the first one writes); and to all other receivers one broadcast from rank 0.
    """
    devices = [senders[0].accelerator, *(receiver.accelerator for receiver in receivers)]
    on_accelerator = None not in devices and len(set(devices)) == len(devices)
    first_on = {sender.machine: rank for rank, sender in reversed(list(enumerate(senders)))}
    is_near = [receiver.machine in first_on and not on_accelerator for receiver in receivers]
    size, routes, rank = 1 + is_near.count(False), list[Route](), 0
    for receiver, near in zip(receivers, is_near, strict=True):
        if near:
            routes.append(Route(first_on[receiver.machine], "memory", 0, 0, False))
        else:
            rank += 1
            routes.append(Route(0, "broadcast", rank, size, on_accelerator))
    return routes


def with_addresses(routes: Sequence[Route], opened: Sequence[dict[Way, str]]) -> list[Route]:
    """The routes with the addresses of what the training ranks opened."""
    return [replace(route, address=opened[route.sender][route.way]) for route in routes]


def open_outlets(
    routes: Sequence[Route], sender: int, address: str, deadline_seconds: float, device: torch.device
) -> dict[Way, Outlet]:
    """The ends of a training rank that computes on `device`; a broadcast is found at `address`."""
    own = [route for route in routes if route.sender == sender]
    near, far = ([route for route in own if route.way == way] for way in ("memory", "broadcast"))
    outlets: dict[Way, Outlet] = {}
    if near:
        outlets["memory"] = SharedMemoryOutlet(len(near), deadline_seconds)
    if far:
        where = device if far[0].on_accelerator else None
        outlets["broadcast"] = CollectiveOutlet(len(far), address, deadline_seconds, where)
    return outlets


def open_inlet(route: Route, deadline_seconds: float, device: torch.device) -> Inlet:
    """The end of a receiver that computes on `device`."""
    if route.way == "memory":
        return SharedMemoryInlet(route.address, deadline_seconds)
    where = device if route.on_accelerator else None
    return CollectiveInlet(route.address, route.rank, route.size, deadline_seconds, where)
