# SPDX-License-Identifier: Apache-2.0
"""From a folder with two files to an exported model that was evaluated, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whet.cli.app import main

SMALL = [
    "model.path=model",
    "data.train_files=rows.jsonl",
    "data.val_files=rows.jsonl",
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "rollout.n=2",
    "trainer.total_steps=2",
    "trainer.run_dir=run",
]


def whet(*arguments: str) -> int:
    """Runs the command and returns its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


@pytest.mark.slow
def test_train_export_and_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert whet("init-model", "model", "--size", "nano") == 0

    assert whet("train", "gsm8k", *SMALL, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "2 steps of 2 prompts x 2 responses" in shown and "+ 1?" in shown
    assert not Path("run", "metrics.jsonl").exists()

    assert whet("train", "gsm8k", *SMALL) == 0
    shown = capsys.readouterr().out
    assert (
        "step 2/2  reward " in shown and "run  finished, 2 of 2 steps" in shown and "whet export run run_model" in shown
    )
    steps = [json.loads(line)["step"] for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]

    assert whet("export", "run", "exported") == 0
    assert whet("export", "run", "exported") == 2  # nothing is overwritten
    assert "CheckpointError: exported: " in capsys.readouterr().err
    evaluation = ["gsm8k_eval", "model.path=exported", "data.val_files=rows.jsonl", "data.max_response_length=4"]
    assert whet("eval", *evaluation, "output=answers") == 0
    shown = capsys.readouterr().out
    assert "wrote answers/answers.jsonl and summary.json; " in shown
    assert json.loads(Path("answers", "summary.json").read_text())["num_prompts"] == 8


def test_a_dry_run_on_examples_takes_no_step(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "response": f"{i + 1}"}) + "\n" for i in (3, 4))
    )
    words = [f"model.path={model_folder}", "data.train_files=rows.jsonl", "data.apply_chat_template=false"]
    assert whet("sft", *words, "data.train_batch_size=2", "data.max_length=8", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert (
        "dry run: 2 examples to train on, 0 to validate on, 1 steps" in shown and "the first example:\n3+1=4" in shown
    )
    assert not Path("runs").exists()
