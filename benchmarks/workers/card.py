# SPDX-License-Identifier: Apache-2.0
"""One card: kernels, sampling and training at the shapes of Qwen2.5, with random weights that are made on the card.

    python -m benchmarks.workers.card kernels sample:0.5b update:0.5b log_probs:0.5b [--out FILE]

Each part prints what it measured, and appends it to FILE as a line of JSON: whoever ends it keeps what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workers.card_models import PROMPTS, VOCABULARY, config_of, workload
from whet import devices
from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.kernels.fused import fuse
from whet.keyed import key
from whet.metrics import Metrics
from whet.models import attention, experts
from whet.models.load import TrainedModel
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate
from whet.trainers.objectives import PolicyObjective

DTYPE = torch.bfloat16  # of sampling and of products in training
PEAK = {"H100": 989e12, "H200": 989e12}  # operations a second in bfloat16, by the vendor
PPO = PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None})
TURNS = 3


def model_of(size: str, dtype: torch.dtype) -> Any:
    """A language model with random weights on the device."""
    config = config_of(size)
    torch.manual_seed(0)
    with torch.device(devices.here()):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention.implementation(config),
            experts_implementation=experts.implementation(),
        )
    fuse(model)
    return model


@dataclass
class Report:
    """Prints, and appends lines to a file."""

    out: Path | None
    start: float
    seconds: dict[str, float] = field(default_factory=dict)  # of updates

    def __call__(self, part: str, **found: Any) -> None:
        found = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
        print(f"[{time.perf_counter() - self.start:6.1f}] {part}: {found}", flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, **found}) + "\n")


def sample(size: str, report: Report, n: int = 8, cache_gib: float = 16.0) -> None:
    """Tokens a second of the native engine, log-probs included: the first turn compiles and records."""
    engine, made = sampler_of(size, PROMPTS.get(size, 64), n, cache_gib)
    wanted, rates, first = sum(each.params.max_new_tokens for each in made), list[float](), 0.0
    for turn in range(1 + TURNS):
        seconds, done = timed(lambda: generate(engine, made))
        assert sum(len(each.token_ids) for each in done) == wanted
        if not turn:
            first = seconds
            report(f"sample:{size}", first_seconds=first)
            continue
        rates.append(wanted / seconds)
        report(
            f"sample:{size}", tokens_per_second=median(rates), turns=turn, first_seconds=first, rows=len(made),
            gib=peak_gib(),
        )  # fmt: skip
    [busy], top = device_busy(lambda: generate(engine, made))
    report(f"sample:{size}", tokens_per_second=median(rates), turns=TURNS, first_seconds=first, busy=busy, top=top)


def sampler_of(size: str, prompts: int, n: int, cache_gib: float) -> tuple[NativeEngine, list[Request]]:
    """The native engine over random weights, and the requests of the work."""
    requests = workload(size, prompts, n)
    made = [
        Request(str(row), prompt, SamplingParams(max_new_tokens=length), key(0, "card", row))
        for row, (prompt, length) in enumerate(requests)
    ]
    engine = NativeEngine(DTYPE, len(requests), kv_cache_bytes=int(cache_gib * 2**30))
    engine.attach(model_of(size, DTYPE), 0, is_own=True)
    return engine, made


def tune(report: Report) -> None:
    """Time of attention over the block table by keys a program, warps and stages."""
    import triton.testing

    from whet.kernels import paged_attention_triton as native

    device = devices.here()
    for rows, heads, kv, dim in ((512, 14, 2, 64), (512, 12, 2, 128)):
        slots, positions = torch.arange(rows, device=device), torch.randint(100, 900, (rows,), device=device)
        tables = torch.randperm(80 * rows, dtype=torch.int32, device=device)[: rows * 64].view(rows, 64)
        keys, values = (torch.randn(kv, 80 * rows + 1, 16, dim, device=device).bfloat16() for _ in range(2))
        new = [torch.randn(rows, many, dim, device=device).bfloat16() for many in (heads, kv, kv)]
        read = float((positions + 1).sum()) * 2 * kv * dim * 2
        for settings in (
            (64, 4, 3, 1024),
            (64, 4, 2, 1024),
            (128, 4, 3, 1024),
            (64, 2, 3, 1024),
            (128, 8, 2, 1024),
            (64, 4, 4, 2048),
            (32, 2, 4, 2048),
            (64, 4, 3, 4096),
        ):
            native.KEYS, native.WARPS, native.STAGES, native.PROGRAMS = settings
            try:
                given = (*new, keys, values, tables, slots, positions, dim**-0.5, 0, 0.0)
                ms = triton.testing.do_bench(partial(native.decode_attention, *given))
                report("tune", dim=dim, settings=settings, ms=ms, gb_per_second=read / ms / 1e6)
            except Exception as error:
                report("tune", dim=dim, settings=settings, failed=str(error)[:80])


def step(engine: SingleEngine, batch: Batch) -> Metrics:
    """Takes an optimizer step of PPO on a mini-batch."""
    metrics = engine.forward_backward(batch, PPO)
    metrics.merge(engine.step())
    return metrics


def update(size: str, report: Report, checkpoint: bool = False, narrow: bool = False, prompts: int = 16) -> None:
    """Tokens a second and MFU (6 N T) of one update over ragged rows; with checkpoints, times the seconds without."""
    name = f"update:{size}{':checkpoints' if checkpoint else ''}{':narrow' if narrow else ''}"
    engine, batch, tokens, parameters = trainer(size, checkpoint, narrow, prompts)
    warm, first = list[float](), 0.0
    for turn in range(1 + TURNS):
        torch.accelerator.reset_peak_memory_stats()
        seconds, metrics = timed(lambda: step(engine, batch))
        if not turn:
            first = seconds
            report(name, first_seconds=first)
            continue
        warm.append(seconds)
        rate = tokens / median(warm)
        found = {"tokens_per_second": rate, "mfu": 6 * parameters * rate / peak(), "turns": turn, "gib": peak_gib()}
        found |= {"first_seconds": first, "grad_norm": float(metrics.reduce()["actor/grad_norm"])}
        if checkpoint and name.removesuffix(":checkpoints") in report.seconds:
            found["times_without"] = median(warm) / report.seconds[name.removesuffix(":checkpoints")]
        report(name, **found)
    report.seconds[name] = median(warm)
    busy, top = device_busy(lambda: step(engine, batch))
    report(name, **found, busy=busy[0], top=top)


def waits(size: str, report: Report) -> None:
    """Places where the host waits for the device within an update and a turn of sampling."""
    engine, batch, *_ = trainer(size, False, False, 16)
    step(engine, batch)
    for line, count in waiting(lambda: step(engine, batch)):
        report(f"waits:{size}:update", count=count, at=line)
    works, seconds = host_share(lambda: step(engine, batch))
    report(f"waits:{size}:update", host_seconds=works, seconds=seconds)
    gc.collect()
    sampler, made = sampler_of(size, 64, 8, 8.0)
    generate(sampler, made)
    for line, count in waiting(lambda: generate(sampler, made)):
        report(f"waits:{size}:sample", count=count, at=line)


def waiting(work: Callable[[], Any]) -> list[tuple[str, int]]:
    """The lines of whet and torch that wait for the device, the most frequent first."""
    import traceback
    import warnings
    from collections import Counter

    found = Counter[str]()

    def note(*_: Any, **__: Any) -> None:
        own = [frame for frame in traceback.extract_stack() if "/whet/" in frame.filename]
        last = own[-1] if own else traceback.extract_stack()[-4]
        found[f"{Path(last.filename).name}:{last.lineno} {last.line}"] += 1

    before, warnings.showwarning = warnings.showwarning, note  # type: ignore[assignment]
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before
    return found.most_common(12)


def host_share(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until the host has sent its last work, but for waits at the end, and seconds in all."""
    devices.synchronize(devices.here())
    start = time.perf_counter()
    work()
    sent = time.perf_counter() - start
    devices.synchronize(devices.here())
    return sent, time.perf_counter() - start


