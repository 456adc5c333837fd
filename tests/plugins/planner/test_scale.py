# SPDX-License-Identifier: Apache-2.0
"""Plans for other numbers of accelerators: by hand, against the launch's own placement, and for the shipped recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.first import first
from tests.raising import raises
from whet.cli.app import app
from whet.config import TrainConfig, load_config, problems
from whet.controller.worker import ResourcePool, WorkerSpec, pools_of
from whet.engines.mesh import Mesh
from whet.errors import ConfigError
from whet.plugins.planner.first import bytes_of, changed, host_bytes, shape_of
from whet.plugins.planner.scale import Scaled, places, scale, smallest

ROOT = Path(__file__).parents[3]

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
}
DENSE = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064}
DENSE |= {"max_position_embeddings": 32768, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_7b_math_grpo": {
        **DENSE,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2_5_32b_math_dapo": {
        **DENSE,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen3_30b_a3b_math_gspo": {
        **MIXTURE,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "qwen3_235b_a22b_math_gspo": {
        **MIXTURE,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
    },
}


def recipe(name: str, folder: Path, words: Sequence[str] = ()) -> tuple[TrainConfig, dict[str, float]]:
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    keys = [*words, f"model.path={folder}", "data.train_files=[]"]
    config = load_config(TrainConfig, name, keys, checked=False).config
    found = shape_of(str(folder))
    assert found is not None
    return config, found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_planned_is_a_config_that_runs(name: str, tmp_path: Path) -> None:
    config, shape = recipe(name, tmp_path)
    before = {str(each) for each in problems(config)}
    for gib in (78.0, 139.0):
        found = scale(config, shape, [8, 16, 64, 256], gib)
        for each in found:
            other = changed(config, each.changes)
            assert other.cluster.devices == each.gpus and not {*map(str, problems(other))} - before
            assert each.needed == bytes_of(other, shape, True, gib) and each.fits == (each.needed <= gib * 2**30)
            taken = [(place.node, device) for place in places(other) for device in place.devices]
            here = other.cluster.devices_here
            assert taken == [divmod(number, here) for number in range(each.gpus)]
        least = smallest(config, shape, gib, 256)
        assert all(each.fits == (least is not None and each.gpus >= least.gpus) for each in found)
        assert (least is None) == (name.startswith("qwen3_235b") and gib < 80)


def cell(found: Scaled | None) -> str:
    """A cell of the table of docs/planning.md: accelerators, how many train, and the mesh if set."""
    if found is None:
        return "none up to 256"
    pools: Any = found.changes.get("cluster.placement", {})
    options: Any = found.changes.get("actor.engine.options", {})
    told = [f"{pools['train']['processes']} train"] if pools else []
    told += [f"`{name}: {size}`" for name, size in options.get("mesh", {}).items()]
    return f"{found.gpus} ({', '.join(told)})" if told else f"{found.gpus}"


LARGEST = pytest.param("qwen3_235b_a22b_math_gspo", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [*[each for each in SHAPES if "235b" not in each], LARGEST])
def test_the_table_of_the_smallest_numbers_is_current(name: str, tmp_path: Path) -> None:
    """With 2,000 GiB a node, and 78 and 139 GiB of a card, as the page says."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    table = page.partition("| recipe | accelerators of 80 GB | of 141 GB |")[2].partition("\n\n")[0]
    rows = {row[0].strip("`"): row[1:] for row in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    assert rows.keys() == SHAPES.keys()
    config, shape = recipe(name, tmp_path)
    for gib, shown in zip((78.0, 139.0), rows[name], strict=True):
        expected = cell(smallest(config, shape, gib, 256, host_gib=2000.0))
        assert shown == expected or (expected.startswith("none") and shown.startswith(f"{expected}: "))


def test_weights_of_235b_by_hand(tmp_path: Path) -> None:
    config, shape = recipe("qwen3_235b_a22b_math_gspo", tmp_path)
    attention = 4096 * 128 * (64 + 64 + 4 + 4)
    experts = 94 * 128 * 3 * 4096 * 1536
    assert shape["in_experts"] == experts and shape["weights"] == 94 * attention + experts + 2 * 151936 * 4096
    assert host_bytes(config, shape) == round(shape["weights"] * 16 / 32 * 8)  # 32 ranks, 8 of them on a node
    [alone] = scale(config, shape, [16], 139.0)
    [host] = scale(config, shape, [16], 139.0, host_gib=1900.0)
    assert alone.fits and not host.fits  # all of AdamW's numbers on one node


def test_places_are_those_of_a_launch(tmp_path: Path) -> None:
    config, _ = recipe("qwen3_30b_a3b_math_gspo", tmp_path)
    specs = [WorkerSpec(role, object, (), {}) for role in ("actor", "ref", "rollout")]  # type: ignore[arg-type]
    pools = pools_of(config.cluster, specs)
    found = [*places(config)]
    assert pools[1] == ResourcePool(2, ("rollout",), "sample", 4)
    assert [(each.pool, each.rank, each.node, each.devices) for each in found] == [
        (slot.pool.name, slot.rank, slot.node, slot.devices) for slot in config.cluster.slots(pools)
    ]
    assert [each.devices for each in found[-2:]] == [(0, 1, 2, 3), (4, 5, 6, 7)] and found[-1].node == 1


def test_coordinates_by_hand() -> None:
    mesh = Mesh.of(16, {"replicate": 2, "context": 2, "tensor": 2, "expert": 4})
    assert mesh.shard == 2
    assert mesh.at(0) == {"replicate": 0, "shard": 0, "context": 0, "tensor": 0, "expert": 0}
    assert mesh.at(11) == {"replicate": 1, "shard": 0, "context": 1, "tensor": 1, "expert": 1}
    assert mesh.at(15) == {"replicate": 1, "shard": 1, "context": 1, "tensor": 1, "expert": 3}
    assert Mesh.of(4, None).at(3) == {"shard": 3}


def test_the_command(tmp_path: Path) -> None:
    recipe("qwen3_235b_a22b_math_gspo", tmp_path)
    words = ["plan", "qwen3_235b_a22b_math_gspo", f"model.path={tmp_path}", "data.train_files=[]"]
    done = CliRunner().invoke(app, [*words, "--gpus", "8,64", "--device-memory", "139"])
    assert done.exit_code == 0, done.output
    ranks = CliRunner().invoke(app, [*words, "--ranks"]).output.splitlines()
    assert len(ranks) == 36 and ranks[9].split(": ")[1] == "node 1, device 1"
    none = CliRunner().invoke(app, [*words, "--gpus", "8", "--device-memory", "78"])
    assert none.exit_code == 1


@pytest.mark.parametrize(("gpus", "device"), [("8,0", 78.0), ("eight", 78.0), ("8", None)])
def test_numbers_that_cannot_be(gpus: str, device: float | None, tmp_path: Path) -> None:
    from whet.plugins.planner.command import plan_for

    config, shape = recipe("qwen2_5_32b_math_dapo", tmp_path)
    with raises(ConfigError, "--gpus" if device else "--device-memory"):
        plan_for(config, gpus, device, None)
    with raises(ConfigError, "--gpus", found=13):
        scale(config, shape, [13], 78.0)


@pytest.mark.parametrize(
    "words",
    first(1, [["--ranks", "--json"], ["--gpus", "8", "--ranks"], ["--gpus", "8", "--json"]], others=pytest.mark.slow),
)
def test_one_answer_at_a_time(words: list[str], tmp_path: Path) -> None:
    recipe("qwen2_5_32b_math_dapo", tmp_path)
    given = ["plan", "qwen2_5_32b_math_dapo", f"model.path={tmp_path}", "data.train_files=[]", *words]
    assert CliRunner().invoke(app, given).exit_code != 0
