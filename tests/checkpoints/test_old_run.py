# SPDX-License-Identifier: Apache-2.0
"""The run of commit 63aba1a in old_run/ (its model, two steps, the checkpoint of step 2) goes on and is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from whet import serialization
from whet.checkpoints.export import export
from whet.config import TrainConfig, load_config
from whet.models.load import load_policy
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit

IDS = torch.tensor([[5, 9, 12, 20, 3]])
# Step 3 as the code of that commit took it.
STEP_3 = {
    "actor/entropy": 3.4587178230285645,
    "actor/grad_norm": 1.0488117933273315,
    "critic/advantages/max": 0.7071057558059692,
    "critic/score/mean": 0.5,
    "response_length/mean": 4.0,
}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(Path(__file__).parent / "old_run", tmp_path / "old")
    monkeypatch.chdir(folder)  # its paths are relative
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = serialization.load(folder / "actor.state")["model"]
    return found


def test_the_run_goes_on_after_its_checkpoint_with_its_weights(old: Path) -> None:
    values = {
        "model.path": "model",
        "data.train_files": "rows.jsonl",
        "data.val_files": "rows.jsonl",
        "data.answer_key": "answer",
        "data.apply_chat_template": False,
        "data.train_batch_size": 2,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "rollout.n": 2,
        "reward.function": "digits.py:digits",
        "reward.num_workers": 0,
        "actor.optim.lr": 1e-2,
        "algorithm.adv_estimator": "grpo",
        "trainer.total_steps": 3,
        "trainer.save_freq": 1,
        "trainer.save_limit": None,
        "trainer.val_freq": 1,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": "run",
    }
    config = load_config(TrainConfig, None, values).config
    run = build(config, build_scorer(config.reward))
    actor: Any = run.roles["actor"]
    module = actor._transport.workers.by_role["actor"].engine.whole_module()
    loaded = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    saved = weights(old / "run" / "checkpoints" / "global_step_2")
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    fit(run)
    run.close()
    assert [each["step"] for each in run.history] == [0, 1, 2, 3]
    third = {name: run.history[-1][name] for name in STEP_3}
    assert third == pytest.approx(STEP_3, rel=1e-4)
    trained = weights(old / "run" / "checkpoints" / "global_step_3")
    assert not torch.equal(trained["model.norm.weight"], saved["model.norm.weight"])
    steps = [json.loads(line)["step"] for line in (old / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_its_export_has_the_log_probs_of_the_tensors_in_its_folder(old: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(export(old / "run", old / "exported"))
    expected = load_policy(old / "model")
    with torch.no_grad():
        before = expected(IDS).logits.log_softmax(-1)
        for name, weight in expected.named_parameters():
            weight.copy_(weights(old / "run" / "checkpoints" / "global_step_2")[name])
        after = expected(IDS).logits.log_softmax(-1)
        torch.testing.assert_close(model(IDS).logits.log_softmax(-1), after, rtol=0, atol=1e-6)
    assert (after - before).abs().max() > 1e-3
