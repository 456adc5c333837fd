# SPDX-License-Identifier: Apache-2.0
"""Plans a run from its config, and forecasts its memory, disk and time, for `whet plan` and `whet doctor`.

Also logs the first lines of a run."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import yaml

from whet.config.checks import check_context
from whet.config.compose import flatten
from whet.config.schema import RunConfig
from whet.data.load import TRAIN, VAL, load_items
from whet.data.loader import run_steps
from whet.errors import ConfigError, ModelError, WhetError
from whet.models.load import context_length, load_tokenizer
from whet.planning.doctor import Finding
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import free_accelerator, free_disk, stated
from whet.planning.planner import Counts, Planner, Setup
from whet.planning.units import count, duration, plural, size
from whet.plugins.planner.fit import Change, Room, changes, check_fits, rooms
from whet.plugins.planner.memory import Memory, cache_room, has_server, outlines_of, plan_memory, sized
from whet.plugins.planner.outline import Outline
from whet.plugins.planner.speed import Speed, measure, plan_speed, training_flops
from whet.registry import register_part, trainer_of
from whet.rollout.build import with_engine
from whet.tracking.runs import CONFIG, read_steps
from whet.trainers.frame import run_folder

log = logging.getLogger(__name__)
RECENT = 20  # steps of an earlier run
# Keys that the time of a step depends on.
OF_SPEED = re.compile(r"^(model|cluster)\.|engine\.|^rollout\.n$|^data\.(train_batch|max_)|mini_batch|\bepochs$")
SLOW, HOPELESS = 300.0, 3600.0  # seconds of a step
QUICK_SECONDS = 0.02  # to measure each rate at the start of a run


@register_part("planner")
def planner() -> Planner:
    """Returns the planner, which uses outlines of the models of a run, and formulas."""
    return Planner(
        check_fits, introduce, sized, cache_room, lambda each: partial(training_flops, Outline(each)), findings
    )


@dataclass(frozen=True)
class Forecast:
    """The memory, disk and time that a run needs."""

    setup: Setup
    plans: Mapping[str, Memory]  # of one process, by pool
    rooms: tuple[Room, ...]
    changes: tuple[Change, ...]  # settings that reduce memory, if the run does not fit
    run_dir: Path
    free_disk_bytes: int | None  # None on a machine that is not this one
    speed: Speed
    cache_bytes: int | None  # of keys and values, where the accelerator's memory decides it
    counts: Counts | None  # None if the data cannot be read
    measured: Mapping[str, float]  # seconds by phase, of an earlier run in run_dir
    notes: tuple[str, ...]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint on disk."""
        return next(iter(self.plans.values())).checkpoint_bytes

    @property
    def disk_bytes(self) -> int:
        """Peak bytes of all checkpoints on disk: a new one is written before the oldest is deleted."""
        return self.checkpoint_bytes * ((self.setup.config.trainer.save_limit or 1) + 1)

    @property
    def fits(self) -> bool:
        """True if the run fits into every memory, as far as known."""
        return all(room.fits for room in self.rooms)

    @property
    def fits_on_disk(self) -> bool:
        """True if the checkpoints fit onto the disk of run_dir, as far as known."""
        return self.free_disk_bytes is None or self.disk_bytes <= self.free_disk_bytes

    @property
    def estimated_seconds(self) -> Mapping[str, float] | None:
        """Estimated seconds of a step by phase; None on an accelerator, since its speed is unknown."""
        return self.speed.seconds if self.setup.device is None else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: measured by an earlier run in run_dir, else estimated."""
        estimated = self.estimated_seconds
        return self.measured.get("time/step", None if estimated is None else sum(estimated.values()))

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run; None if the data cannot be read, or if the speed is unknown."""
        step, counts = self.step_seconds, self.counts
        if step is None or counts is None:
            return None
        return self.speed.whole(self.setup.config.trainer, counts.steps, step=step)


