# SPDX-License-Identifier: Apache-2.0
"""Additions to the API server of vLLM 0.32 (--middleware), loaded in its process; nothing of whet is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from vllm.entrypoints.generate.structured_decisions import api_router
from vllm.entrypoints.scale_out.token_in_token_out import mm_features, serving
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem


class Requests:
    """Serves GET /whet/requests: the id, tokens, log-probs and weight versions of each unfinished request.
    /whet/requests?count is the number of their tokens."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers /whet/requests, and passes other calls on to vLLM."""
        if scope["type"] != "http" or scope["path"] != "/whet/requests":
            await self.app(scope, receive, send)
            return
        states = scope["app"].state.engine_client.output_processor.request_states.values()
        if scope["query_string"] == b"count":
            answer: Any = {"tokens": sum(len(state.detokenizer.output_token_ids) for state in states)}
        else:
            answer = [_tokens_so_far(state) for state in states]
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _tokens_so_far(state: Any) -> dict[str, Any]:
    tokens, chosen = list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs
    spans = (state._weight_version_spans() or []) if tokens else []
    return {
        "request_id": state.external_req_id,
        "token_ids": tokens,
        "log_probs": [each[token].logprob for token, each in zip(tokens, chosen, strict=True)],
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in spans],
    }


def _no_decisions(*_: Any) -> None:
    """Replaces the setup of vLLM's /v1/systemone, which fails if the tokenizer lacks a token for some words."""


def _media(path: str) -> MultiModalKwargsItem:
    """Returns an image or video as its grid and the path of its safetensors file, whose pixels the worker reads."""
    with safe_open(path, "pt") as file:
        data = {name: file.get_tensor(name)[0] for name in file.keys() if name.endswith("grid_thw")}  # noqa: SIM118
        if not data:  # SmolVLM: pixels [1, tiles, 3, side, side]
            data["num_patches"] = torch.tensor(file.get_slice("pixel_values").get_shape()[1])
    data["whet_file"] = torch.tensor(list(path.encode()), dtype=torch.uint8)
    field = MultiModalBatchedField(keep_on_cpu=True)  # other values are dropped where a prefix is in the cache
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=value, field=field) for name, value in data.items()})


def _with_patches(*, prompt_token_ids: list[int], mm_placeholders: dict[str, list[Any]], **more: Any) -> Any:
    """Makes vLLM's input. Only the patch tokens of an image or video get features: a Qwen3-VL video has text between
    its frames, which the protocol of /inference/v1/generate cannot express."""
    marked = {
        kind: [replace(run, is_embed=_patches_of(prompt_token_ids, run)) for run in runs]
        for kind, runs in mm_placeholders.items()
    }
    return _plain_input(prompt_token_ids=prompt_token_ids, mm_placeholders=marked, **more)


def _patches_of(token_ids: list[int], run: Any) -> torch.Tensor | None:
    """Returns the mask of the patch tokens of a run, which equal its first token; None if all tokens are patches."""
    tokens = torch.tensor(token_ids[run.offset : run.offset + run.length])
    found = tokens == tokens[0]
    return None if found.all() else found


_plain_input, serving.mm_input = serving.mm_input, _with_patches
api_router.init_structured_decisions_state = _no_decisions
mm_features.decode_mm_kwargs_item = _media
