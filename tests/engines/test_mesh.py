# SPDX-License-Identifier: Apache-2.0
"""Every mesh that two and four processes can form, against one process: gradients by parameter, steps, states."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from whet.batch import Batch
from whet.config.schema import EngineConfig, LoraConfig
from whet.controller.worker_group import WorkerGroup
from whet.engines.fsdp.pipeline import stages_of
from whet.engines.role import RoleSettings
from whet.errors import ConfigError
from whet.models.load import body_of, load_policy
from whet.models.outputs import ForwardSettings, layout_of, states_of
from whet.models.sequence_parallel import heads_ranks
from whet.trainers.objectives import ValueObjective

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


def without_routers(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a step with a pipeline, whose stages measure no routers."""
    return {name: value for name, value in metrics.items() if "router" not in name}


def named(sizes: Sizes) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "shard"


def fsdp(sizes: Sizes, **options: Any) -> EngineConfig:
    mesh = {name: size for name, size in sizes.items() if name != "stages_per_rank"}
    per_rank = {name: size for name, size in sizes.items() if name == "stages_per_rank"}
    return EngineConfig(name="fsdp", logits_chunk_tokens=16, options={"mesh": mesh, **per_rank, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of 4 layers, with 4 heads and 2 of keys and values, and with 8 experts; dense ones with fewer heads."""
    from tests.models.nano import nano_model  # not in the processes that read this file
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


STAGES: dict[int, list[Sizes]] = {
    2: [{"pipeline": 2}, {"pipeline": 2, "stages_per_rank": 2}],
    4: [
        {"pipeline": 4},
        {"pipeline": 2},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 2, "context": 2, "stages_per_rank": 2},
        {"pipeline": 2, "tensor": 2},
    ],
}
MIXED_STAGES: dict[int, list[Sizes]] = {4: [{"pipeline": 2, "expert": 2}, {"pipeline": 2, "expert": 2, "context": 2}]}
KINDS: dict[str, tuple[str, dict[str, Any], dict[int, list[Sizes]]]] = {
    # name: (model, what differs from plain, of both engines; meshes by processes)
    "dense": ("qwen3", {}, DENSE),
    "mixture": ("qwen3_moe", {}, MIXTURE),
    "stages": ("qwen3 untied", {}, STAGES),
    "stages of a mixture": ("qwen3_moe untied", {}, MIXED_STAGES),
    "checkpointed stages": ("qwen3 untied", {"gradient_checkpointing": True}, {2: [{"pipeline": 2}]}),
    "one head": ("1 heads", {}, {2: [{"context": 2}], 4: [{"context": 4}, {"context": 2}]}),
    "one head in one call": ("1 heads", {}, {4: [{"context": 4}]}),
    "two heads": ("2 heads", {}, {4: [{"context": 4}]}),  # keys are gathered between two pairs that share heads
    "adapter": ("qwen3", {"lora": LoraConfig(rank=4)}, {2: [{"tensor": 2}], 4: [{"tensor": 2}, {"context": 2}]}),
    "adapter of a mixture": (
        "qwen3_moe",
        {"lora": LoraConfig(rank=4)},
        {2: [{"expert": 2}, {"tensor": 2}], 4: [{"expert": 2, "tensor": 2}]},
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
def group_of(folders: dict[str, Path]) -> Iterator[Callable[[str], WorkerGroup]]:
    """The group of a case. No fixture with a parameter of each case, which pytest would end with the case."""

    def settings(case: str) -> RoleSettings:
        _, kind, sizes = CASES[case]
        arch, both, _ = KINDS[kind]
        return suite.settings(folders[arch], fsdp(sizes), **both)

    def launch(cases: list[str], count: int) -> dict[str, WorkerGroup]:
        return suite.launched({case: settings(case) for case in cases}, count)

    with suite.launched_in_turn({case: count for case, (count, *_) in CASES.items()}, launch) as of:
        yield of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_steps_are_those_of_one_process(
    case: str, group_of: Callable[[str], WorkerGroup], reference_of: Callable[[str], Reference]
) -> None:
    _, kind, sizes = CASES[case]
    group, (gradients, record) = group_of(case), reference_of(kind)
    if "in one call" in kind:
        group.in_one_call()
    group.update(suite.batch_of(0, 12), suite.OBJECTIVES[0])
    got = group.gradients(suite.batch_of(1, 12))[0]
    assert got.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert expected.norm() > 0, name
        assert (got[name] - expected).norm() <= BOUND * expected.norm(), name
    got_record = suite.drive(group, steps=range(3))
    if "pipeline" in sizes:
        record = replace(record, metrics=[without_routers(each) for each in record.metrics])
    suite.check_records(record, got_record)


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

    shape = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, **config}
    made = AutoConfig.for_model(arch, **shape, tie_word_embeddings=False, pad_token_id=0)
    made._attn_implementation = "whet"
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
