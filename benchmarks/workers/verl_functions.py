# SPDX-License-Identifier: Apache-2.0
"""One of verl's functions on a random batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]  # of another environment
from verl.workers.config import ActorConfig  # type: ignore[import-not-found]

from benchmarks.workers.random_columns import columns_for
from benchmarks.workers.turns import Turns

CONFIGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "dppo_kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
}


def main() -> None:
    """A turn is one call."""
    turns = Turns()
    kind, name, shape = (turns.settings[key] for key in ("kind", "name", "shape"))
    columns = columns_for(kind, name.removesuffix("_vectorized"), shape)
    work = loss_of(name, columns) if kind == "loss" else estimator_of(name, columns)
    turns.ready("verl")
    while True:
        turns.wait()
        work()
        turns.done()


def estimator_of(name: str, columns: dict[str, Tensor]) -> Any:
    """verl's estimator, with rows' groups as it names them."""
    function = core_algos.get_adv_estimator_fn(name)
    index = np.array([str(each) for each in columns.pop("uid").tolist()], dtype=object)
    options: dict[str, Any] = {"gamma": 0.99, "lam": 0.95} if name == "gae" else {"index": index}
    return lambda: function(**columns, **options)


def loss_of(name: str, columns: dict[str, Tensor]) -> Any:
    """verl's loss, forward with its metrics, and backward."""
    function = core_algos.get_policy_loss_fn(name)
    options = CONFIGS.get(name, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})
    if name in ("dro", "kl_cov", "clip_cov"):
        chosen = {"dro_beta": 1.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0, "clip_cov_ratio": 2e-4}
        chosen |= {"clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
        config: Any = SimpleNamespace(
            clip_ratio=0.2, **options, policy_loss=SimpleNamespace(**chosen), global_batch_info={}
        )
    else:
        sapo = {"tau_pos": 1.0, "tau_neg": 1.05} if name == "sapo" else {}
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options, **sapo)
    mode = "seq-mean-token-mean" if name in ("gspo", "sapo", "geo_mean") else "token-mean"

    def work() -> None:
        columns["log_probs"].grad = None
        loss, _ = function(
            old_log_prob=columns["old_log_probs"],
            log_prob=columns["log_probs"],
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            loss_agg_mode=mode,
            config=config,
        )
        loss.backward()

    return work


if __name__ == "__main__":
    main()
