# SPDX-License-Identifier: Apache-2.0
"""Reads and writes answers.jsonl: one JSON object per trajectory, from `whet eval` and validations (`readable`)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet import files
from whet.data.sources import read_rows
from whet.errors import DataError, StorageError
from whet.tracking.tracker import json_line
from whet.types import Media, Trajectory

log = logging.getLogger(__name__)
Record = dict[str, Any]  # a line of answers.jsonl

NAME, PARTIAL, CONFIG = "answers.jsonl", "answers.partial.jsonl", "config.yaml"
KINDS: dict[str, type | UnionType] = {
    "index": int,
    "reward": float | int | None,
    "accuracy": float | int | None,
    "parts": dict | None,
}
FIELDS = {"index", "data_source", "prompt", "ground_truth", "reward", "accuracy", "failure"}


def read_answers(path: Path) -> list[Record]:
    """Reads an answers.jsonl. `path` is the file or the folder of an evaluation.  Raises: DataError."""
    if path.is_dir():
        if not (path / NAME).exists():
            change = f"run `whet eval` with output={path}, which writes it"
            if (path / PARTIAL).exists():
                change = "run the interrupted evaluation again, which then continues"
            raise DataError(str(path), f"no {NAME}", "the folder of an evaluation", change)
        path = path / NAME
    rows = read_rows(path)
    if not rows:
        raise DataError(str(path), "no responses", "at least one line")
    for number, row in enumerate(rows, start=1):
        missing = FIELDS - row.keys()
        wrong = [name for name, kind in KINDS.items() if not isinstance(row.get(name), kind)]
        if missing or wrong:
            found = f"no {', '.join(sorted(missing))}" if missing else f"{wrong[0]} is {row.get(wrong[0])!r:.50}"
            expected = "responses as `whet eval` or the validation of a run writes them"
            raise DataError(f"{path}, line {number}", found, expected)
    return rows


def readable(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Record:
    """Makes the record of a trajectory for answers.jsonl: texts, reward, and the failure if it failed."""
    sampled = [token for turn in trajectory.turns for token in turn.token_ids]
    log_probs = [value for turn in trajectory.turns for value in turn.log_probs]
    last = trajectory.turns[-1] if trajectory.turns else None
    media = trajectory.prompt.media if last is None else last.media
    versions = {version for turn in trajectory.turns for version, _ in turn.versions}
    return {
        "uid": trajectory.uid,
        "index": trajectory.prompt.index,
        "data_source": trajectory.prompt.data_source,
        "prompt": tokenizer.decode(list(trajectory.prompt.token_ids)),
        "response": tokenizer.decode(list(_response_ids(trajectory))),
        **({"media": [_shown(each) for each in media]} if media else {}),
        "ground_truth": trajectory.prompt.ground_truth,
        "extracted": trajectory.extracted,
        "reward": None if trajectory.failure is not None else trajectory.score,
        "accuracy": trajectory.accuracy,
        "parts": dict(trajectory.parts),
        **({"logged": dict(trajectory.logged)} if trajectory.logged else {}),
        "tokens": len(sampled),
        "turns": len(trajectory.turns),
        **({"limit": trajectory.limit} if trajectory.limit not in (None, "length") else {}),
        "finish_reason": last.finish_reason if last is not None else None,
        "stop": last.stop if last is not None else None,
        "mean_log_prob": math.fsum(log_probs) / len(log_probs) if log_probs else None,
        "policy_version": last.policy_version if last is not None else None,
        **({"policy_versions": [turn.versions for turn in trajectory.turns]} if len(versions) > 1 else {}),
        "failure": None if trajectory.failure is None else asdict(trajectory.failure),
        **({"steps": _steps(trajectory, tokenizer)} if len(trajectory.messages) > 1 or trajectory.fields else {}),
    }


def _shown(media: Media) -> Record:
    """Makes the record of a media: kind, digest, and path (for frames, their paths); None for bytes in memory."""
    paths = [each if isinstance(each, str) else None for each in media.sources]
    source = paths if isinstance(media.source, tuple) else paths[0]
    return {"kind": media.kind, "digest": media.digest, "source": source}


def _steps(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Record]:
    """Makes the records of an episode's turns: observation, action, reward and state."""
    steps = []
    for turn in trajectory.turns:
        step: Record = {
            "observation": [message.to_dict() for message in turn.observation],
            "action": tokenizer.decode(list(turn.token_ids), skip_special_tokens=True),
            "reward": turn.reward,
        }
        named = {"state": turn.state_key, "agent": turn.agent, "player": turn.player}
        steps.append({**step, **{name: value for name, value in named.items() if value}})
    end = [*takewhile(lambda message: message.role != "assistant", reversed(trajectory.messages))]
    if steps and end:  # after the last turn
        steps[-1]["end"] = [message.to_dict() for message in reversed(end)]
    return steps


