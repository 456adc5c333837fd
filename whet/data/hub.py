# SPDX-License-Identifier: Apache-2.0
"""Reads rows with `datasets`: data sets on the hub, folders in the hub's layout, folders that `save_to_disk` wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from whet.errors import DataError, DeadlineError
from whet.processes.background import within

log = logging.getLogger(__name__)
OFFLINE = (
    "there is no network, or the hub does not respond: download the data set once with a network (it is cached below "
    "HF_HOME), or name a folder or file instead; HF_HUB_OFFLINE=1 reads the cache without waiting"
)


def read_hub(
    path: str, config: str | None, split: str | None, *, default_split: str | None, deadline_seconds: float
) -> list[dict[str, Any]]:
    """Reads the rows of one split of a data set on the hub, or of a folder.  Raises: DataError, DeadlineError."""
    name = f"{path}{f':{config}' if config else ''}{f'@{split}' if split else ''}"
    late = f"{name} was not downloaded within data.hub_deadline_seconds={deadline_seconds:g}; raise it; or {OFFLINE}"
    try:
        return within(deadline_seconds, lambda: _read(path, config, split, default_split), late)
    except (DataError, DeadlineError):
        raise
    except ConnectionError as error:
        raise DataError(f"{name} cannot be fetched ({error}); {OFFLINE}") from error
    except Exception as error:  # `datasets` raises whatever the libraries below it do
        hint = _hint(path, str(error))
        raise DataError(f"{name} cannot be read: {' '.join(str(error).split())[:500]}{hint}") from error


def _read(path: str, config: str | None, split: str | None, default_split: str | None) -> list[dict[str, Any]]:
    import datasets

    folder = Path(path).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        if config is not None:
            raise DataError(f"{path} was written by save_to_disk and has no configs; remove :{config}")
        saved = datasets.load_from_disk(str(folder))
        if not isinstance(saved, dict):
            if split is not None:
                raise DataError(f"{path} has a single split without a name; remove @{split}")
            return cast(list[dict[str, Any]], saved.to_list())
        return cast(list[dict[str, Any]], saved[_split_of(path, split, default_split, list(saved))].to_list())
    found = datasets.load_dataset(str(folder) if folder.is_dir() else path, config, split=split)
    if split is None:  # all splits, which are downloaded together anyway; listing their names does not work offline
        found = found[_split_of(path, None, default_split, list(found))]
    return cast(list[dict[str, Any]], found.to_list())


def _split_of(path: str, split: str | None, default: str | None, known: list[str]) -> str:
    """The given split, else the only one, else the default one.  Raises: DataError."""
    wanted = split or (known[0] if len(known) == 1 else default)
    if wanted not in known:
        found = f"no split {split!r}" if split else f"{len(known)} splits"
        raise DataError(f"{path} has {found}; it has {', '.join(known)}: write {path}@{known[0]} for one of them")
    if split is None:
        log.info("%s: reading its split %s", path, wanted)
    return wanted


def _hint(path: str, message: str) -> str:
    if "onfig" in message:
        return f"; write {path}:CONFIG to choose one"
    if "split" in message:
        return f"; write {path}@SPLIT to choose one"
    return "; check the name, and for a set with restricted access `huggingface-cli login`"
