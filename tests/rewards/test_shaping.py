# SPDX-License-Identifier: Apache-2.0
import re
import time

import pytest

from tests.raising import raises
from whet.config.schema import RewardConfig
from whet.errors import ConfigError
from whet.rewards.pool import build_scorer
from whet.rewards.shaping import format_score, language, length, ngram_repetition
from whet.types import RewardItem


@pytest.mark.parametrize(
    ("text", "n", "score"),
    [
        ("a b c d", 3, 0.0),
        ("a a a a", 3, -0.5),  # two 3-grams, one of them repeats
        ("a b a b a", 2, -0.5),  # ab ba ab ba
        ("the cat The cat", 2, -1 / 3),
        ("好好好好", 3, -0.5),
        ("a a", 3, 0.0),
        ("", 3, 0.0),
    ],
)
def test_repeated_n_grams(text, n, score):
    assert ngram_repetition(text, n=n) == pytest.approx(score)


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, -1), (5, -0.5), (10, 0), (100, 0), (125, -0.25), (200, -1), (999, -1)]
)
def test_length_in_tokens(tokens, score):
    assert length({"response_length": tokens}, shortest=10, longest=100) == score


@pytest.mark.parametrize(
    ("text", "answer", "boxed"),
    [
        ("<think>a</think><answer>b</answer>", 1, 0),
        (" <think>a</think>\n\n<answer>b</answer>\n", 1, 0),
        (r"<think>a</think> so \boxed{b}.", 0, 1),
        (r"<think>a</think><answer>\boxed{b}</answer>", 1, 1),
        (r"<think>\boxed{b}</think> b", 0, 0),
        (r"<think>a</think> \boxed{b", 0, 0),
        ("<think>a</think><answer>b</answer> more", 0, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0, 0),
        ("a</think><answer>b</answer>", 0, 0),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_format_of_tags(text, answer, boxed):
    assert format_score(text) == answer
    assert format_score(text, style="boxed") == boxed


def test_the_options_of_the_format():
    assert format_score("a</think><answer>b</answer>", opened=True) == 1.0
    assert format_score("<think>a</think><answer>b</answer>", opened=True) == 0.0
    assert format_score("Answer:\n7\n", pattern=r"Answer:.\d") == 1.0
    assert format_score("Answer: 7, or 8", pattern=r"Answer: \d") == 0.0
    with raises(ConfigError, "pattern", found=re.compile(r"^'\('")):
        format_score("a", pattern="(")


@pytest.mark.parametrize(
    ("text", "script", "share"),
    [
        ("All of it", "latin", 1.0),
        ("caf\u00e9 \u03c0", "latin", 0.8),
        ("да ok", "cyrillic", 0.5),
        ("答案是 \\frac{1}{2} <answer>5</answer>", "han", 1.0),
        ("答えは", "japanese", 1.0),
        ("答えは", "han", 1 / 3),
        ("정답", "hangul", 1.0),
        ("42", "latin", 1.0),
        (" ", "latin", 0.0),
    ],
)
def test_the_script_of_letters(text, script, share):
    assert language(text, script=script) == pytest.approx(share)


def test_parts_beside_a_function_that_reads_the_answer():
    """Each part must reach the reward: 1 + 0.5 * 1 + 0.25 * -0.2 + 0 + 0.1."""
    config = RewardConfig(
        function=["search_qa", "format", "ngram_repetition", "length", "language"],
        weights=[1.0, 0.5, 0.25, 1.0, 0.1],
        num_workers=0,
    )
    text = "<think>so a a a a a</think> <answer>b</answer>"  # five 3-grams, one of them repeats
    scorer = build_scorer(config)
    [found] = scorer.submit_batch([RewardItem("", text, "b", response_ids=(1, 2, 3))]).result()
    scorer.close()
    assert found.accuracy == 1.0 and found.reward == pytest.approx(1.55)
    assert {name: found.parts[name] for name in config.function} == {
        "search_qa": 1.0, "format": 1.0, "ngram_repetition": pytest.approx(-0.2), "length": 0.0, "language": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("unit", ["a ", "<", "\\", "<think>", "\\boxed{", "好"])
def test_a_long_response_is_read_at_once(unit):
    text, start = unit * (100_000 // len(unit)), time.process_time()
    for function in (ngram_repetition, format_score, language):
        function(text)
    assert time.process_time() - start < 2.0
