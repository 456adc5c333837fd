# SPDX-License-Identifier: Apache-2.0
"""Changed programs; `python -m tests.plugins.scores.mutants` writes docs/mutants.md, the mutants of HumanEval that
pass.

It needs HumanEval beside the repository (shared/data) and bubblewrap, and takes a few minutes."""

from __future__ import annotations

import ast
import copy
import difflib
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.plugins.scores.code import compute_score
from whet.programs.protocol import open_sandbox

ROOT = Path(__file__).parents[3]
HUMAN_EVAL = ROOT.parent / "shared/data/humaneval/HumanEval.jsonl.gz"
PAGE = ROOT / "docs/mutants.md"

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
    """Replaces the node at a position in the walk."""

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
    made = [ast.unparse(_Replace(place).visit(copy.deepcopy(tree))) for place in chosen]
    return [each for each in made if each != ast.unparse(tree)]  # `return None` stays as it is


@dataclass(frozen=True)
class Mutant:
    """A mutant of a canonical solution: whether `code` pays it, and whether it passes without any sandbox."""

    task: str
    change: str  # the lines before and after, as they stand in the table
    is_paid: bool
    passes: bool


def of_human_eval() -> tuple[list[str], list[Mutant]]:
    """Returns the tasks whose canonical solution is not paid; the mutants, at most four of a task."""
    rows = [json.loads(line) for line in gzip.decompress(HUMAN_EVAL.read_bytes()).splitlines()]
    wholes = [f"{row['prompt']}{row['canonical_solution']}" for row in rows]
    pairs = [
        (row, whole, mutant)
        for row, whole in zip(rows, wholes, strict=True)
        for mutant in mutants(whole, 4)
        if _beside(mutant, row["entry_point"]) == _beside(whole, row["entry_point"])
    ]
    open_sandbox("bubblewrap", None, "{}", ())
    with ThreadPoolExecutor(2) as pool:
        unpaid = [row["task_id"] for row, ok in zip(rows, pool.map(_is_paid, rows, wholes), strict=True) if not ok]
        found = pool.map(
            lambda each: Mutant(
                each[0]["task_id"], _change(*each[1:]), _is_paid(each[0], each[2]), _passes(each[0], each[2])
            ),
            pairs,
        )
        return unpaid, list(found)


def _beside(source: str, name: str) -> list[str]:
    """The code but for the tested function: functions of the prompt, which the tests take from the prompt."""
    nodes = ast.parse(source).body
    return [ast.unparse(each) for each in nodes if not (isinstance(each, ast.FunctionDef) and each.name == name)]


def _is_paid(row: dict[str, Any], source: str) -> bool:
    truth = {"test": row["test"], "entry_point": row["entry_point"]}
    return bool(compute_score(f"```python\n{source}\n```", truth, {"prompt": row["prompt"]}, seconds=5.0)["reward"])


def _passes(row: dict[str, Any], source: str) -> bool:
    code = f"{source}\n{row['test']}\ncheck({row['entry_point']})\n"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=5.0)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _change(whole: str, mutant: str) -> str:
    """Cells of a table: the line in the solution as `ast` writes it, its text before and after."""
    before, after = ast.unparse(ast.parse(whole)).splitlines(), mutant.splitlines()
    for kind, start, end, begin, stop in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            texts = [" ".join(map(str.strip, part)) for part in (before[start:end], after[begin:stop])]
            return f"{start + 1} | " + " | ".join(f"`{text}`".replace("|", "\\|") for text in texts)
    raise ValueError(f"the mutant is the program itself: {mutant}")


def page(found: list[Mutant]) -> str:
    """The text of docs/mutants.md."""
    paid = [each for each in found if each.is_paid]
    rows = "\n".join(f"| {each.task} | {each.change} |" for each in paid)
    return f"""# Mutants of HumanEval

<!-- `python -m tests.plugins.scores.mutants` writes this page; `tests/plugins/scores/test_code.py` compares it. -->

In these {len(found)} programs, one expression of the tested function of a canonical solution of HumanEval is changed;
there are at most four programs for a task. `code`
([Rewards](rewards.md#programs-and-tests)) pays {len(paid)} of them. The same programs, and no others, pass HumanEval's
tests without any sandbox: either the change makes no difference, or the tests do not detect it.

| task | line | before | after |
|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    PAGE.write_text(page(of_human_eval()[1]), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
