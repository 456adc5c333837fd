# SPDX-License-Identifier: Apache-2.0
"""Operations of an update against torch's own counter. How near the seconds are is in test_measured.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from whet.batch import Batch
from whet.config import SFTConfig, TrainConfig, load_config
from whet.data.supervised import SupervisedExample
from whet.models.load import load_policy
from whet.plugins.planner import forecast, speed
from whet.plugins.planner.memory import outlines_of
from whet.plugins.planner.speed import training_flops
from whet.tracking import profile
from whet.trainers.build import setup
from whet.trainers.sft import SFTRun, to_batch, train_sft

LENGTH = 33


def config_of(folder: Path, **overrides: Any) -> SFTConfig:
    small: dict[str, Any] = {
        "model.path": str(folder),
        "model.dtype": "float32",
        "data.apply_chat_template": False,
        "data.train_batch_size": 2,
        "data.max_length": LENGTH,
        "trainer.total_steps": 2,
        "trainer.logger": ["jsonl"],
    }
    return load_config(SFTConfig, None, small | overrides, given={"data"}).config


def batch_of(rows: int) -> Batch:
    return to_batch([SupervisedExample((5,) * LENGTH, (0,) + (1,) * (LENGTH - 1))] * rows, pad_token_id=0)


def test_operations_are_those_that_torch_counts(qwen25_folder: Path) -> None:
    outline = outlines_of(SFTRun.setup(config_of(qwen25_folder)))["actor"]
    model = load_policy(qwen25_folder)
    with FlopCounterMode(display=False) as counter:
        tokens = torch.full((1, LENGTH), 5)
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.sum().backward()
    # torch counts all pairs of tokens and a head for the last one; here pairs are those that attention sees
    assert training_flops(outline, batch_of(1)) == pytest.approx(counter.get_total_flops(), rel=0.06)
    assert training_flops(outline, batch_of(3)) == 3 * training_flops(outline, batch_of(1))
    outline.config.num_experts = 4  # of which nothing says how many a token is sent to
    assert training_flops(outline, batch_of(1)) == 0.0


def test_a_mixture_of_experts_counts_those_that_a_token_is_sent_to(tmp_path: Path) -> None:
    shape = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 32,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    planned = SFTRun.setup(config_of(tmp_path))
    model = outlines_of(planned)["actor"]
    # A layer: 8*8 + 2 * 8*4 + 8*8 of attention, 8*16 of the router, and of 16 experts with 3 * 8*6 each the 4 in use.
    assert model.layer_weights == 2 * (192 + 128 + 4 * 144) == 1792
    assert model.num_weights > 2 * 16 * 144  # all experts
    # 33 tokens, one of them the prompt: pairs of tokens 1/2 + 32 * (1 + 32/2); in attention 2 layers of 8 numbers.
    forward = 2 * (1792 * 33 + 800 * 32) + 4 * 16 * (0.5 + 32 * 17)
    assert training_flops(outlines_of(planned)["actor"], batch_of(1)) == 3 * forward


def test_an_adapter_and_a_critic_count_what_they_compute(
    train_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_forward_flops", lambda model, rows: 100.0 if model.head_weights else 10.0)
    planned = outlines_of(setup(train_config({"algorithm.adv_estimator": "gae"})))
    assert training_flops(planned["actor"], batch_of(1)) == 3 * 100
    assert training_flops(planned["critic"], batch_of(1)) == 3 * 10
    adapted = outlines_of(setup(train_config({"model.lora.rank": 2})))
    assert training_flops(adapted["actor"], batch_of(1)) == 2 * 100  # no gradients of the weights


def test_a_run_logs_the_share_of_the_peak(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
    config = config_of(model_folder, **{"trainer.run_dir": str(tmp_path / "run")})
    monkeypatch.setattr(forecast, "training_flops", lambda model, batch: 1e6 * len(batch))
    monkeypatch.setattr(profile, "peak_flops", lambda: 1e12)
    train_sft(config, data=rows)
    lines = [json.loads(line) for line in (tmp_path / "run/timings.jsonl").open()]
    assert [line["perf/mfu"] for line in lines] == [2e6 / line["time/update"] / 1e12 for line in lines]
    assert [line["system/driver/mfu"] for line in lines] == [line["perf/mfu"] for line in lines]
    assert len(lines) == 2
    monkeypatch.setattr(profile, "peak_flops", lambda: 0.0)  # not known
    train_sft(config_of(model_folder, **{"trainer.run_dir": str(tmp_path / "again")}), data=rows)
    assert "mfu" not in (tmp_path / "again/timings.jsonl").read_text()


@pytest.mark.slow
def test_each_of_two_processes_has_its_own_share(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "peak_flops", profile.peak_flops)  # put back after the engine's file changed it
    engine = tmp_path / "known.py"
    engine.write_text(
        "from whet.engines.single import SingleEngine\n"
        "from whet.tracking import profile\n\n"
        "profile.peak_flops = lambda: 1e12  # in the process that trains\n\n\n"
        "class Known(SingleEngine):\n"
        '    """Trains on an accelerator whose peak is known."""\n'
    )
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
    two = {"cluster.processes": 2, "engine.name": f"{engine}:Known", "trainer.run_dir": str(tmp_path / "run")}
    train_sft(config_of(model_folder, **two), data=rows)
    for line in map(json.loads, (tmp_path / "run/timings.jsonl").open()):
        first, second = line["system/main_0/mfu"], line["system/main_1/mfu"]
        assert first > 0 and second > 0
        assert line["perf/mfu"] == pytest.approx((first + second) / 2)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 3060", 0.0),
    ],
)
def test_peaks_go_by_the_name_of_the_device(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile.peak_flops() == 0.0
    for attribute, value in {"is_available": True, "is_initialized": True, "get_device_name": name}.items():
        monkeypatch.setattr(torch.cuda, attribute, lambda value=value: value)
    assert profile.peak_flops() == peak
