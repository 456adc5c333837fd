# SPDX-License-Identifier: Apache-2.0
"""Stop strings against decoding the whole answer after every token."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from whet.errors import EngineError
from whet.models.load import load_tokenizer
from whet.rollout.hf import HFEngine
from whet.rollout.protocol import Request, SamplingParams
from whet.rollout.stop_strings import KEPT, LastStops, StopStrings

TEXT = "The answer is 42. Größe: 7 €, 🙂🙃 done.\n\nObservation: 東京 </tool_call>\nnext one"


@pytest.fixture(scope="module")
def byte_level(qwen25_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(qwen25_folder)


def first_end(strings: tuple[str, ...], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, str] | None:
    """The slow way: how many tokens it takes until the text of all contains a string, and the first one in the text."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if any(string in text for string in strings):
            return count, min((s for s in strings if s in text), key=text.find)
    return None


def found_end(strings: tuple[str, ...], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, str] | None:
    stops = StopStrings(strings, tokenizer)
    for count in range(1, len(ids) + 1):
        string = stops.found(ids[count - 1], torch.tensor(ids[:count]))
        if string is not None:
            return count, string
    return None


@pytest.mark.parametrize("seed", range(60))
def test_any_part_of_a_text_is_found_where_it_ends(byte_level: PreTrainedTokenizerBase, seed: int) -> None:
    draw = random.Random(seed)
    special = sorted(byte_level.added_tokens_decoder)
    # Single bytes, whole tokens and special tokens mixed: more ways to write a text than the tokenizer has.
    ids: list[int] = []
    for letter in TEXT * 2:
        ids += byte_level.encode(letter)
        ids += [draw.choice(special)] * draw.randint(0, 3) if draw.random() < 0.1 else []
    ids = byte_level.encode(TEXT) + ids if seed % 2 else ids
    start = draw.randrange(len(TEXT) - 1)
    strings = (TEXT[start : start + draw.randint(1, 12)], TEXT[::-1][start : start + 3], "Z")
    expected = first_end(strings, ids, byte_level)
    assert expected is not None
    assert found_end(strings, ids, byte_level) == expected


@pytest.mark.parametrize("seed", range(30))
def test_rubbish_is_read_as_the_tokenizer_reads_it(byte_level: PreTrainedTokenizerBase, seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(len(byte_level) + 5) for _ in range(60)]  # broken characters, tokens that do not exist
    text = byte_level.decode(ids, skip_special_tokens=True)
    start = draw.randrange(len(text) - 3)
    strings = (text[start : start + 2].replace("\N{REPLACEMENT CHARACTER}", "e"), text[-1])
    assert found_end(strings, ids, byte_level) == first_end(strings, ids, byte_level)


def test_of_two_the_first_in_the_text_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("1+2=3")
    assert found_end(("3", "2=3"), ids, tokenizer) == (5, "2=3")
    assert found_end(("4",), ids, tokenizer) is None


def test_a_piece_with_a_space_before_it(tmp_path: Path) -> None:
    """As SentencePiece writes: the decoder leaves out the space before the first piece."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁a", "▁", "b", "▁b", "<0xE2>", "<0x82>", "<0xAC>"]
    plain = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    assert tokenizer.decode([1, 4, 3]) == "a bb"
    for strings in ((" b",), ("a b",), (" bb",), ("€",), ("b€",), ("b ",), ("a",)):
        for ids in ([4, 1, 4, 3, 2, 5, 6, 7], [1, 3, 2, 3, 4, 3, 5, 6, 7, 2, 4]):
            assert found_end(strings, ids, tokenizer) == first_end(strings, ids, tokenizer), strings


def test_only_who_has_stop_strings_needs_a_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = Request("", (1,), SamplingParams(4), 0)
    asking = Request("", (1,), SamplingParams(4, stop=("7",)), 0)
    loads = 0

    def load() -> PreTrainedTokenizerBase:
        nonlocal loads
        loads += 1
        return tokenizer

    engine = HFEngine(load_tokenizer=load)
    assert engine.stops_of(plain) is None and loads == 0
    assert engine.stops_of(asking) is engine.stops_of(asking) is not None and loads == 1
    with raises(EngineError, key=re.compile("^stop strings "), found=("7",)):
        HFEngine().stops_of(asking)


def test_only_the_last_stop_strings_are_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    kept = LastStops()
    first, second = (kept.of((each,), lambda: tokenizer) for each in "ab")
    for number in range(KEPT - 2):
        kept.of((f"{number}",), lambda: tokenizer)
    assert kept.of(("a",), lambda: tokenizer) is first
    kept.of(("new",), lambda: tokenizer)
    assert kept.of(("a",), lambda: tokenizer) is first and kept.of(("b",), lambda: tokenizer) is not second
    assert len(kept._kept) == KEPT and kept.of((), lambda: tokenizer) is None
