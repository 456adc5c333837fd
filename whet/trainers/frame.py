# SPDX-License-Identifier: Apache-2.0
"""The part of a run that all trainers share: folder, signals, trackers and checkpoints."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.checkpoints import checkpoint
from whet.checkpoints.checkpoint import disk_errors
from whet.checkpoints.hub import Uploads
from whet.config.checks import check
from whet.config.schema import Dtype, ExamplesConfig, RunConfig, TrainConfig, TrainerConfig
from whet.controller.worker_group import WorkerGroup
from whet.errors import CheckpointError, ConfigError, DeadlineError, EngineError, LostWorkerError, WhetError
from whet.metrics import Metrics
from whet.models.load import load_config
from whet.phases import phase
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import check_disk
from whet.planning.planner import Counts, Setup, planner
from whet.roles.telemetry import asked_of_trained, recorded, shares_of_peak, use_of_ranks
from whet.tracking.console import COLUMNS, ConsoleColumn, ConsoleTracker
from whet.tracking.profile import SystemMeter, observed
from whet.tracking.runs import write_state
from whet.tracking.service import TrackedRun, open_services
from whet.tracking.tracker import METRIC_FILES, JsonlTracker, Trackers
from whet.trainers.run_dir import STOP, RunDir, noted, open_run_dir
from whet.trainers.stop import Stopped, StopSignals, likely_steps

log = logging.getLogger(__name__)
SAVE_SECONDS = 600.0  # between two checkpoints of trainer.save_freq=auto
OWN_TRACKERS = frozenset({"console", "jsonl"})  # of `trainer.logger`; the others are services
C = TypeVar("C", TrainConfig, ExamplesConfig)
R = TypeVar("R")


@dataclass(kw_only=True, repr=False)
class Frame:
    """Base class of the runs of all trainers. A subclass adds its fields, the methods `state`, `load_state` and
    `check_health`, and a loop for `train`, which makes its steps in a `Schedule`."""

    columns_shown: ClassVar[tuple[ConsoleColumn, ...]] = COLUMNS  # columns of the console's line
    tokens_metric: ClassVar[str] = "perf/total_num_tokens"  # metric with the tokens of the throughput
    default_best_metric: ClassVar[str] = "val/accuracy"

    config: RunConfig
    opened: RunDir
    services: Trackers
    tokenizer: PreTrainedTokenizerBase
    roles: Mapping[str, WorkerGroup]
    total_steps: int
    callbacks: Sequence[Callable[..., None]] = ()
    step: int = 0  # steps done
    score: float | None = None  # trainer.best_metric of the last step, if it was validated
    is_good: bool = True  # the last update was not skipped
    history: list[dict[str, float]] = field(init=False)  # metrics logged so far, each record with its `step`
    meter: SystemMeter = field(default_factory=SystemMeter)
    flops: dict[str, float] = field(default_factory=dict)  # of the step's updates by process, where peaks are known
    first_update_at: float | None = None  # time.time() after the first optimizer step of this process
    saved_at: float | None = None  # time.monotonic() after the last checkpoint, or when the run was resumed

    def __post_init__(self) -> None:
        found, loggers = self.opened.found, self.config.trainer.logger if self.opened.is_taken else []
        first_step = 0 if found is None else checkpoint.step_of(found)
        console = ConsoleTracker(
            self.total_steps,
            first_step=first_step,
            likely_steps=likely_steps(self.callbacks, self.total_steps),
            columns=self.columns_shown,
        )
        self.stays_here = self.config.cluster.stays_here
        self.trackers = Trackers([*([console] if "console" in loggers else []), self.services])  # get metrics and times
        self.metrics_file, self.timings_file = (  # metrics of the algorithm, equal in equal runs; and times
            JsonlTracker(self.run_dir / name) if "jsonl" in loggers else Trackers([]) for name in METRIC_FILES
        )
        self.signals = StopSignals(self.run_dir / STOP)
        repo = self.config.trainer.hub_repo if self.opened.is_taken else None
        self.uploads = Uploads(repo) if repo is not None else None
        self.history = list(self.opened.history)
        model = Path(str(self.config.model.path)).expanduser()  # saving reads it: user code may change the folder
        self._model_path = model.absolute() if model.exists() else str(self.config.model.path)

    def __repr__(self) -> str:
        metric = self.best_metric.removeprefix("-")
        last = next((f", {metric}={each[metric]:.4g}" for each in reversed(self.history) if metric in each), "")
        return f"<{type(self).__name__} in {self.run_dir}, step {self.step} of {self.total_steps}{last}>"

    @property
    def best_metric(self) -> str:
        """The metric that selects the best checkpoint. The prefix - means that lower is better."""
        return self.config.trainer.best_metric or self.default_best_metric

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return self.opened.path

    @property
    def pad_token_id(self) -> int:
        """The token id that pads rows."""
        assert isinstance(self.tokenizer.pad_token_id, int)
        return self.tokenizer.pad_token_id

    @property
    def validates(self) -> bool:
        """Tells whether the run validates on held-out data."""
        return self.config.trainer.val_freq >= 0

    @property
    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """The roles whose models are trained. Checkpoints save them."""
        return {role: group for role, group in self.roles.items() if role in checkpoint.TRAINED_ROLES}

    @property
    def samples_apart(self) -> bool:
        """Tells whether a validation can run at the same time as the training of the next step."""
        return False

    def interruptible(self) -> AbstractContextManager[None]:
        """Marks a block that changes no saved state. A stop request ends the run inside it, with the checkpoint of the
        steps done. Workers in other processes finish their call first, unless no step is done yet."""
        if self.step == 0 or self.stays_here:
            return self.signals.at_once()
        self.signals.here()
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps beside weights and optimizers."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        raise NotImplementedError

    def check_health(self, batch: Batch, metrics: Metrics) -> None:
        """Checks a logged step for signs of failure.  Raises: EngineError if the run cannot continue."""
        raise NotImplementedError

    def start(self) -> None:
        """Resumes from the checkpoint, if there is one. Otherwise starts from the initial weights.

        Raises: CheckpointError if the checkpoint belongs to another model."""
        _freeze_objects()
        folder = self.opened.found
        try:
            if folder is not None:
                with phase("loading the checkpoint"):
                    state = checkpoint.restore(folder, self.saved_roles, self.state())
                self.step = state["step"]
                self.load_state(state)
                self.saved_at = time.monotonic()
                if (before := state.get("metric") or self.best_metric) != self.best_metric:
                    log.warning(
                        "%s was scored by %s, and trainer.best_metric is %s now: the scores are not compared, so the "
                        "best checkpoint will be one that is saved from now on",
                        *(folder, before, self.best_metric),
                    )
        except EngineError as error:
            found = f"does not fit model.path={self.config.model.path}"
            change = "name the model that the checkpoint was trained from, or another checkpoint"
            raise CheckpointError.joined([CheckpointError(str(folder), found, "", change), error]) from error
        except WhetError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found = f"has an unreadable state ({error!r}): it is damaged, or of another version of whet"
            raise CheckpointError(str(folder), found, "", "resume from another one: trainer.resume=PATH") from error
        if self.step >= self.total_steps:
            log.warning(
                "%s is already done: it has %d of %d steps, so nothing is trained; raise trainer.total_steps to go on, "
                "or choose another trainer.run_dir",
                *(self.run_dir, self.step, self.total_steps),
            )

    def train(self, loop: Callable[[Self], None]) -> None:
        """Runs `loop` until it returns or a signal ends it.

        Raises: Stopped, after a checkpoint of the steps done; StorageError if the disk is full."""
        ranks = partial(recorded, self.roles, self.config.cluster)
        watched = observed(self.run_dir, self.config.trainer.profile, lambda: self.step + 1, ranks)
        write_state(self.run_dir, "running", self.total_steps)
        try:
            with disk_errors(self.run_dir), self.signals, watched:
                _freeze_objects()
                loop(self)
            write_state(self.run_dir, "finished", self.total_steps)
        except Stopped as stopped:
            ended = self._stopped_in_order(stopped)
            write_state(self.run_dir, "stopped", self.total_steps)
            raise ended from stopped
        except BaseException as error:
            with suppress(OSError):  # the disk may be full
                write_state(self.run_dir, "failed", self.total_steps, error)
            if (asked := self.signals.asked) is not None and isinstance(error, LostWorkerError | DeadlineError):
                raise Stopped(f"stopped by {asked}; {error}", asked.number) from error  # so that nothing starts again
            raise

    def stop(self) -> None:
        """Ends the run after the current step. Callbacks call this."""
        self.total_steps = self.step

    def is_due(self, every: int) -> bool:
        """Tells whether an action with period `every` follows the step just done. Period 0 means only at the end."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    @property
    def saves_now(self) -> bool:
        """Tells whether `trainer.save_freq` asks for a checkpoint after the step just done."""
        every = self.config.trainer.save_freq
        if every != "auto":
            return self.is_due(every)
        return self.saved_at is None or time.monotonic() - self.saved_at > SAVE_SECONDS or self.is_due(0)

    def count_flops(self) -> None:
        """Asks the ranks for the FLOPs of the step's updates, if the accelerators' peak speeds are known."""
        if self._peak_flops:
            asked = asked_of_trained(self.roles, self.config.cluster, "update_flops")
            self.flops = {name: sum(numbers) for name, numbers in asked.items()}

    def log(self, step: int, metrics: Metrics) -> None:
        """Sends a step's metrics to the trackers."""
        if self.first_update_at is None and step > 0:
            self.first_update_at = time.time()
        numbers, timings = metrics.reduce(), metrics.timings()
        self.history.append({"step": step, **numbers})
        self.score = best_score(numbers, self.best_metric)
        seconds = timings.get("time/step", 0.0)
        if seconds > 0 and self.tokens_metric in numbers:
            timings["perf/throughput"] = numbers[self.tokens_metric] / seconds
        if any(self.flops.values()) and step > 0 and "time/update" in timings:
            timings |= shares_of_peak(self.flops, self._peak_flops, timings["time/update"])
        timings |= self.meter.measure()
        if not self.stays_here:
            timings |= use_of_ranks(self.roles, self.config.cluster)
        self.metrics_file.log(step, numbers)
        self.timings_file.log(step, timings)
        self.trackers.log(step, {**numbers, **timings})

    @property
    def model_config(self) -> Any:
        """The transformers config of the model. Checkpoints keep it for `whet export`."""
        return load_config(self._model_path, trust_remote_code=self.config.model.trust_remote_code)

    @property
    def _weights(self) -> dict[str, str | None]:
        """The model that the run started from, and the dtype of the weights in validation."""
        config, model = self.config, self.config.model
        dtype = (config.rollout.dtype or model.dtype) if config.trains_on == "prompts" else "float32"
        return {"start": None if model.lora.path else str(self._model_path), "dtype": dtype}

    def save(self) -> Path:
        """Writes a checkpoint of this step.  Returns its folder.

        Raises: EngineError if weights are not finite; CheckpointError if the folder cannot be written; ConfigError if
        the first checkpoint does not fit on the disk."""
        if self.saved_at is None:  # other programs may have filled the disk since the start
            check_disk(self.opened.checkpoint_bytes, self.run_dir)
        with phase("save"):
            self._check_weights()
            folder = checkpoint.save(
                self.run_dir,
                self.step,
                roles=self.saved_roles,
                state={**self.state(), **self._weights},
                score=self.score,
                metric=self.best_metric,
                is_good=self.is_good,
                tokenizer=self.tokenizer,
                model_path=self._model_path,
                model_config=self.model_config,
                save_limit=self.config.trainer.save_limit,
                chat=self.config.data.template_options,
            )
        self.saved_at = time.monotonic()
        if self.uploads is not None:
            self.uploads.checkpoint(folder)
            if self.step == self.total_steps:
                self.uploads.model(folder, trust_remote_code=self.config.model.trust_remote_code)
        return folder

    def close(self) -> None:
        """Ends workers and trackers, then unlocks the folder. An error in one part does not keep others open."""
        with ExitStack() as stack:
            stack.callback(self.opened.close)
            stack.callback(gc.unfreeze)
            if self.uploads is not None:
                stack.callback(self.uploads.close)
            for tracker in (self.timings_file, self.metrics_file, self.trackers):
                stack.callback(tracker.close, failed=not isinstance(sys.exception(), Stopped | None))
            for group in self.roles.values():
                stack.callback(group.close)

    @cached_property
    def _peak_flops(self) -> dict[str, float]:
        """The training accelerators' peak speeds by process, in operations a second; empty if one is unknown."""
        asked = asked_of_trained(self.roles, self.config.cluster, "peak_flops")
        return {name: max(each) for name, each in asked.items()} if all(map(all, asked.values())) else {}

    def _check_weights(self) -> None:
        """Raises: EngineError if a weight, or a model output computed with the weights, is NaN or infinite."""
        for role in checkpoint.TRAINED_ROLES:
            if role in self.roles and not all(self.roles[role].has_finite_weights()):
                found = "weights, their squares or outputs are NaN or infinite, so the run stops without saving"
                change = f"lower the learning rate; {checkpoint.last_good(self.run_dir)}"
                raise EngineError(f"{role}, step {self.step}", found, "", change)

    def _stopped_in_order(self, stopped: Stopped) -> Stopped:
        """Saves finished steps that no checkpoint has.  Returns the exception to raise, with advice to resume."""
        again = "the same command" + " with trainer.resume=auto" * (self.config.trainer.resume in checkpoint.AFRESH)
        if self.step == 0:
            why = "before the first step was done: there was nothing to save"
            return Stopped(f"stopped by {stopped} {why}; {again} starts again", stopped.number)
        folder = checkpoint.newest(self.run_dir)
        if folder is None or checkpoint.number(folder) != self.step:
            folder = self.save()
        return Stopped(
            f"stopped by {stopped} after step {self.step}, which {folder} holds; {again} goes on from there",
            stopped.number,
        )


