# SPDX-License-Identifier: Apache-2.0
"""Rows through `datasets`: sets on the hub, folders laid out as one, and folders that `save_to_disk` wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from whet.errors import DataError, DeadlineError
from whet.processes.background import within

log = logging.getLogger(__name__)
OFFLINE = (
    "there is no network, or the hub does not answer: fetch the set once where there is (it is kept below HF_HOME), or "
    "name a folder or file instead; HF_HUB_OFFLINE=1 goes to the kept sets at once"
)


def read_hub(
    path: str, config: str | None, split: str | None, *, default_split: str | None, deadline_seconds: float
) -> list[dict[str, Any]]:
    """The rows of one split of a set on the hub, or of a folder.  Raises: DataError, DeadlineError."""
    name = f"{path}{f':{config}' if config else ''}{f'@{split}' if split else ''}"
    late = f"{name} was not there after data.hub_deadline_seconds={deadline_seconds:g}; raise it; or {OFFLINE}"
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
            raise DataError(f"{path} was written by save_to_disk and has no configs; take :{config} out")
        saved = datasets.load_from_disk(str(folder))
        if not isinstance(saved, dict):
            if split is not None:
                raise DataError(f"{path} holds one split without a name; take @{split} out")
            return cast(list[dict[str, Any]], saved.to_list())
        return cast(list[dict[str, Any]], saved[_split_of(path, split, default_split, list(saved))].to_list())
    found = datasets.load_dataset(str(folder) if folder.is_dir() else path, config, split=split)
    if split is None:  # all of them, which are fetched together anyway; asking for names does not work offline
        found = found[_split_of(path, None, default_split, list(found))]
    return cast(list[dict[str, Any]], found.to_list())


def _split_of(path: str, split: str | None, default: str | None, known: list[str]) -> str:
    """The split asked for, else the only one, else the usual one."""
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
