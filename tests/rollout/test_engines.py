# SPDX-License-Identifier: Apache-2.0
"""Rollout engines against the model's own forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from whet.errors import DeadlineError, EngineError
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.hf import HFEngine
from whet.rollout.native import scheduler
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, RolloutEngine, SamplingParams

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "native": NativeEngine,
    # room for three sequences at a time, and a cache that holds few of them
    "native, short of everything": lambda: NativeEngine(max_batch_size=3, kv_cache_bytes=2 * 2 * 2 * 16 * 32 * 4 * 24),
    "hf": HFEngine,
}


def block_bytes(model: PreTrainedModel) -> int:
    """Of one block of the cache in float32."""
    config = model.config
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 16 * 4


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    return ENGINES[request.param]()


@pytest.fixture(scope="module", params=["model_folder", "qwen25_folder"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    loaded = load_policy(request.getfixturevalue(request.param)).eval()
    with torch.no_grad():  # random weights say nearly the same of every token: sharpen them
        loaded.get_output_embeddings().weight.mul_(8)
    return loaded


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.2, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0.8},
    {"allowed_token_ids": tuple(range(4, 12)), "bad_words": ((5,), (4, 6), (6, 4, 8), (8, 8)), "top_p": 0.95},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_log_probs_are_the_models_own(engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    engine.attach(model, 0)
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_tokens_are_those_that_sampling_draws(
    engine: RolloutEngine, model: PreTrainedModel, params: dict[str, Any]
) -> None:
    engine.attach(model, 0)
    suite.check_choices(engine, model, suite.requests(seed=1, **params))


def test_rules_are_kept(engine: RolloutEngine, model: PreTrainedModel) -> None:
    engine.attach(model, 0)
    suite.check_rules(engine, suite.requests(longest=60, stop_token_ids=(), **SAMPLING[6]))


def test_rules_that_cannot_be_kept_are_refused(engine: RolloutEngine, model: PreTrainedModel) -> None:
    engine.attach(model, 0)
    for wrong in ((), (5, 10**6)):
        with pytest.raises(EngineError, match="allowed_token_ids"):
            engine.generate(suite.requests(allowed_token_ids=wrong))


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings(engine: RolloutEngine, model: PreTrainedModel, length: int) -> None:
    engine.attach(model, 0)
    engine.load_tokenizer = lambda: load_tokenizer(model.config._name_or_path)  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(model.config._name_or_path)
    suite.check_stop_strings(engine, tokenizer, suite.requests(groups=6, longest=30, stop_token_ids=(9,)), length)


@pytest.mark.parametrize("blocks", [8, 12])
@pytest.mark.parametrize("params", [{}, SAMPLING[5]], ids=["plain", "penalties"])
def test_preemption_changes_nothing(
    model: PreTrainedModel, blocks: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HEADROOM_BLOCKS", 0)  # as short of room as can be
    made = suite.requests(groups=3, n=4, longest=70, stop_token_ids=(), **params)
    roomy = NativeEngine()
    short = NativeEngine(kv_cache_bytes=block_bytes(model) * blocks)
    roomy.attach(model, 0)
    short.attach(model, 0)
    undisturbed, disturbed = roomy.generate(made), short.generate(made)
    assert sum(each.preemptions for each in undisturbed) == 0
    assert sum(each.preemptions for each in disturbed) >= 3
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.token_ids == before.token_ids and after.finish_reason == before.finish_reason
        assert after.log_probs == pytest.approx(before.log_probs, abs=1e-6)
    cache = short._require_cache()
    assert cache.num_blocks == blocks and cache.num_free == blocks


def test_the_oldest_answer_is_never_preempted(model: PreTrainedModel) -> None:
    # 4 requests of 1 + 79 tokens need 5 blocks each, and 9 blocks are there: the first two go on at once
    made = [Request((3 + index,), SamplingParams(79), index) for index in range(4)]
    native = NativeEngine(kv_cache_bytes=block_bytes(model) * 9)
    native.attach(model, 0)
    completions = native.generate(made)
    assert completions[0].preemptions == 0 and sum(each.preemptions for each in completions) > 0
    assert [len(each.token_ids) for each in completions] == [79] * 4


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
