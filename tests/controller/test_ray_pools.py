# SPDX-License-Identifier: Apache-2.0
"""Pools that differ on nodes that differ, by Ray with pretended GPUs: the places of the plan, the numbers of a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL_RUN
from whet.config import TrainConfig, load_config
from whet.plugins.planner.scale import places

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
POOLS: dict[str, Any] = {
    "train": {"processes": 2, "devices": 0.5, "roles": ["actor"]},
    "look": {"processes": 2, "devices": 0.5, "roles": ["ref"]},
    "score": {"processes": 1, "devices": 2, "roles": ["reward"]},
}
REWARD = """
import os
def compute_score(solution_str, ground_truth):
    return sum(ord(each) % 7 for each in solution_str) / 7 + len(ground_truth)
"""


def on_nodes(nodes: list[tuple[int, int]], function: str, folder: Path, **arguments: Any) -> Any:
    """The result of a function of ray_pools.py, on nodes with the given CPUs and GPUs."""
    asked = folder / "asked.json"
    asked.write_text(json.dumps({"nodes": nodes, "function": function, "arguments": arguments}))
    program = [sys.executable, str(ROOT / "tests" / "controller" / "ray_pools.py"), str(asked)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray compares it with the number of GPUs
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)["result"]


def test_every_rank_is_where_the_plan_puts_it(tmp_path: Path) -> None:
    """Two pools share the two GPUs of a node, rewards are on one without. Rank 0 of the actor is lost, and gets its
    half again."""
    keys = {
        "cluster.backend": "ray",
        "cluster.nnodes": 2,
        "cluster.n_gpus_per_node": [2, 0],
        "cluster.placement": POOLS,
    }
    config = load_config(TrainConfig, None, keys, checked=False).config
    cluster = {key.removeprefix("cluster."): value for key, value in keys.items()}
    found = on_nodes([(2, 0), (4, 2)], "found", tmp_path, cluster=cluster, lost="actor")
    node_ids: dict[int, set[str]] = {}
    gpu_ids: dict[tuple[int, int], set[str]] = {}
    for place in places(config):
        rank, node, visible, kind, _ = found[place.roles[0]][place.rank]
        node_ids.setdefault(place.node, set()).add(node)
        assert (rank, kind) == (place.rank, "gpu" if place.devices else "cpu")
        for device in place.devices:
            gpu_ids.setdefault((place.node, device), set()).add(f"{node} {visible}")
    assert [len(ids) for ids in (*node_ids.values(), *gpu_ids.values())] == [1] * 4
    assert len(set.union(*node_ids.values())) == len(set.union(*gpu_ids.values())) == 2
    assert found["error"] == "LostWorkerError" and found["actor again"] == found["actor"][:1]


def test_a_run_on_shares_of_pretended_gpus(model_folder: Path, tmp_path: Path) -> None:
    """Actor and reference run on halves of a GPU, the rollout on another node's, rewards on processors: the numbers
    equal a run's on the host."""
    from ray_pools import train  # imports Ray

    (tmp_path / "graders.py").write_text(REWARD)
    alone = {name: {**pool, "processes": 1} for name, pool in POOLS.items()} | {"sample": {"roles": ["rollout"]}}
    values = {
        **SMALL_RUN,
        "model.path": str(model_folder),
        "reward.function": f"{tmp_path / 'graders.py'}:compute_score",
        "reward.num_workers": 1,
        "algorithm.kl.where": "loss",
        "algorithm.kl.coef": 0.1,
        "actor.optim.lr": 1e-3,
        "actor.engine.options.compile": False,
        "rollout.engine": {"name": "native", "options": {"kv_cache_bytes": 2**20, "compile": False}},
        "trainer.total_steps": 2,
    }
    placed = {
        "cluster.backend": "ray",
        "cluster.nnodes": 2,
        "cluster.n_gpus_per_node": [1, 1],
        "cluster.placement": alone,
        "trainer.run_dir": str(tmp_path / "there"),
    }
    there = on_nodes([(3, 1), (3, 1)], "train", tmp_path, values=values | placed)
    here = train({**values, "trainer.run_dir": str(tmp_path / "here")}, None)
    areas = ("actor/", "advantages/", "response_length/", "reward/")
    names = [name for name in here[0] if name.startswith(areas)]
    assert len(there) == len(here) == 2 and {"actor/kl_loss", "actor/grad_norm", "response_length/mean"} <= {*names}
    for step, other in zip(there, here, strict=True):
        assert [step[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5, abs=1e-7)
