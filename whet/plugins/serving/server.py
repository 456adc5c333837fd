# SPDX-License-Identifier: Apache-2.0
"""`whet serve`: loads a model or a run into a rollout engine, serves it over HTTP, and follows its training."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from whet.checkpoints import checkpoint
from whet.checkpoints.export import find_model, model_folder
from whet.config.schema import Dtype, ModelConfig, RolloutConfig, RolloutEngineConfig
from whet.errors import ConfigError, describe
from whet.evaluation.evaluate import open_engine
from whet.guard import LOCAL, with_deadline
from whet.models.load import (
    cast_weights,
    context_length,
    is_classifier,
    load_config,
    load_policy,
    load_tokenizer,
    rollout_tensors,
    stop_token_ids,
    torch_dtype,
)
from whet.planning.dtypes import choose
from whet.plugins.serving.app import App, ServeSettings
from whet.plugins.serving.bodies import BodyReader
from whet.plugins.serving.engine_thread import EngineThread, named
from whet.plugins.serving.scores import ScoreApp
from whet.rollout.protocol import Request, RolloutEngine, SamplingParams, generate
from whet.tracking.console import long_phase

log = logging.getLogger(__name__)
FOLLOW_SECONDS = 2.0  # between two looks for a new checkpoint
END_SECONDS = 5.0  # for clients to read an error


def serve(settings: ServeSettings) -> None:
    """Serves until a signal.  Raises: WhetError if it cannot start or continue."""
    with ExitStack() as stack:
        bound = stack.enter_context(bound_to(settings.host, settings.port))
        with long_phase("loading the model"):
            source = _source(settings)
            trusted = settings.trust_remote_code
            folder = stack.enter_context(model_folder(source, trust_remote_code=trusted))
            dtype = choose(settings.dtype, "--dtype")
            if is_classifier(load_config(folder, trust_remote_code=trusted)):
                _serve_scores(settings, ScoreApp(settings, folder, dtype), bound)
                return
            reader = reader_of(settings, folder, Path(settings.model).expanduser().resolve().name)
            (rollout, model), step = sampling_of(settings, folder, dtype), _step(source)
            engine = open_engine(rollout, model, folder, version=0 if step is None else step)
            server = _Server(settings, reader, engine, source, dtype)
        server.run(bound)


def sampling_of(settings: ServeSettings, folder: str, dtype: Dtype) -> tuple[RolloutConfig, ModelConfig]:
    """Returns the configs of the sampling engine and of its model."""
    chosen = RolloutEngineConfig(name=settings.engine, options=dict(settings.option))
    rollout = RolloutConfig(engine=chosen, dtype=dtype, max_batch_size=settings.max_running)
    return rollout, ModelConfig(path=folder, dtype=dtype, trust_remote_code=settings.trust_remote_code)


def reader_of(settings: ServeSettings, folder: str, name: str) -> BodyReader:
    """Returns the reader of requests for the model in `folder`, served under the settings' name, else `name`."""
    trusted = settings.trust_remote_code
    tokenizer = load_tokenizer(folder, folder, trust_remote_code=trusted)
    return BodyReader(
        name=settings.name or name,
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(folder, tokenizer, {}),
        context=context_length(folder, trust_remote_code=trusted),
        vocab_size=load_config(folder, trust_remote_code=trusted).get_text_config().vocab_size,
        max_tokens=settings.max_tokens,
        tool_parser=settings.tool_parser,
        most_samples=settings.max_running + settings.max_waiting,
    )


def _serve_scores(settings: ServeSettings, app: ScoreApp, bound: socket.socket) -> None:
    """Serves a reward model until a signal.  Raises: ConfigError."""
    if settings.follow:
        raise ConfigError("--follow", "set", "no --follow with a reward model", "leave it out")
    host, port = bound.getsockname()[:2]
    log.info("serving %s, as %r, on http://%s:%d/v1/models, /pooling, /classify", settings.model, app.name, host, port)
    HttpServer(app.asgi, settings).run_on(bound)


