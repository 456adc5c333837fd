# SPDX-License-Identifier: Apache-2.0
"""Biases of routers that updates move: by hand, in any split and on ranks, in checkpoints, exports and rollouts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.first import first
from tests.raising import check_fields, raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from tests.conftest import SMALL_RUN
from tests.models.nano import nano_model
from whet.checkpoints.export import export
from whet.config import TrainConfig, load_config
from whet.config.checks import problems
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.fsdp.engine import FSDPEngine
from whet.engines.role import RoleSettings
from whet.engines.routing import move_biases
from whet.engines.single import SingleEngine
from whet.errors import EngineError
from whet.models.load import body_of, kept_buffers, load_policy, outline, router_biases, stored_tensors
from whet.plugins.inference.servers.weights import as_in_checkpoints
from whet.rollout.build import load_model
from whet.rollout.native.engine import NativeEngine
from whet.trainers.build import train
from whet.trainers.objectives import ImitationObjective, PolicyObjective
from whet.weight_sync import buckets

RATE = 0.01
OPTION = "router_bias_rate"
LAYERS = {"num_hidden_layers": 3}  # two of them with experts
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "n_routed_experts": 8},
    "glm4_moe": {"n_routed_experts": 8},
    "ernie4_5_moe": {},  # its biases are parameters [1, E] inside the router
}
Folders = Mapping[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = tmp_path_factory.mktemp("nano")
    return {kind: varied(nano_model(made / kind, kind, **LAYERS, **sizes)) for kind, sizes in KINDS.items()}


def varied(folder: Path) -> Path:
    """Makes the routers' scores differ from token to token.  Returns `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.gate.weight.mul_(100)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=first(1, KINDS, others=pytest.mark.slow))
def folder(request: pytest.FixtureRequest, folders: Folders) -> Path:
    return folders[request.param]


def role(folder: Path, tokens: int = 64, **settings: Any) -> RoleSettings:
    optim = settings.pop("optim", OptimConfig(lr=1e-3))
    return RoleSettings(str(folder), EngineConfig(logits_chunk_tokens=16), "float32", tokens, optim, **settings)


def engine_of(folder: Path, rate: float = RATE, tokens: int = 64, **settings: Any) -> SingleEngine:
    return SingleEngine(role(folder, tokens, **settings), router_bias_rate=rate)


def biases(engine: Any) -> torch.Tensor:
    """The biases of all layers, whole: [L, E]."""
    named = dict(engine.named_weights())
    return torch.stack([named[name].flatten().clone() for name in sorted(named) if name.endswith("_bias")])


def moves(engine: Any, before: torch.Tensor) -> torch.Tensor:
    """The steps of each bias since `before`, in units of the rate."""
    return ((biases(engine) - before) / RATE).round(decimals=2)


def choices(folder: Path, batch: suite.Batch) -> torch.Tensor:
    """How often transformers' own model routes states that predict a sampled token to each expert.  [L, E]"""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), list[torch.Tensor]()
    for layer in model.model.layers[1:]:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: found.append(args[1]))
    with torch.no_grad():
        model(**{name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}, use_cache=False)
    at = torch.zeros_like(batch["input_ids"])
    at[:, -batch["response_mask"].shape[1] :] = batch["response_mask"]
    kept, count = at.roll(-1, 1).flatten().bool(), model.model.layers[1].mlp.experts.num_experts
    return torch.stack([each[kept].flatten().bincount(minlength=count) for each in found])


def test_the_step_of_each_bias_worked_by_hand(folders: Folders) -> None:
    """Loads 4 0 2 2 have the mean 2: a step down, a step up, no step; equal loads have no step."""
    for kind in ("deepseek_v3", "ernie4_5_moe"):
        model = load_policy(folders[kind])
        before = [bias.clone() for bias in router_biases(model)]
        rest = before[0].numel() - 4
        move_biases(model, torch.tensor([[4.0, 0.0, 2.0, 2.0, *[2.0] * rest], [3.0] * (4 + rest)]), 0.5)
        found = [(new - old).flatten().tolist() for new, old in zip(router_biases(model), before, strict=True)]
        assert found == [pytest.approx([-0.5, 0.5, 0, 0, *[0] * rest], abs=1e-6), [0.0] * (4 + rest)]


