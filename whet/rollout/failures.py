# SPDX-License-Identifier: Apache-2.0
"""A bad trajectory is data, but a run in which all fail learns nothing: it ends with the reason of the first."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from whet.errors import EngineError, RewardError, SandboxError, WhetError
from whet.types import Failure, FailureSource, Group

log = logging.getLogger(__name__)
PATIENCE = 3  # batches in a row: what worked before may be away for a while
ERRORS: dict[FailureSource, type[WhetError]] = {"reward": RewardError, "sandbox": SandboxError}


class FailureWatch:
    """Reads the scored groups of each step, validation or evaluation, and warns where trajectories failed.

    As long as no trajectory of this process was ever scored, one batch in which all fail ends the run; afterwards
    `PATIENCE` of them in a row do."""

    def __init__(self) -> None:
        self._left = 1
        self._warned: set[FailureSource] = set()

    def record(self, groups: Sequence[Group]) -> None:
        """Raises: RewardError, SandboxError or EngineError, by where the first failure arose."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        failures = [(each.uid, each.failure) for each in trajectories if each.failure is not None]
        if len(failures) < len(trajectories):
            self._left = PATIENCE
        if failures:
            self._report(failures, len(trajectories))

    def _report(self, failures: Sequence[tuple[str, Failure]], total: int) -> None:
        if len(failures) < total:
            for _, failure in failures:
                if failure.source not in self._warned:
                    self._warned.add(failure.source)
                    log.warning(
                        "%d of %d answers failed and are not trained on, the first in the %s: %s (said once; "
                        "failures/%s counts them, rollouts/ has each)",
                        *(len(failures), total, failure.source, failure.message, failure.source),
                    )
            return
        uid, first = failures[0]
        self._left -= 1
        found = (
            f"all {total} answers failed, so there is nothing to learn from: answer {uid} in the "
            f"{first.source}: {first.message}"
        )
        if self._left == 0:
            raise ERRORS.get(first.source, EngineError)(f"{found}. Mend the {first.source}, then start again")
        log.warning("%s. The run ends after %d more such batches", found, self._left)
