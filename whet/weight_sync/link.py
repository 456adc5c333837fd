# SPDX-License-Identifier: Apache-2.0
"""The two ends of a link that carries buckets: one sender, one receiver or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from whet.errors import DeadlineError, WeightSyncError

BUCKET_BYTES = 2**26
SLOTS = 2  # buckets that the sender has: while one is on its way it fills the other


class LinkClosedError(WeightSyncError):
    """The other side let go of the link: it knows why."""


class End(ABC):
    """An end of a link; no wait for the other one is longer than `deadline_seconds`."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds

    @abstractmethod
    def finish(self) -> None:
        """Settles that all that was posted is verified: a receiver says so, the sender waits until all of them have.
        Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the link. May be called twice."""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Raises DeadlineError or LinkClosedError for what goes wrong on the way to the other side."""
        try:
            yield
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # gloo has one error for all
            if isinstance(error, TimeoutError) or "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise DeadlineError(
                    f"{doing}: nothing came within {self.deadline_seconds:g} s; if it may take longer, raise "
                    f"cluster.deadline_seconds ({error})"
                ) from error
            raise LinkClosedError(f"{doing}: the other side is gone ({error}); its own error says why") from error


class Outlet(End):
    """The sender's end."""

    address: str  # where receivers find it

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """Bytes to write the next bucket into. Waits until nobody reads what was in them.
        Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def post(self, used: int) -> None:
        """Hands over the first `used` bytes of the buffer."""


class Inlet(End):
    """A receiver's end."""

    @abstractmethod
    def bucket(self) -> torch.Tensor:
        """The bytes of the next bucket. Waits for it.  Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def release(self) -> None:
        """The bucket was read, and may be overwritten."""
