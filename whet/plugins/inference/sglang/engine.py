# SPDX-License-Identifier: Apache-2.0
"""The rollout engine `sglang` sends requests to its own SGLang server, and weights through this machine's memory."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from whet.config.schema import ModelConfig
from whet.devices import HOST
from whet.errors import ConfigError, EngineError
from whet.models.caches import token_bytes
from whet.models.load import load_tokenizer
from whet.models.positions import next_position
from whet.plugins.inference.servers.engine import FIRST_VERSION, POLL_SECONDS, ServerEngine
from whet.plugins.inference.servers.environment import Package, where_found
from whet.plugins.inference.servers.media import RequestMedia, positions_of
from whet.plugins.inference.servers.options import ServerOptions
from whet.plugins.inference.servers.process import HOST as ADDRESS, variables
from whet.plugins.inference.servers.weights import Part
from whet.plugins.inference.servers.wire_protocol import Live
from whet.registry import register_rollout
from whet.rollout.protocol import Completion, Likeliest, Request, Span
from whet.rollout.requirements import Sampling
from whet.rollout.stop_strings import LastStops, StopStrings
from whet.types import FinishReason, Versions, last_versions

INSIDE = Path(__file__).parent / "inside"  # what SGLang's processes import, and nothing else of whet
GOLDEN = 0x9E3779B97F4A7C15  # the factor of a token's position in the hash of its random number
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
PACKAGE = Package(
    title="SGLang",
    name="sglang",
    distributions=("sglang",),
    version="0.5.23",
    why="whose insides whet builds on",
    arguments=("srt/arg_groups/fields/*.py", "*"),
)


@register_rollout(
    "sglang",
    shares="whet.plugins.inference.servers.options:ServerOptions",
    planned_by="whet.plugins.inference.sglang.engine:SGLangEngine.planned_bytes",
    checked_by="whet.plugins.inference.sglang.engine:SGLangEngine.check_ahead",
    media_checked_by="whet.plugins.inference.sglang.engine:SGLangEngine.check_media",
)
class SGLangEngine(ServerEngine):
    """Samples with SGLang, in a server process with its own environment (`make sglang`). float32 requests give the same
    tokens in any batch."""

    length_option, package = "context_length", PACKAGE

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        device: torch.device,
        model: ModelConfig,
        num_devices: int = 1,
        span: Span | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(dtype, max_batch_size, num_devices, model, span, ServerOptions(**shared))
        given = self.shared
        _check_positions(self.base, self._outline.config)
        path, tokenizer = where_found(self.base, model)
        is_host, of_token = device == HOST, token_bytes(self._outline.config.get_text_config(), dtype.itemsize)
        arguments = {
            "model_path": path,
            "tokenizer_path": tokenizer,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device.type,
            "max_running_requests": max_batch_size,
            "tp_size": given.tensor_parallel_size or num_devices,
            "max_total_tokens": max(1, given.kv_cache_bytes // of_token),
            "trust_remote_code": model.trust_remote_code,
            "weight_version": str(FIRST_VERSION),
            "sampling_backend": "pytorch",  # whose draws whet_sglang.py replaces
            "incremental_streaming_output": True,
            "enable_memory_saver": not is_host,
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,
            "grammar_backend": "none",
            "skip_server_warmup": True,
            **({"attention_backend": "torch_native", "disable_cuda_graph": True} if is_host else {}),
        }
        self._streams: dict[str, tuple[Live, StreamedTokens]] = {}  # by the server's name of the request
        load = partial(load_tokenizer, tokenizer, trust_remote_code=model.trust_remote_code)
        self._load_tokenizer, self._stops = cache(load), LastStops()
        self._never = () if self.encoders is None else self.encoders.forbidden
        own = environment(given.threads or torch.get_num_threads(), device, self.devices_here, self._never)
        self.launch(command, arguments, own)

    @classmethod
    def spanning(cls, span: Span) -> dict[str, Any]:
        return {"nnodes": span.nodes, "node_rank": span.number, "dist_init_addr": f"{span.address}:{span.port}"}

    def prepare(self) -> None:
        self._is_updating = False
        self._streams.clear()

    async def sample(self, live: Live) -> Completion:
        """Sends a request and reads its reply piece by piece."""
        name = _named(live.name)
        sampled = StreamedTokens(live.rest, self._stops.of(live.request.params.stop, self._load_tokenizer))
        self._streams[name] = live, sampled
        with ExitStack() as files:
            files.callback(self._streams.pop, name, None)
            opened = self._media.opened(live.request)  # in a thread: images are decoded
            media = await asyncio.to_thread(files.enter_context, opened) if live.request.media else []
            body = body_of(live.rest, name, self.version, media, self._never)
            async for piece in self.server.client.events("/generate", body):
                if sampled.is_cut:
                    continue  # until the abort has ended it
                if (new := sampled.add(piece)) and live.request.streams:
                    versions, place = last_versions(sampled.versions, new), len(sampled.token_ids) - new
                    tokens, log_probs = tuple(sampled.token_ids[place:]), tuple(sampled.log_probs[place:])
                    found = Completion(tokens, log_probs, "abort", versions, likeliest=tuple(sampled.likeliest[place:]))
                    self.stream(live, place, found)
                if sampled.is_cut and piece["meta_info"]["finish_reason"] is None:
                    abort = {"rid": name}
                    await self.server.client.answer("POST", "/abort_request", abort, seconds=self._answer_seconds)
        if sampled.reason is None:
            raise EngineError(f"request {live.request.uid}", "SGLang ended its answer early", "a finish_reason")
        return sampled.completion()

    def end(self, names: list[str]) -> None:
        for name in names:
            self.call("POST", "/abort_request", {"rid": _named(name)})

    def hold(self, *, keep_cache: bool) -> None:
        """Stops sampling; without `keep_cache` running requests return to SGLang's queue. New requests wait until the
        end of the pause: SGLang would not know them yet, and could not abort them."""
        self.open(False)
        self.call("POST", "/pause_generation", {"mode": "in_place" if keep_cache else "retract"})
        self._read_all()
        if not keep_cache:
            self.call("POST", "/flush_cache")

    def _read_all(self) -> None:
        """Waits until all tokens sampled before a pause have arrived."""
        states = self.call("GET", "/server_info")["internal_states"]  # answered after the pause has begun
        sent = {name: count for state in states for name, count in state["whet_sent"].items()}
        until = time.monotonic() + self._answer_seconds
        while any(self._count_of(name) < count for name, count in sent.items()):
            if time.monotonic() > until:
                raise self.server.failure(f"did not send sampled tokens within {self._answer_seconds:g} s")
            self.server.check()
            time.sleep(POLL_SECONDS)

    def _count_of(self, name: str) -> float:
        found = self._streams.get(name)
        # an ended request needs no more tokens
        return float("inf") if found is None or found[1].is_cut else len(found[1].token_ids)

    def release(self) -> None:
        self.call("POST", "/continue_generation", {})

    def so_far(self) -> Iterator[tuple[Live, Completion]]:
        for live, sampled in list(self._streams.values()):
            if sampled.token_ids and sampled.reason is None:
                yield live, sampled.completion()

    def count(self) -> int:
        return sum(len(sampled.token_ids) for _, sampled in list(self._streams.values()))

    def update(self, parts: Iterable[list[Part]], version: int) -> None:
        if self._is_updating:
            self.call("POST", "/end_weight_update", {})
        self.call("POST", "/begin_weight_update", {})
        self._is_updating = True
        for part in parts:
            told = [base64.b64encode(pickle.dumps(each)).decode() for each in part]
            body = {"serialized_named_tensors": told, "load_format": "whet", "flush_cache": False}
            self.call("POST", "/update_weights_from_tensor", body)
        self.call("POST", "/end_weight_update", {})
        self._is_updating = False
        self.call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def sleep(self) -> None:
        self.unless_lost(lambda: self.call("POST", "/release_memory_occupation", {}))

    def wake(self) -> None:
        self.unless_lost(lambda: self.call("POST", "/resume_memory_occupation", {}))

    def check(self, request: Request) -> None:
        super().check(request)
        self._stops.of(request.params.stop, self._load_tokenizer)

    @classmethod
    def refused(cls, sampling: Sampling, options: Mapping[str, Any]) -> ConfigError | None:
        return None


def _check_positions(base: str, config: Any) -> None:
    """Raises: ConfigError for a Qwen3-VL if SGLang would not interleave its rotary positions as transformers does."""
    if config.model_type.startswith("qwen3_vl") and not config.text_config.rope_parameters.get("mrope_interleaved"):
        key = f"{base}, config.json: text_config.rope_parameters.mrope_interleaved"
        expected = f"true for {config.model_type}, or SGLang computes other log-probs than the trainer"
        raise ConfigError(key, "is not true", expected, "set it there")


def _named(name: str) -> str:
    """Returns the name of a request in the server. It ends with a dot, because SGLang aborts all requests whose names
    begin with a given name."""
    return f"whet-{name}."


def command(python: str, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """Returns the command line of a server with these arguments; leaves out arguments that are false or None."""
    flags = ["--host", ADDRESS, "--port", str(port)]
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return [python, "-m", "whet_sglang", *flags]


def environment(threads: int, device: torch.device, num_devices: int, patches: Sequence[int] = ()) -> dict[str, str]:
    """Returns the environment variables of a server with `threads` threads, or with accelerators from `device` on.

    The server never samples the token ids in `patches`."""
    engine = {"SGLANG_USE_CPU_ENGINE": "1"} if device == HOST else {}
    return variables(threads, device, num_devices, INSIDE) | engine | {"WHET_PATCHES": json.dumps(list(patches))}


def body_of(
    request: Request, name: str, version: int, media: Sequence[RequestMedia], never: Sequence[int]
) -> dict[str, Any]:
    """Returns the body of a call for `request`. `name` is the request's name on the server; `version` is the version of
    its weights; `never` has the token ids that it never samples."""
    params, sampled = request.params, len(request.sampled_ids)
    return {
        "rid": name,
        "input_ids": [*request.prompt_ids, *request.sampled_ids],
        "image_data": [_shown(request, media)] if media else None,
        "extra_key": f"version {version}",  # prompts that were computed with other weights are not shared
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens - sampled,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "no_stop_trim": True,
            "sampling_seed": _seed(request),
            "custom_params": _rules(request, never),
        },
        "top_logprobs_num": params.num_likeliest,
    }


def _rules(request: Request, never: Sequence[int]) -> dict[str, str] | None:
    """Returns token constraints and penalties for `constrained` in inside/whet_sglang.py; None without any."""
    params = request.params
    bad_words = [word for word in params.bad_words if len(word) > 1 or word[0] not in never]
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties == (1.0, 0.0, 0.0) and not bad_words and params.allowed_token_ids is None:
        return None
    rules = dict(zip(("repetition", "presence", "frequency"), penalties, strict=True))
    lists = {"allowed": params.allowed_token_ids, "bad_words": bad_words}
    return {"whet": json.dumps({**rules, **lists, "prompt": len(request.prompt_ids)})}  # SGLang takes no nested lists


def _shown(request: Request, media: Sequence[RequestMedia]) -> str:
    """Encodes a request's media and positions for media_of in inside/whet_sglang.py; SGLang has no fields for them."""
    return json.dumps({"whet": [asdict(each) for each in media], "positions": _positions(request)})


