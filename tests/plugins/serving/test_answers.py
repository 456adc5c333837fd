# SPDX-License-Identifier: Apache-2.0
"""Tool calls of every format in text that comes in any parts, with marks that are text or tokens of their own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from whet.environments.calls import Call, parts_of
from whet.models.load import load_tokenizer
from whet.plugins.serving.answers import Piece, ResponseChoice, ToolText
from whet.plugins.serving.bodies import ApiError, ChatBody, ClientRequest, ToolsAsked
from whet.registry import TOOL_PARSERS
from whet.rollout.protocol import SamplingParams

PARSERS = [name for name in TOOL_PARSERS.names() if ":" not in name]
SCHEMAS: dict[str, Any] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}, "c": True}},
    "say": {"properties": {"text": {"type": "string"}}},
}
ADD, SAY = '{"a": 1, "b": 2}', '{"text": "x > y; \\"}\\" \\u00e9"}'
XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
# One call of each format, and how a second one follows it.
CALLS = {
    "hermes": (f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', "\n"),
    "qwen3_coder": (f"<tool_call>\n{XML}\n</tool_call>", "\n"),
    "llama3_json": (f'{{"name": "add", "parameters": {ADD}}}', "; "),
    "gpt-oss": (f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}<|call|>", ""),
    "mistral": (f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}]', None),
    "phi": (f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}]<|/tool_call|>', "\n"),
    "mistral named": (f"[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{ADD}", ""),
    "python_tag": ("<|python_tag|>add(a=1, b=2)", None),
}
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>", "<|eom_id|>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "phi": ("<|tool_call|>", "<|/tool_call|>"),
    "python_tag": ("<|python_tag|>", "<|eom_id|>"),
}
Parts = Sequence[tuple[str, bool]]


def asking(parser: str, most_calls: int | None = None) -> ToolsAsked:
    return ToolsAsked(parser, SCHEMAS, most_calls)


def split(asked: ToolsAsked, parts: Parts) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """The text, the calls, and the text as it was given, of parts of which nothing comes after the last."""
    tools, texts, calls = ToolText(asked), list[str](), []
    for part in parts:
        text, new = tools.add([part])
        texts.append(text)
        calls += new
    text, new = tools.add([], is_last=True)
    texts.append(text)
    assert len({call.id for call in calls + new}) == len(calls + new)
    return "".join(texts), [(call.name, json.loads(call.arguments)) for call in calls + new], texts


def whole(asked: ToolsAsked, parts: Parts) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of all parts at once."""
    text, calls = ToolText(asked).add(parts, is_last=True)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def cut(draw: random.Random, parts: Parts) -> list[tuple[str, bool]]:
    """The parts in smaller ones; marks stay whole."""
    found: list[tuple[str, bool]] = []
    for text, is_mark in parts:
        ends = [len(text)] if is_mark else sorted({draw.randrange(len(text) + 1) for _ in range(len(text))})
        for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
            found.append((text[start:end], is_mark))
    return found


@pytest.mark.parametrize("form", CALLS)
def test_calls_of_every_format(form: str) -> None:
    call, between = CALLS[form]
    parser = form.split()[0]
    text, calls, texts = split(asking(parser), [(each, False) for each in f"Let me see.\n\n{call}"])
    assert (text, calls) == ("Let me see.", [("add", {"a": 1, "b": 2})])
    # text before a call comes at once: of what was given, no letter waits for another
    assert "".join(texts[: len("Let me see.")]) in ("Let me see.", "Let me see")
    if between is not None:
        text, calls, _ = split(asking(parser), [(each, False) for each in f"{call}{between}{call}"])
        assert (text, calls) == ("", [("add", {"a": 1, "b": 2})] * 2)
        text, calls, _ = split(asking(parser, 1), [(each, False) for each in f"{call}{between}{call}"])
        assert (text, calls) == ("", [("add", {"a": 1, "b": 2})])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "gpt-oss", "phi"])
def test_a_call_is_given_when_it_is_whole(parser: str) -> None:
    call, _ = CALLS[parser]
    tools = ToolText(asking(parser))
    assert tools.add([(call[:-1], False)]) == ("", [])
    _, [found] = tools.add([(call[-1], False)])
    assert found.name == "add" and re.fullmatch("[0-9a-f]{9}", found.id)
    _, more = tools.add([(call, False)])
    assert [each.name for each in more] == ["add"] and tools.add([], is_last=True) == ("", [])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "phi", "mistral", "llama3_json"])
@pytest.mark.parametrize("is_thinking", [False, True])  # whether the prompt has the opening tag
def test_a_call_in_a_thought_is_text(parser: str, is_thinking: bool) -> None:
    call = CALLS[parser][0]
    thought = f"{'' if is_thinking else '<think>'}I could\n{call}\nbut no.</think>"
    tools, given, calls = ToolText(asking(parser), is_thinking=is_thinking), "", []
    for letter in f"{thought}\n{call}":
        text, new = tools.add([(letter, False)])
        given, calls = given + text, calls + new
    text, new = tools.add([], is_last=True)
    assert given + text == thought and [each.name for each in calls + new] == ["add"]
    unclosed = ToolText(asking(parser), is_thinking=is_thinking)
    assert unclosed.add([(thought.removesuffix("</think>"), False)], is_last=True) == (thought[:-8], [])


