# SPDX-License-Identifier: Apache-2.0
"""Aligns two vocabularies by the bytes of their tokens, so that a teacher can have another vocabulary than its student.

Tokens of equal bytes are one outcome. The distributions of two models are compared where a token of each begins at the
same byte of the text: there both have read the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from whet.data.written import end_of_turn
from whet.errors import DataError

BYTE = re.compile("<0x([0-9A-F]{2})>")  # token of a single byte, in SentencePiece
SPACE = "\u2581"  # of SentencePiece


@dataclass(frozen=True)
class ByteVocabulary:
    """A tokenizer's tokens: the bytes of each token of text, and the names of special tokens."""

    tokenizer: PreTrainedTokenizerBase
    texts: Mapping[int, bytes]
    special: Mapping[int, str]
    ends: tuple[int, int]  # the end token, and the token that ends a turn

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteVocabulary:
        """Reads the vocabulary.  Raises: DataError for a tokenizer that is not of the library `tokenizers`."""
        added = tokenizer.added_tokens_decoder
        read = _reader(tokenizer)
        texts = {number: read(token) for token, number in tokenizer.get_vocab().items() if number not in added}
        texts |= {number: token.content.encode() for number, token in added.items() if not token.special}
        special = {number: token.content for number, token in added.items() if token.special}
        end = int(tokenizer.eos_token_id)
        turn = end_of_turn(tokenizer, {}) if tokenizer.chat_template else None
        ends = end, end if turn is None else turn
        special |= {number: str(tokenizer.convert_ids_to_tokens(number)) for number in ends}
        return cls(tokenizer, {number: text for number, text in texts.items() if number not in special}, special, ends)

    def starts(self, ids: Sequence[int]) -> list[int]:
        """Returns the byte at which each token begins and, last, the number of bytes."""
        return list(accumulate((len(self.texts[each]) for each in ids), initial=0))


class Alignment:
    """The tokens that a student and a teacher have in common, and the places of a text that they can be compared at."""

    def __init__(self, student: ByteVocabulary, teacher: ByteVocabulary) -> None:
        self.student, self.teacher = student, teacher
        by_name = {name: number for number, name in teacher.special.items()}
        self.special = {number: by_name.get(name) for number, name in student.special.items()}
        for own, other in zip(student.ends, teacher.ends, strict=True):
            if self.special[own] is None:
                self.special[own] = other

    @cached_property
    def pairs(self) -> dict[int, int]:
        """The student's token of each of the teacher's tokens that both have, by id; each token once."""
        texts = {text: number for number, text in reversed(self.student.texts.items()) if text}
        found = {text: number for number, text in reversed(self.teacher.texts.items()) if text in texts}
        special = {other: own for own, other in reversed(self.special.items()) if other is not None}
        return {number: texts[text] for text, number in found.items()} | special

    def read(self, ids: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Encodes a text of the student's tokens for the teacher. Returns the teacher's tokens, and their places by
        the student's places at which tokens of both begin. A text that is no UTF-8 has no places.

        Raises: DataError for a special token that the teacher lacks; for a tokenizer that changes the text."""
        found, places = list[int](), dict[int, int]()
        for is_special, run in groupby(range(len(ids)), lambda place: ids[place] in self.student.special):
            own = list(run)
            if is_special:
                for place in own:
                    places[place] = len(found)
                    found.append(self._special(ids[place]))
                continue
            try:
                tokens, starts = self._encoded(b"".join(self.student.texts[ids[place]] for place in own).decode())
            except (KeyError, UnicodeDecodeError):  # rows of the vocabulary without a token may be sampled too
                return [], {}
            at = {start: len(found) + number for number, start in enumerate(starts)}
            begun = self.student.starts([ids[place] for place in own])
            places |= {place: at[start] for place, start in zip(own, begun, strict=False) if start in at}
            found += tokens
        return found, places

    def _special(self, token: int) -> int:
        other = self.special[token]
        if other is None:
            found, expected = (
                f"has no token {self.student.special[token]!r}",
                "each special token of the student's rows",
            )
            change = "use rows and a chat template without it, or a teacher that has it"
            raise DataError("tokenizer of the teacher", found, expected, change)
        return other

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the teacher's tokens of a text without special tokens, and the byte at which each begins."""
        tokens = self.teacher.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        read, asked = b"".join(self.teacher.texts.get(each, b"") for each in tokens), text.encode()
        more = len(read) - len(asked)  # SentencePiece may put a space before a text
        if read != b" " * more + asked:
            found = f"reads {text[:40]!r} as {read[:40]!r}"
            raise DataError("tokenizer of the teacher", found, "a tokenizer that keeps all bytes of a text")
        return tokens, [max(0, start - more) for start in self.teacher.starts(tokens)[:-1]]


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """Returns the function that gives the bytes of an entry of the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        found, expected = type(tokenizer).__name__, "a tokenizer of the library `tokenizers` (tokenizer.json)"
        raise DataError("tokenizer", found, expected, "save it as a fast tokenizer")
    decoder = json.loads(backend.to_str())["decoder"] or {}
    kinds = {each["type"] for each in (decoder, *decoder.get("decoders", ())) if each}
    if "ByteLevel" in kinds:
        octets = {letter: octet for octet, letter in bytes_to_unicode().items()}
        return lambda token: bytes(octets[letter] for letter in token)

    def read(token: str) -> bytes:
        octet = BYTE.fullmatch(token)
        return bytes([int(octet[1], 16)]) if octet else token.replace(SPACE, " ").encode()

    return read
