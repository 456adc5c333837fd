# SPDX-License-Identifier: Apache-2.0
"""Builds a run from a config: the one place that names concrete classes. Cheap checks come before slow ones."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.algorithms.calls import Bound
from whet.config.algorithm import AlgorithmConfig
from whet.config.digests import digests
from whet.config.schema import ActorConfig, GroupFilterConfig, LoraConfig, TrainConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.load import VAL, Loaded, load_items
from whet.data.loader import PromptSource, run_steps
from whet.data.preview import shortened
from whet.data.samplers import make_loader
from whet.domains import Domains
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.environments.host import EnvironmentHost
from whet.environments.toolbox import with_tools
from whet.errors import RewardError
from whet.models.load import load_tokenizer, stop_token_ids
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import free_accelerator, stated
from whet.planning.planner import Counts, Setup, planner
from whet.planning.units import plural
from whet.registry import FILTERS, VALUE_LOSSES, load_target, register_trainer
from whet.rewards.pool import build_scorer as build_scorer, checked, is_scored, scorer_of as scorer_of, val_scorer_of
from whet.roles import workers
from whet.roles.placed import ENVIRONMENT, REWARD, EnvironmentWorker, PlacedRewards, RewardWorker, placed_hosts
from whet.roles.rollout_worker import Direct, Modes, RolloutWorker
from whet.roles.workers import TrainWorker
from whet.rollout.build import (
    check_engine,
    check_media,
    check_sampling,
    chosen_engine,
    open_environments,
    sampling_params,
    stages_of,
    with_engine,
)
from whet.rollout.codec import TemplateCodec
from whet.rollout.driver import Driver
from whet.rollout.episode import MAIN, Stage
from whet.rollout.flow import Filter, keep_all
from whet.rollout.protocol import Restarts, SamplingParams
from whet.rollout.replicas import Replicas
from whet.rollout.requirements import Lengths
from whet.rollout.rollouts import Rollouts, reward_item
from whet.trainers.columns import ColumnPlan, plan, unread, updates_per_step
from whet.trainers.frame import opened_for, run_folder, with_named_dtypes, with_restarts
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.rl import fit
from whet.trainers.run import Run
from whet.trainers.run_dir import MEDIA, scoring_digest
from whet.trainers.shape import AdaptiveEntropy, Correction, Fixed, Shaper, estimator
from whet.trainers.stop import likely_steps
from whet.trainers.teacher import teacher_role
from whet.types import Failure, Prompt, Scorer
from whet.weight_sync.routes import weight_sync

log = logging.getLogger(__name__)
Rows = Iterable[Mapping[str, Any] | Prompt] | None
NOT_CHECKED = (
    "not checked here: %s with room for %s, the weights of the model, rollout.engine.name=%s, environments and "
    "trackers; `whet train ... --dry-run` on that machine checks them"
)
SCORED = 4  # prompts of the first batch
OF_POLICY = {"adapter", "port", "routed_experts", "tensor_parallel_size", "weight_delta"}  # options of its engine alone


@register_trainer(
    "train",
    config="whet.config.schema:TrainConfig",
    setup="whet.trainers.build:setup",
    frozen_models="whet.config.algorithm_checks:frozen_models",
    elsewhere="whet.trainers.build:dry_run_elsewhere",
    summary="Train a model with reinforcement learning (PPO, GRPO, ...).",
)
def train(
    config: TrainConfig,
    *,
    dry_run: bool = False,
    reward: Callable[..., Any] | None = None,
    data: Rows = None,
    val_data: Rows = None,
) -> Run:
    """Builds the run, trains it to the end and returns it.

    `reward`, `data` and `val_data` replace `reward.function`, `data.train_files` and `data.val_files`. With `dry_run`
    everything is built, one batch of prompts is loaded and shown, and nothing is trained or written. After the loss of
    a worker the run restarts, at most `trainer.max_restarts` times. Raises: WhetError for every error that a user can
    correct; Stopped, a KeyboardInterrupt, if a signal ended the run."""
    restarts = config.trainer.max_restarts  # the rows may be read again
    rows, val_rows = (list(each) if each is not None and restarts else each for each in (data, val_data))
    return with_restarts(config, lambda once: _train(once, rows, val_rows, dry_run=dry_run, reward=reward))


def _train(config: TrainConfig, data: Rows, val_data: Rows, *, dry_run: bool, reward: Callable[..., Any] | None) -> Run:
    loop: Callable[[Run], None] = load_target(config.trainer.loop) if config.trainer.loop else fit
    for reference in config.trainer.callbacks:
        load_target(reference)  # a wrong name raises before data and models are loaded
    if config.cluster.backend == "local":  # another machine may have what this one lacks
        check_engine(config)
    # Its processes start before a model is in memory.
    scorer = None if config.cluster.lists(REWARD) else scorer_of(config, reward)
    try:
        run = build(config, scorer, data, val_data, dry_run=dry_run, reward=reward)
    except BaseException:
        if scorer is not None:
            scorer.close()
        raise
    with closing(run):
        if dry_run:
            show_batch(config, run.tokenizer, run.rollouts.prompts, run.total_steps, list(run.roles))
        else:
            run.train(loop)
    return run


def build(
    config: TrainConfig,
    scorer: Scorer | None,
    data: Rows = None,
    val_data: Rows = None,
    *,
    dry_run: bool = False,
    reward: Callable[..., Any] | None = None,
) -> Run:
    """Builds the run of a config. It resumes if `trainer.resume` finds a checkpoint."""
    config = with_engine(with_named_dtypes(config))
    media_folder = None if dry_run else run_folder(config.trainer) / MEDIA
    begun = begin(config, data, val_data, reward, media_folder)
    tokenizer, columns, total_steps, val_prompts = begun.tokenizer, begun.columns, begun.total_steps, begun.val_prompts
    validation, lengths = config.trainer.validation, begun.lengths
    has_reward = scorer is None and is_scored(config, reward)
    helpers = [*_helpers(config, reward, has_reward)]
    inputs = digests(config, begun.prompts, val_prompts, reward, command=config.command)
    with ExitStack() as ahead:  # refused options raise before an earlier run is deleted
        hosts = None if config.cluster.lists(ENVIRONMENT) else open_environments(config.environment, ahead)
        counts = Counts(len(lengths), len(val_prompts), total_steps, likely=likely_steps(begun.callbacks, total_steps))
        taken = opened_for(config, setup, lengths, inputs, counts, dry_run=dry_run)
        with taken as (opened, services), ExitStack() as undo:
            specs = worker_specs(config, columns, total_steps, setup(config, lengths))
            roles = launch_roles([*specs, *helpers], config.cluster)
            undo.callback(roles["rollout"].close)
            scorer = PlacedRewards(roles[REWARD]) if REWARD in roles else scorer
            run = Run(
                config=config,
                opened=opened,
                services=services,
                tokenizer=tokenizer,
                roles=roles,
                rollouts=_rollouts(begun, config, roles, scorer, hosts, scoring_digest(config, inputs)),
                columns=columns,
                estimator=estimator(config.algorithm),
                correction=Correction.from_config(config),
                policy_objective=PolicyObjective.from_config(config),
                value_objective=ValueObjective.from_config(config) if "critic" in roles else None,
                shaper=Shaper(config),
                entropy_controller=_entropy_controller(config.algorithm),
                val_prompts=val_prompts,
                val_params=sampling_params(validation, config.data.max_response_length, begun.stop_ids, tokenizer),
                total_steps=total_steps,
                callbacks=begun.callbacks,
            )
            undo.callback(gc.unfreeze)
            run.start()
            undo.pop_all()
        ahead.pop_all()
    return run


@dataclass(frozen=True)
class Begun:
    """The tokenizer, data and plan of a run, all of which are read before anything is started."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    loader: PromptSource
    total_steps: int
    columns: ColumnPlan
    callbacks: list[Callable[..., Any]]
    stop_ids: tuple[int, ...]
    stages: Mapping[str, Stage]  # how the episodes of each agent run

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        return [len(prompt.token_ids) for prompt in self.prompts]


