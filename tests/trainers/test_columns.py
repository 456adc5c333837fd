# SPDX-License-Identifier: Apache-2.0
"""Functions name columns, columns name providers, providers name roles."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.first import first
from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from scripted import Scripted

from whet.batch import Batch
from whet.columns import COLUMNS, Reader
from whet.config import TrainConfig, load_config
from whet.config.commands import commands
from whet.config.compose import find_recipe, shipped_recipes
from whet.errors import ConfigError, DataError, EngineError, RegistryError
from whet.metrics import Metrics
from whet.registry import Registry
from whet.rollout.batch import to_batch
from whet.rollout.protocol import Completion, Request
from whet.trainers.build import build, build_scorer, plan, train
from whet.trainers.columns import ColumnPlan, Sources, plan_columns, register_provider, unread
from whet.trainers.rl import estimate_advantages, fit, sample
from whet.trainers.run import Run
from whet.types import Failure, RewardResult

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
USER_FUNCTIONS = """
def by_style(token_level_rewards, response_mask, style, *, weight=1.0):
    return (token_level_rewards.sum(-1) + weight * style)


def by_entropy(token_level_rewards, response_mask, entropy, sum_pi_squared):
    return token_level_rewards + entropy + sum_pi_squared


def unheard_of(token_level_rewards, moon_phase):
    return token_level_rewards


def too_early(token_level_rewards, log_probs):
    return token_level_rewards


def distant(log_probs, old_log_probs, ref_log_probs, advantages, entropy):
    return -advantages * (log_probs - ref_log_probs)


def distant_values(values, old_values, returns, ref_log_probs):
    return (values - returns).square() + ref_log_probs
"""


class SixTokens(Scripted):
    """Six tokens to every request."""

    def say(self, answer: str, request: Request) -> Completion:
        return Completion((1, 2, 3, 4, 5, 6), (-1.0,) * 6, "length", ((0, 6),))


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(USER_FUNCTIONS)
    return str(path)


def names(config: TrainConfig) -> tuple[list[str], set[str]]:
    """The providers in order and the roles of a config's plan."""
    found = plan(config)
    return [provider.name for provider in found.providers], set(found.roles)


def test_grpo_with_one_update_a_step_needs_nobody(train_config: MakeConfig) -> None:
    assert names(train_config()) == ([], set())


@pytest.mark.parametrize("several", [{"actor.mini_batch_size": 2}, {"actor.epochs": 2}])
def test_several_updates_a_step_need_the_log_probs_before_them(
    several: dict[str, int], train_config: MakeConfig
) -> None:
    assert names(train_config(several)) == (["old_log_probs"], {"actor"})
    assert names(train_config({**several, "algorithm.policy_loss": "reinforce"})) == ([], set())


def test_a_column_of_a_plugin_that_is_gone_is_an_error_of_the_key(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, no_manifests: None
) -> None:
    config = train_config({"reward_model.rubric": "yes_no"})
    assert "judge_scores" in [column.name for column in plan(config).providers]
    monkeypatch.setattr("whet.trainers.columns.PROVIDERS", Registry("provider", "trainers", "register_provider"))
    with raises(ConfigError, re.compile("reward_model.rubric=yes_no: .*judge_scores"), change=re.compile("scores")):
        plan(config)


def test_a_kl_term_starts_the_reference(train_config: MakeConfig) -> None:
    assert names(train_config({"algorithm.kl.where": "loss"})) == (["ref_log_probs"], {"ref"})
    assert names(train_config({"algorithm.kl.where": "reward"})) == (
        ["old_log_probs", "ref_log_probs"],
        {"actor", "ref"},
    )


def test_an_estimator_that_reads_values_starts_the_critic(train_config: MakeConfig) -> None:
    assert names(train_config({"algorithm.adv_estimator": "gae"})) == (["values"], {"critic"})


def test_losses_name_columns_too(train_config: MakeConfig, functions: str) -> None:
    # entropy comes from the update's own forward, and is not computed before it
    assert names(train_config({"algorithm.policy_loss": f"{functions}:distant"})) == (["ref_log_probs"], {"ref"})
    overrides = {"algorithm.adv_estimator": "gae", "critic.value_loss": f"{functions}:distant_values"}
    assert names(train_config(overrides)) == (["values", "ref_log_probs"], {"critic", "ref"})


