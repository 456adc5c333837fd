# SPDX-License-Identifier: Apache-2.0
"""Scores of a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache as cached
from statistics import median
from typing import Any, Literal

from whet.options import Count, NonNegative, Number, Positive, Share
from whet.registry import register_reward
from whet.rewards.judge.client import Client, Settings
from whet.rewards.judge.rubrics import load_rubric


@register_reward("llm_judge", checked_by="whet.rewards.judge.score:check_options")
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
    """The score from 0 to 1 of a judge: `model` at `endpoint` (http://127.0.0.1:8000/v1), asked by `rubric`.

    `rubric` is yes_no, scale, json, pairwise (the response against the ground truth), or a YAML or JSON file. With
    `second_model` (it may be `model` again) two judges score, and the mean counts; with `combine` third, where they
    differ by more than `tolerance`, `model` is asked once more and the median counts. `key_variable` is the environment
    variable of the key. Limits hold for each reward process; `deadline_seconds`, for all attempts, belongs below
    `reward.timeout_seconds`. Prices are of a million tokens. A reply that cannot be read is asked for again.
    Raises: RewardError, ConfigError.
    """
    asked = load_cached(rubric)
    truth = "" if ground_truth is None else str(ground_truth)
    messages = asked.messages({"prompt": prompt_str, "response": solution_str, "ground_truth": truth})
    sampling = (("temperature", temperature), ("max_tokens", max_tokens))
    patience = (request_seconds, deadline_seconds, retries)
    limits = (requests_per_minute, tokens_per_minute, concurrency)
    settings = Settings(
        endpoint, model, sampling, key_variable, *patience, *limits, cache, cache_mb, input_price, output_price
    )
    judges = [client_of(replace(settings, model=name)) for name in (model, second_model) if name is not None]
    calls = [judge.complete(messages, sample=number, read=asked.read) for number, judge in enumerate(judges)]
    answers = list(await asyncio.gather(*calls))
    disagreement = abs(answers[0].value - answers[-1].value)
    if combine == "third" and disagreement > tolerance:
        answers.append(await judges[0].complete(messages, sample=2, read=asked.read))
    return {
        "reward": median(answer.value for answer in answers),  # of two: the mean
        "judge_tokens": float(sum(answer.input_tokens + answer.output_tokens for answer in answers)),
        "judge_cost": sum(answer.cost for answer in answers),
        "disagreement": disagreement,
    }


def check_options(*, endpoint: str = "http://", rubric: str = "yes_no", **_: object) -> None:
    """Raises: RewardError, ConfigError for an endpoint or a rubric that cannot be used."""
    Client(Settings(endpoint, ""))
    load_rubric(rubric)


client_of = cached(Client)
load_cached = cached(load_rubric)
