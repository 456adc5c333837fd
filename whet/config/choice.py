# SPDX-License-Identifier: Apache-2.0
"""Fields that name a registered function or class, which the loader checks, editors complete and pages list alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError, RegistryError
from whet.registry import Entry, Registry


@dataclass(frozen=True)
class Choice:
    """Marks a field: the kind of function that it names, and the field beside it that holds the function's options.

    Only where `is_checked` the function is looked for, and its options are compared with its signature, when a config
    is loaded: one by a path is imported then.
    """

    registry: Registry
    options: str | None = None
    is_checked: bool = True

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The field's own, with the registered names as examples."""
        return {**handler(core_schema), "examples": self.registry.names()}

    def options_key(self, key: str) -> str:
        """The dotted key of the options of the function that `key` names; without options `key` itself."""
        return key if self.options is None else f"{key.rpartition('.')[0]}.{self.options}"

    def check(self, key: str, name: str | None, options: Mapping[str, Any]) -> None:
        """Raises: ConfigError for a function that is not there, or an option that it does not take."""
        where = self.options_key(key)
        if name is not None:
            entry_at(self.registry, key, name).resolve_options(options, where)
        elif options:
            raise ConfigError(f"{where}={dict(options)}, but {key} is not set; name one")


def entry_at(registry: Registry, key: str, reference: str) -> Entry:
    """The function that a key names.  Raises: ConfigError."""
    try:
        return registry[reference]
    except RegistryError as error:
        raise ConfigError(f"{key}: {error}") from error
