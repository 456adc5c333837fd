# SPDX-License-Identifier: Apache-2.0
"""The export loads with plain transformers and gives the same outputs as the trained model."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.conftest import SMALL_RUN
from tests.first import first
from tests.raising import raises
from whet import serialization
from whet.checkpoints import checkpoint
from whet.checkpoints.export import export
from whet.config import EvalConfig, RewardTrainingConfig, SFTConfig, TrainConfig, load_config
from whet.errors import CheckpointError
from whet.evaluation.evaluate import evaluate
from whet.models.load import load_policy, load_reward_model, stop_token_ids
from whet.trainers.build import begin, train
from whet.trainers.sft import train_sft
from whet.trainers.train_reward import train_reward
from whet.weight_sync.buckets import Digest

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
IDS = torch.tensor([[11, 14, 12, 20]])


def length(solution_str: str) -> float:
    return float(len(solution_str))


@pytest.mark.parametrize("folder", first(1, ["model_folder", "qwen25_folder"], others=pytest.mark.slow))
def test_plain_transformers_gives_the_logits_of_the_trained_model(
    folder: str, train_config: MakeConfig, additions: Rows, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    start: Path = request.getfixturevalue(folder)
    train(train_config({"model.path": str(start), "trainer.save_freq": 1}), reward=length, data=additions)
    out = export(tmp_path / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = serialization.load(tmp_path / "run" / "checkpoints" / "global_step_2" / "actor.state")["model"]
    reference = AutoModelForCausalLM.from_pretrained(start)
    before = reference(IDS).logits
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            weight.copy_(trained[name])
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
        assert not torch.allclose(model(IDS).logits, before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    tokenizer, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(start)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == original.apply_chat_template(chat)["input_ids"]
    assert GenerationConfig.from_pretrained(out).eos_token_id == GenerationConfig.from_pretrained(start).eos_token_id
    assert (
        stop_token_ids(out, tokenizer) == stop_token_ids(start, original) and len(stop_token_ids(out, tokenizer)) == 2
    )
    assert AutoConfig.from_pretrained(out).architectures == AutoConfig.from_pretrained(start).architectures


@pytest.mark.slow
def test_a_checkpoint_by_path_and_what_was_exported_trains_on(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = train_config({"trainer.save_freq": 1, "trainer.save_limit": None})
    train(config, reward=length, data=additions)
    checkpoints = tmp_path / "run" / "checkpoints"
    first = export(checkpoints / "global_step_1", tmp_path / "first")
    newest = export(tmp_path / "run", tmp_path / "newest")
    one, two = (AutoModelForCausalLM.from_pretrained(path)(IDS).logits for path in (first, newest))
    assert not torch.equal(one, two)
    overrides = {"model.path": str(first), "trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / "again")}
    again = train(train_config(overrides), reward=length, data=additions)
    assert again.history[0]["actor/grad_norm"] > 0


def narrow_start(model_folder: Path, folder: Path) -> Path:
    """A model whose files are in bfloat16."""
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


VALIDATED = {
    "actor.optim.lr": 1e-5,  # far below the step between two numbers of bfloat16
    "actor.epochs": 3,
    "trainer.total_steps": 3,
    "trainer.save_freq": 1,
    "trainer.save_limit": None,
    "trainer.val_freq": 1,
    "trainer.validation.temperature": 0.0,
    "trainer.validation.n": 1,
}


def validated(run_dir: Path, step: int) -> list[str]:
    """The responses of the validation of a step."""
    lines = (run_dir / "rollouts" / f"validation_{step:06}.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


def evaluated(model: Path, dtype: str, rows: Rows) -> list[str]:
    values = {**SMALL_RUN, "model.path": str(model), "rollout.dtype": dtype, "rollout.n": 1, "rollout.temperature": 0.0}
    known = {name: value for name, value in values.items() if name.partition(".")[0] in ("model", "data", "rollout")}
    config = load_config(EvalConfig, None, known, given={"reward", "data"}).config
    return [row["response"] for row in evaluate(config, reward=length, data=rows).answers]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        pytest.param({"model.lora.rank": 4, "actor.optim.lr": 1e-4}, id="adapter"),
        pytest.param({"actor.engine.name": "fsdp"}, id="sharded"),
        pytest.param({"model.dtype": "bfloat16", "model.lora.rank": 4}, id="narrow base"),
    ],
)
def test_what_is_exported_is_what_was_validated(
    kind: dict[str, Any],
    dtype: str,
    train_config: MakeConfig,
    additions: Rows,
    model_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every weight as the rollout had it, to the bit, and its greedy responses, to the letter."""
    start = narrow_start(model_folder, tmp_path / "start") if "narrow" not in str(kind) else model_folder
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, additions)))
    values = {**VALIDATED, **kind, "model.path": str(start), "rollout.dtype": dtype}
    values |= {"data.val_files": str(tmp_path / "rows.jsonl")}
    run = train(train_config(values), reward=length, data=additions)
    for step in (2, 3):
        caplog.clear()
        with caplog.at_level(logging.INFO, "whet"):
            out = export(run.run_dir / "checkpoints" / f"global_step_{step}", tmp_path / f"out {step}")
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        model = load_policy(out)
        assert evaluated(out, dtype, additions) == validated(run.run_dir, step)
        told = [each.getMessage() for each in caplog.records if "%" in each.getMessage()]
        assert len(told) == (dtype == "bfloat16")
    digest = Digest()
    for name, weight in model.named_parameters():
        digest.add(name, weight.detach().to(getattr(torch, dtype)))
    assert str(digest) == run.digests[3]


