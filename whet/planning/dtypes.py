# SPDX-License-Identifier: Apache-2.0
"""The dtype for the config value `auto`: bfloat16 if all machines of a run have instructions for it, else float32.

Without such instructions a bfloat16 matrix product takes ten to eighty times as long as a float32 one (LOG.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, TypeVar

from whet import devices
from whet.config.cluster import ClusterConfig
from whet.config.schema import Dtype, Section
from whet.planning.machine import uses_accelerators

log = logging.getLogger(__name__)
C = TypeVar("C", bound=Section)


def with_dtypes(config: C, kept: Mapping[str, Dtype] | None = None, *, elsewhere: bool = False) -> C:
    """Replaces each dtype `auto` in a config by a named dtype. `kept` has the dtypes of the run that is resumed, by
    key. `elsewhere`: the plan is for accelerators of other machines.

    Logs the dtypes, and warns of bfloat16 where it is slow.  Raises: ConfigError if Ray's nodes cannot be reached."""
    kept, cluster = kept or {}, config.get("cluster")
    wanted = {name: config[name].dtype for name in ("model", "rollout") if name in config}
    wanted = {name: kept.get(f"{name}.dtype", dtype) if dtype == "auto" else dtype for name, dtype in wanted.items()}
    named: dict[str, Dtype] = {"model": choose(wanted["model"], "model.dtype", cluster, elsewhere)}
    if "rollout" in wanted:  # the sampler's probabilities are nearest to those of training in the same dtype
        is_same = wanted["rollout"] in ("auto", named["model"])
        named["rollout"] = named["model"] if is_same else choose(wanted["rollout"], "rollout.dtype", cluster, elsewhere)
    sections = {name: config[name].model_copy(update={"dtype": dtype}) for name, dtype in named.items()}
    return config.model_copy(update=sections)


def choose(
    dtype: Dtype, key: str, cluster: ClusterConfig | None = None, elsewhere: bool = False
) -> Literal["float32", "bfloat16"]:
    """Chooses the dtype for `auto` on the machines of a run (None: this process). Other dtypes are returned unchanged,
    with a warning for bfloat16 if a machine has no instructions for it. `key` names the setting."""
    if dtype == "float32":
        return dtype
    has_bfloat16, why = (True, "accelerators multiply it") if elsewhere else _machines(cluster)
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16 else "float32"
        log.info("dtype: %s, since %s (%s=auto)", dtype, why, key)
    elif not has_bfloat16:
        log.warning(
            "%s=bfloat16, but %s: a product of it takes ten to eighty times as long as one of float32; set %s=float32, "
            "or auto, which chooses by the machine",
            *(key, why, key),
        )
    return dtype


def _machines(cluster: ClusterConfig | None) -> tuple[bool, str]:
    """Tells whether all machines of a run have instructions for bfloat16, and the reason."""
    if cluster is not None and cluster.backend == "ray":
        if uses_accelerators(cluster):
            return True, "accelerators multiply it"
        from whet.controller.ray.survey import bfloat16_by_node

        found = bfloat16_by_node(cluster)
        if lacking := [node for node, instructions in found.items() if not instructions]:
            return False, f"the processor of node {lacking[0]} has no instructions for bfloat16"
        if found:
            return True, "the processors of all nodes multiply it"
    elif devices.count() >= (1 if cluster is None else cluster.devices):
        has_bfloat16 = devices.accelerates_bfloat16()
        return has_bfloat16, f"the accelerator {'multiplies it' if has_bfloat16 else 'has no bfloat16 instructions'}"
    if instructions := devices.bfloat16_instructions():
        return True, f"this processor multiplies it by {', '.join(instructions)}"
    return False, "this processor has no instructions for bfloat16"
