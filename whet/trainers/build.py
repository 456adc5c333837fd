# SPDX-License-Identifier: Apache-2.0
"""From a config to a run: the one place that names concrete classes, cheap checks before what takes long."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.algorithms.adapters import settling
from whet.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, Fixed
from whet.algorithms.kl import kl_columns
from whet.config.algorithm_checks import uses_critic
from whet.config.checks import check_context
from whet.config.schema import ActorConfig, TrainConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.load import VAL, Loaded, load_prompts
from whet.data.loader import steps_per_epoch
from whet.data.samplers import make_loader
from whet.engines.role import RoleSettings
from whet.errors import ConfigError
from whet.models.load import context_length, load_tokenizer, stop_token_ids
from whet.planning.introduction import Counts, introduce
from whet.planning.memory import Lengths, Setup
from whet.registry import (
    ADV_ESTIMATORS,
    FILTERS,
    POLICY_LOSSES,
    REJECTIONS,
    VALUE_LOSSES,
    WEIGHTS,
    load_target,
)
from whet.rewards.build import build_scorer as build_scorer
from whet.rewards.build import scorer_of as scorer_of
from whet.rollout.build import build_collector, sampling_params
from whet.rollout.groups import Filter
from whet.rollout.protocol import RolloutEngine
from whet.rollout.replicas import Replicas
from whet.rollout.stream import PromptSource, Rollouts, Scorer
from whet.trainers.columns import ColumnPlan, plan_columns
from whet.trainers.frame import opened_for
from whet.trainers.hints import teacher_role
from whet.trainers.inputs import digests
from whet.trainers.modes import Modes
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.restart import with_restarts
from whet.trainers.rl import fit
from whet.trainers.rollout_worker import RolloutWorker
from whet.trainers.run import Run
from whet.trainers.settle import Settlement
from whet.trainers.shape import Shaper
from whet.trainers.workers import AdapterOffWorker, TrainWorker
from whet.types import Prompt
from whet.weight_sync.between_pools import WeightSync, weight_sync

log = logging.getLogger(__name__)
Rows = Iterable[Mapping[str, Any] | Prompt] | None
# What a policy loss is given by the update itself: the forward pass that is differentiated, and what was estimated.
UPDATE_COLUMNS = {"log_probs", "entropy", "sum_pi_squared", "old_log_probs", "advantages", "returns"}
CRITIC_COLUMNS = {"old_values", "returns", "values", "log_probs"}  # the same for a loss of the critic


def train(
    config: TrainConfig,
    *,
    dry_run: bool = False,
    reward: Callable[..., Any] | None = None,
    data: Rows = None,
    val_data: Rows = None,
) -> Run:
    """Builds the run, trains it to the end and returns it.

    `reward`, `data` and `val_data` stand in for `reward.function`, `data.train_files` and `data.val_files`. With
    `dry_run` everything is built, one batch of prompts is loaded and shown, and nothing is trained or written.
    `trainer.max_restarts` says how often it starts again where a worker was lost.
    Raises: WhetError for everything that a user can mend; Stopped, a KeyboardInterrupt, where a signal ended it.
    """
    restarts = config.trainer.max_restarts  # the rows may be read again
    rows, val_rows = (list(each) if each is not None and restarts else each for each in (data, val_data))
    return with_restarts(config, lambda once: _train(once, rows, val_rows, dry_run=dry_run, reward=reward))


def _train(config: TrainConfig, data: Rows, val_data: Rows, *, dry_run: bool, reward: Callable[..., Any] | None) -> Run:
    loop: Callable[[Run], None] = load_target(config.trainer.loop) if config.trainer.loop else fit
    scorer = scorer_of(config, reward)  # its processes start before a model is in memory
    try:
        run = build(config, scorer, data, val_data, dry_run=dry_run, reward=reward)
    except BaseException:
        if scorer is not None:
            scorer.close()
        raise
    with closing(run):
        if dry_run:
            _show_batch(run)
        else:
            with _settled_objects():
                run.train(loop)
    return run


@contextmanager
def _settled_objects() -> Iterator[None]:
    """Whatever exists now the garbage collector leaves alone: searching it again and again, among it torch and
    transformers, takes a tenth of the steps of a small model."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def build(
    config: TrainConfig,
    scorer: Scorer | None,
    data: Rows = None,
    val_data: Rows = None,
    *,
    dry_run: bool = False,
    reward: Callable[..., Any] | None = None,
) -> Run:
    """The run of a config, resumed where `trainer.resume` finds a checkpoint."""
    tokenizer = _tokenizer(config)
    loaded, val_prompts = _prompts(config, tokenizer, data, val_data)
    epoch_steps = steps_per_epoch(len(loaded.items), config.data.train_batch_size)
    total_steps = config.trainer.total_steps or config.trainer.total_epochs * epoch_steps
    draws = total_steps * config.data.train_batch_size
    loader = make_loader(config.data, loaded, seed=config.trainer.seed, total_draws=draws)

    columns = plan(config)
    callbacks = [load_target(path) for path in config.trainer.callbacks]
    lengths = [len(prompt.token_ids) for prompt in loaded.items]
    specs = worker_specs(config, columns, total_steps)
    inputs = digests(config, loaded.items, val_prompts, reward)
    with opened_for(config, setup, lengths, inputs, dry_run=dry_run) as (opened, services), ExitStack() as undo:
        if "console" in config.trainer.logger and not dry_run:
            introduce(setup(config, lengths), Counts(len(lengths), len(val_prompts), total_steps, opened.first_step))
        roles = launch_roles(specs, config.cluster)
        undo.callback(roles["rollout"].close)
        modes = Modes(roles["rollout"] if config.rollout.free_cache_engine else None)
        stop_ids = stop_token_ids(str(config.model.path), tokenizer)
        run = Run(
            config=config,
            opened=opened,
            services=services,
            tokenizer=tokenizer,
            roles=roles,
            weight_sync=_weight_sync(config, roles),
            rollouts=_rollouts(config, tokenizer, loader, _replicas(config, roles["rollout"]), scorer, stop_ids, modes),
            columns=columns,
            estimator=ADV_ESTIMATORS[config.algorithm.adv_estimator],
            estimator_options=_estimator_options(config),
            settlement=Settlement.from_config(config),
            policy_objective=PolicyObjective.from_config(config),
            value_objective=ValueObjective.from_config(config) if "critic" in roles else None,
            shaper=Shaper(config, _kl_controller(config)),
            entropy_controller=_entropy_controller(config),
            val_prompts=val_prompts,
            val_params=sampling_params(config.trainer.validation, config.data.max_response_length, stop_ids, tokenizer),
            total_steps=total_steps,
            callbacks=callbacks,
            modes=modes,
        )
        run.start()
        undo.pop_all()
    return run


