# SPDX-License-Identifier: Apache-2.0
"""docs/config.md is what the schema says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whet.cli.app import main
from whet.cli.config_page import MARK, page, reference
from whet.config.keys import leaf_fields
from whet.config.schema import EngineConfig, TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["config", *arguments])
    assert exit_.value.code == 0


def test_the_page_is_current() -> None:
    assert PAGE.read_text().partition(MARK)[2] == reference(), "write it with `whet config --page docs/config.md`"


def test_every_key_has_its_row() -> None:
    train = reference().partition("## `whet sft`")[0]
    rows = [line for line in train.splitlines() if line.startswith("| `")]
    told = {row.split("`")[1] for row in rows}
    assert told == {key.rpartition(".")[2] for key in leaf_fields(TrainConfig)}
    again = 2 * len(EngineConfig.model_fields)  # the engines of critic and ref are told as the actor's
    assert len(rows) == len(leaf_fields(TrainConfig)) - again
    assert "| `n` | a whole number > 0 | `8` | answers a prompt |" in rows
    assert "The keys and defaults of `actor.engine` of `whet train`." in train
    assert "runs/&lt;project_name&gt;/&lt;experiment_name&gt;" in train


def test_what_stands_above_the_mark_stays(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# Mine\n{MARK}old")
    run("--page", str(file))
    assert file.read_text() == page(f"# Mine\n{MARK}") == f"# Mine\n{MARK}{reference()}"


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("sft", "--schema")
    assert "messages_key" in json.loads(capsys.readouterr().out)["$defs"]["SupervisedDataConfig"]["properties"]