def begin(
    config: TrainConfig,
    data: Rows = None,
    val_data: Rows = None,
    reward: Callable[..., Any] | None = None,
    media_folder: Path | None = None,
) -> Begun:
    """Reads and checks tokenizer, data, ground truths and callbacks; plans columns and steps.  Raises: WhetError."""
    sampled = {"rollout": config.rollout, "trainer.validation": config.trainer.validation}
    check_sampling(config.rollout, sampled)
    read = config.critic.model_path, config.ref.model_path, *config.teacher.model_paths.values()
    tokenizer = workers.tokenizer_of(config, *read)
    workers.check_vocabularies(config, tokenizer)
    workers.check_reward_model(config, tokenizer)
    stages = stages_of(config, tokenizer, media_folder)
    loaded, val_prompts = _prompts(config, tokenizer, data, val_data, reward, media_folder)
    total_steps = run_steps(config.trainer, len(loaded.items), config.data.train_batch_size)
    draws = total_steps * config.data.train_batch_size
    loader = make_loader(config.data, loaded, seed=config.trainer.seed, total_draws=draws)
    columns = plan(config)
    for line in unread(config, columns):
        log.warning("%s", line)
    callbacks = [load_target(path) for path in config.trainer.callbacks]
    stop_ids = stop_token_ids(str(config.model.path), tokenizer, config.data.template_options)
    return Begun(tokenizer, loaded.items, val_prompts, loader, total_steps, columns, callbacks, stop_ids, stages)


