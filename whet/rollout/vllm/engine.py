# SPDX-License-Identifier: Apache-2.0
"""The rollout engine `vllm`: requests to a vLLM server of its own, and weights through shared memory."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from whet.config.schema import ModelConfig
from whet.devices import HOST
from whet.errors import ConfigError, EngineError, LostReplicaError, WeightSyncError
from whet.models.folder import split_adapters
from whet.models.load import outline
from whet.options import Count, Number, Positive
from whet.registry import register_rollout
from whet.rollout.constraints import check_rules
from whet.rollout.planned import Decoding, RolloutBytes
from whet.rollout.protocol import Event, Failed, Finished, Partial, Request, Status, Weights
from whet.rollout.vllm.arguments import engine_arguments, max_length
from whet.rollout.vllm.environment import find_environment
from whet.rollout.vllm.http import HttpError
from whet.rollout.vllm.server import Server, command, environment, free_port
from whet.rollout.vllm.translate import FIRST_VERSION, body_of, completion_of, versions_at, versions_of
from whet.rollout.vllm.weights import Adapter, Kept, adapter_folder, as_in_checkpoints, kept, weights_file
from whet.types import Failure, Versions

MAX_UNFINISHED = 65536  # requests; more are refused until some are done
TICK_SECONDS = 0.2  # between two looks at the server while events are waited for
ABORT_SECONDS = 0.2  # after which an abort is repeated: the request may have been on its way
LEAST_TEMPERATURE = 0.01  # vLLM raises smaller ones to it
ADAPTER = "trained"  # its name in the server
LOST = (OSError, EOFError)  # connections that broke
SENDS = 3  # of a request whose connection broke while the server is well
GENERATE = "/inference/v1/generate"
UNREADABLE = (ValueError, KeyError, TypeError)  # answers of another form


@dataclass(eq=False)
class Live:
    """An unfinished request, and the call of the server that answers it."""

    request: Request
    name: str  # of this attempt, for the server
    submitted_at: float = field(default_factory=time.monotonic)
    is_sent: bool = False
    known: Versions = ()  # of its tokens at the last change of weights, where it streams
    is_replaced: bool = False  # by a later attempt: its end is no event
    call: Future[None] = field(default_factory=Future)


@register_rollout("vllm")
class VLLMEngine:
    """vLLM, in a server process from an environment of its own (`make vllm`); float32 requests give the same tokens in
    any company.

    python: interpreter of the environment; unset: $WHET_VLLM_PYTHON, else .venv-vllm of the checkout.
    kv_cache_bytes: memory for keys and values.
    compile: compiles the model: slower to start, faster to run.
    keep_cache: running requests keep their keys and values when weights change, instead of computing them again.
    adapter: samples with the trained adapter beside the weights, instead of adding it in and sending all weights.
    threads: threads that the server computes with on a CPU; unset: as many as torch uses here.
    port: port of the server on 127.0.0.1; unset: any free one.
    start_seconds: deadline for the server's start.
    answer_seconds: deadline for an answer to anything but a request, and for the next token of any running request.
    restarts: times that a server which is lost or hangs is started again, while other replicas go on with its requests.
        For this the newest weights stay in the host's memory. With 0 they do not, and its loss ends the run.
    server: further engine arguments of vLLM by name, such as max_model_len.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        device: torch.device,
        model: ModelConfig,
        *,
        python: str | None = None,
        kv_cache_bytes: Count = 1_073_741_824,
        compile: bool = False,  # noqa: A002  # the option's name
        keep_cache: bool = False,
        adapter: bool = False,
        threads: Count | None = None,
        port: Count | None = None,
        start_seconds: Positive = 600.0,
        answer_seconds: Positive = 300.0,
        restarts: Number = 3,
        server: dict[str, Any] | None = None,
    ) -> None:
        assert model.path is not None
        self.dtype, self.keep_cache, self.version = dtype, keep_cache, FIRST_VERSION
        base, _ = split_adapters(model.path)  # adapters come by `load`
        self._answer_seconds, self._start_seconds = answer_seconds, start_seconds
        with torch.device("meta"):
            whole: Any = outline(base, trust_remote_code=model.trust_remote_code)
        self._outline: PreTrainedModel = whole
        config = whole.config.get_text_config()
        self.vocab_size, positions = int(config.vocab_size), int(config.max_position_embeddings)
        arguments = engine_arguments(
            model, dtype, max_batch_size, device, kv_cache_bytes, compile=compile, adapter=adapter
        )
        found = find_environment(python)
        found.check_arguments(server or {}, arguments)
        self.max_length = max_length(server or {}, positions)
        self._live: dict[str, Live] = {}  # by uid, the oldest first
        self._ended: queue.SimpleQueue[tuple[Live | None, Event]] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(max_batch_size + max_batch_size // 4)  # in the server, so that it need not wait
        self._names, self._paused, self._is_ready = 0, False, False
        self.takes_adapter = adapter
        self._has_adapter = self._is_adapter_known = False  # requests name it; the server has one under that name
        self._coming: int | None = None  # the version that is being loaded, or was when it broke off
        self._seen = (-1, 0.0)  # tokens of unfinished requests, and when that number last changed
        self._restarts = restarts  # that are left
        self._loss: LostReplicaError | None = None  # why the server is lost
        self._weights: Kept | None = None
        self._adapter: Adapter | None = None
        index = None if device == HOST else device.index or 0
        variables = environment(threads or torch.get_num_threads(), index)

        def start() -> Server:
            own = free_port(port)
            return Server(command(found.python, own, arguments | (server or {})), variables, own)

        self._start, self.server = start, start()

    @classmethod
    def check_ahead(cls, model: ModelConfig, longest: int, options: Mapping[str, Any]) -> None:
        """Raises: ConfigError where vLLM is not here, or could not be started with these options."""
        cache, server = options["kv_cache_bytes"], options["server"] or {}
        ours = engine_arguments(model, torch.float32, 1, HOST, cache, compile=False, adapter=options["adapter"])
        find_environment(options["python"]).check_arguments(server, ours)
        length = server.get("max_model_len", longest)
        if isinstance(length, int) and length < longest:
            raise ConfigError(
                f"rollout.engine.options.server.max_model_len={length} is less than data.max_prompt_length and "
                f"data.max_response_length together, {longest} tokens; raise it, or lower them"
            )

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """The whole cache, which the server reserves at its start."""
        cache, rows = options["kv_cache_bytes"], decoding.rows
        needed = rows * (max(decoding.lengths.prompts) + decoding.lengths.response) * decoding.token_bytes
        smaller = {"kv_cache_bytes": max(2**26, needed // 2)}
        return RolloutBytes(cache, min(cache, needed), True, rows, max(decoding.lengths.prompts), smaller)

    def submit(self, request: Request) -> bool:
        """Takes a request; False while MAX_UNFINISHED are there.  Raises: EngineError for one that can never fit."""
        earlier = self._live.get(request.uid)
        if earlier is not None and request.attempt <= earlier.request.attempt:
            return True
        if earlier is None and len(self._live) >= MAX_UNFINISHED:
            return False
        self._check(request)
        if earlier is not None:
            earlier.is_replaced = True
            self._end([earlier])
        self._raise_loss()
        self._ready()
        if not self._live:
            self._seen = (-1, time.monotonic())
        self._names += 1
        live = self._live[request.uid] = Live(request, str(self._names))
        live.call = self.server.client.start(self._answer(live))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Returns the events as soon as there are any.  Raises: EngineError, WeightSyncError."""
        until, events = time.monotonic() + timeout_seconds, list[Event]()
        self._raise_loss()
        while True:
            self._require_whole_weights()
            left = until - time.monotonic()
            with self._noting_loss():
                self._take(events, min(left, TICK_SECONDS) if self._live and not self._paused else 0.0)
                if not events and self._live and not self._paused:
                    self._look()
            if events or not self._live or self._paused or (self._loss is None and left <= TICK_SECONDS):
                return events
            self._raise_loss()

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests with finish_reason "abort" and the tokens so far.  Raises: EngineError."""
        self._raise_loss()
        self._end([self._live[uid] for uid in uids if uid in self._live])

    def pause(self) -> None:
        """Stops sampling; every request with tokens gives them as Partial.  Raises: EngineError."""
        self._paused = True
        self._unless_lost(self._stop)

    def _stop(self) -> None:
        self._call("POST", "/pause?mode=keep&clear_cache=false")
        for live, found in self._so_far():
            if not live.request.streams:
                where = live.request.uid, live.request.attempt, len(live.request.sampled_ids)
                versions = versions_of(found["weight_versions"])
                partial = Partial(*where, tuple(found["token_ids"]), tuple(found["log_probs"]), versions)
                self._ended.put((None, partial))

    def _so_far(self) -> list[tuple[Live, dict[str, Any]]]:
        """The requests that have tokens, and what the server has of them."""
        by_name = {f"generate-tokens-{live.name}": live for live in self._live.values()}
        found = [(by_name.get(each["request_id"]), each) for each in self._call("GET", "/whet/requests")]
        return [(live, each) for live, each in found if live is not None and each["token_ids"]]

    def resume(self) -> None:
        """Goes on after `pause`.  Raises: EngineError."""
        self._paused, self._seen = False, (-1, time.monotonic())
        if self._coming is None:
            self._unless_lost(lambda: self._call("POST", "/resume"))

    def load(self, weights: Weights, version: int) -> None:
        """Fills the server's model.  Raises: WeightSyncError; EngineError; whatever `weights` raises."""
        self._keep(kept(weights_file(as_in_checkpoints(weights, self._outline)), version))
        self._unless_lost(self._send_weights)
        self._forget(version)

    def load_adapter(self, weights: Weights, config: Mapping[str, Any], version: int) -> None:
        """Samples with an adapter beside the first weights, from now on.  Raises: as `load`."""
        self._keep(self._weights, Adapter([(name, weight.clone()) for name, weight in weights], config, version))
        self._unless_lost(self._send_adapter)
        self._forget(version)

    def restart(self) -> None:
        """Starts another server in the place of one that is lost.  Raises: EngineError."""
        self._restarts -= 1
        self._live, self._ended = {}, queue.SimpleQueue()
        self.server.close()
        self.server, self._is_ready, self._is_adapter_known = self._start(), False, False
        self._ready()

    def rejoin(self) -> None:
        """Fills the new server with the newest weights.  Raises: EngineError, WeightSyncError."""
        self._coming, self._loss = None, None
        for held, send in ((self._weights, self._send_weights), (self._adapter, self._send_adapter)):
            if held is not None:
                self._unless_lost(send)
        if self._paused:
            self._unless_lost(self._stop)

    def _keep(self, weights: Kept | None = None, adapter: Adapter | None = None) -> None:
        """Holds these until newer ones come."""
        if self._weights is not None and self._weights is not weights:
            self._weights.files.close()
        self._weights, self._adapter = weights, adapter

    def _forget(self, version: int) -> None:
        """Ends a load; the weights are kept only for restarts."""
        self.version = version
        if not self._restarts and self._loss is None:
            self._keep()

    def _send_weights(self) -> None:
        assert self._weights is not None
        with self._between_two_steps(self._weights.version):
            self._call("POST", "/start_weight_update")
            self._call("POST", "/update_weights", {"update_info": {"path": self._weights.path}})
            self._call("POST", "/finish_weight_update", {"weight_version": str(self._weights.version)})
            self._has_adapter = False

    def _send_adapter(self) -> None:
        assert self._adapter is not None
        weights, config, version = self._adapter.weights, self._adapter.config, self._adapter.version
        with adapter_folder(weights, config) as folder, self._between_two_steps(version):
            if not self._is_adapter_known:
                self._call("POST", "/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder})
            else:  # the front would name the path with every request, and the worker read it for each
                self._call("POST", "/collective_rpc", {"method": "replace_adapter", "args": [ADAPTER, folder]})
            self._call("POST", "/update_weight_version", {"new_version": str(version)})
            self._has_adapter = self._is_adapter_known = True

    @contextmanager
    def _between_two_steps(self, version: int) -> Iterator[None]:
        """Pauses for new weights, and goes on with them.  Raises: WeightSyncError where the server refuses them."""
        self._coming = version
        self._call("POST", f"/pause?mode=keep&clear_cache={str(not self.keep_cache).lower()}")
        if any(live.request.streams for live in self._live.values()):
            for live, found in self._so_far():
                live.known = versions_of(found["weight_versions"])
        try:
            yield
        except HttpError as error:
            why = self.server.failure("did not take them")
            raise WeightSyncError(
                f"version {version} of the weights does not fit vLLM's model: {error}; trainer and rollout were built "
                f"from different models, or vLLM cannot reload this one: let both load model.path. {why}"
            ) from error
        self.version, self._coming = version, None
        if not self._paused:
            self._call("POST", "/resume")

    def sleep(self) -> None:
        """Frees the accelerator: the cache of keys and values, and the weights' place.  Raises: EngineError."""
        self._unless_lost(lambda: self._call("POST", "/sleep?level=1&mode=keep"))

    def wake(self) -> None:
        """Undoes `sleep`.  Raises: EngineError."""
        self._unless_lost(lambda: self._call("POST", "/wake_up"))

    def status(self) -> Status:
        """Version of the weights, and what runs and waits."""
        unfinished = list(self._live.values())  # at once: another thread may submit
        running, oldest = sum(live.is_sent for live in unfinished), next(iter(unfinished), None)
        return Status(
            version=self.version,
            running=running,
            waiting=len(unfinished) - running,
            oldest=None if oldest is None else oldest.request.uid,
            oldest_seconds=0.0 if oldest is None else time.monotonic() - oldest.submitted_at,
        )

    def close(self) -> None:
        """Ends the server; unfinished requests are lost."""
        self._live.clear()
        self.server.close()
        self._keep()

    def _check(self, request: Request) -> None:
        """Raises: EngineError for a request that can never be sampled."""
        params, uid = request.params, request.uid
        needed = len(request.prompt_ids) + params.max_new_tokens
        if request.media:
            raise EngineError(f"request {uid} has {request.media[0].kind}s, and this rollout engine reads text")
        if not request.prompt_ids or params.max_new_tokens <= len(request.sampled_ids):
            raise EngineError(
                f"request {uid} has {len(request.prompt_ids)} prompt tokens, max_new_tokens={params.max_new_tokens} "
                f"and {len(request.sampled_ids)} tokens sampled earlier; it needs a prompt token and room for one more"
            )
        if needed > self.max_length:
            raise EngineError(
                f"request {uid} may need {needed} tokens, and vLLM takes {self.max_length}; shorten prompts or "
                "responses, or raise rollout.engine.options.server.max_model_len"
            )
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise EngineError(
                f"request {uid} has temperature {params.temperature:g}, which vLLM raises to {LEAST_TEMPERATURE}; "
                "expected 0 (greedy) or at least that: change rollout.temperature"
            )
        if params.allowed_token_ids is not None or params.bad_words:
            check_rules((params.allowed_token_ids, params.bad_words), self.vocab_size)

    async def _answer(self, live: Live) -> None:
        """Sends a request and waits for its end, in the client's thread; every end is put into the queue."""
        request = live.request
        try:
            async with asyncio.timeout(request.deadline_seconds), self._room:
                live.is_sent = True
                answer = await self._sent(live)
            event: Event = Finished(request.uid, request.attempt, completion_of(answer, request))
        except TimeoutError:
            why = f"its deadline of {request.deadline_seconds:g} s was over"
            event = Failed(request.uid, request.attempt, Failure("engine", why, timed_out=True))
        except (EngineError, *LOST, *UNREADABLE) as error:
            event = Failed(request.uid, request.attempt, Failure("engine", f"{type(error).__name__}: {error}"))
        self._ended.put((live, event))

    async def _sent(self, live: Live) -> Any:
        """The answer to a request. Where its connection breaks, the server ends it, and it is sent under another name.
        Raises: OSError, EOFError, HttpError."""
        left = SENDS
        while True:
            body = body_of(live.request, live.name, self.version, ADAPTER if self._has_adapter else None)
            try:
                if live.request.streams:
                    return await self._streamed(live, body)
                return await self.server.client.answer("POST", GENERATE, body, seconds=None)
            except LOST as error:
                left -= 1
                if isinstance(error, TimeoutError) or live.request.streams or not left:
                    raise
                live.name = f"{live.name}-again"

    async def _streamed(self, live: Live, body: dict[str, Any]) -> Any:
        """The same answer, whose tokens come as Partial meanwhile."""
        request, tokens, log_probs, choice = live.request, list[int](), list[Any](), dict[str, Any]()
        async for event in self.server.client.events(GENERATE, {**body, "stream": True}):
            if "error" in event:
                raise EngineError(str(event["error"]))
            [choice] = event["choices"]
            new, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
            if new:
                place = len(tokens)
                versions = versions_at(live.known, self.version, place, place + len(new))
                values = tuple(each["logprob"] for each in content)
                where = request.uid, request.attempt, len(request.sampled_ids) + place
                self._ended.put((None, Partial(*where, tuple(new), values, versions)))
            tokens, log_probs = tokens + new, log_probs + content
        return {"choices": [{**choice, "token_ids": tokens, "logprobs": {"content": log_probs}}]}

    def _take(self, events: list[Event], timeout_seconds: float) -> None:
        """Appends the events that have come, of requests that were not replaced."""
        with _empty_is_fine():
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
        """Ends requests, and returns when all have come to their end."""
        until = time.monotonic() + self._answer_seconds
        for live in chosen:
            if not live.is_sent and live.call.cancel():
                request = live.request
                self._ended.put((live, Finished(request.uid, request.attempt, completion_of(None, request))))
        while sent := [live for live in chosen if not live.call.done()]:
            # The id as the server names it; a plain one is answered with success, and nothing happens.
            self._call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{live.name}" for live in sent]})
            wait([live.call for live in sent], timeout=ABORT_SECONDS)
            if time.monotonic() > until:
                raise self.server.failure(f"did not abort {len(sent)} requests within {self._answer_seconds:g} s")

    def _ready(self) -> None:
        """Waits for the server's start.  Raises: EngineError."""
        if not self._is_ready:
            self.server.wait(self._start_seconds)
            self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
            self._is_ready = True
            self.server.error = LostReplicaError if self._restarts else EngineError

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Notes that the server was lost, for the next call that says so."""
        try:
            yield
        except LostReplicaError as error:
            self._loss = error

    def _unless_lost(self, work: Callable[[], object]) -> None:
        """Works with the server; one that is or was lost gets the same at its restart."""
        if self._loss is None:
            with self._noting_loss():
                self._ready()
                work()

    def _raise_loss(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the server and returns its answer.  Raises: HttpError; EngineError where it is gone or hangs."""
        self.server.check()
        try:
            return self.server.client.call(method, path, body, seconds=self._answer_seconds)
        except TimeoutError as error:
            raise self.server.failure(f"did not answer {path} within {self._answer_seconds:g} s") from error
        except HttpError as error:
            self.server.examine(str(error))  # a server without its worker refuses everything
            raise
        except LOST as error:
            raise self.server.failure(f"closed the connection ({error}) at {path}") from error

    def _look(self) -> None:
        """Raises: EngineError where the server has ended, or no running request got a token in time."""
        self.server.check()
        now, (tokens, changed_at) = time.monotonic(), self._seen
        if now - changed_at < self._answer_seconds / 4:
            return
        count = self._call("GET", "/whet/requests?count")["tokens"]
        if count != tokens:
            self._seen = count, now
        elif now - changed_at > self._answer_seconds:
            raise self.server.failure(f"gave no token to {len(self._live)} requests for {self._answer_seconds:g} s")

    def _require_whole_weights(self) -> None:
        if self._coming is not None:
            raise WeightSyncError(
                f"version {self._coming} of the weights did not arrive whole, and what is left of version "
                f"{self.version} may be mixed with it; nothing is sampled until all weights of a version came"
            )


@contextmanager
def _empty_is_fine() -> Iterator[None]:
    try:
        yield
    except queue.Empty:
        return
