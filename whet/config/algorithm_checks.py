# SPDX-License-Identifier: Apache-2.0
"""Consistency rules for the algorithm (losses, corrections, updates), for training engines and their processes, and for
the cluster. Imports no torch, like `checks`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from whet import registry
from whet.columns import COLUMNS, SCORED_BY
from whet.config import schema
from whet.config.cluster import ROLES, ClusterConfig, devices_of
from whet.config.schema import EngineConfig, ExamplesConfig, ModelConfig, OptimConfig, TrainConfig
from whet.config.section import Section, SectionPlace, entry_at
from whet.errors import ConfigError, did_you_mean, pip_install
from whet.registry import ENGINES, FILTERS, load_target

DEFAULT_AGGREGATION = "token-mean"
AGGREGATED = ("values", "response_mask", "num_tokens", "num_sequences", "fixed_length")  # parameters of an aggregation


def aggregation(algorithm: schema.AlgorithmConfig) -> str:
    """Returns the aggregation of token losses. The loss or the estimator may fix it; otherwise the config chooses it.

    Raises: ConfigError where two of these disagree."""
    loss = _loss(algorithm)
    estimator = _estimator(algorithm)
    chosen, key = algorithm.loss_agg_mode, "algorithm.loss_agg_mode"
    for entry in (loss, estimator):
        fixed = entry.marks.get("aggregation")
        if fixed is None:
            continue
        if chosen is not None and chosen != fixed:
            expected = f"{fixed}, with which {entry.kind} {entry.name!r} is defined"
            change = "leave algorithm.loss_agg_mode unset, or choose a loss and an estimator that agree"
            raise ConfigError(key, chosen, expected, change)
        chosen, key = fixed, f"aggregation of {entry.kind} {entry.name!r}"
    return chosen or DEFAULT_AGGREGATION


def uses_critic(algorithm: schema.AlgorithmConfig) -> bool:
    """Tells whether the estimator or the loss reads a column that the critic computes.  Raises: ConfigError."""
    loss = _loss(algorithm)
    read = {*_estimator(algorithm).columns, *loss.columns}
    return any("critic" in COLUMNS[name].roles for name in read if name in COLUMNS)


def frozen_models(config: TrainConfig) -> dict[str, str]:
    """Returns the paths of the models that a run only reads, by role. A reference that is the base of an adapter has no
    memory of its own."""
    read, own, found = {*_with_reads(_columns(config))}, config.ref.model_path, dict[str, str]()
    reads_ref = config.algorithm.kl.where != "none" or any("ref" in COLUMNS[name].roles for name in read)
    if reads_ref and (own is not None or config.model.lora.rank is None):
        found["ref"] = str(own or config.model.path)
    if "teacher_log_probs" in read:
        found |= {f"teacher:{name}": path for name, path in config.teacher.model_paths.items()}
    if (path := config.reward_model.model_path) is not None:
        found["reward_model"] = path
    return found


def _columns(config: TrainConfig) -> Iterator[str]:
    """Yields the columns that the functions of a config read."""
    algorithm, correction, source = config.algorithm, config.algorithm.correction, config.reward_model.source
    yield from (*_estimator(algorithm).columns, *_loss(algorithm).columns)
    for kind, name in ((registry.WEIGHTS, correction.weight), (registry.REJECTIONS, correction.rejection)):
        yield from kind[name].columns if name is not None else ()
    if uses_critic(algorithm):
        yield from registry.VALUE_LOSSES[config.critic.value_loss].columns
    if source is not None:
        yield SCORED_BY[source]


def _with_reads(names: Iterable[str]) -> Iterator[str]:
    """Yields columns, and the columns that their providers read."""
    for name in names:
        if name in COLUMNS:
            yield name
            yield from _with_reads(COLUMNS[name].reads)


def algorithm_rule(algorithm: schema.AlgorithmConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks KL, overlong penalty, teacher, correction and aggregation."""
    wrapper = algorithm.adv_options.get("wrap_method")
    if isinstance(wrapper, str):  # the option of `cpo` that names a registered function
        entry_at(registry.WRAPPERS, "algorithm.adv_options.wrap_method", wrapper)
    kl, overlong, limit = algorithm.kl, algorithm.overlong, at.whole["data"].max_response_length
    if kl.controller == "adaptive" and kl.where != "reward":
        expected = f"fixed with algorithm.kl.where={kl.where}: the KL must be in the reward to be adapted"
        change = "set algorithm.kl.where=reward, or algorithm.kl.controller=fixed"
        yield ConfigError("algorithm.kl.controller", kl.controller, expected, change)
    if overlong.penalty > 0 and overlong.buffer_length >= limit:
        expected = f"less than data.max_response_length={limit}: the buffer is the last part of it"
        change = f"try {max(1, limit // 4)}"
        yield ConfigError("algorithm.overlong.buffer_length", overlong.buffer_length, expected, change)
    estimator, teacher = _estimator(algorithm), at.whole["teacher"]
    if "teacher_log_probs" in estimator.columns and not teacher.model_paths and teacher.hint is None:
        expected = "a teacher or a hint, without which teacher_log_probs are the policy's own"
        change = f"set teacher.hint ({', '.join(registry.HINTS.names())}) or teacher.model_paths"
        yield ConfigError("algorithm.adv_estimator", estimator.name, expected, change)
    hint = registry.HINTS[teacher.hint] if teacher.hint is not None and teacher.hint in registry.HINTS else None
    if hint is not None and "options_checked_by" in hint.marks:
        yield from hint.marked("options_checked_by")(teacher.hint_options)
    yield from _correction(algorithm)
    yield from _of_pairs(algorithm)
    entry = entry_at(registry.AGGREGATIONS, "algorithm.loss_agg_mode", aggregation(algorithm))
    required = [name for name, default in entry.options.items() if default is registry.REQUIRED]
    if unknown := [name for name in (*entry.parameters, *required) if name not in AGGREGATED]:
        expected = f"parameters of an aggregation only ({', '.join(AGGREGATED)}), not {unknown[0]!r}"
        change = "make it an option with a default after the `*`, or remove it"
        yield ConfigError("algorithm.loss_agg_mode", entry.name, expected, change)


