# SPDX-License-Identifier: Apache-2.0
"""The training side of a link to rollout ranks in other processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.engines.protocol import TrainEngine
from whet.weight_sync.buckets import send
from whet.weight_sync.link import Outlet
from whet.weight_sync.routes import Route, Site, Way, open_outlets


class WeightSender(Worker):
    """A worker whose engine has weights that a rollout may ask for."""

    engine: TrainEngine

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._outlets: dict[Way, Outlet] = {}

    @register(Dispatch.ONE_TO_ALL)
    def site(self) -> Site:
        """Where this rank runs."""
        return Site.here(self.address, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def open_outlets(self, routes: Sequence[Route], deadline_seconds: float) -> dict[Way, str]:
        """Opens this rank's ends of links, and returns their addresses."""
        self._outlets = open_outlets(routes, self.rank, self.address, deadline_seconds, self.device)
        return {way: outlet.address for way, outlet in self._outlets.items()}

    @register(Dispatch.ONE_TO_ALL)
    def publish(self, version: int, dtype: str) -> str | None:
        """Sends the weights of `version` in the rollout's dtype; every rank takes part, as making them whole may need
        it. Returns their digest; None on a rank that sends to nobody.

        Raises: WeightSyncError; DeadlineError.
        """
        try:
            return send(self.engine.named_weights(), version, list(self._outlets.values()), vars(torch)[dtype])
        except BaseException:
            self.close()  # whoever waits for this rank hears of it
            raise

    def close(self) -> None:
        """Lets go of the links."""
        for outlet in self._outlets.values():
            outlet.close()
