# SPDX-License-Identifier: Apache-2.0
"""A shipped tool: a Python interpreter in the sandbox."""

from __future__ import annotations

import ast
from functools import partial

from whet.options import Count, Positive
from whet.programs.protocol import Limits, Program, open_sandbox
from whet.registry import register_tool


@register_tool("python")
class Python:
    """Runs Python programs in a `sandbox`: `bubblewrap`, a service at http://HOST:PORT, or `unisolated`. `python` may
    name an interpreter with more packages. Each call is a new program."""

    def __init__(
        self,
        *,
        sandbox: str = "bubblewrap",
        seconds: Positive = 10.0,
        memory_mb: Count = 512,
        python: str | None = None,
    ) -> None:
        self._open = partial(open_sandbox, sandbox, python)
        self._limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_bytes=memory_mb * 2**20)

    def python(self, code: str) -> str:
        """Runs a Python program and returns its output. Nothing is kept from one call to the next.

        Args:
            code: the whole program; the value of an expression at its end is printed
        """
        program = Program("python", with_last_value(code), self._limits)
        [ran] = self._open().run(program, [b""])
        output = ran.stdout.decode("utf-8", "replace").strip()
        if ran.end == "ok":
            return output or "(no output)"
        errors = ran.stderr.decode("utf-8", "replace").strip().splitlines()
        why = "\n".join(errors[-3:]) if ran.end == "failed" else f"the limit of {ran.end} ended the program"
        return "\n".join(part for part in (output, f"error: {why}") if part)


def with_last_value(code: str) -> str:
    """Extends a program to print the value of an expression at its end, like an interactive interpreter."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code
    lines = code.encode().split(b"\n")
    before = b"\n".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    value = ast.get_source_segment(code, last) or "None"
    return f"{before.decode()}__value = (\n{value}\n)\nif __value is not None:\n    print(repr(__value))\n"
