# SPDX-License-Identifier: Apache-2.0
"""Rollout engines against the model's own forward; `--rollout-engine path/file.py:MyEngine` runs it on yours."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.first import first
from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from tests.rollout.conftest import SHIPPED
from whet import devices
from whet.config.schema import ModelConfig, RolloutConfig
from whet.errors import DeadlineError, EngineError
from whet.models.load import load_policy, load_tokenizer
from whet.rollout import build
from whet.rollout.hf import HFEngine
from whet.rollout.native import scheduler
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import (
    Completion,
    Event,
    Failed,
    Finished,
    Partial,
    Request,
    RolloutEngine,
    SamplingParams,
    SharesModule,
    Sleeps,
    generate,
)
from whet.types import Media

ROOT = Path(__file__).parents[2]


def block_bytes(model: PreTrainedModel) -> int:
    """Of one block of the cache in float32."""
    config = model.config
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 16 * 4


@pytest.fixture
def engine(
    rollout_engine: str, model: PreTrainedModel, device: torch.device, request: pytest.FixtureRequest
) -> Iterator[RolloutEngine]:
    given = json.loads(request.config.getoption("--rollout-engine-options"))
    name, most, options = SHIPPED.get(rollout_engine, (rollout_engine, 256, given))
    config, folder = RolloutConfig(engine={"name": name, "options": options}, max_batch_size=most), folder_of(model)
    made = build.rollout_engine(config, torch.float32, lambda: load_tokenizer(folder), device, ModelConfig(path=folder))
    yield made
    made.close()


def folder_of(model: PreTrainedModel) -> str:
    return str(model.config._name_or_path)


@pytest.fixture(scope="module", params=["model_folder", pytest.param("qwen25_folder", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, device: torch.device) -> PreTrainedModel:
    loaded = load_policy(request.getfixturevalue(request.param)).eval().to(device)
    with torch.no_grad():  # random weights say nearly the same of every token: sharpen them
        loaded.get_output_embeddings().weight.mul_(8)
    return loaded


SAMPLING = suite.SAMPLING


@pytest.mark.parametrize("params", first(2, SAMPLING, others=pytest.mark.slow), ids=str)
def test_log_probs_are_the_models_own(engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.begin(engine, model, 0)
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", first(2, SAMPLING, others=pytest.mark.slow), ids=str)
def test_tokens_are_those_that_sampling_draws(
    engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]
) -> None:
    suite.begin(engine, model, 0)
    suite.check_choices(engine, model, suite.requests(seed=1, **params))


def test_rules_are_kept(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    suite.check_rules(engine, suite.requests(longest=60, stop_token_ids=(), **SAMPLING[6]))


def test_rules_that_cannot_be_kept_are_refused(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    for wrong in ((), (5, 10**6)):
        with raises(EngineError, re.compile("allowed_token_ids")):
            generate(engine, suite.requests(allowed_token_ids=wrong))


@pytest.mark.parametrize("length", first(1, [1, 3], others=pytest.mark.slow))
def test_stop_strings(engine: RolloutEngine, model: PreTrainedModel, length: int) -> None:
    suite.begin(engine, model, 0)
    tokenizer = load_tokenizer(folder_of(model))
    suite.check_stop_strings(engine, tokenizer, suite.requests(groups=6, longest=30, stop_token_ids=(9,)), length)


@pytest.mark.parametrize(
    "params", first(1, [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}], others=pytest.mark.slow), ids=str
)
def test_the_likeliest_tokens(engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.begin(engine, model, 0)
    suite.check_likeliest(engine, model, suite.requests(**params))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [8, 12])
@pytest.mark.parametrize("params", [{}, SAMPLING[5]], ids=["plain", "penalties"])
def test_preemption_changes_nothing(
    model: PreTrainedModel, device: torch.device, blocks: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs but for rounding, which depends on an accelerator on how many rows are computed together."""
    monkeypatch.setattr(scheduler, "HEADROOM_BLOCKS", 0)  # as short of room as can be
    made = suite.requests(groups=3, n=4, longest=70, stop_token_ids=(), num_likeliest=2, **params)
    roomy = NativeEngine()
    short = NativeEngine(kv_cache_bytes=block_bytes(model) * blocks)
    roomy.attach(model, 0)
    short.attach(model, 0)
    undisturbed, disturbed = generate(roomy, made), generate(short, made)
    near = 1e-6 if device == devices.HOST else 5e-5
    assert sum(each.preemptions for each in undisturbed) == 0
    assert sum(each.preemptions for each in disturbed) >= 3
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.token_ids == before.token_ids and after.finish_reason == before.finish_reason
        assert after.log_probs == pytest.approx(before.log_probs, abs=near)
        told, expected = (torch.tensor(each.likeliest, dtype=torch.float64) for each in (after, before))
        assert len(told) == len(after.token_ids) and torch.allclose(told, expected, rtol=0, atol=near)
    cache, _ = short._require_cache()
    assert cache.num_blocks == blocks and cache.num_free == blocks


