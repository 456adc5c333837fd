# SPDX-License-Identifier: Apache-2.0
"""Ground truths that a reward function cannot read, found when the data is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.config.schema import RewardConfig
from whet.data.load import Loaded
from whet.domains import Domains
from whet.errors import DataError, WhetError, describe
from whet.registry import REWARDS, Entry
from whet.types import Prompt


def checked(
    loaded: Loaded[Prompt], config: RewardConfig, function: Callable[..., Any] | None = None
) -> tuple[Prompt, ...]:
    """The prompts, each in its domain. Unless `function` scores them, the registered functions of `config` check the
    ground truths that they will read; a file's function is loaded in its own process alone.

    Raises: DataError naming file and row."""
    prompts = Domains.of_config(config, has_function=function is not None).assign(loaded.items)
    entries: dict[str, list[Entry]] = {}
    for prompt in prompts if function is None else ():
        if (domain := prompt.domain) not in entries:
            own = config.domains.get(domain)
            named = own.function if own is not None else config.function or []
            names = [named] if isinstance(named, str) else named
            entries[domain] = [REWARDS[name] for name in names if name and ":" not in name]
        for entry in entries[domain]:
            try:
                entry.check_row(prompt.ground_truth, prompt.extra_info, prompt.data_source)
            except (ValueError, WhetError, ImportError) as error:
                first, place = 0, iter(loaded.parts)
                while (part := next(place)).num_rows <= prompt.index - first:
                    first += part.num_rows
                where = f"{part.name}, row {prompt.index - first}: reward {entry.name}"
                if isinstance(error, WhetError):
                    raise DataError.joined([error]).at(where) from error
                raise DataError(where, describe(error), "a row that it can read") from error
    return prompts
