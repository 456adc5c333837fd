# SPDX-License-Identifier: Apache-2.0
"""Requirements of every training engine, checked against `SingleEngine` with padding and one micro-batch.

In one process `check_forward` and `check_update` take an engine (test_single.py); on several, `launched` starts workers
with any engine through the controller, `drive` trains them, and `check_records` compares that to a run of `single`
(test_fsdp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.controller.dispatch import register
from whet.controller.launch import launch
from whet.controller.worker import Placement, RankLayout, ResourcePool, Worker, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.engines.protocol import Columns, Objective, TrainEngine
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, WorkerError
from whet.metrics import Metrics
from whet.roles.workers import TrainWorker
from whet.trainers.objectives import ImitationObjective, PolicyObjective

BOUND = 1e-5  # relative norm over all weights, float32
STEPS = 20
MOST_ENGINES = 16  # one after the other in the same processes
NEEDS = ("log_probs", "entropy")


@dataclass(frozen=True)
class Variant:
    """The way in which an engine splits its work; it must not change the results."""

    packing: bool
    max_tokens_per_micro_batch: int


VARIANTS = [Variant(True, 10**6), Variant(False, 10**6), Variant(True, 64), Variant(False, 64), Variant(True, 1)]
MakeEngine = Callable[[Variant, OptimConfig], TrainEngine]
BatchAt = Callable[..., Batch]  # of a `seed`


def ragged_batch(rows: int = 12, seed: int = 0) -> Batch:
    """Rows of 3 to 30 tokens with tool text in the middle, three to a prompt; one failed row."""
    draw = torch.Generator().manual_seed(seed)
    prompt, response = 10, 20
    input_ids = torch.randint(3, 40, (rows, prompt + response), generator=draw)
    left = torch.randint(0, prompt - 1, (rows, 1), generator=draw)
    asked = torch.arange(rows) // 3 * 3
    input_ids[:, :prompt], left = input_ids[asked, :prompt], left[asked]
    right = torch.randint(2, response + 1, (rows, 1), generator=draw)
    at = torch.arange(prompt + response)
    attention_mask = ((at >= left) & (at < prompt + right)).long()
    response_mask = attention_mask[:, prompt:].clone()
    response_mask[:, 1] = 0
    response_mask[3] = 0
    log_probs = -torch.rand(rows, response, generator=draw) * response_mask - 3.0 * response_mask
    objects = {
        "names": [f"row {row}" for row in range(rows)],
        "pictures": [("of two",) * (row % 3 == 2) for row in range(rows)],
    }
    return Batch.of(
        {
            "number": torch.arange(rows),
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "old_log_probs": log_probs,
            "ref_log_probs": log_probs * 1.1,
            "rollout_log_probs": log_probs,
            "advantages": torch.randn(rows, response, generator=draw) * response_mask,
        },
        objects,
    )


class Named(PolicyObjective):
    """Looks that objects stay beside the tensors of their row."""

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """The loss."""
        assert list(batch["names"]) == [f"row {number}" for number in batch["number"].tolist()]
        return super().loss(outputs, batch, counts)


@dataclass(frozen=True)
class Plain:
    """An objective with the members of the protocol alone: it narrows no batch."""

    of: Objective

    def __getattr__(self, name: str) -> Any:
        if name == "narrowed":
            raise AttributeError(name)
        return getattr(self.of, name)


OBJECTIVES = [
    PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}),
    PolicyObjective(
        "gspo", {}, aggregation="seq-mean-token-mean", entropy_coef=0.01, kl_form="k3", kl_coef=0.1, temperature=0.8
    ),
    Named("reinforce", {}, aggregation="seq-mean-token-sum-norm", fixed_length=20),
    ImitationObjective(),
]


def update(engine: TrainEngine, batch: Batch, objective: Objective) -> Metrics:
    """Takes one optimizer step on a mini-batch."""
    metrics = engine.forward_backward(batch, objective)
    metrics.merge(engine.step())
    return metrics


def parts_of(batch: Batch) -> list[Batch]:
    """A mini-batch in parts, one of them of a single row."""
    return [batch[start:stop] for start, stop in ((0, 5), (5, 6), (6, len(batch)))]


def update_in_parts(engine: TrainEngine, batch: Batch, objective: Objective) -> Metrics:
    """The step of `update`, by a call for each part with the counts of the whole."""
    counts, metrics = objective.counts(batch.columns()), Metrics()
    for part in parts_of(batch):
        metrics.merge(engine.forward_backward(part, objective, counts))
    metrics.merge(engine.step())
    return metrics


def weights_of(engine: TrainEngine) -> torch.Tensor:
    """All weights end to end, by name."""
    named: Iterator[tuple[str, torch.Tensor]] = engine.named_weights()
    return torch.cat([weight.cpu().clone().flatten() for _, weight in sorted(named, key=lambda pair: pair[0])])


def check_forward(reference: TrainEngine, engine: TrainEngine, batch_at: BatchAt = ragged_batch) -> None:
    """Log-probs and entropy, whatever the micro-batches."""
    batch, needs = batch_at(), frozenset({"log_probs", "entropy", "sum_pi_squared", "vocab_log_probs"})
    expected, got = reference.forward(batch, needs, 0.9), engine.forward(batch, needs, 0.9)
    assert expected.keys() == got.keys() == needs
    for name in needs:
        torch.testing.assert_close(got[name], expected[name], atol=2e-5, rtol=0)


def check_update(
    reference: TrainEngine,
    engine: TrainEngine,
    objective: object,
    steps: int = 3,
    batch_at: BatchAt = ragged_batch,
) -> None:
    """Loss, gradient norm and weights after a few steps of plain gradient descent-like size."""
    start = weights_of(reference)
    assert torch.equal(start, weights_of(engine))
    for step in range(steps):
        batch = batch_at(seed=step)
        expected = update(reference, batch, objective).reduce()  # type: ignore[arg-type]
        got = update(engine, batch, objective).reduce()  # type: ignore[arg-type]
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(value), atol=2e-5, rtol=2e-4, msg=name)
    moved = (weights_of(reference) - start).norm()
    assert moved > 0
    assert (weights_of(engine) - weights_of(reference)).norm() < BOUND * weights_of(reference).norm()


# -- on several processes, through the controller ---------------------------------------------------------------------


class Probe(TrainWorker):
    """A training worker that shows its weights."""

    @register()
    def weights(self) -> dict[str, torch.Tensor] | None:
        """All of them, by name; from rank 0."""
        named = {name: weight.float().cpu().clone() for name, weight in self.engine.named_weights()}
        return named if self.rank == 0 else None

    @register()
    def gradients(self, batch: Batch) -> dict[str, torch.Tensor] | None:
        """Gradients of a mini-batch, of which each rank takes its rows, whole, by name; from rank 0."""
        engine: Any = self.engine
        rows = batch[list(range(engine.dp_rank, len(batch), engine.dp_size))]
        engine.forward_backward(rows, OBJECTIVES[1])
        named = {name: each.grad for name, each in engine.model.named_parameters() if each.grad is not None}
        whole = {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in named.items()
        }
        everyone: list[Any] = [whole]
        if engine.process_group is not None:  # of stages of a pipeline, each has its own
            everyone = [None] * engine.process_group.size()
            dist.all_gather_object(everyone, whole, group=engine.process_group)
        engine._loss = None
        engine.optimizer.zero_grad(set_to_none=True)
        return {name: grad for each in everyone for name, grad in each.items()} if self.rank == 0 else None

    @register()
    def in_one_call(self) -> None:
        """Attention of all packed rows in one call, as on an accelerator."""
        engine: Any = self.engine
        engine.forward_settings = replace(engine.forward_settings, in_stretches=True)

    @register()
    def held(self) -> int:
        """Numbers of weights that lie in this process between two calls."""
        own = [each.to_local() if isinstance(each, DTensor) else each for each in self.engine.model.parameters()]
        return sum(each.numel() for each in own)

    @register()
    def there_and_back(self) -> None:
        """Off the device and onto it."""
        self.engine.offload()
        self.engine.onload()


class Reused(Probe):
    """A training worker whose process serves one settings after another: a process costs seconds, an engine less."""

    def __init__(self, placement: Placement, settings: RoleSettings) -> None:
        self.placement = placement
        super().__init__(placement, settings)

    @register()
    def become(self, settings: RoleSettings) -> RankLayout | ConfigError:
        """Builds an engine with `settings` in place of the present one.  Returns its layout, or its refusal."""
        vars(self).pop("engine", None)
        try:
            TrainWorker.__init__(self, self.placement, settings)
        except ConfigError as error:
            return error
        return RankLayout(self.dp_rank, self.dp_size, self.is_reporting)


class Pool(Worker):
    """Ranks of which the last two train: the group of a role may be a part of all processes."""

    @register()
    def train(self, settings: RoleSettings, path: str, steps: int) -> dict[str, torch.Tensor] | None:
        """The weights after some steps, saved and loaded in the middle."""
        group = dist.new_group([self.world_size - 2, self.world_size - 1])
        rank = self.rank - (self.world_size - 2)
        if rank < 0:
            return None
        probe, other = (Probe(Placement("actor", rank, 2, group, {}), settings) for _ in range(2))
        for step in range(steps):
            if step == steps // 2:
                probe.save(path)
                other.load(path)
                probe = other
            batch = batch_of(step, 12)
            probe.update(batch[list(range(probe.dp_rank, len(batch), probe.dp_size))], OBJECTIVES[1])
        return probe.weights()


@dataclass(frozen=True)
class Record:
    """The record of a run of some steps."""

    metrics: list[dict[str, float]]  # by step
    outputs: dict[str, torch.Tensor]  # after the last
    weights: dict[str, torch.Tensor]

    def distance(self, other: Record) -> float:
        """Of the weights, relative, by norm over all of them."""
        assert self.weights.keys() == other.weights.keys()
        mine, others = (torch.cat([each.weights[name].flatten() for name in self.weights]) for each in (self, other))
        return float((mine - others).norm() / others.norm())


def settings(folder: Path, engine: EngineConfig | None = None, **changes: Any) -> RoleSettings:
    """Of a role whose steps show the gradient's size: with a large eps AdamW is close to plain gradient descent."""
    given = {
        "model_path": str(folder),
        "engine": engine or EngineConfig(logits_chunk_tokens=16),
        "dtype": "float32",
        "max_tokens_per_micro_batch": 64,
        "optim": OptimConfig(lr=0.5, eps=1.0, weight_decay=0.01, schedule="cosine", warmup_steps=3),
        "grad_clip": 0.5,
        "total_steps": STEPS,
    }
    return RoleSettings(**{**given, **changes})


