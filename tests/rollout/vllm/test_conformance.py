# SPDX-License-Identifier: Apache-2.0
"""vLLM against the model's own forward, and as a stream of requests."""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
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
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import (
    Completion,
    Event,
    Failed,
    Finished,
    Partial,
    Request,
    SamplingParams,
    SharesModule,
    Sleeps,
    generate,
)
from whet.rollout.vllm.engine import VLLMEngine
from whet.types import Media

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
ROUNDING = 2e-5  # of log-probs: a prompt in the prefix cache, or in another batch, is computed in other parts
LENGTH = 1500  # long enough for something to happen before the end
LONG: dict[str, Any] = {"stop_token_ids": (), "max_new_tokens": LENGTH}


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


def begin(engine: VLLMEngine, made: Sequence[Request], tokens: int) -> None:
    """Submits requests and waits until so many tokens are sampled; again where all ended before that was seen."""
    until = time.monotonic() + 120
    for attempt in range(20):
        for request in made:
            assert engine.submit(replace(request, attempt=attempt))
        while any(not live.call.done() for live in engine._live.values()):
            assert time.monotonic() < until
            if engine.call("GET", "/whet/requests?count")["tokens"] >= tokens:
                return
        engine.poll(0.0)
    raise AssertionError(f"20 times all of {len(made)} requests ended before {tokens} tokens were seen")


def drain(engine: VLLMEngine) -> list[Event]:
    events: list[Event] = []
    while (status := engine.status()).running + status.waiting:
        events += engine.poll(1.0)
    return events


def completions(events: list[Event]) -> dict[str, Completion]:
    return {event.uid: event.completion for event in events if isinstance(event, Finished)}


