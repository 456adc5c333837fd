# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the server: routes, API key, limits, and event streams."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from whet.config.schema import Dtype
from whet.errors import EngineError, WhetError
from whet.guard import RefusedError, check_client, read_body
from whet.plugins.serving.answers import (
    ChatAnswer,
    ClientResponse,
    Piece,
    ResponseChoice,
    TextAnswer,
    TokenTexts,
    fingerprint,
)
from whet.plugins.serving.bodies import ApiError, BodyReader, ClientRequest, Raw, TextBody, unsupported
from whet.plugins.serving.engine_thread import EngineStoppedError, EngineThread
from whet.rollout.protocol import Completion, Event, Failed, Finished, Partial, Status, TellsPrompts
from whet.types import last_versions

log = logging.getLogger(__name__)
T = TypeVar("T")
Samples = AsyncGenerator[tuple[ResponseChoice, Event], None]
BODY_SECONDS = 30.0  # for a client to send a body
ANSWER_SECONDS = 30.0  # over the deadline of a request, for a client to read the end of a response
SLACK_SECONDS = 1.0  # over the deadline of a request, for the engine to end it and report its tokens
BUSY_SECONDS = 2.0  # without an answer of the engine's thread; /health then says busy
READING_THREADS = max(2, min(8, os.cpu_count() or 1))
LONG_BYTES = 2**16  # a larger body may take seconds to render and encode; large bodies leave one thread free
REFUSED = {401: "invalid_api_key", 403: "foreign_host", 413: "body_too_large"}  # codes, by status
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
MOST_PROMPT_SCORES = 2**21  # log-probs of prompts in a response, about 60 bytes each
HEALTH, CHAT, TEXT = "/health", "/v1/chat/completions", "/v1/completions"


class Counters:
    """Counts the server's requests and tokens since its start, and shows the engine's state, for Prometheus."""

    def __init__(self) -> None:
        disable_created_metrics()  # one more series for each, with the time of its making
        self._registry = CollectorRegistry()
        named: Any = {"namespace": "whet", "registry": self._registry}
        times = {**named, "buckets": BOUNDS}
        by_status = "Requests by path and HTTP status; 499: the client left."
        self.requests = Counter("requests", by_status, ["path", "status"], **named)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **named)
        self.completion_tokens = Counter("completion_tokens", "Sampled tokens that were sent.", **named)
        streamed = "Time to the first token of requests that stream."
        self.first_token = Histogram("time_to_first_token_seconds", streamed, **times)
        self.whole_request = Histogram("request_seconds", "Time of whole requests that were answered.", **times)
        self._status = {
            "running": Gauge("samples_running", "Samples that are being decoded.", **named),
            "waiting": Gauge("samples_waiting", "Samples that wait in the engine.", **named),
            "oldest_seconds": Gauge("oldest_sample_seconds", "Age of the oldest sample.", **named),
            "version": Gauge("weights_version", "Version of the weights; of a run its checkpoint's step.", **named),
        }

    def page(self, status: Status) -> bytes:
        """Returns the page /metrics."""
        for name, gauge in self._status.items():
            gauge.set(getattr(status, name))
        return generate_latest(self._registry)


@dataclass(frozen=True)
class ServeSettings:
    """The options of `whet serve`; the command has their defaults. A sample is one of the n responses to a prompt."""

    model: str  # a Hugging Face folder or hub name, a checkpoint, or a run
    name: str | None  # of the model for clients; unset: the last part of its path
    follow: bool  # load new checkpoints of the run
    best: bool  # the run's checkpoint with the best validation, not the newest
    engine: str
    option: Mapping[str, object]  # of the engine
    tool_parser: str | None  # registered, or path/file.py:function; unset: that of the chat template
    dtype: Dtype
    host: str
    port: int  # 0: a free one
    api_key: str | None
    max_tokens: int  # of a response whose request names no limit
    max_running: int  # samples decoded together
    max_waiting: int  # samples beyond these; more are refused
    max_body_mib: float
    deadline_seconds: float  # of a request
    stop_seconds: float  # for running requests to end, once the server is to stop
    trust_remote_code: bool
    tinker: bool = False  # serve the tinker SDK
    folder: str = "tinker-checkpoints"  # of its checkpoints
    train_engine: str = "single"  # of its models
    ranks: int = 1  # processes of it


