# SPDX-License-Identifier: Apache-2.0
"""The loop. One step: sample and score answers, add the columns that the algorithm reads, estimate advantages, update
critic and actor, sync the rollout's weights, validate, save.

Copy this file, change it, and name the copy: `trainer.loop=my_project/rl.py:fit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from whet.algorithms.adapters import estimate
from whet.config.schema import ActorConfig
from whet.controller.worker_group import PendingCall
from whet.keyed import key
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.rollout.batch import to_batch, with_scores
from whet.trainers.measure import measure_batch, measure_groups
from whet.trainers.run import Run
from whet.trainers.step_log import StepLog


def fit(run: Run) -> None:
    """Trains until `run.total_steps`, from wherever `run.step` stands."""
    trainer = run.config.trainer
    validates = bool(run.val_prompts) and trainer.val_freq >= 0
    if run.step == 0 and trainer.val_before_train and validates:
        with run.interruptible():
            before = validate(run, step=0)
        run.log(0, before)
    with StepLog(run, validate) as steps:
        while run.step < run.total_steps:
            step = run.step + 1
            metrics = Metrics()
            with metrics.time("time/step"):
                with run.interruptible():
                    batch = take(run, step, metrics)
                with steps.beside():
                    batch = train_step(run, batch, step, metrics)
                with metrics.time("time/sync"):
                    run.sync(step)
            run.step = step
            steps.log(step, metrics, is_validated=validates and run.is_due(trainer.val_freq))
            run.health.look(run, batch, step, metrics)
            if run.is_due(trainer.save_freq):
                run.save()


def take(run: Run, step: int, metrics: Metrics) -> DataProto:
    """One batch of answers, sampled with the weights of the step before, scored, written to rollouts/, and with all
    columns that the algorithm reads. What needs no scores is computed while the answers are being judged.

    Raises: RewardError and its like where every answer failed."""
    sampled = run.rollouts.start(run.config.data.train_batch_size, step=step)
    batch = to_batch(sampled.groups, pad_token_id=run.pad_token_id)
    batch = run.columns.add(batch, run.sources(sampled.groups, step), metrics, is_scored=False)
    taken = sampled.result()
    metrics.merge(taken.metrics)
    measure_groups(metrics, taken.groups)
    run.write_rollouts(step, taken.groups)
    run.rollouts.failures.see(taken.groups)
    batch = with_scores(batch, taken.groups, columns=run.config.reward.columns, is_dropped=taken.is_dropped)
    return run.columns.add(batch, run.sources(taken.groups, step), metrics)


def train_step(run: Run, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
    """What one batch teaches actor and critic, side by side where they have processes of their own.  Returns it with
    its advantages."""
    with metrics.time("time/advantage"):
        batch = run.shaper.rewards(batch, metrics)
        batch = run.shaper.advantages(add_advantages(run, batch, metrics), metrics)
        batch = run.settlement.reject(batch, metrics)
    run.write_tokens(step, batch)
    measure_batch(metrics, batch, run.config.data.max_response_length)

    with metrics.time("time/update"):
        learnt = list[PendingCall]()
        if run.value_objective is not None:
            critic = run.roles["critic"]
            for mini_batch in mini_batches(run, batch, run.config.critic, step):
                learnt.append(critic.start("update", mini_batch, run.value_objective))
        if run.value_objective is None or step > run.config.critic.warmup_steps:
            kl_coef, entropy_coef = run.shaper.kl_controller.coef, run.entropy_controller.coef
            objective = replace(run.policy_objective, kl_coef=kl_coef, entropy_coef=entropy_coef)
            for mini_batch in mini_batches(run, batch, run.config.actor, step):
                weighed = run.settlement.weigh(mini_batch, metrics)
                metrics.merge(run.roles["actor"].update(weighed, objective))
            run.entropy_controller.update(metrics.value("actor/entropy"))
        for call in learnt:
            metrics.merge(call.result())
    return batch


def add_advantages(run: Run, batch: DataProto, metrics: Metrics) -> DataProto:
    """`advantages`, and `returns` where the estimator gives them or a critic learns them, from all rows at once."""
    supplied = {"config": run.config, "batch": batch.batch, "non_tensor_batch": batch.non_tensor_batch}
    with_returns = run.value_objective is not None
    estimated = estimate(run.estimator, batch.tensors(), run.estimator_options, supplied, with_returns=with_returns)
    for name, value in estimated.metrics.items():
        metrics.mean(name if "/" in name else f"critic/{name}", value)
    batch = batch.with_columns(advantages=estimated.advantages)
    return batch if estimated.returns is None else batch.with_columns(returns=estimated.returns)


def mini_batches(run: Run, batch: DataProto, role: ActorConfig, step: int) -> Iterator[DataProto]:
    """A role's passes over the step's rows: mini-batches of whole prompts, in a new order every epoch."""
    groups = batch["uid"].unique()
    for epoch in range(role.epochs):
        draw = torch.Generator().manual_seed(key(run.config.trainer.seed, "mini_batches", step, epoch))
        order = groups[torch.randperm(len(groups), generator=draw)]
        for chosen in order.split(role.mini_batch_size or len(groups)):
            yield batch[torch.isin(batch["uid"], chosen)]


def validate(run: Run, step: int) -> Metrics:
    """Accuracy, reward and length on the held-out prompts, over all and by data source."""
    metrics, n = Metrics(), run.config.trainer.validation.n
    with metrics.time("time/validation"):
        # Its own collector: these seconds and failures are no part of a step's.
        groups = run.rollouts.sample(
            run.val_prompts, n, run.val_params, step=step, metrics=Metrics(), purpose="validation"
        )
    for group in groups:
        for answer in group.trajectories:
            for name in ("val", f"val/{group.prompt.data_source}"):
                metrics.mean(f"{name}/accuracy", answer.accuracy or 0.0)
                metrics.mean(f"{name}/reward", answer.score)
            metrics.mean("val/response_length", sum(len(turn.token_ids) for turn in answer.turns))
            metrics.sum("val/failures", float(answer.failure is not None))
    run.write_rollouts(step, groups, purpose="validation")
    run.rollouts.failures.see(groups)
    return metrics
