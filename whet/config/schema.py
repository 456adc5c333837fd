# SPDX-License-Identifier: Apache-2.0
"""Every setting of whet, its default and its meaning. Options of registered functions live in their signatures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

Dtype = Literal["float32", "bfloat16"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class Section(BaseModel):
    """A frozen part of the config, read like an object (`c.actor.epochs`) or like a dict (`c["actor"]["epochs"]`)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), coerce_numbers_to_str=True
    )
    command: ClassVar[str]  # of a whole config: who reads it

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """One string where a list is expected is a list of one; true and false are no numbers."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and get_origin(annotation) is list:
            return [value]
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("true and false are no numbers")
        return value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # keys, as a dict gives them; pydantic gives pairs
        return iter(self.__dict__)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where there is no such key."""
        return self.__dict__.get(key, default)

    def keys(self) -> list[str]:
        """The names in this section, in the order in which they are declared."""
        return list(self.__dict__)

    def items(self) -> list[tuple[str, Any]]:
        """Pairs of name and value, in the order in which they are declared."""
        return list(self.__dict__.items())


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name."""

    path: str | None = Field(None, description="folder or hub name of the model to train")
    tokenizer_path: str | None = Field(None, description="where the tokenizer lies, if not in model.path")
    dtype: Dtype = Field(
        "float32", description="what forward and backward compute in; bfloat16 keeps float32 master weights"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")


class DataConfig(Section):
    """The prompts."""

    train_files: list[str] = Field([], description=".jsonl, .json or .parquet files, read in this order")
    val_files: list[str] = Field([], description="files of the held-out prompts")
    prompt_key: str = Field("prompt", description="field with the prompt: text, or a list of messages")
    answer_key: str | None = Field(
        None, description="field with the answer; unset: reward_model.ground_truth, else answer"
    )
    data_source: str | None = Field(None, description="names the source of rows that do not say it themselves")
    system_prompt: str | None = Field(None, description="system message put before every prompt that has none")
    format_prompt: str | None = Field(
        None, description="jinja template, or a .jinja file; sees `content` and the row's fields"
    )
    apply_chat_template: bool = Field(True, description="false feeds the prompt text to the model as it is")
    chat_template_kwargs: dict[str, Any] = Field({}, description="passed on to the chat template")
    train_batch_size: PositiveInt = Field(32, description="prompts a step")
    val_max_prompts: PositiveInt | None = Field(None, description="validate on the first so many prompts only")
    max_prompt_length: PositiveInt = Field(512, description="tokens")
    max_response_length: PositiveInt = Field(512, description="tokens")
    overlong_prompts: Literal["drop", "error"] = Field("drop", description="what happens to a prompt over the limit")
    difficulty_key: str | None = Field(None, description="field with how hard a row is, as a number; unset: use all")
    difficulty_window: tuple[float, float] = Field((0.0, 1.0), description="train on rows strictly between these")
    shuffle: bool = Field(True, description="a new order every epoch, the same for the same seed")


class SamplingConfig(Section):
    """How validation samples."""

    n: PositiveInt = Field(1, description="answers a prompt")
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy")
    top_p: PositiveFloat = Field(1.0, le=1.0, description="nucleus")
    top_k: NonNegativeInt = Field(0, description="0 is off")


class RolloutConfig(Section):
    """How answers are sampled."""

    name: Literal["native", "hf"] = Field("native", description="rollout engine")
    n: PositiveInt = Field(8, description="answers a prompt")
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    top_p: PositiveFloat = Field(1.0, le=1.0, description="nucleus: smallest set of tokens with this probability")
    top_k: NonNegativeInt = Field(0, description="the k likeliest tokens; 0 is off")
    length_stages: dict[int, PositiveInt] = Field(
        {},
        description="from which step on an answer may have how many tokens; unset: data.max_response_length",
    )
    dtype: Dtype | None = Field(None, description="unset: model.dtype")
    max_staleness: NonNegativeFloat = Field(0.0, description="steps that a sample may lag behind the weights it trains")
    compile: bool = Field(False, description="compile the decode step: slower to start, faster to run")
    max_batch_size: PositiveInt = Field(256, description="sequences decoded together")
    kv_cache_bytes: PositiveInt = Field(2**30, description="memory for keys and values")
    deadline_seconds: PositiveFloat = Field(3600.0, description="a rollout of one step that takes longer is an error")


class EnvironmentConfig(Section):
    """What answers the model between its turns."""

    name: str = Field("single_turn", description="registered environment, or path/file.py:function")
    options: dict[str, Any] = Field({}, description="options of the environment")
    max_turns: PositiveInt = Field(8, description="turns after which an episode ends")


class RewardConfig(Section):
    """How answers are judged."""

    function: str | list[str] | None = Field(
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


class KLConfig(Section):
    """Distance to the reference policy."""

    where: Literal["none", "reward", "loss"] = Field("none", description="what the KL term is added to")
    form: str = Field(
        "k3",
        description="k1, k2, k3, abs, with + the value of the form and the gradient of k2; full over the vocabulary",
    )
    coef: NonNegativeFloat = Field(0.001, description="its weight")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="whether the weight follows a target")
    target: PositiveFloat = Field(0.1, description="KL that the adaptive controller aims at")
    horizon: PositiveInt = Field(10_000, description="sequences over which the adaptive controller acts")


class FilterConfig(Section):
    """Dynamic sampling: which groups are worth training on."""

    name: str | None = Field(None, description="registered filter, such as dapo; unset: every group is")
    options: dict[str, Any] = Field({}, description="options of the filter")
    metric: str = Field("accuracy", description="accuracy, reward, or the name of a part of the reward")
    max_refills: NonNegativeInt = Field(
        4, description="batches of prompts tried again before training on what there is"
    )


class OverlongConfig(Section):
    """DAPO's soft penalty for answers near the limit."""

    penalty: NonNegativeFloat = Field(0.0, description="the most that is taken from a reward; 0 is off")
    buffer_length: PositiveInt = Field(64, description="tokens before the limit over which the penalty grows")


