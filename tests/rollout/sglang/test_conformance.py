# SPDX-License-Identifier: Apache-2.0
"""SGLang's server against the model's own forward, and as a stream of requests."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
import rollout_conformance as suite

from whet.errors import EngineError, WeightSyncError
from whet.models.load import load_policy
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Event, Finished, Partial, Request, SamplingParams, generate
from whet.rollout.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDING = 2e-5  # of log-probs: a prompt in the prefix cache, or in another batch, is computed in other parts
LENGTH = 1000
LONG: dict[str, Any] = {"stop_token_ids": (), "max_new_tokens": LENGTH}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.9},
)


def gaps(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    return (suite.own_log_probs(model, request, completion) - torch.tensor(completion.log_probs)).abs()


def named(model: PreTrainedModel, factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * factor) for name, weight in model.named_parameters()]


def changed(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    other = load_policy(model.config._name_or_path).eval()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(factor)
    return other


def begin(engine: SGLangEngine, made: list[Request], tokens: int) -> None:
    for request in made:
        assert engine.submit(request)
    until = time.monotonic() + 60
    while engine.count() < tokens:
        assert time.monotonic() < until


def drain(engine: SGLangEngine) -> dict[str, Completion]:
    events: list[Event] = []
    while (status := engine.status()).running + status.waiting:
        events += engine.poll(1.0)
    assert all(isinstance(event, Finished) for event in events), events
    return {event.uid: event.completion for event in events if isinstance(event, Finished)}


@pytest.fixture(autouse=True)
def first_weights(engine: SGLangEngine, model: PreTrainedModel) -> None:
    """Every test begins with the model's own weights, and with nothing under way."""
    engine.resume()
    engine.abort(list(engine._live))
    engine.poll(0.0)
    if engine.version:
        engine.load(named(model), version=0)


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_log_probs_and_tokens(engine: SGLangEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    """Log-probs are the model's own, and tokens those that the native engine draws."""
    suite.check_log_probs(engine, model, suite.requests(**params))
    native = NativeEngine()
    native.attach(model, 0)
    made = suite.requests(groups=8, n=4, longest=60, **params)
    for own, other in zip(generate(engine, made), generate(native, made), strict=True):
        assert own.token_ids == other.token_ids and own.finish_reason == other.finish_reason


def test_a_request_alone_and_among_others(engine: SGLangEngine) -> None:
    suite.check_company_does_not_matter(engine, suite.requests(groups=8, n=4, longest=40), ROUNDING)


def test_an_aborted_request_gives_its_tokens_and_a_later_attempt_the_rest(engine: SGLangEngine) -> None:
    """An abort ends every request whose name begins with the one given: requests 1 and 10 are apart."""
    made = suite.requests(groups=6, n=2, **LONG)
    whole = {request.uid: completion for request, completion in zip(made, generate(engine, made), strict=True)}
    begin(engine, made, 120)
    engine.abort([made[1].uid, "nobody"])
    [cut] = engine.poll(0.0)
    assert isinstance(cut, Finished) and cut.completion.finish_reason == "abort"
    tokens = cut.completion.token_ids
    assert 1 < len(tokens) < LENGTH and tokens == whole[made[1].uid].token_ids[: len(tokens)]
    assert engine.submit(replace(made[1], attempt=1, sampled_ids=tokens))
    found = drain(engine)
    assert tokens + found.pop(made[1].uid).token_ids == whole[made[1].uid].token_ids
    assert len(found) == 11
    for uid, completion in found.items():
        suite.assert_same([completion], [whole[uid]], ROUNDING)


def test_weights_change_while_paused(engine: SGLangEngine, model: PreTrainedModel) -> None:
    """The partial response has all tokens of the old weights; those that follow are a full recompute's."""
    made = suite.requests(groups=1, n=2, **LONG)
    old = dict(zip([request.uid for request in made], generate(engine, made), strict=True))
    begin(engine, made, 60)
    engine.pause()
    partial = {event.uid: event for event in engine.poll(0.0) if isinstance(event, Partial)}
    assert set(partial) == set(old)
    engine.load(named(model, 0.5), version=2)
    assert engine.poll(0.3) == [] and engine.status().running == 2
    engine.resume()
    other = changed(model, 0.5)
    for uid, completion in drain(engine).items():
        before = len(partial[uid].token_ids)
        assert completion.versions == ((0, before), (2, LENGTH - before))
        assert completion.token_ids[:before] == partial[uid].token_ids == old[uid].token_ids[:before]
        [request] = [each for each in made if each.uid == uid]
        assert gaps(other, request, completion)[before:].max() < 1e-4


def test_requests_that_come_in_a_pause_can_be_aborted(engine: SGLangEngine) -> None:
    engine.pause()
    first, second = suite.requests(groups=2, n=1)
    engine.submit(first)
    engine.submit(second)
    engine.abort([first.uid])
    [event] = engine.poll(0.0)
    assert isinstance(event, Finished) and event.completion.finish_reason == "abort"
    engine.resume()
    assert set(drain(engine)) == {second.uid}


def test_a_kept_cache_is_not_computed_again(engine: SGLangEngine, model: PreTrainedModel) -> None:
    """Running requests keep keys and values of the old weights; new ones do not share them."""
    [request] = suite.requests(groups=1, n=1, **LONG)
    begin(engine, [request], 20)
    engine.keep_cache = True
    try:
        engine.load(named(model, 0.5), version=2)
    finally:
        engine.keep_cache = False
    fresh = replace(request, uid="fresh")
    engine.submit(fresh)
    found, other = drain(engine), changed(model, 0.5)
    before = dict(found[request.uid].versions)[0]
    assert gaps(other, request, found[request.uid])[before:].max() > 1e-2
    assert gaps(other, fresh, found["fresh"]).max() < 1e-4


def test_twenty_updates(engine: SGLangEngine, model: PreTrainedModel) -> None:
    """Log-probs after each are the model's own, that of a tied head too."""
    other, draw = changed(model, 1.0), torch.Generator().manual_seed(0)
    for version in range(1, 21):
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.05 * weight.std())
        engine.load(other.named_parameters(), version)
        made = suite.requests(groups=2, n=2, seed=version)
        for request, completion in zip(made, generate(engine, made), strict=True):
            assert float(gaps(other, request, completion).max()) < 1e-5
            assert {each for each, _ in completion.versions} == {version}


