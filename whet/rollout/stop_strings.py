# SPDX-License-Identifier: Apache-2.0
"""Stop strings: a response ends with the token after which its text contains a stop string.

The text is the decoded response without special tokens, as environments and rewards read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

LoadTokenizer = Callable[[], PreTrainedTokenizerBase]
BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
KEPT = 64  # StopStrings kept for later requests


class StopStrings:
    """A set of stop strings, and the tokenizer that decodes the text to search.

    Only the last tokens are decoded, and only if the newest one can end a string. Every token with text stands for at
    least one byte, so a string of b bytes lies in the last b such tokens. One more token is decoded, because many
    tokenizers leave out the space before the first. A cut in the middle of a character breaks only this character."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings, self._tokenizer = strings, tokenizer
        self._window = max(len(string.encode()) for string in strings) + 1
        self._last_letters = {string[-1] for string in strings}
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._silent, self._size = special, len(tokenizer)
        self._can_end: dict[int, bool] = {}

    def found(self, newest: int, response: torch.Tensor | Sequence[int]) -> str | None:
        """Returns the first stop string that `newest`, the last token of `response` [T], completes in it; or None."""
        if newest not in self._can_end:
            # Twice, because many tokenizers leave out the space before the first word.
            text = self._decode([newest, newest])
            self._can_end[newest] = BROKEN in text or not self._last_letters.isdisjoint(text)
        if not self._can_end[newest]:
            return None
        width = self._window
        ids = _listed(response[-width:])
        while len(ids) == width and sum(map(self._has_text, ids)) < self._window:
            width *= 2
            ids = _listed(response[-width:])
        text = self._decode(ids)
        places = [(text.find(string), string) for string in self.strings if string in text]
        return min(places, key=lambda place: place[0])[1] if places else None

    def _decode(self, ids: Sequence[int]) -> str:
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _has_text(self, token: int) -> bool:
        return token < self._size and token not in self._silent


class LastStops:
    """A cache of recent stop strings. Drops the oldest, because clients of a server may always send new ones."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], StopStrings] = {}  # the oldest first

    def of(self, strings: tuple[str, ...], load_tokenizer: LoadTokenizer) -> StopStrings | None:
        """Returns the stop strings of a request, or None if it has none. Loads the tokenizer only for new strings."""
        if not strings:
            return None
        found = self._kept.pop(strings, None) or StopStrings(strings, load_tokenizer())
        self._kept[strings] = found
        if len(self._kept) > KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        return found


def _listed(ids: torch.Tensor | Sequence[int]) -> list[int]:
    return cast(list[int], ids.tolist()) if isinstance(ids, torch.Tensor) else list(ids)
