# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, LlavaConfig, PaliGemmaConfig

from tests.first import first
from tests.models.encoders.conftest import FAMILIES, image_of, picture
from tests.raising import raises
from whet.checkpoints.export import write_weights
from whet.config.schema import LoraConfig
from whet.errors import ModelError
from whet.models.encoders.load import encoders_of
from whet.models.freeze import freeze
from whet.models.load import load_policy, load_tokenizer, load_value_model, outline
from whet.models.lora import adapted_layers, add_adapter, merged_weights, save_adapter
from whet.plugins.lessons.init_model import init_model

Folders = Callable[[str], Path]


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    return out


@pytest.mark.parametrize("family", first(2, FAMILIES, others=pytest.mark.slow))
def test_the_text_has_whets_attention_and_the_tower_torchs(family: str, folder_of: Folders) -> None:
    model = load_policy(folder_of(family))
    assert model.config.get_text_config()._attn_implementation == "whet"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    vision = encoders_of(model)
    assert vision is not None and encoders_of(load_tokenizer(folder_of(family))) is not None
    assert set(vision.forbidden) <= {
        model.config.image_token_id,
        *([model.config.video_token_id] if len(vision.forbidden) > 1 else []),
    }


def test_a_text_model_has_no_vision(tmp_path: Path) -> None:
    folder = init_model(tmp_path / "text", "qwen3", "nano", num_layers=1)
    assert encoders_of(load_policy(folder)) is None
    assert encoders_of(load_tokenizer(folder)) is None
    assert encoders_of(torch.nn.Linear(1, 1)) is None


def test_missing_and_foreign_processors_are_errors_with_a_way_out(folder_of: Folders, tmp_path: Path) -> None:
    missing = copied(folder_of("qwen2_5_vl"), tmp_path / "missing")
    (missing / "preprocessor_config.json").unlink()
    for load in (load_policy, load_tokenizer):
        with raises(ModelError, f"{missing}", found=re.compile(r"\(qwen2_5_vl\) .*preprocessor_config.json")):
            load(missing)
    foreign = init_model(tmp_path / "foreign", "qwen2.5_vl", "nano", patch_size=14, num_layers=1)
    shutil.copy(folder_of("qwen2_5_vl") / "preprocessor_config.json", foreign)
    key = f"{foreign}: preprocessor_config.json: patch_size"
    with raises(ModelError, key, found=8, expected=re.compile("^14, ")):
        load_policy(foreign)
    shutil.copy(folder_of("smolvlm") / "preprocessor_config.json", foreign)
    found, expected = re.compile("qwen2_5_vl .*SmolVLMImageProcessorPil"), re.compile("Qwen2VLImageProcessor")
    with raises(ModelError, f"{foreign}", found=found, expected=expected):
        load_policy(foreign)
    (foreign / "preprocessor_config.json").write_text("{")
    with raises(ModelError, f"{foreign}", found=re.compile(r"preprocessor_config\.json")):
        load_policy(foreign)


@pytest.mark.parametrize(("made", "name"), [(LlavaConfig, "llava"), (PaliGemmaConfig, "paligemma")])
def test_a_model_with_media_and_without_an_encoder_is_named(made: Any, name: str, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    for load in (load_policy, outline):
        expected = re.compile("gemma3, internvl, llava_onevision, qwen2_5_vl, .*smolvlm")
        with raises(ModelError, f"{tmp_path}", found=re.compile(f"is {name}, "), expected=expected):
            load(tmp_path)


def test_processors_in_one_file_are_read_too(folder_of: Folders, tmp_path: Path) -> None:
    folder = copied(folder_of("qwen2_5_vl"), tmp_path / "together")
    parts = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
    together = {name: json.loads((folder / file).read_text()) for name, file in parts.items()}
    (folder / "processor_config.json").write_text(json.dumps(together))
    for file in parts.values():
        (folder / file).unlink()
    vision, other = encoders_of(load_tokenizer(folder)), encoders_of(load_tokenizer(folder_of("qwen2_5_vl")))
    assert vision is not None and other is not None
    assert vision.by_kind["image"].processor.to_dict() == other.by_kind["image"].processor.to_dict()


@pytest.mark.parametrize("family", first(2, FAMILIES, others=pytest.mark.slow))
def test_frozen_towers_and_adapters_of_the_language_model(family: str, folder_of: Folders) -> None:
    model = load_policy(folder_of(family))
    vision = encoders_of(model)
    assert vision is not None and not vision.is_frozen(model)
    freeze(model, ["vision"])
    assert vision.is_frozen(model)
    towers = tuple(f"model.{name}." for name in vision.towers)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if not f"{name}.".startswith(towers)} != set()

    add_adapter(model, LoraConfig(rank=2), seed=0)
    layers = adapted_layers(model)
    assert layers and not any(name.startswith(towers) for name in layers)
    media = vision.measured(image_of(picture(1, 40, 40)), 40, 40)
    before = vision.features(load_policy(folder_of(family)), [media])[0].hidden
    assert torch.equal(vision.features(model, [media])[0].hidden, before)


