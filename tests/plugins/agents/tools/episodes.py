# SPDX-License-Identifier: Apache-2.0
"""An episode with tools whose turns are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.rollout.playing import Playing, World
from whet.config.schema import DataConfig, EnvironmentConfig
from whet.data.chat import encode_rendered, render_chat
from whet.environments.toolbox import with_tools
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.rollout.protocol import Completion, Finished, Request, SamplingParams
from whet.types import Message, Prompt


class Says:
    """An engine that returns scripted texts, turn by turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], end: str) -> None:
        self.turns = [tuple(tokenizer.encode(turn + end, add_special_tokens=False)) for turn in turns]
        self.requests: list[Request] = []
        self.events: list[Finished] = []

    def submit(self, request: Request) -> bool:
        ids = self.turns[len(self.requests)]
        self.requests.append(request)
        done = Completion(ids, (-1.0,) * len(ids), "stop", ((0, len(ids)),))
        self.events.append(Finished(request.uid, request.attempt, done))
        return True

    def poll(self, timeout_seconds: float) -> list[Finished]:
        events, self.events = self.events, []
        return events

    def close(self) -> None: ...


def episode(
    tokenizer: PreTrainedTokenizerBase,
    config: EnvironmentConfig,
    turns: Sequence[str],
    end: str = "<|im_end|>",
    *,
    fails: bool = False,
) -> Any:
    """The trajectory of a conversation."""
    data = with_tools(DataConfig(), config)
    options = data.chat_template_kwargs
    asked = (Message("user", "1+2?"),)
    text = render_chat(tokenizer, asked, add_generation_prompt=True, chat_template_kwargs=options)
    prompt = Prompt("0:0", 0, asked, tuple(encode_rendered(tokenizer, [text])[0]), "s", None)
    tools = toolbox_of(config)
    parsed = tools.with_parser(tokenizer.get_chat_template(tools=[{}]))
    collector = Playing(
        Says(tokenizer, turns, end),  # type: ignore[arg-type]
        tokenizer,
        world=World(config.name, tools=parsed, chat_template_kwargs=options),
        deadline_seconds=60.0,
    )
    try:
        [[trajectory]] = collector.collect([prompt], 1, SamplingParams(max_new_tokens=4000), step=0)
    finally:
        collector.close()
    assert fails == (trajectory.failure is not None), trajectory.failure
    return trajectory