def _of_pairs(algorithm: schema.AlgorithmConfig) -> Iterator[ConfigError]:
    """Checks a policy loss that is a preference loss: it needs pairs, an estimator that orders groups, no weights."""
    loss, estimator = registry.POLICY_LOSSES[algorithm.policy_loss], _estimator(algorithm)
    if loss.kind != registry.PREFERENCE_LOSSES.kind:
        return
    if (of := loss.marks.get("of", "pair")) != "pair":
        expected, change = "a loss of pairs, for groups of sampled responses", "choose another, such as dpo"
        yield ConfigError("algorithm.policy_loss", f"{loss.name}, a loss of a {of}", expected, change)
    if "uid" not in estimator.columns:
        expected = f"an estimator that orders the responses to a prompt, for the preference loss {loss.name!r}"
        yield ConfigError("algorithm.adv_estimator", estimator.name, expected, "set it to best_worst or all_pairs")
    shaping, weight = algorithm.shaping, algorithm.correction.weight
    values = {"shaping.whiten_advantages": shaping.whiten_advantages, "shaping.advantage_clip": shaping.advantage_clip}
    for key, value in (values | {"correction.weight": weight}).items():
        if value not in (None, False):
            expected = f"unset: the preference loss {loss.name!r} reads only the order of the rows of a group"
            yield ConfigError(f"algorithm.{key}", value, expected, "unset it, or choose a policy loss")


