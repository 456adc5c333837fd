# SPDX-License-Identifier: Apache-2.0
"""The config of a run's length, validation, checkpoints and logs, and of sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.section import Section, key

LOGGER = (
    "trackers that receive the metrics: console, jsonl, tensorboard, wandb, mlflow, swanlab, trackio, or "
    "path/file.py:MyTracker"
)
SAVE_FREQ = (
    "steps between checkpoints; auto: after the first step, then after a step that ends ten minutes or more after the "
    "last checkpoint; 0: only at the end"
)


class SamplingConfig(Section):
    """Sampling parameters."""

    n: PositiveInt = key(1, "responses a prompt")
    temperature: NonNegativeFloat = key(0.0, "sampling temperature; 0 is greedy")
    top_p: PositiveFloat = key(1.0, "sample from the smallest set of tokens with this total probability", le=1.0)
    top_k: NonNegativeInt = key(0, "sample from the k most likely tokens; 0 is off")
    min_p: NonNegativeFloat = key(0.0, "least probability of a token, relative to the most likely one's", le=1.0)
    repetition_penalty: PositiveFloat = key(1.0, "divides logits > 0 of tokens in prompt or response; 1 is off")
    presence_penalty: float = key(0.0, "subtracted from the logit of each token in the response", ge=-2.0, le=2.0)
    frequency_penalty: float = key(0.0, "subtracted for each time that a token is in the response", ge=-2.0, le=2.0)
    stop: list[str] = key([], "strings that end a response; the string stays in the response")
    bad_words: list[str] = key([], "strings that are never sampled, with and without a space before them")
    allowed_token_ids: list[NonNegativeInt] | None = key(None, "ids of the only tokens to sample; add the end token")


class TrainerConfig(Section):
    """The length, validation, checkpoints and logs of a run."""

    total_steps: PositiveInt | None = key(None, "steps of the run; unset: total_epochs passes over the data")
    total_epochs: PositiveInt = key(1, "passes over the data, where total_steps is unset")
    val_freq: int = key(0, "steps between validations; 0: only before and after training, -1: never", ge=-1)
    val_before_train: bool = key(True, "validate the initial model")
    validation: SamplingConfig = SamplingConfig()
    save_freq: NonNegativeInt | Literal["auto"] = key("auto", SAVE_FREQ)
    save_limit: PositiveInt | None = key(
        2, "newest checkpoints to keep, besides the best and the last good; unset: all"
    )
    best_metric: str | None = key(
        None, "metric that selects the best checkpoint; -NAME: lower is better; unset: val/accuracy or -val/loss"
    )
    resume: str = key("auto", "auto: newest checkpoint, if any; never; overwrite: delete the earlier run; or a path")
    hub_repo: str | None = key(
        None, "repository owner/name on the hub for each checkpoint and, at the end, the exported model; is private"
    )
    max_restarts: NonNegativeInt = key(0, "restarts from the newest checkpoint after a worker is lost")
    seed: NonNegativeInt = key(0, "seed of all random draws")
    run_dir: str | None = key(None, "folder of the run; unset: runs/<project_name>/<experiment_name>")
    project_name: str = key("whet", "project name in trackers and in the default run_dir")
    experiment_name: str = key("default", "run name in trackers and in the default run_dir")
    logger: list[str] = key(["console", "jsonl"], LOGGER)
    log_rollouts: int = key(1, "steps between files in rollouts/; 0: none", ge=0)
    table_rows: NonNegativeInt = key(8, "trajectories that trackers show in a table; 0: none")
    log_tokens: NonNegativeInt = key(0, "steps between files in tokens/ with every column of every token; 0: none")
    profile: list[PositiveInt] = key([], "steps to profile into profile/: operators by phase, and memory over time")
    callbacks: list[str] = key([], "functions called after every step, as module:function or file.py:function")
    loop: str | None = key(None, "function that replaces the training loop, as module:function or file.py:function")
