# SPDX-License-Identifier: Apache-2.0
"""Saves a model with the checkpoint manager of verl, or of a checkout of EasyR1. Runs in the peers' environment:

python checkpoint_worker.py MODEL OUT PROCESSES FSDP_SIZE fsdp|fsdp2 [CHECKOUT]

Each process makes the model at MODEL, shards it as verl does, and writes its file below OUT; of verl, rank 0 then also
merges the files with verl's own merger, into OUT/merged.
"""

# ruff: noqa: E402  # EasyR1's package is named verl too
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:1] = sys.argv[6:]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import (  # type: ignore[import-not-found]  # of another environment
    FSDPCheckpointManager,
)
from verl.utils.fsdp_utils import get_fsdp_wrap_policy  # type: ignore[import-not-found]


def save(rank: int, model_path: str, out: str, processes: str, fsdp_size: str, kind: str, *checkout: str) -> None:
    """The program of one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=rank, world_size=int(processes))
    sizes = (int(processes),) if fsdp_size == processes else (int(processes) // int(fsdp_size), int(fsdp_size))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[-len(sizes) :])
    module: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if kind == "fsdp2":
        from verl.utils.fsdp_utils import apply_fsdp2

        apply_fsdp2(module, {"mesh": mesh}, {})
    else:
        strategy = ShardingStrategy.FULL_SHARD if len(sizes) == 1 else ShardingStrategy.HYBRID_SHARD
        module = FullyShardedDataParallel(
            module,
            auto_wrap_policy=get_fsdp_wrap_policy(module),
            sharding_strategy=strategy,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=bool(checkout),
        )
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    only = {"save_model_only": True} if checkout else {}  # EasyR1 saves the generator of a GPU beside optimizers
    FSDPCheckpointManager(module, optimizer, schedule, tokenizer).save_checkpoint(out, **only)
    dist.destroy_process_group()


if __name__ == "__main__":
    model_path, out, processes, fsdp_size, kind, *checkout = sys.argv[1:]
    mp.start_processes(save, tuple(sys.argv[1:]), nprocs=int(processes), start_method="fork")
    if not checkout:
        from verl.model_merger.base_model_merger import ModelMergerConfig  # type: ignore[import-not-found]
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger  # type: ignore[import-not-found]

        given = {"target_dir": str(Path(out) / "merged"), "hf_model_config_path": str(Path(out) / "huggingface")}
        config = ModelMergerConfig(operation="merge", backend="fsdp", local_dir=out, **given)
        FSDPModelMerger(config).merge_and_save()
