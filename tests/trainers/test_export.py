# SPDX-License-Identifier: Apache-2.0
"""What is exported loads with plain transformers and says what the trained model says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from whet import serialization
from whet.checkpoints import checkpoint
from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.errors import CheckpointError
from whet.models.load import stop_token_ids
from whet.trainers.build import train

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
IDS = torch.tensor([[11, 14, 12, 20]])


def length(solution_str: str) -> float:
    return float(len(solution_str))


@pytest.mark.parametrize("folder", ["model_folder", "qwen25_folder"])
def test_plain_transformers_gives_the_logits_of_the_trained_model(
    folder: str, train_config: MakeConfig, additions: Rows, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    start: Path = request.getfixturevalue(folder)
    train(train_config({"model.path": str(start), "trainer.save_freq": 1}), reward=length, data=additions)
    out = export(tmp_path / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = serialization.load(tmp_path / "run" / "checkpoints" / "global_step_2" / "actor.state")["model"]
    reference = AutoModelForCausalLM.from_pretrained(start)
    before = reference(IDS).logits
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            weight.copy_(trained[name])
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
        assert not torch.allclose(model(IDS).logits, before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    tokenizer, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(start)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == original.apply_chat_template(chat)["input_ids"]
    assert GenerationConfig.from_pretrained(out).eos_token_id == GenerationConfig.from_pretrained(start).eos_token_id
    assert (
        stop_token_ids(out, tokenizer) == stop_token_ids(start, original) and len(stop_token_ids(out, tokenizer)) == 2
    )
    assert AutoConfig.from_pretrained(out).architectures == AutoConfig.from_pretrained(start).architectures


def test_a_checkpoint_by_path_and_what_was_exported_trains_on(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = train_config({"trainer.save_freq": 1, "trainer.save_limit": None})
    train(config, reward=length, data=additions)
    checkpoints = tmp_path / "run" / "checkpoints"
    first = export(checkpoints / "global_step_1", tmp_path / "first")
    newest = export(tmp_path / "run", tmp_path / "newest")
    one, two = (AutoModelForCausalLM.from_pretrained(path)(IDS).logits for path in (first, newest))
    assert not torch.equal(one, two)
    overrides = {"model.path": str(first), "trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / "again")}
    again = train(train_config(overrides), reward=length, data=additions)
    assert again.history[0]["actor/grad_norm"] > 0


def test_weights_go_back_to_the_dtype_that_they_came_in(
    train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    start = tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(start)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(start)
    train(train_config({"model.path": str(start), "trainer.total_steps": 1}), reward=length, data=additions)
    out = export(tmp_path / "run", tmp_path / "exported")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = serialization.load(tmp_path / "run" / "checkpoints" / "global_step_1" / "actor.state")["model"]
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, trained[name].bfloat16())


def test_nothing_is_overwritten_and_nothing_is_guessed(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="mine is not empty; name a new folder"):
        export(tmp_path / "run", tmp_path / "mine")
    with pytest.raises(CheckpointError, match="run is no checkpoint and no run with one"):
        export(tmp_path / "run", tmp_path / "exported")
    train(train_config({"trainer.total_steps": 1}), reward=length, data=additions)
    state = tmp_path / "run" / "checkpoints" / "global_step_1" / "actor.state"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"global_step_1: actor\.state is damaged"):
        export(state.parent, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_no_model(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """As a run of an earlier version may have saved them."""
    run = train(train_config(), reward=length, data=additions)
    folder = run.run_dir / "checkpoints" / "global_step_2"
    state = serialization.load(folder / "actor.state")
    state["model"]["model.norm.weight"] = torch.full_like(state["model"]["model.norm.weight"], float("inf"))
    serialization.save(folder / "actor.state", state)
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or infinite numbers in torch\.float32"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
