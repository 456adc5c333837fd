# SPDX-License-Identifier: Apache-2.0
"""Texts of one vocabulary in another: places by hand, random texts against offsets counted byte by byte."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.teachers.vocabularies import Alignment, ByteVocabulary

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*merges: tuple[str, str], first: int = 0, end: str = "<end>") -> PreTrainedTokenizerFast:
    """Byte-level BPE; the letters are numbered from `first` on, so that ids differ between vocabularies."""
    words = [*LETTERS[first:], *LETTERS[:first], *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>")


def sentencepiece(*words: str) -> PreTrainedTokenizerFast:
    """Pieces with a space before a text, and a token for each byte that no piece has; short merges come first."""
    pieces = ["<unk>", *(f"<0x{octet:02X}>" for octet in range(256)), *words]
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    model: Any = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def aligned(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> Alignment:
    return Alignment(ByteVocabulary.of(student), ByteVocabulary.of(teacher))


def test_places_of_two_merges_by_hand() -> None:
    """The student's tokens begin at the bytes 0 2 3 5 6, the teacher's at 0 1 3 4 6; both end there."""
    student, teacher = byte_level(("a", "b")), byte_level(("b", "c"), first=7, end="<stop>")
    ids = [*student.encode("abcabcc"), student.eos_token_id]
    assert student.convert_ids_to_tokens(ids) == ["ab", "c", "ab", "c", "c", "<end>"]
    tokens, places = aligned(student, teacher).read(ids)
    assert teacher.convert_ids_to_tokens(tokens) == ["a", "bc", "a", "bc", "c", "<stop>"]
    assert places == {2: 2, 4: 4, 5: 5}  # nothing is read before the first token


def test_tokens_of_equal_bytes_are_pairs() -> None:
    student, teacher = byte_level(("a", "b"), ("c", "d")), byte_level(("c", "d"), ("x", "y"), first=9)
    pairs = aligned(student, teacher).pairs
    named = {teacher.convert_ids_to_tokens(theirs): student.convert_ids_to_tokens(own) for theirs, own in pairs.items()}
    assert len(pairs) == 256 + 1 + 2 and named["cd"] == "cd" and "xy" not in named
    assert all(theirs == own for theirs, own in named.items())
    assert sum(theirs != own for theirs, own in pairs.items()) > 200  # the ids are others


def test_pieces_with_a_space_before_the_text() -> None:
    """The teacher's tokenizer puts a space before the text, which is no place of the student's."""
    teacher = sentencepiece(*"helow\u2581", "he", "ll", "llo")
    student = byte_level(("l", "l"), ("ll", "o"))
    ids = student.encode("hello w\u00e9")
    tokens, places = aligned(student, teacher).read(ids)
    assert student.convert_ids_to_tokens(ids) == ["h", "e", "llo", "\u0120", "w", "\u00c3", "\u00a9"]
    assert teacher.convert_ids_to_tokens(tokens) == ["\u2581", "he", "llo", "\u2581", "w", "<0xC3>", "<0xA9>"]
    assert places == {0: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}


def test_only_the_beginning_of_a_text_gets_a_space() -> None:
    """Behind a special token "he" begins at the same byte for both, and no space comes in between."""
    teacher, student = sentencepiece(*"helow\u2581", "\u2581h", "\u2581he"), byte_level()
    for each in (teacher, student):
        each.add_special_tokens({"additional_special_tokens": ["<a>"]})
    tokens, places = aligned(student, teacher).read(student.encode("w<a>he"))
    assert teacher.convert_ids_to_tokens(tokens) == ["\u2581", "w", "<a>", "h", "e"]
    assert places == {0: 1, 1: 2, 2: 3, 3: 4}


def test_equal_tokenizers_are_the_identity() -> None:
    own = sentencepiece(*"helowabc\u2581", "he", "ll", "llo", "\u2581w")
    own.add_special_tokens({"bos_token": "<s>"})
    for text in ("hello w", "a</s>he", "<s>hello</s>wo", "\u00e9\u4f60"):
        ids = own.encode(text)
        tokens, places = aligned(own, own).read(ids)
        assert tokens == ids and places == {place: place for place in range(1, len(ids))}


def test_a_letter_is_paired_with_its_token_and_not_with_the_byte() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces, student = sentencepiece(*letters, "\u2581"), byte_level()
    both = aligned(student, pieces)
    assert [both.pairs[pieces.convert_tokens_to_ids(each)] for each in letters] == student.convert_tokens_to_ids(
        list(letters)
    )
    assert pieces.convert_tokens_to_ids("<0x61>") not in both.pairs
    assert both.pairs[pieces.convert_tokens_to_ids("<0xFF>")] == student.convert_tokens_to_ids("\u00ff")
    assert list(both.pairs) == sorted(both.pairs)


CHATML = "{% for m in messages %}<turn>{{ m['content'] }}<end>{% endfor %}"


def test_the_tokens_that_end_a_turn_are_a_pair() -> None:
    """A student ends turns and texts with one token, a teacher with two, and in the other order."""
    one, two = byte_level(end="<over>"), byte_level(end="<eos>", first=5)
    two.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    two.chat_template = CHATML
    [own, turn, eos] = one.eos_token_id, two.convert_tokens_to_ids("<end>"), two.eos_token_id
    both = aligned(one, two)
    assert both.read([*one.encode("a"), own])[0][-1] == turn and both.pairs[turn] == own and eos not in both.pairs
    other = aligned(two, one)
    assert other.read([*two.encode("a"), turn])[0][-1] == own and other.pairs[own] == turn


def test_a_teacher_reads_its_own_beginning_of_texts() -> None:
    student, teacher = byte_level(), byte_level(first=4, end="<stop>")
    teacher.add_special_tokens({"bos_token": "<bos>"})
    begin = teacher.bos_token_id
    teacher.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", begin)])
    tokens, places = aligned(student, teacher).read(student.encode("ab"))
    assert teacher.convert_ids_to_tokens(tokens) == ["<bos>", "a", "b"] and places == {0: 1, 1: 2}
    tokens, places = aligned(teacher, student).read(teacher.encode("ab"))
    assert student.convert_ids_to_tokens(tokens) == ["a", "b"] and places == {2: 1}
    student.add_special_tokens({"bos_token": "<begin>"})
    tokens, places = aligned(student, teacher).read([student.bos_token_id, *student.encode("a")])
    assert teacher.convert_ids_to_tokens(tokens) == ["<bos>", "a"] and places == {1: 1}


def test_the_teachers_end_is_the_token_that_ends_the_students_rows() -> None:
    """The student also has a token by the name of the teacher's end, which ends none of its rows."""
    student, teacher = byte_level(end="<over>"), byte_level(end="<eos>", first=5)
    student.add_special_tokens({"additional_special_tokens": ["<eos>"]})
    own, other = student.eos_token_id, teacher.eos_token_id
    both = aligned(student, teacher)
    assert both.read([*student.encode("a"), own])[0][-1] == other and both.pairs[other] == own
    teacher.add_special_tokens({"additional_special_tokens": ["<over>"]})  # now each has its own
    both, over = aligned(student, teacher), teacher.convert_tokens_to_ids("<over>")
    assert (both.pairs[over], both.pairs[other]) == (own, student.convert_tokens_to_ids("<eos>"))


