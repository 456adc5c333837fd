# SPDX-License-Identifier: Apache-2.0
"""The settings of whet, their defaults and meanings. Options of registered functions live in their signatures."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.algorithm import AlgorithmConfig as AlgorithmConfig
from whet.config.algorithm import KLConfig as KLConfig
from whet.config.choice import Choice
from whet.config.cluster import ClusterConfig as ClusterConfig
from whet.config.section import Section as Section
from whet.config.section import key
from whet.registry import ENGINES, ENVIRONMENTS, HINTS, REWARDS, ROLLOUT_ENGINES, SAMPLERS, VALUE_LOSSES

Decay = Annotated[float, Ge(0), Lt(1)]  # of a moving average
Dtype = Literal["float32", "bfloat16"]
Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class LoraConfig(Section):
    """A low-rank adapter that is trained in place of the model."""

    rank: PositiveInt | None = key(None, "unset: no adapter, all weights are trained")
    alpha: PositiveFloat | None = key(None, "the adapter counts alpha / rank times; unset: 2 rank")
    target_modules: list[str] = key([], "names of linear layers; empty: all but the head")
    path: str | None = key(None, "adapter that is merged into the model before anything else")


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name."""

    path: str | None = key(None, "model folder (an adapter's too) or hub name; whet eval: also a checkpoint or a run")
    tokenizer_path: str | None = key(None, "where the tokenizer lies, if not in model.path")
    dtype: Dtype = key("float32", "what forward and backward compute in; bfloat16 keeps float32 master weights")
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass")
    lora: LoraConfig = LoraConfig()
    freeze: list[str] = key([], "weights that are not trained: model.embed_tokens.*, model.layers.[0-3].*, ...")
    allow_pickle: bool = key(False, "load weights that are pickles, which can run code")
    trust_remote_code: bool = key(False, "run the code that a model or tokenizer brings along")


FILES = (
    "files (.jsonl, .json, .parquet, with * too), folders of `datasets`, owner/name:config@split on the hub, functions "
    "as path/file.py:name; an entry may be a mapping: path, and weight, split, config, filter, options, prompt_key, ..."
)
DATA_WEIGHTS = "share of each entry of train_files in what is drawn, made to sum to 1; unset: all rows alike"
DATA_FILTER = (
    "rows to use, by field: a value, a list of values, {min: , max: } or {not: }; of train_files (of val_files in "
    "`whet eval`)"
)

TEMPLATE_KWARGS = (
    "passed on to the chat template; with sanitize_control_tokens=false a control token in a message, such as "
    "<|im_end|>, is no text but that token"
)


class RowsConfig(Section):
    """Data, whatever it is made of."""

    train_files: list[str | dict[str, Any]] = key([], FILES)
    val_files: list[str | dict[str, Any]] = key([], "held-out rows, in the same forms")
    weights: list[PositiveFloat] | None = key(None, DATA_WEIGHTS)
    filter: dict[str, Any] = key({}, DATA_FILTER)


class DataConfig(RowsConfig):
    """The prompts."""

    prompt_key: str | list[str] = key(
        "prompt", "field with the prompt: text or messages; of several names the first there is"
    )
    answer_key: str | list[str] | None = key(
        None, "field (or several) with the truth; unset: reward_model.ground_truth, else answer"
    )
    data_source_key: str = key("data_source", "field with the source, by which results are told apart")
    data_source: str | None = key(None, "names the source of rows that do not say it themselves")
    system_prompt: str | None = key(None, "system message put before every prompt that has none")
    format_prompt: str | None = key(None, "jinja template, or a .jinja file; sees `content` and the row's fields")
    apply_chat_template: bool = key(True, "false feeds the prompt text to the model as it is")
    chat_template_kwargs: dict[str, Any] = key({}, TEMPLATE_KWARGS)
    train_batch_size: PositiveInt = key(32, "prompts a step")
    val_max_prompts: PositiveInt | None = key(None, "validate on the first so many prompts only")
    max_prompt_length: PositiveInt = key(512, "tokens")
    max_response_length: PositiveInt = key(512, "tokens")
    overlong_prompts: Literal["drop", "error"] = key("drop", "what happens to a prompt over the limit")
    difficulty_key: str | None = key(None, "field with how hard a row is, as a number; unset: use all")
    difficulty_window: tuple[float, float] = key((0.0, 1.0), "train on rows strictly between these")
    shuffle: bool = key(True, "a new order every epoch, the same for the same seed")
    sampler: Annotated[str | None, Choice(SAMPLERS, "sampler_options")] = key(
        None, "registered sampler, or path/file.py:name: which rows come when; unset: as data.shuffle says"
    )
    sampler_options: dict[str, Any] = key({}, "options of the sampler")
    hub_deadline_seconds: PositiveFloat = key(1800.0, "a set that takes longer to fetch is an error")


