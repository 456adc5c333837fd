# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from whet.models.load import load_tokenizer
from whet.plugins.serving.answers import BROKEN, StopCut, TextStream, TokenTexts

TEXT = "a bé — 你好 👩‍👩‍👧 naïve\n  two"


@pytest.fixture(params=["model_folder", "qwen25_folder"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return load_tokenizer(request.getfixturevalue(request.param))


def parts_of(draw: random.Random, length: int) -> list[int]:
    """Ends of random parts of `length` things."""
    return [*sorted(draw.randrange(length + 1) for _ in range(draw.randrange(length + 1))), length]


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_the_whole_text(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(len(tokenizer)) for _ in range(60)]
    stream, parts, start = TextStream(tokenizer), [], 0
    for end in parts_of(draw, len(ids)):
        parts.append(stream.add(ids[start:end], is_last=end == len(ids)))
        start = end
        if end == len(ids):
            break
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_half_character_is_given(qwen25_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen25_folder)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)  # several tokens a character
    stream = TextStream(tokenizer)
    parts = [stream.add([token]) for token in ids]
    assert "".join(parts) == TEXT and not any(BROKEN in part for part in parts)
    assert stream.add((), is_last=True) == ""
    cut = TextStream(tokenizer)
    assert cut.add(ids[:2]) + cut.add(tokenizer.encode("👩")[:2]) == tokenizer.decode(ids[:2])
    assert cut.add((), is_last=True) == BROKEN  # the response ended inside the character


def test_a_long_response_is_not_decoded_again(qwen25_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen25_folder)
    stream = TextStream(tokenizer)
    for token in tokenizer.encode(TEXT * 20):
        stream.add([token])
        assert len(stream._ids) < 16


def test_bytes_of_tokens_are_those_of_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = TEXT if len(tokenizer) > 256 else "a b<tool_call>12"
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text)
    assert b"".join(bytes(texts[token].utf8) for token in ids) == text.encode()
    assert all(texts[token].text == bytes(texts[token].utf8).decode(errors="replace") for token in ids)
    assert texts[tokenizer.eos_token_id].text == tokenizer.eos_token
    assert texts[10**6] == ("", ())


@pytest.mark.parametrize("seed", range(20))
def test_text_is_cut_before_the_first_stop_string(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("ab\n") for _ in range(40))
    strings = ["".join(draw.choice("ab\n") for _ in range(draw.randint(1, 6))) for _ in range(2)]
    places = [text.find(string) for string in strings if string in text]
    cut, start, found = StopCut(strings), 0, ""
    for end in parts_of(draw, len(text)):
        found += cut.add(text[start:end])
        start = end
    assert found + cut.add("", is_last=True) == text[: min(places, default=len(text))]
