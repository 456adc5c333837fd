# SPDX-License-Identifier: Apache-2.0
"""Sends the user's functions and modules to other processes."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


def pickle_code(value: Any, target: str | Callable[..., Any]) -> bytes:
    """Pickles `value`, which contains `target`: by reference if other processes can import the target, otherwise with
    its code.

    Raises: errors of pickling an object that the target refers to."""
    module = None if isinstance(target, str) else sys.modules.get(target.__module__)
    top = "" if module is None else module.__name__.partition(".")[0]
    if module is None or any(finder.find_spec(top, None) is not None for finder in sys.meta_path):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)  # it was loaded from a file: other processes cannot import its name
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pin(sources: dict[str, bytes]) -> None:
    """Makes the user's modules load from `sources` (content by path), except installed modules and whet's own. Files
    missing in `sources` are read and added. Compiled files are ignored, because they may be of another version."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = (*installed, f"{Path(__file__).parents[1]}{os.sep}")
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
