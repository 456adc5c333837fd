# SPDX-License-Identifier: Apache-2.0
"""`whet select`: scores the samples of `whet generate`, and keeps the best as rows for `whet sft`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.checkpoints.export import model_folder
from whet.config.algorithm_checks import nearest_divisors
from whet.config.schema import EvalConfig
from whet.data.load import VAL, load_items
from whet.data.sources import DataRow, read_rows, write_rows
from whet.data.supervised import WEIGHT
from whet.errors import ConfigError, DataError, RewardError
from whet.evaluation.answers import Record, by_prompt, output_errors
from whet.models.load import load_tokenizer
from whet.options import is_number
from whet.phases import phase
from whet.rewards.pool import build_scorer, checked
from whet.rollout.rollouts import reward_item
from whet.types import Failure, Prompt


@dataclass(frozen=True)
class Selected:
    """The outcome of `whet select`."""

    output: Path
    num_rows: int
    num_samples: int  # read
    num_chosen: int  # the sum of the rows' weights
    num_prompts: int
    num_empty: int  # prompts without a row
    num_cut: int  # samples that the token limit cut off, at a place where no model would stop
    num_failed: int  # samples that the reward failed on


def select(
    config: EvalConfig,
    samples: Path,
    output: Path,
    *,
    best_of: int | None = None,
    min_score: float = -math.inf,
    reward: Callable[..., Any] | None = None,
    data: Sequence[Mapping[str, Any]] | None = None,
) -> Selected:
    """Keeps the best of each `best_of` samples of a prompt (default: of all) if its score is at least `min_score`;
    among equal scores the first. Equal responses to a prompt become one row, whose weight is their number. The score is
    the sample's field `score`, else the reward function's. `data` replaces `data.val_files`.

    Raises: ConfigError; DataError for samples of other prompts, or of some prompts only; RewardError."""
    if config.model.path is None:
        raise ConfigError("model.path", None, "the model that sampled", "set it")
    if math.isnan(min_score):
        raise ConfigError("--min-score", min_score, "a number", "set one, or leave it out")
    if samples.resolve() == output.resolve():
        raise ConfigError("--output", str(output), "another file than that of the samples", "name one")
    trusted = config.model.trust_remote_code
    with model_folder(config.model.path, trust_remote_code=trusted) as path:
        tokenizer = load_tokenizer(config.model.tokenizer_path or path, path, trust_remote_code=trusted)
        loaded = load_items(config.data, tokenizer, VAL, rows=data, where=config.data.filter, seed=config.seed)
    prompts = {prompt.index: prompt for prompt in checked(loaded, config.reward, reward)}
    rows = by_prompt(_read(samples, prompts, tokenizer))
    size = len(next(iter(rows.values())))  # of each prompt
    if best_of is not None and size % best_of:
        near = " or ".join(map(str, nearest_divisors(size, best_of)))
        raise ConfigError("--best-of", best_of, f"a divisor of {size}, the samples of a prompt", f"try {near}")
    found = [(prompts[index], each) for index, own in rows.items() for each in own]
    with phase("scores"):
        scores = _scores(config, found, reward)
    numbered, made, cut = iter(scores), list[DataRow](), 0
    for index, own in rows.items():
        best = _best([(next(numbered), each) for each in own], best_of or size, min_score)
        counts, firsts = Counter(response for _, response in best), dict[str, float]()
        for score, response in best:
            firsts.setdefault(response, score)
        cut += sum(map(_is_cut, own))
        made += [_row(prompts[index], config, *each, counts[each[0]]) for each in firsts.items()]
    if not made:
        found_ = f"{len(scores)} samples, {cut} cut off, {scores.count(None)} without a score"
        raise DataError(str(samples), found_, f"one with a score of at least {min_score:g} that ended by itself")
    with output_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output = write_rows(output, made)
    empty = len(rows) - len({row["index"] for row in made})
    chosen = int(sum(row[WEIGHT] for row in made))
    return Selected(output, len(made), len(scores), chosen, len(rows), empty, cut, scores.count(None))


def _best(scored: Sequence[tuple[float | None, Record]], size: int, least: float) -> list[tuple[float, str]]:
    """Returns the best score and its response for each `size` samples, if the score is at least `least`."""
    best = list[tuple[float, str]]()
    for start in range(0, len(scored), size):
        block = [(score, each) for score, each in scored[start : start + size] if not _is_cut(each)]
        able = [(score, str(each["response"])) for score, each in block if score is not None and score >= least]
        best += [max(able, key=itemgetter(0))] if able else []
    return best


def _is_cut(sample: Record) -> bool:
    """Tells whether the token limit cut the sample off, at a place where no model would stop."""
    return bool(sample["finish_reason"] != "stop")


def _read(samples: Path, prompts: Mapping[int, Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Record]:
    """Reads the samples of a file, in the order of the prompts.  Raises: DataError."""
    lines = read_rows(samples)
    for number, line in enumerate(lines, start=1):
        if missing := {"index", "response", "finish_reason"} - line.keys():
            expected = "lines that `whet generate` wrote"
            raise DataError(f"{samples}, line {number}", f"no {', '.join(sorted(missing))}", expected)
        prompt, change = prompts.get(line["index"]), "give the words of `whet generate`: model.path, data"
        if prompt is None:
            found = f"is of the prompt {line['index']}"
            raise DataError(f"{samples}, line {number}", found, "a prompt of data.val_files", change)
        text = tokenizer.decode(list(prompt.token_ids))
        if line.get("prompt", text) != text:
            found = f"is of the prompt {line['prompt']!r:.100}"
            raise DataError(f"{samples}, line {number}", found, f"{text!r:.100}, the prompt {prompt.index}", change)
    counts = Counter(line["index"] for line in lines)
    if len(counts) < len(prompts) or len({*counts.values()}) > 1:
        found = f"samples of {len(counts)} of {len(prompts)} prompts, {min(counts.values(), default=0)} or more of each"
        raise DataError(str(samples), found, "as many of each", "finish `whet generate`, by the same command")
    return sorted(lines, key=lambda line: int(line["index"]))


def _scores(
    config: EvalConfig, found: Sequence[tuple[Prompt, Record]], reward: Callable[..., Any] | None
) -> list[float | None]:
    """Scores each sample; None if the reward failed.  Raises: RewardError if it failed on all samples."""
    given = [each.get("score") for _, each in found]
    if all(is_number(each) and math.isfinite(each) for each in given):
        return given
    with closing(build_scorer(config.reward, reward, config.model)) as scorer:
        items = [reward_item(prompt, each["response"], (), {}) for prompt, each in found]
        outcomes = scorer.submit_batch(items).result()
    failures = [each for each in outcomes if isinstance(each, Failure)]
    if len(failures) == len(outcomes):
        message = f"failed on all {len(outcomes)} samples, on the first: {failures[0].message}"
        raise RewardError("reward.function", message, "", "correct it")
    return [None if isinstance(each, Failure) else each.reward for each in outcomes]


def _row(prompt: Prompt, config: EvalConfig, response: str, score: float, weight: int) -> DataRow:
    """Makes a row for `whet sft` and `whet distill`.  Raises: DataError for a prompt with media."""
    if prompt.media:
        raise DataError(f"row {prompt.index}", "has images or videos", "text", "leave such rows out (data.filter)")
    messages = [message.to_dict() for message in prompt.messages]
    named = {"prompt": messages if config.data.apply_chat_template else messages[0]["content"], "response": response}
    more = {"score": score, WEIGHT: float(weight), "data_source": prompt.data_source, "index": prompt.index}
    return {**named, **more}
