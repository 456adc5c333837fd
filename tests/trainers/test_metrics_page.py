# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md lists the metrics that runs record: short runs together pass every line that records a metric."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import whet
from tests.algorithms.calling import estimate, policy_loss, with_mini_batch_columns
from tests.algorithms.conftest import _make_batch
from tests.models.nano import nano_model
from whet.batch import Batch
from whet.checkpoints.export import export
from whet.columns import Column
from whet.config import DistillConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, load_config
from whet.metrics import Metrics
from whet.plugins.lessons.drawn.figures import counting
from whet.plugins.lessons.init_model import init_model
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Registry
from whet.roles.rollout_worker import Direct
from whet.rollout.reports import count_failures
from whet.tracking import profile
from whet.tracking.profile import SystemMeter
from whet.trainers.batch_metrics import measure_environment, measure_groups
from whet.trainers.columns import ColumnPlan, ScoreColumn, Sources
from whet.trainers.distill import distill
from whet.trainers.preference import train_preference
from whet.trainers.sft import train_sft
from whet.trainers.train_reward import train_reward
from whet.types import Failure, Group, Prompt, Trajectory

PACKAGE = Path(whet.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\S+)` \| (.+) \| (.+) \| (\w+) \|$", PAGE, re.MULTILINE)
TABLE = {name: reduction for name, _, _, reduction in ROWS}
KINDS = {"mean", "sum", "max", "min", "time", "seconds"}
Rows = list[dict[str, str]]


def row_of(name: str) -> str | None:
    """The row of the table that a metric has: its own before one with a placeholder."""
    patterns = (row for row in TABLE if "<" in row and re.fullmatch(re.sub("<.+?>", ".+", row), name))
    return name if name in TABLE else next(patterns, None)


def test_rows_are_complete_and_there_is_one_of_each() -> None:
    assert len(ROWS) == len(TABLE) > 80
    assert {*TABLE.values()} == {"mean", "sum", "max", "min", "seconds", "ratio"}
    assert PAGE.count("\n| `") == len(ROWS)  # none that the pattern misses


def reported(registry: Registry, prefix: str) -> set[str]:
    """The metrics that the functions of a registry report, under the names that a run logs."""
    batch, names = _make_batch(1), set()
    for name in registry.names():
        entry = registry[name]
        if registry is ADV_ESTIMATORS:
            rewards = batch["token_level_rewards"].abs()  # max_rl wants them so
            names |= estimate(entry, {**batch, "token_level_rewards": rewards}, {}).metrics.keys()
        else:
            loss = policy_loss(entry, with_mini_batch_columns(entry, batch, {}), {})
            names |= loss.diagnostics.keys() | loss.metrics.keys()
    return {name if "/" in name else prefix + name for name in names}


REGISTRIES = [(POLICY_LOSSES, "actor/"), (VALUE_LOSSES, "critic/"), (ADV_ESTIMATORS, "critic/")]


@pytest.mark.parametrize(("registry", "prefix"), REGISTRIES)
def test_what_functions_report_is_in_the_table(registry: Registry, prefix: str) -> None:
    names = reported(registry, prefix)
    assert {name: TABLE.get(name) for name in names} == dict.fromkeys(names, "mean")


class Recorded:
    """Records the calls of `Metrics`: each name's reduction, and the lines of whet that record it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reductions: dict[str, set[str]] = defaultdict(set)
        self.lines: set[tuple[str, int]] = set()
        record = Metrics._record

        def recorded(metrics: Metrics, reduction: Any, name: str, *values: Any) -> None:
            self.reductions[name].add(reduction)
            frame = sys._getframe(1)
            while frame.f_code.co_filename.endswith(("whet/metrics.py", "contextlib.py")) and frame.f_back:
                frame = frame.f_back
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
            record(metrics, reduction, name, *values)

        monkeypatch.setattr(Metrics, "_record", recorded)


def recording_lines() -> Iterator[tuple[str, range]]:
    """Every call in whet that records a metric: its file and lines."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and any(
                isinstance(each, ast.Attribute)
                and each.attr in KINDS
                and isinstance(each.value, ast.Name)
                and each.value.id == "metrics"
                for each in ast.walk(node.func)
            ):
                yield str(file), range(node.lineno, (node.end_lineno or node.lineno) + 1)


CALLS = itertools.count(1)


def moody(solution_str: str) -> dict[str, float]:
    """Fails now and then, has a part, and is right or wrong so that groups differ."""
    if next(CALLS) % 7 == 0:
        raise ValueError("not today")
    right = float("7" in solution_str)
    return {"reward": right, "accuracy": right, "sevens": solution_str.count("7")}


FIRST_STEP = itertools.count(1)


