# SPDX-License-Identifier: Apache-2.0
"""Weights from a training engine to a rollout engine of the same process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from whet.rollout.protocol import RolloutEngine, SharesModule
from whet.weight_sync.buckets import Weights, in_dtype
from whet.weight_sync.digest import Digest


def attach(rollout: SharesModule, module: PreTrainedModel, weights: Weights, version: int) -> str:
    """Lets the rollout sample from `module` itself, and returns the digest of its `weights`."""
    digest = Digest()
    for name, weight in weights:
        digest.add(name, weight)
    rollout.attach(module, version)
    return str(digest)


def copy(rollout: RolloutEngine, weights: Weights, version: int, dtype: torch.dtype) -> str:
    """Fills the rollout's own module, one weight at a time, and returns the digest of what it was filled with."""
    digest = Digest()

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            converted = in_dtype(weight, dtype)
            digest.add(name, converted)
            yield name, converted

    rollout.load(counted(), version)
    return str(digest)
