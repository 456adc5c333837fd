# SPDX-License-Identifier: Apache-2.0
"""Every mesh that two and four processes can form, against one process: gradients by parameter, steps, states."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.nano import nano_model
from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite
from mesh_cases import (
    GroupOf,
    Reference,
    Sizes,
    check_same,
    fsdp,
    gradients_and_steps,
    meshes_of,
    named,
    some,
    without_routers,
)

from whet.batch import Batch
from whet.config.algorithm_checks import EngineUse
from whet.config.schema import LoraConfig
from whet.config.section import SectionPlace
from whet.engines.engine import rows_of
from whet.engines.fsdp.pipeline import stages_of
from whet.engines.mesh import Mesh
from whet.errors import ConfigError
from whet.models.load import body_of, load_policy
from whet.models.outputs import ForwardSettings, layout_of, model_outputs, states_of
from whet.models.sequence_parallel import heads_ranks
from whet.trainers.objectives import ValueObjective

ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
FOUR_KEYS = "four heads of keys"
ADAPTER = {"lora": LoraConfig(rank=4)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 4 layers, with 4 heads and 2 of keys and values, and with 8 experts; dense ones with fewer heads."""
    from whet.plugins.lessons.init_model import init_model

    folder = tmp_path_factory.mktemp("models")
    made = {
        arch: init_model(folder / arch, arch, "nano", alphabet=ALPHABET, num_layers=4, max_position_embeddings=512)
        for arch in ("qwen3", "qwen3_moe")
    }
    heads = {f"{count} heads": {"num_attention_heads": count, "num_key_value_heads": 1} for count in (1, 2)}
    others = {name: with_config(made["qwen3"], name, **sizes) for name, sizes in heads.items()}
    for arch in ("qwen3", "qwen3_moe"):  # a stage has the embedding, another one the output
        others[f"{arch} untied"] = with_config(made[arch], f"{arch} untied", tie_word_embeddings=False)
        others[f"{arch} {FOUR_KEYS}"] = with_config(made[arch], f"{arch} {FOUR_KEYS}", num_key_value_heads=4)
    return made | others | {arch: nano_model(folder / arch, arch) for arch in ("olmo2", "olmo3", "glm4")}


