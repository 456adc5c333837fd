# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under `tinker://MODEL/KIND/NAME` in a folder: `FOLDER/MODEL/KIND/NAME` with meta.json."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet import files
from whet.errors import StorageError
from whet.guard import RefusedError

SCHEME = "tinker://"
WEIGHTS, SAMPLER = "weights", "sampler_weights"  # kinds: to train on, to sample from
WHOLE, STATE, META = "weights.safetensors", "state", "meta.json"  # the weights that are trained; an engine's state
PARTS = ("train_attn", "train_mlp", "train_unembed")  # of a model that get an adapter
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
LOCK = ".lock"  # of a folder that servers use
PARTIAL, FORMER = ".partial", ".former"  # of a checkpoint that is being written, and of the one that it replaces


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
    is_snapshot: bool = False  # it ends with its session
    base: str = ""  # fingerprint of the base's weights; "" in older checkpoints


class Store:
    """The folder of checkpoints. A client cannot see checkpoints of other owners."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Marks the folder as used by a server. If no other server uses it, removes snapshots and parts of checkpoints
        of servers that have ended.  Raises: StorageError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / LOCK).open("a")
        except OSError as error:
            expected, change = "a folder that can be written", "name another with --folder"
            raise StorageError(str(self.folder), str(error.strerror), expected, change) from error
        with file:
            with suppress(OSError):  # another server uses the folder, or the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._clear()
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def _clear(self) -> None:
        for place in [each for kind in (WEIGHTS, SAMPLER) for each in self.folder.glob(f"*/{kind}/*")]:
            former = re.fullmatch(rf"\.(.+){re.escape(FORMER)}", place.name)
            if former is not None and _read(whole := place.with_name(former[1])) is None:
                files.remove(whole)  # the server ended between two renames
                place.rename(whole)
            elif place.name.startswith(".") or ((saved := _read(place)) is not None and saved.is_snapshot):
                files.remove(place)

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

    @contextmanager
    def writing(self, path: str, saved: Saved, *, overwrite: bool) -> Iterator[Path]:
        """Yields the folder of a new checkpoint, which gets its path when it is complete. Until then, or if the block
        fails, the checkpoint that it replaces stays.  Raises: RefusedError if it exists and `overwrite` is false."""
        place = self.place(path)
        if _read(place) is not None and not overwrite:
            raise RefusedError(409, f"there is a checkpoint {path}; give another name, or overwrite=True")
        partial, former = (place.with_name(f".{place.name}{end}") for end in (PARTIAL, FORMER))
        files.remove(partial)
        partial.mkdir(parents=True)
        try:
            yield partial
            files.write(partial / META, json.dumps(asdict(saved)))
            if place.exists():
                files.remove(former)
                place.rename(former)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)

    def remove(self, owner: str, path: str) -> None:
        """Removes a checkpoint.  Raises: RefusedError."""
        shutil.rmtree(self.find(owner, path)[0])

    def remove_snapshots(self, model: str) -> None:
        """Removes the snapshots of a model."""
        for place in self.folder.glob(f"{model}/*/*"):
            if (saved := _read(place)) is not None and saved.is_snapshot:
                shutil.rmtree(place, ignore_errors=True)

    def listed(self, owner: str, model: str | None = None) -> Iterator[tuple[str, Path, Saved]]:
        """Yields the checkpoints of an owner with their paths, oldest first."""
        pattern = "*/*/*" if model is None else f"{model}/*/*" if NAME.fullmatch(model) else "-"
        found = [(place, _read(place)) for place in self.folder.glob(pattern) if NAME.fullmatch(place.name)]
        kept = [(place, saved) for place, saved in found if saved is not None and saved.owner == owner]
        for place, saved in sorted(kept, key=lambda each: each[1].time):
            yield SCHEME + "/".join(place.parts[-3:]), place, saved


def size_of(place: Path) -> int:
    """Returns the size of a checkpoint in bytes."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def _read(place: Path) -> Saved | None:
    """Reads the meta.json of a folder; None if it is missing, damaged, or expired: an expired checkpoint is removed."""
    try:
        raw: dict[str, Any] = json.loads((place / META).read_text())
        saved = Saved(**{**raw, "kind": ModelKind(**raw["kind"])})
    except (OSError, ValueError, TypeError, LookupError):
        return None
    if saved.expires is not None and saved.expires < time.time():
        shutil.rmtree(place, ignore_errors=True)
        return None
    return saved
