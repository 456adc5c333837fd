# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whet.plugins.planner.outline import TensorBytes


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "without numbers"])
def test_storages_count_once_from_when_they_are_made_to_when_nobody_holds_them(mode: type) -> None:
    with mode():
        before = torch.ones(1000)
        with TensorBytes(lambda tensor: str(tensor.dtype).removeprefix("torch.")) as counted:
            before.view(10, 100).t()  # a view of what was there
            first = before + 1  # 4000
            view = first[:10]
            second = first.double()  # 8000: the height, 12000
            del second
            third = first * 2  # 4000
            del first
            assert counted.now == {"float32": 8000, "float64": 0}  # the view holds the first
            del view, third
            assert counted.now.total() == 0
    assert counted.peak == {"float32": 4000, "float64": 8000}


def test_what_backward_keeps_and_makes_is_seen() -> None:
    weight = torch.ones(100, requires_grad=True)
    with TensorBytes() as counted:
        loss = (weight.exp() * 2).sum()  # exp keeps its result, 400, for the backward pass
        assert 400 <= counted.now.total() < 440
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        assert counted.now.total() == 400  # the gradient
    assert 1200 <= counted.peak.total() < 1300  # exp's result, the gradient behind it, the weight's
