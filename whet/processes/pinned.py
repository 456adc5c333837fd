# SPDX-License-Identifier: Apache-2.0
"""Source files of the user's, as they were when they were first read: what replaces a process runs the same code."""

from __future__ import annotations

import sysconfig
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any


def pin(sources: dict[str, bytes]) -> None:
    """Has modules that no installation made load from `sources`, by their path; a file that is not in there is read,
    and put there. Compiled files beside them are not used: they may be of another version."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    get_code = SourceFileLoader.get_code

    def pinned_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        if path.startswith(installed):
            return get_code(loader, name)
        if path not in sources:
            sources[path] = loader.get_data(path)
        code: Any = loader.source_to_code(sources[path], path)
        return code

    SourceFileLoader.get_code = pinned_code  # type: ignore[method-assign, assignment]
