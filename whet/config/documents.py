# SPDX-License-Identifier: Apache-2.0
"""Reads YAML files that may be malicious: limits on size, depth, and the number of values after expanding aliases."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from whet.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "recipes"
MAX_BYTES = 2**20
MAX_DEPTH = 50
MAX_VALUES = 100_000  # with every alias (*name) expanded


def read_document(file: Path) -> str:
    """Returns the text of a YAML file.

    Raises: ConfigError for a file that is not UTF-8, is not YAML, or exceeds a limit."""
    name = shown(file)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} has {file.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}")
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None:
            _check(root, name, {})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}; correct it there") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested more than {MAX_DEPTH} levels deep; write it flatter") from error
    return text


def shown(file: Path) -> str:
    """A path as errors show it: relative to the working directory or to the package, else absolute."""
    for root in (Path.cwd(), SHIPPED.parent):
        if file.is_relative_to(root):
            return str(file.relative_to(root))
    return str(file)


def _check(node: yaml.Node, name: str, sizes: dict[int, float], depth: int = 1) -> float:
    """Returns how many values a node expands to. `sizes` caches this by node; infinity marks an unfinished node, so
    that an alias to it is found."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = math.inf
    values = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    place = f"{name}:{node.start_mark.line + 1}"
    if depth > MAX_DEPTH:
        raise ConfigError(f"{place}: this value is nested more than {MAX_DEPTH} levels deep; write it flatter")
    size = 1 + sum(_check(part, name, sizes, depth + 1) for part in parts)
    if size > MAX_VALUES:
        raise ConfigError(
            f"{place}: this value expands to more than {MAX_VALUES:,} values, or without end; replace its aliases "
            "(*name) by what they stand for"
        )
    sizes[id(node)] = size
    return size
