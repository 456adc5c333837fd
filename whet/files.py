# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and links that lead out of a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """Gives the name of a new file beside `path`, which takes its place at the end of the block: `path` is the old file
    or the new one, never half of one.

    A link under either name is replaced, not followed. With `synced` the file outlives a power cut.
    """
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
    """Writes a whole file, `replacing` the old one. A lone surrogate, which UTF-8 has no bytes for, is written as its
    escape in JSON."""
    with replacing(path, synced=synced) as partial:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link but not what it leads to; nothing where none is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def links_out(folder: Path) -> Iterator[Path]:
    """Links below `folder` that lead to a place outside of it."""
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                yield path
