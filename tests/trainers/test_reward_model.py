# SPDX-License-Identifier: Apache-2.0
"""A reward model as a role: its scores equal transformers' for the sampled ids, and the trained numbers follow."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.first import first
from tests.raising import raises
from whet.batch import Batch
from whet.config import TrainConfig, load_config
from whet.errors import ConfigError, EngineError, ModelError
from whet.metrics import Metrics
from whet.models.load import load_reward_model, load_tokenizer
from whet.plugins.lessons.init_model import init_model
from whet.roles.reward_texts import TextReader
from whet.trainers import rl
from whet.trainers.build import build, build_scorer, setup, train
from whet.trainers.columns import plan
from whet.trainers.run import Run
from whet.types import Group, Media, Message, Prompt, Trajectory

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def classifier(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy as a classifier with a random head, and with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    model = load_reward_model(model_folder, new_head_seed=1)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    load_tokenizer(model_folder).save_pretrained(folder)
    return folder


def some(solution_str: str) -> float:
    """A score between 0 and 6; responses that begin with a letter from a to m fail."""
    if "a" <= solution_str[:1] <= "m":
        raise ValueError("it begins with an early letter")
    return float(len(set(solution_str)))


def shaped(config: TrainConfig, additions: Rows, reward: Callable[..., Any] = some) -> tuple[Run, Batch, Metrics]:
    """A batch of the first step up to its rewards."""
    metrics = Metrics()
    run = build(config, build_scorer(config.reward, reward), additions)
    try:
        batch = rl.sample(run, 1, metrics)
        return run, run.shaper.rewards(batch, metrics), metrics
    finally:
        run.close()
        run.rollouts.close()


def expected_scores(folder: Path, batch: Batch) -> torch.Tensor:
    """transformers' scores of the ids that the policy saw and wrote."""
    model, real = AutoModelForSequenceClassification.from_pretrained(folder), batch["attention_mask"].bool()
    with torch.no_grad():
        scores = [model(ids[own][None]).logits.item() for ids, own in zip(batch["input_ids"], real, strict=True)]
    return torch.tensor(scores) * batch["response_mask"].any(1)


@pytest.mark.parametrize(
    "changes",
    first(
        1,
        [
            {},
            {"reward_model.engine.packing": False, "reward_model.max_tokens_per_micro_batch": 30},
            {"reward_model.engine.name": "fsdp", "reward_model.max_tokens_per_micro_batch": 1},
        ],
        others=pytest.mark.slow,
    ),
    ids=str,
)
def test_scores_are_those_of_transformers(
    changes: dict[str, Any], train_config: MakeConfig, classifier: Path, additions: Rows
) -> None:
    config = train_config({"reward_model.model_path": str(classifier), **changes})
    _, batch, metrics = shaped(config, additions)
    failed = torch.tensor([error is not None for error in batch["error"]])
    assert 0 < failed.sum() < len(failed)
    expected = expected_scores(classifier, batch)
    torch.testing.assert_close(batch["rm_scores"], expected, atol=1e-5, rtol=0)
    assert not batch["rm_scores"][failed].any()
    numbers = metrics.reduce()
    assert numbers["reward/reward_model"] == pytest.approx(expected[~failed].mean().item(), abs=1e-5)
    # replace: paid at the last token; the function's score stays a metric
    rewards = batch["token_level_rewards"]
    torch.testing.assert_close(rewards.sum(1), expected, atol=1e-5, rtol=0)
    lengths = batch["response_mask"].sum(1)
    assert torch.equal(rewards[~failed].nonzero()[:, 1], lengths[~failed] - 1)
    assert numbers["critic/score/mean"] == pytest.approx(batch["token_level_scores"][~failed].sum(1).mean().item())


def test_a_weight_and_the_sum_with_the_function(
    train_config: MakeConfig, classifier: Path, additions: Rows, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"reward_model.model_path": str(classifier), "reward_model.weight": -2.0}
    for combine in ("replace", "add"):
        changes["trainer.run_dir"] = str(tmp_path / combine)
        _, batch, _ = shaped(train_config({**changes, "reward_model.combine": combine}), additions)
        expected = -2.0 * batch["rm_scores"] + (batch["token_level_scores"].sum(1) if combine == "add" else 0.0)
        torch.testing.assert_close(batch["token_level_rewards"].sum(1), expected)


