# SPDX-License-Identifier: Apache-2.0
"""Divergences between the distributions of a student and its teacher at each position of a response.

q is `student` and p `teacher`: log-probs [..., M] of the same M outcomes, whose probabilities sum to 1. Outcomes are
the tokens of the vocabulary, or K tokens and, last, all others together (`outcomes`). With K tokens a KL compares the
coarser distributions: it is at most the KL over the whole vocabulary, 0 where p and q are equal, and exact with K = V -
1. The probabilities still sum to 1: mass that the student moves out of the K tokens adds to the loss in the last
outcome, without regard to which other tokens get it."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from torch import Tensor

from whet.registry import register_divergence


def outcomes(vocab_log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the K < V tokens `ids` and, last, of all others together.   [..., V], [..., K] -> [..., K + 1]"""
    others = vocab_log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([vocab_log_probs.gather(-1, ids), others], -1)


@register_divergence("forward_kl")
def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """sum p (log p - log q): the student must give mass to every token that the teacher may write.   [..., M] -> [...]

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
    """
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


@register_divergence("reverse_kl")
def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """sum q (log q - log p): the student concentrates on tokens that the teacher would write.   [..., M] -> [...]

    Gu et al. 2023 (MiniLLM), https://arxiv.org/abs/2306.08543.
    """
    return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)


@register_divergence("jsd")
def jsd(student: Tensor, teacher: Tensor, *, beta: Annotated[float, Gt(0), Lt(1)] = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: at most log 2.   [..., M] -> [...]

    For a small beta it is close to beta forward_kl, for a large beta to (1 - beta) reverse_kl. Agarwal et al. 2023
    (GKD), https://arxiv.org/abs/2306.13649."""
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(mixed, teacher) + (1 - beta) * forward_kl(mixed, student)
