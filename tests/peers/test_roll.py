# SPDX-License-Identifier: Apache-2.0
"""Recipes of ROLL's keys against ROLL's own functions, from the checkout that WHET_ROLL names.

Its averages divide by a count + 1e-8, and its advantages are float32: the numbers agree to 1e-5.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.checkouts import Rows, Words, checkout, definitions
from tests.plugins.migration.published import (
    FACTS,
    SCRIPTS,
    Numbers,
    batch_of,
    close,
    formulas,
    keys_of,
    nested,
    numbers,
    recipe,
)
from whet.config import TrainConfig, load_config
from whet.plugins.migration.convert import convert
from whet.plugins.migration.foreign_files import Written
from whet.registry import FILTERS

pytestmark = pytest.mark.slow
ROLL = [name for name in SCRIPTS if FACTS[name]["from"] == "roll"]
MASKED = [name for name in ROLL if keys_of(name).get("max_len_mask")]
DEFAULTS = {  # ROLL's: roll/configs/base_config.py, roll/pipeline/rlvr/rlvr_config.py
    "gamma": 1.0,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "importance_sampling": "token",
    "loss_agg_mode": "seq-mean-token-mean",
    "reward_clip": None,
    "advantage_clip": None,
    "whiten_advantages": False,
    "whiten_rewards": False,
    "norm_mean_type": None,
    "norm_std_type": None,
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "rl_loss_coef": 1.0,
    "entropy_loss_coef": 0.0,
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    "error_max_len_clip": False,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "postive_loss_coef": 0.0,  # their spelling
    "use_topr_neg_loss_coef": 0.0,
    "enable_old_logprobs_recompute": True,
}
NO_MASKS = {"max_len_mask": False, "difficulty_mask": False}
N, ROWS = 4, 12  # of the batch here: three groups of four


class Peer:
    """ROLL's step of one domain: masks, rewards, advantages, and the loss of its actor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "roll"
        self.functions = definitions(self.folder / "utils" / "functionals.py", get_logger=lambda: None)
        self.given = {name: getattr(self.functions, name) for name in ("agg_loss", "compute_approx_kl", "masked_mean")}
        workers = self.folder / "pipeline" / "base_worker.py"
        stubs = {"register": lambda **_: lambda function: function, "Dispatch": Words(), "Worker": object}
        self.base = definitions(workers, "ActorWorker", **self.given, **stubs).ActorWorker
        self.worker = self._definitions("actor_worker.py", BaseActorWorker=self.base).ActorWorker

    def _definitions(self, file: str, **given: Any) -> SimpleNamespace:
        return definitions(self.folder / "pipeline" / "rlvr" / file, **self.given, **given)

    def config(self, keys: Mapping[str, Any]) -> SimpleNamespace:
        """ROLL's config, with the fields that its functions read."""
        told = {name: keys.get(name, default) for name, default in DEFAULTS.items()}
        generating = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=N))
        correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False))
        train = SimpleNamespace(**nested(keys).get("actor_train", {}))
        return SimpleNamespace(
            **told,
            adv_estimator=keys.get("adv_estimator", "gae"),
            actor_infer=generating,
            actor_train=train,
            train_infer_correction=correction,
        )

    def advantages(self, keys: Mapping[str, Any], columns: Mapping[str, Tensor]) -> Rows:
        """The batch with `advantages` and `final_response_mask`: steps 1 to 4 of rlvr_pipeline.py."""
        config, mask = self.config(keys), columns["response_mask"]
        whole = torch.cat([torch.ones(len(mask), 1).long(), mask], 1)  # after a prompt of one token
        scores = columns["token_level_scores"].sum(1)
        names = ("old_log_probs", "ref_log_probs", "values")
        data = Rows(
            {
                **{name: columns[name].clone() for name in names},
                "scores": scores,
                "response_level_rewards": scores,
                "responses": mask,
                "attention_mask": whole,
                "position_ids": whole.cumsum(1) - 1,
                "response_mask": torch.cat([torch.zeros(len(mask), 1).long(), mask], 1),
                "input_ids": whole,
            }
        )
        data, _ = self.functions.get_sample_level_mask(data, config)
        data, _ = self.functions.reward_postprocess(data, config, {})
        controller = SimpleNamespace(value=config.init_kl_coef, update=lambda **_: None)
        data, _ = self.functions.compute_token_reward(data, config, controller)
        options = ("gamma", "lambd", "adv_estimator", "advantage_clip", "whiten_advantages", "whiten_rewards")
        told = {name: getattr(config, name) for name in options}
        found: Rows = self.functions.compute_advantage(
            data, **told, response_mask=data.batch["final_response_mask"].clone(), pipeline_config=config
        )
        return found

    def numbers(
        self, keys: Mapping[str, Any], columns: Mapping[str, Tensor], micro_batch: int = ROWS, kind: Any = None
    ) -> Numbers:
        """The numbers of one update of the worker for RLVR, or of `kind`; its loss is the sum over micro-batches."""
        data, leaf = self.advantages(keys, columns), columns["log_probs"].clone().requires_grad_()
        data.batch["row"] = torch.arange(len(leaf))
        data.batch["train_infer_is_weight"] = torch.ones_like(leaf)
        masks = {"response_mask": columns["response_mask"], "final_response_mask": data.batch["final_response_mask"]}
        data.meta_info = {  # roll/distributed/strategy/strategy.py
            "batch_num_tokens": {name: mask.sum() for name, mask in masks.items()},
            "global_valid_samples": {name: (mask > 0).any(1).sum() for name, mask in masks.items()},
        }
        worker = object.__new__(kind or self.worker)
        worker.pipeline_config = self.config(keys)
        worker.strategy = SimpleNamespace(op_compute_log_probs=lambda logits, **_: leaf[logits])
        losses = [worker.loss_func(part, part.batch["row"])[0] for part in data.split(micro_batch)]
        loss = torch.stack(losses).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
        return Numbers(data.batch["advantages"].double(), loss.detach().double(), slope)

    def variant(self, keys: Mapping[str, Any], columns: Mapping[str, Tensor]) -> Numbers:
        """The numbers of the worker with several losses (actor_pg_worker.py)."""
        worker = object.__new__(self._definitions("actor_pg_worker.py", ActorWorker=object).ActorPGWorker)
        worker.pipeline_config, worker._pg_config_cache, worker._cached_metrics = self.config(keys), {}, {}
        worker._topr_sample_logged = worker._cispo_config_logged = worker._kimi15_config_logged = True
        data, leaf = self.advantages(keys, columns), columns["log_probs"].clone().requires_grad_()
        given = {
            "ratio": (leaf - columns["old_log_probs"]).exp(),
            "log_probs": leaf,
            "old_log_probs": columns["old_log_probs"],
            "advantages": data.batch["advantages"],
            "data": data,
            "final_response_mask": data.batch["final_response_mask"],
            "batch_num_tokens": {"final_response_mask": data.batch["final_response_mask"].sum()},
            "global_valid_samples": {"final_response_mask": data.batch["final_response_mask"].any(1).sum()},
        }
        name = keys["actor_train.pg_variant"]
        function = getattr(worker, f"_compute_{'vanilla_pg' if name == 'vanilla' else name}_loss")
        loss = function(**{each: given[each] for each in inspect.signature(function).parameters})
        total = self.functions.agg_loss(loss, data.batch["final_response_mask"], worker.pipeline_config.loss_agg_mode)
        (slope,) = torch.autograd.grad(total, leaf)
        return Numbers(data.batch["advantages"].double(), total.detach().double(), slope)


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer(checkout("WHET_ROLL", "roll/utils/functionals.py"))


