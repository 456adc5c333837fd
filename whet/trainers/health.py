# SPDX-License-Identifier: Apache-2.0
"""Health checks of a run: skipped updates, jumps in gradient norm or KL, groups with equal rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from whet.algorithms.statistics import masked_mean
from whet.batch import Batch
from whet.checkpoints.checkpoint import last_good
from whet.errors import EngineError, WeightSyncError
from whet.metrics import Metrics

if TYPE_CHECKING:
    from whet.trainers.run import Run

log = logging.getLogger(__name__)
SKIPPED_IN_A_ROW = 3  # updates, after which a run stops
EQUAL_IN_A_ROW = 3  # steps with equal scores in every group, after which the run warns
REMEMBERED = 20  # most earlier steps to compare with
ENOUGH = 5  # fewest earlier steps to compare with
JUMPED = "step %d: %s is %.3g, over %g times the largest of the steps before (%.3g)%s"
NOTHING_TO_LEARN = (
    "step %d: for %d steps all responses to a prompt had the same reward, for every prompt, so all advantages are 0 "
    "and nothing is learned; look at rollouts/, then change the reward, the data (neither too hard nor too easy), "
    "rollout.n or rollout.temperature"
)
JUMP = 5.0  # times the largest value of the remembered steps
SMALLEST_KL = 0.01  # nats a token: below this no KL is a jump
SMALLEST_GAP, FIRST_GAP = 0.3, 1.0  # nats a token: smaller gaps are no jump, after earlier steps and in the first step
ROWS_NAMED = 4
SAMPLER = "rollout/log_probs"
WATCHED = ("actor/grad_norm", "critic/grad_norm", "actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty")


class Health:
    """Warns if a metric jumps far above its values in the last steps. Checkpoints keep these values."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        self._equal_in_a_row = 0

    def check(self, run: Run, batch: Batch, step: int, metrics: Metrics) -> None:
        """Warns of a jump, with its trajectories.  Raises: EngineError after three skipped updates in a row."""
        checks = [check_skipped(role, f"{role}.optim.lr", metrics, run.run_dir) for role in ("actor", "critic")]
        run.is_good = all(checks)
        self._check_groups(run, step, metrics)
        for name in WATCHED:
            value, before = metrics.value(name), max(self._seen.get(name) or [0.0])
            if value is not None and self._is_jump(name, abs(value)):
                log.warning(JUMPED, step, name, value, JUMP, before, _named(heaviest_rows(run, batch, name), step))

    def check_sampler(self, run: Run, batch: Batch, step: int) -> None:
        """Compares log-probs of rollout and trainer, unless the rollout computes with the trainer's tensors on a CPU.
        Warns of a jump in their distance.  Raises: WeightSyncError for a jump if both have the same weights."""
        before = self._seen.get(SAMPLER, [])
        limit = max(SMALLEST_GAP, JUMP * max(before)) if before else FIRST_GAP
        if not run.engine.reads_trained_weights:
            gap, lag = sampler_gap(run, batch, step)
            if not gap <= limit:  # rounding may move a few unlikely tokens as far, but not the mean of all
                gap, lag = sampler_gap(run, batch, step, len(batch))
            self._check_gap(gap, lag, before, limit, step, run.run_dir)

    def _check_gap(self, found: float, lag: int, before: list[float], limit: float, step: int, run_dir: Path) -> None:
        if found < float("inf"):
            self._seen[SAMPLER] = [*before, found][-REMEMBERED:]
        if found <= limit:  # false for NaN
            return
        gap = f"the log-probs of rollout and trainer are {found:.3g} nats a token apart, and at most "
        gap += f"{max(before, default=0.0):.3g} in the steps before"
        if lag > 0:
            log.warning("step %d: %s; the rollout's weights are %d steps older than the trainer's", step, gap, lag)
            return
        expected = f"equal ones, as both have weights of step {step - 1}, which did not arrive as sent"
        change = "resume the run, which did not train on this step; if this comes again, try rollout.engine.name=native"
        raise WeightSyncError(f"step {step}", gap, expected, f"{change}; {last_good(run_dir)}")

    def _check_groups(self, run: Run, step: int, metrics: Metrics) -> None:
        """Warns if, for several steps, all scores in each group are equal although the estimator compares them."""
        is_equal = metrics.value("reward/groups_all_equal") == 1 and "uid" in run.estimator.columns
        self._equal_in_a_row = self._equal_in_a_row + 1 if is_equal else 0
        if self._equal_in_a_row == EQUAL_IN_A_ROW:
            log.warning(NOTHING_TO_LEARN, step, EQUAL_IN_A_ROW)

    def state(self) -> dict[str, list[float]]:
        """Returns the metrics of the last steps, for the checkpoint."""
        return self._seen

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Restores the metrics that `state` returned."""
        self._seen = {name: [0.0 + value for value in values] for name, values in state.items()}

    def _is_jump(self, name: str, value: float) -> bool:
        """Adds `value` to the history of metric `name`.  Returns whether it is a jump compared with earlier steps."""
        if not value < float("inf"):
            return False
        seen = self._seen.setdefault(name, [])
        smallest = 0.0 if name.endswith("grad_norm") else SMALLEST_KL
        jumps = len(seen) >= ENOUGH and value > max(JUMP * max(seen), smallest)
        self._seen[name] = [*seen, value][-REMEMBERED:]
        return jumps


def sampler_gap(run: Run, batch: Batch, step: int, count: int = 0) -> tuple[float, int]:
    """Returns the mean distance between log-probs of rollout and trainer, in nats per token, and the age in steps of
    the rollout's newest weights. Reads only tokens that these weights sampled: of all rows if the batch has the
    trainer's log-probs, else only of the `count` shortest rows (default: one a rank)."""
    actor, version = run.roles["actor"], batch["policy_version"]
    newest = int((version * (batch["response_mask"] != 0)).max())
    mask = batch["response_mask"] * (version == newest)
    if "old_log_probs" in batch and run.config.algorithm.correction.old_log_probs == "trainer":
        ours = batch["old_log_probs"]
    else:
        lengths = mask.sum(1)
        rows = lengths.where(lengths > 0, lengths.max() + 1).argsort()[: count or actor.dp_size]
        batch, mask = batch[rows], mask[rows]
        ours = actor.forward(batch, ("log_probs",), run.policy_objective.temperature)["log_probs"]
    return float(masked_mean((ours - batch["rollout_log_probs"]).abs(), mask)), step - 1 - newest