def log_probs(size: str, report: Report, prompts: int = 16) -> None:
    """Tokens a second and MFU (2 N T) of a pass without gradients."""
    engine, batch, tokens, parameters = trainer(size, False, False, prompts, trained=False)
    found = list[float]()
    for turn in range(1 + TURNS):
        seconds, _ = timed(lambda: engine.forward(batch, frozenset({"log_probs"})))
        if turn:
            found.append(seconds)
            rate = tokens / median(found)
            report(f"log_probs:{size}", tokens_per_second=rate, mfu=2 * parameters * rate / peak(), turns=turn)


def trainer(
    size: str, checkpoint: bool, narrow: bool, prompts: int, trained: bool = True
) -> tuple[SingleEngine, Batch, int, int]:
    """An engine, the batch of an update, its tokens, and the model's parameters."""
    rounding = {"weight_rounding": "stochastic", "state_dtype": "int8"} if narrow else {}
    optim = OptimConfig(lr=1e-6, **rounding) if trained else None  # type: ignore[arg-type]
    role = Role(
        "", EngineConfig(), str(DTYPE).removeprefix("torch."), None, optim, 1.0, gradient_checkpointing=checkpoint
    )
    object.__setattr__(role, "size", size)
    engine = SingleEngine(role, device=devices.here())
    rows = workload(size, prompts, 8)
    most_prompt, most = max(len(p) for p, _ in rows), max(length for _, length in rows)
    ids = torch.zeros(len(rows), most_prompt + most, dtype=torch.int64)
    mask, response = torch.zeros_like(ids), torch.zeros(len(rows), most, dtype=torch.int64)
    draw = torch.Generator().manual_seed(0)
    for row, (prompt, length) in enumerate(rows):
        ids[row, most_prompt - len(prompt) : most_prompt] = torch.tensor(prompt)
        ids[row, most_prompt : most_prompt + length] = torch.randint(10, 500, (length,), generator=draw)
        mask[row, most_prompt - len(prompt) : most_prompt + length] = 1
        response[row, :length] = 1
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "advantages": torch.randn(response.shape, generator=draw) * response,
        "old_log_probs": torch.full(response.shape, -11.9) * response,
    }
    return engine, Batch.of(tensors), int(mask.sum()), sum(p.numel() for p in engine.model.parameters())


