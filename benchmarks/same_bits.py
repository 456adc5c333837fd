# SPDX-License-Identifier: Apache-2.0
"""Compares two commits bit for bit: small runs on this machine, their metrics, rollouts and final weights.

    python -m benchmarks same_bits --before 63aba1a                     against the files that lie here
    python -m benchmarks same_bits --before 63aba1a --after HEAD --only ppo lora

The commit before makes the start models, and both commits are given them. Each run is a process of `whet train`,
`sft`, `preference` or `distill`; weights are those that `whet export` writes, so the actor's (a critic shows in the
metrics). Exit status: 0 if the runs are equal but for the tables below, 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.competitor import ROOT
from benchmarks.revision import SAME, WORKING_TREE, CommandError, Revision, check_out, finish, write_additions

# Old name -> the name in the commit after. The runs below are written as the commit before spells them.
RENAMED_KEYS: dict[str, str] = {"rollout.name": "rollout.engine.name"}  # config key or section
RENAMED_NAMES: dict[str, str] = {}  # metric, field of a rollout, or weight
# Differences on purpose: a pattern of RUN/KIND/NAME (kind: metrics, rollouts, tokens or weights), and the reason.
EXPECTED: dict[str, str] = {
    "async/metrics/rollout/*_groups": "counted at a moment of the sampling thread",
}

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
STEP_KINDS = ("rollouts", "tokens", "metrics")  # the order in which a step writes them
FOLDERS = ("rollouts", "tokens")
ABSENT = "absent"
NUMBER = "number "
KILL_AFTER_STEPS = 2
REWARDS = '''
import time


def even_length(solution_str, **_):
    """Pays half of the answers of a model that knows nothing."""
    return float(len(solution_str) % 2 == 0)


def slowly(solution_str, ground_truth, **_):
    """Takes a moment, so that a run can be killed between two steps."""
    time.sleep(0.01)
    return float(solution_str.strip() == ground_truth)
'''
# The loop of a run that samples ahead. Which weights sample a token depends on when they come: here they come when
# nothing is left to sample, whatever the machine does besides.
RESTFUL = """
import time

import psutil

from whet.trainers import rl

plain = rl.sample


def used():
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [own, *own.children(recursive=True)])


def sample(run, step, metrics):
    batch = plain(run, step, metrics)
    end, before = time.monotonic() + 300.0, -1.0
    while (now := used()) - before > 0.1 and time.monotonic() < end:
        before = now
        time.sleep(3.0)
    return batch


def fit(run):
    rl.sample = sample
    rl.fit(run)
