# SPDX-License-Identifier: Apache-2.0
"""The trees of source files, parsed once for all tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(file: Path) -> ast.Module:
    """The tree of a file, which nobody changes."""
    return ast.parse(file.read_text(encoding="utf-8"))
