# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Dict, List  # noqa: UP035  (users write these)

import pytest
import torch

from tests.raising import raises
from whet.errors import RewardError, SandboxError
from whet.rewards.adapter import adapt
from whet.types import Failure, Message, RewardItem, RewardResult

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
    assert re.search(r"\b1\b.*\b2\b", outcomes[0].message)


def test_one_bad_result_in_a_batch_is_one_failure():
    outcomes = score(lambda reward_inputs: [None, 1.0])
    assert isinstance(outcomes[0], Failure) and outcomes[1] == RewardResult(1.0, 1.0)


@pytest.mark.parametrize("function", [lambda x: 1.0, lambda a, b: 1.0, lambda: 1.0, lambda ground_truth: 1.0])
def test_what_cannot_be_told_apart_is_an_error_that_shows_the_forms(function):
    for form in ("data_source, solution_str", "reward_input:", "reward_inputs:", "DataProto", "predict, ground_truth"):
        with raises(RewardError, re.compile("<lambda>"), expected=re.compile(form)):
            adapt(function, kwargs={}, correct_threshold=1.0)


@pytest.mark.parametrize(
    ("function", "kwargs", "fields"),
    [
        (with_options, {"rigth": 2}, {"key": "reward.kwargs.rigth", "expected": re.compile("right, wrong$")}),
        (
            two_fields,
            {"ground_truth": "5"},
            {"key": "reward.kwargs.ground_truth", "change": re.compile("reward.kwargs")},
        ),
        (lambda solution_str, tokenizer: 1.0, {}, {"key": re.compile(r"<lambda>.*: tokenizer$"), "found": None}),
        (lambda data, tokenizer: 1.0, {}, {"key": re.compile(": tokenizer$"), "found": None}),
        (
            lambda solution_str, ground_truths: 1.0,
            {},
            {"key": re.compile(": ground_truths$"), "change": re.compile("reward.kwargs.ground_truths")},
        ),
        (max, {}, {"key": "<built-in function max>"}),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error_before_the_first_call(function, kwargs, fields):
    with raises(RewardError, **fields):
        adapt(function, kwargs=kwargs, correct_threshold=1.0)


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


# TRL's form, and modules of EasyR1.

ROWS = [
    RewardItem("sums", "5", "5", {"level": 1, "hint": "2+3"}, "2+3=", (11, 12), (21, 22)),
    RewardItem("sums", "7 7", "6", {"level": 2}, "2*3=", (14,), (23, 24, 25)),
]
CHAT = [
    RewardItem("sums", "5", "5", {"level": 1}, "2+3=", messages=(Message("system", "sum"), Message("user", "2+3="))),
    RewardItem("sums", "7", "6", {"level": 2}, "2*3=", messages=(Message("user", "2*3="),)),
]


def test_trls_form_of_texts():
    def unique(completions, **kwargs):
        return [float(len(set(completion))) for completion in completions]

    def first_of_both(prompts, completions, completion_ids):
        return [float(len(p) + len(c) + ids[0]) for p, c, ids in zip(prompts, completions, completion_ids, strict=True)]

    def by_columns(completions, solution, level, hint, weight=0.5, bonus=0.0, absent=3.0):
        assert (solution, level, hint) == (["5", "6"], [1, 2], ["2+3", None])
        return [float(c == s) * weight + bonus + absent for c, s in zip(completions, solution, strict=True)]

    def all_columns(completions, **kwargs):
        names = ["answer", "completion_ids", "data_source", "ground_truth", "hint", "level", "prompts", "solution"]
        assert sorted(kwargs) == names
        return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]

    def own_field(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert rewards(unique, ROWS) == [1.0, 2.0]
    assert rewards(first_of_both, ROWS) == [4 + 1 + 21, 4 + 3 + 23]
    assert rewards(by_columns, ROWS, weight=2.0, bonus=0.25) == [5.25, 3.25]
    assert rewards(all_columns, ROWS) == [1.0, 0.0]
    assert rewards(own_field, [RewardItem("s", "x", "y", {"answer": "x"})]) == [1.0]  # the row's field comes first
    assert adapt(unique, kwargs={}, correct_threshold=1.0).takes_batch


def test_trls_form_of_conversations():
    def contents(completions, prompts, **kwargs):
        assert prompts[0] == [{"role": "system", "content": "sum"}, {"role": "user", "content": "2+3="}]
        assert [len(prompt) for prompt in prompts] == [2, 1]
        texts = [completion[0]["content"] for completion in completions]
        return [float(text == answer) for text, answer in zip(texts, kwargs["answer"], strict=True)]

    def annotated(completions: list[list[dict[str, str]]], prompts, ground_truth) -> list[float]:
        assert prompts == [[{"role": "user", "content": "2+3="}], [{"role": "user", "content": "2*3="}]]
        return [float(each[-1]["content"] == truth) for each, truth in zip(completions, ground_truth, strict=True)]

    def texts(completions: list[str], prompts) -> list[float]:
        return [float(len(prompt + text)) for prompt, text in zip(prompts, completions, strict=True)]

    turns = {"messages": [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "5"}]}
    assert rewards(contents, CHAT) == [1.0, 0.0]
    assert rewards(annotated, ROWS) == [1.0, 0.0]  # the prompts of the data are texts
    assert rewards(texts, CHAT) == [5.0, 5.0]
    assert rewards(
        lambda completions: [len(c) for c in completions], [RewardItem("s", "5", "5", trajectory=turns)]
    ) == [1]
    ended = {**turns, "limit": None}  # the environment spoke last
    of_chat = [RewardItem("s", "5", "5", trajectory=ended, messages=(Message("user", "?"),))]
    assert rewards(lambda completions: [float(c[-1]["role"] == "assistant") for c in completions], of_chat) == [1.0]
    several = RewardItem("s", "5", "5", trajectory=turns, messages=(Message("user", "?"),))
    assert rewards(lambda completions: [len(c) for c in completions], [several]) == [2]


def test_trls_form_may_be_async_an_object_and_leave_rows_out():
    async def later(completions, level, **kwargs):
        await asyncio.sleep(0)
        return [float(each) for each in level]

    class Longest:
        def __init__(self, limit):
            self.limit = limit

        def __call__(self, completions, completion_ids, **kwargs):
            return [None if len(ids) > self.limit else 1.0 for ids in completion_ids]

    assert rewards(later, ROWS) == [1.0, 2.0]
    assert rewards(functools.partial(later, scale=1.0), ROWS) == [1.0, 2.0]
    scored, left_out = score(Longest(2), ROWS)
    assert scored == RewardResult(1.0, 1.0)
    assert isinstance(left_out, Failure)
    assert left_out.message == "the function returned None for this response: it does not score it"


def test_trls_form_says_which_field_is_missing():
    def missing(completions, difficulty):
        return [1.0] * len(completions)

    def of_trainer(completions, trainer_state):
        return [1.0] * len(completions)

    said = {each.message for each in score(missing, ROWS)}
    assert len(said) == 1
    assert "['difficulty']" in said.pop()
    assert rewards(missing, ROWS, difficulty=1) == [1.0, 1.0]
    with raises(RewardError, re.compile(": trainer_state$"), found=None):
        score(of_trainer, ROWS)
    with raises(RewardError, "reward.kwargs.completions"):
        score(missing, ROWS, completions=[])


def test_what_trls_functions_log_travels_with_the_scores():
    def logging(completions, log_extra, log_metric):
        log_extra("first", [text[0] for text in completions])
        log_extra("words", [len(text.split()) for text in completions])
        log_extra("note", "both")
        for number in (1, 2.5):
            log_metric("mean_length", number)
        return [1.0, None]

    scored, left_out = score(logging, ROWS)
    assert scored == RewardResult(1.0, 1.0, logged={"mean_length": 1.75, "first": "5", "words": 1.0, "note": "both"})
    assert isinstance(left_out, Failure)

    def later(completions, log_metric=None, log_extra=None, **kwargs):  # as in trl.rewards, for calls without a trainer
        log_extra("longest", [float("inf")] * len(completions))
        log_metric("one", 1)
        return [1.0] * len(completions)

    assert [each.logged for each in score(later, ROWS)] == [{"one": 1.0, "longest": "inf"}] * 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda log_extra, log_metric: log_extra("a", [1]), "a: 1 "),
        (lambda log_extra, log_metric: log_metric("b", "x"), "log_metric('b'): 'x' (str)"),
    ],
)
def test_what_trls_functions_log_is_checked(call, told):
    def logging(completions, log_extra, log_metric):
        call(log_extra, log_metric)
        return [1.0, 1.0]

    assert all(told in each.message for each in score(logging, ROWS))


