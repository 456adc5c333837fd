# SPDX-License-Identifier: Apache-2.0
"""Uses the SDK against a server, in an environment without whet: python sdk_script.py URL ROWS. Prints JSON."""

from __future__ import annotations

import json
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker  # type: ignore[import-not-found]
from tinker import types

warnings.simplefilter("ignore")
ROWS = json.loads(sys.argv[2])  # token ids, and a mask of the targets
POLICY_LOSSES = ("importance_sampling", "ppo")  # -(sum of advantages) where the ratio is 1, which is 0 here
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}


def now(found: Any) -> Any:
    """The client itself: newer versions give a future of it."""
    return found.result() if type(found).__name__.endswith("Future") else found


def tensor(values: Any, dtype: str) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def datum(ids: list[int], weights: list[float]) -> types.Datum:
    inputs = {"target_tokens": tensor(ids[1:], "int64"), "weights": tensor(weights, "float32")}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def rows() -> list[types.Datum]:
    total = sum(sum(mask) for _, mask in ROWS)
    return [datum(ids, [each / total for each in mask]) for ids, mask in ROWS]


def policy_step(loss: str, model: Any, sequences: Any) -> float:
    """The loss of the sampled tokens, whose log-probs are the model's own: the ratio is 1."""
    data = []
    for number, each in enumerate(sequences):
        tokens, pad = list(each.tokens), [0.0, 0.0]  # behind a prompt of three tokens
        inputs = {
            "target_tokens": tensor([0, 0, *tokens], "int64"),
            "logprobs": tensor([*pad, *each.logprobs], "float32"),
            "advantages": tensor([*pad, *[number - 1.0] * len(tokens)], "float32"),
        }
        ids = types.ModelInput.from_ints([1, 2, 3, *tokens[:-1]])
        data.append(types.Datum(model_input=ids, loss_fn_inputs=inputs))
    return float(model.forward(data, loss).result().metrics["loss:sum"])


def errors(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(url: str) -> dict[str, Any]:
    told: dict[str, Any] = {"version": tinker.__version__}
    service = tinker.ServiceClient(base_url=url, api_key="tml-me")
    told["served"] = [each.model_name for each in service.get_server_capabilities().supported_models]
    model = now(service.create_lora_training_client(base_model="nano", rank=4, seed=3, train_unembed=False))
    told["info"] = [model.get_info().model_data.model_name, model.get_info().lora_rank]
    losses = []
    for _ in range(3):  # submitted before the first has a result
        losses.append(model.forward_backward(rows(), "cross_entropy"))
        step = model.optim_step(types.AdamParams(**ADAM))
    told["losses"] = [each.result().metrics["loss:sum"] for each in losses]
    told["log_probs"] = [each["logprobs"].data for each in losses[0].result().loss_fn_outputs]
    told["step"] = step.result().metrics
    told["state"] = model.save_state("three").result().path
    told["exists"] = errors(lambda: model.save_state("three").result())
    # 2,100 rows are three chunks, which may come in any order
    many = model.forward([datum([1, 2 + i % 30, 3], [1.0, 1.0]) for i in range(2100)], "cross_entropy").result()
    told["chunks"] = [len(many.loss_fn_outputs), [many.loss_fn_outputs[i]["logprobs"].data for i in (0, 30, 2070)]]
    sampler = now(model.save_weights_and_get_sampling_client())
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=6, seed=5, stop=[])
    sampled = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    told["samples"] = [[each.tokens, each.logprobs, each.stop_reason] for each in sampled.sequences]
    told["prompt"] = [sampled.prompt_logprobs, sampled.topk_prompt_logprobs]
    told["policy"] = [policy_step(other_losses, model, sampled.sequences) for other_losses in POLICY_LOSSES]
    told["again"] = [each.tokens for each in sampler.sample(prompt, 3, params).result().sequences]
    told["computed"] = sampler.compute_logprobs(prompt).result()
    other = now(service.create_training_client_from_state_with_optimizer(told["state"]))
    told["resumed"] = []
    for each in (model, other):
        each.forward_backward(rows(), "cross_entropy").result()
        each.optim_step(types.AdamParams(**ADAM)).result()
        told["resumed"].append(each.forward(rows(), "cross_entropy").result().metrics["loss:sum"])
    path = other.save_weights_for_sampler("out").result().path
    saved = now(service.create_sampling_client(model_path=path))
    told["saved"] = [each.tokens for each in saved.sample(prompt, 1, params).result().sequences]
    told["base"] = [
        now(service.create_sampling_client(base_model="nano")).sample(prompt, 1, params).result().sequences[0].tokens
    ]
    stranger = tinker.ServiceClient(base_url=url, api_key="tml-you")
    told["stranger"] = [
        errors(lambda: now(stranger.create_sampling_client(model_path=path)).sample(prompt, 1, params).result()),
        errors(lambda: now(stranger.create_training_client_from_state(told["state"]))),
    ]
    told["wrong"] = [
        errors(lambda: now(service.create_lora_training_client(base_model="another", rank=4))),
        errors(lambda: model.forward_backward([datum([1, 10**6, 2], [1.0, 1.0])], "cross_entropy").result()),
    ]
    picture = types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    seen = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), picture])
    pictured = types.Datum(model_input=seen, loss_fn_inputs=rows()[0].loss_fn_inputs)
    told["images"] = [
        errors(lambda: sampler.sample(seen, 1, params).result()),
        errors(lambda: model.forward([pictured], "cross_entropy").result()),
    ]
    head = now(service.create_lora_training_client(base_model="nano", rank=4, seed=3))
    for _ in range(2):
        head.forward_backward(rows(), "cross_entropy")
        head.optim_step(types.AdamParams(**ADAM)).result()
    told["unembedding"] = head.forward(rows(), "cross_entropy").result().metrics["loss:sum"]
    with ThreadPoolExecutor(4) as pool:  # adapters beside each other
        create = service.create_lora_training_client
        clients = [now(create(base_model="nano", rank=4, seed=3, train_unembed=False)) for _ in range(4)]

        def train(client: Any) -> float:
            for _ in range(3):
                client.forward_backward(rows(), "cross_entropy")
                client.optim_step(types.AdamParams(**ADAM)).result()
            return float(client.forward(rows(), "cross_entropy").result().metrics["loss:sum"])

        told["beside"] = list(pool.map(train, clients))
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
