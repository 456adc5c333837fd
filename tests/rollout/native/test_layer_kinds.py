# SPDX-License-Identifier: Apache-2.0
"""Layers that keep latents or a state, or have sinks: long rows, shared prompts, requests that are taken up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.test_outputs import random_batch
from tests.rollout import rollout_conformance as suite
from tests.rollout.standin import install
from whet.devices import HOST
from whet.kernels.delta_rule import PackedFlow
from whet.models.caches import Pages, State, layer_caches, sequence_bytes, token_bytes
from whet.models.load import load_policy
from whet.models.outputs import ForwardSettings, model_outputs
from whet.plugins.lessons.init_model import Arch, init_model
from whet.rollout.native.cache import BlockCache
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Finished, Request, SamplingParams, generate
from whet.rollout.requirements import Decoding, Lengths

ARCHS = ["gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5"]


@pytest.fixture(scope="module", params=ARCHS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, arch = tmp_path_factory.mktemp("models") / request.param, request.param
    init_model(
        out, arch, "nano", alphabet="0123456789+-*/=() abcdefghijklmnop", num_layers=2, max_position_embeddings=512
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_policy(folder).eval()


def config_of(arch: Arch, tmp_path: Path) -> object:
    return load_policy(init_model(tmp_path / arch, arch, "nano", num_layers=3)).config


def test_caches_by_hand(tmp_path: Path) -> None:
    """Nano: hidden size 128, 4 heads of 32."""
    latent, hybrid, plain = (config_of(arch, tmp_path) for arch in ("deepseek_v3", "qwen3_5", "gpt_oss"))
    # [latent of 32 | 16 rotated] of a token, where whole keys and values have 4 (32 + 16) + 4 32
    assert layer_caches(latent) == (Pages(4, 48, 32, (32, 16)),) * 3
    assert token_bytes(latent, 2) == 3 * 48 * 2 and sequence_bytes(latent) == 0
    # query and key of 2 heads, value of 4, 4 taps; matrices of 4 heads; one layer in two has keys and values
    state, pages = State(2 * 64 + 128, 3, 4, 32, 32), Pages(2, 32, 32)
    assert layer_caches(hybrid) == (state, pages, state)
    assert token_bytes(hybrid, 4) == 2 * 2 * 32 * 4 and sequence_bytes(hybrid) == 2 * (256 * 3 + 4 * 32 * 32) * 4
    assert token_bytes(plain, 4) == 3 * 2 * 2 * 32 * 4 and sequence_bytes(plain) == 0
    cache = BlockCache(latent, dtype=torch.float32, budget_bytes=2**16, device=HOST)
    assert cache.nbytes == 2**16 // (16 * 3 * 48 * 4) * (16 * 3 * 48 * 4) and not cache.values.numel()
    on_device = BlockCache(latent, dtype=torch.float32, budget_bytes=2**16, device=HOST, by_head=True)
    assert on_device.values.data_ptr() == on_device.keys.data_ptr() and on_device.values.shape[-1] == 32


def test_the_flow_of_a_pack_by_hand() -> None:
    """Row 0 is the prompt 0 1 and its response 2 3, row 1 is 4 alone, row 2 responds 5 6 to the prompt of row 0."""
    flow = PackedFlow.of(torch.tensor([-1, 0, 1, 2, -1, 1, 5]), 8)
    assert flow.before.tolist() == [8, 0, 1, 2, 8, 1, 5, 8, 8]
    (first, start), (second, goes_on) = flow.grids
    assert first.tolist() == [[0, 1], [4, 8]] and start is None
    assert second.tolist() == [[2, 3], [5, 6]] and goes_on is not None and goes_on.tolist() == [0, 0]
    assert flow.places.tolist() == [0, 1, 4, 5, 2, 6, 7, 8]


def test_the_plan_counts_the_states_that_are_held(model: PreTrainedModel) -> None:
    config, lengths = model.config.get_text_config(), Lengths((8,), 8)
    states = sequence_bytes(config)
    plan = NativeEngine.planned_bytes(
        Decoding(4, 1, lengths, token_bytes(config, 4), 2, states, 16), {"kv_cache_bytes": 2**20}
    )
    cache = BlockCache(config, dtype=torch.float32, device=HOST, budget_bytes=2**20, slots=16)
    assert (cache.states is None) == (states == 0)
    assert plan.cache == cache.nbytes


def long_batch() -> dict[str, torch.Tensor]:
    """Rows of up to 200 tokens, of several chunks each; rows 0 to 3 have one prompt, 4 and 5 another."""
    batch = random_batch(rows=7, prompt=110, response=90)
    for row, other in {1: 0, 2: 0, 3: 0, 5: 4}.items():
        for name in ("input_ids", "attention_mask"):
            batch[name][row, :110] = batch[name][other, :110]
    batch["response_mask"][1] = batch["attention_mask"][1, -90:]
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def row_by_row(
    folder: Path, batch: dict[str, torch.Tensor], weights: torch.Tensor
) -> tuple[torch.Tensor, PreTrainedModel]:
    """Log-probs [B, R] by plain transformers, each row alone; the model has the gradient of their weighted sum."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found = torch.zeros(batch["response_mask"].shape)
    for row, mask in enumerate(batch["response_mask"].bool()):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row, real]
        log_pi = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.cat([torch.zeros(110, dtype=torch.bool), mask])[real]
        chosen = log_pi[sampled[1:]]
        (chosen * weights[row, mask]).sum().backward()
        found[row, mask] = chosen.detach()
    return found, plain


