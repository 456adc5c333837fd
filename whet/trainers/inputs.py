# SPDX-License-Identifier: Apache-2.0
"""Digests of the data and the code that a run is made of, so that a resumed run knows whether they changed."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
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
                root = _root_of(file)
                for each in _imported(file, root) - {file}:
                    found[f"{key}, code in {each.relative_to(root)}"] = _of(each.read_bytes())
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


def _root_of(file: Path) -> Path:
    """The folder from which a file's neighbours are imported: its own, or the one that its package lies in."""
    folder = file.absolute().parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _imported(file: Path, root: Path) -> set[Path]:
    """The files below `root` that a file imports, and those that these import, with itself; nothing is run."""
    found, waiting = {file}, [file]
    while waiting:
        code = waiting.pop()
        with suppress(SyntaxError, ValueError, OSError):  # it will say so where it is run
            names = list(_imported_names(ast.parse(code.read_bytes()), code.absolute().relative_to(root).parent.parts))
            paths = [
                path
                for base in {code.absolute().parent, root}
                for name in names
                for path in (base.joinpath(*name).with_suffix(".py"), base.joinpath(*name, "__init__.py"))
            ]
            new = {path for path in paths if path.is_file() and not path.resolve().is_relative_to(PACKAGE)}
            new -= {each.absolute() for each in found}
            found |= new
            waiting += new
    return found


def _imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules of import statements, wherever they stand, and their packages; a name that is imported from one may
    be a module too."""
    for node in ast.walk(tree):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(each.name.split(".")) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else ()
            module = (*origin, *(node.module.split(".") if node.module else ()))
            names = [module, *((*module, each.name) for each in node.names if each.name != "*")]
        for name in names:
            yield from (name[:size] for size in range(1, len(name) + 1))