@contextmanager
def opened_for(
    config: RunConfig,
    setup: Callable[[Any, Sequence[int]], Setup],
    lengths: Sequence[int],
    inputs: Mapping[str, str],
    counts: Counts,
    *,
    dry_run: bool = False,
) -> Iterator[tuple[RunDir, Trackers]]:
    """Checks that a run fits the machines, locks its folder, opens the trackers in `trainer.logger` and logs the first
    lines, all before workers start. Closes folder and trackers if the block fails. A dry run only checks the fit.
    `inputs` are digests of code and data.

    Raises: ConfigError, CheckpointError, StorageError."""
    trainer, run_dir = config.trainer, run_folder(config.trainer)
    with disk_errors(run_dir):
        deleted = checkpoint.over_limit(run_dir / "checkpoints", trainer.save_limit)
        reclaimed = sum(file.stat().st_size for folder in deleted for file in folder.rglob("*") if file.is_file())
        needed = planner().check_fits(setup(config, lengths), run_dir, lambda other: setup(other, lengths), reclaimed)
    if dry_run:
        yield RunDir(run_dir), Trackers([])
        return
    with ExitStack() as undo:
        opened = undo.enter_context(closing(open_run_dir(run_dir, config, inputs)))
        # User code may change the working folder.
        opened = replace(opened, path=run_dir.absolute(), checkpoint_bytes=needed)
        tracked = TrackedRun(
            folder=opened.path,
            project=trainer.project_name,
            name=trainer.experiment_name,
            config=config.model_dump(mode="json"),
            steps_done=-1 if opened.found is None else checkpoint.step_of(opened.found),
        )
        names = dict.fromkeys(name for name in trainer.logger if name not in OWN_TRACKERS)
        write_state(opened.path, "running")
        undo.push(lambda kind, error, at: None if error is None else write_state(opened.path, "failed", None, error))
        services = Trackers(open_services(list(names), tracked))
        undo.callback(services.close, failed=True)
        if "console" in trainer.logger:
            planner().introduce(setup(config, lengths), replace(counts, first_step=opened.first_step))
        yield opened, services
        undo.pop_all()


