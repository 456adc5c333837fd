# SPDX-License-Identifier: Apache-2.0
"""Models that see images and videos."""

from __future__ import annotations

from typing import Any


def vision_of(thing: Any) -> Any:
    """The vision of a tokenizer or model; None where it reads text."""
    return getattr(getattr(thing, "base_model", thing), "vision", None)
