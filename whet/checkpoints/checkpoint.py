# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the full state of a run, written atomically.

    checkpoints/global_step_12/
        actor.state  critic.state     weights (only the adapter's with LoRA), optimizer, optimizer steps
        trainer.json                  step, validation score, start model, dtype of exports, position in the data, ...
        model/                        config and tokenizer, for `whet export`
        manifest.json                 size and SHA-256 of every other file; written last, so it marks a whole checkpoint

A checkpoint is written under a temporary name and renamed. A kill at any moment leaves earlier checkpoints intact.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from whet import files
from whet.controller.worker_group import WorkerGroup
from whet.data.chat import template_text
from whet.errors import CheckpointError, StorageError, WhetError
from whet.models.encoders.load import encoders_of
from whet.models.folder import split_adapters
from whet.models.load import stop_token_ids
from whet.options import is_number
from whet.serialization import fits

log = logging.getLogger(__name__)
AFRESH = ("never", "overwrite")  # values of trainer.resume that load no checkpoint
MANIFEST = "manifest.json"
PREFIX = "global_step_"
RESTORE = "put it back from a copy"
TRAINED_ROLES = ("actor", "critic")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def save(
    run_dir: Path,
    step: int,
    *,
    roles: Mapping[str, WorkerGroup],
    state: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    model_path: str | Path,
    model_config: Any,
    save_limit: int | None,
    score: float | None = None,
    metric: str | None = None,
    is_good: bool = True,
    chat: Mapping[str, object] | None = None,
) -> Path:
    """Writes the checkpoint of `step`, then deletes the oldest checkpoints beyond `save_limit`, except the one with the
    highest `score` (by `metric`) and the newest good one.  Returns its folder. `is_good` is false while updates are
    skipped. `chat` has the arguments of the run's chat template, for exports; None without a template.

    Raises: CheckpointError if it cannot be written; the partial checkpoint is removed, others stay intact."""
    target = run_dir / "checkpoints" / f"{PREFIX}{step}"
    partial = target.with_name(f".{target.name}.partial")
    try:
        files.remove(partial)
        (partial / "model").mkdir(parents=True)
        for role, group in roles.items():
            group.save(str(partial / f"{role}.state"))
        written = copy.copy(tokenizer)
        if chat is not None:
            written.chat_template = template_text(tokenizer, chat)
        written.save_pretrained(partial / "model")
        model_config.save_pretrained(partial / "model")
        if (encoders := encoders_of(tokenizer)) is not None:
            for encoder in encoders.own:
                encoder.save(partial / "model")
        generation = Path(split_adapters(model_path)[0]) / "generation_config.json"
        if generation.exists():
            shutil.copy(generation, partial / "model")
        ends = stop_token_ids(model_path, tokenizer, chat)
        if ends != stop_token_ids(model_path, tokenizer):
            values = json.loads(generation.read_text()) if generation.exists() else {}
            values["eos_token_id"] = list(ends)  # the stop tokens of the run, for sampling from an export
            (partial / "model" / generation.name).write_text(json.dumps(values, indent=2) + "\n")
        content = {"step": step, "score": score, "is_good": is_good, **state}
        if score is not None:
            content["metric"] = metric
        (partial / "trainer.json").write_text(json.dumps(content, indent=1))
        _sync(run_dir.glob("*.jsonl"))  # the logs must reach the checkpoint's step after a power cut
        _write_manifest(partial)
        files.remove(target)
        partial.rename(target)
        _sync([target.parent])
    except (OSError, SafetensorError, CheckpointError) as error:
        raise _write_error(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of an error or a second signal
    delete_oldest(target.parent, save_limit)
    return target


def step_of(folder: Path) -> int:
    """Returns the step of the complete checkpoint in `folder`.  Raises: CheckpointError."""
    if (step := _saved_step(folder)) < 0:
        change = "resume from another checkpoint"
        raise CheckpointError(f"{folder}: trainer.json", "is damaged: it names no step", "", change)
    return step


def find(run_dir: Path, resume: str, *, is_begun: bool = False) -> Path | None:
    """Returns the checkpoint that `trainer.resume` selects; None for a fresh start. With `is_begun`, the run in
    `run_dir` has already started from the path in `resume`, so newer checkpoints of the run are preferred.

    Raises: CheckpointError for a path without a complete checkpoint, and if all checkpoints are damaged."""
    if resume in AFRESH:
        return None
    if resume == "auto":
        whole, damaged = _newest_whole(run_dir)
        if whole is None and damaged:
            found = f"none of its {len(damaged)} checkpoints is whole ({damaged[0].name} is the newest), so there is "
            change = "put one back from a copy, or start afresh in another trainer.run_dir"
            raise CheckpointError(f"{run_dir / 'checkpoints'}", f"{found}nothing to go on from", "", change)
        return whole
    named = Path(resume).expanduser()
    whole = _newest_whole(run_dir)[0] if is_begun else None
    if whole is not None and number(whole) > _saved_step(named):
        return whole
    verify(named)
    return named


def _newest_whole(run_dir: Path) -> tuple[Path | None, list[Path]]:
    """Returns the newest undamaged checkpoint, and the damaged checkpoints that are newer."""
    damaged = list[Path]()
    for folder in reversed(folders(run_dir / "checkpoints")):
        try:
            verify(folder)
            return folder, damaged
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
            damaged.append(folder)
    return None, damaged


def newest(run_dir: Path, *, good: bool = False) -> Path | None:
    """Returns the newest complete checkpoint, unverified. With `good`, the newest saved while no update was skipped."""
    complete = [folder for folder in folders(run_dir / "checkpoints") if (folder / MANIFEST).exists()]
    if good:
        complete = [each for each in complete if _saved_step(each) >= 0 and saved(each).get("is_good", True) is True]
    return complete[-1] if complete else None


def last_good(run_dir: Path) -> str:
    """Returns advice for errors: the path of the newest good checkpoint, and the setting that resumes from it."""
    good = newest(run_dir, good=True)
    if good is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {good}: trainer.resume={good} continues from it, with other settings too"


def best(checkpoints: Path) -> Path | None:
    """Returns the complete checkpoint with the highest score, the newest of equal ones; None without scores. Only
    scores by the newest checkpoint's metric count, because a resumed run may change `trainer.best_metric`."""
    scored = [(score, folder) for folder in folders(checkpoints) if (score := score_of(folder)) is not None]
    alike = [(score, folder) for score, folder in scored if metric_of(folder) == metric_of(scored[-1][1])]
    return max(alike, key=lambda each: (each[0], number(each[1])))[1] if alike else None


def score_of(folder: Path) -> float | None:
    """Returns the validation score of a checkpoint (higher is better); None without validation."""
    score = saved(folder).get("score") if (folder / MANIFEST).exists() else None
    return score if is_number(score) and math.isfinite(score) else None


def metric_of(folder: Path) -> str | None:
    """Returns the name of the metric of a checkpoint's score; None in a checkpoint of an older version of whet."""
    metric = saved(folder).get("metric")
    return metric if isinstance(metric, str) else None


def delete_oldest(checkpoints: Path, limit: int | None) -> None:
    """Deletes the checkpoints that `over_limit` returns."""
    for folder in over_limit(checkpoints, limit):
        # The manifest first: a deletion that is cut short leaves no checkpoint that seems complete.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def over_limit(checkpoints: Path, limit: int | None) -> list[Path]:
    """Lists checkpoints to delete: all but the newest `limit` (None: no limit), the best, and the newest good one."""
    if limit is None:
        return []
    protected = best(checkpoints), newest(checkpoints.parent, good=True)
    return [folder for folder in folders(checkpoints)[:-limit] if folder not in protected]


def restore(folder: Path, roles: Mapping[str, WorkerGroup], own: Mapping[str, object]) -> dict[str, Any]:
    """Loads weights and optimizers into `roles`.  Returns the rest of the saved state, including `step`.

    `own` is the present state of the run. Raises: CheckpointError if the saved state lacks a name of `own`, or has a
    value of another form; EngineError for weights of another model."""
    state = {**saved(folder), "step": step_of(folder)}
    if odd := [name for name in own if name in state and not fits(state[name], own[name])]:
        name, change = odd[0], "resume from another checkpoint: trainer.resume=PATH"
        found, expected = f"is damaged: {state[name]!r:.80}", f"the form of {own[name]!r:.80}"
        raise CheckpointError(f"{folder}: trainer.json: {name}", found, expected, change)
    if missing := set(own) - state.keys():
        expected = f"{', '.join(sorted(missing))} too, which this run needs: another kind of run wrote it"
        change = f"to start from its weights, `whet export {folder} OUT`, then set model.path=OUT"
        raise CheckpointError(f"{folder}", f"holds {', '.join(sorted(state))}", expected, change)
    for role, group in roles.items():
        group.load(str(folder / f"{role}.state"))
    return state


def verify(folder: Path) -> None:
    """Checks that a checkpoint is complete and undamaged.  Raises: CheckpointError, which names the file."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        found = "an unfinished checkpoint" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}", f"is {found}", f"a folder global_step_N with a {MANIFEST}")
    try:
        entries = json.loads(manifest.read_text())
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST}", f"is damaged ({error!r})", "", RESTORE) from error
    if "trainer.json" not in expected or any(Path(name).is_absolute() or ".." in Path(name).parts for name in expected):
        found = "is damaged: it names other files than were written"
        raise CheckpointError(f"{folder}: {MANIFEST}", found, "", RESTORE)
    if link := next(files.links_out(folder), None):
        found = f"leads to {os.path.realpath(link)}, outside of the checkpoint"
        raise CheckpointError(f"{link}", found, "files of its own", "replace the link with the file itself")
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name}", "is missing", "", RESTORE)
        if path.stat().st_size != size or _digest(path) != digest:
            found = "is damaged (its size or checksum is not what was written)"
            raise CheckpointError(f"{folder}: {name}", found, "", RESTORE)


def saved(folder: Path) -> dict[str, Any]:
    """Reads the content of trainer.json; empty if it cannot be read."""
    try:
        content = json.loads((folder / "trainer.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _saved_step(folder: Path) -> int:
    step = saved(folder).get("step")
    return step if type(step) is int else -1


def _write_error(target: Path, error: Exception) -> CheckpointError:
    free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
    last = newest(target.parent.parent)
    kept = "there is none before it" if last is None else f"{last} is whole"
    found = f"could not be written: {error} ({free / 2**20:,.0f} MiB are free there); {kept}"
    change = "make room (fewer checkpoints: trainer.save_limit), then start the same command again (with "
    return CheckpointError(f"{target}", found, "", f"{change}trainer.resume=auto): it goes on")


def _write_manifest(folder: Path) -> None:
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in written}
    entries = {str(path.relative_to(folder)): each for path, each in sizes.items()}
    _sync(written)
    files.write(folder / MANIFEST, json.dumps(entries, indent=1), synced=True)
    _sync([folder])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(paths: Iterable[Path]) -> None:
    """Flushes files and directory entries to disk, so that they survive a power cut."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def folders(checkpoints: Path) -> list[Path]:
    """Lists the checkpoint folders, oldest step first. Damaged checkpoints are included."""
    named = [path for path in checkpoints.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}[0-9]{{1,18}}", path.name)]
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=number)


def number(folder: Path) -> int:
    """Reads the step from the name of a checkpoint folder."""
    return int(folder.name.removeprefix(PREFIX))


@contextmanager
def disk_errors(path: Path, key: str = "trainer.run_dir") -> Iterator[None]:
    """Converts disk errors on files in `path` to StorageError, which says how to continue; `key` names the folder."""
    try:
        yield
    except OSError as error:
        whole, named = path.absolute(), Path(os.fsdecode(error.filename) if error.filename else "").absolute()
        if isinstance(error, WhetError):
            raise
        if error.errno not in NO_ROOM:
            if not error.filename or not (named.is_relative_to(whole) or whole.is_relative_to(named)):
                raise
            change = f"correct its permissions, remove the file in its place, or choose another {key}"
            expected = "a folder that can be written to"
            raise StorageError(f"{error.filename}", f"{error.strerror}", expected, change) from error
        last = newest(path)
        again = "starts afresh" if last is None else f"goes on from {last}"
        found = f"{error.strerror} ({shutil.disk_usage(path).free / 2**20:,.0f} MiB are free there)"
        change = f"make room, then start the same command again (with trainer.resume=auto): it {again}"
        raise StorageError(f"{error.filename or path}", found, "", change) from error
