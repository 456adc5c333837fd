# SPDX-License-Identifier: Apache-2.0
"""Makes comparisons from rows, for a policy or a reward model: a prompt and responses, each with a score. Reads the
forms of TRL, OpenRLHF, Llama-Factory, Axolotl and UltraFeedback."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

from whet.config.preference import ResponsesDataConfig
from whet.data.chat import as_text, encode_rendered, encode_texts, roles
from whet.data.prompts import PromptFormat, Row, at_row, find_field, from_row, read_messages
from whet.data.supervised import SupervisedExample, common_prefix, encode_conversation, encode_response
from whet.errors import DataError
from whet.options import is_number
from whet.types import Example, Media, Message

log = logging.getLogger(__name__)
COMMON = {
    "chosen_key": ("chosen", "response_w", "preferred"),
    "rejected_key": ("rejected", "response_l", "dispreferred"),
}
PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input", "messages", "conversations")
RESPONSES = ("completion", "response", "output", "answer")
LISTS = ("responses", "completions", "candidates")
LABELS = ("label", "kto_tag")
SCORES = ("scores", "ranks_scores")
ITEM_SCORES = ("score", "overall_score", "rating")  # of an item of a list that has its score
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "chosen": "assistant", "rejected": "assistant"}
Messages = tuple[Message, ...]
Answer = str | Messages
Response = tuple[tuple[int, ...], tuple[int, ...]]  # token ids, and a mask: 1 on ids that the policy would sample
_TEXT = "only text in the pairs of a reward model"


@dataclass(frozen=True)
class Comparison(Example):
    """A prompt and responses to it, best first; a single response has the score 1 for good, 0 for bad.

    For a reward model it has a `margin` (the least difference of the scores), and the prompt may be empty."""

    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    scores: tuple[float, ...]
    media: tuple[Media, ...] = ()
    margin: float | None = None

    @property
    def num_tokens(self) -> int:
        """The length of the prompt plus the longest response."""
        return len(self.prompt_ids) + max(len(ids) for ids, _ in self.responses)

    @property
    def chosen(self) -> tuple[int, ...]:
        """Token ids of the prompt and the best response."""
        return (*self.prompt_ids, *self.responses[0][0])

    @property
    def rejected(self) -> tuple[int, ...]:
        """Token ids of the prompt and the worst response."""
        return (*self.prompt_ids, *self.responses[-1][0])

    @property
    def content(self) -> tuple[object, ...]:
        if self.margin is not None:
            return self.chosen, self.rejected, self.margin
        return self.prompt_ids, self.responses, self.scores

    def texts(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns token ids and mask of the prompt with each response, by the name of the response in `whet data`."""
        named = {0: ", chosen", 1: ", rejected"} if len(self.responses) == 2 else {}
        shared = (0,) * len(self.prompt_ids)
        return {
            named.get(number, f", response {number + 1}"): ((*self.prompt_ids, *ids), (*shared, *mask))
            for number, (ids, mask) in enumerate(self.responses)
        }

    def facts(self) -> Mapping[str, object]:
        margin = {} if self.margin is None else {"margin": self.margin}
        return {**margin, "scores": list(self.scores), "lengths": [sum(mask) for _, mask in self.responses]}

    @staticmethod
    def notes(items: Sequence[Any]) -> list[str]:
        """Reports how well the length of responses predicts their order: the share of comparisons whose best response
        is longer than the worst, or of all pairs of a good and a bad response. Equal lengths count half."""
        lengths = [[sum(mask) for _, mask in each.responses] for each in items if len(each.responses) > 1]
        compared, notes = [(each[:1], each[-1:]) for each in lengths], []
        if not lengths:
            own = [(each.scores[0] != 0, sum(each.responses[0][1])) for each in items]
            good, bad = (sorted(length for label, length in own if label is wanted) for wanted in (True, False))
            compared, notes = [(good, bad)], [f"{len(good)} of {len(own)} responses are good"]
        if count := sum(len(better) * len(worse) for better, worse in compared):
            twice = sum(bisect_left(w, one) + bisect_right(w, one) for better, w in compared for one in better)
            one, other = (fmean(chain.from_iterable(each)) for each in zip(*compared, strict=True))
            notes.append(
                f"the better response is the longer one in {twice / count / 2:.1%} of {count} comparisons (mean "
                f"lengths {one:.1f} and {other:.1f}): far from 50% a model can learn the length alone"
            )
        return notes

    @property
    def is_equal(self) -> bool:
        """Tells whether all responses are equal, or all scores are equal."""
        distinct = min(len({ids for ids, _ in self.responses}), len({*self.scores}))
        return len(self.responses) > 1 and distinct == 1

    @cached_property
    def digest(self) -> str:
        """The digest of tokens and media."""
        media = [each.digest for each in self.media]
        return hashlib.sha256(json.dumps([self.content, media]).encode()).hexdigest()


