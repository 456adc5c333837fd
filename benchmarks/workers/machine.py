# SPDX-License-Identifier: Apache-2.0
"""Speeds of the machine: a large matrix product, a large copy, and a model's matrix products without the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.floors import Shape
from benchmarks.workers.turns import Turns


def main() -> None:
    """Measures once a turn."""
    turns = Turns()
    size, rows = turns.settings["gemm_size"], turns.settings["rows"]
    shape = Shape(**turns.settings["shape"])
    turns.ready()
    while True:
        turns.wait()
        products = {str(count): seconds_of(model_products(shape, count)) for count in rows}
        turns.done(
            bfloat16_flops=gemm_flops(size, torch.bfloat16),
            float32_flops=gemm_flops(size, torch.float32),
            bytes_per_second=copy_bytes(turns.settings["copy_bytes"]),
            product_seconds=products,
        )


def seconds_of(call: Callable[[], object], repeats: int = 5) -> float:
    """The median of a few calls, after one that does not count."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def gemm_flops(size: int, dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return float(2 * size**3 / seconds_of(lambda: a @ b))


def copy_bytes(size: int) -> float:
    """Bytes a second, read and written, of a copy much larger than the caches."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return 2 * size / seconds_of(lambda: target.copy_(source))


def model_products(shape: Shape, rows: int) -> Callable[[], None]:
    """The matrix products of one forward pass over `rows` tokens in bfloat16, at their own sizes, nothing between."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    queries = shape.num_attention_heads * shape.head_dim
    layer = [
        (shape.hidden_size, heads * shape.head_dim),
        (queries, shape.hidden_size),
        (shape.hidden_size, 2 * shape.intermediate_size),
        (shape.intermediate_size, shape.hidden_size),
    ]
    sizes = [*layer * shape.num_hidden_layers, (shape.hidden_size, shape.vocab_size)]
    pairs = [
        (torch.randn(rows, k, dtype=torch.bfloat16), torch.randn(out, k, dtype=torch.bfloat16)) for k, out in sizes
    ]

    def multiply() -> None:
        with torch.no_grad():
            for x, weight in pairs:
                F.linear(x, weight)

    return multiply


if __name__ == "__main__":
    main()
