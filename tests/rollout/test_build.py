# SPDX-License-Identifier: Apache-2.0
"""The rollout engine of a config, by the way in which its model is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.conftest import SMALL_RUN
from tests.models.nano import config_of, nano_model
from tests.raising import raises
from whet.config import SFTConfig, TrainConfig, load_config
from whet.errors import ConfigError, DataError
from whet.models.general import LOST
from whet.models.load import load_tokenizer, outline
from whet.models.supported import support_of
from whet.planning.dtypes import with_dtypes
from whet.rollout import build
from whet.rollout.build import bad_word_ids, with_engine
from whet.trainers.build import train

ON_TWO = {"actor__engine__name": "fsdp", "cluster__processes": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders without weights, of both ways."""
    root = tmp_path_factory.mktemp("models")
    for model_type in ("llama", "llama4_text"):
        config_of(model_type).save_pretrained(root / model_type)
    return {"own": root / "llama", "general": root / "llama4_text"}


def loaded(folder: Path, **overrides: Any) -> TrainConfig:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    values = {**SMALL_RUN, "model.path": str(folder), **named}
    return load_config(TrainConfig, None, values, given={"reward", "data"}).config


@pytest.mark.parametrize(
    ("way", "written", "expected"),
    [
        ("own", {}, "native"),
        ("own", {"rollout__engine__name": "native"}, "native"),
        ("general", {}, "hf"),
        ("general", {"rollout__engine__name": "hf"}, "hf"),
        ("general", {"rollout__engine__options": {"on_new_weights": "keep"}}, "hf"),
        ("general", {"rollout__engine__name": "vllm"}, "vllm"),
    ],
)
def test_the_default_engine_is_one_that_samples_from_the_model(
    way: str, written: dict[str, Any], expected: str, folders: dict[str, Path]
) -> None:
    assert with_engine(loaded(folders[way], **written)).rollout.engine.name == expected


@pytest.mark.parametrize(
    ("written", "key", "found"),
    [
        ({"rollout__engine__name": "native"}, "rollout.engine.name", "native"),
        (
            {"rollout__engine__options": {"kv_cache_bytes": 2**20}},
            re.compile(r"rollout\.engine\.options"),
            re.compile(""),
        ),
        ({"actor__engine__packing": True}, "actor.engine.packing", True),
        (
            {
                "actor__engine__name": "fsdp",
                "actor__engine__options": {"mesh": {"context": 2}},
                "cluster__processes": 2,
            },
            "actor.engine.options.mesh.context",
            2,
        ),
    ],
)
def test_a_setting_that_needs_whets_own_way_is_an_error(
    written: dict[str, Any], key: str, found: object, folders: dict[str, Path]
) -> None:
    with raises(ConfigError, key, found=found):
        with_engine(loaded(folders["general"], **written))
    with_engine(loaded(folders["own"], **written))


def losses_told(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    """Facts of the lines on the general way: the model, the part of it, the losses."""
    args = [each.args for each in caplog.records if each.name == build.__name__ and isinstance(each.args, tuple)]
    return [each for each in args if LOST in each]


@pytest.mark.parametrize("way", ["own", "general"])
def test_a_run_says_once_at_its_start_what_the_general_way_loses(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = nano_model(tmp_path / "model", {"own": "llama", "general": "lfm2"}[way])
    with torch.device("meta"):
        lacks = support_of(outline(folder)).lacks
    expected = [(str(folder), lacks, LOST)] if way == "general" else []
    config = loaded(folder, **{"trainer.run_dir": str(tmp_path / "run"), "trainer.total_steps": 2})
    before: list[list[tuple[object, ...]]] = []

    def pays(solution_str: str) -> float:
        before.append(losses_told(caplog))
        return float(len(solution_str))

    train(with_dtypes(config), reward=pays, data=[{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)])
    assert before[0] == losses_told(caplog) == expected
    assert {"packed rows", "batch_invariant"} < {*LOST.split(", ")}


def test_supervised_runs_have_no_rollout(folders: dict[str, Path]) -> None:
    values = {"model.path": str(folders["general"]), "data.train_files": ["rows.jsonl"]}
    config = load_config(SFTConfig, None, values, given={"data"}, checked=False).config
    assert with_engine(config) is config
    packed = load_config(SFTConfig, None, {**values, "engine.packing": True}, given={"data"}, checked=False).config
    with raises(ConfigError, "engine.packing", found=True):
        with_engine(packed)


def test_a_bad_word_is_forbidden_with_and_without_a_space(
    tokenizer: PreTrainedTokenizerBase, qwen25_folder: Path
) -> None:
    byte_level = load_tokenizer(qwen25_folder)
    for each in (tokenizer, byte_level):
        found = bad_word_ids(["the", " the"], each)
        assert found == (tuple(each.encode("the")), tuple(each.encode(" the")))
    assert bad_word_ids(["\n"], byte_level)[0] == tuple(byte_level.encode("\n"))
    with raises(DataError, "tokenizer", found=re.compile("^rejects .*'THE'")):
        bad_word_ids(["THE"], tokenizer)
