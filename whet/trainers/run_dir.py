# SPDX-License-Identifier: Apache-2.0
"""A run's folder: who may write to it, where a run goes on in it, and what it is cut back to.

config.yaml  metrics.jsonl  timings.jsonl  rollouts/  tokens/  checkpoints/  .lock
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import yaml

from whet.config.renamed import rename
from whet.config.render import to_yaml
from whet.config.schema import Section, SFTConfig, TrainConfig
from whet.errors import ConfigError, StorageError, WhetError
from whet.tracking.jsonl import METRIC_FILES, cut_back
from whet.trainers import checkpoint

log = logging.getLogger(__name__)
STEP_FOLDERS = ("rollouts", "tokens")  # files that end in _STEP.jsonl
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# What may differ from the config that a run was started with: it changes where and how fast a run goes, how far, and
# what is written of it, but not what a step computes.
FREE = (
    *("cluster.", "extra.", "trainer.", "data.val_", "reward.timeout_seconds", "reward.num_workers"),
    *("rollout.engine.options.compile", "rollout.engine.options.kv_cache_bytes"),
    *("rollout.max_batch_size", "rollout.deadline_seconds"),
    *("rollout.free_cache_engine", "data.hub_deadline_seconds", "model.gradient_checkpointing"),
)
BOUND = ("trainer.seed", "trainer.loop")  # of the free ones


@dataclass(frozen=True)
class RunDir:
    """A folder that no other run writes to for as long as this is open."""

    path: Path
    found: Path | None = None  # the checkpoint to go on from
    lock: TextIOWrapper | None = None  # None in a dry run, which writes nothing

    @property
    def is_taken(self) -> bool:
        """Whether the run writes to it."""
        return self.lock is not None

    def close(self) -> None:
        """Lets another run have it."""
        if self.lock is not None:
            self.lock.close()


def open_run_dir(path: Path, config: TrainConfig | SFTConfig) -> RunDir:
    """Takes the folder, finds the checkpoint to go on from, says which, cuts the run's files back to it, deletes the
    checkpoints over `trainer.save_limit`, and writes the config.

    Raises: ConfigError where another run is in the folder, where it is of another config, and where a fresh start would
    write into an earlier run; CheckpointError; StorageError.
    """
    resume, save_limit = config.trainer.resume, config.trainer.save_limit
    with ExitStack() as undo:
        undo.enter_context(disk_errors(path))
        path.mkdir(parents=True, exist_ok=True)
        lock = undo.enter_context(_lock(path))
        found = checkpoint.find(path, resume)
        is_used = any((path / name).exists() for name in ("checkpoints", *METRIC_FILES))
        if resume == "never" and is_used:
            raise ConfigError(
                f"trainer.resume=never, and {path} holds an earlier run; choose another trainer.run_dir or "
                "trainer.experiment_name, or delete that folder"
            )
        if resume == "auto" and is_used:
            _check_same_config(path, config)
        if found is None:
            log.info("starting afresh in %s", path)
        else:
            log.info("resuming from %s", found)
        cut_back_files(path, -1 if found is None else checkpoint.step_of(found))
        checkpoint.delete_oldest(path / "checkpoints", save_limit)
        partial = path / ".config.yaml.partial"
        partial.write_text(to_yaml(config), encoding="utf-8")
        partial.replace(path / "config.yaml")
        undo.pop_all()
    return RunDir(path, found, lock)


def cut_back_files(run_dir: Path, step: int) -> None:
    """Drops what a killed run wrote after `step`: lines of metric files and whole files of rollouts.

    Checkpoints of later steps (damaged ones, or those that the run is taken back behind) are renamed, so that they
    neither are resumed from nor count for `save_limit`.
    """
    for name in METRIC_FILES:
        cut_back(run_dir / name, step)
    for name in STEP_FOLDERS:
        for path in (run_dir / name).glob("*_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > step:
                path.unlink()
    for folder in checkpoint.folders(run_dir / "checkpoints"):
        if checkpoint.number(folder) > step:
            aside = folder.with_name(f"{folder.name}.left_behind")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            log.warning("%s is no longer part of this run, which goes on before it; renamed to %s", folder, aside.name)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises: StorageError, which says how to go on, where a file of the run cannot be written for want of room."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WhetError) or error.errno not in NO_ROOM:
            raise
        last = checkpoint.newest(path)
        again = "starts afresh" if last is None else f"goes on from {last}"
        raise StorageError(
            f"{error.filename or path}: {error.strerror} ({shutil.disk_usage(path).free / 2**20:,.0f} MiB are free "
            f"there); make room, then start the same command again: it {again}"
        ) from error


def _lock(path: Path) -> TextIOWrapper:
    """The operating system lets go of it when the process ends, however it ends."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"{path} is in use by {owner}: two runs cannot write to one folder; wait for it to end, stop it, or choose "
            "another trainer.run_dir or trainer.experiment_name"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _check_same_config(path: Path, config: Section) -> None:
    """Raises: ConfigError naming the keys by which a step would compute something else than the run so far."""
    written = path / "config.yaml"
    if not written.exists():
        return
    try:
        tree = yaml.safe_load(written.read_text(encoding="utf-8"))
        rename(type(config), tree)
        before = dict(_leaves(tree))
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"{written} cannot be read ({error}); put the run's config back, or delete it") from error
    now = dict(_leaves(config.model_dump(mode="json")))
    changed = {key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]}
    bound = {key: pair for key, pair in changed.items() if key in BOUND or not key.startswith(FREE)}
    if bound:
        lines = "".join(f"\n  {key}: {was!r}, now {is_now!r}" for key, (was, is_now) in bound.items())
        newest = checkpoint.newest(path)
        raise ConfigError(
            f"{path} holds a run of another config:{lines}\ngo on with the old values, choose another trainer.run_dir "
            "or trainer.experiment_name"
            + (f", or go on with the new ones on purpose: trainer.resume={newest}" if newest is not None else "")
        )
    for key, (was, is_now) in changed.items():
        log.info("the run goes on with %s=%s (it was %s)", key, is_now, was)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
