# SPDX-License-Identifier: Apache-2.0
"""Histories of metrics in which a rule warns, and the nearest ones in which it does not."""

from __future__ import annotations

import math

import pytest

from whet.trainers.preference_health import RATIO, RULES, accuracy, chosen, length, margin

History = list[dict[str, float]]


def fallen(chosen: float, rejected: float, *, reference: float = -50.0, steps: int = 10) -> History:
    moved = {"preference/chosen_moved": chosen, "preference/chosen_log_probs": reference + chosen}
    return [{**moved, "preference/rejected_moved": rejected}] * steps


def lengths(chosen: float, rejected: float, steps: int = 10) -> History:
    return [{"preference/chosen_length": chosen, "preference/rejected_length": rejected}] * steps


def by_length(longer: float, shorter: float, spread: float = 0.0, steps: int = 40) -> History:
    """Accuracies whose difference alternates by `spread` around its mean."""
    return [
        {
            "preference/accuracy_longer": longer + (spread if step % 2 else -spread),
            "preference/accuracy_shorter": shorter,
        }
        for step in range(steps)
    ]


def grown(margins: list[float], accuracies: list[float], area: str = "preference/") -> History:
    return [{f"{area}margin": m, f"{area}accuracy": a} for m, a in zip(margins, accuracies, strict=True)]


def test_better_responses_that_lose_a_tenth_though_worse_ones_lose_more() -> None:
    assert chosen(fallen(-6.0, -20.0)) == pytest.approx((6.0, 12.0, 20.0))
    assert chosen(fallen(-6.0, 3.0)) == pytest.approx((6.0, 12.0, -3.0))
    for fine in (fallen(-4.0, -20.0), fallen(6.0, -20.0), fallen(-6.0, -20.0, steps=9), []):
        assert chosen(fine) == ()
    assert chosen(fallen(-60.0, -70.0, reference=0.0)) == ()  # reference.mode=none
    assert chosen(fallen(-9.0, -9.0) + fallen(-1.0, -1.0)) == ()  # of the last steps alone


def test_lengths_that_differ_either_way() -> None:
    assert length(lengths(31.0, 20.0)) == (31.0, 20.0)
    assert length(lengths(20.0, 31.0)) == (20.0, 31.0)
    for fine in (lengths(20.0 * RATIO, 20.0), lengths(24.0, 20.0), lengths(90.0, 20.0, steps=9)):
        assert length(fine) == ()


def test_an_accuracy_that_length_explains() -> None:
    assert accuracy(by_length(0.9, 0.5)) == pytest.approx((0.9, 0.5))
    assert accuracy(by_length(0.4, 0.8)) == pytest.approx((0.4, 0.8))
    one_kind = [{"preference/accuracy_longer": 1.0}] * 40  # of pairs whose better response is always the longer one
    for fine in (by_length(0.9, 0.75), by_length(0.9, 0.5, steps=9), one_kind):
        assert accuracy(fine) == ()
    assert accuracy(by_length(0.8, 0.5, spread=0.5)) != ()  # 0.3 is over 3 standard errors of 0.08
    assert accuracy(by_length(0.8, 0.5, spread=0.7)) == ()  # and not of 0.11


@pytest.mark.parametrize(("area", "steps"), [("preference/", 40), ("val/", 4)])
def test_a_margin_that_grows_while_the_accuracy_does_not(area: str, steps: int) -> None:
    rising = [0.2 * step * 40 / steps for step in range(1, steps + 1)]
    quarter = steps // 4
    halves = sum(rising[quarter : 2 * quarter]) / quarter, 0.7, sum(rising[-quarter:]) / quarter, 0.7
    assert margin(grown(rising, [0.7] * steps, area)) == pytest.approx(halves)
    learning = [0.5 + 0.4 * step / steps for step in range(steps)]
    bounded = [5 * (1 - math.exp(-9 * step / steps)) for step in range(1, steps + 1)]
    small = [0.01 * each for each in rising]
    for margins, accuracies in ((rising, learning), (bounded, [0.7] * steps), (small, [0.7] * steps)):
        assert margin(grown(margins, accuracies, area)) == ()
    assert margin(grown(rising, [0.7] * steps, area)[:-1]) == ()


def test_held_out_accuracy_decides_over_training_accuracy() -> None:
    rising, learning = [0.2 * step for step in range(1, 41)], [0.5 + 0.01 * step for step in range(40)]
    history = grown(rising, learning)
    for step in (9, 19, 29, 39):
        history[step] |= {"val/margin": rising[step], "val/accuracy": 0.6}
    assert margin(history) == pytest.approx((rising[19], 0.6, rising[39], 0.6))
    for step in (9, 19, 29, 39):
        history[step] |= {"val/margin": rising[step], "val/accuracy": learning[step]}
    assert margin(history) == ()


def test_the_numbers_of_a_rule_fill_its_warning() -> None:
    histories = {
        chosen: fallen(-6.0, -20.0),
        length: lengths(31.0, 20.0),
        accuracy: by_length(0.9, 0.5),
        margin: grown([0.2 * step for step in range(40)], [0.7] * 40),
    }
    assert histories.keys() == RULES.keys()
    shown = {rule: RULES[rule] % rule(history) for rule, history in histories.items()}
    assert "6.0" in shown[chosen] and "31.0" in shown[length]
    assert "0.90" in shown[accuracy] and "0.700" in shown[margin]
