# SPDX-License-Identifier: Apache-2.0
"""Converts keys whose values need a calculation or other keys: `unit` in foreign_keys.yaml names the function.

A function yields keys of whet with their values for one key of another framework. It raises ConfigError if the user has
to set the value by hand; the report shows the error. `place` completes processes and devices at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.config.schema import TrainConfig
from whet.config.section import leaf_fields
from whet.errors import ConfigError
from whet.options import as_list
from whet.plugins.migration.foreign import KeyRow
from whet.plugins.migration.foreign_python import calculated

if TYPE_CHECKING:
    from whet.plugins.migration.convert import Conversion

Unit = Iterator[tuple[str, Any]]
_NUMBER = r"[\d.]+(?:[eE][-+]?\d+)?|inf"
# Keys of reward workers; a worker that scores by rules has no model.
_OF_WORKERS = r"\.(data_args|model_args|strategy_args|world_size|infer_batch_size|device_mapping)\b"
# Keys of the reward manager's name, the newest first.
VERL_MANAGER = ("reward.reward_manager.name", "reward.reward_manager", "reward_model.reward_manager")
GPUS_OF_A_NODE = 8
_SAMPLE = "cluster.placement.sample"
_SIZES = ("mesh.tensor", "mesh.context", "mesh.shard")


class Key(NamedTuple):
    """A key of another framework: its value, its row in the tables, and the keys of whet for it."""

    name: str
    value: Any
    row: KeyRow
    ours: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def _updates(of: Conversion, role: str) -> int:
    """Returns the number of updates of a role (actor, critic) in a step; 1 if the command is not `whet train`."""
    values, default = of.result.values, leaf_fields(TrainConfig)["data.train_batch_size"].default
    batch: int = values.get("data.train_batch_size") or default
    mini_batch: int = values.get(f"{role}.mini_batch_size") or batch
    epochs: int = values.get(f"{role}.epochs", 1)
    return -(-batch // mini_batch) * epochs if of.schema is TrainConfig else 1


def updates(of: Conversion, key: Key) -> Unit:
    """Converts a number of steps to a number of optimizer updates; a negative number counts as unset."""
    if key.value > 0:
        yield key.ours[0], key.value * _updates(of, key.ours[0].partition(".")[0])


def steps(of: Conversion, key: Key) -> Unit:
    """Converts optimizer updates to steps of the loop, rounded up. A number below 1 is a fraction of all updates."""
    total, each = of.value("max_steps") or -1, _updates(of, "actor")
    updates = key.value * total if 0 < key.value < 1 else key.value
    if updates > 0:
        yield key.ours[0], math.ceil(updates / each)
    if (0 < key.value < 1 and total < 0) or (updates > 0 and updates % each):
        of.result.check.append(f"{key}: set {key.ours[0]}; there it counts updates, and a step has {each} here")


def refills(of: Conversion, key: Key) -> Unit:
    """Converts the maximum number of batches in a step to the maximum number of refills, which is one less."""
    if key.value > 0:
        yield key.ours[0], key.value - 1
    else:
        default = leaf_fields(TrainConfig)[key.ours[0]].default
        of.result.check.append(f"{key}: no limit there; set {key.ours[0]}, which is {default} where it is not set")


def trackers(of: Conversion, key: Key) -> Unit:
    """Converts the list of trackers, and adds `console` and `jsonl`, which whet's own commands read."""
    names = [each.strip() for each in key.value.split(",")] if isinstance(key.value, str) else key.value
    yield key.ours[0], list(dict.fromkeys([*(key.row.values.get(name, name) for name in names), "console", "jsonl"]))


def ratio(of: Conversion, key: Key) -> Unit:
    """Converts a fraction of all steps (in TRL: of all updates) to a number of updates, if the number of steps is
    known. A value of at least 1 already is a number of updates."""
    steps = of.result.values.get("trainer.total_steps")
    if not key.value:
        return
    if key.value >= 1:
        yield key.ours[0], key.value
    elif steps and of.result.system == "TRL":
        yield key.ours[0], math.ceil(key.value * of.value("max_steps"))
    elif steps:
        yield key.ours[0], int(key.value * steps) * _updates(of, key.ours[0].partition(".")[0])
    else:
        of.result.check.append(f"{key}: set {key.ours[0]} to this share of all updates, whose number is not known")


def one_word(of: Conversion, key: Key) -> Unit:
    """Translates a value, or the only item of a list, by the row's `values`."""
    [word] = as_list(key.value)
    yield key.ours[0], key.row.values[word]


