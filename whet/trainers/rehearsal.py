# SPDX-License-Identifier: Apache-2.0
"""A dry run for a machine that is not here: what needs neither its memory nor its nodes and accelerators."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

from whet.config.schema import TrainConfig
from whet.errors import RewardError
from whet.planning.fit import check_fits
from whet.planning.machine import stated
from whet.planning.memory import Setup
from whet.registry import load_target
from whet.rewards.pool import scorer_of
from whet.trainers.build import begin, setup, show_batch, worker_specs
from whet.trainers.frame import run_folder
from whet.types import Failure, Prompt, RewardItem

log = logging.getLogger(__name__)
NOT_CHECKED = (
    "not checked, for they need that machine: that %d node(s) with %d accelerators are there, weights of the model, "
    "the rollout engine %s, environments, and trackers; `whet train ... --dry-run` there checks them"
)
SCORED = 4  # prompts of the first batch


def rehearse(config: TrainConfig, device_gib: float | None, host_gib: float | None) -> None:
    """Checks config, tokenizer, templates, data, ground truths and rewards of a run, and that it fits accelerators of
    `device_gib` and nodes of `host_gib`, of this machine what is not stated. Loads no model and starts no worker.

    Raises: WhetError for everything that a user can mend."""
    if config.trainer.loop:
        load_target(config.trainer.loop)
    begun = begin(config)
    device, host = stated(device_gib, host_gib)

    def replan(other: TrainConfig) -> Setup:
        return setup(other, begun.lengths)

    check_fits(replace(replan(config), device=device, host=host), run_folder(config.trainer), replan)
    roles = [spec.role for spec in worker_specs(config, begun.columns, begun.total_steps)]
    prompts = show_batch(config, begun.tokenizer, begun.loader, begun.total_steps, [*roles, "rollout"])
    _score(config, prompts[:SCORED])
    log.info(NOT_CHECKED, config.cluster.nnodes, config.cluster.devices, config.rollout.engine.name)


def _score(config: TrainConfig, prompts: list[Prompt]) -> None:
    """Logs the rewards of ground truths as responses, and of none.  Raises: RewardError where the function fails."""
    scorer = scorer_of(config)
    if scorer is None:
        return
    texts = [text for prompt in prompts for text in (str(prompt.ground_truth), "")]
    each = [prompt for prompt in prompts for _ in range(2)]
    items = [
        RewardItem(one.data_source, text, one.ground_truth, one.extra_info, prompt_ids=one.token_ids)
        for one, text in zip(each, texts, strict=True)
    ]
    with closing(scorer):
        outcomes = scorer.submit_batch(items).result()  # each has the deadline reward.timeout_seconds
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RewardError(f"the reward fails on a row of the data: {outcome.message}; mend reward.function")
    rewards = [f"{outcome.reward:g}" for outcome in outcomes if not isinstance(outcome, Failure)]
    told = ", ".join(rewards[::2]), ", ".join(rewards[1::2])
    log.info("rewards of ground truths as responses: %s; of empty responses: %s", *told)
