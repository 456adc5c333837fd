# SPDX-License-Identifier: Apache-2.0
"""answers.jsonl: one JSON object an answer, as `whet eval` and validation write them (`readable`)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet import files
from whet.data.sources import read_rows
from whet.errors import DataError, StorageError
from whet.tracking.jsonl import json_line
from whet.types import Trajectory

log = logging.getLogger(__name__)
Row = dict[str, Any]

NAME, PARTIAL, CONFIG = "answers.jsonl", "answers.partial.jsonl", "config.yaml"
FIELDS = {"index", "data_source", "prompt", "ground_truth", "reward", "accuracy", "failure"}


def read_answers(path: Path) -> list[Row]:
    """The answers in a file, or in the folder that an evaluation wrote.  Raises: DataError."""
    if path.is_dir():
        if not (path / NAME).exists():
            unfinished = (path / PARTIAL).exists()
            hint = (
                "its evaluation was cut off: run it again" if unfinished else f"`whet eval` with output={path} makes it"
            )
            raise DataError(f"{path} has no {NAME}; {hint}")
        path = path / NAME
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path} has no answers")
    for number, row in enumerate(rows, start=1):
        if missing := FIELDS - row.keys():
            raise DataError(
                f"{path}:{number}: no {', '.join(sorted(missing))}; expected answers as `whet eval` or the "
                "validation of a run writes them"
            )
    return rows


def readable(answer: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """An answer as a person reads it: text, reward, and why it failed if it did."""
    sampled = [token for turn in answer.turns for token in turn.token_ids]
    last = answer.turns[-1] if answer.turns else None
    return {
        "uid": answer.uid,
        "index": answer.prompt.index,
        "data_source": answer.prompt.data_source,
        "prompt": tokenizer.decode(list(answer.prompt.token_ids)),
        "response": tokenizer.decode(list(_response_ids(answer))),
        "ground_truth": answer.prompt.ground_truth,
        "extracted": answer.extracted,
        "reward": None if answer.failure is not None else answer.score,
        "accuracy": answer.accuracy,
        "parts": dict(answer.parts),
        "tokens": len(sampled),
        "turns": len(answer.turns),
        "finish_reason": last.finish_reason if last is not None else None,
        "stop": last.stop if last is not None else None,
        "mean_log_prob": _mean([value for turn in answer.turns for value in turn.log_probs]),
        "policy_version": last.policy_version if last is not None else None,
        "failure": None if answer.failure is None else asdict(answer.failure),
    }


def by_prompt(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """The answers to each prompt, by the prompt's row number in the data."""
    prompts: dict[int, list[Row]] = {}
    for row in rows:
        prompts.setdefault(row["index"], []).append(row)
    return prompts


class Journal:
    """The answers of an evaluation that runs, on disk after every chunk: one that was cut off goes on where it was.

    With `resume`, `rows` are those that an earlier evaluation with the same `settings` (config.yaml) gave to the same
    prompts. An answers.jsonl from before stays until `finish`.
    """

    def __init__(self, folder: Path, settings: str, prompts: Mapping[int, str], n: int, *, resume: bool) -> None:
        self.folder = folder
        with output_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.rows = self._earlier(settings, prompts, n) if resume else []
            files.write(folder / CONFIG, settings)
            files.write(folder / PARTIAL, _lines(self.rows))
        if self.rows:
            log.info("%s has %d of %d prompts from before; going on", folder, len(self.rows) // n, len(prompts))

    def add(self, rows: Sequence[Row]) -> None:
        """Appends the answers to whole prompts."""
        with output_errors(self.folder), (self.folder / PARTIAL).open("a", encoding="utf-8") as file:
            file.write(_lines(rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Makes the file answers.jsonl, and writes summary.json."""
        with output_errors(self.folder):
            (self.folder / PARTIAL).replace(self.folder / NAME)
            files.write(self.folder / "summary.json", json.dumps(summary, indent=1))

    def _earlier(self, settings: str, prompts: Mapping[int, str], n: int) -> list[Row]:
        config, partial = self.folder / CONFIG, self.folder / PARTIAL
        if not partial.exists() or not config.exists() or config.read_text(encoding="utf-8") != settings:
            return []
        try:
            lines = partial.read_text(encoding="utf-8").split("\n")[:-1]  # behind the last line end one may be torn
            answered = by_prompt(json.loads(line) for line in lines)
            whole = [all_ for at, all_ in answered.items() if len(all_) == n and all_[0]["prompt"] == prompts.get(at)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%r); all prompts are answered again", partial, error)
            return []
        return [row for rows in whole for row in rows]


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Raises: StorageError where the file or folder that `output` names cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"output={path}: {error.strerror}; expected a place that can be written to: name another one"
        ) from error


def _lines(rows: Iterable[Row]) -> str:
    return "".join(map(json_line, rows))


def _response_ids(answer: Trajectory) -> tuple[int, ...]:
    """Everything after the prompt, where the context was never rewritten; the last turn's view where it was."""
    if not answer.turns:
        return ()
    last = answer.turns[-1]
    whole = last.context_ids + last.token_ids
    start = len(answer.prompt.token_ids) if whole[: len(answer.prompt.token_ids)] == answer.prompt.token_ids else 0
    return whole[start:]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
