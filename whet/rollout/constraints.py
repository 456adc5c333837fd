# SPDX-License-Identifier: Apache-2.0
"""Changes of logits before a token is drawn: allowed tokens, bad words, then penalties, in vLLM's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from whet.data.chat import encode_texts
from whet.devices import moved
from whet.errors import DataError, EngineError
from whet.rollout.protocol import Request

NEVER = -1  # stands for "no such token" where rows have unequally many
Rules = tuple[tuple[int, ...] | None, tuple[tuple[int, ...], ...]]  # allowed tokens and bad words


@dataclass(frozen=True)
class Constraints:
    """The constraints of S requests as columns, with U different prompts, D different rules and W bad words."""

    repetition: torch.Tensor  # [S]
    presence: torch.Tensor  # [S]
    frequency: torch.Tensor  # [S]
    prompt: torch.Tensor  # [S] which prompt
    rule: torch.Tensor  # [S] which rules
    prompts: torch.Tensor  # [U, P], the shorter ones filled up with their last token, as a token counts once
    forbidden: torch.Tensor  # [D, V] bool: outside the allowed tokens, and bad words of one token
    words: torch.Tensor  # [W, K] of several tokens, on the right, NEVER before
    words_rule: torch.Tensor  # [W] whose rules

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> Constraints:
        """The columns of `requests`.  Raises: EngineError for rules that cannot be kept."""
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
        """The same columns on a device."""
        return Constraints(**{name: moved(each, device) for name, each in vars(self).items()})

    def rows(self, index: torch.Tensor | slice) -> Constraints:
        """The columns of some of the requests."""
        return replace(
            self,
            repetition=self.repetition[index],
            presence=self.presence[index],
            frequency=self.frequency[index],
            prompt=self.prompt[index],
            rule=self.rule[index],
        )

    def apply(self, logits: torch.Tensor, generated: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[S, V] logits as constrained. `generated` [S, T] holds the tokens sampled so far, row s counts[s] of them;
        T is 1 at least.  A row without constraints keeps its bits."""
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
        """Rows and tokens that would complete a bad word."""
        starts = self.words[:, :-1]  # [W, K - 1]
        back = torch.arange(starts.shape[1], 0, -1, device=counts.device)
        at = counts[:, None] - back
        recent = generated.gather(1, at.clamp(min=0)).where(at >= 0, NEVER)  # [S, K - 1]
        matches = (starts == NEVER) | (starts == recent[:, None])  # [S, W, K - 1]
        rows, words = (matches.all(-1) & (self.words_rule == self.rule[:, None])).nonzero(as_tuple=True)
        return rows, self.words[words, -1]


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """Returns each word as tokens, at the start of a text and after a space.

    Raises: DataError for a word that has none."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        found |= {tuple(ids): None for ids in encode_texts(tokenizer, [bare], add_special_tokens=False)}
        try:
            found |= {tuple(ids): None for ids in encode_texts(tokenizer, [f" {bare}"], add_special_tokens=False)}
        except DataError:
            continue  # a tokenizer without a space writes none
    return tuple(found)


def check_rules(rules: Rules, vocab_size: int) -> None:
    """Raises: EngineError for tokens that the model does not have, and where nothing could be drawn."""
    allowed, bad_words = rules
    for name, ids in (
        ("allowed_token_ids", allowed or ()),
        ("bad_words", [each for word in bad_words for each in word]),
    ):
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise EngineError(name, outside[0], f"tokens of the model, 0 to {vocab_size - 1}")
    if allowed is not None and not allowed:
        raise EngineError("allowed_token_ids", "is empty", "tokens to draw from", "name some, or leave it unset")
    if not all(bad_words):
        raise EngineError("bad_words", "has a word without tokens", "", "take it out")
    if len({word[-1] for word in bad_words}) < (vocab_size if allowed is None else len(set(allowed))):
        return
    left = set(range(vocab_size) if allowed is None else allowed)
    # What may not follow the longest start of a word are the ends of all words whose start that one ends with.
    for start in dict.fromkeys(word[:-1] for word in bad_words):
        ends = {word[-1] for word in bad_words if start[len(start) - len(word) + 1 :] == word[:-1]}
        if left <= ends and left.issuperset(start):
            where = f"behind tokens {list(start)}" if start else "at all"
            found, change = f"forbid all {len(left)} tokens that may be drawn {where}", "allow more, or take words out"
            raise EngineError("bad_words", found, "", change)
