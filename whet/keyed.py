# SPDX-License-Identifier: Apache-2.0
"""Randomness without state: a draw is a function of what it is for, never of what was drawn before it."""

from __future__ import annotations

import hashlib


def key(seed: int, purpose: str, *names: int | str) -> int:
    """A 63-bit integer that names one draw: equal names give equal keys in every process and on every machine.

    `purpose` keeps draws of different kinds apart ("shuffle", "sample", "dropout", ...); `names` say which one it is
    (step, uid, sample, position). Use it as the seed of a generator that is thrown away after the draw.
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