def run_folder(trainer: TrainerConfig) -> Path:
    """The folder that a run writes to."""
    return Path(trainer.run_dir or Path("runs", trainer.project_name, trainer.experiment_name))


def with_restarts(config: C, attempt: Callable[[C], R]) -> R:
    """Calls `attempt` and returns its result. After the loss of a worker it calls `attempt` again, at most
    `trainer.max_restarts` times. Each time the run resumes from the newest checkpoint.

    Raises: the errors of `attempt`; LostWorkerError and DeadlineError once no restart is left."""
    folder = Path.cwd()
    for left in range(config.trainer.max_restarts - 1, -1, -1):
        try:
            return attempt(config)
        except (LostWorkerError, DeadlineError) as error:
            os.chdir(folder)  # user code may have left it
            if (run_folder(config.trainer) / STOP).exists():
                raise
            if config.trainer.resume in checkpoint.AFRESH:  # the folder is this run's own by now
                config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume": "auto"})})
            last = checkpoint.newest(run_folder(config.trainer))
            where = "afresh" if last is None else f"from {last}"
            log.warning("%s; starting again %s (%d more of trainer.max_restarts)", error, where, left)
    return attempt(config)


def _freeze_objects() -> None:
    """Hides the existing objects from the garbage collector, until the run is closed. Otherwise it searches the objects
    of torch and transformers again and again, which takes a tenth of a small model's step."""
    gc.collect()
    gc.freeze()


