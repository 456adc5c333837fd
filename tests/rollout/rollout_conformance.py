# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine is held to, against the model's own forward. See test_engines.py for the use."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from whet.keyed import key
from whet.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from whet.rollout.sampling import SamplingState, sample

STOP = 7


def requests(groups: int = 4, n: int = 3, seed: int = 0, longest: int = 24, **params: object) -> list[Request]:
    """Groups of equal prompts of 1 to 40 tokens, with limits of 1 to `longest` tokens."""
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = tuple(draw.randrange(3, 40) for _ in range(draw.randint(1, 40)))
        for sample_ in range(n):
            options = {"max_new_tokens": draw.randint(1, longest), "stop_token_ids": (STOP, 9), **params}
            made.append(Request(prompt, SamplingParams(**options), key(seed, "test", group, sample_)))  # type: ignore[arg-type]
    return made


def check_log_probs(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """Log-probs are those of the model's own forward: mean gap below 5e-6, largest below 1e-4 (float32)."""
    gaps = []
    for request, completion in zip(made, engine.generate(made), strict=True):
        log_probs = own_log_probs(model, request, completion)
        gaps.append((log_probs - torch.tensor(completion.log_probs)).abs())
    gap = torch.cat(gaps)
    assert gap.mean() < 5e-6 and gap.max() < 1e-4, (gap.mean(), gap.max())


def own_log_probs(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """The model's forward over the whole sequence, one row, no cache."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
    log_pi = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
    return log_pi.gather(1, ids[0, len(request.token_ids) :, None])[:, 0]


def check_choices(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """Every token is the one that `sample` draws from the model's own logits, and the limits and stops are kept."""
    for request, completion in zip(made, engine.generate(made), strict=True):
        assert 1 <= len(completion.token_ids) <= request.params.max_new_tokens
        ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1]
        state = SamplingState.of([request] * len(logits), logits.shape[1], torch.device("cpu"))
        tokens, _ = sample(logits, state, torch.arange(len(logits)))
        assert tuple(tokens.tolist()) == completion.token_ids
        stops = request.params.stop_token_ids
        assert all(token not in stops for token in completion.token_ids[:-1])
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in stops)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == request.params.max_new_tokens


def check_company_does_not_matter(engine: RolloutEngine, made: Sequence[Request]) -> None:
    """A request gives the same tokens and log-probs alone, among 7 and among all others, in any order."""
    together = engine.generate(made)
    backwards = engine.generate(made[::-1])[::-1]
    assert together == backwards
    some = list(range(0, len(made), max(1, len(made) // 7)))[:7]
    assert engine.generate([made[index] for index in some]) == [together[index] for index in some]
    for index in some:
        assert engine.generate([made[index]]) == [together[index]]


def check_weights(engine: RolloutEngine, model: PreTrainedModel, made: Sequence[Request]) -> None:
    """New weights are used at once, and the completions say which version answered."""
    engine.load_weights(((name, weight * 1.5) for name, weight in model.named_parameters()), version=5)
    changed = engine.generate(made)
    engine.load_weights(model.named_parameters(), version=6)
    back = engine.generate(made)
    assert {c.policy_version for c in changed} == {5} and {c.policy_version for c in back} == {6}
    assert all(a.log_probs != b.log_probs for a, b in zip(changed, back, strict=True))
    engine.sleep()
    engine.wake()
    assert engine.generate(made) == back
