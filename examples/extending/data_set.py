# SPDX-License-Identifier: Apache-2.0
"""A data set of your own: whet train ... data.train_files=examples/extending/data_set.py:Products, or with options
'data.train_files=[{path:"examples/extending/data_set.py:Products",options:{digits:1}}]'.

A function or class whose result has rows (mappings) or `whet.types.Prompt`s: a sequence, an iterable that ends, or an
object with `__len__` and `__getitem__`. The run passes parameters called `seed`, `tokenizer` or `split` ("train" or
"val"); all others are options. The run reads the rows once, before the first step."""

from __future__ import annotations

import random


class Products:
    """`count` products of two numbers; training and validation draw different numbers."""

    def __init__(self, seed: int, split: str, *, digits: int = 2, count: int = 1000) -> None:
        draws = random.Random(f"{seed} {split}")
        highest = 10**digits - 1
        self.factors = [(draws.randint(1, highest), draws.randint(1, highest)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, index: int) -> dict[str, object]:
        a, b = self.factors[index]
        return {"prompt": f"{a}*{b}=", "answer": str(a * b), "size": a * b}
