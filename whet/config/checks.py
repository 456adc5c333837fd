# SPDX-License-Identifier: Apache-2.0
"""Consistency checks of a config, which run before torch is loaded: the registry reads signatures from source.

A rule checks one type of section, wherever it is in the config: it yields one line for each error, or raises
ConfigError. All rules run, so that a user sees every error at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from whet.config import schema
from whet.config.algorithm_checks import algorithm_rule, critic_rule, group_rule, optim_rule, updates_rule
from whet.config.compose import flatten
from whet.config.engine_checks import cluster_rule, engine_rule, neighbours_rule, processes_rule
from whet.config.keys import choices
from whet.config.managers import LIMIT_NAMES
from whet.config.mix import shares_at
from whet.config.section import Choice, Place, entry_at
from whet.config.sources import check_files
from whet.config.tools import tool_rule
from whet.errors import ConfigError, pip_install
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, REWARDS, WEIGHTS

NARROW: dict[str, Callable[[float], bool]] = {  # values with which the most likely token is always sampled
    "temperature": lambda value: value < 0.01,  # a lead of 0.1 in the logits is a probability of 0.99995
    "top_p": lambda value: value < 0.01,  # below the probability of the most likely token
    "top_k": lambda value: value == 1,
    "min_p": lambda value: value == 1.0,
}


def check(config: schema.Section, given: Collection[str] = ()) -> None:
    """Checks that the values of a config are consistent.

    `given` names the arguments that the caller passes as objects ("reward", "data", "val_data").
    Raises: ConfigError with one line for each error."""
    if found := problems(config, given):
        raise ConfigError("\n".join(found))


def problems(config: schema.Section, given: Collection[str] = ()) -> list[str]:
    """Returns one line for each error that `check` would raise."""
    found: dict[str, None] = {}
    for key, section in config.sections():
        for kind, rule in RULES:
            if isinstance(section, kind):
                found |= dict.fromkeys(_lines(rule, section, Place(key, config, given)))
    return list(found)


def check_context(
    config: schema.TrainConfig | schema.ExamplesConfig | schema.EvalConfig | schema.GenerateConfig,
    max_position_embeddings: int,
) -> None:
    """Checks that prompt and response fit into the context length of the model.  Raises: ConfigError."""
    if isinstance(config, schema.ExamplesConfig):
        if config.data.max_length > max_position_embeddings:
            raise ConfigError(
                f"data.max_length={config.data.max_length} is more than the {max_position_embeddings} positions of the "
                f"model; lower it to {max_position_embeddings}"
            )
        return
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if prompt + response > max_position_embeddings:
        left = max_position_embeddings - prompt
        advice = f"data.max_response_length={left}" if left > 0 else "a smaller data.max_prompt_length"
        raise ConfigError(
            f"data.max_prompt_length={prompt} and data.max_response_length={response} make {prompt + response} tokens, "
            f"and the model has {max_position_embeddings} positions; try {advice}"
        )


def check_data(
    config: schema.TrainConfig | schema.ExamplesConfig | schema.EvalConfig | schema.GenerateConfig, *, validation: bool
) -> None:
    """Checks only what `whet data` needs: data files, data options, model.  Raises: ConfigError."""
    if isinstance(config, schema.GenerateConfig):
        key, entries = config.source_key, config.sources
    else:
        name = "val_files" if validation or isinstance(config, schema.EvalConfig) else "train_files"
        key, entries = f"data.{name}", config.data[name]
    check_files(key, entries, config.data, required=True)
    of_model, of_data = _model(config.model, Place("model", config)), _chosen(config.data, Place("data", config))
    of_media = _pixels(config.data, Place("data", config)) if isinstance(config.data, schema.MediaRowsConfig) else ()
    if found := [*of_model, *of_data, *of_media]:
        raise ConfigError("\n".join(found))


def _lines(check: Callable[..., Iterable[str] | None], *arguments: Any, **named: Any) -> Iterator[str]:
    """Yields the lines of a check, and the message of one that raises."""
    try:
        yield from check(*arguments, **named) or ()
    except ConfigError as error:
        yield str(error)


def _chosen(section: schema.Section, at: Place) -> Iterator[str]:
    """Checks every key that names a registered function, and the options of that function."""
    for name, field in type(section).model_fields.items():
        for choice in field.metadata:
            if isinstance(choice, Choice) and choice.is_checked:
                options = section[choice.options] if choice.options else {}
                yield from _lines(choice.check, at.of(name), section[name], options)


def _model(model: schema.ModelConfig, at: Place) -> Iterator[str]:
    if model.lora.rank is not None and model.freeze:
        yield (
            f"model.lora.rank={model.lora.rank} trains the adapter alone, and model.freeze={model.freeze} adds "
            "nothing to that; unset one of them, or choose layers with model.lora.target_modules"
        )
    if model.lora.path is not None and not (Path(model.lora.path) / "adapter_config.json").is_file():
        yield f"model.lora.path={model.lora.path} has no adapter_config.json; expected an adapter's folder"
    if model.path is None:
        yield "model.path is not set; name a model folder (`whet init-model` makes one) or a model on the hub"
        return
    path = Path(model.path).expanduser()
    names_a_folder = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1
    if not path.is_dir():
        if names_a_folder or path.exists():
            yield f"model.path={model.path} is not a folder; expected a folder with a config.json and the weights"
    elif not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        is_checkpoint = (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()
        if not (is_checkpoint and isinstance(at.whole, schema.EvalConfig | schema.GenerateConfig)):
            hint = "; `whet export` makes one from this checkpoint" if is_checkpoint else ""
            yield f"model.path={model.path} has no config.json; expected a Hugging Face model folder{hint}"


def _pixels(data: schema.MediaRowsConfig, at: Place) -> Iterator[str]:
    low, high = data.min_pixels, data.max_pixels
    if low is not None and high is not None and low > high:
        yield f"{at.of('min_pixels')}={low} is over {at.of('max_pixels')}={high}; raise or unset one of them"


def _files(data: schema.RowsConfig, at: Place) -> Iterator[str]:
    whole, required = at.whole, "data" not in at.given
    if isinstance(whole, schema.GenerateConfig):
        read = [(whole.source_key, whole.sources, required)]
    elif isinstance(whole, schema.EvalConfig):
        read = [("data.val_files", data.val_files, required)]
    else:
        read = [("data.train_files", data.train_files, required), ("data.val_files", data.val_files, False)]
    for key, entries, is_required in read:
        yield from _lines(check_files, key, entries, data, required=is_required)


def _trainer(trainer: schema.TrainerConfig, at: Place) -> Iterator[str]:
    data = at.whole["data"]
    if trainer.val_freq > 0 and not data.val_files and "val_data" not in at.given:
        yield (
            f"trainer.val_freq={trainer.val_freq}, but data.val_files is empty; set data.val_files (in Python, "
            "val_data), or trainer.val_freq=0"
        )
    if trainer.resume not in ("auto", "never", "overwrite") and not Path(trainer.resume).expanduser().is_dir():
        ways = "auto, never, overwrite, or the folder of a checkpoint"
        yield f"trainer.resume={trainer.resume} is not a folder; expected {ways}"
    if trainer.loop is not None:
        yield from _function_path("trainer.loop", trainer.loop)
        if isinstance(at.whole, schema.ExamplesConfig):
            own = at.whole.command
            yield f"trainer.loop={trainer.loop} replaces the loop of `whet train`; unset it for `whet {own}`"
    for reference in trainer.callbacks:
        yield from _function_path("trainer.callbacks", reference)
    for name in dict.fromkeys(trainer.logger):
        spec = None if name in ("console", "jsonl") else find_spec(name)
        # A folder of that name in the working directory has a spec without an origin.
        if name not in ("console", "jsonl") and (spec is None or spec.origin is None):
            yield f"trainer.logger names {name}, which is not installed; run {pip_install(name)}"


def _function_path(key: str, reference: str) -> Iterator[str]:
    location, _, name = reference.rpartition(":")
    if not location:
        yield f"{key}={name} is not a function path; expected package.module:function or path/file.py:function"
    elif location.endswith(".py") and not Path(location).expanduser().is_file():
        yield f"{key}: {location} does not exist (seen from {Path.cwd()})"


def _reward(reward: schema.RewardConfig, at: Place) -> Iterator[str]:
    """Checks the reward functions without running user code; the reward processes load them."""
    trained = at.whole if isinstance(at.whole, schema.TrainConfig) else None
    if reward.manager == "dapo" and trained is not None and not trained.algorithm.overlong.penalty:
        yield (
            "reward.manager=dapo subtracts a penalty for length, and algorithm.overlong.penalty=0; set "
            "algorithm.overlong.penalty=1 and algorithm.overlong.buffer_length, or reward.manager=prime to do without"
        )
    if unknown := sorted({*reward.limits} - {*LIMIT_NAMES}):
        yield f"reward.limits has {unknown[0]!r}; expected {', '.join(LIMIT_NAMES)}; correct the name"
    pools = at.whole.cluster.placement.items() if isinstance(at.whole, schema.TrainConfig) else ()
    for name, pool in pools:
        if "reward" in pool.roles and pool.processes > 1 and reward.limits:
            yield (
                f"cluster.placement.{name}.processes={pool.processes} with reward.limits, which hold for one process "
                "of the pool; set processes to 1"
            )
    if "reward" in at.given:
        return
    functions = [reward.function] if isinstance(reward.function, str) else reward.function or []
    has_model = trained is not None and trained.reward_model.source is not None
    if not reward.names_function and not has_model and at.whole["environment"].name == "single_turn":
        yield f"reward.function is not set; name {', '.join(REWARDS.names())}, or your own as path/file.py:function"
    chosen = [("reward", function, reward.kwargs) for function in functions]
    chosen += [(f"reward.domains.{name}", each.function, each.kwargs) for name, each in reward.domains.items()]
    for key, function, options in chosen:
        if ":" in function:
            yield from _function_path(f"{key}.function", function)
        else:
            entry_at(REWARDS, f"{key}.function", function).check(options, f"{key}.kwargs.")
    for name, each in reward.domains.items():
        mark = choices(schema.GroupFilterConfig)["name"]
        mark.check(f"reward.domains.{name}.filter.name", each.filter.name, each.filter.options)
    if reward.weights is not None and len(reward.weights) != len(functions):
        yield (
            f"reward.weights has length {len(reward.weights)} and reward.function length {len(functions)}; set one "
            "weight for each function"
        )


def _reward_model(role: schema.RewardModelConfig, at: Place) -> Iterator[str]:
    """Checks what a reward model goes together with."""
    config: Any = at.whole
    if role.model_path is not None and role.rubric is not None:
        yield f"{at.of('model_path')} and {at.of('rubric')} are both set, and each gives the score; unset one of them"
    if role.source is None:
        default = dict(flatten(schema.RewardModelConfig().model_dump()))
        if found := [f"{at.of(key)}={value}" for key, value in flatten(role.model_dump()) if default.get(key) != value]:
            yield (
                f"{', '.join(found)}, but {at.of('model_path')} is not set, so there is no reward model; set it to a "
                f"sequence classifier, or {at.of('rubric')}, or unset these keys"
            )
        return
    algorithm, reward = config.algorithm, config.reward
    is_unscored = not reward.names_function and config.environment.name == "single_turn"
    if algorithm.filter.name is not None and is_unscored and "reward" not in at.given:
        yield (
            f"algorithm.filter.name={algorithm.filter.name} compares scores of reward.function, which is not set: it "
            f"does not see those of {at.of(role.source)}; unset the filter, or set reward.function"
        )
    if "reward_baselines" in ADV_ESTIMATORS[algorithm.adv_estimator].columns:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares with greedy responses, which only "
            f"reward.function scores, and {at.of(role.source)} is set; expected an estimator without "
            "reward_baselines, such as rloo or grpo"
        )


def _no_adapter(config: schema.RewardTrainingConfig, at: Place) -> Iterator[str]:
    if config.model.lora.path is not None:
        yield (
            f"model.lora.path={config.model.lora.path} is an adapter of a language model, and `whet train-reward` "
            "starts from a whole model; export the merged model first (`whet export`), and name it as model.path"
        )


def _mix(data: schema.DataConfig, at: Place) -> Iterator[str]:
    """Requires shares that sum to 1 at every step, and nothing else that chooses among the rows."""
    steps = {step for share in data.mix.values() if isinstance(share, dict) for step in share} or {0}
    for step in sorted(steps) if data.mix else ():
        shares = shares_at(data.mix, step)
        if abs(sum(shares.values()) - 1) > 1e-6:
            found = ", ".join(f"{name} {share:g}" for name, share in shares.items())
            yield (
                f"{at.of('mix')} sums to {sum(shares.values()):g} at step {step} ({found}); expected 1: change the "
                "shares"
            )
            return
    for name, share in data.mix.items():
        if share == {}:
            yield f"{at.of('mix')}.{name} has no share; expected a number, or shares by step as {{0: 0.5, 100: 0.2}}"


def _sampling(sampling: schema.SamplingConfig, at: Place) -> Iterator[str]:
    narrow = next((name for name, is_narrow in NARROW.items() if is_narrow(sampling[name])), None)
    if narrow is not None and sampling.n > 1:
        yield (
            f"{at.of(narrow)}={sampling[narrow]:g} is greedy: all {sampling.n} responses to a prompt would be the "
            f"same; change it, or set {at.of('n')}=1"
        )
    if sampling.temperature == 0 and sampling.min_p > 0:
        yield (
            f"{at.of('min_p')}={sampling.min_p:g} has no effect with {at.of('temperature')}=0, which is greedy; unset "
            "one of these two keys"
        )
    if sampling.allowed_token_ids == []:
        yield f"{at.of('allowed_token_ids')} is empty, so no token could be sampled; list token ids, or unset it"
    for name in ("stop", "bad_words"):
        if "" in sampling[name]:
            yield f"{at.of(name)} has an empty string, which matches everywhere; remove it"


def _staleness(rollout: schema.RolloutConfig, at: Place) -> Iterator[str]:
    """Requires, where responses are sampled while models train, ranks of their own and a correction."""
    config = at.whole
    if rollout.max_staleness == 0:
        return
    if not isinstance(config, schema.TrainConfig):
        yield f"rollout.max_staleness={rollout.max_staleness:g} has no effect, as nothing is trained here; unset it"
        return
    key, cluster, correction = (
        f"rollout.max_staleness={rollout.max_staleness:g}",
        config.cluster,
        config.algorithm.correction,
    )
    if cluster.stays_here or cluster.pool_of("rollout") == cluster.pool_of("actor"):
        yield (
            f"{key} samples while models train, and rollout and actor share their processes; give the rollout some of "
            "its own: cluster.placement={trainer: {processes: 1, roles: [actor]}, sampler: {processes: 1, roles: "
            "[rollout]}}"
        )
    if rollout.free_cache_engine:
        yield f"{key} samples all the time, so rollout.free_cache_engine=true frees nothing; unset one of the two"
    bound = {"importance": "cap", "icepop": "high"}.get(correction.weight or "", "")
    if correction.weight_options.get(bound) == math.inf:
        yield (
            f"{key} with algorithm.correction.weight_options.{bound}=inf weighs old tokens without a bound, and one "
            f"may be worth more than all others; set {bound} to a number, such as 2"
        )
    if rollout.max_staleness * (size := config.data.train_batch_size) < 1:
        yield (
            f"{key} is less than one prompt of data.train_batch_size={size}, so nothing is sampled ahead; set "
            f"rollout.max_staleness to {math.ceil(1e4 / size) / 1e4:g} or more"
        )
    loss = POLICY_LOSSES[config.algorithm.policy_loss].columns
    chosen = [
        registry[name].columns
        for registry, name in ((WEIGHTS, correction.weight), (REJECTIONS, correction.rejection))
        if name is not None
    ]
    is_old_the_sampler = correction.old_log_probs == "rollout" and "old_log_probs" in loss
    if not is_old_the_sampler and not any("rollout_log_probs" in columns for columns in (loss, *chosen)):
        yield (
            f"{key} trains on tokens that older weights sampled, and nothing in algorithm.correction corrects for it; "
            "set algorithm.correction.weight=importance (truncated importance sampling; with several updates a step "
            "decoupled PPO) or icepop, algorithm.correction.rejection=divergence with rejection_options.high, or, with "
            "a loss that clips its ratio, algorithm.correction.old_log_probs=rollout"
        )


def _output(config: schema.GenerateConfig, at: Place) -> Iterator[str]:
    if config.output is None or Path(config.output).suffix != ".jsonl":
        yield f"output={config.output} is not a file for completions; expected a path that ends in .jsonl"
    elif Path(config.output).resolve() in [Path(each).resolve() for each in config.sources if isinstance(each, str)]:
        yield f"output={config.output} is also an input file of prompts; set output to another path"
    elif Path(config.output).is_symlink():
        target = Path(config.output).resolve()
        yield (
            f"output={config.output} is a link to {target}, which completions are not written through; expected a "
            f"file or a new name: set output={target}, or remove the link"
        )


Rule = Callable[[Any, Place], Iterable[str]]
RULES: list[tuple[type[schema.Section], Rule]] = [
    (next(iter(get_type_hints(rule).values())), rule)  # the first argument is the section that a rule checks
    for rule in (
        *(_chosen, _model, _pixels, _files, _sampling, _staleness, _reward),
        *(_reward_model, _no_adapter, _mix, _trainer, _output),
        *(group_rule, algorithm_rule, updates_rule, critic_rule, optim_rule, tool_rule),
        *(engine_rule, cluster_rule, processes_rule, neighbours_rule),
    )
]
