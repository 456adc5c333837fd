# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from whet.registry import REWARDS
from whet.rewards.math import geo3k, math_dapo


@pytest.mark.parametrize("name", ["math_dapo", "aime"])
def test_plus_and_minus_one(name):
    score = REWARDS[name].load()
    assert score is math_dapo
    assert score(r"So \boxed{\frac12}", "0.5") == {"reward": 1.0, "acc": 1.0, "pred": r"\frac{1}{2}"}
    assert score("Answer: 8", "7") == {"reward": -1.0, "acc": 0.0, "pred": "8"}
    assert score("", "7") == {"reward": -1.0, "acc": 0.0, "pred": None}
    assert score(r"<think>\boxed{7}</think> 8", "7")["reward"] == -1.0


RESPONSES = {  # right and well formed, right, well formed, neither
    "geo3k": (r"<think>a</think> \boxed{7}", r"\boxed{7}", r"<think>a</think> \boxed{8}", r"\boxed{8}"),
    "r1v": (
        "<think>a</think><answer>7</answer>",
        "<answer>7</answer>",
        "<think>a</think><answer>8</answer>",
        "<answer>8</answer>",
    ),
}


@pytest.mark.parametrize(("name", "rewards"), [("geo3k", (1, 0.9, 0.1, 0)), ("r1v", (1, 0.5, 0.5, 0))])
def test_weighted_accuracy_and_format(name, rewards):
    found = [geo3k(text, "7", **REWARDS[name].options) for text in RESPONSES[name]]
    assert [each["reward"] for each in found] == pytest.approx(rewards)
    assert [(each["accuracy"], each["format"]) for each in found] == [(1, 1), (1, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    "text",
    [
        *(text for texts in RESPONSES.values() for text in texts),
        "<think>a</think>",
        r"\boxed{7}</think>",
        "<think>a</think> <answer>7</answer>\n",
        "a<think>b</think><answer>7</answer>",
    ],
)
def test_the_format_is_that_of_easyr1_and_verl(text):
    boxed = float(bool(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", text.strip(), re.DOTALL)))
    tagged = float(bool(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text.strip(), re.DOTALL)))
    assert geo3k(text, "7")["format"] == boxed
    assert geo3k(text, "7", style="answer")["format"] == tagged
