# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.algorithms.entropy import AdaptiveEntropy, FixedEntropy


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


def test_a_fixed_bonus_stays() -> None:
    control = FixedEntropy(0.01)
    control.update(0.0)
    control.load_state(control.state())
    assert control.coef == 0.01
