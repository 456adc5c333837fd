# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the server for the tinker SDK: JSON calls, promises, and results by long polling."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.errors import WhetError, WorkerError
from whet.guard import RefusedError, check_client, read_body
from whet.plugins.serving.app import BODY_SECONDS, ServeSettings
from whet.plugins.serving.bodies import BodyReader, Raw
from whet.plugins.serving.engine_thread import EngineThread
from whet.plugins.serving.tinker.desk import Bounds, ClientSession, Desk, DeskRequest, RequestFailure, Result, Work
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.samplers import Samplers
from whet.plugins.serving.tinker.sampling import Sampling, digest, failure_of
from whet.plugins.serving.tinker.store import PARTS, SAMPLER, SCHEME, WEIGHTS, ModelKind, Saved, size_of
from whet.plugins.serving.tinker.wire import MOST_ROWS, LossRequest, unpacked

log = logging.getLogger(__name__)
Call = Callable[[str, Raw], Awaitable[Raw | Response]]  # of an owner, with the request as JSON
PROTO, JSON = "application/x-protobuf", "application/json"
POLL_SECONDS = 25.0  # of a call that waits for a result; the SDK gives up after 45
SWEEP_SECONDS = 5.0
MOST_TTL_SECONDS = 10 * 366 * 86400  # the longest that the SDK names
MIB = 2**20


@dataclass(frozen=True)
class Served:
    """The served model: its other accepted names, its tokenizer, its architecture."""

    aliases: frozenset[str]
    tokenizer: str  # a folder, or a name on the hub
    arch: str
    reader: BodyReader


