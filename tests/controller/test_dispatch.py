# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from controller_workers import Actor

from tests.raising import raises
from whet.batch import Batch
from whet.controller.dispatch import (
    Arguments,
    CallPlan,
    Dispatch,
    check_layouts,
    plan_call,
    register,
    registered_methods,
)
from whet.controller.worker import RankLayout
from whet.errors import DataError, RegistryError, WorkerError
from whet.metrics import Metrics
from whet.types import Turn

TWO = [RankLayout(0, 2, True), RankLayout(1, 2, True)]
# four ranks, each model on two of them: ranks 0, 1 hold shard 0 and ranks 2, 3 shard 1; the second of each reports
TENSOR_PARALLEL = [RankLayout(0, 2, False), RankLayout(0, 2, True), RankLayout(1, 2, False), RankLayout(1, 2, True)]


def plan(layouts: Sequence[RankLayout], *args: Any, block: int = 1, **kwargs: Any) -> CallPlan:
    return plan_call(Dispatch.DP_COMPUTE, layouts, Arguments(args, kwargs), "actor.update", block)


def batch(lengths: Sequence[int]) -> Batch:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Batch.of({"attention_mask": mask, "row": torch.arange(len(lengths))}, meta_info={"step": 3})


def test_other_names_of_dp_compute() -> None:
    assert (Dispatch.GATHER.name, Dispatch.MEGATRON_COMPUTE.name) == ("DP_COMPUTE", "DP_COMPUTE")


def test_rows_go_by_the_tokens_of_attention_mask() -> None:
    given = plan(TWO, batch([9, 2, 3, 4]), "all", options=("x", "y")).arguments
    assert [given[rank].args[0]["row"].tolist() for rank in (0, 1)] == [[0], [1, 2, 3]]  # 9 against 4 + 3 + 2
    assert given[0].args[0].meta_info == {"step": 3}
    assert given[1].args[1:] == ("all",)
    assert given[1].kwargs == {"options": ("x", "y")}


def test_list_items_go_by_their_tokens() -> None:
    turns = [Turn((), tuple(range(length)), (), "stop", 0) for length in (9, 2, 3, 4)]
    assert [given.args[0] for given in plan(TWO, turns).arguments.values()] == [turns[:1], turns[1:]]
    names = plan(TWO, list("abcd"), block=2).arguments
    assert [given.args[0] for given in names.values()] == [["a", "b"], ["c", "d"]]


def test_all_split_arguments_are_split_alike() -> None:
    given = plan(TWO, batch([9, 2, 3, 4]), names=list("abcd")).arguments
    assert [given[rank].kwargs["names"] for rank in (0, 1)] == [["a"], ["b", "c", "d"]]


def test_results_return_to_the_callers_order() -> None:
    metrics = [Metrics(), Metrics()]
    metrics[0].mean("loss", 1.0, weight=1)
    metrics[1].mean("loss", 5.0, weight=3)
    results = {
        0: (["a"], {"x": torch.tensor([[0.0]])}, Batch.of({"y": torch.tensor([0])}), metrics[0], None),
        1: (
            ["b", "c", "d"],
            {"x": torch.tensor([[1.0], [2.0], [3.0]])},
            Batch.of({"y": torch.tensor([1, 2, 3])}),
            metrics[1],
            None,
        ),
    }
    # rows 2 | 0, 1, 3, so the results above are those of rows 2, 0, 1, 3
    joined, columns, data, merged, nothing = plan(TWO, batch([2, 3, 9, 4])).collect(results)
    assert joined == ["b", "c", "a", "d"]
    assert columns["x"].tolist() == [[1.0], [2.0], [0.0], [3.0]]
    assert data["y"].tolist() == [1, 2, 0, 3]
    assert merged.reduce() == {"loss": (1.0 + 3 * 5.0) / 4}
    assert nothing is None


def test_one_shard_is_the_callers_own_object() -> None:
    data = batch([2, 3])
    single = plan([RankLayout(0, 1, True)], data)
    assert single.arguments[0].args[0] is data
    assert single.collect({0: data}) is data


def test_ranks_that_share_a_model_get_the_same_shard_and_one_reports() -> None:
    given = plan(TENSOR_PARALLEL, list("abcd"))
    assert [arguments.args[0] for arguments in given.arguments.values()] == [
        ["a", "c"],
        ["a", "c"],
        ["b", "d"],
        ["b", "d"],
    ]
    assert given.arguments[0] is given.arguments[1]
    results = {0: None, 1: ["A", "C"], 2: ["not", "heard"], 3: ["B", "D"]}
    assert given.collect(results) == ["A", "B", "C", "D"]