EASYR1 = """
from typing import Any
REWARD_NAME = "sums"
REWARD_TYPE = "{kind}"
def accuracy_reward(response, ground_truth):
    return 1.0 if response.strip() == ground_truth else 0.0
"""
EACH = "right = accuracy_reward(each['response'], each['ground_truth'])"
OVERALL = "{'overall': 0.9 * right + 0.1, 'format': 1.0, 'accuracy': right}"


ONE = f"\n {EACH}\n return {OVERALL}"
ALL = f"\n out = []\n for each in rows:\n  {EACH}\n  out.append({OVERALL})\n return out"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("sequential", f"def f(each: dict[str, Any], format_weight=0.1):{ONE}"),
        ("sequential", f"def f(each, **kwargs):{ONE}"),
        ("sequential", f"def f(each: RewardInput):{ONE}"),
        ("batch", f"def f(rows: list[dict[str, Any]]):{ALL}"),
        ("batch", f"def f(rows, **kwargs):{ALL}"),
    ],
)
def test_modules_of_easyr1(kind, code):
    module = {}
    exec("from __future__ import annotations\n" + EASYR1.replace("{kind}", kind) + code, module)
    assert score(module["f"]) == [RewardResult(1.0, 1.0, {"format": 1.0}), RewardResult(0.1, 0.0, {"format": 1.0})]
    assert adapt(module["f"], kwargs={}, correct_threshold=1.0).takes_batch == (kind == "batch")


def test_a_sandbox_that_is_lost_is_told_from_a_reward_that_fails():
    def lost(solution_str):
        raise SandboxError("no bubblewrap here; install it")

    async def later(solution_str):
        return lost(solution_str)

    expected = Failure("sandbox", "no bubblewrap here; install it")
    assert score(lost) == score(later) == [expected] * 2
    adapted = adapt(later, kwargs={}, correct_threshold=1.0)
    assert asyncio.run(adapted.score_one(ITEMS[0])) == expected
