# SPDX-License-Identifier: Apache-2.0
"""A teacher on an OpenAI-compatible server. The server returns the log-probs of the most probable tokens at each prompt
position: the field `prompt_logprobs` of vLLM's and whet's servers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.errors import EngineError
from whet.http import CallError, fetch, shown
from whet.registry import register_part
from whet.trainers.distill import TEXTS

CONCURRENCY, ATTEMPTS, SECONDS, REPLY_BYTES = 16, 5, 600.0, 2**30
LEAST = 1e-6  # smallest probability of all tokens not returned: 1 minus a sum is only rounding error below it
Place = Mapping[str, Mapping[str, Any]]  # by token id


@register_part("served_teacher")
class HTTPTeacher:
    """A teacher on a server; `key` is its config key. If the server needs an API key, set OPENAI_API_KEY to it."""

    def __init__(self, key: str, address: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises: EngineError where the server does not answer."""
        self._key, self._address, self._tokenizer = key, address.rstrip("/"), tokenizer
        self._checked = set[int]()  # token ids with the same text in the server's and the student's vocabulary
        self._model = str(self._ask("GET", "models")["data"][0]["id"])

    def outcomes(self, batch: Batch, top_k: int, vocab_size: int) -> dict[str, Tensor]:
        """Gets `teacher_ids` [B, R, K], the K = `top_k` likeliest tokens, and `teacher_outcomes` [B, R, K + 1]: their
        log-probs, then the log of the remaining probability. Both are 0 outside of responses.

        Raises: EngineError for a server with another vocabulary, or one that returns too few tokens or positions."""
        masks = batch["response_mask"]
        found = {
            "teacher_ids": torch.zeros(*masks.shape, top_k, dtype=torch.long),
            "teacher_outcomes": torch.zeros(*masks.shape, top_k + 1),
        }
        real = batch["attention_mask"].bool()
        rows = [ids[is_real].tolist() for ids, is_real in zip(batch["input_ids"], real, strict=True)]
        left = batch["input_ids"].shape[1] - masks.shape[1]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            told = list(pool.map(lambda ids: self._places(ids, top_k, vocab_size), rows))
        for row, places in enumerate(told):
            begin = int(real[row, :left].sum())
            for token, each in (pair for place in places if place for pair in place.items()):
                self._check(each, int(token))
            for at in masks[row].nonzero()[:, 0].tolist():
                place = places[begin + at] or {}
                best = _among(place, vocab_size)[:top_k]
                if len(best) < top_k:
                    found_, change = f"returned {len(best)} tokens at a position", "lower top_k, or raise its limit"
                    raise EngineError(self._key, found_, f"top_k={top_k}", change)
                values = [value for value, _ in best]
                others = math.log(max(LEAST, 1.0 - math.fsum(map(math.exp, values))))
                found["teacher_ids"][row, at] = torch.tensor([token for _, token in best])
                found["teacher_outcomes"][row, at] = torch.tensor([*values, others])
        return found

    def _places(self, ids: list[int], top_k: int, vocab_size: int) -> list[Place | None]:
        """Asks the server for the most probable tokens and their log-probs at each position; None at the first one.
        Asks for more of them where fewer than `top_k` are the student's: others are tokens that only a teacher has."""
        body, asked = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}, top_k
        while True:
            answer = self._ask("POST", "completions", {**body, "prompt_logprobs": asked})["choices"][0]
            places: list[Place | None] = answer.get("prompt_logprobs") or []
            if len(places) != len(ids):
                found, change = f"returned {len(places)} of {len(ids)} positions", "use vLLM or `whet serve`"
                raise EngineError(self._key, found, "prompt_logprobs of every token", change)
            short = [each for each in places[1:] if each and len(_among(each, vocab_size)) < top_k]
            if all(len(each) < asked for each in short):  # the server has no more, if there are any
                return places
            asked += top_k

    def _check(self, told: Mapping[str, Any], token: int) -> None:
        """Checks that a token from the server has the same text as the student's token.  Raises: EngineError."""
        if token in self._checked or token >= len(self._tokenizer):  # padding rows of the output layer have no token
            return
        text, own = told.get("decoded_token"), self._tokenizer.decode([token])
        if text is None:
            return
        if text and "\ufffd" not in text + own and text != own:
            found, expected = f"reads the token {token} as {text!r}", f"{own!r}, as the student: one vocabulary"
            raise EngineError(self._key, found, expected, TEXTS)
        self._checked.add(token)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        secret = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        limits: Any = {"seconds": SECONDS, "attempts": ATTEMPTS, "most": REPLY_BYTES}
        try:
            return fetch(method, f"{self._address}/{path}", json.loads, **limits, body=body, headers=headers)
        except CallError as error:
            found = f"{shown(self._address)} did not answer: {error}"
            raise EngineError(self._key, found, "an OpenAI-compatible server", "start it, or correct it") from error


def _among(place: Place, vocab_size: int) -> list[tuple[float, int]]:
    """Returns (log-prob, token) of the tokens below `vocab_size`, the most probable first."""
    pairs = [(float(each["logprob"]), int(token)) for token, each in place.items() if int(token) < vocab_size]
    return sorted(pairs, reverse=True)
