# SPDX-License-Identifier: Apache-2.0
"""An engine with two stages, in one file: it needs no door that the protocol does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from tests.raising import raises
from whet.config import TrainConfig
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.protocol import TrainEngine
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, EngineError
from whet.registry import ENGINES
from whet.roles.workers import check_media, with_adapter
from whet.trainers import build
from whet.types import Media

STAGES = f"{Path(__file__).parent / 'toy_stages.py'}:Stages"


def test_the_first_stage_is_a_micro_batch_ahead(model_folder: Path) -> None:
    role = RoleSettings(str(model_folder), EngineConfig(name=STAGES), "float32", 64, OptimConfig())
    of = ENGINES[STAGES].make({"role": role, "process_group": None, "device": torch.device("cpu")}, {})
    suite.update(of, suite.ragged_batch(), suite.OBJECTIVES[1])
    assert of.order == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]


def test_steps_of_grpo_are_those_of_single(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    def trained(name: str) -> tuple[list[dict[str, float]], torch.Tensor]:
        overrides = {"actor.engine.name": name, "trainer.run_dir": str(tmp_path / name[:6].strip("/"))}
        config = train_config({**overrides, "actor.max_tokens_per_micro_batch": 64, "actor.optim.eps": 1.0})
        run = build.build(config, build.scorer_of(config, lambda solution_str, **_: len(set(solution_str))), additions)
        build.fit(run)
        actor: Any = run.roles["actor"]
        weights = suite.weights_of(actor._transport.workers.by_role["actor"].engine)
        run.close()
        return run.history, weights

    (ours, weights), (theirs, expected) = trained(STAGES), trained("single")
    assert len(ours) == len(theirs) == 2 and theirs[0]["actor/grad_norm"] > 0
    for one, other in zip(ours, theirs, strict=True):
        names = [name for name in other if name.startswith(("actor/", "critic/"))]
        assert len(names) > 5
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert (weights - expected).norm() < suite.BOUND * expected.norm()


def test_an_engine_without_adapters_is_told_by_what_it_has() -> None:
    class Bare:
        """No engine has fewer abilities."""

    with raises(EngineError, "Bare"):
        with_adapter(cast(TrainEngine, Bare()))


PICKY = """
from whet.engines.single import SingleEngine
from whet.errors import ConfigError

class Picky(SingleEngine):
    @classmethod
    def refuses(cls, use):
        if use.engine.packing is False:
            yield ConfigError(f"{use.key}.packing", False, "true")
"""


def test_what_an_engine_of_ones_own_refuses_is_an_error_of_the_config(
    train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    engine = {"actor.engine.name": f"{tmp_path}/picky.py:Picky"}
    assert train_config(engine).actor.engine.packing is None
    with raises(ConfigError, "actor.engine.packing", found=False):
        train_config({**engine, "actor.engine.packing": False})


def test_it_says_what_it_refuses_once_the_data_is_read(train_config: Callable[..., TrainConfig]) -> None:
    config = train_config({"actor.engine.name": STAGES})
    check_media(config, {"row 0": ()})
    with raises(ConfigError, "actor.engine.name", found=STAGES):
        check_media(config, {"row 0": (), "row 1": (Media("image", "digest", b""),)})