# Pieces that calls are made of, in any order.
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"', "}", "{", "[", "]"),
    *("<function=add>", "</function>", "<parameter=a>", "</parameter>", "\n", ";", " ", '"', "é", "to=", "\n{ ", "{}"),
    *("<|python_tag|>", "add(a=1)", "add(a={1})", "x = 1", "(", ")", "<|eom_id|>", "</s>", "<", "[TOOL", "a"),
    *("<|channel|>", " to=functions.add", "<|constrain|>json", "<|message|>", "<|call|>", "<|start|>", "<|end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]add", "[CALL_ID]a1", "[ARGS]", "[ARGS]{}", '[{"name": "add"},'),
    *("[TOOL_CALLS]", '[{"name": "add"}]', '[{"name": "add"}, 3]', '"parameters": ', '{"a": 1}', "1e999", "NaN"),
    *(',"name":', "<think>", "</think>", *(call for call, _ in CALLS.values())),
]


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), max_size=12),
    seed=st.integers(0, 99),
    most=st.sampled_from([None, 1]),
)
def test_any_parts_are_what_the_whole_is(
    parser: str, pieces: list[tuple[str, bool]], seed: int, most: int | None
) -> None:
    special = {*MARKS[parser], "</s>", "<|eom_id|>"}
    parts = [(text, is_mark and text in special) for text, is_mark in pieces]
    text, calls = whole(asking(parser, most), parts)
    for each in range(3):
        found, found_calls, _ = split(asking(parser, most), cut(random.Random(seed * 3 + each), parts))
        assert (found, found_calls) == (text, calls)


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_calls_are_those_that_environments_read(parser: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    content, calls = whole(asking(parser), [(text, False)])
    parts = list(parts_of(parser, text, SCHEMAS, is_whole=False))
    read = [part for part in parts if isinstance(part, Call)]
    if not read:
        assert (content, calls) == (text, [])
    try:
        wanted = [(call.name, json.loads(json.dumps(dict(call.arguments), allow_nan=False))) for call in read]
    except (TypeError, ValueError):
        return  # arguments that are no JSON: the call stays text
    if all(call.error is None for call in read):
        assert calls == wanted


@pytest.mark.parametrize(
    ("parser", "text", "content", "names"),
    [
        ("hermes", "plain < text <tool", "plain < text <tool", []),
        ("hermes", "{call} and\nthen", "and\nthen", ["add"]),
        ("hermes", "  a\n {call} \n{call}\n", "  a", ["add", "add"]),
        ("hermes", "<tool_call>{broken}</tool_call> after ", "<tool_call>{broken}</tool_call> after ", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "go"}', '<tool_call>{"name": "go"}', []),  # the parser wants both tags
        ("hermes", '<tool_call>{"name": "go", "arguments": {"a": NaN}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"a": "\\ud83d"}}</tool_call>', None, []),
        ("llama3_json", "int f() {\n  g();\n} \\frac{a}", "int f() {\n  g();\n} \\frac{a}", []),
        ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
        ("llama3_json", "Now; {call}; {call}", "Now", ["add", "add"]),
        ("llama3_json", '{call}\n{"name": "add", ', '{"name": "add", ', ["add"]),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}, 3]', '[TOOL_CALLS] [{"name": "add"}, 3]', []),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}, {"name": "say"}]', "", ["add", "say"]),
        ("mistral", "{call} more", None, []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]say[ARGS]{"text": "x"}', "", ["add", "say"]),
        ("mistral", "Hm. [TOOL_CALLS]add[ARGS]{} [TOOL_CALLS]say[ARGS]{", "Hm.[TOOL_CALLS]say[ARGS]{", ["add"]),
        ("phi", "{call} and\n{call}", "and", ["add", "add"]),
        ("phi", '<|tool_call|>[{"name": "add"}, 3]<|/tool_call|>', None, []),
        ("hermes", 'I call it: {"name": "add", "arguments": {"a": 1}}', None, []),
        ("llama3_json", 'So {"name": "add", "parameters": {}}', None, []),
        ("llama3_json", '{"name": "Ada", "age": 36}', None, []),
        ("python_tag", "<|python_tag|>say(text={1})", "<|python_tag|>say(text={1})", []),  # a set
        ("gpt-oss", "Hm. {call}", "Hm.", ["add"]),
        ("gpt-oss", "<|channel|>final<|message|>Go to=5", "<|channel|>final<|message|>Go to=5", []),
    ],
)
def test_what_stays_text(parser: str, text: str, content: str | None, names: list[str]) -> None:
    text = text.replace("{call}", CALLS[parser][0])
    for seed in range(10):
        found, calls, _ = split(asking(parser), cut(random.Random(seed), [(text, False)]))
        assert (found, [name for name, _ in calls]) == (text if content is None else content, names)


