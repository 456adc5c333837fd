# SPDX-License-Identifier: Apache-2.0
"""The base class of config sections; `Choice`, which marks a field that names a registered function or class; and
functions on a schema's dotted keys: fields, types in words, suggestions for unknown keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, reduce
from operator import getitem
from typing import Any, ClassVar, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from whet.errors import ConfigError, RegistryError
from whet.options import BOUNDS, words
from whet.registry import Entry, Registry

Values = dict[str, Any]  # by key, as YAML has them: options of a function, the sections of a recipe
ENOUGH_ALIKE = 0.6  # similarity (0 to 1) below which a suggestion would mislead


def key(default: object, meaning: str, **bounds: Any) -> Any:
    """Makes a field of a section: its default, its meaning (for help and docs), and bounds under pydantic's names."""
    return Field(default, description=meaning, **bounds)


class Section(BaseModel):
    """A frozen section of the config, read as attributes (`c.actor.epochs`) or as a dict (`c["actor"]["epochs"]`)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
    command: ClassVar[str] = ""  # the command whose whole config this is; a trainer's is set by `schema_of`

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: object, info: ValidationInfo) -> object:
        """Converts a string to a list of one where a list is expected. Refuses true and false as numbers, and a dot in
        the name of a section."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        match value:
            case str() if get_origin(annotation) is list:
                return [value]
            case bool() if bool not in (annotation, *get_args(annotation)):
                raise ValueError("true and false are no numbers")
            case dict() if get_origin(annotation) is dict and is_section(get_args(annotation)[1]):
                if dotted := [str(name) for name in value if "." in str(name)]:
                    expected = "a name without a dot, which separates the names of sections"
                    raise ConfigError(dotted[0], "has a dot", expected, "rename it")
        return value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # keys, as a dict gives them; pydantic gives pairs
        return iter(self.__dict__)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`; `default` if there is no such key."""
        return self.__dict__.get(key, default)

    def keys(self) -> list[str]:
        """Lists the names of the fields, in order of declaration."""
        return list(self.__dict__)

    def items(self) -> list[tuple[str, Any]]:
        """Lists pairs of name and value, in order of declaration."""
        return list(self.__dict__.items())

    def problems(self, at: SectionPlace) -> Iterable[ConfigError]:
        """Yields errors for values that contradict each other or other sections. Sections of trainers override it."""
        return ()

    def sections(self, key: str = "") -> Iterator[tuple[str, Section]]:
        """Yields the sections below this one, including sections in mappings, then itself; each with its dotted key."""
        for name, value in self.items():
            place = f"{key}.{name}" if key else name
            for inner, below in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(below, Section):
                    yield from below.sections(f"{place}.{inner}" if inner else place)
        yield key, self


@dataclass(frozen=True)
class SectionPlace:
    """The position of a section: its dotted key, and the whole config. `given` names arguments passed as objects."""

    key: str
    whole: Section
    given: Collection[str] = ()

    def of(self, name: str) -> str:
        """The dotted key of a field of the section."""
        return f"{self.key}.{name}" if self.key else name

    @property
    def parent(self) -> Section:
        """The enclosing section."""
        outer: Section = reduce(getitem, self.key.split(".")[:-1], self.whole)
        return outer


@dataclass(frozen=True)
class Choice:
    """Metadata of a field that names a registered function: the registry, and the field with the function's options.

    With `is_checked`, loading a config finds the function and checks its options against its signature. A function that
    is named by a path is imported for this."""

    registry: Registry
    options: str | None = None
    is_checked: bool = True

    def __get_pydantic_json_schema__(self, core_schema: object, handler: Callable[[object], Values]) -> Values:
        """The JSON schema of the field, with the registered names as examples."""
        return {**handler(core_schema), "examples": self.registry.names()}

    def options_key(self, key: str) -> str:
        """The dotted key of the function's options; `key` itself if the section has no field for them."""
        place, dot, _ = key.rpartition(".")
        return key if self.options is None else f"{place}{dot}{self.options}"

    def check(self, key: str, name: str | None, options: Mapping[str, object]) -> None:
        """Checks a name and its options.  Raises: ConfigError for an unknown function, or an unknown option."""
        where = self.options_key(key)
        if name is not None:
            entry_at(self.registry, key, name).resolve_options(options, where)
        elif options:
            raise ConfigError(where, dict(options), f"none, as {key} is not set", f"set {key}, or remove the options")


def entry_at(registry: Registry, key: str, reference: str) -> Entry:
    """Finds the registered function that a key names.  Raises: ConfigError."""
    try:
        return registry[reference]
    except RegistryError as error:
        key = key if error.key == registry.kind else f"{key}: {error.key}"
        raise ConfigError(key, error.found, error.expected, error.change) from error


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
    """Returns the dotted key and the field at a path of names. A path into a field's value gives this field."""
    field = schema.model_fields[path[0]]
    if is_section(field.annotation) and len(path) > 1:
        below, field = field_at(field.annotation, path[1:])
        return f"{path[0]}.{below}", field
    if is_free(field) and len(path) > 2 and is_section(item := get_args(field.annotation)[1]):
        below, field = field_at(item, path[2:])
        return f"{path[0]}.{path[1]}.{below}", field
    return path[0], field


def meaning(schema: type[Section], key: str) -> str:
    """Returns the meaning of a key. A key inside a free mapping has the meaning of the mapping."""
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
    """Finds the valid dotted key that is most similar to `key`; None if none is similar.

    Similarity is the mean over the whole path and the last name: this finds the key for a typing error and for a
    correct name in a wrong section (`actor.lr`, or verl's `actor_rollout_ref.rollout.n`)."""

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
    """Lists candidates for a `key` that misspells the name of a free mapping: adv_option.lam -> adv_options.lam. In a
    mapping of sections, lists the keys of the sections."""
    depth = mapping.count(".") + 1
    head, rest = key.split(".")[:depth], key.split(".")[depth:]
    alike = SequenceMatcher(None, ".".join(head), mapping).ratio() > 0.8
    item = get_args(field.annotation)[1]
    if alike and len(rest) > 1 and is_section(item):
        return [".".join([mapping, rest[0], each]) for each in leaf_fields(item)]
    return [".".join([mapping, *rest])] if rest and alike else []


def describe_type(annotation: object, bounds: tuple[object, ...] = ()) -> str:
    """Describes the type of a field in words, such as 'a whole number > 0 or null'."""
    if is_section(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    return words(annotation, [bound for bound in bounds if type(bound) in BOUNDS], describe_type)
