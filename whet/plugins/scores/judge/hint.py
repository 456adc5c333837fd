# SPDX-License-Identifier: Apache-2.0
"""The hint source `judge`: a language model behind an endpoint, or a function, writes hints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge

from whet.errors import ConfigError
from whet.options import Positive
from whet.plugins.scores.judge.client import Settings, complete_all
from whet.processes.background import Background
from whet.registry import load_target, register_hint
from whet.types import Group

log = logging.getLogger(__name__)


def either(given: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error if options name both a function and an endpoint, or neither."""
    if ("complete" in given) == ("endpoint" in given and "model" in given):
        expected = "with teacher.hint=judge either complete, a function, or endpoint and model"
        yield ConfigError("teacher.hint_options", dict(given), expected, "set one of the two")


@register_hint("judge", options_checked_by="whet.plugins.scores.judge.hint:either")
def judge(
    groups: Sequence[Group],
    *,
    complete: str | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    key_variable: str = "OPENAI_API_KEY",
    max_tokens: Annotated[int, Ge(1)] = 256,
    cache: str | None = None,
    instruction: str = "Give one short hint that helps to solve this problem. Do not give the answer away.",
    timeout_seconds: Positive = 60.0,
    parallel: Annotated[int, Ge(1)] = 8,
) -> list[list[str | None]]:
    """Asks a judge for a hint to each prompt.
    The judge is `model` at an OpenAI-compatible `endpoint` (with the client of `llm_judge`, its retries and its cache),
    or the function `complete` (`path/file.py:function`), which maps messages to text. A prompt gets no hint if its call
    raises, or has no result `timeout_seconds` after the first call of all prompts; both are logged."""
    system = {"role": "system", "content": instruction}
    asked = [[system, *(message.to_dict() for message in group.prompt.messages)] for group in groups]
    if complete is not None:
        function: Callable[[list[dict[str, Any]]], str] = load_target(complete)
        threads = Background("whet-judge", parallel)
        futures = [threads.submit(partial(function, messages)) for messages in asked]
        threads.close()
        wait(futures, timeout=timeout_seconds)
        hints = [_result(future) for future in futures]
    else:
        sampling = (("temperature", 0.0), ("max_tokens", max_tokens))
        settings = Settings(endpoint or "", model or "", sampling, key_variable, cache=cache, concurrency=parallel)
        settings = replace(settings, request_seconds=timeout_seconds, deadline_seconds=timeout_seconds)
        hints = [_hint(reply) for reply in complete_all(settings, asked)]
    return [[hint] * len(group.trajectories) for group, hint in zip(groups, hints, strict=True)]


def _result(future: Future[str]) -> str | None:
    """Returns a judge's hint if the hint is ready; None if the call raised an error or is late."""
    future.cancel()  # unless a thread has begun it
    try:
        return str(future.result(timeout=0))
    except Exception as error:  # other people's code, over a network; TimeoutError, CancelledError
        return _hint(error)


def _hint(reply: str | Exception) -> str | None:
    if isinstance(reply, str):
        return reply
    log.warning("the judge gave no hint: %s: %s", type(reply).__name__, reply)
    return None
