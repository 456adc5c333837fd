# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of the head, by its interpreter, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from whet.kernels import log_probs_triton
from whet.kernels.log_probs import LogitForm, token_statistics

pytestmark = pytest.mark.skipif(not log_probs_triton.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    ("form", "temperature"), [(LogitForm(), 1.0), (LogitForm(0.5, None), 0.7), (LogitForm(1.3, 8.0), 1.5)]
)
def test_statistics_and_gradient(form: LogitForm, temperature: float) -> None:
    torch.manual_seed(0)
    rows, size, width = 5, 9001, 16  # three tiles
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(size, width)
    targets = torch.randint(0, size, (rows,))
    expected = token_statistics(
        hidden, weight, None, targets, temperature=temperature, entropy=True, sum_pi_squared=True, form=form
    )
    products = (hidden @ weight.T).detach()
    how = form.scale, form.cap or 0.0, temperature
    found = log_probs_triton.statistics(products, targets, *how)
    for one, other in zip(found, expected, strict=False):
        assert other is not None and torch.allclose(one, other, atol=2e-5)
    grad, grad_entropy = torch.randn(rows), torch.randn(rows)
    assert expected.entropy is not None
    ((expected.log_probs * grad).sum() + (expected.entropy * grad_entropy).sum()).backward()
    gradient = log_probs_triton.gradient_(products, targets, found[3], found[1], grad, grad_entropy, *how)
    assert gradient is products and hidden.grad is not None
    assert torch.allclose(gradient @ weight, hidden.grad, rtol=1e-4, atol=1e-5)
