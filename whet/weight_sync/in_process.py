# SPDX-License-Identifier: Apache-2.0
"""Weight sync from a training engine to a rollout engine of the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from whet.rollout.protocol import SharesModule
from whet.weight_sync.buckets import Digest, Weights, in_dtype


def attach(rollout: SharesModule, module: PreTrainedModel, weights: Weights, version: int) -> str:
    """Makes the rollout sample from `module` itself.  Returns the digest of its `weights`."""
    digest = Digest()
    for name, weight in weights:
        digest.add(name, weight)
    rollout.attach(module, version)
    return str(digest)


def copy(load: Callable[[Weights, int], None], weights: Weights, version: int, dtype: torch.dtype) -> str:
    """Copies weights into the rollout by its `load`, one at a time.  Returns the digest of the copied weights."""
    digest = Digest()

    def converted_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            converted = in_dtype(weight, dtype)
            digest.add(name, converted)
            yield name, converted

    load(converted_weights(), version)
    return str(digest)