def _positions(request: Request) -> list[list[int]]:
    """Returns rotary positions [3, T] of the prompt and of a response of maximal length. SGLang lacks positions of
    sampled tokens when it recomputes a request."""
    found = positions_of(request)
    assert found is not None
    left = len(request.prompt_ids) + request.params.max_new_tokens - found.shape[1]
    rest = next_position(found) + torch.arange(left).expand(3, -1)
    together: list[list[int]] = torch.cat([found, rest], dim=1).tolist()
    return together


def _seed(request: Request) -> int:
    """Returns the key minus GOLDEN per prompt token but the last, since SGLang counts prompt tokens; signed 64-bit."""
    seed = (request.key - (len(request.prompt_ids) - 1) * GOLDEN) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


@dataclass
class StreamedTokens:
    """Collects the tokens of a streamed reply, up to the token that completes a stop string."""

    request: Request
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    versions: Versions = ()
    reason: dict[str, Any] | None = None
    is_cut: bool = False  # a stop string ended it, which the server does not know

    def add(self, piece: Any) -> int:
        """Adds the new tokens of the next piece, which may repeat earlier tokens.  Returns the number of new tokens."""
        if "error" in piece:
            raise EngineError(f"request {self.request.uid}", f"SGLang: {piece['error']}", "tokens", "see its log")
        about = piece["meta_info"]
        self.reason = about["finish_reason"]
        new: int = about["completion_tokens"] - len(self.token_ids)
        if new:
            self.token_ids += piece["output_ids"][-new:]
            self.log_probs += [each[0] for each in about["output_token_logprobs"][-new:]]
            for place in about["output_top_logprobs"][-new:] if self.request.params.num_likeliest else ():
                self.likeliest.append(tuple((token, log_prob) for log_prob, token, *_ in place))
            self.versions = tuple(
                (int(span["version"]), span["end"] - span["start"]) for span in about["weight_versions"]
            )
        return new if self.stops is None else self._cut(self.stops, len(self.token_ids) - new)

    def _cut(self, stops: StopStrings, known: int) -> int:
        """Ends the response if a token after the first `known` ones completes a stop string.  Returns the number of
        remaining new tokens."""
        request = self.request
        response, earlier = [*request.sampled_ids, *self.token_ids], len(request.sampled_ids)
        for count, token in enumerate(self.token_ids[known:], known + 1):
            string = stops.found(token, response[: earlier + count])
            if string is not None and token not in request.params.stop_token_ids:
                del self.token_ids[count:], self.log_probs[count:], self.likeliest[count:]
                self.versions = last_versions(self.versions[::-1], count)[::-1]
                self.reason, self.is_cut = {"type": "stop", "matched": string}, True
                break
        return len(self.token_ids) - known

    def completion(self) -> Completion:
        """Returns the completion, as aborted if the reply has not ended.  Raises: EngineError."""
        tokens, reason = self.token_ids, self.reason or {"type": "abort"}
        counted, key = sum(count for _, count in self.versions), f"request {self.request.uid}: answer of SGLang"
        if reason["type"] not in REASONS or not len(tokens) == len(self.log_probs) == counted:
            found = f"{len(tokens)} tokens, {len(self.log_probs)} log-probs, versions {self.versions}, reason {reason}"
            raise EngineError(key, found, "as many of each, and stop, length or abort", "see its log")
        if reason["type"] == "abort" and reason.get("status_code"):
            raise EngineError(key, f"was given up: {reason.get('message')}", "", "see its log")
        stop = reason.get("matched") if isinstance(reason.get("matched"), str) else None
        told = tuple(self.log_probs), REASONS[reason["type"]], self.versions, stop
        return Completion(tuple(tokens), *told, tuple(self.likeliest))