"""


@dataclass(frozen=True)
class Task:
    """The start models and the data that both commits are given."""

    folder: Path

    @property
    def rl(self) -> tuple[str, ...]:
        """Overrides of every run that learns additions by RL."""
        return (
            *(f"model.path={self.folder}/adds", f"data.train_files={self.folder}/train.jsonl"),
            *(f"data.val_files={self.folder}/held_out.jsonl", "data.train_batch_size=16", "rollout.n=4"),
            *("actor.mini_batch_size=8", "trainer.total_steps=4", "trainer.val_freq=2", "trainer.log_rollouts=1"),
            *("trainer.logger=[jsonl]", *SAME),
        )

    def reward(self, name: str) -> str:
        """The path of a reward function of the task."""
        return f"{self.folder}/rewards.py:{name}"


@dataclass(frozen=True)
class Run:
    """A command of `whet` that is compared, without its run folder."""

    words: tuple[str, ...]
    is_killed: bool = False  # with SIGKILL after some steps, and started again
    needs: Path | None = None  # skipped where this is absent
    is_quick: bool = False  # part of --quick


def runs(task: Task) -> dict[str, Run]:
    """The runs by name, the longest first."""
    rl, folder = task.rl, task.folder
    short = ("trainer.total_steps=6", "trainer.logger=[jsonl]", "trainer.save_freq=0", "model.dtype=float32")
    return {
        "fsdp2": Run(("train", "quickstart_fsdp2", *rl)),
        "two_processes": Run(("train", "quickstart", *rl, "cluster.processes=2"), is_quick=True),
        "split": Run(("train", "quickstart_ppo_split", *rl, "critic.warmup_steps=1")),
        "killed": Run(
            (
                *("train", "quickstart", *rl, "trainer.total_steps=6", "trainer.save_freq=1"),
                f"reward.function={task.reward('slowly')}",
            ),
            is_killed=True,
            is_quick=True,
        ),
        "async": Run(
            (
                *("train", "quickstart_async", *rl, "rollout.max_staleness=1.5", "trainer.total_steps=6"),
                *("trainer.save_freq=1", f"trainer.loop={folder}/restful.py:fit"),
            ),
            is_killed=True,
        ),
        "vision": Run(
            (
                *("train", "vlm_quickstart", f"model.path={folder}/sees", "trainer.total_steps=3"),
                *("data.val_max_prompts=16", "data.train_batch_size=8", "rollout.n=4", "trainer.val_freq=3"),
                *(f"reward.function={task.reward('even_length')}", "trainer.log_rollouts=1", "trainer.log_tokens=1"),
                *("trainer.logger=[jsonl]", *SAME),
            )
        ),
        "gsm8k": Run(
            (
                *("train", "gsm8k", f"model.path={folder}/random", f"data.train_files={GSM8K}/train.jsonl"),
                *(f"data.val_files={GSM8K}/test.jsonl", "data.val_max_prompts=4", "data.train_batch_size=4"),
                *("rollout.n=4", "data.max_prompt_length=1024", "data.max_response_length=32"),
                *(f"reward.function=[gsm8k,{task.reward('even_length')}]", "reward.weights=[1,0.5]"),
                *("actor.optim.lr=1e-3", "trainer.total_steps=3", "trainer.val_freq=3", "trainer.logger=[jsonl]"),
                *SAME,
            ),
            needs=GSM8K,
        ),
        "quickstart": Run(("train", "quickstart", *rl), is_quick=True),
        "ppo": Run(("train", "ppo_quickstart", *rl, "critic.warmup_steps=1", "trainer.log_tokens=2")),
        "cpo": Run(("train", "cpo_quickstart", *rl)),
        "prime": Run(("train", "prime_quickstart", *rl)),
        "remax": Run(("train", "remax_quickstart", *rl)),
        "skywork": Run(("train", "skywork_quickstart", *rl, "rollout.length_stages={0: 2, 2: 5}")),
        "distillation": Run(
            (
                *("train", "quickstart", *rl, "algorithm.adv_estimator=on_policy_distillation"),
                *("algorithm.policy_loss=reinforce", "algorithm.filter.name=null", "actor.optim.name=adamw"),
                "teacher.model_paths={*: " + f"{folder}/calls" + "}",
            )
        ),
        "lora": Run(
            (
                *("train", "quickstart", *rl, "model.lora.rank=4"),
                *("algorithm.kl.where=loss", "algorithm.kl.coef=0.1", "model.dtype=float32"),
            )
        ),
        "hf_rollout": Run(("train", "quickstart", *rl, "rollout.name=hf")),
        "calculator": Run(
            (
                *("train", "quickstart", *rl, f"model.path={folder}/calls", "environment.name=calculator"),
                *("data.apply_chat_template=true", "data.max_prompt_length=64", "data.max_response_length=96"),
                *("algorithm.filter.name=null", f"reward.function={task.reward('even_length')}"),
            )
        ),
        "preference": Run(
            (
                *("preference", "dpo", f"model.path={folder}/adds", f"data.train_files={folder}/pairs.jsonl", *short),
                *(f"data.val_files={folder}/pairs.jsonl", "trainer.val_freq=3", "optim.lr=1e-3"),
            )
        ),
        "distill": Run(
            (
                *("distill", "gkd", f"model.path={folder}/random", f"data.train_files={folder}/examples.jsonl", *short),
                *(f"data.val_files={folder}/examples.jsonl", "trainer.val_freq=3", "optim.lr=1e-3"),
                *("teachers={*: " + f"{folder}/adds" + "}", "max_response_length=8"),
            )
        ),
        "sft": Run(
            (
                *("sft", "quickstart_sft", f"model.path={folder}/random", f"data.train_files={folder}/examples.jsonl"),
                *(*short, "trainer.total_steps=10"),
            ),
            is_quick=True,
        ),
    }


class Place(NamedTuple):
    """The place of one value: values of a step in the order of writing, weights last."""

    step: float
    order: int
    kind: str  # metrics, rollouts, tokens, weights
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.file}{line} {self.name}"


Values = Mapping[Place, str]  # the text of each value, so that numbers are compared as they were written


@dataclass(frozen=True)
class Difference:
    """One value that is not the same in both runs."""

    place: Place
    before: str
    after: str
    reason: str | None  # unset: nothing in EXPECTED speaks of it


@dataclass(frozen=True)
class Comparison:
    """The result for one run."""

    values: int
    weights: int
    differences: Sequence[Difference]
    added: Sequence[str]  # names that only the run after has

    @property
    def is_equal(self) -> bool:
        """Whether every difference has a reason."""
        return all(each.reason is not None for each in self.differences)

    def __str__(self) -> str:
        new = f"; new: {', '.join(self.added)}" if self.added else ""
        counted = f"{self.values:,} values, {self.weights} weights{new}"
        if not self.differences:
            return f"equal      {counted}"
        unexplained = [each for each in self.differences if each.reason is None]
        if not unexplained:
            reasons = sorted({str(each.reason) for each in self.differences})
            return f"expected   {len(self.differences):,} of {counted}: {'; '.join(reasons)}"
        first, names = unexplained[0], sorted({f"{each.place.kind}/{each.place.name}" for each in unexplained})
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return (
            f"DIFFERENT  first at step {first.place.step:g}, {first.place}: {_short(first.before)} before, "
            f"{_short(first.after)} after; {len(unexplained):,} of {counted}; in {shown}"
        )


def compare(
    run: str,
    before: Values,
    after: Values,
    renamed_names: Mapping[str, str] | None = None,
    expected: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares the values of one run on two commits; tables that are not given default to this file's.

    Names that the run before never wrote are listed, not held against the commit; missing ones are differences.
    """
    names = RENAMED_NAMES if renamed_names is None else renamed_names
    reasons = EXPECTED if expected is None else expected
    before = {place._replace(name=names.get(place.name, place.name)): value for place, value in before.items()}
    known = {(place.kind, place.name) for place in before}
    added = sorted({f"{kind}/{name}" for _, _, kind, _, _, name in after if (kind, name) not in known})
    places = sorted(before.keys() | {place for place in after if (place.kind, place.name) in known})
    differences = []
    for place in places:
        pair = before.get(place, ABSENT), after.get(place, ABSENT)
        if pair[0] != pair[1]:
            told = f"{run}/{place.kind}/{place.name}"
            reason = next((why for pattern, why in reasons.items() if fnmatchcase(told, pattern)), None)
            differences.append(Difference(place, *pair, reason))
    weights = sum(place.kind == "weights" for place in before)
    return Comparison(len(before) - weights, weights, differences, added)


