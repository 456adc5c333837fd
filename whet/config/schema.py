# SPDX-License-Identifier: Apache-2.0
"""The config schema: sections, keys, defaults, meanings. Options of registered functions are in their signatures."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from whet.config.algorithm import (
    AlgorithmConfig as AlgorithmConfig,
    GroupFilterConfig as GroupFilterConfig,
    KLConfig as KLConfig,
    Norm as Norm,
)
from whet.config.cluster import ClusterConfig as ClusterConfig
from whet.config.environment import EnvironmentConfig as EnvironmentConfig, StageConfig as StageConfig
from whet.config.managers import LIMIT_NAMES, LIMITS, MANAGER, MANAGERS, TOKENS_PER_REQUEST, Manager
from whet.config.section import Choice, Section as Section, Values, key
from whet.config.trainer import SamplingConfig as SamplingConfig, TrainerConfig as TrainerConfig
from whet.registry import ENGINES, HINTS, REWARDS, ROLLOUT_ENGINES, SAMPLERS, VALUE_LOSSES

Decay = Annotated[float, Ge(0), Lt(1)]  # decay rate of a moving average
Dtype = Literal["auto", "float32", "bfloat16"]  # auto: whet.planning.dtypes


DTYPE = (
    "dtype of forward and backward passes; bfloat16 keeps float32 master weights; auto: bfloat16 on accelerators and "
    "processors that multiply it, else float32; a resumed run keeps its own"
)


class LoraConfig(Section):
    """A low-rank adapter (LoRA), trained instead of the full weights."""

    rank: PositiveInt | None = key(None, "rank of the adapter; unset: no adapter, all weights are trained")
    alpha: PositiveFloat | None = key(None, "the adapter's output is multiplied by alpha / rank; unset: 2 x rank")
    target_modules: list[str] = key(
        [], "layers that get an adapter: names of linear layers, all-linear (all but the head; the default), experts"
    )
    path: str | None = key(None, "existing adapter, merged into the model when it is loaded")


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name."""

    path: str | None = key(None, "model or adapter folder, or hub name; whet eval: also a checkpoint or run folder")
    tokenizer_path: str | None = key(None, "tokenizer folder or name on the hub; unset: model.path")
    dtype: Dtype = key("auto", DTYPE)
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass, which saves memory")
    lora: LoraConfig = LoraConfig()
    freeze: list[str] = key(
        [], "weights that are not trained: model.embed_tokens.*, model.layers.[0-3].*, vision (the tower), ..."
    )
    media_cache_gib: PositiveFloat = key(1.0, "memory of each process for pixel values of images and videos, in GiB")
    allow_pickle: bool = key(False, "load weights stored as pickles, which can run code")
    trust_remote_code: bool = key(False, "run Python code from the folder of the model or tokenizer")


FILES = (
    "files (.jsonl, .json, .parquet, with * too), folders of `datasets`, owner/name:config@split on the hub, functions "
    "as path/file.py:name; an entry may be a mapping: path, and weight, split, config, filter, options, prompt_key, ..."
)
DATA_WEIGHTS = "sampling weight of each entry of train_files, normalised to sum to 1; unset: all rows weigh the same"
DATA_FILTER = (
    "condition on fields of the rows: a value, a list of values, {min: , max: } or {not: }; filters train_files (in "
    "`whet eval` val_files)"
)

TEMPLATE_KWARGS = (
    "arguments of the chat template; sanitize_control_tokens=false parses control tokens inside messages, such as "
    "<|im_end|>, as tokens instead of text"
)


class RowsConfig(Section):
    """The data sets of a command."""

    train_files: list[str | Values] = key([], FILES)
    val_files: list[str | Values] = key([], "validation data, in the same forms as train_files")
    weights: list[PositiveFloat] | None = key(None, DATA_WEIGHTS)
    filter: Values = key({}, DATA_FILTER)
    apply_chat_template: bool = key(True, "false: the model reads the texts of the rows without a chat template")
    chat_template_kwargs: Values = key({}, TEMPLATE_KWARGS)
    shuffle: bool = key(True, "draw rows in a new random order every epoch, which the seed determines")
    hub_deadline_seconds: PositiveFloat = key(1800.0, "longest time to fetch a data set from the hub, in seconds")

    @property
    def template_options(self) -> Values | None:
        """The arguments of the chat template; None without a template."""
        return self.chat_template_kwargs if self.apply_chat_template else None


