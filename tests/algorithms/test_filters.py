# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.algorithms.calls import call
from whet.registry import FILTERS


@pytest.mark.parametrize("name", ["dynamic_sampling", "dapo"])
@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.0, 1.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.5], False),  # an answer alone has nothing to be compared with
        ([], False),  # all answers failed
        ([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], False),  # one score, summed in two orders
        ([0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1], False),
        ([-0.1 - 0.2 - 0.3, -0.6], False),
        ([0.6, 0.6000000238418579], False),  # of which one is a float32
        ([1e6 + 0.1 + 0.2, 1e6 + 0.3], False),
        ([0.6, 0.6001], True),
        ([1e6, 1e6 + 1], True),
        ([0.0, 1e-6], True),
    ],
)
def test_dynamic_sampling_keeps_groups_that_differ(name: str, values: list[float], kept: bool) -> None:
    assert call(FILTERS[name], {"values": values}, {}) is kept


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.0, 1.0, 0.0, 0.0], True),  # .25
        ([0.0, 0.0, 1.0, 1.0], False),  # .5 is not below .5
        ([0.2, 0.2], False),  # .2 is not above .2
        ([0.3], True),
        ([], False),
        ([0.1 + 0.2 - 0.1] * 3, False),  # .2, but for rounding
        ([0.5 - 1e-16] * 3, False),  # .5
    ],
)
def test_mean_window_is_open_on_both_sides(values: list[float], kept: bool) -> None:
    assert call(FILTERS["mean_window"], {"values": values}, {"low": 0.2, "high": 0.5}) is kept


def test_mean_window_drops_all_right_and_all_wrong_by_default() -> None:
    assert not call(FILTERS["mean_window"], {"values": [0.0] * 8}, {})
    assert not call(FILTERS["mean_window"], {"values": [1.0] * 8}, {})
    assert call(FILTERS["mean_window"], {"values": [1.0] * 7 + [0.0]}, {})


@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0, 1.0], []])
def test_first_finished_keeps_every_group(values: list[float]) -> None:
    assert call(FILTERS["first_finished"], {"values": values}, {"extra": 0.5}) is True
