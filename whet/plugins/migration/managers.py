# SPDX-License-Identifier: Apache-2.0
"""Reward managers of other frameworks: classes that are constructed with a tokenizer and score a DataProto.

verl's managers have `__call__(data, return_dict)`, its newer ones `async run_single(data)` for a batch of one row,
EasyR1's `compute_reward(data)`. The method decides the form, not the class name. This file replaces modules that such
files import: while a file of managers is loaded without verl, the names in `OFFERED` can be imported."""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from whet.errors import RewardError, describe
from whet.registry import REWARDS, load_target, register_part
from whet.rewards.adapter import ONE_OF_THESE, check_options, show
from whet.rewards.result import read_result
from whet.types import Failure

METHODS = ("run_single", "compute_reward", "__call__")  # the first one that the class has is called
VERL_ARGUMENTS = {"tokenizer", "num_examine", "compute_score", "reward_fn_key"}
EASYR1_CONFIG = {"skip_special_tokens": True}


@register_part("reward_manager")
def open_manager(
    cls: type[Any], kwargs: Mapping[str, Any], tokenizer: tuple[str, bool] | None
) -> tuple[Callable[..., Any], asyncio.Runner | None]:
    """Creates a manager. Returns its scoring method, and the runner of its event loop if the method is async, else
    None.

    `kwargs` are arguments of the constructor; mappings become objects with attributes. `config` has EasyR1's form;
    `compute_score` is the name or path of a score function (default `auto`). `tokenizer` has the tokenizer's path, and
    whether its code may run.  Raises: RewardError."""
    methods = [name for name in METHODS if any(name in vars(base) for base in cls.__mro__)]
    if not methods:
        raise RewardError(f"class {cls.__qualname__}", f"no method {', '.join(METHODS)}", ONE_OF_THESE)
    arguments = _arguments(cls, kwargs, tokenizer)

    def make() -> Any:
        try:
            return cls(**arguments)
        except Exception as error:  # a user's constructor may raise anything
            takes = f"a constructor that takes {', '.join(arguments) or 'nothing'}"
            change = "correct it, or set what it reads below reward.kwargs"
            raise RewardError(f"manager {cls.__qualname__}", describe(error), takes, change) from error

    async def make_in_loop() -> Any:  # verl's managers keep the event loop in which they are made
        return make()

    if methods[0] != "run_single":
        return getattr(make(), methods[0]), None
    runner = asyncio.Runner()
    return runner.run(make_in_loop()).run_single, runner


def _arguments(cls: type[Any], kwargs: Mapping[str, Any], tokenizer: tuple[str, bool] | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from whet.models.load import load_tokenizer  # loads torch

    parameters = list(inspect.signature(cls).parameters.values())
    named = {each.name for each in parameters}
    if "tokenizer" not in named and any(each.kind is each.VAR_KEYWORD for each in parameters):
        named |= VERL_ARGUMENTS  # it hands them on to its base
    mappings = {name: OmegaConf.create(dict(each)) for name, each in kwargs.items() if isinstance(each, Mapping)}
    given = {"num_examine": 0, "reward_fn_key": "data_source", **kwargs, **mappings}
    given["config"] = OmegaConf.create({**EASYR1_CONFIG, **kwargs.get("config", {})})
    reference = kwargs.get("compute_score") or "auto"
    if not callable(reference):  # a shipped function gets the fields of the row that it reads
        is_path = ":" in reference
        reference = load_target(reference) if is_path else partial(score_shipped, REWARDS[reference].name)
    given["compute_score"] = reference
    own = {name: value for name, value in given.items() if name in named or name in kwargs}
    check_options(cls, parameters, ({*own} - {*kwargs}) | {"tokenizer"}, kwargs)
    if "tokenizer" not in named:
        return own
    if tokenizer is None:
        raise RewardError("model.path", None, f"the model whose tokenizer {show(cls)} takes", "set model.path")
    path, runs_code = tokenizer
    return {"tokenizer": load_tokenizer(path, trust_remote_code=runs_code), **own}


def score_shipped(
    name: str, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> float:
    """Scores a row by a shipped function. Returns one number, which all managers can read.  Raises: RewardError."""
    fields = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info or {},
        "prompt_str": "",
    }
    entry = REWARDS[name]
    given = {key: value for key, value in fields.items() if key in {*entry.parameters, *entry.options}}
    found = read_result(entry.load()(**given), correct_threshold=1.0, num_response_tokens=0)
    if isinstance(found, Failure):
        raise RewardError(f"reward function {name}", found.message, "a number")
    return found.reward


score_by_source = partial(score_shipped, "auto")  # in the place of verl's default_compute_score

C = TypeVar("C", bound=type)

# The target of each name; it is loaded when a file imports the name, so that no torch is loaded without need.
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


@register_part("foreign_imports")
@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes the names in `OFFERED` importable inside the block, unless verl is installed."""
    parents = {name.rsplit(".", depth)[0] for name in OFFERED for depth in range(1, name.count(".") + 1)}
    found = {} if find_spec("verl") else {name: _Module(name) for name in parents}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            del sys.modules[name]


def register(name: str) -> Callable[[C], C]:
    """Replaces verl's decorator for managers. It returns the class unchanged: a run names a manager by its path."""
    return lambda cls: cls


class AbstractRewardManager:
    """Replaces the base class of verl's managers that have `__call__`."""

    def _extract_reward_from_rm_scores(self, data: object, return_dict: bool = False) -> None:
        return None  # scores of a reward model are no column of the batch that a manager gets


class RewardManagerBase:
    """Replaces the base class of verl's managers with `run_single`. Keeps the event loop in which it is created."""

    _class_initialized = False

    def __init__(self, config: object, tokenizer: object, compute_score: Callable[..., object]) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: object, tokenizer: object) -> None:
        """Runs for each instance. A subclass that prepares data only once checks `_class_initialized` first."""
        cls._class_initialized = True


class FunctionRewardManager(ABC):
    """Replaces the base class of EasyR1's managers: `reward_fn` is the function that the config names."""

    def __init__(self, config: Any, tokenizer: object) -> None:
        self.config, self.tokenizer = config, tokenizer
        function = load_target(f"{config.reward_function}:{config.reward_function_name}")
        options = dict(config.get("reward_function_kwargs") or {})
        self.reward_fn: Callable[[object], object] = lambda given: function(given, **options)

    @abstractmethod
    def compute_reward(self, data: object) -> object:
        """Returns scores [B, R], with each score on a response's last token, and a dict of other numbers by name."""
