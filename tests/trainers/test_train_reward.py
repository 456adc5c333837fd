# SPDX-License-Identifier: Apache-2.0
"""Reward models from preference pairs: any split takes the same steps, a resume has the same bits, an export scores."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import SMALL_RUN
from tests.raising import raises
from whet import serialization
from whet.checkpoints.export import export
from whet.config import RewardTrainingConfig, SFTConfig, TrainConfig, load_config
from whet.data.preferences import Comparison
from whet.errors import ConfigError, ModelError
from whet.models.load import load_reward_model
from whet.trainers.build import train
from whet.trainers.sft import train_sft
from whet.trainers.train_reward import RewardTrainingRun, to_batch, train_reward

MakeConfig = Callable[..., RewardTrainingConfig]


@pytest.fixture
def reward_config(model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(**overrides: Any) -> RewardTrainingConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "model.dtype": "float32",
            "data.apply_chat_template": False,
            "data.train_batch_size": 5,
            "data.max_length": 32,
            "optim.lr": 1e-3,
            "trainer.total_steps": 3,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return load_config(RewardTrainingConfig, None, small | overrides, given={"data"}).config

    return make


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The response with more of the letter a is the better; some have a margin."""
    good, bad = ["aab", "aaba", "baa"], ["bb", "cbacb"]
    pairs = [(prompt, one, other) for prompt in "xyz" for one in good for other in bad]
    return [
        {"prompt": f"say {prompt}=", "chosen": one, "rejected": other, "margin": 0.5 * (number % 3)}
        for number, (prompt, one, other) in enumerate(pairs)
    ]


def weights(folder: Path, step: int) -> torch.Tensor:
    state = serialization.load(folder / "checkpoints" / f"global_step_{step}" / "actor.state")
    return torch.cat([weight.flatten() for weight in state["model"].values()])


def pair(prompt: tuple[int, ...], *responses: tuple[int, ...], margin: float = 0.0) -> Comparison:
    sampled = tuple((ids, (1,) * len(ids)) for ids in responses)
    return Comparison(prompt, sampled, tuple(map(float, range(len(responses), 0, -1))), margin=margin)


def test_the_shared_tokens_leave_one_to_each() -> None:
    """The prompt of a row is all that a pair shares, but the last token of the shorter and the first of each."""
    for chosen, rejected, num_shared in (
        ((5, 6, 7), (5, 6, 8), 2), ((5, 6), (5, 6, 8), 1), ((4, 6), (5, 6), 1)
    ):  # fmt: skip
        batch = to_batch([pair((), chosen, rejected)], pad_token_id=0)
        assert batch["response_mask"].sum(1).tolist() == [len(each) - num_shared for each in (chosen, rejected)]


