# SPDX-License-Identifier: Apache-2.0
"""Weights that do not arrive whole are never sampled from, and a sleeping engine holds no memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from whet.config.schema import ModelConfig
from whet.errors import WeightSyncError
from whet.models.load import load_policy
from whet.rollout.build import load_model
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import generate


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder).eval()


@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_half_updated_weights_are_not_sampled_from(
    make: type[NativeEngine] | type[HFEngine], model: PreTrainedModel
) -> None:
    engine, made = make(), suite.requests(groups=1)
    engine.adopt(model)
    engine.load(model.named_parameters(), version=1)
    before = generate(engine, made)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in list(model.named_parameters())[:3]:
            yield name, weight * 2
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        engine.load(breaks_off(), version=2)
    with raises(WeightSyncError, key="version 2 of the weights"):
        generate(engine, made)
    engine.load(model.named_parameters(), version=3)
    after = generate(engine, made)
    assert [each.token_ids for each in after] == [each.token_ids for each in before]
    assert {version for each in after for version, _ in each.versions} == {3}


def test_a_copy_in_bfloat16_has_the_rotary_positions_of_its_model(model: PreTrainedModel, model_folder: Path) -> None:
    """Frequencies in bfloat16 are off by 0.2 %, which is an angle of a whole radian at place 500."""
    adopted, loaded = NativeEngine(torch.bfloat16), NativeEngine(torch.bfloat16)
    adopted.adopt(model)
    load_model(loaded, ModelConfig(path=str(model_folder)), torch.device("cpu"), torch.bfloat16)
    states, places = torch.zeros(1, 1, 1), torch.tensor([[500]])
    expected = model.base_model.rotary_emb(states, places)
    for engine in (adopted, loaded):
        own = engine.policy.require()
        assert {weight.dtype for weight in own.parameters()} == {torch.bfloat16}
        assert all(map(torch.equal, own.base_model.rotary_emb(states, places), expected))


def test_weights_that_do_not_fit_are_named(model: PreTrainedModel) -> None:
    engine = NativeEngine()
    engine.adopt(model)
    weights = dict(model.named_parameters())
    last = list(weights)[-1]
    with raises(WeightSyncError, "weights", found=re.compile(f"^1 of {len(weights)} .* {last}$")):
        engine.load([(name, weight) for name, weight in weights.items() if name != last], 1)
    with raises(WeightSyncError, last, found=re.compile(rf"^shape \[1\] .* {last} of \[")):
        engine.load({**weights, last: torch.ones(1)}.items(), 1)
    with raises(WeightSyncError, "extra", found=re.compile(r"^shape \[2\] .* no extra$")):
        engine.load({**weights, "extra": torch.ones(2)}.items(), 1)
    with raises(WeightSyncError, key="version 1 of the weights"):
        generate(engine, suite.requests(groups=1))


def resident_bytes(tensors: Mapping[int, int]) -> int:
    """Bytes of the pages that lie wholly in tensors (address: bytes) and in memory; no other tensor's, no other's."""
    page, entry, present = os.sysconf("SC_PAGESIZE"), 8, 7  # the highest bit of an entry's eight bytes
    found = 0
    with Path("/proc/self/pagemap").open("rb") as file:
        for at, count in tensors.items():
            first, end = -(-at // page), (at + count) // page
            file.seek(first * entry)
            found += sum(byte >> present for byte in file.read((end - first) * entry)[entry - 1 :: entry])
    return found * page


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="memory of the process is read from /proc")
def test_sleep_gives_the_memory_of_the_cache_back(model: PreTrainedModel) -> None:
    size = 2**27
    engine = NativeEngine(kv_cache_bytes=size)
    engine.attach(model, 0)
    made = suite.requests(groups=2)
    before = generate(engine, made)
    assert 0.99 * size < engine.cache_bytes <= size
    cache, _ = engine._require_cache()
    cache.keys.fill_(1)  # as full as can be: memory that was never written to is nobody's
    cache.values.fill_(1)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (cache.keys, cache.values)}
    del cache
    assert resident_bytes(tensors) > 0.95 * size
    engine.sleep()
    assert engine.cache_bytes == 0
    assert resident_bytes(tensors) < 0.05 * size
    engine.wake()
    assert engine.cache_bytes == 0  # until there is something to sample
    assert generate(engine, made) == before and engine.cache_bytes > 0
