# SPDX-License-Identifier: Apache-2.0
"""Recipes of EasyR1's keys against EasyR1's own functions, from the checkout that WHET_EASYR1 names.

Its averages divide by a count + 1e-8, and its KL is float32: the numbers agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.checkouts import Rows, checkout, definitions
from tests.plugins.migration.published import (
    FACTS,
    SCRIPTS,
    Numbers,
    batch_of,
    close,
    formulas,
    keys_of,
    numbers,
    recipe,
)
from whet.config import TrainConfig, load_config
from whet.plugins.migration.convert import convert
from whet.plugins.migration.foreign_files import Written

pytestmark = pytest.mark.slow
EASYR1 = [name for name in SCRIPTS if FACTS[name]["from"] == "easyr1"]
ACTOR = {  # EasyR1's defaults: verl/workers/actor/config.py
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_dual": 3.0,
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "loss_type": "default",
    "loss_avg_mode": "token",
    "ppo_epochs": 1,
}
N, ROWS = 4, 12  # of the batch here: three groups of four


class Peer:
    """EasyR1's step: its estimators, its KL in the reward, and the update of its actor."""

    def __init__(self, folder: Path) -> None:
        files = folder / "verl"
        functional = definitions(files / "utils" / "torch_functional.py")
        self.core = definitions(files / "trainer" / "core_algos.py", VF=functional)
        trainer = files / "trainer" / "ray_trainer.py"
        self.trainer = definitions(trainer, "apply_kl_penalty", VF=functional, compute_kl=self.core.compute_kl)
        self.actor = definitions(
            files / "workers" / "actor" / "dp_actor.py",
            "DataParallelPPOActor",
            BasePPOActor=object,
            VF=functional,
            append_to_dict=lambda data, new: [data[key].append(value) for key, value in new.items()],
            dist=SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None)),
            **{name: getattr(self.core, name) for name in ("average_loss", "compute_kl", "compute_policy_loss")},
        )

    def advantages(self, keys: Mapping[str, Any], columns: Mapping[str, Tensor]) -> Tensor:
        """The advantages, after the KL in the reward where the keys ask for it."""
        rewards = columns["token_level_scores"].clone()
        if not keys.get("algorithm.disable_kl", False) and not keys.get("algorithm.use_kl_loss", False):
            controller = self.core.FixedKLController(keys.get("algorithm.kl_coef", 1e-3))
            rows, _ = self.trainer.apply_kl_penalty(Rows(columns), controller, keys.get("algorithm.kl_penalty", "kl"))
            rewards = rows.batch["token_level_rewards"]
        found, _ = self.core.compute_advantage_return(
            keys.get("algorithm.adv_estimator", "grpo"),
            token_level_rewards=rewards,
            index=columns["uid"].tolist(),
            gamma=keys.get("algorithm.gamma", 1.0),
            lam=keys.get("algorithm.lam", 1.0),
            **{name: columns[name] for name in ("response_mask", "values", "reward_baselines")},
        )
        return found.double() * columns["response_mask"]

    def numbers(self, keys: Mapping[str, Any], columns: Mapping[str, Tensor], micro_batch: int) -> Numbers:
        """The numbers of one update in micro-batches. The loss is EasyR1's if there is one micro-batch."""
        advantages, leaf = self.advantages(keys, columns), columns["log_probs"].clone().requires_grad_()
        given = {name: keys.get(f"worker.actor.{name}", default) for name, default in ACTOR.items()}
        kl = {
            name: keys.get(f"algorithm.{name}", default) for name, default in (("kl_penalty", "kl"), ("kl_coef", 1e-3))
        }
        actor = object.__new__(self.actor.DataParallelPPOActor)
        actor.config = SimpleNamespace(
            **given,
            **kl,
            use_kl_loss=not keys.get("algorithm.disable_kl", False) and keys.get("algorithm.use_kl_loss", False),
            dynamic_batching=False,
            global_batch_size_per_device=len(leaf),
            micro_batch_size_per_device_for_update=micro_batch,
        )
        actor.rank, actor.world_size, actor.actor_module = 1, 1, SimpleNamespace(train=lambda: None)
        actor._forward_micro_batch = lambda inputs, temperature: leaf[inputs["row"]]
        actor._optimizer_step = lambda: torch.zeros(())
        names = ("old_log_probs", "ref_log_probs", "response_mask")
        rows = {**{name: columns[name] for name in names}, "advantages": advantages, "row": torch.arange(len(leaf))}
        metrics = actor.update_policy(Rows(rows, temperature=1.0))
        loss = sum(metrics["actor/pg_loss"]) + kl["kl_coef"] * metrics.get("actor/kl_loss", 0.0)
        assert leaf.grad is not None
        return Numbers(advantages, torch.tensor(loss, dtype=torch.float64), leaf.grad)


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer(checkout("WHET_EASYR1", "verl/trainer/core_algos.py"))


