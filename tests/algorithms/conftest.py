# SPDX-License-Identifier: Apache-2.0
"""One batch with everything that goes wrong in a real one, for the tests of all algorithms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Batch = dict[str, Tensor]

FAILED, ONE_TOKEN, ALONE, ALL_EQUAL = 0, 1, 2, (3, 4, 5)  # rows that are special in every batch


def _make_batch(seed: int, rows: int = 12, positions: int = 9, poison: bool = False) -> Batch:
    """float64 columns. Row 0 failed, row 1 is an EOS alone, row 2 is alone in its group, rows 3 to 5 are a group with
    equal scores; groups are interleaved, text of tools stands in answers. With `poison` what is masked is nan."""
    draw = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, positions, generator=draw, dtype=torch.float64)

    lengths = torch.randint(2, positions + 1, (rows,), generator=draw)
    inside = torch.arange(positions) < lengths[:, None]
    tool = torch.rand(rows, positions, generator=draw) < 0.25
    tool[:, 0] = False
    mask = (inside & ~tool).long()
    mask[FAILED] = 0
    mask[ONE_TOKEN] = torch.arange(positions) == 0
    uid = torch.randint(0, 3, (rows,), generator=draw) * 7 + 100
    uid[ALONE] = 5
    uid[list(ALL_EQUAL)] = 6
    rewards = normal()
    rewards[list(ALL_EQUAL)] = 0.0
    rewards[list(ALL_EQUAL), 0] = 0.1
    old_log_probs = -normal().abs()
    columns = {
        "token_level_rewards": rewards,
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "advantages": normal(),
        "old_log_probs": old_log_probs,
        "log_probs": old_log_probs + 0.3 * normal(),
        "ref_log_probs": old_log_probs + 0.3 * normal(),
    }
    turns = (tool.long().cumsum(1) + torch.arange(rows)[:, None] % 2).masked_fill(mask == 0, -1)
    columns |= {
        "process_rewards": normal(),
        "sum_pi_squared": 0.1 + 0.9 * torch.rand(rows, positions, generator=draw, dtype=torch.float64),
        "token_level_scores": rewards.clone(),
        "rollout_log_probs": old_log_probs + 0.3 * normal(),
        "teacher_log_probs": old_log_probs + normal(),
        "entropy": normal().abs(),
        "draws": torch.rand(rows, positions, generator=draw, dtype=torch.float64),
    }
    masked = torch.nan if poison else 0.0
    of_rows = {
        "reward_baselines": torch.randn(rows, generator=draw, dtype=torch.float64),
        "accuracy": torch.randint(0, 2, (rows,), generator=draw).double(),
        "reward_parts": torch.randn(rows, 2, generator=draw, dtype=torch.float64),
        "turn_ids": turns,
        "state_hash": (turns % 2).masked_fill(mask == 0, 0),
    }
    return (
        of_rows
        | {name: column.masked_fill(mask == 0, masked) for name, column in columns.items()}
        | {
            "response_mask": mask,
            "uid": uid,
        }
    )


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """make_batch(seed, rows=12, positions=9, poison=False) -> columns by name."""
    return _make_batch