class Role(RoleSettings):
    """The settings of a model with random weights."""

    size = "tiny"

    def whole_model(self) -> TrainedModel:
        """The model of a shape, on the device."""
        model: TrainedModel = self._prepared(model_of(self.size, torch.float32))
        return model


def kernels(report: Report) -> None:
    """Errors of the kernels against plain torch in float32, and their times."""
    import triton.testing

    from whet.kernels import log_probs_triton, paged_attention_triton as native, sampling_triton
    from whet.kernels.log_probs import LogitForm, token_statistics
    from whet.kernels.paged_attention import reference
    from whet.kernels.sampling import SamplingState, uniforms

    device = devices.here()
    for rows, dtype, heads, kv, dim, window, cap in (
        (5, torch.bfloat16, 14, 2, 64, 0, 0.0),
        (300, torch.bfloat16, 12, 2, 128, 0, 0.0),
        (1024, torch.bfloat16, 14, 2, 64, 300, 0.0),
        (7, torch.float32, 8, 8, 96, 0, 30.0),
        (4, torch.bfloat16, 8, 1, 256, 0, 0.0),
    ):
        torch.manual_seed(rows)
        slots, positions = torch.randperm(rows), torch.randint(0, 1200, (rows,))
        blocks = 80 * rows
        tables = torch.randperm(blocks, dtype=torch.int32)[: rows * 76].view(rows, 76)
        keys, values = (torch.randn(kv, blocks + 1, 16, dim).to(dtype) for _ in range(2))
        query, key_, value = (torch.randn(rows, many, dim).to(dtype) for many in (heads, kv, kv))
        given = [x.to(device) for x in (query, key_, value, keys, values, tables, slots, positions)]
        got = native.decode_attention(*given, dim**-0.5, window, cap)
        few = slice(0, 40)
        kept = given[3].float().permute(1, 0, 3, 2), given[4].float().transpose(0, 1)
        wanted = reference(  # type: ignore[call-arg]  # of unpacked lists
            *(x[few].float() for x in given[:3]), *(x.contiguous() for x in kept), given[5], given[6][few].int(),
            given[7][few], dim**-0.5, window, cap,
        )  # fmt: skip
        error = (got[few].float() - wanted).norm() / wanted.norm()
        ms = triton.testing.do_bench(lambda g=given, a=(dim**-0.5, window, cap): native.decode_attention(*g, *a))
        read = float((positions + 1).clamp(max=window or 9999).sum()) * 2 * kv * dim * query.itemsize
        report("kernel:attention", rows=rows, dim=dim, error=float(error), ms=ms, gb_per_second=read / ms / 1e6)
    rows = 512
    logits = (torch.randn(rows, VOCABULARY, device=device) * 3).bfloat16()
    made = [
        Request(
            str(row), (1,), SamplingParams(max_new_tokens=9, temperature=1.0 if row % 5 else 0.0), key(0, "card", row)
        )
        for row in range(rows)
    ]
    state = SamplingState.of(made, VOCABULARY, devices.HOST).to(device)
    counts, newest = torch.arange(rows, device=device), torch.zeros(rows + 1, dtype=torch.int64, device=device)
    results, slots = torch.zeros(2, rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    pick = lambda: sampling_triton.pick(logits, state, slots, counts, newest, results)  # noqa: E731
    pick()
    probs = logits.double().softmax(-1)
    cumulated = probs.cumsum(-1)
    point = uniforms(state.keys, counts).double()[:, None] * cumulated[:, -1:]
    exact = torch.searchsorted(cumulated, point, right=True).squeeze(1).where(~state.greedy, logits.argmax(-1))
    tokens = results[0].long()
    near = (cumulated.gather(1, tokens[:, None]) - point).abs().squeeze(1)
    log_prob = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    other = tokens != exact
    report(
        "kernel:pick",
        different=int(other.sum()),
        farthest=float(near[other].max()) if bool(other.any()) else 0.0,
        log_prob_error=float((log_prob - results[1].view(torch.float32)).abs().max()),
        ms=triton.testing.do_bench(pick),
    )
    hidden, weight = (
        torch.randn(2048, 896, device=device).bfloat16() * 0.5,
        torch.randn(VOCABULARY, 896, device=device) * 0.05,
    )
    targets = torch.randint(0, VOCABULARY, (2048,), device=device)
    wide = [x.clone().float().requires_grad_() for x in (hidden, weight)]
    narrow = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    for name, options in (
        ("plain", {}),
        ("entropy, squares, cap", {"entropy": True, "sum_pi_squared": True, "form": LogitForm(1.0, 30.0)}),
    ):
        results_ = []
        for given in (wide, narrow):
            found = token_statistics(given[0], given[1], None, targets, chunk_tokens=1024, temperature=0.9, **options)  # type: ignore[arg-type]
            loss = found.log_probs.sum() + (found.entropy.sum() if found.entropy is not None else 0)
            grads = torch.autograd.grad(loss, given)
            results_.append([*(x for x in found if x is not None), *grads])
        errors = [float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*results_, strict=True)]
        report("kernel:head", what=name, errors=[f"{each:.1e}" for each in errors])
    products = torch.randn(4096, VOCABULARY, device=device).bfloat16()
    some, zeros = torch.randint(0, VOCABULARY, (4096,), device=device), torch.zeros(4096, device=device)
    report(
        "kernel:head",
        statistics_ms=triton.testing.do_bench(lambda: log_probs_triton.statistics(products, some, 1.0, 0.0, 1.0)),
        gradient_ms=triton.testing.do_bench(
            lambda: log_probs_triton.gradient_(products, some, zeros, zeros, zeros, None, 1.0, 0.0, 1.0)
        ),
    )


