# SPDX-License-Identifier: Apache-2.0
"""Responses in the form of the OpenAI API, whole or in chunks, made from sampled tokens. Their text has whole
characters and ends before a stop string. Registered tool parsers find tool calls in it."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress, groupby
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from whet.environments.calls import CONTROL, Call, parts_of
from whet.errors import describe
from whet.plugins.serving.bodies import ApiError, ClientRequest, Raw, ToolsAsked
from whet.registry import TOOL_PARSERS
from whet.rollout.protocol import Likeliest
from whet.rollout.stop_strings import BROKEN
from whet.types import FinishReason, Versions

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies


class TokenText(NamedTuple):
    """The text and bytes of a single token."""

    text: str  # with the replacement character for a part of a character
    utf8: tuple[int, ...]


class TokenTexts:
    """The text and bytes of single tokens; the bytes of consecutive tokens join to the bytes of their text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._found: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        if token not in self._found:
            utf8 = self._utf8(token)
            self._found[token] = TokenText(utf8.decode(errors="replace"), tuple(utf8))
        return self._found[token]

    def _utf8(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = cast(str | None, self._tokenizer.convert_ids_to_tokens(token))
        if piece is None:  # a row of the embedding without a token
            return b""
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


class TextStream:
    """The text of a response whose tokens arrive in parts, without special tokens. A character is returned once all its
    bytes have arrived. The parts together equal the text of all tokens at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Tokens from a place where a character begins; the first ones were given, and are kept because many tokenizers
        # leave out the space before the first word.
        self._ids: list[int] = []
        self._next = 0  # number of tokens that the next window leaves out
        self._given = 0  # characters of the window's text

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Returns the text that these tokens complete; with the last tokens all remaining text."""
        self._ids += token_ids
        text = self._decode()
        whole = text if is_last else text.rstrip(BROKEN)
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        if new and whole == text:
            del self._ids[: self._next]
            self._next, self._given = len(self._ids), len(self._decode())
        return new

    def _decode(self) -> str:
        return cast(str, self._tokenizer.decode(self._ids, skip_special_tokens=True))


class StopCut:
    """Cuts text that arrives in parts before the first stop string. Holds back text that may begin a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held, self._is_over = strings, "", False

    def add(self, text: str, *, is_last: bool = False) -> str:
        """Returns the text that certainly lies before every stop string."""
        if self._is_over:
            return ""
        text = self._held + text
        places = [text.find(string) for string in self._strings if string in text]
        self._is_over = bool(places)
        end = min(places) if places else len(text) if is_last else len(text) - num_begun(text, self._strings)
        self._held = text[end:]
        return text[:end]


class MarkedText:
    """The text of a response before the first stop string, and its marks: special tokens that tool parsers may read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], marks: Mapping[int, str]) -> None:
        self._text, self._cut, self._marks = TextStream(tokenizer), StopCut(stop), marks
        self._waiting: deque[tuple[int, str]] = deque()  # marks, and the number of characters before each
        self._num_read = self._num_given = 0  # characters, without those of marks

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> list[tuple[str, bool]]:
        """Returns the parts that are certain after these tokens, in order: (text, False) or (mark, True)."""
        read = ""
        for is_mark, run in groupby(token_ids, self._marks.__contains__):
            if is_mark:
                self._waiting += [(self._num_read + len(read), self._marks[token]) for token in run]
            else:
                read += self._text.add(list(run))
        read += self._text.add((), is_last=is_last)
        self._num_read += len(read)
        known, parts = self._cut.add(read, is_last=is_last), list[tuple[str, bool]]()
        while self._waiting and self._waiting[0][0] <= self._num_given + len(known):
            place, mark = self._waiting.popleft()
            before, known = known[: place - self._num_given], known[place - self._num_given :]
            parts += [(before, False), (mark, True)]
            self._num_given = place
        self._num_given += len(known)
        return [*parts, (known, False)]


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The texts of tokens that a reader should not see, such as the end of a turn."""
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def num_begun(text: str, strings: Iterable[str]) -> int:
    """Returns the number of characters at the end of `text` with which one of the strings may begin."""
    sizes = ((string, size) for string in strings for size in range(1, min(len(string), len(text) + 1)))
    begun = (size for string, size in sizes if text.endswith(string[:size]))
    return max(begun, default=0)


@dataclass(frozen=True)
class Piece:
    """A part of a sample, or all of it. Its text has no stop strings and special tokens; its ids have them."""

    text: str
    calls: Sequence[ToolCall]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Versions
    finish_reason: str | None  # of the last piece
    likeliest: Sequence[Likeliest] = ()  # in the place of each token, where they are asked for

    def for_stream(self) -> list[Piece]:
        """Splits a piece with calls and a finish reason: OpenAI's client completes calls when the reason follows."""
        if not self.calls or self.finish_reason is None:
            return [self]
        return [replace(self, finish_reason=None), Piece("", (), (), (), (), self.finish_reason)]


