# SPDX-License-Identifier: Apache-2.0
"""Calls TRL's own functions on batches from a file and writes their results. Runs in TRL's environment:

python trl_worker.py IN OUT
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl  # type: ignore[import-not-found]  # of another environment
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer  # type: ignore[import-not-found]  # of another environment
from trl.experimental.cpo import CPOTrainer  # type: ignore[import-not-found]
from trl.experimental.gkd import GKDTrainer  # type: ignore[import-not-found]
from trl.experimental.orpo import ORPOTrainer  # type: ignore[import-not-found]
from trl.rewards import get_soft_overlong_punishment  # type: ignore[import-not-found]

ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}
SETTINGS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "max_completion_length": 1,
}


class OneProcess:
    """The part of an accelerator that a trainer uses."""

    num_processes, sync_gradients = 1, True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def pad_across_processes(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x


def loss(batch: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's loss and its gradient with respect to the log-probs, from a trainer that was never built."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    settings = {**SETTINGS, **{name: value for name, value in options.items() if name in SETTINGS}}
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**{**ARGS, **{name: value for name, value in options.items() if name in ARGS}}),
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, batch["entropy"], None),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given)
    mask = batch["response_mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1).long(),
        "prompt_mask": torch.ones(len(mask), 1).long(),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch["row_advantages"],
        "old_per_token_logps": batch["old_log_probs"],
        "ref_per_token_logps": batch["ref_log_probs"],
        "num_items_in_batch": mask.sum(),
    }
    result = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(result, log_probs)
    return result.detach(), gradient


def preferences(scores: torch.Tensor, margin: torch.Tensor, center: float) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's loss of a reward model and its gradient with respect to the scores [2n], the chosen ones first."""
    leaf = scores.clone().requires_grad_()
    accelerator = SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=leaf[:, None])

    inputs = {"margin": margin, "attention_mask": torch.ones(len(scores), 1)}
    result = RewardTrainer.compute_loss(trainer, model, inputs)
    (gradient,) = torch.autograd.grad(result, leaf)
    return result.detach(), gradient


COMPARING = {"beta": 0.1, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "use_weighting": False}
TRAINERS = {"dpo": DPOTrainer, "kto": KTOTrainer}


def comparison(
    kind: str, batch: dict[str, torch.Tensor], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """TRL's loss of preferences and its gradient with respect to the log-probs, the better responses first."""
    leaf, mask = batch["log_probs"].clone().requires_grad_(), batch["response_mask"]
    sums, lengths = (leaf * mask).sum(1), mask.sum(1)
    settings = SimpleNamespace(**{**COMPARING, **options}, accelerator=SimpleNamespace(device="cpu"), alpha=0.0)
    if kind == "cpo":
        result = CPOTrainer.cpo_loss(settings, *(sums / lengths if options.get("mean") else sums).chunk(2))[0].mean()
    elif kind == "orpo":
        result = -ORPOTrainer.odds_ratio_loss(settings, *(sums / lengths).chunk(2))[0].mean()
    else:
        settings.accelerator.gather = settings.accelerator.gather_for_metrics = lambda x: x
        references = (batch["ref_log_probs"] * mask).sum(1)
        outputs = SimpleNamespace(
            log_probs=leaf * mask,
            log_sum_sq_probs=batch["sum_pi_squared"].log(),
            **{name: torch.zeros_like(leaf) for name in ("entropy", "mean_logits")},
            is_top1=torch.zeros(leaf.shape, dtype=torch.bool),
        )
        more = {
            "model": SimpleNamespace(training=True),
            "aux_loss_enabled": False,
            "ld_alpha": None,
            "_tp_size": 1,
            "precompute_ref_logps": True,
            "loss_weights": [1.0],
            "_total_train_tokens": 0,
            "calculate_KL": True,
            "_metrics": {"train": defaultdict(list)},
            "_compute_kl_logps": lambda *_: batch["distances"],
        }
        vars(settings).update({**more, **vars(settings)})
        whole = torch.nn.functional.pad(mask, (1, 0))
        inputs = {"completion_mask": whole, "input_ids": torch.zeros_like(whole), "attention_mask": whole}
        inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), references.chunk(2), strict=True))
        if kind == "kto":
            inputs |= {"label": batch["label"], "ref_logps": references, "ref_KL_logps": 0 * batch["distances"]}
        result = TRAINERS[kind]._compute_loss(settings, lambda **_: outputs, inputs, False)
    (gradient,) = torch.autograd.grad(result, leaf)
    return result.detach(), gradient


def divergence(
    logits: torch.Tensor, teacher: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's loss of distillation, a mean over the places that `labels` does not hide, and its gradient."""
    leaf = logits.clone().requires_grad_()
    result = GKDTrainer.generalized_jsd_loss(leaf, teacher, **options)
    (gradient,) = torch.autograd.grad(result, leaf)
    return result.detach(), gradient


def overlong(lengths: list[int], options: dict[str, int]) -> list[float]:
    """TRL's penalty for answers of these lengths."""
    found: list[float] = get_soft_overlong_punishment(**options)(completion_ids=[[0] * length for length in lengths])
    return found


def fields(names: list[str]) -> dict[str, Any]:
    """The fields of TRL's config classes of these names, with their defaults."""
    found = [each for name in names for each in dataclasses.fields(getattr(trl, name))]
    made = {each.name: each.default_factory() for each in found if each.default_factory is not dataclasses.MISSING}
    return {each.name: each.default for each in found} | made


def main() -> None:
    """Every call of the file, in order."""
    calls = torch.load(sys.argv[1], weights_only=False)
    kinds = {"loss": loss, "overlong": overlong, "preferences": preferences, "comparison": comparison, "fields": fields}
    kinds |= {"divergence": divergence}
    torch.save([kinds[kind](*given) for kind, *given in calls], sys.argv[2])


if __name__ == "__main__":
    main()
