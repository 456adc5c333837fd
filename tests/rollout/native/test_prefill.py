# SPDX-License-Identifier: Apache-2.0
"""Prompts on an accelerator, by a stand-in: batches of few sizes, recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.rollout import rollout_conformance as suite
from tests.rollout.standin import Recorder, install
from whet.models.load import load_policy
from whet.rollout.native import columns, engine, scheduler
from whet.rollout.native.engine import NativeEngine, in_parts
from whet.rollout.native.scheduler import SharedPrompt, Stretch, by_tokens
from whet.rollout.protocol import Request, SamplingParams, generate

NEAR = 5e-5


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        install(patched)
        yield


def sampled(model: PreTrainedModel, made: list[Request], **options: Any) -> list[Any]:
    engine = NativeEngine(kv_cache_bytes=2**24, **options)
    engine.attach(model, 0)
    return generate(engine, made)


def stretch(tokens: int, start: int = 0) -> Stretch:
    request = Request("a", tuple(range(start + tokens)), SamplingParams(max_new_tokens=1), 0)
    return Stretch(tuple(range(start, start + tokens)), start, [0], SharedPrompt(request))


def test_batches_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 32)
    given = [stretch(5), stretch(70, start=3), stretch(20), stretch(1)]
    whole = [[len(each.token_ids) for each in batch] for batch in by_tokens(given)]
    assert whole == [[5], [70], [20, 1]]
    parts = [
        [(each.token_ids[0], len(each.token_ids), each.start, each.is_last) for each in batch]
        for batch in in_parts(given)  # a batch of 32 tokens has room for two sequences
    ]
    assert parts == [
        [(0, 5, 0, True)], [(3, 32, 3, False)], [(35, 32, 35, False)], [(67, 6, 67, True), (0, 20, 0, True)],
        [(0, 1, 0, True)],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_batch_is_replayed_with_other_prompts(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed step gives the same bits as a run one: other prompts, lengths and numbers of them fall into one
    size."""
    work = [suite.requests(groups=groups, n=2, seed=groups) for groups in (2, 4, 3)]
    install(monkeypatch)
    engine = NativeEngine(kv_cache_bytes=2**24)
    engine.attach(model, 0)
    recorded = [generate(engine, made) for made in work]
    made_of = engine._columns.graphs  # type: ignore[attr-defined]
    assert isinstance(made_of, Recorder) and [kind for kind in made_of._steps if kind[0] == "prefill"] == [
        ("prefill", 256)
    ]
    monkeypatch.setattr(columns, "Graphs", columns.Graphs)  # on a host these record nothing
    assert recorded == [sampled(model, made) for made in work]


def test_long_prompts_are_computed_in_parts(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = suite.requests(groups=5, n=2, longest=6)
    longer = tuple(3 + place * 7 % 40 for place in range(150))
    made += [Request("long", longer, SamplingParams(max_new_tokens=6), 5)]
    resumed = [
        replace(made[-1], uid="resumed", sampled_ids=tuple(range(5, 11)), params=SamplingParams(max_new_tokens=9))
    ]
    expected = [sampled(model, made), sampled(model, resumed)]
    install(monkeypatch)
    monkeypatch.setattr(engine, "SIZES", (32, 64))
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 64)
    suite.assert_same_but_for_rounding(sampled(model, made), expected[0], NEAR)
    suite.assert_same_but_for_rounding(sampled(model, resumed), expected[1], NEAR)


@pytest.mark.slow
def test_a_cache_for_longer_prompts_than_the_model_was_made_for(model: PreTrainedModel, device: None) -> None:
    """Block tables grow if a request needs more than the model's positions, and recorded steps are dropped."""
    engine = NativeEngine(kv_cache_bytes=2**24)
    engine.attach(model, 0)
    short = suite.requests(groups=2, n=2)
    first = generate(engine, short)
    longer = Request("long", tuple(3 + place * 7 % 40 for place in range(600)), SamplingParams(max_new_tokens=2), 5)
    [long] = generate(engine, [longer])
    prompts = engine._prompts
    assert prompts is not None and prompts._tables.shape[1] == 38 and len(long.token_ids) == 2
    assert generate(engine, short) == first
