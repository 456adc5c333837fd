# SPDX-License-Identifier: Apache-2.0
"""The order of prompts. A sampler is a function that gives an epoch's order, or a class that learns (`Sampler`).

Before its `*` a sampler may take `prompts`, `epoch` (a function only), `seed` and `total_draws` (how many prompts the
run will take); what follows are options. The same arguments have to give the same rows: that is how a run resumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from whet.config.schema import DataConfig
from whet.data.difficulty import difficulty
from whet.data.load import Loaded
from whet.data.loader import (
    Order,
    PromptLoader,
    Rows,
    Sampler,
    SamplerLoader,
    checked_rows,
    generator,
    in_order,
    mixture,
    shuffled,
)
from whet.errors import DataError
from whet.options import NonNegative, Positive, Share
from whet.registry import SAMPLERS, Entry, register_sampler
from whet.types import Group, Prompt

METHODS = ("take", "observe", "state", "load_state")  # of a sampler that learns


def order_of(loaded: Loaded[Any], *, seed: int, shuffle: bool) -> Order | None:
    """The order of a mixture with weights; None where all rows are drawn alike."""
    weights, counts = _weights(loaded)
    if weights is None:
        return None

    def order(number: int, epoch: int) -> Rows:
        return shuffled(counts[number], seed, epoch, number) if shuffle else in_order(counts[number], epoch)

    return mixture([partial(order, number) for number in range(len(counts))], counts, weights, seed)


def make_loader(
    data: DataConfig, loaded: Loaded[Prompt], *, seed: int, total_draws: int
) -> PromptLoader | SamplerLoader:
    """The prompts in the order that `data` asks for.  Raises: DataError for a sampler that gives none."""
    prompts = loaded.items
    if data.sampler is None:
        own = order_of(loaded, seed=seed, shuffle=data.shuffle)
        return PromptLoader(prompts, seed=seed, shuffle=data.shuffle, order=own)
    entry, name = SAMPLERS[data.sampler], f"data.sampler={data.sampler}"
    options = entry.resolve_options(data.sampler_options, "data.sampler_options")
    weights, counts = _weights(loaded)

    def made(part: Sequence[Prompt], draws: int, **epoch: int) -> Any:
        return _call(entry, name, {"prompts": part, "seed": seed, "total_draws": draws, **epoch}, options)

    def order(part: Sequence[Prompt], draws: int, epoch: int) -> Rows:
        rows = checked_rows(made(part, max(1, draws), epoch=epoch), len(part), name)
        if weights is not None and len(rows) != len(part):
            raise DataError(f"{name} gave {len(rows)} of a source's {len(part)} rows; with weights it gives each once")
        return rows

    if inspect.isclass(entry.load()):
        if weights is not None:
            raise DataError(f"{name} chooses among all prompts itself; unset the weights, or take another sampler")
        sampler = made(prompts, total_draws)
        if not isinstance(sampler, Sampler):
            missing = next(method for method in METHODS if not hasattr(sampler, method))
            raise DataError(f"{name} has no method {missing}; a sampler that learns has {', '.join(METHODS)}")
        return SamplerLoader(prompts, sampler, name)
    if weights is None:
        return PromptLoader(prompts, order=partial(order, prompts, total_draws))
    ends = list(accumulate(counts))
    orders: list[Order] = [
        partial(order, prompts[end - count : end], round(weight * total_draws))
        for end, count, weight in zip(ends, counts, weights, strict=True)
    ]
    return PromptLoader(prompts, order=mixture(orders, counts, weights, seed))


def _call(entry: Entry, name: str, supplied: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    try:
        return entry.make(supplied, options)
    except DataError:
        raise
    except Exception as error:  # other people's code
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error


def _weights(loaded: Loaded[Any]) -> tuple[list[float] | None, list[int]]:
    counts = [part.num_items for part in loaded.parts]
    weights = [part.weight for part in loaded.parts if part.weight is not None]
    return (weights if weights else None), counts


@register_sampler("shuffle")
def shuffle(prompts: Sequence[Prompt], epoch: int, seed: int) -> Rows:
    """Draws each prompt once an epoch, in a new order each epoch."""
    return shuffled(len(prompts), seed, epoch)


@register_sampler("sequential")
def sequential(prompts: Sequence[Prompt]) -> Rows:
    """Draws each prompt once an epoch, in the order of the data."""
    return in_order(len(prompts), 0)


@register_sampler("curriculum")
def curriculum(
    prompts: Sequence[Prompt],
    epoch: int,
    seed: int,
    total_draws: int,
    *,
    difficulty_key: str,
    spread: NonNegative = 0.1,
    hardest_first: bool = False,
) -> Rows:
    """Goes from easy to hard over the steps of the run, by the number that `difficulty_key` names.

    Draw t of T, sorted by t / T + `spread` * u with u uniform in (0, 1), is the prompt at that share of the ranking:
    0 is a strict ranking, 1 nearly a shuffle. In a run of less than an epoch some prompts of each difficulty are left
    out, in a longer one each comes several times before the next. After T draws, such as a filter's refills may take,
    all prompts are shuffled. Bengio et al. 2009, https://doi.org/10.1145/1553374.1553380."""
    count, draws = len(prompts), generator(seed, "curriculum")
    numbers = np.array(
        [difficulty(prompt, difficulty_key, "data.sampler_options.difficulty_key") for prompt in prompts]
    )
    ranked = np.lexsort((draws.random(count), -numbers if hardest_first else numbers))
    when = np.argsort(np.arange(total_draws) / total_draws + spread * draws.random(total_draws), kind="stable")
    rows = ranked[(2 * when + 1) * count // (2 * total_draws)][epoch * count : (epoch + 1) * count]
    return np.concatenate([rows, shuffled(count, seed, epoch)[len(rows) :]])


@register_sampler("learnability")
class Learnability:
    """Prompts that some answers solve and some do not, more often than others: drawn with weight p (1 - p) + `floor`.

    p is the share of right answers, of which `memory` is kept each time that a prompt is answered again; a prompt that
    nobody answered yet has p = 1/2. No prompt comes twice in one draw of a batch.
    Foster et al. 2025, https://arxiv.org/abs/2502.12272."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        floor: NonNegative = 0.02,
        memory: Share = 0.5,
        prior: Positive = 1.0,
    ) -> None:
        self._seed, self._floor, self._memory, self._prior = seed, floor, memory, prior
        self._places = {prompt.index: place for place, prompt in enumerate(prompts)}
        self._right, self._answered = np.zeros(len(prompts)), np.zeros(len(prompts))
        self._batches = 0

    def take(self, n: int) -> list[int]:
        """n different places, by weight; all of them again where there are fewer (Efraimidis & Spirakis 2006)."""
        p = (self._right + self._prior / 2) / (self._answered + self._prior)
        waits = generator(self._seed, "learnability", self._batches).exponential(size=len(p)) / (
            p * (1 - p) + self._floor
        )
        self._batches += 1
        first = np.argsort(waits, kind="stable").tolist()
        return (first * -(-n // len(first)))[:n]

    def observe(self, groups: Sequence[Group]) -> None:
        """Counts right answers; those that failed say nothing."""
        for group in groups:
            judged = [answer.accuracy or 0.0 for answer in group.trajectories if answer.failure is None]
            place = self._places[group.prompt.index]
            self._right[place] = self._memory * self._right[place] + sum(judged)
            self._answered[place] = self._memory * self._answered[place] + len(judged)

    def state(self) -> dict[str, Any]:
        """Batches drawn, and what is known of the prompts that were answered."""
        seen = np.flatnonzero(self._answered)
        return {
            "batches": self._batches,
            "places": seen.tolist(),
            "right": self._right[seen].tolist(),
            "answered": self._answered[seen].tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken."""
        self._batches = state["batches"]
        self._right[state["places"]], self._answered[state["places"]] = state["right"], state["answered"]
