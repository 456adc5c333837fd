# SPDX-License-Identifier: Apache-2.0
"""Trains adapters and all weights by a named and by a custom loss: python sdk_losses.py URL ROWS. Prints JSON. The
other script is found on PYTHONPATH."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker  # type: ignore[import-not-found]
import torch
from tinker import types

from tests.plugins.serving.tinker.sdk_script import ADAM, datum, rows, tensor

PROMPT = [1, 2, 3, 4, 5]


def mean_loss(data: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The cross-entropy of `rows()`, as a client may write it."""
    weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
    loss = torch.stack([-(weight * each).sum() for weight, each in zip(weights, log_probs, strict=True)]).sum()
    return loss, {"mean": float(loss)}


def squared(data: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The square of the sum of two log-probs."""
    return log_probs[0][:2].sum().square(), {}


def train(service: Any, name: str) -> dict[str, Any]:
    """Losses of two steps, and after them; metrics; log-probs of a prompt after training."""
    rank = 0 if name.startswith("full") else 4
    model = service.create_lora_training_client(base_model="nano", rank=rank, seed=3, train_unembed=False).result()
    losses, metrics = [], {}
    for _ in range(2):
        if name.endswith("custom"):
            done = model.forward_backward_custom(rows(), mean_loss).result()
        else:
            done = model.forward_backward(rows(), "cross_entropy").result()
        losses.append(model.forward(rows(), "cross_entropy").result().metrics["loss:sum"])
        metrics = metrics or done.metrics
        model.optim_step(types.AdamParams(**ADAM)).result()
    losses.append(model.forward(rows(), "cross_entropy").result().metrics["loss:sum"])
    model.save_state(name).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1:]
    return {"losses": losses, "metrics": metrics, "scores": scores}


def norm(service: Any, how: str) -> float:
    """The norm of the gradient of `squared`, by the SDK or with the slope that it has by hand as weights."""
    model = service.create_lora_training_client(base_model="nano", rank=4, seed=3).result()
    data = [datum([1, 2, 3, 4], [1.0, 1.0, 1.0])]
    if how == "squared":
        model.forward_backward_custom(data, squared).result()
    else:
        [found] = model.forward(data, "cross_entropy").result().loss_fn_outputs
        slope = -2 * sum(found["logprobs"].data[:2])
        model.forward_backward([datum([1, 2, 3, 4], [slope, slope, 0.0])], "cross_entropy").result()
    return float(model.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"])


def compared(service: Any, is_named: bool) -> list[float]:
    """The loss of a pair whose reference is the model itself but for a nat, and the norm of its gradient: by the
    server's DPO, or by a formula of the client."""
    model = service.create_lora_training_client(base_model="nano", rank=4, seed=3).result()
    pair = [datum([1, 2, 3, 4], [0.0, 1.0, 1.0]), datum([1, 2, 5], [0.0, 1.0])]
    found = model.forward(pair, "cross_entropy").result().loss_fn_outputs
    reference = [[each - 0.5 * (row == 0) for each in out["logprobs"].data] for row, out in enumerate(found)]

    def by_hand(_: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        better, worse = ((own - torch.tensor(ref))[1:].sum() for own, ref in zip(log_probs, reference, strict=True))
        return -torch.nn.functional.logsigmoid(0.2 * (better - worse)), {}

    if not is_named:
        done = model.forward_backward_custom(pair, by_hand).result()
    else:
        inputs = [
            {"ref_log_probs": tensor(own, "float32"), **each.loss_fn_inputs}
            for own, each in zip(reference, pair, strict=True)
        ]
        data = [
            types.Datum(model_input=each.model_input, loss_fn_inputs=own)
            for each, own in zip(pair, inputs, strict=True)
        ]
        done = model.forward_backward(data, "dpo", {"beta": 0.2, "num_comparisons": 1}).result()
    step = model.optim_step(types.AdamParams(**ADAM)).result()
    return [done.metrics["loss:sum"], step.metrics["grad_norm"]]


def main(url: str) -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-me")
    sampler = service.create_sampling_client(base_model="nano").result()
    params = types.SamplingParams(max_tokens=1, seed=0)
    prompt = types.ModelInput.from_ints(PROMPT)
    sampled = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    return {
        "prompt": PROMPT,
        "likeliest": sampled.topk_prompt_logprobs,
        "losses": {name: train(service, name) for name in ("lora", "lora-custom", "full", "full-custom")},
        "squared": norm(service, "squared"),
        "by_hand": norm(service, "by hand"),
        "dpo": [compared(service, is_named) for is_named in (True, False)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
