# SPDX-License-Identifier: Apache-2.0
"""CPO: a hint in the prompt shows which tokens of a response mattered. A wrapper adds a term to GRPO's advantage.

g is `teacher_log_probs`, the policy's log-probs of the response after a prompt with a hint; o `old_log_probs`, without
the hint. k = g - o is high where the hint makes a token likelier. `Terms` has the symbols of the wrappers' formulas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, where

from whet.algorithms.advantages import grpo
from whet.algorithms.statistics import Groups, pick, row_means
from whet.options import Finite, NonNegative
from whet.registry import WRAPPERS, register_adv_est, register_wrapper

LARGEST = 10.0  # MI in the clamped forms, and k of a token


@register_adv_est("cpo")
def cpo(
    token_level_rewards: Tensor,
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    entropy: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    wrap_method: str = "naive",
    cpo_lambda: Annotated[float, Ge(1)] = 2.0,
    pos_alpha: NonNegative = 0.1,
    neg_alpha: NonNegative = 0.1,
    loss_position: Literal["all", "entropy", "first"] = "all",
    gate: bool = False,
    correct_threshold: Finite = 1.0,
    std_norm: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A = A_GRPO + the term of `wrap_method`, at the tokens that `loss_position` selects.   -> [B, R]

    A row is right if its score is at least `correct_threshold`. With `gate` the term is added only in groups in which
    the hint helped at least half of the rows: it raised a right row's mean log-prob, or lowered a wrong row's."""
    base = grpo(token_level_rewards, response_mask, uid, std_norm=std_norm)[:, None].expand(response_mask.shape)
    groups = Groups(uid, response_mask)
    right = token_level_scores.sum(-1) >= correct_threshold
    terms = Terms(
        base, old_log_probs, teacher_log_probs, entropy, response_mask, right, groups, cpo_lambda, pos_alpha, neg_alpha
    )
    wrapper = WRAPPERS[wrap_method]
    added: Tensor = wrapper.load()(terms)
    moved = where(terms.right, terms.mean_k, -terms.mean_k)[:, 0]
    helped = groups.mean((moved > 0).to(base.dtype))
    used = (helped >= 0.5)[:, None] if gate else torch.ones_like(right)[:, None]
    added = added.masked_fill(~(terms.sampled & used & positions(loss_position, entropy, response_mask)), 0.0)
    wrapped = base + added
    if wrapper.marks.get("keeps_sign"):
        wrapped = where(added != 0, where(right[:, None], wrapped.clamp(min=0.0), wrapped.clamp(max=0.0)), wrapped)
    return wrapped, {
        "cpo/k": _mean(terms.k, terms.sampled),
        "cpo/added": _mean(wrapped - base, terms.sampled),
        "cpo/changed": _mean((wrapped != base).to(base.dtype), terms.sampled),
        "cpo/hint_helped": _mean(helped, groups.member),
    }


def positions(which: str, entropy: Tensor, response_mask: Tensor) -> Tensor:
    """Marks sampled tokens, [B, R] bool: "all", "entropy" (above its 80 % quantile in the row), "first" (a fifth)."""
    sampled = response_mask != 0
    if which == "entropy":
        return sampled & (entropy > entropy.masked_fill(~sampled, torch.nan).nanquantile(0.8, dim=-1, keepdim=True))
    if which == "first":
        return sampled & (sampled.cumsum(-1) <= (0.2 * sampled.sum(-1, keepdim=True)).ceil())
    return sampled