class CorrectionConfig(Section):
    """Sampler and trainer compute other probabilities of the same tokens: what is done about it."""

    old_log_probs: Literal["trainer", "rollout"] = Field(
        "trainer", description="who says what the policy was before the update; rollout saves a pass"
    )
    weight: str | None = Field(None, description="registered weight of each token in the loss, such as importance")
    weight_options: dict[str, Any] = Field({}, description="options of the weight")
    rejection: str | None = Field(None, description="registered rule by which tokens are not trained on")
    rejection_options: dict[str, Any] = Field({}, description="options of the rejection")


Over = Literal["none", "group", "batch"]


class ShapingConfig(Section):
    """What happens to rewards before the estimator, and to advantages after it."""

    norm_mean: Over | Literal["running"] = Field(
        "none", description="whose mean score is taken off; running: all steps"
    )
    norm_std: Over | Literal["running"] = Field("none", description="whose deviation of scores rewards are divided by")
    reward_clip: PositiveFloat | None = Field(None, description="largest reward of a token, either sign")
    advantage_clip: PositiveFloat | None = Field(None, description="largest advantage, either sign")
    whiten_advantages: bool = Field(False, description="mean 0 and deviation 1 over the sampled tokens of a step")


class EntropyConfig(Section):
    """An entropy bonus that keeps the entropy above a target."""

    target: NonNegativeFloat | None = Field(None, description="unset: algorithm.entropy_coef stays as it is")
    delta: PositiveFloat = Field(1e-4, description="how much the bonus' weight moves a step")
    highest: PositiveFloat = Field(5e-3, description="the largest weight")