def _correction(algorithm: schema.AlgorithmConfig) -> Iterator[ConfigError]:
    correction = algorithm.correction
    loss = _loss(algorithm)
    if correction.weight is not None and loss.marks.get("corrects"):
        expected = f"no value with policy loss {loss.name!r}, which corrects the mismatch of trainer and rollout itself"
        change = "unset it, or set algorithm.policy_loss=ppo_clip"
        yield ConfigError("algorithm.correction.weight", correction.weight, expected, change)
    given = correction.rejection_options
    bounds = [given.get("high"), given.get("low") if given.get("form") == "k1" else None]  # k2 and k3 are never < 0
    if correction.rejection == "divergence" and all(each in (None, math.inf, -math.inf) for each in bounds):
        change = "set rejection_options.high, such as 0.3: the k3 of a token that became twice as likely"
        expected = "a bound in algorithm.correction.rejection_options, without which no token is rejected"
        yield ConfigError("algorithm.correction.rejection", correction.rejection, expected, change)
    if correction.old_log_probs == "trainer":
        return
    for name, kind in (("weight", registry.WEIGHTS), ("rejection", registry.REJECTIONS)):
        chosen = correction[name]
        reads = entry_at(kind, f"algorithm.correction.{name}", chosen).columns if chosen is not None else ()
        if {"old_log_probs", "rollout_log_probs"} <= set(reads):
            is_same = correction.old_log_probs == "rollout"
            does = "uses the rollout's for both" if is_same else "has the trainer's in the loss alone"
            expected = (
                "no value: it compares the trainer's log-probs with the rollout's, but "
                f"algorithm.correction.old_log_probs={correction.old_log_probs} {does}"
            )
            yield ConfigError(f"algorithm.correction.{name}", chosen, expected, "unset one of the two keys")
    if correction.old_log_probs == "interpolated" and algorithm.kl.where == "reward":
        expected = (
            "loss with algorithm.correction.old_log_probs=interpolated, which has old log-probs in the loss alone"
        )
        change = "set algorithm.kl.where=loss, or unset one of the two keys"
        yield ConfigError("algorithm.kl.where", algorithm.kl.where, expected, change)


