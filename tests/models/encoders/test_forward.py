# SPDX-License-Identifier: Apache-2.0
"""Log-probs through whet's attention against transformers' own forward with its processor's outputs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.models.encoders.conftest import FAMILIES, image_of, picture, text_of, video_of
from tests.raising import raises
from whet.errors import DataError, ModelError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer, load_value_model, outline
from whet.types import Media

Folders = Callable[[str], Path]
TEXT = "{0} What is in it? And {1} now?"
CAUSAL = [family for family in FAMILIES if family != "gemma3"]


def measured(vision: Encoders) -> list[Media]:
    images = [picture(1, 60, 44), picture(2, 30, 30)]
    return [vision.measured(image_of(image), image.height, image.width) for image in images]


def ids_of(folder: Path, media: list[Media]) -> torch.Tensor:
    return torch.tensor([load_tokenizer(folder)(TEXT.format(*(text_of(each) for each in media)))["input_ids"]])


def stock_inputs(vision: Encoders, media: list[Media], ids: torch.Tensor) -> dict[str, Any]:
    """What transformers' processor would pass to its model's forward."""
    parts = [vision.prepared(each) for each in media]
    axis = 1 if vision.config.model_type == "smolvlm" else 0
    found: dict[str, Any] = {name: torch.cat([part[name] for part in parts], axis) for name in parts[0]}
    if vision.config.model_type.startswith("qwen"):
        found["mm_token_type_ids"] = (ids == vision.config.image_token_id).int()
    if vision.config.model_type == "gemma3":
        found["token_type_ids"] = (ids == vision.config.image_token_id).int()
    return found | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def position_ids(model: Any, stock: dict[str, Any]) -> torch.Tensor:
    if "mm_token_type_ids" not in stock:
        return torch.arange(stock["input_ids"].shape[1])[None]
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    found: torch.Tensor = model.base_model.get_rope_index(**{name: stock[name] for name in names})[0]
    return found


@pytest.mark.parametrize("family", CAUSAL)
def test_log_probs_and_gradients_equal_transformers_own(family: str, folder_of: Folders) -> None:
    folder = folder_of(family)
    model, reference = load_policy(folder), AutoModelForImageTextToText.from_pretrained(folder)
    vision = encoders_of(model)
    assert vision is not None
    media = measured(vision)
    ids = ids_of(folder, media)
    stock = stock_inputs(vision, media, ids)
    expected = reference(**stock).logits.log_softmax(-1)
    places = position_ids(model, stock)
    hidden = model.base_model(input_ids=ids, position_ids=places, use_cache=False, **vision.encode(model, media))[0]
    found = model.get_output_embeddings()(hidden).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    without = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)
    assert (without - expected).abs().max() > 1e-3  # the images are seen

    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    for out in (found, expected):
        (out * weights).mean().backward()
    trained, other = dict(model.named_parameters()), dict(reference.named_parameters())
    assert trained.keys() == other.keys()
    for name, weight in trained.items():
        if other[name].grad is None:
            assert weight.grad is None, name
        else:
            torch.testing.assert_close(weight.grad, other[name].grad, atol=1e-6, rtol=1e-4, msg=name)
    assert all(
        any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in part.parameters())
        for part in (model.base_model.get_submodule(name) for name in vision.towers)
    )


def test_the_forward_of_gemma_3_holds_with_transformers_mask_and_its_images_are_refused(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("gemma3")
    model, reference = load_policy(folder), AutoModelForImageTextToText.from_pretrained(folder)
    vision = encoders_of(model)
    assert vision is not None and vision.by_kind["image"].both_ways
    with raises(DataError, "gemma3", change=re.compile("Qwen-VL, SmolVLM")):
        measured(vision)
    with monkeypatch.context() as patch:
        patch.setattr(type(vision.by_kind["image"]), "both_ways", False)
        media = measured(vision)
    ids = ids_of(folder, media)
    stock = stock_inputs(vision, media, ids)
    expected = reference(**stock).logits
    with raises(ModelError, "gemma3", change=re.compile("Qwen-VL, SmolVLM")):
        vision.encode(model, media)
    encoded = vision.outputs(vision.features(model, media))
    causal = model(input_ids=ids, **encoded).logits
    assert (causal - expected).abs().max() > 1e-3
    model.set_attn_implementation("sdpa")
    rest = {name: value for name, value in stock.items() if name != "pixel_values"}
    torch.testing.assert_close(model(**rest, **encoded).logits, expected, atol=5e-6, rtol=0)
    text = {"input_ids": torch.tensor([[300, 301, 302]])}
    model.set_attn_implementation({"text_config": "whet"})
    torch.testing.assert_close(model(**text).logits, reference(**text).logits, atol=5e-6, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_features_are_cut_and_joined_by_tokens_of_images_and_videos(family: str, folder_of: Folders) -> None:
    model = load_policy(folder_of(family))
    vision = encoders_of(model)
    assert vision is not None
    video = vision.measured(video_of([picture(seed, 40, 40) for seed in range(4)]), 40, 40, [0.0, 0.5, 1.0, 1.5])
    first, second = measured(vision)
    media = [first, video, second]
    together = vision.features(model, media)
    assert [len(each.hidden) for each in together] == [each.tokens.count for each in media if each.tokens]
    for each, features in zip(media, together, strict=True):
        (alone,) = vision.features(model, [each])
        torch.testing.assert_close(alone.hidden, features.hidden, atol=2e-6, rtol=0)
        for one, other in zip(alone.deepstack, features.deepstack, strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
    cut = together[1].part(slice(3, 7))
    assert torch.equal(cut.hidden, together[1].hidden[3:7])
    assert [len(layer) for layer in cut.deepstack] == [4] * len(cut.deepstack)
    token = {"image": vision.forbidden[0], "video": vision.forbidden[-1]}
    counts = [(each.kind, each.tokens.count) for each in media if each.tokens]
    ids = torch.tensor([[token[kind] for kind, count in counts for _ in range(count)] + [300]])
    places = torch.arange(ids.shape[1])[None]
    whole = model.base_model(input_ids=ids, position_ids=places, **vision.outputs(together))[0]
    halves = [half for each in together for half in (each.part(slice(2)), each.part(slice(2, None)))]
    again = model.base_model(input_ids=ids, position_ids=places, **vision.outputs(halves))[0]
    torch.testing.assert_close(again, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dummy_pass_is_0_and_reaches_every_tower(family: str, folder_of: Folders) -> None:
    model = load_policy(folder_of(family))
    vision = encoders_of(model)
    assert vision is not None
    out = vision.dummy(model)
    assert float(out.detach()) == 0
    out.backward()
    for name in vision.towers:
        grads = [weight.grad for weight in model.base_model.get_submodule(name).parameters()]
        assert any(grad is not None for grad in grads)
        assert all(grad is None or not grad.any() for grad in grads)


def test_value_models_and_outlines_know_how_their_model_reads_images(folder_of: Folders) -> None:
    folder = folder_of("qwen2_5_vl")
    critic, policy = load_value_model(folder), load_policy(folder)
    vision = encoders_of(critic)
    assert vision is not None
    media = measured(vision)
    assert torch.equal(vision.features(critic, media)[0].hidden, vision.features(policy, media)[0].hidden)  # type: ignore[arg-type]
    with torch.device("meta"):
        for is_value_model in (False, True):
            made = outline(folder, is_value_model=is_value_model)
            assert encoders_of(made) is not None
            assert {name for name, _ in made.named_parameters()} == {
                name for name, _ in (critic if is_value_model else policy).named_parameters()
            }
