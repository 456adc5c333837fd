# SPDX-License-Identifier: Apache-2.0
"""The column `teacher_log_probs`: a teacher's log-probs of the policy's own responses. The teacher is another model, or
the policy itself with a hint in its prompt; responses keep their token ids.

A hint source is a registered function that takes the step's groups and returns a hint, or None, for each trajectory.
Its parameters before `*` are any of `groups`, `sources` and `chat`, the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.config.environment import ToolsConfig
from whet.config.schema import DataConfig, TeacherConfig
from whet.data.prompts import PromptFormat, Template
from whet.environments.toolbox import with_tools
from whet.errors import ConfigError, DataError
from whet.models.positions import position_ids
from whet.registry import HINTS, register_hint
from whet.trainers.columns import Sources, Values, register_provider
from whet.types import Group, Message, Prompt, Trajectory, trajectories_of

Hints = list[list[str | None]]  # by group and trajectory


@register_provider("teacher_log_probs", options={"teacher": "teacher", "data": "data", "environment": "environment"})
def teacher_log_probs(
    batch: Batch, sources: Sources, *, teacher: TeacherConfig, data: DataConfig, environment: ToolsConfig
) -> Values:
    """Computes log-probs of responses under their data source's teacher or the policy; `teacher.hint` changes prompts.

    Raises: ConfigError for a row without a teacher."""
    asked = batch
    if teacher.hint is not None:
        asked = with_hints(batch, sources, teacher, chat_of(sources.rollouts.tokenizer, data, environment))
    if not teacher.model_paths:
        return sources.start("actor", asked, "log_probs")
    routed = [source if source in teacher.model_paths else "*" for source in batch["data_source"]]
    if "*" in routed and "*" not in teacher.model_paths:
        expected = f"data sources with a teacher: {', '.join(teacher.model_paths)}"
        found = f"no teacher for the data source {batch['data_source'][routed.index('*')]!r}"
        raise ConfigError("teacher.model_paths", found, expected, "add a teacher for it, or for all others as '*'")
    rows = {name: [row for row, each in enumerate(routed) if each == name] for name in dict.fromkeys(routed)}
    begun = {name: sources.start(teacher_role(name), asked[own], "log_probs") for name, own in rows.items()}

    def given() -> torch.Tensor:
        column = torch.zeros(batch["response_mask"].shape)
        for name, own in rows.items():
            column[own] = begun[name]()
        return column

    return given


def teacher_role(data_source: str) -> str:
    """The name of the role that teaches rows of a data source."""
    return f"teacher:{data_source}"


def with_hints(batch: Batch, sources: Sources, teacher: TeacherConfig, chat: PromptFormat) -> Batch:
    """Adds a hint to each row's prompt. A row whose prompt was rewritten during the episode stays unchanged."""
    trajectories = trajectories_of(sources.groups)
    hints = [hint for group in hints_of(sources, teacher, chat) for hint in group]
    prompts = [own_prompt(row) for row in zip(batch["prompts"], batch["attention_mask"], strict=True)]
    owners = batch["trajectory_uid"].tolist()
    hintable = [
        row
        for row, owner in enumerate(owners)
        if hints[owner] and tuple(prompts[row]) == trajectories[owner].prompt.token_ids
    ]
    hinted = [(trajectories[owners[row]].prompt, str(hints[owners[row]])) for row in hintable]
    encoded = encode_hinted(hinted, teacher, chat)
    for row, ids in zip(hintable, encoded, strict=True):
        prompts[row] = ids
    return with_prompts(batch, prompts, chat.tokenizer.pad_token_id)


def hints_of(sources: Sources, teacher: TeacherConfig, chat: PromptFormat) -> Hints:
    """Calls the hint source that `teacher.hint` names.  Returns its hints."""
    entry, supplied = HINTS[teacher.hint or ""], {"groups": sources.groups, "sources": sources, "chat": chat}
    found: Hints = entry.make(supplied, entry.resolve_options(teacher.hint_options, "teacher.hint_options"))
    return found