class SamplingConfig(Section):
    """Sampling, as in validation."""

    n: PositiveInt = key(1, "responses a prompt")
    temperature: NonNegativeFloat = key(0.0, "0 is greedy")
    top_p: PositiveFloat = key(1.0, "nucleus: smallest set of tokens with this probability", le=1.0)
    top_k: NonNegativeInt = key(0, "the k likeliest tokens; 0 is off")
    min_p: NonNegativeFloat = key(0.0, "tokens with this share of the likeliest one's probability", le=1.0)
    repetition_penalty: PositiveFloat = key(1.0, "divides logits of tokens in prompt or response; 1 is off")
    presence_penalty: float = key(0.0, "subtracted from the logit of a token in the response", ge=-2.0, le=2.0)
    frequency_penalty: float = key(0.0, "the same, once for each time", ge=-2.0, le=2.0)
    stop: list[str] = key([], "strings that end a response; they and their last token stay in its text")
    bad_words: list[str] = key([], "never sampled as the tokenizer writes them, with and without a space")
    allowed_token_ids: list[NonNegativeInt] | None = key(
        None, "the only tokens sampled, the end token among them; unset: all"
    )


ENGINE_OPTIONS = "options of the engine: `whet algorithms show NAME` lists them"
HYBRID = (
    "sampling and training take turns on the devices: the cache of keys and values is freed while models train; models "
    "trained by fsdp, with their optimizers, are moved to the host while answers are sampled"
)


class RolloutEngineConfig(Section):
    """The rollout engine."""

    name: Annotated[str, Choice(ROLLOUT_ENGINES, "options")] = key(
        "native", "registered rollout engine (native, hf), or path/file.py:MyEngine"
    )
    options: dict[str, Any] = key({}, ENGINE_OPTIONS)


class RolloutConfig(SamplingConfig):
    """Sampling of responses."""

    engine: RolloutEngineConfig = RolloutEngineConfig()
    n: PositiveInt = key(8, "responses a prompt")
    temperature: NonNegativeFloat = key(1.0, "0 is greedy")
    length_stages: dict[int, PositiveInt] = key(
        {}, "most tokens of a response, by step from which on; unset: data.max_response_length"
    )
    dtype: Dtype | None = key(None, "unset: model.dtype")
    max_staleness: NonNegativeFloat = key(0.0, "steps that a sample may lag behind the weights it trains")
    max_batch_size: PositiveInt = key(256, "sequences decoded together")
    free_cache_engine: bool = key(False, HYBRID)
    deadline_seconds: PositiveFloat = key(3600.0, "a rollout of one step that takes longer is an error")


class EnvironmentConfig(Section):
    """The environment that speaks between the turns of the model."""

    name: Annotated[str, Choice(ENVIRONMENTS, "options")] = key(
        "single_turn", "registered environment, or path/file.py:function"
    )
    options: dict[str, Any] = key({}, "options of the environment")
    max_turns: PositiveInt = key(8, "turns after which an episode ends")
    reset_seconds: PositiveFloat = key(120.0, "seconds; an environment that takes longer to begin fails")
    step_seconds: PositiveFloat = key(60.0, "seconds; an environment that takes longer for a step fails")
    episode_seconds: PositiveFloat = key(3600.0, "seconds; an episode that takes longer fails")


class RewardConfig(Section):
    """The score of responses."""

    function: Annotated[str | list[str] | None, Choice(REWARDS, "kwargs", is_checked=False)] = key(
        None, "registered name, module:function or file.py:function; or several"
    )
    weights: list[float] | None = key(None, "one for each of several functions; unset: 1 each")
    kwargs: dict[str, Any] = key({}, "passed to the function")
    columns: list[str] = key([], "numbers that the function returns, as batch columns for an estimator or loss")
    correct_threshold: float = key(1.0, "reward from which a response is right, without an accuracy of the function")
    timeout_seconds: PositiveFloat = key(30.0, "deadline of one item")
    num_workers: NonNegativeInt = key(2, "reward processes; 0 scores in the trainer, without a deadline")


