# SPDX-License-Identifier: Apache-2.0
"""What every training engine is held to, against `SingleEngine` with padding and one micro-batch.

An engine passes if `check_engine(make)` returns for its own `make(settings, optim)`; see test_single.py for the use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from whet.config.schema import OptimConfig
from whet.engines.protocol import TrainEngine
from whet.protocol import DataProto
from whet.trainers.objectives import ImitationObjective, PolicyObjective

BOUND = 1e-5  # relative norm over all weights, float32


@dataclass(frozen=True)
class Variant:
    """How an engine splits its work; none of it may change what comes out."""

    packing: bool
    max_tokens_per_micro_batch: int


VARIANTS = [Variant(True, 10**6), Variant(False, 10**6), Variant(True, 64), Variant(False, 64), Variant(True, 1)]
MakeEngine = Callable[[Variant, OptimConfig], TrainEngine]


def ragged_batch(rows: int = 12, seed: int = 0) -> DataProto:
    """Rows of 3 to 30 tokens with tool text in the middle, three to a prompt; one failed row."""
    draw = torch.Generator().manual_seed(seed)
    prompt, response = 10, 20
    input_ids = torch.randint(3, 40, (rows, prompt + response), generator=draw)
    left = torch.randint(0, prompt - 1, (rows, 1), generator=draw)
    asked = torch.arange(rows) // 3 * 3
    input_ids[:, :prompt], left = input_ids[asked, :prompt], left[asked]
    right = torch.randint(2, response + 1, (rows, 1), generator=draw)
    at = torch.arange(prompt + response)
    attention_mask = ((at >= left) & (at < prompt + right)).long()
    response_mask = attention_mask[:, prompt:].clone()
    response_mask[:, 1] = 0
    response_mask[3] = 0
    log_probs = -torch.rand(rows, response, generator=draw) * response_mask - 3.0 * response_mask
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "old_log_probs": log_probs,
            "ref_log_probs": log_probs * 1.1,
            "rollout_log_probs": log_probs,
            "advantages": torch.randn(rows, response, generator=draw) * response_mask,
        }
    )


OBJECTIVES = [
    PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}),
    PolicyObjective(
        "gspo", {}, aggregation="seq-mean-token-mean", entropy_coef=0.01, kl_form="k3", kl_coef=0.1, temperature=0.8
    ),
    PolicyObjective("reinforce", {}, aggregation="seq-mean-token-sum-norm", fixed_length=20),
    ImitationObjective(),
]


def weights_of(engine: TrainEngine) -> torch.Tensor:
    """All weights end to end, by name."""
    named: Iterator[tuple[str, torch.Tensor]] = engine.named_weights()
    return torch.cat([weight.clone().flatten() for _, weight in sorted(named, key=lambda pair: pair[0])])


def check_forward(reference: TrainEngine, engine: TrainEngine) -> None:
    """Log-probs and entropy, whatever the micro-batches."""
    batch, needs = ragged_batch(), frozenset({"log_probs", "entropy", "sum_pi_squared", "vocab_log_probs"})
    expected, got = reference.forward(batch, needs, 0.9), engine.forward(batch, needs, 0.9)
    assert expected.keys() == got.keys() == needs
    for name in needs:
        torch.testing.assert_close(got[name], expected[name], atol=2e-5, rtol=0)


def check_update(reference: TrainEngine, engine: TrainEngine, objective: object, steps: int = 3) -> None:
    """Loss, gradient norm and weights after a few steps of plain gradient descent-like size."""
    start = weights_of(reference)
    assert torch.equal(start, weights_of(engine))
    for step in range(steps):
        batch = ragged_batch(seed=step)
        expected = reference.update(batch, objective).reduce()  # type: ignore[arg-type]
        got = engine.update(batch, objective).reduce()  # type: ignore[arg-type]
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(value), atol=2e-5, rtol=2e-4, msg=name)
    moved = (weights_of(reference) - start).norm()
    assert moved > 0
    assert (weights_of(engine) - weights_of(reference)).norm() < BOUND * weights_of(reference).norm()
