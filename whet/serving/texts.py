# SPDX-License-Identifier: Apache-2.0
"""Text of tokens that come one by one: whole characters only, cut before stop strings."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from whet.rollout.stop_strings import BROKEN

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies


class TokenText(NamedTuple):
    """A token by itself."""

    text: str  # with the replacement character for a part of a character
    utf8: tuple[int, ...]


class TokenTexts:
    """Text and bytes of single tokens; the bytes of all tokens together are the text that they stand for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._found: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        if token not in self._found:
            utf8 = self._utf8(token)
            self._found[token] = TokenText(utf8.decode(errors="replace"), tuple(utf8))
        return self._found[token]

    def _utf8(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = cast(str | None, self._tokenizer.convert_ids_to_tokens(token))
        if piece is None:  # a row of the embedding without a token
            return b""
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


class TextStream:
    """The text of a response whose tokens come in parts, without special tokens. A character is given when all its
    bytes have come. The parts together are the text that the tokenizer gives for all tokens at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Tokens from a place where a character begins; the first ones were given, and are kept because many tokenizers
        # leave out the space before the first word.
        self._ids: list[int] = []
        self._next = 0  # number of tokens that the next window leaves out
        self._given = 0  # characters of the window's text

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that is whole with these tokens; with the last ones all of the rest."""
        self._ids += token_ids
        text = self._decode()
        whole = text if is_last else text.rstrip(BROKEN)
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        if new and whole == text:
            del self._ids[: self._next]
            self._next, self._given = len(self._ids), len(self._decode())
        return new

    def _decode(self) -> str:
        return cast(str, self._tokenizer.decode(self._ids, skip_special_tokens=True))


class StopCut:
    """The text before the first stop string; what may become one is held back until it is known."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held, self._is_over = strings, "", False

    def add(self, text: str, *, is_last: bool = False) -> str:
        """The text that is known to lie before every stop string."""
        if self._is_over:
            return ""
        text = self._held + text
        places = [text.find(string) for string in self._strings if string in text]
        self._is_over = bool(places)
        end = min(places) if places else len(text) if is_last else len(text) - num_begun(text, self._strings)
        self._held = text[end:]
        return text[:end]


class MarkedText:
    """The text of a response before the first stop string, with those of its special tokens that are marks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], marks: Mapping[int, str]) -> None:
        self._text, self._cut, self._marks = TextStream(tokenizer), StopCut(stop), marks
        self._waiting: deque[tuple[int, str]] = deque()  # marks, and the number of characters before each
        self._num_read = self._num_given = 0  # characters, without those of marks

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> list[tuple[str, bool]]:
        """Returns what is known with these tokens: text, and marks (True), in their order."""
        read = ""
        for is_mark, run in groupby(token_ids, self._marks.__contains__):
            if is_mark:
                self._waiting += [(self._num_read + len(read), self._marks[token]) for token in run]
            else:
                read += self._text.add(list(run))
        read += self._text.add((), is_last=is_last)
        self._num_read += len(read)
        known, parts = self._cut.add(read, is_last=is_last), list[tuple[str, bool]]()
        while self._waiting and self._waiting[0][0] <= self._num_given + len(known):
            place, mark = self._waiting.popleft()
            before, known = known[: place - self._num_given], known[place - self._num_given :]
            parts += [(before, False), (mark, True)]
            self._num_given = place
        self._num_given += len(known)
        return [*parts, (known, False)]


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The texts of the tokens that are no text for a reader, such as the end of a turn."""
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def num_begun(text: str, strings: Iterable[str]) -> int:
    """Characters at the end of `text` that one of the strings may begin with."""
    sizes = ((string, size) for string in strings for size in range(1, min(len(string), len(text) + 1)))
    begun = (size for string, size in sizes if text.endswith(string[:size]))
    return max(begun, default=0)
