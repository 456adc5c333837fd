# SPDX-License-Identifier: Apache-2.0
"""Training ranks of any mesh whose weights are changed and sent, in a module that worker processes import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import engine_conformance as suite

from whet.controller.dispatch import register
from whet.kernels.compact_adamw import own_part
from whet.weight_sync.buckets import HEADER_BYTES
from whet.weight_sync.routes import Route, Way

ROOM = 2**14  # of a narrow bucket, which most weights do not fit into


class Sender(suite.Probe):
    """Counts the bytes that it sends, in buckets of any size."""

    is_narrow, buckets, sent = False, 0, 0

    @register()
    def narrow(self, is_narrow: bool) -> None:
        """Sends in narrow buckets from the next link on, or in wide ones."""
        self.is_narrow = is_narrow

    @register()
    def change_some(self) -> None:
        """Changes every 40th element of this rank's part of each weight, in bfloat16 too."""
        engine: Any = self.engine
        with torch.no_grad():
            for weight in engine.model.parameters():
                own = own_part(weight)
                own += (torch.arange(own.numel()) % 40 == 0).view(own.shape)

    @register()
    def counts(self) -> tuple[int, int]:
        """Buckets and bytes behind their headers since the last call."""
        found, self.buckets, self.sent = (self.buckets, self.sent), 0, 0
        return found

    def open_outlets(self, routes: Sequence[Route], deadline_seconds: float) -> dict[Way, str]:
        """Opens ends whose buckets are counted."""
        found = super().open_outlets(routes, deadline_seconds)
        for outlet in self._outlets.values():
            self._count(outlet)
        return found

    def _count(self, outlet: Any) -> None:
        plain = outlet.post
        if self.is_narrow:
            outlet._slots = outlet._slots[:, : HEADER_BYTES + ROOM]

        def post(used: int) -> None:
            self.buckets, self.sent = self.buckets + 1, self.sent + used - HEADER_BYTES
            plain(used)

        outlet.post = post
