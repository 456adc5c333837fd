# SPDX-License-Identifier: Apache-2.0
"""Makes prompts from rows: reads fields, applies prompt and chat template, drops prompts over the length limit.

Jinja templates of the user are rendered in jinja's sandbox and within limits of time and memory."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.data.chat import DESCRIBED, TOOLS, ChatFormat, roles
from whet.data.media import KINDS, Kind, MediaLimits, MediaReader
from whet.data.placeholders import FIELDS, Value, check_ids, has, place, read_all, values_of
from whet.data.written import as_written, row_tools, unwritten, warn_once
from whet.errors import ConfigError, DataError
from whet.limits import bounded, cause
from whet.options import as_list
from whet.types import Media, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config.schema import DataConfig, ExamplesDataConfig

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]
Names = str | Sequence[str]  # the name of a field, or several: the first that the row has counts
_ROWS_A_CHUNK = 256  # rows that are rendered and tokenised together: enough for the tokenizer's threads
_COMMON_PROMPT_KEYS = ("prompt", "question", "problem", "instruction", "query", "messages")
_OWN_FIELDS = ("reward_model", "data_source", "extra_info")  # read here; the reward gets all other fields
UNKNOWN = "unknown"  # data source of a row that has none
_MESSAGES = 'a list of messages {"role": ..., "content": ...}'
_TEXT = "only text: the model reads no media, and would train without them"
_MEDIA_KEYS: dict[Kind, str] = {kind: plural for kind, (plural, _) in FIELDS.items()}
_MEDIA_FIELDS = (*KINDS, *_MEDIA_KEYS.values(), "multi_modal_data")


@dataclass(eq=False)
class PromptFormat(ChatFormat):
    """Makes the messages and token ids of a prompt from the content of a row.

    `format_prompt` is a jinja template, or the path of a `.jinja` file. Its variables are the row's fields and
    `content`: the prompt's text, or the text of its last message. With `apply_chat_template=False` the text is used
    unchanged. Without a `reader`, a row with media is an error.
    """

    _: KW_ONLY
    system_prompt: str | None = None
    format_prompt: str | None = None
    media_keys: Mapping[Kind, str] = field(default_factory=_MEDIA_KEYS.copy)  # the fields of media by kind
    lost: list[str] = field(
        default_factory=list, init=False
    )  # texts that the template left out, one of each conversation

    def __post_init__(self) -> None:
        if self.system_prompt is not None and not self.apply_chat_template:
            found = "needs a template, but data.apply_chat_template is false"
            raise ConfigError("data.system_prompt", found, "", "unset one key")
        self._template = None if self.format_prompt is None else Template("format_prompt", self.format_prompt)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig | ExamplesDataConfig,
        *,
        beside: str | None = None,
        media_folder: Path | None = None,
    ) -> PromptFormat:
        """Makes the format that a data section of the config describes. `beside` is the folder of the data file, for
        relative paths of media. `media_folder` stores media that are not files."""
        encoders = getattr(tokenizer, "encoders", None)
        return cls(
            tokenizer,
            system_prompt=data.get("system_prompt"),
            format_prompt=data.get("format_prompt"),
            apply_chat_template=data.apply_chat_template,
            chat_template_kwargs=data.chat_template_kwargs,
            reader=None if encoders is None else MediaReader(MediaLimits.of(data, beside), encoders, media_folder),
            media_keys={**_MEDIA_KEYS, "image": data.image_key, "video": data.video_key},
        )

    def messages(self, row: Row, field: str) -> tuple[Message, ...]:
        """Makes the messages of a row from `field`, which has a text or a list of messages.  Raises: DataError."""
        content = row[field]
        is_text = isinstance(content, str)
        messages = _with_tools(row, [Message("user", content)]) if is_text else read_messages(row, field, "text, or ")
        if TOOLS in messages[0].fields and not self.apply_chat_template:
            warn_once("rows have a field `tools`, which the model is not shown: data.apply_chat_template is false")
        if self._template is not None:
            last = messages[-1]
            if not last.is_text:
                found = f"gets a prompt of type {type(last.content).__name__}"
                raise DataError("data.format_prompt", found, "text", "exclude such rows (data.filter)")
            text = self._template.render({**row, "content": last.content})
            messages[-1] = Message(last.role, text, last.fields)
        if not self.apply_chat_template and (len(messages) > 1 or not messages[0].is_text):
            found = f"is a list of messages (roles {roles(messages)}), and data.apply_chat_template is false"
            raise DataError("prompt", found, "a text", "correct the row, or set data.apply_chat_template=true")
        return self.with_system_prompt(messages)

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Adds the system prompt in front of messages that have none."""
        if self.system_prompt is None or messages[0].role == "system":
            return tuple(messages)
        return (Message("system", self.system_prompt), *messages)

    @property
    def media_fields(self) -> tuple[str, ...]:
        """The fields of a row that may hold media."""
        return (*_MEDIA_FIELDS, *self.media_keys.values())

    def refuse_media(self, row: Row, messages: Sequence[Message] = (), expected: str = _TEXT) -> None:
        """Refuses a row with images, videos or audio.  Raises: DataError; `expected` describes the valid input."""
        change = "use a data set of text, or exclude such rows (data.filter)"
        for name in self.media_fields:
            if has(row, name):
                raise DataError(f"field {name!r}", "it holds images, videos or audio", expected, change)
        for number, message in enumerate(messages):
            for form in [str(part.get("type")) for part in message.parts]:
                if any(kind in form for kind in KINDS):
                    raise DataError(f"message {number}", f"has a part of type {form!r}", expected, change)

    def place(self, row: Row, messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[Value]]:
        """Replaces tags in a row's messages by content parts. Returns the messages, and the row's media in order.

        Raises: DataError where the model reads only text, and where the numbers of tags and media differ."""
        if self.reader is None:
            self.refuse_media(row, messages)
            return tuple(messages), []
        others = [kind for kind in KINDS if kind not in self.reader.kinds]
        if unread := [kind for kind in others if any(has(row, name) for name in FIELDS[kind])]:
            raise DataError(unread[0], "is in a field", "only images and videos", "exclude such rows (data.filter)")
        placed, values = place(messages, values_of(row, self.media_keys), self.reader.kinds)
        limit = self.reader.limits.limit_images
        if limit is not None and len(values) > limit:
            expected = f"at most data.limit_images={limit}"
            raise DataError("number of media", len(values), expected, "raise it, or drop the row")
        return placed, values

    def read(self, values: Sequence[Sequence[Value]], rows: Sequence[int] | None = None) -> list[tuple[Media, ...]]:
        """Reads the images and videos of several rows.  Raises: DataError, with the row number if `rows` is given."""
        if self.reader is None or not any(values):
            return [()] * len(values)
        found = iter(read_all(self.reader, [each for own in values for each in own]))
        media = []
        for number, own in zip([None] * len(values) if rows is None else rows, values, strict=True):
            each = [next(found) for _ in own]
            with at_row(number):
                for error in each:
                    if isinstance(error, DataError):
                        raise error
            media.append(from_row(number, cast(list[Media], each)))
        return media

    def with_media(self, row: Row, messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Media, ...]]:
        """Reads the media of one row.  Returns its messages, with tags replaced, and the media.  Raises: DataError."""
        placed, values = self.place(row, messages)
        [media] = self.read([values])
        return placed, media

    def encode(
        self,
        conversations: Sequence[Sequence[Message]],
        rows: Sequence[int] | None = None,
        media: Sequence[tuple[Media, ...]] | None = None,
    ) -> list[list[int]]:
        """Encodes conversations as prompts, up to the start of the response. `media` has the media of each.

        Raises: DataError with the row number, if `rows` is set."""
        numbers = [None] * len(conversations) if rows is None else rows
        given = [()] * len(conversations) if media is None else media
        texts = list[str]()
        with bounded():
            for number, messages, own in zip(numbers, conversations, given, strict=True):
                with at_row(number):
                    texts.append(self.text(messages, own))
        try:
            encoded = self.encode_texts(texts)
        except DataError:
            for number, text in zip(numbers, texts, strict=True):
                with at_row(number):
                    self.encode_texts([text])
            raise
        for number, ids, own in zip(numbers, encoded, given, strict=True):
            with at_row(number):
                self.check(ids, own)
        return encoded

    def check(self, ids: Sequence[int], media: Sequence[Media]) -> None:
        """Checks that `ids` have as many media tokens as `media` need, and no others.  Raises: DataError."""
        if self.reader is not None and self.reader.encoders is not None:
            check_ids(ids, media, self.reader.encoders.forbidden)

    def text(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> str:
        """Renders a prompt up to the start of the response. Records texts that the template leaves out."""
        text = super().text(messages, media)
        if self.apply_chat_template:
            self.note_lost(text, messages)
        return text

    def note_lost(self, text: str, messages: Sequence[Message], but: Collection[int] = ()) -> None:
        """Records texts of messages that the template left out of `text`. Skips the messages numbered in `but`."""
        has_tools = any(self.chat_template_kwargs.get(name) for name in ("tools", DESCRIBED))
        if has_tools and any(TOOLS in message.fields for message in messages):
            warn_once("rows have a field `tools`, which the model is not shown: it is shown environment.tools")
        found = unwritten(text, messages, tools=not has_tools)
        for number in sorted(found.keys() - but)[:1]:
            self.lost.append(f"the {found[number]} of message {number} ({messages[number].role})")

    def warn_lost(self, num_rows: int, hint: str = "") -> None:
        """Warns of rows whose text the template left out in part."""
        if self.lost:
            told = "the chat template leaves out text of the messages of %d of %d rows, such as %s%s"
            logger.warning(told, len(self.lost), num_rows, self.lost[0], hint)


def build_prompts(
    rows: Sequence[Row],
    prompt_format: PromptFormat,
    data: DataConfig,
    *,
    numbers: Sequence[int] | None = None,
    with_answers: bool = True,
) -> tuple[Prompt, ...]:
    """Makes prompts from rows, in order. The `index` of a prompt is its row number, from `numbers` or its position.

    The ground truth is `row[answer_key]`; without an answer_key it is `reward_model.ground_truth`, else `answer`.
    `extra_info` of a prompt has the other fields of the row, updated with the row's `extra_info`. Raises: DataError for
    a missing field, for a row without a ground truth if others have one, and for a prompt that is too long if
    data.overlong_prompts=error."""
    prompts, used = [], {*as_list(data.prompt_key), *as_list(data.answer_key or ())}
    for index, row, messages, token_ids, media in _encoded(rows, prompt_format, data.prompt_key, numbers):
        with at_row(index):
            prompt = Prompt(
                uid=f"0:{index}",
                index=index,
                messages=messages,
                token_ids=tuple(token_ids),
                data_source=str(row.get(data.data_source_key) or data.data_source or UNKNOWN),
                ground_truth=ground_truth(row, data.answer_key) if with_answers else None,
                extra_info=_extra_info(row, {*used, *prompt_format.media_fields} if media else used),
                media=media,
                is_text=isinstance(row[find_field(row, data.prompt_key, "data.prompt_key", _COMMON_PROMPT_KEYS)], str),
            )
        prompts.append(prompt)
    prompt_format.warn_lost(len(rows))
    if with_answers:
        _check_answers(prompts)
    return fit_prompts(prompts, prompt_format, data)


def fit_prompts(prompts: Sequence[Prompt], prompt_format: PromptFormat, data: DataConfig) -> tuple[Prompt, ...]:
    """Returns the prompts within the length limit. Encodes the messages of prompts that have no ids.

    Raises: DataError for an empty prompt, if no prompt is left, and for a long one if data.overlong_prompts=error."""
    limit = data.max_prompt_length
    whole = [p if p.token_ids else _completed(p, prompt_format) for p in prompts]
    kept = tuple(prompt for prompt in whole if len(prompt.token_ids) <= limit)
    too_long = [prompt for prompt in whole if len(prompt.token_ids) > limit]
    if too_long and data.overlong_prompts == "error":
        key, expected = f"row {too_long[0].index}: prompt tokens", f"at most data.max_prompt_length={limit}"
        raise DataError(key, len(too_long[0].token_ids), expected, "raise it, or set data.overlong_prompts=drop")
    if not kept:
        shortest = min((len(prompt.token_ids) for prompt in whole), default=None)
        limits = "the data has no rows" if shortest is None else f"the shortest has {shortest} tokens"
        expected = f"at least one of {len(whole)} prompts within it: {limits}"
        raise DataError("data.max_prompt_length", limit, expected, "raise it")
    if too_long:
        first, more = [prompt.index for prompt in too_long[:5]], f" and {len(too_long) - 5} more"
        logger.warning(
            "dropped %d of %d prompts over data.max_prompt_length=%d tokens (the longest has %d): rows %s%s",
            *(len(too_long), len(whole), limit, max(len(prompt.token_ids) for prompt in too_long)),
            *(", ".join(map(str, first)), more if len(too_long) > 5 else ""),
        )
    return kept


def read_messages(row: Row, field: str, also: str = "") -> list[Message]:
    """Reads a field of a row as messages. `also` names another valid form, for the error.  Raises: DataError."""
    content = row[field]
    is_list = isinstance(content, list) and len(content) > 0
    if not is_list or not all(isinstance(raw, Mapping) and {*raw} >= {"role", "content"} for raw in content):
        kind = "an empty list" if content == [] else f"a value of type {type(content).__name__}"
        found = str(content)[:200] if is_list else kind
        raise DataError(f"field {field!r}", found, also + _MESSAGES, "correct the row")
    for number, raw in enumerate(content):
        parts = raw["content"] if isinstance(raw["content"], list) else []
        if not isinstance(raw["role"], str):
            raise DataError(f"message {number}: role", raw["role"], "text", "correct it")
        if not isinstance(raw["content"], str | list | None) or not all(isinstance(part, Mapping) for part in parts):
            found = str(raw["content"])[:200]
            raise DataError(f"message {number}: content", found, "text, or parts in a list", "correct it")
    return _with_tools(row, [Message.from_dict({"content": "", **as_written(raw)}) for raw in content])


def _with_tools(row: Row, messages: list[Message]) -> list[Message]:
    """Adds the row's tools to the messages, as a field of the first message."""
    tools = row_tools(row)
    return [replace(messages[0], fields={**messages[0].fields, TOOLS: tools}), *messages[1:]] if tools else messages


def find_field(row: Row, names: Names, option: str, common: Sequence[str] = ()) -> str:
    """Returns the first of `names` that is a field of the row.

    Raises: DataError with the fields of the row, and with `option`, the config key of the field's name."""
    for name in as_list(names):
        if row.get(name) is not None:
            return name
    near = [key for name in as_list(names) for key in difflib.get_close_matches(name, list(row), n=1)]
    known = [key for key in (*near, *common) if row.get(key) is not None]
    nearest = f" (perhaps {option}={known[0]})" if known else ""
    found = f"is {'null' if name in row else 'missing'}, and the row has {', '.join(row)}"
    raise DataError(f"field {' or '.join(as_list(names))!r}", found, "", f"set {option}{nearest}")


def _encoded(
    rows: Sequence[Row], prompt_format: PromptFormat, prompt_key: Names, numbers: Sequence[int] | None
) -> Iterator[tuple[int, Row, tuple[Message, ...], list[int], tuple[Media, ...]]]:
    numbers = range(len(rows)) if numbers is None else numbers
    for start in range(0, len(rows), _ROWS_A_CHUNK):
        chunk, places = rows[start : start + _ROWS_A_CHUNK], numbers[start : start + _ROWS_A_CHUNK]
        conversations, values = [], []
        with bounded():
            for index, row in zip(places, chunk, strict=True):
                with at_row(index):
                    if prompt_format.reader is None:
                        prompt_format.refuse_media(row)
                    field = find_field(row, prompt_key, "data.prompt_key", _COMMON_PROMPT_KEYS)
                    messages, own = prompt_format.place(row, prompt_format.messages(row, field))
                    conversations.append(messages)
                    values.append(own)
        media = prompt_format.read(values, places)
        encoded = prompt_format.encode(conversations, places, media)
        yield from zip(places, chunk, conversations, encoded, media, strict=True)


def _completed(prompt: Prompt, prompt_format: PromptFormat) -> Prompt:
    """Completes the prompt: encodes its messages and measures its media.  Raises: DataError if it is empty."""
    with at_row(prompt.index):
        fields = [(each.kind, each) for each in prompt.media]
        row = {prompt_format.media_keys[kind]: [each for own, each in fields if own == kind] for kind, _ in fields}
        messages, media = prompt_format.with_media(row, prompt.messages)
    ids = prompt_format.encode([messages], [prompt.index], [media])[0] if messages else []
    if not ids:
        change = "correct the row, or exclude such rows (data.filter.FIELD.not='')"
        raise DataError(f"row {prompt.index}: prompt", "is empty", "at least one token", change)
    return replace(prompt, messages=messages, token_ids=tuple(ids), media=media)


def from_row(number: int | None, media: Sequence[Media]) -> tuple[Media, ...]:
    """Stores the row number in each media, so that later errors can name the row."""
    return tuple(each if number is None else replace(each, origin=f"row {number}") for each in media)


@contextmanager
def at_row(index: int | None) -> Iterator[None]:
    """Adds the row number to a DataError."""
    try:
        yield
    except DataError as error:
        if index is None:
            raise
        raise error.at(f"row {index}") from error


def ground_truth(row: Row, answer_key: Names | None) -> Any:
    """Returns `row[answer_key]`; without a key, `reward_model.ground_truth`, else `answer`.  Raises: DataError."""
    if answer_key is not None:
        return row[find_field(row, answer_key, "data.answer_key")]
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return row.get("answer")


def _extra_info(row: Row, used: set[str]) -> dict[str, Any]:
    own = row.get("extra_info") or {}
    if not isinstance(own, Mapping):
        raise DataError("extra_info", f"is of type {type(own).__name__}", "an object with fields")
    rest = {key: value for key, value in row.items() if key not in used and key not in _OWN_FIELDS}
    return {**rest, **own}


def _check_answers(prompts: Sequence[Prompt]) -> None:
    """Checks that all rows have a ground truth, or none has.  Raises: DataError. Warns if none has."""
    missing = [prompt.index for prompt in prompts if prompt.ground_truth is None]
    if not missing:
        return
    if len(missing) < len(prompts):
        expected = "one in reward_model.ground_truth or answer, "
        expected += f"as {len(prompts) - len(missing)} of {len(prompts)} rows have one"
        change = "correct the row, exclude such rows (data.filter.answer.not=null), or set data.answer_key if another "
        change += "field has the ground truth"
        raise DataError(f"row {missing[0]}: ground truth", None, expected, change)
    logger.warning(
        "none of %d rows has a ground truth (neither reward_model.ground_truth nor answer): the reward function gets "
        "None; set data.answer_key if another field has it",
        len(prompts),
    )


class Template:
    """The jinja template that is the value of the config key `key`, as text or as the path of a `.jinja` file.

    Raises: DataError for a file that is missing or not UTF-8, and for an error in the template."""

    def __init__(self, key: str, text: str) -> None:
        self.key = key
        if text.endswith(".jinja"):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except FileNotFoundError as error:
                raise DataError(key, f"{text} does not exist", "a file", "correct the path") from error
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(key, f"{text} cannot be read: {error}", "", "save it as UTF-8") from error
        try:
            with bounded():  # compiling evaluates constant expressions
                self._compiled = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{key}: line {error.lineno}", f"{error.message}", "", "correct the template") from error
        except Exception as error:  # errors of Python in the code that jinja generates
            raise DataError(key, f"cannot be compiled: {cause(error)}", "", "write it more simply") from error

    def render(self, fields: Mapping[str, Any]) -> str:
        """Renders the template for the fields of a row.  Raises: DataError, also beyond the limits of `whet.limits`."""
        try:
            with bounded():
                return self._compiled.render(fields)
        except jinja2.UndefinedError as error:
            raise DataError(self.key, f"{error.message}", f"fields of the row: {', '.join(fields)}") from error
        except Exception as error:  # a template is other people's code
            raise DataError(self.key, f"cannot be rendered: {cause(error)}", "", "correct the template") from error