MUON = (
    "adamw, or muon (Jordan et al. 2024): torch's, for the matrices between embedding and output, with steps as large "
    "as AdamW's; AdamW for all others"
)
MICRO_BATCH = "tokens a forward pass, per device; unset: what suits the device, and one row at least"


class EngineConfig(Section):
    """The training engine of a role."""

    name: Annotated[str, Choice(ENGINES, "options")] = key(
        "single",
        "single: the whole model on every rank; fsdp: weights and optimizer in shards over them; or "
        "path/file.py:MyEngine",
    )
    options: dict[str, Any] = key({}, ENGINE_OPTIONS)
    packing: bool | None = key(None, "lay rows end to end without padding; unset: what is faster on the device")
    share_prompts: bool = key(True, "where rows are packed, read a prompt once for all its answers")
    logits_chunk_tokens: PositiveInt = key(1024, "tokens whose logits exist at once")
    compile: bool = key(False, "compile the layers: slower to start, faster to run")


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = key("adamw", MUON)
    lr: NonNegativeFloat = key(1e-6, "peak learning rate")
    momentum: NonNegativeFloat = key(0.95, "of muon", lt=1.0)
    betas: tuple[Decay, Decay] = key((0.9, 0.999), "decay of AdamW's two moments")
    eps: PositiveFloat = key(1e-8, "added to the denominator")
    state_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "float32", "of AdamW's moments; int8 in blocks (Dettmers et al. 2022)"
    )
    weight_rounding: Literal["stochastic", "kahan"] | None = key(
        None, "of AdamW's weights kept in bfloat16: at random, or with their error; unset: float32"
    )
    weight_decay: NonNegativeFloat = key(0.01, "decoupled; not on biases and norms")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "after the warm-up")
    warmup_steps: NonNegativeInt = key(0, "optimizer steps of linear growth from 0")
    min_lr_ratio: NonNegativeFloat = key(0.0, "where linear and cosine end, as a share of lr", le=1.0)


class ActorConfig(Section):
    """The policy's updates."""

    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig()
    mini_batch_size: PositiveInt | None = key(None, "prompts an optimizer step; unset: data.train_batch_size")
    epochs: PositiveInt = key(1, "passes over a step's samples")
    max_tokens_per_micro_batch: PositiveInt | None = key(None, MICRO_BATCH)
    grad_clip: PositiveFloat | None = key(1.0, "largest norm of the gradient")


