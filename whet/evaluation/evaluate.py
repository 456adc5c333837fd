# SPDX-License-Identifier: Apache-2.0
"""`whet eval`: samples responses to a data set, scores them, writes them to a file, and computes metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from whet import devices
from whet.checkpoints.export import find_model, model_folder
from whet.config.checks import check_context
from whet.config.digests import digests
from whet.config.load import to_yaml
from whet.config.schema import DataConfig, EvalConfig, ModelConfig, RolloutConfig
from whet.data.load import VAL, load_items, numbered_rows
from whet.data.loader import PromptSource
from whet.data.prompts import UNKNOWN
from whet.data.sources import DataRow, write_rows
from whet.environments.toolbox import with_tools
from whet.errors import ConfigError
from whet.evaluation.answers import Journal, Record, by_prompt, readable
from whet.evaluation.estimators import MeanEstimate, best_at_k, estimate, maj_at_k, mean_at_n, pass_at_k
from whet.models.load import context_length, load_tokenizer, stop_token_ids, torch_dtype
from whet.phases import counted, phase
from whet.planning.dtypes import with_dtypes
from whet.rewards.pool import checked, scorer_of
from whet.rollout.build import (
    check_media,
    check_sampling,
    chosen_engine,
    load_model,
    open_environments,
    rollout_engine,
    sampling_params,
    stages_of,
)
from whet.rollout.driver import Driver
from whet.rollout.protocol import Restarts, RolloutEngine, SamplingParams
from whet.rollout.replicas import Restarted
from whet.rollout.rollouts import Rollouts
from whet.types import Prompt, Scorer, trajectories_of

log = logging.getLogger(__name__)
BATCHES_PER_CHUNK = 2  # more prompts use the engine better; with fewer, an interruption loses less


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metrics of a model; all prompts weigh the same. A failed trajectory counts as wrong.

    `metrics` has `mean@n`, `best@n` and `pass@k` of the accuracy, and `reward`; also `maj@k`, if the reward function
    returns the extracted answer. `by_data_source` has the same for the prompts of each source."""

    num_prompts: int
    n: int  # responses per prompt
    failures: int
    truncated: float  # fraction of responses that reached data.max_response_length
    mean_response_tokens: float
    metrics: dict[str, MeanEstimate]
    by_data_source: dict[str, dict[str, MeanEstimate]]
    answers: list[Record] = field(default_factory=list)

    def __repr__(self) -> str:
        shown = (f"{name}={each.value:.4g} ({each.low:.4g} to {each.high:.4g})" for name, each in self.metrics.items())
        return f"Evaluation({', '.join([f'{self.num_prompts} prompts x {self.n}', *shown])})"

    @property
    def accuracy(self) -> float:
        """The value of mean@n."""
        return self.metrics[f"mean@{self.n}"].value

    def summary(self) -> dict[str, object]:
        """The fields except `answers`, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "answers"}


def evaluate(
    config: EvalConfig, *, reward: Callable[..., Any] | None = None, data: Sequence[Mapping[str, Any]] | None = None
) -> Evaluation:
    """Evaluates a model, a checkpoint or a run's newest checkpoint. If `output` is set, writes answers.jsonl,
    summary.json and config.yaml there, and continues an interrupted evaluation.

    Raises: WhetError for every error that a user can correct, such as a reward that fails on every response.
    """
    config = with_dtypes(config)
    if config.model.path is None:
        expected = "a Hugging Face model folder, a checkpoint or a hub name"
        raise ConfigError("model.path", None, expected, "set it")
    trusted = config.model.trust_remote_code
    with ExitStack() as started:
        scorer = scorer_of(config, reward)
        if scorer is not None:
            started.callback(scorer.close)
        model_path = started.enter_context(model_folder(config.model.path, trust_remote_code=trusted))
        tokenizer = load_tokenizer(config.model.tokenizer_path or model_path, model_path, trust_remote_code=trusted)
        check_context(config, context_length(model_path, trust_remote_code=trusted))
        files = with_tools(config.data, config.environment)
        loaded = load_items(files, tokenizer, VAL, rows=data, where=files.filter, seed=config.seed)
        first = replace(loaded, items=loaded.items[: config.data.val_max_prompts])
        prompts = checked(first, config.reward, reward)
        check_media(config.rollout, tokenizer, prompts)
        engine = open_engine(config.rollout, config.model, model_path)
        started.callback(engine.close)
        n = config.rollout.n
        stop_ids = stop_token_ids(model_path, tokenizer, config.data.template_options)
        params = sampling_params(config.rollout, config.data.max_response_length, stop_ids, tokenizer)
        rollouts = _rollouts(config, tokenizer, engine, scorer, params, started)
        journal, rows_of_files = None, list[tuple[int, DataRow]]()
        if config.output is not None and config.data.difficulty_key is not None and data is None:
            rows_of_files += numbered_rows(config.data, VAL)
        if config.output is not None:
            texts = {prompt.index: str(tokenizer.decode(list(prompt.token_ids))) for prompt in prompts}
            journal = Journal(Path(config.output), _settings(config, prompts), texts, n, resume=reward is None)
        answers = [] if journal is None else [*journal.rows]
        done = {row["index"] for row in answers}
        left = [prompt for prompt in prompts if prompt.index not in done]
        size = max(1, BATCHES_PER_CHUNK * config.rollout.max_batch_size // n)  # number of prompts between two writes
        started.enter_context(phase("responses"))
        for chunk in (left[start : start + size] for start in range(0, len(left), size)):
            groups = rollouts.sample(chunk, n, params, step=0, purpose="evaluation")
            rows = [readable(each, tokenizer) for each in trajectories_of(groups)]
            if journal is not None:
                journal.add(rows)
            rollouts.failures.record(groups)
            answers += rows
            counted(len(answers), len(prompts) * n)
    evaluation = summarise(answers, seed=config.seed)
    if journal is not None:
        journal.finish(evaluation.summary())
        if rows_of_files:
            _write_pass_rates(config.data, rows_of_files, journal.folder, answers)
    return evaluation


def _rollouts(
    config: EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: RolloutEngine,
    scorer: Scorer | None,
    params: SamplingParams,
    undo: ExitStack,
) -> Rollouts:
    driver = Driver(engine, open_environments(config.environment, undo), config.rollout.deadline_seconds)
    return Rollouts(
        PromptSource(),
        driver,
        stages_of(config, tokenizer),
        scorer,
        tokenizer,
        n=config.rollout.n,
        params=params,
        seed=config.seed,
        correct_threshold=config.reward.correct_threshold,
    )


def _write_pass_rates(
    data: DataConfig, rows: Sequence[tuple[int, DataRow]], folder: Path, answers: Sequence[Record]
) -> None:
    """Writes numbered rows to rows.jsonl. The field `data.difficulty_key` of a row is the mean accuracy of its
    responses. Rows without responses are left out, and counted in the log."""
    key, prompts, rated = str(data.difficulty_key), by_prompt(answers), list[DataRow]()
    for index, row in ((index, row) for index, row in rows if index in prompts):
        found, own = prompts[index], row.get("extra_info")
        rate: DataRow = {key: fmean(each["accuracy"] or 0.0 for each in found)}
        rate |= {"extra_info": {**own, **rate}} if isinstance(own, Mapping) and key in own else {}  # it is read first
        source = {data.data_source_key: found[0]["data_source"]} if found[0]["data_source"] != UNKNOWN else {}
        rated.append({**source, **row, **rate})
    written = write_rows(folder / "rows.jsonl", rated)
    log.info("%s has %d of %d rows with their %s", written, len(rated), len(rows), key)


def open_engine(rollout: RolloutConfig, model: ModelConfig, model_path: str, *, version: int = 0) -> RolloutEngine:
    """Opens a rollout engine that samples with the model in the folder `model_path`, as policy version `version`. If
    its server dies or hangs, the engine restarts it."""
    own, tokenizer, device = model.model_copy(update={"path": model_path}), model.tokenizer_path, devices.here()
    rollout = chosen_engine(rollout, own)
    check_sampling(rollout, {"rollout": rollout})
    load = cache(partial(load_tokenizer, tokenizer or model_path, trust_remote_code=model.trust_remote_code))
    dtype = torch_dtype(rollout.dtype)
    engine = rollout_engine(rollout, dtype, load, device, own)
    load_model(engine, own, device, dtype, version=version)
    return cast(RolloutEngine, Restarted(engine)) if isinstance(engine, Restarts) else engine


def summarise(answers: Sequence[Record], *, seed: int = 0) -> Evaluation:
    """Computes the metrics of scored records. Every prompt must have the same number of records."""
    prompts = list(by_prompt(answers).values())
    sources = sorted({rows[0]["data_source"] for rows in prompts})
    return Evaluation(
        num_prompts=len(prompts),
        n=len(prompts[0]),
        failures=sum(row["failure"] is not None for row in answers),
        truncated=fmean(row["finish_reason"] == "length" for row in answers),
        mean_response_tokens=fmean(row["tokens"] for row in answers),
        metrics=_metrics(prompts, seed),
        by_data_source={
            source: _metrics([rows for rows in prompts if rows[0]["data_source"] == source], seed) for source in sources
        },
        answers=list(answers),
    )


def _settings(config: EvalConfig, prompts: Sequence[Prompt]) -> str:
    """Writes the config as YAML, after the weights and the digests of rows and code as comments."""
    read = [f"# {name}: {digest}" for name, digest in digests(config, (), prompts).items()]
    return "\n".join([f"# {_weights(str(config.model.path))}", *read, to_yaml(config)])


def _weights(path: str) -> str:
    """Describes the weights at `path`: the folder, and the time of its last change."""
    found = Path(find_model(path)).expanduser()
    written = max((file.stat().st_mtime for file in found.glob("*")), default=None)
    when = "" if written is None else f", written {datetime.fromtimestamp(written, UTC).isoformat(timespec='seconds')}"
    return f"the weights of {found}{when}"


def _metrics(prompts: Sequence[Sequence[Record]], seed: int) -> dict[str, MeanEstimate]:
    accuracy = np.array([[row["accuracy"] or 0.0 for row in rows] for rows in prompts])  # None after a failure
    texts = [[row["extracted"] for row in rows] for rows in prompts]
    n = accuracy.shape[1]
    several = [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] * (n > 1)
    values = {f"mean@{n}": mean_at_n(accuracy), f"best@{n}": best_at_k(accuracy, n)}
    values |= {f"pass@{k}": pass_at_k(accuracy, k) for k in (1, *several)}
    if any(text is not None for row in texts for text in row):
        values |= {f"maj@{k}": maj_at_k(accuracy, texts, k, seed=seed) for k in several}
    rewards = np.array([fmean(row["reward"] or 0.0 for row in rows) for rows in prompts])
    estimates = {name: estimate(each, bounds=(0.0, 1.0), seed=seed) for name, each in values.items()}
    return {**estimates, "reward": estimate(rewards, seed=seed)}