def encode_hinted(asked: Sequence[tuple[Prompt, str]], teacher: TeacherConfig, chat: PromptFormat) -> list[list[int]]:
    """Encodes each prompt with its hint: `teacher.hint_template`, rendered with both, replaces the last message."""
    tokenizer, template = chat.tokenizer, Template("teacher.hint_template", teacher.hint_template)
    conversations = []
    for prompt, hint in asked:
        if prompt.media:
            change = "unset teacher.hint, or exclude such rows (data.filter)"
            raise DataError(f"row {prompt.index}", "has images or videos", "a prompt of text, for hints", change)
        cut = tokenizer(hint, add_special_tokens=False)["input_ids"][: teacher.max_hint_tokens]
        last = prompt.messages[-1]
        text = template.render({"content": last.content, "hint": tokenizer.decode(cut)})
        conversations.append([*prompt.messages[:-1], Message(last.role, text, last.fields)])
    return chat.encode(conversations) if conversations else []


def chat_of(tokenizer: PreTrainedTokenizerBase, data: DataConfig, environment: ToolsConfig) -> PromptFormat:
    """Returns the chat format of prompts, without `format_prompt`, which has already been applied to the messages."""
    kwargs = with_tools(data, environment).chat_template_kwargs
    return PromptFormat(tokenizer, apply_chat_template=data.apply_chat_template, chat_template_kwargs=kwargs)


def own_prompt(row: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """A row's prompt without its padding."""
    prompt, mask = row
    ids: list[int] = prompt[mask[: len(prompt)].bool()].tolist()
    return ids


def with_prompts(batch: Batch, prompts: Sequence[Sequence[int]], pad_token_id: Any) -> Batch:
    """Replaces the prompts of the batch by `prompts`; the responses stay."""
    width, old = max(len(prompt) for prompt in prompts), batch["prompts"].shape[1]
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    attention_mask = torch.cat([mask, batch["attention_mask"][:, old:]], 1)
    return Batch.of(
        {
            "prompts": ids,
            "responses": batch["responses"],
            "input_ids": torch.cat([ids, batch["responses"]], 1),
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask),
            "response_mask": batch["response_mask"],
        }
    )


@register_hint("reference")
def reference(groups: Sequence[Group], *, field: str | None = None) -> Hints:
    """Hints from the data: `extra_info[field]`, else `extra_info["solution"]`, else the ground truth."""
    return [[_solution(group.prompt, field)] * len(group.trajectories) for group in groups]


@register_hint("peer")
def peer(groups: Sequence[Group]) -> Hints:
    """Hints from the group: a correct response of another trajectory; None if there is none."""

    def of(group: Group, own: Trajectory) -> str | None:
        correct = [each for each in group.trajectories if each.failure is None and (each.accuracy or 0.0) >= 1.0]
        return next((text(other) for other in correct if other is not own), None)

    return [[of(group, own) for own in group.trajectories] for group in groups]


@register_hint("own")
def own(
    groups: Sequence[Group],
    sources: Sources,
    chat: PromptFormat,
    *,
    question: str = "Say in one sentence what to watch for in this problem, without solving it.\n\n{{ content }}",
    max_tokens: Annotated[int, Ge(1)] = 64,
) -> Hints:
    """Hints that the policy itself writes on request."""
    template = Template("teacher.hint_options.question", question)
    asking = []
    for group in groups:
        last = group.prompt.messages[-1]
        messages = (*group.prompt.messages[:-1], replace(last, content=template.render({"content": last.content})))
        asking.append(replace(group.prompt, uid=f"{group.prompt.uid}:hint", messages=messages))
    encoded = chat.encode([prompt.messages for prompt in asking])
    asking = [replace(prompt, token_ids=tuple(ids)) for prompt, ids in zip(asking, encoded, strict=True)]
    params = replace(sources.rollouts.params, max_new_tokens=max_tokens)
    sampled = sources.rollouts.sample(asking, 1, params, step=sources.step, purpose="hint", is_scored=False)
    texts = [text(trajectory) for trajectory in trajectories_of(sampled)]
    return [[hint] * len(group.trajectories) for group, hint in zip(groups, texts, strict=True)]


def text(trajectory: Trajectory) -> str | None:
    """The text of the model's last message."""
    written = [str(message.content) for message in trajectory.messages if message.role == "assistant"]
    return written[-1] if written else None


def _solution(prompt: Prompt, field: str | None) -> str | None:
    if field is not None and field not in prompt.extra_info:
        expected = f"a field of row {prompt.index}, which has {', '.join(prompt.extra_info) or 'no other fields'}"
        raise ConfigError("teacher.hint_options.field", field, expected)
    found = prompt.extra_info.get(field or "solution", prompt.ground_truth)
    return None if found is None else str(found)
