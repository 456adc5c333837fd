# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

DIGEST = "ab" * 32
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes a JSONL file, as runs write theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8")


def record(uid: str, reward: float | None = 1.0, response: str = "4<|im_end|>", **more: Any) -> dict[str, Any]:
    """A line of rollouts/."""
    return {
        "uid": uid,
        "index": 0,
        "data_source": "sums",
        "prompt": "2+2=",
        "response": response,
        "ground_truth": "4",
        "extracted": "4",
        "reward": reward,
        "accuracy": reward,
        "parts": {},
        "tokens": len(response),
        "turns": 1,
        "finish_reason": "stop",
        "mean_log_prob": -0.5,
        "policy_version": 0,
        "failure": None,
        **more,
    }


def two_turns() -> tuple[dict[str, Any], dict[str, Any]]:
    """A trajectory that calls a tool, which answers with an image, and its tokens; two policy versions wrote it."""
    picture = {"kind": "image", "digest": DIGEST, "source": "/gone/picture.png"}
    observation = {"role": "tool", "content": [{"type": "text", "text": "it is"}, {"type": "image"}]}
    steps = [
        {"observation": [], "action": "look", "reward": 0.0},
        {"observation": [observation], "action": "four", "reward": 1.0, "end": [{"role": "user", "content": "Right."}]},
    ]
    tokens = {
        "uid": "0:1:0",
        "tokens": ["lo", "ok", "it", " is", "four"],
        "response_mask": [1, 1, 0, 0, 1],
        "loss_mask": [1, 0, 0, 0, 1],
        "turn_ids": [0, 0, -1, -1, 1],
        "policy_version": [3, 3, 0, 0, 4],
        "rollout_log_probs": [-1.0, -2.0, 0.0, 0.0, -0.5],
        "old_log_probs": [-1.5, -2.0, 0.0, 0.0, -0.25],
        "advantages": [1.0, 1.0, 0.0, 0.0, -1.0],
    }
    return record("0:1:0", response="lookit isfour", media=[picture], steps=steps, turns=2, tokens=3), tokens


def two_agents() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A trajectory in which a solver asks a checker, and the rows of its tokens."""
    steps = [
        {"observation": [], "action": "ask", "reward": 0.0, "player": "solver"},
        {"observation": [], "action": "fine", "reward": 0.0, "agent": "checker", "player": "solver"},
        {"observation": [{"role": "tool", "content": "fine"}], "action": "4", "reward": 1.0, "player": "solver"},
    ]
    asks = {"uid": "0:5:0/solver", "tokens": ["ask", "fine", "4"], "response_mask": [1, 0, 1], "turn_ids": [0, -1, 2]}
    checks = {"uid": "0:5:0/solver", "agent": "checker", "tokens": ["fine"], "response_mask": [1], "turn_ids": [1]}
    return record("0:5:0", steps=steps, turns=3), [asks, checks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two runs: `one` with trajectories of two steps, tokens, a failure, an image, filtered groups and text
    that attacks the page; `deep/two` with metrics alone."""
    one = tmp_path / "runs" / "one"
    write_lines(one / "metrics.jsonl", [{"step": s, "critic/score/mean": s / 4, "val/accuracy": None} for s in (1, 2)])
    write_lines(one / "timings.jsonl", [{"step": s, "time/step": 3.0, "time/rollout": 2.0} for s in (1, 2)])
    (one / "config.yaml").write_text("trainer:\n  total_steps: 9\n", encoding="utf-8")
    failure = {"source": "tool", "message": "it broke", "timed_out": False}
    look, tokens = two_turns()
    write_lines(one / "rollouts/step_000001.jsonl", [record("0:0:0"), record("0:0:1", 0.0, "five"), look])
    hostile, long = record("0:2:0", 0.5, HOSTILE), record("0:2:1", 0.0, "é" * 50, finish_reason="length")
    write_lines(one / "rollouts/step_000002.jsonl", [hostile, long, record("0:3:0", None, "", failure=failure)])
    write_lines(one / "rollouts/dropped_000002.jsonl", [record("0:4:0", dropped_by="dapo")])
    write_lines(one / "tokens/step_000001.jsonl", [tokens])
    (one / "media").mkdir()
    Image.new("RGB", (4, 4), "red").save(one / "media" / f"{DIGEST}.png")
    write_lines(tmp_path / "runs/deep/two/metrics.jsonl", [{"step": 1, "sft/loss": 2.0}])
    return tmp_path / "runs"