def with_named_dtypes(config: C) -> C:
    """Replaces each dtype `auto` in the config: by the dtype of the resumed run, else by one that the machines support.

    Raises: ConfigError if another key conflicts with the dtype."""
    resume, own = config.trainer.resume, run_folder(config.trainer)
    folders = [] if resume in checkpoint.AFRESH else [own]
    if resume not in ("auto", *checkpoint.AFRESH):
        folders.insert(0, Path(resume).expanduser().absolute().parents[1])
    named = with_dtypes(config, next(filter(None, map(partial(_dtypes_before, config), folders)), None))
    if named.model.dtype != config.model.dtype:
        check(named, ("reward", "data", "val_data"))  # arguments that a caller may pass as objects were checked before
    return named


def _dtypes_before(config: RunConfig, run: Path) -> dict[str, Dtype]:
    """The dtypes of an earlier run in the folder `run`, by config key; empty if there is no run."""
    with suppress(ConfigError):  # damaged, or of another command: `open_run_dir` says so
        before = noted(run, config)
        return {key: before[key] for key in ("model.dtype", "rollout.dtype") if key in before}
    return {}


def best_score(numbers: Mapping[str, float], metric: str) -> float | None:
    """Returns the value of a metric; None if it is missing. A name with prefix - negates it: higher is better."""
    sign = -1.0 if metric.startswith("-") else 1.0
    value = numbers.get(metric.removeprefix("-"))
    return None if value is None or math.isnan(value) else sign * value
