# SPDX-License-Identifier: Apache-2.0
"""Shows that a run that is killed many times ends with the same bits as one that was never killed.

    python examples/survive_kills.py --kills 20
    python examples/survive_kills.py --kills 5 model.path=MY_MODEL data.train_files=MY.jsonl reward.function=exact_match

The first run is never killed. The second one, the same command with another folder, is killed with SIGKILL at a random
moment of a random phase (rollout, reward, update, validation, save, ...) and started again, `--kills` times; then it
finishes. Weights, optimizer state, metrics.jsonl and all rollouts of the two runs must be equal byte for byte.
Without `model.path` a small model with random weights learns additions. Exit status: 0 if equal, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.trainers.run import Run

KILL = "WHET_EXAMPLE_KILL"  # environment variable: "PHASE TIMES DELAY FILE"; the phase of death is written to FILE
PHASES = ("rollout", "reward", "update", "sync", "validation", "save")
DEADLINE_SECONDS = 3600.0  # of one run
LONGEST_DELAY_SECONDS = 0.1  # after the phase began


def fit(run: Run) -> None:
    """The loop of `whet train`. If the variable is set, the process kills itself soon after a phase began."""
    from whet.phases import watching
    from whet.trainers import rl

    wanted, times, delay, file = os.environ.get(KILL, "none 0 0 none").split()
    now, left = "the start", int(times)

    def die() -> None:
        time.sleep(float(delay))
        Path(file).write_text(now)
        os.kill(os.getpid(), signal.SIGKILL)

    def enter(phase: str) -> None:
        nonlocal now, left
        now = phase
        if phase == wanted:
            left -= 1
            if left == 0:
                threading.Thread(target=die, daemon=True).start()

    plain_save = run.save

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        enter(name.removeprefix("time/"))
        yield
        enter("between phases")

    def save_marked() -> Path:
        enter("save")
        folder = plain_save()
        enter("between phases")
        return folder

    run.save = save_marked  # type: ignore[method-assign]
    with watching(marked):
        rl.fit(run)


def main() -> int:
    """Makes both runs and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, default=Path("runs/survive_kills"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as `whet train` takes them")
    chosen = parser.parse_args()
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    is_own = not any(word.startswith("model.path=") for word in chosen.settings)
    words = [*(own_task(chosen.folder) if is_own else []), *chosen.settings]
    words += [f"trainer.loop={Path(__file__).resolve()}:fit", f"trainer.total_steps={3 * chosen.kills + 5}"]
    words += ["trainer.save_freq=1", "trainer.val_freq=2"]

    straight, killed = chosen.folder / "straight", chosen.folder / "killed"
    print(f"a run of {3 * chosen.kills + 5} steps without a kill", flush=True)
    finish(words, straight, chosen.folder)
    died_in: Counter[str] = Counter()
    draw = random.Random(chosen.seed)
    for number in range(1, chosen.kills + 1):
        phase = kill(words, killed, chosen.folder, draw)
        died_in[phase] += 1
        print(f"kill {number}/{chosen.kills}: in {phase}, {steps_written(killed)} steps written", flush=True)
    finish(words, killed, chosen.folder)

    print(f"killed {chosen.kills} times: " + ", ".join(f"{n} in {phase}" for phase, n in died_in.most_common()))
    different = differences(straight, killed)
    if different:
        print("DIFFERENT: " + ", ".join(different))
        return 1
    files = sum(len(list((killed / name).rglob("*"))) for name in ("checkpoints", "rollouts"))
    print(f"equal byte for byte: metrics.jsonl and {files} files of checkpoints and rollouts")
    return 0


def own_task(folder: Path) -> list[str]:
    """Writes a random model of 0.4 M parameters and a thousand additions.  Returns the settings that name them."""
    from whet.plugins.lessons.init_model import init_model

    init_model(folder / "model", size="nano", alphabet="0123456789+=", num_layers=2, max_position_embeddings=64)
    pairs = [(a, b) for a in range(32) for b in range(32)]
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs]
    (folder / "train.jsonl").write_text("".join(rows[:960]))
    (folder / "held_out.jsonl").write_text("".join(rows[960:]))
    return [
        *(f"model.path={folder / 'model'}", f"data.train_files={folder / 'train.jsonl'}"),
        *(f"data.val_files={folder / 'held_out.jsonl'}", "data.apply_chat_template=false", "data.train_batch_size=8"),
        *("data.max_prompt_length=16", "data.max_response_length=8", "rollout.n=4", "reward.function=exact_match"),
        *("actor.optim.lr=1e-3", "actor.mini_batch_size=4", "actor.epochs=2", "trainer.logger=jsonl"),
    ]


def start(words: list[str], run_dir: Path, folder: Path, kill_at: str = "none 0 0 none") -> int:
    """Runs `whet train` until it ends or is killed.  Returns its exit status."""
    command = [sys.executable, "-m", "whet", "train", *words, f"trainer.run_dir={run_dir}"]
    with (folder / "log").open("ab") as output:
        environment = {**os.environ, KILL: kill_at}
        return subprocess.run(
            command, stdout=output, stderr=output, env=environment, timeout=DEADLINE_SECONDS, check=False
        ).returncode


def finish(words: list[str], run_dir: Path, folder: Path) -> None:
    """Runs `whet train` without a kill.  Raises: SystemExit if it fails."""
    if start(words, run_dir, folder) != 0:
        raise SystemExit(f"the run failed; {folder / 'log'} says why:\n{(folder / 'log').read_text()[-2000:]}")


def kill(words: list[str], run_dir: Path, folder: Path, draw: random.Random) -> str:
    """Starts the run, which kills itself soon after it enters a randomly drawn phase, the first, second or third time.
    Returns the phase in which it died."""
    phase, times = draw.choice(PHASES), draw.randint(1, 3)
    delay = LONGEST_DELAY_SECONDS * draw.random() ** 3  # most phases are over in a few milliseconds
    status = start(words, run_dir, folder, f"{phase} {times} {delay} {folder / 'died_in'}")
    if status != -signal.SIGKILL:
        raise SystemExit(f"the run was to be killed in {phase} and ended with {status}; see {folder / 'log'}")
    return (folder / "died_in").read_text()


def steps_written(run_dir: Path) -> int:
    """Returns the number of lines of metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def differences(one: Path, other: Path) -> list[str]:
    """Returns the files that differ between the runs: weights and optimizers, metrics, rollouts."""

    def contents(run_dir: Path) -> dict[str, Any]:
        names = ["metrics.jsonl", *(str(path.relative_to(run_dir)) for path in run_dir.glob("rollouts/*"))]
        checkpoints = (path for path in run_dir.glob("checkpoints/global_step_*/**/*") if path.is_file())
        names += [str(path.relative_to(run_dir)) for path in checkpoints]
        return {name: (run_dir / name).read_bytes() for name in names}

    first, second = contents(one), contents(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


if __name__ == "__main__":
    sys.exit(main())
