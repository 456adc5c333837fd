# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_runs import whet
from whet.config import TrainConfig
from whet.trainers.build import train

ONE: dict[str, Any] = {
    "uid": "0:7:1",
    "data_source": "products",
    "prompt": "2*3=",
    "response": "<calc>2*3</calc>6\n6",
    "media": [{"kind": "image", "digest": "ab12", "source": "cat.png"}],
    "ground_truth": "6",
    "extracted": "6",
    "reward": 1.5,
    "accuracy": 1.0,
    "parts": {"exact": 1.0, "format": 0.5},
    "tokens": 9,
    "turns": 2,
    "finish_reason": "length",
    "policy_version": 3,
    "failure": None,
    "steps": [
        {"observation": [{"role": "user", "content": "2*3="}], "action": "<calc>2*3</calc>", "reward": 0.0},
        {
            "observation": [{"role": "tool", "content": "6"}],
            "action": "6",
            "reward": 0.5,
            "end": [{"role": "user", "content": "Right."}],
        },
    ],
}
FAILED: dict[str, Any] = {
    "uid": "0:8:0",
    "data_source": "",
    "prompt": "a\nlong [red]prompt[/]",
    "response": "",
    "parts": {},
    "ground_truth": "x",
    "reward": None,
    "accuracy": None,
    "tokens": 0,
    "turns": 0,
    "finish_reason": None,
    "failure": {"source": "environment", "message": "it broke", "timed_out": False},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run/rollouts").mkdir(parents=True)
    lines = [ONE, FAILED]
    Path("run/rollouts/step_000004.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Path("run")


def by_turn(uids: list[str]) -> list[str]:
    """One of each group before the second of any."""
    groups = list(dict.fromkeys(uid.rpartition(":")[0] for uid in uids))
    return sorted(uids, key=lambda uid: (int(uid.rpartition(":")[2]), groups.index(uid.rpartition(":")[0])))


def test_prompts_take_turns_and_a_right_response_has_a_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {**ONE, "finish_reason": "stop", "steps": [], "media": [], "response": "6"}
    uids = [f"0:{prompt}:{number}" for prompt in (3, 1) for number in range(3)]
    rows = [{**plain, "uid": uid, "accuracy": float(uid[-1] != "1"), "reward": 1.0} for uid in uids]
    Path("run/rollouts/step_000004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert whet("show", "run", "--limit", "4") == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert [each for each in shown if each in uids] == ["0:3:0", "0:1:0", "0:3:1", "0:1:1"]
    assert [each for each in shown if each in ("why", "verdict")] == ["verdict", "verdict", "why", "why"]


def test_a_trajectory_is_shown_with_turns_media_reward_and_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("show", "run") == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "run/rollouts/step_000004.jsonl: 2 responses",
        "",
        "0:7:1  products",
        "prompt  2*3=",
        "image  cat.png (digest ab12)",
        "response (turn 1)  <calc>2*3</calc>",
        "tool (turn 2)  6",
        "response (turn 2, reward 0.5)  6",
        "user (end)  Right.",
        "reward 1.5 (exact 1, format 0.5)  9 tokens, 2 turns, weights of step 3",
        "why  cut off: data.max_response_length; read '6', expected '6'",
        "",
        "0:8:0",
        "prompt",
        "a",
        "long [red]prompt[/]",
        "response",
        "reward none  0 tokens",
        "why  failed in environment: it broke",
    ]


def test_the_tokens_of_an_image_are_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pads = "<|vision_start|>" + "<|image_pad|>" * 320 + "<|vision_end|>"
    lines = [{**ONE, "prompt": f"{pads}<b><b>?"}, {**FAILED, "prompt": "<b><b>"}]  # the second has no media
    Path("run/rollouts/step_000004.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert whet("show", "run") == 0
    shown = capsys.readouterr().out
    assert "prompt  <|vision_start|><|image_pad|>×320<|vision_end|><b>×2?\n" in shown and "prompt  <b><b>\n" in shown


def test_what_is_shown_is_chosen_sorted_and_limited(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("show", "run", "--where", "failure", "--sort", "length") == 0
    shown = capsys.readouterr().out
    assert "0:8:0" in shown and "0:7:1" not in shown
    assert whet("show", "run", "--sort", "length", "--limit", "1") == 0
    shown = capsys.readouterr().out
    assert "2 responses, the first 1; --limit shows more" in shown and "0:8:0" in shown and "0:7:1" not in shown
    assert whet("show", "run", "--step", "5") == 2
    assert "nothing of step 5" in capsys.readouterr().err


def test_two_runs_stand_beside_each_other(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path("other.jsonl")
    other.write_text(json.dumps({**ONE, "steps": [], "reward": 0.0, "accuracy": 0.0, "response": "seven"}) + "\n")
    assert whet("show", "run", "--other", "other.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run/rollouts/step_000004.jsonl beside other.jsonl: 1 response"
    assert any("response (turn 1)  <calc>2*3</calc>" in line and "response  seven" in line for line in lines)


def test_groups_that_a_run_dropped_are_shown_with_the_filter(
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dapo = {"algorithm.filter.name": "dapo", "algorithm.filter.max_refills": 1, "actor.mini_batch_size": 2}
    trained = train(
        train_config(dapo), reward=lambda solution_str: {"score": 1.0, "acc": "7" in solution_str}, data=additions
    )
    capsys.readouterr()
    file = tmp_path / "run/rollouts/dropped_000002.jsonl"
    uids = [json.loads(line)["uid"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(uids) == 4 * trained.history[1]["filter/dropped_groups"] > 0
    assert whet("show", str(tmp_path / "run"), "--dropped", "--limit", "1000") == 0  # of the last step
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{file}: {len(uids)} responses"
    assert [line.split()[0] for line in shown if line.split()[:1] and line.split()[0] in uids] == by_turn(uids)
    why = [line for line in shown if line.startswith("why")]
    assert len(why) == len(uids) and all("dropped by dapo, which reads the group's accuracy" in line for line in why)
    assert whet("show", str(tmp_path / "run"), "--step", "2") == 0
    assert "dropped by" not in capsys.readouterr().out