def config_of(keys: Mapping[str, Any], model_folder: Path) -> TrainConfig:
    """The config that `whet config convert` makes of these keys and the sizes of the batch here."""
    sizes = {"rollout_batch_size": 3, "num_return_sequences_in_group": N, "response_length": 9}
    values = convert(Written({**sizes, **keys}), "roll").values
    return load_config(TrainConfig, None, {**values, "model.path": str(model_folder)}, checked=False).config


@pytest.mark.parametrize("name", ROLL)
def test_a_published_script(name: str, peer: Peer, tmp_path: Path, model_folder: Path) -> None:
    """Recipe, formula and ROLL have the same numbers, and ROLL for every split into micro-batches, by both of its
    workers. Its masks of rows are off, as in the formula."""
    config, keys, columns = recipe(name, tmp_path, {"model.path": str(model_folder)}), keys_of(name), batch_of(N)
    theirs = peer.numbers({**keys, **NO_MASKS}, columns)
    close(formulas("roll", keys, columns), theirs, rtol=1e-5, atol=1e-5)
    close(numbers(config, columns), theirs, rtol=1e-5, atol=1e-5)
    for kind in (peer.worker, peer.base):
        close(peer.numbers({**keys, **NO_MASKS}, columns, 5, kind), theirs, rtol=1e-5, atol=1e-6)


