# SPDX-License-Identifier: Apache-2.0
"""`judge_scores`: a judge scores responses by a rubric. The judge is the policy or the role `reward_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from whet.batch import Batch
from whet.config.schema import DataConfig
from whet.data.prompts import PromptFormat
from whet.plugins.scores.judge.rubrics import Rubric, load_rubric
from whet.trainers.columns import ScoreColumn, Sources, last_rows, register_provider
from whet.trainers.teacher import text
from whet.types import Failure, Message, Prompt, Trajectory, trajectories_of

UNREADABLE = (
    "the judge's verdict has no score where the rubric {rubric} wants one; it ends with {said!r}: use a stronger "
    "model, another rubric, or llm_judge with an endpoint"
)


@register_provider(
    "judge_scores",
    shape="B",
    phase="reward_model",
    options={"rubric": "reward_model.rubric", "data": "data"},
)
def judge_scores(batch: Batch, sources: Sources, *, rubric: str, data: DataConfig) -> ScoreColumn:
    """Returns the judge's score from 0 to 1, by `reward_model.rubric`, at the last row of each trajectory. The score is
    0 at other rows and for failed trajectories. A trajectory fails if its verdict cannot be read.   [B]"""
    rollouts, asks = sources.rollouts.judge or sources.rollouts, load_rubric(rubric)
    trajectories = trajectories_of(sources.groups)
    judged = [each for each in trajectories if each.failure is None]
    template = PromptFormat(rollouts.tokenizer, chat_template_kwargs=data.chat_template_kwargs)
    asking = _questions(judged, asks, template)
    params = replace(rollouts.params, temperature=0.0, top_p=1.0, top_k=0)
    replies = rollouts.sample(asking, 1, params, step=sources.step, purpose="judge", is_scored=False)
    given, failures = dict[str, float](), dict[str, Failure]()
    for each, reply in zip(judged, trajectories_of(replies), strict=True):
        said = text(reply) or ""
        if reply.failure is not None:
            why = f"the judge gave no verdict, it failed in the {reply.failure.source}: {reply.failure.message}"
            failures[each.uid] = replace(reply.failure, source="reward", message=why)
        elif (value := asks.read(said)) is None:
            failures[each.uid] = Failure("reward", UNREADABLE.format(rubric=asks.name, said=said[-80:]))
        else:
            given[each.uid] = value
    scores = torch.tensor([given.get(each.uid, 0.0) for each in trajectories])
    return ScoreColumn(torch.where(last_rows(batch).bool(), scores[batch["trajectory_uid"]], 0.0), failures)


def _questions(judged: Sequence[Trajectory], rubric: Rubric, template: PromptFormat) -> list[Prompt]:
    """Returns for each trajectory the prompt that asks the judge to score its response."""
    conversations = []
    for trajectory in judged:
        prompt, truth = trajectory.prompt, trajectory.prompt.ground_truth
        texts = {
            "prompt": str(prompt.messages[-1].content) if prompt.messages else "",
            "response": text(trajectory) or "",
            "ground_truth": "" if truth is None else str(truth),
        }
        conversations.append([Message(each["role"], each["content"]) for each in rubric.messages(texts)])
    encoded = template.encode(conversations) if conversations else []
    return [
        Prompt(f"{each.uid}:judge", each.prompt.index, tuple(messages), tuple(ids), each.prompt.data_source, None)
        for each, messages, ids in zip(judged, conversations, encoded, strict=True)
    ]
