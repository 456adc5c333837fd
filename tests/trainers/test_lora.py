# SPDX-License-Identifier: Apache-2.0
"""Runs that train an adapter: the same reference as a second model, small checkpoints, both exports, bits on resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.raising import raises
from whet import serialization
from whet.checkpoints.export import export
from whet.config import EvalConfig, SFTConfig, TrainConfig, load_config
from whet.errors import CheckpointError, ConfigError
from whet.evaluation.evaluate import evaluate
from whet.models.load import load_policy, load_tokenizer
from whet.trainers.build import train, worker_specs
from whet.trainers.columns import plan_columns
from whet.trainers.sft import train_sft

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
IDS = torch.tensor([[11, 14, 12, 20, 8]])
LORA = {"model.lora.rank": 4, "actor.optim.lr": 1e-2}
KL = {"algorithm.kl.where": "loss", "algorithm.kl.coef": 0.1, "actor.mini_batch_size": 2}


def length(solution_str: str) -> float:
    return float(len(solution_str))


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    return result


@pytest.mark.parametrize("where", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_the_reference_is_the_actor_with_its_adapter_off(
    where: str, train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    """Naming the start as ref.model_path loads it a second time; the run is the same to the bit."""
    records = []
    for name, second in (("one", {}), ("two", {"ref.model_path": str(model_folder)})):
        config = train_config({**LORA, **KL, "algorithm.kl.where": where, **second, "trainer.run_dir": tmp_path / name})
        run = train(config, reward=length, data=additions)
        records.append(run.history)
    assert records[0] == records[1]
    key = "actor/kl_loss" if where == "loss" else "actor/reward_kl_penalty"
    assert records[0][1][key] > 1e-5  # the second step's policy has moved


def test_no_second_model_is_loaded(train_config: MakeConfig) -> None:
    columns = plan_columns([("a", "actor", ["ref_log_probs"])], [])
    [ref] = [spec for spec in worker_specs(train_config(LORA), columns, 1) if spec.role == "ref"]
    assert ref.cls.__name__ == "AdapterOffWorker"
    [ref] = [spec for spec in worker_specs(train_config(), columns, 1) if spec.role == "ref"]
    assert ref.cls.__name__ == "TrainWorker"


@pytest.mark.parametrize(
    ("rollout", "dtype"),
    [
        ("native", "float32"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("hf", "float32"), ("native", "bfloat16"))),
    ],
)
def test_what_is_sampled_from_is_the_merged_model(
    rollout: str, dtype: str, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    asked = {"rollout.engine.name": rollout, "rollout.dtype": "float32", "model.dtype": dtype, "trainer.log_tokens": 1}
    config = train_config({**LORA, "actor.mini_batch_size": 2, **asked})
    train(config, reward=length, data=additions)
    gaps = []
    for line in (tmp_path / "run/tokens/step_000002.jsonl").read_text().splitlines():
        row = json.loads(line)
        gaps += [abs(a - b) for a, b in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)]
    assert max(gaps) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.slow
def test_a_checkpoint_is_the_adapter_and_resumes_to_the_same_bits(
    train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    straight = train_config({**LORA, **KL, "trainer.total_steps": 3, "trainer.run_dir": str(tmp_path / "straight")})
    train(straight, reward=length, data=additions)
    for steps in (2, 3):
        again = train(train_config({**LORA, **KL, "trainer.total_steps": steps}), reward=length, data=additions)
    assert again.step == 3
    a, b = (tmp_path / run / "checkpoints/global_step_3/actor.state" for run in ("straight", "run"))
    one, two = serialization.load(a), serialization.load(b)
    assert one["model"].keys() == two["model"].keys()
    assert all("lora_" in name and torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    assert a.stat().st_size < 0.2 * (model_folder / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_exports_of_both_kinds(train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path) -> None:
    train(train_config(LORA), reward=length, data=additions)
    merged = export(tmp_path / "run", tmp_path / "merged")
    alone = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    files = {path.name for path in alone.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), alone)
        torch.testing.assert_close(by_peft(IDS).logits, logits(merged), atol=1e-5, rtol=0)
    assert (logits(merged) - logits(model_folder)).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(merged).encode("1+1=") == load_tokenizer(alone).encode("1+1=")
    # The adapter's folder is a model to whet: merged first, it is the new start.
    assert torch.equal(load_policy(alone).lm_head.weight, load_policy(model_folder).lm_head.weight)
    with torch.no_grad():
        torch.testing.assert_close(load_policy(alone)(IDS).logits, logits(merged), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("as_path", [True, False])
def test_an_adapter_at_the_start_is_merged_and_is_the_reference(
    as_path: bool, train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    train(train_config(LORA), reward=length, data=additions)
    alone = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    first = export(tmp_path / "run", tmp_path / "first")
    start = {"model.path": str(alone)} if as_path else {"model.lora.path": str(alone)}
    records = []
    for name, model in (("on", start), ("plain", {"model.path": str(first)})):
        config = train_config({**LORA, **KL, **model, "trainer.run_dir": str(tmp_path / name)})
        records.append(train(config, reward=length, data=additions).history)
    assert records[0][0]["actor/kl_loss"] == pytest.approx(records[1][0]["actor/kl_loss"], abs=1e-7)
    for one, two in zip(*records, strict=True):
        assert one == pytest.approx(two, abs=1e-3)
    torch.testing.assert_close(
        logits(export(tmp_path / "on", tmp_path / "out")), logits(export(tmp_path / "plain", tmp_path / "out2")),
        atol=1e-3, rtol=0,
    )  # fmt: skip
    if not as_path:
        with raises(CheckpointError, found=re.compile("adapter"), change=re.compile("--adapter$")):
            export(tmp_path / "on", tmp_path / "never", adapter=True)


@pytest.mark.slow
def test_a_base_that_moved_or_changed(
    train_config: MakeConfig, additions: Rows, model_folder: Path, qwen25_folder: Path, tmp_path: Path
) -> None:
    here = shutil.copytree(model_folder, tmp_path / "here")
    train(train_config({**LORA, "model.path": str(here)}), reward=length, data=additions)
    expected = logits(export(tmp_path / "run", tmp_path / "before"))
    there = here.rename(tmp_path / "there")
    with raises(CheckpointError, found=re.compile("here, "), change=re.compile("--base$")):
        export(tmp_path / "run", tmp_path / "exported")
    with raises(CheckpointError, found=re.compile(f"{qwen25_folder}$"), change=re.compile("--base$")):
        export(tmp_path / "run", tmp_path / "exported", base=str(qwen25_folder))
    assert torch.equal(logits(export(tmp_path / "run", tmp_path / "exported", base=str(there))), expected)
    other = load_policy(there)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
    other.save_pretrained(here)
    load_tokenizer(there).save_pretrained(here)
    config = train_config({**LORA, "model.path": str(here), "trainer.total_steps": 3})
    with raises(CheckpointError, found=re.compile(f"{here}$"), expected=re.compile(f"{here}$")):
        train(config, reward=length, data=additions)


def test_a_critic_trains_an_adapter_and_its_head(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    config = train_config({**LORA, "algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-2})
    assert train(config, reward=length, data=additions).history[0]["critic/grad_norm"] > 0
    saved = serialization.load(tmp_path / "run/checkpoints/global_step_2/critic.state")["model"]
    assert {"value_head.weight", "value_head.bias"} <= saved.keys() and saved["value_head.weight"].any()
    assert all("lora_" in name for name in saved.keys() - {"value_head.weight", "value_head.bias"})


@pytest.mark.slow
def test_fine_tuning_and_evaluation(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(3) for b in range(3)]
    overrides = {
        "model.path": str(model_folder),
        "model.lora.rank": 2,
        "model.lora.target_modules": ["q_proj", "v_proj"],
        "optim.lr": 1e-2,
        "data.train_batch_size": 3,
        "data.max_length": 64,
        "data.apply_chat_template": False,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(tmp_path / "run"),
    }
    config = load_config(SFTConfig, None, overrides, given={"data"}).config
    history = train_sft(config, data=rows).history
    assert history[-1]["sft/loss"] < history[0]["sft/loss"]
    alone = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert json.loads((alone / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
    asked = [{"prompt": row["prompt"], "answer": row["response"]} for row in rows]
    seen = []
    for model in ({"model.path": str(alone)}, {"model.path": str(model_folder), "model.lora.path": str(alone)}):
        small = {
            **model,
            "data.apply_chat_template": False,
            "data.max_response_length": 4,
            "data.max_prompt_length": 16,
        }
        small |= {"reward.num_workers": 0}
        done = evaluate(
            load_config(EvalConfig, None, small, given={"reward", "data"}).config, reward=length, data=asked
        )
        seen.append([(answer["response"], answer["mean_log_prob"]) for answer in done.answers])
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_what_does_not_go_together(train_config: MakeConfig, model_folder: Path) -> None:
    with raises(ConfigError, "model.freeze", found=["model.embed_tokens.*"]):
        train_config({**LORA, "model.freeze": ["model.embed_tokens.*"]})
    with raises(ConfigError, "model.lora.path", found=re.compile(r" adapter_config\.json$")):
        train_config({"model.lora.path": str(model_folder)})


@pytest.mark.slow
def test_processes_hold_equal_adapters(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    records = []
    for processes in (1, 2):
        config = train_config(
            {**LORA, **KL, "cluster.processes": processes, "trainer.run_dir": tmp_path / str(processes)}
        )
        records.append(train(config, reward=length, data=additions).history)
    for one, two in zip(*records, strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
