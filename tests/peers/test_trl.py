# SPDX-License-Identifier: Apache-2.0
"""whet's losses against TRL 1.16's GRPOTrainer on a thousand random ragged batches, and its length penalty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import policy_loss
from tests.peers.peer import ask, interpreter
from tests.peers.test_verl import BATCHES, Batch, ragged
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.calls import Bound, call
from whet.algorithms.kl import kl_form
from whet.algorithms.shaping import soft_overlong
from whet.algorithms.statistics import row_means
from whet.plugins.migration.convert import Conversion
from whet.plugins.migration.foreign_files import Written
from whet.registry import POLICY_LOSSES, PREFERENCE_LOSSES, WEIGHTS
from whet.trainers.distill import DistillObjective
from whet.trainers.objectives import PreferenceObjective

WORKER = Path(__file__).parent / "trl_worker.py"
pytestmark = pytest.mark.slow

# (whet's loss, its options, aggregation, what TRL is told)
LOSSES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("ppo_clip", {"clip_ratio_high": 0.28}, "seq-mean-token-mean", {"loss_type": "grpo", "epsilon_high": 0.28}),
    ("ppo_clip", {}, "token-mean", {"loss_type": "bnpo"}),
    ("ppo_clip", {}, "token-mean", {"loss_type": "dapo"}),
    ("ppo_clip", {}, "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
    ("delta", {"delta": 1.1}, "seq-mean-token-mean", {"loss_type": "grpo", "delta": 1.1}),
    (
        "gspo",
        {},
        "seq-mean-token-mean",
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    (
        "luspo",
        {},
        "seq-mean-token-sum",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    ("cispo", {"bounds": "cap", "clip_ratio_high": 1.3}, "token-mean", {"loss_type": "cispo", "epsilon_high": 1.3}),
    ("sapo", {}, "seq-mean-token-mean", {"loss_type": "sapo"}),
    ("vespo", {}, "token-mean", {"loss_type": "vespo"}),
]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the environment that has TRL."""
    return interpreter("WHET_TRL_VENV", ".venv-trl")


def one_advantage_a_row(seed: int) -> Batch:
    batch = ragged(seed)
    draw = torch.Generator().manual_seed(seed)
    batch["row_advantages"] = torch.randn(len(batch["uid"]), generator=draw, dtype=torch.float64)
    batch["advantages"] = batch["row_advantages"][:, None] * batch["response_mask"]
    batch["entropy"] = torch.rand(batch["values"].shape, generator=draw).double() * batch["response_mask"]
    return batch


def ours(
    batch: Batch,
    name: str,
    options: dict[str, Any],
    mode: str,
    weight: Tensor | float = 1.0,
    kl: float = 0.0,
    form: str = "k3",
) -> tuple[Tensor, Tensor]:
    log_probs, mask = batch["log_probs"].clone().requires_grad_(), batch["response_mask"]
    loss = policy_loss(POLICY_LOSSES[name], {**batch, "log_probs": log_probs}, options).per_token
    assert loss is not None
    loss = loss * weight + kl * kl_form(form)({**batch, "log_probs": log_probs})
    total = aggregate(mode, loss, mask, **counts(mask), fixed_length=1)
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), gradient


