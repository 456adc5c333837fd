# SPDX-License-Identifier: Apache-2.0
"""Meshes of two and four processes against one process: log-probs, steps, weights; runs that go on on another mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import engine_conformance as suite
from tiny import KINDS, folder_of

from whet.config.schema import EngineConfig
from whet.controller.worker_group import WorkerGroup
from whet.engines.megatron import sizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sizes.is_installed(), reason="no megatron-core: make megatron"),
]
Options = dict[str, Any]
SHARDED = {"distributed_optimizer": True}
MESHES: dict[tuple[str, int], list[Options]] = {
    ("qwen2", 2): [{}, SHARDED, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual": 2}, {"context": 2}],
    ("qwen2", 4): [
        {"tensor": 2},
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "virtual": 2},
        {"pipeline": 2, **SHARDED},
        {"pipeline": 4},
        {"tensor": 2, **SHARDED},
        {"tensor": 2, "context": 2},
        {"context": 2, "pipeline": 2, **SHARDED},
    ],
    ("qwen3", 2): [{"tensor": 2}],
    ("llama", 2): [{"tensor": 2}, {"pipeline": 2, "virtual": 2}],
    ("qwen3_moe", 2): [{}, {"context": 2, "expert": 2}, {"expert": 2}, {"tensor": 2}, {"pipeline": 2}],
    ("qwen3_moe", 4): [
        {"expert": 2},
        {"expert": 4, **SHARDED},
        {"expert": 2, "tensor": 2},
        {"expert": 2, "pipeline": 2, "virtual": 2},
        {"expert": 2, "tensor": 2, **SHARDED},
        {"tensor": 2, "pipeline": 2},
    ],
    ("mixtral", 2): [{"expert": 2}],
}
CASES = [(where, options) for where, each in MESHES.items() for options in each]


def named(options: Options) -> str:
    return " ".join(f"{name}={size}" for name, size in options.items()) or "rows"


def megatron(options: Options) -> EngineConfig:
    return EngineConfig(name="megatron", logits_chunk_tokens=16, options=options)


def without_routers(record: suite.Record) -> suite.Record:
    """Megatron-Core's routers are not measured."""
    kept = [{name: value for name, value in each.items() if "router" not in name} for each in record.metrics]
    return replace(record, metrics=kept)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: folder_of(kind, root) for kind in KINDS}


@pytest.fixture(scope="module")
def reference_of(folders: dict[str, Path]) -> Callable[[str], suite.Record]:
    """Three steps of one process."""

    @cache
    def made(kind: str) -> suite.Record:
        one = suite.launched({"actor": suite.settings(folders[kind])}, 1)["actor"]
        return without_routers(suite.drive(one, steps=range(3)))

    return made


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[dict[str, WorkerGroup]]:
    """A group for each mesh of a model, all in the same processes."""
    kind, count = request.param
    roles = {named(each): suite.settings(folders[kind], megatron(each)) for each in MESHES[request.param]}
    made = suite.launched(roles, count)
    yield made
    next(iter(made.values())).close()


@pytest.mark.parametrize(
    ("groups", "options"),
    CASES,
    indirect=["groups"],
    ids=[f"{kind} on {count}, {named(options)}" for (kind, count), options in CASES],
)
def test_steps_are_those_of_one_process(
    options: Options,
    groups: dict[str, WorkerGroup],
    reference_of: Callable[[str], suite.Record],
    request: pytest.FixtureRequest,
) -> None:
    kind, _ = request.node.callspec.params["groups"]
    suite.check_records(reference_of(kind), suite.drive(groups[named(options)], steps=range(3)))