def read_values(run_dir: Path, exported: Path) -> dict[Place, str]:
    """Every value of metrics.jsonl, rollouts/ and tokens/ of a run, and every weight of its export."""
    values = dict(_lines("metrics", run_dir / "metrics.jsonl", "metrics.jsonl"))
    for folder in FOLDERS:
        for path in sorted((run_dir / folder).glob("*.jsonl")):
            values.update(_lines(folder, path, f"{folder}/{path.name}"))
    for path in sorted(exported.glob("*.safetensors")):
        for name, told in read_weights(path):
            values[Place(float("inf"), len(STEP_KINDS), "weights", "weights", 0, name)] = told
    return values


def _lines(kind: str, path: Path, file: str) -> Iterator[tuple[Place, str]]:
    """The fields of each line; numbers stay the text that they were written as."""
    order = STEP_KINDS.index(kind) + (len(STEP_KINDS) if path.name.startswith("validation") else 0)
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), start=1):
        record: dict[str, Any] = json.loads(line, parse_float=_number, parse_int=_number, parse_constant=_number)
        step = float(record["step"].removeprefix(NUMBER) if kind == "metrics" else path.stem.rpartition("_")[2])
        for name, value in record.items():
            # each side has a folder of its own, which the paths of media begin with
            told = json.dumps(value, sort_keys=True).replace(str(path.parents[1]), "RUN")
            yield Place(step, order, kind, file, number, name), told


def _number(text: str) -> str:
    """A number as written in the file, distinct from a string of the same characters."""
    return NUMBER + text


