# SPDX-License-Identifier: Apache-2.0
"""Folders that are incomplete, damaged, pickled, or do not belong together are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    with pytest.raises(ModelError, match=rf"names \d files, and 1 of them are missing \({last.name}\); finish the"):
        load_policy(sharded)
    first.unlink()
    with pytest.raises(ModelError, match=rf"2 of them are missing \({first.name}, {last.name}\)"):
        load_policy(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map')
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        load_policy(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match=r"index\.json names \.\./secret\.safetensors, which is no file of its folder"):
        load_policy(sharded)


@pytest.mark.parametrize("kept", [0, 5, 300, 100_000])
def test_a_file_that_was_cut_short(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"model\.safetensors is damaged or was cut short at {kept:,} bytes"):
        load_policy(folder)


def test_weights_that_are_not_there_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 weights of Qwen3ForCausalLM, such as model\.layers\.1\.mlp\.up_proj"
    ):
        load_policy(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: expected model\.safetensors, found .*config\.json"):
        load_policy(folder)


def test_pickles_are_refused_unless_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_policy(folder)
    torch.save(dict(model.named_parameters()), folder / "pytorch_model.bin")
    load_policy(folder)  # beside safetensors a pickle is not read
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"pickles only \(pytorch_model\.bin\).*can run code.*model\.allow_pickle=true"
    ):
        load_policy(folder)
    with caplog.at_level(logging.WARNING, "whet"):
        again = load_policy(folder, allow_pickle=True)
    assert "weights come from pickles (pytorch_model.bin)" in caplog.text
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_run_asks_for_pickles_by_its_config(
    folder: Path, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    torch.save(dict(load_policy(folder).named_parameters()), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    once = {"model.path": str(folder), "trainer.total_steps": 1}
    with pytest.raises(ModelError, match="pickles only"):
        train(train_config(once), reward=length, data=additions)
    asked = train_config({**once, "model.allow_pickle": True})
    assert train(asked, reward=length, data=additions).step == 1


def test_a_name_on_the_hub_is_left_to_transformers() -> None:
    check_weights("someone/some-model")
    assert split_adapters("someone/some-model") == ("someone/some-model", [])


NOT_FOUND = RepositoryNotFoundError("404", response=httpx2.Response(404, request=httpx2.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("some-one/a", OSError("no\nroute"), r"the hub, which cannot be reached \(no route\): correct it$"),
        ("some-one/b", NOT_FOUND, "the hub, which has no model of that name that you may see: correct"),
        ("./c/d/e", None, "or the name of a model on the hub: correct it"),
        (__file__, None, "is a file; expected a model's folder"),
    ],
)
def test_a_name_that_is_no_model_is_said_at_once(
    name: str, answer: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def model_info(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        if answer is not None:
            raise answer

    monkeypatch.setattr("whet.models.folder.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for load in (loading.load_config, load_tokenizer):
        with pytest.raises(ModelError, match=message):
            load(name)
    assert asked == [name, name][: 2 * (answer is not None)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is damaged or names no base_model_name_or_path"),
        ('{"r": 4}', "is damaged or names no base_model_name_or_path"),
        ('{"base_model_name_or_path": null}', r"names no base model; name that as model\.path"),
    ],
)
def test_an_adapter_without_a_base(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path)


def test_adapters_that_lead_nowhere(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(adapter)}))
    with pytest.raises(ModelError, match="names itself as its base"):
        load_tokenizer(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(ModelError, match=r"has no weights: expected adapter_model\.safetensors"):
        load_policy(adapter)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds a whole model and an adapter"):
        load_policy(folder)


def test_a_tokenizer_of_another_model(
    qwen25_folder: Path, train_config: Callable[..., TrainConfig], model_folder: Path, additions: list[dict[str, str]]
) -> None:
    """512 byte-level tokens for the 64 rows of a model of characters."""
    message = (
        r"has token ids up to 511, and the model at .*qwen3 only 64 embedding rows; name the tokenizer that belongs"
    )
    load_tokenizer(qwen25_folder, qwen25_folder)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(qwen25_folder, qwen25_folder, model_folder)
    wrong = {"model.path": str(model_folder), "model.tokenizer_path": str(qwen25_folder)}
    inline = {"reward.num_workers": 0}  # no process to wait for
    with pytest.raises(ModelError, match=message):
        train(train_config({**wrong, **inline}), reward=length, data=additions)
    with pytest.raises(ModelError, match=message):
        train(
            train_config({"model.path": str(qwen25_folder), "ref.model_path": str(model_folder), **inline}),
            data=additions,
            reward=length,
        )
    with pytest.raises(ModelError, match=message):
        train_sft(load_config(SFTConfig, None, wrong, given={"data"}).config, data=[])
    with pytest.raises(ModelError, match=message):
        evaluate(
            load_config(EvalConfig, None, {**wrong, **inline}, given={"data", "reward"}).config, reward=length, data=[]
        )


def test_a_tokenizer_without_padding_says_what_pads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with caplog.at_level(logging.INFO, "whet"):
        load_tokenizer(folder)
    assert "has no padding token; its end token '<|im_end|>' pads" in caplog.text


def test_a_tokenizer_without_a_chat_template(
    folder: Path, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    (folder / "chat_template.jinja").unlink()
    config = train_config({"model.path": str(folder), "data.apply_chat_template": True})
    message = r"has no chat template to use.* Set data\.apply_chat_template=false .* or set data\.chat_template_kwargs"
    with pytest.raises(DataError, match=message):
        train(config, reward=length, data=additions)


def test_a_config_of_an_adapter_that_is_something_else_is_named(tmp_path: Path) -> None:
    for content in (b"[" * 9**5, b"[]", b"\xff", b'{"base_model_name_or_path": 5}'):
        (tmp_path / "adapter_config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"adapter_config\.json is damaged or names no base_model_name_or_path"):
            split_adapters(tmp_path)
