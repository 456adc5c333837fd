# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the loss of transformers, on the answers alone, and resumable to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.raising import raises
from whet import serialization
from whet.config import SFTConfig, load_config
from whet.data.supervised import SupervisedExample
from whet.errors import ConfigError
from whet.trainers.sft import SFTRun, to_batch, train_sft

MakeConfig = Callable[..., SFTConfig]


@pytest.fixture
def sft_config(model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(**overrides: Any) -> SFTConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "data.apply_chat_template": False,
            "data.train_batch_size": 4,
            "data.max_length": 32,
            "optim.lr": 3e-3,
            "trainer.total_steps": 4,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return load_config(SFTConfig, None, small | overrides, given={"data"}).config

    return make


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(4)]


def weights(folder: Path, step: int) -> torch.Tensor:
    state = serialization.load(folder / "checkpoints" / f"global_step_{step}" / "actor.state")
    return torch.cat([weight.flatten() for weight in state["model"].values()])


def test_a_batch_by_hand() -> None:
    # the first token has nothing before it, so it is the prompt whatever the mask says
    examples = [SupervisedExample((5, 6, 7, 8), (0, 0, 1, 1)), SupervisedExample((5, 9), (1, 1))]
    batch = to_batch(examples, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]


def test_the_first_loss_is_transformers_own_on_the_answers(
    sft_config: MakeConfig, rows: list[dict[str, str]], model_folder: Path
) -> None:
    config = sft_config(**{"trainer.total_steps": 1, "data.shuffle": False, "max_tokens_per_micro_batch": 14})
    run = train_sft(config, data=rows)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    losses, tokens = 0.0, 0
    for row in rows[:4]:
        prompt, answer = tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["response"]), tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            losses += model(torch.tensor([prompt + answer]), labels=labels).loss.item() * len(answer)
        tokens += len(answer)
    assert run.history[0]["sft/loss"] == pytest.approx(losses / tokens, rel=1e-5)
    assert run.history[0]["sft/tokens"] == tokens


@pytest.mark.slow
def test_it_learns_the_answers(sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path) -> None:
    run = train_sft(sft_config(**{"trainer.total_steps": 60, "data.train_batch_size": 20}), data=rows)
    losses = [record["sft/loss"] for record in run.history]
    assert losses[0] > 3.5 and losses[-1] < 0.5, (losses[0], losses[-1])


@pytest.mark.slow
def test_packing_and_micro_batches_change_nothing(
    sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    train_sft(sft_config(), data=rows)
    others = {"padded": {"engine.packing": False}, "one by one": {"max_tokens_per_micro_batch": 1}}
    expected = weights(tmp_path / "run", 4)
    for name, other in others.items():
        train_sft(sft_config(**other, **{"trainer.run_dir": str(tmp_path / name)}), data=rows)
        assert (weights(tmp_path / name, 4) - expected).norm() < 1e-4 * expected.norm()


def test_whole_conversations_learn_every_assistant_turn(sft_config: MakeConfig, tmp_path: Path) -> None:
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    config = sft_config(**{"data.apply_chat_template": True, "data.max_length": 64, "trainer.total_steps": 1})
    run = train_sft(config, data=[row] * 4)
    assert run.history[0]["sft/tokens"] == 4 * 2 * 2  # a digit and the end of the turn, twice in each of four rows


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ({"trainer.val_freq": 2}, [0, 2, 3]),
        ({"trainer.val_freq": 0, "trainer.val_before_train": False}, [3]),
        ({"trainer.val_freq": -1}, []),
    ],
    ids=str,
)
def test_validation(
    overrides: dict[str, Any], steps: list[int], sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    overrides = {**overrides, "data.val_files": [str(held_out)], "trainer.total_steps": 3, "data.shuffle": False}
    run = train_sft(sft_config(**overrides), data=rows)
    found = {record["step"]: record["val/loss"] for record in run.history if "val/loss" in record}
    assert list(found) == steps
    if 0 in found:  # the same rows as those of the first step, before it
        assert found[0] == pytest.approx(run.history[1]["sft/loss"], rel=1e-5)


def test_a_stopped_run_goes_on_to_the_same_bits(
    sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    schedule = {"optim.schedule": "cosine", "optim.warmup_steps": 1, "trainer.save_freq": 1}
    train_sft(sft_config(**schedule, **{"trainer.run_dir": str(tmp_path / "straight")}), data=rows)

    def stop(run: SFTRun) -> None:
        if run.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_sft(sft_config(**schedule), data=rows, callbacks=[stop])
    resumed = train_sft(sft_config(**schedule), data=rows)
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_2"
    assert [record["step"] for record in resumed.history] == [1, 2, 3, 4]
    assert torch.equal(weights(tmp_path / "run", 4), weights(tmp_path / "straight", 4))
    metrics = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("run", "straight")]
    assert metrics[0] == metrics[1]


def test_a_callback_may_stop_it_early(sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path) -> None:
    def stop(run: SFTRun) -> None:
        if run.step == 2:
            run.stop()

    run = train_sft(sft_config(**{"trainer.save_freq": 0}), data=rows, callbacks=[stop])
    assert (run.step, run.total_steps) == (2, 2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["global_step_2"]


def test_an_epoch_is_every_example_once(sft_config: MakeConfig, rows: list[dict[str, str]]) -> None:
    run = train_sft(sft_config(**{"trainer.total_steps": None, "trainer.total_epochs": 2}), data=rows)
    assert run.total_steps == 2 * 5
    tokens = sum(len(row["response"]) + 1 for row in rows)
    assert [sum(r["sft/tokens"] for r in run.history[at : at + 5]) for at in (0, 5)] == [tokens, tokens]


def test_what_only_train_has_is_refused(sft_config: MakeConfig) -> None:
    with raises(ConfigError, "trainer.loop", found=re.compile("^mine.loops:fit .*`whet train`$")):
        sft_config(**{"trainer.loop": "mine.loops:fit"})


def test_a_dry_run_writes_nothing(
    sft_config: MakeConfig, rows: list[dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "whet")
    run = train_sft(sft_config(), data=rows, val_data=rows[:3], dry_run=True)
    assert run.step == 0 and not (tmp_path / "run").exists()
    assert f"dry run: {len(rows)} examples to train on, 3 to validate on, {run.total_steps} steps" in caplog.text
    assert f"the first example:\n{rows[0]['prompt']}{rows[0]['response']}" in caplog.text
