# SPDX-License-Identifier: Apache-2.0
"""Requirements of every rollout engine with its own server, beside rollout_conformance.py.

A check of CHECKS takes the engine and the model that its server samples from, and begins after `reset`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import rollout_conformance as suite
import torch
from rollout_conformance import changed, gaps, named
from safetensors import safe_open
from transformers import PreTrainedModel

from tests.raising import raises
from whet.config.schema import ModelConfig
from whet.errors import ConfigError, EngineError, WeightSyncError
from whet.models.load import load_policy, load_tokenizer
from whet.plugins.inference.servers import engine as engine_module
from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.servers.environment import Package, find_environment
from whet.plugins.inference.servers.options import OnNewWeights
from whet.plugins.inference.servers.weights import Part, Weights, in_parts
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
from whet.types import Media
from whet.weight_sync import buckets
from whet.weight_sync.buckets import Digest

if TYPE_CHECKING:
    from whet.plugins.lessons.init_model import Arch

log = logging.getLogger(__name__)
ROUNDING = 2e-5  # of log-probs: a prompt in the prefix cache, or in another batch, is computed in other parts
LENGTHS = {"vLLM": 1500, "SGLang": 1000}  # of 2,048 positions: long enough for something to happen before the end
MIDDLE_SECONDS = 300.0  # within which something has happened in mid-answer
CPU = torch.device("cpu")
SERVER = "server"  # the name of the process that answers, among those of a server
SMALL = {"kv_cache_bytes": 2**26, "threads": 1}
RULES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3}
RULES |= {"bad_words": ((5, 6), (8,))}
Start = Callable[..., Any]
Check = Callable[[ServerEngine, PreTrainedModel], None]
COUNTS: dict[str, Callable[[ServerEngine], list[int]]] = {  # tokens of each unfinished request, as the server says
    "vLLM": lambda engine: [len(each["token_ids"]) for each in engine.call("GET", "/whet/requests")],
    "SGLang": lambda engine: [*engine.call("GET", "/server_info")["internal_states"][0]["whet_sent"].values()],
}


# -- models, servers, requests


def random_model(folder: Path, arch: Arch, *, is_bpe: bool = False, **options: Any) -> PreTrainedModel:
    """A random model of a context of 2,048 tokens, saved with a sharper choice, as new weights say nearly the same of
    every token. A Qwen2.5 gets a head of its own, the others' is tied to the embedding."""
    alphabet = None if is_bpe or arch == "qwen2.5" else "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
    from whet.plugins.lessons.init_model import init_model

    init_model(folder / "plain", arch, "nano", alphabet=alphabet, max_position_embeddings=2048, **options)
    model = load_policy(folder / "plain")
    with torch.no_grad():
        model.model.norm.weight.mul_(4)
        if arch == "qwen2.5":
            model.config.tie_word_embeddings = False
            head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.02
            model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder / "sharp")
    load_tokenizer(folder / "plain").save_pretrained(folder / "sharp")
    return load_policy(folder / "sharp").eval()


def require(package: Package) -> None:
    """Skips where no environment with the package is found."""
    try:
        find_environment(package, None)
    except ConfigError as error:
        pytest.skip(f"no environment with {package.title} here: {error}")


@contextmanager
def starting(kind: type[Any]) -> Iterator[Start]:
    """Yields a function that starts engines on a model's folder, and closes them at the end."""
    require(kind.package)
    started: list[ServerEngine] = []

    def start(folder: Path, dtype: torch.dtype = torch.float32, max_batch_size: int = 64, **options: Any) -> Any:
        model = ModelConfig(path=str(folder))
        started.append(kind(dtype, max_batch_size, CPU, model, **{**SMALL, **options}))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def reset(engine: ServerEngine, model: PreTrainedModel, version: int = 0) -> None:
    """The model's own weights, and nothing under way."""
    engine.resume()
    engine.abort(list(engine._live))
    engine.poll(0.0)
    if engine.version != version:
        engine.load(named(model), version)


