# SPDX-License-Identifier: Apache-2.0
"""The node and devices of every rank, by hand, and properties of all placements."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from tests.raising import raises
from whet.config.cluster import ClusterConfig, ResourcePool, devices_of, processors_of, ranks_of
from whet.errors import ConfigError

Found = list[tuple[str, int, int, tuple[int, ...]]]


def slots(**cluster: Any) -> Found:
    """Pool, rank, node and devices of each rank."""
    found = ClusterConfig.model_validate({"backend": "ray", **cluster}).slots()
    return [(slot.pool.name, slot.rank, slot.node, slot.devices) for slot in found]


def test_a_rank_of_several_devices_begins_at_its_first() -> None:
    """Pools of 2 ranks with a device each, 2 with two each, and 1: devices 0, 1, (2, 3), (4, 5), 6."""
    pools = [ResourcePool(2, name="train"), ResourcePool(2, name="sample", devices=2), ResourcePool(1, name="look")]
    found = ranks_of(pools)
    assert [(slot.pool.name, slot.rank, slot.node, slot.devices) for slot in found] == [
        ("train", 0, 0, (0,)),
        ("train", 1, 0, (1,)),
        ("sample", 0, 0, (2, 3)),
        ("sample", 1, 0, (4, 5)),
        ("look", 0, 0, (6,)),
    ]
    assert devices_of(found) == {0: 7} and processors_of(found) == {0: 7}


def test_nodes_of_unequal_size() -> None:
    """The second rollout engine finds no two GPUs on the first node; the judge gets the one that is left there."""
    placement = {
        "train": {"processes": 2},
        "sample": {"processes": 2, "devices": 2, "roles": ["rollout"]},
        "look": {"roles": ["ref"]},
    }
    assert slots(nnodes=2, n_gpus_per_node=[5, 2], placement=placement) == [
        ("train", 0, 0, (0,)),
        ("train", 1, 0, (1,)),
        ("sample", 0, 0, (2, 3)),
        ("sample", 1, 1, (0, 1)),
        ("look", 0, 0, (4,)),
    ]


def test_rewards_and_environments_on_processors_alone() -> None:
    """On the node without GPUs; where there is none, where the fewest ranks are."""
    placement = {
        "train": {"processes": 3},
        "score": {"processes": 2, "devices": 16, "roles": ["reward"]},
        "games": {"roles": ["environment"]},
    }
    trained = [("train", 0, 0, (0,)), ("train", 1, 0, (1,)), ("train", 2, 1, (0,))]
    assert slots(nnodes=3, n_gpus_per_node=[2, 1, 0], placement=placement) == [
        *trained, ("score", 0, 2, ()), ("score", 1, 2, ()), ("games", 0, 2, ())
    ]  # fmt: skip
    assert slots(nnodes=2, n_gpus_per_node=[2, 1], placement=placement) == [
        *trained, ("score", 0, 1, ()), ("score", 1, 0, ()), ("games", 0, 1, ())
    ]  # fmt: skip
    cluster = ClusterConfig.model_validate({"n_gpus_per_node": 3, "placement": placement})
    assert cluster.devices == 3 and cluster.devices_here == 3


def test_without_gpus_ray_gives_each_pool_shares_of_processors() -> None:
    placement = {"train": {"processes": 2}, "games": {"processes": 2, "roles": ["environment"]}}
    assert slots(nnodes=2, placement=placement) == [
        *(("train", 0, 0, (0,)), ("train", 1, 0, (1,)), ("games", 0, 1, (0,)), ("games", 1, 1, (1,)))
    ]


def test_shares_of_a_gpu() -> None:
    """No two ranks of a pool on one GPU, as no NCCL group may have; a third of one is left for nobody."""
    placement = {
        "train": {"processes": 2, "devices": 0.5},
        "look": {"processes": 2, "devices": 0.3, "roles": ["ref"]},
        "judge": {"processes": 1, "devices": 0.2, "roles": ["reward_model"]},
        "teach": {"processes": 1, "devices": 0.5, "roles": ["teacher"]},
    }
    cluster = ClusterConfig.model_validate({"backend": "ray", "n_gpus_per_node": 3, "placement": placement})
    assert [(slot.pool.name, slot.devices, slot.is_first) for slot in cluster.slots()] == [
        *(("train", (0,), True), ("train", (1,), True), ("look", (0,), False), ("look", (1,), False)),
        *(("judge", (0,), False), ("teach", (2,), True)),
    ]
    assert cluster.devices == 3


def test_a_rank_without_room_is_named() -> None:
    with raises(ConfigError, "cluster.placement.sample.devices", found=2):
        ranks_of([ResourcePool(3, name="sample", devices=2)], [3, 3])


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (3, 1), (1, 3), (2, 2, 0), (4, 4)])
def test_no_device_is_given_twice_and_no_rank_is_divided(nodes: tuple[int, ...]) -> None:
    shares: list[float] = [1, 2, 0.5, 0.34]
    for sizes in product([1, 2], repeat=2):
        for devices in product(shares, repeat=2):
            pools = [
                ResourcePool(*size, devices=each)
                for size, each in zip([(s, (), str(s)) for s in sizes], devices, strict=True)
            ]
            try:
                found = ranks_of([*pools, ResourcePool(2, ("reward",), "score", 1, needs_device=False)], nodes)
            except ConfigError:
                continue
            used = Counter[tuple[int, int]]()
            for slot in found:
                assert len(slot.devices) == (-(-slot.pool.devices // 1) if slot.pool.needs_device else 0)
                assert all(device < nodes[slot.node] for device in slot.devices)
                assert [*slot.devices] == [*range(slot.devices[0], slot.devices[-1] + 1)] if slot.devices else True
                for device in slot.devices:
                    used[slot.node, device] += round(100 * min(1, slot.pool.devices))  # type: ignore[assignment]
            assert max(used.values()) <= 100
            for pool in pools:
                own = [(slot.node, device) for slot in found if slot.pool is pool for device in slot.devices]
                assert len(set(own)) == len(own)
