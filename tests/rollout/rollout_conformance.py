# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine is held to, against the model's own forward. See test_engines.py for the use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.keyed import key
from whet.rollout.protocol import (
    Completion,
    Finished,
    Partial,
    Request,
    RolloutEngine,
    SamplingParams,
    generate,
)
from whet.rollout.sampling import SamplingState, sample

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
    """Log-probs are those of the model's own forward: mean gap below 5e-6, largest below 1e-4 (float32)."""
    gaps = []
    for request, completion in zip(made, generate(engine, made), strict=True):
        log_probs = own_log_probs(model, request, completion)
        gaps.append((log_probs - torch.tensor(completion.log_probs)).abs())
    gap = torch.cat(gaps)
    assert gap.mean() < 5e-6 and gap.max() < 1e-4, (gap.mean(), gap.max())


def own_log_probs(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """The model's forward over the whole sequence, one row, no cache."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    log_pi = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
    return log_pi.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]


def check_choices(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """Every token is the one that `sample` draws from the model's own logits, and the limits and stops are kept."""
    for request, completion in zip(made, generate(engine, made), strict=True):
        assert 1 <= len(completion.token_ids) <= request.params.max_new_tokens
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
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
    """With stop strings taken from its own text an answer ends with the token after which its text first has one, and
    is else what it was; the others do not notice, up to `tolerance` of their log-probs."""
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
    """A request that streams gives a prefix of its completion as Partial events, in order and without a gap; it and
    the others are what they are where none streams. An engine that gives none is skipped."""
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
