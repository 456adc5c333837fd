# SPDX-License-Identifier: Apache-2.0
"""Formats sizes, counts and durations."""

from __future__ import annotations


def size(count: float) -> str:
    """Formats bytes: 1.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"


def count(number: int) -> str:
    """Formats a count: 0.85 M."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def duration(seconds: float) -> str:
    """Formats a duration: 3.5 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, scale, enough in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < enough:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def plural(number: int, one: str, several: str = "") -> str:
    """Formats a number with its noun: 1 step, 2 steps."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
