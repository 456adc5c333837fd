# SPDX-License-Identifier: Apache-2.0
"""YAML files that somebody else may have written: read as text, and refused where unfolding them would never end."""

from __future__ import annotations

from pathlib import Path

import yaml

from whet.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "recipes"
MAX_BYTES = 2**20
MAX_DEPTH = 50
MAX_VALUES = 100_000  # with every alias (*name) unfolded


def read_document(file: Path) -> str:
    """The text of a YAML file.

    Raises: ConfigError with file and line for one that is not UTF-8 or no YAML, is over one of the limits, or has an
    alias that stands inside what it names."""
    name = shown(file)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} has {file.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}")
        text = file.read_text(encoding="utf-8")
        _check(name, text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"no readable YAML in {name}: {' '.join(str(error).split())}; correct it there") from error
    return text


def shown(file: Path) -> str:
    """A path as the user knows it: below the working folder, or by the folder in which shipped recipes lie."""
    for root in (Path.cwd(), SHIPPED.parent):
        if file.is_relative_to(root):
            return str(file.relative_to(root))
    return str(file)


def _check(name: str, text: str) -> None:
    sizes: dict[str, int] = {}  # of what an anchor (&name) names; absent while it is still open
    opened: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and values so far
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{name}:{event.start_mark.line + 1}"  # type: ignore[union-attr]  # of a text there always is one
        anchor, size = None, 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > MAX_DEPTH:
                raise ConfigError(f"{place}: it is nested more than {MAX_DEPTH} deep; write it flatter")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ConfigError(f"{place}: *{event.anchor} stands inside itself, or names nothing; write it out")
            size = sizes[event.anchor]
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, before = opened.pop()
        opened.append((outer, before + size))
        if before + size > MAX_VALUES:
            raise ConfigError(f"{place}: it unfolds to more than {MAX_VALUES:,} values; use fewer aliases (*name)")
