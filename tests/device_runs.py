# SPDX-License-Identifier: Apache-2.0
"""Functions that tests/test_devices.py runs on the host and on the pretend accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests import pretend_gpu
from whet.config import TrainConfig, load_config
from whet.engines.engine import Engine
from whet.engines.optim import optimizers_of
from whet.planning import doctor
from whet.rollout.native.engine import NativeEngine
from whet.trainers import build

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]


def reward(solution_str: str, ground_truth: str, **_: Any) -> float:
    return sum(ord(each) % 7 for each in solution_str) / 7 + len(ground_truth)


def train(values: dict[str, Any]) -> dict[str, Any]:
    """A run of a few steps: its metrics, responses and weights, and where things lay."""
    config = load_config(TrainConfig, None, values, given={"reward", "data"}).config
    run = build.build(config, build.scorer_of(config, reward), ROWS)
    actor = run.roles["actor"]._transport.workers.by_role["actor"].engine  # type: ignore[attr-defined]
    lies: list[tuple[list[str], list[str], int]] = []  # where weights and optimizer state are, how many gradients

    def note() -> None:
        kept = [state for each in optimizers_of(actor.optimizer) for state in each.state.values()]
        states = [each for state in kept for each in state.values() if each.dim()]
        gradients = sum(each.grad is not None for each in actor.model.parameters())
        lies.append((places(actor.model.parameters()), places(states), gradients))

    offload, onload = actor.offload, actor.onload
    actor.offload = lambda **given: (offload(**given), note())
    actor.onload = lambda: (onload(), note())
    build.fit(run)
    note()
    weights = {name: float(weight.detach().cpu().double().norm()) for name, weight in actor.named_weights()}
    answers = [json.loads(line) for path in sorted((run.run_dir / "rollouts").iterdir()) for line in path.open()]
    timings = [json.loads(line) for line in (run.run_dir / "timings.jsonl").read_text().splitlines()]
    run.close()
    return {
        "metrics": [{k: v for k, v in step.items() if not k.startswith("time/")} for step in run.history],
        "weights": weights,
        "answers": [each["response"] for each in answers],
        "lies": lies,
        "timings": timings,
    }


def suite(arguments: list[str]) -> int:
    """The exit status of a run of pytest on the accelerator."""
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "--on-device", *arguments]))


def doctor_gpus() -> list[tuple[str, str]]:
    """The findings of `whet doctor` about accelerators."""
    return [(each.what, each.found.partition(" (")[0]) for each in doctor._gpus()]


def places(tensors: Iterable[torch.Tensor]) -> list[str]:
    return sorted({str(each.device) for each in tensors})


def train_each(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs on the pretend accelerator, and how often the host waited in each call of these methods."""
    found: dict[str, Any] = {"rules": rules()}
    methods = (
        (Engine, "forward"),
        (Engine, "schedule"),
        (Engine, "forward_backward"),
        (Engine, "step"),
        (NativeEngine, "_step"),
    )
    for name, values in cases.items():
        waits: dict[str, list[int]] = {}
        with ExitStack() as counted:
            for owner, method in methods:
                counted.enter_context(counting(owner, method, waits.setdefault(method, [])))
            found[name] = {**train(values), "waits": waits}
    return found


def rules() -> list[Any]:
    """The operations that the pretend accelerator refuses, and the values that it shows of an unfinished copy."""
    there, host = torch.arange(4.0, device="gpu"), torch.arange(4.0)
    refused = []
    for attempt in (
        lambda: there + host,
        lambda: there.data_ptr(),
        lambda: there.numpy(),
        lambda: there[:2].copy_(there),
    ):
        try:
            attempt()
        except (RuntimeError, TypeError) as error:
            refused.append(type(error).__name__)
    late = (there * 2).to("cpu", non_blocking=True)
    before, counts = late.isnan().all().item(), [pretend_gpu.waits()]
    torch.accelerator.synchronize()
    counts.append(pretend_gpu.waits())
    (there * host[3]).sum().item()  # a number of the host may join
    return [refused, before, late.tolist(), [each - counts[0] for each in [*counts, pretend_gpu.waits()]]]


@contextmanager
def counting(owner: Any, name: str, into: list[int]) -> Iterator[None]:
    """Appends the waits of every call of a method to `into`."""
    plain: Callable[..., Any] = vars(owner)[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        before = pretend_gpu.waits()
        try:
            return plain(*args, **kwargs)
        finally:
            into.append(pretend_gpu.waits() - before)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, plain)
