# SPDX-License-Identifier: Apache-2.0
"""A dry run for a machine that is not here: what needs neither its memory nor its nodes and accelerators."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from whet.config.schema import TrainConfig
from whet.errors import RewardError
from whet.planning.dtypes import with_dtypes
from whet.planning.fit import check_fits
from whet.planning.machine import stated
from whet.planning.memory import Setup
from whet.planning.units import plural
from whet.registry import load_target
from whet.rewards.pool import scorer_of
from whet.rollout.build import with_engine
from whet.rollout.rollouts import reward_item
from whet.trainers.build import begin, setup, show_batch, worker_specs
from whet.trainers.frame import run_folder
from whet.types import Failure, Prompt

log = logging.getLogger(__name__)
NOT_CHECKED = (
    "not checked here: %s with room for %s, the weights of the model, rollout.engine.name=%s, environments and "
    "trackers; `whet train ... --dry-run` on that machine checks them"
)
SCORED = 4  # prompts of the first batch


def dry_run_elsewhere(config: TrainConfig, device_gib: float | None, host_gib: float | None) -> None:
    """Checks config, tokenizer, templates, data, ground truths and rewards of a run, and that it fits accelerators of
    `device_gib` and nodes of `host_gib`, of this machine what is not stated. Loads no model and starts no worker.

    Raises: WhetError for everything that a user can mend."""
    if config.trainer.loop:
        load_target(config.trainer.loop)
    device, host = stated(device_gib, "an accelerator"), stated(host_gib, "a node")
    config = with_engine(with_dtypes(config, elsewhere=device is not None))
    begun = begin(config)

    def replan(other: TrainConfig) -> Setup:
        return setup(other, begun.lengths)

    check_fits(replace(replan(config), device=device, host=host), run_folder(config.trainer), replan)
    roles = [spec.role for spec in worker_specs(config, begun.columns, begun.total_steps)]
    prompts = show_batch(config, begun.tokenizer, begun.loader, begun.total_steps, roles)
    _score(config, begun.tokenizer, prompts[:SCORED])
    processes = sum(pool.processes for pool in config.cluster.pools.values())
    machines = plural(config.cluster.nnodes, "node"), plural(processes, "process", "processes")
    log.info(NOT_CHECKED, *machines, config.rollout.engine.name)


def _score(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]) -> None:
    """Logs the rewards of ground truths as responses, and of none.  Raises: RewardError where the function fails."""
    scorer = scorer_of(config)
    if scorer is None:
        return
    items = [
        reward_item(prompt, text, tokenizer.encode(text, add_special_tokens=False), {})
        for prompt in prompts
        for text in (str(prompt.ground_truth), "")
    ]
    with closing(scorer):
        outcomes = scorer.submit_batch(items).result()  # each has the deadline reward.timeout_seconds
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RewardError("reward.function", f"failed on a row of the data: {outcome.message}", "", "correct it")
    rewards = [f"{outcome.reward:g}" for outcome in outcomes if not isinstance(outcome, Failure)]
    told = ", ".join(rewards[::2]), ", ".join(rewards[1::2])
    log.info("rewards of ground truths as responses: %s; of empty responses: %s", *told)
