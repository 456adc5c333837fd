# SPDX-License-Identifier: Apache-2.0
"""Every setting of whet, its default and its meaning. Options of registered functions live in their signatures."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.algorithm import AlgorithmConfig as AlgorithmConfig
from whet.config.algorithm import KLConfig as KLConfig
from whet.config.choice import Choice
from whet.config.cluster import ClusterConfig as ClusterConfig
from whet.config.section import Section as Section
from whet.registry import ENGINES, ENVIRONMENTS, REWARDS, ROLLOUT_ENGINES, SAMPLERS, VALUE_LOSSES

Decay = Annotated[float, Ge(0), Lt(1)]  # of a moving average
Dtype = Literal["float32", "bfloat16"]
Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class LoraConfig(Section):
    """A low-rank adapter that is trained in place of the model."""

    rank: PositiveInt | None = Field(None, description="unset: no adapter, all weights are trained")
    alpha: PositiveFloat | None = Field(None, description="the adapter counts alpha / rank times; unset: 2 rank")
    target_modules: list[str] = Field([], description="names of linear layers; empty: all but the head")
    path: str | None = Field(None, description="adapter that is merged into the model before anything else")


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name."""

    path: str | None = Field(
        None, description="folder (an adapter's too) or hub name of the model; for whet eval also a checkpoint or a run"
    )
    tokenizer_path: str | None = Field(None, description="where the tokenizer lies, if not in model.path")
    dtype: Dtype = Field(
        "float32", description="what forward and backward compute in; bfloat16 keeps float32 master weights"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    lora: LoraConfig = LoraConfig()
    freeze: list[str] = Field(
        [], description="weights of the policy that are not trained, as model.embed_tokens.* or model.layers.[0-3].*"
    )
    allow_pickle: bool = Field(False, description="load weights that are pickles, which can run code")
    trust_remote_code: bool = Field(False, description="run the code that a model or tokenizer brings along")


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

    train_files: list[str | dict[str, Any]] = Field([], description=FILES)
    val_files: list[str | dict[str, Any]] = Field([], description="held-out rows, in the same forms")
    weights: list[PositiveFloat] | None = Field(None, description=DATA_WEIGHTS)
    filter: dict[str, Any] = Field({}, description=DATA_FILTER)


class DataConfig(RowsConfig):
    """The prompts."""

    prompt_key: str | list[str] = Field(
        "prompt", description="field with the prompt: text, or a list of messages; of several names the first there is"
    )
    answer_key: str | list[str] | None = Field(
        None, description="field with the answer, or several names; unset: reward_model.ground_truth, else answer"
    )
    data_source_key: str = Field("data_source", description="field with the source, by which results are told apart")
    data_source: str | None = Field(None, description="names the source of rows that do not say it themselves")
    system_prompt: str | None = Field(None, description="system message put before every prompt that has none")
    format_prompt: str | None = Field(
        None, description="jinja template, or a .jinja file; sees `content` and the row's fields"
    )
    apply_chat_template: bool = Field(True, description="false feeds the prompt text to the model as it is")
    chat_template_kwargs: dict[str, Any] = Field({}, description=TEMPLATE_KWARGS)
    train_batch_size: PositiveInt = Field(32, description="prompts a step")
    val_max_prompts: PositiveInt | None = Field(None, description="validate on the first so many prompts only")
    max_prompt_length: PositiveInt = Field(512, description="tokens")
    max_response_length: PositiveInt = Field(512, description="tokens")
    overlong_prompts: Literal["drop", "error"] = Field("drop", description="what happens to a prompt over the limit")
    difficulty_key: str | None = Field(None, description="field with how hard a row is, as a number; unset: use all")
    difficulty_window: tuple[float, float] = Field((0.0, 1.0), description="train on rows strictly between these")
    shuffle: bool = Field(True, description="a new order every epoch, the same for the same seed")
    sampler: Annotated[str | None, Choice(SAMPLERS, "sampler_options")] = Field(
        None, description="registered sampler, or path/file.py:name: which rows come when; unset: as data.shuffle says"
    )
    sampler_options: dict[str, Any] = Field({}, description="options of the sampler")
    hub_deadline_seconds: PositiveFloat = Field(1800.0, description="a set that takes longer to fetch is an error")


class SamplingConfig(Section):
    """How validation samples."""

    n: PositiveInt = Field(1, description="answers a prompt")
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy")
    top_p: PositiveFloat = Field(1.0, le=1.0, description="nucleus: smallest set of tokens with this probability")
    top_k: NonNegativeInt = Field(0, description="the k likeliest tokens; 0 is off")
    min_p: NonNegativeFloat = Field(
        0.0, le=1.0, description="tokens with this share of the likeliest one's probability"
    )
    repetition_penalty: PositiveFloat = Field(1.0, description="of tokens in prompt or answer: divides; 1 is off")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="off the logit of a token that the answer has")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="the same once for each time")
    stop: list[str] = Field([], description="strings that end an answer; they and their last token stay in its text")
    bad_words: list[str] = Field([], description="never sampled as the tokenizer writes them, with and without a space")
    allowed_token_ids: list[NonNegativeInt] | None = Field(
        None, description="nothing else is sampled (list the end token too); unset: all"
    )


