# SPDX-License-Identifier: Apache-2.0
"""Certificates: the exact expected gradient of an algorithm, compared with the gradient of its objective.

The policy is so small that its responses can be listed: they have up to L of V tokens, and token 0 ends a response. The
expected gradient of the algorithm is a finite sum over all groups of n responses: the probability of the group times
the gradient of the registered loss. The gradient of the objective E[R] - beta KL(pi || ref) comes from autograd through
the same list. All numbers are float64, so that an unbiased gradient agrees to eight digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.calls import Bound, estimate
from whet.algorithms.shaping import pay_on_last_token, soft_overlong
from whet.algorithms.statistics import zero_outside
from whet.batch import Batch
from whet.config.algorithm import AlgorithmConfig, CorrectionConfig, FilterConfig, KLConfig
from whet.config.commands import commands
from whet.config.compose import shipped_recipes
from whet.config.load import load_config
from whet.config.schema import DataConfig, TrainConfig
from whet.metrics import Metrics
from whet.registry import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    FILTERS,
    KL_FORMS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    WEIGHTS,
    Entry,
)
from whet.trainers.objectives import PolicyObjective
from whet.trainers.shape import Correction, Shaper, estimator

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """The world of a certificate: all responses of up to L tokens, from a vocabulary of V tokens, to one prompt; their
    scores; and policies, as tables of logits.

    A state is the tokens so far; there are S states. Rows are the K responses; arrays are [K, L] unless noted."""

    vocabulary: int = 3
    length: int = 3
    seed: int = 0

    @cached_property
    def responses(self) -> list[tuple[int, ...]]:
        """The list of all possible responses. Token 0 or the length limit ends a response."""
        inner, size = range(1, self.vocabulary), self.length
        ended = [(*body, 0) for shorter in range(size) for body in itertools.product(inner, repeat=shorter)]
        return ended + list(itertools.product(inner, repeat=size))

    @cached_property
    def tokens(self) -> Tensor:
        """The token ids of the responses, 0 in the padding."""
        return torch.tensor([[*a, *[0] * (self.length - len(a))] for a in self.responses])

    @cached_property
    def mask(self) -> Tensor:
        """1 where a response has a token."""
        lengths = torch.tensor([len(response) for response in self.responses])
        return (torch.arange(self.length) < lengths[:, None]).long()

    @cached_property
    def states(self) -> Tensor:
        """The index of the state before each token, 0 in the padding."""
        begun = {response[:t]: None for response in self.responses for t in range(len(response))}
        numbers = {state: number for number, state in enumerate(begun)}
        rows = [[numbers[a[:t]] if t < len(a) else 0 for t in range(self.length)] for a in self.responses]
        return torch.tensor(rows)

    @property
    def num_states(self) -> int:
        """The number S of states."""
        return int(self.states.max()) + 1

    def table(self, name: int, scale: float = 1.0) -> Tensor:
        """Returns random logits [S, V], a function of `name` and the world's seed."""
        draw = torch.Generator().manual_seed(1000 * self.seed + name)
        return scale * torch.randn(self.num_states, self.vocabulary, generator=draw, dtype=torch.float64)

    @cached_property
    def scores(self) -> Tensor:
        """The score of each response [K], drawn with the seed: 1 or 0 for its correctness, plus up to 0.1 for style."""
        draw = torch.Generator().manual_seed(1000 * self.seed + 99)
        correct = (torch.rand(len(self.responses), generator=draw, dtype=torch.float64) < 0.4).double()
        return correct + 0.1 * torch.rand(len(self.responses), generator=draw, dtype=torch.float64)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Returns the log-prob of every token, 0 in the padding."""
        chosen = logits.log_softmax(-1)[self.states, self.tokens]
        return chosen.masked_fill(self.mask == 0, 0.0)

    def statistic(self, logits: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `function` to log-probs of all states [S, V] -> [S, ...]. Returns the value of each token's state."""
        at_tokens: Tensor = zero_outside(function(logits.log_softmax(-1))[self.states], self.mask)
        return at_tokens


def entropy_of(log_pi: Tensor) -> Tensor:
    """Returns the entropy of each state.   [S, V] -> [S]"""
    return -(log_pi.exp() * log_pi).sum(-1)


@dataclass(frozen=True)
class Certificate:
    """The algorithm's expected gradient g against the objective's gradient t: |g - t| / |t|, cosine, |g| / |t|, and the
    variance of the gradient of one group, divided by |t|^2. `kl_error` is set for a KL in the loss."""

    relative_error: float
    cosine: float
    norm_ratio: float
    variance: float
    kl_error: float | None = None