def test_a_beginning_of_texts_in_the_middle_of_a_row_is_a_special_token() -> None:
    """A student's mark of turns may be its beginning of texts too: it is the teacher's at a row's first place alone."""
    student, teacher = byte_level(), byte_level(first=4, end="<stop>")
    student.add_special_tokens({"bos_token": "<mark>"})
    mark, [letter] = student.bos_token_id, student.encode("a")
    for begin, first in ((None, []), ("<bos>", ["<bos>"])):
        if begin is not None:
            teacher.add_special_tokens({"bos_token": begin})
        both = aligned(student, teacher)
        assert teacher.convert_ids_to_tokens(both.read([mark, letter])[0]) == [*first, "a"]
        with raises(DataError, found=re.compile("<mark>")):
            both.read([mark, letter, mark, letter])
    teacher.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    tokens, _ = aligned(student, teacher).read([mark, letter, mark, letter])
    assert teacher.convert_ids_to_tokens(tokens) == ["<mark>", "a", "<mark>", "a"]


def test_a_space_of_one_side_before_texts() -> None:
    """The teacher reads a text as its own tokenizer does, behind a beginning of texts too; the first place of a student
    with such a space has no counterpart, since the teacher's token lacks the space."""
    plain, pieces = byte_level(), sentencepiece(*"helow\u2581", "\u2581h", "\u2581he")
    plain.add_special_tokens({"bos_token": "<bos>"})
    pieces.add_special_tokens({"bos_token": "<s>"})
    tokens, places = aligned(plain, pieces).read([plain.bos_token_id, *plain.encode("hel")])
    assert pieces.convert_ids_to_tokens(tokens) == ["<s>", "\u2581he", "l"] and places == {3: 2}
    for begin in ([], [pieces.bos_token_id]):
        ids = [*begin, *pieces.encode("hel")]
        tokens, places = aligned(pieces, plain).read(ids)
        assert pieces.convert_ids_to_tokens(ids)[len(begin) :] == ["\u2581he", "l"]
        assert plain.convert_ids_to_tokens(tokens) == [*["<bos>"] * len(begin), "h", "e", "l"]
        assert places == {len(begin) + 1: len(begin) + 2}