def test_a_rank_without_rows_may_return_anything_empty() -> None:
    single = plan(TWO, ["a"])
    assert [arguments.args[0] for arguments in single.arguments.values()] == [["a"], []]
    assert single.collect({0: ["A"], 1: []}) == ["A"]
    assert single.collect({0: ["A"], 1: None}) == ["A"]
    columns = single.collect({0: {"x": torch.tensor([4])}, 1: {}})
    assert columns["x"].tolist() == [4]
    assert plan(TWO, []).collect({0: [], 1: []}) == []
    with_pair = single.collect({0: (["A"], None), 1: None})
    assert with_pair == (["A"], None)


def test_the_other_modes() -> None:
    call = Arguments(("x",), {"y": 1})
    to_all = plan_call(Dispatch.ONE_TO_ALL, TWO, call, "actor.f")
    assert to_all.arguments == {0: call, 1: call}
    assert to_all.collect({1: "b", 0: "a"}) == ["a", "b"]
    each = plan_call(Dispatch.ALL_TO_ALL, TWO, Arguments((["a", "b"],), {"y": [1, 2]}), "actor.f")
    assert each.arguments == {0: Arguments(("a",), {"y": 1}), 1: Arguments(("b",), {"y": 2})}


@pytest.mark.parametrize(
    ("args", "options", "key", "found"),
    [
        ((3, "x"), {}, "actor.update", "rows$"),
        (([1, 2], [1, 2, 3]), {}, "actor.update", "^list of 2 rows, list of 3 rows$"),
        (([1, 2, 3],), {"block": 2}, "rows", r"^3 rows .*\b2 .*\b2 rows$"),
    ],
)
def test_refuses_arguments_that_cannot_be_split(
    args: tuple[Any, ...], options: dict[str, Any], key: str, found: str
) -> None:
    with raises(DataError, key, found=re.compile(found)):
        plan(TWO, *args, **options)


def test_refuses_wrong_arguments_in_other_modes() -> None:
    with raises(DataError, "actor.f", found=re.compile(r"list .*\b3$"), expected=re.compile(r"\b2 ranks")):
        plan_call(Dispatch.ALL_TO_ALL, TWO, Arguments(([1, 2, 3],), {}), "actor.f")
    with raises(DataError, "actor.f: block", found=2, expected=re.compile("^1, .*one to all")):
        plan_call(Dispatch.ONE_TO_ALL, TWO, Arguments((), {}), "actor.f", block=2)


def test_refuses_results_that_cannot_be_gathered() -> None:
    two_rows = plan(TWO, ["a", "b"])
    with raises(WorkerError, "actor.update", found=re.compile("Tensor$")):
        two_rows.collect({0: torch.zeros(1), 1: torch.zeros(1)})
    with raises(WorkerError, "actor.update", found=re.compile("Metrics, list$"), expected=re.compile("Batch, list")):
        two_rows.collect({0: ["a"], 1: Metrics()})
    with raises(WorkerError, "actor.update", found=re.compile(r"\{'rows': 2\} .*\b1 rows$")):
        two_rows.collect({0: ["a"], 1: ["b", "c"]})
    with raises(WorkerError, "actor.update", found=re.compile(r"\{'x': 1, 'loss': 2\} .*\b1 rows$")):
        two_rows.collect({rank: {"x": torch.zeros(1), "loss": torch.zeros(2)} for rank in (0, 1)})


@pytest.mark.parametrize(
    "layouts",
    [
        [RankLayout(0, 2, True), RankLayout(0, 2, True)],  # shard 1 has nobody
        [RankLayout(0, 1, True), RankLayout(1, 2, True)],  # two opinions of dp_size
        [RankLayout(0, 1, False)],  # nobody reports
        [RankLayout(0, 1, True), RankLayout(1, 1, False)],  # a shard that does not exist
    ],
)
def test_refuses_layouts_that_lose_rows(layouts: list[RankLayout]) -> None:
    found = ", ".join(f"rank {rank}: {layout}" for rank, layout in enumerate(layouts))
    with raises(WorkerError, "critic", found=found, expected=re.compile("is_reporting.*dp_rank.*dp_size")):
        check_layouts(layouts, "critic")
    check_layouts(TENSOR_PARALLEL, "critic")


def test_overrides_stay_registered_and_may_register_anew() -> None:
    class Child(Actor):
        def add(self, amount: float) -> None:
            self.weight -= amount

        @register(Dispatch.ALL_TO_ALL)
        def read(self) -> None: ...

    found = registered_methods(Child)
    assert (found["add"], found["read"]) == (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
    assert "not_registered" not in found
    with raises(RegistryError, re.compile(r"\.update$"), found=re.compile("'block'")):

        @register()
        def update(self: Actor, block: int) -> None: ...