def of_episodes() -> set[str]:
    """The metrics of an episode with tools that ends at a limit, scored by a judge."""
    tools = {f"tools/{name}": 1.0 for name in ("calls", "errors", "malformed", "late", "cut")}
    prompt = Prompt("0:0", 0, (), (1,), "games", None)
    trajectory = Trajectory("0:0:0", prompt, (), 0, fields={"success": 1.0, **tools}, limit="turns")
    trajectory = replace(trajectory, parts={"judge_tokens": 3.0, "judge_cost": 0.5})
    metrics = Metrics()
    count_failures([Group(trajectory.prompt, (trajectory,))], metrics, {"judge_tokens": 4.0})
    judged = {name: metrics.value(name) for name in ("reward/judge_tokens_total", "reward/judge_cost_total")}
    assert [*judged.values()] == [7.0, 0.5]
    measure_groups(metrics, [Group(prompt, (trajectory,))], "games")
    measure_environment(metrics, [Group(prompt, (trajectory,))], "val/env/games")
    names = {*tools, "env/games/success", "env/games/limit/turns", "val/env/games/success"}
    assert all(metrics.value(name) == 1.0 for name in names)
    return names | judged.keys()


def of_verdicts() -> set[str]:
    """The metric of a trajectory of two whose verdict cannot be read."""
    ones = torch.ones(2, 3)
    batch = Batch.of(
        tensors={
            "response_mask": ones,
            "token_level_scores": ones,
            "trajectory_uid": torch.arange(2),
        },
        objects={"error": [None, None], "trajectory_uid_name": ["0", "1"]},
    )
    metrics = Metrics()
    found = ScoreColumn(torch.tensor([0.0, 0.5]), {"0": Failure("reward", "nothing to read")})
    judge: Any = SimpleNamespace(start=lambda *_: SimpleNamespace(result=lambda: {"scores": found}))
    column = Column("verdicts", "B", "scored", "a judge's scores", roles=("judge",), output="scores")
    judged = ColumnPlan((column,)).add(batch, Sources({"judge": judge}, step=1), metrics)
    assert judged["response_mask"].sum(1).tolist() == [0.0, 3.0] and metrics.value("failures/reward") == 1.0
    return {"failures/reward"}


