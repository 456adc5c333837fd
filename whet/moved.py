# SPDX-License-Identifier: Apache-2.0
"""Old names of modules (version 0.3). Importing one gives the module under its new name, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)
MOVED = {  # by the old name of a file or folder
    **{
        f"whet.config.{name}": f"whet.plugins.migration.{name}"
        for name in ("convert", "convert_units", "foreign", "foreign_files", "foreign_python")
    },
    **{f"whet.config.foreign_{name}": f"whet.plugins.migration.foreign_{name}" for name in ("shell", "shell_language")},
    "whet.data.drawn": "whet.plugins.lessons.drawn",
    **{f"whet.tracking.{name}": f"whet.plugins.trackers.{name}" for name in ("mlflow", "swanlab", "trackio", "wandb")},
    "whet.data.pickled": "whet.data.sources",
    "whet.cli.plan_page": "whet.plugins.planner.plan_page",
    "whet.engines.compact_adamw": "whet.kernels.compact_adamw",
    "whet.engines.compact_kernels": "whet.kernels.compact_adamw_triton",
    "whet.cli.serve": "whet.plugins.serving.command",
    "whet.engines.megatron": "whet.plugins.megatron",
    **{f"whet.environments.{name}": f"whet.plugins.agents.{name}" for name in ("check", "shipped", "tools")},
    "whet.evaluation.lm_eval": "whet.plugins.lm_eval.model",
    **{f"whet.models.{name}": f"whet.kernels.{name}" for name in ("compiled_layers", "fused", "linear", "log_probs")},
    "whet.models.encoders.cache": "whet.models.encoders.base",
    "whet.models.fixed": "whet.models.batch_invariant",
    "whet.models.fixed_kernels": "whet.kernels.batch_invariant_triton",
    "whet.models.head_kernels": "whet.kernels.log_probs_triton",
    "whet.models.init": "whet.plugins.lessons.init_model",
    "whet.models.init_vision": "whet.plugins.lessons.init_model",
    **{
        f"whet.planning.{name}": f"whet.plugins.planner.{name}"
        for name in ("first", "fit", "forecast", "memory", "outline", "scale", "speed")
    },
    "whet.models.narrow": "whet.kernels.bfloat16_copies",
    "whet.models.varlen": "whet.kernels.varlen_attention",
    "whet.rollout.native.kernels": "whet.kernels.paged_attention_triton",
    "whet.rollout.native.paged_attention": "whet.kernels.paged_attention",
    "whet.rollout.planned": "whet.rollout.requirements",
    "whet.rollout.sampling": "whet.kernels.sampling",
    "whet.protocol": "whet.plugins.migration.protocol",
    **{f"whet.rewards.{name}": f"whet.plugins.migration.{name}" for name in ("data_proto", "managers")},
    **{
        f"whet.rewards.{name}": f"whet.plugins.scores.{name}"
        for name in ("auto", "check", "code", "hostile_programs", "ifeval", "judge", "perception", "short_answers")
    },
    **{f"whet.rollout.{name}": f"whet.plugins.inference.{name}" for name in ("servers", "sglang", "vllm")},
    "whet.rollout.vllm.routed": "whet.plugins.inference.vllm.plain",
    "whet.sandbox": "whet.programs",
    **{f"whet.sandbox.{name}": f"whet.plugins.sandbox.{name}" for name in ("http", "inside", "local")},
    "whet.sandbox.inside.whet_peer": "whet.programs.inside.whet_peer",
    "whet.sandbox.inside.whet_tester": "whet.programs.inside.whet_tester",
    "whet.serving": "whet.plugins.serving",
    "whet.serving.sandbox": "whet.plugins.sandbox.server",
    "whet.rollout.servers.words": "whet.plugins.inference.servers.wire_protocol",
    **{
        f"whet.trainers.{name}": f"whet.roles.{name}"
        for name in ("placed", "reward_texts", "rollout_worker", "telemetry", "workers")
    },
    "whet.trainers.certify": "whet.plugins.proofs.certify",
    "whet.trainers.hints": "whet.trainers.teacher",
    "whet.trainers.judge": "whet.plugins.scores.judge.role",
    "whet.trainers.measure": "whet.trainers.batch_metrics",
    "whet.trainers.measured": "whet.roles.telemetry",
    "whet.trainers.quickstart": "whet.plugins.lessons.quickstart",
    "whet.trainers.quickstart_images": "whet.plugins.lessons.quickstart_images",
    "whet.trainers.quickstart_pretrained": "whet.plugins.lessons.quickstart_pretrained",
    "whet.viewer": "whet.plugins.viewer",
}
_RENAMED = {  # by module (under its new name) and old name in it: the new name, with a module if this is another
    "whet.column_rules": {"split_second": "whet.plugins.migration.protocol:split_second"},
    "whet.config.load": {"Loaded": "LoadedConfig"},
    "whet.config.section": {"Place": "SectionPlace"},
    "whet.controller.worker": {"Layout": "RankLayout"},
    "whet.data.supervised": {
        "PreferencePair": "whet.data.preferences:Comparison",
        "build_pairs": "whet.data.preferences:build_comparisons",
    },
    "whet.evaluation.estimators": {"Comparison": "ScoreComparison", "Estimate": "MeanEstimate"},
    "whet.kernels.sampling": {
        "LastStops": "whet.rollout.stop_strings:LastStops",
        "StopStrings": "whet.rollout.stop_strings:StopStrings",
        "bad_word_ids": "whet.rollout.build:bad_word_ids",
        "LoadTokenizer": "whet.rollout.stop_strings:LoadTokenizer",
    },
    "whet.plugins.agents.check": {"Finding": "EnvironmentFinding"},
    "whet.plugins.agents.tools.toolbox": {"with_tools": "whet.environments.toolbox:with_tools"},
    "whet.plugins.inference.servers.engine": {"OnNewWeights": "whet.plugins.inference.servers.options:OnNewWeights"},
    "whet.plugins.inference.servers.process": {"Client": "ServerClient", "Span": "whet.rollout.protocol:Span"},
    "whet.plugins.planner.fit": {"check_disk": "whet.planning.machine:check_disk"},
    "whet.plugins.scores.check": {"Finding": "RewardFinding"},
    "whet.plugins.serving.app": {"Settings": "ServeSettings"},
    "whet.rewards.worker": {"WorkerSpec": "ScorerSpec"},
    "whet.rollout.driver": {"Background": "BackgroundDriver"},
    "whet.rollout.episode": {"Context": "Conversation", "Limits": "EpisodeLimits"},
    "whet.rollout.rollouts": {"Sampled": "SampledTrajectories"},
    "whet.serialization": {
        f"{each}_tensordict": f"whet.plugins.migration.protocol:{each}_tensordict" for each in ("pack", "unpack")
    },
    "whet.tracking.console": {"Column": "ConsoleColumn"},
    "whet.trainers.objectives": {"Objective": "LossObjective"},
    "whet.trainers.teacher": {
        "judge": "whet.plugins.scores.judge.hint:judge",
        "judge_scores": "whet.plugins.scores.judge.role:judge_scores",
    },
}
RENAMED = {  # the new location, by module and old name
    module: {old: new if ":" in new else f"{module}:{new}" for old, new in names.items()}
    for module, names in _RENAMED.items()
}


class OldNames:
    """Import hook: finds modules by their old names, and modules whose functions or classes have old names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a module that moved, or has old names; None for any other module."""
        if name in RENAMED and (spec := PathFinder.find_spec(name, path)) is not None:
            spec.loader = WithOldNames(name, str(spec.origin))
            return spec
        if not name.startswith("whet.") or (new := new_name(name)) == name:
            return None
        try:
            found = importlib.util.find_spec(new)
        except ModuleNotFoundError:  # of a plugin that was deleted
            return None
        return None if found is None else ModuleSpec(name, self, origin=new)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module under its new name."""
        assert spec.origin is not None
        if spec.name in MOVED:
            log.warning("%s is now %s: the next version will not know the old name", spec.name, spec.origin)
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, as `create_module` has already imported the module."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class WithOldNames(SourceFileLoader):
    """Loads a module of `RENAMED`. An old name in it gives the object under its new name, with a warning."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module's code. An attribute that the module lacks is looked up among the old names."""

        def renamed(name: str) -> Any:
            if (new := RENAMED[module.__name__].get(name)) is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            log.warning("%s:%s is now %s: the next version will not know the old name", module.__name__, name, new)
            owner, _, today = new.partition(":")
            return getattr(importlib.import_module(owner), today)

        super().exec_module(module)
        module.__dict__["__getattr__"] = renamed


def new_name(name: str) -> str:
    """Returns the new name of a module; the same name if it has not changed."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if (new := MOVED.get(".".join(parts[:length]))) is not None:
            return ".".join([new, *parts[length:]])
    return name


def today(value: Any) -> Any:
    """Returns a config value with the new names of modules in it (`package.module:name`)."""
    if isinstance(value, str) and value.startswith("whet."):
        module, colon, name = value.partition(":")
        module = new_name(module)
        return RENAMED.get(module, {}).get(name, f"{module}{colon}{name}")
    if isinstance(value, Mapping):
        return {key: today(each) for key, each in value.items()}
    return [today(each) for each in value] if isinstance(value, list) else value


sys.meta_path.insert(0, OldNames())