def overlong(of: Conversion, key: Key) -> Unit:
    """Converts DAPO's length penalty, if its buffer is switched on and the reward manager reads it."""
    manager = next((name for each in VERL_MANAGER if isinstance(name := of.value(each), str)), "naive")
    if manager != "dapo":
        of.result.check.append(f"{key}: left out, as verl's manager {manager} does not read it (dapo does)")
    elif of.given.get(f"{key.name.rpartition('.')[0]}.enable", True):
        yield key.ours[0], key.value


def response_length(of: Conversion, key: Key) -> Unit:
    """Checks that DAPO's length penalty and the response length use the same limit, as whet requires."""
    default = leaf_fields(TrainConfig)[key.ours[0]].default  # the same in whet and verl
    if key.value != of.given.get(key.ours[0], default):
        raise ConfigError(key.name, key.value, change="whet's penalty counts back from data.max_response_length")
    yield from ()


def _weight(level: str, is_masked: bool, low: float | None, high: float | None) -> Unit:
    """Yields the keys of the importance weight. Outside the bounds it is 0 with `is_masked`, else it is clipped."""
    lower, upper = ("low", "high") if is_masked else ("floor", "cap")
    yield "algorithm.correction.weight", "icepop" if is_masked else "importance"
    yield "algorithm.correction.weight_options.level", level
    if is_masked or low is not None:
        yield f"algorithm.correction.weight_options.{lower}", low or 0.0
    yield f"algorithm.correction.weight_options.{upper}", math.inf if high is None else high


def verl_weight(of: Conversion, key: Key) -> Unit:
    """Converts verl's importance weight. A single threshold becomes the cap; outside `low_high` the weight is 0."""
    if key.name != key.row.theirs[0] or not key.value:
        return
    low, high = _bounds(of, key.row, 2.0)
    is_masked = low is not None
    yield from _weight(key.value, is_masked, low, high)
    if of.given.get(key.row.theirs[2]) and is_masked:
        of.result.check.append(f"{key.row.theirs[2]}=True: icepop is not divided by its mean here")
    elif of.given.get(key.row.theirs[2]):
        yield key.row.ours[2], True


def _bounds(of: Conversion, row: KeyRow, default: Any) -> tuple[float | None, float]:
    """Returns the lower and the upper bound from `low_high` or `high`.  Raises: ConfigError if they are not numbers."""
    text = of.given.get(row.theirs[1], default)
    found = re.fullmatch(rf"(?:({_NUMBER})_)?({_NUMBER})", str(text))
    if found is None or float(found[2]) <= 0:
        raise ConfigError(row.theirs[1], text, "a bound", f"no bound; set {row.ours[0]} by hand")
    return float(found[1]) if found[1] else None, float(found[2])


def verl_rejection(of: Conversion, key: Key) -> Unit:
    """Converts verl's rejection. k1 bounds the ratio on both sides (default: 1 / upper to upper), k2 and k3 above."""
    if key.name != key.row.theirs[0] or not key.value:
        return
    level, _, form = key.value.rpartition("_")
    if "," in key.value or form not in ("k1", "k2", "k3") or not of.given.get(key.row.theirs[1]):
        change = f"set {key.ours[0]} to one of these, with the bounds {key.row.theirs[1]}"
        raise ConfigError(key.name, key.value, change=change)
    low, upper = _bounds(of, key.row, None)
    yield "algorithm.correction.rejection", "divergence"
    options = {"form": form, "level": level.replace("seq", "sequence")}
    options |= {"low": math.log(low or 1 / upper), "high": math.log(upper)} if form == "k1" else {"high": upper}
    for name, each in options.items():
        yield f"algorithm.correction.rejection_options.{name}", each


def trl_batches(of: Conversion, key: Key) -> Unit:
    """Converts TRL's batch sizes, which count responses, to the numbers of prompts in a step and in an update. A step
    is one batch of generation, or one update if an update needs several such batches."""
    given, n = of.given, of.value("num_generations")
    processes, gathered = given.get("num_processes", 1), given.get("gradient_accumulation_steps", 1)
    if "num_processes" not in given:
        of.result.check.append("num_processes is not set: batch sizes are of one process; multiply by your processes")
    pass_size = given.get("per_device_train_batch_size", 8) * processes
    step = given.get("generation_batch_size") or pass_size * given.get("steps_per_generation", gathered)
    yield from _prompts(of, max(step, pass_size * gathered), pass_size * gathered, n)