def config_of(keys: Mapping[str, Any], model_folder: Path) -> TrainConfig:
    """The config that `whet config convert` makes of these keys and the sizes of the batch here."""
    sizes = {"data.rollout_batch_size": 3, "worker.actor.global_batch_size": 3, "worker.rollout.n": N}
    values = convert(Written({**sizes, **keys}), "easyr1").values
    return load_config(TrainConfig, None, {**values, "model.path": str(model_folder)}, checked=False).config


@pytest.mark.parametrize("name", EASYR1)
def test_a_published_script(name: str, peer: Peer, tmp_path: Path, model_folder: Path) -> None:
    """Recipe, formula and EasyR1 have the same numbers, and EasyR1 for every split into micro-batches."""
    config, keys, columns = recipe(name, tmp_path, {"model.path": str(model_folder)}), keys_of(name), batch_of(N)
    theirs = peer.numbers(keys, columns, ROWS)
    close(formulas("easyr1", keys, columns), theirs, rtol=1e-6, atol=1e-6)
    close(numbers(config, columns), theirs, rtol=1e-6, atol=1e-6)
    for micro_batch in (1, 5):
        split = peer.numbers(keys, columns, micro_batch).gradient
        torch.testing.assert_close(split, theirs.gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "mode"), [("default", "token"), ("cispo", "token"), ("gspo_token", "seq"), ("sapo", "seq")]
)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_losses_and_estimators_of_no_published_script(
    loss: str, mode: str, estimator: str, peer: Peer, model_folder: Path
) -> None:
    """With KL in the reward. The modes of gspo_token and sapo are those of whet's, as the converter tells; ratios of
    sequences stay below clip_ratio_dual, which whet's gspo does not have."""
    keys = {
        "worker.actor.loss_type": loss,
        "worker.actor.loss_avg_mode": mode,
        "algorithm.adv_estimator": estimator,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_coef": 0.05,
    }
    columns = batch_of(N)
    theirs = peer.numbers(keys, columns, ROWS)
    close(numbers(config_of(keys, model_folder), columns), theirs, rtol=1e-6, atol=1e-6)


def test_a_mean_of_sequences_depends_on_the_micro_batches_of_easyr1(peer: Peer, model_folder: Path) -> None:
    """`seq` is whet's seq-mean-token-mean where an update is one micro-batch. EasyR1 weighs a micro-batch by its
    tokens, so that with micro-batches of one row `seq` is token-mean."""
    keys, columns = {"algorithm.disable_kl": True, "worker.actor.loss_avg_mode": "seq"}, batch_of(N)
    rows = numbers(config_of(keys, model_folder), columns)
    tokens = numbers(config_of({**keys, "worker.actor.loss_avg_mode": "token"}, model_folder), columns)
    close(rows, peer.numbers(keys, columns, ROWS), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tokens.gradient, peer.numbers(keys, columns, 1).gradient, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(rows.gradient, tokens.gradient, rtol=1e-2)


def test_gspo_of_easyr1_is_luspo_on_the_scale_of_a_token(peer: Peer, model_folder: Path) -> None:
    """Its `gspo` averages the ratio of a sequence over all N tokens, `luspo` sums it and averages over S sequences."""
    keys, columns = {"algorithm.disable_kl": True, "worker.actor.loss_type": "gspo"}, batch_of(N)
    ours = numbers(config_of(keys, model_folder), columns).gradient * ROWS / columns["response_mask"].sum()
    for micro_batch in (1, ROWS):
        torch.testing.assert_close(ours, peer.numbers(keys, columns, micro_batch).gradient, rtol=1e-6, atol=1e-8)


def test_grpo_passk_of_easyr1_is_whets(peer: Peer, model_folder: Path) -> None:
    """Where the best of a group is alone, and where it is not: both have 0 then."""
    keys, columns = {"algorithm.adv_estimator": "grpo_passk", "algorithm.disable_kl": True}, batch_of(N)
    found = peer.advantages(keys, columns)
    torch.testing.assert_close(numbers(config_of(keys, model_folder), columns).advantages, found, rtol=1e-6, atol=1e-6)
    assert (found != 0).any(1).sum() == 2


def test_estimators_that_fail_in_easyr1(peer: Peer) -> None:
    """Its gae and remax are errors for several rows: a mask [B] as a condition, scores [B] times a mask [B, R]."""
    for name in ("gae", "remax"):
        with pytest.raises(RuntimeError):
            peer.advantages({"algorithm.adv_estimator": name, "algorithm.disable_kl": True}, batch_of(N))
