# SPDX-License-Identifier: Apache-2.0
"""The plugins that ship with whet, and the names that they offer.

A plugin is a folder of `whet/plugins/` with a manifest, `plugin.toml`, which is read without importing the plugin: a
table for each kind (`command`, `reward`, ..., as in the group `whet.KIND` of entry points) with targets by name. Names
of the kind `key` are config keys that the plugin alone reads; their targets are the sections that declare them.
Deleting the folder removes its names; `plugin_names.csv` then still has the plugin of each name."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from whet.errors import RegistryError

PLUGINS = Path(__file__).parent / "plugins"
NAMES = Path(__file__).parent / "plugin_names.csv"


@cache
def manifests() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Returns targets (`package.module:function`) by plugin, kind and name, for the installed plugins."""
    found = dict[str, Any]()
    for path in sorted(PLUGINS.glob("*/plugin.toml")):
        try:
            found[path.parent.name] = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            change = "correct it, or delete its folder"
            raise RegistryError(str(path), f"cannot be read ({error})", "TOML", change) from error
    return {
        plugin: {kind: names for kind, names in read.items() if isinstance(names, dict)}
        for plugin, read in found.items()
    }


def targets(kind: str) -> list[str]:
    """Lists the targets of a kind, plugin by plugin."""
    return [target for offered in manifests().values() for target in offered.get(kind, {}).values()]


def recipes() -> dict[str, Path]:
    """Returns the recipes of plugins by name."""
    offered = ((plugin, kinds.get("recipe", {})) for plugin, kinds in manifests().items())
    return {name: PLUGINS / plugin / file for plugin, files in offered for name, file in files.items()}


def absent(name: str, plugin: str) -> RegistryError:
    """Returns the error for a name of a plugin that was deleted."""
    expected, change = f"the plugin {plugin}, which has it", f"put whet/plugins/{plugin} back, or install whet again"
    return RegistryError(name, "not there", expected, change)


def missing_plugin(kind: str, name: str) -> str:
    """Returns the plugin, now missing, that offers a name; "" if no plugin of whet offers it."""
    with NAMES.open(encoding="utf-8", newline="") as file:
        plugins = {(row["kind"], row["name"]): row["plugin"] for row in csv.DictReader(file)}
    plugin = plugins.get((kind, name), "")
    return "" if plugin in manifests() else plugin