class CriticConfig(ActorConfig):
    """The value model's updates."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    model_path: str | None = key(None, "where the value model starts from; unset: model.path")
    value_loss: Annotated[str, Choice(VALUE_LOSSES, "loss_options")] = key("clipped", "registered value loss")
    loss_options: dict[str, Any] = key({}, "options of the value loss")
    warmup_steps: NonNegativeInt = key(0, "steps in which only the critic learns")


class RefConfig(Section):
    """The frozen reference policy."""

    engine: EngineConfig = EngineConfig()
    model_path: str | None = key(None, "unset: model.path as it was at the start")
    max_tokens_per_micro_batch: PositiveInt | None = key(None, MICRO_BATCH)


class TeacherConfig(Section):
    """The source of `teacher_log_probs`, for CPO and distillation."""

    model_paths: dict[str, str] = key({}, "teachers by data source, * all others; empty: the policy")
    hint: Annotated[str | None, Choice(HINTS, "hint_options")] = key(
        None, "registered hint source: reference, peer, own, judge; unset: no hint"
    )
    hint_options: dict[str, Any] = key({}, "options of the hint source")
    hint_template: str = key("{{ content }}\n\nHint: {{ hint }}", "jinja: what stands in the place of the last message")
    max_hint_tokens: PositiveInt = key(256, "longer hints are cut")


class TrainerConfig(Section):
    """The run."""

    total_steps: PositiveInt | None = key(None, "steps to train; unset: total_epochs over the data")
    total_epochs: PositiveInt = key(1, "passes over the data, where total_steps is unset")
    val_freq: int = key(0, "validate every so many steps; 0 only before and after, -1 never", ge=-1)
    val_before_train: bool = key(True, "validate the model as it comes")
    validation: SamplingConfig = SamplingConfig()
    save_freq: NonNegativeInt = key(0, "save every so many steps; 0 only at the end")
    save_limit: PositiveInt | None = key(2, "newest checkpoints kept, with the best and the last good one; unset: all")
    best_metric: str | None = key(
        None, "selects the best checkpoint; -NAME: lower is better; unset: val/accuracy, sft -val/loss"
    )
    resume: str = key("auto", "auto (the newest in run_dir, if any), never, or the path of a checkpoint")
    max_restarts: NonNegativeInt = key(0, "restarts from the newest checkpoint where a worker was lost")
    seed: NonNegativeInt = key(0, "of every random draw")
    run_dir: str | None = key(None, "unset: runs/<project_name>/<experiment_name>")
    project_name: str = key("whet", "for trackers and the run's folder")
    experiment_name: str = key("default", "for trackers and the run's folder")
    logger: list[Logger] = key(["console", "jsonl"], "where metrics go")
    log_rollouts: int = key(1, "write rollouts/ every so many steps; 0 never", ge=0)
    table_rows: NonNegativeInt = key(8, "responses of rollouts/ that trackers show; 0 none")
    log_tokens: NonNegativeInt = key(0, "write every number of every token every so many steps; 0 never")
    profile: list[PositiveInt] = key([], "steps to trace: operators by phase, and memory over time, into profile/")
    callbacks: list[str] = key([], "module:function or file.py:function, called after every step")
    loop: str | None = key(None, "module:function or file.py:function that replaces the loop")


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
    teacher: TeacherConfig = TeacherConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    extra: dict[str, Any] = key({}, "yours: whet does not read it")

    command: ClassVar[str] = "train"


class SupervisedDataConfig(RowsConfig):
    """Examples to imitate."""

    messages_key: str = key("messages", "field with a whole conversation; where absent, prompt and response are read")
    prompt_key: str = key("prompt", "field with the prompt")
    response_key: str = key("response", "field with the answer")
    apply_chat_template: bool = key(True, "false joins prompt and response as they are")
    chat_template_kwargs: dict[str, Any] = key({}, TEMPLATE_KWARGS)
    max_length: PositiveInt = key(1024, "tokens of prompt and response together")
    overlong: Literal["truncate", "drop", "error"] = key("truncate", "what happens to a longer example")
    train_batch_size: PositiveInt = key(64, "examples an optimizer step")
    shuffle: bool = key(True, "a new order every epoch, the same for the same seed")
    hub_deadline_seconds: PositiveFloat = key(1800.0, "a set that takes longer to fetch is an error")


class SFTConfig(Section):
    """The config of `whet sft`."""

    model: ModelConfig = ModelConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    max_tokens_per_micro_batch: PositiveInt | None = key(None, MICRO_BATCH)
    grad_clip: PositiveFloat | None = key(1.0, "largest norm of the gradient")
    trainer: TrainerConfig = TrainerConfig(experiment_name="sft")
    cluster: ClusterConfig = ClusterConfig()
    extra: dict[str, Any] = key({}, "yours: whet does not read it")

    command: ClassVar[str] = "sft"


class EvalConfig(Section):
    """The config of `whet eval`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1, temperature=0.0)
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    output: str | None = key(
        None, "folder for answers.jsonl and summary.json, where it goes on if cut off; unset: none"
    )
    seed: NonNegativeInt = key(0, "of every random draw")
    extra: dict[str, Any] = key({}, "yours: whet does not read it")

    command: ClassVar[str] = "eval"


class GenerateConfig(Section):
    """The config of `whet generate`."""

    model: ModelConfig = ModelConfig()
    input: list[str | dict[str, Any]] = key([], "the prompts, in the forms of data.train_files; unset: data.val_files")
    output: str | None = key(None, "the .jsonl file of answers, one a line; goes on where it ends")
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1)
    chunk_size: PositiveInt = key(128, "prompts answered and written together: what a killed run loses")
    seed: NonNegativeInt = key(0, "of every random draw")
    extra: dict[str, Any] = key({}, "yours: whet does not read it")

    command: ClassVar[str] = "generate"

    @property
    def source_key(self) -> str:
        """The key that names the prompts."""
        return "input" if self.input else "data.val_files"

    @property
    def sources(self) -> list[str | dict[str, Any]]:
        """The value of that key."""
        return self.input or self.data.val_files


# By the command that reads it.
COMMANDS: dict[str, type[Section]] = {
    each.command: each for each in (TrainConfig, SFTConfig, EvalConfig, GenerateConfig)
}
