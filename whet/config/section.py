# SPDX-License-Identifier: Apache-2.0
"""The base class of config sections, and `Choice`, which marks a field that names a registered function or class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from whet.errors import ConfigError, RegistryError
from whet.registry import Entry, Registry

Values = dict[str, Any]  # by key, as YAML has them: options of a function, the sections of a recipe


def key(default: object, meaning: str, **bounds: Any) -> Any:
    """A field of a section: its default, its meaning for help and docs, and bounds with pydantic's names."""
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
        """Converts a string to a list of one where a list is expected; rejects true and false as numbers."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        match value:
            case str() if get_origin(annotation) is list:
                return [value]
            case bool() if bool not in (annotation, *get_args(annotation)):
                raise ValueError("true and false are no numbers")
        return value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # keys, as a dict gives them; pydantic gives pairs
        return iter(self.__dict__)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if there is no such key."""
        return self.__dict__.get(key, default)

    def keys(self) -> list[str]:
        """The names of the fields, in order of declaration."""
        return list(self.__dict__)

    def items(self) -> list[tuple[str, Any]]:
        """Pairs of name and value, in order of declaration."""
        return list(self.__dict__.items())

    def problems(self, at: Place) -> Iterable[ConfigError]:
        """Yields what the values do not go together with, for sections of a trainer's own."""
        return ()

    def sections(self, key: str = "") -> Iterator[tuple[str, Section]]:
        """Yields the sections below this one, those in mappings too, then itself, each with its dotted key."""
        for name, value in self.items():
            place = f"{key}.{name}" if key else name
            for inner, below in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(below, Section):
                    yield from below.sections(f"{place}.{inner}" if inner else place)
        yield key, self


@dataclass(frozen=True)
class Place:
    """The position of a section: its dotted key and the whole config; `given` names arguments passed as objects."""

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
    """The registry of the function that a field names, and the name of the field with its options.

    With `is_checked` the function is found, and its options are compared with its signature, when a config is loaded;
    a function named by a path is imported then.
    """

    registry: Registry
    options: str | None = None
    is_checked: bool = True

    def __get_pydantic_json_schema__(self, core_schema: object, handler: Callable[[object], Values]) -> Values:
        """The JSON schema of the field, with the registered names as examples."""
        return {**handler(core_schema), "examples": self.registry.names()}

    def options_key(self, key: str) -> str:
        """The dotted key of the function's options; `key` itself where there is no such field."""
        return key if self.options is None else f"{key.rpartition('.')[0]}.{self.options}"

    def check(self, key: str, name: str | None, options: Mapping[str, object]) -> None:
        """Checks a name and its options.  Raises: ConfigError for an unknown function, or an option that it lacks."""
        where = self.options_key(key)
        if name is not None:
            entry_at(self.registry, key, name).resolve_options(options, where)
        elif options:
            raise ConfigError(where, dict(options), f"none, as {key} is not set", f"set {key}, or remove the options")


def entry_at(registry: Registry, key: str, reference: str) -> Entry:
    """The registered function that a key names.  Raises: ConfigError."""
    try:
        return registry[reference]
    except RegistryError as error:
        key = key if error.key == registry.kind else f"{key}: {error.key}"
        raise ConfigError(key, error.found, error.expected, error.change) from error
