# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as a card: a row of a product has the same bits wherever it lies in its tile.

numpy's products depend on the place of a row, and take bfloat16 for whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products from now on sum in float64, in which bfloat16 products are exact."""

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        sums = np.matmul(wide(a), wide(b)) + d.data
        return interpreter.TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
