# SPDX-License-Identifier: Apache-2.0
"""Scores of a reward model on a server: `whet serve`, vLLM or SGLang."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from whet.errors import RewardError
from whet.http import CallError, Http, insist, read as read_reply, shown
from whet.limits import read_json
from whet.options import Number, Positive
from whet.registry import register_reward
from whet.rewards.result import finite

Api = Literal["pooling", "classify", "score", "sglang"]
PATHS: Mapping[Api, str] = {"pooling": "/pooling", "classify": "/classify", "score": "/v1/score", "sglang": "/classify"}
SHOWN_BYTES = 200


@register_reward("reward_server", checked_by="whet.plugins.scores.served:check_options")
async def compute_score(
    solution_str: str,
    prompt_str: str = "",
    conversation: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: str,
    model: str = "",
    api: Literal["pooling", "classify", "score", "sglang"] = "pooling",
    template: str | None = None,
    key_variable: str = "OPENAI_API_KEY",
    retries: Number = 4,
    request_seconds: Positive = 20.0,
    deadline_seconds: Positive = 25.0,
) -> dict[str, float]:
    """Asks a reward model at `endpoint` (http://127.0.0.1:8000) for the score of a conversation. Prompt and response
    are sent as text, so that the model may have any vocabulary.

    `api` selects path and form: `pooling` or `classify` of vLLM and `whet serve`; `sglang` (/classify with a text);
    `score` (vLLM's /v1/score: a cross-encoder reads the prompt's last message and the response). The server renders the
    messages with its chat template. With `template`, a folder or hub name of a tokenizer with a chat template, they are
    rendered here; `sglang` requires it. If the reply has a number for each token, the last one counts. `key_variable`
    is the environment variable of the key. `deadline_seconds` (all attempts) should be below `reward.timeout_seconds`.
    Raises: RewardError."""
    body: dict[str, Any] = {"model": model} if model else {}
    if api == "score":
        body |= {"text_1": prompt_str, "text_2": solution_str}
    elif template is None:
        body |= {"messages": list(conversation), "add_generation_prompt": False}
    else:
        text = tokenizer_at(template).apply_chat_template(list(conversation), tokenize=False)
        body |= {"text": text} if api == "sglang" else {"input": text, "add_special_tokens": False}
    body |= {} if api == "sglang" else {"use_activation": False}  # else vLLM gives a sigmoid of the score
    address = endpoint.rstrip("/").removesuffix("/v1") + PATHS[api]
    secret = os.environ.get(key_variable)
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    async def attempt(number: int) -> float:
        async with (
            asyncio.timeout(request_seconds),
            client().stream("POST", address, body, headers=headers) as reply,
        ):
            content = await read_reply(reply, passes=True)
        try:
            return finite("score", last_number(read_json(content)))
        except (ValueError, LookupError, TypeError) as error:
            said = content[:SHOWN_BYTES].decode(errors="replace")
            raise CallError(f"its reply has no score ({error}): {said}", passes=False) from error

    try:
        return {"reward": await insist(attempt, deadline_seconds, int(retries) + 1, (address, solution_str))}
    except CallError as error:
        found = f"no score within {deadline_seconds:g} s and {int(retries) + 1} attempts: {error}"
        change = f"correct endpoint, model={model!r}, api={api} or the key in {key_variable}, or raise the deadline"
        raise RewardError(f"reward model at {shown(address)}", found, "a reply with one number", change) from error


def last_number(reply: Any) -> float:
    """Reads the score in a reply: its only number, or the number of the last token.

    Raises: ValueError, LookupError, TypeError."""
    rows = reply["data"] if isinstance(reply, dict) and "data" in reply else reply
    row = rows[0] if isinstance(rows, list) else rows
    value: Any = next((row[name] for name in ("probs", "embedding", "score", "data") if name in row), None)
    while isinstance(value, list):
        if len(value) != 1 and not isinstance(value[-1], list):
            raise ValueError(f"{len(value)} numbers of one text, where a reward model has one label")
        value = value[-1]
    return float(value)


def check_options(*, endpoint: str = "http://", api: Api = "pooling", template: str | None = None, **_: object) -> None:
    """Checks the options.  Raises: RewardError for an invalid endpoint, and for `sglang` without a template."""
    if not endpoint.startswith(("http://", "https://")):
        raise RewardError("endpoint", endpoint, "an address such as http://127.0.0.1:8000")
    if api == "sglang" and template is None:
        change = "name the folder of the reward model's tokenizer"
        raise RewardError("template", None, "a tokenizer with a chat template: SGLang's /classify reads a text", change)


@cache
def client() -> Http:
    """Returns the HTTP client of this process, which keeps connections open."""
    return Http()


@cache
def tokenizer_at(path: str) -> Any:
    """Loads the tokenizer of a folder or hub name.  Raises: ModelError; RewardError if it has no chat template."""
    from whet.models.load import load_tokenizer  # and torch, for servers that read no messages

    tokenizer = load_tokenizer(path)
    if not tokenizer.chat_template:
        raise RewardError("template", path, "a tokenizer with a chat template", "name another")
    return tokenizer
