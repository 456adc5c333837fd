# SPDX-License-Identifier: Apache-2.0
"""Published scripts as facts (convert/*.yaml), the recipes that they become, and the numbers of one batch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from tests.algorithms.calling import estimate
from tests.plugins.migration.frameworks import STEPS
from whet.config import TrainConfig, load_config
from whet.metrics import Metrics
from whet.plugins.migration.convert import Converted, convert
from whet.plugins.migration.foreign import tables
from whet.plugins.migration.foreign_files import read
from whet.plugins.migration.protocol import DataProto
from whet.registry import ADV_ESTIMATORS
from whet.trainers.objectives import PolicyObjective
from whet.trainers.shape import Correction, Shaper

FACTS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((Path(__file__).parent / "convert").glob("*"))}
FACTS["easyr1_config"] = {
    "from": "easyr1",
    "keys": next(dict(keys) for table in tables() if table.system == "EasyR1" for keys in table.files.values()),
}
SCRIPTS = [name for name in FACTS if name != "easyr1_config"]
COMMANDS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "easyr1": "python3 -m verl.trainer.main config=base.yaml",
    "trl": "accelerate launch --config_file zero3.yaml examples/scripts/grpo.py",
}

OF_THEIR_DEVICES = re.compile(r"cluster\.|\w+\.engine\.|rollout\.free_cache_engine")


def text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


def written(name: str, folder: Path) -> Path:
    """The script in the form in which it was published: its launcher and end, the shell before it, and words of keys as
    they are written there."""
    facts = FACTS[name]
    keys, system, form = facts["keys"], facts["from"], facts.get("form", "")
    if base := facts.get("base"):
        (folder / "base.yaml").write_text(yaml.safe_dump(FACTS[base]["keys"]))
    if system == "roll" or form == "yaml":
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"hydra": {"run": {"dir": "."}}, **nested(keys)}))
        return file
    flags = system == "trl"
    spelled = {key: flag(value) if flags else quoted(text(value)) for key, value in keys.items()} | facts.get(
        "words", {}
    )
    words = [f"--{key} {word}" if flags else f"{key}={word}" for key, word in spelled.items()]
    command = " \\\n    ".join([facts.get("launcher", COMMANDS[system]), *words])
    file = folder / f"{name}.{'py' if form in ('python', 'docstring') else 'sh'}"
    if form == "python":
        options = {key: value for key, value in keys.items() if key != "model_name_or_path"}
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        model = keys["model_name_or_path"]
        file.write_text(f"from trl import *\nGRPOTrainer(model={model!r}, args=GRPOConfig({arguments})).train()\n")
    elif form == "docstring":
        other = "python other.py --beta 9"
        code = "".join(f"    training_args.{key} = {value!r}\n" for key, value in facts.get("code", {}).items())
        code = f'if __name__ == "__main__":\n    _, training_args = parser.parse_args_and_config()\n{code}'
        file.write_text(f'"""\npip install math_verify\n\n{command}\n\n# or\n\n{other}\n"""\nimport torch\n\n{code}')
    else:
        shell = facts.get("shell", "set -x\nexport A=b # not read\n")
        file.write_text(f"{shell}\n{command}{facts.get('end', ' $@')}\n")
    return file


def quoted(value: str) -> str:
    """A word of a shell in which variables count."""
    return '"' + value.replace('"', "'") + '"' if "$" in value else shlex.quote(value)


def flag(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f'"{each}"' for each in value)
    return "" if value is True else shlex.quote(text(value))


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        place = tree
        for each in sections:
            place = place.setdefault(each, {})
        place[name] = value
    return tree


def keys_of(name: str) -> dict[str, Any]:
    """All keys of a script, including the keys of the file that it names and the ones that it sets, with references
    replaced."""
    facts = FACTS[name]
    keys = {**(FACTS[facts["base"]]["keys"] if "base" in facts else {}), **facts["keys"], **facts.get("code", {})}
    whole = {f"${{{key}}}": value for key, value in keys.items()}
    return {key: whole.get(value, value) if isinstance(value, str) else value for key, value in keys.items()}


def converted(name: str, folder: Path) -> Converted:
    return convert(read(str(written(name, folder)), FACTS[name]["from"]), FACTS[name]["from"])


