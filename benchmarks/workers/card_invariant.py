# SPDX-License-Identifier: Apache-2.0
"""Costs and benefits of `batch_invariant` on this card: the same requests and updates with it and without.

    python -m benchmarks.workers.card_invariant invariant:0.5b [--out FILE]

Prints, and appends to FILE as lines of JSON: tokens a second of sampling and of updates, times the seconds of the plain
way; the share of requests whose tokens and log-probs have the same bits alone and among others; and the largest gap
between log-probs of sampling and of training. Plain numbers come first, in the same process.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.workers import card
from whet import devices
from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.single import SingleEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, generate

TURNS = 3
ALONE = 16  # requests that are sampled alone too


def measure(size: str, report: card.Report, prompts: int = 64, n: int = 8, cache_gib: float = 16.0) -> None:
    """Both ways of one shape."""
    seconds = dict[str, float]()
    for fixed in (False, True):
        trainer, sampler, made = both(size, fixed, prompts, n, cache_gib)
        rates, updates = list[float](), list[float]()
        for turn in range(1 + TURNS):  # the first compiles and records
            taken, done = card.timed(lambda s=sampler, m=made: generate(s, m))
            rates += [taken] if turn else []
        part, kind = f"invariant:{size}", "" if fixed else "plain_"
        gap, batch = compared(trainer, made, done)
        report(part, **{f"{kind}gap_millionths": 1e6 * gap, f"{kind}same_alone": same_alone(sampler, made, done)})
        for turn in range(1 + TURNS):
            taken, _ = card.timed(lambda t=trainer, b=batch: card.step(t, b))
            updates += [taken] if turn else []
        now = {"sample": median(rates), "update": median(updates)}
        tokens = {"sample": sum(len(each.token_ids) for each in done), "update": int(batch["attention_mask"].sum())}
        for name, taken in now.items():
            found = {f"{kind}{name}_tokens_per_second": tokens[name] / taken}
            report(part, **found, **({f"{name}_times_plain": taken / seconds[name]} if fixed else {}))
        seconds = now
        del trainer, sampler
        gc.collect()
        devices.release(devices.here())


def both(
    size: str, fixed: bool, prompts: int, n: int, cache_gib: float
) -> tuple[SingleEngine, NativeEngine, list[Request]]:
    """A trainer with random float32 weights, a sampler that has copied them, and the requests."""
    plain, made = card.sampler_of(size, prompts, n, cache_gib)
    plain.close()
    role = card.Role("", EngineConfig(), "bfloat16", None, OptimConfig(lr=1e-6), 1.0, batch_invariant=fixed)
    object.__setattr__(role, "size", size)
    trainer = SingleEngine(role, device=devices.here())
    sampler = NativeEngine(torch.bfloat16, len(made), kv_cache_bytes=int(cache_gib * 2**30), batch_invariant=fixed)
    module = trainer.whole_module()
    assert module is not None
    sampler.adopt(module)
    return trainer, sampler, made


def compared(trainer: SingleEngine, made: Sequence[Request], done: Sequence[Completion]) -> tuple[float, Batch]:
    """The largest gap between log-probs, and the batch of the completions; an update reads a quarter of them."""
    batch = batch_of(made, done)
    own = trainer.forward(batch, frozenset({"log_probs"}))["log_probs"]
    gap = ((own - batch["rollout_log_probs"]) * batch["response_mask"]).abs().max()
    return float(gap), batch[list(range(max(1, len(made) // 4)))]


def batch_of(made: Sequence[Request], done: Sequence[Completion]) -> Batch:
    """The rows of completions, prompts on the left."""
    before, after = max(len(each.prompt_ids) for each in made), max(len(each.token_ids) for each in done)
    ids, mask = torch.zeros(2, len(made), before + after, dtype=torch.int64)
    response, log_probs = torch.zeros(len(made), after, dtype=torch.int64), torch.zeros(len(made), after)
    for row, (request, each) in enumerate(zip(made, done, strict=True)):
        real = slice(before - len(request.prompt_ids), before + len(each.token_ids))
        ids[row, real], mask[row, real] = torch.tensor([*request.prompt_ids, *each.token_ids]), 1
        response[row, : len(each.token_ids)] = 1
        log_probs[row, : len(each.token_ids)] = torch.tensor(each.log_probs)
    draw = torch.Generator().manual_seed(0)
    columns: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "rollout_log_probs": log_probs,
        "old_log_probs": log_probs,
        "advantages": torch.randn(response.shape, generator=draw) * response,
    }
    return Batch.of(columns)


def same_alone(sampler: NativeEngine, made: Sequence[Request], done: Sequence[Completion]) -> float:
    """The share of the first requests that have the same bits alone."""
    few = range(min(ALONE, len(made)))
    same = [generate(sampler, [replace(made[row], uid="alone")]) == [done[row]] for row in few]
    return sum(same) / len(few)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", help="invariant:SIZE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for each in options.parts:
        measure(each.partition(":")[2], card.Report(options.out, time.perf_counter()))
