# SPDX-License-Identifier: Apache-2.0
"""Rollout engines against the model's own forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from whet.errors import DeadlineError, EngineError
from whet.models.load import load_policy
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, RolloutEngine, SamplingParams

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native": NativeEngine,
    # room for three sequences at a time, and a cache that holds few of them
    "native, short of everything": lambda: NativeEngine(max_batch_size=3, kv_cache_bytes=2 * 2 * 2 * 16 * 32 * 4 * 24),
    "hf": HFEngine,
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    return ENGINES[request.param]()


@pytest.fixture(scope="module", params=["model_folder", "qwen25_folder"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    loaded = load_policy(request.getfixturevalue(request.param)).eval()
    with torch.no_grad():  # random weights say nearly the same of every token: sharpen them
        loaded.get_output_embeddings().weight.mul_(8)
    return loaded


SAMPLING = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}]


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_log_probs_are_the_models_own(engine: RolloutEngine, model: PreTrainedModel, params: dict[str, float]) -> None:
    engine.attach(model, 0)
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_tokens_are_those_that_sampling_draws(
    engine: RolloutEngine, model: PreTrainedModel, params: dict[str, float]
) -> None:
    engine.attach(model, 0)
    suite.check_choices(engine, model, suite.requests(seed=1, **params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_alone_and_among_others(model: PreTrainedModel, dtype: torch.dtype) -> None:
    native = NativeEngine(dtype=dtype)
    native.adopt(model)
    suite.check_company_does_not_matter(native, suite.requests(groups=16, n=8, longest=40))


def test_weights_from_outside(model: PreTrainedModel, engine: RolloutEngine) -> None:
    engine.adopt(model)
    suite.check_weights(engine, model, suite.requests(groups=2))


def test_different_sampling_in_one_batch(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    mixed = [made for params in SAMPLING for made in suite.requests(groups=2, n=2, **params)]
    alone = [native.generate(suite.requests(groups=2, n=2, **params)) for params in SAMPLING]
    assert [c.token_ids for c in native.generate(mixed)] == [c.token_ids for part in alone for c in part]


def test_equal_prompts_are_computed_once(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    seen: list[int] = []
    plain = native._forward

    def counted(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(ids))
        return plain(ids, *rest)  # type: ignore[arg-type]

    native._forward = counted  # type: ignore[method-assign]
    native._decode = counted
    prompt = tuple(range(3, 36))
    native.generate([Request(prompt, SamplingParams(1), key) for key in range(20)])
    assert seen == [48]  # 33 tokens, padded to a multiple of 16, once for 20 requests; one token needs no decode step


def test_attached_module_is_not_copied_and_goes_back_to_training(model: PreTrainedModel) -> None:
    native = NativeEngine()
    model.train()
    native.attach(model, 0)
    made = suite.requests(groups=2)
    before = native.generate(made)
    assert model.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    try:
        assert native.generate(made) != before
    finally:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(1.5)
        model.eval()


def test_a_request_that_can_never_fit_is_refused(model: PreTrainedModel) -> None:
    native = NativeEngine(kv_cache_bytes=2 * 2 * 2 * 16 * 32 * 4 * 4)
    native.attach(model, 0)
    with pytest.raises(EngineError, match=r"may need 110 tokens, the KV cache holds 48; raise rollout.kv_cache_bytes"):
        native.generate([Request(tuple(range(3, 13)), SamplingParams(100), 0)])


def test_empty_prompts_and_limits_are_refused(model: PreTrainedModel) -> None:
    native = NativeEngine()
    native.attach(model, 0)
    with pytest.raises(EngineError, match="at least 1"):
        native.generate([Request((), SamplingParams(4), 0)])


@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_a_rollout_that_takes_too_long_is_named(
    make: type[NativeEngine] | type[HFEngine], model: PreTrainedModel
) -> None:
    late = make(deadline_seconds=0.0)
    late.attach(model, 0)
    with pytest.raises(DeadlineError, match=r"answers; raise rollout\.deadline_seconds"):
        late.generate(suite.requests())


def test_no_weights_yet(engine: RolloutEngine) -> None:
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(suite.requests())


def test_blocks_come_back(model: PreTrainedModel) -> None:
    native = NativeEngine(max_batch_size=4)
    native.attach(model, 0)
    native.generate(suite.requests(groups=6, n=5))
    cache = native._require_cache()
    assert cache.num_free == cache.num_blocks


def test_sliding_window(tmp_path: Path, model_folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(model_folder)
    config.use_sliding_window, config.sliding_window = True, 4
    config.layer_types = ["sliding_attention", "full_attention"]
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    windowed = load_policy(tmp_path).eval()
    native = NativeEngine()
    native.attach(windowed, 0)
    suite.check_log_probs(native, windowed, [replace(made) for made in suite.requests()])


@pytest.mark.slow
def test_compiled_decode_gives_the_same_log_probs(model: PreTrainedModel) -> None:
    native = NativeEngine(compile_decode=True)
    native.attach(model, 0)
    suite.check_log_probs(native, model, suite.requests())
