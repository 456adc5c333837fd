# SPDX-License-Identifier: Apache-2.0
"""Whole GRPO steps of whet and of TRL on one card, each in a process of its own, and whet's start.

    python -m benchmarks.workers.card_step FOLDER [--out FILE] [--steps 4] step:0.5b start:cold start:warm

64 prompts x 8 responses of at most 1,024 tokens, random weights, no KL. `step` needs TRL's environment in
WHET_TRL_VENV and has TRL sample with vLLM in its own process where that environment has it, with `generate` else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import trl_environment
from benchmarks.workers.card_models import PROMPTS, SAMPLES, add, folder_of, longest, rows_of, score
from whet.plugins.lessons.init_model import init_model

ROOT = Path(__file__).parents[2]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The reward that TRL is given too."""
    return score(solution_str)


def with_tokenizer(size: str, folder: Path) -> Path:
    """The model of a shape, with a small tokenizer."""
    made = folder / f"{size}_with_tokenizer"
    if not made.exists():
        init_model(made, "qwen2.5", "nano")
        own = json.loads((made / "config.json").read_text())
        (made / "model.safetensors").unlink()
        for file in folder_of(size, folder).iterdir():
            file.rename(made / file.name)
        config = json.loads((made / "config.json").read_text())
        config |= {name: own[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id") if name in own}
        (made / "config.json").write_text(json.dumps(config))
    return made


def overrides(size: str, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """The config of a run of whet."""
    return {
        "model.path": str(model),
        "data.apply_chat_template": False,
        "data.max_prompt_length": 256,
        "data.max_response_length": longest(size),
        "data.train_batch_size": PROMPTS.get(size, 64),
        "data.train_files": [str(folder / "rows.jsonl")],
        "rollout.n": SAMPLES,
        "actor.optim.lr": 1e-6,
        "reward.function": f"{Path(__file__).resolve()}:compute_score",
        "trainer.total_steps": steps,
        "trainer.val_freq": -1,
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
        "trainer.run_dir": str(folder / "run"),
    }


def whet_run(size: str, model: Path, folder: Path, steps: int, caches: Path) -> tuple[float, list[float]]:
    """Seconds of `whet train` from its start to the end of its last step, and of each step."""
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(size) * (steps + 1))
    words = [f"{name}={json.dumps(value)}" for name, value in overrides(size, model, folder, steps).items()]
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    start = time.time()
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "whet", "train", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | compiled, stdout=log, stderr=log)
    metrics, ended = folder / "run" / "timings.jsonl", 0.0
    while not ended:
        if metrics.exists() and len(lines := metrics.read_text().splitlines()) >= steps:
            ended = time.time() - start
        elif process.poll() is not None:
            raise RuntimeError(f"whet train ended with {process.returncode}: {(folder / 'log').read_text()[-1500:]}")
        time.sleep(0.05)
    process.wait(120)
    return ended, [json.loads(line)["time/step"] for line in lines[:steps]]


def trl_steps(size: str, model: Path, folder: Path, steps: int) -> tuple[str, list[float]]:
    """How TRL sampled, and the seconds of its steps."""
    if (python := trl_environment.find()) is None:
        raise RuntimeError("no environment with TRL is here: make .venv-trl/.ready, or name one as WHET_TRL_VENV")
    words = [str(python), "-m", "benchmarks.workers.card_trl", size, str(model), str(folder), str(steps)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}: {done.stderr[-1500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["engine"], found["seconds"]


def main(parts: list[str], folder: Path, out: Path | None, steps: int) -> None:
    """Measures the parts; whet's figures are written before TRL begins."""
    for part in parts:
        name, _, which = part.partition(":")
        if name == "start":
            size = os.environ.get("WHET_CARD_SIZE", "0.5b")
            model = with_tokenizer(size, folder)
            seconds, _ = whet_run(size, model, folder / f"start_{which}", 1, folder / "caches")
            add(out, part, seconds=round(seconds, 1))
            continue
        model = with_tokenizer(which, folder)
        _, own = whet_run(which, model, folder / f"whet_{which}", steps, folder / "caches")
        add(out, part, whet_seconds=round(median(own[1:]), 3))
        engine, theirs = trl_steps(which, model, folder / f"trl_{which}", steps)
        add(
            out,
            part,
            whet_seconds=round(median(own[1:]), 3),
            trl_seconds=round(median(theirs[1:]), 3),
            times_trl=round(median(theirs[1:]) / median(own[1:]), 3),
            trl_engine=engine,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    main(options.parts, options.folder.resolve(), options.out, options.steps)
