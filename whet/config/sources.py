# SPDX-License-Identifier: Apache-2.0
"""Reads entries of `data.train_files` and `data.val_files` (a file, a folder, a data set on the hub, or a function),
and the shares of kinds of rows in a batch (`data.mix`)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whet.errors import ConfigError, did_you_mean
from whet.options import is_number

if TYPE_CHECKING:
    from whet.config.schema import DataConfig, ExamplesDataConfig

PICKLES = (".pkl", ".pickle")  # refused when they are read
FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", *PICKLES)
ENTRY_KEYS = ("path", "weight", "config", "split", "filter", "options")
# Keys of the data section that an entry may override for its own rows.
OWN_KEYS = (
    *("prompt_key", "answer_key", "response_key", "messages_key"),
    *("data_source", "system_prompt", "format_prompt", "image_key", "video_key"),
)
_NAME = re.compile(r"(?P<path>[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")
_FORMS = (
    f"file ({', '.join(FILE_SUFFIXES[:3])}), folder, data set on the hub (owner/name), or function "
    "(path/file.py:function)"
)
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
MixShare = float | Mapping[int, float]  # one number, or numbers by step


@dataclass(frozen=True)
class Source:
    """A parsed entry of the data files. `fields` has keys of the data section that the entry overrides for its rows."""

    kind: Literal["file", "folder", "hub", "function"]
    path: str
    config: str | None = None  # configuration (subset) of a data set on the hub
    split: str | None = None
    weight: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of a function
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The entry as written in a config: path:config@split."""
        return f"{self.path}{f':{self.config}' if self.config else ''}{f'@{self.split}' if self.split else ''}"


def read_sources(
    key: str, entries: Sequence[str | Mapping[str, Any]], data: DataConfig | ExamplesDataConfig
) -> list[Source]:
    """Parses the entries of `key` without opening them.  Raises: ConfigError."""
    return [_read_source(key, {"path": entry} if isinstance(entry, str) else entry, data) for entry in entries]


def read_weights(sources: Sequence[Source], weights: Sequence[float] | None) -> list[float] | None:
    """Returns the sampling weight of each entry of train_files; they sum to 1. None if no weights are set.

    Raises: ConfigError where some entries have a weight and others have none."""
    own = [source for source in sources if source.weight is not None]
    if weights is None and not own:
        return None
    if weights is not None and own:
        expected = f"no value, as the entry {own[0].name} has a weight too"
        raise ConfigError("data.weights", list(weights), expected, "remove one of the two")
    if weights is None and len(own) < len(sources):
        missing = next(source.name for source in sources if source.weight is None)
        found = f"{own[0].name} has a weight and {missing} has none"
        raise ConfigError("data.train_files", found, change="set one for every entry")
    given = [source.weight or 0.0 for source in sources] if weights is None else list(weights)
    if len(given) != len(sources):
        expected = f"length {len(sources)}, that of data.train_files"
        raise ConfigError("data.weights", given, expected, "set one weight for each entry")
    return [weight / sum(given) for weight in given]


def check_files(
    key: str, entries: Sequence[str | Mapping[str, Any]], data: DataConfig | ExamplesDataConfig, *, required: bool
) -> None:
    """Checks that the entries exist, as far as possible without a network.  Raises: ConfigError."""
    if required and not entries:
        raise ConfigError(key, [], f"at least one {_FORMS}", "name one")
    for source in read_sources(key, entries, data):
        if source.kind == "file" and not files_of(source.path):
            raise missing_file(key, source.path)
        if key == "data.val_files" and source.weight is not None:
            expected = "no weight: validation reads every row"
            raise ConfigError(key, f"{source.name} has a weight", expected, "remove the weight")
    if key == "data.train_files":
        read_weights(read_sources(key, entries, data), data.weights)


def missing_file(key: str, path: str) -> ConfigError:
    """Returns the error for a file that does not exist."""
    return ConfigError(key, f"{path} does not exist (seen from {Path.cwd()})", change="correct the path")


def files_of(path: str) -> list[Path]:
    """Lists the files that match a path, sorted if it contains `*`; empty if there are none."""
    expanded = Path(path).expanduser()
    if "*" not in path:
        return [expanded] if expanded.is_file() else []
    return sorted(found for found in Path(expanded.anchor).glob(str(expanded.relative_to(expanded.anchor))))


