# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under `tinker://MODEL/KIND/NAME` in a folder: `FOLDER/MODEL/KIND/NAME` with meta.json."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet import files
from whet.guard import RefusedError

SCHEME = "tinker://"
WEIGHTS, SAMPLER = "weights", "sampler_weights"  # kinds: to train on, to sample from
WHOLE, STATE, META = "weights.safetensors", "state", "meta.json"  # the weights that are trained; an engine's state
PARTS = ("train_attn", "train_mlp", "train_unembed")  # of a model that get an adapter
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True)
class ModelKind:
    """The base and the adapter of a model. A checkpoint fits only models of the same kind."""

    base_model: str
    rank: int  # of the adapter; 0: all weights are trained
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint's meta.json."""

    owner: str  # digest of the client's key
    kind: ModelKind
    time: float
    expires: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


class Store:
    """The folder of checkpoints. A client cannot see checkpoints of other owners."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, path: str) -> Path:
        """Returns the folder of a `tinker://` path.  Raises: RefusedError."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in (WEIGHTS, SAMPLER):
            raise RefusedError(400, f"{path!r} is no path tinker://MODEL/{WEIGHTS}/NAME")
        if not all(NAME.fullmatch(part) for part in parts):
            raise RefusedError(400, f"{path!r} may have letters, digits, '.', '_', ':' and '-' in its names only")
        return self.folder.joinpath(*parts)

    def find(self, owner: str, path: str) -> tuple[Path, Saved]:
        """Finds a checkpoint and its meta.json.  Raises: RefusedError if it is missing or belongs to another owner."""
        place = self.place(path)
        saved = _read(place)
        if saved is None or saved.owner != owner:
            raise RefusedError(404, f"there is no checkpoint {path}")
        return place, saved

    def begin(self, path: str, overwrite: bool) -> Path:
        """Creates the folder of a new checkpoint.  Raises: RefusedError if it exists and `overwrite` is false."""
        place = self.place(path)
        if _read(place) is not None and not overwrite:
            raise RefusedError(409, f"there is a checkpoint {path}; give another name, or overwrite=True")
        files.remove(place)
        place.mkdir(parents=True)
        return place

    def end(self, place: Path, saved: Saved) -> None:
        """Writes meta.json, which completes the checkpoint."""
        files.write(place / META, json.dumps(asdict(saved)))

    def remove(self, owner: str, path: str) -> None:
        """Removes a checkpoint.  Raises: RefusedError."""
        shutil.rmtree(self.find(owner, path)[0])

    def listed(self, owner: str, model: str | None = None) -> Iterator[tuple[str, Path, Saved]]:
        """Yields the checkpoints of an owner with their paths, oldest first."""
        pattern = "*/*/*" if model is None else f"{model}/*/*" if NAME.fullmatch(model) else "-"
        found = [(place, _read(place)) for place in self.folder.glob(pattern)]
        kept = [(place, saved) for place, saved in found if saved is not None and saved.owner == owner]
        for place, saved in sorted(kept, key=lambda each: each[1].time):
            yield SCHEME + "/".join(place.parts[-3:]), place, saved


def size_of(place: Path) -> int:
    """Returns the size of a checkpoint in bytes."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def _read(place: Path) -> Saved | None:
    """Reads the meta.json of a folder; None if it is missing, or expired: an expired checkpoint is removed."""
    try:
        raw: dict[str, Any] = json.loads((place / META).read_text())
    except (OSError, ValueError):
        return None
    saved = Saved(**{**raw, "kind": ModelKind(**raw["kind"])})
    if saved.expires is not None and saved.expires < time.time():
        shutil.rmtree(place, ignore_errors=True)
        return None
    return saved
