# SPDX-License-Identifier: Apache-2.0
"""SGLang's answers to prompts with images and videos, and a run that samples with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
sys.path.insert(0, str(Path(__file__).parents[3]))
import server_conformance as servers
import server_images as images
from pictures import QWEN, seeing_folder

from whet.models.load import load_policy
from whet.plugins.inference.sglang.engine import PACKAGE, SGLangEngine
from whet.plugins.lessons.init_model import init_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=QWEN)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model."""
    return load_policy(seeing_folder(tmp_path_factory.mktemp("models") / "plain", request.param)).eval()


@pytest.fixture(autouse=True)
def first_weights(request: pytest.FixtureRequest) -> None:
    """Every check begins with the model's own weights, and with nothing under way."""
    if "engine" in request.fixturenames:
        servers.reset(request.getfixturevalue("engine"), request.getfixturevalue("model"))


@pytest.mark.parametrize("check", images.CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: SGLangEngine, model: PreTrainedModel, check: images.Check) -> None:
    check(engine, model)


def test_a_run_is_that_of_the_native_engine(tmp_path: Path) -> None:
    """The patches have 8 pixels, and SGLang's own code takes others than 14 for features."""
    servers.require(PACKAGE)
    folder = init_model(tmp_path / "model", "qwen2.5_vl", "nano", num_layers=2, patch_size=8)
    images.check_run("sglang", folder, tmp_path)
