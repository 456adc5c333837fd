# SPDX-License-Identifier: Apache-2.0
"""Single calls of estimators and losses: functions that are bound to their options first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whet.algorithms import calls
from whet.algorithms.calls import Bound, Estimate, PolicyLoss
from whet.registry import Entry

Columns = Mapping[str, Tensor]
Options = Mapping[str, Any]


def estimate(
    entry: Entry, columns: Columns, options: Options, supplied: Options | None = None, *, with_returns: bool = False
) -> Estimate:
    return calls.estimate(Bound(entry, options), columns, supplied, with_returns=with_returns)


def policy_loss(entry: Entry, columns: Columns, options: Options, supplied: Options | None = None) -> PolicyLoss:
    return calls.policy_loss(Bound(entry, options), columns, supplied)


def with_mini_batch_columns(entry: Entry, columns: Columns, options: Options) -> dict[str, Tensor]:
    return calls.with_mini_batch_columns(Bound(entry, options), columns)
