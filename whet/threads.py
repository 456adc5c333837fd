# SPDX-License-Identifier: Apache-2.0
"""Threads of torch that wait for one another: how long they spin before they give the processor back."""

from __future__ import annotations

import os

# GNU's OpenMP spins 300,000 rounds, which is milliseconds, and Intel's 200 ms: on a machine with other work each wait
# then holds a processor that the awaited thread needs. 10,000 rounds are as fast on an idle machine; with 1,000 a
# rollout of a small model takes a third longer (LOG.md).
SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
POLICY = "OMP_WAIT_POLICY"


def yield_soon() -> None:
    """Shortens the spinning of this process and of those that it starts, unless the user has set it.

    OpenMP reads it when torch is loaded: to be called before that."""
    if not os.environ.keys() & {POLICY, *SPINS}:
        os.environ.update(SPINS)


def spinning() -> str:
    """Returns what is set, as a person writes it."""
    return ", ".join(f"{name}={os.environ[name]}" for name in (POLICY, *SPINS) if name in os.environ)
