# SPDX-License-Identifier: Apache-2.0
"""Converts keys whose values need a calculation or other keys: `unit` in foreign_keys.yaml names the function.

A function yields keys of whet with their values, for one `key` of a `row`, its value, and its counterparts `ours`. It
raises ConfigError, of which the report has a line, where a value has to be set by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from whet.config.convert_cluster import devices_of, roll_devices as roll_devices
from whet.config.foreign import KeyRow
from whet.config.keys import leaf_fields
from whet.config.schema import TrainConfig
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.convert import Conversion

Unit = Iterator[tuple[str, Any]]
_NUMBER = r"[\d.]+(?:[eE][-+]?\d+)?|inf"
# Of rules: no model.
_OF_WORKERS = r"\.(data_args|model_args|strategy_args|world_size|infer_batch_size|device_mapping)\b"
# The newest first.
VERL_MANAGER = ("reward.reward_manager.name", "reward.reward_manager", "reward_model.reward_manager")


def _updates(of: Conversion, role: str) -> int:
    """Updates of a role (actor, critic) in a step; of a run on examples one."""
    values, default = of.result.values, leaf_fields(TrainConfig)["data.train_batch_size"].default
    batch: int = values.get("data.train_batch_size") or default
    mini_batch: int = values.get(f"{role}.mini_batch_size") or batch
    epochs: int = values.get(f"{role}.epochs", 1)
    return -(-batch // mini_batch) * epochs if of.schema is TrainConfig else 1


def updates(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Steps of the loop in updates of the optimizer; a negative number is none."""
    if value > 0:
        yield ours[0], value * _updates(of, ours[0].partition(".")[0])


