# SPDX-License-Identifier: Apache-2.0
"""Makes runs.tar.gz and digests.json: runs of commit d55330f7, and how the code of that commit went on with them.

    python -m tests.kept_runs.make        some minutes, in a clone that has the commit; /tmp/whet-kept-runs must be free

The archive was made once and is kept. It stands for folders that users have, so it is not made again when code changes:
a test that fails is mended in whet/. In it:

    models/ data/ user_code.py    the start of the runs; start.py and user_code.py here wrote it
    runs/NAME/                    a run after two steps, with the checkpoint of step 2
    expected/NAME/                metrics, rollouts and tokens of the same run after that commit took two more steps,
                                  and in exported/ the weights that it exported then
    expected/eval/                `whet eval` of a run, by that commit

Every command ran in the folder that the archive unpacks to, with relative paths; a test changes to that folder first.
Paths that whet makes absolute itself (sources of media in rollouts, the base model in the state of an adapter) name a
folder that is not there any more, as in a run that was moved. digests.json has the checksum of each tensor that the
commit exported of the checkpoints of step 2, of `lora` those of its adapter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.revision import CommandError, Revision, check_out, finish
from benchmarks.same_bits import read_weights

COMMIT = "d55330f7"
HERE = Path(__file__).resolve().parent
ARCHIVE, DIGESTS = HERE / "runs.tar.gz", HERE / "digests.json"
KEPT_STEP, LAST_STEP = 2, 4
JOBS = 3
LOGGED = ("metrics.jsonl", "rollouts", "tokens")  # of a run that went on, kept as what is expected
FLOAT32 = ("model.dtype=float32", "trainer.logger=[jsonl]")
RL = (
    *("model.path=models/text", "rollout.dtype=float32", "data.train_files=data/train.jsonl"),
    *("data.apply_chat_template=false", "data.train_batch_size=4", "data.max_prompt_length=16"),
    *("data.max_response_length=8", "rollout.n=4", "reward.function=user_code.py:early_digit"),
    *("reward.num_workers=0", "actor.optim.lr=1e-2", "actor.optim.eps=1e-4", "trainer.val_freq=-1"),
    *("trainer.log_rollouts=1", *FLOAT32),
)
EXAMPLES = (
    "data.apply_chat_template=false",
    "data.max_length=24",
    "data.train_batch_size=8",
    "optim.lr=1e-2",
    *FLOAT32,
)
EVAL = (
    *(
        "eval",
        "model.path=runs/grpo",
        "rollout.dtype=float32",
        "model.dtype=float32",
        "data.val_files=data/train.jsonl",
    ),
    *("data.apply_chat_template=false", "data.max_prompt_length=16", "data.max_response_length=8", "rollout.n=2"),
    *("rollout.temperature=1", "reward.function=user_code.py:early_digit", "reward.num_workers=0"),
)


@dataclass(frozen=True)
class Run:
    """A command of `whet` that trains, without its number of steps and its folder."""

    words: tuple[str, ...]
    is_killed: bool = False  # with SIGKILL after the checkpoint of step 2, of a run that had all four steps to do


RUNS = {
    "grpo": Run(
        (
            *("train", *RL, "algorithm.adv_estimator=grpo", "algorithm.filter.name=dapo", "algorithm.kl.where=loss"),
            *("algorithm.kl.coef=0.1", "data.val_files=data/held_out.jsonl", "trainer.val_freq=1"),
            *("rollout.n=2", "trainer.log_tokens=1"),  # of two responses, both are often right or both wrong
        )
    ),
    "ppo": Run(
        (
            *("train", *RL, "algorithm.adv_estimator=gae", "algorithm.kl.where=reward", "critic.optim.lr=1e-2"),
            *("critic.optim.eps=1e-4", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=100"),
            *("actor.mini_batch_size=2", "critic.epochs=2", "algorithm.shaping.norm_std=running"),
        )
    ),
    "lora": Run(("train", *RL, "algorithm.adv_estimator=grpo", "model.lora.rank=4")),
    "async": Run(
        (
            *("train", *RL, "algorithm.adv_estimator=user_code.py:patient_mean", "rollout.max_staleness=1.5"),
            *("algorithm.correction.weight=importance", "data.max_response_length=64", "trainer.save_freq=2"),
            "cluster.placement={train: {roles: [actor]}, sample: {roles: [rollout]}}",
        ),
        is_killed=True,
    ),
    "tools": Run(
        (
            *("train", *RL, "algorithm.adv_estimator=grpo", "environment.name=calculator", "environment.max_turns=3"),
            *("model.path=models/calls", "rollout.temperature=1.5", "data.max_response_length=40"),
            *("reward.function=user_code.py:even_length", "trainer.log_tokens=1"),
        )
    ),
    "vision": Run(
        (
            *("train", "vlm_quickstart", *RL, "model.path=models/sees", "data.train_files=data/pictures.jsonl"),
            *("data.val_files=[]", "data.max_prompt_length=48", "data.max_response_length=4"),
            *("data.apply_chat_template=true", "actor.optim.schedule=constant", "trainer.log_tokens=1"),
        )
    ),
    "sft": Run(
        (
            *("sft", *EXAMPLES, "model.path=models/text", "data.train_files=data/examples.jsonl", "optim.name=muon"),
            *("data.val_files=data/more_examples.jsonl", "trainer.val_freq=1"),
        )
    ),
    "reward": Run(
        (
            *("train-reward", *EXAMPLES, "model.path=models/text", "data.train_files=data/preferences.jsonl"),
            *("optim.state_dtype=int8", "optim.eps=1e-4", "center_coef=0.01"),
        )
    ),
    "fsdp": Run(
        ("train", *RL, "algorithm.adv_estimator=grpo", "actor.engine.name=fsdp", "cluster.processes=2"),
    ),
}


def run_python(old: Revision, folder: Path, *words: str) -> None:
    """Runs Python on the files of the commit, in `folder`."""
    subprocess.run([sys.executable, *words], cwd=folder, env=old.environment(1), check=True)


def prepare(old: Revision, folder: Path) -> None:
    """Writes into `folder` the inputs of runs: data, the models `text` and `sees`, and `calls`, which was trained to
    call the calculator."""
    shutil.copy(HERE / "user_code.py", folder)
    run_python(old, folder, str(HERE / "start.py"))
    taught = [*EXAMPLES, "model.path=models/text", "data.train_files=data/calls.jsonl", "trainer.total_steps=60"]
    old.whet(["sft", *taught, "trainer.run_dir=taught"], folder)
    old.whet(["export", "taught", "models/calls"], folder)
    shutil.rmtree(folder / "taught")


def make(old: Revision, name: str, folder: Path) -> dict[str, str]:
    """Makes one run in `folder`, keeps it, and lets it go on.  Returns the checksums of the tensors that it exports."""
    run, run_dir, expected = RUNS[name], folder / "runs" / name, folder / "expected" / name
    words = [*run.words, f"trainer.run_dir=runs/{name}"]
    if run.is_killed:
        kill(old.start([*words, f"trainer.total_steps={LAST_STEP}"], folder), run_dir, folder)
    else:
        old.whet([*words, f"trainer.total_steps={KEPT_STEP}"], folder)
    old.whet(["export", f"runs/{name}", f"exports/{name}", *(["--adapter"] if name == "lora" else [])], folder)
    kept = shutil.copytree(run_dir, folder / "kept" / name)
    old.whet([*words, f"trainer.total_steps={LAST_STEP}"], folder)
    old.whet(["export", f"runs/{name}", f"expected/{name}/exported"], folder)
    for each in LOGGED:
        place = run_dir / each
        if place.is_dir():
            shutil.copytree(place, expected / each)
        elif place.exists():
            shutil.copy(place, expected / each)
    for path in (expected / "exported").iterdir():  # config and tokenizer are in the checkpoint
        if path.suffix != ".safetensors":
            path.unlink()
    shutil.rmtree(run_dir)
    kept.rename(run_dir)
    [weights] = (folder / "exports" / name).glob("*.safetensors")
    return dict(read_weights(weights))


def kill(process: subprocess.Popen[bytes], run_dir: Path, folder: Path) -> None:
    """Ends a run with SIGKILL as soon as it has the checkpoint to keep.  Raises: CommandError where it ends before."""
    while not (run_dir / "checkpoints" / f"global_step_{KEPT_STEP}" / "manifest.json").exists():
        if process.poll() is not None:
            finish(process, folder)
            raise CommandError(f"the run ended before it was killed; see {folder / 'log'}")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def pack(folder: Path, names: Sequence[str]) -> None:
    """Writes the archive; equal files give equal bytes."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name.endswith(".lock"):  # has the name of the machine
            return None
        info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
        return info

    with gzip.GzipFile(ARCHIVE, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as files:
        for name in names:
            files.add(folder / name, name, filter=plain)


def main() -> None:
    """Makes the runs that the command line names, by default all, and the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT, help="the commit, or a folder to take in its place")
    chosen = parser.parse_args()
    folder = Path(tempfile.gettempdir(), "whet-kept-runs")  # by a name that says nothing of the machine
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="whet-kept-tree-") as scratch:
        old = check_out(chosen.commit, Path(scratch) / "tree")
        prepare(old, folder)
        with ThreadPoolExecutor(JOBS) as pool:  # a run that is killed needs quiet, and is made alone
            made = {name: pool.submit(make, old, name, folder) for name, run in RUNS.items() if not run.is_killed}
        digests = {name: made[name].result() if name in made else make(old, name, folder) for name in RUNS}
        old.whet([*EVAL, "output=expected/eval"], folder)
        DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
        pack(folder, ["models", "data", "user_code.py", "runs", "expected"])
    shutil.rmtree(folder)
    sys.stdout.write(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
