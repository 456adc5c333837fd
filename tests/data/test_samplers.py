# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.raising import raises
from whet.config.schema import DataConfig
from whet.data.load import EntryCounts, Loaded
from whet.data.loader import in_order, mixture, shuffled
from whet.data.samplers import Learnability, make_loader, order_of
from whet.errors import ConfigError, DataError
from whet.types import Failure, Group, Prompt, Trajectory


def loaded(*sizes: int, weights: list[float] | None = None) -> Loaded[Prompt]:
    """Prompts whose row number is twice their place, and whose level is their place."""
    prompts = [Prompt(f"0:{2 * i}", 2 * i, (), (i,), "s", None, {"level": i}) for i in range(sum(sizes))]
    shares = weights or [None] * len(sizes)
    return Loaded(tuple(prompts), tuple(EntryCounts("s", n, n, n, w) for n, w in zip(sizes, shares, strict=True)))


def places(prompts: list[Prompt]) -> list[int]:
    return [prompt.token_ids[0] for prompt in prompts]


def loader(of: Loaded[Prompt], *, seed: int = 0, total_draws: int = 100, **data: Any) -> Any:
    return make_loader(DataConfig(**data), of, seed=seed, total_draws=total_draws)


def test_without_a_sampler_data_shuffle_decides() -> None:
    assert places(loader(loaded(4), shuffle=False).take(6)) == [0, 1, 2, 3, 0, 1]
    assert places(loader(loaded(4, 6), seed=3).take(10)) == shuffled(10, 3, 0).tolist()
    assert order_of(loaded(4, 6), seed=0, shuffle=True) is None
    assert places(loader(loaded(9), sampler="shuffle", seed=3).take(18)) == places(loader(loaded(9), seed=3).take(18))
    assert places(loader(loaded(3), sampler="sequential").take(4)) == [0, 1, 2, 0]


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4), shares=st.lists(st.integers(1, 9), min_size=4),
    epoch=st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_of_a_mixture_has_its_exact_shares(counts: list[int], shares: list[int], epoch: int) -> None:
    weights = [share / sum(shares[: len(counts)]) for share in shares[: len(counts)]]
    total, ends = sum(counts), np.cumsum(counts)
    try:
        order = mixture([partial(shuffled, n, 1) for n in counts], counts, weights, seed=1)
    except DataError:
        assert min(weights) * total < 1
        return
    rows = order(epoch)
    drawn = Counter(np.searchsorted(ends, rows, side="right").tolist())
    assert len(rows) == total
    for source, weight in enumerate(weights):
        assert abs(drawn[source] - weight * total) < 1


def test_each_source_goes_through_all_its_rows_before_one_comes_again() -> None:
    """Source 0 (4 rows) has 5 of the 10 draws of an epoch, source 1 (6 rows) the other 5."""
    order = mixture([partial(shuffled, 4, 7), partial(in_order, 6)], [4, 6], [0.5, 0.5], seed=7)
    drawn = np.concatenate([order(epoch) for epoch in range(12)])
    first, second = drawn[drawn < 4], drawn[drawn >= 4]
    assert len(first) == len(second) == 60
    assert first.tolist() == np.concatenate([shuffled(4, 7, number) for number in range(15)]).tolist()
    assert second.tolist() == [4, 5, 6, 7, 8, 9] * 10
    assert order(0).tolist() != order(2).tolist()


def test_a_weight_that_draws_nothing_is_refused() -> None:
    weights = re.compile(r"entry 1 .* 0\.01, .* 18$")  # rows of an epoch
    with raises(DataError, key="data.weights", found=weights):
        loader(loaded(9, 9, weights=[0.99, 0.01]))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"shuffle": False},
        {"sampler": "curriculum", "sampler_options": {"difficulty_key": "level"}},
        {"sampler": "learnability"},
    ],
    ids=["shuffle", "in order", "curriculum", "learnability"],
)
@pytest.mark.parametrize("weights", [None, [0.8, 0.2]])
@pytest.mark.parametrize("before", [0, 3, 10, 17])
def test_resuming_gives_the_same_prompts_with_names_that_are_used_once(
    data: dict[str, Any], weights: list[float] | None, before: int
) -> None:
    if weights and data.get("sampler") == "learnability":
        with raises(DataError, key="data.sampler=learnability", found=re.compile("weights")):
            loader(loaded(3, 7, weights=weights), **data)
        return
    whole, stopped, resumed = (loader(loaded(3, 7, weights=weights), total_draws=30, **data) for _ in range(3))
    expected = [*whole.take(before), *whole.take(20)]
    stopped.take(before)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.take(20) == expected[before:]
    assert len({prompt.uid for prompt in expected}) == len(expected)


def test_a_row_that_comes_again_in_an_epoch_has_another_name() -> None:
    uids = [prompt.uid for prompt in loader(loaded(2, 6, weights=[0.5, 0.5]), shuffle=False).take(16)]
    assert sorted(uid for uid in uids if uid.endswith(":0")) == ["0.1:0", "0:0", "1.1:0", "1:0"]


def curriculum(count: int, draws: int, **options: Any) -> list[int]:
    options = {"difficulty_key": "level", **options}
    return places(loader(loaded(count), total_draws=draws, sampler="curriculum", sampler_options=options).take(draws))


