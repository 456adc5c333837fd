# SPDX-License-Identifier: Apache-2.0
"""The text and tokens of an episode: prompts, observations and turns by the tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import as_text, encode_continuation, encode_rendered, encode_texts, plain_text, render_chat
from whet.data.media import MediaReader
from whet.data.placeholders import expanded, has_parts, has_tag, place
from whet.data.written import warn_once
from whet.environments.protocol import Observation
from whet.environments.tools.toolbox import Toolbox
from whet.errors import DataError
from whet.types import Media, Message, Turn

BARE_TAG = (
    "an observation of the environment has <image> or <video> in its text and no media: the model reads the tag as "
    "text (said once); return Observation(..., media=(whet.data.media.image(...),)), or leave the tag out"
)


class TemplateCodec:
    """The tokenizer and its chat template; without the template, text follows text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Toolbox | None = None,
        reader: MediaReader | None = None,
    ) -> None:
        """`tools` have their parser; `chat_template_kwargs` tell them to the model. `reader` is that of images and
        videos, None for a model of text."""
        self.tools, self.reader = tools, reader
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        self.chat_template_kwargs = chat_template_kwargs or {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[Mapping[str, Any], ...]:
        return () if self.tools is None else self.tools.calls(self.tokenizer, token_ids, turn)

    def read(self, observation: Observation) -> Observation:
        """The observation with its images and videos measured, and a content part for each.  Raises: DataError."""
        if any(has_parts(task.messages) for task in observation.tasks):
            raise DataError("task for a sub-agent", "has images or videos", "text", "describe them")
        if observation.media or has_parts(observation.messages):
            return self._with_media(observation)
        if self.reader is not None and has_tag(observation.messages, self.reader.kinds):
            warn_once(BARE_TAG)  # perhaps text of somebody else
        return observation

    def _with_media(self, observation: Observation) -> Observation:
        if self.reader is None and all("tool_call_id" in message.fields for message in observation.messages):
            warn_once("a tool gave an image, but the model reads only text: it reads [image] in its place (said once)")
            return replace(observation, messages=tuple(map(_as_text, observation.messages)), media=())
        if self.reader is None:
            raise DataError("observation", "has images or videos", "text, as the model reads it", "leave them out")
        given, owner = [(each.kind, each) for each in observation.media], "observation that the environment returned"
        placed, values = place(observation.messages, given, self.reader.kinds, owner)
        media = tuple(self.reader.read(*value) for value in values)
        return replace(observation, messages=placed, media=media)

    def opening(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> list[int]:
        if self.apply_chat_template:
            options = self.chat_template_kwargs
            text = render_chat(self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)
            return encode_rendered(self.tokenizer, [expanded(text, media)])[0]
        text = plain_text(self.tokenizer, messages, media)
        return encode_texts(self.tokenizer, [text], add_special_tokens=True)[0]

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media] = ()
    ) -> list[int]:
        if self.apply_chat_template:
            options = self.chat_template_kwargs
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=options, media=media
            )
        text = plain_text(
            self.tokenizer, new, media, lambda own: as_text(self.tokenizer, own, self.chat_template_kwargs)
        )
        return encode_rendered(self.tokenizer, [text])[0]


def _as_text(message: Message) -> Message:
    """The message with `[image]` in the place of an image, for a model of text, whose tools may be other people's."""
    parts = [message.content] if isinstance(message.content, str) else message.content
    told = [part if isinstance(part, str) else str(part.get("text", f"[{part['type']}]")) for part in parts]
    return replace(message, content="".join(told))
