# SPDX-License-Identifier: Apache-2.0
"""Converts groups of scored trajectories to the batch that the loop trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch

from whet.batch import Batch
from whet.columns import COLUMNS
from whet.errors import DataError
from whet.models.packing import LATER_MEDIA, MEDIA, ROUTED
from whet.models.positions import position_ids, rotary_positions
from whet.models.routing import as_column
from whet.rollout.flow import by_player
from whet.types import Failure, Group, Media, Trajectory, Turn, trajectories_of

B = TypeVar("B", bound=Batch)
NOT_SAMPLED = -1  # turn id of tokens that the policy did not sample


@dataclass
class Row:
    """An append-only token sequence: a prompt, then alternately sampled tokens and observation tokens."""

    prompt_ids: tuple[int, ...]
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    agent: str = ""
    media: tuple[Media, ...] = ()  # of the prompt
    response_media: tuple[Media, ...] = ()  # of observations after the prompt
    routed: list[bytes] = field(default_factory=list, compare=False)  # experts of each token, as `Turn.routed`

    def add(self, token_ids: Sequence[int], turn_id: int = NOT_SAMPLED, turn: Turn | None = None) -> None:
        """Appends the tokens that the policy sampled in `turn`; without a turn, text that it reads."""
        count = len(token_ids)
        self.response_ids += token_ids
        self.turn_ids += [turn_id] * count
        self.log_probs += [0.0] * count if turn is None else turn.log_probs
        runs = ((0, count),) if turn is None else turn.versions
        self.versions += [version for version, length in runs for _ in range(length)]
        self.routed += (turn and turn.routed) or [b""] * count


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Returns a trajectory's rows, as `Trajectory.rows` divides its turns."""
    return [row_of(trajectory, numbers) for numbers in trajectory.rows]


def row_of(trajectory: Trajectory, numbers: Sequence[int]) -> Row:
    """Returns the row of these turns. Turns with `is_trained` false count as observations."""
    first = trajectory.turns[numbers[0]]
    row = Row(first.context_ids, agent=first.agent, media=first.media)
    length = len(first.context_ids)
    for number in numbers:
        turn = trajectory.turns[number]
        row.add(turn.context_ids[length:])
        row.add(turn.token_ids, *((number, turn) if turn.is_trained else ()))
        row.response_media = turn.media[len(row.media) :]
        length = len(turn.context_ids) + len(turn.token_ids)
    return row


def to_batch(groups: Sequence[Group], *, pad_token_id: int, columns: Sequence[str] = ()) -> Batch:
    """Builds the batch of scored groups: `unscored`, then `with_scores`."""
    return with_scores(unscored(groups, pad_token_id=pad_token_id), groups, columns=columns)


def unscored(groups: Sequence[Group], *, pad_token_id: int) -> Batch:
    """Builds the batch without scores: a row for each append-only token sequence of each trajectory, group after group.

    A trajectory that failed before its first token has one row: its prompt and a masked padding token."""
    rows, owners = _rows_and_owners(groups, pad_token_id)
    real_prompts = _real([row.prompt_ids for row in rows]).flip(1)  # padded on the left
    real = _real([row.response_ids for row in rows])
    prompts = _filled(real_prompts, [row.prompt_ids for row in rows], pad_token_id)
    responses = _filled(real, [row.response_ids for row in rows], pad_token_id)
    attention_mask = torch.cat([real_prompts, real], 1).long()
    has_media = any(row.media or row.response_media for row in rows)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask, _positions(rows) if has_media else None),
        "turn_ids": _filled(real, [row.turn_ids for row in rows], NOT_SAMPLED),
        "policy_version": _filled(real, [row.versions for row in rows], 0, torch.int32),
        "rollout_log_probs": _filled(real, [row.log_probs for row in rows], 0.0, torch.float32),
        "uid": _numbered([t.prompt.uid for t in owners]),
        "trajectory_uid": _numbered([t.uid for t in owners]),
        "truncated": torch.tensor([bool(t.turns) and t.turns[-1].finish_reason == "length" for t in owners]),
    }
    objects: dict[str, list[Any]] = {
        "uid_name": [t.prompt.uid for t in owners],
        "trajectory_uid_name": [t.uid for t in owners],
        "data_source": [t.prompt.data_source for t in owners],
        "domain": [t.prompt.domain for t in owners],
        "agent": [row.agent for row in rows],
    }
    if has_media:
        objects |= {MEDIA: [row.media for row in rows], LATER_MEDIA: [row.response_media for row in rows]}
    if (routed := as_column([row.routed for row in rows], real.shape[1])) is not None:
        tensors[ROUTED] = routed
    alive = torch.tensor([trajectory.failure is None for trajectory in owners])[:, None]
    tensors["response_mask"] = ((tensors["turn_ids"] != NOT_SAMPLED) & alive).long()
    return Batch.of(tensors, objects)


def _positions(rows: Sequence[Row]) -> list[torch.Tensor | None] | None:
    """Rotary positions of rows on three axes, computed once for equal prompts; None if no row needs them."""
    prompts: dict[tuple[object, ...], torch.Tensor | None] = {}
    found: list[torch.Tensor | None] = []
    for row in rows:
        if row.response_media:
            ids, media = [*row.prompt_ids, *row.response_ids], row.media + row.response_media
            found.append(rotary_positions(ids, media, len(row.prompt_ids)))
            continue
        if (prompt := (row.prompt_ids, row.media)) not in prompts:
            prompts[prompt] = rotary_positions(*prompt)
        found.append(prompts[prompt])
    return None if all(row is None for row in found) else found


