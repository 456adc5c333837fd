# SPDX-License-Identifier: Apache-2.0
"""Sampling from prompts with images and videos: tokens of transformers' generate, whatever is shared or resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests import pictures
from whet.models.encoders.base import Encoders, _cache_of
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.types import Media

GREEDY = SamplingParams(10, temperature=0.0)


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]  # an image of SmolVLM is cut into tiles of many patches
OTHERS = [pytest.param(name, marks=SLOW) for name in (*sorted({*pictures.QWEN} - {"qwen3_vl"}), "smolvlm")]


@pytest.fixture(scope="module", params=["qwen3_vl", *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.seeing_folder(tmp_path_factory.mktemp("models") / "seeing", request.param)


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return load_policy(folder)


def sampled(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    return generate(engine, requests, deadline_seconds=60.0)


def native(model: PreTrainedModel, **options: Any) -> NativeEngine:
    engine = NativeEngine(**{"kv_cache_bytes": 2**24, **options})
    engine.attach(model, 0)
    return engine


def prompts(folder: Path) -> list[tuple[tuple[int, ...], tuple[Media, ...]]]:
    """With an image, two, a video between images, and none."""
    tokenizer = load_tokenizer(folder)
    vision = encoders_of(tokenizer)
    assert vision is not None
    one, two, three = (pictures.image(vision, seed, size) for seed, size in enumerate(pictures.SIZES))
    film = pictures.video(vision, 5, 4)
    return [(pictures.asked(tokenizer, media), media) for media in ((one,), (two, three), (one, film, two), ())]


def expected(folder: Path, vision: Encoders, ids: tuple[int, ...], media: tuple[Media, ...]) -> list[int]:
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    prompt, given = torch.tensor([ids]), pictures.together([vision.prepared(each) for each in media])
    if media and vision.config.model_type.startswith("qwen"):
        image, film = vision.config.image_token_id, vision.config.video_token_id
        given["mm_token_type_ids"] = (prompt == image).int() + 2 * (prompt == film).int()
    with torch.no_grad():
        out = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            **given,
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_tokens_are_those_of_generate(kind: type[Any], folder: Path, model: PreTrainedModel) -> None:
    """Three answers to each of several prompts side by side."""
    engine, vision = kind(), encoders_of(model)
    engine.attach(model, 0)
    assert vision is not None
    asked = prompts(folder)
    requests = [
        Request(f"{number}:{sample}", ids, GREEDY, sample, media=media)
        for number, (ids, media) in enumerate(asked)
        for sample in range(3)
    ]
    answers = [list(each.token_ids) for each in sampled(engine, requests)]
    for number, (ids, media) in enumerate(asked):
        assert answers[3 * number : 3 * number + 3] == [expected(folder, vision, ids, media)] * 3


def test_an_image_is_encoded_once(folder: Path, model: PreTrainedModel) -> None:
    """For all answers, and again only where the weights of the tower changed."""
    engine, vision, (ids, media) = native(model), encoders_of(model), prompts(folder)[0]
    assert vision is not None
    encoder, calls = vision.by_kind["image"], []
    encode, encoder.embed = encoder.embed, lambda *given: calls.append(1) or encode(*given)  # type: ignore

    def ask(attempt: int) -> list[Completion]:
        return sampled(engine, [Request(f"{attempt}:{n}", ids, GREEDY, n, media=media) for n in range(4)])

    first = ask(0)
    assert len(calls) == 1 and ask(1) == first and len(calls) == 1
    engine.attach(model, 1)  # a version in which the text changed
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    ask(2)
    assert len(calls) == 1
    with torch.no_grad():
        vision._weights(model)[0].mul_(1.5)
    engine.attach(model, 2)
    assert ask(3) != first and len(calls) == 2
    assert _cache_of(model.base_model, engine._tower[1]).held_bytes > 0  # type: ignore[index]


def test_a_turn_goes_on_in_the_middle_of_an_image(folder: Path, model: PreTrainedModel) -> None:
    """Blocks of 16 tokens end inside images; another image in the same place shares only the tokens before it."""
    tokenizer, vision = load_tokenizer(folder), encoders_of(model)
    assert vision is not None
    first, second, other = (pictures.image(vision, seed, (112, 112)) for seed in (1, 2, 3))
    shared = pictures.asked(tokenizer, [first])
    engine = native(model)
    [answer] = sampled(engine, [Request("a", shared, GREEDY, 0, media=(first,), keeps_cache=True)])
    context = shared + answer.token_ids + pictures.asked(tokenizer, [second], "and now")
    for number, media in enumerate(((first, second), (first, other))):
        request = Request(f"b{number}", context, GREEDY, 0, media=media, opening=len(shared), keeps_cache=True)
        [alone], [after] = sampled(native(model), [request]), sampled(engine, [request])
        assert after.token_ids == alone.token_ids
        torch.testing.assert_close(after.log_probs, alone.log_probs, atol=5e-6, rtol=0)


def test_a_request_goes_on_from_its_tokens(folder: Path, model: PreTrainedModel) -> None:
    params = SamplingParams(10, temperature=1.0)
    for ids, media in prompts(folder):
        [whole] = sampled(native(model), [Request("a", ids, params, 3, media=media)])
        rest = Request("a", ids, params, 3, attempt=1, sampled_ids=whole.token_ids[:4], media=media)
        [end] = sampled(native(model), [rest])
        assert end.token_ids == whole.token_ids[4:]


@pytest.mark.slow
def test_preempted_requests_with_images(folder: Path, model: PreTrainedModel) -> None:
    """A cache that holds only some of them."""
    params = SamplingParams(64, temperature=1.0)
    requests = [
        Request(f"{number}:{sample}", ids, params, 10 * number + sample, media=media)
        for number, (ids, media) in enumerate(prompts(folder))
        for sample in range(4)
    ]
    longest = max(len(ids) for ids, _ in prompts(folder)) + params.max_new_tokens
    blocks = max(16, longest // 16 + 4)  # of 16 tokens, 16 KiB each
    roomy, tight = native(model), native(model, kv_cache_bytes=blocks * 16 * 1024)
    answers = sampled(tight, requests)
    assert answers == sampled(roomy, requests) and any(each.preemptions for each in answers)
