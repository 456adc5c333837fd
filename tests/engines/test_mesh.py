# SPDX-License-Identifier: Apache-2.0
"""Every mesh that two and four processes can form, against one process: gradients by parameter, steps, states."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from whet.config.schema import EngineConfig, LoraConfig
from whet.controller.worker_group import WorkerGroup

BOUND = 2e-5  # of the gradient of a parameter, relative by norm, float32
ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
Sizes = dict[str, int]
Reference = tuple[dict[str, torch.Tensor], suite.Record]
DENSE: dict[int, list[Sizes]] = {
    2: [{}, {"replicate": 2}, {"context": 2}, {"tensor": 2}],
    4: [
        {},
        {"replicate": 2},
        {"context": 2},
        {"context": 4},
        {"replicate": 2, "context": 2},
        {"tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"tensor": 2, "context": 2},
    ],
}
MIXTURE: dict[int, list[Sizes]] = {
    2: [{}, {"expert": 2}, {"context": 2, "expert": 2}, {"tensor": 2}],
    4: [
        {"expert": 2},
        {"expert": 4},
        {"expert": 2, "replicate": 2},
        {"expert": 2, "context": 2},
        {"expert": 4, "context": 2},
        {"expert": 2, "context": 2, "replicate": 2},
        {"expert": 2, "tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"expert": 2, "tensor": 2, "context": 2},
    ],
}


def named(sizes: Sizes) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "shard"


def fsdp(sizes: Sizes, **options: Any) -> EngineConfig:
    return EngineConfig(name="fsdp", logits_chunk_tokens=16, options={"mesh": sizes, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 4 layers, with 4 heads and 2 of keys and values, and with 8 experts; dense ones with fewer heads."""
    from whet.models.init import init_model  # not in the processes that read this file

    folder = tmp_path_factory.mktemp("models")
    made = {
        arch: init_model(folder / arch, arch, "nano", alphabet=ALPHABET, num_layers=4, max_position_embeddings=512)
        for arch in ("qwen3", "qwen3_moe")
    }
    heads = {f"{count} heads": {"num_attention_heads": count, "num_key_value_heads": 1} for count in (1, 2)}
    return made | {name: with_config(made["qwen3"], name, **sizes) for name, sizes in heads.items()}


def with_config(folder: Path, name: str, **changes: int) -> Path:
    """A model with random weights and other sizes than that in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    other = Path(shutil.copytree(folder, folder.with_name(name)))
    config = AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    return other


KINDS: dict[str, tuple[str, dict[str, Any], dict[int, list[Sizes]]]] = {
    # name: (model, what differs from plain, of both engines; meshes by processes)
    "dense": ("qwen3", {}, DENSE),
    "mixture": ("qwen3_moe", {}, MIXTURE),
    "one head": ("1 heads", {}, {2: [{"context": 2}], 4: [{"context": 4}, {"context": 2}]}),
    "two heads": ("2 heads", {}, {4: [{"context": 4}]}),  # keys are gathered between two pairs that share heads
    "adapter": ("qwen3", {"lora": LoraConfig(rank=4)}, {2: [{"tensor": 2}], 4: [{"tensor": 2}, {"context": 2}]}),
    "adapter of a mixture": (
        "qwen3_moe",
        {"lora": LoraConfig(rank=4)},
        {2: [{"expert": 2}, {"tensor": 2}], 4: [{"expert": 2, "tensor": 2}]},
    ),
    "checkpointing": ("qwen3_moe", {"gradient_checkpointing": True}, {2: [{"expert": 2}], 4: [{"expert": 2}]}),
}
CASES = [
    ((kind, count), sizes) for kind, (_, _, meshes) in KINDS.items() for count in meshes for sizes in meshes[count]
]


@pytest.fixture(scope="module")
def reference_of(folders: dict[str, Path]) -> Callable[[str], Reference]:
    """Gradients and three steps of one process, by kind."""

    @cache
    def made(kind: str) -> Reference:
        arch, both, _ = KINDS[kind]
        one = suite.launched({"actor": suite.settings(folders[arch], **both)}, 1)["actor"]
        one.update(suite.batch_of(0, 12), suite.OBJECTIVES[0])  # a new adapter has no gradient in A
        return one.gradients(suite.batch_of(1, 12))[0], suite.drive(one, steps=range(3))

    return made


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[dict[str, WorkerGroup]]:
    """A group for each mesh of a kind, all in the same processes."""
    kind, count = request.param
    arch, both, meshes = KINDS[kind]
    roles = {named(sizes): suite.settings(folders[arch], fsdp(sizes), **both) for sizes in meshes[count]}
    made = suite.launched(roles, count)
    yield made
    next(iter(made.values())).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "sizes"), CASES, indirect=["groups"], ids=[f"{kind} on {n}, {named(sizes)}" for (kind, n), sizes in CASES]
)
def test_gradients_and_steps_are_those_of_one_process(
    sizes: Sizes,
    groups: dict[str, WorkerGroup],
    reference_of: Callable[[str], Reference],
    request: pytest.FixtureRequest,
) -> None:
    kind, _ = request.node.callspec.params["groups"]
    group, (gradients, record) = groups[named(sizes)], reference_of(kind)
    group.update(suite.batch_of(0, 12), suite.OBJECTIVES[0])
    got = group.gradients(suite.batch_of(1, 12))[0]
    assert got.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert expected.norm() > 0, name
        assert (got[name] - expected).norm() <= BOUND * expected.norm(), name
    suite.check_records(record, suite.drive(group, steps=range(3)))
