# SPDX-License-Identifier: Apache-2.0
"""Composes recipe and overrides with Hydra into one tree of plain values, and records the source of each value.

Overrides have Hydra's syntax (`key=value`, `+key=`, `++key=`, `~key`, groups), except that `key=value` never needs a
`+`: the schema defines the keys, so the recipe need not mention them. A recipe may be malicious: there are limits
on its size, its depth, and the number of its values after expanding aliases."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from whet.config.commands import commands, schema_of
from whet.config.section import Section, Values, is_free, is_known, is_section, leaf_fields, nearest_key
from whet.errors import ConfigError, did_you_mean
from whet.limits import bounded, cause
from whet.manifests import absent, missing_plugin, recipes
from whet.options import as_list
from whet.registry import PARTS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

COMMAND_LINE = "command line"
ARGUMENT = "argument"
SHIPPED = Path(__file__).parent.parent / "recipes"
MAX_BYTES = 2**20
MAX_DEPTH = 50
MAX_VALUES = 100_000  # with every alias (*name) expanded


def compose(
    schema: type[Section], recipe: str | Path | None, overrides: Sequence[str] | Mapping[str, object]
) -> tuple[Values, dict[str, str]]:
    """Returns the values of all keys after recipe and overrides, including unknown keys; and the source of each value
    that is not a default, by dotted key.  Raises: ConfigError."""
    path = find_recipe(recipe, schema.command) if recipe is not None else None
    texts, arguments = ([], _plain(overrides)) if isinstance(overrides, Mapping) else (overrides, {})
    parsed = [_parse(schema, text) for text in texts]
    if path is not None and path.parent not in folders():
        read_document(path)
    with _explained(recipe, schema, path):
        composed, files = _run_hydra(schema, path, parsed)
        values = _resolve(schema, composed, arguments)
        sources = {key: f"{shown(file)}:{line}" for file, section in files for key, line in key_lines(file, section)}
    for override in parsed:
        key = override.key_or_group
        if override.is_delete():
            sources = {each: source for each, source in sources.items() if not f"{each}.".startswith(f"{key}.")}
        else:
            sources |= dict.fromkeys((each for each, _ in flatten({key: override.value()})), COMMAND_LINE)
    sources |= dict.fromkeys((key for key, _ in flatten(arguments)), ARGUMENT)
    return values, sources


@contextmanager
def _explained(recipe: str | Path | None, schema: type[Section], path: Path | None) -> Iterator[None]:
    """Runs the block within limits of time and memory. Converts errors of Hydra, OmegaConf and YAML to ConfigError,
    with the name of the recipe."""
    from hydra.errors import HydraException  # imported before the time limit starts: a disk may be slow
    from omegaconf.errors import OmegaConfBaseException

    what = "overrides" if recipe is None else f"recipe {recipe} with its includes and overrides"
    try:
        with bounded():
            yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        own = error if isinstance(error, ConfigError) else _explain(error, what)
        # A config of another framework may include files that are missing here: its keys are the better explanation.
        written = [(key, f"{shown(path)}:{line}") for key, line in key_lines(path)] if path is not None else []
        unknown = [each for each in written if not is_known(schema, each[0])]
        foreign = [unknown_key(schema, key, source) for key, source in unknown if advice("key", schema, key)]
        raise ConfigError.joined([*foreign, own]) from error
    except yaml.YAMLError as error:
        raise ConfigError(what, " ".join(str(error).split()), "valid YAML", "correct it there") from error
    except Exception as error:  # a recipe is other people's code: it includes files and refers to values
        found = f"cannot be composed: {_first_line(cause(error)) or type(error).__name__}"
        change = (
            "look for aliases (*name) and references (${key}) that expand without end, and for a section that is set "
            "to a single value"
        )
        raise ConfigError(what, found, change=change) from error


def find_recipe(recipe: str | Path, command: str = "train") -> Path:
    """Finds the file of a recipe: a shipped one by name, a user's by path.  Raises: ConfigError.

    A recipe for the command takes precedence: `whet eval gsm8k` reads gsm8k_eval.yaml."""
    name, path = str(recipe), Path(recipe).expanduser()
    for shipped in (f"{name}_{command}", name):
        if shipped in _shipped():
            return _shipped()[shipped]
    exists = os.path.isfile(path)  # noqa: PTH113  # never raises, for a text that is too long for a name either
    if exists and path.suffix == ".yaml":
        return path.resolve()
    is_file_name = path.suffix in (".yaml", ".yml") or "/" in name
    found = f"does not exist (seen from {Path.cwd()})" if is_file_name else "unknown"
    if exists:
        found, hint = "its name does not end in .yaml", "rename it"
    elif os.path.isfile(path.with_suffix(".yaml")):  # noqa: PTH113
        hint = f"did you mean {path.with_suffix('.yaml')}?"
    elif plugin := missing_plugin("recipe", name):
        raise ConfigError.joined([absent(f"recipe {name}", plugin)])
    elif foreign := advice("config", name.removesuffix(".yaml")):
        hint = foreign
    else:
        otherwise = "correct the path" if is_file_name else "write an override as key=value"
        hint = did_you_mean(name, shipped_recipes(), otherwise, quoted=False)
    expected = f"a YAML file or the name of a shipped recipe: {', '.join(shipped_recipes())}"
    raise ConfigError(f"recipe {name}", found, expected, hint)


def shipped_recipes() -> list[str]:
    """Lists the names of the shipped recipes, sorted."""
    return sorted(_shipped())


@cache
def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in SHIPPED.glob("*.yaml")} | recipes()


@cache
def folders() -> tuple[Path, ...]:
    """The folders of shipped recipes, first the core's folder, then the folders of plugins."""
    return tuple(dict.fromkeys([SHIPPED, *(path.parent for path in recipes().values())]))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys with their values. An empty mapping counts as a value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def put(tree: Values, key: str, value: object) -> None:
    """Sets a dotted key in a tree of sections. Creates missing sections."""
    *sections, name = key.split(".")
    reduce(lambda section, each: section.setdefault(each, {}), sections, tree)[name] = value


