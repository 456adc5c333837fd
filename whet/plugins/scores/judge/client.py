# SPDX-License-Identifier: Apache-2.0
"""A client of OpenAI-compatible chat endpoints, with retries, limits and a cache on disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whet.errors import RewardError
from whet.http import CallError, Http, insist, read as read_reply, shown
from whet.limits import read_json
from whet.processes.background import in_loop

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
MOST_TOKENS = 10**8  # of a reply, as the server counts them
CHARACTERS_PER_TOKEN = 3.0  # for the estimate before a request; its reply corrects it
SHOWN_CHARACTERS = 200
COUNTED_ANEW = 50  # texts that a process writes before it counts the texts of all processes again


@dataclass(frozen=True)
class Settings:
    """An endpoint and the settings of its requests. The limits apply to each client, so to each process."""

    endpoint: str  # with its version: http://127.0.0.1:8000/v1
    model: str
    sampling: tuple[tuple[str, Any], ...] = (("temperature", 0.0), ("max_tokens", 512))
    key_variable: str = "OPENAI_API_KEY"  # environment variable of the key
    request_seconds: float = 20.0
    deadline_seconds: float = 25.0  # for all attempts together
    retries: int = 4
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int = 16
    cache: str | None = None  # folder
    cache_mb: float = 1024.0
    input_price: float = 0.0  # of a million tokens
    output_price: float = 0.0


@dataclass(frozen=True)
class JudgeReply:
    """The text of a reply, the value that `read` of `complete` found in it, and its cost, which is 0 if cached."""

    text: str
    value: Any = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    is_cached: bool = False
    is_cut: bool = False  # at max_tokens


class Client:
    """Sends requests to one model. A client serves one event loop at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if not self.settings.endpoint.startswith(("http://", "https://")):
            raise RewardError("endpoint", self.settings.endpoint, "an address such as http://127.0.0.1:8000/v1")
        folder, size = self.settings.cache, int(self.settings.cache_mb * 2**20)
        self._cache = None if folder is None else Cache(Path(folder), size)
        self._http = Http()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._where = f"judge {settings.model!r} at {shown(settings.endpoint)}"
        self._free_at = 0.0  # time.monotonic() of the next request that the limits allow

    async def complete(
        self, messages: Messages, *, sample: int = 0, read: Callable[[str], Any] | None = None
    ) -> JudgeReply:
        """Returns the reply to `messages`. `sample` numbers independent replies to the same messages. With `read`, a
        reply that was cut off, or for which `read` returns None, is requested again and not cached.

        Raises: RewardError, with the reason of the last attempt."""
        body = {"model": self.settings.model, "messages": list(messages), **dict(self.settings.sampling)}
        asked = json.dumps([self.settings.endpoint, body, sample], sort_keys=True)
        digest = hashlib.blake2b(asked.encode(), digest_size=20).hexdigest()
        text = None if self._cache is None else self._cache.get(digest)
        if text is not None and (value := text if read is None else read(text)) is not None:
            return JudgeReply(text, value, is_cached=True)
        answer = await self._insist(body, digest, sample, read)
        if self._cache is not None:
            self._cache.put(digest, answer.text)
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def _insist(
        self, body: dict[str, Any], digest: str, sample: int, read: Callable[[str], Any] | None
    ) -> JudgeReply:
        """Repeats a request until the reply is readable. The reply has the tokens of all attempts."""
        spent = JudgeReply("")

        async def attempt(number: int) -> JudgeReply:
            nonlocal spent
            seed = sample * 1000 + number
            answer = await self._ask({**body, "seed": seed} if seed else body)
            spent = _sum(answer, spent)
            value = answer.text if read is None else None if answer.is_cut else read(answer.text)
            if value is None:
                cut = f" (it was cut off after max_tokens={body.get('max_tokens')}: raise it)" if answer.is_cut else ""
                raise CallError(f"its reply cannot be read{cut}: {answer.text[-SHOWN_CHARACTERS:]!r}")
            return replace(spent, value=value)

        seconds, attempts = self.settings.deadline_seconds, self.settings.retries + 1
        try:
            return await insist(attempt, seconds, attempts, digest)
        except CallError as error:
            failed = RewardError(
                self._where,
                f"no usable reply within {seconds:g} s and {attempts} attempts: {error}",
                "a reply of an OpenAI-compatible server",
                "correct the endpoint, the model or the rubric, or raise the deadline",
            )
            failed.parts = used([spent])
            raise failed from error

    async def _ask(self, body: dict[str, Any]) -> JudgeReply:
        """Sends one request.  Raises: CallError or TimeoutError if another attempt may help; else RewardError."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._slots = loop, asyncio.Semaphore(self.settings.concurrency)
        async with self._slots:
            estimate = len(json.dumps(body["messages"])) / CHARACTERS_PER_TOKEN + body.get("max_tokens", 0)
            await self._wait_for_limits(estimate)
            secret = os.environ.get(self.settings.key_variable)
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            address = f"{self.settings.endpoint.rstrip('/')}/chat/completions"
            try:
                async with (
                    asyncio.timeout(self.settings.request_seconds),
                    self._http.stream("POST", address, body, headers=headers) as reply,
                ):
                    content = await read_reply(reply, passes=True)
            except CallError as error:
                if error.status in (429, 503):
                    self._free_at = max(self._free_at, time.monotonic() + error.seconds)
                if error.passes:
                    raise
                raise self._refused(error) from error
        answer = self._read(content)
        tokens = answer.input_tokens + answer.output_tokens
        if self.settings.tokens_per_minute is not None and tokens:
            self._free_at += (tokens - estimate) * 60 / self.settings.tokens_per_minute
        return answer

    def _refused(self, error: CallError) -> RewardError:
        where, variable = f"judge at {shown(self.settings.endpoint)}", self.settings.key_variable
        if error.status in (401, 403):
            is_set = "is set, but not accepted" if os.environ.get(variable) else "is not set"
            expected = f"a key in the environment variable {variable}, which {is_set}"
            change = "set it to a valid key, or name another as key_variable"
            return RewardError(where, f"refused the key (status {error.status})", expected, change)
        change = f"correct the endpoint (it ends in /v1 as a rule), or model={self.settings.model!r}"
        return RewardError(where, str(error), "status 200", change)

    def _read(self, content: bytes) -> JudgeReply:
        """Parses the reply of the endpoint.  Raises: CallError."""
        said = content[:SHOWN_CHARACTERS].decode(errors="replace")
        try:
            found = read_json(content)
            choice, usage = found["choices"][0], found.get("usage") or {}
            text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            read, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
            if not (0 <= read <= MOST_TOKENS and 0 <= written <= MOST_TOKENS):
                raise ValueError(f"it counts {read} and {written} tokens")
            if not isinstance(text, str):
                raise ValueError("it has no text")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CallError(f"its reply is no chat completion ({error}): {said}") from error
        cost = (read * self.settings.input_price + written * self.settings.output_price) / 1e6
        return JudgeReply(text, None, read, written, cost, is_cut=is_cut)

    async def _wait_for_limits(self, tokens: float) -> None:
        """Spaces requests evenly over the minute. A pause that the server asks for delays all requests."""
        limits = ((1.0, self.settings.requests_per_minute), (tokens, self.settings.tokens_per_minute))
        spacing = max(60 * size / limit if limit else 0.0 for size, limit in limits)
        start = max(time.monotonic(), self._free_at)
        self._free_at = max(self._free_at, start + spacing if spacing else 0.0)
        await asyncio.sleep(start - time.monotonic())


def complete_all(settings: Settings, conversations: Sequence[Messages]) -> list[str | Exception]:
    """Returns the reply to each conversation, or its error. All calls end within `settings.deadline_seconds`."""

    async def run() -> list[str | Exception]:
        client = Client(settings)
        tasks = [asyncio.create_task(client.complete(messages)) for messages in conversations]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=settings.deadline_seconds)
            for task in tasks:
                task.cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await client.close()
        late = TimeoutError(f"no reply in {settings.deadline_seconds:g} s")  # in the place of CancelledError
        errors = [each if isinstance(each, Exception) else late for each in replies]
        return [each.text if isinstance(each, JudgeReply) else errors[i] for i, each in enumerate(replies)]

    return in_loop(run()).result()


class Cache:
    """Stores texts on disk by digest. When the cache is full, it removes the oldest texts."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._bytes, self._written = sum(size for _, size, _ in self._entries()), 0

    def get(self, digest: str) -> str | None:
        """Returns the text stored for `digest`; None if there is no such text."""
        try:
            found: str = json.loads((self._folder / f"{digest}.json").read_bytes())["text"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found

    def put(self, digest: str, text: str) -> None:
        """Writes a text atomically. If this fails, it logs a warning and the text is not cached."""
        content = json.dumps({"text": text}).encode()
        partial = self._folder / f".{digest}.{os.getpid()}"
        try:
            partial.write_bytes(content)
            partial.replace(self._folder / f"{digest}.json")
        except OSError as error:
            log.warning("the judge's cache cannot be written: %s", error)
            return
        self._bytes += len(content)
        self._written += 1
        if self._bytes > self._max_bytes or self._written % COUNTED_ANEW == 0:  # other processes write too
            self._shrink()

    def _shrink(self) -> None:
        entries = sorted(self._entries())
        self._bytes = sum(size for _, size, _ in entries)
        if self._bytes <= self._max_bytes:
            return
        for _, size, path in entries:
            if self._bytes <= 0.9 * self._max_bytes:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _entries(self) -> list[tuple[int, int, Path]]:
        """Returns the time of writing, the size in bytes and the path of each text."""
        found = []
        for path in self._folder.glob("*.json"):
            with suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return found


def _sum(answer: JudgeReply, earlier: JudgeReply) -> JudgeReply:
    """Adds the tokens and the cost of earlier attempts to a reply."""
    return replace(
        answer,
        input_tokens=answer.input_tokens + earlier.input_tokens,
        output_tokens=answer.output_tokens + earlier.output_tokens,
        cost=answer.cost + earlier.cost,
    )


def used(answers: Sequence[JudgeReply]) -> dict[str, float]:
    """Sums the tokens and the cost of replies, as parts of a reward."""
    tokens = sum(answer.input_tokens + answer.output_tokens for answer in answers)
    return {"judge_tokens": float(tokens), "judge_cost": float(sum(answer.cost for answer in answers))}