def test_an_update_moves_biases_by_the_choices_of_transformers(folder: Path) -> None:
    batch, engine = suite.ragged_batch(), engine_of(folder)
    before, loads = biases(engine), choices(folder, batch)
    suite.update(engine, batch, ImitationObjective())
    assert torch.equal(moves(engine, before), (loads.float().mean(1, keepdim=True) - loads).sign())
    assert loads.float().std() > 1
    assert {bias.dtype for bias in router_biases(engine.model)} == {torch.float32}


def test_any_split_moves_the_same(folder: Path) -> None:
    batch, objective, found = suite.ragged_batch(), ImitationObjective(), []
    for tokens, parts, recomputes in ((10**6, False, False), (1, False, False), (64, True, False), (64, False, True)):
        engine = engine_of(folder, tokens=tokens, gradient_checkpointing=recomputes)
        (suite.update_in_parts if parts else suite.update)(engine, batch, objective)
        found.append(biases(engine))
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.equal(found[0], biases(engine_of(folder)))


def test_a_rate_of_0_keeps_the_bits(folder: Path) -> None:
    plain, still = engine_of(folder, rate=0.0), SingleEngine(role(folder))
    before = [bias.clone() for bias in router_biases(plain.model)]
    for engine in (plain, still):
        suite.update(engine, suite.ragged_batch(), ImitationObjective())
    assert all(map(torch.equal, before, router_biases(plain.model)))
    assert torch.equal(suite.weights_of(plain), suite.weights_of(still))
    assert {name for name, _ in plain.named_weights()} == stored_tensors(plain.model).keys()


def test_a_skipped_step_an_empty_one_and_a_discarded_gradient_move_nothing(folder: Path) -> None:
    engine, batch = engine_of(folder), suite.ragged_batch()
    before = biases(engine)
    broken = batch.with_columns(advantages=batch["advantages"] * torch.nan)
    suite.update(engine, broken, PolicyObjective("reinforce", {}))
    assert engine.skipped == 1
    suite.update(engine, batch.with_columns(response_mask=batch["response_mask"] * 0), ImitationObjective())
    engine.forward_backward(batch, ImitationObjective())
    engine.discard()
    engine.step()
    assert torch.equal(biases(engine), before)
    # The choices of these calls count in no later step.
    other = engine_of(folder)
    other.step()
    for each in (engine, other):
        each.load_state(engine_of(folder).state())
        suite.update(each, batch, ImitationObjective())
    assert torch.equal(biases(engine), biases(other)) and not torch.equal(biases(engine), before)


def test_a_state_has_the_biases_and_the_steps_after_it_are_the_same(folder: Path, tmp_path: Path) -> None:
    straight, batches = engine_of(folder), [suite.ragged_batch(seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        suite.update(straight, batch, ImitationObjective())
    straight.save(tmp_path / "state", None)
    resumed, still = engine_of(folder), engine_of(folder, rate=0.0)
    for each in (resumed, still):
        each.load(tmp_path / "state")
        assert torch.equal(biases(each), biases(straight))
    for batch in batches[2:]:
        for each in (straight, resumed, still):
            suite.update(each, batch, ImitationObjective())
    assert torch.equal(suite.weights_of(straight), suite.weights_of(resumed))


@pytest.mark.parametrize(
    "options", first(1, [{}, {"reshard_after_forward": False}, {"cpu_offload": True}], others=pytest.mark.slow)
)
def test_a_sharded_engine_in_one_process_moves_the_same(folder: Path, options: dict[str, Any]) -> None:
    engines: list[Any] = [engine_of(folder), FSDPEngine(role(folder), router_bias_rate=RATE, **options)]
    found = []
    for engine in engines:
        for seed in range(2):
            suite.update(engine, suite.ragged_batch(seed=seed), ImitationObjective())
        found.append(biases(engine))
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)


def test_the_load_of_the_fullest_expert_falls(folder: Path) -> None:
    batch, engine = suite.ragged_batch()[:6], engine_of(folder, rate=0.05, optim=OptimConfig(lr=0.0))
    for bias in router_biases(engine.model):
        bias.zero_()[..., 0] = 1.0  # more than any score: all tokens choose the first expert
    loads = [suite.update(engine, batch, ImitationObjective()).reduce()["sft/router_load"] for _ in range(25)]
    assert min(loads[-3:]) < 0.75 * loads[0]


def test_a_copy_of_an_engine_has_its_biases(folder: Path) -> None:
    engine, other = engine_of(folder), SingleEngine(role(folder, optim=None))
    suite.update(engine, suite.ragged_batch(), ImitationObjective())
    other.copy_from(engine)
    assert all(map(torch.equal, router_biases(engine.model), router_biases(other.model)))


# -- rollouts


def native(dtype: torch.dtype) -> NativeEngine:
    return NativeEngine(dtype=dtype, max_batch_size=4)


def test_a_rollout_with_a_module_of_its_own_gets_the_biases(folder: Path) -> None:
    """In their own dtype: rounded to bfloat16, small steps of a bias would be lost. (ERNIE's are weights.)"""
    engine, rollout = engine_of(folder), native(torch.bfloat16)
    rollout.adopt(load_policy(folder))
    suite.update(engine, suite.ragged_batch(), ImitationObjective())
    sent = buckets.copy(rollout.load, engine.named_weights(), 1, torch.bfloat16)
    module = rollout.policy.require()
    own, theirs = kept_buffers(module), kept_buffers(engine.model)
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in theirs)
    for mine, theirs_too in zip(router_biases(module), router_biases(engine.model), strict=True):
        torch.testing.assert_close(mine.float(), theirs_too, rtol=1e-2, atol=0)
    assert sent != buckets.copy(rollout.load, engine_of(folder).named_weights(), 2, torch.bfloat16)


