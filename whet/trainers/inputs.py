# SPDX-License-Identifier: Apache-2.0
"""Digests of the data and the code that a run is made of, so that a resumed run knows whether they changed."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.config.compose import flatten
from whet.config.schema import SFTConfig, TrainConfig
from whet.data.supervised import SupervisedExample
from whet.registry import PACKAGE
from whet.types import Prompt

Rows = Sequence[Prompt] | Sequence[SupervisedExample]


def digests(
    config: TrainConfig | SFTConfig, train: Rows, val: Rows, reward: Callable[..., Any] | None = None
) -> dict[str, str]:
    """Returns the digests of the rows, of the files whose functions the config names and of those beside them that they
    import, by key, and of a reward function that was given as an object, as far as its source is known."""
    found = {f"data.{name}_files, rows": _of_rows(rows) for name, rows in (("train", train), ("val", val)) if rows}
    for key, value in flatten(config.model_dump(mode="json")):
        for target in value if isinstance(value, list) else [value]:
            if isinstance(target, str) and (file := _file_of(target)) is not None:
                found[f"{key}, code in {file.name}"] = _of(file.read_bytes())
                for name, each in _imported(file).items():
                    found[f"{key}, code in {name}"] = _of(each.read_bytes())
    with suppress(OSError, TypeError):  # typed at a prompt, or no function
        found |= {"reward.given, code": _of(inspect.getsource(reward).encode())} if reward is not None else {}
    return found


def _of(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def _of_rows(rows: Rows) -> str:
    """Digest of all that a step reads of them; of an object that is not plain only the type counts."""
    found = hashlib.sha256()
    for row in rows:
        read: tuple[Any, ...]
        if isinstance(row, Prompt):
            read = row.token_ids, row.data_source, row.ground_truth, row.extra_info
        else:
            read = row.input_ids, row.loss_mask
        found.update(json.dumps(read, skipkeys=True, default=lambda each: type(each).__name__).encode())
    return _of(found.digest())


def _file_of(target: str) -> Path | None:
    """The file of `path/file.py:function` or `package.module:function`; None for whet's own, and for other text."""
    location, _, name = target.rpartition(":")
    if not name.isidentifier():
        return None
    path = Path(location).expanduser() if location.endswith(".py") else None
    if location.replace(".", "").isidentifier() and path is None:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(location)
            path = Path(spec.origin) if spec is not None and spec.origin is not None else None
    return path if path is not None and path.is_file() and not path.resolve().is_relative_to(PACKAGE) else None


def _imported(file: Path) -> dict[str, Path]:
    """The files that a file imports, and those that these import, by their paths below the folder that its package lies
    in; import statements are read, nothing is run."""
    file = file.absolute()
    root = next(folder for folder in file.parents if not (folder / "__init__.py").is_file())
    found, waiting = {file}, [file]
    while waiting:
        code = waiting.pop()
        with suppress(SyntaxError, ValueError, OSError, IndexError):  # it will say so where it is run
            for base, name in _import_names(ast.parse(code.read_bytes()), code, root):
                for place in [each for each in (base / name, *(base / name).parents) if base in each.parents]:
                    for path in {place.with_name(f"{place.name}.py"), place / "__init__.py"} - found:
                        if path.is_file() and not path.resolve().is_relative_to(PACKAGE):
                            found.add(path)
                            waiting.append(path)
    return {os.path.relpath(path, root): path for path in found - {file}}


def _import_names(tree: ast.AST, code: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """The folders and the paths below them that import statements may mean: what a module gives may be one too."""
    for node in ast.walk(tree):
        bases, names = [code.parent, root], list[str]()
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            bases = [code.parents[node.level - 1]] if node.level else bases
            names = [f"{node.module or ''}.{each.name}" for each in node.names]
        yield from ((base, name.strip(".").replace(".", "/")) for base in bases for name in names)
