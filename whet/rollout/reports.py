# SPDX-License-Identifier: Apache-2.0
"""Metrics of sampled groups: failures, filter, staleness. Ends a run if too many trajectories fail."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import fmean

from whet.errors import EngineError, RewardError, SandboxError, ToolError, WhetError
from whet.metrics import Metrics
from whet.rollout.flow import HandOut
from whet.types import Failure, FailureSource, Group, Trajectory, trajectories_of

log = logging.getLogger(__name__)
PATIENCE = 3  # bad batches in a row that end the run: a service that worked before may be down for a while
OF_ENVIRONMENT = ("environment", "tool", "sandbox")  # sources that should not fail, whatever the responses are
RECENT = 8  # batches in which more than half of all trajectories must not fail in the environment
ERRORS: dict[FailureSource, type[WhetError]] = {"reward": RewardError, "sandbox": SandboxError, "tool": ToolError}


def count_failures(groups: Sequence[Group], metrics: Metrics, spent: dict[str, float]) -> None:
    """Records failures by source, exceeded deadlines and preemptions. Adds the tokens and cost of judges, also of
    failed calls, to `spent`, and records the sums."""
    trajectories = trajectories_of(groups)
    if preemptions := sum(turn.preemptions for trajectory in trajectories for turn in trajectory.turns):
        metrics.sum("rollout/preemptions", preemptions)
    for trajectory in trajectories:
        for name in [name for name in trajectory.fields if name.startswith("tools/")]:
            metrics.mean(name, trajectory.fields[name])
        if trajectory.failure is not None:
            metrics.sum(f"failures/{trajectory.failure.source}", 1)
            if trajectory.failure.timed_out:
                metrics.sum("failures/timed_out", 1)
        reported = trajectory.parts if trajectory.failure is None else trajectory.failure.parts
        for name, value in reported.items():
            if (kind := name.rpartition("/")[2]) in ("judge_tokens", "judge_cost"):
                spent[kind] = spent.get(kind, 0.0) + value
    for kind, total in spent.items():
        metrics.max(f"reward/{kind}_total", total)


def measure_filter(found: HandOut, metrics: Metrics, *, warns: bool) -> None:
    """Records the groups that the filter read, and the share that it kept. With `warns`, logs a warning for a step
    without a group to train on."""
    kept, dropped = found.kept, found.dropped
    metrics.sum("filter/dropped_groups", len(dropped))
    if found.aborted:
        metrics.sum("filter/aborted_groups", len(found.aborted))
    metrics.mean("filter/kept_fraction", len(kept) / (len(kept) + len(dropped)))
    sampled = [each for each in trajectories_of((*kept, *dropped)) if each.failure is None]
    if sampled:
        metrics.mean("filter/sampled_score", fmean(each.score for each in sampled), len(sampled))
        metrics.mean("filter/sampled_accuracy", fmean(each.accuracy or 0.0 for each in sampled), len(sampled))
    if warns and not kept and not all(each.failure for each in trajectories_of(dropped)):
        log.warning(
            "step %d trains on nothing: algorithm.filter dropped all %d groups, refills included; this is "
            "logged again only after a step that keeps groups",
            *(found.step, len(dropped)),
        )


def measure_staleness(found: HandOut, metrics: Metrics) -> None:
    """Records the age of tokens in versions, and the number of tokens that are not trained on."""
    lags = Counter[int]()  # tokens by the number of versions that they are behind
    for version, count in _versions(trajectories_of(found.kept)):
        lags[found.step - 1 - version] += count
    if lags:
        total = lags.total()
        metrics.mean("staleness/mean", sum(lag * count for lag, count in lags.items()) / total, total)
        metrics.max("staleness/max", max(lags))
        metrics.mean("staleness/stale_fraction", 1 - lags[0] / total, total)
    failed = [each for each in trajectories_of(found.kept) if each.failure]
    metrics.sum("rollout/unused_tokens", sum(count for _, count in _versions(trajectories_of(found.dropped) + failed)))


def _versions(trajectories: Iterable[Trajectory]) -> Iterable[tuple[int, int]]:
    """Yields (version, number of tokens) for each run of tokens with equal versions, in all turns."""
    return (run for trajectory in trajectories for turn in trajectory.turns for run in turn.versions)


class FailureWatch:
    """Reads the scored groups of each step, validation or evaluation, and warns of failed trajectories.

    These groups are a batch, which is bad if all trajectories failed, or more than half in environments, tools or
    sandboxes. Before the first good batch in this process, one bad batch ends the run; afterwards `PATIENCE` in a row
    do, or one if more than half of the trajectories in it and the last `RECENT` batches failed there."""

    def __init__(self) -> None:
        self._left = 1
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)  # failures in the environment, trajectories
        self._warned: set[FailureSource] = set()

    def record(self, groups: Sequence[Group]) -> None:
        """Reads a batch.  Raises: RewardError, SandboxError, ToolError or EngineError, by the source of failures."""
        trajectories = trajectories_of(groups)
        failures = [(each.uid, each.failure) for each in trajectories if each.failure is not None]
        of_environment = [(uid, failure) for uid, failure in failures if failure.source in OF_ENVIRONMENT]
        if trajectories:
            self._recent.append((len(of_environment), len(trajectories)))
        if failures and (len(failures) == len(trajectories) or len(of_environment) > len(trajectories) / 2):
            self._count(failures, of_environment, len(trajectories))
        elif trajectories:
            self._left = PATIENCE
            if failures:
                self._warn(failures, len(trajectories))

    def _warn(self, failures: Sequence[tuple[str, Failure]], total: int) -> None:
        for uid, failure in failures:
            if failure.source not in self._warned:
                self._warned.add(failure.source)
                log.warning(
                    "%d of %d trajectories failed and are not trained on, the first in the %s: %s (trajectory %s; "
                    "warned once; failures/%s counts them, rollouts/ has each)",
                    *(len(failures), total, failure.source, failure.message, uid, failure.source),
                )

    def _count(
        self, failures: Sequence[tuple[str, Failure]], of_environment: Sequence[tuple[str, Failure]], total: int
    ) -> None:
        """Counts a bad batch and warns; raises the error that ends the run at the last bad batch allowed."""
        self._left -= 1
        is_most = len(of_environment) > total / 2
        failed, played = map(sum, zip(*self._recent, strict=True))
        uid, failure = (of_environment if is_most else failures)[0]
        if is_most and len(self._recent) == RECENT and failed > played / 2:
            self._left = 0
            key, expected = f"{failed} of {played} trajectories of the last {RECENT} batches", "at most half"
        elif len(failures) == total:
            key, expected = f"all {total} trajectories", "some to learn from"
        else:
            key, expected = f"{len(of_environment)} of {total} trajectories", "at most half"
        found = f"failed, such as {uid} in the {failure.source}: {failure.message}"
        if self._left == 0:
            change = f"correct the {failure.source}, then start again"
            raise ERRORS.get(failure.source, EngineError)(key, found, expected, change)
        log.warning("%s %s. The run ends after %d more such batches", key, found, self._left)
