# SPDX-License-Identifier: Apache-2.0
"""The files of a run that `whet view` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.trainers import run as runs
from whet.trainers.build import build, train
from whet.trainers.rl import fit
from whet.trainers.run import copy_media
from whet.types import Group, Media, Prompt, RewardItem, RewardResult, Trajectory, Turn

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def length(solution_str: str) -> float:
    return len(solution_str) / 10


def test_tokens_have_what_no_function_reads_and_training_keeps_its_bits(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    changes = {"trainer.log_tokens": 1, "trainer.run_dir": str(tmp_path / "logged"), "actor.mini_batch_size": None}
    logged = train(train_config(changes), reward=length, data=additions)
    train(
        train_config({**changes, "trainer.log_tokens": 0, "trainer.run_dir": str(tmp_path / "plain")}),
        reward=length,
        data=additions,
    )
    assert (tmp_path / "logged/metrics.jsonl").read_bytes() == (tmp_path / "plain/metrics.jsonl").read_bytes()
    for step, record in enumerate(logged.history, start=1):
        rows = lines(tmp_path / "logged" / "tokens" / f"step_{step:06}.jsonl")
        for row in rows:
            assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-4)
            assert row["turn_ids"] == [0] * len(row["tokens"])
            assert row["policy_version"] == [step - 1] * len(row["tokens"])
        entropies = [value for row in rows for value in row["entropy"]]
        assert sum(entropies) / len(entropies) == pytest.approx(record["actor/entropy"], abs=1e-4)


def test_dropped_groups_are_written_apart(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    overrides = {"algorithm.filter.name": "dapo", "algorithm.filter.max_refills": 1, "actor.mini_batch_size": 2}
    run = train(
        train_config(overrides), reward=lambda solution_str: {"score": 1.0, "acc": "7" in solution_str}, data=additions
    )
    for step, record in enumerate(run.history, start=1):
        dropped = lines(tmp_path / "run" / "rollouts" / f"dropped_{step:06}.jsonl")
        assert len(dropped) == 4 * record["filter/dropped_groups"] > 0
        groups: dict[int, set[float]] = {}
        for each in dropped:
            groups.setdefault(each["index"], set()).add(each["accuracy"])
            assert each["dropped_by"] == "dapo, which reads the group's accuracy"
        assert all(len(accuracies) == 1 for accuracies in groups.values())


class Late:
    """Scores that come after a number of looks that follows from the text, or at once."""

    scores_alone = True

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def submit_batch(self, items: Sequence[RewardItem]) -> LateOutcomes:
        delay = sum(len(item.solution_str) * 7 % 5 for item in items) * self.looks
        return LateOutcomes([RewardResult(length(item.solution_str), 1.0) for item in items], delay)

    def close(self) -> None: ...


@dataclass
class LateOutcomes:
    found: list[RewardResult]
    left: int

    def done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def result(self) -> list[RewardResult]:
        return self.found


@pytest.mark.slow
def test_a_batch_of_the_first_to_end_has_the_same_bits_however_late_scores_come(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    overrides = {"algorithm.filter.name": "first_finished", "algorithm.filter.options.extra": 0.5, "rollout.n": 2}
    for looks in (0, 3):
        folder = {"trainer.run_dir": str(tmp_path / str(looks)), "data.max_response_length": 24}
        with closing(build(train_config(overrides | folder), Late(looks), additions)) as run:
            run.train(fit)
        assert [record["filter/aborted_groups"] for record in run.history] == [2, 2]
    assert (tmp_path / "0/metrics.jsonl").read_bytes() == (tmp_path / "3/metrics.jsonl").read_bytes()
    indices = [each["index"] for each in lines(tmp_path / "0/rollouts/step_000001.jsonl")]
    assert len({*indices}) == 4 and len(indices) == 8


@pytest.mark.slow
def test_images_are_copied_into_the_run_by_their_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_COPIED_BYTES", 4)
    folder = tmp_path / "run" / "media"
    folder.mkdir(parents=True)
    for name, content in (("small.png", b"1234"), ("large.png", b"12345"), ("run/media/own.png", b"own")):
        (tmp_path / name).write_bytes(content)

    def media(digest: str, source: Any) -> Media:
        return Media("image", digest, source if isinstance(source, bytes) else str(tmp_path / source))

    prompt = Prompt("0:0", 0, (), (1,), "test", None, media=(media("aa", "small.png"), media("bb", "gone.png")))
    read = (media("aa", "small.png"), media("cc", "large.png"), media("dd", "run/media/own.png"), media("ee", b"bytes"))
    turn = Turn((1,), (2,), (0.0,), "stop", ((0, 1),), media=(*read, media("ff", "small.png")))
    copy_media(folder, [Group(prompt, (Trajectory("0:0:0", prompt, (turn,), 0),))])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "aa.png": b"1234",
        "ff.png": b"1234",
        "own.png": b"own",
    }
