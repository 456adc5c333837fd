# SPDX-License-Identifier: Apache-2.0
"""The suite that every training engine passes, against `single` with padding and one micro-batch.

    python -m pytest -m "slow or not slow" tests/engines/test_conformance.py --engine path/file.py:MyEngine \\
        --engine-options '{"size": 2}'

runs it with an engine of your own; without `--engine` the engines that ship are held to it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from whet.config import TrainConfig
from whet.config.algorithm_checks import EngineUse
from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.config.section import SectionPlace
from whet.devices import HOST
from whet.engines.protocol import Narrows, Spread, TrainEngine, TrainsAdapter
from whet.engines.role import RoleSettings
from whet.registry import ENGINES
from whet.trainers import build
from whet.trainers.objectives import PreferenceObjective, ValueObjective

# A large eps makes AdamW close to plain gradient descent: its steps then show the gradient's size, not only its sign.
OPTIM = OptimConfig(lr=1e-3, eps=1.0, weight_decay=0.0)
WHOLE, PADDED, TIGHT = suite.Variant(True, 10**6), suite.Variant(False, 10**6), suite.Variant(True, 64)
Make = Callable[..., TrainEngine]
ROOT = Path(__file__).parents[2]


def made(
    name: str, options: dict[str, Any], folder: Path, variant: suite.Variant, where: torch.device = HOST, **changes: Any
) -> TrainEngine:
    engine = EngineConfig(name=name, packing=variant.packing, logits_chunk_tokens=16)
    given = {"optim": OPTIM, "max_tokens_per_micro_batch": variant.max_tokens_per_micro_batch, **changes}
    role, entry = RoleSettings(str(folder), engine, "float32", **given), ENGINES[name]
    supplied = {"role": role, "process_group": None, "device": where}
    engine_made: TrainEngine = entry.make(supplied, entry.resolve_options(options, "--engine-options"))
    return engine_made


@pytest.fixture
def reference(model_folder: Path) -> Make:
    return lambda variant=PADDED, **changes: made("single", {}, model_folder, variant, **changes)


@pytest.fixture
def engine(engine_name: str, model_folder: Path, device: torch.device, request: pytest.FixtureRequest) -> Make:
    """Makes the engine under test, on the accelerator where pytest is given --on-device."""
    options = json.loads(request.config.getoption("--engine-options"))
    return lambda variant=WHOLE, **changes: made(engine_name, options, model_folder, variant, device, **changes)


@pytest.mark.parametrize("variant", suite.VARIANTS[1:4])
def test_forward(variant: suite.Variant, reference: Make, engine: Make) -> None:
    suite.check_forward(reference(), engine(variant))


@pytest.mark.parametrize("objective", suite.OBJECTIVES, ids=lambda objective: objective.loss_name)
def test_updates(objective: object, reference: Make, engine: Make) -> None:
    suite.check_update(reference(WHOLE), engine(TIGHT), objective, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("variant", suite.VARIANTS[3:])
def test_updates_under_any_split(variant: suite.Variant, reference: Make, engine: Make) -> None:
    suite.check_update(reference(WHOLE), engine(variant), suite.OBJECTIVES[1])


@pytest.mark.parametrize("objective", suite.OBJECTIVES[:2], ids=lambda objective: objective.loss_name)
def test_gradients_of_parts_add_up(objective: Any, reference: Make, engine: Make) -> None:
    """Calls with parts of a mini-batch and the counts of the whole, then a step; and nothing is left for the next."""
    one, other = reference(WHOLE), engine(TIGHT)
    for step in range(2):
        batch = suite.ragged_batch(seed=step)
        expected = suite.update(one, batch, objective).reduce()
        got = suite.update_in_parts(other, batch, objective).reduce()
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, abs=2e-5, rel=2e-4), name
    assert (suite.weights_of(other) - suite.weights_of(one)).norm() < suite.BOUND * suite.weights_of(one).norm()


@pytest.mark.parametrize("objective", suite.OBJECTIVES[:2], ids=lambda objective: objective.loss_name)
def test_what_an_objective_leaves_out_changes_nothing(objective: Any, reference: Make, engine: Make) -> None:
    """A loss of tokens reads none that is rejected, one of sequences no row of these alone."""
    batch, plain = suite.ragged_batch(), suite.Plain(objective)
    kept = torch.rand(batch["response_mask"].shape, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[5] = False
    batch = batch.with_columns(loss_mask=batch["response_mask"] * kept)
    assert isinstance(objective, Narrows) and not isinstance(plain, Narrows)
    one, other = reference(WHOLE), engine(TIGHT)
    expected = suite.update(one, batch, plain).reduce()  # type: ignore[arg-type]
    assert suite.update(other, batch, objective).reduce() == {
        name: pytest.approx(value, abs=2e-5, rel=2e-4) for name, value in expected.items()
    }
    assert (suite.weights_of(other) - suite.weights_of(one)).norm() < suite.BOUND * suite.weights_of(one).norm()


def test_an_engine_says_how_it_spreads_and_what_it_refuses(engine: Make, train_config: Any, engine_name: str) -> None:
    """On one process a model is whole, and a config that was loaded is not refused."""
    kind, use = (
        type(engine()),
        EngineUse.at(SectionPlace("actor.engine", train_config({"actor.engine.name": engine_name}))),
    )
    assert kind.spread(1, use.options) == Spread()
    assert list(kind.refuses(use)) == list(use.refused()) == []


def test_a_value_model(reference: Make, engine: Make) -> None:
    one, other = (make(TIGHT, is_value_model=True) for make in (reference, engine))
    batch, needs = suite.batch_of(0, 12), frozenset({"values"})
    for each in (one, other):
        suite.update(each, batch, ValueObjective())
    torch.testing.assert_close(other.forward(batch, needs)["values"], one.forward(batch, needs)["values"])
    assert one.whole_module() is other.whole_module() is None


def test_a_reward_model(reference: Make, engine: Make) -> None:
    """From a language model, with the same new head; rows in pairs, of which blocks of two stay together."""
    batch, needs = suite.batch_of(0, 12), frozenset({"scores"})
    batch = batch.with_columns(margin=torch.arange(12).div(2, rounding_mode="floor") / 10)
    one, other = (make(TIGHT, is_reward_model=True) for make in (reference, engine))
    for each in (one, other):
        suite.update(each, batch, PreferenceObjective(0.1))
    expected, got = (each.forward(batch, needs)["scores"] for each in (one, other))
    torch.testing.assert_close(got, expected)
    assert torch.equal(
        expected != 0,
        batch["response_mask"].cumsum(1).where(batch["response_mask"] > 0, 0)
        == batch["response_mask"].sum(1, keepdim=True).clamp(min=1),
    )


def test_without_a_token_that_counts_and_with_an_infinite_loss_nothing_moves(engine: Make) -> None:
    made, batch = engine(TIGHT), suite.ragged_batch()
    before = suite.weights_of(made)
    empty = batch.with_columns(response_mask=torch.zeros_like(batch["response_mask"]))
    assert suite.update(made, empty, suite.OBJECTIVES[0]).reduce() == {"actor/empty_updates": 1.0}
    broken = batch.with_columns(advantages=batch["advantages"] * torch.tensor(float("inf")))
    for times in (1, 2):
        measured = suite.update(made, broken, suite.OBJECTIVES[0]).reduce()
        assert measured["actor/skipped_updates"] == measured["actor/skipped_in_a_row"] == times
    assert torch.equal(suite.weights_of(made), before)
    assert suite.update(made, batch, suite.OBJECTIVES[0]).reduce()["actor/skipped_in_a_row"] == 0


def test_a_saved_state_goes_on_to_the_same_bits(engine: Make, device: torch.device, tmp_path: Path) -> None:
    """On an accelerator sums may come out in another order each time."""
    optim = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2)
    straight, stopped, resumed = (engine(TIGHT, optim=optim, total_steps=4) for _ in range(3))
    for step in range(4):
        suite.update(straight, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    for step in range(2):
        suite.update(stopped, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    stopped.save(tmp_path / "state", {"of": "it"})
    assert resumed.load(tmp_path / "state") == {"of": "it"}
    for step in range(2, 4):
        suite.update(resumed, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    check_bits(suite.weights_of(straight), suite.weights_of(resumed), device)


def check_bits(ours: torch.Tensor, theirs: torch.Tensor, device: torch.device) -> None:
    if device == HOST:
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_off_the_device_and_back_changes_nothing(engine: Make, device: torch.device) -> None:
    stays, moves = engine(TIGHT), engine(TIGHT)
    for step in range(2):
        for each in (stays, moves):
            suite.update(each, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
        moves.offload()
        moves.onload()
    check_bits(suite.weights_of(stays), suite.weights_of(moves), device)


def test_an_adapter(reference: Make, engine: Make) -> None:
    """Updated like the reference's; off, the model is the one that it was put into."""
    batch, needs = suite.ragged_batch(), frozenset({"log_probs"})
    before = reference().forward(batch, needs)["log_probs"]
    one, other = (make(TIGHT, lora=LoraConfig(rank=4)) for make in (reference, engine))
    if not isinstance(other, TrainsAdapter):
        pytest.skip("this engine trains no adapters")
    assert isinstance(one, TrainsAdapter) and other.fingerprint() == one.fingerprint()
    suite.check_update(one, other, suite.OBJECTIVES[1])
    expected = dict(one.adapter_weights())
    assert all(name.startswith("base_model.model.") and name.endswith(".weight") for name in expected)
    found = {name: weight.to(HOST) for name, weight in other.adapter_weights()}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (other.forward(batch, needs)["log_probs"] - before).abs().max() > 1e-6
    with other.adapter_off():
        torch.testing.assert_close(other.forward(batch, needs)["log_probs"], before, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(
    engine_name: str, model_folder: Path, request: pytest.FixtureRequest
) -> None:
    options = json.loads(request.config.getoption("--engine-options"))
    config = EngineConfig(name=engine_name, options=options, logits_chunk_tokens=16)
    group = suite.launched({"actor": suite.settings(model_folder, config)}, 2)["actor"]
    one = suite.launched({"actor": suite.settings(model_folder)}, 1)["actor"]
    steps = range(2)
    objective = suite.OBJECTIVES[2]  # it looks at the objects of every row
    suite.check_records(suite.drive(one, objective, steps), suite.drive(group, objective, steps))
    batch = suite.batch_of(2, 12)  # in parts, one of which has no row for the second rank
    expected, counts = one.update(batch, objective).reduce(), objective.counts(batch.columns())
    for part in suite.parts_of(batch):
        group.forward_backward(part, objective, counts)
    measured = [each.reduce() for each in group.step()]
    assert measured[0] == measured[1] and len(measured[0]) == 4
    assert measured[0] == {name: pytest.approx(expected[name], rel=2e-4) for name in measured[0]}
    ours, theirs = (suite.Record([], {}, each.weights()[0]) for each in (group, one))
    assert ours.distance(theirs) < suite.BOUND
    group.close()


# -- an engine of one's own --------------------------------------------------------------------------------------------

MINE = """
import torch
from whet.engines.single import SingleEngine

class Mine(SingleEngine):
    \"\"\"`single`, and counts its steps.\"\"\"

    def __init__(self, role, process_group=None, device=torch.device("cpu"), *, first: int = 0):
        super().__init__(role, process_group, device)
        self.count = first

    def step(self):
        self.count += 1
        return super().step()
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:Mine"


@pytest.mark.slow
def test_a_users_engine_is_chosen_by_its_path(mine: str, train_config: Any, additions: list[dict[str, str]]) -> None:
    """Metrics and weights equal the ones of the engine that it inherits from; its option comes from the config."""

    def trained(name: str, **options: int) -> tuple[Any, list[dict[str, float]]]:
        engine = {"actor.engine.name": name, "actor.engine.options": options}
        config: TrainConfig = train_config(
            {**engine, "trainer.run_dir": str(Path(mine).parent / f"run_{len(options)}")}
        )
        run = build.build(config, build.scorer_of(config, lambda solution_str, **_: len(solution_str)), additions)
        actor = run.roles["actor"]._transport.workers.by_role["actor"].engine  # type: ignore[attr-defined]
        build.fit(run)
        run.close()
        return actor, run.history

    (ours, history), (_, expected) = trained(mine, first=10), trained("single")
    assert type(ours).__name__ == "Mine" and ours.count == 12
    assert [each["actor/pg_loss"] for each in history] == [each["actor/pg_loss"] for each in expected]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_engine_of_the_examples_passes_the_whole_suite_by_the_documented_command() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^python (-m pytest .*tests/engines/test_conformance.py.*) \\$", page, re.MULTILINE)
    words = shlex.split(line.replace("path/file.py:MyEngine", "examples/extending/training_engine.py:Pulled"))
    command = [sys.executable, *words, "-q", "-p", "no:cacheprovider", "-k", "not users and not documented"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 10, done.stdout


@pytest.mark.slow
def test_a_users_engine_runs_the_suite(mine: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", __file__, f"--engine={mine}", "-k", "bits"]
    done = subprocess.run(
        [*command, '--engine-options={"first": 3}', "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
