# SPDX-License-Identifier: Apache-2.0
"""Renamed config keys: the old names are read for one more version, with a warning, and always in older run folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from whet.config.section import Section

log = logging.getLogger(__name__)
_FSDP = {
    "shard_size": None,
    "reshard_after_forward": True,
    "cpu_offload": False,
    "sequence_parallel_size": 1,
    "tensor_parallel_size": 1,
}
# The new name of each key and its old default. An engine option with that default is dropped: other engines lack it.
RENAMED: Mapping[str, tuple[str, Any]] = {
    "rollout.name": ("rollout.engine.name", "native"),
    "rollout.kv_cache_bytes": ("rollout.engine.options.kv_cache_bytes", 2**30),
    "rollout.compile": ("rollout.engine.options.compile", False),
    **{
        f"{role}engine.{name}": (f"{role}engine.options.{name}", default)
        for role in ("actor.", "critic.", "ref.", "")
        for name, default in _FSDP.items()
    },
}


def rename(
    schema: type[Section],
    values: dict[str, Any],
    sources: MutableMapping[str, str] | None = None,
    strong: tuple[str, ...] = (),
) -> None:
    """Moves the values of old keys to the new ones, in place, unless a `strong` source sets the new one.

    A key without a source comes from the folder of an older run and gives no warning."""
    sources = {} if sources is None else sources
    for old, (new, default) in RENAMED.items():
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
        is_idle = ".options." in new and value == default and source not in strong
        if is_idle or sources.get(new) in strong:
            continue
        *sections, name = new.split(".")
        place = values
        for each in sections:
            place = place.setdefault(each, {})
        place[name] = value
        if source is not None:
            sources[new] = f"alias {old} ({source})"
