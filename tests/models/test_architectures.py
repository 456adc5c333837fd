# SPDX-License-Identifier: Apache-2.0
"""Every architecture that `whet init-model` makes: forward, gradient, sampling, one RL step, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
import rollout_conformance
import test_outputs

from tests.first import first
from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.config.schema import LoraConfig
from whet.models.load import load_policy
from whet.models.lora import adapter_off, add_adapter, merged_weights, plain_copy
from whet.models.outputs import ForwardSettings, model_outputs
from whet.plugins.lessons.init_model import ARCHS as KNOWN, MARKERS, Arch, init_model
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import RolloutEngine
from whet.trainers.build import train

FAST = ("llama", "gpt_oss", "qwen3_5")  # plain, with experts, with states
OTHERS = [arch for arch in KNOWN if arch not in ("qwen2.5", "qwen3", *MARKERS, *FAST)]  # those have tests of their own
ARCHS = first(len(FAST), [*FAST, *OTHERS], others=pytest.mark.slow)
WINDOW = 8  # tokens: shorter than the sequences, so that a window that is not kept shows
MODEL_TYPES = {"gemma": "gemma3_text", "phi": "phi3", "qwen3_5": "qwen3_5_text"}


@pytest.fixture(scope="module", params=ARCHS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distributions are not flat: random weights say nearly the same of every token."""
    alphabet = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
    out = tmp_path_factory.mktemp("models") / request.param
    init_model(out, request.param, "nano", alphabet=alphabet, num_layers=2, max_position_embeddings=512)
    config = json.loads((out / "config.json").read_text())
    if "sliding_window" in config and request.param in ("mistral", "gemma", "gemma2", "phi", "gpt_oss"):
        (out / "config.json").write_text(json.dumps({**config, "sliding_window": WINDOW}))
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("sinks" in name or "bias" in name):
                parameter.normal_()
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_policy(folder).eval()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_folder_loads_with_plain_transformers(arch: Arch, tmp_path: Path) -> None:
    out = init_model(tmp_path / "model", arch, "nano", num_layers=2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == MODEL_TYPES.get(arch, arch)
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    messages = [{"role": "user", "content": "Was macht 12 + 34? — „genau“ 数学 🙂\n\n"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < model.get_input_embeddings().num_embeddings
    assert model.config.bos_token_id is None


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_are_those_of_plain_transformers(folder: Path, model: PreTrainedModel, packing: bool) -> None:
    batch = test_outputs.random_batch()
    settings = ForwardSettings(packing=packing, chunk_tokens=7)
    got = model_outputs(model, batch, frozenset({"log_probs", "entropy", "vocab_log_probs"}), settings, 0.7)
    log_probs, entropy = test_outputs.plain_log_probs(folder, batch, 0.7)
    torch.testing.assert_close(got["log_probs"], log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got["entropy"], entropy, atol=1e-5, rtol=0)
    chosen = got["vocab_log_probs"].gather(2, batch["input_ids"][:, -12:, None])[..., 0] * batch["response_mask"]
    torch.testing.assert_close(chosen, log_probs, atol=1e-5, rtol=0)


def test_gradients_are_those_of_plain_transformers(folder: Path) -> None:
    batch = {name: column[:1] for name, column in test_outputs.random_batch().items()}
    ours, plain = load_policy(folder), AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model_outputs(ours, batch, frozenset({"log_probs"}), ForwardSettings())["log_probs"].sum().backward()
    real = batch["attention_mask"][0].bool()
    ids, sampled = batch["input_ids"][:, real], (real & torch.cat([torch.zeros(9), batch["response_mask"][0]]).bool())
    logits = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    logits[sampled[real][1:]].sum().backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    for (name, own), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert (own.grad - other.grad).norm() < 1e-5 * norm, name


@pytest.mark.slow
@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_rollouts_conform(make: Callable[[], RolloutEngine], model: PreTrainedModel) -> None:
    engine = make()
    engine.attach(model, 0)
    rollout_conformance.check_log_probs(engine, model, rollout_conformance.requests())
    rollout_conformance.check_choices(engine, model, rollout_conformance.requests(seed=1, groups=2, top_k=5))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_alone_and_among_others(model: PreTrainedModel, dtype: torch.dtype) -> None:
    engine = NativeEngine(dtype=dtype)
    engine.adopt(model)
    rollout_conformance.check_company_does_not_matter(engine, rollout_conformance.requests(groups=8, n=4))


def test_an_adapter_on_off_and_merged(folder: Path, model: PreTrainedModel) -> None:
    adapted, ids = load_policy(folder), torch.arange(10, 30)[None]
    add_adapter(adapted, LoraConfig(rank=4), seed=1)
    with torch.no_grad():
        start = model(ids).logits
        assert torch.equal(adapted(ids).logits, start)  # B is 0
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        moved = adapted(ids).logits
        with adapter_off(adapted):
            assert torch.equal(adapted(ids).logits, start)
        assert (moved - start).abs().max() > 0.05
        assert torch.equal(adapted(ids).logits, moved)
        plain = plain_copy(adapted)
        assert torch.equal(plain(ids).logits, start)
        own = dict(plain.named_parameters())
        merged = dict(merged_weights(adapted))
        assert merged.keys() == own.keys() == dict(model.named_parameters()).keys()
        for name, weight in merged.items():
            own[name].copy_(weight)
        torch.testing.assert_close(plain(ids).logits, moved, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["native", "hf"])
def test_an_rl_step_and_what_it_exports(
    rollout: str,
    folder: Path,
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
) -> None:
    # Two updates a step: the trainer's log-probs of what was sampled are then a column, and written with log_tokens.
    once = {"trainer.total_steps": 1, "actor.mini_batch_size": 2, "trainer.log_tokens": 1}
    config = train_config({"model.path": str(folder), "rollout.engine.name": rollout, **once})
    [record] = train(config, reward=lambda solution_str: float(len(solution_str)), data=additions).history
    assert record["actor/grad_norm"] > 0
    rows = [json.loads(line) for line in (tmp_path / "run/tokens/step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-5)
    assert len(rows) == 16
    exported = AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "exported"))
    trained = load_policy(tmp_path / "exported")
    ids = torch.tensor([[11, 14, 12, 20]])
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, trained(ids).logits, atol=1e-5, rtol=0)
        assert not torch.allclose(exported(ids).logits, load_policy(folder)(ids).logits, atol=1e-4)
