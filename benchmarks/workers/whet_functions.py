# SPDX-License-Identifier: Apache-2.0
"""One of whet's functions on a random batch."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.workers.random_columns import columns_for
from benchmarks.workers.turns import Turns
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.calls import Bound, estimate, policy_loss, with_mini_batch_columns
from whet.algorithms.statistics import masked_mean
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

OPTIONS = {"gae": {"gamma": 0.99, "lam": 0.95}}


def main() -> None:
    """A turn is one call."""
    turns = Turns()
    kind, name, shape = (turns.settings[key] for key in ("kind", "name", "shape"))
    columns = columns_for(kind, name, shape)
    if kind == "loss" and "chosen" in POLICY_LOSSES[name].columns:
        columns["draws"] = torch.rand(shape)
    work = {"estimate": estimated, "alone": alone, "loss": loss}[kind]
    turns.ready()
    while True:
        turns.wait()
        work(name, columns)
        turns.done()


def estimated(name: str, columns: dict[str, Tensor]) -> None:
    """As the loop does it."""
    estimate(Bound(ADV_ESTIMATORS[name], OPTIONS.get(name, {})), columns)


def alone(name: str, columns: dict[str, Tensor]) -> None:
    """The function itself."""
    Bound(ADV_ESTIMATORS[name], OPTIONS.get(name, {}))(columns)


def loss(name: str, columns: dict[str, Tensor]) -> None:
    """Runs forward, metrics and backward."""
    columns["log_probs"].grad = None
    total(name, columns).backward()  # type: ignore[no-untyped-call]


def total(name: str, columns: dict[str, Tensor]) -> Tensor:
    """The loss as one number; its metrics become a list of numbers, as in an engine."""
    entry, mask = POLICY_LOSSES[name], columns["response_mask"]
    function = Bound(entry, {})
    result = policy_loss(function, with_mini_batch_columns(function, columns))
    reported = [float(masked_mean(value, mask)) for value in result.diagnostics.values()]
    mode = entry.marks.get("aggregation", "token-mean")
    assert result.per_token is not None
    assert len(reported) == len(result.diagnostics)
    return aggregate(mode, result.per_token, mask, **counts(mask), fixed_length=mask.shape[1])


if __name__ == "__main__":
    main()