def test_a_curriculum_goes_from_easy_to_hard_over_the_run() -> None:
    assert curriculum(10, 10, spread=0.0) == list(range(10))
    assert curriculum(10, 5, spread=0.0) == [1, 3, 5, 7, 9]
    assert curriculum(4, 12, spread=0.0) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert curriculum(4, 4, spread=0.0, hardest_first=True) == [3, 2, 1, 0]
    taken = curriculum(1000, 1000, spread=0.1)
    assert sorted(taken) == list(range(1000)) and taken != sorted(taken)
    assert max(abs(place - draw) for draw, place in enumerate(taken)) < 100
    assert abs(np.corrcoef(curriculum(1000, 1000, spread=100.0), np.arange(1000))[0, 1]) < 0.1


def test_after_its_last_draw_a_curriculum_is_a_shuffle() -> None:
    of = loader(loaded(10), total_draws=15, sampler="curriculum", sampler_options={"difficulty_key": "level"})
    of.take(15)
    assert sorted(places(of.take(25)[5:15])) == list(range(10))


def test_a_curriculum_within_each_source_of_a_mixture() -> None:
    options = {"difficulty_key": "level", "spread": 0.0}
    of = loader(loaded(4, 4, weights=[0.75, 0.25]), total_draws=8, sampler="curriculum", sampler_options=options)
    taken = places(of.take(8))
    assert [place for place in taken if place < 4] == [0, 1, 1, 2, 3, 3]
    assert [place for place in taken if place >= 4] == [5, 7]


def answers(place: int, *accuracies: float | None) -> Group:
    prompt = Prompt("0:0", 2 * place, (), (), "s", None)
    failure = Failure("reward", "late")
    return Group(
        prompt,
        tuple(
            Trajectory(str(i), prompt, (), i, 0.0, accuracy, failure=failure if accuracy is None else None)
            for i, accuracy in enumerate(accuracies)
        ),
    )


def test_prompts_that_some_answers_solve_are_drawn_more_often() -> None:
    sampler = Learnability(loaded(4).items, 0, floor=0.01, memory=1.0, prior=0.001)
    sampler.observe([answers(0, 1, 1, 1, 1), answers(1, 0, 0, 0, 0), answers(2, 1, 1, 1, 0), answers(3, 1, 0, None)])
    drawn = Counter(sampler.take(1)[0] for _ in range(4000))
    weights = np.array([0.01, 0.01, 3 / 16 + 0.01, 1 / 4 + 0.01])
    assert np.allclose([drawn[i] / 4000 for i in range(4)], weights / weights.sum(), atol=0.02)
    assert sorted(sampler.take(4)) == [0, 1, 2, 3]
    six = sampler.take(6)
    assert sorted(six[:4]) == [0, 1, 2, 3] and six[4:] == six[:2]


def test_what_was_learned_fades_and_travels() -> None:
    sampler = Learnability(loaded(3).items, 0, memory=0.5)
    sampler.observe([answers(1, 1, 1)])
    sampler.observe([answers(1, 0, 0), answers(2, 1, 0)])
    assert sampler.state() == {"batches": 0, "places": [1, 2], "right": [1.0, 1.0], "answered": [3.0, 2.0]}
    other = Learnability(loaded(3).items, 0, memory=0.5)
    other.load_state(json.loads(json.dumps(sampler.state())))
    assert [other.take(2) for _ in range(9)] == [sampler.take(2) for _ in range(9)]


OWN = """
def backwards(prompts, epoch, seed, total_draws, *, first=0):
    return [*range(len(prompts) - 1, first - 1, -1)]
def outside(prompts):
    return [0, 99]
def names(prompts):
    return ["a"]
def raises(prompts):
    return prompts[0].nothing
def wants(batch):
    return [0]
class Short:
    def __init__(self, prompts): pass
    def take(self, n): return [0]
    def observe(self, groups): pass
    def state(self): return {}
    def load_state(self, state): pass
class Incomplete:
    def take(self, n): return [0]
    def state(self): return {}
"""


def test_samplers_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def own(name: str, **options: Any) -> Any:
        return loader(loaded(4), sampler=f"{tmp_path}/own.py:{name}", sampler_options=options)

    assert places(own("backwards").take(5)) == [3, 2, 1, 0, 3]
    assert places(own("backwards", first=2).take(5)) == [3, 2, 3, 2, 3]
    for name, found, expected in [
        ("outside", re.compile(r"row 99 of 4"), "0 to 3"),
        ("names", re.compile(r"\['a'\]"), None),
        ("raises", re.compile("AttributeError: 'Prompt' object has no attribute 'nothing'"), None),
        ("Incomplete", re.compile("observe"), re.compile("take, observe, state")),
    ]:
        with raises(
            DataError,
            key=f"data.sampler={tmp_path}/own.py:{name}",
            found=found,
            **({} if expected is None else {"expected": expected}),
        ):
            own(name).take(1)
    with raises(DataError, key=f"data.sampler={tmp_path}/own.py:Short: take(2)", found=re.compile("1 "), expected="2"):
        own("Short").take(2)
    with raises(ConfigError, re.compile("frist$"), found=2, change=re.compile("'first'")):
        own("backwards", frist=2)
    with raises(DataError, key="checkpoint", found=re.compile("own.py:Short"), change=re.compile(r"data\.sampler")):
        own("Short").load_state({"epoch": 0, "index": 1})
    key = f"data.sampler={tmp_path}/own.py:backwards"
    with raises(DataError, key=key, found=re.compile("1 of the 2 "), expected=re.compile(r"data\.weights")):
        loader(
            loaded(2, 2, weights=[0.5, 0.5]), sampler=f"{tmp_path}/own.py:backwards", sampler_options={"first": 1}
        ).take(1)