ENGINE_OPTIONS = "options of the engine: `whet algorithms show NAME` lists them"
HYBRID = (
    "sampling and training take turns on the devices: the cache of keys and values is freed while models train; models "
    "trained by fsdp, with their optimizers, are moved to the host while answers are sampled"
)


class RolloutEngineConfig(Section):
    """What samples."""

    name: Annotated[str, Choice(ROLLOUT_ENGINES, "options")] = Field(
        "native", description="registered rollout engine (native, hf), or path/file.py:MyEngine"
    )
    options: dict[str, Any] = Field({}, description=ENGINE_OPTIONS)


class RolloutConfig(SamplingConfig):
    """How answers are sampled."""

    engine: RolloutEngineConfig = RolloutEngineConfig()
    n: PositiveInt = Field(8, description="answers a prompt")
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    length_stages: dict[int, PositiveInt] = Field(
        {},
        description="from which step on an answer may have how many tokens; unset: data.max_response_length",
    )
    dtype: Dtype | None = Field(None, description="unset: model.dtype")
    max_staleness: NonNegativeFloat = Field(0.0, description="steps that a sample may lag behind the weights it trains")
    max_batch_size: PositiveInt = Field(256, description="sequences decoded together")
    free_cache_engine: bool = Field(False, description=HYBRID)
    deadline_seconds: PositiveFloat = Field(3600.0, description="a rollout of one step that takes longer is an error")


class EnvironmentConfig(Section):
    """What answers the model between its turns."""

    name: Annotated[str, Choice(ENVIRONMENTS, "options")] = Field(
        "single_turn", description="registered environment, or path/file.py:function"
    )
    options: dict[str, Any] = Field({}, description="options of the environment")
    max_turns: PositiveInt = Field(8, description="turns after which an episode ends")
    reset_seconds: PositiveFloat = Field(120.0, description="seconds; an environment that takes longer to begin fails")
    step_seconds: PositiveFloat = Field(60.0, description="seconds; an environment that takes longer for a step fails")
    episode_seconds: PositiveFloat = Field(3600.0, description="seconds; an episode that takes longer fails")


class RewardConfig(Section):
    """How answers are judged."""

    function: Annotated[str | list[str] | None, Choice(REWARDS, "kwargs", is_checked=False)] = Field(
        None, description="registered name, module:function or file.py:function; or several"
    )
    weights: list[float] | None = Field(None, description="one for each of several functions; unset: 1 each")
    kwargs: dict[str, Any] = Field({}, description="passed to the function")
    columns: list[str] = Field(
        [], description="numbers that the function returns and an estimator or loss reads: batch columns"
    )
    correct_threshold: float = Field(
        1.0, description="a reward from here on counts as right where the function gives no accuracy"
    )
    timeout_seconds: PositiveFloat = Field(30.0, description="deadline of one item")
    num_workers: NonNegativeInt = Field(2, description="reward processes; 0 scores in the trainer, without a deadline")


MUON = (
    "adamw, or muon (Jordan et al. 2024): torch's, for the matrices between embedding and output, with steps as large "
    "as AdamW's; AdamW for all others"
)
MICRO_BATCH = "tokens a forward pass, per device; unset: what suits the device, and one row at least"


