# SPDX-License-Identifier: Apache-2.0
"""The base class of rollout engines that send requests to their own server, with the bookkeeping that they share."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from whet.config.schema import ModelConfig
from whet.errors import ConfigError, EngineError, LostReplicaError, WeightSyncError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import load_encoders
from whet.models.folder import split_adapters
from whet.models.load import MisfitError, fitting, num_positions, outline
from whet.plugins.inference.servers.environment import Interpreter, Package, find_environment, longest
from whet.plugins.inference.servers.media import QWEN, Sees, SharedMedia, check_media
from whet.plugins.inference.servers.options import ServerOptions
from whet.plugins.inference.servers.process import HttpError, Server, free_port
from whet.plugins.inference.servers.weights import KeptWeights, Part, as_in_checkpoints, in_parts
from whet.plugins.inference.servers.wire_protocol import NEVER_SENT, Live, ServerWords, end_of, in_server
from whet.rollout.episode import joined
from whet.rollout.ledger import Ledger, check_request, check_whole, too_late, too_long
from whet.rollout.protocol import Completion, Event, Failed, Finished, Request, Span, Status, Weights
from whet.rollout.requirements import Decoding, RolloutBytes
from whet.types import Failure, Media

log = logging.getLogger(__name__)
FIRST_VERSION = 0  # of the weights that the server itself loaded
TICK_SECONDS = 0.2  # between two checks of the server while `poll` waits for events
ABORT_SECONDS = 0.2  # after which an abort is repeated: the request may have been on its way
POLL_SECONDS = 0.002  # between two checks for replies that are on their way
SENDS = 3  # attempts for a request whose connection breaks while the server is well
UNREADABLE = (ValueError, KeyError, TypeError)  # errors from replies of an unexpected form


class ServerEngine(ServerWords):
    """Manages a server's requests, versions and weights. Abstract methods are the calls that differ between servers.

    A subclass passes its options to `__init__`, then the server's arguments to `launch`."""

    length_option: ClassVar[str]  # the server's option for the longest sequence
    package: ClassVar[Package]
    sees: ClassVar[Sees] = QWEN
    server: Server

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        num_devices: int,
        model: ModelConfig,
        span: Span | None,
        shared: ServerOptions,
    ) -> None:
        assert model.path is not None
        self.dtype, self.num_devices = dtype, max(num_devices, shared.tensor_parallel_size or 1)
        self.shared, self.on_new_weights, self.takes_delta = shared, shared.on_new_weights, shared.weight_delta
        self.weight_transfer, self.weights_dir, self.span = shared.weight_transfer, shared.weights_dir, span
        self.devices_here = self.num_devices // (1 if span is None else span.nodes)
        self.version = FIRST_VERSION
        self.base, _ = split_adapters(model.path)  # adapters come by `load`
        self._answer_seconds = shared.answer_seconds
        with torch.device("meta"):
            whole: Any = outline(self.base, trust_remote_code=model.trust_remote_code)
        self._outline: PreTrainedModel = whole
        self.encoders = load_encoders(self.base, whole.config, trust_remote_code=model.trust_remote_code)
        self._media = SharedMedia(self.encoders)
        self.vocab_size, self.positions = int(whole.config.get_text_config().vocab_size), num_positions(whole.config)
        self._live = Ledger[Live]()
        self._ended: queue.SimpleQueue[tuple[Live | None, Event]] = queue.SimpleQueue()
        self._most = max_batch_size + max_batch_size // 4  # requests in the server: some wait there, ready to run
        self._names, self._paused, self._is_ready = 0, False, False
        self._coming: int | None = None  # the version that is being loaded, or whose load broke off
        self._seen = (-1, 0.0)  # tokens of unfinished requests, and when that number last changed
        self._restarts = shared.restarts  # restarts that are left
        self._loss: LostReplicaError | None = None  # why the server is lost
        self._kept = KeptWeights(shared.weights_dir, is_shared=span is not None)
        self.options: Mapping[str, Any] = {}  # that `refused` reads

    def launch(
        self,
        command: Callable[[str, int, Mapping[str, Any]], list[str]],
        arguments: Mapping[str, Any],
        variables: Mapping[str, str],
    ) -> None:
        """Starts the server. `command` builds the command line from an interpreter, a port and the arguments, which are
        `arguments` plus the option `server`.  Raises: ConfigError."""
        own = self.shared.server or {}
        found = find_environment(self.package, self.shared.python)
        found.check_arguments(own, arguments)
        self.max_length = longest(self.length_option, own, self.positions)
        whole = {**arguments, **own, **({} if self.span is None else self.spanning(self.span))}

        def start() -> Server:
            chosen = free_port(self.shared.port)
            return Server(self.package.title, command(found.python, chosen, whole), variables, chosen)

        self._start = start
        self._begin()

    def _begin(self) -> None:
        self.server = self._start()
        # Used in the client's thread; `_is_open` is set while requests may be sent.
        self._room, self._is_open = asyncio.Semaphore(self._most), asyncio.Event()
        self._is_open.set()

    @classmethod
    def environment_of(cls, options: Mapping[str, Any]) -> Interpreter:
        """Finds the interpreter for an engine with these options.  Raises: ConfigError."""
        return find_environment(cls.package, options["python"])

    @classmethod
    def check_ahead(cls, model: ModelConfig, longest: int, options: Mapping[str, Any]) -> None:
        """Raises: ConfigError if the server could not start with these options."""
        server, folder = options["server"] or {}, options["weights_dir"]
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            expected = "a folder that can be written to, with room for all weights"
            change = "make it, or leave it out for the host's memory"
            raise ConfigError("rollout.engine.options.weights_dir", folder, expected, change)
        cls.environment_of(options).check_arguments(server, ())
        length = server.get(cls.length_option, longest)
        if isinstance(length, int) and length < longest:
            key = f"rollout.engine.options.server.{cls.length_option}"
            expected = f"at least data.max_prompt_length and data.max_response_length together, {longest} tokens"
            raise ConfigError(key, length, expected, "raise it, or lower them")

    @classmethod
    def check_media(cls, encoders: Encoders | None, media: Sequence[Media], whose: str) -> None:
        """Raises: EngineError if the server cannot read `media`; the error names the prompt as `whose`."""
        check_media(encoders, cls.package.title, cls.sees, media, whose)

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """Returns the bytes of the whole KV cache, which the server reserves at its start."""
        cache, rows = options["kv_cache_bytes"], decoding.rows
        needed = rows * (max(decoding.lengths.prompts) + decoding.lengths.response) * decoding.token_bytes
        smaller = {"kv_cache_bytes": max(2**26, needed // 2)}
        longest = max(decoding.lengths.prompts)
        in_memory = not (options.get("adapter") or options["weights_dir"])
        is_whole_file, is_kept = options["weight_transfer"] == "file", bool(options["restarts"])
        copies = in_memory * (is_kept + (is_whole_file or is_kept))  # old weights until the new ones have arrived
        return RolloutBytes(cache, cache, True, rows, longest, smaller, copies)

    # -- the contract of rollout engines

    def submit(self, request: Request) -> bool:
        """Accepts a request; returns False at MAX_UNFINISHED requests.  Raises: EngineError if it can never fit."""
        if (answer := self._live.answer(request)) is not None:
            return answer
        self.check(request)
        self._end([self._live[request.uid]] if request.uid in self._live else [])
        self._raise_loss()
        self.ready()
        if not self._live:
            self._seen = (-1, time.monotonic())
        self._names += 1
        live = self._live[request.uid] = Live(request, str(self._names))
        self._media.prefetch(request)
        live.call = self.server.client.start(self._answer(live))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        until, events = time.monotonic() + timeout_seconds, list[Event]()
        self._raise_loss()
        while True:
            check_whole(self._coming, self.version)
            left = until - time.monotonic()
            with self._noting_loss():
                self._take(events, min(left, TICK_SECONDS) if self._live and not self._paused else 0.0)
                if not events and self._live and not self._paused:
                    self._look()
            if events or not self._live or self._paused or (self._loss is None and left <= TICK_SECONDS):
                return events
            self._raise_loss()

    def abort(self, uids: Collection[str]) -> None:
        self._raise_loss()
        self._end([self._live[uid] for uid in uids if uid in self._live])

    def pause(self) -> None:
        """Stops sampling. Every request that has tokens returns them as Partial.  Raises: EngineError."""
        self._paused = True
        self.unless_lost(self._stop)

    def _stop(self) -> None:
        self.hold(keep_cache=True)
        found = dict(self.so_far())
        for live in [each for each in self._live.values() if not (each.request.streams or each.call.done())]:
            whole = joined(live.before, found.get(live, NEVER_SENT))
            if whole.token_ids:
                self.stream(live, -len(live.before.token_ids), whole)

    def stream(self, live: Live, place: int, new: Completion) -> None:
        """Queues new tokens of a running request as Partial. `place`: their position after the tokens sent before."""
        where = live.request.uid, live.request.attempt, len(live.rest.sampled_ids) + place
        self._ended.put((None, new.as_partial(*where)))

    def resume(self) -> None:
        self._paused, self._seen = False, (-1, time.monotonic())
        if self._coming is None:
            self.unless_lost(self._go_on)

    def load(self, weights: Weights, version: int) -> None:
        """Loads weights into the server's model.  Raises: WeightSyncError; EngineError; errors of `weights`."""
        try:
            self._load(weights, version)
        except MisfitError as error:
            self._coming = version
            raise self._misfit(version, error) from error

    def _misfit(self, version: int, why: object) -> WeightSyncError:
        expected = f"those of {self.package.title}'s model, which it can reload"
        return WeightSyncError(f"version {version} of the weights", why, expected, "let both load model.path")

    def _load(self, weights: Weights, version: int) -> None:
        whole = as_in_checkpoints(fitting(weights, self._outline), self._outline)
        is_file = self.weight_transfer == "file"
        coming = self._kept.writing(whole, version) if is_file or self._restarts else iter(whole)
        if not is_file:
            parts = in_parts(coming, self.num_devices, self.weights_dir)
            self.unless_lost(lambda: self._send(parts, version))
        for _ in coming:
            pass  # writes the file, or skips weights that a lost server did not read: the sender waits for all
        if is_file:
            self.unless_lost(self._send_kept)
        self.version = version
        if not self._restarts and self._loss is None:
            self._kept.drop()

    def _send_kept(self) -> None:
        self._send(iter([[self._kept.part] * self.num_devices]), self._kept.version)

    def _send(self, parts: Iterator[list[Part]], version: int) -> None:
        """Sends weights to the server, which continues to sample until the first part is ready."""
        first = list(islice(parts, 1))
        with self.between_two_steps(version):
            self.update(chain(first, parts), version)

    def restart(self) -> None:
        """Starts a new server to replace a lost one, and another one if that fails to start.

        Raises: EngineError of the last one, when no restart is left."""
        self._live, self._ended, self._is_ready = Ledger(), queue.SimpleQueue(), False
        while not self._is_ready:
            self._restarts -= 1
            self.server.close()
            self._begin()
            try:
                self.ready()
            except EngineError as error:
                if not self._restarts:
                    raise
                log.warning("a server failed to start, %d restarts are left: %s", self._restarts, error)

    def rejoin(self) -> None:
        """Loads the newest weights into the new server.  Raises: EngineError, WeightSyncError."""
        self._coming, self._loss = None, None
        if self._kept.file is not None:
            self.unless_lost(self._send_kept)
        if self._paused:
            self.unless_lost(self._stop)

    @contextmanager
    def between_two_steps(self, version: int) -> Iterator[None]:
        """Pauses sampling while the `with` block loads weights.  Raises: WeightSyncError if the server refuses them."""
        is_held = self._paused or self._coming is not None  # no request can end in a pause
        handling = "recompute" if is_held else self.on_new_weights
        if handling in ("wait", "abort"):
            self.open(False)
            self._let_end() if handling == "wait" else self._cut()
        self._coming = version
        self.hold(keep_cache=handling == "keep")
        if any(live.request.streams for live in self._live.values()):
            for live, found in self.so_far():
                live.known = found.versions
        try:
            yield
        except HttpError as error:
            raise self._misfit(version, f"{error}. {self.server.failure('did not take them')}") from error
        self.version, self._coming = version, None
        if not self._paused:
            self._go_on()

    def open(self, is_open: bool) -> None:
        """Lets requests pass to the server, or holds new requests back if `is_open` is false."""

        async def change() -> None:
            self._is_open.set() if is_open else self._is_open.clear()

        self.server.client.start(change()).result()

    def _go_on(self) -> None:
        self.release()
        self.open(True)

    def _let_end(self) -> None:
        """Waits until all sent requests have ended.  Raises: EngineError if the server is lost or hangs."""
        self._seen = (-1, time.monotonic())
        while sent := [live.call for live in in_server(self._live.values())]:
            wait(sent, timeout=TICK_SECONDS)
            self._look()

    def _cut(self) -> None:
        """Aborts all sent requests, so that each is sent again with its tokens so far.  Raises: EngineError."""
        for live in (sent := in_server(self._live.values())):
            live.is_cut = True
        self._end(sent)

    def status(self) -> Status:
        return self._live.status(self.version, sum(live.is_sent for live in list(self._live.values())))

    def close(self) -> None:
        self._live.clear()
        self.server.close()
        self._kept.drop()

    def check(self, request: Request) -> None:
        params, uid = request.params, request.uid
        needed = len(request.prompt_ids) + params.max_new_tokens
        if request.media:
            self.check_media(self.encoders, request.media, f"request {request.uid}")
        check_request(request, self.vocab_size)
        if needed > self.max_length:
            most = f"{self.max_length} tokens, which {self.package.title} takes"
            raise too_long(request, most, f"server.{self.length_option}")
        if (why := self.refused(params, self.options)) is not None:
            raise EngineError(f"{why.key} of request {uid}", why.found, why.expected, why.change) from why

    async def _answer(self, live: Live) -> None:
        """Sends a request and waits for its end, in the client's thread. Then puts the result into the queue."""
        request = live.request
        try:
            async with asyncio.timeout(request.deadline_seconds), self._room:
                completion = await self._completed(live)
            event: Event = Finished(request.uid, request.attempt, completion)
        except TimeoutError:
            event = too_late(request)
        except (EngineError, OSError, *UNREADABLE) as error:
            event = Failed(request.uid, request.attempt, Failure("engine", f"{type(error).__name__}: {error}"))
        self._ended.put((live, event))

    async def _completed(self, live: Live) -> Completion:
        """Builds the completion of a request from all attempts to send it."""
        while True:
            await self._is_open.wait()
            live.is_sent = True
            found = joined(live.before, await self._sampled(live))
            if not live.is_cut or found.finish_reason != "abort":
                return found
            if (reason := end_of(found, live.request)) is not None:
                return replace(found, finish_reason=reason)
            live.name = f"{live.name}-on"
            live.before, live.known, live.is_cut, live.is_sent = found, (), False, False

    async def _sampled(self, live: Live) -> Completion:
        """Samples a request's completion. If the connection breaks, sends it again under another name."""
        for _ in range(SENDS - 1):
            try:
                return await self.sample(live)
            except OSError as error:  # of the connection
                if isinstance(error, TimeoutError) or live.request.streams:
                    raise
                live.name = f"{live.name}-again"
        return await self.sample(live)

    def _take(self, events: list[Event], timeout_seconds: float) -> None:
        """Appends the events that have arrived to `events`, except events of requests that were replaced."""
        with suppress(queue.Empty):
            live, event = self._ended.get(timeout=max(0.0, timeout_seconds))
            while True:
                if isinstance(event, Failed) and not event.failure.timed_out:
                    self.server.examine(event.failure.message)
                if live is None or self._live.get(event.uid) is live:
                    events.append(event)
                if live is not None and self._live.get(event.uid) is live:
                    del self._live[event.uid]
                    self._seen = (-1, time.monotonic())
                live, event = self._ended.get_nowait()

    def _end(self, chosen: list[Live]) -> None:
        """Aborts requests, and waits until the server has none of them."""
        until = time.monotonic() + self._answer_seconds
        for live in chosen:
            if not live.is_sent and live.call.cancel():
                request = live.request
                self._ended.put((live, Finished(request.uid, request.attempt, live.before)))
        while sent := in_server(chosen):
            self.end([live.name for live in sent])
            again = time.monotonic() + ABORT_SECONDS
            while in_server(sent) and time.monotonic() < again:
                time.sleep(POLL_SECONDS)
            if time.monotonic() > until:
                raise self.server.failure(f"did not abort {len(sent)} requests within {self._answer_seconds:g} s")

    def ready(self) -> None:
        """Waits until the server has started.  Raises: EngineError."""
        if not self._is_ready:
            self.server.wait(self.shared.start_seconds)
            self.prepare()
            self._is_ready = True
            self.server.error = LostReplicaError if self._restarts else EngineError

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Records a LostReplicaError of the `with` block; the next submit, poll or abort raises it."""
        try:
            yield
        except LostReplicaError as error:
            self._loss = error

    def unless_lost(self, work: Callable[[], object]) -> None:
        """Runs `work` unless the server is lost. If it is lost before or during `work`, its restart replaces `work`."""
        if self._loss is None:
            with self._noting_loss():
                self.ready()
                work()

    def _raise_loss(self) -> None:
        if self._loss is not None:
            raise self._loss

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the server and returns its reply.  Raises: HttpError; EngineError if the server is lost or hangs."""
        self.server.check()
        try:
            return self.server.client.call(method, path, body, seconds=self._answer_seconds)
        except TimeoutError as error:
            raise self.server.failure(f"did not answer {path} within {self._answer_seconds:g} s") from error
        except HttpError as error:
            self.server.examine(str(error))  # a server without its worker refuses everything
            raise
        except OSError as error:
            raise self.server.failure(f"closed the connection ({error}) at {path}") from error

    def _look(self) -> None:
        """Raises: EngineError if the server has ended, or if no running request got a token within the deadline."""
        self.server.check()
        now, (tokens, changed_at) = time.monotonic(), self._seen
        if now - changed_at < self._answer_seconds / 4:
            return
        count = self.count()
        if count != tokens:
            self._seen = count, now
        elif now - changed_at > self._answer_seconds:
            raise self.server.failure(f"gave no token to {len(self._live)} requests for {self._answer_seconds:g} s")
