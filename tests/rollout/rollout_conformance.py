# SPDX-License-Identifier: Apache-2.0
"""Requirements of every rollout engine, checked against the model's own forward. test_engines.py shows the use."""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.config.schema import LoraConfig
from whet.kernels.sampling import SamplingState, sample
from whet.keyed import key
from whet.models.load import load_policy
from whet.models.lora import add_adapter, merged_weights
from whet.rollout.in_process import InProcessEngine
from whet.rollout.protocol import (
    Completion,
    Finished,
    Partial,
    Request,
    RolloutEngine,
    SamplingParams,
    SharesModule,
    generate,
)
from whet.weight_sync import buckets
from whet.weight_sync.buckets import Digest

log = logging.getLogger(__name__)
BytesOf = Callable[[Any], int]
Check = Callable[[RolloutEngine, PreTrainedModel], None]
STOP = 7
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.2, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0.8},
    {"allowed_token_ids": tuple(range(4, 12)), "bad_words": ((5,), (4, 6), (6, 4, 8), (8, 8)), "top_p": 0.95},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


def begin(engine: RolloutEngine, model: PreTrainedModel, version: int) -> None:
    """The model's weights: its module itself, where the engine shares one."""
    if isinstance(engine, SharesModule):
        engine.attach(model, version)
    else:
        engine.load(named(model), version)


