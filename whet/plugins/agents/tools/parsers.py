# SPDX-License-Identifier: Apache-2.0
"""Shipped parsers of tool calls, one for each format. A parser splits a turn into calls and the text around them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from whet.environments.calls import CONTROL, Call, Schemas, parser_of as parser_of, parts_of  # for code of 0.3
from whet.files import shipped_yaml
from whet.registry import register_tool_parser

FORMS: Mapping[str, str] = shipped_yaml("plugins/agents/tools/formats.yaml")  # by parser
INTERPRETERS = ("python", "ipython", "code_interpreter")  # names of a tool that runs code
_THOUGHTS = re.compile(
    r"(?s).*(?:</think>|\[/THINK\]|<think>.*|\[THINK\].*|<\|channel\|>analysis(?:(?!<\|channel\|>).)*)"
)
MAX_BROKEN = 100  # places at which JSON may break off; then the search in a text ends
_ARGUMENTS = {"arguments", "parameters"}
_BROKEN = re.compile(r"""\{\s*["'](?:type|id|name|function|arguments|parameters)["']\s*:""")
_PARAMETER = r"<parameter=([^>\n]+)>((?:(?!<parameter=).)*?)</parameter>"  # no parameter begins inside another
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Parsed:
    """A turn: its calls in order, and the text around them."""

    content: str
    calls: tuple[Call, ...]


def parse(parser: str, text: str, schemas: Schemas) -> Parsed:
    """Parses a turn. `parser` is a registered name or a path. JSON of a call that the parser leaves as text becomes a
    call with an error.  Raises: RegistryError."""
    expected = f"expected {FORMS.get(parser, 'the format that you were told')}"
    content, calls = "", list[Call]()
    for part in parts_of(parser, text, schemas):
        for each in [part] if isinstance(part, Call) else _outside(part, schemas, expected):
            if isinstance(each, Call):
                calls.append(each)
            else:
                content += each
    return Parsed(CONTROL.sub("", content).strip(), tuple(calls))


@register_tool_parser(
    "hermes", begin=("<tool_call>",), end=("</tool_call>",), opening=('<tool_call>\n{"name": "', '", "arguments":')
)
def hermes(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes, Qwen2.5 and Qwen3."""
    yield from _tagged(text, lambda part, body: [_json_call(part, body, "arguments")])


@register_tool_parser(
    "llama3_json",
    begin=("<|python_tag|>",),
    begin_patterns=(r'(?:^|(?<=\n)|;)[^\S\n]*(?:\{\s*(?:"|\Z)|\Z)',),  # also the beginning of a call
    opening=('{"name": "', '", "parameters":'),
)
def llama3_json(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`{"name": ..., "parameters": {...}}` without a tag or after `<|python_tag|>`, the format of Llama 3; `;` or a
    line break separates calls."""
    start = position = 0
    while found := re.compile(r"(?:<\|python_tag\|>|(?:^|(?<=\n)|;)[^\S\n]*(?=\{))").search(text, position):
        value, end = _decoded(text, found.end())
        if (name := _name_of(value)) is None or not (_ARGUMENTS & {*value} or name in schemas):
            if not found[0].startswith("<|"):
                position = found.end() + 1
                continue
            end = len(text)
        if found.start() > start:
            yield text[start : found.start()]
        call = _json_call(text[found.start() : end], text[found.end() : end], "parameters")
        yield call
        start = position = found.start() + len(call.text)
    if start < len(text):
        yield text[start:]


@register_tool_parser("mistral", begin=("[TOOL_CALLS]",))
def mistral(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, the format of Mistral, or for each call
    `[TOOL_CALLS]name[ARGS]{...}`, with or without `[CALL_ID]...` after the name, as in its newer models."""
    before, tag, after = text.partition("[TOOL_CALLS]")
    if before:
        yield before
    rest = tag + after
    while rest:
        found = re.match(r"\[TOOL_CALLS\]\s*(?:([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\])?", rest)
        assert found is not None
        value, end = _decoded(rest, found.end())
        stop = rest.find(tag, max(end, 1))
        part, rest = (rest, "") if stop < 0 else (rest[:stop], rest[stop:])
        match found[1], value, _more(part[end:]):
            case str(name), dict(), False:
                yield Call(name, value, text=part)
            case None, [_, *_], False:
                yield from _calls_of(value, part, "arguments")
            case name, _, _:
                expected = "a JSON list of calls, or name[ARGS] and the arguments as one JSON object, nothing after it"
                yield Call(name or "", error=f"expected {tag} and {expected}", text=part)


@register_tool_parser("phi", begin=("<|tool_call|>",), end=("<|/tool_call|>",))
def phi(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>` or one object, the format of Phi-4-mini."""

    def calls(part: str, body: str) -> Iterable[Call]:
        value, end = _decoded(body, 0)
        is_list = isinstance(value, list) and value and not _more(body[end:])
        return _calls_of(value, part, "arguments") if is_list else [_json_call(part, body, "arguments")]

    yield from _tagged(text, calls, "<|tool_call|>", "<|/tool_call|>")


@register_tool_parser(
    "qwen3_coder", begin=("<tool_call>",), end=("</tool_call>",), opening=("<tool_call>\n<function=", ">\n")
)
def qwen3_coder(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, the format of Qwen3-Coder;
    the schema of the tool tells which values are text."""

    def whole(text: str, start: int) -> int:
        found = re.compile(rf"\s*<function=[^>\n]+>(?>\s*{_PARAMETER})*", re.DOTALL).match(text, start)
        return found.end() if found else start

    yield from _tagged(text, lambda part, body: [_xml_call(part, body, schemas)], whole=whole)


@register_tool_parser(
    "gpt-oss", begin=("<|start|>", "<|channel|>", "to="), end=("<|message|>", "<|call|>", "<|end|>"), gets_thoughts=True
)
def gpt_oss(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`, the format of gpt-oss."""
    for part in re.split(r"(?<=<\|call\|>)|(?<=<\|end\|>)|(?=<\|start\|>)", text):
        head, tag, body = part.partition("<|message|>")
        to = re.search(r"\bto=(?:functions\.)?([\w.-]+)", head)
        if to is None or to[1] == "assistant" or "<|" not in part:  # messages to the assistant are results
            if part:
                yield part
            continue
        match _decoded(CONTROL.sub("", body).strip(), 0, whole=True)[0]:
            case dict(arguments) if tag:
                yield Call(to[1], arguments, text=part)
            case _:
                yield Call(to[1], error="expected <|message|> and the arguments as one JSON object", text=part)


@register_tool_parser("python_tag", begin=("<|python_tag|>",))
def python_tag(text: str, schemas: Schemas) -> Iterator[str | Call]:
    """`<|python_tag|>` and a call in Python, `name(key=value)` or `name.call(key=value)`, or else code for the tool
    python, ipython or code_interpreter."""
    before, tag, code = text.partition("<|python_tag|>")
    if before:
        yield before
    if tag:
        yield from _python_calls(tag + code, CONTROL.sub("", code).strip(), schemas)


def _tagged(
    text: str,
    read: Callable[[str, str], Iterable[Call]],
    begin: str = "<tool_call>",
    end: str = "</tool_call>",
    whole: Callable[[str, int], int] = lambda text, start: _decoded(text, start)[1] or start,
) -> Iterator[str | Call]:
    """Splits text into calls, each from `begin` to `end`, and other text. `read` makes calls from such a part and the
    text between its tags. A part without an end tag lasts to the next call; it is an error, as are an end tag alone and
    XML of a call without tags. `whole` finds the end of a complete value, in which tags are text."""
    error, position = f"a call stands between {begin} and {end}; a tag is missing", 0
    tag = re.compile(rf"{re.escape(end)}|(?={re.escape(begin)})|\Z")
    while position < len(text):
        at = text.find(begin, position)
        if at == position:
            found = tag.search(text, whole(text, at + len(begin)))
            assert found is not None
            part, position = text[at : found.end()], found.end()
            yield from read(part, part[len(begin) : -len(end)]) if found[0] else [Call("", error=error, text=part)]
        else:
            part, position = text[position : at if at > 0 else len(text)], at if at > 0 else len(text)
            yield Call("", error=error, text=part) if end in part or "<function=" in part else part


def _outside(text: str, schemas: Schemas, expected: str) -> Iterator[str | Call]:
    """Finds JSON outside of calls that the model meant as a call, and yields it as a call with an error. Such JSON is
    an object with arguments and the name of a tool in `schemas` (at the start of the text: any name), or incomplete
    JSON at the end that names a tool. JSON in the model's thoughts stays text."""
    if not re.search(r"""["'](?:name|function)["']\s*:""", text):
        yield text
        return
    names = "|".join(map(re.escape, schemas)) or ".*?"
    named = re.finditer(rf"""["'](?:name|function)["']\s*:\s*["'](?:{names})["']""", text)
    last, thoughts = max((each.start() for each in named), default=-1), _THOUGHTS.match(text)
    start, position, broken = 0, thoughts.end() if thoughts else 0, 0
    while broken < MAX_BROKEN and (found := re.compile(r"""\{(?=\s*["'])""").search(text, position)):
        position = found.start()
        value, end = _decoded(text, position)
        broken += not end
        if end:
            is_known = not schemas or _name_in(value) in schemas or not text[:position].strip()
            is_meant = is_known and _name_in(value) is not None
            said = f"the call is not in the format of calls; {expected}"
        else:
            end, is_meant = len(text), position < last and _BROKEN.match(text, position) is not None
            said = f"the call is not valid JSON; {expected}"
        if not is_meant:
            position += 1
            continue
        if position > start:
            yield text[start:position]
        yield Call("", error=said, text=text[position:end])
        start = position = end
    if start < len(text):
        yield text[start:]


def _name_in(value: Any) -> str | None:
    """Returns the tool name of a JSON object, under "name" or "function", if the object has arguments."""
    match value:
        case {"name": str(name)} | {"function": str(name)} if _ARGUMENTS & {*value}:
            return name
    return None


def _json_call(text: str, body: str, key: str) -> Call:
    """Parses a JSON text as a call; `key` is the usual name of its arguments."""
    value, end = _decoded(body, 0)
    if end == 0:
        return Call("", error=f"the call is not valid JSON; {_expected(key)}", text=text)
    if _more(body[end:]):
        return Call("", error=f"there is text after the JSON of the call; {_expected(key)}", text=text)
    return _call_of(value, text, key)


def _calls_of(values: Sequence[object], text: str, key: str) -> list[Call]:
    """Converts the values of a list to calls. The first call has the text of the whole list."""
    return [_call_of(each, text if number == 0 else "", key) for number, each in enumerate(values)]


def _call_of(value: Any, text: str, key: str) -> Call:
    if (name := _name_of(value)) is None:
        return Call("", error=f"the JSON has no name of a tool; {_expected(key)}", text=text)
    arguments: object = next((value[each] for each in (key, "arguments", "parameters") if each in value), {})
    if isinstance(arguments, str):  # the OpenAI form has JSON inside of JSON
        arguments = _decoded(arguments, 0, whole=True)[0]
    if not isinstance(arguments, dict):
        return Call(name, error=f"{key} is no JSON object; {_expected(key)}", text=text)
    return Call(name, arguments, text=text)


def _expected(key: str) -> str:
    return f'expected one object {{"name": ..., "{key}": {{...}}}} for each call'


def _more(text: str) -> bool:
    """Tells whether a text has more than white space and control tokens, such as the end of a turn."""
    return bool(CONTROL.sub("", text).strip())


def _name_of(value: object) -> str | None:
    match value:
        case {"name": str(name)}:
            return name
    return None


def _decoded(text: str, start: int, *, whole: bool = False) -> tuple[Any, int]:
    """Parses the JSON value at `start`; its strings may have literal line breaks. Returns the value and its end.
    Returns (None, 0) if there is no JSON, or if other text follows and `whole` is set."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0
    return (None, 0) if whole and text[end:].strip() else (value, end)


def _xml_call(part: str, body: str, schemas: Schemas) -> Call:
    expected = f"expected {FORMS['qwen3_coder']}"
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
    if found is None:
        return Call("", error=f"a tag of the call is missing; {expected}", text=part)
    name, inner = found[1].strip(), found[2]
    parameters, rest = re.findall(_PARAMETER, inner, re.DOTALL), re.sub(_PARAMETER, "", inner, flags=re.DOTALL)
    if rest.strip():
        return Call(name, error=f"a parameter has no end, or there is other text; {expected}", text=part)
    root = schemas.get(name, {})
    types = root.get("properties", {})
    values = {key.strip(): _typed(value, _kinds(types.get(key.strip()), root)) for key, value in parameters}
    return Call(name, values, text=part)


def _kinds(schema: object, root: Mapping[str, object], seen: tuple[str, ...] = ()) -> set[str]:
    """Returns the JSON types that a schema allows: by `type`, its values, `anyOf` etc., or `$ref` into `root`."""
    if not isinstance(schema, Mapping):  # true is a schema too
        return set()
    named = _list(schema.get("type")) or [schema.get("type")]
    found = {each for each in named if isinstance(each, str)}
    if not found and isinstance(schema.get("enum", []), list):
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
        found = {_JSON_TYPES.get(type(value), "null") for value in values}
    parts = [each for name in ("anyOf", "oneOf", "allOf") for each in _list(schema.get(name))]
    match schema:
        case {"$ref": str(reference)} if reference.startswith("#") and reference not in seen:
            place: Any = root
            for name in reference.split("/")[1:]:
                place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
            parts, seen = [*parts, place], (*seen, reference)
    return found.union(*(_kinds(each, root, seen) for each in parts))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _typed(value: str, kinds: set[str]) -> object:
    """Converts an XML value to a type of `kinds`: JSON if it parses, else text. With "string" numbers stay text."""
    value = value.removeprefix("\n").removesuffix("\n")
    if not kinds or kinds == {"string"}:
        return value
    found, end = _decoded({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value), 0, whole=True)
    if not end and kinds & {"object", "array"}:  # in Python's spelling
        with suppress(ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
            found = json.loads(json.dumps(ast.literal_eval(value.strip())))
        end = isinstance(found, dict | list)
    return found if end and not ("string" in kinds and isinstance(found, int | float)) else value


def _python_calls(text: str, code: str, schemas: Schemas) -> Iterator[Call]:
    if _name_of(_decoded(code, 0)[0]) is not None:
        yield _json_call(text, code, "parameters")
        return
    calls = [_python_call(node, schemas) for node in _python(code)]
    known = [call for call in calls if call is not None]
    if calls and len(known) == len(calls):
        yield from (replace(call, text="" if number else text) for number, call in enumerate(known))
        return
    tool = next((name for name in INTERPRETERS if name in schemas), None)
    if tool is None:
        expected = "expected name(key=value) with literal values"
        yield Call("", error=f"no tool runs Python code, and this is no call of a tool; {expected}", text=text)
        return
    parameters = list(schemas[tool].get("properties", {})) or ["code"]
    yield Call(tool, {parameters[0]: code}, text=text)


def _python(code: str) -> Sequence[ast.AST]:
    try:
        tree = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    match tree:
        case [ast.Expr(value=ast.List(elts=[_, *_] as calls))]:  # [f(x=1), g(y=2)]
            return calls
    return [node.value if isinstance(node, ast.Expr) else node for node in tree]


def _python_call(node: ast.AST, schemas: Schemas) -> Call | None:
    """Converts `name(...)` of a known tool, or `name.call(...)`, in Python to a call; None for other code."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in schemas and name not in INTERPRETERS:
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="call")):
            pass
        case _:
            return None
    known = list(schemas.get(name, {}).get("properties", {}))
    pairs = [*zip(known, node.args, strict=False), *((each.arg or "**", each.value) for each in node.keywords)]
    try:
        arguments: dict[str, object] = {key: ast.literal_eval(value) for key, value in pairs}
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return Call(name, error="the arguments are not literal values; expected name(key=value)")
    if len(node.args) > len(known) or len(arguments) != len(pairs) or "**" in arguments:
        return Call(name, error="an argument is given twice or has no name; expected name(key=value)")
    return Call(name, arguments)
