# SPDX-License-Identifier: Apache-2.0
"""Log-probs through whet's attention against transformers' own forward with its processor's outputs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.first import first
from tests.models.encoders.conftest import FAMILIES, image_of, picture, text_of, video_of
from tests.raising import raises
from whet.errors import EngineError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer, load_value_model, outline
from whet.models.outputs import ForwardSettings, model_outputs
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate
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
    """The inputs that transformers' processor would pass to its model's forward."""
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


@pytest.mark.parametrize("family", first(2, CAUSAL, others=pytest.mark.slow))
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
        any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights_of(model, name))
        for name in vision.towers
    )


def weights_of(model: Any, tower: str) -> list[torch.nn.Parameter]:
    return [weight for name, weight in model.base_model.named_parameters() if f"{name}.".startswith(f"{tower}.")]


@pytest.mark.parametrize("packing", [True, False])
def test_images_of_gemma_3_attend_both_ways(packing: bool, folder_of: Folders) -> None:
    """Log-probs and gradients of transformers' own mask, with a window shorter than the row, in rows of a batch."""
    folder = folder_of("gemma3")
    model, reference = load_policy(folder), AutoModelForImageTextToText.from_pretrained(folder)
    vision = encoders_of(model)
    assert vision is not None and vision.both_ways == (515,)
    media = measured(vision)
    ids = ids_of(folder, media)
    stock = stock_inputs(vision, media, ids)
    expected = reference(**stock).logits.log_softmax(-1)
    causal = reference(**{**stock, "token_type_ids": 0 * ids}).logits.log_softmax(-1)
    assert (causal - expected).abs().max() > 1e-3
    length, sampled = ids.shape[1], 5
    at = torch.arange(length - sampled, length)
    column, mask = torch.arange(length)[None].repeat(2, 1), torch.ones(2, length, dtype=torch.int64)
    batch = {
        "input_ids": ids.repeat(2, 1),
        "attention_mask": mask,
        "position_ids": column,
        "response_mask": mask[:, -sampled:],
        "media": [tuple(media)] * 2,
    }
    found = model_outputs(model, batch, frozenset({"log_probs"}), ForwardSettings(packing=packing))["log_probs"]
    own = expected[0, at - 1, ids[0, at]]
    torch.testing.assert_close(found, own.expand(2, -1), atol=5e-6, rtol=0)
    found.mean().backward()
    own.mean().backward()
    other = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            worst = (weight.grad - other[name].grad).abs().max()
            assert worst <= 1e-5 * max(1.0, float(weight.grad.abs().max())), (name, worst)


def test_the_native_engine_refuses_media_that_attend_both_ways(folder_of: Folders) -> None:
    folder = folder_of("gemma3")
    model, engine = load_policy(folder), NativeEngine()
    vision = encoders_of(model)
    assert vision is not None
    media = measured(vision)
    with raises(EngineError, "row 3", found=re.compile("images.*gemma3"), change=re.compile("engine.name=hf")):
        engine.check_media(vision, media, "row 3")
    engine.attach(model, 0)
    ids = tuple(ids_of(folder, media)[0].tolist())
    with raises(EngineError, "request a", found=re.compile("images.*gemma3")):
        generate(engine, [Request("a", ids, SamplingParams(2), 0, media=tuple(media))], 60.0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision"])
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
    runs = [(each.tokens.token_id, each.tokens.count) for each in media if each.tokens]
    ids = torch.tensor([[token for token, count in runs for _ in range(count)] + [300]])
    places = torch.arange(ids.shape[1])[None]
    whole = model.base_model(input_ids=ids, position_ids=places, **vision.outputs(together))[0]
    halves = [half for each in together for half in (each.part(slice(2)), each.part(slice(2, None)))]
    again = model.base_model(input_ids=ids, position_ids=places, **vision.outputs(halves))[0]
    torch.testing.assert_close(again, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", first(2, FAMILIES, others=pytest.mark.slow))
def test_a_dummy_pass_is_0_and_reaches_every_tower(family: str, folder_of: Folders) -> None:
    model = load_policy(folder_of(family))
    vision = encoders_of(model)
    assert vision is not None
    out = vision.dummy(model)
    assert float(out.detach()) == 0
    out.backward()
    for name in vision.towers:
        grads = [weight.grad for weight in weights_of(model, name)]
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
