# SPDX-License-Identifier: Apache-2.0
"""Digests of data and code that a config names: equal digests mean that a run or an evaluation can go on."""

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
from whet.config.section import Section
from whet.options import as_list
from whet.registry import PACKAGE
from whet.types import Example, Prompt

Items = Sequence[Prompt] | Sequence[Example]


def digests(
    config: Section, train: Items, val: Items, reward: Callable[..., Any] | None = None, *, command: str = ""
) -> dict[str, str]:
    """Returns digests, by key: of the data rows; of the code files that `config` and `command` name, and the files they
    import; and of a reward function passed as an object, if its source is known."""
    found = {f"data.{name}_files, rows": _of_rows(rows) for name, rows in (("train", train), ("val", val)) if rows}
    for key, value in (("command", command), *flatten(config.model_dump(mode="json"))):
        for target in as_list(value):
            if isinstance(target, str) and (file := _file_of(target)) is not None:
                found[f"{key}, code in {file.name}"] = digest_of(file.read_bytes())
                for name, each in _imported(file).items():
                    found[f"{key}, code in {name}"] = digest_of(each.read_bytes())
    with suppress(OSError, TypeError):  # typed at a prompt, or no function
        found |= {"reward.given, code": digest_of(inspect.getsource(reward).encode())} if reward is not None else {}
    return found


def digest_of(content: bytes) -> str:
    """Returns the digest of a file's content."""
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def _of_rows(rows: Items) -> str:
    """Digest of the parts of the rows that a step reads. An object that JSON cannot hold counts by its type only."""
    found = hashlib.sha256()
    for row in rows:
        read = (*row.content, [media.digest for media in row.media]) if row.media else row.content
        found.update(json.dumps(read, skipkeys=True, default=lambda each: type(each).__name__).encode())
    return digest_of(found.digest())


def _file_of(target: str) -> Path | None:
    """The file of `path/file.py:function` or `package.module:function`; None for whet's own files and other text."""
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
    """The files that `file` imports, directly or indirectly, by path below the folder of its package. Reads import
    statements without running them."""
    file = file.absolute()
    root = next(folder for folder in file.parents if not (folder / "__init__.py").is_file())
    found, waiting = {file}, [file]
    while waiting:
        code = waiting.pop()
        with suppress(SyntaxError, ValueError, OSError, IndexError):  # the error is raised when the code runs
            for base, name in _import_names(ast.parse(code.read_bytes()), code, root):
                for place in [each for each in (base / name, *(base / name).parents) if base in each.parents]:
                    for path in {place.with_name(f"{place.name}.py"), place / "__init__.py"} - found:
                        if path.is_file() and not path.resolve().is_relative_to(PACKAGE):
                            found.add(path)
                            waiting.append(path)
    return {os.path.relpath(path, root): path for path in found - {file}}


def _import_names(tree: ast.AST, code: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yields (folder, path below it) for each file that an import may mean. An imported name may be a file too."""
    for node in ast.walk(tree):
        bases, names = [code.parent, root], list[str]()
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            bases = [code.parents[node.level - 1]] if node.level else bases
            names = [f"{node.module or ''}.{each.name}" for each in node.names]
        yield from ((base, name.strip(".").replace(".", "/")) for base in bases for name in names)
