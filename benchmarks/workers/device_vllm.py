# SPDX-License-Identifier: Apache-2.0
"""GRPO with vLLM beside the trainer on one accelerator, which take turns on it, and the same with the native engine:
`FOLDER [--out FILE]`. Weights go to vLLM by handles of the accelerator's memory (weight_transfer=ipc), and vLLM sleeps
while the trainer computes.

vLLM is that of $WHET_VLLM_PYTHON or .venv-vllm, else a folder of packages for this interpreter: $WHET_VLLM_SITE, or
.dev/site-vllm. On a machine without an accelerator a smaller model takes the same way, but for handles and sleep.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.competitor import ROOT
from benchmarks.workers.card_models import add
from whet import devices
from whet.config import TrainConfig, load_config
from whet.errors import ConfigError
from whet.plugins.inference.servers.environment import find_environment
from whet.plugins.inference.vllm.engine import PACKAGE
from whet.plugins.lessons.init_model import init_model
from whet.tracking.tracker import read_records
from whet.trainers.build import train

STEPS = 4  # the first is not counted
PROMPTS, N, TOKENS = 16, 8, 256
ON_HOST = {"size": "nano", "tokens": 32, "dtype": "float32"}
ON_DEVICE = {"size": "base", "tokens": TOKENS, "dtype": "bfloat16"}
GAPS, TIMES = ("mean", "max"), ("step", "rollout", "sync")
WRAPPER = """\
#!/bin/sh
PYTHONPATH="{site}${{PYTHONPATH:+:$PYTHONPATH}}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 exec "{python}" "$@"
"""


def main(folder: Path, out: Path | None = None) -> None:
    """Measures each engine: the medians of the steps but the first, the largest gap of all."""
    logging.basicConfig(level=logging.WARNING)
    folder = folder.absolute()
    python = interpreter(folder)
    found = find_environment(PACKAGE, python)
    print(f"vLLM {found.version}{' in plain mode' if found.other else ''}\n", flush=True)
    shape = ON_HOST if devices.here() == devices.HOST else ON_DEVICE
    init_model(folder / "model", "qwen2.5", str(shape["size"]))
    shared = {"python": python, "weight_transfer": "ipc", "restarts": 0, "kv_cache_bytes": 2**32}
    if shape is ON_HOST:
        shared |= {"kv_cache_bytes": 2**26, "threads": 1}
    for engine, options in (("vllm", shared), ("native", {})):
        run_dir = folder / engine
        trained(folder / "model", run_dir, shape, engine, options)
        numbers = [line for line in read_records(run_dir / "metrics.jsonl") if "correction/abs_mean" in line]
        times = [line for line in read_records(run_dir / "timings.jsonl") if "time/sync" in line][1:]
        figures = {f"{name}_seconds": median(line.get(f"time/{name}", 0.0) for line in times) for name in TIMES}
        gaps = {f"gap_{name}": max(line[f"correction/abs_{name}"] for line in numbers) for name in GAPS}
        add(out, f"train:{engine}", **gaps, **{name: round(each, 3) for name, each in figures.items()})


def interpreter(folder: Path) -> str | None:
    """The interpreter that has vLLM, where it is none that whet finds by itself: a script in `folder`."""
    try:
        find_environment(PACKAGE, None)
    except ConfigError:
        site = Path(os.environ.get("WHET_VLLM_SITE") or ROOT / ".dev" / "site-vllm").absolute()
        if not (site / "vllm").is_dir():
            raise
        script = folder / "python-with-vllm"
        script.write_text(WRAPPER.format(site=site, python=sys.executable))
        script.chmod(0o755)
        return str(script)
    return None


def trained(model: Path, run_dir: Path, shape: Mapping[str, Any], engine: str, options: Mapping[str, Any]) -> None:
    """Trains some steps with an engine that takes turns with the trainer."""
    settings = {
        "model.path": str(model),
        "model.dtype": "bfloat16" if shape is ON_DEVICE else "float32",
        "data.apply_chat_template": False,
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": shape["tokens"],
        "rollout.n": N,
        "rollout.dtype": shape["dtype"],
        "rollout.engine.name": engine,
        "rollout.engine.options": dict(options),
        "rollout.free_cache_engine": True,
        "reward.num_workers": 0,
        "actor.optim.lr": 1e-6,
        "actor.mini_batch_size": PROMPTS // 2,  # two updates a step: the trainer's own log-probs are computed
        "trainer.total_steps": STEPS,
        "trainer.val_freq": -1,
        "trainer.save_freq": 0,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(run_dir),
    }
    config = load_config(TrainConfig, None, settings, given={"reward", "data"}).config
    rows = [{"prompt": f"{number} + {number * 7 % 10} = ", "answer": ""} for number in range(PROMPTS * STEPS)]
    train(config, reward=_sevens, data=rows)


def _sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    main(**vars(parser.parse_args()))