def test_a_teacher_that_cuts_texts_off_reads_all_of_them() -> None:
    teacher, text = byte_level(first=3), "abcdefgh"
    teacher.backend_tokenizer.enable_truncation(4)
    teacher.backend_tokenizer.enable_padding(length=16)
    tokens, _ = aligned(byte_level(), teacher).read(byte_level().encode(text))
    assert teacher.convert_ids_to_tokens(tokens) == [*text]


def test_an_added_token_of_both_is_one_token() -> None:
    """Special for one and text for the other: the name decides."""
    student, teacher = byte_level(), byte_level(end="<stop>")
    student.add_special_tokens({"additional_special_tokens": ["<think>"]})
    teacher.add_tokens(["<think>"])
    for own, other in ((student, teacher), (teacher, student)):
        ids = [*own.encode("a"), own.convert_tokens_to_ids("<think>")]
        tokens, places = aligned(own, other).read(ids)
        assert other.convert_ids_to_tokens(tokens) == ["a", "<think>"] and places == {1: 1}


def test_spaces_of_an_added_piece() -> None:
    teacher = sentencepiece(*"ab\u2581", "\u2581\u2581")
    teacher.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    student = byte_level()
    tokens, _ = aligned(student, teacher).read(student.encode("a  b"))
    assert "".join(teacher.convert_ids_to_tokens(tokens)) == "\u2581a\u2581\u2581b"


def test_a_long_text() -> None:
    student = byte_level()
    both = Alignment(ByteVocabulary.of(student), ByteVocabulary.of(byte_level(first=3)), longest=3)
    assert len(both.read(student.encode("abc"))[0]) == 3
    with raises(DataError, re.compile("teacher"), found=re.compile("4")):
        both.read(student.encode("abcd"))


def test_random_texts_against_bytes_that_are_counted_one_by_one() -> None:
    rng = random.Random(0)
    student = byte_level(("a", "b"), ("ab", "c"), ("\u0120", "a"), ("\u00c3", "\u00a9"))
    teacher = byte_level(("b", "c"), ("a", "bc"), ("c", "\u0120"), first=100)
    both = aligned(student, teacher)
    for _ in range(200):
        text = "".join(rng.choice("abc \u00e9\u4f60") for _ in range(rng.randint(1, 12)))
        ids = student.encode(text)
        if rng.random() < 0.5:  # tokens that the tokenizer would not have chosen
            ids = student.convert_tokens_to_ids(list(byte_level().tokenize(text)))
        tokens, places = both.read(ids)
        assert teacher.decode(tokens) == text

        def bytes_before(tokenizer: PreTrainedTokenizerFast, own: Sequence[int], place: int) -> int:
            return sum(sum(map(len, tokenizer.convert_ids_to_tokens([each]))) for each in own[:place])

        expected = {
            place: at
            for place in range(len(ids))
            for at in range(len(tokens))
            if at and bytes_before(student, ids, place) == bytes_before(teacher, tokens, at)
        }
        assert places == expected


def test_bytes_that_are_no_text_end_it() -> None:
    student, teacher = byte_level(), byte_level(first=3, end="<stop>")
    half = student.encode("\u00e9")[:1]
    tokens, places = aligned(student, teacher).read([*student.encode("ab"), *half, student.eos_token_id])
    assert teacher.convert_ids_to_tokens(tokens) == ["a", "b"] and places == {1: 1}
    tokens, places = aligned(student, teacher).read([*student.encode("ab"), 10_000, *student.encode("c")])
    assert teacher.convert_ids_to_tokens(tokens) == ["a", "b"] and places == {1: 1}


def test_a_special_token_that_the_teacher_lacks() -> None:
    student, teacher = byte_level(), byte_level(end="<stop>")
    student.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    ids = [*student.encode("a"), student.convert_tokens_to_ids("<tool>")]
    with raises(DataError, re.compile("teacher"), found=re.compile("<tool>")):
        aligned(student, teacher).read(ids)
    teacher.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokens, places = aligned(student, teacher).read(ids)
    assert teacher.convert_ids_to_tokens(tokens) == ["a", "<tool>"] and places == {1: 1}


def test_a_special_token_that_stands_in_a_text_is_text() -> None:
    student, teacher = byte_level(), byte_level(end="<stop>")
    ids = student.encode("<stop>", add_special_tokens=False)
    tokens, _ = aligned(student, teacher).read(ids)
    assert len(tokens) == len("<stop>") and teacher.eos_token_id not in tokens


def test_a_teacher_that_changes_the_text() -> None:
    teacher = sentencepiece(*"abc\u2581")
    teacher.backend_tokenizer.normalizer = normalizers.Lowercase()
    with raises(DataError, re.compile("teacher"), found=re.compile("A")):
        student = byte_level()
        aligned(student, teacher).read(student.encode("A"))
