# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases. Its own settings hold: `WANDB_MODE=offline` writes to `wandb/` of the run's folder for
`wandb sync`, `WANDB_ENTITY`, `WANDB_BASE_URL` and the others are read by the library."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from whet.errors import ConfigError
from whet.tracking.service import CLOSE_SECONDS, TrackedRun
from whet.tracking.tracker import NO_TABLES, Tables


class WandbTracker:
    """Sends a history row a step, with its tables. W&B takes no step that is not after the last one that it has, which
    is not sent again where a run goes on. Offline it cannot know, and the new folder has the run from its start."""

    def __init__(self, run: TrackedRun) -> None:
        # A prompt for a key would wait for ever where nobody sits.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "trainer.logger=wandb finds no API key; run `wandb login`, set WANDB_API_KEY, or write to the run's "
                "folder with WANDB_MODE=offline"
            )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow" if run.run_id is not None else None,
            config=dict(run.config),
            dir=str(run.folder),
            reinit="finish_previous",
            settings=wandb.Settings(finish_timeout=CLOSE_SECONDS),
        )
        self.run_id, self.last_step = self._run.id, self._run.step - 1

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Sends the row of a step."""
        shown = {
            name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True)
            for name, rows in tables.items()
        }
        self._run.log({**metrics, **shown}, step=step, commit=True)

    def close(self, failed: bool = False) -> None:
        """Uploads the rest."""
        self._run.finish(exit_code=int(failed))
