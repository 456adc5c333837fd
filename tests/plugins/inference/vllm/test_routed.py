# SPDX-License-Identifier: Apache-2.0
"""Experts that vLLM tells, in the form of its 0.32: base64 of a .npy file with [tokens - 1, layers, k] numbers."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.raising import raises
from whet.config.schema import ModelConfig
from whet.errors import ConfigError, EngineError
from whet.models.load import body_of, outline
from whet.models.routing import as_column
from whet.plugins.inference.servers.environment import Interpreter
from whet.plugins.inference.vllm.engine import PACKAGE, VLLMEngine
from whet.plugins.inference.vllm.plain import KEY, check_routed, mixtures, routed_of
from whet.plugins.lessons.init_model import init_model
from whet.rollout.protocol import Completion

# vLLM's numpy2base64 of [[[1, 5], [0, 0], [255, 2]], [[3, 4], [0, 0], [7, 6]]], uint8
RECORDED = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDMsIDIpLCB9ICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoBBQAA/wIDBAAABwY="
)
TWO = Completion((8, 9), (-1.0, -2.0), "length", ((0, 2),))


def answer(told: str | None) -> dict[str, Any]:
    return {"choices": [{"routed_experts": told}]}


def test_experts_of_the_layers_that_have_some() -> None:
    routed = routed_of(answer(RECORDED), TWO, [0, 2])  # layer 1 is dense
    column = as_column([routed], 3)
    assert column is not None and column.dtype == torch.int16
    assert column.tolist() == [[[[1, 5], [255, 2]], [[3, 4], [7, 6]], [[-1, -1], [-1, -1]]]]


def test_tokens_without() -> None:
    """Of an attempt that ended before its answer, beside tokens of one that has them."""
    assert routed_of(answer(None), TWO, [0, 2]) == (b"", b"")
    assert routed_of(answer(None), TWO, []) == ()
    column = as_column([(b"", *routed_of(answer(RECORDED), TWO, [2]))], 3)
    assert column is not None and column.tolist() == [[[[-1, -1]], [[255, 2]], [[7, 6]]]]


@pytest.mark.parametrize("numbers", [[0, 3], [0]])
def test_another_shape(numbers: list[int]) -> None:
    completion = TWO if numbers[-1] else replace(TWO, token_ids=(8,))
    with raises(EngineError, "routed_experts of vLLM", found="shape (2, 3, 2)"):
        routed_of(answer(RECORDED), completion, numbers)


def test_layers_with_experts(model_folder: Path, tmp_path: Path) -> None:
    folder = init_model(tmp_path / "model", "deepseek_v3", "nano", num_layers=3, max_position_embeddings=64)
    with torch.device("meta"):
        dense, mixture = outline(model_folder), outline(folder)
    first = body_of(mixture).config.first_k_dense_replace
    assert mixtures(mixture) == [*range(first, 3)] and 0 < first < 3
    with raises(ConfigError, KEY, found=True):
        mixtures(dense)


def test_versions_that_tell_none(tmp_path: Path) -> None:
    found = Interpreter("python", tmp_path, PACKAGE)
    (tmp_path / "sampling_params.py").write_text("routed_experts: int = 0")
    given = {"routed_experts": True}
    check_routed(found, {"routed_experts": False}, False)
    for is_plain in (False, True):
        with raises(ConfigError, KEY, found=True):
            check_routed(found, given, is_plain)
    (tmp_path / "sampling_params.py").write_text("routed_experts_prompt_start: int = 0")
    check_routed(found, given, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_build_for_cpus_tells_none(has_vllm: None, tmp_path: Path) -> None:
    """vLLM's model runner V2 alone tells experts, and it wants a Triton that computes on the device."""
    folder = init_model(tmp_path / "model", "qwen3_moe", "nano", num_layers=2, max_position_embeddings=512)
    options = {"plain": True, "routed_experts": True, "restarts": 0, "kv_cache_bytes": 2**26, "threads": 1}
    engine = VLLMEngine(torch.float32, 8, torch.device("cpu"), ModelConfig(path=str(folder)), **options)
    try:
        with raises(EngineError, change=re.compile("Model Runner V2 requires Triton")):
            engine.ready()
    finally:
        engine.close()


def test_the_recorded_form() -> None:
    """The bytes that numpy writes for it today."""
    file = io.BytesIO()
    np.save(file, np.array([[[1, 5], [0, 0], [255, 2]], [[3, 4], [0, 0], [7, 6]]], np.uint8))
    assert base64.b64encode(file.getvalue()).decode() == RECORDED
