# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floors import Machine, Reading, Shape, Work, rollout, update
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


def test_a_model_reads_a_prompt_once_and_no_last_token() -> None:
    reading = Reading(prompts=[2], lengths=[1, 3])
    # The prompt's tokens see 1 and 2. The first answer is one token; of the second two are read, which see 3 and 4.
    assert list(reading.contexts) == [1, 2, 3, 4]
    assert reading.tokens == 4
    assert reading.logits == 3  # after the prompt, and after the two
    assert reading.flops(TINY) == 2 * (120 * 4 + 40 * 3) + 16 * (1 + 2 + 3 + 4)
    several = Reading(prompts=[5, 1], lengths=[2, 7, 1, 1])
    assert several.tokens == len(list(several.contexts)) == 6 + 1 + 6


def test_a_rollout_reads_weights_every_step_and_the_cache_every_token() -> None:
    work = rollout(TINY, Reading(prompts=[2], lengths=[1, 3]))
    assert work.flops == Reading([2], [1, 3]).flops(TINY)
    # The prompt's 2 tokens written, then what the two tokens see; weights in each of 3 steps, 2 bytes each.
    assert work.bytes == 8 * (2 + 3 + 4) + 3 * 2 * 160


def test_an_update_is_three_forwards_and_the_optimizer() -> None:
    work = update(TINY, Reading(prompts=[2], lengths=[1, 3]))
    assert work.flops == 3 * Reading([2], [1, 3]).flops(TINY)
    assert work.bytes == 3 * 2 * (46 * 4 + (4 + 10) * 3) + 7 * 4 * 160


@pytest.mark.parametrize(("flops", "bytes_", "seconds"), [(200.0, 10.0, 2.0), (200.0, 90.0, 3.0)])
def test_the_longer_of_arithmetic_and_traffic_is_the_floor(flops: float, bytes_: float, seconds: float) -> None:
    assert Work(flops, bytes_).seconds(Machine(100.0, 30.0)) == seconds
