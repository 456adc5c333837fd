# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from tests.raising import raises
from whet.algorithms.kl import apply_kl_to_reward, kl_form
from whet.errors import RegistryError
from whet.registry import KL_FORMS

LN2 = math.log(2.0)
FORMS = ["k1", "k2", "k3", "abs"]
OLD = -2.5  # log-probability of the token under the policy that sampled


def value_and_gradient(form: str, d: float) -> tuple[float, float]:
    log_probs = torch.tensor([[d - 1.0]], dtype=torch.float64, requires_grad=True)
    columns = {"ref_log_probs": torch.full_like(log_probs, -1.0), "old_log_probs": torch.full_like(log_probs, OLD)}
    value = kl_form(form)({"log_probs": log_probs, **columns})
    value.backward()
    assert log_probs.grad is not None
    return value.tolist()[0][0], log_probs.grad.tolist()[0][0]


def test_all_forms_are_there() -> None:
    assert KL_FORMS.names() == sorted(["full", "k1_ratio", "k3_ratio", *FORMS, *(form + "+" for form in FORMS)])
    with raises(RegistryError, "KL form", found="k11", change=re.compile("'k1")):
        kl_form("k11")({})


# d = -ln 2, so exp(-d) = 2; the gradient of k2 is d
@pytest.mark.parametrize(
    ("form", "value", "gradient"),
    [("k1", -LN2, 1.0), ("k2", LN2**2 / 2, -LN2), ("k3", 1 - LN2, 1.0 - 2.0), ("abs", LN2, -1.0)],
)
def test_by_hand(form: str, value: float, gradient: float) -> None:
    assert value_and_gradient(form, -LN2) == pytest.approx((value, gradient))
    assert value_and_gradient(form + "+", -LN2) == pytest.approx((value, -LN2))
    if form in ("k1", "k3"):  # l is -ln 2 - 1, the ratio r: d(r k)/dl = r k + r dk/dl
        ratio = math.exp(-LN2 - 1 - OLD)
        assert value_and_gradient(f"{form}_ratio", -LN2) == pytest.approx((ratio * value, ratio * (value + gradient)))


def test_k3_is_clamped_and_its_plus_form_still_pulls_back() -> None:
    assert value_and_gradient("k3", -100.0) == (10.0, 0.0)
    assert value_and_gradient("k3+", -100.0) == (10.0, -100.0)
    # exp(-20) + 20 - 1 is more than 10 too
    assert value_and_gradient("k3", 100.0) == (10.0, 0.0)
    assert value_and_gradient("k3", 5.0)[0] == pytest.approx(math.exp(-5) + 4)


def test_k3_of_a_small_difference_keeps_its_digits() -> None:
    d = torch.tensor([[1e-3, -1e-3, 1e-4]])
    small = kl_form("k3")({"log_probs": d, "ref_log_probs": torch.zeros_like(d)})
    torch.testing.assert_close(small, d.square() / 2, rtol=2e-3, atol=0)
    many = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert (kl_form("k3")({"log_probs": many, "ref_log_probs": torch.zeros_like(many)}) >= 0).all()


def test_the_full_kl_by_hand() -> None:
    policy, ref = torch.tensor([[[0.75, 0.25], [torch.nan, 1.0]]]).log(), torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    policy.requires_grad_()
    columns = {"vocab_log_probs": policy, "ref_vocab_log_probs": ref, "response_mask": torch.tensor([[1, 0]])}
    value = kl_form("full")(columns)
    assert value.tolist()[0] == pytest.approx([0.75 * math.log(1.5) - 0.25 * LN2, 0.0])
    value.sum().backward()
    assert policy.grad is not None  # d sum_v p_v (log p_v - log q_v) / d log p_v = p_v (log p_v - log q_v + 1)
    assert policy.grad[0, 0].tolist() == pytest.approx([0.75 * (math.log(1.5) + 1), 0.25 * (1 - LN2)])
    assert policy.grad[0, 1].tolist() == [0.0, 0.0]


def test_the_full_kl_in_the_reward() -> None:
    vocabulary = torch.tensor([[[0.75, 0.25], [0.1, 0.9]]]).log()
    rewards, penalty = apply_kl_to_reward(
        torch.tensor([[1.0, 5.0]]),
        {
            "response_mask": torch.tensor([[1, 0]]),
            "old_vocab_log_probs": vocabulary,
            "ref_vocab_log_probs": torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log(),
        },
        form=kl_form("full"),
        coef=2.0,
    )
    kl = 0.75 * math.log(1.5) - 0.25 * LN2
    assert penalty.tolist()[0] == pytest.approx([kl, 0.0]) and rewards.tolist()[0] == pytest.approx([1 - 2 * kl, 0.0])