class AlgorithmConfig(Section):
    """The mathematics of one step."""

    adv_estimator: str = Field("grpo", description="registered name, module:function or file.py:function")
    adv_options: dict[str, Any] = Field({}, description="options of the estimator")
    policy_loss: str = Field("ppo_clip", description="registered name, module:function or file.py:function")
    loss_options: dict[str, Any] = Field({}, description="options of the loss")
    loss_agg_mode: Aggregation | None = Field(
        None, description="unset: what the loss or estimator fixes, else token-mean"
    )
    loss_fixed_length: PositiveInt | None = Field(
        None, description="F of seq-mean-token-sum-norm; unset: data.max_response_length"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    filter: FilterConfig = FilterConfig()
    overlong: OverlongConfig = OverlongConfig()
    shaping: ShapingConfig = ShapingConfig()
    entropy: EntropyConfig = EntropyConfig()
    truncated: Literal["keep", "drop", "zero"] = Field(
        "keep", description="answers cut off at the limit: drop takes them out of the group, zero trains on none"
    )


MUON = (
    "adamw, or muon (Jordan et al. 2024): torch's, for the matrices between embedding and output, with steps as large "
    "as AdamW's; AdamW for all others"
)
MICRO_BATCH = "tokens a forward pass, per device; unset: what suits the device, and one row at least"


class EngineConfig(Section):
    """What trains a role's model."""

    name: Literal["single"] = Field("single", description="training engine")
    packing: bool | None = Field(
        None, description="lay rows end to end without padding; unset: what is faster on the device"
    )
    share_prompts: bool = Field(True, description="where rows are packed, read a prompt once for all its answers")
    logits_chunk_tokens: PositiveInt = Field(1024, description="tokens whose logits exist at once")


class OptimConfig(Section):
    """An optimizer and its schedule."""

    name: Literal["adamw", "muon"] = Field("adamw", description=MUON)
    lr: NonNegativeFloat = Field(1e-6, description="peak learning rate")
    momentum: NonNegativeFloat = Field(0.95, lt=1.0, description="of muon")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    eps: PositiveFloat = Field(1e-8, description="added to the denominator")
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
    value_loss: str = Field("clipped", description="registered value loss")
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
    save_limit: PositiveInt | None = Field(2, description="newest checkpoints kept, and the best; unset: all")
    best_metric: str | None = Field(
        None, description="by which the best checkpoint is; - before it: lower is; unset: val/accuracy, sft -val/loss"
    )
    resume: str = Field("auto", description="auto (the newest in run_dir, if any), never, or the path of a checkpoint")
    seed: NonNegativeInt = Field(0, description="of every random draw")
    run_dir: str | None = Field(None, description="unset: runs/<project_name>/<experiment_name>")
    project_name: str = Field("whet", description="for trackers and the run's folder")
    experiment_name: str = Field("default", description="for trackers and the run's folder")
    logger: list[Literal["console", "jsonl"]] = Field(["console", "jsonl"], description="where metrics go")
    log_rollouts: int = Field(1, ge=0, description="write rollouts/ every so many steps; 0 never")
    log_tokens: NonNegativeInt = Field(0, description="write every number of every token every so many steps; 0 never")
    callbacks: list[str] = Field([], description="module:function or file.py:function, called after every step")
    loop: str | None = Field(None, description="module:function or file.py:function that replaces the loop")


class ClusterConfig(Section):
    """Where the roles run."""

    backend: Literal["local"] = Field("local", description="in this process, or in processes on this machine")
    processes: PositiveInt = Field(1, description="training processes; 1 stays in this one")
    deadline_seconds: PositiveFloat = Field(1800.0, description="the longest wait for one call of a worker")


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


class SupervisedDataConfig(Section):
    """Examples to imitate."""

    train_files: list[str] = Field([], description=".jsonl, .json or .parquet files")
    val_files: list[str] = Field([], description="held-out examples")
    messages_key: str = Field(
        "messages", description="field with a whole conversation; where absent, prompt and response are read"
    )
    prompt_key: str = Field("prompt", description="field with the prompt")
    response_key: str = Field("response", description="field with the answer")
    apply_chat_template: bool = Field(True, description="false joins prompt and response as they are")
    max_length: PositiveInt = Field(1024, description="tokens of prompt and response together")
    overlong: Literal["truncate", "drop", "error"] = Field("truncate", description="what happens to a longer example")
    train_batch_size: PositiveInt = Field(64, description="examples an optimizer step")
    shuffle: bool = Field(True, description="a new order every epoch, the same for the same seed")


class SFTConfig(Section):
    """All of `whet sft`."""

    model: ModelConfig = ModelConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    max_tokens_per_micro_batch: PositiveInt | None = Field(None, description=MICRO_BATCH)
    grad_clip: PositiveFloat | None = Field(1.0, description="largest norm of the gradient")
    trainer: TrainerConfig = TrainerConfig()
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
    output: str | None = Field(None, description="folder for answers.jsonl and summary.json; unset: none is written")
    seed: NonNegativeInt = Field(0, description="of every random draw")
    extra: dict[str, Any] = Field({}, description="yours: whet does not read it")

    command: ClassVar[str] = "eval"