def check_skipped(name: str, lr_key: str, metrics: Metrics, run_dir: Path) -> bool:
    """Warns if the last update was skipped.  Returns whether it was applied.  Raises: EngineError after three skipped
    in a row, with the checkpoint to resume from."""
    skipped = round(metrics.value(f"{name}/skipped_in_a_row") or 0)
    if not skipped:
        return True
    log.warning("%s: loss or gradient was not finite: the update was skipped (%d in a row)", name, skipped)
    if skipped >= SKIPPED_IN_A_ROW:
        found = f"{skipped} updates in a row had a loss or gradient that is not finite, so the run stops"
        change = f"look for infinite rewards or log-probs in {run_dir}/rollouts, or lower {lr_key}"
        raise EngineError(name, found, "", f"{change}; {last_good(run_dir)}")
    return False


def _named(rows: Sequence[str], step: int) -> str:
    shown = f"; the responses that weigh most in it: {', '.join(rows)} (uids in rollouts/step_{step:06d}.jsonl)"
    return shown if rows else ""


def heaviest_rows(run: Run, batch: Batch, metric: str) -> list[str]:
    """Names the trajectories that contribute most to a metric, the largest first; empty if this is unknown."""
    weights = _weights(run, batch, metric)
    heaviest = [] if weights is None else weights.nan_to_num(torch.inf).argsort(descending=True)[:ROWS_NAMED].tolist()
    return [str(batch["trajectory_uid_name"][row]) for row in heaviest]


def _weights(run: Run, batch: Batch, metric: str) -> torch.Tensor | None:
    """Contribution of each row to the metric; approximate if the exact one needs a backward pass per row.   [B]"""
    mask = batch["response_mask"]
    old = batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]
    if metric == "critic/grad_norm":
        known = "returns" in batch and "values" in batch  # PRIME's reward model has neither
        return ((batch["returns"] - batch["values"]).abs() * mask).sum(1) if known else None
    if metric == "actor/grad_norm":
        return _pull(run, batch, old)
    if metric == "actor/ppo_kl":
        new = run.roles["actor"].forward(batch, ("log_probs",), run.policy_objective.temperature)["log_probs"]
        return ((new - old).abs() * mask).sum(1)
    return ((batch["ref_log_probs"] - old).abs() * mask).sum(1) if "ref_log_probs" in batch else None


def _pull(run: Run, batch: Batch, old: torch.Tensor) -> torch.Tensor | None:
    """Sum over a row's tokens of |d loss / d log-prob| (1 - p): a bound of the row's gradient at the logits. None if
    the loss does not read log-probs.   [B]"""
    objective = run.policy_objective
    others = tuple(sorted(objective.needs - {"log_probs"}))
    outputs = run.roles["actor"].forward(batch, others, objective.temperature) if others else {}
    log_probs = old.detach().clone().requires_grad_()
    columns = run.correction.weigh(batch, Metrics()).tensors()
    loss, _ = objective.loss({**outputs, "log_probs": log_probs}, columns, objective.counts(columns))
    if not loss.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return (gradient.abs() * (1 - old.exp())).sum(1)
