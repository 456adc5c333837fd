# SPDX-License-Identifier: Apache-2.0
"""Every kind of nano models on every mesh of two processes: compared with one process, or refused by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.models.nano import NANO, WITH_EXPERTS, nano_model
from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite
from mesh_cases import GroupOf, Reference, Sizes, check_same, fsdp, gradients_and_steps, meshes_of, named

from whet.errors import ConfigError
from whet.models.load import load_policy
from whet.models.supported import support_of
from whet.rollout.build import with_engine

# What is refused of kinds of the own way: every other mesh is compared. (A dense model has no experts to split.)
REFUSED: dict[str, str] = {
    "phimoe": "tensor",  # has no plan
    "granitemoe": "tensor",
    "hunyuan_v1_dense": "tensor",
    "deepseek_v2": "tensor",  # has layers of a kind that is not split
    "gpt_oss": "tensor expert",  # has no plan, and experts with biases
    "qwen3_next": "context",  # has linear attention
    "qwen3_5_text": "context",
}
UNTRAINED = {"phimoe": "router.weight"}  # which samples experts in training, and so stays in evaluation
GENERAL = {"bamba", "falcon_h1", "gemma3n_text", "jamba", "lfm2", "llama4_text", "mamba2", "minimax"}
OF_GENERAL = {"jamba", "minimax"}  # whose experts are split all the same
SPLIT = {*WITH_EXPERTS, "qwen3_next"} - GENERAL | OF_GENERAL  # the kinds whose experts are stacked


def refuses(kind: str) -> set[str]:
    """The dimensions of a mesh that a kind does not have."""
    named = {*REFUSED.get(kind, "").split()} | (set() if kind in SPLIT else {"expert"})
    return named | {"context", "tensor", "pipeline"} if kind in GENERAL else named


CASES = [(kind, sizes) for kind in NANO for sizes in meshes_of(2) if not refuses(kind) & sizes.keys()]
WITHOUT = [(kind, sizes) for kind in NANO for sizes in meshes_of(2) if refuses(kind) & sizes.keys()]


@pytest.fixture(scope="module")
def group_of() -> Iterator[GroupOf]:
    """The group of settings, in processes that stay from case to case."""
    with suite.reusing() as of:
        yield of


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Sizes], Path]:
    """The nano model of a kind. Where a mesh has a pipeline, its output is not tied to its embedding."""

    @cache
    def made(kind: str, is_untied: bool) -> Path:
        changes: dict[str, Any] = {"tie_word_embeddings": False} if is_untied else {}
        return nano_model(tmp_path_factory.mktemp(kind) / "model", kind, **changes)

    return lambda kind, sizes: made(kind, "pipeline" in sizes)


@pytest.fixture(scope="module")
def reference_of() -> Callable[[Path], Reference]:
    """Gradients and three steps of one process, by model."""
    return cache(lambda folder: gradients_and_steps(suite.launched({"actor": suite.settings(folder)}, 1)["actor"]))


def test_every_mesh_of_two_processes_is_compared_or_refused() -> None:
    assert len(CASES) + len(WITHOUT) == 7 * len(NANO) and len(CASES) > 190
    assert REFUSED.keys() | GENERAL | SPLIT <= NANO.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=[f"{kind}, {named(sizes)}" for kind, sizes in CASES])
def test_gradients_and_steps_are_those_of_one_process(
    kind: str,
    sizes: Sizes,
    group_of: GroupOf,
    folder_of: Callable[[str, Sizes], Path],
    reference_of: Callable[[Path], Reference],
) -> None:
    folder = folder_of(kind, sizes)
    got = gradients_and_steps(group_of(suite.settings(folder, fsdp(sizes)), 2))
    check_same(reference_of(folder), got, sizes, UNTRAINED.get(kind, ""))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NANO)
def test_other_meshes_are_refused_by_name(
    kind: str, group_of: GroupOf, folder_of: Callable[[str, Sizes], Path], train_config: Any
) -> None:
    """By the engine; of the general way, which pads rows, when the run begins."""
    for sizes in (sizes for other, sizes in WITHOUT if other == kind):
        folder, refused = folder_of(kind, sizes), refuses(kind) & sizes.keys()
        early = refused - {"expert"}
        assert support_of(load_policy(folder)).is_own == (kind not in GENERAL)
        if kind in GENERAL and early:
            words = {"model.path": folder, "cluster.processes": 2, "actor.engine.name": "fsdp"}
            config = train_config({**words, "actor.engine.options.mesh": sizes})
            with raises(ConfigError, one_of("actor.engine.options.mesh", early), found=2):
                with_engine(config)
        else:
            with raises(ConfigError, one_of("engine.options.mesh", refused), found=2):
                group_of(suite.settings(folder, fsdp(sizes)), 2)


def one_of(mesh: str, names: Collection[str]) -> re.Pattern[str]:
    """The keys of these sizes: a mesh may be refused for any of them."""
    return re.compile(rf"{re.escape(mesh)}\.({'|'.join(sorted(names))})")
