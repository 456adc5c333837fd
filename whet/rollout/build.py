# SPDX-License-Identifier: Apache-2.0
"""Builds the rollout engine, environments and settings of episodes from a config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from whet.config.environment import EnvironmentConfig
from whet.config.schema import (
    EngineConfig,
    EvalConfig,
    ExamplesConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    StageConfig,
    TrainConfig,
)
from whet.config.section import entry_at
from whet.data.chat import encode_texts, template_text
from whet.data.media import MediaLimits, MediaReader
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.toolbox import tools_of, with_tools
from whet.errors import ConfigError, DataError, EnvError
from whet.models.encoders.base import keep_prepared
from whet.models.encoders.load import encoders_of
from whet.models.folder import split_adapters
from whet.models.general import LOST
from whet.models.load import cast_weights, load_policy, outline, rollout_tensors
from whet.models.supported import support_of
from whet.registry import ENGINES, ENVIRONMENTS, ROLLOUT_ENGINES
from whet.rollout.codec import TemplateCodec
from whet.rollout.episode import MAIN, EpisodeLimits, Stage
from whet.rollout.protocol import RolloutEngine, SamplingParams, SharesModule, Span
from whet.rollout.requirements import CacheRoom, requirement
from whet.types import Limit, Prompt

log = logging.getLogger(__name__)
C = TypeVar("C", bound=TrainConfig | ExamplesConfig)
NATIVE = "native"
OF_OWN_WAY = ("context", "tensor", "pipeline")  # mesh options of training engines that need whet's own forward


def rollout_engine(
    config: RolloutConfig,
    dtype: torch.dtype,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
    device: torch.device,
    model: ModelConfig,
    num_devices: int = 1,
    cache_room: CacheRoom | None = None,
    span: Span | None = None,
) -> RolloutEngine:
    """Builds the configured engine. An engine that shares the trainer's module starts without weights; any other loads
    `model.path`. The tokenizer is loaded only for stop strings. `device` is the first of `num_devices` devices.
    `cache_room` is the memory that training leaves for the cache; `span` is this node's part of a server."""
    entry = ROLLOUT_ENGINES[config.engine.name]
    keep_prepared(model.media_cache_gib)
    given = {
        "dtype": dtype,
        "max_batch_size": config.max_batch_size,
        "load_tokenizer": load_tokenizer,
        "device": device,
        "num_devices": num_devices,
        "cache_room": cache_room,
        "model": model,
        "span": span,
    }
    engine: RolloutEngine = entry.make(given, entry.resolve_options(config.engine.options, "rollout.engine.options"))
    return engine


def with_engine(config: C) -> C:
    """Returns the config with a rollout engine that supports the model (`chosen_engine`). Logs a change of it.

    Raises: ConfigError for a setting that is impossible with transformers' own forward; ModelError."""
    lacks = lack_at(config.model)
    if not lacks:
        return config
    log.warning(
        "%s is computed by transformers' own forward, over padded rows, since it has %s; so it is trained and sampled "
        "without %s",
        *(config.model.path, lacks, LOST),
    )
    for name, section in config.items():
        engine = section if name == "engine" else getattr(section, "engine", None)
        if isinstance(engine, EngineConfig) and getattr(section, "model_path", None) is None:
            key = name if name == "engine" else f"{name}.engine"
            options = entry_at(ENGINES, f"{key}.name", engine.name).resolve_options(engine.options, f"{key}.options")
            wanted = [(f"options.mesh.{part}", (options.get("mesh") or {}).get(part, 1)) for part in OF_OWN_WAY]
            for at, found in [("packing", engine.packing or 1), *wanted]:
                if found is True or found > 1:
                    raise ConfigError(f"{key}.{at}", found, f"padded rows, as the model has {lacks}", "unset it")
    if not isinstance(config, TrainConfig):
        return config
    return config.model_copy(update={"rollout": chosen_engine(config.rollout, config.model)})


