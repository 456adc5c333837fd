# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.raising import check_fields
from whet.config import TrainConfig, problems
from whet.config.cluster import ClusterConfig
from whet.config.load import load_config
from whet.errors import ConfigError, pip_install

TWO_POOLS = "{train: {processes: 2, roles: [actor, ref]}, sample: {roles: [rollout]}}"


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the checks see: they import nothing."""
    monkeypatch.setattr("whet.config.algorithm_checks.find_spec", lambda name: object())


def refusals(sections: str) -> list[ConfigError]:
    return [each for each in problems(TrainConfig.model_validate(yaml.safe_load(sections))) if "cluster" in str(each)]


RAY = "cluster: {backend: ray, "


@pytest.mark.parametrize(
    ("sections", "key", "found", "advice"),
    [
        ("cluster: {nnodes: 2}", "nnodes", 2, "cluster.backend=local.*cluster.backend=ray"),
        ("cluster: {address: auto}", "address", "auto", "cluster.backend=local.*cluster.backend=ray"),
        (RAY + "address: 'ray://10.0.0.1:10001'}", "address", "ray://10.0.0.1:10001", "ray job submit"),
        (RAY + "nnodes: 2, processes: 5}", "processes", 5, "cluster.nnodes=2; try 4 or 6"),
        (RAY + "nnodes: 2, n_gpus_per_node: 8, processes: 4}", "processes", 4, "^16, .*=2 x .*=8"),
        (f"{RAY}n_gpus_per_node: 2, placement: {TWO_POOLS}}}", "placement", "3 processes", "^2, .*=1 x .*=2"),
        ("cluster: {placement: {train: {devices: 2}}}", "placement.train.devices", 2, "^1 .* all:"),
        (
            RAY + "nnodes: 2, n_gpus_per_node: 3, placement: "
            "{train: {processes: 2}, sample: {processes: 2, devices: 2, roles: [rollout]}}}",
            "placement.sample.devices",
            2,
            r"^2 .*\b1 of 2;.* 3, 3;",
        ),
        (RAY + "nnodes: 2, n_gpus_per_node: [8]}", "n_gpus_per_node", [8], "^a number .*=2;"),
        (RAY + "nnodes: 2, n_gpus_per_node: [2, 0]}", "n_gpus_per_node", [2, 0], "node 1 .*; add a pool"),
        (
            RAY + "nnodes: 2, n_gpus_per_node: [2, 1], placement: "
            "{train: {processes: 2, devices: 0.5}, judge: {processes: 2, devices: 0.5, roles: [ref]}}}",
            "placement",
            "2 devices",
            r"^3, the GPUs of cluster.n_gpus_per_node=\[2, 1\]; ",
        ),
        (
            f"{RAY}n_gpus_per_node: 1, placement: {{score: {{roles: [reward]}}, train: {{roles: [actor]}}}}}}",
            "placement",
            "2 processes",
            "^1, ",
        ),
        (f"cluster: {{processes: 2, placement: {TWO_POOLS}}}", "processes", 2, "cluster.placement"),
        ("cluster: {placement: {train: {}, sample: {}}}", "placement.sample.roles", [], "critic.* train;"),
        (
            "cluster: {placement: {train: {}, sample: {roles: [rolout]}}}",
            "placement.sample.roles",
            "rolout",
            r"actor, critic, environment, ref.* rollout\?",
        ),
        (
            "cluster: {placement: {train: {roles: [actor]}, sample: {roles: [actor]}}}",
            "placement.sample.roles",
            "actor",
            " train ",
        ),
        (
            "{actor: {mini_batch_size: 1}, rollout: {n: 2}, cluster: {placement: {a: {processes: 3}}}}",
            "placement.a.processes",
            3,
            "2 or less",
        ),
        (
            "{model: {lora: {rank: 4}}, cluster: {placement: {train: {}, look: {roles: [ref]}}}}",
            "placement",
            re.compile("model.lora.rank"),
            r"ref \(look\) and actor \(train\)",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(
    sections: str, key: str, found: object, advice: str
) -> None:
    [error] = refusals(sections)
    check_fields(error, f"cluster.{key}", found=found)
    assert re.search(advice, f"{error.expected}; {error.change}")


@pytest.mark.parametrize(
    "sections",
    [
        f"cluster: {{placement: {TWO_POOLS}}}",
        "cluster: {backend: ray, nnodes: 2}",
        f"cluster: {{backend: ray, nnodes: 3, placement: {TWO_POOLS}}}",
        "cluster: {n_gpus_per_node: 4}",
        "cluster: {n_gpus_per_node: 4, placement: {train: {processes: 2}, sample: {devices: 2, roles: [rollout]}}}",
        f"{RAY}nnodes: 2, n_gpus_per_node: 2, placement: "
        "{train: {}, sample: {devices: 2, roles: [rollout]}, look: {roles: [ref]}}}",
        f"{RAY}nnodes: 3, n_gpus_per_node: [2, 1, 0], "
        "placement: {train: {processes: 3}, score: {roles: [reward]}}}",
        f"{RAY}n_gpus_per_node: 1, placement: {{train: {{devices: 0.5}}, look: {{devices: 0.5, roles: [ref]}}}}}}",
        "{model: {lora: {rank: 4}}, ref: {model_path: x}, cluster: {placement: {train: {}, look: {roles: [ref]}}}}",
    ],
)
def test_what_goes_together_is_not_refused(sections: str) -> None:
    assert refusals(sections) == []


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.config.algorithm_checks.find_spec", lambda name: None)
    [error] = refusals("cluster: {backend: ray}")
    check_fields(error, "cluster.backend", change=re.compile(re.escape(pip_install("ray"))))


@pytest.mark.parametrize(
    ("cluster", "processes"),
    [
        ({"nnodes": 2}, 2),
        ({"nnodes": 2, "n_gpus_per_node": 8}, 16),
        ({"n_gpus_per_node": 4}, 4),
        ({"nnodes": 3, "n_gpus_per_node": [8, 4, 0]}, 12),
        ({"nnodes": 2, "processes": 6}, 6),
        ({}, 1),
    ],
)
def test_one_process_on_each_device_unless_said_otherwise(cluster: dict[str, Any], processes: int) -> None:
    assert ClusterConfig.model_validate(cluster).processes == processes


def test_every_role_has_a_pool() -> None:
    cluster = ClusterConfig.model_validate({"placement": yaml.safe_load(TWO_POOLS)})
    roles = ("actor", "critic", "ref", "rollout", "teacher:gsm8k")
    assert [cluster.pool_of(role) for role in roles] == ["train", "train", "train", "sample", "train"]
    assert [cluster.processes_of(role) for role in roles] == [2, 2, 2, 1, 2]
    assert (cluster.devices, cluster.stays_here) == (3, False)
    judged = ClusterConfig.model_validate({"placement": {"all": {}, "judge": {"roles": ["teacher"]}}})
    assert [judged.pool_of(role) for role in roles] == ["all", "all", "all", "all", "judge"]
    alone = ClusterConfig()
    assert (alone.pool_of("actor"), alone.processes_of("actor"), alone.stays_here) == ("main", 1, True)


def test_slips_below_a_pool_are_named() -> None:
    placement = {"train": {"proceses": 2}, "sample": {"processes": 0, "roles": "rollout"}}
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, None, {"cluster.placement": placement}, checked=False)
    of_train, of_sample = caught.value, caught.value.others[0]
    check_fields(
        of_train, "cluster.placement.train.proceses", change=re.compile(r"cluster\.placement\.train\.processes")
    )
    check_fields(of_sample, "cluster.placement.sample.processes", found=0, expected=re.compile("whole .*> 0$"))
    assert "(argument)" in str(of_train.found) and "(argument)" in of_sample.change
    lines = ["cluster.placement.train.processes=2", "cluster.placement.sample.roles=[rollout]"]
    config = load_config(TrainConfig, None, lines, checked=False).config
    assert {name: (pool.processes, pool.roles) for name, pool in config.cluster.placement.items()} == {
        "train": (2, []),
        "sample": (1, ["rollout"]),
    }
