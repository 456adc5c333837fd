# SPDX-License-Identifier: Apache-2.0
"""The client calls that sample responses and score prompts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import replace
from functools import partial

import numpy as np

from whet.errors import DataError, WhetError, WorkerError
from whet.guard import RefusedError
from whet.keyed import key
from whet.options import as_list
from whet.plugins.serving.app import ServeSettings
from whet.plugins.serving.bodies import ApiError, BodyReader, Raw
from whet.plugins.serving.engine_thread import EngineThread
from whet.plugins.serving.tinker.desk import ClientSession, Desk, RequestFailure, Result
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.samplers import SampleRequest, Source
from whet.plugins.serving.tinker.wire import PromptScores, write_samples
from whet.rollout.protocol import Completion, Event, Failed, Finished, SamplingParams

log = logging.getLogger(__name__)
MOST_LIKELIEST = 128  # tokens of a place
MOST_SCORES = 2**20  # of the most probable tokens of a prompt


class Sampling:
    """Samples for clients, from the request until the result."""

    def __init__(
        self, models: Models, thread: EngineThread, settings: ServeSettings, desk: Desk, reader: BodyReader
    ) -> None:
        self._models, self._thread, self._settings, self._desk, self._reader = models, thread, settings, desk, reader
        self._tasks: dict[str, asyncio.Task[bytes]] = {}

    def clear(self, session: ClientSession) -> None:
        """Ends the samples of an ended session."""
        for name, task in list(self._tasks.items()):
            if name.rpartition(":")[0] in session.samplers:
                task.cancel()

    async def sample(self, owner: str, raw: Raw) -> Raw:
        """Starts sampling.  Returns a promise.  Raises: RefusedError."""
        sampler, number = raw["sampling_session_id"], int(raw.get("num_samples", 1))
        session, room = self._desk.owned(owner, sampler), self._settings.max_running + self._settings.max_waiting
        name, most = f"{sampler}:{raw['seq_id']}", -(-room // 2)
        if not 0 < number <= most:
            raise RefusedError(400, f"num_samples={number} is not from 1 to {most}")
        if name not in self._desk.requests:
            self._desk.check_room(owner, "samples", room, lambda each: each.samples, number)
        ids = [f"{name}:{index}" for index in range(number)]
        if self._desk.note(name, session, digest(raw)):
            session.samples += number
            self._tasks[name] = asyncio.create_task(self._run((owner, session.samplers[sampler]), raw, ids))
            self._tasks[name].add_done_callback(partial(self._end, session, name, ids))
        return {"request_id": name, "sample_sequence_ids": ids}

    def _end(self, session: ClientSession, name: str, uids: list[str], done: asyncio.Task[bytes]) -> None:
        session.samples -= len(uids)
        del self._tasks[name]
        result: Result = RequestFailure("the request was cancelled", "user")
        if not done.cancelled():
            error = done.exception()
            result = done.result() if error is None else failure_of(name, error)
        self._thread.abort(uids)
        self._desk.finish(name, result)

    async def _run(self, source: Source, raw: Raw, uids: list[str]) -> bytes:
        """Scores a prompt and samples responses to it.  Returns a SampleResponse."""
        widths = int(raw.get("topk_sample_logprobs") or 0), int(raw.get("topk_prompt_logprobs") or 0)
        if not 0 <= min(widths) <= max(widths) <= MOST_LIKELIEST:
            raise RefusedError(400, f"{max(widths)} likeliest tokens are requested; at most {MOST_LIKELIEST} can be")
        prompt, params = self._asked(raw)
        if len(prompt) * widths[1] > MOST_SCORES:
            found = (
                f"topk_prompt_logprobs={widths[1]} of {len(prompt)} tokens are {len(prompt) * widths[1]:,} log-probs"
            )
            raise RefusedError(400, f"{found}; at most {MOST_SCORES:,} can be requested")
        scores = await self._scores(source, raw, prompt)
        samples = await self._completions(source, raw, prompt, replace(params, num_likeliest=widths[0]), uids)
        return await asyncio.to_thread(write_samples, samples, scores, *widths)

    def _asked(self, raw: Raw) -> tuple[tuple[int, ...], SamplingParams]:
        """Returns the prompt and the sampling parameters, checked as by /v1/completions.  Raises: RefusedError,
        DataError, ApiError."""
        for name in ("prompt_alt_tokens_k", "target_prompt_logprobs"):
            if raw.get(name):
                raise RefusedError(400, f"{name} is not supported")
        chunks, given, reader = raw["prompt"]["chunks"], dict(raw.get("sampling_params") or {}), self._reader
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise DataError("prompt", "has an image or audio", "text, which this server samples from")
        prompt = [token for chunk in chunks for token in chunk["tokens"]]
        if (stop := given.pop("stop", None)) is not None:
            words, reader = as_list(stop), replace(reader, stop_ids=())
            given["stop"] = [each for each in words if isinstance(each, str)]
            given["stop_token_ids"] = [each for each in words if not isinstance(each, str)]
        room, most = max(1, self._models.context - len(prompt)), given.get("max_tokens")
        given["max_tokens"] = room if most is None else min(room, most) if isinstance(most, int) else most
        if given.get("top_k") == -1:
            del given["top_k"]
        asked = reader.text({**given, "model": reader.name, "prompt": prompt})
        return asked.prompts[0], asked.params[0]

    async def _scores(self, source: Source, raw: Raw, prompt: tuple[int, ...]) -> PromptScores:
        wants, likeliest = bool(raw.get("prompt_logprobs")), int(raw.get("topk_prompt_logprobs") or 0)
        if not (wants or likeliest):
            return PromptScores()
        call = self._thread.call(lambda: self._models.scores(self._models.module(*source), prompt, likeliest))
        found, last = await asyncio.wrap_future(call), raw.get("prompt_logprobs_last_n")
        if last is not None and found.log_probs is not None:
            unread = max(0, len(prompt) - int(last))
            found.log_probs[:unread] = np.nan
            found = replace(found, likeliest=[[]] * unread + list(found.likeliest[unread:]))
        return found if wants else replace(found, log_probs=None)

    async def _completions(
        self, source: Source, raw: Raw, prompt: tuple[int, ...], params: SamplingParams, uids: list[str]
    ) -> list[Completion]:
        """Samples the responses.  Raises: WhetError, RefusedError."""
        seed, queue = (raw.get("sampling_params") or {}).get("seed"), asyncio.Queue[Event | WhetError]()
        seconds, done, requests = self._settings.deadline_seconds, dict[str, Completion](), list[SampleRequest]()
        for index, uid in enumerate(uids):
            drawn = key(0, "tinker", uid) if seed is None else key(int(seed), "tinker", index)
            requests.append(SampleRequest(uid, prompt, params, drawn, deadline_seconds=seconds, source=source))
        self._thread.submit(requests, queue.put_nowait)
        while len(done) < len(uids):
            match event := await queue.get():
                case WhetError():
                    raise event
                case Failed(failure=failure):
                    raise RefusedError(500, failure.message)
                case Finished(uid=uid, completion=completion):
                    done[uid] = completion
        return [done[uid] for uid in uids]

    async def cancel(self, owner: str, raw: Raw) -> Raw:
        """Ends a sampling request."""
        self._desk.find(owner, raw["request_id"])
        if (found := self._tasks.get(raw["request_id"])) is not None:
            found.cancel()
        return {}


def digest(asked: Raw | bytes) -> bytes:
    """Hashes a request, to detect a different request under the same name."""
    body = asked if isinstance(asked, bytes) else json.dumps(asked, sort_keys=True).encode()
    return hashlib.blake2b(body, digest_size=16).digest()


def failure_of(name: str, error: BaseException) -> RequestFailure:
    """Converts an error to the form for the client. The traceback of a bug goes to the log."""
    if isinstance(error, WhetError | RefusedError | ApiError):
        return RequestFailure(str(error), "server" if isinstance(error, WorkerError) else "user")
    log.error("request %s failed", name, exc_info=error)
    return RequestFailure(f"unexpected {type(error).__name__}: {error}; the traceback is in the server's log", "server")