def chosen_engine(rollout: RolloutConfig, model: ModelConfig) -> RolloutConfig:
    """Replaces the default engine by `hf` if the default does not support the model.

    Raises: ConfigError if the user chose the engine; ModelError."""
    engine = rollout.engine
    if engine.name != NATIVE or not (lacks := lack_at(model)):
        return rollout
    if "name" in engine.model_fields_set:
        expected = f"an engine that samples from a model with {lacks}: hf, vllm or sglang"
        raise ConfigError("rollout.engine.name", engine.name, expected, "unset it, or set one of these engines")
    log.warning("rollout.engine.name: hf, since the default, %s, does not sample from a model with %s", NATIVE, lacks)
    entry_at(ROLLOUT_ENGINES, "rollout.engine.name", "hf").resolve_options(engine.options, "rollout.engine.options")
    return rollout.model_copy(update={"engine": engine.model_copy(update={"name": "hf"})})


def lack_at(model: ModelConfig) -> str:
    """Names the part of a model that whet's own forward does not support; "" if it supports all parts.

    Raises: ModelError."""
    assert model.path is not None
    with torch.device("meta"):
        return support_of(outline(model.path, trust_remote_code=model.trust_remote_code)).lacks


def check_engine(config: TrainConfig) -> None:
    """Checks that the engine of a run can be built on this machine.  Raises: ConfigError."""
    rollout, model, cluster = config.rollout, config.model, config.cluster
    entry = ROLLOUT_ENGINES[rollout.engine.name]
    pool, check = cluster.pool_of("rollout"), requirement(entry, "checked_by")
    if cluster.pools[pool].devices > 1 and "num_devices" not in entry.parameters:
        key, change = f"cluster.placement.{pool}.devices", "lower it, or choose one for more devices, such as vllm"
        expected = f"1, as the rollout engine {rollout.engine.name} samples on one device"
        raise ConfigError(key, cluster.pools[pool].devices, expected, change)
    if rollout.engine.options.get("weight_delta") is True and pool == cluster.pool_of("actor"):
        key, change = "rollout.engine.options.weight_delta", "unset it, or give the rollout a pool of its own"
        raise ConfigError(key, True, f"false in the actor's pool ({pool}), where weights are copied", change)
    if check is not None:
        longest = config.data.max_prompt_length + config.data.max_response_length
        check(model, longest, entry.resolve_options(rollout.engine.options, "rollout.engine.options"))


def check_sampling(rollout: RolloutConfig, sections: Mapping[str, SamplingConfig]) -> None:
    """Checks that the engine supports the sampling parameters of each config section, by key.  Raises: ConfigError."""
    entry = ROLLOUT_ENGINES[rollout.engine.name]
    refuses = requirement(entry, "refuses")
    options = entry.resolve_options(rollout.engine.options, "rollout.engine.options")
    for section, sampling in sections.items():
        if refuses is not None and (why := refuses(sampling, options)) is not None:
            raise ConfigError(f"{section}.{why.key}", why.found, why.expected, why.change)


def check_media(rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]) -> None:
    """Checks that the engine supports the prompts' images.  Raises: EngineError with the row number."""
    check, encoders = requirement(ROLLOUT_ENGINES[rollout.engine.name], "media_checked_by"), encoders_of(tokenizer)
    for prompt in prompts:
        if prompt.media and check is not None:
            check(encoders, prompt.media, f"row {prompt.index}")


def load_model(
    engine: RolloutEngine, model: ModelConfig, device: torch.device, dtype: torch.dtype, *, version: int = 0
) -> None:
    """Loads the model and its adapter as weights of `version`. An engine in this process gets a module of its own; a
    server engine has already loaded version 0 of a model without adapter.  Raises: ModelError."""
    assert model.path is not None
    _, adapters = split_adapters(model.path)
    if not isinstance(engine, SharesModule) and not adapters and model.lora.path is None and version == 0:
        return
    module = load_policy(
        model.path,
        adapter_path=model.lora.path,
        allow_pickle=model.allow_pickle,
        trust_remote_code=model.trust_remote_code,
    )
    cast_weights(module.requires_grad_(False), dtype)
    if isinstance(engine, SharesModule):
        engine.attach(module.to(device), version=version, is_own=True)  # type: ignore[arg-type]
    else:
        engine.load(iter(rollout_tensors(module).items()), version=version)


