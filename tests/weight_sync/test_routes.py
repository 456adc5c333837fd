# SPDX-License-Identifier: Apache-2.0
"""Memory where it is shared, one broadcast for everybody else."""

from __future__ import annotations

import pytest

from whet.devices import HOST
from whet.weight_sync.routes import RankSite, Route, open_outlets, plan_routes, with_addresses

A, B, C = (RankSite(name, f"10.0.0.{number}") for number, name in enumerate("abc"))


def test_on_one_machine_the_first_training_rank_writes_for_all() -> None:
    routes = plan_routes([A, A], [A, A, A])
    assert routes == [Route(0, "memory", 0, 0, False)] * 3


def test_every_machine_has_a_writer_and_the_others_one_broadcast() -> None:
    routes = plan_routes([A, A, B], [B, C, A, C])
    assert [(route.sender, route.way) for route in routes] == [
        *((2, "memory"), (0, "broadcast")),
        *((0, "memory"), (0, "broadcast")),
    ]
    assert [(route.rank, route.size) for route in routes if route.way == "broadcast"] == [(1, 3), (2, 3)]
    opened = [{"memory": "/a", "broadcast": "a:1"}, {}, {"memory": "/b"}]
    assert [route.address for route in with_addresses(routes, opened)] == ["/b", "a:1", "/a", "a:1"]


def test_different_accelerators_talk_to_each_other() -> None:
    one, two, three = (RankSite("a", "10.0.0.1", f"GPU-{number}") for number in range(3))
    routes = plan_routes([one], [two, three])
    assert routes == [Route(0, "broadcast", rank, 3, True) for rank in (1, 2)]
    # One device for both, or a rank without one: by the host.
    assert plan_routes([one], [one, two]) == [Route(0, "memory", 0, 0, False)] * 2
    assert plan_routes([one], [A, two]) == [Route(0, "memory", 0, 0, False)] * 2


def test_this_process_is_beside_itself() -> None:
    assert RankSite.here("127.0.0.1", HOST) == RankSite.here("127.0.0.1", HOST) != RankSite.here("10.0.0.1", HOST)


@pytest.mark.slow
def test_a_training_rank_opens_the_ends_of_its_own_routes() -> None:
    routes = plan_routes([A, A, B], [B, C, A, C])
    opened = [open_outlets(routes, sender, "127.0.0.1", 1.0, HOST) for sender in range(3)]
    assert [set(ends) for ends in opened] == [{"memory", "broadcast"}, set(), {"memory"}]
    for ends in opened:
        for end in ends.values():
            end.close()
