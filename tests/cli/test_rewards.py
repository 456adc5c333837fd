# SPDX-License-Identifier: Apache-2.0
"""`whet rewards`, and the examples that it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whet.cli.app import main
from whet.cli.rewards import examples, examples_of
from whet.registry import REQUIRED, REWARDS, Entry
from whet.rewards.adapter import adapt
from whet.types import RewardItem, RewardResult


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["rewards", *arguments])
    assert exit_.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_every_function_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    title, *lines = printed(capsys).splitlines()
    assert title == "reward  reward.function"
    listed = lines[: len(REWARDS.names())]
    assert [line.split()[0] for line in listed] == REWARDS.names()
    assert all(len(line.split()) > 1 for line in listed)


def test_show_prints_rule_fields_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "gsm8k")
    assert "reward gsm8k\n1 if the answer is the number of the ground truth" in out
    assert "reads                       solution_str, ground_truth, prompt_str\n" in out
    assert "reward.kwargs.method        flexible (one of flexible, strict)\n" in out
    assert "\nExamples:\n1  solution_str='5 + 2 = 7', ground_truth='#### 7'\n0  solution_str='7 or 8'" in out


def test_an_alias_shows_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "r1v")
    assert "reward.kwargs.format_weight  0.5 (a number >= 0 and <= 1)" in out and "alias of" in out


def test_show_takes_a_function_of_the_user(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text('def own(solution_str, *, weight: float = 0.5):\n    """The weight."""\n    return weight\n')
    out = printed(capsys, "show", f"{file}:own")
    assert "The weight." in out and "reward.kwargs.weight  0.5" in out and "Examples" not in out


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search("reward: ifevall; .* math, .*'ifeval'", printed(capsys, "show", "ifevall", status=2))


# A function with a required option, an endpoint, has no examples of its own.
SHIPPED = [e for e in REWARDS if e.target.startswith("whet.") and REQUIRED not in e.options.values()]


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_every_example_is_true(entry: Entry) -> None:
    shown = examples_of(entry)
    assert len({reward for _, _, reward, *_ in shown}) > 1, "examples need a good and a bad response"
    assert [reward for reward, _ in examples(entry)] == [reward for _, _, reward, *_ in shown]
    for response, truth, reward, *more in shown:
        given = more[0] if more else {}
        options = {**entry.options, **{name: value for name, value in given.items() if name in entry.options}}
        if "sandbox" in options:
            options["sandbox"] = "unisolated"  # bubblewrap is not installed everywhere
        tokens = tuple(range(len(response.split())))
        item = RewardItem(given.get("data_source", ""), response, truth, response_ids=tokens)
        [outcome] = adapt(entry.load(), kwargs=options, correct_threshold=1.0).score([item])
        assert isinstance(outcome, RewardResult), outcome
        assert outcome.reward == pytest.approx(reward)
