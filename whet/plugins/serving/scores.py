# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of a served reward model. It scores texts and conversations, in the form of vLLM's /pooling and
/classify."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.config.schema import EngineConfig
from whet.data.chat import encode_rendered, encode_texts, render_chat
from whet.devices import here
from whet.engines.protocol import TrainEngine
from whet.engines.role import RoleSettings
from whet.errors import WhetError
from whet.guard import RefusedError, check_client, read_body
from whet.limits import read_json
from whet.models.load import context_length, load_tokenizer, reward_config
from whet.plugins.serving.app import BODY_SECONDS, ServeSettings
from whet.plugins.serving.bodies import ApiError
from whet.registry import ENGINES
from whet.roles.reward_texts import rows_of
from whet.types import Message

FORMS: dict[str, tuple[str, dict[str, object]]] = {  # name of the scores, and fields beside them
    "/pooling": ("data", {"object": "pooling"}),
    "/classify": ("probs", {"label": "score", "num_classes": 1}),
}


class ScoreApp:
    """The ASGI application of one reward model. A server runs its `asgi`."""

    def __init__(self, settings: ServeSettings, folder: str, dtype: Literal["float32", "bfloat16"]) -> None:
        """Loads the model.  Raises: ModelError."""
        trusted = settings.trust_remote_code
        reward_config(folder, trust_remote_code=trusted)
        role = RoleSettings(folder, EngineConfig(name="single"), dtype, is_reward_model=True, trust_remote_code=trusted)
        given = {"role": role, "process_group": None, "device": here()}
        self._engine: TrainEngine = ENGINES["single"].make(given, ENGINES["single"].resolve_options({}, "--option"))
        self._tokenizer = load_tokenizer(folder, folder, trust_remote_code=trusted)
        self._longest = context_length(folder, trust_remote_code=trusted)
        self._settings, self.name = settings, settings.name or Path(settings.model).expanduser().resolve().name
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._work: asyncio.Task[None] | None = None
        routes = [self._route("/health", self._health, "GET"), self._route("/v1/models", self._models, "GET")]
        for path in FORMS:
            routes.append(self._route(path, partial(self._answer, path), "POST"))
        self.asgi = Starlette(routes=routes)

    def _route(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        """Makes a route that checks the API key and converts errors to responses."""

        async def guarded(request: Request) -> Response:
            try:
                if path != "/health":
                    check_client(request.headers, self._settings.host, self._settings.api_key)
                async with asyncio.timeout(self._settings.deadline_seconds):
                    return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except (ApiError, RefusedError, WhetError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                status = 503 if late else error.status if isinstance(error, ApiError | RefusedError) else 400
                told = ApiError(status, "the deadline of the request passed" if late else str(error))
                return JSONResponse(told.to_dict(), status, {"retry-after": "1"} if status == 429 else None)

        return Route(path, guarded, methods=[method])

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        card = {"id": self.name, "object": "model", "owned_by": "whet", "max_model_len": self._longest}
        return JSONResponse({"object": "list", "data": [card]})

    async def _answer(self, path: str, request: Request) -> Response:
        most = round(self._settings.max_body_mib * 2**20)
        content = await read_body(request.headers, request.stream(), most, BODY_SECONDS)
        try:
            body = read_json(content)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        rows = await asyncio.to_thread(self._rows, body)
        scores = await self._scored(rows)
        key, kind = FORMS[path]
        data = [{"index": index, **kind, key: [score]} for index, score in enumerate(scores)]
        usage = {"prompt_tokens": sum(map(len, rows))}
        return JSONResponse({"object": "list", "model": self.name, "data": data, "usage": usage})

    def _rows(self, body: Any) -> list[list[int]]:
        """Returns the token ids of `messages`, or of `input`, which is one text, several texts, or token ids.  Raises:
        ApiError, DataError."""
        if not isinstance(body, dict) or ("messages" in body) == ("input" in body):
            raise ApiError(400, "a body needs either messages or input", param="input")
        if body.get("model") not in (None, "", self.name):
            raise ApiError(404, f"the model {body['model']!r} does not exist; this server has {self.name!r}")
        if body.get("use_activation"):
            raise ApiError(400, "a reward model's score has no activation", param="use_activation")
        if "messages" in body:
            try:
                messages = [Message.from_dict({**each}) for each in body["messages"]]
            except (KeyError, TypeError) as error:
                raise ApiError(400, "messages are objects with role and content", param="messages") from error
            text = render_chat(self._tokenizer, messages, add_generation_prompt=bool(body.get("add_generation_prompt")))
            rows = encode_rendered(self._tokenizer, [text])
        else:
            rows = self._read(body["input"], bool(body.get("add_special_tokens", True)))
        for row in rows:
            if not 2 <= len(row) <= self._longest:
                raise ApiError(400, f"a text has {len(row)} tokens, and 2 to {self._longest} can be read")
        return rows

    def _read(self, given: Any, add_special_tokens: bool) -> list[list[int]]:
        texts = given if isinstance(given, list) and not all(isinstance(each, int) for each in given) else [given]
        if texts and all(isinstance(each, str) for each in texts):
            return encode_texts(self._tokenizer, texts, add_special_tokens=add_special_tokens)
        most = len(self._tokenizer)
        if all(isinstance(ids, list) and all(type(each) is int and 0 <= each < most for each in ids) for ids in texts):
            return texts
        raise ApiError(400, "input is a text, token ids, or a list of either", param="input")

    async def _scored(self, rows: Sequence[list[int]]) -> list[float]:
        """Scores rows in forward passes that it shares with other requests.  Raises: ApiError."""
        if len(self._waiting) + len(rows) > self._settings.max_running + self._settings.max_waiting:
            raise ApiError(429, f"{len(self._waiting)} texts wait; send the request again later")
        loop = asyncio.get_running_loop()
        own = [(row, loop.create_future()) for row in rows]
        self._waiting += own
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._passes())
        return list(await asyncio.gather(*(future for _, future in own)))

    async def _passes(self) -> None:
        """Runs forward passes over waiting rows until no row waits."""
        most = self._settings.max_running
        while self._waiting:
            taken, self._waiting = self._waiting[:most], self._waiting[most:]
            work = asyncio.get_running_loop().run_in_executor(None, self._pass, [row for row, _ in taken])
            await asyncio.wait([work])
            for place, (_, future) in enumerate(taken):
                if future.done():  # its request is over
                    continue
                if (error := work.exception()) is not None:  # the next pass may succeed
                    future.set_exception(error)
                else:
                    future.set_result(work.result()[place])

    def _pass(self, rows: Sequence[list[int]]) -> list[float]:
        found: list[float] = self._engine.forward(rows_of(rows), frozenset({"scores"}))["scores"].sum(1).tolist()
        return found