def group_rule(rollout: schema.RolloutConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Requires several responses per prompt, if an estimator or a filter compares them."""
    if rollout.n > 1 or not isinstance(at.whole, schema.TrainConfig):
        return
    entry, chosen = _estimator(at.whole.algorithm), at.whole.algorithm.filter.name
    if "uid" in entry.columns:
        expected = f"at least 2 with {entry.name!r}, which compares the responses to one prompt"
        change = "raise it, or set algorithm.adv_estimator to one that does not (gae, reinforce_plus_plus)"
        yield ConfigError("rollout.n", rollout.n, expected, change)
    if chosen is not None:
        expected = f"at least 2 with algorithm.filter.name={chosen}, which compares the responses to one prompt"
        yield ConfigError("rollout.n", rollout.n, expected, "raise it, or unset algorithm.filter.name")


def extra_rule(rollout: schema.RolloutConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Refuses the option `extra` of a filter in a domain, and with `rollout.max_staleness` above 0."""
    config = at.whole
    if not isinstance(config, schema.TrainConfig):
        return
    refused = [(f"reward.domains.{name}.filter", each.filter) for name, each in config.reward.domains.items()]
    if rollout.max_staleness:
        refused.append(("algorithm.filter", config.algorithm.filter))
    stale = f"rollout.max_staleness={rollout.max_staleness:g}, which lets long responses continue over several steps"
    for key, chosen in refused:
        why = stale if key == "algorithm.filter" else "a filter of a domain"
        entry = None if chosen.name is None else entry_at(FILTERS, f"{key}.name", chosen.name)
        if entry and (extra := entry.resolve_options(chosen.options, f"{key}.options").get("extra", 0)):
            yield ConfigError(f"{key}.options.extra", extra, f"0 with {why}", "set it to 0, or choose another filter")


def updates_rule(role: schema.ActorConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks the mini-batch and micro-batch sizes of a trained role."""
    if at.key == "critic" and not uses_critic(at.whole["algorithm"]):
        return
    data: schema.DataConfig = at.whole["data"]
    batch, mini_batch = data.train_batch_size, role.mini_batch_size or data.train_batch_size
    if batch % mini_batch:
        near = " or ".join(map(str, nearest_divisors(batch, mini_batch)))
        expected = f"a divisor of data.train_batch_size={batch} (both in prompts)"
        yield ConfigError(at.of("mini_batch_size"), mini_batch, expected, f"try {near}")
    longest = data.max_prompt_length + data.max_response_length
    if (most := role.max_tokens_per_micro_batch) is not None and most < longest:
        expected = f"at least {longest}, one row of data.max_prompt_length + data.max_response_length tokens"
        yield ConfigError(at.of("max_tokens_per_micro_batch"), most, expected, f"set it to {longest} or more")


def optim_rule(optim: schema.OptimConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Refuses options for the states of AdamW if the optimizer is another one."""
    for name, default in (("state_dtype", "float32"), ("weight_rounding", None)):
        if optim.name != "adamw" and optim[name] != default:
            expected = f"no value with {at.of('name')}={optim.name}: it is an option of adamw"
            yield ConfigError(at.of(name), optim[name], expected, "unset one of the two keys")


def critic_rule(critic: schema.CriticConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks that the value loss trains the kind of model that the estimator reads: value or process reward model."""
    algorithm, steps = at.whole["algorithm"], at.whole["trainer"].total_steps
    if not uses_critic(algorithm):
        if critic.warmup_steps > 0:
            readers = f"estimator {algorithm.adv_estimator!r} nor loss {algorithm.policy_loss!r}"
            expected = f"0, as no critic is trained: neither {readers} reads values"
            yield ConfigError(
                "critic.warmup_steps", critic.warmup_steps, expected, "unset it, or choose another estimator"
            )
        return
    if steps is not None and critic.warmup_steps >= steps:
        expected = f"less than trainer.total_steps={steps}, or the policy is never trained"
        yield ConfigError("critic.warmup_steps", critic.warmup_steps, expected, "lower it")
    estimator = _estimator(algorithm)
    wanted, output = (
        ("log_probs", "process_rewards") if "process_rewards" in estimator.columns else ("values", "values")
    )
    if wanted not in entry_at(registry.VALUE_LOSSES, "critic.value_loss", critic.value_loss).columns:
        fitting = [entry.name for entry in registry.VALUE_LOSSES if wanted in entry.columns]
        expected = f"a loss that trains a model with {output}, which {estimator.name!r} reads"
        yield ConfigError("critic.value_loss", critic.value_loss, expected, f"set it to {' or '.join(fitting)}")


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Returns the largest divisor of `number` below `wanted` and the smallest one above it, if they exist."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below, above = [each for each in divisors if each < wanted], [each for each in divisors if each > wanted]
    return [*below[-1:], *above[:1]]


def _loss(algorithm: schema.AlgorithmConfig) -> registry.Entry:
    return entry_at(registry.POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)


def _estimator(algorithm: schema.AlgorithmConfig) -> registry.Entry:
    return entry_at(registry.ADV_ESTIMATORS, "algorithm.adv_estimator", algorithm.adv_estimator)


@dataclass(frozen=True)
class EngineUse:
    """The settings of a role's engine. The function `refuses` of an engine's class gets them as its argument."""

    key: str  # actor.engine
    engine: EngineConfig
    options: Mapping[str, Any]  # with defaults
    model: ModelConfig
    optim: OptimConfig | None
    optim_key: str
    processes: int
    processes_key: str
    batch_invariant: bool  # the rollout is, so training needs the same kernels
    media: str = ""  # the name of a row with images or videos, if there is one; "" before the data is read

    @classmethod
    def at(cls, place: SectionPlace, media: str = "") -> EngineUse:
        """Reads the engine's settings from a section.  Raises: ConfigError for an unknown engine or option."""
        config, engine, cluster = place.whole, place.parent["engine"], place.whole["cluster"]
        options = entry_at(ENGINES, place.of("name"), engine.name).resolve_options(engine.options, place.of("options"))
        prefix = place.key.removesuffix("engine")
        role, optim = prefix.removesuffix(".") or "actor", (place.parent.get("optim"), f"{prefix}optim")
        processes = cluster.processes_of(role), cluster.processes_key(role)
        rollout = config.get("rollout") if role == "actor" else None
        invariant = rollout is not None and rollout.engine.options.get("batch_invariant") is True
        return cls(place.key, engine, options, config["model"], *optim, *processes, invariant, media)

    def refused(self) -> Iterable[ConfigError]:
        """Calls `refuses` of the engine's class, and returns its errors. The registration of a shipped engine names
        this function, in a module that loads no torch."""
        entry = ENGINES[self.engine.name]
        if entry.function is None and "refuses" not in entry.marks:
            return ()
        target = entry.marks.get("refuses", f"{entry.target}.refuses")
        refuses: Callable[[EngineUse], Iterable[ConfigError]] = load_target(target)
        return refuses(self)

    @property
    def row_ranks(self) -> int:
        """The number of processes that compute a row together, by the mark `row_ranks` or `spread` of the engine."""
        entry = ENGINES[self.engine.name]
        if "row_ranks" in entry.marks:
            return int(entry.marked("row_ranks")(self.processes, self.options))
        return 1 if entry.function is None else int(entry.load().spread(self.processes, self.options).row_ranks)  # type: ignore[attr-defined]


def other_kernels(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error if the rollout is batch-invariant but the training engine does not use the same kernels."""
    if use.batch_invariant:
        expected = "single with rollout.engine.options.batch_invariant=true: other engines use other kernels"
        yield ConfigError(f"{use.key}.name", use.engine.name, expected, "set it to single, or unset batch_invariant")


def engine_rule(engine: EngineConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks the settings of an engine: first by the rules of all engines, then by the engine's own rules."""
    use = EngineUse.at(at)
    rounding = None if use.optim is None else use.optim.weight_rounding
    if rounding is not None and use.model.dtype == "float32":
        expected = "no value with model.dtype=float32 (auto is, on a machine that does not multiply bfloat16)"
        change = "set model.dtype=bfloat16, in which it keeps the weights"
        yield ConfigError(f"{use.optim_key}.weight_rounding", rounding, expected, change)
    if (rate := use.options.get("router_bias_rate")) and use.model.lora.rank is not None:
        expected = "0 with model.lora.rank: an adapter's checkpoint has no biases"
        yield ConfigError(f"{use.key}.options.router_bias_rate", rate, expected, "unset one of the two keys")
    yield from use.refused()
    yield from _rows(use, at.whole)


def _rows(use: EngineUse, config: Section) -> Iterator[ConfigError]:
    """Requires that each shard of a mini-batch has at least one row."""
    if isinstance(config, ExamplesConfig):
        rows, what = config.data.train_batch_size, "data.train_batch_size"
    elif isinstance(config, TrainConfig) and use.key in ("actor.engine", "critic.engine"):
        prompts = config[use.key.partition(".")[0]].mini_batch_size or config.data.train_batch_size
        rows, what = prompts * config.rollout.n, "mini-batch prompts x rollout.n"
    else:
        return
    if use.processes > (most := rows * (ranks := use.row_ranks)):
        together = f" x {ranks} processes that compute a row together" if ranks > 1 else ""
        expected = f"at most {most}, the rows of an optimizer step ({what}){together}"
        yield ConfigError(use.processes_key, use.processes, expected, f"set it to {most} or less")


def cluster_rule(cluster: ClusterConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks backend, nodes, GPUs and pools."""
    if cluster.backend == "local":
        for key, value in (("address", cluster.address), ("nnodes", cluster.nnodes if cluster.nnodes > 1 else None)):
            if value is not None:
                change = f"set cluster.backend=ray, or unset cluster.{key}"
                yield ConfigError(f"cluster.{key}", value, "no value with cluster.backend=local: it needs Ray", change)
    elif find_spec("ray") is None:
        yield ConfigError("cluster.backend", cluster.backend, "an installation of Ray", f"run {pip_install('ray')}")
    if cluster.address is not None and "://" in cluster.address:
        expected = "host:port, or no address; Ray's client would send every batch through one server"
        change = "start whet on a node of the cluster (`ray job submit -- whet train ...`)"
        yield ConfigError("cluster.address", cluster.address, expected, change)
    yield from _pools(cluster)
    yield from _nodes(cluster)


def _nodes(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Checks that the ranks of all pools fill the nodes.  Raises: ConfigError."""
    total, nodes, gpus = cluster.devices, cluster.nnodes, cluster.n_gpus_per_node
    unit = "devices" if any(pool.devices != 1 for pool in cluster.pools.values()) else "processes"
    key, found = ("cluster.placement", f"{total} {unit}") if cluster.placement else ("cluster.processes", total)
    if len(cluster.gpus) != nodes:
        expected = f"a number for each of cluster.nnodes={nodes}"
        yield ConfigError("cluster.n_gpus_per_node", gpus, expected, "make the two agree")
    elif any(cluster.gpus) and total != sum(cluster.gpus):
        each = f"cluster.nnodes={nodes} x cluster.n_gpus_per_node={gpus}"
        given = each if isinstance(gpus, int) else f"cluster.n_gpus_per_node={gpus}"
        expected = (
            f"{sum(cluster.gpus)}, the GPUs of {given}; a process has one GPU, or as many as devices of its pool says"
        )
        yield ConfigError(key, found, expected, "make the two numbers equal")
    elif not any(cluster.gpus) and total % nodes:
        near = f"{total - total % nodes or nodes} or {total + nodes - total % nodes}"
        yield ConfigError(key, found, f"a multiple of cluster.nnodes={nodes}", f"try {near}")
    elif empty := {*range(nodes)} - {slot.node for slot in cluster.slots()}:
        change = "add a pool of environment or reward, or remove the node"
        yield ConfigError("cluster.n_gpus_per_node", gpus, f"a process on node {min(empty)} too", change)


def _pools(cluster: ClusterConfig) -> Iterator[ConfigError]:
    if cluster.placement and cluster.processes > 1:
        expected = "no value with cluster.placement, whose pools have sizes of their own"
        yield ConfigError("cluster.processes", cluster.processes, expected, "unset one of the two keys")
    owners = dict[str, str]()
    for number, (name, pool) in enumerate(cluster.placement.items()):
        key = f"cluster.placement.{name}"
        if not pool.roles and number > 0:
            expected = f"some of {', '.join(ROLES)}: roles in no pool go to the first, {next(iter(cluster.placement))}"
            yield ConfigError(f"{key}.roles", [], expected, "list some, or remove the pool")
        if pool.devices > 1 and pool.roles != ["rollout"] and cluster.needs_device(name):
            expected = f"1 with the roles {', '.join(pool.roles) or 'all'}: a training engine computes on one device"
            yield ConfigError(f"{key}.devices", pool.devices, expected, "lower it, or give the rollout a separate pool")
        for role in pool.roles:
            if role not in ROLES:
                hint = did_you_mean(role, ROLES, "correct the name", quoted=False)
                yield ConfigError(f"{key}.roles", role, f"one of {', '.join(ROLES)}", hint)
            elif role in owners:
                expected = f"each role in one pool, and pool {owners[role]} has it too"
                yield ConfigError(f"{key}.roles", role, expected, "remove it from one")
            owners[role] = name


def replica_rule(cluster: ClusterConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Requires that the ranks of the rollout's pool form whole replicas. Each must be on one node or fill nodes."""
    options = at.whole.rollout.engine.options if isinstance(at.whole, TrainConfig) else {}
    size, where, name = options.get("tensor_parallel_size"), "rollout.engine.options", cluster.pool_of("rollout")
    pool, devices, key = cluster.pools[name], cluster.replica_devices(options), f"{where}.tensor_parallel_size"
    if not isinstance(size, int) or size < 1:
        if devices != pool.num_devices:
            yield ConfigError(key, size, "a number, as the server has stages of several devices", "set it")
        return
    ranks, slots = cluster.replica_ranks(options), cluster.slots()
    if devices % pool.num_devices or pool.processes % ranks:
        expected = f"a size that divides the {pool.processes * pool.num_devices} devices of the pool {name}"
        yield ConfigError(key, size, f"{expected}, in whole ranks", "change it, or the processes of the pool")
        return
    here, own = devices_of(slots), [slot for slot in slots if slot.pool.name == name]
    servers = [devices_of(own[at : at + ranks]) for at in range(0, len(own), ranks)]
    if all(len(server) == 1 for server in servers):
        return
    if all(server[node] == here[node] for server in servers for node in server):
        needs = {"weights_dir": "a folder that all nodes share", "weight_transfer": "file", "restarts": "0"}
        for option, wanted in needs.items():
            found = options.get(option)
            if found is None or (option != "weights_dir" and str(found) != wanted):
                expected = f"{wanted}, as a server has devices of {len(servers[0])} nodes"
                yield ConfigError(f"{where}.{option}", found, expected, f"set it, or lower {key}")
    else:
        expected = f"all {devices} devices of a server on one node (largest: {max(here.values())}), or on whole nodes"
        yield ConfigError(key, size, expected, "lower it")


def neighbours_rule(cluster: ClusterConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Requires actor and reference in the same pool, if the reference is the actor's model without its adapter."""
    config = at.whole
    if not isinstance(config, TrainConfig) or config.model.lora.rank is None or config.ref.model_path is not None:
        return
    ref, actor = cluster.pool_of("ref"), cluster.pool_of("actor")
    if ref != actor:
        expected = f"one pool for ref ({ref}) and actor ({actor}), as ref is the actor's model without its adapter"
        change = "put both into one pool, or set ref.model_path to load a separate reference"
        yield ConfigError("cluster.placement", "ref and actor are apart, with model.lora.rank", expected, change)
