# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from whet.cli.app import main
from whet.config import EvalConfig, GenerateConfig, SFTConfig, TrainConfig, load_config


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["config", *arguments])
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_printed_tree_is_the_config_with_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults: [gsm8k, _self_]\nrollout:\n  n: 4\n")
    out, _ = printed(capsys, "train", "mine.yaml", "rollout.top_k=7", "custom_reward_function.path=my.py")
    config = load_config(
        TrainConfig, "mine.yaml", ["rollout.top_k=7", "reward.function=my.py:compute_score"], checked=False
    )
    assert yaml.safe_load(out) == config.config.model_dump(mode="json")  # the notes are comments
    noted = {line.split(":")[0].strip(): line.split("  # ")[1] for line in out.splitlines() if "  # " in line}
    assert noted["n"] != "" and "  n: 4" in out
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("  n: 4")).endswith("# mine.yaml:3")
    assert next(line for line in lines if line.startswith("  top_k: 7")).endswith("# command line")
    assert noted["prompt_key"].endswith("recipes/data/gsm8k.yaml:2")
    assert noted["function"] == "alias custom_reward_function (command line)"
    assert noted["top_p"] == "default"


@pytest.mark.parametrize(
    ("command", "schema"),
    [("train", TrainConfig), ("sft", SFTConfig), ("eval", EvalConfig), ("generate", GenerateConfig)],
)
def test_without_a_recipe_it_prints_the_defaults(
    command: str, schema: type[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = printed(capsys, command)
    assert yaml.safe_load(out) == schema().model_dump(mode="json")
    assert f"`whet {command}` would refuse this config:\n- model.path is not set" in err


def test_what_would_be_refused_is_told_beside_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = printed(capsys, "train", "gsm8k", "actor.mini_batch_size=5")
    assert "mini_batch_size: 5" in out
    assert re.search("^- actor.mini_batch_size=5; .*data.train_batch_size=32 .* 4 or 8$", err, re.MULTILINE)


def test_meanings_replace_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "train", "gsm8k", "--meanings", "algorithm.loss_options.clip_ratio_low=0.1")
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("  n: 8")).endswith("# responses a prompt")
    assert next(line for line in lines if "clip_ratio_low" in line).endswith("# options of the loss")


@pytest.mark.slow
def test_the_recipe_may_be_given_as_hydra_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "train", "--config-name", "gsm8k", "rollout.n=2") == (
        printed(capsys, "train", "gsm8k", "rollout.n=2")
    )


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "sft", "--schema")
    assert "messages_key" in json.loads(out)["$defs"]["SupervisedDataConfig"]["properties"]
