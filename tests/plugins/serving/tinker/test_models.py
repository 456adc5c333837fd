# SPDX-License-Identifier: Apache-2.0
"""Models of clients: the bits of `whet sft` and of an update of `whet train`, adapters on one base, resuming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.models.nano import nano_model
from tests.plugins.serving.tinker.rows import answer, datum, request
from whet.algorithms.calls import mini_batch_functions, with_mini_batch_columns
from whet.batch import Batch
from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.data.preferences import Comparison
from whet.data.supervised import SupervisedExample
from whet.devices import HOST
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import DataError, EngineError, RegistryError
from whet.guard import RefusedError
from whet.models.positions import position_ids
from whet.plugins.lessons.init_model import init_model
from whet.plugins.serving.tinker.losses import NAMED, OWN
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.store import ModelKind, Saved, Store
from whet.plugins.serving.tinker.training import Base, Training
from whet.registry import POLICY_LOSSES, PREFERENCE_LOSSES
from whet.trainers.objectives import ComparisonObjective, ImitationObjective, PolicyObjective
from whet.trainers.preference import to_batch as preference_batch
from whet.trainers.sft import to_batch

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
OPTIM = OptimConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
pytestmark = pytest.mark.slow
FULL, LORA = ModelKind("nano", 0), ModelKind("nano", 4, seed=3)
BOTH = ("ppo", "importance_sampling", "cispo", "dro", "whet:cispo", "clip_cov")  # losses that train all weights too
KINDS = pytest.mark.parametrize("kind", [FULL, LORA], ids=["full", "lora"])


@pytest.fixture
def models(model_folder: Path, tmp_path: Path) -> Models:
    return Models(Base(str(model_folder)), "nano", "float32", Store(tmp_path), 512, HOST)


def engine_of(models: Models, name: str) -> SingleEngine:
    here: Training = models.here
    engine: SingleEngine = here.engines[name]
    return engine


def result_of(models: Models, *asked: Any, **options: Any) -> tuple[list[npt.NDArray[np.float32]], dict[str, float]]:
    """Log-probs and metrics of a request, which may be done in parts."""
    *parts, reply = models.loss(request(*asked, **options))
    assert reply is not None and not any(parts)
    return answer(reply)


def saved(models: Models, name: str, kind: ModelKind, path: str) -> None:
    models.save(name, path, Saved("me", kind, 1.0), overwrite=False)


def of_whet(folder: Path, kind: ModelKind) -> SingleEngine:
    """The engine that `whet sft` and `whet train` train with the same settings."""
    lora = LoraConfig(rank=kind.rank, alpha=32.0) if kind.rank else None
    return SingleEngine(
        RoleSettings(str(folder), EngineConfig(), "float32", None, OPTIM, 1.0, lora=lora, seed=kind.seed)
    )


def same_bits(model: Models, name: str, engine: SingleEngine) -> None:
    own, other = engine_of(model, name).state()["model"], engine.state()["model"]
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], other[key]) for key in own)


EXAMPLES = [
    SupervisedExample((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 1, 1)),
    SupervisedExample((1, 2, 9, 8), (0, 1, 1, 1)),
    SupervisedExample((7, 7, 7, 11, 12), (0, 0, 0, 0, 1)),
]


def as_data(examples: Sequence[SupervisedExample]) -> list[bytes]:
    count = sum(sum(each.loss_mask) for each in examples)
    return [
        datum(each.input_ids[:-1], target_tokens=each.input_ids[1:], weights=np.float32(each.loss_mask[1:]) / count)
        for each in examples
    ]


@KINDS
def test_cross_entropy_has_the_bits_of_sft(models: Models, model_folder: Path, kind: ModelKind) -> None:
    """With weights 1/N and three steps, so that the optimizer's state counts too; each log-prob of the request is
    returned."""
    engine = of_whet(model_folder, kind)
    models.create("m", kind)
    batch = to_batch(EXAMPLES, 0)
    for _ in range(3):
        expected = engine.forward(
            batch.with_columns(response_mask=batch["attention_mask"][:, 1:]), frozenset({"log_probs"})
        )
        engine.forward_backward(batch, ImitationObjective())
        log_probs, metrics = result_of(models, "m", as_data(EXAMPLES), "cross_entropy")
        engine.step()
        models.step("m", ADAM)
        same_bits(models, "m", engine)
        for row, (found, example) in enumerate(zip(log_probs, EXAMPLES, strict=True)):
            trained = np.array(example.loss_mask[1:], bool)
            own = expected["log_probs"][row, : len(found)].numpy()
            assert found == pytest.approx(own, abs=1e-6) and len(found) == len(example.input_ids) - 1
            assert trained.any()
        mean = -sum(
            row[np.array(each.loss_mask[1:], bool)].sum() for row, each in zip(log_probs, EXAMPLES, strict=True)
        )
        assert metrics == {"loss:sum": pytest.approx(mean / 8, rel=1e-5)}


LOSSES = [*NAMED, *(f"{OWN}{name}" if name in NAMED else name for name in POLICY_LOSSES.names())]
CHOICES: dict[str, dict[str, float]] = {
    "clip_cov": {"share": 0.5, "lower": -1.0, "upper": 1.0},
    "kl_cov": {"share": 0.5},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_has_the_bits_of_an_update(models: Models, model_folder: Path, loss: str) -> None:
    """Rows of two groups with shared prompts, laid out as the loop does."""
    name, options = NAMED.get(loss, (loss.removeprefix(OWN), CHOICES.get(loss, {})))
    prompts, responses = [(1, 2, 3), (1, 2, 3), (4, 5)], [(6, 7), (8, 9, 10), (11,)]
    rng = np.random.default_rng(0)
    start = of_whet(model_folder, FULL).forward(rows_of(prompts, responses, {}), frozenset({"log_probs"}))["log_probs"]
    old, sampled = (
        [rng.normal(row[: len(each)], 0.1).astype(np.float32) for row, each in zip(start, responses, strict=True)]
        for _ in range(2)
    )
    scores, accuracy = np.float32([0.7, -0.3, -0.4]), np.float32([1, 0, 0])
    columns = {
        "old_log_probs": old,
        "rollout_log_probs": sampled,
        "advantages": [np.full(len(r), s) for r, s in zip(responses, scores, strict=True)],
        "draws": [rng.random(len(each)).astype(np.float32) for each in responses],
    }
    objective, total = PolicyObjective(name, options), sum(map(len, responses))
    batch = rows_of(prompts, responses, columns).with_columns(accuracy=torch.from_numpy(accuracy))
    own = mini_batch_functions(objective.function.entry)
    extra = {each: with_mini_batch_columns(objective.function, batch.tensors())[each] for each in own}
    batch, data = batch.with_columns(**extra), []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        inputs = {"logprobs": old[row], "rollout_log_probs": sampled[row], "advantages": columns["advantages"][row]}
        inputs |= {each: column[row, : len(response)].float().numpy() for each, column in extra.items()}
        inputs["weights"] = np.full(len(response), np.float32(1) / np.float32(total))
        pad = np.zeros(len(prompt) - 1, np.float32)
        given = {key: np.concatenate([pad, each]) for key, each in inputs.items()} | {"accuracy": accuracy[[row]]}
        data.append(datum([*prompt, *response[:-1]], target_tokens=[0] * len(pad) + [*response], **given))
    for kind in (FULL, LORA) if loss in BOTH else (LORA,):
        engine = of_whet(model_folder, kind)
        models.create(str(kind.rank), kind)
        for update in range(2):
            engine.forward_backward(batch, objective)
            result_of(models, str(kind.rank), data, loss, CHOICES.get(loss))
            engine.step()
            assert models.step(str(kind.rank), ADAM)["grad_norm"] > 0 or update
            same_bits(models, str(kind.rank), engine)


LISTS = [  # prompt, responses, scores; a pair has the best and the worst one
    ((1, 2, 3), [(6, 7), (8, 9, 10), (11,)], (3.0, 2.0, 1.0)),
    ((4, 5), [(12, 13), (14,), (15, 16, 17)], (1.0, 0.5, 0.0)),
]
LABELLED = [((1, 2, 3), [(6, 7)], (1.0,)), ((1, 2, 3), [(8, 9, 10)], (0.0,)), ((4, 5), [(11,)], (1.0,))]


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES.names())
def test_every_preference_loss_has_the_bits_of_whet_preference(models: Models, model_folder: Path, loss: str) -> None:
    """Two updates on the same rows; the reference is the model before the first."""
    of, kind = PREFERENCE_LOSSES[loss].marks["of"], FULL if loss == "dpo" else LORA
    examples = [
        Comparison(prompt, tuple((each, (1,) * len(each)) for each in responses), scores)
        for prompt, responses, scores in (LABELLED if of == "label" else LISTS)
    ]
    engine, batch = of_whet(model_folder, kind), preference_batch(examples, 0, of, 3)
    own = {"ref_log_probs": engine.forward(batch, frozenset({"log_probs"}))["log_probs"]}
    own |= {name: torch.linspace(0.1, 0.5, len(batch)) for name in ("reference_point", "mean_log_ratio")}
    batch = batch.with_columns(**own)
    block = {"pair": 2, "label": 1, "list": 3}[of]
    objective, options = ComparisonObjective(loss, {}, block=block, of=of), {"num_comparisons": len(batch) / block}
    options |= {"list_size": 3.0} if of == "list" else {}
    width, data = batch["input_ids"].shape[1] - batch["response_mask"].shape[1], []
    for row in range(len(batch)):
        real, mask = batch["attention_mask"][row].bool(), batch["response_mask"][row].bool()
        ids, pad = batch["input_ids"][row][real].tolist(), np.zeros(int(real[:width].sum()) - 1, np.float32)
        inputs = {"weights": mask[mask].float(), "ref_log_probs": batch["ref_log_probs"][row][mask]}
        given = {name: np.concatenate([pad, each.numpy()]) for name, each in inputs.items()}
        given |= {name: batch[name][row, None].numpy() for name in ("label", "scores", *own) if batch[name].ndim == 1}
        data.append(datum(ids[:-1], target_tokens=ids[1:], **given))
    models.create("m", kind)
    for update in range(2):
        engine.forward_backward(batch, objective)
        (_, metrics), (_, forward) = (
            result_of(models, "m", data, loss, options, forward_only=each) for each in (False, True)
        )
        expected = objective.function({**batch.columns(), **engine.forward(batch, objective.needs)})[0].sum()
        assert metrics == forward == {"loss:sum": pytest.approx(float(expected) * block / len(batch), rel=1e-5)}
        engine.step()
        assert models.step("m", ADAM)["grad_norm"] > 0 or update
        same_bits(models, "m", engine)


def rows_of(prompts: Sequence[Any], responses: Sequence[Any], columns: dict[str, list[Any]]) -> Batch:
    """[left padding | prompt | response | right padding], as in the loop."""
    p, r = max(map(len, prompts)), max(map(len, responses))
    right = lambda row, dtype: np.pad(np.asarray(row, dtype), (0, r - len(row)))  # noqa: E731
    ids = [[0] * (p - len(a)) + [*a, *b] + [0] * (r - len(b)) for a, b in zip(prompts, responses, strict=True)]
    real = [[0] * (p - len(a)) + [1] * len(a + b) + [0] * (r - len(b)) for a, b in zip(prompts, responses, strict=True)]
    found = {
        name: torch.from_numpy(np.stack([right(row, np.float32) for row in rows])) for name, rows in columns.items()
    }
    mask = torch.tensor(real)
    found |= {"input_ids": torch.tensor(ids), "attention_mask": mask, "position_ids": position_ids(mask)}
    return Batch.of({**found, "response_mask": mask[:, p:]})


def test_work_in_several_passes_has_the_bits_of_sft(models: Models, model_folder: Path) -> None:
    """As long as a pass of the engine has room for the longest row alone, a request is done in three parts."""
    engine = of_whet(model_folder, LORA)
    models.create("m", LORA)
    engine.max_tokens_per_micro_batch = engine_of(models, "m").max_tokens_per_micro_batch = 6
    for _ in range(2):
        engine.forward_backward(to_batch(EXAMPLES, 0), ImitationObjective())
        whole = request("m", as_data(EXAMPLES), "cross_entropy", {"trained_logprobs_only": 1.0})
        assert len([*models.loss(whole)]) == 4  # the last one is the result
        engine.step()
        models.step("m", ADAM)
        same_bits(models, "m", engine)


def test_the_unembedding_is_adapted_where_it_is_asked_for(models: Models, model_folder: Path) -> None:
    """Only its two parts are trained; the gradient equals the one of logits (W + s B A) h by torch's autograd."""
    kind = ModelKind("nano", 4, train_attn=False, train_mlp=False, train_unembed=True)
    models.create("m", kind)
    module = engine_of(models, "m").model
    own = {name: each for name, each in module.named_parameters() if each.requires_grad}
    assert {name.split(".lora_")[0] for name in own} == {"lm_head"} and len(own) == 2
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for _ in range(2):  # B is 0 at first
        for each in own.values():
            each.grad = None
        logits = module(input_ids=tokens).logits[0, :-1].log_softmax(-1)  # by peft's own forward
        loss = -logits[torch.arange(5), tokens[0, 1:]][1:].sum() / 4
        expected = torch.autograd.grad(loss, list(own.values()))
        data = as_data(EXAMPLES[:1])
        [log_probs], metrics = result_of(models, "m", data, "cross_entropy")
        assert metrics["loss:sum"] == pytest.approx(float(loss), rel=1e-5)
        for weight, grad in zip(own.values(), expected, strict=True):
            torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-6)
        models.step("m", ADAM)
    path = "tinker://m/sampler_weights/s"
    saved(models, "m", kind, path)
    [log_probs], _ = result_of(models, "m", data, "cross_entropy", forward_only=True)
    scores = models.scores(models.module("me", path), (1, 2, 3, 4, 5, 6), 0)
    assert scores.log_probs is not None and scores.log_probs[1:] == pytest.approx(log_probs, abs=1e-5)
    base = models.scores(models.module("me", None), (1, 2, 3, 4, 5, 6), 0).log_probs
    assert base is not None and not np.allclose(base[1:], log_probs, atol=1e-3)


