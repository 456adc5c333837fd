# SPDX-License-Identifier: Apache-2.0
"""Dotted keys of a config schema: their fields, their types in words, and what an unknown one may mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import TypeGuard, get_args, get_origin

from pydantic.fields import FieldInfo

from whet.config.section import Choice, Section
from whet.options import BOUNDS, words

ENOUGH_ALIKE = 0.6  # similarity (0 to 1) below which a suggestion would mislead


@cache
def leaf_fields(schema: type[Section]) -> Mapping[str, FieldInfo]:
    """The fields with a value (all but sections), by dotted key, in order of declaration."""
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


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Tells whether a type is a section, whose fields are keys."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_free(field: FieldInfo) -> bool:
    """Tells whether the field is a mapping with arbitrary keys."""
    return get_origin(field.annotation) is dict


def field_at(schema: type[Section], path: Sequence[str]) -> tuple[str, FieldInfo]:
    """The dotted key and field at a path of names; where the path goes below a field's value, that field."""
    field = schema.model_fields[path[0]]
    if is_section(field.annotation) and len(path) > 1:
        below, field = field_at(field.annotation, path[1:])
        return f"{path[0]}.{below}", field
    if is_free(field) and len(path) > 2 and is_section(item := get_args(field.annotation)[1]):
        below, field = field_at(item, path[2:])
        return f"{path[0]}.{path[1]}.{below}", field
    return path[0], field


def meaning(schema: type[Section], key: str) -> str:
    """The meaning of a key; for a key inside a free mapping, the meaning of the mapping."""
    return field_at(schema, key.split("."))[1].description or ""


def is_known(schema: type[Section], key: str) -> bool:
    """Tells whether `key` is a field, a section, or a key inside a free mapping."""
    fields = leaf_fields(schema)
    return (
        key in fields
        or any(leaf.startswith(f"{key}.") for leaf in fields)
        or any(key.startswith(f"{leaf}.") for leaf, field in fields.items() if is_free(field))
    )


def nearest_key(schema: type[Section], key: str) -> str | None:
    """The valid dotted key that is most similar to `key`; None if none is similar.

    Similarity is the mean of that of the whole path and that of the last name: this finds the key for a typing error
    and for a correct name in a wrong section (`actor.lr`, or verl's `actor_rollout_ref.rollout.n`)."""

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
    """Candidates below a free mapping whose name `key` misspells: adv_option.lam -> adv_options.lam; in a mapping of
    sections, the keys of those sections."""
    depth = mapping.count(".") + 1
    head, rest = key.split(".")[:depth], key.split(".")[depth:]
    alike = SequenceMatcher(None, ".".join(head), mapping).ratio() > 0.8
    item = get_args(field.annotation)[1]
    if alike and len(rest) > 1 and is_section(item):
        return [".".join([mapping, rest[0], each]) for each in leaf_fields(item)]
    return [".".join([mapping, *rest])] if rest and alike else []


def describe_type(annotation: object, bounds: tuple[object, ...] = ()) -> str:
    """The type of a field in words, such as 'a whole number > 0 or null'."""
    if is_section(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    return words(annotation, [bound for bound in bounds if type(bound) in BOUNDS], describe_type)
