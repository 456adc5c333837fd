# SPDX-License-Identifier: Apache-2.0
"""Dotted keys of a schema: which there are, which is meant by one that is not there, and what one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from whet.config.schema import Section

ENOUGH_ALIKE = 0.6  # of 1; below this a suggestion misleads more than it helps
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    list: "a list",
    dict: "a mapping",
    Any: "any value",
}
BOUNDS: tuple[tuple[type[Any], Callable[[Any], str]], ...] = (
    (Gt, lambda bound: f"> {bound.gt}"),
    (Ge, lambda bound: f">= {bound.ge}"),
    (Le, lambda bound: f"<= {bound.le}"),
    (Lt, lambda bound: f"< {bound.lt}"),
)


@cache
def leaf_fields(schema: type[Section]) -> Mapping[str, FieldInfo]:
    """The fields that hold a value, by dotted key, in the order in which they are declared."""
    fields: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        if is_section(field.annotation):
            fields |= {f"{name}.{key}": leaf for key, leaf in leaf_fields(field.annotation).items()}
        else:
            fields[name] = field
    return fields


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Whether a field of this type has keys of its own."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_free(field: FieldInfo) -> bool:
    """Whether the field is a mapping whose keys are the user's."""
    return get_origin(field.annotation) is dict


def field_at(schema: type[Section], path: Sequence[str]) -> tuple[str, FieldInfo]:
    """The field that a path of names leads to, or the last one on the way where the path goes on below it."""
    field = schema.model_fields[path[0]]
    if is_section(field.annotation) and len(path) > 1:
        below, field = field_at(field.annotation, path[1:])
        return f"{path[0]}.{below}", field
    if is_free(field) and len(path) > 2 and is_section(item := get_args(field.annotation)[1]):
        below, field = field_at(item, path[2:])
        return f"{path[0]}.{path[1]}.{below}", field
    return path[0], field


def meaning(schema: type[Section], key: str) -> str:
    """What a key is for; of a key in a mapping that is the user's, what the mapping is for."""
    return field_at(schema, key.split("."))[1].description or ""


def is_known(schema: type[Section], key: str) -> bool:
    """Whether `key` is a value, a section, or lies in a mapping whose keys are the user's."""
    fields = leaf_fields(schema)
    return (
        key in fields
        or any(leaf.startswith(f"{key}.") for leaf in fields)
        or any(key.startswith(f"{leaf}.") for leaf, field in fields.items() if is_free(field))
    )


def nearest_key(schema: type[Section], key: str) -> str | None:
    """The valid dotted key that is most like `key`, None where nothing is like it.

    Likeness is the mean over the whole path and over the last name, so that a slip of a letter finds its key, and so
    does a right name in a wrong section (`actor.lr`, or `actor_rollout_ref.rollout.n` as verl has it)."""

    def likeness(candidate: str) -> float:
        last, wanted = candidate.rpartition(".")[2], key.rpartition(".")[2]
        return (SequenceMatcher(None, key, candidate).ratio() + SequenceMatcher(None, wanted, last).ratio()) / 2

    best = max(_candidates(schema, key), key=likeness)
    return best if likeness(best) >= ENOUGH_ALIKE else None


def _candidates(schema: type[Section], key: str) -> list[str]:
    candidates: list[str] = []
    for leaf, field in leaf_fields(schema).items():
        candidates += [leaf, *(leaf.rsplit(".", up)[0] for up in range(1, leaf.count(".") + 1))]
        if is_free(field):
            candidates += _below(leaf, field, key)
    return candidates


def _below(mapping: str, field: FieldInfo, key: str) -> list[str]:
    """`key` moved below `mapping`, if it looks like a misspelling of that: adv_option.lam -> adv_options.lam; in a
    mapping of sections the keys that these have."""
    depth = mapping.count(".") + 1
    head, rest = key.split(".")[:depth], key.split(".")[depth:]
    alike = SequenceMatcher(None, ".".join(head), mapping).ratio() > 0.8
    item = get_args(field.annotation)[1]
    if alike and len(rest) > 1 and is_section(item):
        return [".".join([mapping, rest[0], each]) for each in leaf_fields(item)]
    return [".".join([mapping, *rest])] if rest and alike else []


def describe_type(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """What a field takes, in words a user knows from YAML: 'a whole number > 0 or null'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0], tuple(arguments[1:]))
    if origin in (Union, UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe_type(arguments[0])}"
    if origin is list:
        return f"a list, each {describe_type(arguments[0])}"
    if origin is dict:
        return WORDS[dict]
    if is_section(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    limits = [words(bound) for kind, words in BOUNDS for bound in bounds if isinstance(bound, kind)]
    return f"{WORDS[annotation]} {' and '.join(limits)}".rstrip()
