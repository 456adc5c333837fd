# SPDX-License-Identifier: Apache-2.0
"""Samples tokens from logits with random numbers that depend only on the request and the position. Constraints change
the logits first, in vLLM's order: allowed tokens, bad words, penalties. `sampling_triton` has a kernel that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from whet.column_rules import tensors_of
from whet.devices import HOST, moved
from whet.errors import EngineError
from whet.types import Likeliest, SamplingParams

NEVER = -1  # equals no token: fills up rows that have fewer tokens than others
Rules = tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...]]  # allowed tokens and bad words
OFF = 2.0  # a top_p that the rounded sum of probabilities never reaches


class KeyedRequest(Protocol):
    """A response to sample: its prompt, its sampling parameters and the key of its random numbers."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def key(self) -> int: ...


@dataclass(frozen=True)
class Constraints:
    """The constraints of S requests as columns; U prompts, D rules (allowed tokens, bad words), W multi-token words."""

    repetition: torch.Tensor  # [S]
    presence: torch.Tensor  # [S]
    frequency: torch.Tensor  # [S]
    prompt: torch.Tensor  # [S] number of the request's prompt
    rule: torch.Tensor  # [S] number of the request's rule
    prompts: torch.Tensor  # [U, P], shorter prompts repeat their last token, because repetitions do not count
    forbidden: torch.Tensor  # [D, V] bool: not an allowed token, or a bad word of one token
    words: torch.Tensor  # [W, K] bad words of several tokens, padded on the left with NEVER
    words_rule: torch.Tensor  # [W] number of the word's rule

    @classmethod
    def of(cls, requests: Sequence[KeyedRequest], vocab_size: int, device: torch.device) -> Constraints:
        """Builds the columns of `requests`.  Raises: EngineError for a rule that cannot be met (`check_rules`)."""
        params = [request.params for request in requests]
        rules: dict[Rules, int] = {}
        rule = [rules.setdefault((p.allowed_token_ids, p.bad_words), len(rules)) for p in params]
        prompts: dict[tuple[int, ...], int] = {}
        prompt = [prompts.setdefault(request.prompt_ids, len(prompts)) for request in requests]
        longest_prompt = max(map(len, prompts)) if any(p.repetition_penalty != 1 for p in params) else 1
        words = [(word, number) for (_, bad), number in rules.items() for word in bad if len(word) != 1]
        longest_word = max((len(word) for word, _ in words), default=1)
        for each in rules:
            check_rules(each, vocab_size)
        forbidden = torch.zeros(len(rules), vocab_size, dtype=torch.bool)
        for (allowed, bad), number in rules.items():
            if allowed is not None:
                forbidden[number] = True
                forbidden[number, list(allowed)] = False
            forbidden[number, [word[0] for word in bad if len(word) == 1]] = True

        def column(values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            repetition=column([p.repetition_penalty for p in params], torch.float32),
            presence=column([p.presence_penalty for p in params], torch.float32),
            frequency=column([p.frequency_penalty for p in params], torch.float32),
            prompt=column(prompt),
            rule=column(rule),
            prompts=column([(ids + ids[-1:] * (longest_prompt - len(ids)))[:longest_prompt] for ids in prompts]),
            forbidden=forbidden.to(device),
            words=column([[NEVER] * (longest_word - len(word)) + list(word) for word, _ in words]).view(
                len(words), longest_word
            ),
            words_rule=column([number for _, number in words]),
        )

    def to(self, device: torch.device) -> Constraints:
        """Copies the columns to a device."""
        return Constraints(**{name: moved(each, device) for name, each in vars(self).items()})

    def rows(self, index: torch.Tensor | slice) -> Constraints:
        """Selects the values of some requests."""
        return replace(
            self,
            repetition=self.repetition[index],
            presence=self.presence[index],
            frequency=self.frequency[index],
            prompt=self.prompt[index],
            rule=self.rule[index],
        )

    def apply(self, logits: torch.Tensor, generated: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Applies the constraints to logits [S, V]. Row s of `generated` [S, T] has the counts[s] tokens sampled so
        far; T is at least 1. A row without constraints does not change."""
        logits = logits.masked_fill(self.forbidden[self.rule], float("-inf"))
        if len(self.words):
            logits[self._ends_of_bad_words(generated, counts)] = float("-inf")
        if not bool(((self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)).any()):
            return logits
        is_sampled = torch.arange(generated.shape[1], device=logits.device) < counts[:, None]
        tokens = generated.where(is_sampled, 0)
        times = torch.zeros_like(logits).scatter_add_(1, tokens, is_sampled.to(logits.dtype))
        is_used = times > 0
        seen = is_used.scatter(1, self.prompts[self.prompt], True)
        repetition = self.repetition[:, None].where(seen, 1.0)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return logits - self.frequency[:, None] * times - self.presence[:, None] * is_used

    def _ends_of_bad_words(self, generated: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row number and the token of each token that would complete a bad word."""
        starts = self.words[:, :-1]  # [W, K - 1]
        back = torch.arange(starts.shape[1], 0, -1, device=counts.device)
        at = counts[:, None] - back
        recent = generated.gather(1, at.clamp(min=0)).where(at >= 0, NEVER)  # [S, K - 1]
        matches = (starts == NEVER) | (starts == recent[:, None])  # [S, W, K - 1]
        rows, words = (matches.all(-1) & (self.words_rule == self.rule[:, None])).nonzero(as_tuple=True)
        return rows, self.words[words, -1]


def check_rules(rules: Rules, vocab_size: int) -> None:
    """Checks that the rules name only tokens of the model, and always leave a token to sample.  Raises: EngineError."""
    allowed, bad_words = rules
    for name, ids in (
        ("allowed_token_ids", allowed or ()),
        ("bad_words", [each for word in bad_words for each in word]),
    ):
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise EngineError(name, outside[0], f"tokens of the model, 0 to {vocab_size - 1}")
    if allowed is not None and not allowed:
        raise EngineError("allowed_token_ids", "is empty", "tokens to draw from", "name tokens, or leave it unset")
    if not all(bad_words):
        raise EngineError("bad_words", "has a word without tokens", "", "remove this word")
    if len({word[-1] for word in bad_words}) < (vocab_size if allowed is None else len(set(allowed))):
        return
    left = set(range(vocab_size) if allowed is None else allowed)
    # After the start of a word (all tokens but its last), other words may end too: words whose start is its end.
    for start in dict.fromkeys(word[:-1] for word in bad_words):
        ends = {word[-1] for word in bad_words if start[len(start) - len(word) + 1 :] == word[:-1]}
        if left <= ends and left.issuperset(start):
            where = f"after tokens {list(start)}" if start else "at all"
            found, change = f"forbid all {len(left)} tokens that may be drawn {where}", "allow more, or remove words"
            raise EngineError("bad_words", found, "", change)


@dataclass(frozen=True)
class SamplingState:
    """The sampling parameters of S requests as columns."""

    keys: torch.Tensor  # [S] int64
    temperature: torch.Tensor  # [S] float32, 1 for greedy rows
    greedy: torch.Tensor  # [S] bool
    top_p: torch.Tensor  # [S] float32, OFF for rows without top-p
    top_k: torch.Tensor  # [S] int64, larger than any vocabulary for rows without top-k
    min_p: torch.Tensor  # [S] float32
    stop_ids: torch.Tensor  # [S, K] int64, filled up with NEVER
    limits: torch.Tensor  # [S] int64, maximum number of sampled tokens
    plain: bool  # all rows draw from softmax(logits): the common case needs one softmax
    has_min_p: bool  # True if any row has min-p; known on the host, which then need not ask the device
    has_top: bool  # the same for top-k and top-p
    constraints: Constraints | None  # None if no row has constraints
    num_likeliest: int  # the largest `num_likeliest` of the requests

    @classmethod
    def of(cls, requests: Sequence[KeyedRequest], vocab_size: int, device: torch.device) -> SamplingState:
        """Builds the columns of `requests`.  Raises: EngineError for constraints that cannot be met."""
        params = list({id(request.params): request.params for request in requests}.values())  # often shared
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
        """Tells whether no row has constraints, min-p, top-k or top-p."""
        return self.constraints is None and not self.has_top and not self.has_min_p

    def wider(self, rows: int) -> SamplingState:
        """Appends `rows` rows of zeros to all columns."""
        columns: dict[str, Any] = {
            n: torch.cat([each, each.new_zeros(rows, *each.shape[1:])])
            for n, each in vars(self).items()
            if torch.is_tensor(each)
        }
        return replace(self, **columns)

    def to(self, device: torch.device) -> SamplingState:
        """Copies the columns to a device."""
        if device == self.keys.device:
            return self
        columns: dict[str, Any] = {n: moved(each, device) for n, each in vars(self).items() if torch.is_tensor(each)}
        constraints = None if self.constraints is None else self.constraints.to(device)
        return replace(self, **columns, constraints=constraints)

    def rows(self, index: torch.Tensor | slice) -> SamplingState:
        """Selects the values of some requests."""
        columns: dict[str, Any] = {name: each[index] for name, each in tensors_of(vars(self)).items()}
        constraints = None if self.constraints is None else self.constraints.rows(index)
        return replace(self, **columns, constraints=constraints)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns random numbers [S] float32 in [0, 1), hashed from each row's key and position (splitmix64, Steele et al.
    2014)."""
    x = keys + (positions + 1) * -7046029254386353131  # the golden ratio's 64 bits, as a signed number
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).float() * 2.0**-24


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts the bits right and fills with zeros. (torch's own shift keeps the sign.)"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: torch.Tensor, state: SamplingState, positions: torch.Tensor, generated: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples tokens [S] from logits [S, V]. Returns them and their log-probs [S]. `positions` [S] counts the tokens
    sampled before; `generated` [S, T], T >= 1, has these tokens if rows have constraints.

    The sampled token is the first whose cumulated probability exceeds the row's uniform number, so that a row's token
    depends on its own logits alone. Log-probs are of softmax(logits / temperature), before constraints, min-p, top-k
    and top-p."""
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
    # The rounded cumulated sum may not end at 1: scale the uniform number by its end.
    point = uniforms(state.keys, positions)[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, point, right=True).squeeze(1)
    # With the largest uniforms the point can round up to the end: take the last token with a probability above 0.
    beyond = tokens >= logits.shape[1]
    if logits.device != HOST or bool(beyond.any()):  # on an accelerator waiting for the result costs more than the work
        at = torch.arange(logits.shape[1], device=logits.device)
        tokens = torch.where(beyond, torch.where(choices.exp() > 0, at, 0).amax(-1), tokens)
    if not state.plain:
        tokens = torch.where(state.greedy, likeliest, tokens)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def likeliest(logits: torch.Tensor, state: SamplingState) -> list[Likeliest]:
    """Returns the most probable tokens of each row of logits [S, V], with log-probs as in `sample`. Every row gets
    `state.num_likeliest` tokens, the largest number that a row requests."""
    log_probs = (logits.float() / state.temperature[:, None]).log_softmax(-1)
    found = log_probs.topk(min(state.num_likeliest, logits.shape[1]))
    return [tuple(zip(*row, strict=True)) for row in zip(found.indices.tolist(), found.values.tolist(), strict=True)]


def _cut(log_probs: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Sets tokens to -inf, in three steps. min-p: below min_p times the largest probability. top-k: outside the top_k
    most probable. top-p: outside the smallest set of most probable tokens with at least top_p of the remaining mass."""
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
    """Returns [S] bool: whether the token is among the row's `stop_ids` [S, K], which end its response."""
    return (tokens[:, None] == stop_ids).any(1)
