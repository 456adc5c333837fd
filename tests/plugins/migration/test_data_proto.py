# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from whet.plugins.migration.protocol import DataProto
from whet.rewards.adapter import adapt
from whet.types import Failure, Outcome, RewardItem, RewardResult

if TYPE_CHECKING:
    import verl

ITEMS = [
    RewardItem("sums", "5", "5", {"level": 1}, "2+3=", (11, 12, 13), (21, 22)),
    RewardItem("products", "7", "6", {"level": 2}, "2*3=", (14,), (23, 24, 25)),
]


def score(function: Any) -> list[Outcome]:
    return adapt(function, kwargs={}, correct_threshold=1.0).score(ITEMS)


def data_by_name(data: Any) -> torch.Tensor:
    assert data.batch["responses"].tolist() == [[21, 22, 0], [23, 24, 25]]
    assert data.batch["prompts"].tolist() == [[11, 12, 13], [0, 0, 14]]
    assert data.batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 0], [0, 0, 14, 23, 24, 25]]
    assert data.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert data.batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert (data.responses, data.prompts, data.ground_truth) == (["5", "7"], ["2+3=", "2*3="], ["5", "6"])
    return torch.tensor([float(a == b) for a, b in zip(data.responses, data.ground_truth, strict=True)])


def data_by_row(batch: DataProto) -> torch.Tensor:
    """The loop that verl's users write: a [B, R] tensor, paid at the last valid token."""
    reward_tensor = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
    for i in range(len(batch)):
        row = batch[i]
        prompt_length = row.batch["prompts"].shape[-1]
        valid = int(row.batch["attention_mask"][prompt_length:].sum())
        truth = row.non_tensor_batch["reward_model"]["ground_truth"]
        answer = row.non_tensor_batch["solution_str"]
        reward_tensor[i, valid - 1] = 2.0 if answer == truth else -0.5
    return reward_tensor


def data_for_type_checkers_only(batch: verl.DataProto) -> dict[str, Any]:
    return {"reward": torch.tensor([1.0, 0.25]), "acc": [1, 0], "margin": torch.tensor([3.0, 4.0]), "beta": 0.1}


def data_to_data(data: DataProto) -> DataProto:
    scores = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.25]])
    return data.union(DataProto.from_dict(tensors={"token_level_scores": scores}))


def data_to_rm_scores(data: DataProto) -> DataProto:
    return DataProto.from_dict(tensors={"rm_scores": torch.tensor([1.0, 0.5])})


def test_a_data_proto_to_a_tensor_of_answers() -> None:
    assert score(data_by_name) == [RewardResult(1.0, 1.0), RewardResult(0.0, 0.0)]


def test_a_data_proto_to_a_tensor_of_tokens() -> None:
    assert score(data_by_row) == [
        RewardResult(2.0, 1.0, {}, (0.0, 2.0)),
        RewardResult(-0.5, 0.0, {}, (0.0, 0.0, -0.5)),
    ]


def test_a_data_proto_to_a_dict_of_columns() -> None:
    assert score(data_for_type_checkers_only) == [
        RewardResult(1.0, 1.0, {"margin": 3.0, "beta": 0.1}),
        RewardResult(0.25, 0.0, {"margin": 4.0, "beta": 0.1}),
    ]


def test_a_data_proto_to_a_data_proto() -> None:
    assert score(data_to_data) == [
        RewardResult(1.0, 1.0, {}, (0.5, 0.5)),
        RewardResult(0.25, 0.0, {}, (0.0, 0.0, 0.25)),
    ]
    assert score(data_to_rm_scores) == [RewardResult(1.0, 1.0), RewardResult(0.5, 0.0)]


def test_a_data_proto_without_scores_is_a_failure_that_names_its_columns() -> None:
    outcomes = score(lambda data: DataProto.from_dict(tensors={"logits": torch.zeros(2)}))
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert all(name in outcome.message for name in ("logits", "token_level_scores", "rm_scores"))


def test_the_annotation_of_a_manager_beats_the_type_of_its_module() -> None:
    module: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n"
        "REWARD_TYPE = 'sequential'\n"
        "class Manager:\n def __call__(self, batch: DataProto, return_dict=False):\n"
        "  import torch\n  return torch.arange(len(batch.batch['responses']), dtype=torch.float32)\n",
        module,
    )
    adapted = adapt(module["Manager"]().__call__, kwargs={}, correct_threshold=1.0)
    assert adapted.takes_batch and adapted.score(ITEMS) == [RewardResult(0.0, 0.0), RewardResult(1.0, 1.0)]