class _Server:
    """A loaded engine, its thread, and the HTTP server in front of them."""

    def __init__(
        self, settings: ServeSettings, reader: BodyReader, engine: RolloutEngine, source: str, dtype: str
    ) -> None:
        self._settings, self._name, self._source = settings, reader.name, source
        self._dtype = torch_dtype(dtype)
        self._engine = EngineThread(engine, on_death=lambda error: setattr(self._http, "should_exit", True))
        warm_up = Request("warm-up", (reader.stop_ids or (0,))[:1], SamplingParams(1), 0)
        warmed = self._engine.call(lambda: generate(engine, [warm_up]))  # makes the cache, compiles the kernels
        if (error := warmed.exception()) is not None:
            self._engine.stop()
            raise named(error) from error
        app = App(reader, self._engine, settings, lambda: {"root": self._source})
        app.asgi.router.lifespan_context = self._lifespan
        self._http = HttpServer(app.asgi, settings, self._engine)

    def run(self, bound: socket.socket) -> None:
        """Serves until a signal, or until the engine fails.  Raises: WhetError if the engine has failed."""
        settings, (host, port) = self._settings, bound.getsockname()[:2]
        log.info("serving %s with %s, as %r, on http://%s:%d/v1", self._source, settings.engine, self._name, host, port)
        log.info("Ctrl-C ends it when running requests are done, after %g s at the latest", settings.stop_seconds)
        self._http.run_on(bound)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.run_elsewhere = asyncio.get_running_loop().call_soon_threadsafe
        follower = asyncio.create_task(self._follow()) if self._settings.follow else None
        yield
        if follower is not None:
            follower.cancel()
            with suppress(asyncio.CancelledError):
                await follower

    async def _follow(self) -> None:
        """Loads each new checkpoint of the run between two decode steps."""
        run, last = Path(self._settings.model).expanduser(), _identity(Path(self._source))
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            newest = checkpoint.newest(run)
            if newest is None or (found := _identity(newest)) == last:
                continue
            last = found
            try:
                await asyncio.to_thread(self._load, newest)
            except Exception as error:  # such as too little memory; the next checkpoint may be loaded
                log.warning("%s was not loaded: %s; the server keeps serving %s", newest, describe(error), self._source)
            else:
                self._source = str(newest)
                log.info("serving %s from now on", newest)

    def _load(self, source: Path) -> None:
        trusted = self._settings.trust_remote_code
        with model_folder(str(source), trust_remote_code=trusted) as folder:
            module = load_policy(folder, trust_remote_code=trusted)
        cast_weights(module.requires_grad_(False), self._dtype)
        weights, step = iter(rollout_tensors(module).items()), checkpoint.step_of(source)
        self._engine.call(lambda: self._engine.engine.load(weights, step)).result()


class HttpServer(uvicorn.Server):
    """uvicorn's server, which also ends requests with an error if they take too long after a signal."""

    def __init__(self, app: Starlette, settings: ServeSettings, engine: EngineThread | None = None) -> None:
        http = with_deadline(AutoHTTPProtocol)
        config = uvicorn.Config(app, http=http, log_level="warning", access_log=False, server_header=False)
        config.timeout_graceful_shutdown = round(settings.stop_seconds + (0 if engine is None else END_SECONDS))
        super().__init__(config)
        self._settings, self._engine = settings, engine

    def run_on(self, bound: socket.socket) -> None:
        """Serves until a signal, or until the engine fails; then stops the engine.  Raises: WhetError if the engine has
        failed."""
        if self._settings.host not in LOCAL and not self._settings.api_key:
            log.warning("anyone who reaches %s:%d may use this server; set --api-key KEY", *bound.getsockname()[:2])
        try:
            with _signals_end_quietly():
                self.run(sockets=[bound])
            death = None if self._engine is None else self._engine.death
        finally:
            if self._engine is not None:
                self._engine.stop()
        if death is not None:
            raise death

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new connections, and waits for requests to end."""
        log.info("the server stops when its running requests end; Ctrl-C again stops it at once")
        if self._engine is not None:
            asyncio.get_running_loop().call_later(self._settings.stop_seconds, self._engine.end_requests)
        await super().shutdown(sockets)


def _source(settings: ServeSettings) -> str:
    """Returns the model or checkpoint to load.  Raises: ConfigError, CheckpointError."""
    run = Path(settings.model).expanduser()
    found = find_model(settings.model)
    is_run = found != settings.model and Path(found) != run
    if (settings.follow or settings.best) and not is_run:
        option = "--follow" if settings.follow else "--best"
        expected = f"the folder of a run, which {option} needs"
        raise ConfigError("model", settings.model, expected, f"name one, or leave {option} out")
    if settings.follow and settings.best:
        found, change = "set beside --follow, which serves the newest checkpoint", "leave one out"
        raise ConfigError("--best", found, "one of the two", change)
    if not settings.best:
        return found
    best = checkpoint.best(run / "checkpoints")
    if best is None:
        found, change = f"no checkpoint of {run} has a validation score", "leave it out to serve the newest"
        raise ConfigError("--best", found, change=change)
    return str(best)


def _identity(folder: Path) -> tuple[str, int]:
    """Returns a checkpoint's name and completion time. A resumed run may write another checkpoint of the same name."""
    with suppress(OSError):  # removed meanwhile
        return folder.name, (folder / checkpoint.MANIFEST).stat().st_mtime_ns
    return folder.name, 0


def _step(source: str) -> int | None:
    """Returns the step of a checkpoint; None for a model."""
    folder = Path(source).expanduser()
    return checkpoint.step_of(folder) if (folder / checkpoint.MANIFEST).exists() else None


@contextmanager
def bound_to(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket bound to the address, before the model is loaded.  Raises: ConfigError."""
    try:
        # Without the protocol asyncio would leave Nagle's algorithm on, which delays replies by 40 ms.
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1)
            yield bound
    except OSError as error:
        found = f"the server cannot listen there ({error.strerror})"
        change = "name another address with --host, or another port with --port (0: a free one)"
        raise ConfigError(f"{host}:{port}", found, change=change) from error


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Ignores the SIGINT and SIGTERM that uvicorn raises again after it has stopped."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
