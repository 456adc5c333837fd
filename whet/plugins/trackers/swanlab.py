# SPDX-License-Identifier: Apache-2.0
"""The SwanLab tracker. The library reads its own settings: `SWANLAB_API_KEY`, `SWANLAB_MODE` (`offline` writes to
`swanlab/` in the run folder, for `swanlab sync`), and others."""

from __future__ import annotations

from collections.abc import Mapping

import swanlab

from whet.registry import register_tracker
from whet.tracking.service import TrackedRun, no_key
from whet.tracking.tracker import NO_TABLES, Tables


@register_tracker("swanlab", package="swanlab")
class SwanlabTracker:
    """Logs scalars and tables by step. A resumed run sends all steps again from the start: SwanLab ignores repeated
    steps, but in offline mode it loses the last steps of a killed process."""

    def __init__(self, run: TrackedRun) -> None:
        settings = swanlab.Settings()
        if settings.mode == "online" and settings.api_key is None:
            raise no_key("swanlab")
        self._run = swanlab.init(**run.arguments, log_dir=str(run.folder / "swanlab"), reinit=True)
        self.run_id, self.last_step = self._run.id, -1

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        shown = {}
        for name, rows in tables.items():
            shown[name] = swanlab.echarts.Table()
            shown[name].add(list(rows[0]), [list(row.values()) for row in rows])
        self._run.log({**metrics, **shown}, step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish(*(("crashed", "training failed") if failed else ()))
