# SPDX-License-Identifier: Apache-2.0
"""Chat templates: converts messages, and the text between a sampled turn and the next one, to token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from whet.data.media import KINDS, MediaReader
from whet.data.placeholders import expanded, media_tokens
from whet.errors import DataError, TextError
from whet.limits import bounded, cause
from whet.types import Media, Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Options = Mapping[str, Any]  # of the chat template, and of whet: `sanitize_control_tokens`, `described_tools`
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESPONSE, _THOUGHT = "whet-probe-response", "whet-probe-thought"
MAX_CHARACTERS = 4_000_000  # of one text: about a million tokens, for which a tokenizer needs seconds and a gigabyte
SANITIZE = "sanitize_control_tokens"  # the option's name in transformers
DESCRIBED = "described_tools"  # an option of whet: a text that describes the tools, put into the system message
TOOLS = "row_tools"  # a field of a row's first message: the row's tools, for the template if the run has no tools
_OTHER_ENDS = ("<|eom_id|>", "<|call|>", "<|return|>")  # models may sample these instead of the template's end token
_SYSTEM_TOOLS = re.compile(r"message\[['\"]tools['\"]\]|message\.tools\b")  # Phi's template reads tools in this way
_MARK = "\U0010ffff"  # a noncharacter that marks control tokens in messages; the template's own tokens have no mark
TEMPLATE, OWN_TEMPLATE = "chat template", "data.chat_template_kwargs.chat_template"  # in errors


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Options | None = None,
) -> str:
    """Renders `messages` to text with the chat template. `encode_rendered` turns the text into ids.

    `chat_template_kwargs` may have `tools`, and `sanitize_control_tokens`: by default a control token such as
    `<|im_end|>` inside a message stays text; only control tokens of the template itself are parsed.  Raises: DataError
    if there is no template, or the template rejects the messages."""
    options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {}), "tokenize": False}
    options = _with_tools(tokenizer, messages, options)
    template = template_text(tokenizer, options)
    try:
        with bounded():
            told = _told(messages, options, template)
            try:
                return _rendered(tokenizer, told, options)
            except Exception:
                if DESCRIBED not in options or len(told) < 2:
                    raise
                return _rendered(tokenizer, _without_system(told), options)  # such as Gemma's first templates
    except Exception as error:  # the template is other people's code
        found = f"cannot render messages of roles ({roles(messages)}): {cause(error)}"
        raise DataError(TEMPLATE, found, "", f"correct the messages, or set {OWN_TEMPLATE}") from error


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], options: Options) -> str:
    dicts = as_text(tokenizer, _dicts(tokenizer, messages, options), options)
    return cast(str, tokenizer.apply_chat_template(dicts, **_of_template(options)))


def _with_tools(tokenizer: Tokenizer, messages: Sequence[Message], options: Options) -> dict[str, Any]:
    """Returns the template options. If the run has no tools, adds the row's tools."""
    found = next((message.fields[TOOLS] for message in messages if TOOLS in message.fields), None)
    if found is None or options.get("tools") or DESCRIBED in options:
        return dict(options)
    return {**options, "tools": as_text(tokenizer, found, options)}


def _dicts(tokenizer: Tokenizer, messages: Sequence[Message], options: Options) -> list[dict[str, Any]]:
    """Converts messages to dicts for the template, with the arguments of tool calls as objects or as JSON text."""
    dicts = [{name: value for name, value in each.to_dict().items() if name != TOOLS} for each in messages]
    if any("tool_calls" in each for each in dicts):
        wants_text = _wants_text(tokenizer, template_text(tokenizer, options))
        dicts = [{**each, "tool_calls": _with_arguments(each.get("tool_calls"), wants_text)} for each in dicts]
    return dicts


def _with_arguments(calls: Any, wants_text: bool) -> Any:
    if isinstance(calls, list | tuple):
        return [_with_arguments(each, wants_text) for each in calls]
    if not isinstance(calls, Mapping):
        return calls
    if isinstance(calls.get("function"), Mapping):
        return {**calls, "function": _with_arguments(calls["function"], wants_text)}
    given = read_arguments(calls.get("arguments", "{}"))
    is_text = wants_text and isinstance(given, Mapping)
    return {**calls, "arguments": json.dumps(given, ensure_ascii=False) if is_text else given}


@lru_cache(maxsize=8)
def _wants_text(tokenizer: Tokenizer, template: str) -> bool:
    """Tells whether the template needs a tool call's arguments as JSON text, because it writes objects wrongly."""
    message = assistant_message("", [{"id": "t0000c000", "name": "probe", "arguments": {_RESPONSE: _THOUGHT}}])
    chat: Any = [{"role": "user", "content": _THOUGHT}, message.to_dict()]
    try:
        with bounded():
            text = str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False))
    except Exception as error:  # the template is other people's code
        return isinstance(error, TypeError)  # text + object
    return f"{{'{_RESPONSE}'" in text


