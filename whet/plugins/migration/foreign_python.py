# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of ...Config and ...Trainer calls in a Python script, without running it."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from whet.config.section import Values

N = TypeVar("N", bound=ast.AST)
Operator = Callable[[Any, Any], object]
Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign
_ARITHMETIC: dict[type[ast.operator], Operator] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_ARITHMETIC |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_ARITHMETIC |= {ast.Pow: operator.pow}
_COMPARISONS: dict[type[ast.cmpop], Operator] = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt}
_COMPARISONS |= {ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_MAKERS = ("Config", ".parse_args_and_config", ".parse_args_into_dataclasses")  # of configs
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory")  # arguments that name functions and classes
_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.ExceptHandler)
_QUOTES = "'\"-"
DEFAULTS = {"LoraConfig": {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}}  # of peft, not of TRL
_CHANGES = ("update", "pop", "setdefault", "append", "extend", "insert", "remove", "clear")


def arguments_of_calls(tree: ast.Module, path: str = "") -> tuple[Values, list[str], str]:
    """Returns three things: the argument values by name; the arguments that are neither literals nor constants; the
    names of the configs and trainers. A function that the script at `path` defines becomes PATH:NAME."""
    values, unread, called, names = Values(), list[str](), list[str](), constants(tree)
    own = {each.name for each in tree.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    for call in _nodes(tree, ast.Call):
        name = ast.unparse(call.func).rpartition(".")[2]
        if not name.endswith(("Config", "Trainer")):
            continue
        called.append(name)
        values |= DEFAULTS.get(name, {})
        first = ("model", "ref_model") if name in ("DPOTrainer", "KTOTrainer") else ("model",)
        models = zip(first, call.args, strict=False) if name.endswith("Trainer") else ()
        for each in [*(ast.keyword(*model) for model in models), *call.keywords]:
            if each.arg in _FUNCTIONS:
                listed = _functions(each.value, names)
                values[each.arg] = [f"{path}:{name}" if path and name in own else name for name in listed]
            elif each.arg in ("model", "ref_model") or not name.endswith("Trainer"):
                found = _value(each.arg, each.value, names, unread)
                values |= {key: value for key, value in found.items() if key != "ref_model" or value is not None}
                if isinstance(each.value, ast.Attribute):
                    unread += [
                        f"{key}={ast.unparse(each.value)}: {found[key]}, the default of that flag" for key in found
                    ]
    return values, unread, " ".join(sorted(called, key=lambda name: not name.endswith("Trainer")))


def attributes_of_configs(tree: ast.Module) -> tuple[Values, list[str]]:
    """Returns the constants that a script assigns to attributes of its configs, by name, and the assignments that it
    does not read: of values that are not constant, in a branch or loop, or to several names at once."""
    values, unread, configs, names = Values(), list[str](), _configs(tree), constants(tree)
    guarded = [block for block in _nodes(tree, *_BRANCHES) if not ast.unparse(block).startswith("if __name__ ==")]
    undecided = {each for block in guarded for each in ast.walk(block)}
    assignments: Iterator[Assignment] = _nodes(tree, ast.Assign, ast.AugAssign, ast.AnnAssign)
    for node in sorted(assignments, key=lambda node: node.lineno):
        targets = _targets(node)
        for stored in (each for target in targets for each in _nodes(target, ast.Attribute)):
            if ast.unparse(stored.value) not in configs:
                continue
            if node in undecided or isinstance(node, ast.AugAssign) or stored not in targets or node.value is None:
                unread.append(f"{ast.unparse(node)} is not read: set {stored.attr} by hand")
            else:
                values |= _value(stored.attr, node.value, names, unread)
    return values, unread


def _value(name: str | None, node: ast.expr, names: Mapping[str, ast.expr], unread: list[str]) -> Values:
    """Returns the value of an argument, or all values of a mapping after **; notes an unknown value in `unread`."""
    try:
        return {name: literal(node, names)} if name else {**literal(node, names)}
    except (ValueError, TypeError):
        unread.append(f"{f'{name}=' if name else '**'}{ast.unparse(node)} is not a literal: set it by hand")
        return {}


def _nodes(tree: ast.AST, *kinds: type[N]) -> Iterator[N]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def _targets(node: Assignment) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _configs(tree: ast.Module) -> set[str]:
    """Returns variables with configs: a trainer's `args`, results of ...Config(...), and parsed command lines."""
    trainers = [call for call in _nodes(tree, ast.Call) if ast.unparse(call.func).endswith("Trainer")]
    found = {ast.unparse(each.value) for call in trainers for each in call.keywords if each.arg == "args"}
    assignments: Iterator[Assignment] = _nodes(tree, ast.Assign, ast.AnnAssign)
    for node in assignments:
        match node.value:
            case ast.Call(made) if ast.unparse(made).endswith(_MAKERS):
                found |= {each.id for target in _targets(node) for each in _nodes(target, ast.Name)}
    return found


class Budget:
    """Limits the reading of a script: the number of steps, and the characters and digits of its values."""

    MAX_STEPS, MAX_TEXT, MAX_ALL, MAX_BITS = 200_000, 100_000, 20_000_000, 256

    def __init__(self) -> None:
        self.steps = self.characters = 0

    def step(self, count: int = 1) -> None:
        """Counts steps.  Raises: TooMuch."""
        self.steps += count
        if self.steps > self.MAX_STEPS:
            raise TooMuch(f"it takes more than {self.MAX_STEPS:,} steps")

    def text(self, text: str) -> str:
        """Counts the characters of a text, and returns the text.  Raises: TooMuch."""
        self.characters += len(text)
        if len(text) > self.MAX_TEXT or self.characters > self.MAX_ALL:
            raise TooMuch(f"a value has more than {self.MAX_TEXT:,} characters, or all together {self.MAX_ALL:,}")
        return text


class TooMuch(Exception):  # noqa: N818
    """Raised for a script that exceeds a limit; `foreign_files.read` adds the script's name to the error."""


def calculated(text: str, values: Mapping[str, Any] | None = None, budget: Budget | None = None) -> Any:
    """Evaluates an expression that may use the names in `values`.  Raises: ValueError."""
    try:
        names = {name: ast.parse(repr(value), mode="eval").body for name, value in (values or {}).items()}
        return literal(ast.parse(text.strip(), mode="eval").body, names, budget)
    except SyntaxError as error:
        raise ValueError(f"{text[:60]!r} is no expression") from error


def literal(node: ast.expr, names: Mapping[str, ast.expr], budget: Budget | None = None) -> Any:
    """Evaluates literals, `names`, `dict()`, `list()`, `range()`, arithmetic, comparisons.  Raises: ValueError."""
    try:
        return _literal(node, names, budget or Budget())
    except (TypeError, SyntaxError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{error}, in {ast.unparse(node)[:60]!r}") from error


def _literal(node: ast.expr, names: Mapping[str, ast.expr], budget: Budget) -> Any:
    budget.step()
    read = partial(_literal, names=names, budget=budget)
    match node:
        case ast.Name() | ast.Attribute() if (written := ast.unparse(node)) in names:
            return _literal(names[written], {name: value for name, value in names.items() if name != written}, budget)
        case ast.Call(func=ast.Name("dict"), args=[]):
            keys: list[ast.expr | None] = [ast.Constant(each.arg) if each.arg else None for each in node.keywords]
            return read(ast.Dict(keys, [each.value for each in node.keywords]))
        case ast.Call(func=ast.Name("list"), args=[ast.List() | ast.Call(func=ast.Name("range")) as items]):
            return read(items)
        case ast.Call(func=ast.Name("range"), args=[_, *_]):
            return list(range(*map(read, node.args))[: budget.MAX_TEXT])
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            parts = (read(value) if key is None else {read(key): read(value)} for key, value in pairs)
            return {key: value for part in parts for key, value in part.items()}
        case ast.List() | ast.Tuple():
            return [read(each) for each in node.elts]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _combined(_ARITHMETIC[type(node.op)], read(node.left), read(node.right), budget)
        case ast.BoolOp(op):
            values = [read(each) for each in node.values]
            return all(values) if type(op) is ast.And else any(values)
        case ast.IfExp():
            return read(node.body if read(node.test) else node.orelse)
        case ast.Call(func=ast.Name("int" | "float" | "str" as kind), args=[value], keywords=[]):
            return {"int": int, "float": float, "str": str}[kind](read(value))
        case ast.Call(args=[_, default]) if ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get"):
            return read(default)
        case ast.UnaryOp(op=ast.Not()):
            return not read(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            return -read(node.operand)
        case ast.Subscript(slice=ast.Slice(lower=low, upper=high, step=step)):
            bounds = [None if each is None else read(each) for each in (low, high, step)]
            if isinstance(whole := read(node.value), str):
                raise ValueError(f"{whole[:60]!r} is no list")
            return whole[slice(*bounds)]
        case ast.Subscript():
            return read(node.value)[read(node.slice)]
        case ast.Compare(ops=[sign], comparators=[right]) if type(sign) in _COMPARISONS:
            return _COMPARISONS[type(sign)](read(node.left), read(right))
    return ast.literal_eval(node)


def _combined(function: Operator, left: Any, right: Any, budget: Budget) -> object:
    """Applies an operator to two numbers, or adds two texts or lists.  Raises: ValueError beyond a limit."""
    numbers = all(isinstance(each, (int, float)) for each in (left, right))
    if (not numbers and function is not operator.add) or (function is operator.pow and abs(right) > budget.MAX_BITS):
        raise ValueError("no arithmetic of numbers")
    found = function(left, right)
    match found:
        case int() if found.bit_length() > budget.MAX_BITS:
            raise ValueError("a number of too many digits")
        case str() | list():
            budget.text(" " * min(len(found), budget.MAX_TEXT + 1))
    return found


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values of names that are assigned once and never changed, and the default of each flag that
    `parser.add_argument` declares, as `args.NAME`."""
    stored, found = Counter[str](), dict[str, ast.expr]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(name), *_]):
                found[name] = node.value
            case ast.arg(name) | ast.Name(name, ast.Store() | ast.Del()):
                stored[name] += 1
            case ast.Subscript(ast.Name(name), ctx=ast.Store() | ast.Del()):
                stored[name] += 1
            case ast.Attribute(ast.Name(name), changed, ctx) if changed in _CHANGES or type(ctx) is not ast.Load:
                stored[name] += 1
    flags = [call for call in _nodes(tree, ast.Call) if ast.unparse(call.func).endswith(".add_argument") and call.args]
    return {name: value for name, value in found.items() if stored[name] == 1} | {
        f"args.{ast.unparse(call.args[-1]).strip(_QUOTES).replace('-', '_')}": each.value
        for call in flags
        for each in call.keywords
        if each.arg == "default"
    }


def _functions(node: ast.expr, names: Mapping[str, ast.expr]) -> list[str]:
    """Returns the functions in `node` as source text: a name, or the call that makes a function."""
    node = names.get(ast.unparse(node), node)
    calls = {name: value for name, value in names.items() if isinstance(value, ast.Call)}
    listed = [ast.unparse(each) for each in (node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node])]
    return [ast.unparse(calls[name]) if name in calls else name.strip("'\"") for name in listed]