def build_comparisons(
    rows: Sequence[Row], prompt_format: PromptFormat, data: ResponsesDataConfig, *, numbers: Sequence[int] | None = None
) -> tuple[Comparison | StepExample, ...]:
    """Makes comparisons from rows, in order; `numbers` are the row numbers for errors.

    A row has two responses (chosen, rejected), one response with a label, or a list with scores. They are texts,
    messages, or whole conversations without a prompt. Comparisons whose responses or scores are all equal are dropped;
    with data.overlong=drop also those over data.max_length. If the first row has a list of `labels`, a reward model
    gets `StepExample`s.  Raises: DataError for a row of another form, for a row that is too long if
    data.overlong=error, and if no row is left."""
    of_steps = "margin_key" in data and bool(rows) and isinstance(rows[0].get("labels"), list)
    made: list[Comparison | StepExample] = []
    num_equal = num_long = 0
    for index, row in zip(range(len(rows)) if numbers is None else numbers, rows, strict=True):
        noted = len(prompt_format.lost)
        with at_row(index):
            each = _steps(row, prompt_format, data) if of_steps else _comparison(index, row, prompt_format, data)
        del prompt_format.lost[noted + 1 :]  # keeps one of each row
        is_long = each.num_tokens > data.max_length
        if is_long and data.overlong == "error":
            expected = f"at most data.max_length={data.max_length} with its prompt"
            key, change = f"row {index}: number of tokens", "raise it, or set data.overlong=drop"
            raise DataError(key, each.num_tokens, expected, change)
        num_equal, num_long = num_equal + each.is_equal, num_long + (is_long and not each.is_equal)
        made += [] if each.is_equal or is_long else [each]
    found = f"{num_long} of {len(rows)} rows over data.max_length={data.max_length} tokens, and {num_equal} with"
    if not made:
        expected = f"at least one row that is left: dropped {found} equal responses or scores"
        raise DataError("data.max_length", data.max_length, expected, "raise it, or correct the rows")
    if num_equal or num_long:
        log.warning("dropped %s equal responses or scores", found)
    prompt_format.warn_lost(len(rows))
    return tuple(made)


@dataclass(frozen=True)
class StepExample(SupervisedExample):
    """A prompt and reasoning steps, labelled from 0 (wrong) to 1 (right). The mask is 1 on the token after a step."""

    labels: tuple[float, ...] = ()

    @property
    def content(self) -> tuple[object, ...]:
        return *super().content, self.labels

    @property
    def is_equal(self) -> bool:
        """Returns False, because the example is not a comparison."""
        return False

    def facts(self) -> Mapping[str, object]:
        return {"labels": list(self.labels)}