def launched(roles: Mapping[str, RoleSettings], processes: int, cls: type[Probe] = Probe) -> dict[str, WorkerGroup]:
    """Every role on that many processes of the local backend."""
    specs = [WorkerSpec(role, cls, (each,)) for role, each in roles.items()]
    return launch(specs, ResourcePool(processes), deadline_seconds=480)


def reused(group: WorkerGroup, settings: RoleSettings) -> WorkerGroup:
    """The group with engines of other settings, in the same processes.  Raises: ConfigError if the engine refuses."""
    found: list[Any] = group.become(settings)
    for each in found:
        if isinstance(each, ConfigError):
            raise each
    return WorkerGroup(group.role, Reused, found, group._transport, group._deadline_seconds)


@contextmanager
def reusing() -> Iterator[Callable[[RoleSettings, int], WorkerGroup]]:
    """A function of settings and a number of processes that returns their group. The processes serve some more calls
    with the same number, as the process groups of earlier engines stay open and poll."""
    made: list[WorkerGroup] = []

    def group_of(settings: RoleSettings, processes: int) -> WorkerGroup:
        if made and made[0].world_size == processes and len(made) < MOST_ENGINES:
            with suppress(WorkerError):  # an earlier case failed, and with it its workers
                made.append(reused(made[0], settings))
                return made[-1]
        for group in made[:1]:
            group.close()
        made[:] = [launched({"actor": settings}, processes, Reused)["actor"]]
        return made[0]

    yield group_of
    for group in made[:1]:
        group.close()


