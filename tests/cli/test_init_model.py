# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from whet.cli.app import main


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
