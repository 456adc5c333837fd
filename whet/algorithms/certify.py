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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.adapters import estimate, policy_loss, settle
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.kl import apply_kl_to_reward, kl_penalty
from whet.algorithms.shaping import pay_on_last_token, soft_overlong
from whet.config.algorithm import AlgorithmConfig, CorrectionConfig, FilterConfig, KLConfig, OverlongConfig
from whet.config.algorithm_checks import aggregation
from whet.config.compose import shipped_recipes
from whet.config.load import load_config
from whet.config.schema import TrainConfig
from whet.masks import zero_outside
from whet.registry import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    FILTERS,
    KL_FORMS,
    POLICY_LOSSES,
    WEIGHTS,
    Entry,
    call,
)

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
        """A function of each state's log-probs [S, V] -> [S, ...], at each token."""
        at_tokens: Tensor = zero_outside(function(logits.log_softmax(-1))[self.states], self.mask)
        return at_tokens


def entropy_of(log_pi: Tensor) -> Tensor:
    """[S, V] -> [S]."""
    return -(log_pi.exp() * log_pi).sum(-1)


@dataclass(frozen=True)
class Certificate:
    """The expected gradient g against the objective's, t: |g - t| / |t|, their cosine, |g| / |t|, and the variance of
    one group's gradient in units of |t|^2."""

    relative_error: float
    cosine: float
    norm_ratio: float
    variance: float


def certify(
    algorithm: AlgorithmConfig,
    world: World = World(),
    *,
    n: int = 2,
    mode: str | None = None,
    staleness: float = 0.0,
    gap: float = 0.0,
) -> Certificate:
    """The certificate of what a config says of the mathematics, in groups of n answers.

    `mode` is an aggregation in the place of the config's. Samples are of a policy that is `staleness` away from the one
    that is updated, in the standard deviation of logits; with `gap` the sampler was further away still.
    """
    now = world.table(1)
    old = now + staleness * world.table(2)
    sampler = old + gap * world.table(3)
    penalised = algorithm.kl.coef if algorithm.kl.where != "none" else 0.0
    scores = scores_of(world, algorithm.overlong)
    target = objective_gradient(world, scores, now.clone().requires_grad_(), penalised)
    probabilities = world.log_probs(sampler).sum(-1).exp()

    groups = list(multisets(len(world.answers), n))
    weights = torch.tensor([multiplicity(group) for group in groups], dtype=torch.float64)
    weights = weights * probabilities[torch.tensor(groups)].prod(-1)
    if algorithm.filter.name is not None:  # what is left out is sampled again
        weights = weights * torch.tensor([is_kept(algorithm.filter, world, group) for group in groups])
        weights = weights / weights.sum()
    columns, outputs = columns_of(world, scores, old, sampler), outputs_of(world, now)
    slopes = torch.stack([slope_of_group(algorithm, mode, world, group, columns, outputs) for group in groups])
    gradients = -slopes @ jacobian(world, now)
    mean = weights @ gradients
    variance = weights @ (gradients - mean).square().sum(-1)
    size = target.norm()
    return Certificate(
        relative_error=float((mean - target).norm() / size),
        cosine=float(torch.cosine_similarity(mean, target, dim=0)) if bool(mean.norm() > 0) else 0.0,
        norm_ratio=float(mean.norm() / size),
        variance=float(variance / size.square()),
    )


def scores_of(world: World, overlong: OverlongConfig) -> Tensor:
    """What the answers earn, less what a config takes from long ones: that is part of what it maximises.   [K]"""
    if not overlong.penalty:
        return world.scores
    return world.scores + soft_overlong(
        world.mask.sum(-1).double(),
        max_response_length=world.length,
        buffer_length=min(overlong.buffer_length, world.length - 1),
        penalty=overlong.penalty,
    )


def objective_gradient(world: World, scores: Tensor, logits: Tensor, kl_coef: float) -> Tensor:
    """Of E[R] - kl_coef KL(pi || ref), over all answers; R is `scores` [K]."""
    log_pi = world.log_probs(logits).sum(-1)
    log_ref = world.log_probs(world.table(4)).sum(-1)
    value = (log_pi.exp() * (scores - kl_coef * (log_pi - log_ref))).sum()
    return torch.autograd.grad(value, logits)[0].flatten()


