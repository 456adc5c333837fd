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


@pytest.fixture(scope="module", params=QWEN)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model whose answers depend on its images: its tower's output is enlarged."""
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


def requests(model: PreTrainedModel, prompts: Sequence[tuple[Media, ...]], n: int = 2, **params: float) -> list[Request]:
    tokenizer, forbidden = load_tokenizer(model.config._name_or_path), seeing(model).forbidden
    sampling = SamplingParams(**{"max_new_tokens": 16, "temperature": 0.0, **params}, bad_words=tuple((each,) for each in forbidden))  # type: ignore[arg-type]
    return [
        Request(f"{number}:{sample}", asked(tokenizer, media, f"count {number}"), sampling, 10 * number + sample, media=media)
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