@dataclass(frozen=True)
class Terms:
    """The symbols of the wrappers' formulas, all [B, R] or [B, 1]. A is `advantages` (GRPO's), H is `entropy`; pos, neg
    and lambda (`bound`) are the options pos_alpha, neg_alpha and cpo_lambda; the properties are k, MI, U, Hmax, ..."""

    advantages: Tensor
    o: Tensor
    g: Tensor
    entropy: Tensor
    response_mask: Tensor
    is_right: Tensor  # [B]
    groups: Groups
    bound: float
    pos: float
    neg: float

    @cached_property
    def sampled(self) -> Tensor:
        """True for sampled tokens."""
        return self.response_mask != 0

    @cached_property
    def right(self) -> Tensor:
        """[B, 1]: True for a right row, whose score is at least `correct_threshold`."""
        return self.is_right[:, None]

    @cached_property
    def difficulty(self) -> Tensor:
        """[B, 1]: -1 where all rows of the group are wrong, 1 where all are right, else 0."""
        share = self.groups.mean(self.is_right.to(self.o.dtype))[:, None]
        return (share == 1).int() - (share == 0).int()

    @cached_property
    def hard(self) -> Tensor:
        """[B, 1]: True where the whole group is wrong."""
        return self.difficulty == -1

    @cached_property
    def k(self) -> Tensor:
        """k = g - o: the change of a token's log-prob by the hint; 0 where no token was sampled."""
        return (self.g - self.o).masked_fill(~self.sampled, 0.0)

    @cached_property
    def mi(self) -> Tensor:
        """MI = exp(g) k: a token's contribution to the mutual information between hint and response."""
        return self.g.exp() * self.k

    @cached_property
    def u(self) -> Tensor:
        """U: the entropy scaled to 0 at the row's minimum, 1 at its maximum; 0 if it is constant."""
        least = self.entropy.masked_fill(~self.sampled, torch.inf).amin(-1, keepdim=True)
        span = self.most_entropy - least
        return where(span > 0, (self.entropy - least) / span.masked_fill(span <= 0, 1.0), 0.0)

    @cached_property
    def most_entropy(self) -> Tensor:
        """Hmax [B, 1]: the largest entropy among the row's tokens."""
        return self.entropy.masked_fill(~self.sampled, -torch.inf).amax(-1, keepdim=True)

    @cached_property
    def mean_entropy(self) -> Tensor:
        """Hbar [B, 1]: the mean entropy of the row."""
        return row_means(self.entropy, self.response_mask)[:, None]

    @cached_property
    def mean_k(self) -> Tensor:
        """Kbar [B, 1]: the mean k of the row."""
        return row_means(self.k, self.response_mask)[:, None]

    @cached_property
    def half(self) -> Tensor:
        """abs(A) / 2, with A the advantage of GRPO."""
        return self.advantages.abs() / 2


def _mean(x: Tensor, where_: Tensor) -> Tensor:
    return x.masked_fill(~where_, 0.0).sum() / where_.sum().clamp(min=1)


# ---- wrappers: the term that is added to A


@register_wrapper("naive", keeps_sign=True)
def naive(t: Terms) -> Tensor:
    """Adds pos H in right rows where exp(k) >= lambda and exp(g) > 0.1. Subtracts neg (Hmax - H) in wrong rows where
    exp(k) <= 1 / lambda and exp(o) > 0.1. `Terms` has the symbols."""
    return _lifted(t).masked_fill(~t.right, 0.0) - _lowered(t).masked_fill(t.right, 0.0)


@register_wrapper("noaccmask", keeps_sign=True)
def noaccmask(t: Terms) -> Tensor:
    """`naive` without its conditions on right and wrong rows: both of its terms apply to all rows."""
    return _lifted(t) - _lowered(t)


@register_wrapper("mi", keeps_sign=True)
def mi(t: Terms) -> Tensor:
    """Adds pos MI U where MI >= 0, neg MI (1 - U) where MI < 0. `Terms` has the symbols."""
    return where(t.mi >= 0, t.pos * t.mi * t.u, t.neg * t.mi * (1 - t.u))


@register_wrapper("mi_accmask", keeps_sign=True)
def mi_accmask(t: Terms) -> Tensor:
    """Adds pos MI (1 + U) in right rows where MI >= 0, neg MI (2 - U) in wrong rows where MI < 0 (symbols: `Terms`)."""
    up, down = t.pos * t.mi * (1 + t.u), t.neg * t.mi * (2 - t.u)
    return where((t.mi >= 0) & t.right, up, 0.0) + where((t.mi < 0) & ~t.right, down, 0.0)


@register_wrapper("mi_unify", keeps_sign=True)
def mi_unify(t: Terms) -> Tensor:
    """Adds pos MI (1 - U) in right rows, neg MI (1 - U) in wrong rows. `Terms` has the symbols."""
    return pick(t.right, t.pos, t.neg, t.k) * t.mi * (1 - t.u)


@register_wrapper("mi_clamp_unify")
def mi_clamp_unify(t: Terms) -> Tensor:
    """`mi_unify` with MI clamped to at most 10."""
    return pick(t.right, t.pos, t.neg, t.k) * t.mi.clamp(max=LARGEST) * (1 - t.u)