@pytest.mark.parametrize("form", [entry.name for entry in KL_FORMS if entry.name != "full"])
def test_what_is_masked_reaches_neither_value_nor_gradient(form: str) -> None:
    log_probs = torch.tensor([[-1.0, torch.nan, torch.inf]], requires_grad=True)
    others = torch.tensor([[-1.5, torch.nan, -1.0]])
    columns = {"ref_log_probs": others, "old_log_probs": others, "response_mask": torch.tensor([[1, 0, 0]])}
    value = kl_form(form)({"log_probs": log_probs, **columns})
    value.sum().backward()
    assert log_probs.grad is not None
    assert value.tolist()[0][1:] == [0.0, 0.0]
    assert log_probs.grad.tolist()[0][1:] == [0.0, 0.0]


def expected_gradient(form: str, logits: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor | None = None) -> Tensor:
    """Of the form as a loss, over all actions weighted with the probabilities of the policy that samples, by default
    the policy's own, one decision long."""
    logits = logits.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    columns = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "old_log_probs": old}
    (old.exp() * kl_form(form)(columns)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_times_the_ratio_a_form_is_exact_whichever_policy_sampled() -> None:
    theta = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64)
    ref, old = (torch.tensor([[*logits]]).double().log_softmax(-1) for logits in ((0.5, 1.0, 0.0), (2.0, 1.0, 0.0)))
    exact = torch.tensor([[0.0614, -0.2129, 0.1515]], dtype=torch.float64)
    d = theta.log_softmax(-1) - ref
    pi = theta.softmax(-1)
    torch.testing.assert_close(pi * (d - (pi * d).sum()), exact, atol=5e-5, rtol=0)
    for form in ("k1_ratio", "k3_ratio"):
        torch.testing.assert_close(expected_gradient(form, theta, ref, old), pi * (d - (pi * d).sum()))
        torch.testing.assert_close(expected_gradient(form, theta, ref), pi * (d - (pi * d).sum()))
    stale = torch.tensor([[0.164, -0.192, 0.028]], dtype=torch.float64)
    for form in ("k2", "k2+", "k3+", "k1+", "abs+"):
        torch.testing.assert_close(expected_gradient(form, theta, ref, old), stale, atol=5e-4, rtol=0)


def test_a_ratio_in_the_reward_is_one() -> None:
    columns = {
        name: torch.tensor([[-1.0, -0.5]]) * scale for name, scale in (("old_log_probs", 1), ("ref_log_probs", 3))
    }
    columns["response_mask"] = torch.ones(1, 2, dtype=torch.long)
    for form in ("k1", "k3"):
        plain, ratio = (
            apply_kl_to_reward(torch.zeros(1, 2), columns, form=kl_form(name), coef=0.5)[0]
            for name in (form, f"{form}_ratio")
        )
        assert torch.equal(plain, ratio) and plain.any()


def test_which_forms_follow_the_gradient_of_the_kl_as_a_loss() -> None:
    draw = torch.Generator().manual_seed(1)
    logits, ref = torch.randn(2, 1, 6, generator=draw, dtype=torch.float64).unbind()
    ref = ref.log_softmax(-1)
    exact = logits.clone().requires_grad_()
    (exact.softmax(-1) * (exact.log_softmax(-1) - ref)).sum().backward()

    torch.testing.assert_close(expected_gradient("k1", logits, ref), torch.zeros_like(logits))
    for form in ("k2", "k1+", "k2+", "k3+", "abs+"):
        torch.testing.assert_close(expected_gradient(form, logits, ref), exact.grad)
    whole = logits.clone().requires_grad_()
    vocabulary = whole.log_softmax(-1)[None]
    kl_form("full")({"vocab_log_probs": vocabulary, "ref_vocab_log_probs": ref[None]}).sum().backward()
    torch.testing.assert_close(whole.grad, exact.grad)
    assert not torch.allclose(expected_gradient("k3", logits, ref), exact.grad, rtol=0.01)


def test_kl_in_the_reward_by_hand() -> None:
    # o - b = .5, (tool), -1; coef .2: 1 - .1, 0 + .2
    rewards, penalty = apply_kl_to_reward(
        torch.tensor([[1.0, torch.nan, 0.0]]),
        {
            "old_log_probs": torch.tensor([[-0.5, torch.nan, -2.0]], requires_grad=True),
            "ref_log_probs": torch.tensor([[-1.0, torch.nan, -1.0]]),
            "response_mask": torch.tensor([[1, 0, 1]]),
        },
        form=kl_form("k1"),
        coef=0.2,
    )
    torch.testing.assert_close(rewards, torch.tensor([[0.9, 0.0, 0.2]]))
    torch.testing.assert_close(penalty, torch.tensor([[0.5, 0.0, -1.0]]))
    assert not rewards.requires_grad
