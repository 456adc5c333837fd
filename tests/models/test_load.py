# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils.logging import set_tqdm_hook, tqdm

import whet
from tests.raising import raises
from whet.errors import ModelError
from whet.models.load import (
    load_config,
    load_policy,
    load_tokenizer,
    load_value_model,
    stop_token_ids,
    without_weight_bars,
)
from whet.plugins.lessons.init_model import init_model

OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(model_folder, tmp_path / "model")


def test_writing_and_loading_draw_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_policy(init_model(tmp_path / "model", "qwen3", "nano", alphabet="01", num_layers=1))
    out, err = capfd.readouterr()
    assert "shard" not in (out + err) and "it/s" not in (out + err)


def test_bars_are_left_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    def mine(bar: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[int]:
        return [1, 2]

    before = set_tqdm_hook(mine)
    try:
        with pytest.raises(KeyError), without_weight_bars():
            assert list(tqdm([5], desc="weights")) == [5]
            raise KeyError
        assert tqdm([5]) == [1, 2]
    finally:
        set_tqdm_hook(before)
    assert capfd.readouterr().err == ""


def test_answers_end_with_the_tokenizers_token_and_with_those_of_the_model(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(folder, tokenizer) == (0, 1)  # the generation config names both
    (folder / "generation_config.json").unlink()
    assert stop_token_ids(folder, tokenizer) == (tokenizer.eos_token_id,) == (1,)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert stop_token_ids(folder, tokenizer) == (1, 5)


def test_a_tokenizer_without_padding_pads_with_its_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with raises(ModelError, f"tokenizer at {folder}", change=re.compile("eos_token")):
        load_tokenizer(folder)


def test_a_value_model_has_the_body_of_the_policy(model_folder: Path) -> None:
    policy, critic = load_policy(model_folder), load_value_model(model_folder)
    body = dict(policy.base_model.named_parameters())
    assert all(torch.equal(body[name], weight) for name, weight in critic.body.named_parameters())
    assert not critic.value_head.weight.any()


def test_nothing_is_dropped_out_in_training(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5'))
    ids = torch.arange(10, 30)[None]
    model = load_policy(folder)
    assert model.config.attention_dropout == 0.5
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("load", [load_policy, load_tokenizer])
def test_what_cannot_be_loaded_is_named(load: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with raises(ModelError, f"{tmp_path}"):
        load(tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("values", "key", "found", "most"),
    [
        ({"hidden_size": -128}, "hidden_size", -128, "1,073,741,824"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", 0, "1,024"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", 10**9, "1,024"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers", 10**9, "1,024"),
        ({"num_key_value_heads": -1}, "num_key_value_heads", -1, ""),
        ({"vocab_size": "many"}, "vocab_size", "many", ""),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings", 10**30, ""),
    ],
)
def test_a_config_with_absurd_values_is_refused_before_a_model_is_made(
    values: dict[str, object], key: str, found: object, most: str, folder: Path
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with raises(ModelError, f"{folder}: {key}", found=found, expected=re.compile(f" {most}")):
        load_config(folder)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(wrong: float, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = wrong
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with raises(ModelError, f"{folder}", found=re.compile(r"model\.layers\.1\.mlp\.up_proj\.weight")):
        load_policy(folder)


def test_large_weights_are_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = 1e38  # their sum is not
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_policy(folder)


def test_a_models_own_code_is_refused_and_nobody_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | OWN_CODE))
    (folder / "own.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    for load in (load_config, load_policy):
        with raises(ModelError, f"{folder}", change=re.compile(r"model\.trust_remote_code=true")):
            load(folder)


def test_every_call_of_a_transformers_loader_says_whether_it_runs_code() -> None:
    """One that says nothing would ask on standard input."""
    texts = (file.read_text(encoding="utf-8") for file in Path(whet.__file__).parent.rglob("*.py"))
    for text in (each for each in texts if "Auto" in each):
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and re.match(r"(\w+\.)?Auto\w+\.from_", ast.unparse(call.func)):
                assert "trust_remote_code" in [keyword.arg for keyword in call.keywords], ast.unparse(call)
