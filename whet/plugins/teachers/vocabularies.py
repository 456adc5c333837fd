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
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from whet.data.written import end_of_turn
from whet.errors import DataError

BYTE = re.compile("<0x([0-9A-F]{2})>")  # token of a single byte, in SentencePiece
SPACE = "\u2581"  # of SentencePiece
OCTETS = {letter: octet for octet, letter in bytes_to_unicode().items()}
KEY = "tokenizer of the teacher"
SHOWN = 40  # letters of a text that an error shows


@dataclass(frozen=True)
class ByteVocabulary:
    """A tokenizer's tokens: the bytes of tokens of text, and the names of added and special tokens."""

    encoder: Tokenizer  # puts no space before a text
    texts: Mapping[int, bytes]
    added: Mapping[int, str]
    special: frozenset[int]  # of `added`, those that are no text
    ends: tuple[int, int]  # the token that ends a turn, and the end token
    begin: int | None  # token that begins a text
    begins: bool  # whether the tokenizer writes `begin` before each text
    pad_id: int
    leads: bool  # whether it puts a space before a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteVocabulary:
        """Reads the vocabulary.  Raises: DataError for a tokenizer that is not of the library `tokenizers`."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            found, expected = type(tokenizer).__name__, "a tokenizer of the library `tokenizers` (tokenizer.json)"
            raise DataError("tokenizer", found, expected, "save it as a fast tokenizer")
        spec = json.loads(backend.to_str())
        read, entries = _reader(spec["decoder"]), spec["model"]["vocab"]
        own = {text for text, _ in entries} if isinstance(entries, list) else entries
        tokens = dict(tokenizer.added_tokens_decoder)
        added = {number: token.content for number, token in tokens.items()}
        texts = {number: read(text) for text, number in tokenizer.get_vocab().items()}
        texts |= {number: text.encode() for number, text in added.items() if text not in own}
        end, begin = int(tokenizer.eos_token_id), tokenizer.bos_token_id
        turn = end_of_turn(tokenizer, {}) if tokenizer.chat_template else None
        ends = (end if turn is None else turn, end)
        special = {number for number, token in tokens.items() if token.special} | {*ends, begin} - {None}
        added |= {number: str(tokenizer.convert_ids_to_tokens(number)) for number in special}
        begins, pad_id = begin is not None and tokenizer.encode("a")[:1] == [begin], int(tokenizer.pad_token_id)
        encoder, leads = _without_lead(spec)
        return cls(encoder, texts, added, frozenset(special), ends, begin, begins, pad_id, leads)

    @cached_property
    def by_name(self) -> dict[bytes, int]:
        """The token of each text, by id; a token of a single byte only if no other has that byte."""
        ids = [number for number in self.texts if number not in self.special and self.texts[number]]
        ids.sort(key=lambda number: (bool(BYTE.fullmatch(self.encoder.id_to_token(number) or "")), number))
        return {self.texts[number]: number for number in reversed(ids)}


class Alignment:
    """The tokens that a student and a teacher have in common, and the places of a text that they can be compared at."""

    def __init__(self, student: ByteVocabulary, teacher: ByteVocabulary, longest: int = 2**31) -> None:
        """`longest` is the number of tokens that the teacher reads at most."""
        self.student, self.teacher, self.longest = student, teacher, longest
        by_name = {name: number for number, name in teacher.added.items()}
        named = {number: by_name[name] for number, name in student.added.items() if name in by_name}
        ends = list(zip(student.ends, teacher.ends, strict=True))
        self.added = dict(reversed(ends)) | named
        self.ends = [(own, other) for own, other in ends if self.added[own] == other]
        begin = {} if student.begin is None else {student.begin: teacher.begin}
        self.opening: dict[int, int | None] = {**self.added, **begin, **named}  # of a row's first token; None: left out

    @cached_property
    def common(self) -> dict[int, int]:
        """The student's token of each of the teacher's tokens of text with the same bytes."""
        own = self.student.by_name
        return {number: own[text] for text, number in self.teacher.by_name.items() if text in own}

    @cached_property
    def pairs(self) -> dict[int, int]:
        """The student's token of each of the teacher's tokens that both have, ordered by the teacher's ids. The token
        that ends the teacher's texts is the student's token that does."""
        added = {other: own for own, other in (*reversed(self.added.items()), *reversed(self.ends))}
        return dict(sorted((self.common | added).items()))

    def read(self, ids: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Encodes a text of the student's tokens for the teacher. Returns the teacher's tokens, and their places by
        the student's places at which tokens of both begin. Bytes that are no UTF-8 end the text.

        Raises: DataError for a special token that the teacher lacks, a tokenizer that changes the text, a long text."""
        teacher, found, places = self.teacher, list[int](), dict[int, int]()
        has_begin = bool(ids) and self.opening.get(ids[0], -1) == teacher.begin
        if teacher.begins and not has_begin:
            found.append(int(teacher.begin or 0))
        for is_added, run in groupby(
            range(len(ids)), lambda at: ids[at] in self.added or ids[at] in self.student.special
        ):
            own = list(run)
            if is_added:
                for place in own:
                    if (token := self._added(ids[place], place)) is not None:
                        places[place] = len(found)
                        found.append(token)
                continue
            octets = [self.student.texts.get(ids[place]) for place in own]
            whole = octets if None not in octets else octets[: octets.index(None)]  # rows of a model without a token
            text = _text(b"".join(each for each in whole if each is not None))
            more = teacher.leads - self.student.leads  # spaces before a text; -1: the student's, which is left out
            if own[0] != int(has_begin) or (more > 0) == text.startswith(" "):
                more = 0
            tokens, starts = self._encoded(" " * more + text[max(0, -more) :])
            at = {start - more: len(found) + number for number, start in enumerate(starts)}
            begun = accumulate((len(each or b"") for each in whole), initial=0)
            places |= {place: at[start] for place, start in zip(own, begun, strict=False) if start in at}
            found += tokens
            if len(text.encode()) < sum(len(each or b"") for each in octets) or len(whole) < len(octets):
                break
        if len(found) > self.longest:
            raise DataError(KEY, f"reads a row as {len(found)} tokens", f"at most {self.longest}", "use shorter rows")
        return found, {place: at for place, at in places.items() if at > 0}  # nothing comes before the first token

    def _added(self, token: int, place: int) -> int | None:
        """Returns the teacher's token; None for a row's beginning that the teacher does not have."""
        known = self.added if place else self.opening
        if token not in known:
            found, expected = f"has no token {self.student.added[token]!r}", "each special token of the student's rows"
            raise DataError(KEY, found, expected, "use rows and a chat template without it, or a teacher that has it")
        return known[token]

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the teacher's tokens of a text without special tokens, and the byte at which each begins."""
        tokens = self.teacher.encoder.encode(text, add_special_tokens=False).ids
        octets = [self.teacher.texts.get(each, b"") for each in tokens]
        if (read := b"".join(octets)) != text.encode():
            other = read.decode(errors="replace")
            same = next(
                (at for at, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(other)
            )
            begin = max(0, same - SHOWN // 2)
            found = f"reads {text[begin : begin + SHOWN]!r} as {other[begin : begin + SHOWN]!r}"
            raise DataError(KEY, found, "a tokenizer that keeps all bytes of a text", "name another teacher")
        return tokens, list(accumulate(map(len, octets[:-1]), initial=0)) if tokens else []


def _text(octets: bytes) -> str:
    """Returns the text up to the first byte that is no UTF-8."""
    try:
        return octets.decode()
    except UnicodeDecodeError as error:
        return octets[: error.start].decode()


def _reader(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Returns the function that gives the bytes of an entry of the vocabulary."""
    kinds = {each["type"] for each in (decoder, *decoder.get("decoders", ()))} if decoder else set[str]()

    def read(token: str) -> bytes:
        if "ByteLevel" in kinds and all(letter in OCTETS for letter in token):
            return bytes(OCTETS[letter] for letter in token)
        octet = BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        return bytes([int(octet[1], 16)]) if octet else token.replace(SPACE, " ").encode()

    return read


def _without_lead(spec: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer of a specification, without the space that it puts before texts, and whether it does."""
    leads, normalizer = False, spec["normalizer"]
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    kept = [each for each in steps if each and each["type"] != "Prepend"]
    if len(kept) < len([each for each in steps if each]):
        leads, spec["normalizer"] = True, {"type": "Sequence", "normalizers": kept}
    before = spec["pre_tokenizer"]
    for each in before.get("pretokenizers", [before]) if before else ():
        if each["type"] == "Metaspace" and each.get("prepend_scheme") != "never":
            leads, each["prepend_scheme"] = True, "never"
        elif each["type"] == "ByteLevel" and each["add_prefix_space"]:
            leads, each["add_prefix_space"] = True, False
    encoder = Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}))
    encoder.encode_special_tokens = True
    return encoder, leads
