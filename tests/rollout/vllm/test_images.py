# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos: vLLM answers as the native engine, also under new weights of the tower."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
import server_conformance as servers
from pictures import QWEN, asked, image, seeing_folder, video

from whet.errors import EngineError
from whet.models.load import load_policy, load_tokenizer
from whet.models.vision.base import Vision
from whet.models.vision.load import vision_of
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.rollout.vllm.engine import VLLMEngine
from whet.types import Media

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GAP = 5e-6  # of log-probs in float32


@pytest.fixture(scope="module", params=QWEN[:2])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model."""
    folder = seeing_folder(tmp_path_factory.mktemp("models") / "plain", request.param)
    return load_policy(folder).eval()


@pytest.fixture(autouse=True)
def first_weights(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Every test begins with the model's own weights, and with nothing under way."""
    servers.reset(engine, model)


def shown(model: PreTrainedModel) -> list[tuple[Media, ...]]:
    """The media of some prompts: one image, none, three of different sizes, the same one twice."""
    vision = seeing(model)
    first, *others = (image(vision, seed, size) for seed, size in enumerate(((56, 56), (84, 56), (56, 140))))
    return [(first,), (), (first, *others), (others[0], others[0])]


def seeing(model: PreTrainedModel) -> Vision:
    found = vision_of(model)
    assert found is not None
    return found


def requests(
    model: PreTrainedModel, prompts: Sequence[tuple[Media, ...]], n: int = 2, **params: float
) -> list[Request]:
    tokenizer, forbidden = load_tokenizer(model.config._name_or_path), seeing(model).forbidden
    words = tuple((each,) for each in forbidden)
    sampling = SamplingParams(16, bad_words=words, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    prompt_ids = [asked(tokenizer, media, f"count {number}") for number, media in enumerate(prompts)]
    return [
        Request(f"{number}:{sample}", prompt_ids[number], sampling, 10 * number + sample, media=media)
        for number, media in enumerate(prompts)
        for sample in range(n)
    ]


def native(model: PreTrainedModel, made: Sequence[Request]) -> list[Completion]:
    engine = NativeEngine(torch.float32, 16, servers.CPU)
    engine.attach(model, 0)
    return generate(engine, made)


def assert_equal(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    gaps = [
        abs(a - b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one.log_probs, other.log_probs, strict=True)
    ]
    assert max(gaps) < GAP


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_the_native_engine(engine: VLLMEngine, model: PreTrainedModel, temperature: float) -> None:
    made = requests(model, shown(model), temperature=temperature)
    assert_equal(generate(engine, made), native(model, made))


def test_another_image_gives_another_answer(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """The prompts have the same token ids."""
    made = requests(model, [(image(seeing(model), seed),) for seed in range(3)], n=1)
    made = [replace(each, prompt_ids=made[0].prompt_ids) for each in made]
    found = generate(engine, made)
    assert len({each.log_probs for each in found}) == 3
    assert_equal(found, native(model, made))


def test_new_weights_reach_the_tower(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Features and prefixes of the old weights are not used again."""
    made = requests(model, shown(model))
    before = generate(engine, made)
    other = load_policy(model.config._name_or_path).eval()
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.mul_(1.5 if ".visual." in name else 1.0)
    engine.load(servers.named(other), 1)
    after = generate(engine, made)
    assert max(abs(a - b) for a, b in zip(before[0].log_probs, after[0].log_probs, strict=True)) > 100 * GAP
    assert_equal(after, native(other, made))
    assert all(each.versions == ((1, 16),) for each in after)


def test_patch_tokens_are_not_sampled(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Only patches and one other token are allowed, and patches are banned."""
    [made] = requests(model, shown(model)[:1], n=1, temperature=1.0)
    made = replace(made, params=replace(made.params, allowed_token_ids=(*seeing(model).forbidden, 7)))
    [found] = generate(engine, [made])
    assert found.token_ids == (7,) * 16


def test_a_request_goes_on_behind_its_sampled_tokens(engine: VLLMEngine, model: PreTrainedModel) -> None:
    made = requests(model, shown(model), n=1)
    whole = generate(engine, made)
    rest = [
        replace(each, uid=f"rest {each.uid}", sampled_ids=done.token_ids[:5])
        for each, done in zip(made, whole, strict=True)
    ]
    assert [each.token_ids for each in generate(engine, rest)] == [each.token_ids[5:] for each in whole]


def test_videos(engine: VLLMEngine, model: PreTrainedModel) -> None:
    seen = video(seeing(model), 0, 6), image(seeing(model), 1)
    made = requests(model, [seen, seen[:1]])
    assert_equal(generate(engine, made), native(model, made))


def test_pixel_values_are_freed(engine: VLLMEngine, model: PreTrainedModel) -> None:
    generate(engine, requests(model, shown(model)))
    assert not engine._media._files and not engine._media._users


def test_media_that_were_not_measured_are_refused(engine: VLLMEngine, model: PreTrainedModel) -> None:
    [made] = requests(model, shown(model)[:1], n=1)
    with pytest.raises(EngineError, match="has audios, and the model reads text, images, videos"):
        engine.submit(replace(made, media=(replace(made.media[0], kind="audio"),)))
