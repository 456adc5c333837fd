# SPDX-License-Identifier: Apache-2.0
"""The order in which bodies are read, and long ones that are refused before they cost anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.data.chat import as_text, encode_rendered
from whet.errors import DataError
from whet.models.load import load_tokenizer, stop_token_ids
from whet.plugins.serving import bodies
from whet.plugins.serving.app import LONG_BYTES, ShortestFirst
from whet.plugins.serving.bodies import ApiError, BodyReader


def test_the_shortest_come_first_and_long_ones_leave_a_thread() -> None:
    """Two threads: of three long bodies one runs, so that every short one finds a thread, the shortest first."""
    done, gate, first = list[str](), threading.Event(), threading.Event()

    def work(name: str, wait: threading.Event | None = None) -> Callable[[], None]:
        def run() -> None:
            if wait is not None:
                assert wait.wait(20)
            done.append(name)

        return run

    async def main() -> None:
        reading = ShortestFirst(threads=2)
        long = [asyncio.create_task(reading.run(LONG_BYTES + 10 - i, work(f"long {i}", gate))) for i in range(3)]
        busy = asyncio.create_task(reading.run(1, work("busy", first)))  # the other thread
        await asyncio.sleep(0.05)
        gone = asyncio.create_task(reading.run(3, work("gone")))
        short = [asyncio.create_task(reading.run(size, work(f"short {size}"))) for size in (900, 30, 200, 5)]
        await asyncio.sleep(0.05)
        gone.cancel()
        first.set()
        await asyncio.gather(busy, *short)
        assert done == ["busy", "short 5", "short 30", "short 200", "short 900"]
        gate.set()
        await asyncio.gather(*long)
        assert done[5:] == ["long 0", "long 2", "long 1"]  # the first had begun; then the shorter one

        def fail() -> None:
            raise ValueError("no")

        for _ in range(5):  # a failure gives its thread back
            with pytest.raises(ValueError):
                await reading.run(LONG_BYTES + 1, fail)
        await asyncio.gather(*(reading.run(1, work("end")) for _ in range(4)))

    asyncio.run(main())


@pytest.fixture
def reader(qwen25_folder: Path) -> BodyReader:
    tokenizer = load_tokenizer(qwen25_folder)
    return BodyReader(
        "m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, tokenizer.vocab_size, 100, most_samples=64
    )


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": each} for each in contents], **more}


TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 9000}}
LARGE: dict[str, dict[str, Any]] = {
    "one text": chat("a" * 8193),
    "a text of many parts": chat([{"type": "text", "text": "ab"}] * 4097),
    "many messages": chat(*["a"] * 9000),
    "empty messages": chat(*[""] * 9000),
    "empty parts": chat([{"type": "text", "text": ""}] * 9000),
    "a tool": chat("a", tools=[TOOL]),
    "arguments": {"model": "m", "messages": [{"role": "assistant", "content": "", "tool_calls": [{"a": "b" * 8193}]}]},
    "keywords of the template": chat("a", chat_template_kwargs={"a": ["b" * 8193]}),
    "a name": {"model": "m", "messages": [{"role": "user", "content": "a", "name": "b" * 8193}]},
    "a key": {"model": "m", "messages": [{"role": "user", "content": "a", "b" * 8193: 1}]},
    "a prompt": {"model": "m", "prompt": "a" * 8193},
    "one of two prompts": {"model": "m", "prompt": ["a", "b" * 8193]},
}
MANY: dict[str, dict[str, Any]] = {
    "prompts": {"model": "m", "prompt": ["a"] * 65},
    "prompts of ids": {"model": "m", "prompt": [[1]] * 65},
    "samples of prompts": {"model": "m", "prompt": ["a"] * 22, "n": 3},
    "samples": chat("a", n=65),
}


@pytest.mark.parametrize("name", [*LARGE, *MANY])
def test_what_is_too_large_is_refused_before_it_is_encoded(
    name: str, reader: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("it was rendered or encoded")

    for each in ("encode_texts", "encode_rendered", "render_chat"):
        monkeypatch.setattr(bodies, each, no)
    body = (LARGE | MANY)[name]
    with pytest.raises(ApiError) as refused:
        (reader.chat if "messages" in body else reader.text)(body)
    assert refused.value.status == 400
    if name in MANY:
        assert "64" in refused.value.message and refused.value.param == "n"
    else:
        assert (
            refused.value.code == "context_length_exceeded"
            and f"{512 * bodies.CHARACTERS_PER_TOKEN:,}" in refused.value.message
        )


def test_what_the_context_may_hold_is_read(reader: BodyReader) -> None:
    assert (
        reader.text({"model": "m", "prompt": ["a"] * 64}).prompts
        == (reader.text({"model": "m", "prompt": "a"}).prompts[0],) * 64
    )
    with pytest.raises(ApiError) as refused:  # the tokens are counted, as before
        reader.chat(chat("a b " * 500))
    assert "tokens" in refused.value.message


def test_a_text_of_control_tokens_is_encoded_in_one_go(qwen25_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as one part after the other, in a fraction of the time."""
    tokenizer = load_tokenizer(qwen25_folder)
    text = as_text(tokenizer, "x<|im_end|>y<|im_end|><|im_start|> z" * 3, {})
    assert encode_rendered(tokenizer, [text]) == [ids_slowly(tokenizer, text)]
    hostile = as_text(tokenizer, "<|im_end|>" * 20_000, {})
    started = time.process_time()
    [found] = encode_rendered(tokenizer, [hostile])
    assert time.process_time() - started < 3.0
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in found
    assert tokenizer.decode(found) == "<|im_end|>" * 20_000


def ids_slowly(tokenizer: Any, text: str) -> list[int]:
    """Part after part, each behind a line break."""
    from whet.data.chat import _MARK

    first, *rest = text.split(_MARK)
    ids = list(tokenizer(first, add_special_tokens=False)["input_ids"])
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for part in rest:
        after = tokenizer(f"\n{part}", add_special_tokens=False)["input_ids"]
        assert after[: len(line_break)] == line_break
        ids += after[len(line_break) :]
    return ids


def test_a_broken_text_is_still_named(qwen25_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen25_folder)
    with pytest.raises(DataError):
        encode_rendered(tokenizer, ["a\ud800"])
