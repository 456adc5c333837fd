# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.competitor import ROOT
from benchmarks.revision import renamed
from benchmarks.same_bits import Comparison, compare, main, read_values

METRICS = [{"step": 1, "actor/lr": 0.1, "kl": 0.0}, {"step": 2, "actor/lr": 0.2, "kl": 0.30000000000000004}]
ROLLOUT = {"uid": "0:1:0", "response": "12", "reward": 1.0, "parts": {"style": 0.5}}


def written(folder: Path, metrics: list[dict[str, float]], rollout: dict[str, object], weight: float = 1.0) -> Path:
    """A run folder, with the export in `exported`."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "rollouts" / "step_000002.jsonl").write_text(json.dumps(rollout) + "\n")
    (folder / "exported").mkdir()
    weights = {"head": torch.tensor([1.0, weight], dtype=torch.bfloat16), "norm": torch.ones(3)}
    save_file(weights, folder / "exported" / "model.safetensors")
    return folder


def compared(tmp_path: Path, after: Path, **tables: dict[str, str]) -> Comparison:
    before = written(tmp_path / "before", METRICS, ROLLOUT)
    return compare("ppo", *(read_values(folder, folder / "exported") for folder in (before, after)), **tables)


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    result = compared(tmp_path, written(tmp_path / "after", METRICS, ROLLOUT))
    assert str(result) == "equal      10 values, 2 weights" and result.is_equal


def test_the_last_bit_of_a_number_is_a_difference(tmp_path: Path) -> None:
    after = [METRICS[0], {**METRICS[1], "kl": 0.3}]
    result = compared(tmp_path, written(tmp_path / "after", after, ROLLOUT))
    assert not result.is_equal
    [difference] = result.differences
    assert (difference.place.step, str(difference.place)) == (2, "metrics.jsonl:2 kl")
    assert "30000000000000004" in difference.before and difference.after == '"number 0.3"'


@pytest.mark.parametrize("field", [{"reward": 1}, {"reward": "1.0"}, {"parts": {"style": 0.25}}, {"response": "12 "}])
def test_every_field_of_a_rollout_counts(field: dict[str, object], tmp_path: Path) -> None:
    result = compared(tmp_path, written(tmp_path / "after", METRICS, ROLLOUT | field))
    assert [str(each.place) for each in result.differences] == [f"rollouts/step_000002.jsonl:1 {next(iter(field))}"]


def test_the_first_difference_is_the_earliest_that_a_run_writes(tmp_path: Path) -> None:
    """A step's rollouts are written before its metrics, weights at the end."""
    metrics = [METRICS[0], {**METRICS[1], "kl": 0.5}]
    result = compared(tmp_path, written(tmp_path / "after", metrics, {**ROLLOUT, "uid": "x"}, weight=1.0078125))
    assert [each.place.kind for each in result.differences] == ["rollouts", "metrics", "weights"]
    assert str(result).startswith(
        'DIFFERENT  first at step 2, rollouts/step_000002.jsonl:1 uid: "0:1:0" before, "x" after; '
        "3 of 10 values, 2 weights; in metrics/kl, rollouts/uid, weights/head"
    )


def test_what_is_missing_is_a_difference_and_what_is_new_is_not(tmp_path: Path) -> None:
    after = [{"step": 1, "actor/lr": 0.1, "new": 3.0}, {"step": 2, "kl": 0.30000000000000004, "actor/lr": 0.2}]
    result = compared(tmp_path, written(tmp_path / "after", after, ROLLOUT))
    assert [(str(each.place), each.after) for each in result.differences] == [("metrics.jsonl:1 kl", "absent")]
    assert result.added == ["metrics/new"]


def test_tables_of_names_and_of_differences(tmp_path: Path) -> None:
    after = [{"step": line["step"], "rate": line["actor/lr"], "kl": 9.0} for line in METRICS]
    result = compared(
        tmp_path,
        written(tmp_path / "after", after, ROLLOUT),
        renamed_names={"actor/lr": "rate"},
        expected={"ppo/metrics/kl": "no longer cut", "sft/*": "another run"},
    )
    assert result.is_equal and str(result) == "expected   2 of 10 values, 2 weights: no longer cut"


def test_config_keys_and_sections_are_renamed() -> None:
    keys = {"rollout.name": "rollout.engine.name", "algorithm.kl": "objective.kl"}
    words = ["train", "rollout.name=hf", "algorithm.kl.coef=0.1", "algorithm.kl_other=1", "rollout.n=4", "algorithm.kl"]
    assert [renamed(word, keys) for word in words] == [
        *("train", "rollout.engine.name=hf", "objective.kl.coef=0.1", "algorithm.kl_other=1", "rollout.n=4"),
        "algorithm.kl",
    ]


def test_an_unknown_run_and_an_unknown_commit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--before", str(ROOT), "--only", "pppo"])
    assert "no run is called pppo; there are fsdp2, two_processes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="not_there is no commit of this clone"):
        main(["--before", "not_there"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_changed_number_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a copy of whet: the number beside GRPO's deviation."""
    planted = tmp_path / "planted"
    shutil.copytree(ROOT / "whet", planted / "whet", ignore=shutil.ignore_patterns("__pycache__"))
    source = planted / "whet" / "algorithms" / "advantages.py"
    line = "return groups.normalised(scores, eps) if std_norm else groups.deviation(scores)"
    assert source.read_text().count(line) == 1
    source.write_text(source.read_text().replace(line, line.replace("eps", "10 * eps")))
    assert main(["--before", str(ROOT), "--after", str(planted), "--only", "quickstart", "sft"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("quickstart     DIFFERENT  first at step 1, metrics.jsonl:2 actor/")
    assert shown[1].startswith("sft            equal ")