def certify(
    algorithm: AlgorithmConfig,
    world: World = World(),
    *,
    n: int = 2,
    mode: str | None = None,
    staleness: float = 0.0,
    gap: float = 0.0,
) -> Certificate:
    """Computes the certificate of an algorithm's config, with groups of n responses.

    `mode` replaces the config's aggregation. The logits of the old policy differ from the updated policy's by noise
    with standard deviation `staleness`; the sampler's logits differ from the old policy's by noise of size `gap`."""
    step = CertifiedStep.of(algorithm, world, mode)
    penalised = algorithm.kl.coef if algorithm.kl.where != "none" else 0.0
    target = objective_gradient(world, step.scores, world.table(1).requires_grad_(), penalised)
    mean, variance = step.expected_gradient(n, staleness, gap)
    size = target.norm()
    return Certificate(
        relative_error=float((mean - target).norm() / size),
        cosine=float(torch.cosine_similarity(mean, target, dim=0)) if bool(mean.norm() > 0) else 0.0,
        norm_ratio=float(mean.norm() / size),
        variance=float(variance / size.square()),
    )


def kl_error(form: str, world: World = World(), *, staleness: float = 0.0) -> float:
    """Returns |g - t| / |t| for a loss that is only a KL of this `form`. t is the gradient of each state's KL, weighted
    by fixed visit probabilities. `staleness`: noise between the logits of the sampling and the updated policy."""
    step = CertifiedStep.of(plain(kl=KLConfig(where="loss", form=form, coef=1.0)), world, SUMS)
    mean, _ = step.expected_gradient(1, staleness, 0.0)  # in a group of one RLOO's advantage is 0
    now = world.table(1).requires_grad_()
    log_pi, log_ref = now.log_softmax(-1), world.table(4).log_softmax(-1)
    by_state = (log_pi.exp() * (log_pi - log_ref)).sum(-1)
    visits = world.log_probs(world.table(1) + staleness * world.table(2)).sum(-1).exp()[:, None] * world.mask
    target = -torch.autograd.grad((visits * by_state[world.states]).sum(), now)[0].flatten()
    return float((mean - target).norm() / target.norm())


@dataclass(frozen=True)
class CertifiedStep:
    """The estimator, correction and objective of a config, as in the loop, applied to one group of responses."""

    world: World
    config: TrainConfig
    estimator: Bound
    correction: Correction
    objective: PolicyObjective

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, world: World, mode: str | None = None) -> CertifiedStep:
        """Builds a step from an algorithm's config; `mode`, if given, replaces the aggregation of the loss."""
        overlong = algorithm.overlong
        overlong = overlong.model_copy(update={"buffer_length": min(overlong.buffer_length, world.length - 1)})
        algorithm = algorithm.model_copy(update={"overlong": overlong})
        config = TrainConfig(algorithm=algorithm, data=DataConfig(max_response_length=world.length))
        objective = replace(PolicyObjective.from_config(config), kl_coef=algorithm.kl.coef)
        return cls(
            world,
            config,
            estimator(algorithm),
            Correction.from_config(config),
            objective if mode is None else replace(objective, aggregation=mode),
        )

    @cached_property
    def scores(self) -> Tensor:
        """The world's scores minus the length penalty, which is part of the objective.   [K]"""
        overlong, lengths = self.config.algorithm.overlong, self.world.mask.sum(-1).double()
        if not overlong.penalty:
            return self.world.scores
        limits: dict[str, Any] = {"max_response_length": self.world.length, "buffer_length": overlong.buffer_length}
        return self.world.scores + soft_overlong(lengths, penalty=overlong.penalty, **limits)

    def expected_gradient(self, n: int, staleness: float, gap: float) -> tuple[Tensor, Tensor]:
        """Returns the expected gradient [S V] over all groups of n responses, and its variance."""
        now = self.world.table(1)
        old = now + staleness * self.world.table(2)
        sampler = old + gap * self.world.table(3)
        groups = list(itertools.combinations_with_replacement(range(len(self.world.responses)), n))  # in any order
        weights = torch.tensor([multiplicity(group) for group in groups], dtype=torch.float64)
        weights = weights * self.world.log_probs(sampler).sum(-1).exp()[torch.tensor(groups)].prod(-1)
        settings = self.config.algorithm.filter
        if settings.name is not None:  # groups that it drops are sampled again
            weights = weights * torch.tensor([self.is_kept(group) for group in groups])
            extra = FILTERS[settings.name].resolve_options(settings.options, "algorithm.filter.options").get("extra", 0)
            durations = self.world.mask.sum(-1)[torch.tensor(groups)].amax(-1)
            weights = weights * kept_first(durations, weights, BATCH, math.ceil(extra * BATCH))
            weights = weights / weights.sum()
        columns, outputs = columns_of(self.world, old, sampler), outputs_of(self.world, now)
        slopes = torch.stack([self.slope(group, columns, outputs) for group in groups])
        gradients = -slopes @ jacobian(self.world, now)
        mean = weights @ gradients
        return mean, weights @ (gradients - mean).square().sum(-1)

    def slope(self, group: Sequence[int], columns: Columns, outputs: Columns) -> Tensor:
        """Returns the gradient of a group's loss w.r.t. the model's outputs, concatenated for all responses."""
        leaves = {name: output.detach().requires_grad_() for name, output in outputs.items()}
        found = torch.autograd.grad(self.loss(group, columns, leaves), list(leaves.values()), materialize_grads=True)
        return torch.cat([each.flatten() for each in found])

    def loss(self, group: Sequence[int], columns: Columns, outputs: Columns) -> Tensor:
        """Returns the loss of a step on one group; selects its rows from the columns and outputs of all responses."""
        rows, metrics = torch.tensor(group), Metrics()
        shaper = Shaper(self.config)  # a new one for each group, without state
        uid = torch.zeros(len(group), dtype=torch.int64)
        batch = Batch.of({**{name: column[rows] for name, column in columns.items()}, "uid": uid})
        batch = shaper.rewards(batch, metrics)
        advantages = estimate(self.estimator, batch.tensors()).advantages
        batch = shaper.advantages(batch.with_columns(advantages=advantages), metrics)
        shown = self.correction.weigh(self.correction.reject(batch, metrics), metrics).tensors()
        of_rows = {name: output[rows] for name, output in outputs.items()}
        loss, _ = self.objective.loss(of_rows, shown, self.objective.counts(shown))
        return loss

    def is_kept(self, group: Sequence[int]) -> bool:
        """Tells whether the config's filter keeps a group, given the correctness of its responses."""
        settings = self.config.algorithm.filter
        correct = [float(self.world.scores[response] >= 1) for response in group]
        kept: bool = FILTERS[settings.name or ""].load()(correct, **settings.options)
        return kept


