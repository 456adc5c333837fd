# SPDX-License-Identifier: Apache-2.0
"""Samplers choose the order of prompts. A function returns the order of an epoch; a class (`Sampler`) is adaptive.
`data.mix` sets the share of each domain in a batch.

Parameters before `*` may be `prompts`, `epoch` (functions only), `seed` and `total_draws` (the number of prompts that
the run draws); parameters after it are options. The same arguments must give the same rows, so that a run can resume.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from whet.config.schema import DataConfig
from whet.config.sources import MixShare, mean_shares, shares_at
from whet.data.load import Loaded, difficulty, users_code
from whet.data.loader import (
    Order,
    PromptLoader,
    PromptSource,
    RowNumbers,
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
from whet.registry import SAMPLERS, register_sampler
from whet.types import Group, Prompt

METHODS = ("take", "observe", "state", "load_state")  # of an adaptive sampler


def order_of(loaded: Loaded[Any], *, seed: int, shuffle: bool) -> Order | None:
    """Returns the order of a weighted mixture of entries; None if no weights are set."""
    weights, counts = _weights(loaded)
    if weights is None:
        return None

    orders = [partial(_own_order, count, seed, number, shuffle) for number, count in enumerate(counts)]
    return mixture(orders, counts, weights, seed)


def make_loader(data: DataConfig, loaded: Loaded[Prompt], *, seed: int, total_draws: int) -> PromptSource:
    """Makes the loader of a run's prompts, in the order that `data` configures.  Raises: DataError."""
    prompts = loaded.items
    weights, counts = _weights(loaded)
    if data.mix and weights is not None:
        raise DataError("data.mix", "weights of data entries also set the shares of rows", "", "unset one of the two")
    if data.sampler is None:
        if data.mix:
            return _mixed(data, prompts, lambda kind, rows: partial(_own_order, len(rows), seed, kind, data.shuffle))
        own = order_of(loaded, seed=seed, shuffle=data.shuffle)
        return PromptLoader(prompts, seed=seed, shuffle=data.shuffle, order=own)
    entry, name = SAMPLERS[data.sampler], f"data.sampler={data.sampler}"
    options = entry.resolve_options(data.sampler_options, "data.sampler_options")

    def made(part: Sequence[Prompt], draws: int, **epoch: int) -> Any:
        with users_code(name, change="correct the sampler"):
            return entry.make({"prompts": part, "seed": seed, "total_draws": draws, **epoch}, options)

    def order(part: Sequence[Prompt], draws: int, epoch: int) -> RowNumbers:
        rows = checked_rows(made(part, max(1, draws), epoch=epoch), len(part), name)
        if weights is not None and len(rows) != len(part):
            found = f"returned {len(rows)} of the {len(part)} rows of an entry"
            raise DataError(name, found, "each row once, as data.weights needs it")
        return rows

    if inspect.isclass(entry.load()):
        if weights is not None or data.mix:
            key = "data.mix" if data.mix else "weights of data entries"
            raise DataError(name, f"chooses among all prompts, which excludes {key}", "", "unset one of the two")
        sampler = made(prompts, total_draws)
        if not isinstance(sampler, Sampler):
            missing = next(method for method in METHODS if not hasattr(sampler, method))
            raise DataError(name, f"has no method {missing}", f"an adaptive sampler with {', '.join(METHODS)}")
        return SamplerLoader(prompts, sampler, name)
    if data.mix:
        draws = mean_shares(data.mix, total_draws // data.train_batch_size)
        return _mixed(data, prompts, lambda kind, rows: partial(order, rows, round(draws[kind] * total_draws)))
    if weights is None:
        return PromptLoader(prompts, order=partial(order, prompts, total_draws))
    ends = list(accumulate(counts))
    orders: list[Order] = [
        partial(order, prompts[end - count : end], round(weight * total_draws))
        for end, count, weight in zip(ends, counts, weights, strict=True)
    ]
    return PromptLoader(prompts, order=mixture(orders, counts, weights, seed))


def _mixed(data: DataConfig, prompts: Sequence[Prompt], order: Callable[[str, Sequence[Prompt]], Order]) -> MixedLoader:
    """Makes the loader of batches with the shares of `data.mix`. `order` returns the order of one kind's rows."""
    kinds = by_kind(prompts, data.mix)
    loaders = {kind: PromptLoader(rows, order=order(kind, rows)) for kind, rows in kinds.items()}
    return MixedLoader(loaders, data.mix, data.train_batch_size)


def _own_order(count: int, seed: int, kind: int | str, shuffle: bool, epoch: int) -> RowNumbers:
    return shuffled(count, seed, epoch, kind) if shuffle else in_order(count, epoch)


def _weights(loaded: Loaded[Any]) -> tuple[list[float] | None, list[int]]:
    counts = [part.num_items for part in loaded.parts]
    weights = [part.weight for part in loaded.parts if part.weight is not None]
    return (weights if weights else None), counts


@register_sampler("shuffle")
def shuffle(prompts: Sequence[Prompt], epoch: int, seed: int) -> RowNumbers:
    """Draws each prompt once per epoch, in a new random order each epoch."""
    return shuffled(len(prompts), seed, epoch)


@register_sampler("sequential")
def sequential(prompts: Sequence[Prompt]) -> RowNumbers:
    """Draws each prompt once per epoch, in the order of the data."""
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
) -> RowNumbers:
    """Draws from easy to hard over the steps of the run, by the field that `difficulty_key` names.

    Draw t of T has the key t / T + `spread` * u, with u uniform in (0, 1); the draws sorted by key go through the
    ranking of prompts: `spread` 0 is the strict ranking, 1 is nearly a shuffle. In a run of less than an epoch some
    prompts of each difficulty are skipped; in a longer one each prompt is drawn several times in a row. After T draws
    (the refills of a filter need more) all prompts are shuffled.
    Bengio et al. 2009, https://doi.org/10.1145/1553374.1553380."""
    count, draws = len(prompts), generator(seed, "curriculum")
    option = "data.sampler_options.difficulty_key"
    numbers = np.array([difficulty(prompt, difficulty_key, option) for prompt in prompts])
    ranked = np.lexsort((draws.random(count), -numbers if hardest_first else numbers))
    when = np.argsort(np.arange(total_draws) / total_draws + spread * draws.random(total_draws), kind="stable")
    rows = ranked[(2 * when + 1) * count // (2 * total_draws)][epoch * count : (epoch + 1) * count]
    return np.concatenate([rows, shuffled(count, seed, epoch)[len(rows) :]])


@register_sampler("learnability")
class Learnability:
    """Prefers prompts that the policy solves sometimes: draws them with weight p (1 - p) + `floor`.

    p is the share of correct responses; earlier counts are multiplied by `memory` each time a prompt is sampled again;
    an unseen prompt has p = 1/2. No prompt is drawn twice in one batch. Foster et al. 2025,
    https://arxiv.org/abs/2502.12272."""

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
        self._correct, self._scored = np.zeros(len(prompts)), np.zeros(len(prompts))
        self._batches = 0

    def take(self, n: int) -> list[int]:
        """Draws n row numbers by weight, without repetition unless n exceeds the rows (Efraimidis & Spirakis 2006)."""
        p = (self._correct + self._prior / 2) / (self._scored + self._prior)
        draws = generator(self._seed, "learnability", self._batches).exponential(size=len(p))
        self._batches += 1
        first = np.argsort(draws / (p * (1 - p) + self._floor), kind="stable").tolist()
        return (first * -(-n // len(first)))[:n]

    def observe(self, groups: Sequence[Group]) -> None:
        """Adds the correct responses and all responses to the counts of each prompt, without failed trajectories."""
        for group in groups:
            accuracies = [each.accuracy or 0.0 for each in group.trajectories if each.failure is None]
            place = self._places[group.prompt.index]
            self._correct[place] = self._memory * self._correct[place] + sum(accuracies)
            self._scored[place] = self._memory * self._scored[place] + len(accuracies)

    def state(self) -> dict[str, Any]:
        """Returns the number of batches drawn, and the counts of the prompts seen so far."""
        seen = np.flatnonzero(self._scored)
        return {
            "batches": self._batches,
            "places": seen.tolist(),
            "right": self._correct[seen].tolist(),
            "answered": self._scored[seen].tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._batches = state["batches"]
        self._correct[state["places"]], self._scored[state["places"]] = state["right"], state["answered"]


def by_kind(prompts: Sequence[Prompt], mix: Mapping[str, MixShare]) -> dict[str, list[Prompt]]:
    """Groups the prompts by the kinds that `mix` names. A kind is a domain; without domains, a data source.

    Raises: DataError for a kind without rows, and for rows of another kind."""
    kinds: dict[str, list[Prompt]] = {name: [] for name in mix}
    for prompt in prompts:
        kinds.setdefault(prompt.domain or prompt.data_source, []).append(prompt)
    counts = ", ".join(f"{name} ({len(rows)} rows)" for name, rows in kinds.items() if rows)
    for name, rows in kinds.items():
        if not rows:
            raise DataError(f"data.mix.{name}", f"no row is of {name!r}", counts, "take it out, or add rows")
        if name not in mix:
            expected = f"a share for the rows of {name!r}, as row {rows[0].index}; it names {', '.join(mix)}"
            raise DataError(f"data.mix.{name}", None, expected, "set it, 0 to leave them out")
    return kinds


class MixedLoader(PromptSource):
    """Draws each batch from several loaders, one for each kind, by the shares of `mix`. Shares of a batch are rounded;
    the rounded-off fractions are added to the next batch, so that a small share does not vanish.

    `batch_size` draws are one step of the shares' schedule; draws that replace groups dropped by a filter count too."""

    def __init__(self, loaders: Mapping[str, PromptLoader], mix: Mapping[str, MixShare], batch_size: int) -> None:
        super().__init__([prompt for loader in loaders.values() for prompt in loader.prompts])
        self._loaders, self._mix, self._batch_size = dict(loaders), mix, batch_size
        self._owed = dict.fromkeys(self._loaders, 0.0)
        self._drawn = 0

    def draw(self, n: int) -> list[Prompt]:
        """Draws the next n prompts. The kinds (domains or data sources) are interleaved."""
        shares = shares_at(self._mix, self._drawn / self._batch_size)
        owed = {name: self._owed[name] + shares[name] * n for name in self._loaders}
        turns: list[str] = []
        for _ in range(n):
            name = max((name for name in owed if shares[name] > 0), key=owed.__getitem__)
            owed[name] -= 1
            turns.append(name)
        drawn = {name: iter(loader.take(turns.count(name))) for name, loader in self._loaders.items()}
        self._owed, self._drawn = owed, self._drawn + n
        return [next(drawn[name]) for name in turns]

    def position(self) -> dict[str, Any]:
        """The number of draws, and for each kind its carried fraction and the position of its loader."""
        kinds = {name: {"owed": self._owed[name], **loader.state()} for name, loader in self._loaders.items()}
        return {"drawn": self._drawn, "kinds": kinds}

    def move_to(self, state: Mapping[str, Any]) -> None:
        kinds = state.get("kinds", {})
        if kinds.keys() != self._loaders.keys():
            found, change = f"names {', '.join(self._loaders)}", "restore it, or set trainer.resume=never"
            expected = f"{', '.join(kinds) or 'one order of all rows'}, from which the checkpoint draws"
            raise DataError("data.mix", found, expected, change)
        self._drawn = state["drawn"]
        for name, loader in self._loaders.items():
            self._owed[name] = kinds[name]["owed"]
            loader.load_state(kinds[name])
