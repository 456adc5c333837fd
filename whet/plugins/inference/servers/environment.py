# SPDX-License-Identifier: Apache-2.0
"""Finds and checks the Python environment of an inference engine, without importing the engine."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from whet.config.schema import ModelConfig
from whet.errors import CHECKOUT, ConfigError

SECONDS = 60.0  # for an interpreter to report its packages
LOOK = """
import importlib.metadata, importlib.util, json, sys
package, *names = sys.argv[1:]
spec = importlib.util.find_spec(package)
versions = [each.version for each in importlib.metadata.distributions() if each.name in names]
print(json.dumps([None if spec is None else spec.origin, (versions or [None])[0]]))
"""


@dataclass(frozen=True)
class Package:
    """The package of an inference engine, with the version that whet supports."""

    title: str
    name: str  # of the package, of `make NAME` and of the environment .venv-NAME
    distributions: tuple[str, ...]
    version: str
    why: str  # reason for this version
    arguments: tuple[str, str]  # pattern of files, and of their classes, that have a field for each argument
    oldest: tuple[int, int] | None = None  # oldest version that runs in plain mode; None: no plain mode

    def runs(self, version: str) -> bool:
        """Tells whether whet supports another version too, through its public interface alone (plain mode)."""
        numbers = [int(each) for each in re.findall(r"\d+", version)[:2]]
        return self.oldest is not None and numbers[:1] == [self.oldest[0]] and numbers >= [*self.oldest]

    @property
    def variable(self) -> str:
        """The name of the environment variable that may have the interpreter's path."""
        return f"WHET_{self.name.upper()}_PYTHON"

    @property
    def how(self) -> str:
        """The advice that ends an error message: how to install the engine and to name its interpreter."""
        where = f"name the interpreter as rollout.engine.options.python or in {self.variable}"
        checkout = CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else "a checkout of whet"
        return f"run `make {self.name}` in {checkout}, and {where}"


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter that has a supported version of the inference engine."""

    python: str
    folder: Path  # of the package
    package: Package
    other: str | None = None  # the installed version, if it is not `package.version`

    @property
    def version(self) -> str:
        """The version of the inference engine."""
        return self.other or self.package.version

    def mentions(self, pattern: str, word: str) -> bool:
        """Tells whether a file of the package that matches `pattern` contains the word."""
        return any(word in file.read_text(encoding="utf-8") for file in self.folder.glob(pattern))

    def check_arguments(self, names: Iterable[str], ours: Iterable[str]) -> None:
        """Checks names of engine arguments.  Raises: ConfigError for an unknown name, or an argument that whet sets."""
        known, package = _engine_arguments(self.folder, self.package), self.package
        for name in names:
            where = f"rollout.engine.options.server.{name}"
            if name in ours:
                raise ConfigError(where, "is set by whet", f"another argument of {package.title}", "take it out")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its arguments are the fields of {self.folder.name}"
                raise ConfigError(where, f"is no engine argument of {package.title} {self.version}", "", hint)


@cache
def find_environment(package: Package, python: str | None) -> Interpreter:
    """Finds an engine's interpreter: `python`, else $WHET_NAME_PYTHON, else in .venv-NAME.  Raises: ConfigError."""
    name, wanted, how = package.name, f"{package.title} {package.version}", package.how
    path = python or os.environ.get(package.variable) or str(CHECKOUT / f".venv-{name}" / "bin" / "python")
    if not Path(path).is_file():
        raise ConfigError(path, "does not exist", f"the Python of an environment with {wanted}", how)
    line = [path, "-c", LOOK, name, *package.distributions]
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(path, f"cannot be run ({error})", "a Python interpreter", how) from error
    if run.returncode:
        [said] = run.stderr.strip().splitlines()[-1:] or ["nothing in stderr"]
        raise ConfigError(path, f"ended with {run.returncode}: {said[-300:]}", "a Python interpreter", how)
    origin, version = json.loads(run.stdout)
    if origin is None:
        raise ConfigError(path, f"has no package {name}", wanted, how)
    is_own = f"{version}.".startswith(f"{package.version}.")
    if version is None or not (is_own or package.runs(version)):
        others = "" if package.oldest is None else f", or plain from {'.'.join(map(str, package.oldest))} on"
        expected = f"{package.version}, {package.why}{others}"
        raise ConfigError(path, f"has {package.title} {version}", expected, how)
    return Interpreter(path, Path(origin).parent, package, None if is_own else version)


@cache
def _engine_arguments(folder: Path, package: Package) -> frozenset[str]:
    """Returns the field names of the engine's argument classes, read from their source."""
    files, classes = package.arguments
    nodes = [node for file in folder.glob(files) for node in ast.parse(file.read_text(encoding="utf-8")).body]
    found = [node for node in nodes if isinstance(node, ast.ClassDef) and fnmatch(node.name, classes)]
    fields = (each.target for node in found for each in node.body if isinstance(each, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


def longest(option: str, server: Mapping[str, Any], positions: int) -> int:
    """Returns the longest sequence that the server accepts.  Raises: ConfigError if it is above `positions`."""
    length = server.get(option, positions)
    if not isinstance(length, int) or not 0 < length <= positions:
        expected = f"1 to {positions}, the positions of the model"
        raise ConfigError(f"rollout.engine.options.server.{option}", length, expected, "lower it, or leave it out")
    return length


def where_found(base: str, model: ModelConfig) -> tuple[str, str]:
    """Returns the paths of model and tokenizer: absolute, as the server has another working folder, or hub names."""
    paths = base, model.tokenizer_path or base
    first, second = (str(Path(path).resolve()) if Path(path).exists() else path for path in paths)
    return first, second