@pytest.fixture(autouse=True)
def first_weights(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Every test begins with the model's own weights, and with nothing under way."""
    engine.resume()
    engine.abort(list(engine._live))
    engine.poll(0.0)
    if engine.version:
        engine.load(named(model), version=0)


# -- log-probs and choices


@pytest.mark.parametrize("params", suite.SAMPLING, ids=str)
def test_log_probs_are_the_models_own(engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", suite.SAMPLING, ids=str)
def test_tokens_are_those_that_sampling_draws(
    engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]
) -> None:
    suite.check_choices(engine, model, suite.requests(seed=1, **params))


def test_different_sampling_in_one_batch(engine: VLLMEngine) -> None:
    mixed = [
        replace(made, uid=f"{number}:{made.uid}")
        for number, params in enumerate(suite.SAMPLING)
        for made in suite.requests(groups=2, n=2, **params)
    ]
    alone = [generate(engine, suite.requests(groups=2, n=2, **params)) for params in suite.SAMPLING]
    suite.assert_same(generate(engine, mixed), [each for part in alone for each in part], ROUNDING)


def test_tokens_are_those_of_the_native_engine(engine: VLLMEngine, model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    made = suite.requests(groups=8, n=4, longest=60)
    for own, other in zip(generate(engine, made), generate(native, made), strict=True):
        assert own.token_ids == other.token_ids and own.finish_reason == other.finish_reason


def test_frequencies_are_those_of_the_model(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Chi-square of 2,000 first tokens, for plain sampling and for a cut one."""
    prompt, draw = (5, 6, 7, 8), random.Random(3)
    for params in (SamplingParams(1), SamplingParams(1, temperature=0.7, top_k=6)):
        made = [Request(str(index), prompt, params, draw.getrandbits(63)) for index in range(2000)]
        counts = Counter(completion.token_ids[0] for completion in generate(engine, made))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1] / params.temperature
        if params.top_k:
            logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], float("-inf"))
        expected = (logits.softmax(-1) * len(made)).tolist()
        common = [token for token, each in enumerate(expected) if each >= 5]
        rest = len(made) - sum(counts[token] for token in common)
        rest_expected = len(made) - sum(expected[token] for token in common)
        chi = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
        chi += (rest - rest_expected) ** 2 / rest_expected if rest_expected > 1 else 0.0
        freedom = len(common) - (rest_expected <= 1)
        # mean `freedom`, variance twice that: five deviations
        assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5, (chi, freedom)


def test_rules_are_kept(engine: VLLMEngine) -> None:
    suite.check_rules(engine, suite.requests(longest=60, stop_token_ids=(), **suite.SAMPLING[6]))


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings(engine: VLLMEngine, model: PreTrainedModel, length: int) -> None:
    """Of whole characters: where bytes are none, vLLM's text is behind that of all tokens."""
    tokenizer = load_tokenizer(model.config._name_or_path)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    whole = tuple(token for token, text in enumerate(texts) if "\N{REPLACEMENT CHARACTER}" not in text)
    made = suite.requests(groups=6, longest=30, stop_token_ids=(9,), allowed_token_ids=whole)
    suite.check_stop_strings(engine, tokenizer, made, length, ROUNDING)


def test_a_request_alone_and_among_others(engine: VLLMEngine) -> None:
    suite.check_company_does_not_matter(engine, suite.requests(groups=16, n=8, longest=40), ROUNDING)


# -- requests that cannot be sampled


def test_streams(engine: VLLMEngine) -> None:
    suite.check_streams(engine, suite.requests(groups=4, n=4, longest=40), ROUNDING)


def test_what_can_never_be_sampled_is_refused(engine: VLLMEngine) -> None:
    [request] = suite.requests(groups=1, n=1)
    tokens = replace(request.params, allowed_token_ids=(5, 10**6))
    for wrong, message in (
        (replace(request, params=tokens), "allowed_token_ids has token 1000000"),
        (replace(request, params=SamplingParams(10**4)), r"may need .* tokens, and vLLM takes 2048; shorten"),
        (replace(request, params=SamplingParams(4, temperature=0.001)), "temperature 0.001, which vLLM raises to 0.01"),
        (replace(request, prompt_ids=()), "needs a prompt token"),
        (replace(request, media=(Media("image", "d1", None),)), "has images, and this rollout engine reads text"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.submit(wrong)
    assert engine.status().running == engine.status().waiting == 0


# -- a stream of requests


def test_requests_may_come_while_others_run(engine: VLLMEngine) -> None:
    made = suite.requests(groups=3, n=2, **LONG)
    undisturbed = generate(engine, made)
    events: list[Event] = []
    for request in made:
        assert engine.submit(request)
        events += engine.poll(0.0)
    assert engine.submit(made[0])  # is there already: not taken twice
    found = completions(events + drain(engine))
    suite.assert_same([found[request.uid] for request in made], undisturbed, ROUNDING)
    assert engine.status().oldest is None


def test_an_aborted_request_gives_its_tokens_and_a_later_attempt_the_rest(engine: VLLMEngine) -> None:
    """Draws, penalties and bad words count from the start of the response."""
    rules = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3, "bad_words": ((5, 6), (8,))}
    made = suite.requests(groups=2, n=2, **LONG, **rules)
    whole = {request.uid: completion for request, completion in zip(made, generate(engine, made), strict=True)}
    begin(engine, made, 60)
    engine.abort([request.uid for request in made[1:]] + ["nobody"])
    cut = completions(engine.poll(0.0))
    assert set(cut) == {request.uid for request in made[1:]}
    for uid, completion in cut.items():
        assert completion.finish_reason == "abort" and 1 < len(completion.token_ids) < LENGTH
        assert completion.token_ids == whole[uid].token_ids[: len(completion.token_ids)]
    for request in made[1:]:
        assert engine.submit(replace(request, attempt=100, sampled_ids=cut[request.uid].token_ids))
    rest = completions(drain(engine))
    suite.assert_same([rest[made[0].uid]], [whole[made[0].uid]], ROUNDING)
    for uid, completion in cut.items():
        assert completion.token_ids + rest[uid].token_ids == whole[uid].token_ids
        assert rest[uid].finish_reason == "length"
        assert rest[uid].log_probs == pytest.approx(whole[uid].log_probs[len(completion.token_ids) :], abs=ROUNDING)


def test_a_later_attempt_replaces_an_earlier_one(engine: VLLMEngine) -> None:
    [request] = suite.requests(groups=1, n=1, **LONG)
    assert engine.submit(request) and engine.submit(replace(request, attempt=1))
    [event] = drain(engine)
    assert isinstance(event, Finished) and event.attempt == 1


def test_a_paused_engine_gives_what_it_has_and_is_silent(engine: VLLMEngine, model: PreTrainedModel) -> None:
    engine.load(named(model), version=4)
    made = suite.requests(groups=1, n=3, **LONG)
    whole = generate(engine, made)
    begin(engine, made, 60)
    engine.pause()
    partial = engine.poll(0.0)
    assert [type(event) for event in partial] == [Partial] * 3
    for event, completion in zip(sorted(partial, key=lambda event: event.uid), whole, strict=True):
        assert isinstance(event, Partial) and event.offset == 0 and 4 <= len(event.token_ids) < LENGTH
        assert event.token_ids == completion.token_ids[: len(event.token_ids)]
        assert event.log_probs == pytest.approx(completion.log_probs[: len(event.token_ids)], abs=ROUNDING)
        assert event.versions == ((4, len(event.token_ids)),)
    time.sleep(0.3)
    assert engine.poll(0.3) == [] and engine.status().running == 3
    engine.resume()
    found = completions(drain(engine))
    suite.assert_same([found[request.uid] for request in made], whole, ROUNDING)


def test_weights_change_between_two_tokens(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Tokens before the change are the old weights' and those after it a full recompute's under the new ones."""
    made = suite.requests(groups=2, n=2, **LONG)
    old = dict(zip([request.uid for request in made], generate(engine, made), strict=True))
    begin(engine, made, 100)
    engine.load(named(model, 0.5), version=2)
    found, other, mixed = completions(drain(engine)), changed(model, 0.5), 0
    for request in made:
        completion = found[request.uid]
        assert sum(count for _, count in completion.versions) == LENGTH
        before = dict(completion.versions).get(0, 0)
        mixed += 0 < before < LENGTH
        assert completion.token_ids[:before] == old[request.uid].token_ids[:before]
        assert completion.log_probs[:before] == pytest.approx(old[request.uid].log_probs[:before], abs=ROUNDING)
        assert gaps(other, request, completion)[before:].max() < 1e-4
    assert mixed >= 2


def test_weights_change_while_paused(engine: VLLMEngine, model: PreTrainedModel) -> None:
    [request] = suite.requests(groups=1, n=1, **LONG)
    begin(engine, [request], 20)
    engine.pause()
    engine.load(named(model, 0.5), version=2)
    [partial] = engine.poll(0.0)
    assert isinstance(partial, Partial)
    assert engine.poll(0.3) == []  # a new version does not end the pause
    engine.resume()
    [completion] = completions(drain(engine)).values()
    before = len(partial.token_ids)
    assert completion.versions == ((0, before), (2, LENGTH - before))
    assert gaps(changed(model, 0.5), request, completion)[before:].max() < 1e-4


def test_a_kept_cache_is_not_computed_again(engine: VLLMEngine, model: PreTrainedModel) -> None:
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
    found, other = completions(drain(engine)), changed(model, 0.5)
    before = dict(found[request.uid].versions)[0]
    assert gaps(other, request, found[request.uid])[before:].max() > 1e-2
    assert gaps(other, fresh, found["fresh"]).max() < 1e-4


def test_a_request_past_its_deadline_fails_alone(engine: VLLMEngine) -> None:
    first, second, other = suite.requests(groups=3, n=1, **LONG)
    engine.submit(replace(first, deadline_seconds=0.0))
    engine.submit(replace(second, deadline_seconds=0.05))
    engine.submit(other)
    events = drain(engine)
    failed = {event.uid: event.failure for event in events if isinstance(event, Failed)}
    assert failed.keys() == {first.uid, second.uid} and completions(events).keys() == {other.uid}
    assert all(each.timed_out and each.source == "engine" for each in failed.values())
    until = time.monotonic() + 10  # the server hears of it
    while engine.call("GET", "/whet/requests"):
        assert time.monotonic() < until


# -- weights


def test_weights_from_outside(engine: VLLMEngine, model: PreTrainedModel) -> None:
    suite.check_weights(engine, model, suite.requests(groups=2), ROUNDING)


def test_twenty_updates(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Log-probs after each are the model's own, that of a tied head too; memory stays."""
    other, seconds, worst, memory = changed(model, 1.0), [], 0.0, []
    draw = torch.Generator().manual_seed(0)
    for version in range(1, 21):
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.05 * weight.std())
        began = time.perf_counter()
        engine.load(other.named_parameters(), version)
        seconds.append(time.perf_counter() - began)
        made = suite.requests(groups=2, n=2, seed=version)
        for request, completion in zip(made, generate(engine, made), strict=True):
            gap = float(gaps(other, request, completion).max())
            assert gap < 1e-5
            worst = max(worst, gap)
            assert {each for each, _ in completion.versions} == {version}
        memory.append(server_bytes(engine))
    log.info(
        "20 updates of %.1f M parameters: %.0f ms (median), largest gap %.1e, memory of the server %.0f to %.0f MiB",
        *(sum(weight.numel() for weight in other.parameters()) / 1e6, statistics.median(seconds) * 1e3, worst),
        *(memory[0] / 2**20, memory[-1] / 2**20),
    )
    assert memory[-1] - memory[4] < 32 * 2**20


def server_bytes(engine: VLLMEngine) -> int:
    server = psutil.Process(engine.server.process.pid)
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


def test_a_prompt_that_old_weights_computed_is_not_shared(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """The prefix cache is per version: equal prompts of 300 tokens before and after a change."""
    request = Request("0", tuple(5 + index % 30 for index in range(300)), SamplingParams(8), 3)
    generate(engine, [request])
    engine.load(named(model, 0.5), version=1)
    [completion] = generate(engine, [request])
    assert gaps(changed(model, 0.5), request, completion).max() < 1e-4


def test_weights_of_another_model_are_refused(engine: VLLMEngine, model: PreTrainedModel) -> None:
    made = suite.requests(groups=1)
    before = generate(engine, made)
    wrong_shape = [(name, weight[:-1] if "norm" in name else weight) for name, weight in named(model)]
    for wrong in (named(model)[:-1], [*named(model), ("model.extra.weight", torch.zeros(2))], wrong_shape):
        with pytest.raises(WeightSyncError, match="version 7 of the weights does not fit vLLM's model"):
            engine.load(wrong, version=7)
        engine.submit(made[0])
        with pytest.raises(WeightSyncError, match="nothing is sampled until all weights of a version came"):
            engine.poll(1.0)
        engine.load(named(model), version=0)
        drain(engine)
    suite.assert_same(generate(engine, made), before, ROUNDING)


def test_weights_that_break_off_change_nothing(engine: VLLMEngine, model: PreTrainedModel) -> None:
    def broken() -> Any:
        yield from named(model, 2.0)[:3]
        raise OSError("the link broke")

    made = suite.requests(groups=1)
    before = generate(engine, made)
    with pytest.raises(OSError, match="the link broke"):
        engine.load(broken(), version=7)
    suite.assert_same(generate(engine, made), before, ROUNDING)


def test_memory_after_a_thousand_requests(engine: VLLMEngine) -> None:
    generate(engine, suite.requests(groups=25, n=8))
    before = server_bytes(engine)
    for seed in range(1, 6):
        generate(engine, suite.requests(groups=25, n=8, seed=seed))
    assert server_bytes(engine) - before < 32 * 2**20


def test_what_it_can_do(engine: VLLMEngine) -> None:
    assert isinstance(engine, Sleeps) and not isinstance(engine, SharesModule)


# -- what vLLM's own answers would hide


def test_a_plain_id_aborts_nothing(engine: VLLMEngine) -> None:
    [request] = suite.requests(groups=1, n=1, **LONG)
    begin(engine, [request], 1)
    [live] = engine._live.values()
    assert engine.call("POST", "/abort_requests", {"request_ids": [live.name]})["status"] == "aborted"
    [completion] = completions(drain(engine)).values()
    assert completion.finish_reason == "length" and len(completion.token_ids) == LENGTH
