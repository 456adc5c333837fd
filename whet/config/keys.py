# SPDX-License-Identifier: Apache-2.0
"""Dotted keys of a schema: which there are, which is meant by one that is not there, and what one takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any, TypeGuard, get_args, get_origin

from pydantic.fields import FieldInfo

from whet.config.choice import Choice
from whet.config.schema import Section
from whet.options import BOUNDS, words

ENOUGH_ALIKE = 0.6  # of 1; below this a suggestion misleads more than it helps


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


@cache
def choices(schema: type[Section]) -> Mapping[str, Choice]:
    """The fields that name a registered function, by dotted key."""
    return {
        key: mark for key, field in leaf_fields(schema).items() for mark in field.metadata if isinstance(mark, Choice)
    }


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Tells whether a field of this type has keys of its own."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_free(field: FieldInfo) -> bool:
    """Tells whether the field is a mapping whose keys are the user's."""
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
    """The meaning of a key; of one in a mapping that is the user's, the meaning of the mapping."""
    return field_at(schema, key.split("."))[1].description or ""


def is_known(schema: type[Section], key: str) -> bool:
    """Tells whether `key` is a value, a section, or lies in a mapping whose keys are the user's."""
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
    """The type of a field in words that a user knows from YAML: 'a whole number > 0 or null'."""
    if is_section(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    return words(annotation, [bound for bound in bounds if type(bound) in BOUNDS], describe_type)