def kept_first(durations: Tensor, weights: Tensor, batch: int, extra: int) -> Tensor:
    """Returns the probability that a group is among the first `batch` to end, if batch + extra groups start together;
    ties are broken at random. `weights` are the probabilities of the groups that a filter keeps.   [G] -> [G]"""
    others, found = batch + extra - 1, torch.zeros_like(weights)
    for duration in durations.unique():
        faster, same = (float(weights[at].sum()) for at in (durations < duration, durations == duration))
        slower = max(0.0, 1 - faster - same)
        for before, beside in itertools.product(range(others + 1), repeat=2):
            orders = math.comb(others, before) * math.comb(others - before, beside)
            chance = orders * faster**before * same**beside * slower ** max(0, others - before - beside)
            found[durations == duration] += chance * min(1.0, max(0.0, (batch - before) / (beside + 1)))
    return found


def objective_gradient(world: World, scores: Tensor, logits: Tensor, kl_coef: float) -> Tensor:
    """Returns the gradient of E[R] - kl_coef KL(pi || ref) over all responses. `scores` [K] are the rewards R."""
    log_pi = world.log_probs(logits).sum(-1)
    log_ref = world.log_probs(world.table(4)).sum(-1)
    value = (log_pi.exp() * (scores - kl_coef * (log_pi - log_ref))).sum()
    return torch.autograd.grad(value, logits)[0].flatten()


def jacobian(world: World, logits: Tensor) -> Tensor:
    """Returns the Jacobian of the model's outputs, concatenated for all responses, w.r.t. the logits.   [., S V]"""

    def outputs(at: Tensor) -> Tensor:
        return torch.cat([output.flatten() for output in outputs_of(world, at).values()])

    found: Tensor = torch.autograd.functional.jacobian(outputs, logits, vectorize=True)  # type: ignore[no-untyped-call]
    return found.flatten(1)


def outputs_of(world: World, now: Tensor) -> Columns:
    """Returns the outputs of the policy with parameters `now` for all responses, differentiable in `now`."""
    return {
        "log_probs": world.log_probs(now),
        "entropy": world.statistic(now, entropy_of),
        "vocab_log_probs": world.statistic(now, lambda log_pi: log_pi),
    }


def columns_of(world: World, old: Tensor, sampler: Tensor) -> Columns:
    """Returns the columns that an algorithm may read, for all responses."""
    scores = world.scores
    mask, correct = world.mask, (world.scores >= 1).double()
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
        "prompts": mask[:, :0],
        "attention_mask": mask,
        "truncated": world.tokens[:, -1] > 0,
        "token_level_scores": pay_on_last_token(scores, mask),
        "turn_ids": torch.arange(mask.shape[1]).expand(mask.shape).masked_fill(mask == 0, -1),
        "state_hash": world.states,
        "accuracy": correct,
        "reward_baselines": scores[follows][0].expand(len(scores)),
        "reward_parts": torch.stack([correct, scores - correct], 1),
    }