def parse_override(text: str) -> Override:
    """Reads an override in Hydra's syntax, which may sweep over several values.  Raises: ConfigError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, _ = text.partition("=")
    if not equals and not text.startswith("~"):
        raise ConfigError(text, "not an override", "key=value, or ~key to remove a value of the recipe")
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        hint = f"quote a value that has commas, braces, brackets or quotes in it: '{key}=\"...\"'"
        raise ConfigError(text[:200], f"cannot be read ({_first_line(error)})", change=hint) from error


def _parse(schema: type[Section], text: str) -> Override:
    override = parse_override(text)
    if override.is_sweep_override():
        key, _, written = text.partition("=")
        change = (
            f"write a list as {key}=[{written}], text with commas as {key}='\"...\"', or add -m to `whet train`, which "
            "starts a run for each value"
        )
        raise ConfigError(key, f"{written} is a Hydra sweep over several values", "one value", change)
    if override.is_delete() and not is_known(schema, override.key_or_group):
        raise unknown_key(schema, override.key_or_group, COMMAND_LINE)
    return override


def unknown_key(schema: type[Section], key: str, source: str) -> ConfigError:
    """Returns the error for an unknown key. It names whet's key for another framework's key, or the nearest key."""
    near = nearest_key(schema, key)
    if near == key:
        return ConfigError(key, f"one name with dots ({source})", "nested sections", "write a section for each part")
    meant = f"did you mean {near}?" if near else "`whet config` lists all keys; put keys of your own below extra"
    is_elsewhere = key.partition(".")[0] not in schema.model_fields
    own = next((each for each in commands() if is_elsewhere and is_known(schema_of(each), key)), None)
    of_another = f"a key of `whet {own}`, which `whet {schema.command}` does not read; leave it out"
    hint = (of_another if own and schema.command else advice("key", schema, key)) or meant
    return ConfigError(key, f"unknown key ({source})", change=hint)


def advice(kind: str, *given: object) -> str | None:
    """Returns advice on a `config` or `key` (`kind`) of another framework; None if no plugin knows its name."""
    name = f"foreign_{kind}"
    text: str | None = PARTS[name].load()(*given) if name in PARTS else None
    return text


def _run_hydra(
    schema: type[Section], recipe: Path | None, overrides: list[Override]
) -> tuple[DictConfig, list[tuple[Path, str]]]:
    """Returns the composed tree, and its recipe files with their sections, in order of priority (last wins)."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if recipe is None and not overrides:
        return OmegaConf.create(), []
    folder = recipe.parent if recipe else SHIPPED
    name = recipe.stem if recipe else None
    groups = {each.key_or_group for each in overrides if _is_folder(each.key_or_group, folder)}
    leaves = {key for key, field in leaf_fields(schema).items() if not is_free(field)}
    values = [each for each in overrides if each.key_or_group in groups & leaves]
    with _own_hydra(), hydra.initialize_config_dir(str(folder), version_base="1.3"):
        places = ",".join(f"'file://{each}'" for each in folders())
        others = [_for_hydra(each, groups) for each in overrides if each not in values]
        lines = [f"hydra.searchpath=[{places}]", *others]
        composed = hydra.compose(name, lines)
        parts = GlobalHydra.instance().config_loader().compute_defaults_list(name, lines, RunMode.RUN).defaults
    OmegaConf.set_struct(composed, False)
    for each in values:  # Hydra would search for a file in the folder of this name
        if each.is_delete():
            composed.pop(each.key_or_group, None)
        else:
            OmegaConf.update(composed, each.key_or_group, each.value())
    files = [(_part_file(f"{part.config_path}.yaml", folder), part.package or "") for part in parts]
    return composed, [(file, section) for file, section in files if file is not None]


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Saves and restores Hydra's global state, because the calling program may use Hydra too."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.initialize import get_gh_backup, restore_gh_from_backup

    theirs = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        restore_gh_from_backup(theirs)


