# SPDX-License-Identifier: Apache-2.0
"""The reward `llm_judge`: a language model behind an OpenAI-compatible endpoint scores responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache as cached
from statistics import median
from typing import Any, Literal

from whet.errors import RewardError
from whet.options import Count, NonNegative, Number, Positive, Share
from whet.plugins.scores.judge.client import Client, JudgeReply, Settings, used
from whet.plugins.scores.judge.rubrics import load_rubric
from whet.registry import register_reward


@register_reward("llm_judge", checked_by="whet.plugins.scores.judge.score:check_options")
async def compute_score(
    solution_str: str,
    ground_truth: Any = None,
    prompt_str: str = "",
    *,
    endpoint: str,
    model: str,
    rubric: str = "yes_no",
    key_variable: str = "OPENAI_API_KEY",
    temperature: NonNegative = 0.0,
    max_tokens: Count = 512,
    second_model: str | None = None,
    second_endpoint: str | None = None,
    second_key_variable: str | None = None,
    combine: Literal["mean", "third"] = "mean",
    tolerance: Share = 0.25,
    retries: Number = 4,
    request_seconds: Positive = 20.0,
    deadline_seconds: Positive = 25.0,
    requests_per_minute: Positive | None = None,
    tokens_per_minute: Positive | None = None,
    concurrency: Count = 16,
    cache: str | None = None,
    cache_mb: Positive = 1024.0,
    input_price: NonNegative = 0.0,
    output_price: NonNegative = 0.0,
) -> dict[str, float]:
    """Returns a judge's score from 0 to 1: `model` at `endpoint` (http://127.0.0.1:8000/v1) replies to `rubric`.

    `rubric` is `yes_no`, `scale`, `json`, `pairwise` (the response against the ground truth), or a YAML or JSON file.
    `second_model` (it may be `model` again) adds a second judge, at `second_endpoint` if that differs, with the key in
    `second_key_variable`; the mean counts. With `combine=third`, if they differ by more than `tolerance`, `model`
    scores once more and the median counts. `key_variable` is the environment variable of the key. Limits hold for each
    reward process. `deadline_seconds`, for all attempts, belongs below `reward.timeout_seconds`. Prices are for a
    million tokens. An unreadable reply is requested again.  Raises: RewardError, ConfigError."""
    asked = load_cached(rubric)
    truth = "" if ground_truth is None else str(ground_truth)
    messages = asked.messages({"prompt": prompt_str, "response": solution_str, "ground_truth": truth})
    sampling = (("temperature", temperature), ("max_tokens", max_tokens))
    patience = (request_seconds, deadline_seconds, retries)
    limits = (requests_per_minute, tokens_per_minute, concurrency)
    settings = Settings(
        endpoint, model, sampling, key_variable, *patience, *limits, cache, cache_mb, input_price, output_price
    )
    variable = second_key_variable or key_variable
    other = replace(settings, endpoint=second_endpoint or endpoint, model=second_model or model, key_variable=variable)
    judges = [client_of(each) for each in ([settings, other] if second_model or second_endpoint else [settings])]
    calls = [judge.complete(messages, sample=number, read=asked.read) for number, judge in enumerate(judges)]
    answers = _together(await asyncio.gather(*calls, return_exceptions=True))
    disagreement = abs(answers[0].value - answers[-1].value)
    if combine == "third" and disagreement > tolerance:
        third = asyncio.gather(judges[0].complete(messages, sample=2, read=asked.read), return_exceptions=True)
        answers = _together([*answers, *await third])
    parts = {**used(answers), "disagreement": disagreement}
    return {"reward": median(answer.value for answer in answers), **parts}  # of two: the mean


def _together(found: Sequence[JudgeReply | BaseException]) -> list[JudgeReply]:
    """Returns the replies of all judges.  Raises: the first error, with the tokens and the cost of all replies."""
    answers = [each for each in found if isinstance(each, JudgeReply)]
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        reported = [used(answers), *(each.parts for each in errors if isinstance(each, RewardError))]
        if isinstance(errors[0], RewardError):
            errors[0].parts = {name: sum(each.get(name, 0.0) for each in reported) for name in reported[0]}
        raise errors[0]
    return answers


def check_options(
    *, endpoint: str = "http://", second_endpoint: str | None = None, rubric: str = "yes_no", **_: object
) -> None:
    """Raises: RewardError or ConfigError for an unusable endpoint or rubric."""
    for each in (endpoint, second_endpoint or endpoint):
        Client(Settings(each, ""))
    load_rubric(rubric)


client_of = cached(Client)
load_cached = cached(load_rubric)
