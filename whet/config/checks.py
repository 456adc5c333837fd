# SPDX-License-Identifier: Apache-2.0
"""Values that do not go together, found before anything heavy is loaded: the registry reads signatures without torch.

Each check is a function that raises on what it looks at; all of them run, so that a user sees every reason at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import Any

from whet.config.algorithm_checks import algorithm_checks, check_optim
from whet.config.choice import entry_at
from whet.config.cluster_checks import cluster_checks
from whet.config.engine_checks import engine_checks
from whet.config.keys import choices
from whet.config.schema import (
    EnvironmentConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    Section,
    SFTConfig,
    TrainConfig,
    TrainerConfig,
)
from whet.config.sources import check_files
from whet.errors import ConfigError, pip_install
from whet.registry import REWARDS

NARROW: dict[str, Callable[[float], bool]] = {  # values that leave the likeliest token alone
    "temperature": lambda value: value < 0.01,  # a lead of 0.1 in the logits is a probability of 0.99995
    "top_p": lambda value: value < 0.01,  # less than what the likeliest token has
    "top_k": lambda value: value == 1,
    "min_p": lambda value: value == 1.0,
}


def check(config: Section, given: Collection[str] = ()) -> None:
    """Refuses a config whose values do not go together, with one line for each reason.

    `given` names what the caller hands over as an object ("reward", "data", "val_data").  Raises: ConfigError."""
    if found := problems(config, given):
        raise ConfigError("\n".join(found))


def problems(config: Section, given: Collection[str] = ()) -> list[str]:
    """All that `check` refuses, each a line that says what to change; empty where nothing is wrong."""
    found: dict[str, None] = {}
    for each in (*_choice_checks(config), *_checks(config, given)):
        try:
            each()
        except ConfigError as error:
            found[str(error)] = None
    return list(found)


def check_context(config: TrainConfig | SFTConfig | EvalConfig | GenerateConfig, max_position_embeddings: int) -> None:
    """Refuses lengths that the model has no positions for; called once the model is known.  Raises: ConfigError."""
    if isinstance(config, SFTConfig):
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


def check_data(config: TrainConfig | SFTConfig | EvalConfig, *, validation: bool) -> None:
    """Refuses a config whose data cannot be looked at, whatever else is wrong with it.  Raises: ConfigError."""
    _check_model(config.model)
    key = "data.val_files" if validation or isinstance(config, EvalConfig) else "data.train_files"
    check_files(key, config.data[key.partition(".")[2]], config.data, required=True)
    for each in _choice_checks(config, below="data."):
        each()


def _choice_checks(config: Section, below: str = "") -> list[Callable[[], object]]:
    """For everything that is chosen by name, with options."""
    found: list[Callable[[], object]] = []
    for key, choice in choices(type(config)).items():
        *sections, name = key.split(".")
        section: Any = reduce(getitem, sections, config)
        if choice.is_checked and key.startswith(below):
            found.append(partial(choice.check, key, section[name], section[choice.options] if choice.options else {}))
    return found


def _checks(config: Section, given: Collection[str]) -> list[Callable[[], object]]:
    match config:
        case TrainConfig():
            return [
                *_shared_checks(config, given),
                partial(_check_sampling, "trainer.validation", config.trainer.validation),
                *algorithm_checks(config),
            ]
        case SFTConfig():
            supervised = partial(_check_supervised, config.trainer)
            return [*_shared_checks(config, given), supervised, partial(check_optim, "optim", config.optim)]
        case EvalConfig():
            return [
                partial(_check_model, config.model, or_checkpoint=True),
                partial(
                    check_files, "data.val_files", config.data.val_files, config.data, required="data" not in given
                ),
                *_answer_checks(config, given),
            ]
        case GenerateConfig():
            return [
                partial(_check_model, config.model, or_checkpoint=True),
                partial(check_files, config.source_key, config.sources, config.data, required=True),
                partial(_check_output, config),
                *_rollout_checks(config.rollout),
            ]
        case _:
            return []


def _shared_checks(config: TrainConfig | SFTConfig, given: Collection[str]) -> list[Callable[[], object]]:
    data, trainer = config.data, config.trainer
    return [
        partial(_check_model, config.model),
        partial(check_files, "data.train_files", data.train_files, data, required="data" not in given),
        partial(check_files, "data.val_files", data.val_files, data, required=False),
        partial(_check_validation, trainer, data.val_files or ["val_data"] * ("val_data" in given)),
        partial(_check_trainer, trainer),
        partial(_check_loggers, trainer.logger),
        *(_answer_checks(config, given) if isinstance(config, TrainConfig) else []),
        *cluster_checks(config),
        *engine_checks(config),
    ]


def _answer_checks(config: TrainConfig | EvalConfig, given: Collection[str]) -> list[Callable[[], object]]:
    environment = config.environment
    return [
        partial(_check_reward, config.reward, environment, given),
        *_rollout_checks(config.rollout),
    ]


def _rollout_checks(rollout: RolloutConfig) -> list[Callable[[], object]]:
    return [partial(_check_sampling, "rollout", rollout), partial(_check_rollout, rollout)]


def _check_model(model: ModelConfig, *, or_checkpoint: bool = False) -> None:
    if model.path is None:
        raise ConfigError(
            "model.path is not set; name a model folder (`whet init-model` makes one) or a model on the hub"
        )
    if model.lora.rank is not None and model.freeze:
        raise ConfigError(
            f"model.lora.rank={model.lora.rank} trains the adapter alone, and model.freeze={model.freeze} adds "
            "nothing to that; unset one of them, or choose layers with model.lora.target_modules"
        )
    if model.lora.path is not None and not (Path(model.lora.path) / "adapter_config.json").is_file():
        raise ConfigError(f"model.lora.path={model.lora.path} has no adapter_config.json; expected an adapter's folder")
    path = Path(model.path).expanduser()
    names_a_folder = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1
    if not path.is_dir() and (names_a_folder or path.exists()):
        raise ConfigError(f"model.path={model.path} is no folder; expected one with a config.json and the weights")
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        is_checkpoint = (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()
        if is_checkpoint and or_checkpoint:
            return
        hint = "; `whet export` makes one of this checkpoint" if is_checkpoint else ""
        raise ConfigError(f"model.path={model.path} has no config.json; expected a Hugging Face model folder{hint}")


def _check_validation(trainer: TrainerConfig, files: Sequence[Any]) -> None:
    if trainer.val_freq > 0 and not files:
        raise ConfigError(
            f"trainer.val_freq={trainer.val_freq} and data.val_files is empty; name files (val_data, in Python), or "
            "set it to 0"
        )


def _check_trainer(trainer: TrainerConfig) -> None:
    if trainer.resume not in ("auto", "never") and not Path(trainer.resume).expanduser().is_dir():
        raise ConfigError(
            f"trainer.resume={trainer.resume} is no folder; expected auto, never, or a checkpoint's folder"
        )
    for key, references in (("loop", [trainer.loop] if trainer.loop else []), ("callbacks", trainer.callbacks)):
        for reference in references:
            _check_function_path(f"trainer.{key}", reference)


def _check_loggers(names: Sequence[str]) -> None:
    """A library that is not there; a folder of its name in the working directory is no library."""
    for name in dict.fromkeys(name for name in names if name not in ("console", "jsonl")):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(f"trainer.logger names {name}, which is not installed; run {pip_install(name)}")


def _check_function_path(key: str, reference: str) -> None:
    location, _, name = reference.rpartition(":")
    if not location:
        raise ConfigError(f"{key}={name} names no function; write package.module:function or path/file.py:function")
    if location.endswith(".py") and not Path(location).expanduser().is_file():
        raise ConfigError(f"{key}: {location} does not exist (seen from {Path.cwd()})")


def _check_reward(reward: RewardConfig, environment: EnvironmentConfig, given: Collection[str]) -> None:
    """The function itself is loaded in the reward processes; here only what can be seen without running user code."""
    if "reward" in given:
        return
    functions = [reward.function] if isinstance(reward.function, str) else reward.function or []
    if not functions and environment.name == "single_turn":
        raise ConfigError(
            f"reward.function is not set; name {', '.join(REWARDS.names())}, or your own as path/file.py:function"
        )
    for function in functions:
        if ":" in function:
            _check_function_path("reward.function", function)
        else:
            entry_at(REWARDS, "reward.function", function).check(reward.kwargs, "reward.kwargs.")
    if reward.weights is not None and len(reward.weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(reward.weights)} and reward.function {len(functions)}; give one for each"
        )


def _check_sampling(key: str, sampling: SamplingConfig) -> None:
    narrow = next((name for name, is_narrow in NARROW.items() if is_narrow(sampling[name])), None)
    if narrow is not None and sampling.n > 1:
        raise ConfigError(
            f"{key}.{narrow}={sampling[narrow]:g} is greedy: all {sampling.n} answers to a prompt would be the same; "
            f"change it, or set {key}.n=1"
        )
    if sampling.temperature == 0 and sampling.min_p > 0:
        raise ConfigError(
            f"{key}.min_p={sampling.min_p:g} changes nothing with {key}.temperature=0, which takes the likeliest "
            "token; unset one of them"
        )
    if sampling.allowed_token_ids == []:
        raise ConfigError(f"{key}.allowed_token_ids is empty: no token could be sampled; list some, or unset it")
    for name in ("stop", "bad_words"):
        if "" in sampling[name]:
            raise ConfigError(f"{key}.{name} has an empty string, which is everywhere; take it out")


def _check_output(config: GenerateConfig) -> None:
    if config.output is None or Path(config.output).suffix != ".jsonl":
        raise ConfigError(f"output={config.output} names no file for the answers; expected one that ends in .jsonl")
    if Path(config.output).resolve() in [Path(each).resolve() for each in config.sources if isinstance(each, str)]:
        raise ConfigError(f"output={config.output} is a file of prompts too; name another")


def _check_rollout(rollout: RolloutConfig) -> None:
    if rollout.max_staleness > 0:
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness:g} lets samples lag behind the weights that they train, "
            "but whet does not sample and train at the same time yet: it takes them in turn; set it to 0"
        )


def _check_supervised(trainer: TrainerConfig) -> None:
    if trainer.loop is not None:
        raise ConfigError(f"trainer.loop={trainer.loop} replaces the loop of `whet train`; take it out of `whet sft`")
