# SPDX-License-Identifier: Apache-2.0
"""`whet eval`: sample answers to a data set, judge them, write them down, say how good they are."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from whet.config.checks import check_context
from whet.config.schema import EvalConfig
from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import WorkerSpec
from whet.data.sources import read_rows
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.models.load import load_config, load_tokenizer, stop_token_ids
from whet.rollout.stream import Rollouts
from whet.trainers.build import build_collector, load_prompts, sampling_params, scorer_of
from whet.trainers.run import write_answers
from whet.trainers.workers import RolloutWorker
from whet.types import Group

CALL_DEADLINE_SECONDS = 24 * 3600.0  # the engine has a deadline of its own: rollout.deadline_seconds


@dataclass(frozen=True)
class Evaluation:
    """Accuracy over prompts, each weighing the same. An answer that failed counts as wrong."""

    num_prompts: int
    n: int  # answers a prompt
    accuracy: float  # mean over prompts of the mean over answers (mean@n)
    best_accuracy: float  # share of prompts with at least one right answer (best@n)
    reward: float
    mean_response_tokens: float
    failures: int
    by_data_source: dict[str, float]
    groups: list[Group] = field(default_factory=list, repr=False)

    def summary(self) -> dict[str, Any]:
        """Everything but the answers themselves."""
        return {name: value for name, value in vars(self).items() if name != "groups"}


def evaluate(
    config: EvalConfig,
    *,
    reward: Callable[..., Any] | None = None,
    data: Sequence[Mapping[str, Any]] | None = None,
) -> Evaluation:
    """Evaluates a model and, where `output` is set, writes answers.jsonl and summary.json there.

    Raises: WhetError for everything that a user can mend.
    """
    if config.model.path is None:
        raise ConfigError("model.path is not set; it names a Hugging Face model folder or hub name")
    with ExitStack() as started:
        scorer = scorer_of(config, reward)
        if scorer is not None:
            started.callback(scorer.close)
        tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
        check_context(config, load_config(config.model.path).get_text_config().max_position_embeddings)
        prompts = load_prompts(config, tokenizer, read_rows(list(data) if data is not None else config.data.val_files))
        tokenizer_path = config.model.tokenizer_path or config.model.path
        settings = (config.rollout, config.model.dtype, tokenizer_path, config.model.path)
        spec = WorkerSpec("rollout", RolloutWorker, settings)
        engine = launch([spec], ResourcePool(processes=1), deadline_seconds=CALL_DEADLINE_SECONDS)["rollout"]
        started.callback(engine.close)
        stop_ids = stop_token_ids(config.model.path, tokenizer)
        params = sampling_params(config.rollout, config.data.max_response_length, stop_ids, tokenizer)
        collector = build_collector(config, tokenizer, engine.generate, config.seed)
        n = config.rollout.n
        threshold = config.reward.correct_threshold
        rollouts = Rollouts(None, collector, scorer, tokenizer, n=n, params=params, correct_threshold=threshold)
        asked = prompts[: config.data.val_max_prompts]
        groups = rollouts.sample(asked, n, params, step=0, metrics=Metrics(), purpose="evaluation")
    evaluation = summarise(groups)
    if config.output is not None:
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_answers(folder / "answers.jsonl", groups, tokenizer)
        (folder / "summary.json").write_text(json.dumps(evaluation.summary(), indent=1))
    return evaluation


def summarise(groups: Sequence[Group]) -> Evaluation:
    """The numbers of judged answers."""
    right = [[answer.accuracy or 0.0 for answer in group.trajectories] for group in groups]  # failed ones have none
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, each in zip(groups, right, strict=True):
        by_source[group.prompt.data_source].append(mean(each))
    answers = [answer for group in groups for answer in group.trajectories]
    return Evaluation(
        num_prompts=len(groups),
        n=len(groups[0].trajectories),
        accuracy=mean(mean(each) for each in right),
        best_accuracy=mean(float(max(each) >= 1.0) for each in right),
        reward=mean(answer.score for answer in answers),
        mean_response_tokens=mean(sum(len(turn.token_ids) for turn in answer.turns) for answer in answers),
        failures=sum(answer.failure is not None for answer in answers),
        by_data_source={name: mean(each) for name, each in sorted(by_source.items())},
        groups=list(groups),
    )
