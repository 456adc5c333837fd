# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Dict, List  # noqa: UP035  (users write these)

import pytest
import torch

from whet.errors import RewardError
from whet.protocol import DataProto
from whet.rewards.adapter import adapt
from whet.types import Failure, RewardItem, RewardResult

if TYPE_CHECKING:
    import verl

ITEMS = [
    RewardItem("sums", "5", "5", {"level": 1}, "2+3=", (11, 12, 13), (21, 22)),
    RewardItem("products", "7", "6", {"level": 2}, "2*3=", (14,), (23, 24, 25)),
]


def score(function, items=ITEMS, threshold=1.0, **kwargs):
    return adapt(function, kwargs=kwargs, correct_threshold=threshold).score(items)


def rewards(function, items=ITEMS, **kwargs):
    return [outcome.reward for outcome in score(function, items, **kwargs)]


# One answer, by field.


def four_fields(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + extra_info["level"] * (data_source == "products")


def two_fields(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def with_options(solution_str, ground_truth, *, right=1.0, wrong=0.0):
    return right if solution_str == ground_truth else wrong


def any_keyword(solution_str, **kwargs):
    assert sorted(kwargs) == ["bonus", "data_source", "extra_info", "ground_truth"]
    return float(solution_str == kwargs["ground_truth"]) + kwargs["bonus"]


def only_keywords(**kwargs):
    return float(kwargs["solution_str"] == kwargs["ground_truth"])


def old_easyr1(predict: str, ground_truth: str) -> dict[str, float]:
    right = float(predict == ground_truth)
    return {"overall": 0.9 * right + 0.1, "format": 1.0, "accuracy": right}


def test_fields_are_passed_by_name():
    assert rewards(four_fields) == [1.0, 2.0]
    assert rewards(two_fields) == [1.0, 0.0]
    assert rewards(lambda prompt_str, solution_str: len(prompt_str + solution_str)) == [5.0, 5.0]


def test_options_are_passed_and_keywords_accepted():
    assert rewards(with_options, wrong=-1.0) == [1.0, -1.0]
    assert rewards(any_keyword, bonus=0.5) == [1.5, 0.5]
    assert rewards(only_keywords) == [1.0, 0.0]
    assert rewards(functools.partial(with_options, right=3.0)) == [3.0, 0.0]


def test_the_old_easyr1_form():
    assert score(old_easyr1) == [RewardResult(1.0, 1.0, {"format": 1.0}), RewardResult(0.1, 0.0, {"format": 1.0})]


class Judge:
    def __call__(self, solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    def score(self, reward_input: dict[str, Any]) -> float:
        return float(reward_input["response"] == reward_input["ground_truth"])


def test_objects_and_methods_are_functions():
    assert rewards(Judge()) == [1.0, 0.0]
    assert rewards(Judge().score) == [1.0, 0.0]


# One answer as a dict, all answers as a list of dicts.


def expected_dict(item: RewardItem) -> dict[str, Any]:
    return {
        "response": item.solution_str,
        "response_length": len(item.response_ids),
        "ground_truth": item.ground_truth,
        "prompt": item.prompt_str,
        "data_source": item.data_source,
        "extra_info": item.extra_info,
        "trajectory": {
            "messages": [{"role": "assistant", "content": item.solution_str}],
            "turn_rewards": [0.0],
            "fields": {},
            "limit": None,
        },
    }


def by_dict_annotation(sample: dict[str, Any]) -> float:
    assert sample in [expected_dict(item) for item in ITEMS]
    return float(sample["response"] == sample["ground_truth"])


def by_old_dict_annotation(data: Dict[str, Any]) -> float:  # noqa: UP006
    return float(data["response_length"])


def by_mapping_annotation(x: Mapping[str, Any], scale: float = 2.0) -> float:
    return scale * x["extra_info"]["level"]


def by_dict_name(reward_input):
    return float(reward_input["response"] == reward_input["ground_truth"])


def by_list_annotation(samples: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    assert samples == [expected_dict(item) for item in ITEMS]
    return [{"overall": sample["extra_info"]["level"] + format_weight, "accuracy": 0.0} for sample in samples]


def by_old_list_annotation(data: List[Dict[str, Any]]) -> List[float]:  # noqa: UP006
    return [float(sample["response_length"]) for sample in data]


def by_sequence_annotation(x: Sequence[Mapping[str, Any]]):
    return torch.tensor([float(sample["response_length"]) for sample in x])


def by_list_name(reward_inputs):
    return [float(sample["response_length"]) for sample in reward_inputs]


def plural_fields(data_sources, solution_strs, ground_truths, extra_infos=None, **kwargs):
    return [
        float(answer == truth) + info["level"]
        for answer, truth, info in zip(solution_strs, ground_truths, extra_infos, strict=True)
    ]


@pytest.mark.parametrize(
    ("function", "expected", "takes_batch"),
    [
        (by_dict_annotation, [1.0, 0.0], False),
        (by_old_dict_annotation, [2.0, 3.0], False),
        (by_mapping_annotation, [2.0, 4.0], False),
        (by_dict_name, [1.0, 0.0], False),
        (by_list_annotation, [1.1, 2.1], True),
        (by_old_list_annotation, [2.0, 3.0], True),
        (by_sequence_annotation, [2.0, 3.0], True),
        (by_list_name, [2.0, 3.0], True),
        (plural_fields, [2.0, 2.0], True),
    ],
)
def test_dicts_and_lists_by_annotation_and_by_name(function, expected, takes_batch):
    assert rewards(function) == pytest.approx(expected)
    assert adapt(function, kwargs={}, correct_threshold=1.0).takes_batch is takes_batch


def test_an_annotation_outweighs_a_name():
    def listed(reward_input: list[dict[str, Any]]) -> list[float]:
        return [1.0] * len(reward_input)

    def single(reward_inputs: dict[str, Any]) -> float:
        return float(reward_inputs["response"] == "5")

    assert rewards(listed) == [1.0, 1.0]
    assert rewards(single) == [1.0, 0.0]


def test_no_items_no_call():
    def fails(reward_inputs):
        raise AssertionError("called")

    assert score(fails, []) == [] and score(two_fields, []) == []


# DataProto.


def data_by_name(data):
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


def data_for_type_checkers_only(batch: verl.DataProto):
    return {"reward": torch.tensor([1.0, 0.25]), "acc": [1, 0], "margin": torch.tensor([3.0, 4.0]), "beta": 0.1}


def data_to_data(data: DataProto) -> DataProto:
    scores = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.25]])
    return data.union(DataProto.from_dict(tensors={"token_level_scores": scores}))


def data_to_rm_scores(data: DataProto) -> DataProto:
    return DataProto.from_dict(tensors={"rm_scores": torch.tensor([1.0, 0.5])})


def test_a_data_proto_to_a_tensor_of_answers():
    assert score(data_by_name) == [RewardResult(1.0, 1.0), RewardResult(0.0, 0.0)]


def test_a_data_proto_to_a_tensor_of_tokens():
    assert score(data_by_row) == [
        RewardResult(2.0, 1.0, {}, (0.0, 2.0)),
        RewardResult(-0.5, 0.0, {}, (0.0, 0.0, -0.5)),
    ]


def test_a_data_proto_to_a_dict_of_columns():
    assert score(data_for_type_checkers_only) == [
        RewardResult(1.0, 1.0, {"margin": 3.0, "beta": 0.1}),
        RewardResult(0.25, 0.0, {"margin": 4.0, "beta": 0.1}),
    ]


def test_a_data_proto_to_a_data_proto():
    assert score(data_to_data) == [
        RewardResult(1.0, 1.0, {}, (0.5, 0.5)),
        RewardResult(0.25, 0.0, {}, (0.0, 0.0, 0.25)),
    ]
    assert rewards(data_to_rm_scores) == [1.0, 0.5]


def test_a_data_proto_without_scores_is_a_failure_that_names_its_columns():
    outcomes = score(lambda data: DataProto.from_dict(tensors={"logits": torch.zeros(2)}))
    assert [type(outcome) for outcome in outcomes] == [Failure, Failure]
    assert "no column token_level_scores or rm_scores; it has logits" in outcomes[0].message


# Async.


def test_async_functions_are_awaited_on_one_loop():
    loops = []

    async def one(solution_str, ground_truth):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    async def every(reward_inputs):
        return await asyncio.gather(*(one(each["response"], each["ground_truth"]) for each in reward_inputs))

    assert rewards(one) == [1.0, 0.0]
    assert len(set(loops)) == 1 and len(loops) == 2
    assert rewards(every) == [1.0, 0.0]


# What goes wrong.


def test_an_exception_fails_its_item_only_and_says_type_text_and_place(caplog):
    def picky(solution_str):
        if solution_str == "5":
            raise ValueError("five\nis bad")
        return 1.0

    with caplog.at_level(logging.WARNING):
        outcomes = score(picky, [*ITEMS, *ITEMS])
    assert [outcome == RewardResult(1.0, 1.0) for outcome in outcomes] == [False, True, False, True]
    assert outcomes[0].source == "reward"
    assert outcomes[0].message.startswith("ValueError: five is bad (") and "test_adapter.py:" in outcomes[0].message
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None


def test_a_long_message_is_cut():
    def shouts(solution_str):
        raise ValueError("x" * 100_000)

    assert len(score(shouts)[0].message) < 1000


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError(), asyncio.CancelledError()])
def test_whatever_is_raised_is_a_failure(error):
    def raises(solution_str):
        raise error

    assert type(error).__name__ in score(raises)[0].message