class App:
    """An OpenAI-compatible application for one model. A server runs its `asgi`."""

    def __init__(
        self, reader: BodyReader, engine: EngineThread, settings: ServeSettings, described: Callable[[], Raw]
    ) -> None:
        """Builds the application. `described` returns more fields of the model's card."""
        self._reader, self._engine, self._settings, self._described = reader, engine, settings, described
        self._texts, self._counters = TokenTexts(reader.tokenizer), Counters()
        self._decoded: dict[int, str] = {}  # by token id
        self._created, self._unfinished = int(time.time()), 0  # samples
        self._reading = ShortestFirst()
        routes = [
            self._route(HEALTH, self._health),
            self._route("/metrics", self._metrics),
            self._route("/v1/models", self._models),
            self._route("/v1/models/{model:path}", self._model),
            self._route(CHAT, partial(self._answer, CHAT), "POST"),
            self._route(TEXT, partial(self._answer, TEXT), "POST"),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _not_here})

    def _route(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
        """Makes a route that checks the API key, converts errors to responses, and counts every request."""

        async def counted(request: Request) -> Response:
            try:
                if path != HEALTH:
                    check_client(request.headers, self._settings.host, self._settings.api_key)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                told = self._told(path, error)
                headers = {"retry-after": "1"} if told.status == 429 else None
                response = JSONResponse(told.to_dict(), told.status, headers)
            if not isinstance(response, EventStream):
                self._counters.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, counted, methods=[method])

    def _told(self, path: str, error: Exception) -> ApiError:
        """Converts an error for the client. The traceback of a bug goes to the log."""
        match error:
            case ApiError():
                return error
            case RefusedError():
                return ApiError(error.status, str(error), code=REFUSED.get(error.status))
            case WhetError():
                return ApiError(400 if self._engine.death is None else 503, str(error))
        log.error("a request to %s failed", path, exc_info=error)
        found = f"the server failed with an unexpected {type(error).__name__}; the traceback is in its log"
        return ApiError(500, found)

    async def _health(self, request: Request) -> Response:
        dead, seconds = self._engine.death, self._engine.busy_seconds
        if dead is not None:
            return JSONResponse({"status": "failed", "message": str(dead)}, 503)
        if seconds > BUSY_SECONDS:
            return JSONResponse({"status": "busy", "message": f"the engine has not answered for {seconds:.0f} s"})
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._counters.page(self._status()), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        if (asked := request.path_params["model"]) != self._reader.name:
            message = f"the model {asked!r} does not exist; this server has {self._reader.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model_card())

    def _model_card(self) -> Raw:
        own = {"id": self._reader.name, "object": "model", "created": self._created, "owned_by": "whet"}
        version = self._status().version
        more = {"max_model_len": self._reader.context, "system_fingerprint": fingerprint(version)}
        return {**own, **more, **self._described()}

    def _status(self) -> Status:
        """Returns the last known status, since the engine may be busy.  Raises: WhetError if the engine has failed."""
        if self._engine.death is not None:
            raise self._engine.death
        return self._engine.status

    async def _answer(self, path: str, request: Request) -> Response:
        """Answers a completion request. With stream=true the response begins at the first token."""
        started = time.monotonic()
        most = round(self._settings.max_body_mib * 2**20)
        body = await read_body(request.headers, request.stream(), most, BODY_SECONDS)
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        read = self._reader.chat if path == CHAT else self._reader.text
        asked = await self._reading.run(len(body), lambda: read(raw))
        uid = uuid.uuid4().hex
        answer = (ChatAnswer if path == CHAT else TextAnswer)(uid, self._reader.name, asked, self._texts)
        late_at = asyncio.get_running_loop().time() + self._settings.deadline_seconds + SLACK_SECONDS
        events = self._events(uid, asked, late_at)
        if not asked.body.stream:
            whole = await _unless_gone(request, self._whole(asked, late_at, events, answer))
            self._counters.whole_request.observe(time.monotonic() - started)
            return whole
        first = await _unless_gone(request, anext(events))
        self._counters.first_token.observe(time.monotonic() - started)
        seconds = self._settings.deadline_seconds + ANSWER_SECONDS
        return EventStream(self._chunks(first, events, answer, path, started), events, seconds)

    async def _tables(self, asked: ClientRequest, late_at: float) -> list[str]:
        """Returns the log-probs of each prompt in vLLM's form, as JSON: by token id at each position after the first;
        empty if they were not requested.  Raises: ApiError."""
        body, engine = asked.body, self._engine.engine
        if not isinstance(body, TextBody) or (count := body.prompt_logprobs) is None:
            return []
        if not isinstance(engine, TellsPrompts):
            why = "the engine gives log-probs of sampled tokens alone; leave it out"
            raise unsupported("prompt_logprobs", count, why)
        if (size := sum(map(len, asked.prompts)) * (count + 1) * body.n) > MOST_PROMPT_SCORES:
            why = f"the response would have {size:,} log-probs, over {MOST_PROMPT_SCORES:,}; send fewer prompts at once"
            raise unsupported("prompt_logprobs", count, why)
        found = list[str]()
        for prompt in asked.prompts:
            call = self._engine.call(partial(engine.prompt_log_probs, prompt, count))
            own, likeliest = await self._in_time(asyncio.wrap_future(call), late_at)
            table = partial(self._table, prompt[1:], own, likeliest)
            found.append(await self._in_time(self._reading.run(size, table), late_at))
        return found

    async def _events(self, uid: str, asked: ClientRequest, late_at: float) -> Samples:
        """Samples a request and yields events until all samples end; aborts the samples if the reader leaves early."""
        queue: asyncio.Queue[Event | WhetError] = asyncio.Queue()
        requests = asked.requests(uid, self._settings.deadline_seconds)
        samples = {
            request.uid: ResponseChoice(index, asked, self._reader.tokenizer) for index, request in enumerate(requests)
        }
        room = self._settings.max_running + self._settings.max_waiting
        if self._unfinished + len(requests) > room:
            message = f"the server is full ({self._unfinished} of {room} samples); send the request again later"
            raise ApiError(429, message, code="server_full")
        self._unfinished += len(requests)
        try:
            self._counters.prompt_tokens.inc(sum(map(len, asked.prompts)))
            self._engine.submit(requests, queue.put_nowait)
            left = len(requests)
            while left:
                event = await self._in_time(queue.get(), late_at)
                match event:
                    case EngineStoppedError():
                        raise ApiError(503, f"the request was ended: {event}", code="stopped")
                    case WhetError():
                        raise ApiError(400, str(in_own_words(event)), code="refused_by_engine")
                    case Failed(failure=failure):
                        status, code = (504, "deadline_exceeded") if failure.timed_out else (500, "engine_failure")
                        raise ApiError(status, f"the request failed: {failure.message}", code=code)
                    case Finished(completion=completion):
                        left -= 1
                        if completion.finish_reason == "abort":
                            raise ApiError(503, "the engine ended the request early; send it again", code="aborted")
                        self._check_likeliest(asked, completion)
                    case Partial():
                        self._check_likeliest(asked, event)
                yield samples[event.uid], event
        finally:
            self._unfinished -= len(requests)
            self._engine.abort([request.uid for request in requests])

    def _table(self, prompt: Sequence[int], own: Sequence[float], likeliest: Sequence[Any]) -> str:
        """Converts log-probs to JSON, one position at a time, so that the event loop has its turn in between."""
        places = zip(prompt, own, likeliest or [()] * len(own), strict=True)
        found = (_json(self._place({token: value, **dict(others)})) for token, value, others in places)
        return f"[{','.join(('null', *found))}]"

    def _place(self, log_probs: Mapping[int, float]) -> Raw:
        """Converts the log-probs at one position to vLLM's form: by token id, with the text of each token."""
        for token in log_probs:
            if token not in self._decoded:
                self._decoded[token] = str(self._reader.tokenizer.decode([token]))
        texts = self._decoded
        return {str(token): {"logprob": each, "decoded_token": texts[token]} for token, each in log_probs.items()}

    async def _in_time(self, work: Awaitable[T], late_at: float) -> T:
        """Waits for the result of `work`.  Raises: ApiError at the loop's time `late_at`, even if the engine hangs."""
        try:
            async with asyncio.timeout_at(late_at):
                return await work
        except TimeoutError as error:
            why = ", and the engine is still busy" if self._engine.busy_seconds > BUSY_SECONDS else ""
            message = f"the request failed: its deadline of {self._settings.deadline_seconds:g} s was over{why}"
            raise ApiError(504, message, code="deadline_exceeded") from error

    def _check_likeliest(self, asked: ClientRequest, sampled: Completion | Partial) -> None:
        count = asked.body.likeliest
        if count and len(sampled.likeliest) < len(sampled.token_ids):
            why = "the engine gives the log-prob of the sampled token alone; set it to 0"
            raise unsupported(asked.body.likeliest_field, count, why)

    async def _whole(self, asked: ClientRequest, late_at: float, events: Samples, answer: ClientResponse) -> Response:
        async with aclosing(events):
            tables = await self._tables(asked, late_at)
            pieces = [(sample, self._piece(sample, event)) async for sample, event in events]
        whole = answer.whole(sorted(pieces, key=lambda each: each[0].index))
        if not tables:
            return JSONResponse(whole)
        choices = (
            f'{_json(each)[:-1]}, "prompt_logprobs": {tables[each["index"] // asked.body.n]}}}'
            for each in whole["choices"]
        )
        rest = {name: each for name, each in whole.items() if name != "choices"}
        content = f'{_json(rest)[:-1]}, "choices": [{", ".join(choices)}]}}'
        return Response(content, media_type="application/json")

    async def _chunks(
        self, first: tuple[ResponseChoice, Event], events: Samples, answer: ClientResponse, path: str, started: float
    ) -> AsyncGenerator[str, None]:
        """Yields the lines of a stream of server-sent events."""
        samples, status = dict[int, ResponseChoice](), 499
        found: tuple[ResponseChoice, Event] | None = first
        try:
            while found is not None:
                sample, event = found
                samples[sample.index] = sample
                for piece in self._piece(sample, event).for_stream():
                    if (chunk := answer.chunk(sample, piece)) is not None:
                        yield _line(chunk)
                found = await anext(events, None)  # type: ignore[arg-type]  # of typeshed's overload
            if (end := answer.end(list(samples.values()))) is not None:
                yield _line(end)
            yield "data: [DONE]\n\n"
            status = 200
            self._counters.whole_request.observe(time.monotonic() - started)
        except Exception as error:
            told = self._told(path, error)
            status = told.status
            yield _line(told.to_dict())
        finally:
            self._counters.requests.labels(path, status).inc()

    def _piece(self, sample: ResponseChoice, event: Event) -> Piece:
        """Returns the piece of a sample that an event completes."""
        if isinstance(event, Finished):
            done, first = event.completion, sample.num_tokens
            token_ids, log_probs, reason = done.token_ids[first:], done.log_probs[first:], done.finish_reason
            versions, likeliest = last_versions(done.versions, len(token_ids)), done.likeliest[first:]
        else:
            assert isinstance(event, Partial)
            token_ids, log_probs, versions, reason = event.token_ids, event.log_probs, event.versions, None
            likeliest = event.likeliest
        self._counters.completion_tokens.inc(len(token_ids))
        return sample.add(token_ids, log_probs, versions, reason, likeliest)


