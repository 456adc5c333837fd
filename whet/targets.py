# SPDX-License-Identifier: Apache-2.0
"""Loads objects by their location: `package.module:name` or `path/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from whet.errors import RegistryError, did_you_mean
from whet.manifests import absent
from whet.moved import new_name

MISSING = object()
GAMES = "a package of games: pip install -e ./examples/environments"


def load_target(target: str, *, is_called: bool = True) -> Any:
    """Loads `package.module:name` or `path/file.py:name`; with `is_called` only a callable.  Raises: RegistryError."""
    location, _, name = target.rpartition(":")
    if not location:
        raise RegistryError("function", target, "package.module:function or path/file.py:function", "add its module")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location, target)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, MISSING)
    if found is MISSING or (is_called and not callable(found)):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        what = "nothing of that name" if found is MISSING else f"a {type(found).__name__}, not a function"
        change = did_you_mean(name, own, "correct the name", quoted=False)
        raise RegistryError(target, what, f"one of {', '.join(own) or 'no functions'} in {location}", change)
    return found


def _load_module(location: str, target: str) -> Any:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        parts = new_name(location).split(".")
        if parts[:2] == ["whet", "plugins"] and new_name(error.name or "").startswith("whet.plugins"):
            raise absent(target, parts[2]) from error
        if error.name is not None and (location == error.name or location.startswith(error.name + ".")):
            way = f"it comes with {GAMES}; or " if error.name.startswith("whet_environments") else ""
            found = f"no module {error.name!r} on the Python path"
            raise RegistryError(target, found, change=f"{way}set PYTHONPATH") from error
        raise


def _load_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise RegistryError(str(path), "does not exist", "a Python file with the function", "correct the path")
    name = f"whet_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise RegistryError(str(path), f"imports {error.name}, which is missing here", change=_advice(error)) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _advice(error: ModuleNotFoundError) -> str:
    if (error.name or "").partition(".")[0] == "verl":
        return (
            "write `from whet.plugins.migration.protocol import DataProto`, and import decorators from whet "
            "(`from whet import register_adv_est`), which needs no verl; docs/migrating.md has the forms"
        )
    return "install it, or set PYTHONPATH to its folder"