def slope_of_group(
    algorithm: AlgorithmConfig, mode: str | None, world: World, group: Sequence[int], columns: Batch, outputs: Batch
) -> Tensor:
    """The gradient of `loss_of_group` with respect to all that the model says of all answers, end to end."""
    leaves = {name: output.detach().requires_grad_() for name, output in outputs.items()}
    loss = loss_of_group(algorithm, mode, world, group, columns, leaves)
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def jacobian(world: World, logits: Tensor) -> Tensor:
    """Of all that the model says of all answers, end to end, with respect to the logits.   [., S V]"""

    def said(at: Tensor) -> Tensor:
        return torch.cat([output.flatten() for output in outputs_of(world, at).values()])

    found: Tensor = torch.autograd.functional.jacobian(said, logits, vectorize=True)  # type: ignore[no-untyped-call]
    return found.flatten(1)


def loss_of_group(
    algorithm: AlgorithmConfig, mode: str | None, world: World, group: Sequence[int], columns: Batch, outputs: Batch
) -> Tensor:
    """The loss of a step whose batch is one group of answers, among columns and model outputs of all answers."""
    rows = torch.tensor(group)
    batch = {name: column[rows] for name, column in columns.items()}
    outputs = {name: column[rows] for name, column in outputs.items()}
    batch["uid"] = torch.zeros(len(rows), dtype=torch.int64)
    mask, kl, correction = batch["response_mask"], algorithm.kl, algorithm.correction
    rewards = batch["token_level_scores"]
    if kl.where == "reward":
        rewards, _ = apply_kl_to_reward(rewards, batch, form=kl.form, coef=kl.coef)
    batch["token_level_rewards"] = rewards
    estimated = estimate(ADV_ESTIMATORS[algorithm.adv_estimator], batch, algorithm.adv_options)
    batch |= {"advantages": estimated.advantages}
    entry = POLICY_LOSSES[algorithm.policy_loss]
    batch = settle(entry, batch, algorithm.loss_options)
    weights = mask
    if correction.weight is not None:
        weights = call(WEIGHTS[correction.weight], batch, correction.weight_options)
    loss = policy_loss(entry, {**batch, **outputs}, algorithm.loss_options)
    assert loss.per_token is not None

    def total_of(values: Tensor) -> Tensor:
        return aggregate(mode or aggregation(algorithm), values, mask, **counts(mask), fixed_length=world.length)

    total = total_of(loss.per_token * weights)
    if algorithm.entropy_coef:
        total = total - algorithm.entropy_coef * total_of(outputs["entropy"])
    if kl.where == "loss":
        total = total + kl.coef * total_of(kl_penalty(kl.form, {**batch, **outputs}))
    return total


def is_kept(settings: FilterConfig, world: World, group: Sequence[int]) -> bool:
    """Whether a filter trains on a group, by which of its answers are right."""
    right = [float(world.scores[answer] >= 1) for answer in group]
    kept: bool = FILTERS[settings.name or ""].load()(right, **settings.options)
    return kept


def outputs_of(world: World, now: Tensor) -> Batch:
    """What the policy that is updated says of all answers, differentiable."""
    vocabulary = world.statistic(now, lambda log_pi: log_pi)
    return {
        "log_probs": world.log_probs(now),
        "entropy": world.statistic(now, entropy_of),
        "vocab_log_probs": vocabulary,
    }


