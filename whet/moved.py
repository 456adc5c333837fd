# SPDX-License-Identifier: Apache-2.0
"""Former names of modules, functions and classes (version 0.3).

`former_names.csv` has the name of today by the former name: of a module (and so of modules in its folder), or
`module:name`. A former name can be imported, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)
FORMER = dict(line.split(",") for line in (Path(__file__).parent / "former_names.csv").read_text("utf-8").split()[1:])
OWNERS = {former.partition(":")[0] for former in FORMER if ":" in former}  # modules with former names of functions


class FormerNames:
    """Import hook: finds modules by former names, and modules whose functions or classes have former names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a module that moved, or has former names; None for any other module.

        Raises: ModuleNotFoundError, with the new name, if that module belongs to a plugin that was deleted."""
        if not name.startswith("whet."):
            return None
        if (new := new_name(name)) == name:
            spec = PathFinder.find_spec(name, path) if name in OWNERS else None
            if spec is not None:
                spec.loader = WithFormerNames(name, str(spec.origin))
            return spec
        is_there = importlib.util.find_spec(new) is not None
        return ModuleSpec(name, self, origin=new, is_package=True) if is_there else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns a module whose attributes are looked up under their names of today."""
        assert spec.origin is not None
        if spec.name in FORMER:
            _warn(spec.name, spec.origin)
        importlib.import_module(spec.origin)
        return FormerModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, as a module under its former name has no code."""


class FormerModule(ModuleType):
    """A module under its former name."""

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class WithFormerNames(SourceFileLoader):
    """Loads a module of which functions or classes have former names."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module's code. An attribute that the module lacks is looked up among former names."""
        super().exec_module(module)
        module.__dict__["__getattr__"] = lambda name: _attribute(module.__name__, name)


def new_name(name: str) -> str:
    """Returns the new name of a module; the same name if it has not changed."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if (new := FORMER.get(".".join(parts[:length]))) is not None:
            return ".".join([new, *parts[length:]])
    return name


def today(value: Any) -> Any:
    """Returns a config value with the new names of modules in it (`package.module:name`)."""
    if isinstance(value, str) and value.startswith("whet."):
        if value in FORMER:
            return FORMER[value]
        module, colon, name = value.partition(":")
        moved = f"{new_name(module)}{colon}{name}"
        return FORMER.get(moved, moved)
    if isinstance(value, Mapping):
        return {key: today(each) for key, each in value.items()}
    return [today(each) for each in value] if isinstance(value, list) else value


def _attribute(module: str, name: str) -> Any:
    former = f"{module}:{name}"
    owner, _, new = today(former).partition(":")
    if name.startswith("__") or f"{owner}:{new}" == former:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if f"{new_name(module)}:{name}" != f"{owner}:{new}":
        _warn(former, f"{owner}:{new}")
    try:
        return getattr(importlib.import_module(owner), new)
    except ModuleNotFoundError as error:  # a plugin was deleted
        raise AttributeError(f"{former} is now {owner}:{new}, which is not there") from error


def _warn(former: str, new: str) -> None:
    log.warning("%s is now %s: the next version will not know the old name", former, new)


sys.meta_path.insert(0, FormerNames())