class EngineConfig(Section):
    """What trains a role's model."""

    name: Annotated[str, Choice(ENGINES, "options")] = Field(
        "single",
        description="single: the whole model on every rank; fsdp: weights and optimizer in shards over them; or "
        "path/file.py:MyEngine",
    )
    options: dict[str, Any] = Field({}, description=ENGINE_OPTIONS)
    packing: bool | None = Field(
        None, description="lay rows end to end without padding; unset: what is faster on the device"
    )
    share_prompts: bool = Field(True, description="where rows are packed, read a prompt once for all its answers")
    logits_chunk_tokens: PositiveInt = Field(1024, description="tokens whose logits exist at once")
    compile: bool = Field(False, description="compile the layers: slower to start, faster to run")


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description=MUON)
    lr: NonNegativeFloat = Field(1e-6, description="peak learning rate")
    momentum: NonNegativeFloat = Field(0.95, lt=1.0, description="of muon")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    eps: PositiveFloat = Field(1e-8, description="added to the denominator")
    state_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        "float32", description="of AdamW's two moments; int8 in blocks, as Dettmers et al. 2022"
    )
    weight_rounding: Literal["stochastic", "kahan"] | None = Field(
        None, description="keep AdamW's weights in bfloat16, rounded at random or with their error; unset: float32"
    )
    weight_decay: NonNegativeFloat = Field(0.01, description="decoupled; not on biases and norms")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear growth from 0")
    min_lr_ratio: NonNegativeFloat = Field(0.0, le=1.0, description="where linear and cosine end, as a share of lr")


class ActorConfig(Section):
    """The policy's updates."""

    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig()
    mini_batch_size: PositiveInt | None = Field(
        None, description="prompts an optimizer step; unset: data.train_batch_size"
    )
    epochs: PositiveInt = Field(1, description="passes over a step's samples")
    max_tokens_per_micro_batch: PositiveInt | None = Field(None, description=MICRO_BATCH)
    grad_clip: PositiveFloat | None = Field(1.0, description="largest norm of the gradient")


class CriticConfig(ActorConfig):
    """The value model's updates."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    model_path: str | None = Field(None, description="where the value model starts from; unset: model.path")
    value_loss: Annotated[str, Choice(VALUE_LOSSES, "loss_options")] = Field(
        "clipped", description="registered value loss"
    )
    loss_options: dict[str, Any] = Field({}, description="options of the value loss")
    warmup_steps: NonNegativeInt = Field(0, description="steps in which only the critic learns")


class RefConfig(Section):
    """The frozen reference policy."""

    engine: EngineConfig = EngineConfig()
    model_path: str | None = Field(None, description="unset: model.path as it was at the start")
    max_tokens_per_micro_batch: PositiveInt | None = Field(None, description=MICRO_BATCH)


class TeacherConfig(Section):
    """Who says what the policy's answers are worth to it: `teacher_log_probs`, for CPO and distillation."""

    model_paths: dict[str, str] = Field({}, description="teachers by data source, * all others; empty: the policy")
    hint: str | None = Field(None, description="registered hint source: reference, peer, own, judge; unset: no hint")
    hint_options: dict[str, Any] = Field({}, description="options of the hint source")
    hint_template: str = Field(
        "{{ content }}\n\nHint: {{ hint }}", description="jinja: what stands in the place of the last message"
    )
    max_hint_tokens: PositiveInt = Field(256, description="longer hints are cut")


