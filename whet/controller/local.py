# SPDX-License-Identifier: Apache-2.0
"""Workers in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from whet.controller.dispatch import Arguments
from whet.controller.hosted import BUILD, Hosted
from whet.controller.worker import Layout, WorkerSpec
from whet.controller.worker_group import Reply, closed_error
from whet.errors import WhetError, WorkerError


class SameProcess:
    """The transport to workers in this process: a call is a call."""

    def __init__(self) -> None:
        self.hosted = Hosted()
        self._closed_by: WhetError | None = None

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[Layout]]:
        """Implements `RemoteTransport.build`."""
        try:
            return {spec.role: [self.send(spec.role, BUILD, {0: spec})[0].result()] for spec in specs}
        except BaseException:
            self.close()
            raise

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments | WorkerSpec]) -> dict[int, Reply]:
        """Implements `Transport.send`."""
        if self._closed_by is not None:
            raise closed_error(role, method, self._closed_by)
        return {rank: self._reply(role, method, given) for rank, given in arguments.items()}

    def _reply(self, role: str, method: str, given: Arguments | WorkerSpec) -> Reply:
        reply: Reply = Future()
        try:
            reply.set_result(self.hosted.call(role, method, given))
        except Exception as error:
            described = self.hosted.describe(error, role, method)
            self.abort(described)
            reply.set_exception(described)
        return reply

    def abort(self, error: WhetError) -> None:
        """Implements `Transport.abort`."""
        self._closed_by = self._closed_by or error

    def close(self) -> None:
        """Implements `Transport.close`."""
        self._closed_by = self._closed_by or WorkerError("close() was called")
        self.hosted.close()