OF_THEIR_DATA = ("data.mix", "reward.domains", "reward.kwargs")


def recipe(name: str, folder: Path, overrides: Mapping[str, Any]) -> TrainConfig:
    """The recipe as a file, loaded with a model and data of this machine, for one process without a GPU, and without
    the domains of the original data."""
    file, result = folder / "recipe.yaml", converted(name, folder)
    for key in [key for key in result.values if key.startswith(OF_THEIR_DATA) or OF_THEIR_DEVICES.match(key)]:
        del result.values[key]
    file.write_text(result.to_yaml())
    return load_config(TrainConfig, file, overrides, checked=False).config


def batch_of(n: int) -> dict[str, Tensor]:
    """Three groups of n rows, float64; scores on the last token, one group's all equal."""
    draw = torch.Generator().manual_seed(7)
    rows, width = 3 * n, 9

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=draw)
    mask = (torch.arange(width) < lengths[:, None]).long()
    last = (torch.arange(width) == lengths[:, None] - 1).double()
    scores = torch.randint(0, 3, (rows,), generator=draw).double() / 2
    scores[:n] = 1.0
    old = -normal().abs() - 0.2
    columns = {
        "values": normal(),
        "old_log_probs": old,
        "log_probs": (old + 0.4 * normal()).clamp(max=-0.01),
        "ref_log_probs": old + 0.4 * normal(),
        "rollout_log_probs": old + 0.2 * normal(),
        "entropy": normal().abs(),
        "token_level_scores": scores[:, None] * last,
    }
    return {
        **{name: column * mask for name, column in columns.items()},
        "last": last,
        "lengths": lengths,
        "response_mask": mask,
        "uid": torch.arange(3).repeat_interleave(n),
        "reward_baselines": torch.randn(rows, generator=draw, dtype=torch.float64),
        "accuracy": (scores == 1).double(),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "prompts": torch.zeros(rows, 1).long(),
        "attention_mask": torch.cat([torch.ones(rows, 1).long(), mask], 1),
    }


class Numbers(NamedTuple):
    """The results of a step for one batch."""

    advantages: Tensor  # [B, R]
    loss: Tensor
    gradient: Tensor  # [B, R], with respect to the log-probs


def close(found: Numbers, expected: Numbers, *, rtol: float, atol: float) -> None:
    """Asserts that all three are equal within the tolerances."""
    for name, ours, theirs in zip(Numbers._fields, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)


def formulas(system: str, keys: Mapping[str, Any], columns: Mapping[str, Tensor]) -> Numbers:
    """The numbers of a framework by its formulas in frameworks.py."""
    leaf = columns["log_probs"].clone().requires_grad_()
    advantages, total = STEPS[system](keys, {**columns, "log_probs": leaf})
    (slope,) = torch.autograd.grad(total, leaf)
    return Numbers(advantages, total.detach(), slope)


def numbers(config: TrainConfig, columns: Mapping[str, Tensor]) -> Numbers:
    """The numbers of whet by the parts of its loop."""
    metrics, shaper, algorithm = Metrics(), Shaper(config), config.algorithm
    batch = DataProto.from_dict({key: value for key, value in columns.items() if key not in ("last", "lengths")})
    batch = shaper.rewards(batch, metrics)
    entry = ADV_ESTIMATORS[algorithm.adv_estimator]
    options = entry.resolve_options(algorithm.adv_options, "algorithm.adv_options")
    batch = batch.with_columns(advantages=estimate(entry, batch.tensors(), options).advantages)
    batch = Correction.from_config(config).weigh(shaper.advantages(batch, metrics), metrics)

    objective = PolicyObjective.from_config(config)
    objective = replace(objective, entropy_coef=algorithm.entropy_coef, kl_coef=algorithm.kl.coef)
    leaf = columns["log_probs"].clone().requires_grad_()
    outputs = {"log_probs": leaf, "entropy": columns["entropy"]}
    tensors = {key: value for key, value in batch.tensors().items() if key not in outputs}
    total, _ = objective.loss(outputs, tensors, objective.counts(tensors))
    (slope,) = torch.autograd.grad(total, leaf)
    return Numbers(batch["advantages"], total.detach(), slope)
