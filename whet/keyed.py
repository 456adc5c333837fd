# SPDX-License-Identifier: Apache-2.0
"""Keyed randomness: a random draw is a function of its key, not of earlier draws."""

from __future__ import annotations

import hashlib


def key(seed: int, purpose: str, *names: int | str) -> int:
    """The key of a draw, a 63-bit integer: equal arguments give equal keys in every process and on every machine.

    `purpose` separates kinds of draws ("shuffle", "sample", "dropout", ...); `names` identify the draw (step, uid,
    sample, position). Use the key as the seed of a generator for this draw only.
    """
    text = "\x1f".join([str(seed), purpose, *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