def test_ctrl_c_is_not_a_failure():
    def interrupted(solution_str):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


def test_a_wrong_number_of_results_fails_them_all():
    outcomes = score(lambda reward_inputs: [1.0])
    assert [outcome.source for outcome in outcomes] == ["reward", "reward"]
    assert "1 entries for 2 responses" in outcomes[0].message


def test_one_bad_result_in_a_batch_is_one_failure():
    outcomes = score(lambda reward_inputs: [None, 1.0])
    assert isinstance(outcomes[0], Failure) and outcomes[1] == RewardResult(1.0, 1.0)


@pytest.mark.parametrize("function", [lambda x: 1.0, lambda a, b: 1.0, lambda: 1.0, lambda ground_truth: 1.0])
def test_what_cannot_be_told_apart_is_an_error_that_shows_the_forms(function):
    with pytest.raises(RewardError, match="cannot recognise") as caught:
        adapt(function, kwargs={}, correct_threshold=1.0)
    for form in ("data_source, solution_str", "reward_input:", "reward_inputs:", "DataProto", "predict, ground_truth"):
        assert form in str(caught.value)


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        (with_options, {"rigth": 2}, "reward.kwargs.rigth"),
        (with_options, {"rigth": 2}, "its options are right, wrong"),
        (two_fields, {"ground_truth": "5"}, "remove it from reward.kwargs"),
        (lambda solution_str, tokenizer: 1.0, {}, "needs a value for 'tokenizer'"),
        (lambda data, tokenizer: 1.0, {}, "needs a value for 'tokenizer'"),
        (lambda solution_str, ground_truths: 1.0, {}, "needs a value for 'ground_truths'"),
        (max, {}, "no signature"),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error_before_the_first_call(function, kwargs, said):
    with pytest.raises(RewardError) as caught:
        adapt(function, kwargs=kwargs, correct_threshold=1.0)
    assert said in str(caught.value)


# A whole trajectory.


def whole(trajectory):
    return sum(trajectory["turn_rewards"]) + len(trajectory["messages"]) + trajectory["fields"].get("bonus", 0.0)


def wholes(trajectories, ground_truths):
    return [whole(trajectory) + float(truth) for trajectory, truth in zip(trajectories, ground_truths, strict=True)]


def whole_in_a_dict(reward_input: dict[str, Any]) -> float:
    return whole(reward_input["trajectory"])


def test_a_function_may_read_the_whole_trajectory():
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    of_two = {"messages": messages, "turn_rewards": [0.25, 0.5], "fields": {"bonus": 8.0}, "limit": "turns"}
    items = [RewardItem("games", "a b", "16", trajectory=of_two), ITEMS[0]]  # the second has one turn, of one message
    assert rewards(whole, items) == [0.75 + 2 + 8, 1.0]
    assert rewards(wholes, items) == [0.75 + 2 + 8 + 16, 1.0 + 5]
    assert rewards(whole_in_a_dict, items) == [0.75 + 2 + 8, 1.0]