def _tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy, which has to be that of all other models.  Raises: ModelError, ConfigError."""
    model_path = _required(config.model.path, "model.path")
    others = [config.critic.model_path, config.ref.model_path, *config.teacher.model_paths.values()]
    models = [path for path in (model_path, *others) if path is not None]
    trusted = config.model.trust_remote_code
    tokenizer = load_tokenizer(config.model.tokenizer_path or model_path, *models, trust_remote_code=trusted)
    check_context(config, context_length(model_path, trust_remote_code=trusted))
    return tokenizer


def _prompts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, data: Rows, val_data: Rows
) -> tuple[Loaded[Prompt], Sequence[Prompt]]:
    """The prompts to train on and those to validate on."""
    files, seed = config.data, config.trainer.seed
    loaded = load_prompts(files, tokenizer, rows=data, where=files.filter, seed=seed)
    if not files.val_files and val_data is None:
        return loaded, ()
    return loaded, load_prompts(files, tokenizer, VAL, rows=val_data, seed=seed).items[: files.val_max_prompts]


def plan(config: TrainConfig) -> ColumnPlan:
    """The columns that the functions in use read before an update, and who gives them."""
    algorithm = config.algorithm
    estimator, loss = ADV_ESTIMATORS[algorithm.adv_estimator], POLICY_LOSSES[algorithm.policy_loss]
    readers = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": [c for c in estimator.columns if c != "returns"],
        f"algorithm.policy_loss={algorithm.policy_loss}": [
            c for c in loss.columns if c not in UPDATE_COLUMNS and c not in loss.marks.get("before", {})
        ],
    }
    # What is settled on a mini-batch before its update: by the loss itself, and the tokens' weights.
    correction = algorithm.correction
    settled = {f"what {algorithm.policy_loss} has settled": each for each in settling(loss).values()}
    settled |= {
        f"algorithm.correction={name}": registry[name]
        for registry, name in ((WEIGHTS, correction.weight), (REJECTIONS, correction.rejection))
        if name is not None
    }
    readers |= {why: [c for c in entry.columns if c != "advantages"] for why, entry in settled.items()}
    if uses_critic(algorithm):
        read = VALUE_LOSSES[config.critic.value_loss].columns
        readers[f"critic.value_loss={config.critic.value_loss}"] = [c for c in read if c not in CRITIC_COLUMNS]
    bypass = correction.old_log_probs == "rollout"
    of_loss = {*loss.columns, *(kl_columns(algorithm.kl.form) if algorithm.kl.where == "loss" else ())}
    if "old_log_probs" in of_loss and (bypass or updates_per_step(config.actor, config.data.train_batch_size) > 1):
        # With one update a step the samples are the current policy's: its own log-probs, detached, are the old ones.
        readers["the ratio of the policy to what it was"] = ["old_log_probs"]
    if algorithm.kl.where == "reward":
        readers["algorithm.kl.where=reward"] = ["old_log_probs", *kl_columns(algorithm.kl.form, "old_")]
    if algorithm.kl.where == "loss":
        readers["algorithm.kl.where=loss"] = [c for c in kl_columns(algorithm.kl.form) if c.startswith("ref_")]
    return plan_columns(readers, config.reward.columns)


def setup(config: TrainConfig, prompt_lengths: Sequence[int] = ()) -> Setup:
    """What the plan of a run is made from; without lengths every prompt is taken to be as long as it may be."""
    columns = plan(config)
    roles = {spec.role: spec.args[0] for spec in worker_specs(config, columns, 1) if spec.cls is TrainWorker}
    return Setup(
        config,
        roles,
        {
            "actor": PolicyObjective.from_config(config),
            **({"critic": ValueObjective.from_config(config)} if "critic" in roles else {}),
        },
        Lengths(tuple(prompt_lengths) or (config.data.max_prompt_length,), config.data.max_response_length),
        tuple(role for provider in columns.providers for role in provider.marks.get("roles", ())),
    )


def updates_per_step(role: ActorConfig, train_batch_size: int) -> int:
    """Optimizer steps that a role takes in one step of the loop."""
    return role.epochs * -(-train_batch_size // (role.mini_batch_size or train_batch_size))


def worker_specs(config: TrainConfig, columns: ColumnPlan, total_steps: int) -> list[WorkerSpec]:
    """The workers of one process, those first that others look at."""
    model, model_path = config.model, _required(config.model.path, "model.path")

    def trained(role: ActorConfig, path: str | None, steps: int, is_value_model: bool = False) -> RoleSettings:
        return RoleSettings(
            model_path=path or model_path,
            engine=role.engine,
            dtype=model.dtype,
            max_tokens_per_micro_batch=role.max_tokens_per_micro_batch,
            optim=role.optim,
            grad_clip=role.grad_clip,
            total_steps=steps * updates_per_step(role, config.data.train_batch_size),
            is_value_model=is_value_model,
            gradient_checkpointing=model.gradient_checkpointing,
            adapter_path=model.lora.path if path is None else None,
            allow_pickle=model.allow_pickle,
            trust_remote_code=model.trust_remote_code,
            lora=model.lora if model.lora.rank is not None else None,
            freeze=tuple(model.freeze) if role is config.actor else (),
            seed=config.trainer.seed,
        )

    actor_steps = max(1, total_steps - (config.critic.warmup_steps if "critic" in columns.roles else 0))
    specs = [WorkerSpec("actor", TrainWorker, (trained(config.actor, None, actor_steps),))]
    if "critic" in columns.roles:
        is_value_model = "values" in VALUE_LOSSES[config.critic.value_loss].columns
        settings = trained(config.critic, config.critic.model_path, total_steps, is_value_model)
        specs.append(WorkerSpec("critic", TrainWorker, (settings,)))

    def read(path: str | None) -> RoleSettings:
        return RoleSettings(
            model_path=path or model_path,
            engine=config.ref.engine,
            dtype=model.dtype,
            max_tokens_per_micro_batch=config.ref.max_tokens_per_micro_batch,
            adapter_path=model.lora.path if path is None else None,
            allow_pickle=model.allow_pickle,
            trust_remote_code=model.trust_remote_code,
        )

    if "ref" in columns.roles:
        is_start = model.lora.rank is not None and config.ref.model_path is None
        ref = WorkerSpec("ref", TrainWorker, (read(config.ref.model_path),))
        specs.append(WorkerSpec("ref", AdapterOffWorker) if is_start else ref)
    if any(provider.name == "teacher_log_probs" for provider in columns.providers):
        for source, path in config.teacher.model_paths.items():
            specs.append(WorkerSpec(teacher_role(source), TrainWorker, (read(path),)))
    tokenizer_path = config.model.tokenizer_path or model_path
    own = (config.rollout, model.dtype, tokenizer_path, model)
    return [*specs, WorkerSpec("rollout", RolloutWorker, own)]


def _replicas(config: TrainConfig, rollout: WorkerGroup) -> Replicas:
    return Replicas(rollout, config.rollout.max_batch_size, gathers=not config.cluster.stays_here)


def _weight_sync(config: TrainConfig, roles: Mapping[str, WorkerGroup]) -> WeightSync:
    dtype = config.rollout.dtype or config.model.dtype
    return weight_sync(roles["actor"], roles["rollout"], dtype, config.cluster.deadline_seconds)


def _rollouts(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    loader: PromptSource,
    engine: RolloutEngine,
    scorer: Scorer | None,
    stop_ids: tuple[int, ...],
    modes: Modes,
) -> Rollouts:
    return Rollouts(
        loader,
        build_collector(config, tokenizer, engine, config.trainer.seed),
        scorer,
        tokenizer,
        n=config.rollout.n,
        params=sampling_params(config.rollout, config.data.max_response_length, stop_ids, tokenizer),
        group_filter=_group_filter(config),
        correct_threshold=config.reward.correct_threshold,
        length_stages=config.rollout.length_stages,
        sampling=modes.rollout_mode,
    )


def _estimator_options(config: TrainConfig) -> dict[str, Any]:
    entry = ADV_ESTIMATORS[config.algorithm.adv_estimator]
    return entry.resolve_options(config.algorithm.adv_options, "algorithm.adv_options")


def _kl_controller(config: TrainConfig) -> Fixed | AdaptiveKL:
    kl = config.algorithm.kl
    return Fixed(kl.coef) if kl.controller == "fixed" else AdaptiveKL(kl.coef, kl.target, kl.horizon)


def _entropy_controller(config: TrainConfig) -> Fixed | AdaptiveEntropy:
    entropy, coef = config.algorithm.entropy, config.algorithm.entropy_coef
    if entropy.target is None:
        return Fixed(coef)
    return AdaptiveEntropy(coef, entropy.target, entropy.delta, entropy.highest)


def _group_filter(config: TrainConfig) -> Filter | None:
    chosen = config.algorithm.filter
    if chosen.name is None:
        return None
    entry = FILTERS[chosen.name]
    options = entry.resolve_options(chosen.options, "algorithm.filter.options")
    return Filter(entry.load(), options, chosen.metric, chosen.max_refills)


def _show_batch(run: Run) -> None:
    """What a dry run says: the size of everything, and the first prompt as the model would read it."""
    assert run.rollouts.prompts is not None
    prompts = run.rollouts.prompts.take(run.config.data.train_batch_size)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    log.info(
        "dry run: %d steps of %d prompts x %d answers; roles %s; the first batch has %d to %d prompt tokens",
        *(run.total_steps, len(prompts), run.config.rollout.n, ", ".join(run.roles), min(lengths), max(lengths)),
    )
    log.info("the first prompt:\n%s", run.tokenizer.decode(list(prompts[0].token_ids)))
    log.info("its ground truth: %s", prompts[0].ground_truth)


def _required(value: str | None, key: str) -> str:
    if value is None:
        raise ConfigError(f"{key} is not set; it names a Hugging Face model folder or hub name")
    return value
