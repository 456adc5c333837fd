# SPDX-License-Identifier: Apache-2.0
"""Allowed tokens, bad words and penalties: by hand, and value by value against transformers' own processors."""

from __future__ import annotations

import random
import re

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.raising import raises
from whet.errors import EngineError
from whet.kernels.sampling import Constraints, SamplingState, _cut
from whet.rollout.protocol import Request, SamplingParams

VOCABULARY = 12
CPU = torch.device("cpu")
BAD_WORDS = ((3,), (4, 5), (1, 2, 6), (2, 7))


def request(prompt: tuple[int, ...] = (1,), **params: object) -> Request:
    return Request("", prompt, SamplingParams(8, **params), 0)  # type: ignore[arg-type]


def applied(logits: torch.Tensor, answers: list[list[int]], requests: list[Request]) -> torch.Tensor:
    """The logits of each row as its request and its answer so far leave them; unused places hold rubbish."""
    width = max(1, *map(len, answers)) + 2
    generated = torch.tensor([answer + [9] * (width - len(answer)) for answer in answers])
    constraints = Constraints.of(requests, logits.shape[1], CPU)
    assert constraints is not None
    return constraints.apply(logits, generated, torch.tensor(list(map(len, answers))))


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def test_penalties_by_hand() -> None:
    # prompt 0, answer 1 1 2: repetition 2 halves 4.0 of tokens 0 and 2, doubles -1 of token 1;
    # then frequency 0.5 and presence 0.25: token 1 has -2 - 2 * 0.5 - 0.25, token 2 has 2 - 0.5 - 0.25
    logits = torch.tensor([[4.0, -1.0, 4.0, 4.0]])
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    assert applied(logits, [[1, 1, 2]], [request((0,), **params)]).tolist() == [[2.0, -3.25, 1.25, 4.0]]
    assert applied(logits, [[]], [request((0,), **params)]).tolist() == [[2.0, -1.0, 4.0, 4.0]]


def test_repetition_is_that_of_transformers_over_prompt_and_answer() -> None:
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(VOCABULARY) for _ in range(length)) for length in (1, 4, 7)]
    answers = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (5, 0, 2)]
    logits = some_logits(3)
    requests = [
        request(prompt, repetition_penalty=penalty) for prompt, penalty in zip(prompts, (1.3, 0.8, 2.0), strict=True)
    ]
    found = applied(logits, answers, requests)
    for row, asked in enumerate(requests):
        theirs = RepetitionPenaltyLogitsProcessor(penalty=asked.params.repetition_penalty)
        ids = torch.tensor([[*asked.prompt_ids, *answers[row]]])
        torch.testing.assert_close(found[row : row + 1], theirs(ids, logits[row : row + 1]), rtol=0, atol=0)


def test_bad_words_are_those_of_transformers() -> None:
    theirs = NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=11)
    for seed in range(40):
        draw = random.Random(seed)
        answer = [draw.choice((1, 2, 4, 8)) for _ in range(draw.randint(1, 5))]
        logits = some_logits(1, seed)
        found = applied(logits, [answer], [request(bad_words=BAD_WORDS)])
        torch.testing.assert_close(found, theirs(torch.tensor([answer]), logits.clone()), rtol=0, atol=0)


def test_what_the_prompt_says_begins_no_bad_word() -> None:
    found = applied(torch.zeros(1, 6), [[]], [request((4,), bad_words=((4, 5),))])
    assert found.tolist() == [[0.0] * 6]


def test_nothing_but_allowed_tokens_is_left() -> None:
    found = applied(torch.zeros(2, 5), [[], [3]], [request(allowed_token_ids=(1, 3)), request(presence_penalty=1.0)])
    assert found.tolist() == [[-torch.inf, 0, -torch.inf, 0, -torch.inf], [0, 0, 0, -1, 0]]


def test_a_row_without_constraints_keeps_its_bits_and_rows_do_not_see_each_other() -> None:
    logits = some_logits(4)
    answers = [[1, 2], [4], [2, 2, 2], []]
    requests = [
        request((1, 5), repetition_penalty=1.7),
        request((1, 5, 6), bad_words=BAD_WORDS, frequency_penalty=0.3),
        request((2,)),
        request((2, 3), allowed_token_ids=(1, 2), presence_penalty=-0.5),
    ]
    found = applied(logits, answers, requests)
    assert torch.equal(found[2], logits[2])
    for row in (0, 1, 3):
        assert torch.equal(applied(logits[row : row + 1], [answers[row]], [requests[row]])[0], found[row])
    constraints = [SamplingState.of([each], VOCABULARY, CPU).constraints for each in requests]
    assert [each is not None for each in constraints] == [True, True, False, True]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "temperature"), [(0, 1, 0.2, 0.7), (5, 0.6, 0.05, 1.4), (3, 1, 0, 2.0)]
)
def test_all_together_is_vllms_order_of_transformers_processors(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits, answer, prompt = some_logits(50, 3), [1, 2, 8], (5, 6)
    params = {"top_k": top_k, "top_p": float(top_p), "min_p": float(min_p), "temperature": temperature}
    asked = [request(prompt, repetition_penalty=1.5, bad_words=BAD_WORDS, **params)] * 50
    state = SamplingState.of(asked, VOCABULARY, CPU)
    constrained = applied(logits, [answer] * 50, asked)
    found = _cut((constrained / temperature).log_softmax(-1), state)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        chain.append(MinPLogitsWarper(float(min_p)))
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(float(top_p)))
    theirs = NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=11)(
        torch.tensor([answer] * 50), logits.clone()
    )
    theirs = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[*prompt, *answer]] * 50), theirs)
    theirs = chain(torch.tensor([answer] * 50), theirs)
    assert (theirs > -torch.inf).sum() < 50 * (VOCABULARY - 2)
    torch.testing.assert_close(found.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("params", "key", "found"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids", re.compile("empty")),
        ({"allowed_token_ids": (1, 12)}, "allowed_token_ids", 12),
        ({"bad_words": ((1, -3),)}, "bad_words", -3),
        ({"bad_words": ((),)}, "bad_words", re.compile("tokens$")),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,), (2,))}, "bad_words", re.compile(" 2 .*at all$")),
        ({"bad_words": tuple((token,) for token in range(12))}, "bad_words", re.compile(" 12 ")),
        # after 1 2 neither may follow: 1 by the long word, 2 by the short one
        ({"allowed_token_ids": (1, 2), "bad_words": ((1, 2, 1), (2, 2))}, "bad_words", re.compile(r" \[1, 2\]$")),
    ],
)
def test_what_cannot_be_kept_is_refused(params: dict[str, object], key: str, found: object) -> None:
    with raises(EngineError, key=key, found=found):
        Constraints.of([request(**params)], VOCABULARY, CPU)


def test_taking_turns_is_no_dead_end() -> None:
    assert Constraints.of([request(allowed_token_ids=(1, 2), bad_words=((1, 1), (2, 2)))], VOCABULARY, CPU) is not None
