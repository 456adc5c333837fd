# SPDX-License-Identifier: Apache-2.0
"""The Trackio tracker: it logs to a local database (`trackio show`) in the folder `TRACKIO_DIR`, or to a Space on the
Hub if `TRACKIO_SPACE_ID` is set."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from whet.registry import register_tracker
from whet.tracking.service import TrackedRun
from whet.tracking.tracker import NO_TABLES, Tables


@register_tracker("trackio", package="trackio")
class TrackioTracker:
    """Logs one record for each step, with its tables. A resumed run continues the Trackio run of its unique name."""

    def __init__(self, run: TrackedRun) -> None:
        self.run_id = run.run_id or _free_name(run.project, run.name)
        self._run = trackio.init(
            run.project,
            self.run_id,
            config=dict(run.config),
            resume="allow" if run.run_id is not None else "never",
            embed=False,
        )
        self.last_step = self._run._next_step - 1  # Trackio has no public attribute for this

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        shown = {
            name: trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            for name, rows in tables.items()
        }
        self._run.log({**metrics, **shown}, step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish()


def _free_name(project: str, name: str) -> str:
    try:
        taken = {run.name for run in trackio.Api().runs(project)}
    except ValueError:  # no such project yet
        return name
    names = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(each for each in names if each not in taken)