def _prompts(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: Rows,
    val_data: Rows,
    reward: Callable[..., Any] | None,
    media_folder: Path | None,
) -> tuple[Loaded[Prompt], Sequence[Prompt]]:
    """Loads and checks the training prompts and the validation prompts, each with its domain."""
    files, seed = with_tools(config.data, config.environment), config.trainer.seed
    loaded = load_items(files, tokenizer, rows=data, where=files.filter, seed=seed, media_folder=media_folder)
    loaded = replace(loaded, items=checked(loaded, config.reward, reward))
    held_out = tuple[Prompt, ...]()
    if files.val_files or val_data is not None:
        own: dict[str, Any] = {"rows": val_data, "argument": "val_data", "seed": seed, "media_folder": media_folder}
        given = load_items(files, tokenizer, VAL, **own)
        held_out = checked(replace(given, items=given.items[: files.val_max_prompts]), config.reward, reward)
    check_media(config.rollout, tokenizer, [*loaded.items, *held_out])
    workers.check_media(config, {f"row {prompt.index}": prompt.media for prompt in loaded.items})
    Domains.of_config(config.reward, has_function=reward is not None).check_used([*loaded.items, *held_out])
    return loaded, held_out


def setup(config: TrainConfig, prompt_lengths: Sequence[int] = ()) -> Setup:
    """Returns the setup for the memory plan. Without `prompt_lengths`, each prompt has the maximum length."""
    columns = plan(config)
    roles = {role: each for role, each in role_settings(config, columns, 1).items() if each is not None}
    if (judge := config.reward_model.judge) is not None:
        roles["reward_model"] = workers.settings_of(config.model, config.reward_model, judge)
    objectives: dict[str, Objective] = {"actor": PolicyObjective.from_config(config)}
    if "critic" in roles:
        objectives["critic"] = ValueObjective.from_config(config)
    lengths = Lengths(tuple(prompt_lengths) or (config.data.max_prompt_length,), config.data.max_response_length)
    return Setup(config, roles, objectives, lengths, columns.passes)


def role_settings(config: TrainConfig, columns: ColumnPlan, total_steps: int) -> dict[str, RoleSettings | None]:
    """Returns the settings of each role with a training engine, in the order in which workers are built: `ref` follows
    `actor`, whose weights it may read. It has no settings if it is the actor without its adapter."""
    model, ref, critic = config.model, config.ref, config.critic

    def trained(role: ActorConfig, path: str | None, steps: int) -> RoleSettings:
        updates = steps * updates_per_step(role, config.data.train_batch_size)
        return workers.settings_trained(config, role, updates, path)

    actor_steps = max(1, total_steps - (critic.warmup_steps if "critic" in columns.roles else 0))
    fixed = config.rollout.engine.options.get("batch_invariant") is True
    actor = replace(trained(config.actor, None, actor_steps), freeze=tuple(model.freeze), batch_invariant=fixed)
    found: dict[str, RoleSettings | None] = {"actor": actor}
    if "critic" in columns.roles:
        is_value_model = "values" in VALUE_LOSSES[critic.value_loss].columns
        found["critic"] = replace(trained(critic, critic.model_path, total_steps), is_value_model=is_value_model)
    if "ref" in columns.roles:
        is_start = model.lora.rank is not None and ref.model_path is None
        found["ref"] = None if is_start else workers.settings_of(model, ref, ref.model_path)
    if any(column.name == "teacher_log_probs" for column in columns.providers):
        for source, path in config.teacher.model_paths.items():
            found[teacher_role(source)] = workers.settings_of(model, ref, path)
    if "reward_model" in columns.roles:
        settings = workers.settings_of(model, config.reward_model, config.reward_model.model_path)
        found["reward_model"] = replace(settings, is_reward_model=True)
    return found


