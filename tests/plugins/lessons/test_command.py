# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from whet.cli.app import main
from whet.cli.arguments import program, split_recipe
from whet.config import SFTConfig, TrainConfig, load_config, problems
from whet.plugins.lessons import command
from whet.plugins.lessons.init_model import ARCHS


def test_a_model_folder_is_written_with_a_tokenizer_of_the_given_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("seven plus seven\n" * 50)
    out = tmp_path / "model"
    arguments = ["init-model", str(out), "--arch", "qwen2.5", "--size", "nano", "--texts", str(tmp_path / "text.txt")]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    vocabulary = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    assert "seven" in vocabulary and "answer" not in vocabulary
    assert f"model.path={out}" in capsys.readouterr().out


@pytest.mark.parametrize(("arch", "rows"), [("qwen3", "openai/gsm8k"), ("qwen2.5_vl", "drawn.figures:counting")])
def test_the_commands_that_it_prints_are_accepted_as_they_stand(
    arch: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["init-model", "my_model", "--size", "nano", "--arch", arch])
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  whet ")]
    assert [words[1] for words in printed] == ["sft", "export", "train"]
    sft, train = (
        load_config(schema, *split_recipe(words[2:], None), checked=False).config
        for schema, words in ((SFTConfig, printed[0]), (TrainConfig, printed[2]))
    )
    assert problems(sft) == [] and printed[1][2:] == [sft_folder(sft), "my_model_sft"]
    assert train.model.path == "my_model_sft" and problems(train) == []
    assert all(rows in str(files) for files in (sft.data.train_files, train.data.train_files, train.data.val_files))


def sft_folder(config: SFTConfig) -> str:
    return f"runs/{config.trainer.project_name}/{config.trainer.experiment_name}"


@pytest.mark.parametrize(
    ("on_the_path", "called", "shown"),
    [(True, ".venv/bin/whet", "whet"), (False, ".venv/bin/whet", ".venv/bin/whet"), (False, "-m", "whet")],
)
def test_commands_are_printed_as_the_shell_finds_them(
    on_the_path: bool, called: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/whet" if on_the_path else None)
    monkeypatch.setattr("sys.argv", [called])
    assert program() == shown


def test_every_architecture_can_be_named() -> None:
    assert (*get_args(command.TextArch), *get_args(command.VisionArch)) == ARCHS
