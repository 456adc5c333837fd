# SPDX-License-Identifier: Apache-2.0
"""Freezes weights, which are selected by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from whet.errors import ModelError
from whet.models.encoders.load import encoders_of

log = logging.getLogger(__name__)
TOWER = "vision"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes every weight whose name matches a pattern (`*`, `?` and `[0-3]`, as in a shell). The pattern `vision`
    stands for the towers of a model with media, and the layers that connect them to the text.

    A tied weight has two names; a match of either freezes it.  Raises: ModelError for a pattern without a match, and if
    no trainable weight would remain."""
    if not patterns:
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [name for name in named if fnmatchcase(name, pattern)]
        if pattern == TOWER and (encoders := encoders_of(model)) is not None:
            matched = encoders.tower_weights(model)
        if not matched:
            near = get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            found = f"no weight of {type(model).__name__} matches {pattern!r}"
            expected = f"names or patterns such as {', '.join(near)} (* stands for any text, [0-3] for one character)"
            raise ModelError("model.freeze", found, expected)
        for name in matched:
            named[name].requires_grad_(False)
            if others := [other for other, weight in named.items() if weight is named[name] and other not in matched]:
                log.info("model.freeze: %s is tied to %s, which is frozen with it", name, ", ".join(others))
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ModelError("model.freeze", list(patterns), "patterns that leave a weight to train: these freeze all")
    counts = {parameter: parameter.numel() for parameter in model.parameters()}
    kept = sum(count for parameter, count in counts.items() if parameter.requires_grad)
    log.info("model.freeze: %.1f of %.1f M weights are trained", kept / 1e6, sum(counts.values()) / 1e6)
