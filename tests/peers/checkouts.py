# SPDX-License-Identifier: Apache-2.0
"""How tests call a peer that no package index has: its own functions, from a checkout that a variable names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ANNOTATIONS = annotations.compiler_flag  # annotations name types of modules that are not here


def checkout(variable: str, file: str) -> Path:
    """The folder of the checkout that the variable names; without one that has `file` the test is skipped."""
    folder = Path(os.environ.get(variable) or "unset")
    if not (folder / file).is_file():
        pytest.skip(f"{variable} names no checkout that has {file} (CONTRIBUTING.md)")
    return folder


def definitions(file: Path, *only: str, **given: Any) -> SimpleNamespace:
    """The definitions of a file, run as they are: all, or `only` these functions and classes. `given` are the names
    that it imports from modules not here."""
    found: dict[str, Any] = {"__name__": file.stem, **given}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if only and isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in only:
            continue
        code = compile(ast.Module([node], []), str(file), "exec", flags=ANNOTATIONS, dont_inherit=True)
        try:
            exec(code, found)
        except ImportError:
            assert isinstance(node, (ast.Import, ast.ImportFrom)), f"{file}:{node.lineno}"
    found.update(given)
    return SimpleNamespace(**found)


class Words:
    """An enumeration of which only the names are read."""

    def __getattr__(self, name: str) -> str:
        return name


class Columns(dict[str, Tensor]):
    """A dict of columns with the size that a tensordict tells."""

    @property
    def batch_size(self) -> torch.Size:
        """The number of rows, as a shape."""
        return next(iter(self.values())).shape[:1]


class Rows:
    """The little of a peer's DataProto that its functions of one batch read."""

    def __init__(self, columns: Mapping[str, Tensor], **meta_info: Any) -> None:
        self.batch, self.meta_info = Columns(columns), meta_info
        self.non_tensor_batch: dict[str, Any] = {}

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def select(self, *names: Any) -> Rows:
        """All columns."""
        return self

    def split(self, size: int) -> list[Rows]:
        """Pieces of `size` rows."""
        return list(self._split(size))

    def _split(self, size: int) -> Iterator[Rows]:
        for start in range(0, len(self), size):
            yield Rows({name: column[start : start + size] for name, column in self.batch.items()}, **self.meta_info)
