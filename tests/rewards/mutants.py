# SPDX-License-Identifier: Apache-2.0
"""Programs with one line changed."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
OPERATORS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.FloorDiv}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one change in itself."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.Compare) and type(made.ops[0]) in COMPARISONS:
        made.ops[0] = COMPARISONS[type(made.ops[0])]()
        yield made
    elif isinstance(made, ast.BinOp) and type(made.op) in OPERATORS:
        made.op = OPERATORS[type(made.op)]()
        yield made
    elif isinstance(made, ast.Constant) and type(made.value) is int:
        made.value += 1
        yield made
    elif isinstance(made, ast.BoolOp):
        made.op = ast.Or() if isinstance(made.op, ast.And) else ast.And()
        yield made
    elif isinstance(made, ast.Return) and made.value is not None:
        made.value = ast.Constant(None)
        yield made


class _Replace(ast.NodeTransformer):
    """Puts a node in the place of the node at a position in the walk."""

    def __init__(self, position: int) -> None:
        self.left = position

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Counts the nodes that can be changed."""
        for made in changed(node):
            if self.left == 0:
                self.left = -1
                return ast.copy_location(made, node)
            self.left -= 1
        return super().generic_visit(node)


def mutants(source: str, count: int) -> list[str]:
    """At most `count` mutants, spread evenly over the places that can be changed."""
    tree = ast.parse(source)
    places = sum(1 for node in ast.walk(tree) for _ in changed(node))
    chosen = sorted({round(place * (places - 1) / max(1, count - 1)) for place in range(min(count, places))})
    return [ast.unparse(_Replace(place).visit(copy.deepcopy(tree))) for place in chosen]
