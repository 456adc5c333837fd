# SPDX-License-Identifier: Apache-2.0
"""The options that all rollout engines with a server share; their registration names this class as `shares`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from whet.options import Count, Number, Positive

OnNewWeights = Literal["recompute", "keep", "wait", "abort"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options by name; their text follows the text of an engine's own options.

    python: interpreter of the server's environment; unset: $WHET_VLLM_PYTHON or $WHET_SGLANG_PYTHON, else .venv-vllm or
        .venv-sglang of the checkout.
    kv_cache_bytes: memory for keys and values.
    on_new_weights: behaviour of running requests when weights change. `recompute`: continue with recomputed keys and
        values; `keep`: continue with keys and values of the old weights; `wait`: finish with the old weights before
        the new ones load; `abort`: stop at once, and continue as new requests with their tokens.
    threads: number of threads of a server on a CPU; unset: as many as torch uses here.
    port: port of the server on 127.0.0.1; unset: any free one.
    start_seconds: deadline for the server's start.
    answer_seconds: deadline for a reply to any call except a request, and for the next token of any running request.
    tensor_parallel_size: devices over which the server splits each layer; unset: the devices of its rank. With more, it
        also uses devices of the next ranks, on which training and sampling take turns.
    restarts: number of restarts of a lost or hanging server, while other replicas continue its requests. This keeps the
        newest weights in the host's memory. With 0 they are not kept, and the loss of the server ends the run.
    weight_transfer: how weights reach the server. `file`: whole, in one file; `ipc`: in parts, by handles of the
        accelerator's memory, or through the host's memory for weights that are not on an accelerator.
    weights_dir: folder on a disk of this machine through which weights go to the server; unset: the host's memory.
    weight_delta: the actor's processes send only elements that changed since the last version; the result is exact.
        Sender and receiver each keep a copy of the weights in the host's memory.
    server: further arguments of the server by name, such as max_model_len of vLLM and context_length of SGLang.
    """

    python: str | None = None
    kv_cache_bytes: Count = 1_073_741_824
    on_new_weights: OnNewWeights = "recompute"
    threads: Count | None = None
    port: Count | None = None
    start_seconds: Positive = 600.0
    answer_seconds: Positive = 300.0
    tensor_parallel_size: Count | None = None
    restarts: Number = 3
    weight_transfer: Literal["file", "ipc"] = "file"
    weights_dir: str | None = None
    weight_delta: bool = False
    server: dict[str, Any] | None = None
