# SPDX-License-Identifier: Apache-2.0
"""`whet generate`: samples responses to prompts into a file, one JSON object per line, in the order of the prompts.

A run that was killed continues after the last whole line. Chunks of prompts that are sampled together are always the
same, so the resumed file has the same bytes as an uninterrupted one. FILE.run.json beside it records model, prompts and
settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from whet import files
from whet.checkpoints.export import model_digest, model_folder
from whet.config.checks import check_context
from whet.config.compose import flatten
from whet.config.schema import GenerateConfig
from whet.data.load import load_items
from whet.errors import ConfigError, DataError
from whet.evaluation.answers import Record, output_errors
from whet.evaluation.evaluate import open_engine
from whet.keyed import key
from whet.models.load import context_length, load_tokenizer, stop_token_ids
from whet.phases import counted, phase
from whet.planning.dtypes import with_dtypes
from whet.rollout.build import check_media, sampling_params
from whet.rollout.protocol import Completion, Request, RolloutEngine, generate as sample_all
from whet.tracking.tracker import json_line
from whet.types import Prompt

# Settings on which the file's content depends, besides model and prompts; and rollout options that do not change it.
DECIDING = ("model.dtype", "data.max_response_length", "rollout", "chunk_size", "seed")
FREE = ("rollout.deadline_seconds", "rollout.engine.options.kv_cache_bytes", "rollout.engine.options")


@dataclass(frozen=True)
class Generated:
    """The outcome of `whet generate`."""

    output: Path
    num_found: int  # lines that an earlier run wrote
    num_written: int  # lines that this run wrote
    num_tokens: int  # sampled by this run
    seconds: float


def generate(config: GenerateConfig, *, data: Sequence[Mapping[str, Any]] | None = None) -> Generated:
    """Samples `rollout.n` responses to every prompt, and writes them to the file `output`. Skips responses that an
    earlier run has written. `data` replaces `input`.

    Raises: ConfigError if the file was written with other settings; other WhetErrors that a user can correct."""
    config = with_dtypes(config)
    assert config.model.path is not None and config.output is not None
    started, output, n = time.monotonic(), Path(config.output), config.rollout.n
    trusted = config.model.trust_remote_code
    with ExitStack() as stack:
        model_path = stack.enter_context(model_folder(config.model.path, trust_remote_code=trusted))
        tokenizer = load_tokenizer(config.model.tokenizer_path or model_path, trust_remote_code=trusted)
        check_context(config, context_length(model_path, trust_remote_code=trusted))
        named, where = config.data.model_copy(update={"val_files": config.sources}), config.data.filter
        prompts = load_items(
            named, tokenizer, config.source_key, rows=data, where=where, seed=config.seed, with_answers=False
        ).items
        check_media(config.rollout, tokenizer, prompts)
        sampler = stack.enter_context(LineSampler(config, tokenizer, model_path))
        origin = _origin(config, prompts)
        with output_errors(output):
            _open_output(output, origin)
            file = stack.enter_context(output.open("r+b"))
        num_found = num_lines = _truncate(file, output)
        stack.enter_context(phase(output.name))
        first = num_found // (config.chunk_size * n) * config.chunk_size
        for start in range(first, len(prompts), config.chunk_size):
            chunk = prompts[start : start + config.chunk_size]
            missing = (start + len(chunk)) * n - num_lines
            if missing > 0:  # sample the whole chunk if a line is missing: rounding may depend on the other requests
                file.write("".join(sampler.lines(chunk)[-missing:]).encode())
                file.flush()
                num_lines += missing
                speed = f"{sampler.num_tokens / sampler.seconds:,.0f} tokens/s"
                counted(num_lines // n, len(prompts), speed)
    return Generated(output, num_found, num_lines - num_found, sampler.num_tokens, time.monotonic() - started)


class LineSampler(ExitStack):
    """Samples completions as JSON lines. Loads the model at the first prompts; the end of the block releases it."""

    def __init__(self, config: GenerateConfig, tokenizer: PreTrainedTokenizerBase, model_path: str) -> None:
        super().__init__()
        self._config, self._tokenizer, self._model_path = config, tokenizer, model_path
        stop_ids = stop_token_ids(model_path, tokenizer, config.data.template_options)
        self._params = sampling_params(config.rollout, config.data.max_response_length, stop_ids, tokenizer)
        self._engine: RolloutEngine | None = None
        self.num_tokens = 0  # sampled
        self.seconds = 0.0  # of sampling

    def lines(self, prompts: Sequence[Prompt]) -> list[str]:
        """Samples all completions of these prompts.  Returns their lines."""
        config = self._config
        samples = [(prompt, sample) for prompt in prompts for sample in range(config.rollout.n)]
        requests = [
            Request(
                uid=f"{prompt.uid}:{sample}",
                prompt_ids=prompt.token_ids,
                params=self._params,
                key=key(config.seed, "generate", prompt.index, sample),
                media=prompt.media,
            )
            for prompt, sample in samples
        ]
        if self._engine is None:
            self._engine = open_engine(config.rollout, config.model, self._model_path)
            self.callback(self._engine.close)
        started = time.monotonic()
        with phase("sampling"):
            completions = sample_all(self._engine, requests, config.rollout.deadline_seconds)
        self.seconds += time.monotonic() - started
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        return [self._line(*each, completion) for each, completion in zip(samples, completions, strict=True)]

    def _line(self, prompt: Prompt, sample: int, completion: Completion) -> str:
        record = {
            "index": prompt.index,
            "uid": f"{prompt.uid}:{sample}",
            "prompt": self._tokenizer.decode(list(prompt.token_ids)),
            "response": self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True),
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
            "log_prob": math.fsum(completion.log_probs),
        }
        return json_line(record)


def _origin(config: GenerateConfig, prompts: Sequence[Prompt]) -> Record:
    """Returns the content of FILE.run.json: all inputs that determine the responses."""
    values = dict(flatten(config.model_dump(mode="json")))
    deciding = {name for name in values if name.startswith(DECIDING) and name not in FREE}
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.index}:{prompt.token_ids}{''.join(each.digest for each in prompt.media)}".encode())
    models = [path for path in (config.model.path, config.model.tokenizer_path) if path is not None]
    return {
        "model": [model_digest(path, config.model.trust_remote_code) for path in models],
        "prompts": digest.hexdigest(),
        "config": {name: values[name] for name in values if name in deciding},
    }


def _open_output(output: Path, origin: Record) -> None:
    """Creates the file and its FILE.run.json.  Raises: ConfigError if the file exists with another origin."""
    note = output.with_name(f"{output.name}.run.json")
    if output.exists() and output.stat().st_size:
        if not note.exists():
            found = f"exists without {note.name}, which `whet generate` writes"
            raise ConfigError(str(output), found, change="move the file away")
        try:
            differences = list(_differences(json.loads(note.read_text(encoding="utf-8")), origin))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(str(note), repr(error), change=f"move it and {output.name} away") from error
        if differences:
            found = f"written with other settings: {'; '.join(differences)}"
            change = "use those settings, name another output, or delete the file to start again"
            raise ConfigError(str(output), found, change=change)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    files.write(note, json.dumps(origin, indent=1, ensure_ascii=False))
    output.touch()


def _differences(before: Record, now: Record) -> Iterator[str]:
    if before["model"] != now["model"]:
        yield "by another model (or tokenizer)"
    if before["prompts"] != now["prompts"]:
        yield "from other prompts (or another template)"
    for name in sorted(before["config"].keys() | now["config"].keys()):
        old, new = (origin["config"].get(name) for origin in (before, now))
        if old != new:
            yield f"{name} was {json.dumps(old)} and is {json.dumps(new)}"


def _truncate(file: IO[bytes], output: Path) -> int:
    """Removes an incomplete last line, and seeks to the end.  Returns the number of whole lines."""
    count = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        if not line.startswith(b'{"index": '):
            expected = "lines that `whet generate` wrote"
            raise DataError(f"{output}, line {count + 1}", f"{line[:80]!r}", expected, "move the file away")
        count, end = count + 1, end + len(line)
    file.seek(end)
    file.truncate()
    return count