def read_weights(path: Path) -> Iterator[tuple[str, str]]:
    """Name of each tensor of a safetensors file, and its type, shape and checksum."""
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            digest = hashlib.sha256(content[8 + length + start : 8 + length + end]).hexdigest()
            yield name, f"{entry['dtype']}{entry['shape']} {digest[:16]}"


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def prepare(revision: Revision, folder: Path) -> None:
    """Makes the start models: `random`; `adds`, which knows a little; `calls`, which asks the calculator; `sees`."""
    write_additions(folder)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "restful.py").write_text(RESTFUL)
    revision.whet(["init-model", str(folder / "random"), "--size", "nano"], folder / "log_random")
    seeing = ("--size", "nano", "--arch", "qwen2.5_vl", "--patch-size", "8")
    revision.whet(["init-model", str(folder / "sees"), *seeing], folder / "log_sees")

    def warm(name: str, examples: str, *words: str) -> None:
        own, run_dir = folder / f"log_{name}", folder / f"run_{name}"
        settings = [f"model.path={folder}/random", f"data.train_files={folder}/{examples}.jsonl"]
        settings += [f"trainer.run_dir={run_dir}", "trainer.logger=[jsonl]", *words]
        revision.whet(["sft", "quickstart_sft", *settings], own)
        revision.whet(["export", str(run_dir), str(folder / name)], own)

    with ThreadPoolExecutor(2) as pool:
        adds = pool.submit(warm, "adds", "examples", "trainer.total_steps=100")
        chat = ("data.apply_chat_template=true", "data.max_length=64", "trainer.total_steps=60")
        calls = pool.submit(warm, "calls", "calls", *chat)
        for each in (adds, calls):
            each.result()


def take(revision: Revision, run: Run, folder: Path) -> dict[Place, str]:
    """Makes a run on one commit, in `folder`, and reads its files.  Raises: CommandError."""
    words = [*run.words, "trainer.run_dir=run"]
    if run.is_killed:
        kill_after_steps(revision, words, folder)
    revision.whet(words, folder)
    revision.whet(["export", "run", "exported"], folder)
    return read_values(folder / "run", folder / "exported")


def kill_after_steps(revision: Revision, words: Sequence[str], folder: Path) -> None:
    """Starts a run and ends it with SIGKILL as soon as the checkpoint of a step is whole: which responses a run that
    samples ahead draws again depends on the step that it goes on from.

    Raises: CommandError where it ends before.
    """
    process = revision.start(words, folder)
    checkpoint = folder / "run" / "checkpoints" / f"global_step_{KILL_AFTER_STEPS}"
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        finish(process, folder)
        raise CommandError(f"the run came to its end before it was killed; see {folder / 'log'}")


def main(words: Sequence[str] | None = None) -> int:
    """Compares the commits that the command line names.  Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks same_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="commit, or a folder with its files")
    parser.add_argument("--after", default=WORKING_TREE, help="commit or folder; by default the working tree")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="these runs alone")
    parser.add_argument("--quick", action="store_true", help="four of the runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time, a thread each")
    parser.add_argument("--folder", type=Path, help="an empty folder to keep all files in; by default none is kept")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="whet-bits-") as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        before = check_out(chosen.before, folder / "tree_before")
        after = check_out(chosen.after, folder / "tree_after", RENAMED_KEYS)
        task, started = Task(folder / "task"), time.monotonic()
        known = runs(task)
        names = chosen.only or [name for name, run in known.items() if run.is_quick or not chosen.quick]
        if unknown := set(names) - known.keys():
            parser.error(f"no run is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        prepare(before, task.folder)
        is_equal = report(before, after, task, names, folder, chosen.jobs)
    verdict, seconds = "equal" if is_equal else "NOT EQUAL", time.monotonic() - started
    print(f"{before.name} against {after.name}: {verdict}, {seconds:.0f} s")
    return 0 if is_equal else 1


def report(before: Revision, after: Revision, task: Task, names: Sequence[str], folder: Path, jobs: int) -> bool:
    """Makes and compares the runs, a line each.  Returns whether all came to an end, equal but for the tables."""
    all_equal, known = True, runs(task)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            (name, side): pool.submit(take, revision, known[name], folder / side / name)
            for name in names
            if (needs := known[name].needs) is None or needs.exists()
            for side, revision in (("before", before), ("after", after))
        }
        for name in names:
            if (name, "before") not in futures:
                print(f"{name:14} skipped    {known[name].needs} is not there", flush=True)
                continue
            try:
                result = compare(name, futures[name, "before"].result(), futures[name, "after"].result())
                all_equal, told = all_equal and result.is_equal, str(result)
            except (
                CommandError,
                OSError,
                ValueError,
                KeyError,
            ) as error:  # it ended badly, or wrote what cannot be read
                all_equal, told = False, f"FAILED     {error}"
            print(f"{name:14} {told}", flush=True)
    return all_equal