def _read_source(key: str, entry: Mapping[str, Any], data: DataConfig | ExamplesDataConfig) -> Source:
    own_keys = [name for name in OWN_KEYS if name in data]
    for name in entry:
        if name not in (*ENTRY_KEYS, *own_keys):
            known = (*ENTRY_KEYS, *own_keys)
            hint = did_you_mean(str(name), known, "correct the name", quoted=False)
            raise ConfigError(key, f"unknown key {name!r} in an entry", f"one of {', '.join(known)}", hint)
    path, weight = entry.get("path"), entry.get("weight")
    if not isinstance(path, str):
        raise ConfigError(key, dict(entry), "an entry with path: FILE, FOLDER, HUB or FUNCTION", "add it")
    if weight is not None and not (is_number(weight) and weight > 0):
        raise ConfigError(f"{key}: weight of {path}", weight, "a number > 0", "correct it")
    for name in ("filter", "options"):
        if not isinstance(entry.get(name, {}), Mapping):
            raise ConfigError(f"{key}: {name} of {path}", entry[name], "a mapping", "correct it")
    kind, name, config, split = _kind(key, path)
    source = Source(
        kind=kind,
        path=name,
        config=entry.get("config", config),
        split=entry.get("split", split),
        weight=weight,
        where=entry.get("filter", {}),
        options=entry.get("options", {}),
        fields={name: entry[name] for name in own_keys if name in entry},
    )
    if kind in ("file", "function") and (source.config or source.split):
        raise ConfigError(f"{key}: {path}", f"a {kind}, which has no config and no split", change="remove them")
    if kind != "function" and source.options:
        raise ConfigError(f"{key}: {path}", f"a {kind}, and only a function has options", change="remove the options")
    return source


def _kind(key: str, path: str) -> tuple[Literal["file", "folder", "hub", "function"], str, str | None, str | None]:
    """Splits a path into four parts: its kind, the path itself, config and split."""
    on_hub = path.startswith("hub:")
    parts = _NAME.fullmatch(path.removeprefix("hub:"))
    if on_hub and parts:
        return "hub", parts["path"], parts["config"], parts["split"]
    if path.endswith(FILE_SUFFIXES):
        return "file", path, None, None
    location, _, function = path.rpartition(":")
    if location.endswith(".py") and not Path(location).expanduser().is_file():
        raise missing_file(key, location)
    if location.endswith(".py") or (location and "/" not in path and function.isidentifier()):
        return "function", path, None, None
    if parts and Path(parts["path"]).expanduser().is_dir():
        return "folder", parts["path"], parts["config"], parts["split"]
    file = Path(path).expanduser()
    if file.is_file():
        found, suffixes = f"{path} ends in {file.suffix or 'nothing'}", ", ".join(FILE_SUFFIXES[:3])
        raise ConfigError(key, found, suffixes, "convert it, or read it with a function (path/file.py:function)")
    if parts and _HUB.fullmatch(parts["path"]) and not path.startswith((".", "~")) and not file.parent.is_dir():
        return "hub", parts["path"], parts["config"], parts["split"]
    found, more = f"{path} does not exist (seen from {Path.cwd()})", "hub:owner/name, :config and @split for the hub"
    raise ConfigError(key, found, f"a {_FORMS}; {more}", "correct the path")


def shares_at(mix: Mapping[str, MixShare], step: float) -> dict[str, float]:
    """Returns the share of each kind of rows at a step: linear between the steps of `mix`, constant outside of them."""
    return {name: share if isinstance(share, int | float) else _between(share, step) for name, share in mix.items()}


def _between(shares: Mapping[int, float], step: float) -> float:
    steps = sorted(shares)
    place = bisect_right(steps, step)
    if place in (0, len(steps)):
        return shares[steps[max(0, place - 1)]] if steps else 0.0
    before, after = steps[place - 1], steps[place]
    part = (step - before) / (after - before)
    return (1 - part) * shares[before] + part * shares[after]


def mean_shares(mix: Mapping[str, MixShare], steps: int) -> dict[str, float]:
    """Averages the share of each kind of rows over the steps of a run."""
    at = [shares_at(mix, step) for step in range(max(1, steps))]
    return {name: sum(shares[name] for shares in at) / len(at) for name in mix}
