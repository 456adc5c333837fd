# SPDX-License-Identifier: Apache-2.0
"""Errors of devices and of the models that play on them."""

from __future__ import annotations

from whet.errors import WhetError


class DeviceError(WhetError, RuntimeError):
    """A device that is absent, lost or too slow; the message names it, and what to change."""


class BackendError(WhetError, RuntimeError):
    """A model server that cannot be reached, refuses a request, or answers in another form."""


class BackendDeadlineError(BackendError, TimeoutError):
    """A model server that took too long."""
