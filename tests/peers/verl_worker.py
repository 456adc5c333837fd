# SPDX-License-Identifier: Apache-2.0
"""Calls verl's own functions on batches from a file and writes their results. Runs in the peers' environment:

python verl_worker.py IN OUT
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper  # type: ignore[import-not-found]  # of another environment
from verl.workers.config import ActorConfig  # type: ignore[import-not-found]


class Config(SimpleNamespace):
    """Attributes that verl reads in either way."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def estimate(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """verl's advantages."""
    parts = {
        name: np.array(part.tolist(), dtype=object) for name, part in zip("ab", batch["reward_parts"].T, strict=True)
    }
    given = {
        **{column: batch[column].clone() for column in batch if column != "uid"},
        "non_tensor_batch": parts,
        "batch": {"prompts": torch.zeros(len(batch["uid"]), 1), "attention_mask": attention_mask(batch)},
        "index": np.array([str(each) for each in batch["uid"].tolist()], dtype=object),
        "config": Config(**options),
        **options,
    }
    if "cap" in options:
        ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp()
        given["rollout_is_weights"] = ratio.clamp(max=options["cap"])
    function = core_algos.get_adv_estimator_fn(name)
    wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
    advantages, _ = function(**{name: given[name] for name in wanted if name in given})
    return advantages


def attention_mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a prompt of one token and the answer up to its last sampled token."""
    answered = batch["response_mask"].flip(-1).cumsum(-1).flip(-1) > 0
    return torch.cat([torch.ones(len(answered), 1), answered], 1).long()


def loss(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's loss and its gradient with respect to the log-probs."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    result, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch["old_log_probs"],
        log_prob=log_probs,
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode=options["loss_agg_mode"],
        config=actor_config({option: value for option, value in options.items() if option != "loss_agg_mode"}),
    )
    (gradient,) = torch.autograd.grad(result, log_probs)
    return result.detach(), gradient


def actor_config(options: dict[str, Any]) -> Any:
    """verl's config of an actor, which some losses insist on; others read a `policy_loss` of it."""
    if "policy_loss" in options:
        inner = Config(**options["policy_loss"])
        return Config(**{"clip_ratio": 0.2, "global_batch_info": {}, **options, "policy_loss": inner})
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


def kl(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """verl's KL per token."""
    return core_algos.kl_penalty(batch["log_probs"], batch["ref_log_probs"], name)


def value(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """verl's value loss."""
    return core_algos.compute_value_loss(
        vpreds=batch["values"],
        returns=batch["returns"],
        values=batch["old_values"],
        response_mask=batch["response_mask"],
        **options,
    )[0]


def weights(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """verl's weights between trainer and sampler."""
    apart = batch["old_log_probs"] - batch["rollout_log_probs"]
    return rollout_corr_helper.compute_rollout_correction_weights(apart, batch["response_mask"], name, **options)[0]


def rejection(name: str, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """The mask after verl's rejection."""
    apart = batch["old_log_probs"] - batch["rollout_log_probs"]
    return rollout_corr_helper.compute_rollout_rejection_mask(apart, batch["response_mask"], name, **options)[0]


def main() -> None:
    """Every call of the file, in order."""
    calls = torch.load(sys.argv[1], weights_only=False)
    kinds = {
        "estimate": estimate,
        "loss": loss,
        "kl": kl,
        "value": value,
        "weights": weights,
        "rejection": rejection,
    }
    results = [kinds[kind](name, batch, options) for kind, name, batch, options in calls]
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
