# SPDX-License-Identifier: Apache-2.0
"""Keyed randomness: a random draw depends on its key, not on earlier draws."""

from __future__ import annotations

import hashlib


def key(seed: int, purpose: str, *names: int | str) -> int:
    """Computes the key of a random draw, a 63-bit integer. Equal arguments give equal keys in every process and
    machine.

    `purpose` separates kinds of draws ("shuffle", "sample", "dropout", ...); `names` identify the draw (step, uid,
    sample, position). Use the key as the seed of a generator for this draw only."""
    text = "\x1f".join([str(seed), purpose, *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