def forecast_of(config: RunConfig, device_gib: float | None = None, host_gib: float | None = None) -> Forecast:
    """Forecasts a run on this machine. With `device_gib` it assumes accelerators of that size, one for each process;
    with `host_gib`, nodes of that memory.  Raises: ConfigError, ModelError."""
    make_setup, run_dir = trainer_of(config.command).marked("setup"), run_folder(config.trainer)
    if config.model.path is None:
        needs = "a config.json is enough, with the preprocessor_config.json of a model that reads images"
        raise ConfigError("model.path", None, f"a hub name, or a model folder ({needs})", "set it")
    check_context(config, context_length(config.model.path, trust_remote_code=config.model.trust_remote_code))
    lengths, note, media_share = row_lengths(config)
    device, host = stated(device_gib, "an accelerator"), stated(host_gib, "a node")
    config = with_engine(with_dtypes(config, elsewhere=device is not None))
    device = device or free_accelerator(config.cluster)
    setup, notes = replace(make_setup(config, lengths), device=device, host=host, media_share=media_share), [note]
    if not lengths and any(each.encoders is not None for each in outlines_of(setup).values()):
        notes.append("all tokens of prompts are assumed to be tokens of images")
    found = tuple(rooms(setup))
    room = max(found, key=lambda each: each.used)
    advised = list[Change]()
    if not room.fits:
        advised = changes(setup, room, lambda other: replace(make_setup(other, lengths), media_share=media_share))
    measured, response, unlike = _earlier_run(run_dir, config)
    if unlike:
        notes.append(f"times of the earlier run in {run_dir} are not used: its values of {', '.join(unlike)} differ")
    if response is not None:
        notes.append(f"responses have {response:.0f} tokens, as in the last steps of {run_dir}")
    elif config.trains_on == "prompts":
        longest = config.data.max_response_length
        notes.append(f"all responses reach data.max_response_length={longest} tokens: shorter ones need less time")
    counts = None
    if lengths:
        steps = run_steps(config.trainer, len(lengths), config.data.train_batch_size)
        counts = Counts(len(lengths), _num_val(config), steps)
    plans = {name: plan_memory(setup, name) for name in config.cluster.pools}
    disk = free_disk(run_dir) if host is None else None
    speed = plan_speed(setup, response, num_val=0 if counts is None else counts.val)
    for_cache, cache = cache_room(setup), None
    if for_cache is not None and device is not None and device.bytes < sys.maxsize:
        cache = for_cache.bytes(device.bytes)
    return Forecast(setup, plans, found, tuple(advised), run_dir, disk, speed, cache, counts, measured, tuple(notes))


def row_lengths(config: RunConfig) -> tuple[list[int], str, float]:
    """Returns the lengths of prompts or examples in tokens (empty if the data cannot be read), a note about them, and
    the fraction of their tokens in images and videos (1.0 if unknown; for vision models only)."""
    limit = config.data.max_length if config.trains_on == "examples" else config.data.max_prompt_length
    if not config.data.train_files:
        return [], f"data.train_files is empty: the plan assumes {limit} tokens in every row, the limit", 1.0
    try:
        rows = _read(config, TRAIN)
    except (WhetError, OSError) as error:
        note = f"the data cannot be read here ({error}): the plan assumes {limit} tokens in every row, the limit"
        return [], note, 1.0
    lengths, of_media = [tokens for tokens, _ in rows], sum(media for _, media in rows)
    what = "examples" if config.trains_on == "examples" else "prompts"
    note = f"{len(lengths)} {what} of {fmean(lengths):.0f} tokens on average, the longest has {max(lengths)}"
    if of_media:
        note += f"; {of_media / len(lengths):.0f} are of images and videos"
    return lengths, note, of_media / sum(lengths)


def _num_val(config: RunConfig) -> int:
    """Returns the number of validation prompts or examples; 0 without validation, or if the data cannot be read."""
    if not config.data.val_files or config.trainer.val_freq < 0:
        return 0
    try:
        return len(_read(config, VAL)[: config.data.get("val_max_prompts")])
    except (WhetError, OSError):
        return 0


def _read(config: RunConfig, key: str) -> list[tuple[int, int]]:
    """Returns for each prompt or example its number of tokens, and how many of them belong to images and videos."""
    model, seed, where = config.model, config.trainer.seed, config.data.filter if key == TRAIN else None
    tokenizer = load_tokenizer(model.tokenizer_path or str(model.path), trust_remote_code=model.trust_remote_code)
    items = load_items(config.data, tokenizer, key, where=where, seed=seed).items
    media = [sum(each.tokens.count for each in item.media if each.tokens is not None) for item in items]
    return [(item.num_tokens, count) for item, count in zip(items, media, strict=True)]


