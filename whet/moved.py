# SPDX-License-Identifier: Apache-2.0
"""Modules under their names of version 0.3: imported, they are the modules of today, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

log = logging.getLogger(__name__)
MOVED = {  # by the old name of a file or folder
    "whet.data.drawn": "whet.plugins.lessons.drawn",
    **{f"whet.tracking.{name}": f"whet.plugins.trackers.{name}" for name in ("mlflow", "swanlab", "trackio", "wandb")},
    "whet.evaluation.lm_eval": "whet.plugins.lm_eval.model",
    "whet.models.init": "whet.plugins.lessons.init_model",
    "whet.models.init_vision": "whet.plugins.lessons.init_model",
    "whet.sandbox": "whet.plugins.sandbox",
    "whet.sandbox.inside.whet_peer": "whet.programs.inside.whet_peer",
    "whet.sandbox.inside.whet_tester": "whet.programs.inside.whet_tester",
    "whet.sandbox.protocol": "whet.programs.protocol",
    "whet.serving.sandbox": "whet.plugins.sandbox.server",
    "whet.trainers.certify": "whet.plugins.proofs.certify",
    "whet.trainers.quickstart": "whet.plugins.lessons.quickstart",
    "whet.trainers.quickstart_images": "whet.plugins.lessons.quickstart_images",
    "whet.trainers.quickstart_pretrained": "whet.plugins.lessons.quickstart_pretrained",
    "whet.viewer": "whet.plugins.viewer",
}


class OldNames:
    """Finds modules by their old names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a module that moved, None for any other."""
        if not name.startswith("whet.") or (new := _new_name(name)) is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(name, self, origin=new)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module of today."""
        assert spec.origin is not None
        if spec.name in MOVED:
            log.warning("%s is now %s: the next version will not know the old name", spec.name, spec.origin)
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is: its import was `create_module`."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _new_name(name: str) -> str | None:
    """Returns the name of today, None where the module has its old one."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if (new := MOVED.get(".".join(parts[:length]))) is not None:
            return ".".join([new, *parts[length:]])
    return None


sys.meta_path.insert(0, OldNames())
