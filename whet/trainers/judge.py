# SPDX-License-Identifier: Apache-2.0
"""`judge_scores`: a judge scores responses by a rubric; it is the policy, or a model with the role `reward_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from whet.batch import Batch
from whet.config.schema import DataConfig, LoraConfig, TrainConfig
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.prompts import PromptFormat
from whet.models.load import load_tokenizer, stop_token_ids
from whet.rewards.judge.rubrics import Rubric, load_rubric
from whet.rollout.build import chosen_engine
from whet.rollout.collect import Collector
from whet.rollout.protocol import SamplingParams
from whet.rollout.replicas import Replicas
from whet.rollout.rollouts import Rollouts
from whet.trainers.columns import Sources, last_rows, register_provider
from whet.trainers.rollout_worker import RolloutWorker
from whet.trainers.teacher import text
from whet.types import Failure, Message, Prompt, Trajectory

OF_POLICY = {"adapter", "port", "routed_experts", "tensor_parallel_size", "weight_delta"}  # options of its engine alone
UNREADABLE = (
    "the judge's verdict has no score where the rubric {rubric} wants one; it ends with {said!r}: use a stronger "
    "model, another rubric, or llm_judge with an endpoint"
)


def judge_worker(config: TrainConfig) -> WorkerSpec:
    """The worker of a judge: the rollout engine with the judge's weights."""
    own = {"path": config.reward_model.judge, "tokenizer_path": None, "lora": LoraConfig()}
    model, engine = config.model.model_copy(update=own), config.rollout.engine
    options = {name: value for name, value in engine.options.items() if name not in OF_POLICY}
    plain = config.rollout.model_copy(update={"engine": engine.model_copy(update={"options": options})})
    devices = config.cluster.pools[config.cluster.pool_of("reward_model")].num_devices
    return WorkerSpec("reward_model", RolloutWorker, (chosen_engine(plain, model), model.path, model, devices))


def judge_of(group: WorkerGroup, config: TrainConfig) -> Rollouts:
    """The `Rollouts` through which the judge's ranks sample verdicts."""
    path, trusted = str(config.reward_model.judge), config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    engine = Replicas(group, config.rollout.max_batch_size, gathers=group.here is None)
    collector = Collector(engine, tokenizer, deadline_seconds=config.rollout.deadline_seconds)
    stop_ids = stop_token_ids(path, tokenizer, config.data.template_options)
    params = SamplingParams(config.data.max_response_length, stop_token_ids=stop_ids)
    return Rollouts(None, collector, None, tokenizer, n=1, params=params)


@register_provider("judge_scores", shape="B", phase="reward_model")
def judge_scores(batch: Batch, sources: Sources, *, rubric: str, data: DataConfig) -> torch.Tensor:
    """Score from 0 to 1 that the judge gives by `reward_model.rubric` for the last row of each trajectory; 0 for its
    other rows and for trajectories that failed. A trajectory whose verdict cannot be read fails.   [B]"""
    rollouts, asks = sources.rollouts.judge or sources.rollouts, load_rubric(rubric)
    trajectories = [each for group in sources.groups for each in group.trajectories]
    judged = [each for each in trajectories if each.failure is None]
    template = PromptFormat(rollouts.tokenizer, chat_template_kwargs=data.chat_template_kwargs)
    asking = _questions(judged, asks, template)
    params = replace(rollouts.params, temperature=0.0, top_p=1.0, top_k=0)
    with rollouts.sampling():
        replies = rollouts.collector.collect(asking, 1, params, step=sources.step, purpose="judge")
    given: dict[str, float] = {}
    for each, [reply] in zip(judged, replies, strict=True):
        said = text(reply) or ""
        if reply.failure is not None:
            why = f"the judge gave no verdict, it failed in the {reply.failure.source}: {reply.failure.message}"
            sources.failures[each.uid] = replace(reply.failure, source="reward", message=why)
        elif (value := asks.read(said)) is None:
            sources.failures[each.uid] = Failure("reward", UNREADABLE.format(rubric=asks.name, said=said[-80:]))
        else:
            given[each.uid] = value
    scores = torch.tensor([given.get(each.uid, 0.0) for each in trajectories])
    return torch.where(last_rows(batch).bool(), scores[batch["trajectory_uid"]], 0.0)


def _questions(judged: Sequence[Trajectory], rubric: Rubric, template: PromptFormat) -> list[Prompt]:
    """Prompts that ask the judge about each trajectory."""
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
