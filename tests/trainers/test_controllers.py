# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from whet.trainers.shape import AdaptiveEntropy, AdaptiveKL, Fixed


def test_the_bonus_grows_while_the_entropy_is_low_and_is_at_work_only_then() -> None:
    control = AdaptiveEntropy(coef=0.1, target=0.5, delta=0.25, highest=0.5)
    seen = []
    for entropy in (0.9, 0.4, 0.4, 0.4, 0.6, 0.4):
        control.update(entropy)
        seen.append(control.coef)
    # down to 0 and not below; up three times to the highest; off; from .25 up again
    assert seen == pytest.approx([0.0, 0.25, 0.5, 0.5, 0.0, 0.5])


def test_its_state_resumes() -> None:
    one, other = (AdaptiveEntropy(coef=0.1, target=0.5, delta=0.25, highest=1.0) for _ in range(2))
    one.update(0.4)
    other.load_state(one.state())
    assert one.coef == other.coef == pytest.approx(0.35)
    one.update(0.4)
    other.update(None)  # a step that trained nothing
    other.update(0.4)
    assert one.coef == other.coef


def test_the_adaptive_controller_by_hand() -> None:
    # kl / target - 1 = 2, cut to .2: .1 * (1 + .2 * 100 / 1000); then -.1: * (1 - .1 * 50 / 1000); then cut to -.2
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    controller.update(0.15, 100)
    assert controller.coef == pytest.approx(0.102)
    controller.update(0.045, 50)
    assert controller.coef == pytest.approx(0.102 * 0.995)
    controller.update(0.0, 1000)
    assert controller.coef == pytest.approx(0.102 * 0.995 * 0.8)


def test_the_adaptive_controller_goes_on_from_its_state() -> None:
    first = AdaptiveKL(0.1, target=0.05, horizon=1000)
    first.update(0.15, 100)
    resumed = AdaptiveKL(0.1, target=0.05, horizon=1000)
    resumed.load_state(json.loads(json.dumps(first.state())))
    for controller in (first, resumed):
        controller.update(0.01, 64)
    assert resumed.coef == first.coef


def test_the_fixed_controller_follows_its_config() -> None:
    controller = Fixed(0.3)
    controller.update(99.0, 64)
    resumed = Fixed(0.2)
    resumed.load_state(controller.state())
    assert (controller.coef, resumed.coef) == (0.3, 0.2)
