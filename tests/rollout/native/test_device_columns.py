# SPDX-License-Identifier: Apache-2.0
"""Steps of the native engine on an accelerator, by a stand-in: sent, recorded, replayed, read a step late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.first import first
from tests.rollout import rollout_conformance as suite
from tests.rollout.standin import Recorder, install
from whet.kernels.paged_attention import BLOCK_SIZE
from whet.models.caches import token_bytes
from whet.models.load import load_policy
from whet.rollout.native.columns import DeviceColumns, batch_size
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams, generate

NEAR = 5e-5  # attention of prompts and of single tokens rounds differently


@pytest.fixture
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        install(patched)
        yield


def on_host(model: PreTrainedModel, made: list[Request]) -> list[Completion]:
    engine = NativeEngine(kv_cache_bytes=2**24)
    engine.attach(model, 0)
    return generate(engine, made)


def stepwise(model: PreTrainedModel, **options: Any) -> NativeEngine:
    engine = NativeEngine(**options)
    engine.attach(model, 0)
    return engine


def graphs_of(engine: NativeEngine) -> Recorder:
    assert isinstance(engine._columns, DeviceColumns) and isinstance(engine._columns.graphs, Recorder)
    return engine._columns.graphs


@pytest.mark.parametrize(
    "params",
    first(
        1,
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.7, "top_p": 0.8, "num_likeliest": 2},
            {"repetition_penalty": 1.3, "bad_words": ((5,), (4, 6))},
        ],
        others=pytest.mark.slow,
    ),
    ids=["plain", "greedy", "cut", "constrained"],
)
@pytest.mark.parametrize("rows", [256, 3], ids=["roomy", "few rows"])
def test_completions_are_those_of_the_host(
    model: PreTrainedModel, params: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = suite.requests(groups=3, n=3, **params)
    expected = on_host(model, made)
    install(monkeypatch)
    suite.assert_same_but_for_rounding(generate(stepwise(model, max_batch_size=rows), made), expected, NEAR)


@pytest.mark.slow
def test_requests_that_are_preempted_and_that_end_unexpectedly(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = suite.requests(groups=3, n=4, longest=70, stop_token_ids=())
    stop = on_host(model, made)[0].token_ids[20]
    made = [replace(each, params=replace(each.params, stop_token_ids=(stop,))) for each in made]
    expected = on_host(model, made)
    assert {each.finish_reason for each in expected} == {"stop", "length"}
    install(monkeypatch)
    monkeypatch.setattr("whet.rollout.native.scheduler.HEADROOM_BLOCKS", 0)
    engine = stepwise(model, kv_cache_bytes=BLOCK_SIZE * token_bytes(model.config, 4) * 8)
    found = generate(engine, made)
    assert sum(each.preemptions for each in found) >= 1
    suite.assert_same_but_for_rounding([replace(each, preemptions=0) for each in found], expected, NEAR)
    cache, _ = engine._require_cache()
    assert cache.num_free == cache.num_blocks == 8


@pytest.mark.slow
def test_a_step_is_recorded_once_for_a_size_and_again_after_a_move(model: PreTrainedModel, device: None) -> None:
    made = suite.requests(groups=4, n=6)  # 24 rows: batches of 32 and of 16, and one of prompts
    engine = stepwise(model)
    first = generate(engine, made)
    recorded = graphs_of(engine).recorded
    assert recorded == 3 and generate(engine, made) == first and graphs_of(engine).recorded == recorded
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)  # in place: an optimizer's step
    engine.attach(model, 1)
    changed = generate(engine, made)
    assert graphs_of(engine).recorded == recorded and [each.token_ids for each in changed] != [
        each.token_ids for each in first
    ]
    suite.check_log_probs(engine, model, made)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # an offload, and back
    engine.attach(model, 2)
    assert generate(engine, made)[0].token_ids == changed[0].token_ids
    assert graphs_of(engine).recorded == 2 * recorded


def test_aborts_pauses_and_streams_read_what_is_on_its_way(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = on_host(model, [Request("a", (3, 4, 5), SamplingParams(max_new_tokens=20), 7)])
    install(monkeypatch)
    engine = stepwise(model)
    for steps in range(4):
        request = Request(f"{steps}", (3, 4, 5), SamplingParams(max_new_tokens=20), 7, streams=True)
        engine.submit(request)
        events = [event for _ in range(steps) for event in engine.poll(0.0)]
        engine.pause()
        events += engine.poll(0.0)
        read = sum((each.token_ids for each in events if isinstance(each, Partial)), ())
        assert read == whole.token_ids[:steps]  # a prefill and steps - 1 decode steps, all of them read
        engine.resume()
        engine.abort([request.uid])
        [ended] = engine.poll(0.0)
        assert ended.completion.token_ids == whole.token_ids[:steps]  # type: ignore[union-attr]
        assert engine.status().running == 0 and not engine.unfinished


def test_sizes_of_batches() -> None:
    assert [batch_size(rows) for rows in (1, 16, 17, 64, 65, 128, 129, 512)] == [16, 16, 32, 64, 128, 128, 192, 512]
