# SPDX-License-Identifier: Apache-2.0
"""Trajectories of several rows: where the context was rewritten, a new row of the same trajectory begins."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.columns import ROW_COLUMNS
from whet.errors import DataError


class TrajectoryLayout:
    """Concatenates the sampled tokens of rows with the same `trajectory_uid`, in row order, and splits results again.

    T trajectories become columns [T, L] without gaps, L the largest number of sampled tokens. The k-th sampled token of
    the batch moves from (row[k], position[k]) to (trajectory[k], place[k]).
    """

    def __init__(self, trajectory_uid: Tensor, response_mask: Tensor) -> None:
        sampled = response_mask != 0
        names, self.trajectory_of_row = torch.unique(trajectory_uid, return_inverse=True)  # [T], [B]
        rows = torch.arange(len(trajectory_uid), device=trajectory_uid.device)
        self.first_row = torch.full_like(names, len(rows)).scatter_reduce(0, self.trajectory_of_row, rows, "amin")
        before, lengths = _tokens_before(self.trajectory_of_row, sampled.sum(-1), len(names))
        self.shape = (len(names), max(1, int(lengths.max())))  # a batch of failures keeps one empty position
        self.row_shape = response_mask.shape
        self.row, self.position = sampled.nonzero(as_tuple=True)
        self.trajectory = self.trajectory_of_row[self.row]
        self.place = before[self.row] + sampled.cumsum(-1)[self.row, self.position] - 1

    def join(self, name: str, column: Tensor) -> Tensor:
        """[B, R] -> [T, L]; a column with one value per row -> one value per trajectory.
        Raises: DataError where the rows of a trajectory disagree about such a value."""
        if column.shape == self.row_shape and name not in ROW_COLUMNS:
            joined = column.new_zeros(self.shape)
            joined[self.trajectory, self.place] = column[self.row, self.position]
            return joined
        first = column[self.first_row]
        differs = (column != first[self.trajectory_of_row]).nonzero()
        if len(differs):
            row = int(differs[0, 0])
            other = int(self.first_row[self.trajectory_of_row[row]])
            raise DataError(
                f"rows {other} and {row} have one trajectory_uid but different {name!r}; "
                "give every row of a trajectory the same value"
            )
        return first

    def cut(self, result: Tensor) -> Tensor:
        """[T, L] -> [B, R], 0 where no token was sampled; [T] -> [B]."""
        if result.ndim == 1:
            return result[self.trajectory_of_row]
        rows = result.new_zeros(self.row_shape)
        rows[self.row, self.position] = result[self.trajectory, self.place]
        return rows


def _tokens_before(trajectory_of_row: Tensor, row_lengths: Tensor, num_trajectories: int) -> tuple[Tensor, Tensor]:
    """Returns the number of tokens in earlier rows of the same trajectory [B], and of each trajectory [T]."""
    lengths = row_lengths.new_zeros(num_trajectories).index_add(0, trajectory_of_row, row_lengths)
    starts = lengths.cumsum(0) - lengths  # of each trajectory in the concatenation of all
    order = trajectory_of_row.argsort(stable=True)
    ordered = row_lengths[order]
    before = torch.empty_like(row_lengths)
    before[order] = ordered.cumsum(0) - ordered - starts[trajectory_of_row[order]]
    return before, lengths
