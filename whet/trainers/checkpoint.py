# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: everything that a run needs to go on, complete or not there.

    checkpoints/global_step_12/
        actor.state  critic.state     weights (of an adapter its own alone), optimizer, optimizer steps
        trainer.json                  step, score of its validation, place in the data, controllers
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from whet.controller.worker_group import WorkerGroup
from whet.errors import CheckpointError
from whet.models.folder import split_adapters
from whet.models.load import load_config

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
    trust_remote_code: bool = False,
    save_limit: int | None,
    score: float | None = None,
    is_good: bool = True,
) -> Path:
    """Writes the checkpoint of `step`, then deletes the oldest beyond `save_limit`, but never the one with the highest
    `score`.  Returns its folder. `is_good` is false while updates are being skipped.

    Raises: CheckpointError where it cannot be written; what was half written is gone then, and the others are whole.
    """
    target = run_dir / "checkpoints" / f"{PREFIX}{step}"
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "model").mkdir(parents=True)
        for role in TRAINED_ROLES:
            if role in roles:
                roles[role].save(str(partial / f"{role}.state"))
        tokenizer.save_pretrained(partial / "model")
        load_config(model_path, trust_remote_code=trust_remote_code).save_pretrained(partial / "model")
        generation = Path(split_adapters(model_path)[0]) / "generation_config.json"
        if generation.exists():
            shutil.copy(generation, partial / "model")
        (partial / "trainer.json").write_text(
            json.dumps({"step": step, "score": score, "is_good": is_good, **state}, indent=1)
        )
        _sync_files(run_dir.glob("*.jsonl"))  # a checkpoint never knows of more steps than they hold
        _write_manifest(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync_folder(target.parent)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _unwritten(target, error) from error
    delete_oldest(target.parent, save_limit)
    return target


def step_of(folder: Path) -> int:
    """The step after which the complete checkpoint in `folder` was written."""
    return int(json.loads((folder / "trainer.json").read_text())["step"])


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `trainer.resume` means, or None for a fresh start. Says which in the log.

    Raises: CheckpointError for a path without a complete checkpoint, and where there are some but none is whole.
    """
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(resume).expanduser()
        verify(folder)
        return folder
    whole, damaged = None, []
    for folder in reversed(folders(run_dir / "checkpoints")):
        try:
            verify(folder)
        except CheckpointError as error:
            log.warning("%s; looking for an older one", error)
            damaged.append(folder)
            continue
        whole = folder
        break
    if whole is None and damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {run_dir / 'checkpoints'} is whole ({damaged[0].name} is the "
            "newest), so there is nothing to go on from; put one back from a copy, or start afresh in another "
            "trainer.run_dir"
        )
    return whole


def newest(run_dir: Path, *, good: bool = False) -> Path | None:
    """The newest checkpoint that was completed, without looking for damage; `good`: while no update was skipped."""
    complete = [folder for folder in folders(run_dir / "checkpoints") if (folder / MANIFEST).exists()]
    if good:
        complete = [each for each in complete if json.loads((each / "trainer.json").read_text()).get("is_good", True)]
    return complete[-1] if complete else None


def best(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the highest score, the newest of equals; None where no score was ever taken."""
    scored = [
        (score, number(folder), folder) for folder in folders(checkpoints) if (score := score_of(folder)) is not None
    ]
    return max(scored)[2] if scored else None


def score_of(folder: Path) -> float | None:
    """What the run's validation said of a checkpoint, higher being better; None where it was not asked then."""
    if not (folder / MANIFEST).exists():
        return None
    score: float | None = json.loads((folder / "trainer.json").read_text()).get("score")
    return score


def delete_oldest(checkpoints: Path, limit: int | None) -> None:
    """Deletes all but the newest `limit` checkpoints (None: nothing) and the best."""
    for folder in over_limit(checkpoints, limit):
        # Without its manifest it no longer counts, should this be cut short.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def over_limit(checkpoints: Path, limit: int | None) -> list[Path]:
    """What `delete_oldest` deletes."""
    if limit is None:
        return []
    protected = best(checkpoints)
    return [folder for folder in folders(checkpoints)[:-limit] if folder != protected]


def bytes_over_limit(run_dir: Path, limit: int | None) -> int:
    """What a run that starts in the folder gives back to the disk first."""
    deleted = over_limit(run_dir / "checkpoints", limit)
    return sum(file.stat().st_size for folder in deleted for file in folder.rglob("*") if file.is_file())


def restore(folder: Path, roles: Mapping[str, WorkerGroup]) -> dict[str, Any]:
    """Puts weights and optimizers back.  Returns the rest of the state that was saved, `step` among it."""
    for role in TRAINED_ROLES:
        if role in roles:
            roles[role].load(str(folder / f"{role}.state"))
    state: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return state


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


def _unwritten(target: Path, error: Exception) -> CheckpointError:
    free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
    last = newest(target.parent.parent)
    kept = "there is none before it" if last is None else f"{last} is whole"
    return CheckpointError(
        f"{target} could not be written: {error} ({free / 2**20:,.0f} MiB are free there); {kept}; make room (fewer "
        "checkpoints: trainer.save_limit), then start the same command again: it goes on from there"
    )


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries: dict[str, Any] = {}
    for path in files:
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    _sync_files(files)
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


def _sync_files(files: Iterable[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes a rename outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folders(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, whole or damaged, oldest step first."""
    found = [path for path in checkpoints.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name)]
    return sorted(found, key=number)


def number(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix(PREFIX))