def long_requests(engine: ServerEngine, groups: int, n: int, **params: Any) -> list[Request]:
    return suite.requests(groups, n, **{"stop_token_ids": (), "max_new_tokens": length_of(engine), **params})


def length_of(engine: ServerEngine) -> int:
    return LENGTHS[engine.package.title]


def in_mid_answer(
    engine: ServerEngine, model: PreTrainedModel, made: Sequence[Request], tokens: int, act: Callable[[], object]
) -> list[Event]:
    """Submits requests to the model's own weights, acts when each has so many tokens, and returns the events; all again
    where one had come to its own end by then, as on a busy machine."""
    until, version, count = time.monotonic() + MIDDLE_SECONDS, engine.version, COUNTS[engine.package.title]
    while time.monotonic() < until:
        reset(engine, model, version)
        for request in made:
            assert engine.submit(request)
        while not (is_over := any(live.call.done() for live in engine._live.values())):
            assert time.monotonic() < until
            if len(counts := count(engine)) == len(made) and min(counts) >= tokens:
                break
        if not is_over:
            act()
            events = engine.poll(0.0)
            if all(event.completion.finish_reason == "abort" for event in events if isinstance(event, Finished)):
                return events
        log.info("a request ended too early; again")
    raise AssertionError(f"for {MIDDLE_SECONDS:g} s requests ended before anything could be done to them")


def unfinished(engine: ServerEngine) -> int:
    status = engine.status()
    return status.running + status.waiting


def drain(engine: ServerEngine) -> list[Event]:
    events: list[Event] = []
    while unfinished(engine):
        events += engine.poll(1.0)
    return events


def completions(events: list[Event]) -> dict[str, Completion]:
    return {event.uid: event.completion for event in events if isinstance(event, Finished)}


def processes(engine: ServerEngine) -> list[psutil.Process]:
    server = psutil.Process(engine.server.process.pid)
    return [server, *server.children(recursive=True)]


def process_of(engine: ServerEngine, name: str) -> psutil.Process:
    """The process of the server with `name` in its title."""
    found = processes(engine)
    return found[0] if name == SERVER else next(each for each in found if name in each.name())


def server_bytes(engine: ServerEngine) -> int:
    return sum(process.memory_info().rss for process in processes(engine))


# -- choices


def check_native_tokens(engine: ServerEngine, model: PreTrainedModel, **params: Any) -> None:
    """Checks that tokens equal the native engine's."""
    native = NativeEngine()
    native.attach(model, 0)
    made = suite.requests(groups=8, n=4, longest=60, **params)
    for own, other in zip(generate(engine, made), generate(native, made), strict=True):
        assert own.token_ids == other.token_ids and own.finish_reason == other.finish_reason


def check_company(engine: ServerEngine, model: PreTrainedModel) -> None:
    """A request alone and among others."""
    suite.check_company_does_not_matter(engine, suite.requests(groups=16, n=8, longest=40), ROUNDING)


def check_mixed(engine: ServerEngine) -> None:
    """Checks that requests with different sampling parameters in one batch give the same results as alone."""
    mixed = [
        replace(made, uid=f"{number}:{made.uid}")
        for number, params in enumerate(suite.SAMPLING)
        for made in suite.requests(groups=2, n=2, **params)
    ]
    alone = [generate(engine, suite.requests(groups=2, n=2, **params)) for params in suite.SAMPLING]
    suite.assert_same(generate(engine, mixed), [each for part in alone for each in part], ROUNDING)


