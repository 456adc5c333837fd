# SPDX-License-Identifier: Apache-2.0
"""Score functions that take a DataProto: all items of a call become one batch, and the result is split into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from whet.errors import RewardError
from whet.plugins.migration.protocol import DataProto
from whet.registry import register_part
from whet.rewards.result import RESULT, split_rows
from whet.types import RewardItem

SCORE_COLUMNS = ("token_level_scores", "rm_scores")


@register_part("data_proto")
def data_proto_form() -> tuple[Callable[[Sequence[RewardItem]], RewardBatch], Callable[[object, int], list[object]]]:
    """Returns `make_batch`, which makes a call's argument, and `split_batch_rows`, which splits the call's result."""
    return make_batch, split_batch_rows


class RewardBatch(DataProto):
    """The argument of a score function that takes `data: DataProto`.

    Tensors: `prompts` [B, P] (left-padded with 0), `responses` [B, R] (right-padded with 0), `input_ids` and
    `attention_mask` [B, P + R], `response_mask` [B, R] (1 on the response, 0 on its padding). Objects: `data_source`,
    `ground_truth`, `extra_info`, `reward_model` (a dict with `ground_truth`), `prompt_str`, `solution_str`. The texts
    are also attributes of the batch.
    """

    @property
    def prompts(self) -> list[str]:
        """The decoded prompts."""
        return list(self.non_tensor_batch["prompt_str"])

    @property
    def responses(self) -> list[str]:
        """The decoded responses."""
        return list(self.non_tensor_batch["solution_str"])

    @property
    def ground_truth(self) -> list[object]:
        """The ground truths of the responses, in order."""
        return list(self.non_tensor_batch["ground_truth"])


def make_batch(items: Sequence[RewardItem]) -> RewardBatch:
    """Collects the items into one batch, in order."""
    prompt_length = max(len(item.prompt_ids) for item in items)
    response_length = max(len(item.response_ids) for item in items)
    input_ids = torch.zeros(len(items), prompt_length + response_length, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, item in enumerate(items):
        ids = torch.tensor([*item.prompt_ids, *item.response_ids], dtype=torch.long)
        start = prompt_length - len(item.prompt_ids)
        input_ids[row, start : start + len(ids)] = ids
        attention_mask[row, start : start + len(ids)] = 1
    columns = ("data_source", "ground_truth", "extra_info", "prompt_str", "solution_str")
    objects = {name: [vars(item)[name] for item in items] for name in columns}
    objects["extra_info"] = [dict(item.extra_info) for item in items]  # verl's managers write into it
    return RewardBatch.from_dict(
        tensors={
            "prompts": input_ids[:, :prompt_length],
            "responses": input_ids[:, prompt_length:],
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "response_mask": attention_mask[:, prompt_length:],
        },
        non_tensors={**objects, "reward_model": [{"ground_truth": item.ground_truth} for item in items]},
    )


def split_batch_rows(raw: object, count: int) -> list[object]:
    """Splits a result into rows, as `split_rows` does. Also reads a DataProto (scores in the column
    `token_level_scores`, else `rm_scores`), and a manager's dict with `reward_tensor` and `reward_extra_info`, or the
    pair of the two.  Raises: RewardError."""
    if isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[1], Mapping):
        raw = {"reward_tensor": raw[0], "reward_extra_info": raw[1]}
    if isinstance(raw, Mapping) and "reward_tensor" in raw:
        return split_rows({**(raw.get("reward_extra_info") or {}), "reward": raw["reward_tensor"]}, count)
    if not isinstance(raw, DataProto):
        return split_rows(raw, count)
    name = next((name for name in SCORE_COLUMNS if name in raw), None)
    if name is None:
        found = f"a DataProto of {', '.join(raw.keys()) or 'no column'}"
        raise RewardError(RESULT, found, f"a column {' or '.join(SCORE_COLUMNS)}")
    return split_rows(raw[name], count)
