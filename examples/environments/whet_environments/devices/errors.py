# SPDX-License-Identifier: Apache-2.0
"""Errors of devices and of the models that play on them."""

from __future__ import annotations

from importlib.util import find_spec

from whet.errors import WhetError

INSTALL = "pip install './examples/environments[devices]'"


class DeviceError(WhetError, RuntimeError):
    """A device that is absent, lost or too slow; the message names it, and the change that helps."""


def check_pillow() -> None:
    """Checks that Pillow is there.  Raises: DeviceError."""
    if find_spec("PIL") is None:
        raise DeviceError("package Pillow", "not installed", change=f"run {INSTALL}")


class BackendError(WhetError, RuntimeError):
    """A model server that cannot be reached, refuses a request, or answers in another form."""


class BackendDeadlineError(BackendError, TimeoutError):
    """A model server that took too long."""