@pytest.mark.parametrize(
    ("function", "column"), [("unheard_of", "moon_phase"), ("too_early", "log_probs"), ("by_style", "style")]
)
def test_a_column_that_nobody_provides_is_named(
    function: str, column: str, train_config: MakeConfig, functions: str
) -> None:
    key, found, change = (
        re.compile(f"adv_estimator=.*{function}$"),
        re.compile(f" {column},"),
        re.compile("reward.columns"),
    )
    with raises(ConfigError, key=key, found=found, expected=re.compile(", judge_scores, old_"), change=change):
        plan(train_config({"algorithm.adv_estimator": f"{functions}:{function}"}))


@pytest.mark.parametrize("taken", ["accuracy", "uid", "values"])
def test_a_reward_column_may_not_take_another_ones_name(taken: str) -> None:
    with raises(ConfigError, key="reward.columns", found=taken):
        plan_columns([], [taken])


@pytest.fixture
def run(train_config: MakeConfig, additions: Rows, functions: str) -> Iterator[Run]:
    """A run whose estimator and loss read nearly everything that there is."""
    config = train_config(
        {
            "algorithm.adv_estimator": f"{functions}:by_entropy",
            "algorithm.kl.where": "reward",
            "algorithm.kl.coef": 0.5,
            "algorithm.kl.form": "k1",
            "rollout.temperature": 0.7,
        }
    )
    built = build(config, build_scorer(config.reward, lambda solution_str: float(len(solution_str))), additions)
    yield built
    built.close()


def test_providers_say_what_the_roles_compute(run: Run) -> None:
    metrics = Metrics()
    groups = run.rollouts.start(4, step=1).result().groups
    before = to_batch(groups, pad_token_id=run.pad_token_id)
    in_every_batch = {column.name for column in COLUMNS.values() if column.is_in_every_batch}
    assert set(before.tensors()) >= in_every_batch - {"token_level_rewards", "reward_parts"}
    batch = run.columns.add(before, run.sources(groups, 1), metrics)
    assert [provider.name for provider in run.columns.providers] == [
        "entropy",
        "sum_pi_squared",
        "old_log_probs",
        "ref_log_probs",
    ]
    assert {"actor", "ref", "rollout"} == set(run.roles)
    expected = run.roles["actor"].forward(before, ("log_probs", "entropy", "sum_pi_squared"), 0.7)
    torch.testing.assert_close(batch["old_log_probs"], expected["log_probs"])
    torch.testing.assert_close(batch["ref_log_probs"], expected["log_probs"])  # the reference is the start
    torch.testing.assert_close(batch["entropy"], expected["entropy"])
    torch.testing.assert_close(batch["sum_pi_squared"], expected["sum_pi_squared"])
    torch.testing.assert_close(batch["old_log_probs"], batch["rollout_log_probs"], atol=1e-4, rtol=0)
    assert metrics.timings().keys() == {"time/log_probs"}

    batch = run.shaper.rewards(batch.with_columns(ref_log_probs=batch["old_log_probs"] - 0.5), metrics)
    mask = batch["response_mask"]
    torch.testing.assert_close(batch["token_level_rewards"], (before["token_level_scores"] - 0.25) * mask)
    assert metrics.reduce()["actor/reward_kl_penalty"] == pytest.approx(0.5, abs=1e-6)
    batch = estimate_advantages(run, batch, metrics)
    summed = batch["token_level_rewards"] + batch["entropy"] + batch["sum_pi_squared"]
    torch.testing.assert_close(batch["advantages"], summed * mask)


def test_a_column_that_is_there_is_not_asked_for(run: Run) -> None:
    groups = run.rollouts.start(1, step=1).result().groups
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    mine = {name: torch.full(batch["responses"].shape, 3.0) for name in ("entropy", "sum_pi_squared", "old_log_probs")}
    added = run.columns.add(
        batch.with_columns(**mine, ref_log_probs=mine["entropy"]),
        Sources({}, 1, groups),
        Metrics(),
    )
    assert all(torch.equal(added[name], column) for name, column in mine.items())


def style(solution_str: str) -> dict[str, float]:
    return {"reward": 1.0, "style": float(len(solution_str))}


