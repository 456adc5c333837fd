# SPDX-License-Identifier: Apache-2.0
"""The machine: its capabilities and its description."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.competitor import ROOT
from benchmarks.floors import Machine, Shape
from benchmarks.setting import Setting

TITLE = "The machine"
NOTE = """\
The floors below are computed from these rates. A floor is the least time that a phase can take: its arithmetic at the
rate of the large product, or its memory traffic at the rate of the copy, whichever is longer. Only necessary work is
counted (benchmarks/floors.py). The matrices of this model are small: the last rows have the rates of its own products.
"""
RATES = ("bfloat16_flops", "float32_flops", "bytes_per_second")
ROWS = (64, 128, 4096)  # tokens: two sizes of a decode step, one of a training pass


def run(setting: Setting) -> dict[str, Any]:
    """The rates that the floors of phases are computed from."""
    shape = shape_of(setting.workload.model)
    entry = setting.whet(
        "machine",
        shape=asdict(shape),
        rows=ROWS,
        gemm_size=setting.scale.gemm_size,
        copy_bytes=setting.scale.copy_bytes,
    )
    rounds = setting.take_turns({"machine": entry})["machine"].rounds
    rates = {name: median(turn[name] for turn in rounds) for name in RATES}
    products = {rows: median(turn["product_seconds"][str(rows)] for turn in rounds) for rows in ROWS}
    return {"rates": rates, "product_seconds": products, "shape": asdict(shape), "gemm_size": setting.scale.gemm_size}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    section = results["machine"]
    rates, size = section["rates"], section["gemm_size"]
    lines = [
        "| measured | |",
        "|---|---|",
        f"| product of two {size} x {size} matrices, bfloat16 | {rates['bfloat16_flops'] / 1e12:.2f} TFLOP/s |",
        f"| the same in float32 | {rates['float32_flops'] / 1e12:.3f} TFLOP/s |",
        f"| copy of a large tensor, read and written | {rates['bytes_per_second'] / 1e9:.1f} GB/s |",
    ]
    lines += [
        f"| the model's matrix products alone, bfloat16, {rows} tokens at once | {int(rows) / seconds:,.0f} tokens/s |"
        for rows, seconds in section["product_seconds"].items()
    ]
    return lines


def machine_of(results: Mapping[str, Any]) -> Machine:
    """The rates, for floors."""
    rates = results["machine"]["rates"]
    return Machine(rates["bfloat16_flops"], rates["bytes_per_second"])


def shape_of(model: Path) -> Shape:
    """The shape in a model folder's config."""
    from whet.models.load import load_config

    config = load_config(model).to_dict()
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


def provenance() -> dict[str, Any]:
    """The origin of a section of the results."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "has_changes": bool(_git("status", "--porcelain", "--", ":(glob)whet/**", ":(glob)benchmarks/**/*.py")),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


class OthersClock:
    """How busy others kept the cores since this was made: above a few percent the times are not worth much."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Their share of all cores, stolen time of a virtual machine included."""
        spent = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, spent / ((time.perf_counter() - self._started) * (os.cpu_count() or 1)))


def _busy_seconds() -> float:
    """Seconds that the cores did not idle or wait for a disk, since the machine started."""
    user, nice, system, _idle, _waiting, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split()[1:]
    ticks = sum(map(int, (user, nice, system, irq, softirq, steal)))
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _own_seconds() -> float:
    """Seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    features = {"avx512f", "avx512_bf16", "amx_bf16"} & set(fields.get("flags", "").split())
    return f"{fields.get('model name', platform.machine())} ({', '.join(sorted(features)) or 'no AVX-512'})"