@contextmanager
def launched_in_turn(
    processes: Mapping[str, int], launch: Callable[[list[str], int], dict[str, WorkerGroup]], at_once: int = 8
) -> Iterator[Callable[[str], WorkerGroup]]:
    """A function of a role that returns its group. `processes` has the number of each role; some roles after the one
    that is asked for start with it, in the same processes: a process costs seconds, idle process groups poll."""
    made: dict[str, WorkerGroup] = {}

    def close() -> None:
        for group in [*made.values()][:1]:
            group.close()
        made.clear()

    def group_of(role: str) -> WorkerGroup:
        if role not in made:
            close()
            later = [*processes][[*processes].index(role) :]
            made.update(
                launch([each for each in later if processes[each] == processes[role]][:at_once], processes[role])
            )
        return made[role]

    yield group_of
    close()


def drive(
    group: WorkerGroup,
    objective: Objective | None = None,
    steps: range | None = None,
    needs: tuple[str, ...] = NEEDS,
    batch_at: BatchAt = ragged_batch,
) -> Record:
    """Updates on one mini-batch a step, of 3 to 12 rows: some ranks have more micro-batches than others, or no row."""
    objective, metrics = objective or OBJECTIVES[1], []
    for step in steps if steps is not None else range(STEPS):
        rows = (12, 3, 9)[step % 3]
        metrics.append(group.update(batch_of(step, rows, batch_at), objective).reduce())
    outputs = group.forward(batch_at()[:7], needs, 0.9)
    return Record(metrics, outputs, group.weights()[0])


def check_continues(group: WorkerGroup, path: Path, steps: range) -> None:
    """After a saved state is loaded, the same steps give the same bits."""
    group.save(str(path))
    before = drive(group, steps=steps)
    group.load(str(path))
    assert drive(group, steps=steps).distance(before) == 0


def batch_of(step: int, rows: int, batch_at: BatchAt = ragged_batch) -> Batch:
    """The first rows of a ragged batch, with a column that value models read."""
    batch = batch_at(seed=step)[:rows]
    return batch.with_columns(returns=batch["advantages"] + 0.5, values=0.1 * batch["advantages"])


def check_records(
    expected: Record, got: Record, bound: float = BOUND, wider: Mapping[str, float] = MappingProxyType({})
) -> None:
    """The same losses, norms and outputs at every step, and the same weights at the end; `wider` are factors of the
    bound for single metrics."""
    assert [each.keys() for each in expected.metrics] == [each.keys() for each in got.metrics]
    for step, (theirs, ours) in enumerate(zip(expected.metrics, got.metrics, strict=True)):
        for name, value in theirs.items():
            close = abs(ours[name] - value) <= 20 * bound * wider.get(name, 1.0) * max(1.0, abs(value))
            assert close, f"step {step}, {name}: {ours[name]}, expected {value}"
    assert expected.outputs.keys() == got.outputs.keys()
    for name, values in expected.outputs.items():
        assert (got.outputs[name] - values).norm() <= 20 * bound * values.norm(), name
    assert expected.distance(got) <= bound
