# SPDX-License-Identifier: Apache-2.0
"""The rollout engine `sglang`: requests to an SGLang server of its own, and weights in the memory of its machine."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from whet.config.schema import ModelConfig
from whet.devices import HOST
from whet.errors import ConfigError, EngineError
from whet.models.caches import token_bytes
from whet.models.load import load_tokenizer
from whet.options import Count, Number, Positive
from whet.registry import register_rollout
from whet.rollout.planned import Sampling
from whet.rollout.protocol import Completion, Request
from whet.rollout.servers.client import HOST as ADDRESS
from whet.rollout.servers.engine import FIRST_VERSION, POLL_SECONDS, ServerEngine
from whet.rollout.servers.environment import Package, where_found
from whet.rollout.servers.parts import Part
from whet.rollout.servers.process import variables
from whet.rollout.servers.words import Live
from whet.rollout.sglang.translate import Sampled, body_of
from whet.rollout.stop_strings import LastStops
from whet.types import last_versions

INSIDE = Path(__file__).parent / "inside"  # what SGLang's processes import, and nothing else of whet
PACKAGE = Package(
    title="SGLang",
    name="sglang",
    distributions=("sglang",),
    version="0.5.23",
    why="whose insides whet builds on",
    arguments=("srt/arg_groups/fields/*.py", "*"),
)


@register_rollout("sglang")
class SGLangEngine(ServerEngine):
    """SGLang, in a server process from an environment of its own (`make sglang`); float32 requests give the same tokens
    in any company.

    python: interpreter of the environment; unset: $WHET_SGLANG_PYTHON, else .venv-sglang of the checkout.
    kv_cache_bytes: memory for keys and values.
    on_new_weights: what running requests do when weights change. recompute: go on, and compute their keys and values
        again; keep: go on with those of the old weights; wait: end under the old weights, before the new ones load;
        abort: are ended, and sent again with the tokens that they have.
    threads: threads that the server computes with on a CPU; unset: as many as torch uses here.
    port: port of the server on 127.0.0.1; unset: any free one.
    start_seconds: deadline for the server's start.
    answer_seconds: deadline for an answer to anything but a request, and for the next token of any running request.
    restarts: times that a server which is lost or hangs is started again, while other replicas go on with its requests.
        For this the newest weights stay in the host's memory. With 0 they do not, and its loss ends the run.
    weight_transfer: how weights reach the server. file: as a whole, in one file; ipc: in parts, by handles of the
        accelerator's memory, or in the host's where they did not come on an accelerator.
    weights_dir: folder on a disk of this machine through which weights go to the server; unset: the host's memory.
    server: further arguments of SGLang's server by name, such as context_length.
    """

    length_option, package = "context_length", PACKAGE

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        device: torch.device,
        model: ModelConfig,
        num_devices: int = 1,
        *,
        python: str | None = None,
        kv_cache_bytes: Count = 1_073_741_824,
        on_new_weights: Literal["recompute", "keep", "wait", "abort"] = "recompute",
        threads: Count | None = None,
        port: Count | None = None,
        start_seconds: Positive = 600.0,
        answer_seconds: Positive = 300.0,
        restarts: Number = 3,
        weight_transfer: Literal["file", "ipc"] = "file",
        weights_dir: str | None = None,
        server: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            dtype,
            max_batch_size,
            num_devices,
            model,
            on_new_weights=on_new_weights,
            weight_transfer=weight_transfer,
            weights_dir=weights_dir,
            start_seconds=start_seconds,
            answer_seconds=answer_seconds,
            restarts=restarts,
        )
        _check_positions(self.base, self._outline.config)
        path, tokenizer = where_found(self.base, model)
        is_host, of_token = device == HOST, token_bytes(self._outline.config.get_text_config(), dtype.itemsize)
        arguments = {
            "model_path": path,
            "tokenizer_path": tokenizer,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device.type,
            "max_running_requests": max_batch_size,
            "tp_size": num_devices,
            "max_total_tokens": max(1, kv_cache_bytes // of_token),
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
        self._streams: dict[str, tuple[Live, Sampled]] = {}  # by the server's name of the request
        load = partial(load_tokenizer, tokenizer, trust_remote_code=model.trust_remote_code)
        self._load_tokenizer, self._stops = cache(load), LastStops()
        self._never = () if self.encoders is None else self.encoders.forbidden
        given = environment(threads or torch.get_num_threads(), device, num_devices, self._never)
        self.launch(command, arguments, given, python=python, port=port, server=server)

    def prepare(self) -> None:
        self._is_updating = False
        self._streams.clear()

    async def sample(self, live: Live) -> Completion:
        """Sends a request and reads its answer, piece by piece."""
        name, sampled = (
            _named(live.name),
            Sampled(live.rest, self._stops.of(live.request.params.stop, self._load_tokenizer)),
        )
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
        """Stops sampling; requests that are to compute all again go back into SGLang's queue. No other is sent: SGLang
        knows nothing of requests that come meanwhile, and could not abort them."""
        self.open(False)
        self.call("POST", "/pause_generation", {"mode": "in_place" if keep_cache else "retract"})
        self._read_all()
        if not keep_cache:
            self.call("POST", "/flush_cache")

    def _read_all(self) -> None:
        """Waits until all tokens that were sampled before a pause are here."""
        states = self.call("GET", "/server_info")["internal_states"]  # answered behind the pause
        sent = {name: count for state in states for name, count in state["whet_sent"].items()}
        until = time.monotonic() + self._answer_seconds
        while any(self._count_of(name) < count for name, count in sent.items()):
            if time.monotonic() > until:
                raise self.server.failure(f"did not send sampled tokens within {self._answer_seconds:g} s")
            self.server.check()
            time.sleep(POLL_SECONDS)

    def _count_of(self, name: str) -> float:
        found = self._streams.get(name)
        # nobody waits for tokens of an ended one
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
    """Raises: ConfigError for a Qwen3-VL whose rotary positions SGLang would not interleave, as transformers does."""
    if config.model_type.startswith("qwen3_vl") and not config.text_config.rope_parameters.get("mrope_interleaved"):
        key = f"{base}, config.json: text_config.rope_parameters.mrope_interleaved"
        expected = f"true for {config.model_type}, or SGLang computes other log-probs than the trainer"
        raise ConfigError(key, "is not true", expected, "set it there")


def _named(name: str) -> str:
    """The server's name: an abort ends every request whose name begins with the one given."""
    return f"whet-{name}."


def command(python: str, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """The command line of a server with these arguments; those that are false or None are left out."""
    flags = ["--host", ADDRESS, "--port", str(port)]
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return [python, "-m", "whet_sglang", *flags]


def environment(threads: int, device: torch.device, num_devices: int, patches: Sequence[int] = ()) -> dict[str, str]:
    """The environment variables of a server that computes with so many threads, or on accelerators from `device` on.

    The server samples none of the tokens `patches`."""
    engine = {"SGLANG_USE_CPU_ENGINE": "1"} if device == HOST else {}
    return variables(threads, device, num_devices, INSIDE) | engine | {"WHET_PATCHES": json.dumps(list(patches))}
