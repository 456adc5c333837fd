# SPDX-License-Identifier: Apache-2.0
"""`Choice`: marks a config field that names a registered function or class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError, RegistryError
from whet.registry import Entry, Registry


@dataclass(frozen=True)
class Choice:
    """The registry of the function that a field names, and the name of the field with its options.

    With `is_checked` the function is found, and its options are compared with its signature, when a config is loaded;
    a function named by a path is imported then.
    """

    registry: Registry
    options: str | None = None
    is_checked: bool = True

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The JSON schema of the field, with the registered names as examples."""
        return {**handler(core_schema), "examples": self.registry.names()}

    def options_key(self, key: str) -> str:
        """The dotted key of the function's options; `key` itself where there is no such field."""
        return key if self.options is None else f"{key.rpartition('.')[0]}.{self.options}"

    def check(self, key: str, name: str | None, options: Mapping[str, Any]) -> None:
        """Checks a name and its options.  Raises: ConfigError for an unknown function, or an option that it lacks."""
        where = self.options_key(key)
        if name is not None:
            entry_at(self.registry, key, name).resolve_options(options, where)
        elif options:
            raise ConfigError(f"{where}={dict(options)}, but {key} is not set; set {key}, or remove the options")


def entry_at(registry: Registry, key: str, reference: str) -> Entry:
    """The registered function that a key names.  Raises: ConfigError."""
    try:
        return registry[reference]
    except RegistryError as error:
        raise ConfigError(f"{key}: {error}") from error