class MediaRowsConfig(RowsConfig):
    """Data sets whose rows may have images and videos, for models that read them."""

    image_key: str = key("images", "field with the images of a row; `images` is also read from `image`")
    video_key: str = key("videos", "field with the videos of a row; `videos` is also read from `video`, one video")
    image_dir: str | None = key(None, "folder that relative image paths refer to; unset: the data file's folder")
    min_pixels: PositiveInt | None = key(None, "smaller images and frames are enlarged; unset: the processor's value")
    max_pixels: PositiveInt | None = key(None, "larger images and frames are reduced; unset: the processor's value")
    video_fps: PositiveFloat = key(2.0, "frames read per second of a video, evenly spaced")
    max_frames: PositiveInt = key(16, "most frames of a video")
    limit_images: PositiveInt | None = key(None, "most images and videos of a row; more are an error; unset: no limit")
    allow_media_urls: bool = key(False, "fetch images and videos that rows name by http(s) URL")


MIX = (
    "share of each domain (without reward.domains: of each data source) in every batch, as math: 0.7, code: 0.3; or "
    "shares by step, linear between them, as code: {0: 0, 100: 0.5}; empty: no fixed shares"
)


class DataConfig(MediaRowsConfig):
    """The prompts of a run."""

    prompt_key: str | list[str] = key(
        "prompt", "field with the prompt (text or messages); of several names, the first that the row has"
    )
    answer_key: str | list[str] | None = key(
        None, "field (or several) with the ground truth; unset: reward_model.ground_truth, else answer"
    )
    data_source_key: str = key("data_source", "field with the data source; metrics are reported by data source")
    data_source: str | None = key(None, "data source of rows without data_source_key")
    mix: dict[str, NonNegativeFloat | dict[NonNegativeInt, NonNegativeFloat]] = key({}, MIX)
    system_prompt: str | None = key(None, "system message for prompts that have none")
    format_prompt: str | None = key(None, "jinja template, or a .jinja file; variables: `content` and the row's fields")
    train_batch_size: PositiveInt = key(32, "prompts a step")
    val_max_prompts: PositiveInt | None = key(None, "validate on only the first N prompts; unset: all")
    max_prompt_length: PositiveInt = key(512, "most tokens of a prompt")
    max_response_length: PositiveInt = key(512, "most tokens of a response")
    overlong_prompts: Literal["drop", "error"] = key("drop", "drop prompts over max_prompt_length, or error")
    difficulty_key: str | None = key(None, "field with the difficulty of a row, a number; unset: all rows are used")
    difficulty_window: tuple[float, float] = key((0.0, 1.0), "train on rows of a difficulty strictly between these")
    sampler: Annotated[str | None, Choice(SAMPLERS, "sampler_options")] = key(
        None, "order of the rows: registered sampler, or path/file.py:name; unset: data.shuffle"
    )
    sampler_options: Values = key({}, "options of the sampler")


ENGINE_OPTIONS = "options of the engine; `whet algorithms show NAME` lists them"
HYBRID = (
    "hybrid mode: frees the KV cache during training; during sampling, moves optimizers to the host, and models that "
    "the rollout does not sample from"
)


class RolloutEngineConfig(Section):
    """The rollout engine."""

    name: Annotated[str, Choice(ROLLOUT_ENGINES, "options")] = key(
        "native", "registered rollout engine (native, hf, vllm, sglang), or path/file.py:MyEngine"
    )
    options: Values = key({}, ENGINE_OPTIONS)


MAX_STALENESS = (
    "most versions of the weights between the sampling of a token and its training; 0: sample, wait, train; 1: sample "
    "the next step while this one trains; 1.5: at most half of a batch is 2 versions old"
)