class ResponseChoice:
    """A choice (sample) of a response; its tokens arrive in parts."""

    def __init__(self, index: int, asked: ClientRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        number, special = index // asked.body.n, special_tokens(tokenizer) if asked.tools else {}
        params = asked.params[number]
        self.index, self.prompt_ids = index, asked.prompts[number]
        self.num_tokens = self.num_calls = self.num_shown = 0  # tokens, calls and pieces that are given
        self.num_characters = 0  # of the tokens so far, one by one
        marks = {token: text for token, text in special.items() if token not in params.stop_token_ids}
        self._text = MarkedText(tokenizer, params.stop, marks)
        ending = str(tokenizer.decode(list(self.prompt_ids[-16:]))).rstrip() if asked.tools else ""
        self._tools = ToolText(asked.tools, is_thinking=ending.endswith("<think>")) if asked.tools else None
        self._opening = [(asked.tools.opening, False)] if asked.tools else []

    def add(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Versions,
        finish_reason: FinishReason | None = None,
        likeliest: Sequence[Likeliest] = (),
    ) -> Piece:
        """Adds tokens, and returns the piece that they complete; the last tokens come with a finish reason."""
        is_last = finish_reason is not None
        parts, calls = self._text.add(token_ids, is_last=is_last), list[ToolCall]()
        text = "".join(text for text, _ in parts)
        if self._tools is not None:
            text, calls = self._tools.add([*self._opening, *parts], is_last=is_last)
            self._opening = []
        self.num_tokens += len(token_ids)
        self.num_calls += len(calls)
        called = finish_reason == "stop" and self.num_calls > 0
        return Piece(text, calls, token_ids, log_probs, versions, "tool_calls" if called else finish_reason, likeliest)


class ClientResponse:
    """The response to a request: `whole` for complete samples, or a `chunk` for each piece and an `end`."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, uid: str, model: str, asked: ClientRequest, texts: TokenTexts) -> None:
        self.asked, self.uid = asked, f"{self.prefix}-{uid}"
        self._model, self._texts, self._created = model, texts, int(time.time())
        self._version = -1

    def whole(self, samples: Sequence[tuple[ResponseChoice, Piece]]) -> Raw:
        """Returns the complete response."""
        choices = [self._full(self._choice(sample, piece), sample, piece) for sample, piece in samples]
        usage = self._usage([sample for sample, _ in samples])
        return {**self._frame(self.kind, [piece for _, piece in samples]), "choices": choices, "usage": usage}

    def chunk(self, sample: ResponseChoice, piece: Piece) -> Raw | None:
        """Returns the chunk for a piece; None if the piece has nothing for the client."""
        shows_tokens = piece.token_ids and (self.asked.body.likeliest is not None or self.asked.body.return_token_ids)
        if not (piece.text or piece.calls or piece.finish_reason or shows_tokens):
            return None
        choice = self._full(self._delta(sample, piece), sample, piece)
        frame = {**self._frame(self.chunk_kind, [piece]), "choices": [choice]}
        return {**frame, "usage": None} if self.asked.include_usage else frame

    def end(self, samples: Sequence[ResponseChoice]) -> Raw | None:
        """Returns the last chunk, with the token usage; None if the client did not request it."""
        if not self.asked.include_usage:
            return None
        return {**self._frame(self.chunk_kind, []), "choices": [], "usage": self._usage(samples)}

    def _frame(self, kind: str, pieces: Sequence[Piece]) -> Raw:
        self._version = max([self._version, *(version for piece in pieces for version, _ in piece.versions)])
        return {
            "id": self.uid,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(self._version),
        }

    def _usage(self, samples: Sequence[ResponseChoice]) -> Raw:
        prompt, completion = sum(map(len, self.asked.prompts)), sum(sample.num_tokens for sample in samples)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _full(self, choice: Raw, sample: ResponseChoice, piece: Piece) -> Raw:
        """Returns `choice` with the fields that responses of both endpoints have."""
        choice |= {"index": sample.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if self.asked.body.likeliest is not None:
            choice["logprobs"] = self._log_probs(sample, piece)
        if self.asked.body.return_token_ids:
            choice |= {} if sample.num_shown else {"prompt_token_ids": list(sample.prompt_ids)}
            choice |= {"token_ids": list(piece.token_ids), "weight_versions": [list(run) for run in piece.versions]}
        sample.num_shown += 1
        return choice

    def _choice(self, sample: ResponseChoice, piece: Piece) -> Raw:
        raise NotImplementedError

    def _delta(self, sample: ResponseChoice, piece: Piece) -> Raw:
        raise NotImplementedError

    def _log_probs(self, sample: ResponseChoice, piece: Piece) -> Raw:
        raise NotImplementedError


class ChatAnswer(ClientResponse):
    """The response of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, sample: ResponseChoice, piece: Piece) -> Raw:
        content = None if piece.calls and not piece.text else piece.text
        message: Raw = {"role": "assistant", "content": content, "refusal": None}
        if piece.calls:
            message["tool_calls"] = [call.to_dict() for call in piece.calls]
        return {"message": message}

    def _delta(self, sample: ResponseChoice, piece: Piece) -> Raw:
        delta: Raw = {} if sample.num_shown else {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            first = sample.num_calls - len(piece.calls)
            delta["tool_calls"] = [{"index": first + at, **call.to_dict()} for at, call in enumerate(piece.calls)]
        return {"delta": delta}

    def _log_probs(self, sample: ResponseChoice, piece: Piece) -> Raw:
        likeliest = piece.likeliest or [()] * len(piece.token_ids)
        content = [
            {**self._log_prob(token, log_prob), "top_logprobs": [self._log_prob(*other) for other in others]}
            for token, log_prob, others in zip(piece.token_ids, piece.log_probs, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _log_prob(self, token: int, log_prob: float) -> Raw:
        text, utf8 = self._texts[token]
        return {"token": text, "logprob": log_prob, "bytes": list(utf8)}


class TextAnswer(ClientResponse):
    """The response of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, sample: ResponseChoice, piece: Piece) -> Raw:
        return {"text": piece.text}

    def _delta(self, sample: ResponseChoice, piece: Piece) -> Raw:
        return self._choice(sample, piece)

    def _log_probs(self, sample: ResponseChoice, piece: Piece) -> Raw:
        tokens = [self._texts[token].text for token in piece.token_ids]
        offsets = []
        for text in tokens:
            offsets.append(sample.num_characters)
            sample.num_characters += len(text)
        found, log_probs = {"tokens": tokens, "token_logprobs": list(piece.log_probs)}, list[dict[str, float]]()
        for text, log_prob, others in zip(tokens, piece.log_probs, piece.likeliest, strict=False):
            log_probs.append({})
            for other, value in [*((self._texts[token].text, each) for token, each in others), (text, log_prob)]:
                log_probs[-1].setdefault(other, value)  # of several tokens with one text the likeliest
        return {**found, "top_logprobs": log_probs or None, "text_offset": offsets}


def fingerprint(version: int) -> str:
    """The name of a weight version, for system_fingerprint; a run's checkpoint has its step as version."""
    return f"weights-{version}"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. An id has nine letters and digits, as Mistral's template requires."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])

    def to_dict(self) -> Raw:
        """Returns the call as an entry of `tool_calls` in OpenAI's chat API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolText:
    """Splits text that arrives in parts into tool calls and the text around them, as the parser splits the whole text.

    Text is returned up to where a call may begin, a call at its end, all other text with the last part. An invalid call
    stays text, and keeps its marks (special tokens) except ends of turns; other text has no marks. White space around
    calls is left out."""

    def __init__(self, asked: ToolsAsked, *, is_thinking: bool = False) -> None:
        """`is_thinking`: the prompt ends with the opening tag of a thought."""
        entry = TOOL_PARSERS[asked.parser]
        self._asked = asked
        self._begins, self._ends = entry.marks.get("begin", ()), entry.marks.get("end", ())
        # Without marks the pattern is empty, and fits everywhere: all text waits for the end.
        self._begin = re.compile("|".join([*map(re.escape, self._begins), *entry.marks.get("begin_patterns", ())]))
        self._text = "<think>" if is_thinking else ""  # all text with its marks
        self._is_shown = bytearray(len(self._text))  # 0 for characters of marks
        self._num_given = self._num_parsed = len(self._text)  # characters
        self._num_calls = 0  # given, or left out as too many
        self._space, self._is_after_call = "", False

    def add(self, parts: Sequence[tuple[str, bool]], *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Returns the text and calls that are certain. A part is (text, False) or (mark, True).  Raises: ApiError."""
        for text, is_mark in parts:
            self._text += text
            self._is_shown += bytes([not is_mark]) * len(text)
        found, new = list[str | ToolCall](), self._text[self._num_given :]
        ends = [self._num_given + new.rfind(end) + len(end) for end in self._ends if end in new]
        end = len(self._text) if is_last else max(ends, default=0)
        if (is_last or end > self._num_parsed) and self._begin.search(self._text, self._num_given, end):
            self._num_parsed = end
            found += self._parsed(end, is_last=is_last)
        known = len(self._text) if is_last else self._known()
        found.append(self._shown(self._num_given, known))
        self._num_given = max(self._num_given, known)
        return self._split(found, is_last=is_last)

    def _known(self) -> int:
        """Returns the position up to which no call can begin."""
        begin, start = self._begin.search(self._text, self._num_given), self._num_given
        end = begin.start() if begin else len(self._text) - num_begun(self._text[start:], self._begins)
        return start + len(self._text[start:end].rstrip())  # a call may begin with the white space before it

    def _parsed(self, end: int, *, is_last: bool) -> Iterator[str | ToolCall]:
        """Yields the new text and calls before `end`, without a last call that still has an error."""
        groups, num_calls = self._groups(end), 0
        if not is_last and groups and groups[-1][2] and None in map(_written, groups[-1][2]):
            end = max(self._num_given, groups.pop()[0])
        for start, stop, parts in groups:
            calls = [_written(part) for part in parts]
            begin = self._begin.search(self._text, max(start, self._num_given), stop) if calls else None
            middle = begin.start() if begin else stop
            yield self._shown(max(start, self._num_given), middle)
            valid = [call for call in calls if call is not None]
            if len(valid) < len(calls):
                yield CONTROL.sub("", self._text[max(middle, self._num_given) : stop])
                continue
            num_calls += len(valid)
            yield from valid[len(valid) - max(0, num_calls - self._num_calls) :]
            self._num_calls = max(self._num_calls, num_calls)
        self._num_given = end

    def _groups(self, end: int) -> list[tuple[int, int, list[Call]]]:
        """Returns the parts of the text before `end`: beginning, end and calls. Several calls may share one part."""
        groups, position = list[tuple[int, int, list[Call]]](), 0
        try:
            for part in parts_of(self._asked.parser, self._text[:end], self._asked.schemas, is_whole=False):
                text, calls = (part, []) if isinstance(part, str) else (part.text, [part])
                if calls and not text and groups and groups[-1][2] and groups[-1][0] < position:
                    groups[-1][2].extend(calls)
                    continue
                start = self._text.index(text, position, end)  # a user's parser may leave out text
                position = start + len(text)
                groups.append((start, position, calls))
        except Exception as error:  # the code of a user
            message = f"the tool parser {self._asked.parser} failed: {describe(error)}"
            raise ApiError(500, message, code="tool_parser_failed") from error
        return groups

    def _shown(self, start: int, stop: int) -> str:
        """Returns the text from `start` to `stop`, without its marks (special tokens)."""
        return "".join(compress(self._text[start:stop], self._is_shown[start:stop]))

    def _split(self, found: Sequence[str | ToolCall], *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Returns the text and the calls in `found`, without white space around calls, and with `most_calls` calls."""
        texts, calls = list[str](), list[ToolCall]()
        for each in found:
            if isinstance(each, ToolCall):
                calls.append(each)
                self._space, self._is_after_call = "", True
                continue
            text = self._space + (each.lstrip() if self._is_after_call else each)
            shown = text.rstrip()
            self._space = text[len(shown) :]
            self._is_after_call = self._is_after_call and not shown
            texts.append(shown)
        before, most = self._num_calls - len(calls), self._asked.most_calls
        kept = calls if most is None else calls[: max(0, most - before)]
        return "".join(texts) + (self._space if is_last else ""), kept


def _written(call: Call) -> ToolCall | None:
    """Returns the call in the form of the API; None if it has an error, or arguments that are not JSON."""
    try:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
        (call.name + arguments).encode()  # half of a surrogate pair has no encoding
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(call.name, arguments) if call.error is None else None