def open_environments(environment: EnvironmentConfig, undo: ExitStack) -> dict[str, EnvironmentHost]:
    """Opens the hosts of an environment and of its sub-agents, by name of the sub-agent; `undo` closes the hosts.

    Raises: ConfigError, ToolError, the errors of `open_host`; EnvError if an environment refuses its options."""
    hosts = dict[str, EnvironmentHost]()
    for agent, stage in {MAIN: environment, **environment.agents}.items():
        if stage.is_silent:
            continue
        seconds = Deadlines(reset=stage.reset_seconds, step=stage.step_seconds)
        hosts[agent] = open_host(
            stage.name, stage.options, tools=tools_of(stage), deadlines=seconds, max_episodes=stage.max_episodes
        )
        undo.callback(hosts[agent].shutdown)
        if refusal := hosts[agent].refusal():
            at = f"environment.agents.{agent}" if agent else "environment"
            raise EnvError.joined([refusal]).at(f"{at}.name={stage.name}, {at}.options={stage.options}")
    return hosts


def stages_of(
    config: TrainConfig | EvalConfig, tokenizer: PreTrainedTokenizerBase, media_folder: Path | None = None
) -> dict[str, Stage]:
    """Makes the settings of each agent's episodes, by name, without starting an environment. `media_folder` stores the
    images and videos of observations.  Raises: ConfigError; ToolError for an MCP server that does not start."""
    environment, encoders = config.environment, encoders_of(tokenizer)
    reader = None if encoders is None else MediaReader(MediaLimits.of(config.data), encoders, media_folder)
    agents = {MAIN: environment, **environment.agents}
    return {name: _stage(stage, config, tokenizer, reader) for name, stage in agents.items()}


def _stage(
    stage: StageConfig,
    config: TrainConfig | EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    reader: MediaReader | None,
) -> Stage:
    whole, data, tools = config.environment, with_tools(config.data, stage), tools_of(stage)
    turns = stage.max_turns
    if tools is None:
        turns = min(turns, ENVIRONMENTS[stage.name].marks.get("max_turns", turns))
    else:
        template = template_text(tokenizer, data.chat_template_kwargs) if data.apply_chat_template else None
        tools = tools.with_parser(template)
    choices: dict[Limit, str] = {"time": whole.on_timeout, "overflow": whole.on_overflow}
    limits = EpisodeLimits(
        max_turns=turns,
        max_turn_tokens=stage.max_turn_tokens,
        max_episode_tokens=stage.max_episode_tokens,
        max_context_tokens=config.data.max_prompt_length,
        fails_at=frozenset(limit for limit, choice in choices.items() if choice == "fail"),
        seconds=stage.episode_seconds,
    )
    codec = TemplateCodec(
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
        reader=reader,
        tools=tools,
    )
    return Stage(codec, limits, stage.is_silent)


def sampling_params(
    config: SamplingConfig, max_new_tokens: int, stop_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase
) -> SamplingParams:
    """Returns the sampling parameters of a config. The special tokens of images and videos are never sampled."""
    allowed, encoders = config.allowed_token_ids, encoders_of(tokenizer)
    patches = () if encoders is None else tuple((token_id,) for token_id in encoders.forbidden)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=stop_ids,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        stop=tuple(config.stop),
        bad_words=bad_word_ids(config.bad_words, tokenizer) + patches,
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word, at the start of a text and after a space.

    Raises: DataError for a word without tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        found |= {tuple(ids): None for ids in encode_texts(tokenizer, [bare], add_special_tokens=False)}
        try:
            found |= {tuple(ids): None for ids in encode_texts(tokenizer, [f" {bare}"], add_special_tokens=False)}
        except DataError:
            continue  # a tokenizer without a space has no tokens for it
    return tuple(found)