def _steps(row: Row, prompt_format: PromptFormat, data: ResponsesDataConfig) -> StepExample:
    """Makes the example of a row of steps. Each step is encoded separately and ends with a line break."""
    prompt_format.refuse_media(row, expected="only text in rows of steps")
    steps, labels = row.get("completions"), row.get("labels")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError("field 'completions'", f"is {str(steps)[:80]!r}", "a list of texts, the steps", "correct it")
    shares = [each for each in labels if isinstance(each, int | float) and 0 <= each <= 1] if labels else []
    if labels != shares or len(shares) != len(steps):
        expected = f"a label from 0 (wrong) to 1 (right) for each of the {len(steps)} steps"
        raise DataError("field 'labels'", f"is {str(labels)[:80]!r}", expected, "correct it")
    messages = prompt_format.messages(row, find_field(row, data.prompt_key, "data.prompt_key", PROMPTS))
    *prompt, end = encode_response(_with_system(row, messages, prompt_format), "", prompt_format).input_ids
    texts, tokenizer = [f"{step}\n" for step in steps], prompt_format.tokenizer
    if prompt_format.apply_chat_template:
        texts = as_text(tokenizer, texts, prompt_format.chat_template_kwargs)
    parts = encode_rendered(tokenizer, texts)
    ends = [int(at == len(part)) for part in parts for at in range(1, len(part) + 1)]
    ids = (*prompt, *chain.from_iterable(parts), end)
    return StepExample(ids, (0,) * (len(prompt) + 1) + tuple(ends), labels=tuple(map(float, shares)))


def _comparison(index: int, row: Row, prompt_format: PromptFormat, data: ResponsesDataConfig) -> Comparison:
    responses, scores = _responses(row, data)
    margin = _margin(row, data["margin_key"]) if "margin_key" in data else None
    name = _first(row, [each for each in (data.prompt_key, *PROMPTS) if each not in dict(responses)])
    prompt = None if name is None else _prompt(row, name, prompt_format)
    answers = [_answer(row, *each, prompt_format) for each in responses]
    if prompt is None or any(each[0].role in ("system", "user") for each in answers if not isinstance(each, str)):
        prompt, answers = _shared_messages(row, prompt, answers, prompt_format, is_needed=margin is None)
    placed, media = prompt_format.with_media(row, prompt) if prompt and margin is None else (prompt, ())
    if margin is not None:
        prompt_format.refuse_media(row, placed, _TEXT)
        if len(responses) == 1:
            raise DataError(f"field {responses[0][0]!r}", "is the only response", "two responses, or a list")
    media = from_row(index, media)
    named = zip((name for name, _ in responses), answers, strict=True)
    examples = [_encode(placed, *each, prompt_format, media) for each in named]
    order = sorted(range(len(examples)), key=lambda number: -scores[number])  # stable
    whole = [examples[number] for number in order]
    shared = _num_shared(whole, bool(prompt))
    ends = [len(example.loss_mask) - example.loss_mask[::-1].index(1) for example in whole]
    parts = [
        (example.input_ids[shared:end], example.loss_mask[shared:end]) for example, end in zip(whole, ends, strict=True)
    ]
    if not shared and margin is None:
        raise DataError("prompt", "is empty", "at least one token before the responses", "correct the row")
    ordered = tuple(scores[number] for number in order)
    return Comparison(whole[0].input_ids[:shared], tuple(parts), ordered, media, margin)


def _margin(row: Row, field: str) -> float:
    value = row.get(field)
    if value is None:
        return 0.0
    if not is_number(value) or not math.isfinite(value):
        raise DataError(f"field {field!r}", f"is {value!r}", "a number", "correct it, or set data.margin_key")
    return float(value)


def _num_shared(examples: Sequence[SupervisedExample], has_prompt: bool) -> int:
    """Counts the tokens that all responses share: the prompt, or the common beginning of whole texts."""
    first, *others = examples
    limit = min(each.loss_mask.index(1) for each in examples) if has_prompt or not others else len(first.input_ids)
    agree = [common_prefix(first.input_ids, other.input_ids) for other in others]
    return min(limit, *agree, *(len(each.input_ids) - 1 for each in examples))


