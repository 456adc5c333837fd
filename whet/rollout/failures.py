# SPDX-License-Identifier: Apache-2.0
"""A bad answer is data, but a run in which every answer fails learns nothing: it is ended with the first reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from whet.errors import EngineError, RewardError, SandboxError, WhetError
from whet.types import FailureSource, Group

log = logging.getLogger(__name__)
PATIENCE = 3  # batches in a row: what worked before may be away for a while
ERRORS: dict[FailureSource, type[WhetError]] = {"reward": RewardError, "sandbox": SandboxError}


class FailureWatch:
    """Sees the scored groups of each step, validation or evaluation, and says so where answers fail.

    As long as no answer of this process was ever judged, one batch in which all fail ends the run; afterwards
    `PATIENCE` of them in a row do."""

    def __init__(self) -> None:
        self._left = 1
        self._said: set[FailureSource] = set()

    def record(self, groups: Sequence[Group]) -> None:
        """Raises: RewardError, SandboxError or EngineError, by where the first failure arose."""
        answers = [answer for group in groups for answer in group.trajectories]
        failures = [(answer.uid, answer.failure) for answer in answers if answer.failure is not None]
        if not answers:
            return
        if len(failures) < len(answers):
            self._left = PATIENCE
            for _, failure in failures:
                if failure.source not in self._said:
                    self._said.add(failure.source)
                    log.warning(
                        "%d of %d answers failed and are not trained on, the first in the %s: %s (said once; "
                        "failures/%s counts them, rollouts/ has each)",
                        *(len(failures), len(answers), failure.source, failure.message, failure.source),
                    )
            return
        uid, first = failures[0]
        self._left -= 1
        said = (
            f"all {len(answers)} answers failed, so there is nothing to learn from: answer {uid} in the "
            f"{first.source}: {first.message}"
        )
        if self._left == 0:
            raise ERRORS.get(first.source, EngineError)(f"{said}. Mend the {first.source}, then start again")
        log.warning("%s. The run ends after %d more such batches", said, self._left)