class RolloutConfig(SamplingConfig):
    """Sampling of responses."""

    engine: RolloutEngineConfig = RolloutEngineConfig()
    n: PositiveInt = key(8, "responses a prompt")
    temperature: NonNegativeFloat = key(1.0, "sampling temperature; 0 is greedy")
    length_stages: dict[int, PositiveInt] = key({}, "new length limit of responses at each of these steps; empty: none")
    dtype: Dtype = key("auto", "dtype of sampling; auto: model.dtype")
    max_staleness: NonNegativeFloat = key(0.0, MAX_STALENESS)
    max_batch_size: PositiveInt = key(256, "most sequences that are decoded together")
    free_cache_engine: bool = key(False, HYBRID)
    deadline_seconds: PositiveFloat = key(3600.0, "longest time to sample one step, in seconds")

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_model(cls, value: object) -> object:
        return "auto" if value is None else value  # as configs of older runs have it


class DomainConfig(Section):
    """The reward functions for the rows of one domain."""

    function: Annotated[str, Choice(REWARDS, "kwargs", is_checked=False)] = key("", "reward function of the domain")
    sources: list[str] | None = key(
        None, "data sources of the domain, * for any text; unset: its name; or a row names it in the field `domain`"
    )
    kwargs: Values = key({}, "keyword arguments of the function")
    weight: float = key(1.0, "factor of the domain's rewards")
    filter: GroupFilterConfig = GroupFilterConfig()
    norm_mean: Norm | None = key(None, "algorithm.shaping.norm_mean for rows of this domain; unset: the general value")
    norm_std: Norm | None = key(None, "algorithm.shaping.norm_std for rows of this domain; unset: the general value")
    timeout_seconds: PositiveFloat | None = key(None, "deadline for one response; unset: reward.timeout_seconds")
    num_workers: NonNegativeInt | None = key(None, "reward processes of the domain; unset: reward.num_workers")


class RewardConfig(Section):
    """The reward functions and their settings."""

    function: Annotated[str | list[str] | None, Choice(REWARDS, "kwargs", is_checked=False)] = key(
        None, "registered reward function, module:function or file.py:function; or a list of them"
    )
    domains: dict[str, DomainConfig] = key(
        {}, "reward functions by domain; reward.function then scores the rows without a domain"
    )
    weights: list[float] | None = key(None, "weight of each function in the sum; unset: 1 each")
    kwargs: Values = key({}, "keyword arguments of the function")
    val_function: dict[str, Values] = key(
        {},
        "{name: options} of a stricter function for the accuracy of validation; unset: reward.function",
        max_length=1,
    )
    manager: Manager | None = key(None, MANAGER)
    columns: list[str] = key([], "parts of the reward that become batch columns for an estimator or loss")
    correct_threshold: float = key(1.0, "lowest reward of a correct response, if the function returns no accuracy")
    timeout_seconds: PositiveFloat = key(30.0, "deadline for scoring one response, in seconds")
    num_workers: NonNegativeInt = key(2, "reward processes; 0 scores in the trainer's process, without a deadline")
    concurrency: PositiveInt = key(16, "most calls that an async function runs at a time in one process")
    memory_limit_mb: PositiveFloat | None = key(
        None, "memory at which a reward process and its child processes are killed, in MB; unset: no limit"
    )
    limits: dict[str, PositiveFloat] = key({}, f"limits of a function's calls in all its processes: {LIMITS}")

    @model_validator(mode="before")
    @classmethod
    def _of_manager(cls, values: Any) -> object:
        """Fills in the values that the preset `reward.manager` sets."""
        match values:
            case {"manager": str(manager)} if manager in MANAGERS:
                return {**MANAGERS[manager], **values}
        return values

    @property
    def names_function(self) -> bool:
        """Tells whether the config names a reward function, for all rows or for a domain."""
        return bool(self.function or self.domains)

    @property
    def seconds_between_calls(self) -> float:
        """The least time between the starts of two calls, in seconds; 0 if calls are not limited."""
        calls, tokens, each = (self.limits.get(name) for name in LIMIT_NAMES)
        return max(60 / calls if calls else 0.0, 60 * (each or TOKENS_PER_REQUEST) / tokens if tokens else 0.0)


MUON = (
    "adamw, or muon (Jordan et al. 2024): torch's Muon for the matrices between embedding and output, with AdamW's "
    "update size, and AdamW for all other weights"
)
# Measured by `make bench` (docs/benchmarks.md, "Packed or padded") on a CPU; for an accelerator of unknown memory.
MICRO_BATCH_TOKENS = {"cpu": 2048, "accelerator": 16384}
KV_CACHE_BYTES = 2**30  # of the native engine with kv_cache_bytes=auto: on the host; elsewhere at least this
MICRO_BATCH = "most tokens of a forward pass, per device (at least a row); unset: by the accelerator's memory or 2,048"