def _part_file(name: str, folder: Path) -> Path | None:
    """Finds an included file as Hydra does: beside the recipe, else among shipped files; None for Hydra's files."""
    return next((place / name for place in (folder, *folders()) if (place / name).is_file()), None)


def _is_folder(name: str, folder: Path) -> bool:
    return any((place / name).is_dir() for place in (folder, *folders()))


def _for_hydra(override: Override, groups: Collection[str]) -> str:
    """Converts an override to Hydra's syntax. `++` sets a value even if the recipe lacks the key; `data=gsm8k` chooses
    the file data/gsm8k.yaml."""
    text, chooses = str(override.input_line), isinstance(override.value(), str) and override.key_or_group in groups
    return text if chooses or override.is_delete() else f"++{text.lstrip('+')}"


def _resolve(schema: type[Section], composed: DictConfig, arguments: Mapping[str, object]) -> Values:
    """Merges defaults, composed tree and arguments (last wins), and resolves interpolations."""
    from omegaconf import OmegaConf

    for key, value in arguments.items():
        OmegaConf.update(composed, key, value, merge=True, force_add=True)
    _drop_empty_sections(schema, composed)
    values: Any = _merged(schema().model_dump(mode="json"), OmegaConf.to_container(composed))
    if _refers(values):
        values = OmegaConf.to_container(OmegaConf.create(values), resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in values.items()}