class TinkerApp:
    """An ASGI application; a server runs its `asgi`. Methods run in the event loop, models in the engine's thread."""

    def __init__(
        self, served: Served, models: Models, thread: EngineThread, samplers: Samplers, settings: ServeSettings
    ) -> None:
        self._served, self._models, self._thread, self._settings = served, models, thread, settings
        self._samplers, self._name = samplers, served.reader.name
        self._desk: Desk = Desk(Bounds(), self._wake)
        self._events: dict[str, asyncio.Event] = {}
        self._sampling = Sampling(models, thread, settings, self._desk, served.reader)
        self._is_busy = False
        self._keys = [each.strip() for each in (settings.api_key or "").split(",") if each.strip()]
        self._most = round(settings.max_body_mib * MIB)
        calls: dict[str, Call | Raw] = {
            **self._told(), "POST create_session": self._open, "POST session_heartbeat": self._heartbeat,
            "POST sessions/{session}/finish": self._finish, "POST create_model": self._create,
            "POST get_info": self._info, "POST forward_backward": self._loss, "POST optim_step": self._step,
            "POST retrieve_future": self._retrieve, "POST save_weights": self._save,
            "POST save_weights_for_sampler": self._snapshot, "POST load_weights": self._load,
            "POST weights_info": self._weights_info, "POST create_sampling_session": self._sampler,
            "POST asample": self._sampling.sample, "POST cancel_future": self._sampling.cancel,
            "GET samplers/{sampler}": self._sampler_info, "GET checkpoints": self._checkpoints,
            "GET training_runs/{model}/checkpoints": self._checkpoints,
            "DELETE training_runs/{model}/checkpoints/{checkpoint:path}": self._delete,
        }  # fmt: skip
        routes = [self._route(name, call) for name, call in calls.items()]
        routes.append(Route("/api/v1/healthz", self._health, methods=["GET"]))
        self.asgi = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._thread.run_elsewhere = asyncio.get_running_loop().call_soon_threadsafe
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            for name in list(self._desk.sessions):
                self._clear(self._desk.end(name))

    def _route(self, name: str, call: Call | Raw) -> Route:
        """Makes the route of a client's call. It checks the client's key, and converts errors to responses."""
        method, path = name.split(" ")

        async def answer(request: HttpRequest) -> Response:
            try:
                if self._thread.death is not None:
                    raise RefusedError(503, str(self._thread.death))
                owner, raw = self._owner(request.headers), Raw()
                if method == "POST":
                    raw = await self._read(request, PROTO if call == self._loss else JSON)
                found = call if isinstance(call, dict) else await call(owner, {**raw, **request.path_params})
                return found if isinstance(found, Response) else JSONResponse(found)
            except ClientDisconnect:
                return Response(status_code=499)
            except (RefusedError, WhetError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                words = str(error) if isinstance(error, RefusedError | WhetError) else f"it cannot be read: {error!r}"
                status = error.status if isinstance(error, RefusedError) else 400
                return JSONResponse({"error": words, "detail": words}, status)

        return Route(f"/api/v1/{path}", answer, methods=[method])

    async def _read(self, request: HttpRequest, kind: str) -> Raw:
        body = await read_body(request.headers, request.stream(), self._most, BODY_SECONDS, kind)
        if request.headers.get("content-encoding") == "zstd":
            body = await asyncio.to_thread(unpacked, body, self._most)
        if kind == PROTO:
            return {"body": body}
        if not isinstance(raw := json.loads(body), dict):
            raise RefusedError(400, "the body is not a JSON object")
        return raw

    def _owner(self, headers: Mapping[str, str]) -> str:
        """Returns the digest of a client's key.  Raises: RefusedError."""
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not self._keys:
            check_client(headers, self._settings.host, None)
        elif not any(hmac.compare_digest(given.encode(), each.encode()) for each in self._keys):
            raise RefusedError(401, "the request has no API key of this server; set TINKER_API_KEY")
        return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()

    # Sessions.

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok" if self._thread.death is None else "failed"})

    def _told(self) -> dict[str, Raw]:
        """Returns the constant replies, by the name of the call. Telemetry is accepted but not stored."""
        model = {"model_name": self._name, "max_context_length": self._models.context, "trainable": True}
        config = {
            "pjwt_auth_enabled": False, "proto_compress_fwdbwd": True, "create_model_via_load_weights": True,
            "parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": MOST_ROWS,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, self._most // 2),
            "sample_max_concurrent_requests": (self._settings.max_running + self._settings.max_waiting) // 2,
        }  # fmt: skip
        return {
            "POST client/config": config, "POST telemetry": {"status": "accepted"},
            "POST client/dynamic_config": {"refresh_interval_sec": 300, "sample_cancel_enabled": True},
            "GET get_server_capabilities": {"supported_models": [{**model, "sampleable": True}]},
        }  # fmt: skip

    async def _open(self, owner: str, raw: Raw) -> Raw:
        self._desk.open(owner, name := str(uuid.uuid4()), time.monotonic())
        return {"type": "create_session", "session_id": name}

    async def _heartbeat(self, owner: str, raw: Raw) -> Raw:
        self._desk.session(owner, raw["session_id"], time.monotonic())
        return {"type": "session_heartbeat"}

    async def _finish(self, owner: str, raw: Raw) -> Raw:
        self._desk.session(owner, raw["session"])
        self._clear(self._desk.end(raw["session"]))
        return {}

    def _clear(self, session: ClientSession) -> None:
        """Frees the models, snapshots and samples of an ended session, after the work that is running on them."""
        for model in session.models:
            self._thread.call(partial(self._models.drop, model))
        self._sampling.clear(session)

    async def _sweep(self) -> None:
        """Ends sessions that send no heartbeat, as long as the server runs."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for name, session in self._desk.sweep(time.monotonic()):
                log.info("session %s ended: no heartbeat for %g s", name, self._desk.bounds.session_seconds)
                self._clear(session)

    # Models.

    def _check_asked(self, name: str | None, raw: Raw) -> None:
        """Raises: RefusedError if a client asks for another base model, or another optimizer."""
        if name is not None and name not in {self._name, *self._served.aliases}:
            raise RefusedError(400, f"this server has the model {self._name!r}, not {name!r}")
        if (optimizer := (raw.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
            raise RefusedError(400, f"models are trained by adamw, not {optimizer!r}")

    async def _create(self, owner: str, raw: Raw) -> Raw:
        self._check_asked(raw["base_model"], raw)
        lora = raw.get("lora_config") or {"rank": 0}
        if not 0 <= int(lora["rank"]) <= 1024:
            raise RefusedError(400, f"rank={lora['rank']} is not from 1 to 1024, or 0 to train all weights")
        parts = {name: bool(lora.get(name, True)) for name in PARTS}
        kind = ModelKind(self._name, int(lora["rank"]), int(lora.get("seed") or 0), **parts)
        model = self._desk.add_model(owner, raw["session_id"], int(raw["model_seq_id"]), time.monotonic())

        def work() -> Result:
            self._models.create(model, kind)
            return {"type": "create_model", "model_id": model}

        return self._enter(owner, model, 0, raw, work)

    async def _info(self, owner: str, raw: Raw) -> Raw:
        self._desk.owned(owner, model := raw["model_id"])
        kind, data = self._models.kind_of(model), {"arch": self._served.arch, "tokenizer_id": self._served.tokenizer}
        told = {"model_name": self._name, "is_lora": kind.rank > 0, "lora_rank": kind.rank}
        told["model_data"] = {**data, "model_name": self._name}
        return {"type": "get_info", "model_id": model, **told}

    async def _loss(self, owner: str, raw: Raw) -> Raw:
        request = await asyncio.to_thread(LossRequest, raw["body"])
        work = partial(next, self._models.loss(request))
        return self._enter(owner, request.model_id, request.seq_id, raw["body"], work)

    async def _step(self, owner: str, raw: Raw) -> Raw:
        model, params = raw["model_id"], raw.get("adam_params")

        def work() -> Result:
            if not isinstance(params, dict):
                return RequestFailure("models are trained by adamw; send AdamParams", "user")
            found = self._models.step(model, params)
            # The SDK reads a text as a number; JSON has no NaN and no infinity.
            shown = {key: each if math.isfinite(each) else str(each) for key, each in found.items()}
            return {"type": "optim_step", "metrics": shown}

        return self._enter(owner, model, raw["seq_id"], raw, work)

    async def _save(self, owner: str, raw: Raw) -> Raw:
        path, work = self._saving(owner, raw, WEIGHTS, raw.get("path"))
        return self._enter(owner, raw["model_id"], raw["seq_id"], raw, lambda: {**work(), "path": path})

    async def _snapshot(self, owner: str, raw: Raw) -> Raw:
        """Saves weights for sampling: under the name in the request, or only for a sampler of this session."""
        model, number, kind = raw["model_id"], raw.get("sampling_session_seq_id"), raw.get("kind") or "snapshot"
        if kind != "snapshot":
            raise RefusedError(400, f"kind={kind!r} is not supported; leave it out, for a snapshot")
        session, seq = self._desk.owned(owner, model), raw["seq_id"]
        if number is None:
            path, work = self._saving(owner, raw, SAMPLER, raw.get("path"))
            return self._enter(owner, model, seq, raw, lambda: {**work(), "path": path})
        # A retry of the SDK has another number: it gets the sampler of the first request.
        asked = {key: each for key, each in raw.items() if key != "sampling_session_seq_id"}
        is_new = not self._desk.has(model, seq)
        path, work = self._saving(owner, raw, SAMPLER, f"snapshot-{seq}-{uuid.uuid4().hex[:8]}", is_snapshot=True)
        name = self._desk.sampler_name(session, int(number), path) if is_new else ""
        told = {"path": None, "sampling_session_id": name}
        promise = self._enter(owner, model, seq, asked, lambda: {**work(), **told})
        if is_new:
            self._desk.add_sampler(session, int(number), path)
        return promise

    def _saving(
        self, owner: str, raw: Raw, kind: str, name: str | None, *, is_snapshot: bool = False
    ) -> tuple[str, Callable[[], Raw]]:
        """Returns the path of a checkpoint, and a function that writes it.  Raises: RefusedError."""
        model, ttl, now = raw["model_id"], raw.get("ttl_seconds"), time.time()
        path = f"{SCHEME}{model}/{kind}/{name or format(raw['seq_id'], '06d')}"
        self._models.store.place(path)
        if ttl is not None and not 0 < ttl <= MOST_TTL_SECONDS:
            raise RefusedError(400, f"ttl_seconds={ttl} is not from 1 to {MOST_TTL_SECONDS}")
        expires, overwrite = None if ttl is None else now + ttl, bool(raw.get("overwrite"))
        metadata = {str(key): str(each) for key, each in (raw.get("user_metadata") or {}).items()}

        def work() -> Raw:
            saved = Saved(owner, self._models.kind_of(model), now, expires, metadata, is_snapshot)
            self._models.save(model, path, saved, overwrite=overwrite)
            return {"type": "save_weights" if kind == WEIGHTS else "save_weights_for_sampler"}

        return path, work

    async def _load(self, owner: str, raw: Raw) -> Raw:
        """Loads weights into an existing model, or into a new model."""
        path, seq, model = raw["path"], raw.get("seq_id"), raw.get("model_id")
        self._models.store.find(owner, path)
        self._check_asked(raw.get("base_model"), raw)
        if model is None:
            model, seq = self._desk.add_model(owner, raw["session_id"], int(raw["model_seq_id"]), time.monotonic()), 0

        def work() -> Result:
            self._models.load(owner, model, path, optimizer=bool(raw["optimizer"]))
            return {"type": "load_weights", "path": path, "model_id": model}

        return self._enter(owner, model, seq, raw, work)

    def _enter(self, owner: str, model: str, seq: Any, asked: Raw | bytes, work: Work) -> Raw:
        """Queues the function `work` for a model.  Returns a promise of its result."""
        self._desk.owned(owner, model)
        if not isinstance(seq, int):
            raise RefusedError(400, "the request has no seq_id")
        size = len(asked) if isinstance(asked, bytes) else 0
        request = self._desk.enter(model, seq, digest(asked), work, size, time.monotonic())
        self._pump()
        return {"request_id": request.id, "model_id": model}

    def _pump(self) -> None:
        """Runs the next part of the next request's work, if no part is running."""
        if self._is_busy or (request := self._desk.take()) is None or request.work is None:
            return
        self._is_busy, work = True, request.work

        def timed() -> Result | None:
            start = time.monotonic()
            try:
                return work()
            finally:
                self._samplers.spent = time.monotonic() - start

        def ran(done: Future[Result | None]) -> None:
            with suppress(RuntimeError):  # of an event loop that has ended, and so has the request's session
                self._thread.run_elsewhere(lambda: self._ran(request, done))

        self._thread.call(timed).add_done_callback(ran)

    def _ran(self, request: DeskRequest, done: Future[Result | None]) -> None:
        self._is_busy = False
        if (error := done.exception()) is not None:
            if isinstance(error, WorkerError):  # the ranks are gone
                self._samplers.lost = error
            self._desk.finish(request.id, failure_of(request.id, error))
        elif (result := done.result()) is not None:
            self._desk.finish(request.id, result)
        else:
            self._desk.put_back(request)
        self._pump()

    # Results.

    def _wake(self, name: str) -> None:
        if (event := self._events.pop(name, None)) is not None:
            event.set()

    async def _retrieve(self, owner: str, raw: Raw) -> Raw | Response:
        """Returns the result of a request. If it takes too long, the reply asks the client to try again."""
        name = raw["request_id"]
        if self._desk.find(owner, name).result is None:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._events.setdefault(name, asyncio.Event()).wait()
            except TimeoutError:
                return {"type": "try_again", "request_id": name, "queue_state": "active"}
        match self._desk.read(owner, name, time.monotonic()):
            case bytes() as proto:
                return Response(proto, media_type=PROTO)
            case RequestFailure(error=error, category=category):
                return {"error": error, "category": category}
            case result:
                return result

    async def _sampler(self, owner: str, raw: Raw) -> Raw:
        self._check_asked(raw.get("base_model"), raw)
        if (path := raw.get("model_path")) is not None:
            self._models.store.find(owner, path)
        session = self._desk.session(owner, raw["session_id"])
        name = self._desk.add_sampler(session, int(raw["sampling_session_seq_id"]), path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _sampler_info(self, owner: str, raw: Raw) -> Raw:
        session, name = self._desk.owned(owner, raw["sampler"]), raw["sampler"]
        return {"sampler_id": name, "base_model": self._name, "model_path": session.samplers[name]}

    # Checkpoints.

    async def _weights_info(self, owner: str, raw: Raw) -> Raw:
        kind = self._models.store.find(owner, raw["tinker_path"])[1].kind
        parts = {name: vars(kind)[name] for name in PARTS}
        return {"base_model": kind.base_model, "is_lora": kind.rank > 0, "lora_rank": kind.rank or None, **parts}

    async def _checkpoints(self, owner: str, raw: Raw) -> Raw:
        found = list(self._models.store.listed(owner, raw.get("model")))
        page = {"offset": 0, "limit": len(found), "total_count": len(found)}
        return {"checkpoints": [_card(path, size_of(place), saved) for path, place, saved in found], "cursor": page}

    async def _delete(self, owner: str, raw: Raw) -> Response:
        self._models.store.remove(owner, f"{SCHEME}{raw['model']}/{raw['checkpoint']}")
        return Response(status_code=204)


def _card(path: str, size: int, saved: Saved) -> Raw:
    """Converts a checkpoint to the form that the SDK reads."""
    kind = "training" if f"/{WEIGHTS}/" in path else "sampler"
    when = {"time": _date(saved.time), "expires_at": None if saved.expires is None else _date(saved.expires)}
    where = {"checkpoint_id": "/".join(path.split("/")[-2:]), "checkpoint_type": kind, "tinker_path": path}
    return {**where, **when, "size_bytes": size, "public": False, "user_metadata": saved.user_metadata}


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
