# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import yaml

from whet.config import TrainConfig, problems
from whet.config.cluster import ClusterConfig
from whet.config.load import load_config
from whet.errors import ConfigError, pip_install

TWO_POOLS = "{train: {processes: 2, roles: [actor, ref]}, sample: {roles: [rollout]}}"


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the checks see: they import nothing."""
    monkeypatch.setattr("whet.config.engine_checks.find_spec", lambda name: object())


def refusals(sections: str) -> list[str]:
    return [line for line in problems(TrainConfig.model_validate(yaml.safe_load(sections))) if "cluster" in line]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ("cluster: {nnodes: 2}", "cluster.nnodes=2 needs a Ray cluster, but cluster.backend is local"),
        ("cluster: {address: auto}", "cluster.address=auto needs a Ray cluster, but cluster.backend is local"),
        ("cluster: {backend: ray, address: 'ray://10.0.0.1:10001'}", "start whet on a node of the cluster (`ray job"),
        (
            "cluster: {backend: ray, nnodes: 2, processes: 5}",
            "5 processes, which must be a multiple of cluster.nnodes=2; try 4",
        ),
        (
            "cluster: {backend: ray, nnodes: 2, n_gpus_per_node: 8, processes: 4}",
            "cluster.processes sets 4 processes, but cluster.nnodes=2 x cluster.n_gpus_per_node=8 "
            "is 16 GPUs; a process has one GPU, or those in devices",
        ),
        (
            f"cluster: {{backend: ray, n_gpus_per_node: 2, placement: {TWO_POOLS}}}",
            "the pools of cluster.placement have 3 processes, but cluster.nnodes=1 x",
        ),
        (
            "cluster: {placement: {train: {devices: 2}}}",
            "cluster.placement.train.devices=2 with the roles all; a training engine computes on one device a process",
        ),
        (
            "cluster: {backend: ray, nnodes: 2, n_gpus_per_node: 2, placement: "
            "{train: {}, sample: {devices: 2, roles: [rollout]}, look: {roles: [ref]}}}",
            "cluster.placement.sample.devices=2 puts a process on two nodes of 2 devices; expected all of its devices",
        ),
        (f"cluster: {{processes: 2, placement: {TWO_POOLS}}}", "cluster.processes=2 is the size of a single pool, but"),
        (
            "cluster: {placement: {train: {}, sample: {}}}",
            "cluster.placement.sample.roles is empty, and roles in no pool go to the first one, train; ",
        ),
        (
            "cluster: {placement: {train: {}, sample: {roles: [rolout]}}}",
            "cluster.placement.sample.roles has 'rolout'; expected one of actor, critic, environment, ref",
        ),
        (
            "cluster: {placement: {train: {roles: [actor]}, sample: {roles: [actor]}}}",
            "cluster.placement has the role actor in the pools train and sample; expected one pool",
        ),
        (
            "{actor: {mini_batch_size: 1}, rollout: {n: 2}, cluster: {placement: {a: {processes: 3}}}}",
            "cluster.placement.a.processes=3 is more than the 2 rows of an optimizer step",
        ),
        (
            "{model: {lora: {rank: 4}}, cluster: {placement: {train: {}, look: {roles: [ref]}}}}",
            "cluster.placement has ref in pool look and actor in pool train, but with model.lora.rank the reference is",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(sections: str, said: str) -> None:
    found = refusals(sections)
    assert len(found) == 1, found
    assert said in found[0]


@pytest.mark.parametrize(
    "sections",
    [
        f"cluster: {{placement: {TWO_POOLS}}}",
        "cluster: {backend: ray, nnodes: 2}",
        f"cluster: {{backend: ray, nnodes: 3, placement: {TWO_POOLS}}}",
        "cluster: {n_gpus_per_node: 4}",
        "cluster: {n_gpus_per_node: 4, placement: {train: {processes: 2}, sample: {devices: 2, roles: [rollout]}}}",
        "{model: {lora: {rank: 4}}, ref: {model_path: x}, cluster: {placement: {train: {}, look: {roles: [ref]}}}}",
    ],
)
def test_what_goes_together_is_not_refused(sections: str) -> None:
    assert refusals(sections) == []


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.config.engine_checks.find_spec", lambda name: None)
    assert refusals("cluster: {backend: ray}") == [
        f"cluster.backend=ray, but Ray is not installed; run {pip_install('ray')}"
    ]


@pytest.mark.parametrize(
    ("cluster", "processes"),
    [
        ({"nnodes": 2}, 2),
        ({"nnodes": 2, "n_gpus_per_node": 8}, 16),
        ({"n_gpus_per_node": 4}, 4),
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
    assert str(caught.value).splitlines() == [
        "unknown key cluster.placement.train.proceses (argument); did you mean cluster.placement.train.processes?",
        "cluster.placement.sample.processes=0 (argument) is a whole number; expected a whole number > 0",
    ]
    lines = ["cluster.placement.train.processes=2", "cluster.placement.sample.roles=[rollout]"]
    config = load_config(TrainConfig, None, lines, checked=False).config
    assert {name: (pool.processes, pool.roles) for name, pool in config.cluster.placement.items()} == {
        "train": (2, []),
        "sample": (1, ["rollout"]),
    }
