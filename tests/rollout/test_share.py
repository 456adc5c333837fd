# SPDX-License-Identifier: Apache-2.0
"""Ranks that take requests from one list: all are taken once, and no rank takes what others should have."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from whet.models.load import load_policy
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams
from whet.rollout.share import Share, blocks_of, everything


def requests_of(*prompts: tuple[int, int, int]) -> list[Request]:
    """For each (tokens, samples, limit) so many equal requests."""
    made = [
        Request((number,) * tokens, SamplingParams(limit), key=0)
        for number, (tokens, samples, limit) in enumerate(prompts)
        for _ in range(samples)
    ]
    return made


def test_blocks_keep_prompts_whole_unless_too_few_would_be_left() -> None:
    # 24 rows over 2 ranks: blocks of at most 24 // 8 = 3, the longest possible first, else as they came.
    made = requests_of((4, 3, 10), (5, 3, 10), (4, 3, 10), (2, 3, 50), (4, 12, 10))
    assert blocks_of(made, 2) == [
        *([9, 10, 11], [3, 4, 5]),
        *([0, 1, 2], [6, 7, 8]),
        *([12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]),
    ]
    assert blocks_of([], 2) == []
    assert blocks_of(requests_of((1, 2, 1)), 4) == [[0], [1]]


def test_all_start_at_once_where_they_fit() -> None:
    made = requests_of(*[(3, 8, 10)] * 5)  # 40 rows in blocks of 40 // 8 = 5 and what is left of 8
    counter = itertools.count()
    one, two = (Share(made, 2, lambda: next(counter)) for _ in range(2))
    first = one(0, 99)
    assert first == list(range(21)) and one(21, 99) == [] and one(20, 99) == []
    assert two(0, 99) == list(range(21, 40))
    assert one(0, 99) == two(0, 99) == []


def test_a_rank_whose_answers_are_short_takes_more() -> None:
    made = requests_of(*[(3, 4, 10)] * 20)  # 80 rows, of which a rank has room for 12
    counter = itertools.count()
    one, two = (Share(made, 2, lambda: next(counter)) for _ in range(2))
    assert one(0, 12) == list(range(12)) and two(0, 12) == list(range(12, 24))
    assert one(12, 12) == [] and one(9, 12) == list(range(24, 28))
    taken = [*one(0, 12), *one(8, 12), *one(3, 12)]
    assert taken == list(range(28, 28 + 12 + 4 + 12))
    assert two(12, 12) == [] and two(1, 12) == list(range(56, 68)) and two(0, 12) == list(range(68, 80))
    assert one(0, 12) == two(5, 12) == []


def test_alone_everything_is_taken_at_once() -> None:
    claim = everything(5)
    assert list(claim(0, 2)) == [0, 1, 2, 3, 4] and list(claim(0, 2)) == []


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder).eval()


@pytest.mark.parametrize("make", [NativeEngine, HFEngine, lambda: NativeEngine(max_batch_size=5)])
def test_answers_are_the_same_whoever_gives_them(
    make: type[NativeEngine] | type[HFEngine], model: PreTrainedModel
) -> None:
    """Three engines at once, in whatever order they come to the counter, against one alone: to the bit."""
    made = suite.requests(groups=14, n=4, longest=30)
    alone = NativeEngine()
    alone.attach(model, 0)
    expected = alone.generate(made)
    counter = itertools.count()

    def answer() -> dict[int, Completion]:
        engine = make()
        engine.adopt(model)
        return engine.answer(made, Share(made, 3, lambda: next(counter)))

    with ThreadPoolExecutor(3) as threads:
        parts = [each.result() for each in [threads.submit(answer) for _ in range(3)]]
    assert sorted(itertools.chain(*parts)) == list(range(len(made)))
    merged = parts[0] | parts[1] | parts[2]
    for index, completion in enumerate(expected):
        if isinstance(make(), HFEngine):
            assert merged[index].token_ids == completion.token_ids
        else:
            assert merged[index] == replace(completion, policy_version=-1)


def test_requests_that_come_later_are_the_same_answers(model: PreTrainedModel) -> None:
    """One by one, samples of a prompt apart from each other: prompts are prefilled again where they have to be."""
    made = suite.requests(groups=5, n=4, longest=30)
    engine = NativeEngine()
    engine.attach(model, 0)
    expected = engine.generate(made)
    order = iter([index for sample in range(4) for index in range(sample, len(made), 4)])

    def one_more(unfinished: int, most: int) -> list[int]:
        return [index] if unfinished < 7 and (index := next(order, None)) is not None else []

    done = engine.answer(made, one_more)
    assert [done[index] for index in range(len(made))] == expected
    cache = engine._require_cache()
    assert cache.num_free == cache.num_blocks