def stretches(report: Report) -> None:
    """Attention of packed rows with shared prompts in one call, against plain torch, forward and backward."""
    from whet.kernels.varlen_attention import Stretches, reference, varlen_attention

    device = devices.here()
    for heads, kv, dim, window in ((14, 2, 64, 0), (8, 4, 128, 50), (4, 4, 96, 0)):
        torch.manual_seed(dim)
        own, prefix = torch.tensor([200, 180, 90, 70, 33]), torch.tensor([0, 60, 60, 0, 40])
        index = torch.full((5, 400), -1)
        starts = own.cumsum(0) - own
        for row, source in enumerate((0, 0, 0, 3, 3)):
            ids = [*range(int(starts[source]), int(starts[source] + prefix[row]))]
            ids += range(int(starts[row]), int(starts[row] + own[row]))
            index[row, : len(ids)] = torch.tensor(ids)
        where = Stretches.of(own, prefix, index)
        given = [torch.randn(where.size, many, dim) for many in (heads, kv, kv)]
        layout = where.queries, where.keys, where.source, where.longest_query, where.longest_key, dim**-0.5, window
        leaves = [x.clone().requires_grad_() for x in given]
        wanted, _ = reference(*leaves, *layout)
        weights = torch.randn_like(wanted)
        (wanted * weights).sum().backward()
        there = Stretches(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in vars(where).values()))
        close = [x.to(device).bfloat16().requires_grad_() for x in given]
        got = varlen_attention(*close, there, dim**-0.5, window)  # type: ignore[call-arg]  # of an unpacked list
        (got.float() * weights.to(device)).sum().backward()
        pairs = [(got, wanted), *((a.grad, b.grad) for a, b in zip(close, leaves, strict=True))]
        errors = [float((a.float().cpu() - b).norm() / b.norm()) for a, b in pairs]
        report("kernel:stretches", dim=dim, window=window, errors=[f"{each:.1e}" for each in errors])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, the device's work included, and its result."""
    devices.synchronize(devices.here())
    start = time.perf_counter()
    result = work()
    devices.synchronize(devices.here())
    return time.perf_counter() - start, result