class EngineConfig(Section):
    """The training engine of a role."""

    name: Annotated[str, Choice(ENGINES, "options")] = key(
        "single",
        "single: the whole model on every rank; fsdp: weights and optimizer sharded over the ranks; or "
        "path/file.py:MyEngine",
    )
    options: Values = key({}, ENGINE_OPTIONS)
    packing: bool | None = key(None, "pack rows end to end without padding; unset: the faster way on the device")
    share_prompts: bool = key(True, "with packing, compute a prompt once for all responses to it")
    logits_chunk_tokens: PositiveInt = key(1024, "tokens whose logits are in memory at once")


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = key("adamw", MUON)
    lr: NonNegativeFloat = key(1e-6, "peak learning rate")
    momentum: NonNegativeFloat = key(0.95, "momentum of muon", lt=1.0)
    betas: tuple[Decay, Decay] = key((0.9, 0.999), "decay rates of AdamW's two moments")
    eps: PositiveFloat = key(1e-8, "number added to AdamW's denominator")
    state_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "float32", "dtype of AdamW's moments; int8 is quantised in blocks (Dettmers et al. 2022)"
    )
    weight_rounding: Literal["stochastic", "kahan"] | None = key(
        None, "keeps master weights in bfloat16, with stochastic rounding or Kahan summation; unset: float32"
    )
    weight_decay: NonNegativeFloat = key(0.01, "decoupled weight decay; not for biases and norms")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "learning rate schedule after the warm-up")
    warmup_steps: NonNegativeInt = key(0, "optimizer steps in which the learning rate grows linearly from 0")
    min_lr_ratio: NonNegativeFloat = key(0.0, "final learning rate of linear and cosine, as a fraction of lr", le=1.0)


class PassConfig(Section):
    """The training engine and the forward passes of a role."""

    engine: EngineConfig = EngineConfig()
    max_tokens_per_micro_batch: PositiveInt | None = key(None, MICRO_BATCH)


class ActorConfig(PassConfig):
    """Training of the policy."""

    optim: OptimConfig = OptimConfig()
    mini_batch_size: PositiveInt | None = key(None, "prompts an optimizer step; unset: data.train_batch_size")
    epochs: PositiveInt = key(1, "passes over the rows of a step")
    grad_clip: PositiveFloat | None = key(1.0, "largest norm of the gradient; a larger one is scaled down")


class CriticConfig(ActorConfig):
    """Training of the value model."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    model_path: str | None = key(None, "model that the critic is initialised from; unset: model.path")
    value_loss: Annotated[str, Choice(VALUE_LOSSES, "loss_options")] = key("clipped", "registered value loss")
    loss_options: Values = key({}, "options of the value loss")
    warmup_steps: NonNegativeInt = key(0, "number of first steps that train only the critic")


class RefConfig(PassConfig):
    """The frozen reference policy."""

    model_path: str | None = key(None, "reference model; unset: model.path, the initial policy")


class RewardModelConfig(PassConfig):
    """The reward model. Its score is the reward, or a part of it. It is a sequence classifier with one label, or a
    judge: the policy itself or another language model."""

    model_path: str | None = key(None, "reward model (`whet train-reward` makes one), or with `rubric` the judge")
    rubric: str | None = key(None, "rubric (docs/rewards.md) by which a judge gives the score; unset: no judge")
    weight: float = key(1.0, "factor of the score")
    combine: Literal["replace", "add"] = key(
        "replace", "train on the score alone (replace), or on the sum with the score of reward.function (add)"
    )

    @property
    def source(self) -> str | None:
        """The key that selects the kind of reward model; None if there is none."""
        return next((name for name in ("rubric", "model_path") if self[name] is not None), None)

    @property
    def judge(self) -> str | None:
        """The path of a judge that has its own role. None if there is no judge, or if the policy is the judge."""
        return self.model_path if self.rubric is not None else None


class TeacherConfig(Section):
    """The teacher, which gives `teacher_log_probs` for CPO and distillation."""

    model_paths: dict[str, str] = key({}, "teacher model by data source, * for others; empty: the policy itself")
    hint: Annotated[str | None, Choice(HINTS, "hint_options")] = key(
        None, "hint that only the teacher reads, from a registered source: reference, peer, own, judge; unset: no hint"
    )
    hint_options: Values = key({}, "options of the hint source")
    hint_template: str = key("{{ content }}\n\nHint: {{ hint }}", "jinja template of the teacher's last message")
    max_hint_tokens: PositiveInt = key(256, "most tokens of a hint; longer ones are truncated")


class TrainConfig(Section):
    """The config of `whet train`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    teacher: TeacherConfig = TeacherConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    extra: Values = key({}, "settings of your own code; whet does not read them")

    command: ClassVar[str] = "train"
    trains_on: ClassVar[Literal["prompts"]] = "prompts"


