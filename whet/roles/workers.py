# SPDX-License-Identifier: Apache-2.0
"""The worker that trains or runs a model, and the sender's end of weight sync to rollout ranks in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.config.algorithm_checks import EngineUse
from whet.config.checks import check_context
from whet.config.schema import (
    ActorConfig,
    ExamplesConfig,
    ModelConfig,
    RefConfig,
    RewardModelConfig,
    RunConfig,
    TrainConfig,
)
from whet.config.section import SectionPlace
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.engines.protocol import Columns, Objective, TrainEngine, TrainsAdapter
from whet.engines.role import RoleSettings
from whet.errors import CheckpointError, ConfigError, DeadlineError, EngineError, ModelError, WorkerError
from whet.metrics import Metrics
from whet.models.load import context_length, load_tokenizer, reward_config
from whet.models.lora import LoraSettings
from whet.phases import span
from whet.planning.planner import planner
from whet.registry import ENGINES
from whet.roles.reward_texts import text_reader
from whet.roles.telemetry import MeasuredWorker
from whet.tracking import profile
from whet.types import Media
from whet.weight_sync.buckets import Broken, Digest, LinkClosedError, Outlet, send
from whet.weight_sync.delta import DeltaBase
from whet.weight_sync.routes import RankSite, Route, Way, open_outlets


class EngineWorker(MeasuredWorker):
    """Base class of ranks that call a training engine."""

    engine: TrainEngine

    @property
    def dp_rank(self) -> int:
        return self.engine.dp_rank

    @property
    def dp_size(self) -> int:
        return self.engine.dp_size

    @property
    def is_reporting(self) -> bool:
        return self.engine.is_reporting

    @register(Dispatch.DP_COMPUTE)
    def forward(self, batch: Batch, needs: tuple[str, ...], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Computes model outputs [B, R] without gradient."""
        return self.engine.forward(batch, frozenset(needs), temperature)