@pytest.mark.slow
def test_long_packed_rows_and_their_gradient(folder: Path) -> None:
    batch, ours = long_batch(), load_policy(folder)
    weights = torch.linspace(-1, 1, batch["response_mask"].numel()).view_as(batch["response_mask"])
    expected, plain = row_by_row(folder, batch, weights)
    for share_prompts in (True, False):
        ours.zero_grad()
        settings = ForwardSettings(share_prompts=share_prompts)
        got = model_outputs(ours, batch, frozenset({"log_probs"}), settings)["log_probs"]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        (got * weights).sum().backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([each.grad.norm() for each in plain.parameters() if each.grad is not None]).norm()
        for (name, own), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert own.grad is not None and other.grad is not None
            assert (own.grad - other.grad).norm() < 1e-5 * norm, name


@pytest.mark.slow
def test_greedy_tokens_are_those_of_generate(folder: Path, model: PreTrainedModel) -> None:
    engine = NativeEngine()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    engine.adopt(model)
    made = suite.requests(groups=5, n=1, seed=4, temperature=0.0, max_new_tokens=40, stop_token_ids=())
    for request, completion in zip(made, generate(engine, made), strict=True):
        ids = torch.tensor([request.prompt_ids])
        options: Any = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        whole = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tuple(whole[0, ids.shape[1] :].tolist()) == completion.token_ids


def long_requests() -> list[Request]:
    """Groups with prompts of more than a chunk, too."""
    made = suite.requests(groups=3, n=3, seed=2, max_new_tokens=50, stop_token_ids=())
    return [replace(each, prompt_ids=each.prompt_ids * (1 + 3 * (index // 3))) for index, each in enumerate(made)]


@pytest.mark.slow
def test_what_was_aborted_goes_on_with_the_same_tokens(model: PreTrainedModel) -> None:
    engine, made = NativeEngine(), long_requests()
    engine.adopt(model)
    whole = generate(engine, made)
    suite.check_log_probs(engine, model, made)
    for request in made:
        assert engine.submit(request)
    for _ in range(20):
        engine.poll(0.0)
    engine.abort([request.uid for request in made[::2]])
    parts = dict[str, Completion]()
    while len(parts) < len(made):
        parts |= {event.uid: event.completion for event in engine.poll(1.0) if isinstance(event, Finished)}
    aborted = [request for request in made if parts[request.uid].finish_reason == "abort"]
    assert len(aborted) == 5 and all(0 < len(parts[each.uid].token_ids) < 50 for each in aborted)
    again = [replace(each, sampled_ids=parts[each.uid].token_ids) for each in aborted]
    found = {request.uid: each for request, each in zip(again, generate(engine, again), strict=True)}
    for request, expected in zip(made, whole, strict=True):
        rest = found[request.uid] if request.uid in found else parts[request.uid]
        before = parts[request.uid].token_ids if request.uid in found else ()
        assert (*before, *rest.token_ids) == expected.token_ids
        assert rest.log_probs == expected.log_probs[len(before) :]


@pytest.mark.slow
def test_where_memory_is_short_requests_are_computed_again(model: PreTrainedModel) -> None:
    plenty, short, made = (
        NativeEngine(),
        NativeEngine(kv_cache_bytes=40 * 16 * token_bytes(model.config, 4)),
        long_requests(),
    )
    for engine in (plenty, short):
        engine.adopt(model)
    whole, found = (generate(engine, made) for engine in (plenty, short))
    assert sum(each.preemptions for each in found) > 0
    suite.assert_same([replace(each, preemptions=0) for each in found], whole)


@pytest.mark.slow
def test_new_weights_in_the_middle_recompute_states(model: PreTrainedModel) -> None:
    """Running requests go on under the same weights, loaded again, as if nothing had been."""
    engine, made = NativeEngine(), long_requests()
    engine.adopt(model)
    whole = generate(engine, made)
    for request in made:
        assert engine.submit(request)
    for _ in range(15):
        engine.poll(0.0)
    engine.load(model.named_parameters(), version=3)
    done = dict[str, Completion]()
    while len(done) < len(made):
        done |= {event.uid: event.completion for event in engine.poll(1.0) if isinstance(event, Finished)}
    assert [done[request.uid].token_ids for request in made] == [each.token_ids for each in whole]


@pytest.mark.slow
def test_a_later_turn_is_computed_where_a_state_is_missing(model: PreTrainedModel) -> None:
    """A request whose prompt continues a sequence that was kept has its log-probs."""
    engine, params = NativeEngine(), SamplingParams(max_new_tokens=20)
    engine.adopt(model)
    first = Request("1", tuple(range(5, 30)), params, 7, keeps_cache=True)
    [turn] = generate(engine, [first])
    later = Request("2", (*first.prompt_ids, *turn.token_ids, 9, 8), params, 8, keeps_cache=True)
    suite.check_log_probs(engine, model, [later])


@pytest.mark.slow
def test_the_way_of_accelerators(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: steps that are read late, the cache in the layout of a device, few slots that come again."""
    more = [replace(each, uid=f"more {each.uid}") for each in suite.requests(groups=3, n=2, seed=5)]
    made = [*long_requests(), *more]
    engines = [NativeEngine(), NativeEngine(max_batch_size=4)]
    engines[0].attach(model, 0)
    expected = generate(engines[0], made)
    install(monkeypatch)
    engines[1].attach(model, 0)
    suite.assert_same_but_for_rounding(generate(engines[1], made), expected, 5e-5)