def columns_of(world: World, scores: Tensor, old: Tensor, sampler: Tensor) -> Batch:
    """Every column that an algorithm may read, of all answers."""
    mask, right = world.mask, (world.scores >= 1).double()
    greedy = old.argmax(-1)
    follows = ((world.tokens == greedy[world.states]) | (mask == 0)).all(-1)
    anything = torch.Generator().manual_seed(7)
    per_token = {
        "old_log_probs": world.log_probs(old),
        "rollout_log_probs": world.log_probs(sampler),
        "ref_log_probs": world.log_probs(world.table(4)),
        "teacher_log_probs": world.log_probs(world.table(5)),
        "old_vocab_log_probs": world.statistic(old, lambda log_pi: log_pi),
        "ref_vocab_log_probs": world.statistic(world.table(4), lambda log_pi: log_pi),
        "entropy": world.statistic(old, entropy_of),
        "sum_pi_squared": world.statistic(old, lambda log_pi: log_pi.exp().square().sum(-1)),
        "values": world.table(6)[:, 0][world.states].masked_fill(mask == 0, 0.0),
        "process_rewards": world.log_probs(world.table(7)) - world.log_probs(world.table(4)),
        "draws": torch.rand(mask.shape, generator=anything, dtype=torch.float64),
    }
    return {
        **per_token,
        "response_mask": mask,
        "token_level_scores": pay_on_last_token(scores, mask),
        "turn_ids": torch.arange(mask.shape[1]).expand(mask.shape).masked_fill(mask == 0, -1),
        "state_hash": world.states,
        "accuracy": right,
        "reward_baselines": scores[follows][0].expand(len(scores)),
        "reward_parts": torch.stack([right, scores - right], 1),
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
SUMS = "seq-mean-token-sum"


@dataclass(frozen=True)
class Row:
    """What was looked at, with all else RLOO, `reinforce` and sums over sequences; or a whole recipe."""

    kind: str
    name: str
    algorithm: AlgorithmConfig
    is_exact: bool = False  # has to be
    mode: str | None = SUMS
    gap: float = 0.0  # between sampler and trainer


def plain(**changed: Any) -> AlgorithmConfig:
    """The algorithm that follows the objective's gradient exactly, with something changed."""
    return AlgorithmConfig(**{"adv_estimator": "rloo", "policy_loss": "reinforce", **changed})


def rows() -> list[Row]:
    """One factor at a time: every estimator, loss, aggregation, place and form of the KL, and weight there is; then the
    shipped recipes."""
    kinds = (ADV_ESTIMATORS, POLICY_LOSSES, AGGREGATIONS, KL_FORMS, WEIGHTS)
    found = [row for kind in kinds for entry in kind if entry.alias_of is None for row in rows_of(entry)]
    whole = CorrectionConfig(weight="importance", weight_options={"level": "sequence", "cap": math.inf})
    found.append(Row(WEIGHTS.kind, "importance of the sequence, no cap", plain(correction=whole), True, gap=GAP))
    found.append(Row(WEIGHTS.kind, "none", plain(), gap=GAP))
    seen = list[AlgorithmConfig]()
    for name in shipped_recipes():
        if not name.endswith(("_sft", "_eval")):  # of other commands
            algorithm = load_config(TrainConfig, name, checked=False).config.algorithm
            if algorithm not in seen:  # or it is one of these on more processes
                found.append(Row("recipe", name, algorithm, mode=None))
            seen.append(algorithm)
    return found


def rows_of(entry: Entry) -> list[Row]:
    """Those of one function; none of a kind that has no part in a gradient."""
    kind, name, exact = entry.kind, entry.name, bool(entry.marks.get("unbiased"))
    if kind == ADV_ESTIMATORS.kind:
        return [Row(kind, name, plain(adv_estimator=name), exact)]
    if kind == POLICY_LOSSES.kind:
        return [Row(kind, name, plain(policy_loss=name), exact, entry.marks.get("aggregation", SUMS))]
    if kind == AGGREGATIONS.kind:
        return [Row(kind, name, plain(), exact, mode=name)]
    if kind == KL_FORMS.kind:
        settings = [KLConfig(where=where, form=name, coef=0.5) for where in ("reward", "loss")]
        exact = name in ("k1", "k1+")  # in the reward
        return [Row(f"KL in the {kl.where}", name, plain(kl=kl), exact and kl.where == "reward") for kl in settings]
    if kind == WEIGHTS.kind:
        return [Row(kind, name, plain(correction=CorrectionConfig(weight=name)), gap=GAP)]
    return []


def certificates(row: Row) -> tuple[Certificate, Certificate]:
    """On the policy's own samples, and on those of one that is `STALENESS` away."""
    own = certify(row.algorithm, mode=row.mode, gap=row.gap)
    return own, certify(row.algorithm, mode=row.mode, gap=row.gap, staleness=STALENESS)
