# SPDX-License-Identifier: Apache-2.0
"""Loads a config: composes recipe and overrides, validates, checks consistency, and keeps the source of each value.
Writes a config as YAML, for run folders and `whet config`; writes the JSON Schema of recipe files.

Old names of keys are accepted for one more version, with a warning; in older run folders always."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import yaml
from pydantic import ValidationError

from whet.config.checks import check
from whet.config.compose import ARGUMENT, COMMAND_LINE, compose, flatten, put, shipped_recipes, unknown_key
from whet.config.managers import MANAGERS
from whet.config.section import Section, Values, describe_type, field_at, is_free
from whet.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

log = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=Section)
DEFAULT = "default"
ANNOTATIONS = ("description", "default", "examples")
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_FSDP = {
    "shard_size": None,
    "reshard_after_forward": True,
    "cpu_offload": False,
    "sequence_parallel_size": 1,
    "tensor_parallel_size": 1,
}
# The new name of each key and its old default. An engine option with its old default is dropped, because other engines
# lack it. An old limit of processes is dropped too: it did not hold for environments without their own processes.
RENAMED: Mapping[str, tuple[str, object]] = {
    "rollout.name": ("rollout.engine.name", "native"),
    "rollout.kv_cache_bytes": ("rollout.engine.options.kv_cache_bytes", 2**30),
    "environment.max_processes": ("environment.max_episodes", 256),
    "rollout.compile": ("rollout.engine.options.compile", False),
    **{
        f"{role}engine.{name}": (f"{role}engine.options.{name}", default)
        for role in ("actor.", "critic.", "ref.", "reward_model.", "")
        for name, default in {**_FSDP, "compile": False}.items()
    },
}


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """A config, and the source of each value that is not a default, by dotted key."""

    config: ConfigT
    sources: Mapping[str, str]

    def source(self, key: str) -> str:
        """Returns the source of a key's value: a line of a recipe, the command line, an alias, or the default."""
        return self.sources.get(key, DEFAULT)


def load_config(
    schema: type[ConfigT],
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    given: Collection[str] = (),
    checked: bool = True,
) -> LoadedConfig[ConfigT]:
    """Loads the config from a shipped recipe (by name) or a YAML file (by path), and overrides.

    Overrides are Hydra's (`["rollout.n=8"]`), or a mapping from dotted keys to values. `given` names the arguments
    passed as objects ("reward", "data", "val_data"), whose keys are then not required. `checked=False` skips the
    consistency checks (`whet.config.checks`).

    Raises: ConfigError for the first error, with the `others`."""
    values, sources = compose(schema, recipe, overrides)
    _apply_reward_alias(values, sources)
    _apply_manager(values, sources)
    rename(schema, values, sources, (COMMAND_LINE, ARGUMENT))
    config = _validate(schema, values, sources)
    _mark_written(config, sources)
    if checked:
        check(config, given)
    return LoadedConfig(config, sources)


def _apply_reward_alias(values: Values, sources: dict[str, str]) -> None:
    """Converts verl's `custom_reward_function.path` and `.name` to `reward.function`, in place of a recipe's value."""
    reward = values.get("reward")
    if "custom_reward_function" not in values or not isinstance(reward, dict):
        return
    alias = values.pop("custom_reward_function") or {}
    if not isinstance(alias, dict) or not alias.keys() <= {"path", "name"}:
        change = "put options below reward.kwargs"
        raise ConfigError("custom_reward_function", alias, "a mapping with path and name alone", change)
    if alias.get("path") is None:
        return
    function = f"{alias['path']}:{alias.get('name') or 'compute_score'}"
    source = sources.get("custom_reward_function.path", DEFAULT)
    if sources.get("reward.function") in (COMMAND_LINE, ARGUMENT):
        if source in (COMMAND_LINE, ARGUMENT) and reward["function"] != function:
            expected = f"the function of custom_reward_function.path, {function}"
            raise ConfigError("reward.function", reward["function"], expected, "unset one of the two keys")
        return
    values["reward"] = {**reward, "function": function}
    sources["reward.function"] = f"alias custom_reward_function ({source})"


def _apply_manager(values: Values, sources: dict[str, str]) -> None:
    """Replaces the defaults of `reward` by the values of the preset that `reward.manager` names."""
    reward = values.get("reward")
    if not isinstance(reward, dict) or not isinstance(manager := reward.get("manager"), str) or manager not in MANAGERS:
        return
    chosen = {name: value for name, value in MANAGERS[manager].items() if f"reward.{name}" not in sources}
    values["reward"] = {**reward, **chosen}
    sources |= dict.fromkeys((f"reward.{name}" for name in chosen), f"reward.manager={manager}")


def _validate(schema: type[ConfigT], values: Values, sources: Mapping[str, str]) -> ConfigT:
    for key, value in flatten(values):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except (ValueError, TypeError) as error:
            half = isinstance(error, UnicodeEncodeError)
            what = (
                "half of a surrogate pair" if half else "a number of more than 4,300 digits, or a key of no plain type"
            )
            change = f"write it as plain text ({sources.get(key, DEFAULT)})"
            raise ConfigError(key, what, "a value that a file can store", change) from error
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        errors = [each for finding in error.errors() for each in _explain(schema, finding, values, sources)]
        raise ConfigError.joined({str(each): each for each in errors}.values()) from None


def _mark_written(config: Section, sources: Mapping[str, str]) -> None:
    """Removes defaults from the `model_fields_set` of each section: only fields that the user set remain."""
    written = {key[:end] for key in sources for end in [*(at.start() for at in re.finditer(r"\.", key)), len(key)]}
    for key, section in config.sections():
        section.model_fields_set.intersection_update(
            name for name in section if (f"{key}.{name}" if key else name) in written
        )


