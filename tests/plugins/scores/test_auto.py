# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from tests.raising import check_fields, raises
from whet.config.schema import RewardConfig
from whet.errors import RewardError
from whet.plugins.scores import code
from whet.plugins.scores.auto import SOURCES, find
from whet.registry import REWARDS
from whet.rewards.pool import build_scorer
from whet.types import Failure, RewardItem


def scored(*items):
    scorer = build_scorer(RewardConfig(function="auto", num_workers=0))
    outcomes = scorer.submit_batch([RewardItem(*item) for item in items]).result()
    scorer.close()
    return outcomes


def test_each_source_has_its_function():
    choice = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    outcomes = scored(
        ("openai/gsm8k", "#### 7", "7"),
        ("openai/gsm8k", "7", "7"),  # strict, as in verl
        ("HuggingFaceH4/MATH-500", r"\boxed{7}", "7"),
        ("math_dapo", r"\boxed{8}", "7"),
        ("aime_2024", r"\boxed{7}", "7"),
        ("hiyouga/geometry3k", r"\boxed{7}", "7"),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}),
        ("google/IFEval", "no commas", choice),
        ("google/IFEval", "no, commas", "", choice),  # in extra_info
        ("cais/mmlu", "The answer is B", "B"),
    )
    assert [each.reward for each in outcomes] == pytest.approx([1, 0, 1, -1, 1, 0.9, 1, 1, 0, 1])
    assert [each.accuracy for each in outcomes] == [1, 0, 1, 0, 1, 1, 1, 1, 0, 1]


def test_every_function_of_the_table_exists_and_takes_its_options():
    for source, (name, options) in SOURCES.items():
        assert set(options) <= set(REWARDS[name].options), source
        REWARDS[name].check(options, f"{source}: ")


def test_programs_of_verls_sources_have_its_tolerance(monkeypatch):
    monkeypatch.setattr(
        "whet.plugins.scores.code.compute_score.__kwdefaults__",
        {**code.compute_score.__kwdefaults__, "sandbox": "unisolated"},
    )
    truth = {"inputs": [""], "outputs": ["0.33333"]}
    outcomes = scored(
        *((source, "```python\nprint(1 / 3)\n```", truth) for source in ("apps", "taco", "codecontests", "codeforces")),
        ("openai/openai_humaneval", "```python\nprint(1 / 3)\n```", truth),
        ("apps", "```python\nprint(0.3334)\n```", truth),
    )
    assert [each.reward for each in outcomes] == [1, 1, 1, 1, 0, 0]


def test_an_unknown_source_is_named():
    [failed] = scored(("openai/gsm9k", "7", "7"))
    assert isinstance(failed, Failure)
    with pytest.raises(RewardError) as caught:
        find("openai/gsm9k")
    change = re.compile("'openai/gsm8k'.*reward.function")
    check_fields(
        caught.value, "data_source", found="openai/gsm9k", expected=re.compile("openai/gsm8k, "), change=change
    )
    assert failed.message == str(caught.value)


def test_a_function_that_is_not_registered_is_named(monkeypatch):
    monkeypatch.setitem(SOURCES, "own", ("nothing_of_that_name", {}))
    with raises(
        RewardError, "data_source", found=re.compile("'own'.*'nothing_of_that_name'"), expected=re.compile("gsm8k")
    ):
        find("own")
