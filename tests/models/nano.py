# SPDX-License-Identifier: Apache-2.0
"""Nano models of the kinds that people train today, made from transformers' configs, and the requirements for each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import SMALL_RUN
from whet.checkpoints.export import export
from whet.config import TrainConfig, load_config
from whet.models.load import kept_buffers, load_policy
from whet.models.outputs import ForwardSettings, model_outputs
from whet.models.supported import support_of
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import train

ROWS = 64  # of the embedding, for a tokenizer of 29 tokens
ALPHABET = "0123456789+-*/=() "
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
HEAD = {"head_dim": 8}
TWO = {"num_experts_per_tok": 2}
EXPERTS = {**TWO, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    **EXPERTS,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    **HEAD,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "ministral": HEAD | WINDOW,
    "qwen2": {},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": HEAD | WINDOW,
    "gemma3_text": HEAD | WINDOW,
    "gemma3n_text": {
        **HEAD,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": ROWS,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "phi": {},
    "phi3": {},
    "glm": HEAD,
    "glm4": HEAD,
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {"logits_scaling": 2.0},
    "smollm3": {},
    "cohere2": HEAD | WINDOW,
    "ernie4_5": HEAD,
    "hunyuan_v1_dense": HEAD,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **HEAD,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, **HEAD, **EXPERTS},
    "phimoe": {"num_local_experts": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**HEAD, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {
        **HEAD,
        **WINDOW,
        **TWO,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmoe": {"num_experts": 4, **TWO},
    "granitemoe": {"num_local_experts": 4, **TWO},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "falcon_h1": {
        **HEAD,
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
        "mamba_chunk_size": 8,
    },
    "mamba2": {
        **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "minimax": {
        **HEAD,
        **TWO,
        "num_local_experts": 4,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
NANO = DENSE | WITH_EXPERTS | WITH_STATES


def config_of(model_type: str, **changed: Any) -> Any:
    """transformers' config of a nano model of a type; a value of None is left out."""
    values = {**SHAPE, "vocab_size": ROWS, "bos_token_id": None, "pad_token_id": 0, **NANO[model_type], **changed}
    kept = {name: value for name, value in values.items() if value is not None or name == "bos_token_id"}
    return AutoConfig.for_model(model_type, **kept)


def nano_model(out: Path, model_type: str, **changed: Any) -> Path:
    """Writes a nano model whose distributions are not flat, with a tokenizer of digits and signs.  Returns `out`."""
    init_model(out, "qwen3", "nano", alphabet=ALPHABET, num_layers=1, vocab_size=ROWS)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(model_type, **ends, **changed))
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(10)
            for name, buffer in model.named_buffers():
                if "correction_bias" in name:  # a router's, which is never trained
                    buffer.normal_()
    model.save_pretrained(out)
    return out


def ways() -> dict[str, tuple[str, str]]:
    """The table of kinds in docs/models.md: each kind's way, and the part that whet's own way does not support."""
    page = Path(__file__).parents[2].joinpath("docs", "models.md").read_text(encoding="utf-8")
    table = page.partition("<!-- kinds -->")[2].partition("<!-- end of kinds -->")[0]
    return {
        name: (way, lacks)
        for name, way, lacks in re.findall(r"^\| `(\w+)` \| (own|general|refused) \| (.*) \|$", table, re.M)
    }


def check_trains(model_type: str, tmp_path: Path) -> None:
    """Two steps of GRPO by the way in docs/models.md, with the default rollout engine of this way: its log-probs equal
    the trainer's. The export loads with transformers, whose log-probs equal whet's for the trained model."""
    folder, run = nano_model(tmp_path / "model", model_type), tmp_path / "run"
    small = {
        **SMALL_RUN,
        "model.path": str(folder),
        "trainer.run_dir": str(run),
        "trainer.total_steps": 2,
        "trainer.log_tokens": 1,
        "actor.mini_batch_size": 2,  # two updates a step: the trainer's log-probs before them are then a column
        "actor.optim.lr": 1e-2,
    }
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(8, 12)]
    config = load_config(TrainConfig, None, small, given={"reward", "data"}).config
    done = train(config, reward=lambda solution_str: float(len(solution_str)), data=rows)
    assert done.history[0]["actor/grad_norm"] > 0
    (way, lacks), start = ways()[model_type], load_policy(folder)
    assert support_of(start).is_own == (way == "own") and support_of(start).lacks == lacks
    assert done.config.rollout.engine.name == {"own": "native", "general": "hf"}[way]
    for step in (1, 2):
        lines = (run / f"tokens/step_{step:06}.jsonl").read_text().splitlines()
        assert len(lines) == 16
        for row in map(json.loads, lines):
            assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-5)
    exported = export(run, tmp_path / "exported")
    ids = torch.tensor([[11, 14, 12, 20, 5, 6, 9]])
    plain = plain_log_probs(exported, ids)
    trained = load_policy(exported)
    torch.testing.assert_close(whet_log_probs(trained, ids), plain, atol=2e-5, rtol=0)
    assert (whet_log_probs(start, ids) - plain).abs().max() > 1e-3
    buffers = kept_buffers(start)
    others = [trained] if not buffers else [trained, load_policy(export(run, tmp_path / "narrow", dtype="bfloat16"))]
    for other in others:  # in their own dtype
        found = kept_buffers(other)
        assert found.keys() == buffers.keys() and all(torch.equal(found[name], buffers[name]) for name in buffers)


@torch.no_grad()
def plain_log_probs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens of a row after the first two, by transformers alone.  [1, T] -> [1, T - 2]"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    log_pi: torch.Tensor = model(ids, use_cache=False).logits[:, 1:-1].log_softmax(-1)
    return log_pi.gather(2, ids[:, 2:, None])[..., 0]


@torch.no_grad()
def whet_log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same by whet, in the way of the model."""
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
        "response_mask": torch.ones_like(ids[:, 2:]),
    }
    settings = ForwardSettings(packing=support_of(model).is_own)
    return model_outputs(model.eval(), batch, frozenset({"log_probs"}), settings)["log_probs"]
