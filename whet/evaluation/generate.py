# SPDX-License-Identifier: Apache-2.0
"""`whet generate`: prompts in, answers out, one JSON object a line, in the order of the prompts.

A run that was killed goes on behind the last whole line. What is answered together is always the same chunk of prompts,
so the file ends with the bytes that it would have had. Beside it lies FILE.run.json, which says what it is made from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from whet.config.checks import check_context
from whet.config.compose import flatten
from whet.config.schema import GenerateConfig
from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.prompts import PromptFormat, read_field
from whet.data.sources import Row, read_rows
from whet.errors import ConfigError, DataError
from whet.evaluation.evaluate import CALL_DEADLINE_SECONDS
from whet.keyed import key
from whet.models.load import load_config, load_tokenizer, stop_token_ids
from whet.rollout.protocol import Completion, Request
from whet.tracking.console import progress
from whet.trainers.build import prompt_format, sampling_params
from whet.trainers.workers import RolloutWorker

log = logging.getLogger(__name__)

# Where things lie, and how much memory and time they may take, says nothing about the answers.
FREE_KEYS = {"output", "input", "model.path", "model.tokenizer_path", "data.train_files", "data.val_files"}
FREE_KEYS |= {"rollout.deadline_seconds", "rollout.kv_cache_bytes"}
MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}


@dataclass(frozen=True)
class Generated:
    """What a run of `whet generate` did."""

    output: Path
    num_found: int  # lines that were there when it began
    num_written: int  # lines
    num_tokens: int  # sampled by this run
    seconds: float


def generate(config: GenerateConfig) -> Generated:
    """Answers every prompt `rollout.n` times, or those that an earlier run left.

    Raises: ConfigError where the file was made from something else; every other WhetError that a user can mend.
    """
    assert config.model.path is not None and config.output is not None
    started, output, rows = time.monotonic(), Path(config.output), read_rows(config.files)
    for index, row in enumerate(rows):  # now, not when an hour's answers are written
        read_field(row, config.data.prompt_key, index, "data.prompt_key")
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    check_context(config, load_config(config.model.path).get_text_config().max_position_embeddings)
    answers = Answers(config, tokenizer)
    _claim(output, _origin(config))
    written = 0
    with output.open("r+b") as file, progress(output.name, total=len(rows)) as advance:
        num_found, last, found = _cut_back(file, output, config.chunk_size)
        try:
            for start in range(0, len(rows), config.chunk_size):
                chunk = rows[start : start + config.chunk_size]
                if start >= last:
                    lines = answers.of(chunk, start, found if start == last else 0)
                    file.write("".join(lines).encode())
                    file.flush()
                    written += len(lines)
                advance(len(chunk), f"{answers.num_tokens / max(answers.seconds, 1e-9):,.0f} tokens/s")
        finally:
            answers.close()
    if answers.num_dropped:
        log.warning("%d prompts over data.max_prompt_length tokens were left out", answers.num_dropped)
    return Generated(output, num_found, written, answers.num_tokens, time.monotonic() - started)


class Answers:
    """Answers to chunks of rows as lines; the model is loaded when the first is to be sampled."""

    def __init__(self, config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._format: PromptFormat = prompt_format(config.data, tokenizer)
        stop_ids = stop_token_ids(str(config.model.path), tokenizer)
        self._params = sampling_params(config.rollout, config.data.max_response_length, stop_ids, tokenizer)
        self._engine: WorkerGroup | None = None
        self.num_dropped = self.num_tokens = 0
        self.seconds = 0.0  # that sampling took

    def of(self, rows: Sequence[Row], start: int, found: int) -> list[str]:
        """The lines of these rows, the first of which is row `start`, but for the first `found`. If one is missing all
        are sampled: an engine may round otherwise in other company."""
        prompts, n = self._prompts(rows, start), self._config.rollout.n
        asked = [(index, ids, sample) for index, ids in prompts for sample in range(n)]
        if found >= len(asked):
            return []
        requests = [
            Request(ids, self._params, key(self._config.seed, "generate", index, sample))
            for index, ids, sample in asked
        ]
        if self._engine is None:
            self._engine = _launch(self._config)
        started = time.monotonic()
        completions = self._engine.generate(requests, block=n)
        self.seconds += time.monotonic() - started
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        lines = [self._line(*each, completion) for each, completion in zip(asked, completions, strict=True)]
        return lines[found:]

    def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.close()

    def _prompts(self, rows: Sequence[Row], start: int) -> list[tuple[int, tuple[int, ...]]]:
        """Row number and tokens of those that are not too long."""
        data = self._config.data
        conversations = [
            self._format.messages(read_field(row, data.prompt_key, index, "data.prompt_key"), row, index)
            for index, row in enumerate(rows, start)
        ]
        encoded = [(start + at, tuple(ids)) for at, ids in enumerate(self._format.encode(conversations))]
        kept = [(index, ids) for index, ids in encoded if len(ids) <= data.max_prompt_length]
        if len(kept) < len(encoded) and data.overlong_prompts == "error":
            index, ids = next(each for each in encoded if each not in kept)
            raise DataError(
                f"row {index}: the prompt has {len(ids)} tokens, over data.max_prompt_length={data.max_prompt_length}; "
                "raise it, or set data.overlong_prompts=drop"
            )
        self.num_dropped += len(encoded) - len(kept)
        return kept

    def _line(self, index: int, prompt: tuple[int, ...], sample: int, completion: Completion) -> str:
        answer = {
            "index": index,
            "uid": f"0:{index}:{sample}",  # as in a run, whose first number is the epoch
            "prompt": self._tokenizer.decode(list(prompt)),
            "response": self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True),
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
            "log_prob": math.fsum(completion.log_probs),
        }
        return json.dumps(answer, ensure_ascii=False) + "\n"


def _launch(config: GenerateConfig) -> WorkerGroup:
    model = config.model
    settings = (config.rollout, model.dtype, model.tokenizer_path or model.path, model.path)
    spec = WorkerSpec("rollout", RolloutWorker, settings)
    return launch([spec], ResourcePool(processes=1), deadline_seconds=CALL_DEADLINE_SECONDS)["rollout"]


def _origin(config: GenerateConfig) -> dict[str, Any]:
    """What decides about the answers."""
    values = dict(flatten(config.model_dump(mode="json")))
    used = {name: value for name, value in values.items() if name not in FREE_KEYS and not name.startswith("extra")}
    template = config.data.format_prompt or ""
    files = [Path(file) for file in (*config.files, *([template] if template.endswith(".jinja") else []))]
    models = [path for path in (config.model.path, config.model.tokenizer_path) if path is not None]
    return {"model": [_model_digest(path) for path in models], "prompts": _digest(files), "config": used}


def _model_digest(path: str) -> str:
    """Of the contents of a folder, or the commit of a model on the hub."""
    if not Path(path).expanduser().is_dir():
        return f"{path}@{load_config(path)._commit_hash}"
    files = [file for file in Path(path).expanduser().iterdir() if file.suffix in MODEL_SUFFIXES]
    return _digest(sorted(files), named=True)


def _digest(files: Sequence[Path], named: bool = False) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            whole.update((path.name if named else "").encode() + hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


def _claim(output: Path, origin: dict[str, Any]) -> None:
    """Makes the file and its FILE.run.json.  Raises: ConfigError where there is a file that was made otherwise."""
    note = output.with_name(f"{output.name}.run.json")
    if output.exists() and output.stat().st_size:
        if not note.exists():
            raise ConfigError(f"{output} is there, and {note.name}, which `whet generate` writes, is not; move it away")
        if differences := list(_differences(json.loads(note.read_text(encoding="utf-8")), origin)):
            raise ConfigError(
                f"{output} was written otherwise: {'; '.join(differences)}. Go back to that, name another output, or "
                "delete the file to start anew"
            )
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = note.with_name(f"{note.name}.new")
    beside.write_text(json.dumps(origin, indent=1, ensure_ascii=False), encoding="utf-8")
    beside.replace(note)
    output.touch()


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if before["model"] != now["model"]:
        yield "by another model (or tokenizer)"
    if before["prompts"] != now["prompts"]:
        yield "from other prompts"
    for name in sorted(before["config"].keys() | now["config"].keys()):
        old, new = (origin["config"].get(name) for origin in (before, now))
        if old != new:
            yield f"{name} was {json.dumps(old)} and is {json.dumps(new)}"


def _cut_back(file: IO[bytes], output: Path, chunk_size: int) -> tuple[int, int, int]:
    """Cuts a torn last line off and stands behind what is whole.

    Returns the number of lines, the row with which the chunk of the last one begins, and the number of its lines."""
    count = last = found = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            start = json.loads(line)["index"] // chunk_size * chunk_size
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{output}:{count + 1} is no answer that `whet generate` wrote; move the file away"
            ) from error
        found = found + 1 if start == last else 1
        count, last, end = count + 1, start, end + len(line)
    file.seek(end)
    file.truncate()
    return count, last, found