def test_a_batch_by_hand() -> None:
    pairs = [pair((5,), (6, 7, 8), (1,), (6, 9), margin=0.5), pair((), (5, 4), (3, 4, 4))]
    batch = to_batch(pairs, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 9, 0], [0, 5, 4, 0], [0, 3, 4, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 2], [0, 0, 1, 1], [0, 0, 1, 2]]
    assert batch["response_mask"].tolist() == [[1, 1], [1, 0], [1, 0], [1, 1]]
    assert batch["margin"].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_the_first_loss_is_that_of_transformers_scores(
    reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A learning rate of 0: the exported model is the one that the loss was computed with."""
    changes = {"trainer.total_steps": 1, "data.shuffle": False, "optim.lr": 0.0, "center_coef": 0.1}
    run = train_reward(reward_config(**changes), data=rows)
    out = export(tmp_path / "run", tmp_path / "out")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    losses, rights = [], []
    for row in rows[:5]:
        ids = [
            [*tokenizer.encode(row["prompt"] + row[name]), tokenizer.eos_token_id] for name in ("chosen", "rejected")
        ]
        with torch.no_grad():
            chosen, rejected = (model(torch.tensor([each])).logits.squeeze() for each in ids)
        apart = chosen - rejected - row["margin"]
        losses.append((-torch.nn.functional.logsigmoid(apart) + 0.1 * (chosen + rejected) ** 2).item())
        rights.append(float(chosen > rejected))
    [record] = run.history
    assert record["reward_model/loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert record["reward_model/accuracy"] == pytest.approx(sum(rights) / 5)


def test_an_export_has_the_scores_of_the_run(
    reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    scores: list[torch.Tensor] = []

    def score(run: RewardTrainingRun) -> None:
        batch = to_batch(run.examples[:4], run.pad_token_id)
        scores.append(run.roles["actor"].forward(batch, ("scores",))["scores"].sum(1))

    run = train_reward(reward_config(), data=rows, callbacks=[score])
    out = export(tmp_path / "run", tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_labels == 1 and type(model).__name__ == "Qwen3ForSequenceClassification"
    ids = [list(ids) for pair in run.examples[:4] for ids in (pair.chosen, pair.rejected)]
    tokenizer = AutoTokenizer.from_pretrained(out)
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**{name: padded[name] for name in ("input_ids", "attention_mask")}).logits.squeeze(1)
    torch.testing.assert_close(theirs, scores[-1], atol=1e-5, rtol=0)
    assert (theirs - scores[0]).abs().max() > 1e-3


def test_it_learns_the_preference(reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::4]))
    changes = {"trainer.total_steps": 15, "data.train_batch_size": 9, "data.val_files": [str(tmp_path / "val.jsonl")]}
    run = train_reward(reward_config(**changes), data=rows)
    first, last = run.history[0], run.history[-1]
    assert last["val/accuracy"] == 1.0 and last["val/loss"] < 0.5 * first["val/loss"]
    assert last["val/margin"] == pytest.approx(last["val/chosen"] - last["val/rejected"], abs=1e-5)
    assert last["reward_model/margin"] > 1.0
    assert last["val/brier"] < 0.25 * first["val/brier"] and 0 < last["val/calibration_error"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"engine.packing": False},
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"engine.packing": False, "max_tokens_per_micro_batch": 1},
        {"engine.share_prompts": False},
        {"engine.name": "fsdp"},
    ],
    ids=str,
)
def test_any_split_of_a_mini_batch_takes_the_same_steps(
    changes: dict[str, Any], reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A large eps makes AdamW close to plain gradient descent: weights then show the size of gradients."""
    both = {"optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0, "center_coef": 0.1}
    one = train_reward(reward_config(**both), data=rows)
    other = train_reward(reward_config(**both, **changes, **{"trainer.run_dir": str(tmp_path / "other")}), data=rows)
    check_same(one, other)
    before, after = (exported(tmp_path / name) for name in ("run", "other"))
    assert before.keys() == after.keys()
    moved = torch.cat([before[name].flatten() for name in before])
    apart = torch.cat([(before[name] - after[name]).flatten() for name in before])
    assert apart.norm() < 1e-5 * moved.norm()


ADAPTED = {"model.lora.rank": 4, "optim.lr": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "adapter"), [("single", {}), ("fsdp", {}), ("single", ADAPTED), ("fsdp", ADAPTED)])
def test_two_processes_take_the_steps_of_one(
    engine: str, adapter: dict[str, Any], reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    both = {"optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0, "center_coef": 0.1, **adapter}
    one = train_reward(reward_config(**both), data=rows)
    changes = {"cluster.processes": 2, "engine.name": engine, "trainer.run_dir": str(tmp_path / "other")}
    other = train_reward(reward_config(**both, **changes), data=rows)
    check_same(one, other)
    before, after = (exported(tmp_path / name) for name in ("run", "other"))
    apart = torch.cat([(before[name] - after[name]).flatten() for name in before])
    assert apart.norm() < 1e-5 * torch.cat([weight.flatten() for weight in before.values()]).norm()


def exported(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(export(folder, folder / "out"))
    return dict(model.named_parameters())


def check_same(one: RewardTrainingRun, other: RewardTrainingRun) -> None:
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=2e-5)


def stop_at_three(run: RewardTrainingRun) -> None:
    if run.step == 3:
        raise KeyboardInterrupt


def test_a_stopped_run_goes_on_to_the_same_bits(
    reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    schedule = {"optim.schedule": "cosine", "trainer.save_freq": 1, "trainer.total_steps": 4}
    train_reward(reward_config(**schedule, **{"trainer.run_dir": str(tmp_path / "straight")}), data=rows)

    with pytest.raises(KeyboardInterrupt):
        train_reward(reward_config(**schedule), data=rows, callbacks=[stop_at_three])
    resumed = train_reward(reward_config(**schedule), data=rows)
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_2"
    assert torch.equal(weights(tmp_path / "run", 4), weights(tmp_path / "straight", 4))
    metrics = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("run", "straight")]
    assert metrics[0] == metrics[1]


LORA = {"model.lora.rank": 4, "optim.lr": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_an_adapter_and_the_whole_head_are_trained(
    engine: str, reward_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, tmp_path: Path
) -> None:
    """Merged and as peft reads it, the export has the scores of the run; a policy is trained against it."""
    scores: list[torch.Tensor] = []

    def score(run: RewardTrainingRun) -> None:
        batch = to_batch(run.examples[:4], run.pad_token_id)
        scores.append(run.roles["actor"].forward(batch, ("scores",))["scores"].sum(1))

    run = train_reward(reward_config(**LORA, **{"engine.name": engine}), data=rows, callbacks=[score])
    merged = export(tmp_path / "run", tmp_path / "merged")
    alone = export(tmp_path / "run", tmp_path / "alone", adapter=True)
    fields = json.loads((alone / "adapter_config.json").read_text())
    assert (fields["task_type"], fields["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "score" not in fields["target_modules"]
    kind, ids = AutoModelForSequenceClassification, [list(e) for p in run.examples[:4] for e in (p.chosen, p.rejected)]
    padded = AutoTokenizer.from_pretrained(merged).pad({"input_ids": ids}, return_tensors="pt")
    whole = kind.from_pretrained(merged)
    base = kind.from_pretrained(model_folder, num_labels=1, pad_token_id=whole.config.pad_token_id)
    with torch.no_grad():
        for model in (whole, PeftModel.from_pretrained(base, alone)):
            theirs = model(**{name: padded[name] for name in ("input_ids", "attention_mask")}).logits.squeeze(1)
            torch.testing.assert_close(theirs, scores[-1], atol=1e-5, rtol=0)
    assert (scores[-1] - scores[0]).abs().max() > 1e-2
    start, end = load_reward_model(model_folder, new_head_seed=0), dict(whole.named_parameters())
    same = {name for name, weight in start.named_parameters() if torch.equal(weight, end[name])}
    assert "score.weight" not in same and "model.embed_tokens.weight" in same
    assert {name.split(".")[-2] for name in end.keys() - same} == {*fields["target_modules"], "score"}

    against = {**SMALL_RUN, "model.path": str(model_folder), "reward_model.model_path": str(merged)}
    against |= {"trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / "against")}
    [record] = train(
        load_config(TrainConfig, None, against, given={"data"}).config, data=[{"prompt": "say x="}] * 4
    ).history
    assert record["critic/rewards/mean"] == pytest.approx(record["reward/reward_model"])
    assert record["actor/grad_norm"] > 0


@pytest.mark.slow
def test_engines_train_the_same_adapter_and_head(
    reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    both = {**LORA, "optim.eps": 1.0, "optim.lr": 1.0, "optim.weight_decay": 0.0}
    one = train_reward(reward_config(**both), data=rows)
    sharded = {"engine.name": "fsdp", "max_tokens_per_micro_batch": 1, "trainer.run_dir": str(tmp_path / "other")}
    other = train_reward(reward_config(**both, **sharded), data=rows)
    check_same(one, other)
    before, after = (exported(tmp_path / name) for name in ("run", "other"))
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_stopped_run_of_an_adapter_goes_on_to_the_same_bits(
    reward_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, tmp_path: Path
) -> None:
    schedule = {**LORA, "trainer.save_freq": 1, "trainer.total_steps": 3}
    train_reward(reward_config(**schedule, **{"trainer.run_dir": str(tmp_path / "straight")}), data=rows)

    with pytest.raises(KeyboardInterrupt):
        train_reward(reward_config(**schedule), data=rows, callbacks=[stop_at_three])
    train_reward(reward_config(**schedule), data=rows)
    files = [tmp_path / name / "checkpoints/global_step_3/actor.state" for name in ("run", "straight")]
    one, other = (serialization.load(file)["model"] for file in files)
    assert {name for name in one if "lora_" not in name} == {"score.weight"} and one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert files[0].stat().st_size < 0.2 * (model_folder / "model.safetensors").stat().st_size
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()


def test_it_goes_on_from_a_classifier(reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    train_reward(reward_config(), data=rows)
    out = export(tmp_path / "run", tmp_path / "out")
    changes = {"model.path": str(out), "trainer.run_dir": str(tmp_path / "more"), "optim.lr": 0.0}
    train_reward(reward_config(**changes), data=rows)
    assert torch.equal(weights(tmp_path / "more", 3), weights(tmp_path / "run", 3))


def test_a_dry_run_writes_nothing(
    reward_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "whet")
    train_reward(reward_config(), data=rows, dry_run=True)
    assert not (tmp_path / "run").exists()
    assert "dry run: 18 rows to train on, 0 to validate on, 3 steps" in caplog.text
    assert "the first row, rejected:\nsay x=bb<|im_end|>" in caplog.text


def test_a_plan_counts_both_rows_of_a_pair(reward_config: MakeConfig) -> None:
    from whet.plugins.planner.memory import mini_batch, plan_memory

    config = reward_config()
    assert len(mini_batch(config, "actor", RewardTrainingRun.setup(config).lengths)) == 10
    memory = plan_memory(RewardTrainingRun.setup(config))
    assert memory.weights["actor"] > 0 and memory.micro_batch_tokens["actor"] > 32


def test_what_cannot_be(
    reward_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with raises(
        ConfigError, "model.lora.path", found=re.compile(f"^{tmp_path}/lora "), change=re.compile("`whet export`")
    ):
        reward_config(**{"model.lora.path": str(tmp_path / "lora")})
    with raises(ModelError, "model.lora.target_modules", found=re.compile("'score'")):
        train_reward(reward_config(**{"model.lora.rank": 4, "model.lora.target_modules": ["score"]}), data=rows)
    with raises(ConfigError, "trainer.loop", change=re.compile("`whet train-reward`$")):
        reward_config(**{"trainer.loop": "mine.loops:fit"})
    train_reward(reward_config(), data=rows)
    fine_tuning = {"model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run"), "trainer.total_steps": 1}
    config = load_config(
        SFTConfig, None, {**fine_tuning, "data.apply_chat_template": False, "data.max_length": 32}, given={"data"}
    ).config
    found, expected = re.compile("`whet train-reward`$"), re.compile("`whet sft`$")
    with raises(ConfigError, key=str(tmp_path / "run"), found=found, expected=expected):
        train_sft(config, data=[{"prompt": "a", "response": "b"}])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model_folder)}))
    with raises(ModelError, f"{adapter}", found=re.compile(f"{model_folder}$"), change=re.compile("whet export")):
        train_reward(reward_config(**{"model.path": str(adapter), "trainer.run_dir": str(tmp_path / "b")}), data=rows)


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    """A step is right if it has the letter a."""
    parts = [("ab", "cc"), ("bb", "ca", "a"), ("dd",), ("a", "ba", "b", "c")]
    return [
        {"prompt": f"say {x}=", "completions": [*each], "labels": ["a" in step for step in each]}
        for x in "xyz"
        for each in parts
    ]


def test_the_loss_of_steps_is_that_of_transformers_scores_of_the_text_up_to_them(
    reward_config: MakeConfig, steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"trainer.total_steps": 1, "data.shuffle": False, "optim.lr": 0.0, "data.max_length": 48}
    run = train_reward(reward_config(**changes), data=steps, val_data=steps[:5])
    model = AutoModelForSequenceClassification.from_pretrained(export(tmp_path / "run", tmp_path / "out"))
    scores, labels = [], []
    for example in run.examples[:5]:
        for end in (place for place, mark in enumerate(example.loss_mask) if mark):
            with torch.no_grad():
                scores.append(model(torch.tensor([example.input_ids[:end]])).logits.squeeze())
        labels += example.labels
    logits, truths = torch.stack(scores), torch.tensor(labels)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truths).item()
    found = run.history[-1]
    assert found["reward_model/loss"] == pytest.approx(loss, rel=1e-5) == found["val/loss"]
    assert found["val/accuracy"] == pytest.approx(((logits > 0) == (truths > 0.5)).float().mean().item())
    assert found["val/brier"] == pytest.approx((logits.sigmoid() - truths).square().mean().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"engine.packing": False, "max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"engine.name": "fsdp"},
        {"cluster.processes": 2},
    ],
    ids=str,
)
def test_any_split_of_steps_is_the_same(
    changes: dict[str, Any], reward_config: MakeConfig, steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    both = {"optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0, "data.max_length": 48}
    one = train_reward(reward_config(**both), data=steps)
    check_same(
        one, train_reward(reward_config(**both, **changes, **{"trainer.run_dir": str(tmp_path / "other")}), data=steps)
    )


def test_centring_needs_pairs(reward_config: MakeConfig, steps: list[dict[str, Any]]) -> None:
    with raises(ConfigError, "center_coef", found=0.1):
        train_reward(reward_config(**{"center_coef": 0.1, "data.max_length": 48}), data=steps)