def device_busy(work: Callable[[], Any]) -> tuple[list[float], list[str]]:
    """The share of a call's time in which the device is busy, and the operators that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds, _ = timed(work)
    events = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in events) / 1e6
    top = [f"{each.self_device_time_total / 1e3:.1f} ms {each.count}x {each.key[:90]}" for each in events[:14]]
    print("\n".join(f"    {line}" for line in top), flush=True)
    return [total / seconds], top


def peak() -> float:
    """Operations a second of the card."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for card, rate in PEAK.items() if card in name), 989e12)


def peak_gib() -> float:
    """The most memory that was allocated."""
    return torch.accelerator.max_memory_allocated() / 2**30 if torch.accelerator.is_available() else 0.0


def main(parts: Sequence[str], out: Path | None) -> None:
    """Runs the parts, of which one that fails does not end the others."""
    report = Report(out, time.perf_counter())
    for part in parts:
        name, size, *rest = [*part.split(":"), "0.5b"] if ":" not in part else part.split(":")
        try:
            if name in ("kernels", "stretches", "tune"):
                {"kernels": kernels, "stretches": stretches, "tune": tune}[name](report)
            elif name == "update":
                update(size, report, "checkpoints" in rest, "narrow" in rest)
            else:
                {"sample": sample, "log_probs": log_probs, "waits": waits}[name](size, report)
        except Exception as error:
            import traceback

            traceback.print_exc()
            report(part, failed=f"{type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        devices.release(devices.here())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    main(options.parts, options.out)