def test_losses_and_their_gradients(python: Path, tmp_path: Path) -> None:
    cases = [(case, one_advantage_a_row(seed)) for case in LOSSES for seed in range(BATCHES // len(LOSSES))]
    calls = [("loss", batch, told) for (_, _, _, told), batch in cases]
    for ((name, options, mode, told), batch), (value, gradient) in zip(
        cases, ask(python, WORKER, tmp_path, calls), strict=True
    ):
        total, slope = ours(batch, name, options, mode)
        torch.testing.assert_close(total, value.double(), rtol=1e-6, atol=1e-6, msg=f"{name} {told}")
        torch.testing.assert_close(slope, gradient, rtol=1e-6, atol=1e-6, msg=f"gradient of {name} {told}")


def test_the_kl_term_and_the_masks_of_tokens(python: Path, tmp_path: Path) -> None:
    batches = [one_advantage_a_row(seed) for seed in range(60)]
    unbiased = {"beta": 0.1, "use_bias_correction_kl": True}
    told = [{"beta": 0.1}, unbiased, {"top_entropy_quantile": 0.3}, {"off_policy_mask_threshold": 0.05}]
    calls = [("loss", batch, options) for options in told for batch in batches]
    for (_, batch, options), (value, gradient) in zip(calls, ask(python, WORKER, tmp_path, calls), strict=True):
        weight: Tensor | float = 1.0
        if "top_entropy_quantile" in options:
            weight = call(WEIGHTS["top_entropy"], batch, {"share": 0.3})
        if "off_policy_mask_threshold" in options:  # TRL compares with the current policy
            now = {**batch, "old_log_probs": batch["log_probs"], "rollout_log_probs": batch["old_log_probs"]}
            weight = call(WEIGHTS["off_policy_sequence"], now, {"threshold": 0.05})
        form = "k3_ratio" if "use_bias_correction_kl" in options else "k3"
        total, slope = ours(batch, "ppo_clip", {}, "seq-mean-token-mean", weight, options.get("beta", 0.0), form)
        torch.testing.assert_close(total, value.double(), rtol=1e-6, atol=1e-6, msg=str(options))
        torch.testing.assert_close(slope, gradient, rtol=1e-6, atol=1e-6, msg=f"gradient of {options}")


def test_the_loss_of_reward_models(python: Path, tmp_path: Path) -> None:
    """The objective on rows in whet's order, in micro-batches of one and of two pairs."""
    draw = torch.Generator().manual_seed(0)
    pairs = [torch.randn(3, 7, generator=draw, dtype=torch.float64) * 3 for _ in range(100)]  # chosen, rejected, margin
    centres = [0.0, 0.01, 0.5]
    calls = [("preferences", torch.cat([c, r]), m.abs(), centre) for c, r, m in pairs for centre in centres]
    asked = [(pair, centre) for pair in pairs for centre in centres]
    for ((chosen, rejected, margin), centre), (value, gradient) in zip(
        asked, ask(python, WORKER, tmp_path, calls), strict=True
    ):
        objective = PreferenceObjective(centre)
        scores = torch.stack([chosen, rejected], 1).flatten()[:, None].requires_grad_()
        batch = {
            "response_mask": torch.ones(14, 1),
            "attention_mask": torch.ones(14, 1),
            "margin": margin.abs().repeat_interleave(2),
        }
        counts = objective.counts(batch)
        total = torch.zeros(())
        for part in (slice(0, 2), slice(2, 6), slice(6, 14)):
            rows = {name: column[part] for name, column in batch.items()}
            total = total + objective.loss({"scores": scores[part]}, rows, counts)[0]
        (slope,) = torch.autograd.grad(total, scores)
        torch.testing.assert_close(total.detach(), value.double(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(slope.view(7, 2).T.flatten(), gradient, rtol=1e-9, atol=1e-9)


SMOOTHED = {"label_smoothing": 0.2}
# (whet's loss, its options, TRL's trainer, what it is told)
COMPARISONS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("dpo", {"beta": 0.3}, "dpo", {"loss_types": ["sigmoid"], "beta": 0.3}),
    ("rpo", {}, "dpo", {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    ("bco", {}, "dpo", {"loss_types": ["bco_pair"]}),
    ("robust_dpo", SMOOTHED, "dpo", {"loss_types": ["robust"], **SMOOTHED}),
    ("ipo", {"beta": 0.3}, "dpo", {"loss_types": ["ipo"], "beta": 0.3}),
    ("hinge", {}, "dpo", {"loss_types": ["hinge"]}),
    ("exo", SMOOTHED, "dpo", {"loss_types": ["exo_pair"], **SMOOTHED}),
    ("apo_zero", {}, "dpo", {"loss_types": ["apo_zero"]}),
    ("apo_down", {}, "dpo", {"loss_types": ["apo_down"]}),
    ("wpo", {}, "dpo", {"loss_types": ["sigmoid"], "use_weighting": True}),
    ("cpo", {"sft_coef": 0.0, **SMOOTHED}, "cpo", {"loss_type": "sigmoid", **SMOOTHED}),
    (
        "simpo",
        {"beta": 2.0, "gamma": 0.7},
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "mean": True},
    ),
    ("orpo", {}, "orpo", {}),
    (
        "kto",
        {"good_weight": 1.5, "bad_weight": 0.5},
        "kto",
        {"loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
]


def pairs(seed: int) -> Batch:
    """Ragged rows in TRL's order, the better responses first."""
    batch = ragged(seed)
    kept = batch["response_mask"].any(1).nonzero()[:, 0]
    kept = kept[: len(kept) // 2 * 2]
    draw = torch.Generator().manual_seed(seed)
    made = {name: batch[name][kept] for name in ("log_probs", "ref_log_probs", "response_mask")}
    share = torch.rand(made["log_probs"].shape, generator=draw).double()
    # So that no weight of WPO exceeds 1, which whet bounds and TRL does not.
    made["sum_pi_squared"] = (made["log_probs"] * share).exp()
    made["distances"] = torch.randn(len(kept), generator=draw, dtype=torch.float64) + 0.5
    made["label"] = torch.arange(len(kept)) < len(kept) // 2
    return made


def of_one_length(batch: Batch) -> Batch:
    """The batch, whose better responses have three tokens."""
    mask = batch["response_mask"].clone()
    half, room = len(mask) // 2, mask.shape[1]
    mask[:half] = (torch.arange(room) < 3).to(mask)
    return {**batch, "response_mask": mask}


@pytest.mark.parametrize(("name", "options", "trainer", "told"), COMPARISONS, ids=[each[0] for each in COMPARISONS])
def test_losses_of_preferences_and_their_gradients(
    name: str, options: dict[str, Any], trainer: str, told: dict[str, Any], python: Path, tmp_path: Path
) -> None:
    """One pair of ORPO has TRL's first term added, which is a mean of its own there. TRL's term of imitation in RPO is
    a mean over all tokens, whet's over each response: the better responses are of one length. TRL's BCO of pairs has
    no mean of the rewards so far, and counts a pair once. TRL's DPO has no label smoothing."""
    batches = [pairs(seed) for seed in range(40)]
    if name == "rpo":
        batches = [of_one_length(batch) for batch in batches]
    entry = PREFERENCE_LOSSES[name]
    function = Bound(entry, entry.resolve_options(options, "loss_options"))
    calls = [("comparison", trainer, batch, told) for batch in batches]
    for batch, (value, gradient) in zip(batches, ask(python, WORKER, tmp_path, calls), strict=True):
        half = len(batch["log_probs"]) // 2
        order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()  # the pairs, one by one
        log_probs = batch["log_probs"].clone().requires_grad_()
        columns = {**batch, "log_probs": log_probs}
        columns["reference_point"] = batch["distances"].mean().clamp(min=0).expand(2 * half)
        columns["mean_log_ratio"] = torch.zeros(2 * half)
        losses, _ = function({each: column[order] for each, column in columns.items()})
        total = 2 * losses.mean() if name == "bco" else losses.mean()
        if name == "orpo":
            total = total + row_means(log_probs, batch["response_mask"])[:half].mean()
        (slope,) = torch.autograd.grad(total, log_probs)
        torch.testing.assert_close(total.detach(), value.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(slope, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "beta"),
    [("forward_kl", {}, 0.0), ("reverse_kl", {}, 1.0), ("jsd", {}, 0.5), ("jsd", {"beta": 0.1}, 0.1)],
)
def test_divergences_of_a_teacher_and_their_gradients(
    name: str, options: dict[str, Any], beta: float, python: Path, tmp_path: Path
) -> None:
    """The objective's mean over trained tokens and its slope at the logits, at two temperatures."""
    calls = []
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        logits, teacher = torch.randn(2, 3, 5, 11, generator=draw, dtype=torch.float64).mul(3)
        labels = torch.where(torch.rand(3, 5, generator=draw) < 0.6, 1, -100)
        labels[0, 0] = 1
        calls.append((logits, teacher, labels, (1.0, 0.6)[seed % 2]))
    objective = DistillObjective(name, options)
    told = [("divergence", a, b, {"labels": c, "temperature": t, "beta": beta}) for a, b, c, t in calls]
    for (logits, teacher, labels, heat), (value, gradient) in zip(
        calls, ask(python, WORKER, tmp_path, told), strict=True
    ):
        leaf = logits.clone().requires_grad_()
        batch = {"response_mask": (labels != -100).long(), "teacher_outcomes": (teacher / heat).log_softmax(-1)}
        total, _ = objective.loss({"vocab_log_probs": (leaf / heat).log_softmax(-1)}, batch, objective.counts(batch))
        (slope,) = torch.autograd.grad(total, leaf)
        torch.testing.assert_close(total.detach(), value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(slope, gradient, rtol=1e-6, atol=1e-6)


def test_the_penalty_for_long_answers(python: Path, tmp_path: Path) -> None:
    lengths = list(range(1, 101))
    told = {"max_completion_len": 100, "soft_punish_cache": 20}
    [penalties] = ask(python, WORKER, tmp_path, [("overlong", lengths, told)])
    found = soft_overlong(torch.tensor(lengths), max_response_length=100, buffer_length=20)
    assert found.tolist() == pytest.approx(penalties)


TRAINERS = {"dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig"}


@pytest.mark.parametrize(("trainer", "config"), TRAINERS.items())
def test_every_field_of_a_config_is_converted_or_told(trainer: str, config: str, python: Path, tmp_path: Path) -> None:
    [fields] = ask(python, WORKER, tmp_path, [("fields", [config, "ModelConfig", "ScriptArguments"])])
    of = Conversion(Written({"learning_rate": 1e-5}, trainer=trainer), "TRL")
    known = {key.partition("=")[0] for row in of.rows for key in row.theirs}
    counted = tuple(beginning for table in of.tables for beginning in table.speed)
    assert len(fields) > 120
    assert [each for each in fields if each not in known and not each.startswith(counted)] == []
    theirs = {key: fields[key] for key in of.defaults if key in fields}
    theirs |= {"lora_target_modules": ["q_proj", "v_proj"]}  # None: peft's, by the architecture
    if trainer == "dpo":
        [theirs["loss_type"]] = theirs["loss_type"]
    assert len(theirs) > 10
    assert {key: of.defaults[key] for key in theirs} == theirs