def test_numbers_of_the_reward_become_columns(train_config: MakeConfig, additions: Rows, functions: str) -> None:
    config = train_config(
        {
            "algorithm.adv_estimator": f"{functions}:by_style",
            "algorithm.adv_options": {"weight": 2.0},
            "reward.columns": ["style"],
            "trainer.total_steps": 1,
        }
    )
    run = build(config, build_scorer(config.reward, style), additions)
    groups = run.rollouts.start(4, step=1).result().groups
    batch = to_batch(groups, pad_token_id=run.pad_token_id, columns=config.reward.columns)
    batch = estimate_advantages(run, run.shaper.rewards(batch, Metrics()), Metrics())
    assert batch["style"].unique().numel() > 1
    torch.testing.assert_close(batch["advantages"], (1.0 + 2.0 * batch["style"])[:, None] * batch["response_mask"])
    fit(run)
    run.close()
    assert run.history[0]["critic/advantages/max"] > 1.0


def test_a_column_that_the_reward_never_reports_is_an_error_that_names_it(
    train_config: MakeConfig, additions: Rows, functions: str
) -> None:
    config = train_config({"algorithm.adv_estimator": f"{functions}:by_style", "reward.columns": ["style"]})
    with raises(DataError, key="reward.columns", found="style", expected=re.compile(": nothing$")):
        train(config, reward=lambda solution_str: 1.0, data=additions)


class Waited:
    """A role whose calls are finished only when they are waited for, and which says when each happened."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def start(self, method: str, batch: Batch, needs: tuple[str, ...], temperature: float) -> Any:
        self.events.append(f"{self.name} begins")
        return self

    def result(self) -> dict[str, torch.Tensor]:
        self.events.append(f"{self.name} is awaited")
        return dict.fromkeys(("log_probs", "values"), torch.full((8, 6), float(len(self.name))))


class Judge:
    """A scorer that judges as slowly as it is asked for it, and fails on the first answer."""

    scores_alone = False

    def __init__(self, events: list[str]) -> None:
        self.events, self.count = events, 0

    def submit_batch(self, items: Sequence[Any]) -> Any:
        self.events.append("judge begins")
        self.count = len(items)
        return self

    def done(self) -> bool:
        return False

    def result(self) -> list[Any]:
        self.events.append("judge is awaited")
        return [Failure("reward", "no opinion"), *[RewardResult(1.0, 1.0)] * (self.count - 1)]

    def close(self) -> None:
        """Holds nothing."""


def test_models_read_answers_side_by_side_and_while_they_are_judged(train_config: MakeConfig, additions: Rows) -> None:
    """process_rewards reads ref_log_probs and so has to wait for it; old_log_probs and ref_log_probs for nobody."""
    events: list[str] = []
    run = build(
        train_config(
            {
                "algorithm.adv_estimator": "prime",
                "critic.value_loss": "implicit_reward",
                "actor.mini_batch_size": 1,
                "data.train_batch_size": 2,
                "data.max_response_length": 6,
            }
        ),
        Judge(events),
        additions,
    )
    sampler = run.roles["rollout"]
    run.roles = {name: Waited(name, events) for name in run.roles} | {"rollout": sampler}  # type: ignore[assignment,dict-item]
    run.rollouts.driver.engine = SixTokens(run.tokenizer, "")
    batch = sample(run, 1, Metrics())
    sampler.close()
    assert events == [
        "judge begins",
        *("ref begins", "actor begins"),
        *("ref is awaited", "actor is awaited"),
        *("critic begins", "critic is awaited"),
        "judge is awaited",
    ]
    failed, *others = batch["process_rewards"]
    assert torch.equal(failed, torch.zeros(6)) and all(torch.equal(row, torch.full((6,), 3.0)) for row in others)
    assert batch["response_mask"].sum(1).tolist() == [0, *[6] * 7]
    assert batch["token_level_scores"][:, -1].tolist() == [0, *[1] * 7]
    assert batch["accuracy"].tolist() == [0, *[1] * 7]


def test_a_column_that_reads_a_judged_one_waits_for_the_judge() -> None:
    judged = dataclasses.replace(COLUMNS["ref_log_probs"], when="scored")
    events: list[str] = []
    columns = ColumnPlan((judged, COLUMNS["process_rewards"]))
    sources = Sources({name: Waited(name, events) for name in ("ref", "critic")}, 1)  # type: ignore[arg-type]
    batch = Batch.of({"response_mask": torch.ones(8, 6)}, {"error": [None] * 8})
    assert columns.add(batch, sources, Metrics(), is_scored=False) is batch and not events
    columns.add(batch, sources, Metrics())
    assert events == ["ref begins", "ref is awaited", "critic begins", "critic is awaited"]


def test_a_provider_needs_no_config_and_no_rollouts() -> None:
    """As in a trainer of preferences, it needs only roles, a batch, and the providers that the plan names. A provider
    that asks the policy reports that nothing samples."""
    events: list[str] = []
    sources = Sources({name: Waited(name, events) for name in ("ref", "actor")}, 1)  # type: ignore[arg-type]
    mask = torch.ones(8, 6)
    objects = {"error": [None] * 8, "trajectory_uid_name": [f"{row}" for row in range(8)]}
    batch = Batch.of({"response_mask": mask, "responses": mask.long(), "rollout_log_probs": -2.0 * mask}, objects)
    names, options = ("old_log_probs", "ref_log_probs", "draws"), {"old_log_probs": {"by": "rollout"}}
    plan = ColumnPlan(tuple(COLUMNS[name] for name in names), {**options, "draws": {"seed": 3}})
    added = plan.add(batch, sources, Metrics())
    assert events == ["ref begins", "ref is awaited"]
    assert torch.equal(added["old_log_probs"], -2.0 * mask) and 0 < added["draws"].mean() < 1
    asked = ColumnPlan(plan.providers, {"old_log_probs": {"by": "trainer"}, "draws": {"seed": 3}})
    asked.add(batch, sources, Metrics())
    assert events[2:4] == ["actor begins", "ref begins"]
    with raises(EngineError, key="rollouts", found=None):
        ColumnPlan((COLUMNS["reward_baselines"],)).add(batch, sources, Metrics())


def test_a_provider_may_not_take_a_name_of_the_table() -> None:
    with raises(RegistryError, key="column values", change=re.compile(" mine ")):

        @register_provider("values")
        def mine(batch: Batch, sources: Sources) -> torch.Tensor:
            return batch["rollout_log_probs"]


POWERS = """
import torch
from whet.trainers.columns import ScoreColumn, register_provider
from whet.types import Failure

