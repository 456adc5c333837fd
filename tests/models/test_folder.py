# SPDX-License-Identifier: Apache-2.0
"""Folders that are incomplete, damaged, pickled, or do not belong together are refused by name."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.raising import raises
from whet.config import EvalConfig, SFTConfig, TrainConfig, load_config
from whet.errors import DataError, ModelError
from whet.evaluation.evaluate import evaluate
from whet.models import load as loading
from whet.models.folder import check_weights, split_adapters
from whet.models.load import load_policy, load_tokenizer
from whet.trainers.build import train
from whet.trainers.sft import train_sft


def length(solution_str: str) -> float:
    return float(len(solution_str))


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in several files."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def test_a_half_downloaded_folder(sharded: Path) -> None:
    load_policy(sharded)
    first, *_, last = sorted(sharded.glob("model-*.safetensors"))
    last.unlink()
    with raises(ModelError, f"{sharded}", found=re.compile(rf"\d files, .* 1 .* missing \({last.name}\)$")):
        load_policy(sharded)
    first.unlink()
    with raises(ModelError, f"{sharded}", found=re.compile(rf" 2 .* \({first.name}, {last.name}\)$")):
        load_policy(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map')
    index = f"{sharded / 'model.safetensors.index.json'}"
    with raises(ModelError, index, found=re.compile("JSONDecodeError")):
        load_policy(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with raises(ModelError, index, found=re.compile(r"\.\./secret\.safetensors")):
        load_policy(sharded)


@pytest.mark.parametrize("kept", [0, 5, 300, 100_000])
def test_a_file_that_was_cut_short(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with raises(ModelError, f"{weights}", found=re.compile(f"{kept:,} ")):
        load_policy(folder)


def test_weights_that_are_not_there_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lost = re.compile(r"1 weights of Qwen3ForCausalLM, .*model\.layers\.1\.mlp\.up_proj")
    with raises(ModelError, f"{folder}", found=lost):
        load_policy(folder)
    (folder / "model.safetensors").unlink()
    with raises(ModelError, f"{folder}", found=re.compile(r"config\.json"), expected="model.safetensors"):
        load_policy(folder)


def test_pickles_are_refused_unless_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_policy(folder)
    torch.save(dict(model.named_parameters()), folder / "pytorch_model.bin")
    load_policy(folder)  # beside safetensors a pickle is not read
    (folder / "model.safetensors").unlink()
    allowed = re.compile(r"model\.allow_pickle=true")
    with raises(ModelError, f"{folder}", found=re.compile(r"\(pytorch_model\.bin\)"), change=allowed):
        load_policy(folder)
    with caplog.at_level(logging.WARNING, "whet"):
        again = load_policy(folder, allow_pickle=True)
    assert "pytorch_model.bin" in [str(record.args[-1]) for record in caplog.records if record.args]
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_run_asks_for_pickles_by_its_config(
    folder: Path, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    torch.save(dict(load_policy(folder).named_parameters()), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    once = {"model.path": str(folder), "trainer.total_steps": 1}
    with raises(ModelError, f"{folder}", change=re.compile("model.allow_pickle")):
        train(train_config(once), reward=length, data=additions)
    asked = train_config({**once, "model.allow_pickle": True})
    assert train(asked, reward=length, data=additions).step == 1


def test_a_name_on_the_hub_is_left_to_transformers() -> None:
    check_weights("someone/some-model")
    assert split_adapters("someone/some-model") == ("someone/some-model", [])


NOT_FOUND = RepositoryNotFoundError("404", response=httpx2.Response(404, request=httpx2.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("name", "answer", "found"),
    [
        ("some-one/a", OSError("no\nroute"), r"\(no route\)$"),
        ("some-one/b", NOT_FOUND, "hub"),
        ("./c/d/e", None, "here$"),
        (__file__, None, "file"),
    ],
)
def test_a_name_that_is_no_model_is_said_at_once(
    name: str, answer: Exception | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def model_info(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        if answer is not None:
            raise answer

    monkeypatch.setattr("whet.models.folder.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for load in (loading.load_config, load_tokenizer):
        with raises(ModelError, name, found=re.compile(found)):
            load(name)
    assert asked == [name, name][: 2 * (answer is not None)]


@pytest.mark.parametrize(
    ("config", "key", "fields"),
    [
        ("{", "adapter_config.json", {"found": re.compile("JSONDecodeError")}),
        ('{"r": 4}', "adapter_config.json", {"found": re.compile("KeyError")}),
        (
            '{"base_model_name_or_path": null}',
            "adapter_config.json: base_model_name_or_path",
            {"found": None, "change": re.compile(r"model\.path")},
        ),
    ],
)
def test_an_adapter_without_a_base(tmp_path: Path, config: str, key: str, fields: dict[str, object]) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with raises(ModelError, f"{tmp_path / key}", **fields):
        load_policy(tmp_path)


def test_adapters_that_lead_nowhere(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(adapter)}))
    with raises(ModelError, f"{adapter}: base_model_name_or_path"):
        load_tokenizer(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with raises(ModelError, f"{adapter}", expected="adapter_model.safetensors"):
        load_policy(adapter)
    (folder / "adapter_config.json").write_text("{}")
    with raises(ModelError, f"{folder}", found=re.compile("adapter_config.json"), change=re.compile("model.lora.path")):
        load_policy(folder)


def test_a_tokenizer_of_another_model(
    qwen25_folder: Path, train_config: Callable[..., TrainConfig], model_folder: Path, additions: list[dict[str, str]]
) -> None:
    """512 byte-level tokens for the 64 rows of a model of characters."""
    found = re.compile(r" 511, .*qwen3 only 64 ")
    load_tokenizer(qwen25_folder, qwen25_folder)
    with raises(ModelError, f"tokenizer at {qwen25_folder}", found=found):
        load_tokenizer(qwen25_folder, qwen25_folder, model_folder)
    wrong = {"model.path": str(model_folder), "model.tokenizer_path": str(qwen25_folder)}
    inline = {"reward.num_workers": 0}  # no process to wait for
    with raises(ModelError, found=found, change=re.compile("model.tokenizer_path")):
        train(train_config({**wrong, **inline}), reward=length, data=additions)
    with raises(ModelError, found=found):
        train(
            train_config({"model.path": str(qwen25_folder), "ref.model_path": str(model_folder), **inline}),
            data=additions,
            reward=length,
        )
    with raises(ModelError, found=found):
        train_sft(load_config(SFTConfig, None, wrong, given={"data"}).config, data=[])
    with raises(ModelError, found=found):
        evaluate(
            load_config(EvalConfig, None, {**wrong, **inline}, given={"data", "reward"}).config, reward=length, data=[]
        )


def test_a_tokenizer_without_padding_says_what_pads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with caplog.at_level(logging.INFO, "whet"):
        load_tokenizer(folder)
    assert "<|im_end|>" in [arg for record in caplog.records for arg in record.args or ()]


def test_a_tokenizer_without_a_chat_template(
    folder: Path, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    (folder / "chat_template.jinja").unlink()
    config = train_config({"model.path": str(folder), "data.apply_chat_template": True})
    change = re.compile(r"data\.apply_chat_template=false .* data\.chat_template_kwargs")
    with raises(DataError, re.compile(f"tokenizer of {folder}$"), change=change):
        train(config, reward=length, data=additions)


def test_a_config_of_an_adapter_that_is_something_else_is_named(tmp_path: Path) -> None:
    for content in (b"[" * 9**5, b"[]", b"\xff", b'{"base_model_name_or_path": 5}'):
        (tmp_path / "adapter_config.json").write_bytes(content)
        with raises(ModelError, f"{tmp_path / 'adapter_config.json'}"):
            split_adapters(tmp_path)
