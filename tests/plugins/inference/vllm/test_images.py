# SPDX-License-Identifier: Apache-2.0
"""vLLM's answers to prompts with images and videos, its features, and runs that sample with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
sys.path.insert(0, str(Path(__file__).parents[3]))
import server_conformance as servers
import server_images as images
from pictures import QWEN, seeing_folder

from whet.models.load import load_policy
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.plugins.lessons.init_model import Arch
from whet.rollout.protocol import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


FAMILIES: tuple[Arch, ...] = (*QWEN, "smolvlm")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model. The config of a Qwen3-VL does not say that its rotary positions are interleaved."""
    folder = seeing_folder(tmp_path_factory.mktemp("models") / "plain", request.param)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].get("rope_parameters", {}).pop("mrope_interleaved", None)
    (folder / "config.json").write_text(json.dumps(config))
    return load_policy(folder).eval()


@pytest.fixture(autouse=True)
def first_weights(request: pytest.FixtureRequest) -> None:
    """Every check begins with the model's own weights, and with nothing under way."""
    if "engine" in request.fixturenames:
        servers.reset(request.getfixturevalue("engine"), request.getfixturevalue("model"))


@pytest.mark.parametrize("check", images.CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: VLLMEngine, model: PreTrainedModel, check: images.Check) -> None:
    check(engine, model)


def test_features_stay_while_the_tower_does(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """The other weights change; the prompts show three images, some of them several times."""

    def encoded() -> int:
        [number] = engine.call("POST", "/collective_rpc", {"method": "num_encoded"})["results"]
        return int(number)

    made, other = images.requests(model, images.shown(model)), load_policy(model.config._name_or_path).eval()
    tower = {*images.seeing(model).tower_weights(model)}
    engine.load(servers.named(model), 0)  # the server knows its tower from the first update on
    generate(engine, made)
    before = encoded()
    for version, scale in ((1, 1.5), (2, 0.5)):
        with torch.no_grad():
            for name, weight in other.named_parameters():
                weight.mul_(1.0 if name in tower else scale)
        engine.load(servers.named(other), version)
        images.assert_equal(generate(engine, made), images.native(other, made))
    assert encoded() == before
    with torch.no_grad():
        next(weight for name, weight in other.named_parameters() if name in tower).mul_(2.0)
    engine.load(servers.named(other), 3)
    images.assert_equal(generate(engine, made), images.native(other, made))
    assert encoded() == before + 3


@pytest.mark.parametrize("arch", FAMILIES[1:])
@pytest.mark.parametrize("freeze", [[], ["vision"]], ids=["tower trained", "tower frozen"])
def test_a_run_is_that_of_the_native_engine(has_vllm: None, tmp_path: Path, arch: Arch, freeze: list[str]) -> None:
    images.check_run("vllm", seeing_folder(tmp_path / "model", arch), tmp_path, freeze)
