# SPDX-License-Identifier: Apache-2.0
"""Consistency checks of a config. They run before torch is loaded: the registry reads signatures from source.

A rule checks one type of section at any place in the config. It yields errors, or raises one. All rules run, so that a
user sees every error at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from whet.config import schema
from whet.config.algorithm_checks import (
    algorithm_rule,
    cluster_rule,
    critic_rule,
    engine_rule,
    extra_rule,
    group_rule,
    neighbours_rule,
    optim_rule,
    replica_rule,
    updates_rule,
)
from whet.config.compose import flatten
from whet.config.environment import tool_rule
from whet.config.managers import LIMIT_NAMES
from whet.config.section import Choice, SectionPlace, choices, entry_at
from whet.config.sources import check_files, missing_file, shares_at
from whet.errors import ConfigError, pip_install
from whet.options import as_list
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, REJECTIONS, REWARDS, TRACKERS, WEIGHTS

NARROW: dict[str, Callable[[float], bool]] = {  # values with which the most likely token is always sampled
    "temperature": lambda value: value < 0.01,  # a lead of 0.1 in the logits is a probability of 0.99995
    "top_p": lambda value: value < 0.01,  # below the probability of the most likely token
    "top_k": lambda value: value == 1,
    "min_p": lambda value: value == 1.0,
}


def check(config: schema.Section, given: Collection[str] = ()) -> None:
    """Checks that the values of a config are consistent.

    `given` names arguments that are passed as objects ("reward", "data", "val_data").  Raises: ConfigError for the
    first error; its `others` has the rest."""
    if found := problems(config, given):
        raise ConfigError.joined(found)


def problems(config: schema.Section, given: Collection[str] = ()) -> list[ConfigError]:
    """Returns the errors that `check` would raise."""
    found: dict[str, ConfigError] = {}
    for key, section in config.sections():
        at = SectionPlace(key, config, given)
        found |= {str(each): each for each in _errors(section.problems, at)}
        for kind, rule in RULES:
            if isinstance(section, kind):
                found |= {str(each): each for each in _errors(rule, section, at)}
    return list(found.values())


def check_context(config: schema.WholeConfig, max_position_embeddings: int) -> None:
    """Checks that prompt and response fit into the context length of the model.  Raises: ConfigError."""
    most = f"at most {max_position_embeddings}, the positions of the model"
    if isinstance(config, schema.ExamplesConfig):
        if (length := config.data.max_length) > max_position_embeddings:
            raise ConfigError("data.max_length", length, most, f"lower it to {max_position_embeddings}")
        return
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if prompt + response > max_position_embeddings:
        left = max_position_embeddings - prompt
        lower = f"max_response_length={response} to {left}" if left > 0 else f"max_prompt_length={prompt}"
        both = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(both, prompt + response, most, f"lower data.{lower}")


def check_data(config: schema.WholeConfig, *, validation: bool) -> None:
    """Checks only the keys that `whet data` reads: data files, data options and the model.  Raises: ConfigError."""
    key, entries = _read(config)[-1 if validation else 0]
    check_files(key, entries, config.data, required=True)
    of_model, of_data = (
        _model(config.model, SectionPlace("model", config)),
        _chosen(config.data, SectionPlace("data", config)),
    )
    of_media = (
        _pixels(config.data, SectionPlace("data", config)) if isinstance(config.data, schema.MediaRowsConfig) else ()
    )
    if found := [*of_model, *of_data, *of_media]:
        raise ConfigError.joined(found)


def _errors(check: Callable[..., Iterable[ConfigError] | None], *arguments: Any, **named: Any) -> Iterator[ConfigError]:
    """Yields the errors that a check yields or raises."""
    try:
        yield from check(*arguments, **named) or ()
    except ConfigError as error:
        yield error


def _chosen(section: schema.Section, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks each key that names a registered function, and the function's options."""
    for name, field in type(section).model_fields.items():
        for choice in field.metadata:
            if isinstance(choice, Choice) and choice.is_checked:
                options = section[choice.options] if choice.options else {}
                yield from _errors(choice.check, at.of(name), section[name], options)


