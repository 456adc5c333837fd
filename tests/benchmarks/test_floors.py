# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floors import Machine, Shape, Work, rollout, update
from benchmarks.machine import shape_of

# 1 layer, hidden 4, MLP 6, 2 heads and 1 KV head of 2, vocabulary 10.
TINY = Shape(1, 4, 6, 2, 1, 2, 10)


def test_sizes_of_a_shape() -> None:
    # Query and output 4x4 each, key and value 4x2 each, three MLP matrices 4x6: 16 + 16 + 8 + 8 + 72.
    assert TINY.body_weights == 120
    assert TINY.head_weights == 40
    # Read and written: 4 -> 4 + 2 + 2, 4 -> 4, 4 -> 6 + 6, 6 -> 4.
    assert TINY.activations == 12 + 8 + 16 + 10
    # Scores and values: 2 products of 2 operations, 2 heads of 2, for each token seen.
    assert TINY.attention_flops(3) == 4 * 2 * 2 * 3
    # A key and a value of one KV head of 2, 2 bytes a number.
    assert TINY.cached_bytes == 8


def test_body_and_head_are_all_weights_but_norms(model_folder: Path) -> None:
    from whet.models.load import load_policy

    shape = shape_of(model_folder)
    matrices = sum(p.numel() for p in load_policy(model_folder).parameters() if p.dim() == 2)
    assert shape.body_weights + shape.head_weights == matrices  # the embedding is the head


def test_a_rollout_counts_the_prompt_once_and_feeds_no_last_token() -> None:
    work = rollout(TINY, prompts=[2], lengths=[1, 3])
    # The prompt: 2 tokens through the body, seeing 1 and 2, and the head once. The first answer needs no more.
    prompt = 2 * 120 * 2 + 16 * (1 + 2) + 2 * 40
    # The second feeds its first two tokens, which see 3 and 4.
    answer = 2 * 2 * (120 + 40) + 16 * (3 + 4)
    assert work.flops == prompt + answer
    # Cached: 2 tokens of prompt, then what the fed tokens see. Weights once for each of 3 steps, 2 bytes each.
    assert work.bytes == 8 * (2 + 3 + 4) + 3 * 2 * 160


def test_an_update_counts_forward_and_backward_of_every_row() -> None:
    work = update(TINY, prompts=[2], lengths=[1, 2])
    # Rows of 3 and 4 tokens, 3 of them sampled; backward costs two forwards; row of n: n (n + 1) / 2 pairs.
    assert work.flops == 3 * (2 * (120 * 7 + 40 * 3) + 16 * (6 + 10))
    assert work.bytes == 3 * 2 * (46 * 7 + (4 + 10) * 3) + 7 * 4 * 160


@pytest.mark.parametrize(("flops", "bytes_", "seconds"), [(200.0, 10.0, 2.0), (200.0, 90.0, 3.0)])
def test_the_longer_of_arithmetic_and_traffic_is_the_floor(flops: float, bytes_: float, seconds: float) -> None:
    assert Work(flops, bytes_).seconds(Machine(100.0, 50.0, 30.0)) == seconds
