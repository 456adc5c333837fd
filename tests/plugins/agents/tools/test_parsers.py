# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls: each format as published, mistakes of models, and any text at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from whet.plugins.agents.tools.parsers import CONTROL, FORMS, Call, parse, parser_of, parts_of
from whet.plugins.agents.tools.sources import checked, schema_of
from whet.registry import TOOL_PARSERS

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "say": {"properties": {"text": {"type": "string"}, "many": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    "python": {"properties": {"code": {"type": "string"}}},
}
PARSERS = TOOL_PARSERS.names()
FORMATS = [*PARSERS, "mistral named", "mistral with ids", "phi one"]  # the parser, and another form that it reads


def told(parser: str, text: str) -> list[tuple[str, dict[str, Any]] | str]:
    """The calls of a text: name and arguments, or the error."""
    return [call.error or (call.name, dict(call.arguments)) for call in parse(parser.split()[0], text, SCHEMAS).calls]


def written(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of the format writes them."""
    match parser:
        case "hermes":
            each = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in each)
        case "llama3_json":
            return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)
        case "mistral":
            return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": given} for name, given in calls]) + "</s>"
        case "mistral named" | "mistral with ids":
            uid = "[CALL_ID]a1B2c3D4e" if parser.endswith("ids") else ""
            return "".join(f"[TOOL_CALLS]{name}{uid}[ARGS]{json.dumps(given)}" for name, given in calls) + "</s>"
        case "phi":
            listed = json.dumps([{"name": name, "arguments": given} for name, given in calls])
            return f"<|tool_call|>{listed}<|/tool_call|><|end|>"
        case "phi one":
            each = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
            return "\n".join(f"<|tool_call|>{text}<|/tool_call|>" for text in each)
        case "qwen3_coder":
            return "\n".join(_as_xml(name, given) for name, given in calls)
        case "gpt-oss":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
                for name, given in calls
            )
    shown = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return "<|python_tag|>[" + ", ".join(shown) + "]<|eom_id|>"


def _as_xml(name: str, given: dict[str, Any]) -> str:
    lines = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in given.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


@pytest.mark.parametrize("parser", FORMATS)
def test_two_calls_as_the_format_writes_them(parser: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("add", {"a": 2, "b": -3.5}), ("say", {"text": '1 < 2\nand "é"'})]
    assert told(parser, written(parser, calls)) == calls
    assert told(parser, "No call is needed: 2 + 3 = 5.") == []


WORDS = st.text("ab 1{}<>[]\"'\\\n\té=,;/|", max_size=20)
ARGUMENTS = st.one_of(
    st.fixed_dictionaries({"text": WORDS, "many": st.none() | st.integers(-5, 5)}).map(lambda given: ("say", given)),
    st.fixed_dictionaries({"a": st.integers(), "b": st.floats(-9, 9)}).map(lambda given: ("add", given)),
)


@pytest.mark.parametrize("parser", [parser for parser in FORMATS if parser != "qwen3_coder"])
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_calls_come_back_as_they_were_written(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert told(parser, written(parser, calls)) == calls


@settings(max_examples=60, deadline=None)
@given(text=st.text("ab 1{}[]\"'\\\té=,;", max_size=20), many=st.none() | st.integers())
def test_values_of_xml_come_back_by_their_schema(text: str, many: int | None) -> None:
    calls = [("say", {"text": text, "many": many})]
    assert told("qwen3_coder", written("qwen3_coder", calls)) == calls


# Pieces that calls are made of, in any order: far likelier than random letters to reach every branch.
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"', "}", "{", "[", "]"),
    *("<function=add>", "</function>", "<parameter=a>", "</parameter>", "\n", ";", " ", '"', "é", "\ud83d", "\x00"),
    *("<|python_tag|>", "add(a=1)", "add(1, 2)", "add(*a)", "add(**a)", "x = 1", "(", ")", "<|eom_id|>", "</s>"),
    *("<|channel|>", "commentary to=functions.add", "<|constrain|>json", "<|message|>", "<|call|>", "<|start|>"),
    *(
        "<|tool_call|>",
        "<|/tool_call|>",
        "[TOOL_CALLS]add",
        "[CALL_ID]a1",
        "[ARGS]",
        '"arguments": {',
        "'name': 'add'",
        "```",
    ),
    *(
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        '"parameters": ',
        '{"name": 3}',
        "null",
        "1e999",
        '{"a": 1}{"a": 1}',
        '{"type": "function",',
        "[" * 3000,
        "(" * 300,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=10).map("".join))
def test_no_text_raises_and_none_is_lost(parser: str, text: str) -> None:
    parts = list(TOOL_PARSERS[parser].load()(text, SCHEMAS))
    assert "".join(part.text if isinstance(part, Call) else part for part in parts) == text
    parsed = parse(parser, text, SCHEMAS)
    assert all(isinstance(call.arguments, dict) for call in parsed.calls)
    assert not CONTROL.search(parsed.content) or CONTROL.search(CONTROL.sub("", text))


FORM = 'expected one object {"name": ..., "arguments": {...}} for each call'
ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "say", "arguments": {"text": "a\nb"}}', ("say", {"text": "a\nb"})),  # a literal line break
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ("add", {"a": 1})),  # JSON inside of JSON
        ('{"name": "add"}', ("add", {})),
        ('{"name": "add", "parameters": {"a": 1}}', ("add", {"a": 1})),
        ('{"name": "add", "arguments": {"a": 1}', f"the call is not valid JSON; {FORM}"),  # without its last brace
        (f"{ADD}{ADD}", f"there is text after the JSON of the call; {FORM}"),
        (f"{ADD}\n{ADD}", f"there is text after the JSON of the call; {FORM}"),
        ('{"name": "add", "arguments": [1]}', f"arguments is no JSON object; {FORM}"),
        ('{"arguments": {"a": 1}}', f"the JSON has no name of a tool; {FORM}"),
        ("add(1)", f"the call is not valid JSON; {FORM}"),
        ("", f"the call is not valid JSON; {FORM}"),
    ],
)
def test_what_hermes_calls_may_look_like(body: str, said: Any) -> None:
    assert told("hermes", f"Let me see.\n<tool_call>\n{body}\n</tool_call>") == [said]


def test_a_missing_tag_is_an_error_and_no_answer() -> None:
    error = "a call stands between <tool_call> and </tool_call>; a tag is missing"
    assert (
        told("phi", ADD + "<|/tool_call|>")
        == told("phi", f"<|tool_call|>{ADD}")
        == ["a call stands between <|tool_call|> and <|/tool_call|>; a tag is missing"]
    )
    assert told("hermes", f"So: {ADD}</tool_call>") == [error]
    assert told("hermes", f"<tool_call>{ADD}") == [error]
    assert told("hermes", f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>") == [error, ("add", {"a": 1})]
    parsed = parse("hermes", f"First\n<tool_call>{ADD}</tool_call>\nthen<|im_end|>", SCHEMAS)
    assert parsed.content == "First\n\nthen" and parsed.calls[0].text == f"<tool_call>{ADD}</tool_call>"


OTHER = '{"name": "add", "parameters": {"a": 1}}'
NOT_JSON, NOT_SO = "the call is not valid JSON", "the call is not in the format of calls"


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        (f"I call it: {ADD}", "I call it:", [NOT_SO]),
        (f"```json {ADD}\n```<|im_end|>", "```json \n```", [NOT_SO]),
        (f"So {ADD} and {OTHER}, then.", "So  and , then.", [NOT_SO] * 2),
        (f"[{ADD}]", "[]", [NOT_SO]),
        ('So {"arguments": {"a": 1}, "name": "add"}', "So", [NOT_SO]),
        ('So {"type": "function", "function": "add", "parameters": {"a": 1}}', "So", [NOT_SO]),
        (f'{{"type": "function", "function": {ADD}}}', '{"type": "function", "function": }', [NOT_SO]),
        (f'So {{"tool_calls": [{ADD}]}}', 'So {"tool_calls": []}', [NOT_SO]),
        ('So {"type": "function", "name": "add", "parameters": {"a": 1}', "So", [NOT_JSON]),
        ("So {'name': 'add', 'arguments': {'a': 1}} is it", "So", [NOT_JSON]),
        ('So {"name": "add", "arguments": {"a": 1', "So", [NOT_JSON]),
        ('{"id": 1, "arguments": {"a": 1}, "name": "add"', "", [NOT_JSON]),
        (f"<think>Maybe {ADD}?</think>Now: {ADD}", f"<think>Maybe {ADD}?</think>Now:", [NOT_SO]),
        # answers
        (f"<think>Maybe {ADD}, or {OTHER[:-1]}?</think>It is 3.", None, []),
        (f"[THINK]Maybe {ADD}[/THINK]It is 3.", None, []),
        (f"<think>Maybe {ADD} then", None, []),
        ('"name": "add" ' + '{"k" ' * 200 + ADD, None, []),  # not looked for behind so much that is broken
        ('The person: {"name": "Ada", "age": 36}', None, []),
        ('{"name": "Ada", "age": 36}', None, []),
        ('{"name": "Ada", "age":', None, []),
        ('So {"name": "Ada", "arguments": {"a": 1}}', None, []),  # no tool
        ('So {"name": "add", "age": 36}', None, []),
        ('So {"a": {"b": "add"}, "arguments": {}}', None, []),
        ('{ "x": 1, the tool has "name": "add"', None, []),
        ("f = {'a': {'name': 3}}; int g() { return 1; }", None, []),
    ],
)  # fmt: skip
def test_json_of_a_call_in_another_place_is_an_error(
    parser: str, text: str, content: str | None, said: list[str]
) -> None:
    found = parse(parser, text, SCHEMAS)
    assert [call.error for call in found.calls] == [f"{each}; expected {FORMS[parser]}" for each in said]
    assert found.content == (text if content is None else content)
    assert all(call.name == "" and call.arguments == {} for call in found.calls)


def test_a_call_of_no_tool_is_an_error_where_it_is_all_the_text() -> None:
    text = '{"name": "subtract", "arguments": {"a": 1}}'
    assert told("hermes", text) == [f"{NOT_SO}; expected {FORMS['hermes']}"]
    assert told("llama3_json", text) == [("subtract", {"a": 1})]  # the format; there is no such tool
    assert [call.text for call in parse("hermes", f"So {text}", {}).calls] == [text]  # no schemas are known
    assert (
        told("gpt-oss", f"<|channel|>analysis<|message|>So {ADD}<|end|><|start|>assistant<|channel|>final<|message|>3")
        == []
    )
    assert len(told("gpt-oss", f"<|channel|>final<|message|>{ADD}<|return|>")) == 1
    call = '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
    tag = "<|start|>assistant<|channel|>final<|message|>a </think> of no thought, as its thoughts are a channel"
    for parser in ("gpt-oss", "whet.plugins.agents.tools.parsers:gpt_oss"):
        assert told(parser, call + tag) == [("add", {"a": 1})]


def test_text_of_a_parser_of_ones_own_may_be_a_call_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(text, schemas):\n    yield text\n")
    [call] = parse(f"{tmp_path}/mine.py:mine", f"So {ADD}", SCHEMAS).calls
    assert call.error == f"{NOT_SO}; expected the format that you were told"


@pytest.mark.parametrize(
    ("parser", "text", "said"),
    [
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>', [("add", {"a": 1})]),
        ("llama3_json", 'I add.\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>', None),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', [("add", {})]),
        ("llama3_json", '{"a": 1} is JSON', []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', None),
        ("mistral", '[TOOL_CALLS] {"name": "add"}', None),
        ("mistral", "[TOOL_CALLS] []", None),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}][TOOL_CALLS]say[ARGS]{"text": "[TOOL_CALLS]"}',
         [("add", {}), ("say", {"text": "[TOOL_CALLS]"})]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', None),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', None),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1} is it', None),
        ("mistral", '[TOOL_CALLS]add[ARGS][1]', None),
        ("mistral", '[TOOL_CALLS][ARGS]{"a": 1}', None),
        ("phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, 3]<|/tool_call|>',
         [("add", {"a": 1}), f"the JSON has no name of a tool; {FORM}"]),
        ("phi", '<|tool_call|>[]<|/tool_call|>', None),
        ("phi", '<|tool_call|>[{"name": "add"}] so<|/tool_call|>', None),
        ("phi", '<|tool_call|>[{"name": "add"}<|/tool_call|>', None),
        ("qwen3_coder", "<function=add>\n<parameter=a>1</parameter>\n</function>", None),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>", None),
        ("gpt-oss", "<|channel|>analysis<|message|>to=functions.add?<|end|><|start|>assistant<|message|>5", []),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant to=functions.add<|channel|>commentary "
            'json<|message|>{"a": 1}<|call|>',
            [("add", {"a": 1})],
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{1}<|call|>", None),
        ("python_tag", '<|python_tag|>add.call(a=1, b=2.5)<|eom_id|>', [("add", {"a": 1, "b": 2.5})]),
        ("python_tag", "<|python_tag|>add(1, b=2)", [("add", {"a": 1, "b": 2})]),
        ("python_tag", "<|python_tag|>print(1)\nx = 2<|eom_id|>", [("python", {"code": "print(1)\nx = 2"})]),
        ("python_tag", "<|python_tag|>add(a=x)", None),
        ("python_tag", "<|python_tag|>add(1, a=1)", None),
    ],
)  # fmt: skip
def test_other_formats(parser: str, text: str, said: list[Any] | None) -> None:
    """None stands for one malformed call."""
    found = parse(parser, text, SCHEMAS)
    if said is None and not text.startswith("I add"):
        assert [call.error is not None for call in found.calls] == [True]
    elif said is not None:
        assert told(parser, text) == said
    else:  # text before the JSON, and a control token after it
        assert (found.content, found.calls[0].name) == ("I add.", "add")


XML = {
    "go": {
        "properties": {
            "city": {"type": "string"},
            "state": {"type": "string"},
            "of": {"type": "object"},
            "list": {"type": "array"},
            "either": {"type": ["object", "string"]},
            "x": {"type": "number"},
        }
    }
}


def xml(inner: str) -> str:
    return f"<tool_call>\n<function=go>\n{inner}\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "inner",
    [
        "<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>",
        "<parameter=city>Dallas<parameter=state>TX</parameter>",
        "<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX",
        "<parameter=city>\nDallas\n<parameter=state>\nTX",
    ],
)
def test_a_parameter_without_its_end_is_an_error_and_spoils_no_other_call(inner: str) -> None:
    good = xml("<parameter=city>\nBern\n</parameter>")
    for text in (xml(inner) + "\n" + good, good + xml(inner), xml(inner) + good + xml(inner)):
        calls = parse("qwen3_coder", text, XML).calls
        assert [dict(call.arguments) for call in calls if not call.error] == [{"city": "Bern"}]
        assert len(calls) == text.count("<tool_call>")


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("of", "{'a': 1, 'b': [True, None]}", {"a": 1, "b": [True, None]}),
        ("of", "{'it': \"it's\"}", {"it": "it's"}),
        ("list", "['a', ('b', 2)]", ["a", ["b", 2]]),
        ("list", "[1, 2,]", [1, 2]),
        ("either", "{'a': 1}", {"a": 1}),
        ("city", "{'a': 1}", "{'a': 1}"),  # a text
        ("of", "{'a', 'b'}", "{'a', 'b'}"),  # JSON has no sets
        ("of", "{'a': f(1)}", "{'a': f(1)}"),
        ("of", "dict(a=1)", "dict(a=1)"),
        ("of", "{" * 3000, "{" * 3000),
        ("list", "'text'", "'text'"),
    ],
)
def test_objects_and_lists_may_be_in_the_spelling_of_python(name: str, written: str, value: Any) -> None:
    [call] = parse("qwen3_coder", xml(f"<parameter={name}>\n{written}\n</parameter>"), XML).calls
    assert call.error is None and call.arguments == {name: value}


TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_call></tool_call>",
    "</tool_call>\n<tool_call>",
    "<|tool_call|>",
    "<|/tool_call|>",
)


@pytest.mark.parametrize("parser", ["hermes", "phi", "phi one", "qwen3_coder"])
@pytest.mark.parametrize("tag", TAGS)
def test_tags_in_a_value_are_text(parser: str, tag: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("say", {"text": f"write {tag} here"}), ("add", {"a": 1, "b": 2.5})]
    text = written(parser, calls)
    assert told(parser, f"First.\n{text}") == calls
    whole = [part for part in parts_of(parser.split()[0], text, SCHEMAS) if isinstance(part, Call)]
    for end in range(len(text)):  # as a server reads it
        parts = parts_of(parser.split()[0], text[:end], SCHEMAS, is_whole=False)
        found = [part for part in parts if isinstance(part, Call) and part.error is None]
        assert [(each.name, each.arguments) for each in found] == [
            (each.name, each.arguments) for each in whole[: len(found)]
        ]


NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e999"]


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize("parser", [parser for parser in FORMATS if parser not in ("qwen3_coder", "python_tag")])
def test_a_number_that_json_does_not_have_is_an_error(parser: str, number: str) -> None:
    text = written(parser, [("add", {"a": [{"b": 12345}]})]).replace("12345", number)
    [call] = parse(parser.split()[0], text, SCHEMAS).calls
    assert call.error is not None and not call.arguments


def test_values_that_json_does_not_have_are_errors_in_every_way(tmp_path: Path) -> None:
    for value in ("1e999", "{1, 2}", "b'x'", "2j"):
        [call] = parse("python_tag", f"<|python_tag|>add(a={value})", SCHEMAS).calls
        assert call.error is not None, value
    [call] = parse("qwen3_coder", xml("<parameter=of>\n{'a': 1e999}\n</parameter>"), XML).calls
    assert call.error is not None
    body = "def mine(text, schemas):\n    yield Call('add', {'a': float('nan')}, text=text)\n"
    (tmp_path / "mine.py").write_text(f"from whet.plugins.agents.tools.parsers import Call\n{body}")
    [call] = parse(f"{tmp_path}/mine.py:mine", "x", SCHEMAS).calls
    assert call.error is not None and call.text == "x"


def test_no_tool_gets_a_number_that_is_not_finite() -> None:
    def add(a: float, b: float | None = None) -> str:
        """Adds."""
        return str(a)

    model = schema_of(add, "add", "here")[1]
    for value in (float("nan"), "NaN", "inf", float("-inf")):
        with pytest.raises(ValueError, match="a"):
            checked(model, {"a": value})
    assert checked(model, {"a": "2.5"}) == {"a": 2.5}


def test_schemas_of_others_may_have_any_form() -> None:
    properties = {"a": {"type": ["integer", "null"]}, "b": True, "c": {"anyOf": None}, "d": {"type": "object"}}
    calls = "".join(f"<parameter={name}>7</parameter>" for name in "abcd")
    text = f"<tool_call><function=add>{calls}</function></tool_call>"
    assert parse("qwen3_coder", text, {"add": {"properties": properties}}).calls[0].arguments == {
        "a": 7,
        "b": "7",
        "c": "7",
        "d": 7,
    }
    assert parse("qwen3_coder", text, {"add": {}}).calls[0].arguments["a"] == "7"


def test_what_separates_calls_is_no_text() -> None:
    found = parse("llama3_json", written("llama3_json", [("add", {"a": 1}), ("add", {"a": 2})]), SCHEMAS)
    assert (found.content, [call.arguments for call in found.calls]) == ("", [{"a": 1}, {"a": 2}])


def test_code_without_an_interpreter_is_malformed() -> None:
    found = parse("python_tag", "<|python_tag|>import os", {"add": SCHEMAS["add"]})
    assert [call.error for call in found.calls] == [
        "no tool runs Python code, and this is no call of a tool; expected name(key=value) with literal values"
    ]


@pytest.mark.parametrize(
    ("sign", "parser"),
    [
        ("'\\n<tool_call>\\n{\"name\": '", "hermes"),
        ("<tool_call>\\n<function=' + name", "qwen3_coder"),
        ("message.role == 'tool' %}<|start_header_id|>ipython", "llama3_json"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]' + call.name + '[ARGS]", "mistral"),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi"),
        ("<|channel|>commentary to=functions.", "gpt-oss"),
        ("<start_of_turn>model", None),
        ("<tool_call>{function-name}\\n<arg_key>", None),  # GLM
    ],
)
def test_the_template_tells_the_parser(sign: str, parser: str | None) -> None:
    assert parser_of("{% for m in messages %}" + sign) == parser


CALLED = f"<tool_call>{ADD}</tool_call>"
IN_CODE = '<tool_call>{"name": "say", "arguments": {"text": "%s"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        (f"<think>I could {CALLED}, but no.</think>The answer is 5.", None, []),
        (f"I could {CALLED}, but no.</think>The answer is 5.", None, []),  # the prompt has the opening tag
        (f"<think>I could {CALLED}, but", None, []),  # cut off
        (f"Well. <think>Maybe {CALLED}", None, []),
        (f"[THINK]Maybe {CALLED}.[/THINK]5", None, []),
        (f"<think>Maybe <tool_call>{ADD} or not</think>5", None, []),
        (f"<think>Maybe {CALLED}.</think>\n{CALLED}", f"<think>Maybe {CALLED}.</think>", [("add", {"a": 1})]),
        (f"{CALLED}<think>{CALLED}</think>{CALLED}", f"<think>{CALLED}</think>", [("add", {"a": 1})] * 2),
        # tags inside of a call are its own
        (IN_CODE % "</think>", "", [("say", {"text": "</think>"})]),
        (f"Hm.</think>{IN_CODE % '<think>'}", "Hm.</think>", [("say", {"text": "<think>"})]),
        (f"<think>{IN_CODE % '</think>'} no</think>5", None, []),
    ],
)  # fmt: skip
def test_a_call_in_a_thought_is_a_thought(text: str, content: str | None, said: list[Any]) -> None:
    found = parse("hermes", text, SCHEMAS)
    assert told("hermes", text) == said
    assert found.content == (text if content is None else content)


@pytest.mark.parametrize("parser", [each for each in FORMATS if each not in ("gpt-oss", "python_tag")])
def test_each_format_begins_after_the_thought(parser: str) -> None:
    call = written(parser, [("add", {"a": 1})])
    assert told(parser, f"<think>\n{call}\n</think>\n\n{call}") == [("add", {"a": 1})]
    assert told(parser, f"<think>\n{call}\n</think>\n\n5") == []


def test_values_of_references_enums_and_parts() -> None:
    """A schema as pydantic writes it for models, enums and unions, and as MCP servers write others."""
    properties = {
        "model": {"$ref": "#/$defs/Point"},
        "level": {"$ref": "#/$defs/Level", "default": 1},
        "colour": {"$ref": "#/$defs/Colour"},
        "either": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "one": {"oneOf": [{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Line"}]},
        "all": {"allOf": [{"$ref": "#/definitions/n~1a"}], "description": "a"},
        "literal": {"enum": [1, 2]},
        "constant": {"const": True},
        "text": {"const": "1"},
        "circle": {"$ref": "#/$defs/Circle"},
        "nowhere": {"$ref": "#/$defs/Nowhere"},
        "elsewhere": {"$ref": "https://example.com/schema"},
    }
    root = {
        "properties": properties,
        "$defs": {
            "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "Line": {"type": "array"},
            "Level": {"enum": [1, 2], "type": "integer"},
            "Colour": {"enum": ["1", "2"], "type": "string"},
            "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "integer"}]},
        },
        "definitions": {"n/a": {"type": "number"}},
    }
    given = {
        "model": '{"x": 1}',
        "level": "2",
        "colour": "1",
        "either": '{"x": 2}',
        "one": "[3]",
        "all": "4.5",
        "literal": "1",
        "constant": "True",
        "text": "1",
        "circle": "5",
        "nowhere": "6",
        "elsewhere": "7",
    }
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in given.items())
    [call] = parse("qwen3_coder", f"<tool_call><function=f>{values}</function></tool_call>", {"f": root}).calls
    assert call.error is None and call.arguments == {
        "model": {"x": 1},
        "level": 2,
        "colour": "1",
        "either": {"x": 2},
        "one": [3],
        "all": 4.5,
        "literal": 1,
        "constant": True,
        "text": "1",
        "circle": 5,
        "nowhere": "6",
        "elsewhere": "7",
    }


def test_a_tool_with_a_model_and_an_enum_can_be_called() -> None:
    from enum import Enum

    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    class Level(Enum):
        LOW = 1

    def draw(point: Point, level: Level) -> str:
        """Draws."""
        return ""

    draw.__annotations__ = {"point": Point, "level": Level, "return": str}
    schema, model = schema_of(draw, "draw", "tools")
    text = written("qwen3_coder", [("draw", {"point": {"x": 1}, "level": 1})])
    [call] = parse("qwen3_coder", text, {"draw": schema.parameters}).calls
    assert checked(model, call.arguments) == {"point": Point(x=1), "level": Level.LOW}
