# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in `tensorboard/` of the run's folder."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from whet.registry import register_tracker
from whet.tracking.service import TrackedRun
from whet.tracking.tracker import NO_TABLES, TableRow, Tables


@register_tracker("tensorboard", package="tensorboard")
class TensorboardTracker:
    """Writes scalars, tables as Markdown text, and the config as text. When a run resumes, scalars after its checkpoint
    are purged, so that a repeated step is shown once."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / "tensorboard"
        self.run_id, self.last_step = folder.name, run.steps_done if folder.exists() else -1
        self._writer = SummaryWriter(str(folder), purge_step=run.steps_done + 1)
        config = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), run.steps_done + 1)

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Writes the step and flushes, so that it survives a killed process."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, rows in tables.items():
            self._writer.add_text(name, markdown(rows), step)
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


def markdown(rows: Sequence[TableRow]) -> str:
    """Formats a table in Markdown, and escapes markup in its cells."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None) -> str:
    text = "" if value is None else html.escape(str(value)).replace("|", "&#124;").replace("`", "&#96;")
    return "<br>".join(text.splitlines())
