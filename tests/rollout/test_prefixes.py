# SPDX-License-Identifier: Apache-2.0
"""Turns of one episode share their keys and values in the native engine, and nothing else of a response changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from whet.models.load import load_policy
from whet.rollout.native.cache import BlockCache, Prefixes
from whet.rollout.native.engine import NativeEngine, Stretch
from whet.rollout.protocol import Completion, Request, SamplingParams, generate

READ = (5, 6, 7)  # the ids that an environment adds after each turn


class Counting(NativeEngine):
    """Counts the tokens that it computes other than one by one."""

    read = 0

    def _compute_batch(self, stretches: list[Stretch]) -> torch.Tensor:  # type: ignore[override]
        self.read += sum(len(stretch.token_ids) for stretch in stretches)
        return super()._compute_batch(stretches)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder).eval()


def play(
    engine: NativeEngine, *, keeps: bool, episodes: int = 1, turns: int = 3, length: int = 24
) -> list[list[Completion]]:
    """The turns of episodes that begin with different ids and go on together."""
    contexts = [(3 + number,) * 20 for number in range(episodes)]
    played: list[list[Completion]] = []
    for turn in range(turns):
        params = SamplingParams(max_new_tokens=length)
        made = [
            Request(f"{number}:{turn}", context, params, 100 * number + turn, keeps_cache=keeps)
            for number, context in enumerate(contexts)
        ]
        played.append(generate(engine, made))
        contexts = [
            context + completion.token_ids + READ for context, completion in zip(contexts, played[-1], strict=True)
        ]
    return played


def opened(model: PreTrainedModel, **options: int) -> Counting:
    engine = Counting(**options)  # type: ignore[arg-type]
    engine.attach(model, 0)
    return engine


def test_a_turn_reads_only_what_is_new(model: PreTrainedModel) -> None:
    """20 ids, then 24 sampled and 3 read a turn, unless a stop came: contexts of 20, 47 and 74 ids. Of those before,
    43 and 70 are computed, the last of them in a block that is not full: 4 ids are left to read each time."""
    kept, again = opened(model), opened(model)
    found, expected = play(kept, keeps=True), play(again, keeps=False)
    assert found == expected
    assert [len(turn[0].token_ids) for turn in found] == [24, 24, 24]
    assert (kept.read, again.read) == (20 + 4 + 4, 20 + 47 + 74)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [8, 14, 30])
def test_a_short_cache_lets_what_is_kept_go(model: PreTrainedModel, blocks: int) -> None:
    cache = BlockCache(model.config, dtype=torch.float32, budget_bytes=2**24, device=torch.device("cpu"))
    per_block = 2**24 // cache.num_blocks
    short, roomy = opened(model, kv_cache_bytes=blocks * per_block), opened(model)
    found = play(short, keeps=True, episodes=5)
    for turn, expected in zip(found, play(roomy, keeps=False, episodes=5), strict=True):
        for one, other in zip(turn, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6)
    own, prefixes = short._require_cache()
    prefixes.clear()
    assert own.num_free == own.num_blocks == blocks


def test_new_weights_forget(model: PreTrainedModel) -> None:
    engine = opened(model)
    play(engine, keeps=True, turns=1)
    engine.attach(model, 1)
    engine.read = 0
    play(engine, keeps=True, turns=1)
    assert engine.read == 20
    engine.read = 0
    play(engine, keeps=True, turns=1)
    assert engine.read == 4  # all but a whole block; the next one that is kept has sampled ids
    engine.sleep()
    engine.wake()
    engine.read = 0
    play(engine, keeps=True, turns=1)
    assert engine.read == 20


def test_tokens_of_two_versions_are_not_kept(model: PreTrainedModel) -> None:
    engine = opened(model)
    engine.keep_cache = True
    engine.submit(Request("a", (3,) * 20, SamplingParams(max_new_tokens=24), 0, keeps_cache=True))
    engine.poll(0.0)
    engine.attach(model, 1)
    while not engine.poll(0.0):
        pass
    _, prefixes = engine._require_cache()
    assert prefixes.kept_part((3,) * 20) == ([], 0)


def test_images_are_part_of_a_prefix(model: PreTrainedModel) -> None:
    cache = BlockCache(model.config, dtype=torch.float32, budget_bytes=2**20, device=torch.device("cpu"))
    prefixes, total = Prefixes(cache), cache.num_free
    blocks = cache.take(3)
    text, seen = tuple(range(40)), (*range(20), "digest", *range(21, 40))
    prefixes.keep(seen, blocks)  # two whole blocks, and 8 tokens of the third
    cache.release(blocks)
    assert cache.num_free == total - 3
    assert prefixes.kept_part((*range(15), "digest", *range(16, 40))) == ([], 0)
    assert prefixes.kept_part(text) == (blocks[:1], 16)  # the image comes after it
    assert prefixes.kept_part(seen[:32]) == (blocks[:1], 16)  # its last token has to be computed
    assert prefixes.kept_part(seen[:33]) == (blocks[:2], 32)
    assert prefixes.kept_part((*seen[:39], 7, 8)) == (blocks[:2], 32)  # another token in the third
    assert prefixes.kept_part(seen[:40]) == (blocks[:2], 32)  # the eighth is the last of this prompt
    assert prefixes.kept_part((*seen, 7, 8)) == (blocks, 40)
    assert prefixes.kept_part((*seen, 9)) == (blocks[:2], 32)  # who asked first fills the third
    prefixes.free(total)
    assert cache.num_free == total - 3  # shared by the calls
    cache.release([blocks[0]] * 7 + [blocks[1]] * 5 + [blocks[2]])
    assert cache.num_free == total


def test_prompts_of_one_call_share_their_beginning(model: PreTrainedModel) -> None:
    """Three tasks behind a system prompt of 50 ids: 48 of them, three whole blocks, are computed once."""
    made = [
        Request(str(number), (*range(3, 53), *(60 + number,) * 10), SamplingParams(max_new_tokens=8), number)
        for number in range(3)
    ]
    kept, again = opened(model), opened(model)
    shared = generate(kept, [dataclasses.replace(each, keeps_cache=True) for each in made])
    assert shared == generate(again, made)
    assert (kept.read, again.read) == (60 + 12 + 12, 3 * 60)


@pytest.mark.parametrize("n", [1, 3])
def test_responses_of_one_turn_go_on_apart(model: PreTrainedModel, n: int) -> None:
    """n requests continue one response with other ids: the first fills its last block, the others compute these ids."""
    kept, again = opened(model), opened(model)
    first = Request("a", tuple(range(3, 23)), SamplingParams(max_new_tokens=14), 0, keeps_cache=True)
    [response], [expected] = generate(kept, [first]), generate(again, [first])
    assert response == expected and len(response.token_ids) == 14
    _, prefixes = again._require_cache()
    prefixes.clear()
    made = [
        Request(
            f"b{number}", first.prompt_ids + response.token_ids + (7, 8 + number), SamplingParams(max_new_tokens=30), 5
        )
        for number in range(n)
    ]
    kept.read = again.read = 0
    assert generate(kept, made) == generate(again, made)
    assert (kept.read, again.read) == (3 + (n - 1) * 4, n * 36)
