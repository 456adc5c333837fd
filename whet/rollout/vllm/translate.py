# SPDX-License-Identifier: Apache-2.0
"""Requests and completions in the words of vLLM's /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from whet.errors import EngineError
from whet.rollout.protocol import Completion, Likeliest, Request
from whet.rollout.servers.engine import FIRST_VERSION
from whet.rollout.servers.media import Shown, positions_of
from whet.types import FinishReason, Versions

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def body_of(
    request: Request, name: str, version: int, adapter: str | None = None, media: Sequence[Shown] = ()
) -> dict[str, Any]:
    """The body of a call for `request`, which the server is to call `name`, under weights of `version`."""
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


def _features(media: Sequence[Shown], version: int) -> dict[str, Any]:
    """The files of media by kind; features of weights of another version are not used."""
    found: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for each in media:
        run = {"offset": each.places[0], "length": each.places[-1] + 1 - each.places[0]}
        for field, value in zip(found.values(), (f"{each.digest} version {version}", run, each.path), strict=True):
            field.setdefault(each.kind, []).append(value)
    return found


def completion_of(answer: Any, request: Request, version: int | None = None) -> Completion:
    """The completion in an answer of the server, in plain mode of weights of `version`.  Raises: EngineError."""
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
    """The choice with what older versions leave out: a stop string, and the reason of a stream that was aborted."""
    tokens, stops, reason = choice.get("token_ids") or (), request.params.stop, choice.get("finish_reason") or "abort"
    spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else []
    stop = choice.get("stop_reason", stops[0] if stops and reason == "stop" else None)
    return {**choice, "finish_reason": reason, "stop_reason": stop, "weight_versions": spans}


def likeliest_of(content: Sequence[Any], request: Request) -> tuple[Likeliest, ...]:
    """The likeliest tokens in the place of each token of an answer, where they are asked for; vLLM's come behind the
    sampled one."""
    if not (count := request.params.num_likeliest):
        return ()
    pairs = [[(_token_id(each), each["logprob"]) for each in place["top_logprobs"]] for place in content]
    return tuple(tuple(sorted(place, key=lambda pair: -pair[1])[:count]) for place in pairs)


def _token_id(told: Any) -> int:
    """The id of a token, which versions before 0.32 write as text."""
    return int(told["token_id"] if "token_id" in told else told["token"].removeprefix("token_id:"))


def versions_of(spans: Sequence[Any]) -> Versions:
    """Runs of (version, tokens) from spans of the server, which calls the weights that itself loaded "default"."""
    return tuple(
        (FIRST_VERSION if span["version"] == "default" else int(span["version"]), span["end"] - span["start"])
        for span in spans
    )


def versions_at(known: Versions, version: int, start: int, end: int) -> Versions:
    """Runs of the tokens from `start` to `end`: the first ones are `known`, those behind are of `version`."""
    each = [known_version for known_version, count in known for _ in range(count)]
    each += [version] * (end - len(each))
    return tuple((run, len(list(same))) for run, same in groupby(each[start:end]))
