# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files, removal, links that lead out of a folder, and YAML that ships with whet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.errors import StorageError


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yields the path of a temporary file beside `path`. At the end of the block it replaces `path` atomically.

    A link under either name is replaced, not followed. With `synced` the file survives a power failure.

    Raises: StorageError if `path` is a folder."""
    if path.is_dir() and not path.is_symlink():
        raise StorageError(str(path), "a folder", "a file", "move the folder away")
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.touch(exist_ok=False)
        yield partial
        if synced:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Writes a file atomically, by `replacing`. Lone surrogates, which UTF-8 cannot encode, are escaped as in JSON."""
    with replacing(path, synced=synced) as partial:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def remove(path: Path) -> None:
    """Removes a file, a folder with its content, or a link but not its target; does nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def links_out(folder: Path) -> Iterator[Path]:
    """Yields the links below `folder` that lead out of it."""
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                yield path


def shipped_yaml(path: str) -> Any:
    """Reads a YAML file that ships with whet. `path` is relative to whet's package folder."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C, ten times faster
    return yaml.load((Path(__file__).parent / path).read_text(encoding="utf-8"), Loader=loader)
