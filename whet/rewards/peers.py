# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what reward files of verl and EasyR1 import, where verl is not installed: while such a file is loaded,
the names of `OFFERED` can be imported, and others raise the usual error."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from whet.registry import load_target

if TYPE_CHECKING:
    from torch import Tensor

    from whet.protocol import DataProto

C = TypeVar("C", bound=type)

_HERE, _ANY = __name__, "typing:Any"
_DATA, _SCORE = "whet.protocol:DataProto", "whet.rewards.managers:score_by_source"
_MANAGERS = ("FunctionRewardManager", "SequentialFunctionRewardManager", "BatchFunctionRewardManager")
# Where each name is, by module; loaded when it is imported, so that a file which needs no torch loads none.
OFFERED: Mapping[str, Mapping[str, str]] = {
    "verl": {"DataProto": _DATA},
    "verl.protocol": {"DataProto": _DATA},
    "verl.utils": {},
    "verl.utils.ray_utils": {"get_event_loop": "asyncio:get_event_loop"},
    "verl.utils.reward_score": {"default_compute_score": _SCORE, "_default_compute_score": _SCORE},
    "verl.workers": {},
    "verl.workers.reward_manager": {"register": f"{_HERE}:register"},
    "verl.workers.reward_manager.registry": {"register": f"{_HERE}:register"},
    "verl.workers.reward_manager.abstract": {
        "AbstractRewardManager": f"{_HERE}:AbstractRewardManager",
        "RawRewardFn": _ANY,
    },
    # EasyR1's
    "verl.workers.reward": {"RewardConfig": _ANY, **{name: f"{_HERE}:{name}" for name in _MANAGERS}},
    "verl.workers.reward.config": {"RewardConfig": _ANY},
    "verl.workers.reward.function": {
        **dict.fromkeys(("RewardInput", "RewardScore"), "builtins:dict"),
        **{name: f"{_HERE}:{name}" for name in _MANAGERS},
    },
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes the names of `OFFERED` importable in the block; an installed verl comes first."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        whole = f"{self.__name__}.{name}"
        if name in OFFERED[self.__name__]:
            return load_target(OFFERED[self.__name__][name])
        if name.startswith("__") or whole in OFFERED:  # a part that is not imported yet
            raise AttributeError(name)
        raise ModuleNotFoundError(f"No module named {whole!r}", name=whole)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `OFFERED`, after all other finders; none where verl itself is of another origin."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a stand-in."""
        is_ours = name == "verl" or isinstance(sys.modules.get("verl"), _Module)
        return ModuleSpec(name, self, is_package=True) if name in OFFERED and is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, which loads a name when it is read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a stand-in has no code."""


def register(name: str) -> Callable[[C], C]:
    """verl's decorator of managers. The class stays as it is: a run names it by its path."""
    return lambda cls: cls


class AbstractRewardManager(ABC):
    """The base of verl's managers."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **options: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any: ...

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> None:
        return None  # scores of a reward model are no column of the batch that a manager gets


class FunctionRewardManager(ABC):
    """The base of EasyR1's managers: `reward_fn` is the function that the config names."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        place = f"{config.reward_function}"
        function = load_target(place if ":" in place else f"{place}:{config.get('reward_function_name', 'main')}")
        options = dict(config.get("reward_function_kwargs") or {})
        self.reward_fn: Callable[[Any], Any] = lambda given: function(given, **options)

    @abstractmethod
    def compute_reward(self, data: DataProto) -> tuple[Tensor, dict[str, list[float]]]:
        """Scores on the last token of each response, and the other numbers of each."""

    def _inputs(self, data: DataProto) -> list[dict[str, Any]]:
        lengths = data.batch["response_mask"].sum(-1).tolist()
        texts = [
            self.tokenizer.decode(ids[:length], skip_special_tokens=self.config.skip_special_tokens)
            for ids, length in zip(data.batch["responses"], lengths, strict=True)
        ]
        rows = zip(texts, lengths, data.non_tensor_batch["ground_truth"], strict=True)
        return [dict(zip(("response", "response_length", "ground_truth"), row, strict=True)) for row in rows]

    def _rewards(self, data: DataProto, scores: Sequence[Mapping[str, float]]) -> tuple[Tensor, dict[str, list[float]]]:
        rewards = data.batch["response_mask"].float() * 0
        for row, length in enumerate(data.batch["response_mask"].sum(-1).tolist()):
            rewards[row, length - 1] = scores[row]["overall"]
        return rewards, {name: [each[name] for each in scores] for name in scores[0]}


class SequentialFunctionRewardManager(FunctionRewardManager):
    """Calls the function for each response."""

    def compute_reward(self, data: DataProto) -> tuple[Tensor, dict[str, list[float]]]:
        """See FunctionRewardManager."""
        return self._rewards(data, [self.reward_fn(each) for each in self._inputs(data)])


class BatchFunctionRewardManager(FunctionRewardManager):
    """Calls the function once for all responses."""

    def compute_reward(self, data: DataProto) -> tuple[Tensor, dict[str, list[float]]]:
        """See FunctionRewardManager."""
        return self._rewards(data, self.reward_fn(self._inputs(data)))
