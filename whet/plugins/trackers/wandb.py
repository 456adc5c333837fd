# SPDX-License-Identifier: Apache-2.0
"""The Weights & Biases tracker. The library reads its own settings: `WANDB_MODE` (`offline` writes to `wandb/` in the
run folder, for `wandb sync`), `WANDB_ENTITY`, `WANDB_BASE_URL`, and others."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from whet.registry import register_tracker
from whet.tracking.service import CLOSE_SECONDS, TrackedRun, no_key
from whet.tracking.tracker import NO_TABLES, Tables


@register_tracker("wandb", package="wandb")
class WandbTracker:
    """Logs metrics and tables by step. W&B accepts only steps after the last step that it has, so a resumed run does
    not send earlier steps again. In offline mode that step is unknown, so the new folder gets the whole run."""

    def __init__(self, run: TrackedRun) -> None:
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise no_key("wandb")
        self._run = wandb.init(
            **run.arguments,
            dir=str(run.folder),
            reinit="finish_previous",
            settings=wandb.Settings(finish_timeout=CLOSE_SECONDS),
        )
        self.run_id, self.last_step = self._run.id, self._run.step - 1

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        shown = {
            name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True)
            for name, rows in tables.items()
        }
        self._run.log({**metrics, **shown}, step=step, commit=True)

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