def worker_specs(
    config: TrainConfig, columns: ColumnPlan, total_steps: int, fits: Setup | None = None
) -> list[WorkerSpec]:
    """Returns the specifications of a run's workers. With `fits`, sizes that the config leaves open (tokens of
    micro-batches, bytes of the cache) fit the accelerators of this setup."""
    model, cluster = config.model, config.cluster
    settings, room = role_settings(config, columns, total_steps), dict[str, Any]()
    if fits is not None:
        planned, fits = planner(), replace(fits, device=free_accelerator(fits.config.cluster))
        room["cache_room"] = planned.cache_room(fits)
        settings = {role: None if each is None else planned.sized(each, fits, role) for role, each in settings.items()}
    specs = [
        WorkerSpec(role, workers.AdapterOffWorker) if each is None else WorkerSpec(role, TrainWorker, (each,))
        for role, each in settings.items()
    ]
    if config.reward_model.judge is not None:
        specs.append(replace(judge_worker(config), kwargs=room))
    tokenizer_path = model.tokenizer_path or workers.path_of(model)
    ranks, devices = (of(config.rollout.engine.options) for of in (cluster.replica_ranks, cluster.replica_devices))
    sampling = (config.rollout, tokenizer_path, model, devices, ranks)
    return [*specs, WorkerSpec("rollout", RolloutWorker, sampling, room)]


def judge_worker(config: TrainConfig) -> WorkerSpec:
    """The worker of a judge: the rollout engine with the judge's weights."""
    own = {"path": config.reward_model.judge, "tokenizer_path": None, "lora": LoraConfig()}
    model, engine = config.model.model_copy(update=own), config.rollout.engine
    options = {name: value for name, value in engine.options.items() if name not in OF_POLICY}
    plain = config.rollout.model_copy(update={"engine": engine.model_copy(update={"options": options})})
    devices = config.cluster.pools[config.cluster.pool_of("reward_model")].num_devices
    return WorkerSpec("reward_model", RolloutWorker, (chosen_engine(plain, model), model.path, model, devices))


def _helpers(config: TrainConfig, reward: Callable[..., Any] | None, has_reward: bool) -> Iterator[WorkerSpec]:
    """Yields the specifications of workers without a model (environments, rewards) that pools of the config list."""
    if has_reward and config.cluster.lists(REWARD):
        yield WorkerSpec(REWARD, RewardWorker, (config.reward, reward, config.model))
    if config.cluster.lists(ENVIRONMENT):
        yield WorkerSpec(ENVIRONMENT, EnvironmentWorker, (config.environment,))


def _rollouts(
    begun: Begun,
    config: TrainConfig,
    roles: Mapping[str, WorkerGroup],
    scorer: Scorer | None,
    hosts: Mapping[str, EnvironmentHost] | None,
    scoring: str,
) -> Rollouts:
    tokenizer, engine = begun.tokenizer, _engine(config, roles)
    if ENVIRONMENT in roles:
        hosts = placed_hosts(roles[ENVIRONMENT], config.environment)
    staleness = config.rollout.max_staleness
    made = Rollouts(
        begun.loader,
        Driver(engine, hosts or {}, config.rollout.deadline_seconds, in_thread=staleness > 0),
        begun.stages,
        scorer,
        tokenizer,
        seed=config.trainer.seed,
        n=config.rollout.n,
        params=sampling_params(config.rollout, config.data.max_response_length, begun.stop_ids, tokenizer),
        batch_size=config.data.train_batch_size,
        max_staleness=staleness,
        last_step=begun.total_steps,
        group_filter=_group_filter(config),
        correct_threshold=config.reward.correct_threshold,
        length_stages=config.rollout.length_stages,
        sampling=Modes(roles["rollout"]).rollout_mode if config.rollout.free_cache_engine else nullcontext,
    )
    made.val_scorer, made.flow.scoring = val_scorer_of(config), scoring
    made.judge = None if config.reward_model.judge is None else judge_of(roles["reward_model"], config)
    return made


def judge_of(group: WorkerGroup, config: TrainConfig) -> Rollouts:
    """Returns the `Rollouts` that sample the judge's verdicts on its ranks."""
    path, trusted = str(config.reward_model.judge), config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    engine = Replicas(group, config.rollout.max_batch_size, gathers=group.here is None)
    driver = Driver(engine, {}, config.rollout.deadline_seconds)
    stop_ids = stop_token_ids(path, tokenizer, config.data.template_options)
    params = SamplingParams(config.data.max_response_length, stop_token_ids=stop_ids)
    stages = {MAIN: Stage(TemplateCodec(tokenizer), is_silent=True)}
    return Rollouts(PromptSource(), driver, stages, None, tokenizer, n=1, params=params)


