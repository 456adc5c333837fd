# SPDX-License-Identifier: Apache-2.0
"""Values that do not go together, found before anything heavy is loaded: the registry reads signatures without torch.

A rule is about one kind of section, wherever it stands: it gives a line for each thing that is wrong there, or raises
ConfigError. All rules run, so that a user sees every reason at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from whet.config.algorithm_checks import algorithm_rule, critic_rule, group_rule, optim_rule, updates_rule
from whet.config.choice import Choice, entry_at
from whet.config.cluster_checks import cluster_rule, neighbours_rule, processes_rule
from whet.config.engine_checks import engine_rule
from whet.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    ClusterConfig,
    CriticConfig,
    EngineConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RowsConfig,
    SamplingConfig,
    Section,
    SFTConfig,
    TrainConfig,
    TrainerConfig,
)
from whet.config.section import Place
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
    """Returns a line for each thing that `check` refuses, which says what to change."""
    found: dict[str, None] = {}
    for key, section in config.sections():
        for kind, rule in RULES:
            if isinstance(section, kind):
                found |= dict.fromkeys(_lines(rule, section, Place(key, config, given)))
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
    name = "val_files" if validation or isinstance(config, EvalConfig) else "train_files"
    check_files(f"data.{name}", config.data[name], config.data, required=True)
    of_model, of_data = _model(config.model, Place("model", config)), _chosen(config.data, Place("data", config))
    if found := [*of_model, *of_data]:
        raise ConfigError("\n".join(found))


def _lines(rule: Rule, section: Section, at: Place) -> Iterator[str]:
    try:
        yield from rule(section, at)
    except ConfigError as error:
        yield str(error)


def _refusal(each: Callable[..., object], *arguments: Any, **named: Any) -> Iterator[str]:
    """The line of a check that raises."""
    try:
        each(*arguments, **named)
    except ConfigError as error:
        yield str(error)


def _chosen(section: Section, at: Place) -> Iterator[str]:
    """Rules of everything that is chosen by name, with options."""
    for name, field in type(section).model_fields.items():
        for choice in field.metadata:
            if isinstance(choice, Choice) and choice.is_checked:
                options = section[choice.options] if choice.options else {}
                yield from _refusal(choice.check, at.of(name), section[name], options)


def _model(model: ModelConfig, at: Place) -> Iterator[str]:
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
            yield f"model.path={model.path} is no folder; expected one with a config.json and the weights"
    elif not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        is_checkpoint = (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()
        if not (is_checkpoint and isinstance(at.whole, EvalConfig | GenerateConfig)):
            hint = "; `whet export` makes one of this checkpoint" if is_checkpoint else ""
            yield f"model.path={model.path} has no config.json; expected a Hugging Face model folder{hint}"


def _files(data: RowsConfig, at: Place) -> Iterator[str]:
    whole, required = at.whole, "data" not in at.given
    if isinstance(whole, GenerateConfig):
        read = [(whole.source_key, whole.sources, True)]
    elif isinstance(whole, EvalConfig):
        read = [("data.val_files", data.val_files, required)]
    else:
        read = [("data.train_files", data.train_files, required), ("data.val_files", data.val_files, False)]
    for key, entries, is_required in read:
        yield from _refusal(check_files, key, entries, data, required=is_required)


def _trainer(trainer: TrainerConfig, at: Place) -> Iterator[str]:
    data = at.whole["data"]
    if trainer.val_freq > 0 and not data.val_files and "val_data" not in at.given:
        yield (
            f"trainer.val_freq={trainer.val_freq} and data.val_files is empty; name files (val_data, in Python), or "
            "set it to 0"
        )
    if trainer.resume not in ("auto", "never") and not Path(trainer.resume).expanduser().is_dir():
        yield f"trainer.resume={trainer.resume} is no folder; expected auto, never, or a checkpoint's folder"
    if trainer.loop is not None:
        yield from _function_path("trainer.loop", trainer.loop)
        if isinstance(at.whole, SFTConfig):
            yield f"trainer.loop={trainer.loop} replaces the loop of `whet train`; take it out of `whet sft`"
    for reference in trainer.callbacks:
        yield from _function_path("trainer.callbacks", reference)
    for name in dict.fromkeys(trainer.logger):
        spec = None if name in ("console", "jsonl") else find_spec(name)
        # A folder of its name in the working directory is no library.
        if name not in ("console", "jsonl") and (spec is None or spec.origin is None):
            yield f"trainer.logger names {name}, which is not installed; run {pip_install(name)}"


def _function_path(key: str, reference: str) -> Iterator[str]:
    location, _, name = reference.rpartition(":")
    if not location:
        yield f"{key}={name} names no function; write package.module:function or path/file.py:function"
    elif location.endswith(".py") and not Path(location).expanduser().is_file():
        yield f"{key}: {location} does not exist (seen from {Path.cwd()})"


def _reward(reward: RewardConfig, at: Place) -> Iterator[str]:
    """The function itself is loaded in the reward processes; here only what can be seen without running user code."""
    if "reward" in at.given:
        return
    functions = [reward.function] if isinstance(reward.function, str) else reward.function or []
    if not functions and at.whole["environment"].name == "single_turn":
        yield f"reward.function is not set; name {', '.join(REWARDS.names())}, or your own as path/file.py:function"
    for function in functions:
        if ":" in function:
            yield from _function_path("reward.function", function)
        else:
            entry_at(REWARDS, "reward.function", function).check(reward.kwargs, "reward.kwargs.")
    if reward.weights is not None and len(reward.weights) != len(functions):
        yield f"reward.weights has {len(reward.weights)} and reward.function {len(functions)}; give one for each"


def _sampling(sampling: SamplingConfig, at: Place) -> Iterator[str]:
    narrow = next((name for name, is_narrow in NARROW.items() if is_narrow(sampling[name])), None)
    if narrow is not None and sampling.n > 1:
        yield (
            f"{at.of(narrow)}={sampling[narrow]:g} is greedy: all {sampling.n} answers to a prompt would be the same; "
            f"change it, or set {at.of('n')}=1"
        )
    if sampling.temperature == 0 and sampling.min_p > 0:
        yield (
            f"{at.of('min_p')}={sampling.min_p:g} changes nothing with {at.of('temperature')}=0, which takes the "
            "likeliest token; unset one of them"
        )
    if sampling.allowed_token_ids == []:
        yield f"{at.of('allowed_token_ids')} is empty: no token could be sampled; list some, or unset it"
    for name in ("stop", "bad_words"):
        if "" in sampling[name]:
            yield f"{at.of(name)} has an empty string, which is everywhere; take it out"


def _rollout(rollout: RolloutConfig, at: Place) -> Iterator[str]:
    if rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness={rollout.max_staleness:g} lets samples lag behind the weights that they train, "
            "but whet does not sample and train at the same time yet: it takes them in turn; set it to 0"
        )


def _output(config: GenerateConfig, at: Place) -> Iterator[str]:
    if config.output is None or Path(config.output).suffix != ".jsonl":
        yield f"output={config.output} names no file for the answers; expected one that ends in .jsonl"
    elif Path(config.output).resolve() in [Path(each).resolve() for each in config.sources if isinstance(each, str)]:
        yield f"output={config.output} is a file of prompts too; name another"
    elif Path(config.output).is_symlink():
        target = Path(config.output).resolve()
        yield (
            f"output={config.output} is a link to {target}, and answers are written through no link; expected a file "
            f"or a new name: name {target} itself, or remove the link"
        )


Rule = Callable[[Any, Place], Iterable[str]]
RULES: tuple[tuple[type[Section], Rule], ...] = (
    (Section, _chosen),
    (ModelConfig, _model),
    (RowsConfig, _files),
    (SamplingConfig, _sampling),
    (RolloutConfig, _rollout),
    (RolloutConfig, group_rule),
    (RewardConfig, _reward),
    (AlgorithmConfig, algorithm_rule),
    (ActorConfig, updates_rule),
    (CriticConfig, critic_rule),
    (EngineConfig, engine_rule),
    (OptimConfig, optim_rule),
    (TrainerConfig, _trainer),
    (ClusterConfig, cluster_rule),
    (ClusterConfig, processes_rule),
    (ClusterConfig, neighbours_rule),
    (GenerateConfig, _output),
)