def with_scores(batch: B, groups: Sequence[Group], *, columns: Sequence[str] = (), is_dropped: bool = False) -> B:
    """Adds scores, accuracy and failures of `groups` to their unscored batch, as columns. With `is_dropped` no token of
    the batch is trained on.

    `columns` names numbers that the reward or the environment reports. They become columns [B]; 0 if not reported.
    Raises: DataError for a name in `columns` that no trajectory reports."""
    by_uid = {each.uid: each for each in trajectories_of(by_player(groups))}
    owners = [by_uid[uid] for uid in batch["trajectory_uid_name"]]
    part_names = sorted({name for trajectory in owners for name in trajectory.parts})
    scores = {
        "response_mask": ((batch["turn_ids"] != NOT_SAMPLED) & (not is_dropped)).long(),
        "token_level_scores": _scores(batch, owners),
        "accuracy": torch.tensor([t.accuracy or 0.0 for t in owners]),
        **{name: _reported(name, owners) for name in columns},
    }
    if part_names:
        scores["reward_parts"] = torch.tensor([[t.parts.get(name, 0.0) for name in part_names] for t in owners])
    scored = batch.with_columns(**scores, error=[t.failure for t in owners])
    scored.meta_info["reward_part_names"] = part_names
    return with_failures(scored, {}) if any(t.failure for t in owners) else scored


def with_failures(batch: B, failures: Mapping[str, Failure]) -> B:
    """Masks the rows of failed trajectories, and sets their scores and the columns of providers to 0. `failures`, by
    uid of the trajectory, are added to the column `error`."""
    errors = [failures.get(uid, own) for uid, own in zip(batch["trajectory_uid_name"], batch["error"], strict=True)]
    failed = torch.tensor([error is not None for error in errors])
    given = [name for name in batch.columns() if name in COLUMNS and COLUMNS[name].has_provider]
    found = {name: batch[name] for name in ("response_mask", "token_level_scores", *given)}
    zeroed = {name: each.masked_fill(failed.view(-1, *[1] * (each.ndim - 1)), 0) for name, each in found.items()}
    return batch.with_columns(**zeroed, error=errors)


def _rows_and_owners(groups: Sequence[Group], pad_token_id: int) -> tuple[list[Row], list[Trajectory]]:
    """Returns all rows, and the trajectory that each row belongs to."""
    rows: list[Row] = []
    owners: list[Trajectory] = []
    for trajectory in trajectories_of(by_player(groups)):
        own = rows_of(trajectory) or [Row(trajectory.prompt.token_ids, media=trajectory.prompt.media)]
        for row in own:
            if not row.response_ids:
                row.add([pad_token_id])
        rows += own
        owners += [trajectory] * len(own)
    return rows, owners


def _scores(batch: Batch, owners: Sequence[Trajectory]) -> torch.Tensor:
    """Places scores on tokens, [B, R]. A turn's reward from the environment is on the turn's last token. A trajectory's
    reward is on the last sampled token of its last row; token rewards, if it has some, replace it in this row. The
    reward of an unsampled token moves to the sampled token before it."""
    turn_ids, owner_of = batch["turn_ids"], dict(enumerate(owners))
    sampled, scores = turn_ids != NOT_SAMPLED, torch.zeros(turn_ids.shape, dtype=torch.float64)
    is_end = sampled & (turn_ids != torch.nn.functional.pad(turn_ids[:, 1:], (0, 1), value=NOT_SAMPLED))
    for (row, position), turn_id in zip(is_end.nonzero().tolist(), turn_ids[is_end].tolist(), strict=True):
        scores[row, position] = owner_of[row].turns[turn_id].reward
    paid_at = torch.where(sampled, torch.arange(turn_ids.shape[1]), 0).cummax(1).values  # last sampled position
    for row in {each.uid: row for row, each in owner_of.items() if sampled[row].any()}.values():
        if (rewards := owner_of[row].token_rewards) is None:
            scores[row, paid_at[row, -1]] += owner_of[row].reward or 0.0
        else:
            scores[row].index_add_(0, paid_at[row, : len(rewards)], torch.tensor(rewards, dtype=torch.float64))
    return scores.float()


def _real(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """A mask [B, longest], bool: True at the tokens of each row, False at its padding."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _filled(
    real: torch.Tensor, rows: Sequence[Sequence[float]], padding: float, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A matrix with each row's numbers where `real` is True, and `padding` elsewhere.   [B, W]"""
    column = torch.full(real.shape, padding, dtype=dtype)
    return column.masked_scatter_(real, torch.tensor(list(chain.from_iterable(rows)), dtype=dtype))


def _numbered(names: Sequence[str]) -> torch.Tensor:
    """Numbers the names in the order of their first appearance; equal names have equal numbers.   [B] int64"""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def _reported(name: str, owners: Sequence[Trajectory]) -> torch.Tensor:
    """[B]: the number that the reward or the environment reports under `name`."""
    reported = [{**t.fields, **t.parts} for t in owners]
    scored = [numbers for numbers, t in zip(reported, owners, strict=True) if t.failure is None]
    if scored and not any(name in numbers for numbers in scored):
        there = ", ".join(sorted({each for numbers in scored for each in numbers})) or "nothing"
        raise DataError("reward.columns", name, f"a number that the scores of this step report: {there}")
    return torch.tensor([float(numbers.get(name, 0.0)) for numbers in reported])
