# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from tests.raising import raises
from whet.errors import DataError
from whet.metrics import Metrics


def test_each_reduction_by_hand() -> None:
    metrics = Metrics()
    for value, weight in [(1.0, 2.0), (4.0, 1.0), (7.0, 1.0)]:
        metrics.mean("a/mean", value, weight)
        metrics.sum("a/sum", value)
        metrics.max("a/max", value)
        metrics.min("a/min", value)
    # (2 * 1 + 4 + 7) / 4 = 3.25
    assert metrics.reduce() == {"a/max": 7.0, "a/mean": 3.25, "a/min": 1.0, "a/sum": 12.0}
    assert list(metrics.reduce()) == ["a/max", "a/mean", "a/min", "a/sum"]


def test_mean_over_ranks_is_the_mean_over_all() -> None:
    # rank 0: mean 2 over 3 tokens, rank 1: mean 10 over 1 token -> (6 + 10) / 4 = 4, not (2 + 10) / 2
    ranks = [Metrics(), Metrics()]
    ranks[0].mean("actor/loss", 2.0, weight=3)
    ranks[1].mean("actor/loss", 10.0, weight=1)
    total = Metrics()
    for rank in ranks:
        total.merge(rank)
    assert total.reduce() == {"actor/loss": 4.0}
    assert ranks[0].reduce() == {"actor/loss": 2.0}


def test_merge_puts_a_prefix_before_names() -> None:
    engine, step = Metrics(), Metrics()
    engine.mean("grad_norm", 2.0)
    step.merge(engine, prefix="actor/")
    step.merge(engine, prefix="critic/")
    assert step.reduce() == {"actor/grad_norm": 2.0, "critic/grad_norm": 2.0}
    assert engine.reduce() == {"grad_norm": 2.0}


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3, allow_subnormal=False), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    st.permutations(range(3)),
)
def test_any_split_and_merge_order_gives_the_same_bits(rows: list[tuple[float, float, int]], order: list[int]) -> None:
    whole, parts = Metrics(), [Metrics() for _ in range(3)]
    for value, weight, part in rows:
        for metrics in (whole, parts[part]):
            metrics.mean("a/mean", value, weight)
            metrics.sum("a/sum", value)
            metrics.max("a/max", value)
            metrics.min("a/min", value)
    left, right = Metrics(), Metrics()
    for part in order:
        left.merge(parts[part])
    inner = Metrics()  # the other bracketing: a + (b + c)
    inner.merge(parts[order[1]])
    inner.merge(parts[order[2]])
    right.merge(parts[order[0]])
    right.merge(inner)
    assert left.reduce() == right.reduce() == whole.reduce()
    assert whole.reduce()["a/sum"] == float(sum(Fraction(value) for value, _, _ in rows))
    total_weight = sum(Fraction(weight) for _, weight, _ in rows)
    if total_weight:
        exact = sum(Fraction(value) * Fraction(weight) for value, weight, _ in rows) / total_weight
        assert whole.reduce()["a/mean"] == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
    else:
        assert "a/mean" not in whole.reduce()


def test_a_mean_of_equal_numbers_is_that_number() -> None:
    metrics = Metrics()
    metrics.mean("a/b", 0.1, 3)  # 0.1 * 3 / 3 rounds to 0.10000000000000002
    assert metrics.reduce() == {"a/b": 0.1}


def test_without_weight_there_is_no_mean() -> None:
    metrics = Metrics()
    metrics.mean("a/b", math.nan, weight=0)  # a mean over no tokens
    assert metrics.reduce() == {}
    metrics.mean("a/b", 3.0, weight=torch.tensor(2))
    assert metrics.reduce() == {"a/b": 3.0}


