# SPDX-License-Identifier: Apache-2.0
"""Converts between the tokens of an episode and its messages, by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from whet.data.chat import ChatFormat
from whet.data.placeholders import has_parts, has_tag, place
from whet.data.written import warn_once
from whet.environments.protocol import Observation
from whet.environments.toolbox import Tools
from whet.errors import DataError
from whet.types import Media, Message

BARE_TAG = (
    "an observation of the environment has <image> or <video> in its text and no media: the model reads the tag as "
    "text (this is logged once); return Observation(..., media=(whet.data.media.image(...),)), or leave the tag out"
)


@dataclass(eq=False)
class TemplateCodec(ChatFormat):
    """Converts between the tokens of an episode and its messages."""

    tools: Tools | None = None  # with the parser of their calls; `chat_template_kwargs` describe them to the model

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[Mapping[str, Any], ...]:
        return () if self.tools is None else self.tools.calls(self.tokenizer, token_ids, turn)

    def read(self, observation: Observation) -> Observation:
        """Converts images and videos of the observation to content parts; counts their tokens.  Raises: DataError."""
        if any(has_parts(task.messages) for task in observation.tasks):
            raise DataError("task for a sub-agent", "has images or videos", "only text", "describe them in the text")
        if observation.media or has_parts(observation.messages):
            return self._with_media(observation)
        if self.reader is not None and has_tag(observation.messages, self.reader.kinds):
            warn_once(BARE_TAG)  # no error: the tag may be plain text
        return observation

    def _with_media(self, observation: Observation) -> Observation:
        if self.reader is None and all("tool_call_id" in message.fields for message in observation.messages):
            warn_once("a tool gave an image, but the model reads only text: it gets the text [image] (logged once)")
            return replace(observation, messages=tuple(map(_as_text, observation.messages)), media=())
        if self.reader is None:
            raise DataError("observation", "has images or videos", "text, which the model reads", "leave them out")
        given, owner = [(each.kind, each) for each in observation.media], "observation that the environment returned"
        placed, values = place(observation.messages, given, self.reader.kinds, owner)
        media = tuple(self.reader.read(*value) for value in values)
        return replace(observation, messages=placed, media=media)

    def opening(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> list[int]:
        return self.encode_texts([self.text(messages, media)])[0]


def _as_text(message: Message) -> Message:
    """Replaces each image of the message by `[image]`, for text models whose tools return images."""
    return replace(message, content="".join(str(part.get("text", f"[{part['type']}]")) for part in message.parts))
