# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of tensors in a block: each storage that an operator creates, until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of storages created inside the block, current and peak, by `kind`.

    Works on real tensors, and on fake ones inside a FakeTensorMode. It does not count temporary memory of a single
    operator.
    """

    def __init__(self, kind: Callable[[torch.Tensor], str] = lambda tensor: "tensors") -> None:
        super().__init__()
        self._kind = kind
        self._alive: dict[int, tuple[str, int]] = {}
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()  # bytes by kind at the time of the largest total

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operator and counts the storages that it created."""
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # the most frequent call
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        made = function(*args, **(kwargs or {}))
        if not isinstance(made, torch.Tensor | tuple | list):
            return made
        new = {each.untyped_storage()._cdata: each for each in _tensors(made)}
        new = {key: each for key, each in new.items() if key not in self._alive}
        if new:  # remove views of tensors from before the block
            for each in _tensors((args, kwargs)):
                new.pop(each.untyped_storage()._cdata, None)
            for key, each in new.items():
                self._count(key, each)
        return made

    def _count(self, key: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        kind, size = self._kind(tensor), storage.nbytes()
        self._alive[key] = kind, size
        self.now[kind] += size
        weakref.finalize(storage, self._forget, key)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def _forget(self, key: int) -> None:
        kind, size = self._alive.pop(key)
        self.now[kind] -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