class TrainWorker(EngineWorker):
    """A rank of a model that is trained or computes columns: actor, critic, reference and others."""

    def __init__(self, placement: Placement, settings: RoleSettings) -> None:
        super().__init__(placement)
        entry, key = ENGINES[settings.engine.name], "engine.options"
        given = {"role": settings, "process_group": self.process_group, "device": self.device}
        self.settings = settings
        self.engine = entry.make(given, entry.resolve_options(settings.engine.options, key))
        self._outlets: dict[Way, Outlet] = {}
        self._base = DeltaBase()
        self._flops = 0.0  # operations of updates since they were last asked for
        self._flops_of = planner().update_flops(settings) if profile.peak_flops() else None
        self.start: dict[str, Any] | None = None
        if settings.lora is not None:
            self.start = start_of(settings, settings.lora) | {"fingerprint": with_adapter(self.engine).fingerprint()}

    @register(Dispatch.DP_COMPUTE)
    def update(self, batch: Batch, objective: Objective) -> Metrics:
        """Takes an optimizer step on the mini-batch `batch`."""
        if self._flops_of is not None:  # assumes that ranks which share rows share the work evenly
            self._flops += self._flops_of(batch) * self.dp_size / self.world_size
        metrics = self.engine.forward_backward(batch, objective)
        metrics.merge(self.engine.step())
        return metrics

    @register(Dispatch.DP_COMPUTE)
    def forward_backward(self, batch: Batch, objective: Objective, counts: Columns) -> Metrics:
        """Accumulates the gradient of a part of a mini-batch, for `step`. `counts` are of the whole mini-batch."""
        return self.engine.forward_backward(batch, objective, counts)

    @register(Dispatch.ONE_TO_ALL)
    def step(self) -> Metrics:
        """Takes an optimizer step with the accumulated gradients. All ranks return the same metrics."""
        return self.engine.step()

    @register(Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """Returns the digest of the model's weights, with an adapter merged. All ranks return the same digest."""
        return str(Digest.of(self.engine.named_weights()))

    @register(concurrent=True)
    def peak_flops(self) -> float:
        """The peak speed of this rank's accelerator, in operations per second."""
        return profile.peak_flops()

    @register(concurrent=True)
    def update_flops(self) -> float:
        """Returns the number of operations of this rank's updates since the last call; 0.0 if the peak is unknown."""
        found, self._flops = self._flops, 0.0
        return found

    @register(Dispatch.ONE_TO_ALL)
    def has_finite_weights(self) -> bool:
        """Tells whether this rank's trained weights, and a model output computed with them, are finite."""
        return self.engine.has_finite_weights()

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        """Writes weights, optimizer state and step count; for an adapter also a record of its base (`start_of`).

        Raises: CheckpointError."""
        try:
            self.engine.save(Path(path), self.start)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(path, f"cannot be written ({error})", "a writable folder with free space") from error

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        """Restores the state that `save` wrote.  Raises: CheckpointError."""
        if not Path(path).exists():
            raise CheckpointError(path, "is missing", f"a state of the role {self.role!r}", "name another checkpoint")
        try:
            saved = self.engine.load(Path(path))
        except (KeyError, TypeError, AttributeError) as error:
            found = f"has no state of {self.role} ({error!r})"
            raise CheckpointError(path, found, "", "name another checkpoint") from error
        if saved is not None and self.start is not None and saved["fingerprint"] != self.start["fingerprint"]:
            theirs, ours = (each["model_path"] for each in (saved, self.start))
            found, expected = f"is an adapter for the model at {theirs}", f"an adapter for the other weights at {ours}"
            raise CheckpointError(path, found, expected, "name the model that the run started from")

    @register(Dispatch.ONE_TO_ALL)
    def site(self) -> RankSite:
        """Returns the machine, address and accelerator of this rank."""
        return RankSite.here(self.address, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def open_outlets(self, routes: Sequence[Route], deadline_seconds: float) -> dict[Way, str]:
        """Closes this rank's earlier links, and opens its ends of the links in `routes`.  Returns their addresses."""
        self.close()
        self._base = DeltaBase()
        self._outlets = open_outlets(routes, self.rank, self.address, deadline_seconds, self.device)
        return {way: outlet.address for way, outlet in self._outlets.items()}

    @register(Dispatch.ONE_TO_ALL)
    def publish(self, version: int, dtype: str, only_adapter: bool, as_delta: bool = False) -> str | Broken | None:
        """Sends the weights of `version`, or only the adapter's, in the rollout's dtype; with `as_delta` only the
        changes since the last version on these links. All ranks must call it: gathering may need all.  Returns the
        weights' digest; None on a rank without a link; Broken if a link broke."""
        try:
            weights = with_adapter(self.engine).adapter_weights() if only_adapter else self.engine.named_weights()
            with span("weight sync"):
                outlets, base = list(self._outlets.values()), self._base if as_delta else None
                return send(weights, version, outlets, vars(torch)[dtype], base)
        except BaseException as error:
            self.close()  # so that no other rank waits for this one
            if isinstance(error, DeadlineError | LinkClosedError):
                return Broken(error)
            raise

    def close(self) -> None:
        for outlet in self._outlets.values():
            outlet.close()


class AdapterOffWorker(EngineWorker):
    """The reference (`ref`) of a run that trains an adapter: the actor's own module, with the adapter switched off."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.engine = actor_beside(self).engine

    def forward(self, batch: Batch, needs: tuple[str, ...], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        with with_adapter(self.engine).adapter_off():
            return super().forward(batch, needs, temperature)


def start_of(settings: RoleSettings, lora: LoraSettings) -> dict[str, Any]:
    """Describes the base model of an adapter, for the checkpoint, with absolute paths."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path

    return {
        "model_path": whole(settings.model_path),
        "adapter_path": whole(settings.adapter_path),
        "allow_pickle": settings.allow_pickle,
        "dtype": settings.dtype,  # of the adapted layers' own weights
        "lora": {"rank": lora.rank, "alpha": lora.alpha, "target_modules": lora.target_modules},
    }


def actor_beside(worker: Worker) -> TrainWorker:
    """Returns the actor's worker in the same process as `worker`.  Raises: WorkerError."""
    actor = worker.neighbours["actor"]
    if not isinstance(actor, TrainWorker) or actor.settings.is_value_model:
        found, expected = "has no actor with a language model in its process", "both roles in one pool"
        raise WorkerError(f"{worker.role} rank {worker.rank}", found, expected)
    return actor


def with_adapter(engine: TrainEngine) -> TrainsAdapter:
    """Returns the engine, typed as one with adapter methods.  Raises: EngineError if it trains no adapters."""
    if not isinstance(engine, TrainsAdapter):
        change = "unset model.lora.rank, or choose another engine"
        raise EngineError(type(engine).__name__, "trains no adapters", "", change)
    return engine


def path_of(model: ModelConfig) -> str:
    """Returns the folder or hub name of the policy.  Raises: ConfigError if it is not set."""
    if model.path is None:
        raise ConfigError("model.path", None, "a Hugging Face model folder or hub name")
    return model.path


def settings_of(
    model: ModelConfig, role: ActorConfig | RefConfig | RewardModelConfig | ExamplesConfig, path: str | None = None
) -> RoleSettings:
    """Returns the settings of a role that only runs the model at `path`, by default the policy's model."""
    assert model.dtype != "auto", "`with_dtypes` comes first, in the driver"
    return RoleSettings(
        model_path=path or path_of(model),
        engine=role.engine,
        dtype=model.dtype,
        max_tokens_per_micro_batch=role.max_tokens_per_micro_batch,
        adapter_path=model.lora.path if path is None else None,
        allow_pickle=model.allow_pickle,
        media_cache_gib=model.media_cache_gib,
        trust_remote_code=model.trust_remote_code,
    )


def settings_trained(
    config: RunConfig, role: ActorConfig | ExamplesConfig, total_steps: int, path: str | None = None
) -> RoleSettings:
    """Returns the settings of a role that trains the model at `path` in `total_steps` optimizer steps."""
    model = config.model
    return replace(
        settings_of(model, role, path),
        optim=role.optim,
        grad_clip=role.grad_clip,
        total_steps=total_steps,
        gradient_checkpointing=model.gradient_checkpointing,
        lora=model.lora if model.lora.rank is not None else None,
        seed=config.trainer.seed,
    )


def tokenizer_of(config: RunConfig, *others: str | None) -> PreTrainedTokenizerBase:
    """Returns the policy's tokenizer. Checks that the policy and the models at `others` have embeddings of all tokens.

    Raises: ModelError; ConfigError if the model's context is too short."""
    path, trusted = path_of(config.model), config.model.trust_remote_code
    models = [path, *(other for other in others if other is not None)]
    tokenizer = load_tokenizer(config.model.tokenizer_path or path, *models, trust_remote_code=trusted)
    check_context(config, context_length(path, trust_remote_code=trusted))
    return tokenizer


def check_media(config: RunConfig, media: Mapping[str, Sequence[Media]]) -> None:
    """Checks that the training engines support images and videos, if any row has them. `media` maps the name of a row
    to its media.  Raises: ConfigError."""
    row = next((name for name, own in media.items() if own), None)
    keys = [f"{name}.engine" for name in ("actor", "critic", "ref", "reward_model") if name in config] or ["engine"]
    for key in keys if row is not None else ():
        for error in EngineUse.at(SectionPlace(key, config), row or "").refused():
            raise error


def check_vocabularies(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that every model that computes values per token has the policy's vocabulary.

    Raises: ConfigError."""
    teachers = {f"teacher.model_paths.{source}": path for source, path in config.teacher.model_paths.items()}
    paths = {"critic.model_path": config.critic.model_path, "ref.model_path": config.ref.model_path, **teachers}
    change = "name one (the score of a whole text may come from another vocabulary: reward_model.model_path)"
    check_vocabulary(paths, config.model, tokenizer, change)


def check_vocabulary(
    paths: Mapping[str, str | None], policy: ModelConfig, tokenizer: PreTrainedTokenizerBase, change: str
) -> None:
    """Checks that the models at `paths`, by config key, have the policy's vocabulary. A model whose folder has no
    tokenizer is skipped.  Raises: ConfigError."""
    expected = "a model with the policy's vocabulary, because it computes a value for each token"
    for key, path in paths.items():
        with suppress(ModelError):  # a folder without a tokenizer is assumed to have the policy's vocabulary
            if path not in (None, policy.path) and text_reader(path, policy.trust_remote_code, tokenizer):
                raise ConfigError(key, path, expected, change)


def check_reward_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the reward model is a classifier with one label. It must read the policy's token ids or, if its
    vocabulary differs, have its own chat template.  Raises: ModelError."""
    path, trusted = config.reward_model.model_path, config.model.trust_remote_code
    if path is None or config.reward_model.rubric is not None:
        return
    reward_config(path, trust_remote_code=trusted)
    reader = text_reader(path, trusted, tokenizer)
    if reader is not None and not reader.tokenizer.chat_template:
        found = "has another vocabulary than the policy, and no chat template to read conversations by"
        change = "add its chat_template to the folder, or name a reward model with the policy's vocabulary"
        raise ModelError(f"tokenizer at {path}", found, "a chat template", change)