@pytest.mark.slow
def test_rounding_says_what_is_left_of_the_update(
    train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = narrow_start(model_folder, tmp_path / "start")
    run = train(
        train_config({**VALIDATED, "model.path": str(start), "trainer.val_freq": -1}), reward=length, data=additions
    )
    with caplog.at_level(logging.INFO, "whet"):
        out = export(run.run_dir, tmp_path / "out", dtype="bfloat16")
    saved = serialization.load(run.run_dir / "checkpoints" / "global_step_3" / "actor.state")["model"]
    first, last = (dict(load_policy(folder).named_parameters()) for folder in (start, out))
    error = sum(float((last[name] - saved[name]).detach().double().square().sum()) for name in saved)
    update = sum(float((saved[name] - first[name]).detach().double().square().sum()) for name in saved)
    assert 0 < 1 - error / update < 0.9
    assert f"{100 * (1 - error / update):.1f} %" in caplog.text
    assert all(torch.equal(last[name], saved[name].bfloat16().float()) for name in saved)
    caplog.clear()
    (start / "model.safetensors").unlink()
    with caplog.at_level(logging.INFO, "whet"):
        export(run.run_dir, tmp_path / "again", dtype="bfloat16")
    assert "unknown share" in caplog.text
    with raises(CheckpointError, found="float16", change=re.compile("--dtype")):
        export(run.run_dir, tmp_path / "never", dtype="float16")


@pytest.mark.parametrize("kind", first(1, ["sft", "reward"], others=pytest.mark.slow))
def test_a_run_without_a_rollout_is_exported_as_it_was_trained(
    kind: str, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32, also where products and the model's files are in bfloat16: the validation looked at these weights."""
    start = narrow_start(model_folder, tmp_path / "start")
    values = {"model.path": str(start), "model.dtype": "bfloat16", "optim.lr": 1e-5, "trainer.total_steps": 1}
    values |= {"data.apply_chat_template": False, "data.max_length": 16, "trainer.logger": []}
    values |= {"trainer.run_dir": str(tmp_path / "run")}
    if kind == "sft":
        sft = load_config(SFTConfig, None, values, given={"data"}).config
        folder = train_sft(sft, data=[{"prompt": "1+1=", "response": "2"}] * 4).run_dir
    else:
        config = load_config(RewardTrainingConfig, None, values, given={"data"}).config
        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
        folder = train_reward(config, data=rows).run_dir
    with caplog.at_level(logging.INFO, "whet"):
        out = export(folder, tmp_path / "out")
    told = [each.getMessage() for each in caplog.records if each.name.startswith("whet.checkpoints")]
    assert not [each for each in told if "%" in each]
    saved = serialization.load(folder / "checkpoints" / "global_step_1" / "actor.state")["model"]
    model = load_policy(out) if kind == "sft" else load_reward_model(out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert all(torch.equal(weight, saved[name]) for name, weight in model.named_parameters())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())


CHOSEN = """\
{%- for m in messages %}{{ m.role + '=' + m.content + '<|endoftext|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant=' }}{% endif %}"""


@pytest.mark.parametrize("kind", first(1, ["train", "sft"], others=pytest.mark.slow))
def test_the_template_of_the_config_and_its_end_are_exported(
    kind: str, train_config: MakeConfig, additions: Rows, qwen25_folder: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(qwen25_folder, start)
    values = {"eos_token_id": AutoTokenizer.from_pretrained(start).eos_token_id}
    (start / "generation_config.json").write_text(json.dumps(values))
    chosen = {"data.apply_chat_template": True, "data.chat_template_kwargs": {"chat_template": CHOSEN}}
    if kind == "train":
        more = {"model.path": str(start), "trainer.total_steps": 1, "data.max_prompt_length": 64}
        run: Any = train(train_config({**more, **chosen}), reward=length, data=additions)
    else:
        small = {
            "model.path": str(start),
            "trainer.total_steps": 1,
            "data.max_length": 64,
            "trainer.run_dir": str(tmp_path / "run"),
        }
        config = load_config(SFTConfig, None, {**small, **chosen, "trainer.logger": []}, given={"data"}).config
        run = train_sft(config, data=[{"prompt": "1", "response": "2"}])
    out = export(run.run_dir, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "user=1<|endoftext|>"
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert set(GenerationConfig.from_pretrained(out).eos_token_id) == {end, tokenizer.eos_token_id}


def test_sampling_stops_at_the_end_that_the_template_writes(
    qwen25_folder: Path, tmp_path: Path, train_config: MakeConfig
) -> None:
    start = tmp_path / "start"
    shutil.copytree(qwen25_folder, start)
    (start / "generation_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(start)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert stop_token_ids(start, tokenizer) == (tokenizer.eos_token_id,)
    assert stop_token_ids(start, tokenizer, {"chat_template": CHOSEN}) == tuple(sorted((end, tokenizer.eos_token_id)))
    more = {"model.path": str(start), "data.max_prompt_length": 64, "data.chat_template_kwargs.chat_template": CHOSEN}
    rows = [{"prompt": "1", "answer": "1"}] * 4
    for applied, expected in ((True, {end, tokenizer.eos_token_id}), (False, {tokenizer.eos_token_id})):
        config = train_config({**more, "data.apply_chat_template": applied})
        assert set(begin(config, data=rows, reward=length).stop_ids) == expected


def test_nothing_is_overwritten_and_nothing_is_guessed(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with raises(CheckpointError, f"{tmp_path / 'mine'}"):
        export(tmp_path / "run", tmp_path / "mine")
    with raises(CheckpointError, f"{tmp_path / 'run'}", expected=re.compile("manifest.json")):
        export(tmp_path / "run", tmp_path / "exported")
    train(train_config({"trainer.total_steps": 1}), reward=length, data=additions)
    state = tmp_path / "run" / "checkpoints" / "global_step_1" / "actor.state"
    state.write_bytes(state.read_bytes()[:-1])
    with raises(CheckpointError, re.compile(r"global_step_1: actor\.state$")):
        export(state.parent, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_no_model(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """As a run of an earlier version may have saved them."""
    run = train(train_config(), reward=length, data=additions)
    folder = run.run_dir / "checkpoints" / "global_step_2"
    state = serialization.load(folder / "actor.state")
    state["model"]["model.norm.weight"] = torch.full_like(state["model"]["model.norm.weight"], float("inf"))
    serialization.save(folder / "actor.state", state)
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder)
    with raises(CheckpointError, "model.norm.weight", found=re.compile("torch.float32")):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