def _refers(tree: object) -> bool:
    """Tells whether the tree has an interpolation (`${...}`) or a missing value (`???`)."""
    if isinstance(tree, dict | list):
        return any(map(_refers, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, str) and ("${" in tree or tree == "???")


def _merged(below: object, above: object) -> object:
    """Merges the tree `above` into `below`. Mappings are merged; any other value is replaced."""
    match below, above:
        case dict(), dict():
            return below | {key: _merged(below.get(key), value) for key, value in above.items()}
    return above


def _drop_empty_sections(schema: type[Section], composed: DictConfig) -> None:
    """Removes sections that are null. YAML reads a section as null if all its lines are commented out."""
    for name, field in schema.model_fields.items():
        if is_section(field.annotation) and name in composed:
            if composed[name] is None:
                del composed[name]
            elif isinstance(composed[name], Mapping):
                _drop_empty_sections(field.annotation, composed[name])


def key_lines(file: Path, section: str = "") -> Iterator[tuple[str, int]]:
    """Yields the dotted keys that a YAML file sets, below `section`, each with its line number."""
    root = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from _node_lines(root, f"{section}." if section else "")


def _node_lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    yaml.SafeLoader("").flatten_mapping(node)  # replaces `<<` by its values, before the mapping's own
    for name, value in {str(pair[0].value): pair for pair in node.value}.values():
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _node_lines(value, f"{key}.")
        else:
            yield key, name.start_mark.line + 1


def _plain(arguments: Mapping[str, object]) -> Values:
    """Converts arguments to plain YAML values: paths to text, tuples to lists.  Raises: ConfigError."""
    plain: Values = {}
    for name, value in arguments.items():
        try:
            plain[str(name)] = json.loads(json.dumps(value, default=_as_plain))
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for several numbers
            change = "hand a function over as reward=" if callable(value) else "convert it"
            raise ConfigError(name, f"{value!r:.80}", "text, numbers, lists and mappings", change) from error
    return plain


def _as_plain(value: Any) -> object:
    """Converts a path to text, and a number of numpy or torch to Python's."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _explain(error: Exception, what: str) -> ConfigError:
    """Converts an error of Hydra or OmegaConf to ConfigError: its config key, else `what`, and its first lines."""
    from omegaconf.errors import OmegaConfBaseException

    chain = [each for each in (error, error.__cause__) if each is not None]
    keys = [each.full_key for each in chain if isinstance(each, OmegaConfBaseException) and each.full_key]
    found = ": ".join(dict.fromkeys(filter(None, map(_first_line, chain))))
    asked = re.search(r"Could not (?:load|find) '([^']+)'", found)
    if asked is not None and (plugin := missing_plugin("recipe", asked[1])):
        return ConfigError.joined([absent(f"recipe {asked[1]}", plugin).at(what)])
    return ConfigError(keys[0] if keys else what, found, change="correct the recipe or the override")


def _first_line(error: BaseException | str) -> str:
    return str(error).strip().partition("\n")[0]


def read_document(file: Path) -> str:
    """Returns the text of a YAML file.

    Raises: ConfigError for a file that is not UTF-8, is not YAML, or exceeds a limit."""
    name = shown(file)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(name, f"{file.stat().st_size:,} bytes", f"at most {MAX_BYTES:,} bytes", "shorten it")
        text = file.read_text(encoding="utf-8")
        check_document(text, name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(name, f"cannot be read: {error}", "text in UTF-8", "save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(name, " ".join(str(error).split()), "valid YAML", "correct it there") from error
    except RecursionError as error:
        raise _too_deep(name) from error
    return text


def check_document(text: str, name: str) -> None:
    """Checks how deep a YAML text is nested, and how many values it expands to.  Raises: ConfigError, YAMLError."""
    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None:
        _check(root, name, {})


def shown(file: Path) -> str:
    """Formats a path for errors: relative to the working directory or to the package, else absolute."""
    for root in (Path.cwd(), SHIPPED.parent):
        if file.is_relative_to(root):
            return str(file.relative_to(root))
    return str(file)


def _check(node: yaml.Node, name: str, sizes: dict[int, float], depth: int = 1) -> float:
    """Counts the values that a node expands to, and checks the limits. `sizes` caches the count by node. The count is
    infinite until a node is finished, so that an alias to itself is found."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = math.inf
    values = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
    parts = [part for value in values for part in as_list(value)]
    place = f"{name}:{node.start_mark.line + 1}"
    if depth > MAX_DEPTH:
        raise _too_deep(place)
    size = 1 + sum(_check(part, name, sizes, depth + 1) for part in parts)
    if size > MAX_VALUES:
        change = "replace its aliases (*name) by what they stand for"
        raise ConfigError(place, "this value expands too far, or without end", f"at most {MAX_VALUES:,} values", change)
    sizes[id(node)] = size
    return size


def _too_deep(place: str) -> ConfigError:
    return ConfigError(place, "the nesting is too deep", f"at most {MAX_DEPTH} levels", "write it flatter")
