# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what reward files of verl and EasyR1 import, where verl is not installed: while such a file is loaded,
the names of `OFFERED` can be imported, and others raise the usual error."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from whet.registry import load_target

C = TypeVar("C", bound=type)

# What each name stands for; loaded when it is imported, so that a file which needs no torch loads none.
_LINES = Path(__file__).with_name("offered.txt").read_text(encoding="utf-8").splitlines()
OFFERED = dict(line.split() for line in _LINES)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> object:
        whole = f"{self.__name__}.{name}"
        if whole in OFFERED:
            return load_target(OFFERED[whole])
        if whole in sys.modules:
            return sys.modules[whole]
        raise AttributeError(name) if name.startswith("__") else ModuleNotFoundError(f"no {whole}", name=whole)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes the names of `OFFERED` importable in the block, unless verl is installed."""
    parents = {name.rsplit(".", depth)[0] for name in OFFERED for depth in range(1, name.count(".") + 1)}
    found = {} if find_spec("verl") else {name: _Module(name) for name in parents}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            del sys.modules[name]


def register(name: str) -> Callable[[C], C]:
    """verl's decorator of managers. The class stays as it is: a run names it by its path."""
    return lambda cls: cls


class AbstractRewardManager:
    """The base of verl's managers."""

    def _extract_reward_from_rm_scores(self, data: object, return_dict: bool = False) -> None:
        return None  # scores of a reward model are no column of the batch that a manager gets


class RewardManagerBase:
    """The base of verl's managers with `run_single`, which keep the event loop that they are made in."""

    _class_initialized = False

    def __init__(self, config: object, tokenizer: object, compute_score: Callable[..., object]) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: object, tokenizer: object) -> None:
        """Called with each instance; a class that prepares something once asks `_class_initialized`."""
        cls._class_initialized = True


class FunctionRewardManager(ABC):
    """The base of EasyR1's managers: `reward_fn` is the function that the config names."""

    def __init__(self, config: Any, tokenizer: object) -> None:
        self.config, self.tokenizer = config, tokenizer
        function = load_target(f"{config.reward_function}:{config.reward_function_name}")
        options = dict(config.get("reward_function_kwargs") or {})
        self.reward_fn: Callable[[object], object] = lambda given: function(given, **options)

    @abstractmethod
    def compute_reward(self, data: object) -> object:
        """Scores [B, R], on the last token of each response, and a dict with the other numbers of each."""