def of_accelerators(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The metrics of a machine with an accelerator, whose tensors took 3 GiB, busy for 40 %."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * 2**30)
        patch.setattr(profile, "by_driver", lambda device: (0.4, 4 * 2**30))
        measured = SystemMeter().measure()
    assert measured["system/driver/accelerator_gib"] == 3.0 and measured["system/driver/accelerator_use"] == 0.4
    return {*measured}


def broken(solution_str: str) -> float:
    """Judges the answers of one step, and none after it."""
    if next(FIRST_STEP) > 16:
        raise ValueError("never again")
    return 1.0


def late(solution_str: str) -> float:
    """Judges one answer of each process too late."""
    if next(CALLS) == 5:
        time.sleep(3)
    return float("7" in solution_str)


def summing(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, factor: float = 1.0) -> Any:
    return -factor * advantages * log_probs, {"actor/ppo_kl": (old_log_probs - log_probs).detach().mean()}


RUNS: dict[str, dict[str, Any]] = {
    "filtered, corrected, KL in the reward": {
        "algorithm.policy_loss": "vanilla",
        "algorithm.kl.where": "reward",
        "algorithm.overlong.penalty": 0.5,
        "algorithm.overlong.buffer_length": 2,
        "algorithm.filter.name": "dapo",
        "algorithm.filter.metric": "sevens",
        "algorithm.correction.weight": "importance",
        "algorithm.correction.rejection": "divergence",
        "algorithm.correction.rejection_options": {"high": 9.0},
    },
    "a critic, KL in the loss, validation": {
        "reward.domains": {"all": {"function": "exact_match", "sources": ["*"]}},
        "algorithm.adv_estimator": "gae",
        "algorithm.kl.where": "loss",
        "algorithm.truncated": "zero",
        "trainer.val_freq": 1,
    },
    "hints": {"algorithm.adv_estimator": "cpo", "teacher.hint": "reference", "teacher.hint_template": "{{ hint }}"},
    "states, whole answers only": {"algorithm.adv_estimator": "gigpo", "algorithm.truncated": "drop"},
    "greedy baselines, a loss that reports a sum": {
        "algorithm.adv_estimator": "remax",
        "algorithm.policy_loss": f"{__file__}:summing",
    },
    "process rewards": {"algorithm.adv_estimator": "prime", "critic.value_loss": "implicit_reward"},
    "nothing but failures": {"trainer.total_steps": 2},
    "short of memory": {
        "data.max_response_length": 60,
        "rollout.engine.options.kv_cache_bytes": 9 * 16384,
    },  # nine blocks
    "more groups than needed": {"algorithm.filter.name": "first_finished", "algorithm.filter.options.extra": 1.0},
    "sampled ahead": {
        "rollout.max_staleness": 1,
        "algorithm.correction.weight": "icepop",
        "cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}},
    },
    "a deadline": {"reward.num_workers": 1, "reward.timeout_seconds": 0.5},
}

REWARDS = {"nothing but failures": broken, "a deadline": late}


@pytest.mark.slow
def test_runs_record_what_the_table_says_and_all_of_it(
    model_folder: Path, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, logged = Recorded(monkeypatch), set()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({**row, "data_source": "sums"}) + "\n" for row in additions[:2]))
    common: dict[str, Any] = {
        "model.path": str(model_folder),
        "data.apply_chat_template": False,
        "data.train_batch_size": 4,
        "trainer.total_steps": 1,
        "trainer.logger": ["jsonl"],
        "trainer.log_rollouts": 0,
    }
    for number, (name, overrides) in enumerate(RUNS.items()):
        small = {"data.max_prompt_length": 32, "data.max_response_length": 6, "rollout.n": 4, "reward.num_workers": 0}
        where = {"trainer.run_dir": str(tmp_path / str(number)), "data.val_files": [str(held_out)]}
        settings = {**common, **small, **where, "trainer.val_freq": -1, **overrides}
        whet.train(reward=REWARDS.get(name, moody), data=additions, **settings)
    examples = [{"prompt": row["prompt"], "response": row["answer"]} for row in additions]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in examples[:2]))
    fine = {"data.max_length": 32, "data.val_files": [str(held_out)], "trainer.run_dir": str(tmp_path / "sft")}
    monkeypatch.setattr(profile, "peak_flops", lambda: 1e12)  # for perf/mfu
    to_pairs = {"trainer.run_dir": str(tmp_path / "pairs")}
    train_sft(load_config(SFTConfig, None, common | fine, given={"data"}).config, data=examples)
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "none"} for row in additions]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in pairs[:2]))
    train_reward(load_config(RewardTrainingConfig, None, common | fine | to_pairs, given={"data"}).config, data=pairs)
    longer = [*pairs, *({**row, "rejected": ""} for row in pairs)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in (longer[0], longer[-1])))
    for loss in ("dpo", "kto"):
        own = {"loss": loss, "trainer.run_dir": str(tmp_path / loss)}
        train_preference(load_config(PreferenceConfig, None, common | fine | own, given={"data"}).config, data=longer)
    held_out.write_text("".join(json.dumps(row) + "\n" for row in examples[:2]))
    own = {"teachers": {"*": common["model.path"]}, "on_policy": 0.5, "top_k": 4, "max_response_length": 3}
    own["alignment"] = "bytes"
    own["trainer.run_dir"] = str(tmp_path / "distill")
    distill(load_config(DistillConfig, None, common | fine | own, given={"data"}).config, data=examples)
    against = {"reward_model.model_path": str(export(tmp_path / "pairs", tmp_path / "reward_model"))}
    where = {"trainer.run_dir": str(tmp_path / "against"), "trainer.val_freq": 1}
    monkeypatch.setattr(Direct, "num_lost", 1)  # for rollout/lost_ranks
    whet.train(reward=moody, data=additions, val_data=additions[:2], **{**common, **small, **where, **against})
    seeing = init_model(
        tmp_path / "seeing", "qwen2.5_vl", "nano", num_layers=1, patch_size=8, max_position_embeddings=64
    )
    small |= {"data.max_prompt_length": 48, "data.data_source": "counting", "model.path": str(seeing)}
    where = {"trainer.run_dir": str(tmp_path / "images"), "data.apply_chat_template": True, "trainer.val_freq": -1}
    counted = counting("train", 0, num_rows=4, prompt="<image>?")
    assert whet.train(reward=moody, data=counted, **{**common, **small, **where}).step == 1
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    routed = {"model.path": str(nano_model(tmp_path / "experts", "mixtral", **asks))}
    where = {"trainer.run_dir": str(tmp_path / "routed"), "trainer.val_freq": -1}
    whet.train(reward=moody, data=additions, **{**common, **small, "data.max_prompt_length": 32, **where, **routed})
    logged |= of_episodes() | of_verdicts() | of_accelerators(monkeypatch)
    for path in (*tmp_path.glob("*/metrics.jsonl"), *tmp_path.glob("*/timings.jsonl")):
        logged |= {name for line in path.open() for name in json.loads(line)} - {"step"}

    assert [name for name in sorted(logged) if row_of(name) is None] == []
    wrong = {name: found for name, found in recorded.reductions.items() if found != {TABLE.get(row_of(name) or "")}}
    assert not wrong, "the table says another reduction, or nothing"
    logged = logged.union(*(reported(registry, prefix) for registry, prefix in REGISTRIES))
    assert TABLE.keys() - {row_of(name) for name in logged} == set(), "rows that no run records"
    missed = [
        f"{file}:{lines.start}"
        for file, lines in recording_lines()
        if not any((file, line) in recorded.lines for line in lines)
    ]
    assert missed == [], "lines that these runs do not pass: let one of them do so"