class ExamplesDataConfig(MediaRowsConfig):
    """The examples of supervised training."""

    prompt_key: str = key("prompt", "field with the prompt")
    max_length: PositiveInt = key(1024, "most tokens of prompt and response together")
    train_batch_size: PositiveInt = key(64, "examples an optimizer step")

    builder: ClassVar[str] = "whet.data.supervised:build_examples"  # makes the examples from rows


UNWRITTEN = (
    "if the chat template leaves out text of a conversation, such as thoughts of earlier turns: "
    "as_is (with a warning), split (an example for each turn, in which this turn is the last), error"
)


class SupervisedDataConfig(ExamplesDataConfig):
    """The examples of `whet sft`."""

    messages_key: str = key("messages", "field with a whole conversation; rows without it have prompt and response")
    response_key: str = key("response", "field with the response")
    overlong: Literal["truncate", "drop", "error"] = key("truncate", "truncate or drop examples over max_length")
    unwritten: Literal["as_is", "split", "error"] = key("as_is", UNWRITTEN)


class ExamplesConfig(Section):
    """Base class of the configs of trainers that train on examples, such as `whet sft`."""

    model: ModelConfig = ModelConfig()
    data: ExamplesDataConfig = ExamplesDataConfig()
    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    max_tokens_per_micro_batch: PositiveInt | None = key(None, MICRO_BATCH)
    grad_clip: PositiveFloat | None = key(1.0, "largest norm of the gradient; a larger one is scaled down")
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    extra: Values = key({}, "settings of your own code; whet does not read them")

    trains_on: ClassVar[Literal["examples"]] = "examples"

    @property
    def rows_an_example(self) -> int:
        """The number of batch rows that an example has."""
        return 1


class SFTConfig(ExamplesConfig):
    """The config of `whet sft`."""

    data: SupervisedDataConfig = SupervisedDataConfig()
    trainer: TrainerConfig = TrainerConfig(experiment_name="sft")

    command: ClassVar[str] = "sft"


def no_frozen_models(config: ExamplesConfig) -> dict[str, str]:
    """Returns the paths of the models that a run only reads, by role: none."""
    return {}


RunConfig = TrainConfig | ExamplesConfig  # of a run that trains


class EvalConfig(Section):
    """The config of `whet eval`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1, temperature=0.0)
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    output: str | None = key(
        None, "folder for answers.jsonl and summary.json, from which an interrupted run continues; unset: none"
    )
    seed: NonNegativeInt = key(0, "seed of all random draws")
    extra: Values = key({}, "settings of your own code; whet does not read them")

    command: ClassVar[str] = "eval"


class GenerateConfig(Section):
    """The config of `whet generate`."""

    model: ModelConfig = ModelConfig()
    input: list[str | Values] = key([], "the prompts, in the forms of data.train_files; unset: data.val_files")
    output: str | None = key(None, ".jsonl file to write, one completion a line; an interrupted run continues it")
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1)
    chunk_size: PositiveInt = key(128, "prompts that are sampled and written together; a kill loses at most these")
    seed: NonNegativeInt = key(0, "seed of all random draws")
    extra: Values = key({}, "settings of your own code; whet does not read them")

    command: ClassVar[str] = "generate"

    @property
    def source_key(self) -> str:
        """The key that lists the files of prompts."""
        return "input" if self.input else "data.val_files"

    @property
    def sources(self) -> list[str | Values]:
        """The files of prompts: the value of the key `source_key`."""
        return self.input or self.data.val_files


WholeConfig = RunConfig | EvalConfig | GenerateConfig  # of any command
