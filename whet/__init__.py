# SPDX-License-Identifier: Apache-2.0
"""whet: reinforcement learning for language models. Importing the package does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import no_exit
from whet.registry import (
    register_adv_est,
    register_aggregation,
    register_engine,
    register_environment,
    register_filter,
    register_hint,
    register_kl,
    register_policy_loss,
    register_rejection,
    register_reward,
    register_rollout,
    register_sampler,
    register_tool,
    register_tool_parser,
    register_value_loss,
    register_weight,
    register_wrapper,
)

if TYPE_CHECKING:
    from whet.trainers.run import Run
    from whet.types import Prompt

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "register_adv_est",
    "register_aggregation",
    "register_engine",
    "register_environment",
    "register_filter",
    "register_hint",
    "register_kl",
    "register_policy_loss",
    "register_rejection",
    "register_reward",
    "register_rollout",
    "register_sampler",
    "register_tool",
    "register_tool_parser",
    "register_value_loss",
    "register_weight",
    "register_wrapper",
    "train",
]


@no_exit()
def train(
    recipe: str | Path | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    data: Iterable[Mapping[str, Any] | Prompt] | None = None,
    val_data: Iterable[Mapping[str, Any] | Prompt] | None = None,
    **overrides: Any,
) -> Run:
    """Trains as `whet train` does and returns the finished run.

        whet.train("gsm8k", reward=my_function, data=rows, **{"model.path": "my_model", "rollout.n": 8})

    `reward`, `data` and `val_data` (rows or prompts) stand in for `reward.function`, `data.train_files` and
    `data.val_files`; `overrides` are dotted keys of the config, or whole sections as mappings (`rollout={"n": 8}`).
    Raises: ConfigError before anything is loaded."""
    from whet.config import TrainConfig, load_config

    objects = {"reward": reward, "data": data, "val_data": val_data}
    given = {name for name, value in objects.items() if value is not None}
    config = load_config(TrainConfig, recipe, overrides, given=given).config

    from whet.threads import yield_soon

    yield_soon()
    from whet.trainers import build  # after the config is checked, since this loads torch

    return build.train(config, reward=reward, data=data, val_data=val_data)
