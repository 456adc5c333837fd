# SPDX-License-Identifier: Apache-2.0
"""Types and ranges of options: reads their annotations, checks values against them, describes them in words.

`cap: Annotated[float, Gt(0)] = 2.0` rejects 0, `level: Literal["token", "sequence"]` rejects other text. nan is never
accepted as a number. An annotation with an unknown name is not checked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
NonNegative = Annotated[float, Ge(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Le(1)]
Cap = Annotated[float, Gt(0)]  # inf: no cap
Count = Annotated[int, Gt(0)]
Number = Annotated[int, Ge(0)]

# By type of bound: its sign, its comparison, its limit.
BOUNDS: dict[type, tuple[str, Callable[[Any, float], bool], Callable[[object], float]]] = {
    Gt: (">", operator.gt, operator.attrgetter("gt")),
    Ge: (">=", operator.ge, operator.attrgetter("ge")),
    Lt: ("<", operator.lt, operator.attrgetter("lt")),
    Le: ("<=", operator.le, operator.attrgetter("le")),
}
WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    list: "a list",
    dict: "a mapping",
    Any: "any value",
}


def read(annotation: object, names: Mapping[str, object] | None = None) -> Any:
    """Evaluates an annotation that is text, with `names`; Any if a name is missing. Without `names`, the annotation was
    read from the source of a shipped function, and uses the names of this module."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(globals() if names is None else names))
    except Exception:  # user code, whose annotations may use names that only a type checker imports
        return Any


def bounds_of(annotation: object) -> Iterator[object]:
    """Yields the bounds in an annotation."""
    for argument in get_args(annotation):
        if isinstance(argument, GroupedMetadata):
            yield from argument
        elif type(argument) in BOUNDS:
            yield argument
        else:
            yield from bounds_of(argument)


def fits(value: object, annotation: object) -> bool:
    """Tells whether the annotation accepts a value."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is Annotated:
        own = () if value is None else bounds_of(Annotated[(Any, *arguments[1:])])
        known = ((bound, *BOUNDS[type(bound)]) for bound in own)
        return fits(value, arguments[0]) and all(compare(value, limit(bound)) for bound, _, compare, limit in known)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits(each, arguments[0]) for each in value)
    if origin is dict and arguments[1] is not Any:
        return isinstance(value, dict) and all(
            fits(each, kind) for pair in value.items() for each, kind in zip(pair, arguments, strict=True)
        )
    if annotation in (int, float):
        return is_number(value) and value == value and (annotation is float or isinstance(value, int))
    kind = origin or annotation
    return not isinstance(kind, type) or isinstance(value, kind)


def as_list(value: Any) -> list[Any]:
    """Returns the items of a list or tuple; any other value is the only item."""
    return [*value] if isinstance(value, list | tuple) else [value]


def is_number(value: object) -> TypeGuard[int | float]:
    """Tells whether a value is a number, finite or not; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def words(annotation: Any, bounds: Sequence[object] = (), inner: Callable[[Any], str] | None = None) -> str:
    """Describes an annotation in words: "a whole number > 0 or null"; `inner` describes nested annotations."""
    inner = inner or words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words(arguments[0], list(bounds_of(annotation)), inner)
    if origin in (Union, UnionType):
        return " or ".join(words(each, bounds) if each in (int, float) else inner(each) for each in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin is tuple:
        return f"a list of {len(arguments)}, each {inner(arguments[0])}"
    if origin in (list, Sequence):
        return f"a list, each {inner(arguments[0])}"
    if origin is dict and arguments[1] is not Any:
        return f"a mapping, each key {inner(arguments[0])}, each value {inner(arguments[1])}"
    kind = WORDS.get(origin or annotation) or f"a {(origin or annotation).__name__}"
    limits = [(sign, of(bound)) for each, (sign, _, of) in BOUNDS.items() for bound in bounds if type(bound) is each]
    if any(math.isinf(limit) for _, limit in limits):
        kind = kind.replace("a number", "a finite number")
    ranges = [f"{sign} {limit}" for sign, limit in limits if not math.isinf(limit)]
    return f"{kind} {' and '.join(ranges)}".rstrip()
