# SPDX-License-Identifier: Apache-2.0
"""The two ends of a link that carries buckets: one sender, and one or several receivers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from whet.errors import DeadlineError, WeightSyncError

BUCKET_BYTES = 2**26
SLOTS = 2  # buckets of the sender: it fills one while the other is being sent


class LinkClosedError(WeightSyncError):
    """The other side closed the link; its own error has the reason."""


@dataclass(frozen=True)
class Broken:
    """A broken link, given instead of the digest. As an error it would end all ranks, and one that is lost breaks the
    links of the others."""

    error: DeadlineError | LinkClosedError


class End(ABC):
    """An end of a link; each wait for the other end is limited to `deadline_seconds`."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds

    @abstractmethod
    def finish(self) -> None:
        """Ends a version: each receiver confirms that its weights are verified, the sender waits for all of them.
        Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def close(self) -> None:
        """Closes the link. May be called twice."""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Converts errors of the connection to DeadlineError or LinkClosedError; `doing` names the wait in them."""
        try:
            yield
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # gloo raises RuntimeError for everything
            if isinstance(error, TimeoutError) or "timed out" in str(error).lower() or "timeout" in str(error).lower():
                found = f"nothing arrived within {self.deadline_seconds:g} s ({error})"
                raise DeadlineError(doing, found, "", "raise cluster.deadline_seconds if it may take longer") from error
            raise LinkClosedError(doing, f"the other side ended ({error})", "", "see its own error") from error


class Outlet(End):
    """The sender's end."""

    address: str  # to which receivers connect

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """The memory for the next bucket. Waits until its last content has been read.
        Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def post(self, used: int) -> None:
        """Sends the first `used` bytes of the buffer."""


class Inlet(End):
    """A receiver's end."""

    @abstractmethod
    def bucket(self) -> torch.Tensor:
        """Waits for the next bucket.  Returns its bytes.  Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def release(self) -> None:
        """Allows the sender to overwrite the bucket."""