@register_wrapper("mi_clamp_unify_difficulty")
def mi_clamp_unify_difficulty(t: Terms) -> Tensor:
    """Adds pos min(MI, 10) (1 - U) in groups all right or all wrong, in mixed groups with neg for pos (see `Terms`)."""
    return pick(t.difficulty != 0, t.pos, t.neg, t.k) * t.mi.clamp(max=LARGEST) * (1 - t.u)


@register_wrapper("mi2")
def mi2(t: Terms) -> Tensor:
    """Adds pos U in right rows, neg MI in wrong rows. `Terms` has the symbols."""
    return where(t.right, t.pos * t.u, t.neg * t.mi)


@register_wrapper("mi3")
def mi3(t: Terms) -> Tensor:
    """Adds pos U in right rows; in wrong rows neg MI U if MI >= 0, neg MI (1 - U) if MI < 0 (symbols: `Terms`)."""
    return where(t.right, t.pos * t.u, _mi3_wrong(t))


@register_wrapper("negonly_mi3")
def negonly_mi3(t: Terms) -> Tensor:
    """`mi3`, but the term of wrong rows is added only in groups that are all wrong."""
    return where(t.right, t.pos * t.u, where(t.hard, _mi3_wrong(t), 0.0))


@register_wrapper("reverse_mi3")
def reverse_mi3(t: Terms) -> Tensor:
    """Adds pos U in right rows, as `mi3`; subtracts in wrong rows the term that `mi3` adds."""
    return where(t.right, t.pos * t.u, -_mi3_wrong(t))


@register_wrapper("addition_mi3")
def addition_mi3(t: Terms) -> Tensor:
    """`mi3`, but in rows with wrong responses adds its term only where MI (see `Terms`) is at least 0."""
    return where(t.right, t.pos * t.u, where(t.mi >= 0, t.neg * t.mi * t.u, 0.0))


@register_wrapper("negonly_mi")
def negonly_mi(t: Terms) -> Tensor:
    """Adds pos U in right rows, neg MI in the rows of groups that are all wrong. `Terms` has the symbols."""
    return where(t.right, t.pos * t.u, where(t.hard, t.neg * t.mi, 0.0))


@register_wrapper("seq_kl")
def seq_kl(t: Terms) -> Tensor:
    """Adds pos Hbar in right rows, neg Kbar in wrong rows, at most abs(A) / 2 in mixed groups (symbols: `Terms`)."""
    pull = t.neg * t.mean_k
    return where(t.right, t.pos * t.mean_entropy, where(t.hard, pull, torch.minimum(pull, t.half)))


@register_wrapper("negonly_seq_kl")
def negonly_seq_kl(t: Terms) -> Tensor:
    """Adds pos Kbar in right rows, neg Kbar in the rows of groups that are all wrong. `Terms` has the symbols."""
    return where(t.right, t.pos * t.mean_k, where(t.hard, t.neg * t.mean_k, 0.0)).expand_as(t.k)


@register_wrapper("tok_kl")
def tok_kl(t: Terms) -> Tensor:
    """Adds pos U in right rows, neg k in wrong rows, at most abs(A) / 2 in mixed groups; k is clamped to [-10, 10]."""
    pull = t.neg * t.k.clamp(-LARGEST, LARGEST)
    return where(t.right, t.pos * t.u, where(t.hard, pull, torch.minimum(pull, t.half)))


@register_wrapper("negonly_tok_kl")
def negonly_tok_kl(t: Terms) -> Tensor:
    """Adds pos U in right rows, neg k in the rows of groups that are all wrong; k is clamped to [-10, 10]."""
    return where(t.right, t.pos * t.u, where(t.hard, t.neg * t.k.clamp(-LARGEST, LARGEST), 0.0))


def _lifted(t: Terms) -> Tensor:
    return where((t.k.exp() >= t.bound) & (t.g.exp() > 0.1), t.pos * t.entropy, 0.0)


def _lowered(t: Terms) -> Tensor:
    return where((t.k.exp() <= 1 / t.bound) & (t.o.exp() > 0.1), t.neg * (t.most_entropy - t.entropy), 0.0)


def _mi3_wrong(t: Terms) -> Tensor:
    return t.neg * t.mi * where(t.mi >= 0, t.u, 1 - t.u)