def with_config(folder: Path, name: str, **changes: Any) -> Path:
    """A model with random weights and other sizes than that in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    other = Path(shutil.copytree(folder, folder.with_name(name)))
    config = AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    return other


def interleaved(meshes: list[Sizes]) -> list[Sizes]:
    """The same with two stages on each rank, which a pipeline of four layers on four ranks does not have."""
    return [{**sizes, "stages_per_rank": 2} for sizes in meshes if sizes["pipeline"] == 2]


def by_count(meshes: Callable[[int], list[Sizes]]) -> dict[int, list[Sizes]]:
    return {count: meshes(count) for count in (2, 4)}


def with_tensor(count: int, size: int, lacks: str) -> list[Sizes]:
    """The meshes without a pipeline that split heads so many times, or at most twice for 2."""
    return [each for each in some(count, "", lacks) if (each.get("tensor", 1) == 4) == (size == 4)]


KINDS: dict[str, tuple[str, dict[str, Any], dict[int, list[Sizes]]]] = {
    # name: (model, what differs from plain, of both engines; meshes by processes)
    "dense": ("qwen3", {}, by_count(lambda count: with_tensor(count, 2, "expert pipeline"))),
    "mixture": ("qwen3_moe", {}, by_count(lambda count: with_tensor(count, 2, "pipeline"))),
    FOUR_KEYS: (f"qwen3 {FOUR_KEYS}", {}, {4: with_tensor(4, 4, "")}),
    f"mixture of {FOUR_KEYS}": (f"qwen3_moe {FOUR_KEYS}", {}, {4: with_tensor(4, 4, "")}),
    "stages": (
        "qwen3 untied",
        {},
        by_count(lambda count: (given := some(count, "pipeline", "expert")) + interleaved(given)),
    ),
    "stages of a mixture": ("qwen3_moe untied", {}, by_count(lambda count: some(count, "pipeline"))),
    "interleaved stages of a mixture": (
        "qwen3_moe untied",
        {},
        by_count(lambda count: interleaved(some(count, "pipeline expert"))),
    ),
    "checkpointed stages": ("qwen3 untied", {"gradient_checkpointing": True}, {2: [{"pipeline": 2}]}),
    "one head": ("1 heads", {}, {2: [{"context": 2}], 4: [{"context": 4}, {"context": 2}]}),
    "one head in one call": ("1 heads", {}, {4: [{"context": 4}]}),
    "two heads": ("2 heads", {}, {4: [{"context": 4}]}),  # keys are gathered between two pairs that share heads
    "adapter": (
        "qwen3",
        {"lora": LoraConfig(rank=4)},
        by_count(lambda count: with_tensor(count, 2, "expert pipeline")),
    ),
    "adapter of a mixture": (
        "qwen3_moe",
        {"lora": LoraConfig(rank=4)},
        by_count(
            lambda count: [each for each in with_tensor(count, 2, "pipeline") if {"expert", "tensor"} & each.keys()]
        ),
    ),
    "adapter of experts": (
        "qwen3_moe",
        {"lora": LoraConfig(rank=4, target_modules=["q_proj", "experts"])},
        by_count(lambda count: some(count, "", "expert tensor pipeline")),
    ),
    "checkpointed adapter of experts": (
        "qwen3_moe",
        {"lora": LoraConfig(rank=4, target_modules=["experts"]), "gradient_checkpointing": True},
        {2: [{}]},
    ),
    "checkpointing": ("qwen3_moe", {"gradient_checkpointing": True}, {2: [{"expert": 2}], 4: [{"expert": 2}]}),
    # norms read the sum over the ranks itself
    **{arch: (arch, {}, {2: [{"tensor": 2}]}) for arch in ("olmo2", "olmo3", "glm4")},
}
CASES = {
    f"{kind} on {count}, {named(sizes)}": (count, kind, sizes)
    for count in (2, 4)
    for kind, (*_, meshes) in KINDS.items()
    for sizes in meshes.get(count, [])
}
# Refused by name: model, processes, mesh, and the size that is refused.
REFUSED: list[tuple[str, int, Sizes, str]] = [
    *(("qwen3", count, sizes, "expert") for count in (2, 4) for sizes in some(count, "expert", "pipeline")),
    *(("qwen3 untied", 4, sizes, "expert") for sizes in some(4, "expert pipeline")),
    *(("qwen3", count, sizes, "pipeline") for count in (2, 4) for sizes in some(count, "pipeline")),  # a tied output
    ("qwen3", 4, {"tensor": 4}, "tensor"),
    ("qwen3_moe", 4, {"tensor": 4}, "tensor"),
    ("qwen3 untied", 4, {"pipeline": 4, "stages_per_rank": 2}, "pipeline"),
]


@pytest.fixture(scope="module")
def group_of() -> Iterator[GroupOf]:
    """The group of settings, in processes that stay from case to case."""
    with suite.reusing() as of:
        yield of


@pytest.fixture(scope="module")
def reference_of(folders: dict[str, Path]) -> Callable[[str], Reference]:
    """Gradients and three steps of one process, by kind."""

    @cache
    def made(kind: str) -> Reference:
        arch, both, _ = KINDS[kind]
        return gradients_and_steps(suite.launched({"actor": suite.settings(folders[arch], **both)}, 1)["actor"])

    return made


def test_every_mesh_is_compared() -> None:
    """Of a mixture and of a dense model, which has no experts to split."""
    for kinds, lacks in (
        (("mixture", f"mixture of {FOUR_KEYS}", "stages of a mixture"), ""),
        (("dense", FOUR_KEYS, "stages"), "expert"),
    ):
        for count, number in ((2, 7 - 2 * bool(lacks)), (4, 27 - 12 * bool(lacks))):
            told = [
                sizes for kind in kinds for sizes in KINDS[kind][2].get(count, []) if "stages_per_rank" not in sizes
            ]
            assert sorted(map(named, told)) == sorted(map(named, some(count, "", lacks)))
            assert len({*map(named, told)}) == len(told) == number


def test_every_other_grid_is_refused_before_a_process_starts(train_config: Any) -> None:
    """Every choice of sizes of 1, 2 and 4 is a mesh of two or four processes, or an error that names a size."""
    for count in (2, 4):
        words = {"actor.engine.name": "fsdp", "cluster.processes": count}
        use = EngineUse.at(SectionPlace("actor.engine", train_config(words)))
        meshes, refused = meshes_of(count), 0
        for grid in product((1, 2, 4), repeat=len(Mesh.__dataclass_fields__)):
            sizes = dict(zip(Mesh.__dataclass_fields__, grid, strict=True))
            errors = [*replace(use, options={**use.options, "mesh": sizes}).refused()]
            assert all(each.key.startswith("actor.engine.options.mesh.") for each in errors)
            assert bool(errors) == ({name: size for name, size in sizes.items() if size > 1} not in meshes)
            refused += bool(errors)
        assert refused == 3**6 - len(meshes)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_steps_are_those_of_one_process(
    case: str, group_of: GroupOf, reference_of: Callable[[str], Reference], folders: dict[str, Path]
) -> None:
    count, kind, sizes = CASES[case]
    arch, both, _ = KINDS[kind]
    group = group_of(suite.settings(folders[arch], fsdp(sizes), **both), count)
    if "in one call" in kind:
        group.in_one_call()
    check_same(reference_of(kind), gradients_and_steps(group), sizes)


@pytest.mark.slow
def test_a_mesh_that_a_model_does_not_have_is_refused_by_name(group_of: GroupOf, folders: dict[str, Path]) -> None:
    for count in (2, 4):
        group_of(suite.settings(folders["qwen3"], fsdp({})), count)  # the ranks outlive a refusal
        for arch, _, sizes, name in (each for each in REFUSED if each[1] == count):
            with raises(
                ConfigError, f"engine.options.mesh.{name}", found=sizes[name] * sizes.get("stages_per_rank", 1)
            ):
                group_of(suite.settings(folders[arch], fsdp(sizes)), count)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["expert", "tensor"])
def test_adapted_experts_are_not_split(group_of: GroupOf, folders: dict[str, Path], size: str) -> None:
    settings = suite.settings(
        folders["qwen3_moe"], fsdp({size: 2}), lora=LoraConfig(rank=4, target_modules=["experts"])
    )
    with raises(ConfigError, f"engine.options.mesh.{size}", found=2, expected=re.compile("target_modules.*experts")):
        group_of(settings, 2)


def test_a_pass_of_a_rank_without_rows_has_finite_gradients(tmp_path: Path) -> None:
    """Gemma 3n divides by the norm of an embedding, which is 0 for its padding, token 0."""
    model = load_policy(nano_model(tmp_path / "model", "gemma3n_text"))
    idle = {name: torch.as_tensor(each) for name, each in rows_of(suite.ragged_batch().columns(), []).items()}
    settings = ForwardSettings(packing=False)
    (0.0 * model_outputs(model, idle, frozenset({"log_probs"}), settings)["log_probs"].sum()).backward()
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert found and not any(bool(each.any()) for each in found)


@pytest.mark.slow
def test_a_value_model_in_stages(folders: dict[str, Path]) -> None:
    model, objective = folders["qwen3 untied"], ValueObjective()
    records = []
    for engine, count in ((None, 1), (fsdp({"pipeline": 2}), 2)):
        group = suite.launched({"critic": suite.settings(model, engine, is_value_model=True)}, count)["critic"]
        records.append(suite.drive(group, objective, range(3), needs=("values",)))
        group.close()
    suite.check_records(*records)


# A run goes on with other processes and another mesh each time.
CHAIN: list[tuple[int, Sizes]] = [
    (4, {"expert": 2, "tensor": 2}),
    (2, {"pipeline": 2, "stages_per_rank": 2}),
    (4, {"expert": 4, "context": 2}),
    (1, {}),
    (4, {"pipeline": 2, "expert": 2}),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_state_goes_on_on_another_mesh(folders: dict[str, Path], tmp_path: Path) -> None:
    model = folders["qwen3_moe untied"]
    expected = suite.drive(suite.launched({"actor": suite.settings(model)}, 1)["actor"], steps=range(2 * len(CHAIN)))
    metrics: list[dict[str, float]] = []
    for part, (count, sizes) in enumerate(CHAIN):
        group = suite.launched({"actor": suite.settings(model, fsdp(sizes))}, count)["actor"]
        if part:
            group.load(str(tmp_path / f"{part}.state"))
        got = suite.drive(group, steps=range(2 * part, 2 * part + 2))
        metrics += got.metrics
        group.save(str(tmp_path / f"{part + 1}.state"))
        group.close()
    ours, theirs = ([without_routers(each) for each in those] for those in (metrics, expected.metrics))
    suite.check_records(replace(expected, metrics=theirs), replace(got, metrics=ours))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_row_of_32k_tokens_over_more_ranks_than_heads(folders: dict[str, Path]) -> None:
    model = with_config(folders["1 heads"], "one layer", num_hidden_layers=1, layer_types=["full_attention"])
    length, draw = 32_768, torch.Generator().manual_seed(0)
    mask = torch.ones(1, length, dtype=torch.long)
    columns = {"input_ids": torch.randint(3, 40, (1, length), generator=draw), "attention_mask": mask}
    response = torch.zeros(1, length - 8, dtype=torch.long)
    response[:, -64:] = 1
    row = Batch.of({**columns, "position_ids": mask.cumsum(1) - 1, "response_mask": response})
    found = []
    for engine, count in ((None, 1), (fsdp({"context": 4}), 4)):
        settings = suite.settings(model, engine, max_tokens_per_micro_batch=length)
        group = suite.launched({"actor": settings}, count)["actor"]
        norm = group.update(row, suite.OBJECTIVES[3]).reduce()["sft/grad_norm"]
        found.append((norm, group.forward(row, ("log_probs",))["log_probs"]))
        group.close()
    (one, expected), (other, got) = found
    assert other == pytest.approx(one, rel=1e-4)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "arch", "key", "found"),
    [
        ({"pipeline": 2}, "qwen3", "engine.options.mesh.pipeline", 2),  # ties its output to its embedding
        ({"pipeline": 8}, "qwen3 untied", "engine.options.mesh.pipeline", 8),
    ],
)
def test_a_model_without_such_stages(sizes: Sizes, arch: str, key: str, found: int, folders: dict[str, Path]) -> None:
    with raises(ConfigError, key, found=found):
        stages_of(load_policy(folders[arch]), sizes["pipeline"], [0])


def random_model(arch: str, **config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from whet.models import attention

    shape = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, **config}
    made = AutoConfig.for_model(arch, **shape, tie_word_embeddings=False, pad_token_id=0)
    made._attn_implementation = attention.implementation(made)
    return AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("granite", {"embedding_multiplier": 12.0}),  # a factor between embedding and layers
        ("nanochat", {}),  # a norm there
        ("gpt2", {}),  # embeddings of positions
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}),  # the same, in an inner module
    ],
)
def test_a_body_that_does_not_pass_on_received_states_has_no_stages(arch: str, config: dict[str, Any]) -> None:
    with raises(ConfigError, "engine.options.mesh.pipeline", found=2):
        stages_of(random_model(arch, **config), 2, [0])


def test_heads_are_split_whose_config_does_not_count_those_of_keys() -> None:
    config = random_model("gpt_neox").config
    assert [heads_ranks(config, size) for size in (2, 4, 8)] == [2, 4, 4]


@pytest.mark.parametrize("arch", ["granite", "gpt_neox"])
def test_stages_in_turn_compute_the_states_of_the_whole(arch: str) -> None:
    model, ones = random_model(arch).eval(), torch.ones(2, 10, dtype=torch.long)
    ids, positions = torch.arange(20).view(2, 10), ones.cumsum(1) - 1
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": positions, "response_mask": ones[:, 4:]}
    settings = ForwardSettings()
    where, (_, stages) = layout_of(columns, settings), stages_of(model, 2, [0, 1])
    with torch.no_grad():
        body_of(stages[1]).get_input_embeddings().hidden = states_of(stages[0], where, settings)[None]
        assert states_of(stages[1], where, settings).equal(states_of(model, where, settings))


def test_stages_have_the_names_of_the_whole_and_each_weight_once(folders: dict[str, Path]) -> None:
    model = load_policy(folders["qwen3 untied"])
    whole = [name for name, _ in model.named_parameters()]
    first, (zero, two) = stages_of(model, 4, [0, 2])
    second, _ = stages_of(model, 4, [1, 3])
    names = [[name for name, _ in each.named_parameters()] for each in (first, second, zero, two)]
    assert sorted(names[0] + names[1]) == sorted(whole) and sorted(names[2] + names[3]) == sorted(names[0])
    assert names[2][0] == "model.embed_tokens.weight" and all("layers.2." in name for name in names[3])
    assert {"model.norm.weight", "lm_head.weight"} < set(names[1])
