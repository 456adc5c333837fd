# SPDX-License-Identifier: Apache-2.0
"""Calls that sample, and score prompts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.guard import RefusedError
from whet.keyed import key
from whet.rollout.protocol import Event, Failed, Finished, SamplingParams
from whet.serving.app import Settings
from whet.serving.engine_thread import EngineThread
from whet.serving.tinker.desk import Desk, Failure, Result, Session
from whet.serving.tinker.models import Models, prompt_of
from whet.serving.tinker.samplers import SampleRequest, Source
from whet.serving.tinker.wire import PromptScores, SampledTokens, write_samples

log = logging.getLogger(__name__)
Raw = dict[str, Any]
MOST_LIKELIEST = 128  # tokens of a place


class Sampling:
    """Samples of clients, from the moment that they are asked for until they have a result."""

    def __init__(
        self, models: Models, thread: EngineThread, settings: Settings, desk: Desk[Any], stop_ids: tuple[int, ...]
    ) -> None:
        self._models, self._thread, self._settings, self._desk = models, thread, settings, desk
        self._stop_ids = stop_ids
        self._tasks: dict[str, asyncio.Task[bytes]] = {}

    def clear(self, session: Session) -> None:
        """Ends the samples of a session that has ended."""
        for name, task in list(self._tasks.items()):
            if name.rpartition(":")[0] in session.samplers:
                task.cancel()

    async def sample(self, owner: str, raw: Raw) -> Raw:
        """Begins to sample.  Returns a promise.  Raises: RefusedError."""
        sampler, number = raw["sampling_session_id"], int(raw.get("num_samples", 1))
        session, room = self._desk.owned(owner, sampler), self._settings.max_running + self._settings.max_waiting
        name, most = f"{sampler}:{raw['seq_id']}", -(-room // 2)
        if not 0 < number <= most:
            raise RefusedError(400, f"num_samples={number} is not from 1 to {most}")
        others = sum(each.samples for each in self._desk.sessions.values()) - session.samples
        # A session has at most half of the room that others leave, which so is never gone.
        if name not in self._desk.requests and 2 * (session.samples + number) > max(2, room - others + 1):
            raise RefusedError(429, f"{others + session.samples} of {room} samples are there; come again later")
        ids = [f"{name}:{index}" for index in range(number)]
        if self._desk.note(name, session, digest(raw)):
            session.samples += number
            task = asyncio.create_task(self._run((owner, session.samplers[sampler]), raw, ids))
            self._tasks[name] = task
            task.add_done_callback(lambda done: self._finish_samples(session, name, ids, done))
        return {"request_id": name, "sample_sequence_ids": ids}

    def _finish_samples(self, session: Session, name: str, uids: list[str], done: asyncio.Task[bytes]) -> None:
        session.samples -= len(uids)
        del self._tasks[name]
        result: Result = Failure("the request was cancelled", "user")
        if not done.cancelled():
            error = done.exception()
            result = done.result() if error is None else failure_of(name, error)
        self._thread.abort(uids)
        self._desk.finish(name, result)

    async def _run(self, source: Source, raw: Raw, uids: list[str]) -> bytes:
        """Scores a prompt, and samples its responses.  Returns a SampleResponse."""
        widths = int(raw.get("topk_sample_logprobs") or 0), int(raw.get("topk_prompt_logprobs") or 0)
        if not 0 <= min(widths) <= max(widths) <= MOST_LIKELIEST:
            raise RefusedError(400, f"{max(widths)} likeliest tokens are asked for, of at most {MOST_LIKELIEST}")
        prompt = prompt_of(raw["prompt"]["chunks"], self._models.vocab_size)
        params = self._params(raw, len(prompt))
        async with asyncio.timeout(self._settings.deadline_seconds):
            scores = await self._scores(source, raw, prompt)
            done = await self._completions(source, raw, prompt, params, uids)
        samples = [
            SampledTokens(each.token_ids, each.log_probs, each.finish_reason == "length", each.likeliest)
            for each in (done[uid].completion for uid in uids)
        ]
        return write_samples(samples, scores, *widths)

    def _params(self, raw: Raw, length: int) -> SamplingParams:
        """The SDK's parameters of sampling as the engine's.  Raises: RefusedError."""
        given, room = raw.get("sampling_params") or {}, self._models.context - length
        for name in ("prompt_alt_tokens_k", "target_prompt_logprobs"):
            if raw.get(name):
                raise RefusedError(400, f"{name} is not supported")
        if room < 1:
            raise RefusedError(400, f"the prompt has {length} tokens; the model reads {self._models.context}")
        stop = given.get("stop")
        words = [stop] if isinstance(stop, str) else list(stop or ())
        ids = tuple(each for each in words if isinstance(each, int)) if stop is not None else self._stop_ids
        return SamplingParams(
            max_new_tokens=min(room, int(given["max_tokens"]) if given.get("max_tokens") is not None else room),
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=max(0, int(given.get("top_k", -1))),
            stop_token_ids=ids,
            stop=tuple(each for each in words if isinstance(each, str)),
            num_likeliest=int(raw.get("topk_sample_logprobs") or 0),
        )

    async def _scores(self, source: Source, raw: Raw, prompt: tuple[int, ...]) -> PromptScores:
        wants, likeliest = bool(raw.get("prompt_logprobs")), int(raw.get("topk_prompt_logprobs") or 0)
        if not (wants or likeliest):
            return PromptScores()
        call = self._thread.call(lambda: self._models.scores(self._models.module(*source), prompt, likeliest))
        found = await asyncio.wrap_future(call)
        last = raw.get("prompt_logprobs_last_n")
        if last is not None and found.log_probs is not None:
            unread = max(0, len(prompt) - int(last))
            found.log_probs[:unread] = np.nan
            found = replace(found, likeliest=[[]] * unread + list(found.likeliest[unread:]))
        return found if wants else replace(found, log_probs=None)

    async def _completions(
        self, source: Source, raw: Raw, prompt: tuple[int, ...], params: SamplingParams, uids: list[str]
    ) -> dict[str, Finished]:
        """Samples.  Raises: WhetError, RefusedError."""
        seed, queue = (raw.get("sampling_params") or {}).get("seed"), asyncio.Queue[Event | WhetError]()
        drawn = [key(0 if seed is None else int(seed), "tinker", *((uid,) if seed is None else (i,)))
                 for i, uid in enumerate(uids)]  # fmt: skip
        seconds = self._settings.deadline_seconds
        requests = [
            SampleRequest(uid, prompt, params, each, deadline_seconds=seconds, source=source)
            for uid, each in zip(uids, drawn, strict=True)
        ]
        self._thread.submit(requests, queue.put_nowait)
        done: dict[str, Finished] = {}
        while len(done) < len(uids):
            match event := await queue.get():
                case WhetError():
                    raise event
                case Failed(failure=failure):
                    raise RefusedError(500, failure.message)
                case Finished(uid=uid):
                    done[uid] = event
        return done

    async def cancel(self, owner: str, raw: Raw) -> Raw:
        """Ends a request that samples."""
        self._desk.find(owner, raw["request_id"])
        if (found := self._tasks.get(raw["request_id"])) is not None:
            found.cancel()
        return {}


def digest(asked: Raw | bytes) -> bytes:
    """Tells requests of one name apart."""
    body = asked if isinstance(asked, bytes) else json.dumps(asked, sort_keys=True).encode()
    return hashlib.blake2b(body, digest_size=16).digest()


def failure_of(name: str, error: BaseException) -> Failure:
    """An error as the client gets it; of one that is a bug the log has the traceback."""
    if isinstance(error, WhetError | RefusedError):
        return Failure(str(error), "user")
    if isinstance(error, TimeoutError):
        return Failure("the deadline of the request is over", "server")
    log.error("request %s failed", name, exc_info=error)
    return Failure(f"unexpected {type(error).__name__}: {error}; the traceback is in the server's log", "server")