def test_a_target_that_only_the_tower_has_adapts_the_tower(folder_of: Folders) -> None:
    model = load_policy(folder_of("qwen2_5_vl"))
    add_adapter(model, LoraConfig(rank=2, target_modules=["qkv", "q_proj"]), seed=0)
    assert {name.split(".")[1] for name in adapted_layers(model)} == {"visual", "language_model"}


def test_an_adapters_folder_merges_into_the_language_model_alone(folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("smolvlm")  # its tower and its language model have layers of the same names
    model, untouched = load_policy(folder), load_policy(folder)
    add_adapter(model, LoraConfig(rank=2), seed=0)
    for layer in adapted_layers(model).values():
        torch.nn.init.ones_(layer.lora_B["default"].weight)
    weights = {name: weight.detach() for name, weight in model.named_parameters() if "lora_" in name}
    config = model.peft_config["default"]
    config.base_model_name_or_path = str(folder)
    save_adapter(weights, config, tmp_path / "adapter")
    merged = load_policy(tmp_path / "adapter")
    vision = encoders_of(merged)
    assert vision is not None
    expected = dict(merged_weights(model))
    tower = set(vision.tower_weights(merged))
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, expected[name])
        changed = not torch.equal(weight, untouched.get_parameter(name))
        assert changed == ("_proj" in name and name not in tower), name


def test_the_tower_of_a_value_model_can_be_frozen(folder_of: Folders) -> None:
    critic = load_value_model(folder_of("smolvlm"))
    vision = encoders_of(critic)
    assert vision is not None
    freeze(critic, ["vision"])
    assert vision.is_frozen(critic) and critic.value_head.weight.requires_grad


@pytest.mark.parametrize("family", first(2, FAMILIES, others=pytest.mark.slow))
def test_exported_weights_have_the_names_of_transformers_folders(
    family: str, folder_of: Folders, tmp_path: Path
) -> None:
    model = load_policy(folder_of(family))
    write_weights(
        tmp_path, ((name, weight.detach()) for name, weight in model.named_parameters()), model, torch.float32, {}
    )
    with (
        safe_open(folder_of(family) / "model.safetensors", framework="pt") as expected,
        safe_open(tmp_path / "model.safetensors", framework="pt") as found,
    ):
        assert set(found.keys()) == set(expected.keys())
        assert all(torch.equal(found.get_tensor(name), expected.get_tensor(name)) for name in found.keys())  # noqa: SIM118


def test_saved_processors_equal_those_read(folder_of: Folders, tmp_path: Path) -> None:
    vision = encoders_of(load_tokenizer(folder_of("qwen3_vl")))
    assert vision is not None
    vision.own[0].save(tmp_path)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert json.loads((tmp_path / file).read_text()) == json.loads((folder_of("qwen3_vl") / file).read_text())


@pytest.mark.parametrize("arch", first(1, ["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"], others=pytest.mark.slow))
def test_new_folders_are_equal_bytes_and_read_media_in_chats(arch: str, tmp_path: Path) -> None:
    folders = [init_model(tmp_path / name, arch, "nano", num_layers=2, patch_size=8, seed=3) for name in "ab"]  # type: ignore[arg-type]
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    model = AutoModelForImageTextToText.from_pretrained(folders[0])
    assert 600_000 < model.num_parameters() < 1_100_000
    tokenizer = load_tokenizer(folders[0])
    vision = encoders_of(tokenizer)
    assert vision is not None
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "video"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    inside = ("<image>", "<video>")
    if arch != "smolvlm":
        inside = tuple(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))  # type: ignore[assignment]
    assert text == f"<|im_start|>user\n{inside[0]}a{inside[1]}<|im_end|>\n"
    media = vision.measured(image_of(picture(1, 64, 64)), 64, 64)
    assert media.tokens is not None
    assert media.tokens.count == (20 if arch == "smolvlm" else 16)
    assert (
        tokenizer.convert_tokens_to_ids(media.tokens.text[-1 if arch != "smolvlm" else 1][0]) == media.tokens.token_id
    )
    with pytest.raises(Exception, match="text and images and videos"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "audio"}]}], tokenize=False)