@pytest.mark.parametrize("values", list(itertools.permutations([1.0, math.nan, 2.0])))
def test_nan_is_never_hidden(values: tuple[float, ...]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.mean("a/mean", value)
        metrics.sum("a/sum", value)
        metrics.max("a/max", value)
        metrics.min("a/min", value)
    assert all(math.isnan(value) for value in metrics.reduce().values())
    assert len(metrics.reduce()) == 4


def test_infinities_and_overflow_are_numbers_too() -> None:
    metrics = Metrics()
    for value in (math.inf, 1.0):
        metrics.mean("a/inf", value)
    for value in (math.inf, -math.inf):
        metrics.sum("a/nan", value)
    for value in (1.7e308, 1.7e308):
        metrics.sum("a/overflow", value)
    result = metrics.reduce()
    assert result["a/inf"] == math.inf
    assert math.isnan(result["a/nan"])
    assert result["a/overflow"] == math.inf


def test_tensors_of_any_dtype_and_numbers_mix() -> None:
    metrics = Metrics()
    metrics.mean("a/mean", torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2))
    metrics.mean("a/mean", torch.tensor(4.5, dtype=torch.float64), 1)
    metrics.sum("a/count", torch.tensor(3))
    metrics.sum("a/count", torch.tensor(True))
    assert metrics.reduce() == {"a/count": 4.0, "a/mean": 2.5}  # (2 * 1.5 + 4.5) / 3


def test_a_tensor_counts_as_it_was_when_recorded() -> None:
    metrics, running = Metrics(), torch.tensor(1.0)
    metrics.sum("a/b", running)
    running += 10
    metrics.sum("a/b", running)
    assert metrics.reduce() == {"a/b": 12.0}


def test_recording_keeps_no_graph_and_no_large_storage() -> None:
    weight = torch.ones(1000, requires_grad=True)
    metrics = Metrics()
    metrics.mean("a/loss", (weight * 2)[0])
    assert len(pickle.dumps(metrics)) < 1000
    (kept, _) = metrics._series["a/loss"].numbers[0]
    assert isinstance(kept, torch.Tensor)
    assert not kept.requires_grad
    assert kept.untyped_storage().nbytes() == 4


def test_pickle_and_deepcopy_keep_everything() -> None:
    metrics = Metrics()
    metrics.mean("a/b", torch.tensor(2.0), torch.tensor(3.0))
    metrics.max("a/c", 5)
    with metrics.time("time/x"):
        pass
    for other in (pickle.loads(pickle.dumps(metrics)), copy.deepcopy(metrics)):
        assert other.reduce() == metrics.reduce() == {"a/b": 2.0, "a/c": 5.0}
        assert other.timings() == metrics.timings()
        other.mean("a/b", 6.0)  # (3 * 2 + 6) / 4
        assert other.reduce()["a/b"] == 3.0
    assert metrics.reduce()["a/b"] == 2.0


def test_time_adds_up_and_stays_apart() -> None:
    metrics = Metrics()
    metrics.sum("a/b", 1)
    start = time.perf_counter()
    for _ in range(2):
        with metrics.time("time/sleep"):
            time.sleep(0.02)
    with pytest.raises(KeyError), metrics.time("time/raised"):
        time.sleep(0.01)
        raise KeyError
    passed = time.perf_counter() - start
    timings = metrics.timings()
    assert timings["time/sleep"] >= 0.04
    assert timings["time/raised"] >= 0.01
    assert sum(timings.values()) <= passed
    assert metrics.reduce() == {"a/b": 1.0}
    other = Metrics()
    other.merge(metrics)
    other.merge(metrics)
    assert other.timings()["time/sleep"] == 2 * timings["time/sleep"]


def test_one_name_has_one_reduction() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.mean("a/b", 1)
    with raises(DataError, "metric a/b", found="mean and sum"):
        metrics.sum("a/b", 1)
    other.max("a/b", 1)
    with raises(DataError, "metric a/b", found="mean and max"):
        metrics.merge(other)
    with raises(DataError, "metric a/b", found="mean and seconds"), metrics.time("a/b"):
        pass
    assert metrics.reduce() == {"a/b": 1.0}


def test_what_is_not_one_number_is_refused() -> None:
    metrics = Metrics()
    with raises(DataError, "metric a/b", found=re.compile(r"\[2\]")):
        metrics.sum("a/b", torch.zeros(2))
    with raises(DataError, "metric a/b", found="None"):
        metrics.sum("a/b", None)  # type: ignore[arg-type]
    metrics.mean("a/c", 1.0, weight=torch.tensor(-1.0))
    with raises(DataError, re.compile("a/c"), found=-1.0):
        metrics.reduce()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA and --on-device")
def test_recording_does_not_wait_for_the_device() -> None:
    value, metrics = torch.tensor(2.0, device="cuda"), Metrics()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.mean("a/b", value, value)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metrics.reduce() == {"a/b": 2.0}