def multiplicity(group: Sequence[int]) -> int:
    """Returns the number of orders in which the responses of a group can be sampled."""
    same = [group.count(each) for each in set(group)]
    return math.factorial(len(group)) // math.prod(math.factorial(count) for count in same)


# ---- the table

STALENESS, GAP = 0.3, 0.3
BATCH = 4  # groups of a batch; a filter with an option `extra` starts more
KL_LOSS = "KL in the loss"
SUMS = "seq-mean-token-sum"


@dataclass(frozen=True)
class Certified:
    """A row of the table: an algorithm's part, with RLOO, `reinforce` and sums over sequences; a whole recipe; or a
    preference loss, which has no algorithm."""

    kind: str
    name: str
    algorithm: AlgorithmConfig
    is_exact: bool = False  # whether the expected gradient has to be exact
    mode: str | None = SUMS
    gap: float = 0.0  # between sampler and trainer


def plain(**changed: Any) -> AlgorithmConfig:
    """Returns a config of RLOO with `reinforce`, which is exactly unbiased; `changed` replaces its values."""
    return AlgorithmConfig(**{"adv_estimator": "rloo", "policy_loss": "reinforce", **changed})


def rows() -> list[Certified]:
    """Returns the rows of the table: first every estimator, loss, aggregation, KL, weight and filter, changed one at a
    time, then the shipped recipes."""
    kinds = (ADV_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, AGGREGATIONS, KL_FORMS, WEIGHTS, FILTERS)
    found = [row for kind in kinds for entry in kind for row in rows_of(entry)]
    whole = CorrectionConfig(weight="importance", weight_options={"level": "sequence", "cap": math.inf})
    found.append(Certified(WEIGHTS.kind, "importance of the sequence, no cap", plain(correction=whole), True, gap=GAP))
    found.append(Certified(WEIGHTS.kind, "none", plain(), gap=GAP))
    seen = list[AlgorithmConfig]()
    for name in shipped_recipes():
        if not name.endswith(tuple(f"_{command}" for command in commands())):  # recipes of other commands
            algorithm = load_config(TrainConfig, name, checked=False).config.algorithm
            if algorithm not in seen:  # else the recipe differs in other sections only
                found.append(Certified("recipe", name, algorithm, mode=None))
            seen.append(algorithm)
    return found


def rows_of(entry: Entry) -> list[Certified]:
    """Returns the rows of a registered function; none if its kind does not affect the gradient, and for an alias."""
    kind, name, exact = entry.kind, entry.name, bool(entry.marks.get("unbiased"))
    if kind == KL_FORMS.kind:
        terms = [KLConfig(where=where, form=name, coef=0.5) for where in ("reward", "loss")]
        exact = name.startswith("k1")  # exact in the reward only
        return [Certified(f"KL in the {kl.where}", name, plain(kl=kl), exact and kl.where == "reward") for kl in terms]
    if kind == PREFERENCE_LOSSES.kind:
        is_exact = entry.target.startswith("whet.") and bool(entry.marks.get("unbiased", True))
        return [Certified(kind, name, plain(), is_exact, mode=None)]
    if entry.alias_of is not None:
        return []
    mode = entry.marks.get("aggregation", SUMS)
    by_kind = {
        ADV_ESTIMATORS.kind: lambda: Certified(kind, name, plain(adv_estimator=name), exact),
        POLICY_LOSSES.kind: lambda: Certified(kind, name, plain(policy_loss=name), exact, mode),
        AGGREGATIONS.kind: lambda: Certified(kind, name, plain(), exact, mode=name),
        WEIGHTS.kind: lambda: Certified(kind, name, plain(correction=CorrectionConfig(weight=name)), gap=GAP),
        FILTERS.kind: lambda: Certified(kind, name, plain(filter=FilterConfig(name=name))),
    }
    return [by_kind[kind]()] if kind in by_kind else []


def certificates(row: Certified) -> tuple[Certificate, Certificate | None]:
    """Computes two certificates: sampled by the policy itself, and by a policy whose logits differ by `STALENESS`. A
    preference loss has the first alone, since no policy samples its data."""
    if row.kind == PREFERENCE_LOSSES.kind:
        from whet.plugins.proofs.comparisons import certify_comparisons

        return certify_comparisons(row.name), None
    own, stale = (certify(row.algorithm, mode=row.mode, gap=row.gap, staleness=each) for each in (0.0, STALENESS))
    if row.kind == KL_LOSS:
        stale = replace(stale, kl_error=kl_error(row.name, staleness=STALENESS))
    return own, stale