def _explain(
    schema: type[Section], finding: ErrorDetails, values: Mapping[str, object], sources: Mapping[str, str]
) -> Iterator[ConfigError]:
    """Converts one error of pydantic to errors by config key."""
    if finding["type"] in ("extra_forbidden", "invalid_key"):
        for key, _ in flatten({".".join(map(str, finding["loc"])): finding["input"]}):
            yield unknown_key(schema, key, sources.get(key, DEFAULT))
        return
    path = [str(name) for name in finding["loc"]]
    if isinstance(error := finding.get("ctx", {}).get("error"), ConfigError):
        yield error.at(".".join(path))
        return
    key, field = field_at(schema, path)
    found: Any = values
    for name in key.split("."):
        found = found[name]
    expected = describe_type(field.annotation, tuple(field.metadata))
    rest = path[key.count(".") + 1 :]
    if rest and is_free(field) and isinstance(found, dict):  # an entry of a mapping
        found = next((value for name, value in found.items() if str(name) == rest[0]), found)
        key, expected = f"{key}.{rest[0]}", describe_type(get_args(field.annotation)[1])
    below = next((source for each, source in sources.items() if each.startswith(f"{key}.")), DEFAULT)
    yield ConfigError(key, "''" if found == "" else found, expected, f"change it ({sources.get(key, below)})")


def rename(
    schema: type[Section], values: Values, sources: MutableMapping[str, str] | None = None, strong: tuple[str, ...] = ()
) -> None:
    """Moves values of old keys to the new keys, in place. A new key with a value from a `strong` source keeps it.

    An old key that `sources` lacks comes from the folder of an older run, and gives no warning."""
    sources = {} if sources is None else sources
    of_agents = [key for key, _ in flatten(values) if re.match(r"environment\.agents\.[^.]*\.max_processes$", key)]
    renamed = {**RENAMED, **{key: (key.replace("processes", "episodes"), 256) for key in of_agents}}
    for old, (new, default) in renamed.items():
        *sections, name = old.split(".")
        place: Any = values
        for each in sections:
            place = place.get(each) if isinstance(place, dict) else None
        if sections[0] not in schema.model_fields or not isinstance(place, dict) or name not in place:
            continue
        value, source = place.pop(name), sources.pop(old, None)
        if source is not None:
            log.warning(
                "%s (%s) is now called %s: rename it, the next version will not know the old name", old, source, new
            )
        is_idle = (".options." in new or new.endswith(".max_episodes")) and value == default and source not in strong
        if is_idle or sources.get(new) in strong:
            continue
        put(values, new, value)
        if source is not None:
            sources[new] = f"alias {old} ({source})"


def to_yaml(config: Section) -> str:
    """Writes the whole config as YAML. `load_config` restores it unchanged."""
    return yaml.safe_dump(escaped(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=120)


def keyed_lines(config: Section) -> list[tuple[str, str]]:
    """Returns the lines of the config as YAML, each with the dotted key that it sets; "" for the name of a section."""
    return list(value_lines(escaped(config.model_dump(mode="json"))))


def escaped(value: Any) -> Any:
    """Escapes each `${` in the texts of a value, since a recipe would read it as a reference to a key."""
    match value:
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case dict():
            return {key: escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list) else value


def value_lines(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the lines of nested values, each with the dotted key that it sets; "" for the name of a mapping."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", ""
            yield from value_lines(value, f"{key}.")
        else:
            yield f"{indent}{name}: {inline(value)}", key


def inline(value: object) -> str:
    """Writes a value as YAML on one line. Text with line breaks becomes a quoted string."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    text = text.removesuffix("...\n").rstrip("\n")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def json_schema(schema: type[Section]) -> Values:
    """Returns the JSON Schema of a command's recipes. `$defs` has the schemas of sections, for files of config groups.

    No key is required, since a recipe has only the keys that it changes. The schema also allows everything that the
    loader accepts beyond plain values: a `defaults` list, empty sections, a string for a list of one, `${...}` for any
    value. Draft 7, since editors support it."""
    whole = schema.model_json_schema()
    for section in (whole, *whole["$defs"].values()):
        section["properties"] = {key: _as_written(field) for key, field in section["properties"].items()}
    part = {"anyOf": [{"type": "string", "examples": shipped_recipes()}, {"type": "object"}]}
    whole["properties"]["defaults"] = {"description": "recipes that this one builds on, in order", "items": part}
    if "reward" in whole["properties"]:
        text = {"type": ["string", "null"]}
        whole["properties"]["custom_reward_function"] = {
            "description": "verl's key for reward.function",
            "type": ["object", "null"],
            "properties": {"path": text, "name": text},
            "additionalProperties": False,
        }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole}


def _as_written(field: Values) -> Values:
    """Extends the schema of a field to all forms that a recipe may write."""
    if "$ref" in field:
        return {"anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]}
    annotations: Values = {key: field[key] for key in ANNOTATIONS if key in field}
    forms: list[Values] = []
    for form in field.get("anyOf", [field]):
        form = {key: value for key, value in form.items() if key not in ("title", *ANNOTATIONS)}
        if "prefixItems" in form:
            form["items"] = form.pop("prefixItems")[0]  # all items have the same type
        if form.get("type") == "string" and "enum" not in form:
            form["type"] = ["string", "number"]  # the loader reads a number as text
        forms.append(form)
        if form.get("type") == "array":
            items = form["items"].get("anyOf", [form["items"]])
            forms += [each for each in items if each.get("type") == "string"]
    return {**annotations, "anyOf": [*forms, INTERPOLATION]}
