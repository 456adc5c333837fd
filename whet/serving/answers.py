# SPDX-License-Identifier: Apache-2.0
"""Responses as the OpenAI API has them, whole or in chunks, from the tokens of the samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.rollout.protocol import Likeliest
from whet.serving.bodies import Asked
from whet.serving.texts import MarkedText, TokenTexts, special_tokens
from whet.serving.tools import ToolCall, ToolText
from whet.types import FinishReason, Versions

Json = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of a sample, or all of it. Without stop strings and special tokens in its text; with them in its ids."""

    text: str
    calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Versions
    finish_reason: str | None  # of the last piece
    likeliest: Sequence[Likeliest] = ()  # in the place of each token, where they are asked for

    def for_stream(self) -> list[Piece]:
        """The piece in parts: the official client takes calls for done when the finish reason comes after them."""
        if not self.calls or self.finish_reason is None:
            return [self]
        return [replace(self, finish_reason=None), Piece("", (), (), (), (), self.finish_reason)]


class Sample:
    """A choice of a response, whose tokens come in parts."""

    def __init__(self, index: int, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        number, special = index // asked.body.n, special_tokens(tokenizer) if asked.tools else {}
        params = asked.params[number]
        self.index, self.prompt_ids = index, asked.prompts[number]
        self.num_tokens = self.num_calls = self.num_shown = 0  # tokens, calls and pieces that are given
        self.num_characters = 0  # of the tokens so far, one by one
        marks = {token: text for token, text in special.items() if token not in params.stop_token_ids}
        self._text = MarkedText(tokenizer, params.stop, marks)
        ending = str(tokenizer.decode(list(self.prompt_ids[-16:]))).rstrip() if asked.tools else ""
        self._tools = ToolText(asked.tools, is_thinking=ending.endswith("<think>")) if asked.tools else None
        self._opening = [(asked.tools.opening, False)] if asked.tools else []

    def add(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Versions,
        finish_reason: FinishReason | None = None,
        likeliest: Sequence[Likeliest] = (),
    ) -> Piece:
        """The piece that these tokens complete; with the last ones there is a finish reason."""
        is_last = finish_reason is not None
        parts, calls = self._text.add(token_ids, is_last=is_last), list[ToolCall]()
        text = "".join(text for text, _ in parts)
        if self._tools is not None:
            text, calls = self._tools.add([*self._opening, *parts], is_last=is_last)
            self._opening = []
        self.num_tokens += len(token_ids)
        self.num_calls += len(calls)
        called = finish_reason == "stop" and self.num_calls > 0
        return Piece(text, calls, token_ids, log_probs, versions, "tool_calls" if called else finish_reason, likeliest)


class ClientResponse:
    """A response to one request: `whole` of complete samples, or a `chunk` for each piece and an `end`."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, uid: str, model: str, asked: Asked, texts: TokenTexts) -> None:
        self.asked, self.uid = asked, f"{self.prefix}-{uid}"
        self._model, self._texts, self._created = model, texts, int(time.time())
        self._version = -1

    def whole(self, samples: Sequence[tuple[Sample, Piece]]) -> Json:
        """The response."""
        choices = [self._full(self._choice(sample, piece), sample, piece) for sample, piece in samples]
        usage = self._usage([sample for sample, _ in samples])
        return {**self._frame(self.kind, [piece for _, piece in samples]), "choices": choices, "usage": usage}

    def chunk(self, sample: Sample, piece: Piece) -> Json | None:
        """The chunk with a piece; None for a piece in which a client would see nothing."""
        shows_tokens = piece.token_ids and (self.asked.body.has_log_probs or self.asked.body.return_token_ids)
        if not (piece.text or piece.calls or piece.finish_reason or shows_tokens):
            return None
        choice = self._full(self._delta(sample, piece), sample, piece)
        frame = {**self._frame(self.chunk_kind, [piece]), "choices": [choice]}
        return {**frame, "usage": None} if self.asked.include_usage else frame

    def end(self, samples: Sequence[Sample]) -> Json | None:
        """The chunk with the usage, where it is asked for."""
        if not self.asked.include_usage:
            return None
        return {**self._frame(self.chunk_kind, []), "choices": [], "usage": self._usage(samples)}

    def _frame(self, kind: str, pieces: Sequence[Piece]) -> Json:
        self._version = max([self._version, *(version for piece in pieces for version, _ in piece.versions)])
        return {
            "id": self.uid,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(self._version),
        }

    def _usage(self, samples: Sequence[Sample]) -> Json:
        prompt, completion = sum(map(len, self.asked.prompts)), sum(sample.num_tokens for sample in samples)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _full(self, choice: Json, sample: Sample, piece: Piece) -> Json:
        """A choice with all that both kinds of responses have."""
        choice |= {"index": sample.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if self.asked.body.has_log_probs:
            choice["logprobs"] = self._log_probs(sample, piece)
        if self.asked.body.return_token_ids:
            choice |= {} if sample.num_shown else {"prompt_token_ids": list(sample.prompt_ids)}
            choice |= {"token_ids": list(piece.token_ids), "weight_versions": [list(run) for run in piece.versions]}
        sample.num_shown += 1
        return choice

    def _choice(self, sample: Sample, piece: Piece) -> Json:
        raise NotImplementedError

    def _delta(self, sample: Sample, piece: Piece) -> Json:
        raise NotImplementedError

    def _log_probs(self, sample: Sample, piece: Piece) -> Json:
        raise NotImplementedError


class ChatAnswer(ClientResponse):
    """A chat completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, sample: Sample, piece: Piece) -> Json:
        content = None if piece.calls and not piece.text else piece.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if piece.calls:
            message["tool_calls"] = [call.to_dict() for call in piece.calls]
        return {"message": message}

    def _delta(self, sample: Sample, piece: Piece) -> Json:
        delta: Json = {} if sample.num_shown else {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            first = sample.num_calls - len(piece.calls)
            delta["tool_calls"] = [{"index": first + at, **call.to_dict()} for at, call in enumerate(piece.calls)]
        return {"delta": delta}

    def _log_probs(self, sample: Sample, piece: Piece) -> Json:
        likeliest = piece.likeliest or [()] * len(piece.token_ids)
        content = [
            {**self._log_prob(token, log_prob), "top_logprobs": [self._log_prob(*other) for other in others]}
            for token, log_prob, others in zip(piece.token_ids, piece.log_probs, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _log_prob(self, token: int, log_prob: float) -> Json:
        text, utf8 = self._texts[token]
        return {"token": text, "logprob": log_prob, "bytes": list(utf8)}


class TextAnswer(ClientResponse):
    """A completion of a text."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, sample: Sample, piece: Piece) -> Json:
        return {"text": piece.text}

    def _delta(self, sample: Sample, piece: Piece) -> Json:
        return self._choice(sample, piece)

    def _log_probs(self, sample: Sample, piece: Piece) -> Json:
        tokens = [self._texts[token].text for token in piece.token_ids]
        offsets = []
        for text in tokens:
            offsets.append(sample.num_characters)
            sample.num_characters += len(text)
        found, log_probs = {"tokens": tokens, "token_logprobs": list(piece.log_probs)}, list[dict[str, float]]()
        for text, log_prob, others in zip(tokens, piece.log_probs, piece.likeliest, strict=False):
            log_probs.append({})
            for other, value in [*((self._texts[token].text, each) for token, each in others), (text, log_prob)]:
                log_probs[-1].setdefault(other, value)  # of several tokens with one text the likeliest
        return {**found, "top_logprobs": log_probs or None, "text_offset": offsets}


def fingerprint(version: int) -> str:
    """The name of a version of the weights, for system_fingerprint; that of a run's checkpoint is its step."""
    return f"weights-{version}"