def test_held_out_answers_have_its_score_beside_the_truth(
    train_config: MakeConfig, classifier: Path, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five held-out prompts, more than the four of a step: judged four and one."""
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions[:5]))
    changes = {"reward_model.model_path": str(classifier), "trainer.total_steps": 1, "trainer.log_rollouts": 1}
    changes |= {"trainer.val_freq": 1, "data.val_files": [str(tmp_path / "val.jsonl")]}
    changes |= {"trainer.validation.n": 2, "trainer.validation.temperature": 1.0}
    own, ids = Run.judge, dict[str, tuple[int, ...]]()

    def judge(self: Run, groups: Sequence[Group], step: int) -> list[Group]:
        for each in (each for group in groups for each in group.trajectories):
            ids[f"{step} {each.uid}"] = each.prompt.token_ids + each.turns[-1].token_ids
        return own(self, groups, step)

    monkeypatch.setattr(Run, "judge", judge)
    run = train(train_config(changes), data=additions, reward=some)
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    for step, record in enumerate(run.history):
        path = tmp_path / "run" / "rollouts" / f"validation_{step:06}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        alive = [line for line in lines if line["failure"] is None]
        assert len(lines) == 10 and 0 < len(alive) < 10
        scores = [line["parts"]["reward_model"] for line in alive]
        for line, score in zip(alive, scores, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([ids[f"{step} {line['uid']}"]])).logits.item()
            assert score == pytest.approx(expected, abs=1e-5)
        assert all(line["parts"] == {} for line in lines if line["failure"] is not None)
        assert record["val/reward_model"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
        assert record["val/reward"] == pytest.approx(sum(line["reward"] for line in alive) / 10)
    trained = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert all((line["failure"] is None) == ("reward_model" in line["parts"]) for line in trained)


def test_a_validation_that_needs_the_reward_model_does_not_run_beside_training(
    train_config: MakeConfig, classifier: Path
) -> None:
    pools = {"main": {"processes": 1}, "sampling": {"processes": 1, "roles": ["rollout"]}}
    of_model, of_rubric = {"reward_model.model_path": str(classifier)}, {"reward_model.rubric": "yes_no"}
    for scored_by, is_apart in (({}, True), (of_model, False), (of_rubric, True), (of_model | of_rubric, False)):
        config = train_config({"cluster.placement": pools, **scored_by})
        roles = dict.fromkeys(("actor", "rollout"))
        stub = SimpleNamespace(config=config, roles=roles, columns=plan(config), stays_here=False)
        assert Run.samples_apart.fget(stub) is is_apart  # type: ignore[attr-defined]


def test_only_the_last_row_of_a_trajectory_is_scored(
    train_config: MakeConfig, classifier: Path, additions: Rows
) -> None:
    from whet.trainers.columns import rm_scores

    config = train_config({"reward_model.model_path": str(classifier)})
    run = build(config, build_scorer(config.reward, some), additions)
    try:
        batch = rl.sample(run, 1, Metrics())
        one = rm_scores(batch, run.sources([], 1))()  # type: ignore[operator]
        owners = torch.arange(len(batch)) // 2
        both = rm_scores(batch.with_columns(trajectory_uid=owners), run.sources([], 1))()  # type: ignore[operator]
    finally:
        run.close()
        run.rollouts.close()
    assert not both[::2].any()
    torch.testing.assert_close(both[1::2], one[1::2])


@pytest.mark.slow
def test_without_a_function_the_model_alone_pays(
    classifier: Path, model_folder: Path, additions: Rows, tmp_path: Path
) -> None:
    from tests.conftest import SMALL_RUN

    overrides = {
        **SMALL_RUN,
        "model.path": str(model_folder),
        "reward_model.model_path": str(classifier),
        "actor.optim.lr": 3e-3,
        "trainer.total_steps": 12,
        "trainer.run_dir": str(tmp_path / "run"),
    }
    run = train(load_config(TrainConfig, None, overrides, given={"data"}).config, data=additions)
    proxy = [record["reward/reward_model"] for record in run.history]
    assert sum(proxy[-3:]) / 3 > sum(proxy[:3]) / 3 + 0.2, proxy
    assert all(record["critic/score/mean"] == 0.0 for record in run.history)
    assert all(record["critic/rewards/mean"] == pytest.approx(record["reward/reward_model"]) for record in run.history)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_a_pool_of_its_own_with_two_processes(
    engine: str, train_config: MakeConfig, classifier: Path, additions: Rows
) -> None:
    """The run of one process, to the last metric of its rewards."""
    changes = {"reward_model.model_path": str(classifier), "reward_model.engine.name": engine}
    pools = {"main": {"processes": 1}, "scores": {"processes": 2, "roles": ["reward_model"]}}
    apart = {"cluster.placement": pools, "trainer.run_dir": str(train_config().trainer.run_dir) + "_apart"}
    one, other = (
        train(train_config({**changes, **each}), data=additions, reward=lambda solution_str: float(len(solution_str)))
        for each in ({}, apart)
    )
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_plan_counts_the_role(train_config: MakeConfig, classifier: Path) -> None:
    from whet.plugins.planner.memory import plan_memory

    made = setup(train_config({"reward_model.model_path": str(classifier)}))
    assert "reward_model" in made.passes
    memory = plan_memory(made)
    model = load_reward_model(classifier)
    assert memory.weights["reward_model"] == model.num_parameters()
    [item] = [item for item in memory.items if item.name == "reward_model: weights"]
    assert set(item.by_phase.values()) == {4 * model.num_parameters()}


@pytest.mark.slow
def test_the_example_learns_what_the_reward_model_was_taught(tmp_path: Path) -> None:
    import runpy

    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "reward_model.py"))
    found = example["run"](tmp_path / "run", 1)
    assert found["accuracy"] > 0.85
    assert found["truth_after"] > found["truth_before"] + 0.4
    assert found["proxy_after"] > found["proxy_before"] + 0.5
    assert (tmp_path / "run" / "proxy_and_truth.png").exists()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"reward_model.model_path": None, "reward_model.weight": 2.0, "reward_model.engine.name": "fsdp"},
        r"(?s)(?=.*reward_model\.engine\.name: fsdp;).*reward_model\.weight=2\.0;",
    ),
    (
        {"algorithm.adv_estimator": "remax"},
        r"algorithm\.adv_estimator: remax; .*reward_model\.model_path",
    ),
    (
        {"cluster.placement": {"main": {}, "other": {"roles": ["rewardmodel"]}}},
        r"other\.roles: rewardmodel; .*reward_model\?",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_goes_not_together(
    overrides: dict[str, Any], message: str, train_config: MakeConfig, classifier: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config({"reward_model.model_path": str(classifier), **overrides})


def test_a_filter_needs_a_function(classifier: Path, model_folder: Path) -> None:
    overrides = {"model.path": str(model_folder), "reward_model.model_path": str(classifier)}
    with raises(ConfigError, "algorithm.filter.name", found="dapo"):
        load_config(TrainConfig, None, {**overrides, "algorithm.filter.name": "dapo"}, given={"data"})
    load_config(TrainConfig, None, overrides, given={"data"})


def test_a_language_model_is_no_reward_model(train_config: MakeConfig, model_folder: Path, additions: Rows) -> None:
    with raises(ModelError, f"{model_folder}", found=re.compile("Qwen3ForCausalLM")):
        train(train_config({"reward_model.model_path": str(model_folder)}), data=additions, reward=some)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a vocabulary of the same size and another order, and a chat template of its own."""
    alphabet = "[]0123456789+-*/=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?<>|_'\n%"
    folder = init_model(tmp_path_factory.mktemp("models") / "foreign", "llama", "nano", alphabet=alphabet)
    model = load_reward_model(folder, new_head_seed=0)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def scores_by_hand(folder: Path, batch: Batch, run: Run, rows: Rows) -> torch.Tensor:
    """transformers' scores of the conversations, by the template and tokenizer of the folder."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), load_tokenizer(folder)
    found = []
    for row, uid in enumerate(batch["uid_name"]):
        asked, own = rows[int(uid.rpartition(":")[2])]["prompt"], batch["response_mask"][row].bool()
        said = run.rollouts.tokenizer.decode(batch["responses"][row][own], skip_special_tokens=True)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits.item() if own.any() else 0.0)
    return torch.tensor(found)


@pytest.mark.parametrize(
    "changes",
    first(
        1,
        [
            {},
            {"reward_model.engine.packing": False, "reward_model.max_tokens_per_micro_batch": 30},
            {"algorithm.adv_estimator": "gae"},
        ],
        others=pytest.mark.slow,
    ),
    ids=str,
)
def test_a_vocabulary_of_its_own_reads_texts(
    changes: dict[str, Any], train_config: MakeConfig, foreign: Path, additions: Rows
) -> None:
    run, batch, _ = shaped(train_config({"reward_model.model_path": str(foreign), **changes}), additions)
    expected = scores_by_hand(foreign, batch, run, additions)
    assert 0 < (expected == 0.0).sum() < len(expected)  # some failed
    torch.testing.assert_close(batch["rm_scores"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["token_level_rewards"].sum(1), expected, atol=1e-5, rtol=0)
    by_ids = AutoModelForSequenceClassification.from_pretrained(foreign)
    with torch.no_grad():
        wrong = by_ids(batch["input_ids"][:1][batch["attention_mask"][:1].bool()][None]).logits.item()
    assert abs(wrong - expected[0].item()) > 1e-3


@pytest.mark.slow
def test_texts_on_ranks_of_their_own(train_config: MakeConfig, foreign: Path, additions: Rows) -> None:
    changes = {"reward_model.model_path": str(foreign), "reward_model.engine.name": "fsdp"}
    pools = {"main": {"processes": 1}, "scores": {"processes": 2, "roles": ["reward_model"]}}
    apart = {"cluster.placement": pools, "trainer.run_dir": str(train_config().trainer.run_dir) + "_apart"}
    one, other = (
        train(train_config({**changes, **each}), data=additions, reward=lambda solution_str: float(len(solution_str)))
        for each in ({}, apart)
    )
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_texts_that_cannot_go_over_are_refused(
    train_config: MakeConfig, foreign: Path, additions: Rows, tmp_path: Path
) -> None:
    shutil.copytree(foreign, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    config = train_config({"reward_model.model_path": str(tmp_path / "plain")})
    with raises(ModelError, f"tokenizer at {tmp_path}/plain", found=re.compile("another vocabulary")):
        train(config, data=additions, reward=some)
    for key in ("critic.model_path", "ref.model_path"):  # numbers of single tokens
        with raises(ConfigError, key, found=str(foreign), change=re.compile("reward_model.model_path")):
            train(train_config({key: str(foreign), "algorithm.adv_estimator": "gae"}), data=additions, reward=some)
    short = TextReader(str(foreign), load_tokenizer(foreign), 3)
    prompt = Prompt("0:0", 0, (Message("user", "2+3?"),), (1,), "test", None)
    told = Trajectory("0:0:0", prompt, (), 0, messages=(Message("assistant", "5"),))
    with raises(EngineError, "trajectory 0:0:0: tokens", found=15, expected=re.compile("at most 3, ")):
        short.encode([told])
    seen = replace(prompt, media=(Media("image", "a", b""),))
    with raises(EngineError, "trajectory 0:0:0", found=re.compile("images"), change=re.compile("llm_judge")):
        short.encode([replace(told, prompt=seen)])


@pytest.mark.slow
def test_an_engine_without_scores(train_config: MakeConfig, classifier: Path, additions: Rows, tmp_path: Path) -> None:
    """The error for a user's engine without scores names the engine and its outputs."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from whet.engines.single import SingleEngine\n"
        "from whet.errors import EngineError\n"
        "class Mine(SingleEngine):\n"
        "    def forward(self, batch, needs, temperature=1.0):\n"
        "        if not needs <= {'log_probs', 'entropy'}:\n"
        "            raise EngineError('Mine', f'no {sorted(needs)}', 'log_probs, entropy', 'take another one')\n"
        "        return super().forward(batch, needs, temperature)\n"
    )
    changes = {"reward_model.model_path": str(classifier), "reward_model.engine.name": f"{path}:Mine"}
    with pytest.raises(EngineError, match=r"Mine: .*\['scores'\]"):
        train(train_config(changes), data=additions, reward=lambda solution_str: 1.0)
