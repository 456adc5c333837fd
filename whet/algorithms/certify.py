# SPDX-License-Identifier: Apache-2.0
"""Certificates: what an algorithm's expected gradient is, exactly, against that of the objective it is said to follow.

A policy so small that all its answers can be counted: V tokens, the first of which ends an answer, and at most L of
them. Its expected gradient is a finite sum, over every group of n answers with its probability, of the gradient of the
loss that the registered functions give; the objective's, E[R] - beta KL(pi || ref) over whole answers, is autograd
through the same enumeration. All in float64, so that what is unbiased is so to eight digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.adapters import estimate, policy_loss, settle
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.kl import apply_kl_to_reward, kl_penalty
from whet.registry import ADV_ESTIMATORS, AGGREGATIONS, KL_FORMS, POLICY_LOSSES, WEIGHTS, call

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """All answers of V tokens and length up to L to one prompt, what they earn, and policies as tables of logits.

    A state is what was said before; there are S of them. Rows are answers, K of them; all [K, L] but where said.
    """

    vocabulary: int = 3
    length: int = 3
    seed: int = 0

    @cached_property
    def answers(self) -> list[tuple[int, ...]]:
        """Every answer: token 0 ends it, as the length does."""
        inner = [
            (*body, 0)
            for size in range(self.length)
            for body in itertools.product(range(1, self.vocabulary), repeat=size)
        ]
        return inner + list(itertools.product(range(1, self.vocabulary), repeat=self.length))

    @cached_property
    def mask(self) -> Tensor:
        """1 where an answer has a token."""
        return torch.tensor([[int(t < len(a)) for t in range(self.length)] for a in self.answers])

    @cached_property
    def tokens(self) -> Tensor:
        """Token ids, 0 in the padding."""
        return torch.tensor([[*a, *[0] * (self.length - len(a))] for a in self.answers])

    @cached_property
    def states(self) -> Tensor:
        """The number of the state in which each token was chosen, 0 in the padding."""
        names: dict[tuple[int, ...], int] = {}
        rows = [
            [names.setdefault(a[:t], len(names)) if t < len(a) else 0 for t in range(self.length)] for a in self.answers
        ]
        return torch.tensor(rows)

    @property
    def num_states(self) -> int:
        """S."""
        return int(self.states.max()) + 1

    def table(self, name: int, scale: float = 1.0) -> Tensor:
        """Random logits [S, V], always the same for a name."""
        draw = torch.Generator().manual_seed(1000 * self.seed + name)
        return scale * torch.randn(self.num_states, self.vocabulary, generator=draw, dtype=torch.float64)

    @cached_property
    def scores(self) -> Tensor:
        """[K]: some answers are right, most are not, and a little is for style."""
        draw = torch.Generator().manual_seed(1000 * self.seed + 99)
        right = (torch.rand(len(self.answers), generator=draw, dtype=torch.float64) < 0.4).double()
        return right + 0.1 * torch.rand(len(self.answers), generator=draw, dtype=torch.float64)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Of every token, 0 in the padding."""
        chosen = logits.log_softmax(-1)[self.states, self.tokens]
        return chosen.masked_fill(self.mask == 0, 0.0)

    def statistic(self, logits: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of each state's log-probs [S, V] -> [S], at each token."""
        return function(logits.log_softmax(-1))[self.states].masked_fill(self.mask == 0, 0.0)


def entropy_of(log_pi: Tensor) -> Tensor:
    """[S, V] -> [S]."""
    return -(log_pi.exp() * log_pi).sum(-1)


@dataclass(frozen=True)
class Choice:
    """An algorithm: names and options of what is registered, as a config has them."""

    adv_estimator: str = "rloo"
    adv_options: Mapping[str, Any] = field(default_factory=dict)
    policy_loss: str = "reinforce"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str | None = None  # unset: what the loss or the estimator fixes, else sums over sequences
    kl_where: str = "none"
    kl_form: str = "k1"
    kl_coef: float = 0.0
    weight: str | None = None
    weight_options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 2

    @property
    def mode(self) -> str:
        """The aggregation."""
        fixed = (POLICY_LOSSES[self.policy_loss], ADV_ESTIMATORS[self.adv_estimator])
        marks = [entry.marks["aggregation"] for entry in fixed if "aggregation" in entry.marks]
        return self.aggregation or (marks[0] if marks else "seq-mean-token-sum")


@dataclass(frozen=True)
class Certificate:
    """The expected gradient g against the objective's, t: |g - t| / |t|, their cosine, |g| / |t|, and the variance of
    one group's gradient in units of |t|^2."""

    relative_error: float
    cosine: float
    norm_ratio: float
    variance: float


def certify(choice: Choice, world: World = World(), staleness: float = 0.0, gap: float = 0.0) -> Certificate:
    """The certificate of a choice. Samples are of a policy that is `staleness` away from the one that is updated, in
    the standard deviation of logits; with `gap` the sampler was further away still."""
    now = world.table(1).requires_grad_()
    old = now.detach() + staleness * world.table(2)
    sampler = old + gap * world.table(3)
    target = objective_gradient(world, now, choice.kl_coef if choice.kl_where != "none" else 0.0)
    probabilities = world.log_probs(sampler).sum(-1).exp()

    groups = list(multisets(len(world.answers), choice.n))
    weights = torch.tensor([multiplicity(group) for group in groups], dtype=torch.float64)
    weights = weights * probabilities[torch.tensor(groups)].prod(-1)
    columns, outputs = columns_of(world, old, sampler), outputs_of(world, now)
    losses = torch.stack([loss_of_group(choice, world.length, group, columns, outputs) for group in groups])
    gradients = -gradients_of(losses, now)
    mean = weights @ gradients
    variance = weights @ (gradients - mean).square().sum(-1)
    size = target.norm()
    return Certificate(
        relative_error=float((mean - target).norm() / size),
        cosine=float(torch.cosine_similarity(mean, target, dim=0)) if bool(mean.norm() > 0) else 0.0,
        norm_ratio=float(mean.norm() / size),
        variance=float(variance / size.square()),
    )


def objective_gradient(world: World, logits: Tensor, kl_coef: float) -> Tensor:
    """Of E[R] - kl_coef KL(pi || ref), over all answers."""
    log_pi = world.log_probs(logits).sum(-1)
    log_ref = world.log_probs(world.table(4)).sum(-1)
    value = (log_pi.exp() * (world.scores - kl_coef * (log_pi - log_ref))).sum()
    return torch.autograd.grad(value, logits)[0].flatten()


def gradients_of(losses: Tensor, logits: Tensor) -> Tensor:
    """Of each of N losses, [N, S V]."""
    each = torch.eye(len(losses), dtype=losses.dtype)
    (found,) = torch.autograd.grad(losses, logits, each, is_grads_batched=True)
    return found.flatten(1)


def loss_of_group(choice: Choice, length: int, group: Sequence[int], columns: Batch, outputs: Batch) -> Tensor:
    """The loss of a step whose batch is one group of answers, among columns and model outputs of all answers."""
    rows = torch.tensor(group)
    batch = {name: column[rows] for name, column in columns.items()}
    outputs = {name: column[rows] for name, column in outputs.items()}
    batch["uid"] = torch.zeros(len(rows), dtype=torch.int64)
    mask = batch["response_mask"]
    batch["token_level_rewards"] = batch["token_level_scores"]
    if choice.kl_where == "reward":
        batch["token_level_rewards"], _ = apply_kl_to_reward(
            batch["token_level_scores"],
            batch["old_log_probs"],
            batch["ref_log_probs"],
            mask,
            form=choice.kl_form,
            coef=choice.kl_coef,
        )
    estimated = estimate(ADV_ESTIMATORS[choice.adv_estimator], batch, choice.adv_options)
    batch |= {"advantages": estimated.advantages}
    entry = POLICY_LOSSES[choice.policy_loss]
    batch = settle(entry, batch, choice.loss_options)
    weights = 1.0 if choice.weight is None else call(WEIGHTS[choice.weight], batch, choice.weight_options)
    loss = policy_loss(entry, {**batch, **outputs}, choice.loss_options)
    assert loss.per_token is not None

    def total_of(values: Tensor) -> Tensor:
        return aggregate(choice.mode, values, mask, **counts(mask), fixed_length=length)

    total = total_of(loss.per_token * weights)
    if choice.kl_where == "loss":
        penalty = kl_penalty(choice.kl_form, outputs["log_probs"], batch["ref_log_probs"], mask)
        total = total + choice.kl_coef * total_of(penalty)
    return total


def outputs_of(world: World, now: Tensor) -> Batch:
    """What the policy that is updated says of all answers, differentiable."""
    return {"log_probs": world.log_probs(now), "entropy": world.statistic(now, entropy_of)}


def columns_of(world: World, old: Tensor, sampler: Tensor) -> Batch:
    """Every column that an algorithm may read, of all answers."""
    mask, scores = world.mask, world.scores
    ends = (mask * (mask.cumsum(-1) == mask.sum(-1, keepdim=True))).double()
    greedy = old.argmax(-1)
    follows = ((world.tokens == greedy[world.states]) | (mask == 0)).all(-1)
    anything = torch.Generator().manual_seed(7)
    per_token = {
        "old_log_probs": world.log_probs(old),
        "rollout_log_probs": world.log_probs(sampler),
        "ref_log_probs": world.log_probs(world.table(4)),
        "teacher_log_probs": world.log_probs(world.table(5)),
        "entropy": world.statistic(old, entropy_of),
        "sum_pi_squared": world.statistic(old, lambda log_pi: log_pi.exp().square().sum(-1)),
        "values": world.table(6)[:, 0][world.states].masked_fill(mask == 0, 0.0),
        "process_rewards": world.log_probs(world.table(7)) - world.log_probs(world.table(4)),
        "draws": torch.rand(mask.shape, generator=anything, dtype=torch.float64),
    }
    return {
        **per_token,
        "response_mask": mask,
        "token_level_scores": ends * scores[:, None],
        "turn_ids": torch.arange(mask.shape[1]).expand(mask.shape).masked_fill(mask == 0, -1),
        "state_hash": world.states,
        "accuracy": (scores >= 1).double(),
        "reward_baselines": scores[follows][0].expand(len(scores)),
        "reward_parts": torch.stack([(scores >= 1).double(), scores - (scores >= 1).double()], 1),
    }


def multisets(answers: int, n: int) -> Iterator[tuple[int, ...]]:
    """Groups of n answers, whatever their order: algorithms do not look at it."""
    return itertools.combinations_with_replacement(range(answers), n)


def multiplicity(group: Sequence[int]) -> int:
    """In how many orders a group can be sampled."""
    same = [group.count(each) for each in set(group)]
    return math.factorial(len(group)) // math.prod(math.factorial(count) for count in same)


# ---- the table

STALENESS, GAP = 0.3, 0.3


@dataclass(frozen=True)
class Row:
    """What was looked at, with all else RLOO, `reinforce` and sums over sequences."""

    kind: str
    name: str
    choice: Choice
    claims_unbiased: bool
    gap: float = 0.0  # between sampler and trainer


def rows() -> list[Row]:
    """One factor at a time: every estimator, loss, aggregation, place and form of the KL, and weight there is."""
    sums = "seq-mean-token-sum"
    shipped = [entry for kind in (ADV_ESTIMATORS, POLICY_LOSSES, AGGREGATIONS) for entry in kind]
    found = [
        Row(entry.kind, entry.name, choice, bool(entry.marks.get("unbiased")))
        for entry in shipped
        if entry.alias_of is None
        for choice in [
            Choice(adv_estimator=entry.name, aggregation=sums)
            if entry.kind == ADV_ESTIMATORS.kind
            else Choice(policy_loss=entry.name)
            if entry.kind == POLICY_LOSSES.kind
            else Choice(aggregation=entry.name)
        ]
    ]
    found += [
        Row(f"KL in the {place}", entry.name, Choice(kl_where=place, kl_form=entry.name, kl_coef=0.5), unbiased)
        for place in ("reward", "loss")
        for entry in KL_FORMS
        for unbiased in [place == "reward" and entry.name.rstrip("+") == "k1"]
    ]
    exact = Choice(weight="importance", weight_options={"level": "sequence", "cap": math.inf})
    found += [Row("weight", "importance, of the sequence, without a cap", exact, True, GAP)]
    found += [
        Row("weight", entry.name, Choice(weight=entry.name), False, GAP) for entry in WEIGHTS if entry.alias_of is None
    ]
    return [*found, Row("weight", "none", Choice(), False, GAP)]


def certificates(row: Row) -> tuple[Certificate, Certificate]:
    """On the policy's own samples, and on those of one that is `STALENESS` away."""
    return certify(row.choice, gap=row.gap), certify(row.choice, staleness=STALENESS, gap=row.gap)
