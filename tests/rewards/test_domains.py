# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises
from whet.algorithms.shaping import RunningScores
from whet.config import TrainConfig, load_config
from whet.config.schema import RewardConfig
from whet.errors import ConfigError, DataError
from whet.rewards.pool import build_scorer
from whet.trainers.build import train
from whet.trainers.shape import Shaper
from whet.types import Failure, RewardItem, RewardResult

SLEEPS = "import time\ndef compute_score(solution_str):\n    time.sleep(float(solution_str))\n    return 1.0\n"


def config(given: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate(given)


def item(source: str, response: str, truth: Any = "7", **extra: Any) -> RewardItem:
    return RewardItem(source, response, truth, extra, response_ids=(1, 2))


@pytest.mark.slow
def test_every_row_goes_to_its_domain() -> None:
    domains = {
        "sums": {"function": "gsm8k", "kwargs": {"method": "strict"}, "sources": ["openai/*", "additions"]},
        "text": {"function": "exact_match", "weight": 0.5},
    }
    scorer = build_scorer(config({"domains": domains, "function": "format", "num_workers": 1}))
    items = [
        item("text", "7"),
        item("openai/gsm8k", "7"),  # without the mark: strict
        item("additions", "#### 7"),
        item("other", "<think>a</think><answer>b</answer>"),
        item("other", "7", domain="text"),
        item("text", "8"),
    ]
    outcomes = scorer.submit_batch(items).result()
    scorer.close()
    assert [each.reward for each in outcomes if isinstance(each, RewardResult)] == [0.5, 0.0, 1.0, 1.0, 0.5, 0.0]
    assert [each.accuracy for each in outcomes if isinstance(each, RewardResult)] == [1, 0, 1, 1, 1, 0]
    parts = [each.parts for each in outcomes if isinstance(each, RewardResult)]
    assert parts[0] == {"text/reward": 1.0, "text/accuracy": 1.0}
    assert parts[2] == {"sums/reward": 1.0, "sums/accuracy": 1.0} and "others/reward" in parts[3]


@pytest.mark.slow
def test_a_domain_has_its_own_deadline_and_processes(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    function = f"{tmp_path / 'sleeps.py'}:compute_score"
    domains = {"slow": {"function": function, "timeout_seconds": 5.0}, "quick": {"function": function}}
    given = {"domains": domains, "timeout_seconds": 0.3, "num_workers": 1}
    scorer = build_scorer(config(given))
    start = time.monotonic()
    slow, late, fine = scorer.submit_batch([item("slow", "1"), item("quick", "60"), item("quick", "0")]).result()
    assert time.monotonic() - start < 30  # not the 60 that one sleeps
    scorer.close()
    assert isinstance(slow, RewardResult) and isinstance(fine, RewardResult)
    assert late == Failure("reward", "quick: timed out after 0.3 s", timed_out=True)


def test_rows_of_no_domain() -> None:
    domains = {"sums": {"function": "gsm8k", "sources": ["openai/*"]}, "text": {"function": "exact_match"}}
    scorer = build_scorer(config({"domains": domains, "num_workers": 0}))
    with raises(DataError, "data source", found="x", expected=re.compile(r"sums: openai/\*; text")):
        scorer.submit_batch([item("x", "7")])
    key, known = "domain (data source 'text')", "one of sums, text"
    with raises(DataError, key, found="code", expected=known, change=re.compile("'domain'")):
        scorer.submit_batch([item("text", "7", domain="code")])


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ({"function": "gsm9k"}, "function: gsm9k; .*'gsm8k'"),
        ({}, "function: '';"),
        ({"function": "gsm8k", "kwargs": {"format_score": 2}}, "kwargs.format_score=2;"),
        ({"function": "missing.py:f"}, "function: missing.py "),
        ({"function": "gsm8k", "source": ["x"]}, "source: "),
    ],
)
def test_what_is_wrong_is_said_before_a_run(domain: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.domains.a.{message}"):
        load_config(TrainConfig, None, {"reward.domains": {"a": domain}, "model.path": "m"}, given={"data"})


def test_a_run_of_two_domains(train_config: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "data_source": ("sums", "echo")[a % 2]} for a in range(8)]
    domains = {"sums": {"function": "gsm8k"}, "echo": {"function": "exact_match"}}
    changes = {
        "reward.function": None,
        "reward.kwargs": {},
        "reward.domains": domains,
        "trainer.run_dir": tmp_path / "run",
    }
    train(train_config({**changes, "trainer.total_steps": 1}), data=rows)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"reward/sums/accuracy", "reward/echo/reward"} <= set(metrics)


