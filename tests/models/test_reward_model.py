# SPDX-License-Identifier: Apache-2.0
"""Scores of a reward model against transformers' own sequence classifier, and folders that are none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.first import first
from tests.raising import raises
from whet.errors import EngineError, ModelError
from whet.models.load import load_policy, load_reward_model, new_head
from whet.models.outputs import ForwardSettings, model_outputs
from whet.models.positions import position_ids


def classifier(folder: Path, out: Path, **changes: object) -> Path:
    """The language model in `folder` as a classifier with a random head."""
    model = load_reward_model(folder, new_head_seed=1)
    model.config.update({"architectures": [type(model).__name__], **changes})
    model.save_pretrained(out)
    return out


def rows() -> dict[str, torch.Tensor]:
    """Prompts padded on the left, of which two are equal, and responses on the right; text that was only read in the
    third; padding tokens that were sampled at the end of the fourth, and in all of the fifth."""
    lengths = [(3, 4), (3, 2), (5, 6), (4, 5), (4, 3)]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (5, 5 + 6), generator=draw)
    ids[1, :5] = ids[0, :5]
    at = torch.arange(11)
    mask = torch.stack([(at >= 5 - prompt) & (at < 5 + response) for prompt, response in lengths]).long()
    ids[3, 8:10] = ids[4, 5:8] = 0
    response_mask = mask[:, 5:].clone()
    response_mask[2, 1:3] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": position_ids(mask),
        "response_mask": response_mask,
    }


@pytest.mark.parametrize("name", first(1, ["model_folder", "qwen25_folder"], others=pytest.mark.slow))
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("pad_token_id", first(1, [0, None], others=pytest.mark.slow))
def test_scores_are_those_of_transformers(
    name: str, packing: bool, pad_token_id: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = classifier(request.getfixturevalue(name), tmp_path / "classifier", pad_token_id=pad_token_id)
    batch, theirs = rows(), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        got = model_outputs(load_reward_model(folder), batch, frozenset({"scores"}), ForwardSettings(packing=packing))[
            "scores"
        ]
        real = batch["attention_mask"].bool()
        expected = [theirs(ids[own][None]).logits.item() for ids, own in zip(batch["input_ids"], real, strict=True)]
    torch.testing.assert_close(got.sum(1), torch.tensor(expected), atol=1e-5, rtol=0)
    last = batch["response_mask"].shape[1] - 1 - batch["response_mask"].flip(1).argmax(1)
    assert torch.equal(got.nonzero()[:, 1], last)  # on the last sampled token, and nothing elsewhere


def test_a_new_head_depends_on_the_seed_alone(model_folder: Path) -> None:
    heads = [load_reward_model(model_folder, new_head_seed=seed).get_parameter("score.weight") for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert new_head(torch.Size((1, 4095)), 0).std().item() == pytest.approx(1 / 64, rel=0.05)


def test_the_head_of_a_classifier_is_kept(model_folder: Path, tmp_path: Path) -> None:
    folder = classifier(model_folder, tmp_path / "classifier")
    heads = [load_reward_model(folder, new_head_seed=seed).get_parameter("score.weight") for seed in (None, 5)]
    assert torch.equal(heads[0], heads[1])


def test_models_that_are_no_reward_models(model_folder: Path, tmp_path: Path) -> None:
    with raises(ModelError, f"{model_folder}", found=re.compile("Qwen3ForCausalLM"), change=re.compile("train-reward")):
        load_reward_model(model_folder)
    labels = {str(number): f"LABEL_{number}" for number in range(3)}
    folder = classifier(model_folder, tmp_path / "three")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": labels}))
    with raises(ModelError, f"{folder}", found=re.compile(r"\(Qwen3ForSequenceClassification\) .* 3 ")):
        load_reward_model(folder)
    headless = shutil.copytree(model_folder, tmp_path / "headless")
    config = json.loads((classifier(model_folder, tmp_path / "whole") / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config))
    with raises(ModelError, f"{headless}", found=re.compile("1 .* Qwen3ForSequenceClassification, .* score.weight")):
        load_reward_model(headless)


def test_a_language_model_has_no_scores(model_folder: Path) -> None:
    with raises(EngineError, "Qwen3ForCausalLM", found=re.compile("entropy, log_probs, "), expected="scores"):
        model_outputs(load_policy(model_folder), rows(), frozenset({"scores"}), ForwardSettings())
