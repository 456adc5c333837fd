# SPDX-License-Identifier: Apache-2.0
"""A run's folder: locks it, finds the checkpoint to resume from, cuts files back to that checkpoint, and records
digests of the run's data and code.

config.yaml  inputs.json  run.json  metrics.jsonl  timings.jsonl  rollouts/  tokens/  media/  checkpoints/  .lock"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from whet import files
from whet.checkpoints import checkpoint
from whet.checkpoints.checkpoint import disk_errors
from whet.config.commands import likely_command
from whet.config.compose import flatten
from whet.config.digests import digest_of
from whet.config.load import escaped, rename, to_yaml
from whet.config.schema import RunConfig
from whet.errors import ConfigError
from whet.moved import today
from whet.tracking.runs import COMMAND, CONFIG, INPUTS
from whet.tracking.tracker import METRIC_FILES, cut_back, with_nan

log = logging.getLogger(__name__)
STEP_FOLDERS = ("rollouts", "tokens")  # files that end in _STEP.jsonl
STOP = "stop"  # a file that ends the run
MEDIA = "media"  # images and videos by digest
OWN = {*STEP_FOLDERS, MEDIA, "checkpoints", "profile"}  # trackers write other folders, which may have links
# Keys that a resumed run may change: they change where, how fast and how long a run computes, and
# which files it writes, but not the computation of a step.
FREE = (
    *("cluster.", "extra.", "trainer.", "data.val_", "reward.timeout_seconds", "reward.num_workers", "reward.given"),
    *("reward.manager", "reward.limits"),
    *("environment.reset_seconds", "environment.step_seconds", "environment.episode_seconds"),
    *("rollout.engine.options.compile", "rollout.engine.options.kv_cache_bytes"),
    *("rollout.max_batch_size", "rollout.deadline_seconds"),
    *("rollout.free_cache_engine", "data.hub_deadline_seconds", "model.gradient_checkpointing"),
)
BOUND = ("trainer.seed", "trainer.loop")  # keys below FREE that must not change
SCORING = re.compile(r"(reward|algorithm\.filter)\.(?!timeout_seconds|num_workers|manager|limits)")
LOCKS = weakref.WeakSet[TextIOWrapper]()  # that this process holds
OTHER_FOLDER = "choose another trainer.run_dir or trainer.experiment_name"


@dataclass(frozen=True)
class RunDir:
    """A run folder, locked against other runs while it is open."""

    path: Path
    found: Path | None = None  # the checkpoint to resume from
    lock: TextIOWrapper | None = None  # None in a dry run, which writes nothing
    history: list[dict[str, float]] = field(default_factory=list)  # metrics up to that checkpoint
    checkpoint_bytes: int = 0  # planned size of a checkpoint

    @property
    def first_step(self) -> int:
        """The number of steps that the run has already done."""
        return 0 if self.found is None else checkpoint.step_of(self.found)

    @property
    def is_taken(self) -> bool:
        """Tells whether this run has locked the folder."""
        return self.lock is not None

    def close(self) -> None:
        """Unlocks the folder."""
        if self.lock is not None:
            self.lock.close()


def open_run_dir(path: Path, config: RunConfig, inputs: Mapping[str, str] | None = None) -> RunDir:
    """Locks the folder, finds and names the checkpoint to resume from, cuts the run's files back to it, deletes
    checkpoints beyond `trainer.save_limit`, and writes the config and the digests of the `inputs` (code and data).

    Raises: ConfigError if another run uses the folder, if its run has another config or other inputs, or if a fresh
    start would write into an earlier run; CheckpointError; StorageError."""
    resume = config.trainer.resume
    with ExitStack() as undo:
        undo.enter_context(disk_errors(path))
        path.mkdir(parents=True, exist_ok=True)
        _check_links(path)
        lock = undo.enter_context(lock_folder(path))
        (path / STOP).unlink(missing_ok=True)  # of an earlier run
        for partial in path.glob("checkpoints/.*.partial"):  # a kill left it
            files.remove(partial)
        is_used = any((path / name).exists() for name in ("checkpoints", *METRIC_FILES))
        if resume == "overwrite" and is_used:
            log.warning("deleting the earlier run in %s: trainer.resume=overwrite", path)
            _delete(path)
            is_used = False
        if resume == "never" and is_used:
            change = f"delete it: trainer.resume=overwrite, resume it: trainer.resume=auto, or {OTHER_FOLDER}"
            raise ConfigError(str(path), "has an earlier run", "none, with trainer.resume=never", change)
        begun = is_used and is_begun(path, config, inputs or {})
        found = checkpoint.find(path, resume, is_begun=begun)
        if found is None:
            log.info("starting afresh in %s", path)
        elif begun and resume not in ("auto", str(found)):
            log.info("resuming from %s: this run, which began from %s, has reached it", found, resume)
        else:
            log.info("resuming from %s", found)
        history = cut_back_files(path, found, is_logged=found is None or resume != "auto")
        limit = config.trainer.save_limit
        for folder in checkpoint.over_limit(path / "checkpoints", limit):
            log.info("deleted %s: trainer.save_limit=%s", folder, limit)
        checkpoint.delete_oldest(path / "checkpoints", limit)
        files.write(path / CONFIG, to_yaml(config))
        files.write(path / INPUTS, json.dumps({COMMAND: config.command, **(inputs or {})}, indent=1))
        undo.pop_all()
    return RunDir(path, found, lock, history)


def cut_back_files(run_dir: Path, found: Path | None, *, is_logged: bool = False) -> list[dict[str, float]]:
    """Deletes the rollout files and the lines of metric files that a killed run wrote after the checkpoint `found`, and
    returns the remaining metrics. `is_logged` logs the deletions, if a user took the run back to an earlier step.

    Renames later checkpoints (damaged, or after the step that the user goes back to). They are then never resumed from,
    and do not count for `save_limit`."""
    step = -1 if found is None else checkpoint.step_of(found)
    found_files = {name: path for name in METRIC_FILES if (path := run_dir / name).exists()}
    lines = {name: path.read_bytes().count(b"\n") for name, path in found_files.items()}
    kept = {name: cut_back(run_dir / name, step) for name in METRIC_FILES}
    dropped = [f"{n} line{'s' * (n > 1)} of {name}" for name, num in lines.items() if (n := num - len(kept[name])) > 0]
    for name, records in kept.items():
        last = records[-1]["step"] if records else 0
        if found is not None and found.parent == run_dir / "checkpoints" and last < step and (run_dir / name).exists():
            log.warning("%s ends with step %d: its lines from there to step %d are missing", run_dir / name, last, step)
    for name in STEP_FOLDERS:
        numbered = {path: re.search(r"_([0-9]+)$", path.stem) for path in (run_dir / name).glob("*.jsonl")}
        later = [path for path, at in numbered.items() if at and int(at[1]) > step and not path.is_dir()]
        dropped += [f"{len(later)} files of {name}"] * bool(later)
        for path in later:
            path.unlink()
    if dropped and is_logged:
        after = f"after step {step}" if found is not None else "and no checkpoint, so the run begins anew"
        log.warning("deleted what %s holds %s: %s", run_dir, after, ", ".join(dropped))
    for folder in checkpoint.folders(run_dir / "checkpoints"):
        if checkpoint.number(folder) > step:
            names = (f"{folder.name}.left_behind{number or ''}" for number in count())
            aside = next(path for path in map(folder.with_name, names) if not path.exists())
            folder.rename(aside)
            log.warning("%s is no longer part of this run, which goes on before it; renamed to %s", folder, aside.name)
    return [with_nan(each) for each in kept[METRIC_FILES[0]]]


def lock_folder(path: Path, name: str = ".lock") -> TextIOWrapper:
    """Locks a folder through a file in it. The operating system releases the lock when the process ends, even after a
    crash. Forked children do not hold it.  Raises: ConfigError if another process has it."""
    file = open(  # noqa: SIM115  # it is returned
        path / name, "a+", errors="replace", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        change = f"wait for it to end, stop it, or {OTHER_FOLDER}"
        raise ConfigError(str(path), f"is in use by {owner}", "one run in a folder", change) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    LOCKS.add(file)
    return file


def _check_links(path: Path) -> None:
    for link in files.links_out(path):
        if link.parent == path or link.relative_to(path).parts[0] in OWN:
            found, change = os.path.realpath(link), "remove the link, or set trainer.run_dir to the other place"
            raise ConfigError(str(link), f"is a link to {found}", "no link out of the folder of the run", change)


def _delete(path: Path) -> None:
    """Deletes the files of an earlier run in the folder. Media stay, because they include media of the new run."""
    for name in (*OWN - {MEDIA}, *METRIC_FILES, CONFIG, INPUTS):
        place = path / name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def _unlock() -> None:
    """Closes the locks in a forked child, which may outlive the run."""
    for lock in LOCKS:
        lock.close()


os.register_at_fork(after_in_child=_unlock)


def is_begun(path: Path, config: RunConfig, inputs: Mapping[str, str]) -> bool:
    """Tells whether the folder holds the run of `config` and `inputs`, begun with the same `trainer.resume` or `auto`.

    Raises: ConfigError with the keys that would change the computation of a step, if `trainer.resume` is `auto`."""
    before = noted(path, config)
    now = {**dict(flatten(config.model_dump(mode="json"))), **inputs}
    changed = {  # an older run wrote values without escapes
        key: (before[key], value)
        for key, value in now.items()
        if key in before and today(before[key]) not in (today(value), today(escaped(value)))
    }
    bound = {key: pair for key, pair in changed.items() if key.startswith(BOUND) or not key.startswith(FREE)}
    if config.trainer.resume != "auto":
        return not bound and before.get("trainer.resume") == config.trainer.resume
    if bound:
        newest = checkpoint.newest(path)
        again = f", or keep the new values on purpose: trainer.resume={newest}" if newest is not None else ""
        found, change = "has a run of another config", f"go back to its values, {OTHER_FOLDER}{again}"
        lines = [ConfigError(key, is_now, f"{was!r} of the run") for key, (was, is_now) in bound.items()]
        raise ConfigError.joined([ConfigError(str(path), found, "", change), *lines])
    for key, (was, is_now) in changed.items():
        log.info("the run goes on with %s=%s (it was %s)", key, is_now, was)
    return True


def noted(path: Path, config: RunConfig) -> dict[str, Any]:
    """Returns the config and the digests of the folder's run at its last start, by dotted key.

    Raises: ConfigError for damaged files, and for a run of another command."""
    found: dict[str, Any] = {}
    for file in (path / CONFIG, path / INPUTS):
        try:
            if file.exists():
                values = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML too
                rename(type(config), values)
                found |= dict(flatten(values))
        except (yaml.YAMLError, OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(
                str(file), f"cannot be read ({error})", "", "restore it from a copy, or delete it"
            ) from error
    if found.get("rollout.dtype", "") is None:  # an older run: that of the model
        found["rollout.dtype"] = found.get("model.dtype")
    sections, before = {key.partition(".")[0] for key in found}, found.pop(COMMAND, None)
    if before is None:  # an older run
        before = config.command if sections <= type(config).model_fields.keys() else likely_command(sections)
    if before.rpartition(":")[2] != config.command.rpartition(":")[2]:  # its file may have moved
        has, expected = f"has a run of `whet {before}`", f"one of `whet {config.command}`"
        raise ConfigError(str(path), has, expected, OTHER_FOLDER)
    return found


def scoring_digest(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """Digest of the settings and the code that scores and filters depend on. `inputs` are from `digests`."""
    values = {**dict(flatten(config.model_dump(mode="json", exclude_defaults=True))), **inputs}
    return digest_of(json.dumps({key: values[key] for key in sorted(values) if SCORING.match(key)}).encode())