class TrainerConfig(Section):
    """The run."""

    total_steps: PositiveInt | None = Field(None, description="steps to train; unset: total_epochs over the data")
    total_epochs: PositiveInt = Field(1, description="passes over the data, where total_steps is unset")
    val_freq: int = Field(0, ge=-1, description="validate every so many steps; 0 only before and after, -1 never")
    val_before_train: bool = Field(True, description="validate the model as it comes")
    validation: SamplingConfig = SamplingConfig()
    save_freq: NonNegativeInt = Field(0, description="save every so many steps; 0 only at the end")
    save_limit: PositiveInt | None = Field(
        2, description="newest checkpoints kept, with the best and the last good one; unset: all"
    )
    best_metric: str | None = Field(
        None, description="by which the best checkpoint is; - before it: lower is; unset: val/accuracy, sft -val/loss"
    )
    resume: str = Field("auto", description="auto (the newest in run_dir, if any), never, or the path of a checkpoint")
    max_restarts: NonNegativeInt = Field(
        0, description="times that the run goes on by itself from its newest checkpoint where a worker was lost"
    )
    seed: NonNegativeInt = Field(0, description="of every random draw")
    run_dir: str | None = Field(None, description="unset: runs/<project_name>/<experiment_name>")
    project_name: str = Field("whet", description="for trackers and the run's folder")
    experiment_name: str = Field("default", description="for trackers and the run's folder")
    logger: list[Logger] = Field(["console", "jsonl"], description="where metrics go")
    log_rollouts: int = Field(1, ge=0, description="write rollouts/ every so many steps; 0 never")
    table_rows: NonNegativeInt = Field(8, description="answers that trackers show of what rollouts/ holds; 0 none")
    log_tokens: NonNegativeInt = Field(0, description="write every number of every token every so many steps; 0 never")
    profile: list[PositiveInt] = Field(
        [], description="steps to trace: operators by phase, and memory over time, into profile/"
    )
    callbacks: list[str] = Field([], description="module:function or file.py:function, called after every step")
    loop: str | None = Field(None, description="module:function or file.py:function that replaces the loop")


class TrainConfig(Section):
    """All of `whet train`."""

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
    extra: dict[str, Any] = Field({}, description="yours: whet does not read it")

    command: ClassVar[str] = "train"


class SupervisedDataConfig(RowsConfig):
    """Examples to imitate."""

    messages_key: str = Field(
        "messages", description="field with a whole conversation; where absent, prompt and response are read"
    )
    prompt_key: str = Field("prompt", description="field with the prompt")
    response_key: str = Field("response", description="field with the answer")
    apply_chat_template: bool = Field(True, description="false joins prompt and response as they are")
    chat_template_kwargs: dict[str, Any] = Field({}, description=TEMPLATE_KWARGS)
    max_length: PositiveInt = Field(1024, description="tokens of prompt and response together")
    overlong: Literal["truncate", "drop", "error"] = Field("truncate", description="what happens to a longer example")
    train_batch_size: PositiveInt = Field(64, description="examples an optimizer step")
    shuffle: bool = Field(True, description="a new order every epoch, the same for the same seed")
    hub_deadline_seconds: PositiveFloat = Field(1800.0, description="a set that takes longer to fetch is an error")


class SFTConfig(Section):
    """All of `whet sft`."""

    model: ModelConfig = ModelConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    max_tokens_per_micro_batch: PositiveInt | None = Field(None, description=MICRO_BATCH)
    grad_clip: PositiveFloat | None = Field(1.0, description="largest norm of the gradient")
    trainer: TrainerConfig = TrainerConfig(experiment_name="sft")
    cluster: ClusterConfig = ClusterConfig()
    extra: dict[str, Any] = Field({}, description="yours: whet does not read it")

    command: ClassVar[str] = "sft"


class EvalConfig(Section):
    """All of `whet eval`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1, temperature=0.0)
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    output: str | None = Field(
        None, description="folder for answers.jsonl and summary.json; unset: none is written; cut off, it goes on"
    )
    seed: NonNegativeInt = Field(0, description="of every random draw")
    extra: dict[str, Any] = Field({}, description="yours: whet does not read it")

    command: ClassVar[str] = "eval"


class GenerateConfig(Section):
    """All of `whet generate`."""

    model: ModelConfig = ModelConfig()
    input: list[str | dict[str, Any]] = Field(
        [], description="the prompts, in the forms of data.train_files; unset: data.val_files"
    )
    output: str | None = Field(None, description="the .jsonl file of answers, one a line; goes on where it ends")
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig(n=1)
    chunk_size: PositiveInt = Field(128, description="prompts answered and written together: what a killed run loses")
    seed: NonNegativeInt = Field(0, description="of every random draw")
    extra: dict[str, Any] = Field({}, description="yours: whet does not read it")

    command: ClassVar[str] = "generate"

    @property
    def source_key(self) -> str:
        """Which key names the prompts."""
        return "input" if self.input else "data.val_files"

    @property
    def sources(self) -> list[str | dict[str, Any]]:
        """What that key says."""
        return self.input or self.data.val_files