class ShortestFirst:
    """Runs functions in threads, the shortest bodies first, so that a long text does not delay short texts."""

    def __init__(self, threads: int = READING_THREADS) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, "prompts")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap by size and order
        self._order, self._running, self._long = count(), 0, 0

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Runs the function for a body of `size` bytes when its turn comes, and returns its result."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (size, next(self._order), turn))
        self._start()
        try:
            await turn
            return await loop.run_in_executor(self._pool, function)
        finally:
            if not turn.cancelled():
                self._running -= 1
                self._long -= size > LONG_BYTES
            self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._threads:
            size, _, turn = self._waiting[0]
            if size > LONG_BYTES and self._long == self._threads - 1:
                return
            heapq.heappop(self._waiting)
            if not turn.cancelled():
                self._running += 1
                self._long += size > LONG_BYTES
                turn.set_result(None)


class EventStream(StreamingResponse):
    """Sends server-sent events. Ends the stream and its samples if the client leaves, or reads too slowly."""

    def __init__(self, lines: AsyncGenerator[str, None], samples: Samples, seconds: float) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._lines, self._samples, self._seconds = lines, samples, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the lines."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            await self._lines.aclose()
            await self._samples.aclose()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Waits for the result of `work`; cancels it if the client leaves.  Raises: ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def in_own_words(error: WhetError) -> WhetError:
    """Returns an engine's error. The change for a request that is too long names the server's option and its field."""
    if not (isinstance(error, EngineError) and error.option):
        return error
    return EngineError(error.key, error.found, error.expected, f"raise --option {error.option} or lower max_tokens")


def _line(content: Raw) -> str:
    return f"data: {_json(content)}\n\n"


def _json(content: Raw) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


async def _not_here(request: Request, error: Exception) -> Response:
    """Returns the response for an unknown route."""
    assert isinstance(error, HTTPException)
    expected = f"the server has POST {CHAT}, POST {TEXT}, GET /v1/models, /v1/models/MODEL, {HEALTH} and /metrics"
    message = f"{request.method} {request.url.path}: {error.detail}; {expected}"
    return JSONResponse(ApiError(error.status_code, message).to_dict(), error.status_code, error.headers)