def _responses(row: Row, data: ResponsesDataConfig) -> tuple[list[tuple[str, Any]], list[float]]:
    """Finds the responses of a row.  Returns pairs of field name and unchanged value, and the scores."""
    is_pair = all(row.get(data[key]) is not None for key in COMMON)  # whatever other fields it has
    if not is_pair and (listed := _first(row, LISTS)) is not None:
        return _listed(row, listed)
    is_pair = is_pair or all(_first(row, names) for names in COMMON.values())
    if not is_pair and (label := _first(row, LABELS)) is not None:
        if not isinstance(row[label], bool) and row[label] not in (0, 1):
            raise DataError(f"field {label!r}", f"is {row[label]!r}", "true (good) or false (bad)", "correct it")
        whole = [name for name in (data.prompt_key, *PROMPTS[-2:]) if isinstance(row.get(name), list)]
        name = _first(row, RESPONSES) or find_field(row, whole or PROMPTS[-2:], "data.prompt_key", RESPONSES)
        return [(name, row[name])], [float(row[label])]
    output = row.get("output")
    if not is_pair and isinstance(output, list) and len(output) == 2 and _first(row, COMMON["chosen_key"]) is None:
        return [("output", each) for each in output], [1.0, 0.0]  # Llama-Factory's first form
    keys = [find_field(row, data[key], f"data.{key}", names) for key, names in COMMON.items()]
    return [(name, row[name]) for name in keys], [1.0, 0.0]


def _listed(row: Row, name: str) -> tuple[list[tuple[str, Any]], list[float]]:
    """Finds the responses in the list field `name`. Scores are in a parallel field or in the items of the list."""
    items = row[name]
    if not isinstance(items, list) or len(items) < 2:
        raise DataError(f"field {name!r}", f"is {str(items)[:80]!r}", "a list of two responses or more", "correct it")
    if (field := _first(row, SCORES)) is not None:
        scores, responses = row[field], items
    else:
        keys = [_first(item, ITEM_SCORES) if isinstance(item, Mapping) else None for item in items]
        if None in keys:
            expected = f"a field {' or '.join(SCORES)} beside it, or {' or '.join(ITEM_SCORES)} in each item"
            raise DataError(f"field {name!r}", "has no scores", expected, "add them")
        field, scores = name, [item[key] for item, key in zip(items, keys, strict=True)]
        texts = [_first(item, (*RESPONSES, "content", "text")) for item in items]
        if None in texts:
            raise DataError(f"field {name!r}", f"item {texts.index(None)} has no text", "response, content or text")
        responses = [item[text] for item, text in zip(items, texts, strict=True)]
    if not isinstance(scores, list) or len(scores) != len(items):
        raise DataError(f"field {field!r}", f"is {str(scores)[:80]!r}", f"a list of {len(items)} numbers", "correct it")
    wrong = [score for score in scores if not is_number(score) or not math.isfinite(score)]
    if wrong:
        raise DataError(f"field {field!r}", f"has {wrong[0]!r}", "numbers", "correct it")
    return [(name, each) for each in responses], [float(score) for score in scores]


def _prompt(row: Row, name: str, prompt_format: PromptFormat) -> Messages:
    """Returns the messages of the prompt in field `name`."""
    value = row[name]
    if isinstance(value, list):
        row = {**row, name: as_messages(value)}
    elif name == "instruction" and isinstance(row.get("input"), str) and row["input"]:
        row = {**row, name: f"{value}\n{row['input']}"}
    return _with_system(row, prompt_format.messages(row, name), prompt_format)


def _with_system(row: Row, messages: Messages, prompt_format: PromptFormat) -> Messages:
    """Puts the text in the row's field `system` in front of messages that have no system message."""
    system = row.get("system")
    if isinstance(system, str) and system and messages[0].role != "system" and prompt_format.apply_chat_template:
        return (Message("system", system), *messages)
    return messages


def as_messages(value: Any) -> Any:
    """Converts a message, or a list in ShareGPT's form {"from", "value"}, to a list of messages {"role", "content"}."""
    if isinstance(value, Mapping):
        return as_messages([value])
    if not isinstance(value, list):
        return value
    return [
        {"role": ROLES.get(str(each["from"]), each["from"]), "content": each.get("value")}
        if isinstance(each, Mapping) and "from" in each
        else each
        for each in value
    ]