def _earlier_run(run_dir: Path, config: RunConfig) -> tuple[dict[str, float], float | None, list[str]]:
    """Returns the median seconds by phase, and the mean response length, of the last steps of an earlier run in
    `run_dir`. Both are empty if keys that affect its speed differ; the third value has the names of these keys."""
    try:
        before = dict(flatten(yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))))
        steps = read_steps(run_dir)[-RECENT:]
    except (WhetError, OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):  # none, or damaged
        return {}, None, []
    now = flatten(config.model_dump(mode="json"))
    if unlike := [key for key, value in now if OF_SPEED.search(key) and before.get(key) != value]:
        return {}, None, unlike
    found: dict[str, list[float]] = {}
    for name, value in ((name, value) for step in steps for name, value in step.items() if not math.isnan(value)):
        found.setdefault(name, []).append(value)
    responses = found.get("response_length/mean")
    seconds = {name: median(values) for name, values in sorted(found.items()) if name.startswith("time/")}
    return seconds, fmean(responses) if responses else None, []


def introduce(setup: Setup, counts: Counts) -> None:
    """Logs the first lines of a run: its models, its data and its estimated time."""
    setup = replace(setup, device=free_accelerator(setup.config.cluster))
    try:
        lines = [*model_lines(setup), data_line(setup, counts)]
        if setup.device is None and not has_server(setup.config):  # the speed of others is not measured
            speed = plan_speed(setup, rates=measure(setup, QUICK_SECONDS), num_val=counts.val)
            seconds = speed.whole(setup.config.trainer, counts.likely or counts.steps, counts.first_step)
            longest = "" if setup.config.trains_on == "examples" else " if all responses reach their length limit"
            end = f" to its likely end at step {counts.likely}" if counts.likely else ""
            lines.append(f"estimated total time: {duration(seconds)}{end}{longest} (accurate to a factor of two)")
    except ModelError as error:  # loading the model will raise it again
        log.debug("no estimate: %s", error)
        return
    for line in lines:
        log.info("%s", line)


def model_lines(setup: Setup) -> Iterator[str]:
    """Yields a line for each model: its size, trained fraction, dtype, number of processes and device."""
    config = setup.config
    dtype = "float32" if config.model.dtype == "float32" else f"{config.model.dtype} over float32 weights"
    threads = plural(torch.get_num_threads(), "thread")
    device = f"the CPU with {threads}" if setup.device is None else "one accelerator each"
    for role, model in outlines_of(setup).items():
        share = model.trained_share if role in setup.objectives else 0.0
        trained = "not trained" if share == 0 else "all trained" if share == 1 else f"{share:.2%} trained"
        processes = plural(config.cluster.processes_of(role), "process", "processes")
        seen = f" ({count(model.vision_weights)} of the vision tower)" if model.vision_weights else ""
        yield f"{role}: {count(model.num_weights)} parameters{seen}, {trained}, {dtype}, {processes} on {device}"


def data_line(setup: Setup, counts: Counts) -> str:
    """Returns a line with the size of the data and the number of steps."""
    config = setup.config
    what, each = "examples", ""
    if config.trains_on == "prompts":
        what, each = "prompts", f" x {config.rollout.n} responses"
    held_out = f", {counts.val:,} to validate on" if counts.val else ""
    done = f", {counts.first_step} done" if counts.first_step else ""
    most = "at most " if counts.likely else ""
    steps = f"{most}{plural(counts.steps, 'step')} of {config.data.train_batch_size} {what}{each}{done}"
    return f"{counts.train:,} {what} to train on{held_out}; {steps}"


def findings(config: RunConfig) -> Iterator[Finding]:
    """Yields the lines of `whet doctor` about memory, disk and time of a run."""
    try:
        made = forecast_of(config)
    except WhetError as error:
        yield Finding("config", "refused", str(error), is_problem=True)
        return
    for room in made.rooms:
        if room.free is not None:
            found = f"about {size(room.needed)} needed, {size(room.free)} free"
            advice = "" if room.fits else "`whet plan` lists settings that reduce it"
            yield Finding("device" if room.on_device else "memory", found, advice, is_problem=True)
    free = size(made.free_disk_bytes or 0)
    found = f"about {size(made.disk_bytes)} for checkpoints, {free} free in {made.run_dir}"
    advice = "" if made.fits_on_disk else "lower trainer.save_limit, or free disk space"
    yield Finding("disk", found, advice, is_problem=True)
    step = made.step_seconds
    if step is None:
        yield Finding("time", "unknown: the speed of accelerators is not measured")
        return
    whole = "" if made.seconds is None else f", {duration(made.seconds)} in all"
    smaller = "a smaller model, fewer or shorter responses (data.max_response_length), or an accelerator"
    advice = smaller * (step > SLOW)
    yield Finding("time", f"about {duration(step)} a step{whole}", advice, is_problem=step > HOPELESS)