def test_a_module_in_this_process_is_shared_with_its_biases(folder: Path) -> None:
    engine, rollout = engine_of(folder), native(torch.float32)
    digests = [buckets.attach(rollout, engine.whole_module(), engine.named_weights(), 0)]  # type: ignore[arg-type]
    suite.update(engine, suite.ragged_batch(), ImitationObjective())
    digests.append(buckets.attach(rollout, engine.whole_module(), engine.named_weights(), 1))  # type: ignore[arg-type]
    assert all(
        a is b for a, b in zip(router_biases(rollout.policy.require()), router_biases(engine.model), strict=True)
    )
    assert digests[0] != digests[1]


class Kept:
    """A server engine as far as weights go: it keeps them by their names in checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.weights = dict[str, torch.Tensor]()
        with torch.device("meta"):
            self.outline: Any = outline(folder)

    def load(self, weights: Any, version: int) -> None:
        self.weights = dict(as_in_checkpoints(weights, self.outline))


def test_a_server_gets_the_biases_under_their_names_in_files(folder: Path) -> None:
    engine, kept = engine_of(folder), Kept(folder)
    suite.update(engine, suite.ragged_batch(), ImitationObjective())
    buckets.copy(kept.load, engine.named_weights(), 1, torch.float32)
    body_of(engine.model).save_pretrained(folder.with_name(f"{folder.name}-moved"))
    whole = AutoModelForCausalLM.from_pretrained(folder.with_name(f"{folder.name}-moved"), dtype=torch.float32)
    named = [each for name, each in sorted(kept.weights.items()) if name.endswith("_bias")]
    assert all(torch.equal(a, b) for a, b in zip(named, router_biases(whole), strict=True))
    exported = Kept(folder)
    config = load_config(TrainConfig, None, {"model.path": str(folder)}, given={"reward", "data"}).config
    load_model(exported, config.model, torch.device("cpu"), torch.bfloat16, version=1)  # type: ignore[arg-type]
    assert exported.weights.keys() == kept.weights.keys()


# -- refusals


def test_only_a_policy_with_biases_is_trained_with_a_rate(folders: Folders, model_folder: Path) -> None:
    key = f"engine.options.{OPTION}"
    with raises(EngineError, key, found=RATE):
        engine_of(model_folder)
    with raises(EngineError, key, found=RATE):
        engine_of(folders["glm4_moe"], is_value_model=True)
    with raises(EngineError, key, found=RATE):
        FSDPEngine(role(model_folder), router_bias_rate=RATE)
    narrow = OptimConfig(lr=1e-3, weight_rounding="stochastic")
    with raises(EngineError, key, found=RATE):
        engine_of(folders["ernie4_5_moe"], optim=narrow)
    for kind in ("deepseek_v3", "glm4_moe"):  # buffers, which stay float32
        engine = engine_of(folders[kind], optim=narrow)
        assert {bias.dtype for bias in router_biases(engine.model)} == {torch.float32}
    assert engine_of(folders["glm4_moe"], optim=None).optimizer is None  # of a model that is not trained


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ("{actor: {engine: {options: {RATE}}}, model: {lora: {rank: 4}}}", f"actor.engine.options.{OPTION}"),
        (
            "{actor: {engine: {name: fsdp, options: {RATE}}}, model: {lora: {rank: 4}}}",
            f"actor.engine.options.{OPTION}",
        ),
        (
            "{actor: {engine: {name: fsdp, options: {RATE, mesh: {pipeline: 2}}}}, cluster: {processes: 2}}",
            "actor.engine.options.mesh.pipeline",
        ),
    ],
)
def test_a_config_that_has_no_biases_to_move_is_refused(
    sections: str, key: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = yaml.safe_load(sections.replace("RATE", f"{OPTION}: 0.001"))
    given["model"] = {"path": str(model_folder), **given.get("model", {})}
    whole = {**given, "reward": {"function": "gsm8k"}, "data": {"train_files": ["train.jsonl"]}}
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    monkeypatch.chdir(tmp_path)
    [error] = problems(TrainConfig.model_validate(whole))
    check_fields(error, key)


# -- ranks and runs

MESHES: dict[str, EngineConfig] = {
    "single": EngineConfig(logits_chunk_tokens=16, options={OPTION: RATE}),
    "fsdp": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={OPTION: RATE}),
    "copies": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={OPTION: RATE, "mesh": {"replicate": 2}}),
    "experts": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={OPTION: RATE, "mesh": {"expert": 2}}),
    "context": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={OPTION: RATE, "mesh": {"context": 2}}),
    "tensor": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={OPTION: RATE, "mesh": {"tensor": 2}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS])
def test_two_ranks_move_the_biases_of_one(kind: str, folders: Folders, tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, eps=1.0, weight_decay=0.0)  # small steps: no choice is near a border
    given = {name: suite.settings(folders[kind], each, optim=optim) for name, each in MESHES.items()}
    if kind == "deepseek_v3":
        del given["tensor"]  # its plan has no heads to split
    alone = suite.launched({"actor": given["single"]}, 1)["actor"]
    reference = suite.drive(alone, steps=range(6))
    alone.close()
    groups = suite.launched(given, 2)
    for name, group in groups.items():
        found = suite.drive(group, steps=range(6))
        assert found.weights.keys() == reference.weights.keys(), name
        moved = [each for each in found.weights if each.endswith("_bias")]
        assert len(moved) == 2
        for each in moved:
            torch.testing.assert_close(found.weights[each], reference.weights[each], rtol=0, atol=1e-6, msg=name)
    suite.check_continues(groups["fsdp"], tmp_path / "state", range(6, 8))
    groups["fsdp"].close()


def run_of(folder: Path, run: Path, steps: int, **changed: Any) -> Any:
    small = {
        **SMALL_RUN,
        "model.path": str(folder),
        "trainer.run_dir": str(run),
        "trainer.total_steps": steps,
        "trainer.log_tokens": 1,
        "trainer.save_freq": 1,
        "actor.mini_batch_size": 2,
        "actor.optim.lr": 1e-2,
        f"actor.engine.options.{OPTION}": 0.2,
        **changed,
    }
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(8, 12)]
    config = load_config(TrainConfig, None, small, given={"reward", "data"}).config
    return train(config, reward=lambda solution_str: float(len(solution_str)), data=rows)


POOLS = {"train": {"processes": 1}, "sample": {"processes": 1, "roles": ["rollout"]}}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_apart"), [*((kind, False) for kind in KINDS), ("deepseek_v3", True)])
def test_a_run_samples_with_moved_biases_and_a_resume_has_its_bits(
    kind: str, is_apart: bool, folders: Folders, tmp_path: Path
) -> None:
    """The rollout's log-probs are the trainer's, though biases moved by far more than rounding."""
    folder, changed = folders[kind], {"cluster.placement": POOLS} if is_apart else {}
    run_of(folder, tmp_path / "straight", 3, **changed)
    run_of(folder, tmp_path / "resumed", 1, **changed)
    run_of(folder, tmp_path / "resumed", 3, **changed)
    for step in (2, 3):
        lines = (tmp_path / f"straight/tokens/step_{step:06}.jsonl").read_text().splitlines()
        assert lines == (tmp_path / f"resumed/tokens/step_{step:06}.jsonl").read_text().splitlines()
        for row in map(json.loads, lines):
            assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-5)
    start, *exported = (load_policy(path) for path in (folder, *(
        export(tmp_path / name, tmp_path / f"{name}-exported") for name in ("straight", "resumed")
    )))  # fmt: skip
    assert all(map(torch.equal, *map(router_biases, exported)))
    assert all(
        (new - old).abs().max() > 0.1 for new, old in zip(router_biases(exported[0]), router_biases(start), strict=True)
    )