def read_arguments(given: Any) -> Any:
    """Parses a tool call's arguments if they are JSON text of an object; otherwise returns them unchanged."""
    with suppress(ValueError, RecursionError):
        found = json.loads(given or "{}") if isinstance(given, str) else given
        return found if isinstance(found, dict) else given
    return given


def encode_marked_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, chat_template_kwargs: Options | None = None
) -> tuple[list[int], list[int]] | None:
    """Encodes a conversation.  Returns its ids, and a mask that is 1 between the template's `{% generation %}` marks.

    Returns None if the template has no such marks, or if control tokens in messages must stay text, which transformers
    does not support here.  Raises: as `render_chat`."""
    options = _with_tools(tokenizer, messages, chat_template_kwargs or {})
    template = template_text(tokenizer, options)
    if not _GENERATION_MARK.search(template):
        return None
    # Render within limits first, without encoding: the tokenizer's process dies if it runs into the memory limit.
    text = render_chat(tokenizer, messages, add_generation_prompt=False, chat_template_kwargs=options)
    if _MARK in text:
        return None
    _check_text(text)
    dicts = _dicts(tokenizer, _told(messages, options, template), options)
    encoded: Any = tokenizer.apply_chat_template(dicts, return_assistant_tokens_mask=True, **_of_template(options))
    return encoded["input_ids"], encoded["assistant_masks"]


def as_text(tokenizer: Tokenizer, value: Any, options: Options) -> Any:
    """Marks control tokens in all strings of `value`, which `encode_rendered` keeps as text; an option turns it off."""
    if isinstance(value, str) and options.get(SANITIZE, True):
        control = _control_tokens(tokenizer)
        return control.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", value.replace(_MARK, ""))
    if isinstance(value, Mapping):
        return {key: as_text(tokenizer, each, options) for key, each in value.items()}
    return [as_text(tokenizer, each, options) for each in value] if isinstance(value, list | tuple) else value


