# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of calls of ...Config and ...Trainer in a Python script. Nothing is run."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

_ARITHMETIC: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_ARITHMETIC |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_MAKERS = ("Config", ".parse_args_and_config", ".parse_args_into_dataclasses")  # of configs
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.ExceptHandler)
_CHANGES = ("update", "pop", "setdefault", "append", "extend", "insert", "remove", "clear")


def arguments_of_calls(tree: ast.Module) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of arguments by name, and those that are neither literals nor constants of the script."""
    values, unread, names = dict[str, Any](), list[str](), _constants(tree) | _flags(tree)
    for call in ast.walk(tree):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not name.endswith(("Config", "Trainer")):
            continue
        if name == "LoraConfig":
            values |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8}  # the defaults of peft, not of TRL
        for each in call.keywords:
            if name.endswith("Trainer") and each.arg not in ("model", "reward_funcs"):
                continue
            try:
                of_rewards = each.arg == "reward_funcs"
                found: Any = _functions(each.value, names) if of_rewards else literal(each.value, names)
                values |= found if each.arg is None else {each.arg: found}
                if isinstance(each.value, ast.Attribute):
                    unread.append(f"{each.arg}={ast.unparse(each.value)}: {found}, the default of that flag")
            except (ValueError, TypeError, SyntaxError, ArithmeticError):
                shown = f"{each.arg}=" if each.arg else "**"
                unread.append(f"{shown}{ast.unparse(each.value)} is not a literal: set it by hand")
    return values, unread


def attributes_of_configs(tree: ast.Module) -> tuple[dict[str, Any], list[str]]:
    """Returns the constants that a script assigns to attributes of its configs, by name, and assignments not read: of
    what is no constant, in a branch or a loop, of several names at once."""
    values, unread, configs = dict[str, Any](), list[str](), _configs(tree)
    names = _constants(tree) | _flags(tree)
    branches = [block for block in ast.walk(tree) if isinstance(block, _BRANCHES)]
    guarded = [block for block in branches if not ast.unparse(block).startswith("if __name__ ==")]
    undecided = {each for block in guarded for each in ast.walk(block)}
    assignments = [each for each in ast.walk(tree) if isinstance(each, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    for node in sorted(assignments, key=lambda node: node.lineno):
        targets = _targets(node)
        for stored in (each for target in targets for each in ast.walk(target)):
            if not (isinstance(stored, ast.Attribute) and ast.unparse(stored.value) in configs):
                continue
            if node in undecided or isinstance(node, ast.AugAssign) or stored not in targets or node.value is None:
                unread.append(f"{ast.unparse(node)} is not read: set {stored.attr} by hand")
                continue
            try:
                values[stored.attr] = literal(node.value, names)
            except (ValueError, TypeError, SyntaxError, ArithmeticError):
                unread.append(f"{stored.attr}={ast.unparse(node.value)} is not a literal: set it by hand")
    return values, unread


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _configs(tree: ast.Module) -> set[str]:
    """Names of configs: given to a trainer as `args`, made by a ...Config(...), or parsed from the command line."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer"):
            found |= {ast.unparse(each.value) for each in node.keywords if each.arg == "args"}
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            targets = _targets(node) if ast.unparse(node.value.func).endswith(_MAKERS) else []
            found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def literal(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """The value of an expression of literals, constants, `dict()` and arithmetic.  Raises: ValueError, ..."""
    written = ast.unparse(node)
    if isinstance(node, (ast.Name, ast.Attribute)) and written in names:
        return literal(names[written], {name: value for name, value in names.items() if name != written})
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        keys: list[ast.expr | None] = [ast.Constant(each.arg) if each.arg else None for each in node.keywords]
        node = ast.Dict(keys, [each.value for each in node.keywords])
    if isinstance(node, ast.Dict):
        merged: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            merged |= literal(value, names) if key is None else {literal(key, names): literal(value, names)}
        return merged
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal(each, names) for each in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](literal(node.left, names), literal(node.right, names))
    return ast.literal_eval(node)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of names that are assigned once and never changed."""
    stored, found = Counter[str](), dict[str, ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        is_changed = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) or isinstance(node, ast.arg)
        if is_changed or (isinstance(node, ast.Attribute) and node.attr in _CHANGES):
            owner = node.value if isinstance(node, (ast.Subscript, ast.Attribute)) else node
            stored[getattr(owner, "id", getattr(owner, "arg", ""))] += 1
    return {name: value for name, value in found.items() if stored[name] == 1}


def _flags(tree: ast.Module) -> dict[str, ast.expr]:
    """The defaults of flags that `parser.add_argument` declares, as `args.NAME`."""
    found = dict[str, ast.expr]()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument") and call.args:
            name = ast.unparse(call.args[-1]).strip("'\"-").replace("-", "_")
            found |= {f"args.{name}": each.value for each in call.keywords if each.arg == "default"}
    return found


def _functions(node: ast.expr, names: Mapping[str, ast.expr]) -> list[str]:
    """Reward functions as they are written: a name, or the call that makes one."""
    node = names.get(ast.unparse(node), node)
    calls = {name: value for name, value in names.items() if isinstance(value, ast.Call)}
    listed = [ast.unparse(each) for each in (node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node])]
    return [ast.unparse(calls[name]) if name in calls else name.strip("'\"") for name in listed]
