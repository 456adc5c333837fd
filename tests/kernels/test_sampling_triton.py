# SPDX-License-Identifier: Apache-2.0
"""Triton's choice of tokens, by its interpreter, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from whet.devices import HOST
from whet.kernels.paged_attention_triton import INTERPRETED
from whet.kernels.sampling import SamplingState, sample
from whet.kernels.sampling_triton import pick
from whet.rollout.protocol import Request, SamplingParams

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.slow
def test_the_choice_of_tokens() -> None:
    torch.manual_seed(0)
    rows, size = 48, 9001  # three tiles
    logits = (torch.randn(rows, size) * 3).bfloat16()
    logits[7] = float("-inf")
    logits[7, [5, 8999]] = 0.0
    made = [
        Request(
            str(row), (1,), SamplingParams(max_new_tokens=9, temperature=(1.0, 0.0, 0.7)[row % 3]), row * 7919 - 2**50
        )
        for row in range(rows)
    ]
    state, slots, counts = SamplingState.of(made, size, HOST), torch.randperm(rows), torch.arange(rows)
    expected, log_probs = sample(logits, state.rows(slots), counts)
    newest, results = torch.full((rows + 1,), -1), torch.zeros(2, rows, dtype=torch.int32)
    pick(logits, state, slots, counts, newest, results)
    assert torch.equal(results[0].long(), expected)
    assert torch.allclose(results[1].view(torch.float32), log_probs, atol=1e-5)
    assert torch.equal(newest[slots], expected) and newest[rows] == -1