def encode_rendered(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes rendered texts. The template's control tokens become their ids; control tokens that `as_text` marked stay
    text: each is encoded in two parts, and neither part is a control token. No special token is added."""
    parts = [text.split(_MARK) for text in texts]
    found = encode_texts(tokenizer, [first for first, *_ in parts], add_special_tokens=False)
    marked = list(dict.fromkeys(part for _, *rest in parts for part in rest))  # a hostile text may have 100,000
    if marked:
        # After a line break, since some tokenizers add a space before a text.
        both = ["\n", *(f"\n{part}" for part in marked), *marked]
        line_break, *ids_of = encode_texts(tokenizer, both, add_special_tokens=False)
        behind = dict(zip(marked, zip(ids_of, ids_of[len(marked) :], strict=False), strict=False))
        for ids, (_, *rest) in zip(found, parts, strict=True):
            for after, alone in map(behind.__getitem__, rest):
                ids += after[len(line_break) :] if after[: len(line_break)] == line_break else alone
    return found


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Encodes each text.  Raises: DataError for a text that is too long, or that the tokenizer rejects."""
    for text in texts:
        _check_text(text)
    try:
        return cast(list[list[int]], tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # the tokenizers library raises nothing narrower
        found = f"rejects one of {len(texts)} texts, the first of which is {texts[0][:80]!r}: {error}"
        raise TextError("tokenizer", found, "", "use only characters that are in its vocabulary") from error


def plain_text(
    tokenizer: Tokenizer, messages: Sequence[Message], media: Sequence[Media], written: Callable[[str], str] = str
) -> str:
    """Joins the texts of messages without the chat template. `written` escapes each text. An image or video becomes its
    placeholder tokens, between the tokens that the template puts around them."""
    left, texts = iter(media), list[str]()
    for message in messages:
        for part in message.parts:
            if part.get("type") not in KINDS:
                texts.append(written(str(part.get("text") or "")))
                continue
            each = next(left)
            before, after = _around(tokenizer, each.kind, media_tokens(each).placeholder)
            texts += [before, expanded(media_tokens(each).placeholder, [each]), after]
    return "".join(texts)


@lru_cache(maxsize=8)
def _around(tokenizer: Tokenizer, kind: str, placeholder: str) -> tuple[str, str]:
    """Finds the texts that the chat template writes before and after a placeholder; empty without a template."""
    if not tokenizer.chat_template:
        return "", ""
    first, last = ({"type": "text", "text": text} for text in (_RESPONSE, _THOUGHT))
    parts: list[dict[str, Any]] = [first, {"type": kind}, last]
    text = render_chat(tokenizer, [Message("user", parts)], add_generation_prompt=False)
    before, found, after = text.partition(_RESPONSE)[2].partition(_THOUGHT)[0].partition(placeholder)
    return (before, after) if found else ("", "")


def assistant_message(text: str, calls: Sequence[Mapping[str, Any]]) -> Message:
    """Makes the assistant message of a turn. It has `tool_calls`, because some templates need them before results."""
    if not calls:
        return Message("assistant", text)
    functions = [{"name": call["name"] or "unknown", "arguments": call["arguments"]} for call in calls]
    ids = [call["id"] for call in calls]
    made = [{"id": uid, "type": "function", "function": each} for uid, each in zip(ids, functions, strict=True)]
    return Message("assistant", text, {"tool_calls": made})


def encode_continuation(
    tokenizer: Tokenizer,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    turn: Turn,
    chat_template_kwargs: Options | None = None,
    media: Sequence[Media] = (),
) -> list[int]:
    """Encodes the text between a sampled turn and the next: the turn's end, the new messages, the generation prompt.

    `messages_before` are the messages before `turn`; `new_messages` (tool results, user messages) follow it, with their
    `media`. The next context is `turn.context_ids + turn.token_ids + encode_continuation(...)`: no sampled id is ever
    tokenised again. A sampled stop token is not repeated; a turn that was truncated at its length limit is closed.

    The template renders the conversation with a probe in place of the turn's text; the text after the probe is the
    continuation. This needs a template that only appends. Some templates write tool results only after a message with
    `tool_calls`, others take only one call: such forms of earlier messages and probe are tried in turn.  Raises:
    DataError for a template that rewrites earlier turns."""

    plain = [_without_calls(message) for message in messages_before]
    forms = [(messages_before, False)]
    if any("tool_call_id" in message.fields for message in new_messages) or plain != [*messages_before]:
        forms += [(plain, False), (messages_before, True)]
    first: DataError | None = None
    for before, calls in forms:
        try:
            text = _continuation(tokenizer, before, new_messages, turn, chat_template_kwargs, calls=calls)
        except DataError as error:
            first = first or error
        else:
            [ids] = encode_rendered(tokenizer, [expanded(text, media)])
            return ids[_num_sampled(tokenizer, turn, ids) :]
    assert first is not None
    raise first


@dataclass(eq=False)
class ChatFormat:
    """Encodes conversations by the chat template; without a template, by joining the texts of their messages."""

    tokenizer: Tokenizer
    _: KW_ONLY
    apply_chat_template: bool = True
    chat_template_kwargs: Options = field(default_factory=dict)
    reader: MediaReader | None = None  # of images and videos; None for a text model

    def text(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> str:
        """Renders a conversation up to the start of the model's next turn, for `encode_texts`."""
        if not self.apply_chat_template:
            return plain_text(self.tokenizer, messages, media)
        options = self.chat_template_kwargs
        text = render_chat(self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)
        return expanded(text, media)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts that `text` has rendered.  Raises: DataError."""
        if self.apply_chat_template:
            return encode_rendered(self.tokenizer, texts)
        return encode_texts(self.tokenizer, texts, add_special_tokens=True)

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media] = ()
    ) -> list[int]:
        """Encodes the text between a sampled turn and the next, as `encode_continuation` does."""
        options = self.chat_template_kwargs
        if self.apply_chat_template:
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=options, media=media
            )
        text = plain_text(self.tokenizer, new, media, lambda own: as_text(self.tokenizer, own, options))
        return encode_rendered(self.tokenizer, [text])[0]


def _continuation(
    tokenizer: Tokenizer,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    turn: Turn,
    options: Options | None,
    *,
    calls: bool,
) -> str:
    """Renders the continuation with one form of the probe: as text, or with `calls` as an argument of tool calls."""

    def render(messages: Sequence[Message]) -> str:
        return render_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)

    thinks = "</think>" in tokenizer.decode(list(turn.token_ids))  # templates treat such turns differently
    probe = Message("assistant", f"<think>\n{_THOUGHT}\n</think>\n\n{_RESPONSE}" if thinks else _RESPONSE)
    if calls:
        answered = [message.fields for message in new_messages if "tool_call_id" in message.fields]
        called = [{"id": x["tool_call_id"], "name": x["name"], "arguments": {"x": _RESPONSE}} for x in answered]
        probe = assistant_message("", called)
    with_probe = [*messages_before, probe]
    with bounded():
        before, after = render(messages_before), render([*with_probe, *new_messages])
        without_new = render(with_probe)
    size = _size_of(before, after)
    if size is None:
        raise _not_append_only("messages before the response")
    opening, _, continuation = after[size:].partition(_RESPONSE)
    if calls:  # the template writes more of the call, up to the end of the turn
        end = _control_tokens(tokenizer).search(continuation)
        continuation = continuation[end.start() :] if end else ""
    elif thinks and _THOUGHT not in opening:
        raise _not_append_only("thoughts of the response")
    if not continuation or (not thinks and not calls and opening.strip()):
        raise _not_append_only("response")
    if after == without_new:
        found = f"renders nothing for the new messages (roles {roles(new_messages)})"
        raise DataError(TEMPLATE, found, "", "send their text as a user message, or use another template")
    return continuation


def _size_of(before: str, text: str) -> int | None:
    """Returns the length of the prefix of `text` that equals `before` except for white space; None if there is no such
    prefix. Some templates (Hermes 3) write white space differently after the last message."""
    if text.startswith(before):
        return len(before)
    letters = "".join(before.split())
    if not letters:
        return 0
    if not "".join(text.split()).startswith(letters):
        return None
    places = [place for place, letter in enumerate(text) if not letter.isspace()]
    return places[len(letters) - 1] + 1


def _without_calls(message: Message) -> Message:
    fields = {name: value for name, value in message.fields.items() if name != "tool_calls"}
    return Message(message.role, message.content, fields) if "tool_calls" in message.fields else message


def _told(messages: Sequence[Message], options: Options, template: str) -> Sequence[Message]:
    """Adds the tools to the system message, for templates that read tools only there, or that cannot describe tools."""
    fields: dict[str, Any] = {}
    if options.get("tools") and _SYSTEM_TOOLS.search(template):
        fields["tools"] = json.dumps([tool.get("function", tool) for tool in options["tools"]], ensure_ascii=False)
    elif DESCRIBED not in options:
        return messages
    has_system = bool(messages) and messages[0].role == "system" and messages[0].is_text
    own, rest = (str(messages[0].content), messages[1:]) if has_system else ("", messages)
    text = "\n\n".join(part for part in (own, str(options.get(DESCRIBED, ""))) if part)
    return [Message("system", text, fields), *rest]


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Removes the system message. Its text moves to the start of the next message."""
    system, first, *rest = messages
    text, own = f"{system.content}\n\n", first.content
    content = text + own if isinstance(own, str) else [{"type": "text", "text": text}, *own]
    return [Message(first.role, content, first.fields), *rest]


def roles(messages: Sequence[Message]) -> str:
    """Lists the roles of messages in order, for errors."""
    return ", ".join(message.role for message in messages)


def _num_sampled(tokenizer: Tokenizer, turn: Turn, ids: Sequence[int]) -> int:
    """Counts the ids at the start of a continuation, up to the stop token that the turn has already sampled.

    Usually the stop token is the first id. Some templates close with " </s>": then it is the first control token."""
    if turn.finish_reason != "stop":
        return 0
    stop = turn.token_ids[-1]
    if ids[0] == stop:
        return 1
    is_other_end = tokenizer.decode([stop]) in _OTHER_ENDS
    control_ids = tokenizer.added_tokens_decoder.keys()
    first = next((position for position, token_id in enumerate(ids) if token_id in control_ids), None)
    return 0 if first is None or not (ids[first] == stop or is_other_end) else first + 1


def _not_append_only(what: str) -> DataError:
    found = "written differently when new messages follow, so the sampled ids cannot be continued as one row"
    change = f"set {OWN_TEMPLATE}, or let the environment start a new row for each turn"
    return DataError(f"{TEMPLATE}: {what}", found, "a template that is append-only", change)


def check_message(message: Message) -> None:
    """Checks all text of a message.  Raises: DataError for text that is too long or is not valid Unicode."""
    _check_text(json.dumps(message.to_dict(), ensure_ascii=False, default=str))


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise TextError("number of characters", len(text), f"at most {MAX_CHARACTERS:,}", "shorten the text")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        found = f"character {error.start}, after {text[max(0, error.start - 20) : error.start]!r}, is half of a "
        found += "surrogate pair, which no encoding can hold"
        raise TextError("text", found, "", "fix the program that wrote it, or remove the character") from error


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _of_template(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in (SANITIZE, DESCRIBED)}


def template_text(tokenizer: Tokenizer, options: Options) -> str:
    """Returns the source of the chat template that `options` choose.  Raises: DataError if there is none."""
    try:
        return tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except (ValueError, TypeError) as error:
        found = f"has no chat template to use: {cause(error)}"
        change = f"set data.apply_chat_template=false to use the text without a template, or set {OWN_TEMPLATE}"
        raise DataError(f"tokenizer of {tokenizer.name_or_path or 'this model'}", found, "", change) from error
