# SPDX-License-Identifier: Apache-2.0
"""Requests and completions in the words of SGLang's /generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from whet.errors import EngineError
from whet.models.positions import next_position
from whet.rollout.protocol import Completion, Likeliest, Request
from whet.rollout.servers.media import Shown, positions_of
from whet.rollout.stop_strings import StopStrings
from whet.types import FinishReason, Versions, last_versions

GOLDEN = 0x9E3779B97F4A7C15  # by which the number of a place is multiplied in a draw's hash
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def body_of(request: Request, name: str, version: int, media: Sequence[Shown], never: Sequence[int]) -> dict[str, Any]:
    """The body of a call for `request`, which the server is to call `name`, under weights of `version`. It never
    samples the tokens `never`, whatever is asked for."""
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
    """The changes of the choice, for `constrained` of inside/whet_sglang.py; None without any."""
    params = request.params
    bad_words = [word for word in params.bad_words if len(word) > 1 or word[0] not in never]
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties == (1.0, 0.0, 0.0) and not bad_words and params.allowed_token_ids is None:
        return None
    rules = dict(zip(("repetition", "presence", "frequency"), penalties, strict=True))
    lists = {"allowed": params.allowed_token_ids, "bad_words": bad_words}
    return {"whet": json.dumps({**rules, **lists, "prompt": len(request.prompt_ids)})}  # SGLang takes no nested lists


def _shown(request: Request, media: Sequence[Shown]) -> str:
    """The media and positions of a request, for media_of of inside/whet_sglang.py: SGLang takes no other fields."""
    return json.dumps({"whet": [asdict(each) for each in media], "positions": _positions(request)})


def _positions(request: Request) -> list[list[int]]:
    """Multimodal rotary positions [3, T] of the prompt and of the longest response: SGLang has none for tokens that it
    sampled before it computes a request again."""
    found = positions_of(request)
    assert found is not None
    left = len(request.prompt_ids) + request.params.max_new_tokens - found.shape[1]
    rest = next_position(found) + torch.arange(left).expand(3, -1)
    together: list[list[int]] = torch.cat([found, rest], dim=1).tolist()
    return together


def _seed(request: Request) -> int:
    """The key less the places of the prompt, as SGLang's positions count them too: a signed 64-bit number."""
    seed = (request.key - (len(request.prompt_ids) - 1) * GOLDEN) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


@dataclass
class Sampled:
    """The tokens that a streamed answer has brought so far, up to the one that completes a stop string."""

    request: Request
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    versions: Versions = ()
    reason: dict[str, Any] | None = None
    is_cut: bool = False  # a stop string ended it, which the server does not know

    def add(self, piece: Any) -> int:
        """Takes the next piece: its tokens are those beyond the ones that are here.  Returns the number of new ones."""
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
        """Ends the response where a token behind the `known` ones completes a stop string.  Returns the number of new
        tokens that are left."""
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
        """The completion, aborted where the answer has not ended.  Raises: EngineError."""
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