def own(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Makes ready for `load`."""
    if isinstance(engine, SharesModule):
        engine.adopt(model)


def requests(groups: int = 4, n: int = 3, seed: int = 0, longest: int = 24, **params: object) -> list[Request]:
    """Groups of equal prompts of 1 to 40 tokens, with limits of 1 to `longest` tokens."""
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = tuple(draw.randrange(3, 40) for _ in range(draw.randint(1, 40)))
        for sample_ in range(n):
            options = {"max_new_tokens": draw.randint(1, longest), "stop_token_ids": (STOP, 9), **params}
            sampling = SamplingParams(**options)  # type: ignore[arg-type]
            made.append(Request(f"{group}:{sample_}", prompt, sampling, key(seed, "test", group, sample_)))
    return made


def check_log_probs(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """Checks that log-probs equal the model's own forward: mean gap below 5e-6, largest below 1e-4 (float32)."""
    gaps = []
    for request, completion in zip(made, generate(engine, made), strict=True):
        log_probs = own_log_probs(model, request, completion)
        gaps.append((log_probs - torch.tensor(completion.log_probs)).abs())
    gap = torch.cat(gaps)
    assert gap.mean() < 5e-6 and gap.max() < 1e-4, (gap.mean(), gap.max())


def own_log_probs(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """The model's forward over the whole sequence, one row, no cache."""
    logits = forward(model, (*request.prompt_ids, *completion.token_ids))[len(request.prompt_ids) - 1 : -1]
    log_pi = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
    return log_pi.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def check_likeliest(
    engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request], tolerance: float = 0.0
) -> None:
    """Checks that the most probable tokens at each position equal the model's own forward, also in Partials; the tokens
    and log-probs equal the ones of requests without this option."""
    plain = generate(engine, made)
    asking = [
        replace(request, params=replace(request.params, num_likeliest=number % 4), streams=number % 3 == 0)
        for number, request in enumerate(made)
    ]
    for request in asking:
        assert engine.submit(request)
    done, parts = dict[str, Completion](), dict[str, list[Partial]]()
    while len(done) < len(made):
        for event in engine.poll(1.0):
            if isinstance(event, Partial):
                parts.setdefault(event.uid, []).append(event)
            else:
                assert isinstance(event, Finished)
                done[event.uid] = event.completion
    found = [done[request.uid] for request in asking]
    assert_same([replace(each, likeliest=()) for each in found], plain, tolerance)
    assert not any(each.likeliest for each in plain)
    for request, completion in zip(asking, found, strict=True):
        if not (count := request.params.num_likeliest):
            assert completion.likeliest == ()
            continue
        logits = forward(model, (*request.prompt_ids, *completion.token_ids))[len(request.prompt_ids) - 1 : -1]
        log_pi = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
        told = torch.tensor(completion.likeliest, dtype=torch.float64)  # [T, count, 2]
        assert told.shape == (len(completion.token_ids), count, 2)
        own, ids = told[..., 1].float(), told[..., 0].long()
        assert (own - log_pi.topk(count).values).abs().max() < 1e-4 and (own.diff() <= 0).all()
        assert (own - log_pi.gather(1, ids)).abs().max() < 1e-4
        places = zip(completion.token_ids, completion.log_probs, map(dict, completion.likeliest), strict=True)
        assert all(each.get(token, log_prob) == log_prob for token, log_prob, each in places)
        given = [each for part in parts.get(request.uid, []) for each in part.likeliest]
        assert given == list(completion.likeliest[: len(given)])
        assert [len(part.likeliest) for part in parts.get(request.uid, [])] == [
            len(part.token_ids) for part in parts.get(request.uid, [])
        ]


def forward(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """The logits after each token, on the host."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits.cpu()


def gaps(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    return (own_log_probs(model, request, completion) - torch.tensor(completion.log_probs)).abs()


def changed(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """A copy of the model, with all weights multiplied."""
    other = load_policy(model.config._name_or_path).eval().to(model.device)
    with torch.no_grad():
        for weight, own in zip(other.parameters(), model.parameters(), strict=True):
            weight.copy_(own * factor)
    return other


def named(model: PreTrainedModel, factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * factor) for name, weight in model.named_parameters()]


def check_choices(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """Every token is the one that `sample` draws from the model's own logits, and the limits and stops are kept."""
    for request, completion in zip(made, generate(engine, made), strict=True):
        assert 1 <= len(completion.token_ids) <= request.params.max_new_tokens
        logits = forward(model, (*request.prompt_ids, *completion.token_ids))[len(request.prompt_ids) - 1 : -1]
        state = SamplingState.of([request] * len(logits), logits.shape[1], torch.device("cpu"))
        so_far = torch.tensor([completion.token_ids] * len(logits))
        tokens, _ = sample(logits, state, torch.arange(len(logits)), so_far)
        assert tuple(tokens.tolist()) == completion.token_ids
        stops = request.params.stop_token_ids
        assert all(token not in stops for token in completion.token_ids[:-1])
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in stops)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == request.params.max_new_tokens


def check_rules(engine: RolloutEngine, made: Sequence[Request]) -> None:
    """Nothing but allowed tokens, and no bad word."""
    for request, completion in zip(made, generate(engine, made), strict=True):
        ids, params = completion.token_ids, request.params
        assert params.allowed_token_ids is None or set(ids) <= set(params.allowed_token_ids)
        for word in params.bad_words:
            assert word not in [ids[start : start + len(word)] for start in range(len(ids))]


def check_stop_strings(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    made: Sequence[Request],
    length: int,
    tolerance: float = 0.0,
) -> None:
    """Checks that with stop strings taken from its own text a response ends with the token after which its text first
    has one, and is otherwise unchanged; other requests do not change, up to `tolerance` of their log-probs."""
    free = generate(engine, made)
    stopping: list[Request] = []
    for row, (request, completion) in enumerate(zip(made, free, strict=True)):
        text = tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        middle = len(text) // 2
        stop = (text[middle : middle + length], "never said") if text[middle:] and row % 3 else ()
        stopping.append(replace(request, params=replace(request.params, stop=stop)))
    ended = 0
    for request, before, after in zip(stopping, free, generate(engine, stopping), strict=True):
        texts = [
            tokenizer.decode(list(before.token_ids[: count + 1]), skip_special_tokens=True)
            for count in range(len(before.token_ids))
        ]
        ends = [count for count, text in enumerate(texts, 1) if any(string in text for string in request.params.stop)]
        if not ends or before.token_ids[ends[0] - 1] in request.params.stop_token_ids:
            assert_same([after], [before], tolerance)
            continue
        expected = (before.token_ids[: ends[0]], "stop", request.params.stop[0])
        assert (after.token_ids, after.finish_reason, after.stop) == expected
        assert after.log_probs == pytest.approx(before.log_probs[: ends[0]], abs=max(1e-6, tolerance))
        ended += ends[0] < len(before.token_ids)
    assert ended > len(made) // 4


def assert_same(found: Sequence[Completion], expected: Sequence[Completion], tolerance: float = 0.0) -> None:
    """Equal completions, but for a `tolerance` of log-probs."""
    assert [replace(each, log_probs=()) for each in found] == [replace(each, log_probs=()) for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, rel=0, abs=tolerance)


def assert_same_but_for_rounding(found: Sequence[Completion], expected: Sequence[Completion], near: float) -> None:
    """Checks that completions are equal up to the rounding of log-probs, including the most probable tokens'."""
    bare = [[replace(each, likeliest=()) for each in completions] for completions in (found, expected)]
    assert_same(*bare, near)
    for one, other in zip(found, expected, strict=True):
        told = (torch.tensor(each.likeliest, dtype=torch.float64) for each in (one, other))
        assert torch.allclose(*told, rtol=0, atol=near)


def check_company_does_not_matter(engine: RolloutEngine, made: Sequence[Request], tolerance: float = 0.0) -> None:
    """A request gives the same tokens and log-probs alone, among 7 and among all others, in any order."""
    together = generate(engine, made)
    backwards = generate(engine, made[::-1])[::-1]
    assert_same(together, backwards, tolerance)
    some = list(range(0, len(made), max(1, len(made) // 7)))[:7]
    assert_same(generate(engine, [made[index] for index in some]), [together[index] for index in some], tolerance)
    for index in some:
        assert_same(generate(engine, [made[index]]), [together[index]], tolerance)


def check_streams(engine: RolloutEngine, made: Sequence[Request], tolerance: float = 0.0) -> None:
    """Checks that a streaming request returns a prefix of its completion as Partial events, in order and without a gap;
    it and the others have the same results as without streaming. An engine that gives none is skipped."""
    whole = generate(engine, made)
    for row, request in enumerate(made):
        assert engine.submit(replace(request, streams=row % 2 == 0))
    streamed: dict[str, list[Partial]] = {request.uid: [] for request in made}
    done: dict[str, Completion] = {}
    while len(done) < len(made):
        for event in engine.poll(1.0):
            if isinstance(event, Finished):
                done[event.uid] = event.completion
            else:
                assert isinstance(event, Partial) and event.uid not in done
                assert event.offset == sum(len(each.token_ids) for each in streamed[event.uid])
                streamed[event.uid].append(event)
    assert_same([done[request.uid] for request in made], whole, tolerance)
    assert not any(streamed[request.uid] for request in made[1::2])
    if not any(streamed.values()):
        pytest.skip("this engine gives no tokens before the end")
    for request in made[::2]:
        completion = done[request.uid]
        given = [(each.token_ids, each.log_probs, each.versions) for each in streamed[request.uid]]
        tokens, log_probs = (tuple(value for parts in given for value in parts[column]) for column in (0, 1))
        assert all(tokens for tokens, _, _ in given)
        assert tokens == completion.token_ids[: len(tokens)]
        assert log_probs == completion.log_probs[: len(tokens)]
        versions = [run for _, _, runs in given for run in runs]
        assert sum(count for _, count in versions) == len(tokens)
        assert {version for version, _ in versions} <= {version for version, _ in completion.versions}


def check_weights(
    engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request], tolerance: float = 0.0
) -> None:
    """New weights are used at once, and the completions say which version answered."""
    engine.load(((name, weight * 1.5) for name, weight in model.named_parameters()), version=5)
    changed = generate(engine, made)
    engine.load(model.named_parameters(), version=6)
    back = generate(engine, made)
    assert {c.versions for c in changed} == {((5, len(c.token_ids)),) for c in changed}
    assert {v for c in back for v, _ in c.versions} == {6}
    assert all(a.log_probs != b.log_probs for a, b in zip(changed, back, strict=True))
    engine.sleep()
    engine.wake()
    assert_same(generate(engine, made), back, tolerance)


def check_digests(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Checks that after an update the weights passed to the engine have the digest of the trainer's, copied or shared,
    and so have the weights that it holds, if they can be read. One bit of one weight changes it."""
    digests, other = {digest_of(model)}, changed(model, 1.0)
    own(engine, model)
    for version in (1, 2):
        with torch.no_grad():
            next(other.parameters()).view(torch.int32)[0].bitwise_xor_(1)
            list(other.parameters())[-version].mul_(1.01)
        given = buckets.copy(engine.load, named(other), version, torch.float32)
        assert given == digest_of(other) and given not in digests
        assert engine.status().version == version
        digests.add(given)
        if isinstance(engine, InProcessEngine):
            assert engine.policy.require() is not other and digest_of(engine.policy.require()) == given
    if isinstance(engine, SharesModule):
        assert buckets.attach(engine, other, named(other), 3) == digest_of(other)
        with torch.no_grad():  # an optimizer's step in place
            next(other.parameters()).view(torch.int32)[0, 0].bitwise_xor_(1)
        assert digest_of(other) not in digests
        if isinstance(engine, InProcessEngine):
            assert digest_of(engine.policy.require()) == digest_of(other)


def digest_of(model: PreTrainedModel) -> str:
    digest = Digest()
    for name, weight in model.named_parameters():
        digest.add(name, weight.detach())
    return str(digest)


def own_bytes(engine: RolloutEngine) -> int:
    """The memory of this process, for an engine that computes in it."""
    gc.collect()
    return psutil.Process().memory_info().rss


def check_frequencies(engine: RolloutEngine, model: PreTrainedModel, is_cut: bool = True) -> None:
    """Chi-square of 2,000 first tokens, for plain sampling and for a cut one, where the engine has such. A sharp model
    is sampled at a temperature at which it chooses among many."""
    prompt, draw = (5, 6, 7, 8), random.Random(3)
    logits = forward(model, prompt)[-1]
    flat = max(1.0, float(logits.max() - logits.median()) / 4)
    both = SamplingParams(1, temperature=flat), SamplingParams(1, temperature=0.7 * flat, top_k=6)
    for params in both[: 1 + is_cut]:
        made = [Request(str(index), prompt, params, draw.getrandbits(63)) for index in range(2000)]
        counts = Counter(completion.token_ids[0] for completion in generate(engine, made))
        cut = logits / params.temperature
        if params.top_k:
            cut = cut.masked_fill(cut < cut.topk(params.top_k).values[-1], float("-inf"))
        expected = (cut.softmax(-1) * len(made)).tolist()
        common = [token for token, each in enumerate(expected) if each >= 5]
        rest = len(made) - sum(counts[token] for token in common)
        rest_expected = len(made) - sum(expected[token] for token in common)
        chi = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
        chi += (rest - rest_expected) ** 2 / rest_expected if rest_expected > 1 else 0.0
        freedom = len(common) - (rest_expected <= 1)
        log.info("chi-square %.1f of %d degrees of freedom", chi, freedom)
        # mean `freedom`, variance twice that: five deviations
        assert freedom >= 5 and abs(chi - freedom) < 5 * (2 * freedom) ** 0.5, (chi, freedom)


def check_twenty_updates(engine: RolloutEngine, model: PreTrainedModel, bytes_of: BytesOf = own_bytes) -> None:
    """Checks that log-probs after each update are the model's own, with a tied head too, and that memory does not
    grow."""
    other, seconds, worst, memory = changed(model, 1.0), list[float](), 0.0, list[int]()
    own(engine, model)
    draw = torch.Generator().manual_seed(0)
    for version in range(1, 21):
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw).to(weight) * 0.05 * weight.std())
        began = time.perf_counter()
        engine.load(other.named_parameters(), version)
        seconds.append(time.perf_counter() - began)
        made = requests(groups=2, n=2, seed=version)
        for request, completion in zip(made, generate(engine, made), strict=True):
            gap = float(gaps(other, request, completion).max())
            assert gap < 5e-6
            worst = max(worst, gap)
            assert {each for each, _ in completion.versions} == {version}
        memory.append(bytes_of(engine))
    log.info(
        "20 updates of %.1f M parameters: %.0f ms (median), largest gap %.1e, memory %.0f to %.0f MiB",
        *(sum(weight.numel() for weight in other.parameters()) / 1e6, statistics.median(seconds) * 1e3, worst),
        *(memory[0] / 2**20, memory[-1] / 2**20),
    )
    assert memory[-1] - memory[4] < 32 * 2**20


def check_adapter(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Log-probs under an adapter: of a module that has one, and of weights that it was merged into."""
    adapted = changed(model, 1.0)
    add_adapter(adapted, LoraConfig(rank=2), seed=1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:  # 0 in a new adapter
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.1)
    made = requests(groups=2)
    plain = generate(engine, made)
    if isinstance(engine, SharesModule):
        engine.attach(adapted, 1)
        check_log_probs(engine, adapted, made)
    own(engine, model)
    engine.load(merged_weights(adapted), version=2)
    check_log_probs(engine, adapted, made)
    assert all(a.log_probs != b.log_probs for a, b in zip(generate(engine, made), plain, strict=True))


def check_memory(engine: RolloutEngine, model: PreTrainedModel, bytes_of: BytesOf = own_bytes) -> None:
    """Memory does not grow with 1,000 requests."""
    generate(engine, requests(groups=25, n=8))
    before = bytes_of(engine)
    for seed in range(1, 6):
        generate(engine, requests(groups=25, n=8, seed=seed))
    after = bytes_of(engine)
    log.info("memory over 1,000 requests: %.0f to %.0f MiB", before / 2**20, after / 2**20)
    assert after - before < 32 * 2**20


CHECKS: tuple[Check, ...] = (check_frequencies, check_twenty_updates, check_adapter, check_memory)
QUICK_CHECKS: tuple[Check, ...] = (check_digests,)
