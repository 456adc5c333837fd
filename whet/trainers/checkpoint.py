# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: everything that a run needs to go on, complete or not there.

    checkpoints/global_step_12/
        actor.state  critic.state     weights, optimizer, optimizer steps
        trainer.json                  step, place in the data, KL controller
        model/                        config and tokenizer: what `whet export` adds to the weights
        manifest.json                 size and SHA-256 of every other file; written last: without it nothing counts

A checkpoint is written beside its name and renamed. A kill at any moment leaves the ones before it as they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.controller.worker_group import WorkerGroup
from whet.errors import CheckpointError, ConfigError
from whet.models.load import load_config
from whet.tracking.jsonl import METRIC_FILES, cut_back

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
PREFIX = "global_step_"
TRAINED_ROLES = ("actor", "critic")


def save(
    run_dir: Path,
    step: int,
    *,
    roles: Mapping[str, WorkerGroup],
    state: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    save_limit: int | None,
) -> Path:
    """Writes the checkpoint of `step`, then deletes the oldest beyond `save_limit`.  Returns its folder."""
    target = run_dir / "checkpoints" / f"{PREFIX}{step}"
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    for role in TRAINED_ROLES:
        if role in roles:
            roles[role].save(str(partial / f"{role}.state"))
    tokenizer.save_pretrained(partial / "model")
    load_config(model_path).save_pretrained(partial / "model")
    generation = Path(model_path) / "generation_config.json"
    if generation.exists():
        shutil.copy(generation, partial / "model")
    (partial / "trainer.json").write_text(json.dumps({"step": step, **state}, indent=1))
    _write_manifest(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync_folder(target.parent)
    _delete_oldest(target.parent, save_limit)
    return target


def open_run_dir(run_dir: Path, resume: str, config_yaml: str) -> Path | None:
    """Finds the checkpoint to resume, says which, cuts the run's files back to it, and writes the config.

    Raises: ConfigError where a fresh start would write into an earlier run; CheckpointError.
    """
    found = find(run_dir, resume)
    if resume == "never" and any((run_dir / name).exists() for name in ("checkpoints", *METRIC_FILES)):
        raise ConfigError(
            f"trainer.resume=never, and {run_dir} holds an earlier run; choose another trainer.run_dir or "
            "trainer.experiment_name, or delete that folder"
        )
    if found is None:
        log.info("starting afresh in %s", run_dir)
    else:
        log.info("resuming from %s", found)
    run_dir.mkdir(parents=True, exist_ok=True)
    cut_back_files(run_dir, -1 if found is None else step_of(found))
    (run_dir / "config.yaml").write_text(config_yaml)
    return found


def step_of(folder: Path) -> int:
    """The step after which the complete checkpoint in `folder` was written."""
    return int(json.loads((folder / "trainer.json").read_text())["step"])


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `trainer.resume` means, or None for a fresh start. Says which in the log.

    Raises: CheckpointError for a path without a complete checkpoint.
    """
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(resume).expanduser()
        verify(folder)
        return folder
    for folder in reversed(_folders(run_dir / "checkpoints")):
        try:
            verify(folder)
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
            continue
        return folder
    return None


def restore(folder: Path, roles: Mapping[str, WorkerGroup]) -> dict[str, Any]:
    """Puts weights and optimizers back.  Returns the rest of the state that was saved, `step` among it."""
    for role in TRAINED_ROLES:
        if role in roles:
            roles[role].load(str(folder / f"{role}.state"))
    state: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return state


def cut_back_files(run_dir: Path, step: int) -> None:
    """Drops what a killed run wrote after `step`: lines of metric files and whole files of rollouts.

    Checkpoints of later steps (damaged ones, or those that the run is taken back behind) are renamed, so that they
    neither are resumed from nor count for `save_limit`.
    """
    for name in METRIC_FILES:
        cut_back(run_dir / name, step)
    for path in (run_dir / "rollouts").glob("*_*.jsonl"):
        if int(path.stem.rpartition("_")[2]) > step:
            path.unlink()
    for folder in _folders(run_dir / "checkpoints"):
        if _number(folder) > step:
            aside = folder.with_name(f"{folder.name}.left_behind")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            log.warning("%s is no longer part of this run, which goes on before it; renamed to %s", folder, aside.name)


def verify(folder: Path) -> None:
    """Raises: CheckpointError naming what is missing or damaged in a checkpoint."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        found = "an unfinished checkpoint" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder} is {found}; expected a folder global_step_N with a {MANIFEST}")
    try:
        entries = json.loads(manifest.read_text())
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({error})") from error
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.exists():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != size or _digest(path) != digest:
            raise CheckpointError(f"{folder}: {name} is damaged (its size or checksum is not what was written)")


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries: dict[str, Any] = {}
    for path in files:
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial = folder / f".{MANIFEST}"
    with partial.open("w") as file:
        json.dump(entries, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / MANIFEST)
    _sync_folder(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes a rename outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, oldest step first."""
    found = [path for path in checkpoints.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name)]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def _delete_oldest(checkpoints: Path, limit: int | None) -> None:
    if limit is not None:
        for folder in _folders(checkpoints)[:-limit]:
            # Without its manifest it no longer counts, should this be cut short.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