def steps(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Updates of the optimizer in steps of the loop, rounded up; a number below 1 is a share of all updates."""
    total, each = of.value("max_steps") or -1, _updates(of, "actor")
    updates = value * total if 0 < value < 1 else value
    if updates > 0:
        yield ours[0], math.ceil(updates / each)
    if (0 < value < 1 and total < 0) or (updates > 0 and updates % each):
        of.result.check.append(f"{key}={value}: set {ours[0]}; there it counts updates, and a step has {each} here")


def refills(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """The most batches of a step, of which the first is no refill."""
    if value > 0:
        yield ours[0], value - 1
    else:
        default = leaf_fields(TrainConfig)[ours[0]].default
        of.result.check.append(f"{key}={value}: no limit there; set {ours[0]}, which is {default} where it is not set")


def trackers(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """The trackers, and the two that whet's own commands read."""
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    yield ours[0], list(dict.fromkeys([*(row.values.get(name, name) for name in names), "console", "jsonl"]))


def ratio(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """A share of all steps in updates, where their number is known; TRL's are updates."""
    steps = of.result.values.get("trainer.total_steps")
    if not value:
        return
    if steps and of.result.system == "TRL":
        yield ours[0], math.ceil(value * of.value("max_steps"))
    elif steps:
        yield ours[0], int(value * steps) * _updates(of, ours[0].partition(".")[0])
    else:
        of.result.check.append(f"{key}={value}: set {ours[0]} to this share of all updates, whose number is not known")


def overlong(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """DAPO's penalty, where the buffer is switched on and the manager reads it."""
    manager = next((name for each in VERL_MANAGER if isinstance(name := of.value(each), str)), "naive")
    if manager != "dapo":
        of.result.check.append(f"{key}={value}: left out, as verl's manager {manager} does not read it (dapo does)")
    elif of.given.get(f"{key.rpartition('.')[0]}.enable", True):
        yield ours[0], value


def response_length(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """The length from which DAPO's penalty counts back: that of responses here."""
    if value != of.given.get(ours[0], leaf_fields(TrainConfig)[ours[0]].default):  # one default here and there
        raise ConfigError(key, value, change="the penalty counts back from data.max_response_length here")
    yield from ()


def _weight(level: str, is_masked: bool, low: float | None, high: float | None) -> Unit:
    """The ratio of trainer and sampler as a weight: 0 beyond the bounds where it is masked, else the bound."""
    lower, upper = ("low", "high") if is_masked else ("floor", "cap")
    yield "algorithm.correction.weight", "icepop" if is_masked else "importance"
    yield "algorithm.correction.weight_options.level", level
    if is_masked or low is not None:
        yield f"algorithm.correction.weight_options.{lower}", low or 0.0
    yield f"algorithm.correction.weight_options.{upper}", math.inf if high is None else high


def verl_weight(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """A threshold is the cap, or `low_high` the bounds outside which the weight is 0."""
    if key != row.theirs[0] or not value:
        return
    low, high = _bounds(of, row, 2.0)
    is_masked = low is not None
    yield from _weight(value, is_masked, low, high)
    if of.given.get(row.theirs[2]) and is_masked:
        of.result.check.append(f"{row.theirs[2]}=True: icepop is not divided by its mean here")
    elif of.given.get(row.theirs[2]):
        yield row.ours[2], True


def _bounds(of: Conversion, row: KeyRow, default: Any) -> tuple[float | None, float]:
    """The lower and the upper one of `low_high` or `high`.  Raises: ConfigError where they are no numbers."""
    text = of.given.get(row.theirs[1], default)
    found = re.fullmatch(rf"(?:({_NUMBER})_)?({_NUMBER})", str(text))
    if found is None or float(found[2]) <= 0:
        raise ConfigError(row.theirs[1], text, "a bound", f"no bound; set {row.ours[0]} by hand")
    return float(found[1]) if found[1] else None, float(found[2])


def verl_rejection(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Bounds of k1 are bounds of the ratio there, the lower one by default 1 / upper; of k2 and k3 there is one."""
    if key != row.theirs[0] or not value:
        return
    level, _, form = value.rpartition("_")
    if "," in value or form not in ("k1", "k2", "k3") or not of.given.get(row.theirs[1]):
        change = f"set {ours[0]} to one of these, with the bounds {row.theirs[1]}"
        raise ConfigError(key, value, change=change)
    low, upper = _bounds(of, row, None)
    yield "algorithm.correction.rejection", "divergence"
    options = {"form": form, "level": level.replace("seq", "sequence")}
    options |= {"low": math.log(low or 1 / upper), "high": math.log(upper)} if form == "k1" else {"high": upper}
    for name, each in options.items():
        yield f"algorithm.correction.rejection_options.{name}", each


def trl_batches(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Prompts of a step and of an update, from products that count responses. A step is one batch of generation, or
    one update where that needs several."""
    given, n = of.given, of.value("num_generations")
    processes, gathered = given.get("num_processes", 1), given.get("gradient_accumulation_steps", 1)
    if "num_processes" not in given:
        of.result.check.append("num_processes is not set: batch sizes are those of one process; multiply them by yours")
    pass_size = given.get("per_device_train_batch_size", 8) * processes
    step = given.get("generation_batch_size") or pass_size * given.get("steps_per_generation", gathered)
    yield from _prompts(of, max(step, pass_size * gathered), pass_size * gathered, n)


def _has_environments(of: Conversion) -> bool:
    return any(key.startswith(("train_env_manager.", "custom_envs.")) for key in of.given)


def roll_lengths(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Tokens of a response: those of a sequence without its prompt, or max_new_tokens, with environments of a turn."""
    sequence, *of_turn = row.theirs
    if key == sequence:
        if value > (prompt := of.value("prompt_length")):
            yield ours[0], value - prompt
        else:
            of.result.check.append(f"{key}={value}: set {ours[0]}, since prompt_length={prompt} leaves no response")
    elif _has_environments(of) or key == of_turn[0]:
        yield "environment.max_turn_tokens", min(of.given[each] for each in of_turn if each in of.given)
    elif not {sequence, "response_length"} & {*of.given}:
        yield ours[0], value
    elif value != of.result.values.get(ours[0]):
        of.result.ignored.append(f"{key}={value}: without effect beside response_length or {sequence}")


def _responses(of: Conversion) -> tuple[int, int]:
    """Responses of a step and of a prompt."""
    if _has_environments(of):  # the batch size counts trajectories
        return of.value("rollout_batch_size"), of.given.get("train_env_manager.group_size", 1)
    n = of.value("num_return_sequences_in_group")
    return of.value("rollout_batch_size") * n, n


def roll_step(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Prompts of a step."""
    step, n = _responses(of)
    yield from ((target, each) for target, each in _prompts(of, step, n, n) if target == ours[0])


def roll_batches(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Prompts or examples of an update: rows of a device, times accumulation, times the ranks that read other rows."""
    given, role = of.given, key.partition(".")[0]
    ranks = len(devices_of(given.get(f"{role}.device_mapping", [0])) or [0])
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= given.get(f"{role}.strategy_args.strategy_config.{name}", 1)
    update = value * given.get(f"{role}.training_args.gradient_accumulation_steps", 1) * max(1, ranks)
    if of.schema is not TrainConfig:
        yield ours[0], update
        return
    step, n = _responses(of)
    yield from ((target, each) for target, each in _prompts(of, step, min(update, step), n) if target == ours[0])


def _prompts(of: Conversion, step: int, update: int, n: int) -> Unit:
    if step % n or update % n or step % update:
        of.result.check.append(
            f"a step has {step} and an update {update} responses, {n} a prompt: whole groups have no such sizes"
        )
        update = max(n, update - update % n)
        step = max(update, step - step % update)
    yield "data.train_batch_size", step // n
    yield "actor.mini_batch_size", update // n


def function_path(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """A function by the path of its module, or `reward_func` of a file; no function of a URL."""
    if str(value).endswith(".py"):
        yield ours[0], f"{value}:reward_func"
    elif "/" not in str(value) and "." in str(value):
        yield ours[0], ":".join(str(value).rsplit(".", 1))
    else:
        of.result.check.append(f"{key}={value}: set {ours[0]}{f' ({row.remark})' if row.remark else ''}")


def functions(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Functions of the script; the others are asked for."""
    names = [value] if isinstance(value, str) else [str(each) for each in value]
    if others := [name for name in names if ":" not in name]:
        of.result.check.append(f"{key}={', '.join(others)}: set {ours[0]} ({row.remark})")
    yield ours[0], [name for name in names if ":" in name]


def roll_environment(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """The environment of the first tag of training, with its settings."""
    tags = of.given.get("train_env_manager.tags") or [""]
    used = list(dict.fromkeys(tags if isinstance(tags, list) else [tags]))
    of_tag = {name.split(".", 2)[2]: each for name, each in value.items() if name.startswith(f"{key}.{used[0]}.")}
    name = row.values.get(of_tag.get("env_type"))
    if name is None or len(used) > 1:
        found = ", ".join(str(value.get(f"{key}.{tag}.env_type", tag)) for tag in used)
        of.result.check.append(f"{key}: set {' and '.join(ours)} for {found or 'its env_type'} ({row.remark})")
    if name is not None:
        yield ours[0], name
        settings = {each.removeprefix("env_config."): given for each, given in of_tag.items() if "env_config." in each}
        of.result.check += [f"{key}.{used[0]}.env_config: set {ours[1]} from {settings}"] if settings else []


def shares(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Shares of domains, of which the last has the rest."""
    *first, last = (name for name in value)
    domains = {name.rpartition(".")[2]: round(value[name], 6) for name in first}
    yield ours[0], {**domains, last.rpartition(".")[2]: round(1 - sum(domains.values()), 6)}


def roll_norm(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Rewards of environments are normalised as this says, whatever the estimator."""
    if key != row.theirs[0] or of.value("adv_estimator") in ("step_reinforce", "gigpo"):
        return
    over = "batch" if of.given.get(row.theirs[1], "batch") == "batch" else "group"
    methods = {row.ours[0]: ("mean", "mean_std", "asym_clip"), row.ours[1]: ("mean_std", "asym_clip")}
    for name, with_it in methods.items():
        of.result.values.pop(name, None)
        yield name, over if value in with_it else "none"


def rewards(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """ROLL's worker classes as functions: one for all rows, or one for each domain."""
    workers = {name.split(".")[1]: each for name, each in value.items() if name.endswith(".worker_cls")}
    for name, each in value.items():
        if "llm_judge" not in name and re.search(_OF_WORKERS, name):
            of.result.speed.append(name)
        elif not name.endswith((".worker_cls", ".tag_included")):
            of.result.without.append(f"{name}={each}")
    for domain, worker in workers.items():
        function, _, note = row.values.get(worker.rpartition(".")[2], "").partition("; ")
        if note or not function:
            asked = note or f"set reward.domains.{domain}.function"
            of.result.check.append(f"rewards.{domain}.worker_cls={worker}: {asked}")
        if not function:
            continue
        if len(workers) == 1:
            yield "reward.function", function
            continue
        yield f"reward.domains.{domain}.function", function
        if sources := value.get(f"rewards.{domain}.tag_included"):
            yield f"reward.domains.{domain}.sources", sources


def trl_weight(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """The weight for vLLM's probabilities by its mode, such as token_truncate, with the bounds of other keys."""
    mode, *uppers, lower = row.theirs
    if key == mode:
        level, _, how = value.partition("_")
        unbounded = None if uppers[0] in of.nulls else 3.0
        high = next((of.given[each] for each in reversed(uppers) if each in of.given), unbounded)
        yield from _weight(level, how == "mask", of.given.get(lower), high)


def trl_rewards(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Functions of trl.rewards, and others by the path of their module; the penalty for length is no function here."""
    names = [value] if isinstance(value, str) else [str(each) for each in value]
    weights, kept = of.result.values.get("reward.weights") or [1.0] * len(names), dict[str, Any]()
    for name, weight in zip(names, weights, strict=False):
        made, _, options = name.partition("(")
        numbers = [int(number) for number in re.findall(r"\b\d+\b", options)] or [1280, 256]  # those of `trl grpo`
        if made == "get_soft_overlong_punishment" and numbers[:1] == [of.value("max_completion_length")]:
            yield "algorithm.overlong.penalty", weight
            yield "algorithm.overlong.buffer_length", numbers[-1]
        elif name in row.values or ":" in name or re.fullmatch(r"[\w.]+\.\w+", name):
            kept[name if ":" in name else row.values.get(name, ":".join(name.rsplit(".", 1)))] = weight
            if name in row.values:
                other = ", or reward.function=math" if "accuracy" in name else ""
                of.result.check.append(f"{key}={name}: reads trl.rewards, so install trl{other}")
        else:
            change = f"set reward.function, with {name} as path/file.py:function"
            raise ConfigError(key, ", ".join(names), change=change)
    if "reward.weights" in of.result.values:
        of.result.values["reward.weights"] = list(kept.values())
    if kept:
        yield ours[0], list(kept) if len(kept) > 1 else next(iter(kept))