def _model(model: schema.ModelConfig, at: SectionPlace) -> Iterator[ConfigError]:
    if model.lora.rank is not None and model.freeze:
        expected = f"none with model.lora.rank={model.lora.rank}, which trains the adapter alone"
        change = "unset one of the two keys, or choose layers with model.lora.target_modules"
        yield ConfigError("model.freeze", model.freeze, expected, change)
    if model.lora.path is not None and not (Path(model.lora.path) / "adapter_config.json").is_file():
        found, expected = f"{model.lora.path} has no adapter_config.json", "the folder of an adapter"
        yield ConfigError("model.lora.path", found, expected, "correct the path")
    if model.path is None:
        yield ConfigError("model.path", None, "a model folder (`whet init-model` makes one) or a hub name")
        return
    path = Path(model.path).expanduser()
    names_a_folder = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1
    if not path.is_dir():
        if names_a_folder or path.exists():
            expected = "a folder with a config.json and the weights"
            yield ConfigError("model.path", f"{model.path} is not a folder", expected, "correct the path")
    elif not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        is_checkpoint = (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()
        if not (is_checkpoint and isinstance(at.whole, schema.EvalConfig | schema.GenerateConfig)):
            change = "export this checkpoint with `whet export`" if is_checkpoint else "correct the path"
            yield ConfigError("model.path", f"{model.path} has no config.json", "a Hugging Face model folder", change)


def _pixels(data: schema.MediaRowsConfig, at: SectionPlace) -> Iterator[ConfigError]:
    low, high = data.min_pixels, data.max_pixels
    if low is not None and high is not None and low > high:
        most = f"at most {at.of('max_pixels')}={high}"
        yield ConfigError(at.of("min_pixels"), low, most, "change or unset one of the two keys")


def _files(data: schema.RowsConfig, at: SectionPlace) -> Iterator[ConfigError]:
    for number, (key, entries) in enumerate(_read(at.whole)):
        yield from _errors(check_files, key, entries, data, required=number == 0 and "data" not in at.given)


def _read(config: schema.Section) -> list[tuple[str, Any]]:
    """The keys of data that a command reads, the one that it needs first, with their values."""
    if isinstance(config, schema.GenerateConfig):
        return [(config.source_key, config.sources)]
    keys = ("val_files",) if isinstance(config, schema.EvalConfig) else ("train_files", "val_files")
    return [(f"data.{name}", config["data"][name]) for name in keys]


def _trainer(trainer: schema.TrainerConfig, at: SectionPlace) -> Iterator[ConfigError]:
    data = at.whole["data"]
    if trainer.val_freq > 0 and not data.val_files and "val_data" not in at.given:
        change = "set data.val_files (in Python, val_data), or trainer.val_freq=0"
        yield ConfigError("trainer.val_freq", trainer.val_freq, "0 or less while data.val_files is empty", change)
    if trainer.resume not in ("auto", "never", "overwrite") and not Path(trainer.resume).expanduser().is_dir():
        ways = "auto, never, overwrite, or the folder of a checkpoint"
        yield ConfigError("trainer.resume", f"{trainer.resume} is not a folder", ways, "correct it")
    if trainer.loop is not None:
        yield from _function_path("trainer.loop", trainer.loop)
        if isinstance(at.whole, schema.ExamplesConfig):
            found, own = f"{trainer.loop} replaces the loop of `whet train`", at.whole.command
            yield ConfigError("trainer.loop", found, change=f"unset it for `whet {own}`")
    for reference in trainer.callbacks:
        yield from _function_path("trainer.callbacks", reference)
    for name in dict.fromkeys(trainer.logger):
        if name in ("console", "jsonl"):
            continue
        package = entry_at(TRACKERS, "trainer.logger", name).marks.get("package")
        spec = None if package is None else find_spec(package)
        # A folder of that name in the working directory has a spec without an origin.
        if package is not None and (spec is None or spec.origin is None):
            yield ConfigError("trainer.logger", f"{package} is not installed", change=f"run {pip_install(package)}")


def _function_path(key: str, reference: str) -> Iterator[ConfigError]:
    location, _, name = reference.rpartition(":")
    if not location:
        expected = "a function as package.module:function or path/file.py:function"
        yield ConfigError(key, name, expected, "add the function's module or file")
    elif location.endswith(".py") and not Path(location).expanduser().is_file():
        yield missing_file(key, location)


def _reward(reward: schema.RewardConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks the reward functions without running user code; the reward processes load them."""
    trained = at.whole if isinstance(at.whole, schema.TrainConfig) else None
    if reward.manager == "dapo" and trained is not None and not trained.algorithm.overlong.penalty:
        expected = "algorithm.overlong.penalty above 0, the penalty for length that dapo subtracts"
        change = "set algorithm.overlong.penalty=1 and algorithm.overlong.buffer_length, or reward.manager=prime"
        yield ConfigError("reward.manager", reward.manager, expected, f"{change} to do without")
    if unknown := sorted({*reward.limits} - {*LIMIT_NAMES}):
        yield ConfigError("reward.limits", unknown[0], f"one of {', '.join(LIMIT_NAMES)}", "correct the name")
    for name, pool in trained.cluster.placement.items() if trained is not None else ():
        if "reward" in pool.roles and pool.processes > 1 and reward.limits:
            key, expected = f"cluster.placement.{name}.processes", "1 with reward.limits, which count in one process"
            yield ConfigError(key, pool.processes, expected, "lower it, or unset reward.limits")
    if "reward" in at.given:
        return
    functions = as_list(reward.function or [])
    has_model = trained is not None and trained.reward_model.source is not None
    if not reward.names_function and not has_model and at.whole["environment"].name == "single_turn":
        yield ConfigError("reward.function", None, f"{', '.join(REWARDS.names())}, or your own path/file.py:function")
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
        expected = f"length {len(functions)}, that of reward.function"
        yield ConfigError("reward.weights", reward.weights, expected, "set one weight for each function")


def _reward_model(role: schema.RewardModelConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Refuses other keys of `reward_model` if it has no model, and settings that a reward model excludes."""
    config: Any = at.whole
    if role.source is None:
        default = dict(flatten(schema.RewardModelConfig().model_dump()))
        change = f"set {at.of('model_path')} to a sequence classifier, or {at.of('rubric')}; or unset this key"
        for key, value in flatten(role.model_dump()):
            if default.get(key) != value:
                yield ConfigError(at.of(key), value, f"a reward model, and {at.of('model_path')} is not set", change)
        return
    algorithm, reward = config.algorithm, config.reward
    is_unscored = not reward.names_function and config.environment.name == "single_turn"
    if algorithm.filter.name is not None and is_unscored and "reward" not in at.given:
        expected = f"no filter without reward.function: it does not read scores of {at.of(role.source)}"
        change = "unset the filter, or set reward.function"
        yield ConfigError("algorithm.filter.name", algorithm.filter.name, expected, change)
    if "reward_baselines" in ADV_ESTIMATORS[algorithm.adv_estimator].columns:
        expected = f"an estimator without reward_baselines: {at.of(role.source)} does not score greedy responses"
        change = "choose another, such as rloo or grpo"
        yield ConfigError("algorithm.adv_estimator", algorithm.adv_estimator, expected, change)


def _mix(data: schema.DataConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Requires shares of `data.mix` that sum to 1 at every step. Refuses an empty mapping as a share."""
    steps = {step for share in data.mix.values() if isinstance(share, dict) for step in share} or {0}
    for step in sorted(steps) if data.mix else ():
        shares = shares_at(data.mix, step)
        if abs(sum(shares.values()) - 1) > 1e-6:
            expected = f"a sum of 1 at step {step}, not {sum(shares.values()):g}"
            yield ConfigError(at.of("mix"), shares, expected, "change the shares")
            return
    for name, share in data.mix.items():
        if share == {}:
            yield ConfigError(f"{at.of('mix')}.{name}", share, "a number, or shares by step: {0: 0.5, 100: 0.2}")


def _sampling(sampling: schema.SamplingConfig, at: SectionPlace) -> Iterator[ConfigError]:
    narrow = next((name for name, is_narrow in NARROW.items() if is_narrow(sampling[name])), None)
    if narrow is not None and sampling.n > 1:
        expected = f"a value that is not greedy, or all {sampling.n} responses to a prompt would be the same"
        yield ConfigError(at.of(narrow), sampling[narrow], expected, f"change it, or set {at.of('n')}=1")
    if sampling.temperature == 0 and sampling.min_p > 0:
        expected = f"0 with {at.of('temperature')}=0, which is greedy"
        yield ConfigError(at.of("min_p"), sampling.min_p, expected, "unset one of the two keys")
    if sampling.allowed_token_ids == []:
        yield ConfigError(at.of("allowed_token_ids"), [], "at least one token id", "list token ids, or unset it")
    for name in ("stop", "bad_words"):
        if "" in sampling[name]:
            yield ConfigError(at.of(name), sampling[name], change="remove the empty string, which matches everywhere")


def _staleness(rollout: schema.RolloutConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Requires a separate pool for the rollout, and a correction, if responses are sampled while models train."""
    config = at.whole
    if rollout.max_staleness == 0:
        return
    key, stale = "rollout.max_staleness", rollout.max_staleness
    if not isinstance(config, schema.TrainConfig):
        yield ConfigError(key, stale, "0 where nothing is trained", "unset it")
        return
    cluster, correction = config.cluster, config.algorithm.correction
    if cluster.stays_here or cluster.pool_of("rollout") == cluster.pool_of("actor"):
        expected = "0 where rollout and actor share processes: above 0 both work at the same time"
        pools = "{trainer: {processes: 1, roles: [actor]}, sampler: {processes: 1, roles: [rollout]}}"
        yield ConfigError(key, stale, expected, f"set cluster.placement={pools}")
    if rollout.free_cache_engine:
        expected = f"false with {key}={stale:g}: the rollout samples all the time, and frees nothing"
        yield ConfigError("rollout.free_cache_engine", True, expected, "unset one of the two keys")
    bound = {"importance": "cap", "icepop": "high"}.get(correction.weight or "", "")
    if correction.weight_options.get(bound) == math.inf:
        expected = f"a bound with {key}={stale:g}, or one old token may be worth more than all others"
        of_weight = f"algorithm.correction.weight_options.{bound}"
        yield ConfigError(of_weight, math.inf, expected, f"set {bound} to a number, such as 2")
    if stale * (size := config.data.train_batch_size) < 1:
        expected = f"at least one prompt of data.train_batch_size={size}, or nothing is sampled ahead"
        yield ConfigError(key, stale, expected, f"set it to {math.ceil(1e4 / size) / 1e4:g} or more")
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    chosen = [
        registry[name].columns
        for registry, name in ((WEIGHTS, correction.weight), (REJECTIONS, correction.rejection))
        if name is not None
    ]
    is_old_the_sampler = correction.old_log_probs == "rollout" and "old_log_probs" in loss.columns
    is_for_any = is_old_the_sampler or loss.kind == PREFERENCE_LOSSES.kind  # a preference holds for any sampler
    if not is_for_any and not any("rollout_log_probs" in columns for columns in (loss.columns, *chosen)):
        change = (
            "set algorithm.correction.weight=importance (truncated importance sampling; with several updates a step "
            "decoupled PPO) or icepop, algorithm.correction.rejection=divergence with rejection_options.high, or, with "
            "a loss that clips its ratio, algorithm.correction.old_log_probs=rollout"
        )
        yield ConfigError(key, stale, "0 without a correction for tokens that older weights sampled", change)


def _output(config: schema.GenerateConfig, at: SectionPlace) -> Iterator[ConfigError]:
    if config.output is None or Path(config.output).suffix != ".jsonl":
        yield ConfigError("output", config.output, "a path that ends in .jsonl", "name a file for the completions")
    elif Path(config.output).resolve() in [Path(each).resolve() for each in config.sources if isinstance(each, str)]:
        found = f"{config.output} is also an input file of prompts"
        yield ConfigError("output", found, change="set output to another path")
    elif Path(config.output).is_symlink():
        target = Path(config.output).resolve()
        found, change = f"{config.output} is a link to {target}", f"set output={target}, or remove the link"
        yield ConfigError("output", found, "a file or a new name: completions are not written through links", change)


Rule = Callable[[Any, SectionPlace], Iterable[ConfigError]]
RULES: list[tuple[type[schema.Section], Rule]] = [
    (next(iter(get_type_hints(rule).values())), rule)  # the first argument is the section that a rule checks
    for rule in (
        *(_chosen, _model, _pixels, _files, _sampling, _staleness, _reward),
        *(_reward_model, _mix, _trainer, _output),
        *(group_rule, extra_rule, algorithm_rule, updates_rule, critic_rule, optim_rule, tool_rule),
        *(engine_rule, cluster_rule, neighbours_rule, replica_rule),
    )
]
