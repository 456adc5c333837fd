# SPDX-License-Identifier: Apache-2.0
"""The loop. One step: sample and score responses, add the columns that the algorithm reads, estimate advantages, update
critic and actor, sync the rollout's weights, log.

Copy this file, change it, and name the copy: `trainer.loop=my_project/rl.py:fit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from whet.algorithms.calls import estimate
from whet.batch import Batch
from whet.config.schema import ActorConfig
from whet.controller.worker_group import PendingCall
from whet.keyed import key
from whet.metrics import Metrics
from whet.rollout.batch import unscored, with_scores
from whet.trainers.batch_metrics import measure_batch, measure_environment, measure_groups, measure_part
from whet.trainers.columns import judged
from whet.trainers.run import Run
from whet.trainers.schedule import Schedule


def fit(run: Run) -> None:
    """Trains from `run.step` to `run.total_steps`."""
    with Schedule(run, validate) as schedule:
        while run.step < run.total_steps:
            step, metrics = run.step + 1, Metrics()
            with metrics.time("time/step"):
                with schedule.sampling():
                    batch = sample(run, step, metrics)
                with schedule.training():
                    batch = add_advantages(run, batch, step, metrics)
                    update(run, batch, step, metrics)
                with metrics.time("time/sync"):
                    run.sync(step)
            schedule.end_step(batch, metrics)


def sample(run: Run, step: int, metrics: Metrics) -> Batch:
    """Samples and scores responses to the next prompts with the weights of the step before, writes them to rollouts/,
    and adds all columns that the algorithm reads. Columns that need no scores are computed during scoring.

    Raises: RewardError, SandboxError, ToolError or EngineError if too many responses failed."""
    sampled = run.rollouts.start(run.config.data.train_batch_size, step=step, metrics=metrics)
    batch = unscored(sampled.groups, pad_token_id=run.pad_token_id)
    batch = run.columns.add(batch, run.sources(sampled.groups, step), metrics, is_scored=False)
    scored = sampled.result()
    batch = with_scores(batch, scored.groups, columns=run.config.reward.columns, is_dropped=not scored.kept)
    batch = run.columns.add(batch, run.sources(scored.groups, step), metrics)
    groups = judged(scored.groups, batch)
    measure_groups(metrics, groups, run.environment_name)
    run.write_rollouts(step, groups)
    run.write_rollouts(step, scored.unused, purpose="dropped")
    run.rollouts.failures.record(groups)
    return batch


def add_advantages(run: Run, batch: Batch, step: int, metrics: Metrics) -> Batch:
    """Turns scores into rewards and advantages, and adds the mask of the trained tokens."""
    run.health.check_sampler(run, batch, step)
    with metrics.time("time/advantage"):
        batch = run.shaper.rewards(batch, metrics)
        batch = run.shaper.advantages(estimate_advantages(run, batch, metrics), metrics)
        batch = run.correction.reject(batch, metrics)
    run.write_tokens(step, batch)
    measure_batch(metrics, batch, run.config.data.max_response_length)
    return batch


def update(run: Run, batch: Batch, step: int, metrics: Metrics) -> None:
    """Takes the optimizer steps of critic and actor, at the same time if they have processes of their own."""
    with metrics.time("time/update"):
        pending = list[PendingCall]()
        if run.value_objective is not None:
            critic = run.roles["critic"]
            for mini_batch in mini_batches(run, batch, run.config.critic, step):
                pending.append(critic.start("update", mini_batch, run.value_objective))
        if run.value_objective is None or step > run.config.critic.warmup_steps:
            kl_coef, entropy_coef = run.shaper.kl_controller.coef, run.entropy_controller.coef
            objective = replace(run.policy_objective, kl_coef=kl_coef, entropy_coef=entropy_coef, version=step - 1)
            for mini_batch in mini_batches(run, batch, run.config.actor, step):
                weighted = run.correction.weigh(mini_batch, metrics)
                metrics.merge(run.roles["actor"].update(weighted, objective))
            run.entropy_controller.update(metrics.value("actor/entropy"))
        for call in pending:
            metrics.merge(call.result())


def estimate_advantages(run: Run, batch: Batch, metrics: Metrics) -> Batch:
    """Adds `advantages` of all rows, and `returns` if the estimator gives them or a critic learns them."""
    with_returns = run.value_objective is not None
    entry = run.estimator.entry
    supplied = {"config": run.config, "non_tensor_batch": batch.non_tensor_batch}
    if "batch" in (*entry.parameters, *entry.options):  # verl's form: a TensorDict
        supplied["batch"] = batch.tensor_dict()
    estimated = estimate(run.estimator, batch.tensors(), supplied, with_returns=with_returns)
    for name, value in estimated.metrics.items():
        metrics.mean(name if "/" in name else f"critic/{name}", value)
    batch = batch.with_columns(advantages=estimated.advantages)
    return batch if estimated.returns is None else batch.with_columns(returns=estimated.returns)


def mini_batches(run: Run, batch: Batch, role: ActorConfig, step: int) -> Iterator[Batch]:
    """Yields mini-batches of whole prompts for one role, in a new order in every epoch over the step's rows."""
    groups = batch["uid"].unique()
    for epoch in range(role.epochs):
        draw = torch.Generator().manual_seed(key(run.config.trainer.seed, "mini_batches", step, epoch))
        order = groups[torch.randperm(len(groups), generator=draw)]
        for chosen in order.split(role.mini_batch_size or len(groups)):
            yield batch[torch.isin(batch["uid"], chosen)]


def validate(run: Run, step: int) -> Metrics:
    """Measures accuracy, reward and length on the held-out prompts: over all, by data source and by domain."""
    metrics, n = Metrics(), run.config.trainer.validation.n
    with metrics.time("time/validation"):
        groups = run.rollouts.sample(run.val_prompts, n, run.val_params, step=step, purpose="validation")
        groups = run.judge(groups, step)
    for group in groups:
        for trajectory in group.trajectories:
            kinds = filter(None, (group.prompt.data_source, group.prompt.domain))
            for name in dict.fromkeys(("val", *(f"val/{kind}" for kind in kinds))):
                metrics.mean(f"{name}/accuracy", trajectory.accuracy or 0.0)
                metrics.mean(f"{name}/reward", trajectory.score)
            metrics.mean("val/response_length", sum(len(turn.token_ids) for turn in trajectory.turns))
            metrics.sum("val/failures", float(trajectory.failure is not None))
    measure_part(metrics, groups, "reward_model", "val")
    measure_environment(metrics, groups, f"val/env/{run.environment_name}")
    run.write_rollouts(step, groups, purpose="validation")
    run.rollouts.held_out.record(groups)
    return metrics