@pytest.mark.slow
def test_the_oldest_answer_is_never_preempted(model: PreTrainedModel) -> None:
    # 4 requests of 1 + 79 tokens need 5 blocks each, and 9 blocks are there: the first two go on at once
    made = [Request(str(index), (3 + index,), SamplingParams(79), index) for index in range(4)]
    native = NativeEngine(kv_cache_bytes=block_bytes(model) * 9)
    native.attach(model, 0)
    completions = generate(native, made)
    assert completions[0].preemptions == 0 and sum(each.preemptions for each in completions) > 0
    assert [len(each.token_ids) for each in completions] == [79] * 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_alone_and_among_others(model: PreTrainedModel, dtype: torch.dtype) -> None:
    native = NativeEngine(dtype=dtype)
    native.adopt(model)
    suite.check_company_does_not_matter(native, suite.requests(groups=16, n=8, longest=40))


def test_weights_from_outside(model: PreTrainedModel, engine: RolloutEngine) -> None:
    suite.own(engine, model)
    suite.check_weights(engine, model, suite.requests(groups=2))


@pytest.mark.slow
def test_different_sampling_in_one_batch(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    mixed = [
        replace(made, uid=f"{number}:{made.uid}")
        for number, params in enumerate(SAMPLING)
        for made in suite.requests(groups=2, n=2, **params)
    ]
    alone = [generate(native, suite.requests(groups=2, n=2, **params)) for params in SAMPLING]
    assert [c.token_ids for c in generate(native, mixed)] == [c.token_ids for part in alone for c in part]


def test_an_engine_that_nobody_holds_gives_its_cache_back_at_once(model: PreTrainedModel) -> None:
    """Without a pass of the garbage collector, which does not see how large a cache is."""
    native = NativeEngine()
    native.attach(model, 0)
    generate(native, [Request("a", (1, 2, 3), SamplingParams(2), 0)])
    cache = weakref.ref(native._require_cache()[0])
    gc.disable()
    try:
        del native
        assert cache() is None
    finally:
        gc.enable()


def test_equal_prompts_are_computed_once(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    seen: list[int] = []
    plain = native._forward

    def counted(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(ids))
        return plain(ids, *rest)  # type: ignore[arg-type]

    native._forward = counted  # type: ignore[method-assign]
    prompt = tuple(range(3, 36))
    generate(native, [Request(str(key), prompt, SamplingParams(1), key) for key in range(20)])
    assert seen == [48]  # 33 tokens, padded to a multiple of 16, once for 20 requests; one token needs no decode step


def test_attached_module_is_not_copied_and_goes_back_to_training(model: PreTrainedModel) -> None:
    native = NativeEngine()
    model.train()
    native.attach(model, 0)
    made = suite.requests(groups=2)
    before = generate(native, made)
    assert model.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    try:
        assert generate(native, made) != before
    finally:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(1.5)
        model.eval()


def test_a_request_that_can_never_fit_is_refused(model: PreTrainedModel) -> None:
    native = NativeEngine(kv_cache_bytes=2 * 2 * 2 * 16 * 32 * 4 * 4)
    native.attach(model, 0)
    change = re.compile(r"rollout\.engine\.options\.kv_cache_bytes")
    with raises(EngineError, key="request 0", found=re.compile(" 110 "), expected=re.compile(" 48,"), change=change):
        generate(native, [Request("0", tuple(range(3, 13)), SamplingParams(100), 0)])


def test_empty_prompts_and_limits_are_refused(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    with raises(EngineError, key="request 0", found=re.compile(r"^0 .* 0 .*max_new_tokens=4$")):
        generate(native, [Request("0", (), SamplingParams(4), 0)])


@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_a_rollout_that_takes_too_long_is_named(
    make: type[NativeEngine] | type[HFEngine], model: PreTrainedModel
) -> None:
    late = make()
    late.attach(model, 0)
    change = re.compile(r"rollout\.deadline_seconds")
    with raises(DeadlineError, key="rollout", found=re.compile(" 12 responses "), change=change):
        generate(late, suite.requests(), deadline_seconds=0.0)
    assert late.status().running == late.status().waiting == 0


def test_no_weights_yet(engine: RolloutEngine) -> None:
    if not isinstance(engine, SharesModule):
        pytest.skip("this engine begins with the folder's weights")
    with raises(EngineError, key=re.compile("^module "), found=None):
        generate(engine, suite.requests())


def test_blocks_come_back(model: PreTrainedModel) -> None:
    native = NativeEngine(max_batch_size=4)
    native.attach(model, 0)
    generate(native, suite.requests(groups=6, n=5))
    cache, _ = native._require_cache()
    assert cache.num_free == cache.num_blocks


def test_sliding_window(tmp_path: Path, model_folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(model_folder)
    config.use_sliding_window, config.sliding_window = True, 4
    config.layer_types = ["sliding_attention", "full_attention"]
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    windowed = load_policy(tmp_path).eval()
    native = NativeEngine()
    native.attach(windowed, 0)
    suite.check_log_probs(native, windowed, [replace(made) for made in suite.requests()])


@pytest.mark.slow
def test_compiled_decode_gives_the_same_log_probs(model: PreTrainedModel) -> None:
    native = NativeEngine(compile=True)
    native.attach(model, 0)
    suite.check_log_probs(native, model, suite.requests())


# -- a stream of requests ----------------------------------------------------------------------------------------------


def drain(engine: RolloutEngine) -> list[Event]:
    """All events until nothing is left."""
    events: list[Event] = []
    while (status := engine.status()).running + status.waiting:
        events += engine.poll(0.0)
    return events + engine.poll(0.0)


def completions(events: list[Event]) -> dict[str, Completion]:
    return {event.uid: event.completion for event in events if isinstance(event, Finished)}


def sharpened(model: PreTrainedModel, factor: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * factor) for name, weight in model.named_parameters()]


LONG: dict[str, Any] = {"stop_token_ids": (), "max_new_tokens": 20}


def test_requests_may_come_while_others_run(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    made = suite.requests(groups=3, n=2, **LONG)
    undisturbed = generate(engine, made)
    events: list[Event] = []
    for request in made:
        assert engine.submit(request)
        events += engine.poll(0.0)
    assert engine.status().oldest == made[0].uid and engine.status().version == 0
    assert engine.submit(made[0])  # is there already: not taken twice
    found = completions(events + drain(engine))
    assert [found[request.uid].token_ids for request in made] == [each.token_ids for each in undisturbed]
    assert engine.status().oldest is None


def test_an_aborted_request_gives_its_tokens_and_a_later_attempt_the_rest(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    suite.begin(engine, model, 0)
    made = suite.requests(groups=2, n=2, **LONG, repetition_penalty=1.3)
    whole = {request.uid: completion for request, completion in zip(made, generate(engine, made), strict=True)}
    for request in made:
        engine.submit(request)
    for _ in range(6):
        assert engine.poll(0.0) == []
    engine.abort([request.uid for request in made[1:]] + ["nobody"])
    cut = completions(engine.poll(0.0))
    assert set(cut) == {request.uid for request in made[1:]}
    for uid, completion in cut.items():
        assert completion.finish_reason == "abort"
        assert completion.token_ids == whole[uid].token_ids[: len(completion.token_ids)]
    again = [replace(request, attempt=1, sampled_ids=cut[request.uid].token_ids) for request in made[1:]]
    rest = completions([event for request in again for event in _submitted(engine, request)] + drain(engine))
    assert rest[made[0].uid] == whole[made[0].uid]
    for uid, completion in cut.items():
        assert completion.token_ids + rest[uid].token_ids == whole[uid].token_ids
        assert rest[uid].finish_reason == "length"
        assert rest[uid].log_probs == pytest.approx(whole[uid].log_probs[len(completion.token_ids) :], abs=2e-5)
    assert any(len(completion.token_ids) > 0 for completion in cut.values())


def _submitted(engine: RolloutEngine, request: Request) -> list[Event]:
    assert engine.submit(request)
    return engine.poll(0.0)


def test_a_paused_engine_gives_what_it_has_and_is_silent(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 4)
    made = suite.requests(groups=1, n=3, **LONG)
    whole = generate(engine, made)
    for request in made:
        engine.submit(request)
    for _ in range(5):
        engine.poll(0.0)
    engine.pause()
    partial = engine.poll(0.0)
    assert [type(event) for event in partial] == [Partial] * 3
    for event, completion in zip(partial, whole, strict=True):
        assert isinstance(event, Partial) and event.offset == 0 and 4 <= len(event.token_ids) < 20
        assert event.token_ids == completion.token_ids[: len(event.token_ids)]
        assert event.versions == ((4, len(event.token_ids)),)
    assert engine.poll(0.0) == [] and engine.status().running + engine.status().waiting == 3
    engine.resume()
    found = completions(drain(engine))
    assert [found[request.uid] for request in made] == whole


def test_weights_change_between_two_tokens(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Tokens before the change come from the old weights, and later ones from a full recomputation with the new
    ones."""
    suite.own(engine, model)
    engine.load(sharpened(model, 1.0), version=1)
    made = suite.requests(groups=2, n=2, **LONG)
    old = dict(zip([request.uid for request in made], generate(engine, made), strict=True))
    for request in made:
        engine.submit(request)
    for _ in range(8):
        engine.poll(0.0)
    engine.load(sharpened(model, 0.5), version=2)
    found = completions(drain(engine))
    changed = suite.changed(model, 0.5)
    mixed = 0
    for request in made:
        completion = found[request.uid]
        assert sum(count for _, count in completion.versions) == 20
        before = dict(completion.versions).get(1, 0)
        mixed += 0 < before < 20
        assert completion.token_ids[:before] == old[request.uid].token_ids[:before]
        new = suite.own_log_probs(changed, request, completion)[before:]
        assert torch.allclose(new, torch.tensor(completion.log_probs[before:]), atol=1e-4)
    assert mixed >= 2


def test_a_kept_cache_is_not_computed_again(model: PreTrainedModel) -> None:
    found = {}
    for keeps in (True, False):
        native = NativeEngine(on_new_weights="keep" if keeps else "recompute")
        native.adopt(model)
        native.load(sharpened(model, 1.0), version=1)
        [request] = suite.requests(groups=1, n=1, **LONG)
        native.submit(request)
        for _ in range(8):
            native.poll(0.0)
        native.load(sharpened(model, 0.5), version=2)
        [found[keeps]] = completions(drain(native)).values()
        assert found[keeps].versions == ((1, 8), (2, 12)) and found[keeps].preemptions == 0
    assert found[True].log_probs[:8] == found[False].log_probs[:8]
    assert found[True].log_probs[8] != found[False].log_probs[8]


def test_a_request_past_its_deadline_fails_alone(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    late, other = suite.requests(groups=2, n=1, **LONG)
    engine.submit(replace(late, deadline_seconds=0.0))
    engine.submit(other)
    events = drain(engine)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert failed.uid == late.uid and failed.failure.timed_out and failed.failure.source == "engine"
    assert completions(events).keys() == {other.uid}


def test_equal_uids_are_refused(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    with raises(EngineError, key=re.compile("^request "), found=re.compile(" 2 ")):
        generate(engine, [*suite.requests(groups=1, n=1), *suite.requests(groups=1, n=1)])


def test_media_are_refused_by_an_engine_that_reads_text(engine: RolloutEngine, model: PreTrainedModel) -> None:
    suite.begin(engine, model, 0)
    [request] = suite.requests(groups=1, n=1)
    with raises(EngineError, found=re.compile("images")):
        engine.submit(replace(request, media=(Media("image", "d1", None),)))


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_what_engines_can_do(kind: type[NativeEngine] | type[HFEngine]) -> None:
    assert isinstance(kind(), SharesModule) and isinstance(kind(), Sleeps)


@pytest.mark.parametrize(
    "check",
    [*suite.QUICK_CHECKS, *(pytest.param(check, marks=pytest.mark.slow) for check in suite.CHECKS)],
    ids=lambda check: check.__name__,
)
def test_as_every_engine(engine: RolloutEngine, model: PreTrainedModel, check: suite.Check) -> None:
    suite.begin(engine, model, 0)
    check(engine, model)


# -- requests that stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", first(1, [{}, SAMPLING[5]], others=pytest.mark.slow), ids=["plain", "penalties"])
def test_streamed_tokens_are_the_completions(
    engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]
) -> None:
    suite.begin(engine, model, 0)
    suite.check_streams(engine, suite.requests(groups=4, n=4, **params))


def test_a_stream_goes_on_over_new_weights_a_pause_and_a_later_attempt(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    suite.own(engine, model)
    engine.load(sharpened(model, 1.0), version=1)
    [request] = suite.requests(groups=1, n=1, **LONG)
    whole = generate(engine, [request])[0]
    again = replace(request, attempt=1, sampled_ids=whole.token_ids[:5], streams=True)
    assert engine.submit(again)
    events = [event for _ in range(4) for event in engine.poll(0.0)]
    engine.pause()
    events += engine.poll(0.0)
    engine.resume()
    engine.load(sharpened(model, 0.5), version=2)
    *streamed, last = events + drain(engine)
    assert isinstance(last, Finished) and {type(event) for event in streamed} == {Partial}
    partials = [event for event in streamed if isinstance(event, Partial)]
    lengths = [len(event.token_ids) for event in partials]  # a pause may give two: the last step was on its way
    assert [event.offset - 5 for event in partials] == [sum(lengths[:at]) for at in range(len(lengths))]
    assert sum(lengths) == 14 and max(lengths) <= 2
    assert sum((event.token_ids for event in partials), ()) == last.completion.token_ids[:-1]
    assert sum((event.log_probs for event in partials), ()) == last.completion.log_probs[:-1]
    runs = [(version, 1) for event in partials for version, count in event.versions for _ in range(count)]
    old = dict(last.completion.versions)[1]
    assert runs == [(1, 1)] * old + [(2, 1)] * (14 - old) and 0 < old < 14
    assert last.completion.token_ids[:old] == whole.token_ids[5 : 5 + old]


def test_rows_that_do_not_stream_are_not_read(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    read: list[list[str]] = []
    before = native._read_streaming
    monkeypatch.setattr(
        native, "_read_streaming", lambda live: (read.append([each.request.uid for each in live]), before(live))
    )
    made = suite.requests(groups=2, n=2, **LONG)
    generate(native, made)
    assert not read
    generate(native, [replace(made[0], streams=True), *made[1:]])
    assert read == [[made[0].uid]] * 19 and not native._streaming


# -- an engine of a user


@pytest.mark.slow
def test_the_documented_command_holds_an_engine_of_a_file_to_the_suite(tmp_path: Path) -> None:
    """The command in examples/extending leaves out the tests of whet's own engines."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command += ["tests/rollout/test_engines.py", "--rollout-engine", "examples/extending/rollout_engine.py:Recorded"]
    command += ["--rollout-engine-options", json.dumps({"file": str(tmp_path / "requests.jsonl")})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    passed = int(re.findall(r"(\d+) passed", done.stdout)[0])
    assert passed > 40 and "native" not in done.stdout
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) > 500