def test_a_prompt_that_old_weights_computed_is_not_shared(engine: SGLangEngine, model: PreTrainedModel) -> None:
    request = Request("0", tuple(5 + index % 20 for index in range(300)), SamplingParams(8), 3)
    generate(engine, [request])
    engine.load(named(model, 0.5), version=1)
    [completion] = generate(engine, [request])
    assert gaps(changed(model, 0.5), request, completion).max() < 1e-4


def test_weights_of_another_model_are_refused(engine: SGLangEngine, model: PreTrainedModel) -> None:
    made = suite.requests(groups=1)
    before = generate(engine, made)
    wrong_shape = [(name, weight[:-1] if "norm" in name else weight) for name, weight in named(model)]
    for wrong in (named(model)[:-1], [*named(model), ("model.extra.weight", torch.zeros(2))], wrong_shape):
        with pytest.raises(WeightSyncError, match="version 7 of the weights does not fit SGLang's model"):
            engine.load(wrong, version=7)
        engine.submit(made[0])
        with pytest.raises(WeightSyncError, match="nothing is sampled until all weights of a version came"):
            engine.poll(1.0)
        engine.load(named(model), version=0)
        drain(engine)
    suite.assert_same(generate(engine, made), before, ROUNDING)


def test_a_killed_scheduler_is_heard_of(engine: SGLangEngine) -> None:
    """The last test of the file: the server is gone with it."""
    begin(engine, suite.requests(groups=2, n=2, **LONG), 1)
    server = psutil.Process(engine.server.process.pid)
    processes = [server, *server.children(recursive=True)]
    next(each for each in processes if "scheduler" in each.name() or "scheduler" in " ".join(each.cmdline())).kill()
    began = time.monotonic()
    with pytest.raises(EngineError, match="the SGLang server"):
        while True:
            engine.poll(1.0)
    assert time.monotonic() - began < 30
    engine.close()
    assert not psutil.wait_procs(processes, timeout=10)[1]