def _engine(config: TrainConfig, roles: Mapping[str, WorkerGroup]) -> Replicas | Direct:
    """Returns the engine of this process, if it has one that cannot restart; else all rollout ranks as one engine."""
    ranks = roles["rollout"]
    if ranks.here is not None:
        worker = ranks.here.by_role["rollout"]
        assert isinstance(worker, RolloutWorker)
        if not isinstance(worker.engine, Restarts):
            return Direct(worker, ranks.here)
    sync = weight_sync(roles["actor"], ranks, config.rollout.dtype, config.cluster.deadline_seconds)
    return Replicas(ranks, config.rollout.max_batch_size, gathers=ranks.here is None, weight_sync=sync)


def _entropy_controller(algorithm: AlgorithmConfig) -> Fixed | AdaptiveEntropy:
    """Returns the controller that sets the weight of the entropy bonus at each step."""
    entropy, coef = algorithm.entropy, algorithm.entropy_coef
    if entropy.target is None:
        return Fixed(coef)
    return AdaptiveEntropy(coef, entropy.target, entropy.delta, entropy.highest)


def _group_filter(config: TrainConfig) -> Filter | None:
    """Returns the group filter, including the filters of domains that set their own."""

    def made(chosen: GroupFilterConfig, key: str) -> Filter | None:
        if chosen.name is None:
            return None
        of = Bound.of(FILTERS, chosen.name, chosen.options, f"{key}.filter.options")
        return Filter(of.entry.load(), of.options, chosen.metric, extra=of.options.get("extra", 0.0))

    by_domain = {name: made(each.filter, f"reward.domains.{name}") for name, each in config.reward.domains.items()}
    of_domain = {name: each for name, each in by_domain.items() if each is not None}
    general = made(config.algorithm.filter, "algorithm")
    if general is None and not of_domain:
        return None
    refills = config.algorithm.filter.max_refills
    return replace(general or Filter(keep_all, {}), max_refills=refills, of_domain=of_domain)


def show_batch(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, source: PromptSource, total_steps: int, roles: list[str]
) -> list[Prompt]:
    """Logs the sizes of a dry run, and the first prompt as the model reads it.  Returns the first batch."""
    prompts = source.take(config.data.train_batch_size)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    log.info(
        "dry run: %d steps of %d prompts x %d responses; roles %s; the first batch has %d to %d prompt tokens",
        *(total_steps, len(prompts), config.rollout.n, ", ".join(roles), min(lengths), max(lengths)),
    )
    text = str(tokenizer.decode(list(prompts[0].token_ids)))
    log.info("the first prompt:\n%s", shortened(text, prompts[0].media))
    log.info("its ground truth: %s", prompts[0].ground_truth)
    return prompts


def dry_run_elsewhere(config: TrainConfig, device_gib: float | None, host_gib: float | None) -> None:
    """Checks a run's config, tokenizer, templates, data, ground truths and rewards. Checks that it fits accelerators of
    `device_gib` and nodes of `host_gib`; None is this machine's size. Loads no model, starts no worker.

    Raises: WhetError for every error that a user can correct."""
    planned = planner(is_needed=True)
    if config.trainer.loop:
        load_target(config.trainer.loop)
    device, host = stated(device_gib, "an accelerator"), stated(host_gib, "a node")
    config = with_engine(with_dtypes(config, elsewhere=device is not None))
    begun = begin(config)

    def replan(other: TrainConfig) -> Setup:
        return setup(other, begun.lengths)

    planned.check_fits(replace(replan(config), device=device, host=host), run_folder(config.trainer), replan, 0)
    roles = [spec.role for spec in worker_specs(config, begun.columns, begun.total_steps)]
    prompts = show_batch(config, begun.tokenizer, begun.loader, begun.total_steps, roles)
    _score(config, begun.tokenizer, prompts[:SCORED])
    processes = sum(pool.processes for pool in config.cluster.pools.values())
    machines = plural(config.cluster.nnodes, "node"), plural(processes, "process", "processes")
    log.info(NOT_CHECKED, *machines, config.rollout.engine.name)


def _score(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]) -> None:
    """Logs the rewards of two test responses, ground truth and empty text, to each prompt.  Raises: RewardError."""
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
