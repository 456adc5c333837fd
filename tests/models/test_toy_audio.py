# SPDX-License-Identifier: Apache-2.0
"""A model of audio whose encoder is one file: rows, training, sampling, checkpoints and exports know nothing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from tests.models import toy_audio
from tests.models.toy_audio import FRAME, PAD, tone
from tests.raising import raises
from whet.config import SFTConfig
from whet.data.load import load_items
from whet.errors import DataError
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_audio.folder_of(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Low and high tones, as bytes and as files."""
    path = tmp_path_factory.mktemp("tones") / "high.wav"
    path.write_bytes(tone(90.0, 4))
    low = {"prompt": "<audio> low or high?", "response": "low", "answer": "low", "audios": [tone(5.0, 3)]}
    high = {"prompt": "<audio> low or high?", "response": "high", "answer": "high", "audio": str(path)}
    return [low, high, low, high]


def keys_of(folder: Path, run: Path, **more: Any) -> dict[str, Any]:
    common = {"model.path": str(folder), "model.dtype": "float32", "trainer.run_dir": str(run)}
    return {**common, "trainer.total_steps": 2, "data.train_batch_size": 2, "trainer.logger": ["jsonl"], **more}


def test_an_audio_is_measured_from_its_header(folder: Path, rows: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer(folder)
    config = SFTConfig.model_validate({"data": {"max_length": 64}})
    low, high = load_items(config.data, tokenizer, rows=rows[:2]).items
    assert [each.kind for each in (*low.media, *high.media)] == ["audio", "audio"]
    assert (low.media[0].tokens.count, high.media[0].tokens.count) == (3, 4)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    assert (low.input_ids.count(pad), high.input_ids.count(pad)) == (3, 4)
    with raises(DataError, re.compile("format$"), found=re.compile("WAV")):
        load_items(config.data, tokenizer, rows=[{**rows[0], "audios": [b"no sound"]}])


def test_features_are_those_of_the_tower(folder: Path, rows: list[dict[str, Any]]) -> None:
    model = load_policy(folder)
    encoders = encoders_of(model)
    assert encoders is not None and encoders.kinds == {"audio"} and encoders.towers == ("audio_tower",)
    config = SFTConfig.model_validate({"data": {"max_length": 64}})
    media = [each.media[0] for each in load_items(config.data, load_tokenizer(folder), rows=rows[:2]).items]
    found = encoders.features(model, [media[1], media[0]])
    expected = model.model.audio_tower(encoders.prepared(media[0])["frames"])
    assert encoders.prepared(media[0])["frames"].shape == (3, FRAME)
    torch.testing.assert_close(found[1].hidden, expected)
    assert encoders.dummy(model).item() == 0.0 and len(found[0].hidden) == 4


def test_two_steps_on_examples(folder: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = whet.sft(data=rows, **keys_of(folder, tmp_path / "run", **{"data.max_length": 64, "optim.lr": 1e-2}))
    assert len(whole.history) == 2 and whole.history[1]["sft/loss"] < whole.history[0]["sft/loss"]
    exported = whet.export(whole.run_dir, tmp_path / "exported")
    before, after = (load_policy(each).model.audio_tower.weight for each in (folder, exported))
    assert not torch.equal(before, after)  # the tower learns too
    assert encoders_of(load_tokenizer(exported)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_two_steps_of_reinforcement_learning(
    engine: str, folder: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    more = {"data.max_prompt_length": 48, "data.max_response_length": 4, "rollout.n": 2, "rollout.engine.name": engine}
    more |= {"actor.mini_batch_size": 2, "actor.optim.lr": 1e-3}
    run = whet.train(reward=reward, data=rows, **keys_of(folder, tmp_path / "run", **more))
    steps = [each for each in run.history if each["step"] > 0]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def reward(solution_str: str) -> float:
    return float(len(solution_str))