def _has_environments(of: Conversion) -> bool:
    return any(key.startswith(("train_env_manager.", "custom_envs.")) for key in of.given)


def roll_lengths(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's response length: sequence - prompt, or max_new_tokens, which limits a turn with environments."""
    sequence, *of_turn = key.row.theirs
    if key.name == sequence:
        if key.value > (prompt := of.value("prompt_length")):
            yield key.ours[0], key.value - prompt
        else:
            of.result.check.append(f"{key}: set {key.ours[0]}, since prompt_length={prompt} leaves no response")
    elif _has_environments(of) or key.name == of_turn[0]:
        yield "environment.max_turn_tokens", min(of.given[each] for each in of_turn if each in of.given)
    elif not {sequence, "response_length"} & {*of.given}:
        yield key.ours[0], key.value
    elif key.value != of.result.values.get(key.ours[0]):
        of.result.ignored.append(f"{key}: without effect beside response_length or {sequence}")


def _responses(of: Conversion) -> tuple[int, int]:
    """Returns the number of responses in a step, and the number of responses to a prompt."""
    if _has_environments(of):  # the batch size counts trajectories
        return of.value("rollout_batch_size"), of.given.get("train_env_manager.group_size", 1)
    n = of.value("num_return_sequences_in_group")
    return of.value("rollout_batch_size") * n, n


def roll_step(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's rollout batch size to the number of prompts in a step."""
    step, n = _responses(of)
    yield from ((target, each) for target, each in _prompts(of, step, n, n) if target == key.ours[0])


def roll_batches(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's update size: rows of a device times gradient accumulation times data-parallel ranks."""
    given, role = of.given, key.name.partition(".")[0]
    ranks = len(devices_of(given.get(f"{role}.device_mapping", [0])) or [0])
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= given.get(f"{role}.strategy_args.strategy_config.{name}", 1)
    update = key.value * given.get(f"{role}.training_args.gradient_accumulation_steps", 1) * max(1, ranks)
    if of.schema is not TrainConfig:
        yield key.ours[0], update
        return
    step, n = _responses(of)
    yield from ((target, each) for target, each in _prompts(of, step, min(update, step), n) if target == key.ours[0])


def _prompts(of: Conversion, step: int, update: int, n: int) -> Unit:
    if step % n or update % n or step % update:
        of.result.check.append(
            f"a step has {step} and an update {update} responses, {n} a prompt: the sizes are rounded to groups"
        )
        update = max(n, update - update % n)
        step = max(update, step - step % update)
    yield "data.train_batch_size", step // n
    yield "actor.mini_batch_size", update // n


def function_path(of: Conversion, key: Key) -> Unit:
    """Converts MODULE.NAME to MODULE:NAME, and FILE.py to FILE.py:reward_func. The report asks for any other value."""
    if str(key.value).endswith(".py"):
        yield key.ours[0], f"{key.value}:reward_func"
    elif "/" not in str(key.value) and "." in str(key.value):
        yield key.ours[0], ":".join(str(key.value).rsplit(".", 1))
    else:
        of.result.check.append(f"{key}: set {key.ours[0]}{f' ({key.row.remark})' if key.row.remark else ''}")


def functions(of: Conversion, key: Key) -> Unit:
    """Keeps functions of the script, written PATH:NAME; for other functions the report asks the user to set the key."""
    names = [str(each) for each in as_list(key.value)]
    if others := [name for name in names if ":" not in name]:
        of.result.check.append(f"{key.name}={', '.join(others)}: set {key.ours[0]} ({key.row.remark})")
    yield key.ours[0], [name for name in names if ":" in name]


def roll_environment(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's environment of the first training tag; the report asks the user to set the options."""
    tags = of.given.get("train_env_manager.tags") or [""]
    used = list(dict.fromkeys(as_list(tags)))
    below = f"{key.name}.{used[0]}."
    of_tag = {name.removeprefix(below): each for name, each in key.value.items() if name.startswith(below)}
    name = key.row.values.get(of_tag.get("env_type"))
    if name is None or len(used) > 1:
        found = ", ".join(str(key.value.get(f"{key.name}.{tag}.env_type", tag)) for tag in used)
        asked = f"set {' and '.join(key.ours)} for {found or 'its env_type'} ({key.row.remark})"
        of.result.check.append(f"{key.name}: {asked}")
    if name is not None:
        yield key.ours[0], name
        settings = {each.removeprefix("env_config."): given for each, given in of_tag.items() if "env_config." in each}
        of.result.check += [f"{key.name}.{used[0]}.env_config: set {key.ours[1]} from {settings}"] if settings else []


def shares(of: Conversion, key: Key) -> Unit:
    """Converts the sampling shares of data domains; the last domain gets the rest."""
    *first, last = (name for name in key.value)
    domains = {name.rpartition(".")[2]: round(key.value[name], 6) for name in first}
    yield key.ours[0], {**domains, last.rpartition(".")[2]: round(1 - sum(domains.values()), 6)}


def roll_norm(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's normalisation of rewards in environments, for all estimators but step_reinforce and gigpo."""
    if key.name != key.row.theirs[0] or of.value("adv_estimator") in ("step_reinforce", "gigpo"):
        return
    over = "batch" if of.given.get(key.row.theirs[1], "batch") == "batch" else "group"
    methods = {key.row.ours[0]: ("mean", "mean_std", "asym_clip"), key.row.ours[1]: ("mean_std", "asym_clip")}
    for name, with_it in methods.items():
        of.result.values.pop(name, None)
        yield name, over if key.value in with_it else "none"


def rewards(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's reward worker classes to reward functions: one for all rows, or one for each domain."""
    workers = {name.split(".")[1]: each for name, each in key.value.items() if name.endswith(".worker_cls")}
    for name, each in key.value.items():
        if "llm_judge" not in name and re.search(_OF_WORKERS, name):
            of.result.speed.append(name)
        elif not name.endswith((".worker_cls", ".tag_included")):
            of.result.without.append(f"{name}={each}")
    for domain, worker in workers.items():
        function, _, note = key.row.values.get(worker.rpartition(".")[2], "").partition("; ")
        if note or not function:
            asked = note or f"set reward.domains.{domain}.function"
            of.result.check.append(f"rewards.{domain}.worker_cls={worker}: {asked}")
        if not function:
            continue
        if len(workers) == 1:
            yield "reward.function", function
            continue
        yield f"reward.domains.{domain}.function", function
        if sources := key.value.get(f"rewards.{domain}.tag_included"):
            yield f"reward.domains.{domain}.sources", sources


def trl_weight(of: Conversion, key: Key) -> Unit:
    """Converts TRL's importance weights for vLLM by their mode, such as token_truncate; other keys give the bounds."""
    mode, *uppers, lower = key.row.theirs
    if key.name == mode:
        level, _, how = key.value.partition("_")
        unbounded = None if uppers[0] in of.nulls else 3.0
        high = next((of.given[each] for each in reversed(uppers) if each in of.given), unbounded)
        yield from _weight(level, how == "mask", of.given.get(lower), high)


def trl_rewards(of: Conversion, key: Key) -> Unit:
    """Converts reward functions of trl.rewards, or MODULE.NAME. TRL's length penalty becomes `algorithm.overlong`."""
    names = [str(each) for each in as_list(key.value)]
    weights, kept = of.result.values.get("reward.weights") or [1.0] * len(names), dict[str, Any]()
    for name, weight in zip(names, weights, strict=False):
        made, _, options = name.partition("(")
        numbers = [int(number) for number in re.findall(r"\b\d+\b", options)] or [1280, 256]  # numbers of `trl grpo`
        if made == "get_soft_overlong_punishment" and numbers[:1] == [of.value("max_completion_length")]:
            yield "algorithm.overlong.penalty", weight
            yield "algorithm.overlong.buffer_length", numbers[-1]
        elif name in key.row.values or ":" in name or re.fullmatch(r"[\w.]+\.\w+", name):
            kept[name if ":" in name else key.row.values.get(name, ":".join(name.rsplit(".", 1)))] = weight
            if name in key.row.values:
                other = ", or reward.function=math" if "accuracy" in name else ""
                of.result.check.append(f"{key.name}={name}: reads trl.rewards, so install trl{other}")
        else:
            change = f"set reward.function, with {name} as path/file.py:function"
            raise ConfigError(key.name, ", ".join(names), change=change)
    if "reward.weights" in of.result.values:
        of.result.values["reward.weights"] = list(kept.values())
    if kept:
        yield key.ours[0], list(kept) if len(kept) > 1 else next(iter(kept))


def place(of: Conversion) -> None:
    """Completes `cluster`: the numbers of nodes and GPUs, and Ray for several nodes. Drops mesh sizes that do not
    divide the number of processes, and the sharding engine if there is one process."""
    values, origins = of.result.values, of.result.origins
    nodes, gpus = values.get("cluster.nnodes", 1), values.get("cluster.n_gpus_per_node", 1)
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return  # refused by the check of all values
    training = max(1, nodes * gpus)
    own = values.get("cluster.placement.train.processes")
    if own:
        size = values.get(f"{_SAMPLE}.devices", 1)
        values[f"{_SAMPLE}.devices"] = devices = min(size, GPUS_OF_A_NODE)  # an engine stays on one node
        values[f"{_SAMPLE}.processes"] = values.get(f"{_SAMPLE}.processes", 1) * max(1, size // devices)
        training, total = own, own + values[f"{_SAMPLE}.processes"] * devices
        gpus = total if total <= GPUS_OF_A_NODE else GPUS_OF_A_NODE if total % GPUS_OF_A_NODE == 0 else gpus
        nodes = -(-total // gpus)
    elif (rows := _rows(of)) < training:
        of.result.parallel.append(f"{training} GPUs are more than the {rows} rows of an update; {rows} are used")
        training, gpus, nodes = rows, rows, 1
    if own or "cluster.n_gpus_per_node" in values:
        values |= {"cluster.nnodes": nodes, "cluster.n_gpus_per_node": gpus}
        origins |= {
            f"cluster.{each}": origins.get(f"cluster.{each}", "pools") for each in ("nnodes", "n_gpus_per_node")
        }
    if nodes == 1:
        values.pop("cluster.nnodes", None)
    else:
        of.write("cluster.backend", "ray", "several nodes")
    for key in [key for key in values if re.match(r"(\w+\.)?engine\.(name$|options\.)", key) and "rollout" not in key]:
        role, _, option = key.rpartition("engine.")
        context = values.get(f"{role}engine.options.mesh.context", 1)
        if option == "options.mesh.shard" and values[key] % context == 0:
            values[key] //= context  # the other framework's size counts the ranks that share tokens too
        if training == 1:
            left_out = "is for several processes, and there is one"
        elif option[8:] in _SIZES and training % values[key]:
            left_out = f"does not divide the {training} processes"
        else:
            of.write(f"{role}engine.name", "fsdp", origins[key], over=False)
            continue
        if not origins[key].startswith("default"):
            of.result.parallel.append(f"{origins[key]}={values[key]}: {left_out}; left out")
        del values[key], origins[key]


def _rows(of: Conversion) -> int:
    """Returns the number of rows in an update of the policy; 10**9 (no limit) if the command is not `whet train`."""
    values = of.result.values
    prompts = values.get("actor.mini_batch_size") or values.get("data.train_batch_size") or 32
    return max(1, prompts * values.get("rollout.n", 8)) if of.result.command == "train" else 10**9


def devices_of(value: Any) -> list[int] | None:
    """Parses device numbers, such as `list(range(0,8))`, `[0, 1]` or a sum of these; None for anything else."""
    if isinstance(value, list):
        return value
    try:
        found = calculated(str(value))
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(each, int) for each in found) else None


def roll_devices(of: Conversion, key: Key) -> Unit:
    """Converts ROLL's device lists: roles share a pool, or sampling gets its own. Also sets the number of nodes."""
    if key.name != key.row.theirs[0]:
        return
    training, sampling = (devices_of(of.given.get(each, [])) for each in key.row.theirs[:2])
    if training is None or sampling is None:
        of.result.parallel.append(f"{key}: not read; set cluster.n_gpus_per_node and cluster.placement")
        return
    config = "actor_infer.strategy_args.strategy_config."
    size = of.given.get("actor_infer.num_gpus_per_worker") or of.given.get(f"{config}tensor_parallel_size") or 1
    if sampling and not {*training} & {*sampling}:
        size = size if len(sampling) % size == 0 else 1
        yield from {
            "cluster.placement.train.processes": len(training),
            "cluster.placement.train.roles": ["actor"],
            f"{_SAMPLE}.processes": len(sampling) // size,
            f"{_SAMPLE}.roles": ["rollout"],
            f"{_SAMPLE}.devices": size,
        }.items()
        return
    if sampling and {*training} != {*sampling}:
        told = f"{len(training)} train and {len(sampling)} sample, some do both; in whet all {len(training)} do both"
        of.result.parallel.append(f"{key.row.theirs[1]}={of.given[key.row.theirs[1]]}: {told}")
    gpus = max(1, min(len(training), of.value("num_gpus_per_node") or GPUS_OF_A_NODE))
    gpus = gpus if len(training) % gpus == 0 else len(training)
    yield "cluster.n_gpus_per_node", gpus
    yield "cluster.nnodes", max(1, len(training) // gpus)