def _answer(row: Row, name: str, value: Any, prompt_format: PromptFormat) -> Answer:
    """Reads a response as text or messages.  Raises: DataError."""
    if isinstance(value, str):
        return value
    messages = read_messages({**row, name: as_messages(value)}, name, "text, or ")
    if messages[-1].role != "assistant":
        found = f"ends in a message of the role {messages[-1].role!r} (roles {roles(messages)})"
        raise DataError(f"field {name!r}", found, "the response last, of the role 'assistant'", "correct the row")
    return tuple(messages)


def _shared_messages(
    row: Row, prompt: Messages | None, answers: list[Answer], prompt_format: PromptFormat, *, is_needed: bool
) -> tuple[Messages, list[Answer]]:
    """Splits conversations into their common first messages, and the remaining messages of each. Texts share none. The
    conversations of a row with a `prompt` begin with it."""
    conversations = [_with_system(row, each, prompt_format) for each in answers if not isinstance(each, str)]
    if prompt is not None:
        head = [each for each in prompt[:1] if each.role == "system"]
        conversations = [each if each[0].role == "system" else (*head, *each) for each in conversations]
        begun = [each if head or each[0].role != "system" else each[1:] for each in conversations]
        odd = [each[0].content for each in begun if _said(each[: len(prompt)]) != _said(prompt)]
        if odd or len(conversations) < len(answers):
            found = f"begin with {odd[0]!r:.80}" if odd else "are a text and a conversation"
            expected = f"responses alone, or conversations that begin with the prompt, {prompt[-1].content!r:.80}"
            raise DataError("responses", found, expected, "correct the row, or set data.prompt_key")
    if len(conversations) < len(answers):
        if prompt_format.apply_chat_template:
            change = "set data.prompt_key, or data.apply_chat_template=false for whole texts"
            found = f"is missing (the row has {', '.join(row)}), and a response is a text"
            raise DataError("prompt", found, "a prompt, or lists of messages", change)
        return (), answers
    shared = 0
    shortest = min(map(len, conversations)) - 1
    while shared < shortest and len({repr(each[shared]) for each in conversations}) == 1:
        shared += 1
    if len(conversations) == 1:
        shared = shortest
    after = conversations[0][shared]
    if after.role == "user" and all(each.role == "system" for each in conversations[0][:shared]):
        shared = 0  # a system message alone is no prompt
    if not shared and is_needed:
        found = f"begin with other messages: {after.content!r}"
        raise DataError("responses", found, "conversations with the same first message", "set data.prompt_key")
    return conversations[0][:shared], [each[shared:] for each in conversations]


def _said(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Returns role and text of messages, to compare them."""
    return [(each.role, str(each.content).strip()) for each in messages]


def _encode(
    prompt: Messages, name: str, answer: Answer, prompt_format: PromptFormat, media: tuple[Media, ...]
) -> SupervisedExample:
    """Encodes prompt and response. The mask is 1 on tokens that the policy would sample after the prompt."""
    if isinstance(answer, str) and prompt:
        return encode_response(prompt, answer, prompt_format, media)
    if isinstance(answer, str):  # a whole text: the beginning that all share becomes the prompt
        [ids] = encode_texts(prompt_format.tokenizer, [answer], add_special_tokens=True)
        if not ids:
            raise DataError(f"field {name!r}", "is an empty text without a prompt", "at least one token", "correct it")
        return SupervisedExample((*ids, prompt_format.tokenizer.eos_token_id), (0, *[1] * len(ids)))
    prompt_format.refuse_media({}, answer, "images and videos in the prompt alone")
    example = encode_conversation((*prompt, *answer), prompt_format, media)
    if not prompt:
        return example
    [head] = prompt_format.encode([prompt], media=[media])
    start = common_prefix(head, example.input_ids)
    return SupervisedExample(example.input_ids, (0,) * start + example.loss_mask[start:], media)


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)