def test_text_comes_at_once_where_no_call_can_begin() -> None:
    tools = ToolText(asking("llama3_json"))
    parts = ["Hi", " there:\n", "{", "\n return", " x", ";", "}\n", '{"', "name"]
    given = [tools.add([(part, False)])[0] for part in parts]
    assert given == ["Hi", " there:", "", "\n{\n return", " x", "", ";}", "", ""]
    tools = ToolText(asking("gpt-oss"))
    parts = ["<|channel|>", "final", "<|message|>", "We", " go"]
    given = [tools.add([(part, part.startswith("<|"))])[0] for part in parts]
    assert given == ["", "", "final", "We", " go"]


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer in the way of SentencePiece, as Mistral's and Llama 2's: letters, and a space at the first word."""
    letters = sorted({*"".join(call for call, _ in CALLS.values()), *"ILetms3.", "\u2581", "\n"})
    bpe = models.BPE({"<unk>": 0, **{letter: 1 + at for at, letter in enumerate(letters)}}, [], unk_token="<unk>")
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("parser", PARSERS)
def test_marks_that_are_tokens(parser: str, are_special: bool, kind: str, qwen25_folder: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = metaspace() if kind == "metaspace" else deepcopy(load_tokenizer(qwen25_folder))
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=are_special) for mark in MARKS[parser]])
    call, _ = CALLS[f"{parser} named" if kind == "byte-level" and parser == "mistral" else parser]
    broken = call.replace("{", "{{").replace("</function>", "").replace("(", "((").removesuffix("<|call|>")
    for text, content, num_calls in (
        (f"Let me see.\n{call}", "Let me see.", 1),
        (f"Let me see.\n{broken}", None, 0),
        ("It is 3. ", "It is 3. ", 0),
    ):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        plain, marked = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(ids[:-1])
        if are_special:
            assert not any(mark in plain for mark in MARKS[parser])
        for seed in range(6):
            pieces = sampled(tokenizer, ids, asking(parser), seed)
            found, calls = "".join(piece.text for piece in pieces), [call for piece in pieces for call in piece.calls]
            assert (found, len(calls)) == (marked if content is None else content, num_calls)
            assert all(json.loads(each.arguments) == {"a": 1, "b": 2} for each in calls)
            assert pieces[-1].finish_reason == ("tool_calls" if calls else "stop")
            assert [token for piece in pieces for token in piece.token_ids] == ids
            assert "".join(piece.text for piece in sampled(tokenizer, ids, None, seed)) == plain


def test_a_stop_string_ends_calls_too(qwen25_folder: Path) -> None:
    tokenizer = deepcopy(load_tokenizer(qwen25_folder))
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS["hermes"]])
    call, _ = CALLS["hermes"]
    ids = tokenizer.encode(f"{call}So STOP {call}")
    for seed in range(6):
        pieces = sampled(tokenizer, ids, asking("hermes"), seed, stop=("STOP", "}x"))
        assert "".join(piece.text for piece in pieces) == "So " and sum(len(piece.calls) for piece in pieces) == 1


def sampled(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    asked: ToolsAsked | None,
    seed: int,
    stop: tuple[str, ...] = (),
) -> list[Piece]:
    """The pieces of a response whose tokens come in random parts, with seed 0 in one."""
    draw = random.Random(seed)
    ends = [] if seed == 0 else sorted(draw.randrange(len(ids)) for _ in range(draw.randrange(len(ids))))
    params = SamplingParams(100, stop_token_ids=(int(tokenizer.eos_token_id),), stop=stop)
    body = ChatBody(model="m", messages=[{}])
    sample = ResponseChoice(0, ClientRequest(body, ((1,),), (params,), asked), tokenizer)
    pieces = [
        sample.add(ids[start:end], [0.0] * (end - start), ()) for start, end in zip([0, *ends], ends, strict=False)
    ]
    rest = ids[ends[-1] if ends else 0 :]
    return [*pieces, sample.add(rest, [0.0] * len(rest), (), "stop")]


def test_a_parser_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(text, schemas):\n    yield 'other'\n")
    name = f"{tmp_path}/mine.py:other"
    with pytest.raises(ApiError, match=r"mine\.py:other .*ValueError: substring") as error:
        ToolText(asking(name)).add([("text", False)], is_last=True)
    assert (error.value.status, error.value.code) == (500, "tool_parser_failed")


def test_a_parser_with_marks_of_its_own(tmp_path: Path) -> None:
    """Without marks text waits for the end."""
    source = (Path(__file__).parents[3] / "examples" / "extending" / "tool_parser.py").read_text()
    marks = '@register_tool_parser("lines_of_a_test", begin=("!",), end=("\\n",))\ndef lines'
    (tmp_path / "marked.py").write_text("from whet import register_tool_parser\n" + source.replace("def lines", marks))
    (tmp_path / "plain.py").write_text(source)
    text = 'I add! yes\n!add {"a": 1}\nDone.'
    for name, first in (("marked", "I add"), ("plain", "")):
        found, calls, texts = split(asking(f"{tmp_path}/{name}.py:lines"), [(each, False) for each in text])
        assert (found, calls) == ("I add! yesDone.", [("add", {"a": 1})])
        assert "".join(texts[: len("I add! ")]) == first
