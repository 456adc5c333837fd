# SPDX-License-Identifier: Apache-2.0
"""Plain mode of the engine `vllm`: whet uses only public flags and calls of vLLM, no additions in its processes. Every
version runs so except that of `make vllm`. Also reads each token's experts (`--enable-return-routed-experts`)."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from whet.errors import ConfigError, EngineError
from whet.keyed import key
from whet.models.experts import expert_modules
from whet.models.load import layers
from whet.models.routing import as_bytes
from whet.plugins.inference.servers.environment import Interpreter
from whet.rollout.protocol import Completion, Request
from whet.rollout.requirements import Sampling

OFF: Mapping[str, tuple[object, ...]] = {  # values with which vLLM's processed log-probs are log_softmax(logits / T)
    "top_p": (1,),
    "top_k": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "bad_words": ((), []),
    "allowed_token_ids": (None,),
}
SCALE_OUT = ("entrypoints/**/cli_args.py", "enable_scale_out")  # versions that need the flag for /inference/v1/generate
STOP_REASON = ("entrypoints/scale_out/token_in_token_out/protocol.py", "stop_reason")  # versions that report it
GENERATED = "vllm:generation_tokens_total"
KEY = "rollout.engine.options.routed_experts"
TOLD = ("sampling_params.py", "routed_experts_prompt_start")  # versions that can leave out the prompt's experts
INSTEAD = "or use the version of `make vllm` with plain=false"


def check_options(found: Interpreter, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError for an option that plain mode (without whet's additions to vLLM) does not support."""
    for name, value, default in (("adapter", True, "false"), ("on_new_weights", "keep", "recompute")):
        if options[name] == value:
            expected = f"{default}, as {found.python} with {found.version} has no additions to vLLM"
            raise ConfigError(f"rollout.engine.options.{name}", value, expected, f"change it, {INSTEAD}")


def inside(found: Interpreter | None, sees: bool) -> dict[str, Any]:
    """Returns the engine arguments of plain mode; without `found`, of the mode with whet's additions to vLLM."""
    additions = "whet_vllm.Extension", "whet", "raw"
    name, backend, mode = additions if found is None else ("whet_transfer.PlainExtension", "whet_plain", "processed")
    arguments = {"worker_extension_cls": name, "weight_transfer_config": {"backend": backend}}
    # pixel values come normalized; vLLM's own processor leaves that to the tower
    images = {"mm_device_do_normalize": False} if sees and found is None else {}
    return {**arguments, "logprobs_mode": f"{mode}_logprobs", **images}


def without(found: Interpreter) -> str:
    """Returns a warning with the features that plain mode (vLLM without whet's additions) lacks."""
    return (
        f"vLLM {found.version} samples in plain mode, by its public flags and calls. It does without what needs whet's "
        f"additions to {found.package.version}: draws of the native engine (a request has a seed of vLLM's, on a CPU "
        "none), on_new_weights=keep, adapter=true, images, penalties, bad words, and top_p, top_k, min_p and "
        "allowed_token_ids. Running requests are ended and sent again where weights change"
    )


def plainly_refused(sampling: Sampling, found: Interpreter) -> ConfigError | None:
    """Returns the error for a sampling parameter with which vLLM alone (plain mode) would return other log-probs."""
    given = {name: vars(sampling)[name] for name in OFF}
    if (name := next((name for name, value in given.items() if value not in OFF[name]), None)) is not None:
        expected = "its default: others change the log-probs that vLLM gives in plain mode"
        return ConfigError(name, given[name], expected, f"leave it out, {INSTEAD}")
    if len(sampling.stop) > 1 and not found.mentions(*STOP_REASON):
        expected = f"one string, as vLLM {found.version} does not tell which of several ended a response"
        return ConfigError("stop", f"{len(sampling.stop)} strings", expected, f"give one, {INSTEAD}")
    return None


def seed_of(request: Request) -> int:
    """Returns the seed of a request for vLLM. A request that is sent again with sampled tokens gets another seed."""
    return key(request.key, "vllm", len(request.sampled_ids))


def generated(metrics: str) -> int:
    """Returns the number of tokens that a server has sampled, read from the text of its /metrics."""
    return sum(int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(GENERATED))


def check_routed(found: Interpreter, options: Mapping[str, Any], is_plain: bool) -> None:
    """Raises: ConfigError if `routed_experts` is set and the server would not report the experts of tokens."""
    if not options["routed_experts"]:
        return
    if not is_plain:
        expected = "false, as whet's additions to vLLM need the model runner that reports no experts"
        raise ConfigError(KEY, True, expected, "set rollout.engine.options.plain=true, or unset it")
    if not found.mentions(*TOLD):
        raise ConfigError(KEY, True, f"a vLLM with {TOLD[1]} (0.32), not {found.version}", "unset it")


def mixtures(model: torch.nn.Module) -> list[int]:
    """Returns the indices of the layers with experts.  Raises: ConfigError if there are none."""
    found = [number for number, layer in enumerate(layers(model)) if next(expert_modules(layer), None) is not None]
    if not found:
        raise ConfigError(KEY, True, "a mixture of experts", "unset it")
    return found


def routed_of(answer: Any, completion: Completion, numbers: Sequence[int]) -> tuple[bytes, ...]:
    """Reads each token's experts in the layers `numbers` from a reply, in the form of `Completion.routed`.
    Raises: EngineError."""
    tokens, told = len(completion.token_ids), answer["choices"][0].get("routed_experts")
    if not numbers or told is None:
        return (b"",) * tokens if numbers else ()
    table = np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False)  # [tokens, layers, k]
    if table.ndim != 3 or len(table) != tokens or table.shape[1] <= numbers[-1]:
        expected = f"{tokens} tokens, {numbers[-1] + 1} layers or more, and experts"
        raise EngineError("routed_experts of vLLM", f"shape {table.shape}", expected, "see its log")
    return tuple(as_bytes([torch.from_numpy(table[:, layer].astype(np.int16)) for layer in numbers], None))