def test_chunks_add_up(models: Models) -> None:
    """Two requests before a step are one with all rows, but for the order of a sum."""
    for name in ("whole", "parts"):
        models.create(name, LORA)
    data = as_data(EXAMPLES)
    result_of(models, "whole", data, "cross_entropy")
    for part in (data[:1], data[1:]):
        result_of(models, "parts", part, "cross_entropy")
    whole, parts = (models.step(name, ADAM)["grad_norm"] for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_adapters_share_a_base_and_nothing_else(models: Models) -> None:
    """A model beside others has the bits that it has alone; the base stays as it was, and is in memory once."""
    before = {name: each.clone() for name, each in models.base.named_parameters()}
    models.create("alone", LORA)
    result_of(models, "alone", as_data(EXAMPLES), "cross_entropy")
    models.step("alone", ADAM)
    for name, kind in (("a", LORA), ("b", ModelKind("nano", 2, train_mlp=False)), ("c", FULL)):
        models.create(name, kind)
    for name in ("b", "a", "c"):
        result_of(models, name, as_data(EXAMPLES), "cross_entropy")
    for name in ("c", "a", "b"):
        models.step(name, ADAM)
    same_bits(models, "a", engine_of(models, "alone"))
    assert all(torch.equal(each, before[name]) for name, each in models.base.named_parameters())
    base = {each.data_ptr() for each in models.base.parameters()}
    own = {name: {each.data_ptr() for each in engine_of(models, name).model.parameters()} for name in "abc"}
    assert base < own["a"] and base < own["b"] and not base & own["c"]
    trained = [name for name, each in engine_of(models, "b").model.named_parameters() if each.requires_grad]
    assert trained and all("self_attn" in name for name in trained)


@pytest.mark.parametrize(
    ("parts", "others"), [({}, True), ({"train_attn": False}, False), ({"train_mlp": False}, True)], ids=str
)
def test_experts_belong_to_the_mlp(tmp_path: Path, parts: dict[str, bool], others: bool) -> None:
    """A model beside another has the bits that it has alone; it is sampled with its experts' adapters."""
    folder = init_model(tmp_path / "mixture", "qwen3_moe", "nano", num_layers=1)
    models = Models(Base(str(folder)), "nano", "float32", Store(tmp_path), 512, HOST)
    kind = ModelKind("nano", 2, **parts)
    for name in ("alone", "a", "b"):
        models.create(name, ModelKind("nano", 4) if name == "b" else kind)
        result_of(models, name, as_data(EXAMPLES), "cross_entropy")
        if name != "a":
            models.step(name, ADAM)
    models.step("a", ADAM)
    same_bits(models, "a", engine_of(models, "alone"))
    trained = [name for name, each in engine_of(models, "a").model.named_parameters() if each.requires_grad]
    assert any(".experts." in name for name in trained) == (parts != {"train_mlp": False})
    assert any(".self_attn." in name for name in trained) == others
    merged, base = dict(engine_of(models, "a").named_weights()), dict(models.base.named_parameters())
    assert merged.keys() == base.keys()
    assert {name for name in merged if not torch.equal(merged[name], base[name])} == {
        name
        for name in base
        if (".experts." in name and parts != {"train_mlp": False}) or (re.search(r"\.[qkvo]_proj", name) and others)
    }


def test_shared_experts_have_no_adapter(tmp_path: Path) -> None:
    """peft might adapt the experts in place of these layers, which have the names of experts in files."""
    folder = nano_model(tmp_path / "mixture", "glm4_moe")
    models = Models(Base(str(folder)), "nano", "float32", Store(tmp_path), 512, HOST)
    models.create("a", ModelKind("nano", 2, train_attn=False))
    trained = [name for name, each in engine_of(models, "a").model.named_parameters() if each.requires_grad]
    assert trained and all(".experts." in name for name in trained)


def test_an_adapter_narrows_no_weights_of_others(model_folder: Path, tmp_path: Path) -> None:
    """In bfloat16 the layers below an adapter are narrow for all models from the start, and a full model's never."""
    models = Models(Base(str(model_folder)), "nano", "bfloat16", Store(tmp_path), 512, HOST)
    before = {name: each.dtype for name, each in models.base.named_parameters()}
    models.create("a", LORA)
    models.create("b", FULL)
    assert {name: each.dtype for name, each in models.base.named_parameters()} == before
    assert {each.dtype for each in engine_of(models, "b").model.parameters()} == {torch.float32}


def test_targets_that_are_not_the_next_tokens(models: Models) -> None:
    """With two targets a position, the loss is a weighted sum of their log-probs, which equal the model's over the
    vocabulary."""
    models.create("m", LORA)
    one = [datum([1, 2, 3], target_tokens=[2, 3, 4], weights=np.float32([0.5, 0.0, 2.0]))]
    two = [
        datum(
            [1, 2, 3], target_tokens=[[2, 9], [3, 9], [4, 8]], weights=np.float32([[0.5, 0.0], [0.0, 0.0], [2.0, 0.0]])
        )
    ]
    [plain], metrics = result_of(models, "m", one, "cross_entropy", forward_only=True)
    [pairs], same = result_of(models, "m", two, "cross_entropy", forward_only=True)
    assert pairs.shape == (3, 2) and pairs[:, 0] == pytest.approx(plain, abs=1e-5)
    assert same["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)
    assert metrics["loss:sum"] == pytest.approx(-(0.5 * plain[0] + 2 * plain[2]), rel=1e-5)
    norms = []
    for data in (one, two):
        result_of(models, "m", data, "cross_entropy")
        norms.append(models.step("m", ADAM | {"learning_rate": 0.0})["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@KINDS
def test_a_saved_state_goes_on_to_the_same_bits(models: Models, kind: ModelKind) -> None:
    def step(name: str) -> None:
        result_of(models, name, as_data(EXAMPLES), "cross_entropy")
        models.step(name, ADAM)

    models.create("a", kind)
    step("a")
    path = "tinker://a/weights/one"
    saved(models, "a", kind, path)
    step("a")
    models.load("me", "b", path, optimizer=True)
    step("b")
    same_bits(models, "b", engine_of(models, "a"))
    models.load("me", "c", path, optimizer=False)
    step("c")
    with pytest.raises(AssertionError):
        same_bits(models, "c", engine_of(models, "a"))
    with pytest.raises(RefusedError):
        models.load("you", "d", path, optimizer=True)
    with pytest.raises(RefusedError):
        saved(models, "a", kind, path)
    models.create("e", ModelKind("nano", 1))
    with pytest.raises(EngineError):
        models.load("me", "e", path, optimizer=False)


@KINDS
def test_a_snapshot_stays_as_it_is(models: Models, kind: ModelKind) -> None:
    models.create("a", kind)
    path = "tinker://a/sampler_weights/s"
    result_of(models, "a", as_data(EXAMPLES), "cross_entropy")
    models.step("a", ADAM)
    saved(models, "a", kind, path)
    data = [datum([1, 2, 3, 4], target_tokens=[2, 3, 4, 5])]
    [trained], _ = result_of(models, "a", data, "cross_entropy", forward_only=True)
    result_of(models, "a", as_data(EXAMPLES), "cross_entropy")
    models.step("a", ADAM)
    scores = models.scores(models.module("me", path), (1, 2, 3, 4, 5), 3)
    assert scores.log_probs is not None and np.isnan(scores.log_probs[0])
    assert scores.log_probs[1:] == pytest.approx(trained, abs=1e-5)
    [tokens, values] = zip(*scores.likeliest[2], strict=True)
    assert sorted(values, reverse=True) == [*values] and len(set(tokens)) == 3
    base = models.scores(models.module("me", None), (1, 2, 3, 4, 5), 0).log_probs
    assert base is not None and not np.allclose(base[1:], trained, atol=1e-3)
    models.drop("a")
    assert not models._sampled and not models.here.engines


@pytest.mark.parametrize(
    ("data", "loss", "kind"),
    [
        ([datum([1, 2], target_tokens=[2, 3])], "nonesuch", RegistryError),
        ([datum([1, 2], target_tokens=[2, 3], logprobs=np.float32([-1, -2]))], "ppo", DataError),
        ([datum([1, 99999], target_tokens=[2, 3])], "cross_entropy", DataError),
        ([datum([1, 2], target_tokens=[2, 99999])], "cross_entropy", DataError),
        ([datum([1, 2], target_tokens=[2])], "cross_entropy", DataError),
        ([datum([1, 2])], "cross_entropy", DataError),
        ([datum([], target_tokens=[])], "cross_entropy", DataError),
        ([datum([1] * 600, target_tokens=[1] * 600)], "cross_entropy", DataError),
        ([], "cross_entropy", DataError),
    ],
)
def test_what_cannot_be_trained_on_is_an_error(
    models: Models, data: list[bytes], loss: str, kind: type[Exception]
) -> None:
    models.create("m", LORA)
    with pytest.raises(kind):
        result_of(models, "m", data, loss)
    assert "empty_updates" in models.step("m", ADAM)
