# SPDX-License-Identifier: Apache-2.0
"""The shop of a web server as an environment of text, and its reward for browsers. Every request has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError, describe
from whet.options import Count, NonNegative, Positive
from whet.registry import register_environment
from whet.types import Message, Prompt
from whet_environments.game import MOST_READ, Context, row_seed
from whet_environments.webshop.environment import RULES, bought, not_possible


class LostServerError(RuntimeError):
    """A server that is gone, does not answer in time, or answers with an error."""


async def ask(client: httpx.AsyncClient, verb: str, url: str, seconds: float, body: object = None) -> dict[str, Any]:
    """The JSON object that a server answers.  Raises: LostServerError."""
    try:
        async with asyncio.timeout(seconds):
            answer = await client.request(verb, url, json=body)
            found = answer.json() if answer.status_code == 200 else None
    except TimeoutError as error:
        raise LostServerError(f"the server at {url} gave no answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise LostServerError(f"the server at {url} is lost: {describe(error)}") from error
    if not isinstance(found, dict):
        raise LostServerError(f"the server at {url} answered {answer.status_code}: {answer.text[:200]}")
    return found


async def shop_reward(url: str, answer: str, prompt: Prompt, seconds: float) -> float:
    """The reward of the session to which a page belongs: 0 before Buy Now.  Raises: LostServerError.

    A scorer of the environment `browser`."""
    parts = urlsplit(url)
    session = parts.path.strip("/").partition("/")[0]
    async with httpx.AsyncClient(trust_env=False, timeout=seconds) as client:
        found = await ask(client, "GET", f"{parts.scheme}://{parts.netloc}/{session}/reward", seconds)
    return float(found["reward"])


@register_environment("webshop_server", shared=True)
class WebShopServer:
    """The environment `webshop` on a server, whose address is `url`; the server has the catalogue.

    A server that is gone, or takes longer than `request_seconds`, fails the episode."""

    def __init__(
        self,
        *,
        url: str,
        max_steps: Count = 15,
        context: Context = "append",
        format_penalty: NonNegative = 0.0,
        max_tokens: Count | None = None,
        request_seconds: Positive = 10.0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(
                "environment.options.url", url, "the address that the server prints, such as http://127.0.0.1:8000"
            )
        self._api = f"{url.rstrip('/')}/api/sessions"
        self._context: Context = context
        self._penalty, self._max_tokens, self._seconds = format_penalty, max_tokens, request_seconds
        self._max_steps, self._left = max_steps, 0
        self._client: httpx.AsyncClient | None = None
        self._session = ""
        self._buttons: list[str] = []

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begins a session."""
        self._client = httpx.AsyncClient(trust_env=False, timeout=self._seconds)
        view = await self._ask("POST", self._api, {"seed": row_seed(prompt, seed)})
        self._session, self._left = view["id"], self._max_steps
        return self._observe(view, RULES, reward=0.0)

    async def step(self, answer: Answer) -> Observation:
        """Sends the answer.  Raises: LostServerError, RuntimeError after the end."""
        if not self._left:
            raise RuntimeError("step was called after the end of the episode, or before reset; call reset first")
        view = await self._ask("POST", f"{self._api}/{self._session}/actions", {"action": answer.text[-MOST_READ:]})
        self._left = 0 if view["is_done"] else self._left - 1
        if view["is_done"]:
            return self._observe(view, bought(view["reward"]), reward=view["reward"])
        if not view["is_possible"]:
            return self._observe(view, not_possible(view["buttons"]), reward=0.0 - self._penalty)
        return self._observe(view, "", reward=0.0)

    async def close(self) -> None:
        """Ends the session, if the server is there."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._session:
                await ask(client, "DELETE", f"{self._api}/{self._session}", min(self._seconds, 2.0))
        except LostServerError:
            pass  # its sessions are gone with it
        finally:
            await client.aclose()

    def choices(self) -> list[str]:
        """The actions of the page."""
        return [f"click[{each}]" for each in self._buttons] or ["search[lamp]", "search[easy clean]"]

    async def _ask(self, verb: str, url: str, body: object) -> dict[str, Any]:
        assert self._client is not None
        return await ask(self._client, verb, url, self._seconds, body)

    def _observe(self, view: Mapping[str, Any], said: str, *, reward: float) -> Observation:
        self._buttons = list(view["buttons"])
        is_whole = said == RULES or self._context == "replace"
        texts = (RULES if is_whole else "", "" if said == RULES else said, view["text"])
        is_done = bool(view["is_done"])
        return Observation(
            done=is_done,
            truncated=not is_done and not self._left,
            messages=(Message("user", "\n\n".join(each for each in texts if each)),),
            reward=reward,
            fields={"success": float(view["reward"] == 1.0), "bought": float(is_done)},
            context=self._context,
            state_key=view["text"],
            max_tokens=self._max_tokens,
        )
