# SPDX-License-Identifier: Apache-2.0
"""The MLflow tracker: it logs to the server `MLFLOW_TRACKING_URI`, or else to a database in `mlflow/` of the run folder
(`mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`)."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import is_tracking_uri_set

from whet.config.compose import flatten
from whet.registry import register_tracker
from whet.tracking.service import TrackedRun
from whet.tracking.tracker import NO_TABLES, TableRow, Tables

LAST_STEP = "whet.last_step"  # a tag, since MLflow adds a second point if a step is logged twice
MAX_PARAMS, MAX_PARAM_LENGTH = 100, 6000  # of one request, and of one value
REFUSED = re.compile(r"[^\w\-. :/]")  # not allowed in names of metrics and parameters


@register_tracker("mlflow", package="mlflow")
class MlflowTracker:
    """Logs metrics by step, the config as parameters and as `config.json`, and tables as CSV in `generations/`."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder.resolve() / "mlflow"
        own = not is_tracking_uri_set()
        if own:
            folder.mkdir(exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}" if own else None)
        if run.run_id is None:
            found = self._client.get_experiment_by_name(run.project)
            artifacts = (folder / "artifacts").as_uri() if own else None
            experiment = found.experiment_id if found else self._client.create_experiment(run.project, artifacts)
            self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
            values = flatten(run.config)
            params = [Param(REFUSED.sub("_", key), str(value)[:MAX_PARAM_LENGTH]) for key, value in values]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self.run_id, params=params[start : start + MAX_PARAMS])
        else:
            self.run_id = run.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        self.last_step = int(self._client.get_run(self.run_id).data.tags.get(LAST_STEP, -1))
        self._client.log_text(self.run_id, json.dumps(run.config, indent=2, default=str), "config.json")

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Logs the tables of a step, then its metrics in one request."""
        for name, rows in tables.items():
            self._client.log_text(self.run_id, _csv(rows), f"{name}_{step:06}.csv")
        now = int(time.time() * 1000)
        numbers = [Metric(REFUSED.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=numbers, tags=[RunTag(LAST_STEP, str(step))])

    def close(self, failed: bool = False) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _csv(rows: Sequence[TableRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