def check_streams(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Tokens before the end, where an engine gives any."""
    suite.check_streams(engine, suite.requests(groups=4, n=4, longest=40), ROUNDING)


# -- a stream of requests


def check_refusals(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Checks that impossible requests are refused."""
    [request] = suite.requests(groups=1, n=1)
    with raises(EngineError, key=f"request {request.uid}", expected=re.compile(rf"2048 .*{engine.package.title}")):
        engine.submit(replace(request, params=SamplingParams(10**4)))
    with raises(EngineError, key=f"request {request.uid}", found=re.compile("^0 prompt tokens")):
        engine.submit(replace(request, prompt_ids=()))
    with raises(
        EngineError,
        key=f"request {request.uid}",
        found=re.compile("^has images"),
        change=re.compile(r"engine\.name to native"),
    ):
        engine.submit(replace(request, media=(Media("image", "d1", None),)))
    assert engine.status().running == engine.status().waiting == 0


def check_arrivals(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Requests may come while others run."""
    made = long_requests(engine, 3, 2)
    undisturbed = generate(engine, made)
    events: list[Event] = []
    for request in made:
        assert engine.submit(request)
        events += engine.poll(0.0)
    assert engine.submit(made[0])  # is there already: not taken twice
    found = completions(events + drain(engine))
    suite.assert_same([found[request.uid] for request in made], undisturbed, ROUNDING)
    assert engine.status().oldest is None


def check_abort(engine: ServerEngine, model: PreTrainedModel, groups: int = 6, **rules: Any) -> None:
    """Aborted requests give their tokens and a later attempt the rest: draws and rules count from the start of the
    response. The others do not notice, such as request 10 where 1 is aborted."""
    made = long_requests(engine, groups, 2, **rules)
    whole = {request.uid: completion for request, completion in zip(made, generate(engine, made), strict=True)}
    engine._names = 0
    ended = {request.uid: request for request in made[0:4:2]}
    cut = completions(in_mid_answer(engine, model, made, 15, lambda: engine.abort([*ended, "nobody"])))
    assert set(cut) == set(ended)
    for uid, completion in cut.items():
        assert completion.finish_reason == "abort" and 1 < len(completion.token_ids) < length_of(engine)
        assert completion.token_ids == whole[uid].token_ids[: len(completion.token_ids)]
        assert engine.submit(replace(ended[uid], attempt=1, sampled_ids=completion.token_ids))
    rest = completions(drain(engine))
    assert set(rest) == set(whole)
    for uid in set(whole) - set(cut):
        suite.assert_same([rest[uid]], [whole[uid]], ROUNDING)
    for uid, completion in cut.items():
        assert completion.token_ids + rest[uid].token_ids == whole[uid].token_ids
        assert rest[uid].finish_reason == "length"
        assert rest[uid].log_probs == pytest.approx(whole[uid].log_probs[len(completion.token_ids) :], abs=ROUNDING)


def check_attempts(engine: ServerEngine, model: PreTrainedModel) -> None:
    """A later attempt replaces an earlier one."""
    [request] = long_requests(engine, 1, 1)
    assert engine.submit(request) and engine.submit(replace(request, attempt=1))
    [event] = drain(engine)
    assert isinstance(event, Finished) and event.attempt == 1


def check_pause(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Checks that a paused engine returns its tokens so far, and then nothing."""
    engine.load(named(model), version=4)
    made = long_requests(engine, 1, 3)
    whole = generate(engine, made)
    partial = in_mid_answer(engine, model, made, 15, engine.pause)
    assert [type(event) for event in partial] == [Partial] * 3
    for event, completion in zip(sorted(partial, key=lambda event: event.uid), whole, strict=True):
        assert isinstance(event, Partial) and event.offset == 0 and 4 <= len(event.token_ids) < length_of(engine)
        assert event.token_ids == completion.token_ids[: len(event.token_ids)]
        assert event.log_probs == pytest.approx(completion.log_probs[: len(event.token_ids)], abs=ROUNDING)
        assert event.versions == ((4, len(event.token_ids)),)
    time.sleep(0.3)
    assert engine.poll(0.3) == [] and unfinished(engine) == 3
    engine.resume()
    found = completions(drain(engine))
    suite.assert_same([found[request.uid] for request in made], whole, ROUNDING)


def check_arrivals_in_a_pause(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Requests that come in a pause can be aborted."""
    engine.pause()
    first, second = suite.requests(groups=2, n=1)
    assert engine.submit(first) and engine.submit(second)
    engine.abort([first.uid])
    [event] = engine.poll(0.0)
    assert isinstance(event, Finished) and event.completion.finish_reason == "abort"
    engine.resume()
    assert set(completions(drain(engine))) == {second.uid}


@contextmanager
def on_new_weights(engine: ServerEngine, handling: OnNewWeights) -> Iterator[None]:
    """The engine with another value of the option."""
    engine.on_new_weights = handling
    try:
        yield
    finally:
        engine.on_new_weights = "recompute"


def check_load(
    engine: ServerEngine, model: PreTrainedModel, pauses: bool = False, handling: OnNewWeights = "recompute"
) -> None:
    """Checks that tokens before a change of weights come from the old weights, and later ones from a full recomputation
    with the new ones; partial responses at a pause have all tokens of the former."""
    made = long_requests(engine, 2, 2)
    old = dict(zip([request.uid for request in made], generate(engine, made), strict=True))

    def change() -> None:
        if pauses:
            engine.pause()
        with on_new_weights(engine, handling):
            engine.load(named(model, 0.5), version=2)

    partial = {event.uid: event for event in in_mid_answer(engine, model, made, 25, change)}
    assert set(partial) == (set(old) if pauses else set())
    if pauses:
        assert engine.poll(0.3) == [] and unfinished(engine) == 4  # a new version does not end the pause
        engine.resume()
    found, other = completions(drain(engine)), changed(model, 0.5)
    for request in made:
        completion, early = found[request.uid], partial.get(request.uid)
        (first, before), (second, after) = completion.versions
        assert (first, second, before + after) == (0, 2, length_of(engine)) and 0 < before < length_of(engine)
        assert completion.token_ids[:before] == old[request.uid].token_ids[:before]
        assert completion.log_probs[:before] == pytest.approx(old[request.uid].log_probs[:before], abs=ROUNDING)
        assert gaps(other, request, completion)[before:].max() < 1e-4
        assert early is None or (isinstance(early, Partial) and early.token_ids == completion.token_ids[:before])


def check_load_while_paused(engine: ServerEngine, model: PreTrainedModel) -> None:
    """The same in a pause."""
    check_load(engine, model, pauses=True)


def check_load_by_abort(engine: ServerEngine, model: PreTrainedModel) -> None:
    """The same where requests are ended and sent again; in a pause nothing can end, and they compute all again."""
    check_load(engine, model, handling="abort")
    reset(engine, model)
    check_load(engine, model, pauses=True, handling="abort")


def check_load_by_waiting(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Requests that run end under the old weights, and others begin under the new ones."""
    made = long_requests(engine, 2, 2)
    old = generate(engine, made)
    for request in made:
        assert engine.submit(request)
    until = time.monotonic() + MIDDLE_SECONDS
    while len(counts := COUNTS[engine.package.title](engine)) < len(made) or not min(counts):
        assert time.monotonic() < until
    with on_new_weights(engine, "wait"):
        engine.load(named(model, 0.5), version=2)
    fresh = replace(made[0], uid="fresh")
    engine.submit(fresh)
    found, other = completions(drain(engine)), changed(model, 0.5)
    suite.assert_same([found[request.uid] for request in made], old, ROUNDING)
    assert found["fresh"].versions == ((2, length_of(engine)),)
    assert gaps(other, fresh, found["fresh"]).max() < 1e-4


def check_kept_cache(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Running requests keep keys and values of the old weights; new ones do not share them."""
    [request] = long_requests(engine, 1, 1)

    def change() -> None:
        with on_new_weights(engine, "keep"):
            engine.load(named(model, 0.5), version=2)

    in_mid_answer(engine, model, [request], 20, change)
    fresh = replace(request, uid="fresh")
    engine.submit(fresh)
    found, other = completions(drain(engine)), changed(model, 0.5)
    before = dict(found[request.uid].versions)[0]
    assert gaps(other, request, found[request.uid])[before:].max() > 1e-2
    assert gaps(other, fresh, found["fresh"]).max() < 1e-4


def check_deadline(engine: ServerEngine, model: PreTrainedModel) -> None:
    """A request past its deadline fails alone, and the server hears of it."""
    first, second, other = long_requests(engine, 3, 1)
    engine.submit(replace(first, deadline_seconds=0.0))
    engine.submit(replace(second, deadline_seconds=0.05))
    engine.submit(other)
    events = drain(engine)
    failed = {event.uid: event.failure for event in events if isinstance(event, Failed)}
    assert failed.keys() == {first.uid, second.uid} and completions(events).keys() == {other.uid}
    assert all(each.timed_out and each.source == "engine" for each in failed.values())
    until = time.monotonic() + 10
    while COUNTS[engine.package.title](engine):
        assert time.monotonic() < until


# -- weights


def check_weights(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Weights from outside, and sleep."""
    assert isinstance(engine, Sleeps) and not isinstance(engine, SharesModule)
    suite.check_weights(engine, model, suite.requests(groups=2), ROUNDING)


def check_prefixes_per_version(engine: ServerEngine, model: PreTrainedModel) -> None:
    """The prefix cache is per version: equal prompts of 300 tokens before and after a change."""
    request = Request("0", tuple(5 + index % 30 for index in range(300)), SamplingParams(8), 3)
    generate(engine, [request])
    engine.load(named(model, 0.5), version=1)
    [completion] = generate(engine, [request])
    assert gaps(changed(model, 0.5), request, completion).max() < 1e-4


def check_other_models_weights(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Weights of another model are refused, and nothing is sampled until others came."""
    made = suite.requests(groups=1)
    before = generate(engine, made)
    wrong_shape = [(name, weight[:-1] if "norm" in name else weight) for name, weight in named(model)]
    expected = re.compile(engine.package.title)
    for wrong in (named(model)[:-1], [*named(model), ("model.extra.weight", torch.zeros(2))], wrong_shape):
        with raises(WeightSyncError, key="version 7 of the weights", expected=expected):
            engine.load(wrong, version=7)
        engine.submit(made[0])
        with raises(WeightSyncError, key=re.compile(r"^version \d+ "), change=re.compile("weights")):
            engine.poll(1.0)
        engine.load(named(model), version=0)
        drain(engine)
    suite.assert_same(generate(engine, made), before, ROUNDING)


def check_broken_weights(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Weights that break off change nothing."""

    def broken() -> Any:
        yield from named(model, 2.0)[:3]
        raise OSError("the link broke")

    made = suite.requests(groups=1)
    before = generate(engine, made)
    with pytest.raises(OSError, match="the link broke"):
        engine.load(broken(), version=7)
    suite.assert_same(generate(engine, made), before, ROUNDING)


@contextmanager
def in_small_parts(engine: ServerEngine, part_bytes: int = 2**17) -> Iterator[list[Part]]:
    """Makes the engine send weights in parts of about `part_bytes` bytes; yields the sent parts."""
    sent = list[Part]()

    def parts(weights: Weights, readers: int, folder: str | None) -> Iterator[list[Part]]:
        for part in in_parts(weights, readers, folder, part_bytes):
            sent.append(part[0])
            yield part

    before, engine_module.in_parts, engine.weight_transfer = engine_module.in_parts, parts, "ipc"
    try:
        yield sent
    finally:
        engine_module.in_parts, engine.weight_transfer = before, "file"


def check_parts(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Checks that weights in parts change running requests like weights in one file. If they break off after the first
    part, nothing is sampled, and the next ones repair it. A server without a copy for restarts needs none."""
    made = suite.requests(groups=1)
    before = generate(engine, made)
    with in_small_parts(engine) as sent:
        check_load(engine, model)
        assert len(sent) > 3 and engine._kept.file is not None and engine._kept.version == 2
        all_weights = named(model, 2.0)
        in_a_layer = max(place for place, (name, _) in enumerate(all_weights) if "k_proj" in name)
        missing = next(name for name, _ in all_weights if "up_proj" in name)

        def broken() -> Any:
            yield from all_weights[: in_a_layer + 1]
            raise OSError("the link broke")

        with pytest.raises(OSError, match="the link broke"):
            engine.load(broken(), version=7)
        engine.submit(made[0])
        with raises(WeightSyncError, key=re.compile(r"^version \d+ "), change=re.compile("weights")):
            engine.poll(1.0)
        with raises(WeightSyncError, key="version 8 of the weights"):
            engine.load([each for each in all_weights if each[0] != missing], version=8)
        engine.abort([made[0].uid])
        engine._restarts, kept = 0, engine._restarts
        engine.load(named(model), version=9)
        assert engine._kept.file is None
        engine._restarts = kept
        drain(engine)
    found = generate(engine, made)
    assert {each.versions for each in found} == {((9, len(each.token_ids)),) for each in found}
    as_before = [replace(each, versions=now.versions) for each, now in zip(before, found, strict=True)]
    suite.assert_same(found, as_before, ROUNDING)


def check_digests(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Checks that the digest of the trainer's weights equals the digest of the rank's weights, and of the file that the
    server reads; log-probs belong to these weights. The server's own memory is not read."""
    suite.check_digests(engine, model)
    other, file = changed(model, 1.0), Digest()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    given = buckets.copy(engine.load, named(other), 3, torch.float32)
    with safe_open(engine._kept.part["path"], "pt") as kept:
        for name in kept.keys():  # noqa: SIM118  # a file is no mapping
            file.add(name, kept.get_tensor(name))
    assert given == str(file) == suite.digest_of(other) != suite.digest_of(model)
    suite.check_log_probs(engine, other, suite.requests(groups=2))


def check_twenty_updates(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Checks that log-probs after each update are the model's own, with a tied head too, and that memory does not
    grow."""
    suite.check_twenty_updates(engine, model, server_bytes)


def check_memory(engine: ServerEngine, model: PreTrainedModel) -> None:
    """The server's processes do not grow with 1,000 requests."""
    suite.check_memory(engine, model, server_bytes)


REQUEST_CHECKS: tuple[Check, ...] = (
    *(check_native_tokens, suite.check_frequencies, check_company, check_streams, check_refusals, check_arrivals),
    *(check_abort, check_attempts, check_pause, check_arrivals_in_a_pause, check_deadline),
)
WEIGHT_CHECKS: tuple[Check, ...] = (
    *(check_load, check_load_while_paused),
    *(
        check_load_by_abort,
        check_load_by_waiting,
        check_kept_cache,
        check_weights,
        check_parts,
        check_digests,
        check_twenty_updates,
        suite.check_adapter,
    ),
    *(check_prefixes_per_version, check_other_models_weights, check_broken_weights, check_memory),
)
CHECKS = (*REQUEST_CHECKS, *WEIGHT_CHECKS)


def check_kill(start: Start, folder: Path, victim: str, answer_seconds: float = 20.0) -> None:
    """A killed process is heard of within seconds, and no other outlives it."""
    random_model(folder, "qwen3")
    engine = start(folder / "sharp", answer_seconds=answer_seconds)
    generate(engine, suite.requests(groups=1))
    found, began = processes(engine), time.monotonic()
    for request in long_requests(engine, 2, 2):
        engine.submit(request)
    process_of(engine, victim).kill()
    with raises(EngineError, key=re.compile(f"^{engine.package.title} server ")):
        while True:
            engine.poll(1.0)
    log.info("%s killed: heard of after %.1f s", victim, time.monotonic() - began)
    assert time.monotonic() - began < 15
    engine.close()
    assert not psutil.wait_procs(found, timeout=10)[1]