@register_provider("powers", options={"base": "data.train_batch_size", "seed": "KEY"}, shape="B")
def powers(batch, sources, *, base, seed):
    return ScoreColumn(torch.tensor([float(base**seed)] * 2), {"b": Failure("reward", "no power")})

def reader(token_level_rewards, powers):
    return powers * token_level_rewards
"""


@pytest.fixture
def with_powers(train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Returns the plan of a run with a user's provider, one option of which is the value of a config key."""
    monkeypatch.setattr("whet.trainers.columns.COLUMNS", dict(COLUMNS))
    monkeypatch.setattr("whet.trainers.columns.PROVIDERS", Registry("provider", "trainers", "register_provider"))

    def planned(key: str) -> ColumnPlan:
        file = tmp_path / "powers.py"
        file.write_text(POWERS.replace("KEY", key))
        named = {"algorithm.adv_estimator": f"{file}:reader"}
        return plan(train_config({**named, "data.train_batch_size": 4, "trainer.seed": 3}))

    return planned


def test_a_provider_gets_config_values_and_fails_trajectories(with_powers: Callable[[str], Any]) -> None:
    planned = with_powers("trainer.seed")
    assert planned.options == {"powers": {"base": 4, "seed": 3}}
    ones, metrics = torch.ones(2, 3), Metrics()
    objects = {"error": [None, None], "trajectory_uid_name": ["a", "b"]}
    batch = Batch.of({"response_mask": ones, "token_level_scores": ones}, objects)
    added = planned.add(batch, Sources({}, step=1), metrics)
    assert added["powers"].tolist() == [64.0, 64.0] and metrics.value("failures/reward") == 1.0
    assert added["response_mask"].sum(1).tolist() == [3.0, 0.0]
    assert [error and error.message for error in added["error"]] == [None, "no power"]


