# SPDX-License-Identifier: Apache-2.0
"""Chunked statistics against torch's own softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from whet.kernels.log_probs import LogitForm, token_statistics, vocab_log_probs


def inputs(count: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 5, dtype=torch.float64, generator=draw, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=draw, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, generator=draw, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, 11, (count,), generator=draw)


def test_by_hand() -> None:
    # logits (0, ln 3): pi = (1/4, 3/4); log pi_1 = ln 3/4; H = -(1/4 ln 1/4 + 3/4 ln 3/4); sum pi^2 = 10/16
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [3.0]]).log1p().mul(0) + torch.tensor([[0.0], [1.0986123]])
    got = token_statistics(hidden, weight, None, torch.tensor([1]), entropy=True, sum_pi_squared=True)
    assert got.log_probs.item() == pytest.approx(-0.2876821, abs=1e-6)
    assert got.entropy is not None and got.entropy.item() == pytest.approx(0.5623351, abs=1e-6)
    assert got.sum_pi_squared is not None and got.sum_pi_squared.item() == pytest.approx(0.625, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_softmax_of_all_logits(chunk: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, targets = inputs()
    used_bias = bias if with_bias else None
    got = token_statistics(
        hidden,
        weight,
        used_bias,
        targets,
        temperature=temperature,
        chunk_tokens=chunk,
        entropy=True,
        sum_pi_squared=True,
    )
    log_pi = ((hidden @ weight.T + (bias if with_bias else 0)) / temperature).log_softmax(-1)
    torch.testing.assert_close(got.log_probs, log_pi.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(got.entropy, -(log_pi.exp() * log_pi).sum(-1))
    torch.testing.assert_close(got.sum_pi_squared, log_pi.exp().square().sum(-1))


FORMS = [LogitForm(), LogitForm(scale=0.3), LogitForm(cap=2.0), LogitForm(0.5, 2.0)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_equal_autograd(chunk: int, form: LogitForm) -> None:
    hidden, weight, bias, targets = inputs()

    def statistics(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        got = token_statistics(h, w, b, targets, temperature=1.3, chunk_tokens=chunk, entropy=True, form=form)
        assert got.entropy is not None
        return got.log_probs, got.entropy

    assert torch.autograd.gradcheck(statistics, (hidden, weight, bias))


def test_gradient_without_entropy_being_used() -> None:
    hidden, weight, bias, targets = inputs()
    token_statistics(hidden, weight, bias, targets, entropy=True).log_probs.sum().backward()
    got = hidden.grad
    hidden.grad = None
    (hidden @ weight.T + bias).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(got, hidden.grad)


def test_no_tokens() -> None:
    hidden, weight, bias, targets = inputs(0)
    got = token_statistics(hidden, weight, bias, targets, entropy=True)
    assert got.log_probs.shape == (0,)
    got.log_probs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() == 0


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.kernels import log_probs

    seen: list[int] = []
    plain = log_probs._logits

    def counted(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(hidden))
        return plain(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(log_probs, "_logits", counted)
    hidden, weight, bias, targets = inputs()
    token_statistics(hidden, weight, bias, targets, chunk_tokens=3).log_probs.sum().backward()
    assert seen == [3, 3, 1, 3, 3, 1]


def test_scaled_and_capped_logits() -> None:
    """Gemma: cap tanh(z / cap). Granite divides, Cohere multiplies."""
    hidden, weight, bias, targets = inputs()
    z = hidden @ weight.T + bias
    for form, logits in zip(FORMS, (z, 0.3 * z, 2 * (z / 2).tanh(), 2 * (z / 4).tanh()), strict=True):
        log_pi = (logits / 0.7).log_softmax(-1)
        got = token_statistics(hidden, weight, bias, targets, temperature=0.7, chunk_tokens=3, entropy=True, form=form)
        torch.testing.assert_close(got.log_probs, log_pi.gather(1, targets[:, None])[:, 0])
        torch.testing.assert_close(got.entropy, -(log_pi.exp() * log_pi).sum(-1))
        torch.testing.assert_close(vocab_log_probs(hidden, weight, bias, 0.7, form), log_pi)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, bias, targets = inputs()
    expected = torch.autograd.grad(token_statistics(hidden, weight, bias, targets).log_probs.sum(), hidden)[0]
    token_statistics(hidden, weight.detach(), bias.detach(), targets).log_probs.sum().backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, expected)
