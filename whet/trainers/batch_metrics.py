# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step's batch. Metrics that verl also has, with the same meaning, have verl's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean

import torch

from whet.algorithms.value_loss import explained_variance
from whet.batch import Batch
from whet.metrics import Metrics
from whet.rollout.flow import by_player
from whet.rounding import all_alike
from whet.types import Group, trajectories_of

# Metrics of the area "reward" that are no parts of the reward function: a part of that name is "reward/part/<name>".
OWN = {"accuracy", "groups_all_equal", "overlong_penalty", "truncated", "judge_tokens_total", "judge_cost_total"}


def measure_groups(metrics: Metrics, groups: Sequence[Group], environment: str = "") -> None:
    """Records scores, accuracy, reward parts and the environment's metrics over the trajectories that did not fail, and
    the share of groups whose scores are all equal. `environment` is the environment's name in metrics."""
    measure_environment(metrics, groups, f"env/{environment}")
    groups = by_player(groups)
    valid = [[each for each in group.trajectories if each.failure is None] for group in groups]
    scores = [[each.score for each in group] for group in valid]
    trajectories = list(chain.from_iterable(valid))
    _spread(metrics, "critic/score", list(chain.from_iterable(scores)))
    _average(metrics, "reward/accuracy", [each.accuracy or 0.0 for each in trajectories])
    _average(metrics, "episode/turns", [len(each.turns) for each in trajectories])
    parts: dict[str, list[float]] = {}
    for name, value in chain.from_iterable({**each.parts, **each.logged}.items() for each in trajectories):
        if isinstance(value, float):
            parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        _average(metrics, f"reward/part/{name}" if name in OWN else f"reward/{name}", values)
    for domain in dict.fromkeys(group.prompt.domain for group in groups if group.prompt.domain):
        _average(metrics, f"data/share/{domain}", [float(group.prompt.domain == domain) for group in groups])
    _average(metrics, "reward/groups_all_equal", [float(all_alike(each)) for each in scores])


def measure_part(metrics: Metrics, groups: Sequence[Group], name: str, area: str) -> None:
    """Records the mean of reward part `name` over the trajectories that have it, as metric `<area>/<name>`."""
    trajectories = trajectories_of(groups)
    _average(metrics, f"{area}/{name}", [each.parts[name] for each in trajectories if name in each.parts])


def measure_environment(metrics: Metrics, groups: Sequence[Group], area: str) -> None:
    """Records the mean of each number that the environment reports, over the trajectories that have it. Also records
    the share of trajectories that ended at each limit. Metric names begin with `area`."""
    trajectories = [each for each in trajectories_of(groups) if each.failure is None]
    reported: dict[str, list[float]] = {}
    for field, value in chain.from_iterable(each.fields.items() for each in trajectories):
        if isinstance(value, int | float) and not field.startswith("tools/"):  # `count_failures` records these
            reported.setdefault(field, []).append(float(value))
    for field, values in reported.items():
        _average(metrics, f"{area}/{field}", values)
    for limit in dict.fromkeys(each.limit for each in trajectories if each.limit not in (None, "length")):
        _average(metrics, f"{area}/limit/{limit}", [float(each.limit == limit) for each in trajectories])


def measure_batch(metrics: Metrics, batch: Batch, max_response_length: int) -> None:
    """Records lengths in tokens, rewards after the KL term, and advantages and returns over sampled tokens."""
    mask = batch["response_mask"].bool()
    counted = mask.any(1)
    width = batch["prompts"].shape[1]
    lengths = batch["attention_mask"][:, width:].sum(1)[counted]
    _spread(metrics, "response_length", lengths.tolist())
    if len(lengths):
        metrics.mean("response_length/clip_ratio", (lengths >= max_response_length).float().mean(), len(lengths))
    _spread(metrics, "prompt_length", batch["attention_mask"][:, :width].sum(1)[counted].tolist())
    _spread(metrics, "critic/rewards", (batch["token_level_rewards"] * mask).sum(1)[counted].tolist())
    for name in ("advantages", "returns", "values"):
        if name in batch:
            _spread(metrics, f"critic/{name}", batch[name][mask])
    if "returns" in batch and "values" in batch and int(mask.sum()) > 1:
        metrics.mean("critic/vf_explained_var", explained_variance(batch["values"], batch["returns"], mask))
    metrics.sum("perf/total_num_tokens", int(batch["attention_mask"][counted].sum()))


def _average(metrics: Metrics, name: str, values: Sequence[float]) -> None:
    if values:
        metrics.mean(name, fmean(values), len(values))


def _spread(metrics: Metrics, name: str, values: torch.Tensor | Iterable[float]) -> None:
    column = torch.as_tensor(values, dtype=torch.float64)
    if column.numel():
        metrics.mean(f"{name}/mean", column.mean(), column.numel())
        metrics.max(f"{name}/max", column.max())
        metrics.min(f"{name}/min", column.min())
