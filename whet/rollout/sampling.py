# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens from logits with random numbers that depend on the request and the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from whet.devices import HOST, moved
from whet.rollout.constraints import NEVER, Constraints
from whet.rollout.protocol import Likeliest, Request

OFF = 2.0  # a top_p that the rounded sum of probabilities never reaches


@dataclass(frozen=True)
class SamplingState:
    """The sampling parameters of S requests as columns."""

    keys: torch.Tensor  # [S] int64
    temperature: torch.Tensor  # [S] float32, 1 where greedy
    greedy: torch.Tensor  # [S] bool
    top_p: torch.Tensor  # [S] float32, OFF where off
    top_k: torch.Tensor  # [S] int64, more than any vocabulary where off
    min_p: torch.Tensor  # [S] float32
    stop_ids: torch.Tensor  # [S, K] int64, NEVER where a request has fewer
    limits: torch.Tensor  # [S] int64 tokens
    plain: bool  # all rows draw from softmax(logits): the common case needs one softmax
    has_min_p: bool  # some row has one, and so for the next; the host need not ask the device
    has_top: bool
    constraints: Constraints | None  # None where no row has any
    num_likeliest: int  # the largest of the rows' numbers

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingState:
        """The columns of `requests`.  Raises: EngineError for constraints that cannot be kept."""
        params = list({id(request.params): request.params for request in requests}.values())  # many share theirs
        number = {id(each): number for number, each in enumerate(params)}
        row = torch.tensor([number[id(request.params)] for request in requests], dtype=torch.int64, device=device)
        most = max((len(p.stop_token_ids) for p in params), default=0)
        stops = [[*p.stop_token_ids, *[NEVER] * (most - len(p.stop_token_ids))] for p in params]
        no_penalty = all((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0) for p in params)
        is_free = no_penalty and not any(p.bad_words or p.allowed_token_ids is not None for p in params)
        uncut = all(p.temperature == 1 and p.top_p == 1 and p.top_k == 0 and p.min_p == 0 for p in params)

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[row]

        return cls(
            keys=torch.tensor([request.key for request in requests], dtype=torch.int64, device=device),
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            greedy=column([p.temperature == 0 for p in params], torch.bool),
            top_p=column([p.top_p if p.top_p < 1 else OFF for p in params], torch.float32),
            top_k=column([p.top_k or 2**62 for p in params], torch.int64),
            min_p=column([p.min_p for p in params], torch.float32),
            stop_ids=torch.tensor(stops, dtype=torch.int64, device=device).view(len(params), most)[row],
            limits=column([p.max_new_tokens for p in params], torch.int64),
            plain=uncut and is_free,
            has_min_p=any(p.min_p > 0 for p in params),
            has_top=any(p.top_p < 1 or 0 < p.top_k < vocab_size for p in params),
            constraints=None if is_free else Constraints.of(requests, vocab_size, device),
            num_likeliest=max((p.num_likeliest for p in params), default=0),
        )

    @property
    def is_uncut(self) -> bool:
        """True where all rows draw from softmax(logits / temperature), or take the likeliest token."""
        return self.constraints is None and not self.has_top and not self.has_min_p

    def wider(self, rows: int) -> SamplingState:
        """The columns, with zeros for so many rows more."""
        columns: dict[str, Any] = {
            n: torch.cat([each, each.new_zeros(rows, *each.shape[1:])])
            for n, each in vars(self).items()
            if torch.is_tensor(each)
        }
        return replace(self, **columns)

    def to(self, device: torch.device) -> SamplingState:
        """The same columns on a device."""
        if device == self.keys.device:
            return self
        columns: dict[str, Any] = {n: moved(each, device) for n, each in vars(self).items() if torch.is_tensor(each)}
        constraints = None if self.constraints is None else self.constraints.to(device)
        return replace(self, **columns, constraints=constraints)

    def rows(self, index: torch.Tensor | slice) -> SamplingState:
        """The columns of some of the requests."""
        columns: dict[str, Any] = {
            name: each[index] for name, each in vars(self).items() if isinstance(each, torch.Tensor)
        }
        constraints = None if self.constraints is None else self.constraints.rows(index)
        return replace(self, **columns, constraints=constraints)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[S] float32 in [0, 1): a hash of each row's key and position (splitmix64's finaliser, Steele et al. 2014)."""
    x = keys + (positions + 1) * -7046029254386353131  # the golden ratio's 64 bits, as a signed number
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).float() * 2.0**-24


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: torch.Tensor, state: SamplingState, positions: torch.Tensor, generated: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [S] and their log-probs [S] from logits [S, V]; `positions` [S] counts the tokens sampled before, and
    `generated` [S, T], T >= 1, holds them where rows have constraints.

    A token is where the cumulated probability first exceeds the row's uniform number, so that a row's choice depends on
    its own logits alone. Log-probs are of softmax(logits / temperature), before constraints, min-p, top-k and top-p.
    """
    logits = logits.float()
    log_probs = (logits if state.plain else logits / state.temperature[:, None]).log_softmax(-1)
    choices = log_probs
    if state.constraints is not None:
        assert generated is not None
        choices = state.constraints.apply(logits, generated, positions)
        choices = (choices / state.temperature[:, None]).log_softmax(-1)
    if not state.plain:
        likeliest, choices = choices.argmax(-1), _cut(choices, state)
    cumulated = choices.exp().cumsum(-1)
    # Rounded sums may not end at 1: draw below what they do end at.
    point = uniforms(state.keys, positions)[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, point, right=True).squeeze(1)
    # With the largest uniforms the point can round up to the end: take the last token that has any probability.
    beyond = tokens >= logits.shape[1]
    if logits.device != HOST or bool(beyond.any()):  # to ask an accelerator costs more than to compute it
        at = torch.arange(logits.shape[1], device=logits.device)
        tokens = torch.where(beyond, torch.where(choices.exp() > 0, at, 0).amax(-1), tokens)
    if not state.plain:
        tokens = torch.where(state.greedy, likeliest, tokens)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def likeliest(logits: torch.Tensor, state: SamplingState) -> list[Likeliest]:
    """The likeliest tokens of each row of [S, V] with their log-probs, which are those of `sample`: as many as the row
    with the most asks for."""
    log_probs = (logits.float() / state.temperature[:, None]).log_softmax(-1)
    found = log_probs.topk(min(state.num_likeliest, logits.shape[1]))
    return [tuple(zip(*row, strict=True)) for row in zip(found.indices.tolist(), found.values.tolist(), strict=True)]


def _cut(log_probs: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """-inf where a token has less than min_p of the likeliest's probability, then outside the top_k likeliest of those
    left, then outside the smallest likeliest set of at least top_p of what is left."""
    if state.has_min_p:
        probs = log_probs.exp()
        unlikely = probs < state.min_p[:, None] * probs.amax(-1, keepdim=True)
        log_probs = log_probs.masked_fill(unlikely, float("-inf"))
    if not state.has_top:
        return log_probs
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(log_probs.shape[1], device=log_probs.device)
    outside = rank >= state.top_k[:, None]
    ordered = ordered.masked_fill(outside, float("-inf"))
    probs = ordered.softmax(-1)
    outside |= (probs.cumsum(-1) - probs >= state.top_p[:, None]) & (rank > 0)
    return log_probs.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))


def is_stop(tokens: torch.Tensor, stop_ids: torch.Tensor) -> torch.Tensor:
    """[S] bool: the token is among the row's `stop_ids` [S, K], which end its response."""
    return (tokens[:, None] == stop_ids).any(1)
