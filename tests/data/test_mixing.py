# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.raising import raises
from whet.config import TrainConfig, load_config
from whet.config.schema import DataConfig
from whet.config.sources import mean_shares, shares_at
from whet.data.load import EntryCounts, Loaded
from whet.data.samplers import MixedLoader, make_loader
from whet.errors import ConfigError, DataError
from whet.types import Prompt


def loaded(**counts: int) -> Loaded[Prompt]:
    """Prompts of several data sources, numbered over all."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    prompts = [Prompt(f"0:{i}", i, (), (i,), kind, None, {"level": i}) for i, kind in enumerate(kinds)]
    return Loaded(tuple(prompts), (EntryCounts("all", len(kinds), len(kinds), len(kinds)),))


def loader(of: Loaded[Prompt], *, total_draws: int = 100, **data: Any) -> MixedLoader:
    made = make_loader(DataConfig(**data), of, seed=3, total_draws=total_draws)
    assert isinstance(made, MixedLoader)
    return made


def counts(prompts: list[Prompt]) -> dict[str, int]:
    return dict(Counter(prompt.data_source for prompt in prompts))


def test_a_small_share_does_not_vanish() -> None:
    of = loader(loaded(a=50, b=50, c=5), mix={"a": 0.65, "b": 0.3, "c": 0.05}, train_batch_size=4)
    # 2.6, 1.2, 0.2 -> 3, 1, 0; then -0.4 + 2.6, 0.2 + 1.2, 0.4 -> 2, 1, 1 (0.4 is tied with 0.4: the earlier one first)
    batches = [counts(of.take(4)) for _ in range(5)]
    assert batches[0] == {"a": 3, "b": 1}
    assert sum((Counter(each) for each in batches), Counter()) == {"a": 13, "b": 6, "c": 1}


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=12),
)
def test_counts_stay_near_their_shares(weights: list[int], sizes: list[int]) -> None:
    mix = {f"k{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    of = loader(loaded(**dict.fromkeys(mix, 3)), mix=mix, train_batch_size=8)
    drawn: Counter[str] = Counter()
    for size in sizes:
        drawn.update(counts(of.take(size)))
        assert all(abs(drawn[kind] - share * drawn.total()) < len(mix) for kind, share in mix.items())
    assert drawn.total() == sum(sizes)


def test_a_schedule_is_linear_between_its_steps() -> None:
    mix = {"a": {0: 1.0, 10: 0.5, 20: 0.5, 30: 0.0}, "b": {0: 0.0, 10: 0.5, 20: 0.5, 30: 1.0}}
    assert [shares_at(mix, step)["a"] for step in (0, 4, 10, 15, 26, 30, 99)] == pytest.approx(
        [1.0, 0.8, 0.5, 0.5, 0.2, 0.0, 0.0]
    )
    assert mean_shares(mix, 10)["b"] == pytest.approx(0.225)  # 0, 0.05, ..., 0.45
    of = loader(loaded(a=9, b=9), mix=mix, train_batch_size=10)
    batches = [counts(of.take(10)) for _ in range(32)]
    assert batches[0] == {"a": 10} and batches[10] == {"a": 5, "b": 5} and batches[31] == {"b": 10}
    assert 0 < batches[26]["a"] <= 3


def test_each_kind_goes_through_all_of_its_rows() -> None:
    of = loader(loaded(a=4, b=2), mix={"a": 0.5, "b": 0.5}, train_batch_size=4)
    taken = of.take(8)
    assert Counter(each.index for each in taken) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert len({each.uid for each in taken}) == 8
    assert of.find(taken[-1].uid) == taken[-1]
    by_order = loader(loaded(a=4, b=2), mix={"a": 0.5, "b": 0.5}, train_batch_size=4, shuffle=False)
    assert [each.index for each in by_order.take(6)] == [0, 4, 1, 5, 2, 4]


def test_a_sampler_orders_each_kind() -> None:
    of = loader(
        loaded(a=4, b=4),
        mix={"a": 0.75, "b": 0.25},
        train_batch_size=4,
        total_draws=16,
        sampler="curriculum",
        sampler_options={"difficulty_key": "level", "spread": 0.0},
    )
    taken = of.take(16)
    assert [each.index for each in taken if each.data_source == "a"] == sorted([0, 1, 2, 3] * 3)
    assert [each.index for each in taken if each.data_source == "b"] == [4, 5, 6, 7]


@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_resumed_run_draws_the_same(before: int) -> None:
    mix = {"a": {0: 0.9, 6: 0.2}, "b": {0: 0.1, 6: 0.8}}
    of, again = (loader(loaded(a=5, b=3), mix=mix, train_batch_size=3) for _ in range(2))
    for _ in range(before):
        of.take(3)
    again.load_state(copy.deepcopy(of.state()))
    assert [of.take(3) for _ in range(9)] == [again.take(3) for _ in range(9)]


@pytest.mark.parametrize(
    ("mix", "key", "fields"),
    [
        ({"a": 0.5, "c": 0.5}, "data.mix.c", {"expected": "a (2 rows), b (1 rows)"}),
        ({"a": 1.0}, "data.mix.b", {"found": None, "expected": re.compile("'b'.* row 2.* a$")}),
    ],
)
def test_kinds_that_do_not_fit_the_rows(mix: dict[str, float], key: str, fields: dict[str, object]) -> None:
    with raises(DataError, key, **fields):
        loader(loaded(a=2, b=1), mix=mix)


def test_what_a_mix_excludes() -> None:
    of = loaded(a=2, b=2)
    weighted = Loaded(of.items, (EntryCounts("a", 2, 2, 2, 0.5), EntryCounts("b", 2, 2, 2, 0.5)))
    with raises(DataError, key="data.mix", found=re.compile("weights")):
        loader(weighted, mix={"a": 0.5, "b": 0.5})
    with raises(DataError, key="data.sampler=learnability", found=re.compile("data.mix")):
        loader(of, mix={"a": 0.5, "b": 0.5}, sampler="learnability")
    other = loader(of, mix={"a": 1.0, "b": 0.0})
    with raises(DataError, key="data.mix", found=re.compile("a, b"), change=re.compile("trainer.resume=never")):
        other.load_state({"epoch": 0, "index": 3})


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"a": 0.5, "b": 0.4}, r"data.mix=\{'a': 0.5, 'b': 0.4\}; .* 1 at step 0, not 0.9"),
        ({"a": 0.5, "b": {0: 0.5, 10: 0.7}}, r"data.mix=\{'a': 0.5, 'b': 0.7\}; .* 1 at step 10, not 1.2"),
        ({"a": 1.0, "b": {}}, r"data.mix.b=\{\}; "),
        ({"a": 1.5, "b": -0.5}, r"data.mix.b.*-0.5"),
    ],
)
def test_shares_that_do_not_sum_to_one(mix: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, {"data.mix": mix, "model.path": "m"}, given={"data", "reward"})


def test_a_mix_on_the_command_line() -> None:
    texts = ["data.mix={a: {0: 0.5, 100: 1.0}, b: {0: 0.5, 100: 0.0}}", "model.path=m", "reward.function=gsm8k"]
    config = load_config(TrainConfig, None, texts, given={"data"}).config
    assert shares_at(config.data.mix, 50) == {"a": 0.75, "b": 0.25}
