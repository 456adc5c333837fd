# SPDX-License-Identifier: Apache-2.0
"""Waiting threads of torch: how long they spin before they release the processor."""

from __future__ import annotations

import os

# GNU's OpenMP spins 300,000 rounds, which are milliseconds, and Intel's 200 ms: on a machine with other programs a
# waiting thread then keeps a processor that the awaited thread needs. 10,000 rounds are as fast on an idle machine;
# with 1,000 a rollout of a small model takes a third longer (LOG.md).
SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
POLICY = "OMP_WAIT_POLICY"


def yield_soon() -> None:
    """Shortens the spinning of this process and its children, unless the user has set it.

    Call it before torch is loaded, since OpenMP reads the settings then."""
    if not os.environ.keys() & {POLICY, *SPINS}:
        os.environ.update(SPINS)


def spinning() -> str:
    """Returns the settings of spinning in the environment, as NAME=VALUE."""
    return ", ".join(f"{name}={os.environ[name]}" for name in (POLICY, *SPINS) if name in os.environ)