def kept(config: TrainConfig, columns: Mapping[str, Tensor]) -> Tensor:
    """The rows of groups that the filter of the config lets pass."""
    chosen, scores = config.algorithm.filter, columns["token_level_scores"].sum(1).view(-1, N)
    assert chosen.name is not None and (chosen.metric, chosen.max_refills) == ("reward", 0)
    passed = [FILTERS[chosen.name].load()(group.tolist(), **chosen.options) for group in scores]
    return torch.tensor(passed).repeat_interleave(N)


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_a_published_script(name: str, peer: Peer, tmp_path: Path, model_folder: Path) -> None:
    """Truncated responses and groups that are too easy: ROLL masks their rows, whet drops the groups. ROLL normalises
    rewards over all rows before; the whitening of what remains takes that out again."""
    config, columns = recipe(name, tmp_path, {"model.path": str(model_folder)}), batch_of(N)
    theirs, rows = peer.numbers(keys_of(name), columns), kept(config, columns)
    columns = {**columns, "truncated": columns["lengths"] == columns["response_mask"].shape[1]}
    assert not rows.all() and columns["truncated"][rows].any()
    ours = numbers(config, {key: column[rows] for key, column in columns.items()})
    close(ours, Numbers(theirs.advantages[rows], theirs.loss, theirs.gradient[rows]), rtol=1e-5, atol=1e-5)
    assert not theirs.gradient[~rows].any()


@pytest.mark.parametrize(
    "keys",
    [
        {"adv_estimator": "gae", "whiten_advantages": True, "lambd": 0.9, "gamma": 0.95},
        {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch", "reward_clip": 1},
        {"adv_estimator": "reinforce", "norm_mean_type": "batch", "add_token_level_kl": True, "init_kl_coef": 0.1},
        {"adv_estimator": "grpo", "loss_agg_mode": "token-mean", "use_kl_loss": True, "kl_loss_coef": 0.1},
        {
            "adv_estimator": "grpo",
            "loss_agg_mode": "seq-mean-token-sum",
            "use_pg_clip_range": True,
            "pg_clip_high": 0.3,
        },
        {"adv_estimator": "grpo", "importance_sampling": "seq"},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_keys_of_no_published_script(keys: dict[str, Any], peer: Peer, model_folder: Path) -> None:
    columns = batch_of(N)
    close(numbers(config_of(keys, model_folder), columns), peer.numbers(keys, columns), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"actor_train.pg_variant": "vanilla"},
        {"actor_train.pg_variant": "ppo", "dual_clip_loss": True},
        {"actor_train.pg_variant": "tis"},
        {"actor_train.pg_variant": "topr"},
        {"actor_train.pg_variant": "topr", "actor_train.topr_positive_weight": 0.5},
        {"actor_train.pg_variant": "cispo", "pg_clip": 0.2},
        {"actor_train.pg_variant": "cispo", "actor_train.cispo_epsilon_high": 0.3},
        {"actor_train.pg_variant": "kimi15"},
        {"actor_train.pg_variant": "kimi15", "actor_train.kimi15_tau": 0.5},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_variants_of_the_policy_loss(keys: dict[str, Any], peer: Peer, model_folder: Path) -> None:
    """topr takes a score above 0 for a right response, whet's an accuracy of 1."""
    checkout("WHET_ROLL", "roll/pipeline/rlvr/actor_pg_worker.py")
    keys, columns = {"adv_estimator": "reinforce", "whiten_advantages": True, **keys}, batch_of(N)
    right = {**columns, "accuracy": (columns["token_level_scores"].sum(1) > 0).double()}
    close(numbers(config_of(keys, model_folder), right), peer.variant(keys, columns), rtol=1e-5, atol=1e-5)


def test_the_fixed_length_of_roll_is_the_width_of_the_batch(peer: Peer, model_folder: Path) -> None:
    """seq-mean-token-sum-norm: ROLL divides the sum by the width alone, whet by the number of sequences too."""
    keys, columns = {"adv_estimator": "grpo", "loss_agg_mode": "seq-mean-token-sum-norm"}, batch_of(N)
    ours, theirs = numbers(config_of(keys, model_folder), columns), peer.numbers(keys, columns)
    close(Numbers(ours.advantages, ours.loss * ROWS, ours.gradient * ROWS), theirs, rtol=1e-5, atol=1e-5)


def test_the_clip_of_rewards_with_kl_in_them(peer: Peer, model_folder: Path) -> None:
    """reward_clip: ROLL clips the score and then the reward of each token after the KL term, whet the score alone."""
    keys = {"adv_estimator": "reinforce", "add_token_level_kl": True, "init_kl_coef": 0.5, "reward_clip": 0.25}
    columns = batch_of(N)
    ours, theirs = numbers(config_of(keys, model_folder), columns).advantages, peer.advantages(keys, columns)
    paid = torch.nn.functional.pad(ours, (0, 1)).diff(dim=1).neg().clamp(-0.25, 0.25) * columns["response_mask"]
    expected = paid.flip(1).cumsum(1).flip(1) * columns["response_mask"]
    torch.testing.assert_close(theirs.batch["advantages"].double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, expected, atol=1e-2)