def test_a_provider_that_names_an_unknown_key_is_an_error(with_powers: Callable[[str], Any]) -> None:
    with raises(ConfigError, key="trainer.sead", change=re.compile(r"trainer\.seed")):
        with_powers("trainer.sead")


def test_what_the_loop_gives_is_given_to_those_that_come_after_it() -> None:
    readers: list[tuple[str, Reader, list[str]]] = [("a", "actor", ["old_log_probs", "advantages", "vocab_log_probs"])]
    assert plan_columns(readers, []).providers == ()
    assert plan_columns([("a", "correction", ["old_log_probs"])], []).passes == ("actor",)
    with raises(ConfigError, key="a", found=re.compile(" advantages,")):
        plan_columns([("a", "estimator", ["advantages"])], [])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"teacher.hint": "peer", "teacher.max_hint_tokens": 8},
            "teacher.hint=peer, teacher.max_hint_tokens=8: .* teacher_log_probs, .*"
            "algorithm.adv_estimator=cpo, grpo_distillation, on_policy_distillation",
        ),
        (
            {"ref.max_tokens_per_micro_batch": 64},
            "ref.max_tokens_per_micro_batch=64: .* ref_log_probs or ref_vocab_log_probs, .*kl.where=reward, loss",
        ),
        ({"critic.optim.lr": 3e-5}, "critic.optim.lr=3e-05: .* process_rewards or values, "),
        ({"teacher.hint": "peer", "algorithm.adv_estimator": "cpo"}, ""),
        ({"ref.max_tokens_per_micro_batch": 64, "algorithm.kl.where": "loss"}, ""),
        ({"ref.max_tokens_per_micro_batch": 64, "algorithm.adv_estimator": "prime"}, ""),
        ({"teacher.hint": "peer", "trainer.loop": "mine:fit"}, ""),  # what it reads is not known
    ],
)
def test_keys_that_nothing_reads_are_named(train_config: MakeConfig, overrides: dict[str, Any], said: str) -> None:
    if overrides.get("algorithm.adv_estimator") == "prime":
        overrides = {**overrides, "critic.value_loss": "implicit_reward"}
    config = train_config(overrides)
    found = unread(config, plan(config))
    assert [bool(re.match(said, line)) for line in found] == [True] * bool(said), found


OTHERS = tuple(f"_{command}" for command in commands())  # endings of recipes of other commands


@pytest.mark.parametrize(
    "name", first(3, [each for each in shipped_recipes() if not each.endswith(OTHERS)], others=pytest.mark.slow)
)
def test_no_shipped_recipe_has_keys_that_nothing_reads(name: str, model_folder: Path) -> None:
    if "backend: ray" in find_recipe(name).read_text():
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    files = {"model.path": str(model_folder), "trainer.val_freq": 0}
    config = load_config(TrainConfig, name, files, given={"data", "reward"}).config
    assert unread(config, plan(config)) == []


@pytest.mark.parametrize(
    ("source", "planned"), [("trainer", True), ("rollout", True), ("interpolated", False)], ids=str
)
def test_stale_samples_always_have_old_log_probs(source: str, planned: bool, train_config: MakeConfig) -> None:
    """With one update a step a synchronous run needs no column: the samples are the current policy's."""
    key = "algorithm.correction.old_log_probs"
    assert "old_log_probs" not in {column.name for column in plan(train_config()).providers}
    apart = {"cluster.placement": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}}}
    loss = "ppo_clip" if source == "rollout" else "decoupled_ppo"
    stale = {**apart, "rollout.max_staleness": 0.5, "algorithm.policy_loss": loss, key: source}
    columns = {column.name for column in plan(train_config(stale)).providers}
    assert ("old_log_probs" in columns) is planned


def test_providers_are_known_before_their_files_are_imported() -> None:
    """Names are read from the source: this process loads only the imports of `whet.registry`."""
    said = "import sys; from whet.registry import PROVIDERS; print('whet.trainers' in sys.modules, *PROVIDERS.names())"
    known = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60, check=True)
    is_loaded, *names = known.stdout.split()
    assert is_loaded == "False" and {"judge_scores", "teacher_log_probs", "old_log_probs"} <= {*names}