def by_prompt(rows: Iterable[Record]) -> dict[int, list[Record]]:
    """Groups the records by prompt. The key is the prompt's row number in the data."""
    prompts: dict[int, list[Record]] = {}
    for row in rows:
        prompts.setdefault(row["index"], []).append(row)
    return prompts


class Journal:
    """The records of a running evaluation, written after every chunk, so that an interrupted evaluation can resume.

    With `resume`, `rows` begins with records from an interrupted evaluation of the same prompts with the same
    `settings` (config.yaml), without those of failed prompts. An older answers.jsonl stays until `finish`."""

    def __init__(self, folder: Path, settings: str, prompts: Mapping[int, str], n: int, *, resume: bool) -> None:
        self.folder = folder
        with output_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.rows = self._earlier(settings, prompts, n) if resume else []
            files.write(folder / CONFIG, settings)
            files.write(folder / PARTIAL, _lines(self.rows))
        if self.rows:
            log.info("%s has %d of %d prompts already; continuing", folder, len(self.rows) // n, len(prompts))

    def add(self, rows: Sequence[Record]) -> None:
        """Appends the records of whole prompts."""
        with output_errors(self.folder), (self.folder / PARTIAL).open("a", encoding="utf-8") as file:
            file.write(_lines(rows))

    def finish(self, summary: Mapping[str, object]) -> None:
        """Renames the partial file to answers.jsonl, and writes summary.json."""
        with output_errors(self.folder):
            (self.folder / PARTIAL).replace(self.folder / NAME)
            files.write(self.folder / "summary.json", json.dumps(summary, indent=1))

    def _earlier(self, settings: str, prompts: Mapping[int, str], n: int) -> list[Record]:
        config, partial = self.folder / CONFIG, self.folder / PARTIAL
        if not partial.exists() or not config.exists() or config.read_text(encoding="utf-8") != settings:
            return []
        try:
            lines = partial.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
            found = by_prompt(json.loads(line) for line in lines)
            whole = [all_ for at, all_ in found.items() if len(all_) == n and all_[0]["prompt"] == prompts.get(at)]
            whole = [all_ for all_ in whole if not any(row["failure"] for row in all_)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%r); all prompts are sampled again", partial, error)
            return []
        return [row for rows in whole for row in rows]


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Converts system errors in the block, while writing to the path of the key `output`, to StorageError."""
    try:
        yield
    except OSError as error:
        expected = "a path that can be written to"
        raise StorageError("output", f"{path} ({error.strerror})", expected, "choose another path") from error


def _lines(rows: Iterable[Record]) -> str:
    return "".join(map(json_line, rows))


def _response_ids(trajectory: Trajectory) -> tuple[int, ...]:
    """Returns the tokens after the prompt; if the context was rewritten, the last turn with its whole context."""
    if not trajectory.turns:
        return ()
    last, prompt_ids = trajectory.turns[-1], trajectory.prompt.token_ids
    whole = last.context_ids + last.token_ids
    return whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else whole