def paying(config: Any, tmp_path: Path, rows: Any, reward: Any, **changes: Any) -> list[dict[str, float]]:
    """Metrics of a run whose domains `up` and `down` are scored by a file's function."""
    (tmp_path / "pay.py").write_text(reward)
    function = f"{tmp_path / 'pay.py'}:compute_score"
    domains = {name: {"function": function, **changes.pop(name, {})} for name in ("up", "down")}
    given = {"reward.function": None, "reward.kwargs": {}, "reward.domains": domains, "reward.num_workers": 1}
    run_dir = tmp_path / "run"
    train(config({**given, "trainer.run_dir": run_dir, "trainer.total_steps": 1, **changes}), data=rows)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


BY_LENGTH = (
    "def compute_score(solution_str, data_source):\n    return float(len(solution_str)) * (data_source == 'up')\n"
)


@pytest.mark.slow
def test_a_filter_of_its_own(train_config: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "data_source": ("up", "down")[a % 2]} for a in range(8)]
    drops_all = {"filter": {"name": "mean_window", "options": {"low": 0.5, "high": 2.0}, "metric": "reward"}}
    changes = {"algorithm.filter.max_refills": 1, "data.train_batch_size": 8, "data.shuffle": False, "down": drops_all}
    metrics = paying(train_config, tmp_path, rows, BY_LENGTH, **changes)[-1]
    # Rows of `down` are worth 0, outside of the window; those of `up` have no filter. 4 of 8 are kept, then 2 of 4.
    assert metrics["data/share/up"] == 1.0 and "data/share/down" not in metrics
    assert metrics["filter/dropped_groups"] == 6.0 and metrics["filter/kept_fraction"] == 0.5


@pytest.mark.slow
def test_statistics_of_each_domain(train_config: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "data_source": ("up", "down")[a % 2]} for a in range(8)]
    reward = "def compute_score(solution_str, data_source):\n    return 100.0 if data_source == 'up' else 1.0\n"
    changes = {"algorithm.shaping.norm_mean": "running", "down": {"norm_mean": "none"}, "trainer.save_freq": 1}
    metrics = paying(train_config, tmp_path, rows, reward, **changes)[-1]
    assert metrics["critic/score/max"] == 100.0
    assert metrics["critic/rewards/max"] == 1.0 and metrics["critic/rewards/min"] == 0.0  # 100 less its own mean
    [state] = (tmp_path / "run").glob("checkpoints/*/trainer.json")
    running = json.loads(state.read_text())["shaper"]["running"]
    assert running["up"]["mean"] == 100.0 and "count" not in running


def test_running_statistics_go_on_from_a_checkpoint() -> None:
    made = [Shaper(TrainConfig.model_validate({"algorithm": {"shaping": {"norm_std": "running"}}})) for _ in range(3)]
    first, second, older = made
    for domain, numbers in {"up": [1.0, 2.0, 4.0], "down": [8.0, 8.5]}.items():
        first.running[domain] = RunningScores()
        first.running[domain].update(torch.tensor(numbers)[:, None], torch.ones(len(numbers), 1))
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() and second.state()["running"]["up"]["mean"] == pytest.approx(7 / 3)
    older.load_state({"kl_controller": {}, "running": first.state()["running"]["down"]})  # without domains, earlier
    assert older.state()["running"] == {"": first.state()["running"]["down"]}


@pytest.mark.slow
def test_rows_of_no_domain_end_the_run_before_it_begins(train_config: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "data_source": "up"}, {"prompt": "1+2=", "data_source": "sideways"}]
    with pytest.raises(DataError, match=r"row 1.*sideways.*up"):
        paying(train_config, tmp_path, rows, BY_LENGTH)
