# SPDX-License-Identifier: Apache-2.0
"""Samples answers of given lengths with a rollout engine of whet's config, or with `transformers.generate`; fills an
engine with new weights after each turn."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.workers.rollout import transformers_generate
from benchmarks.workers.turns import Turns
from whet import devices
from whet.config.schema import ModelConfig, RolloutConfig, RolloutEngineConfig
from whet.keyed import key
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.build import load_model, rollout_engine
from whet.rollout.protocol import Request, SamplingParams, generate

MAX_LENGTH = 2048  # tokens of a sequence


def main() -> None:
    """Samples all requests once a turn."""
    turns = Turns()
    path, requests, name = turns.settings["model"], turns.settings["requests"], turns.settings["engine"]
    wanted = sum(length for _, length in requests)
    if name == "transformers":
        sample = transformers_generate(path, requests)
        turns.ready()
        while True:
            turns.wait()
            turns.done(sampled_tokens=sample(), load_seconds=None)
    options = {"server": {"max_model_len": MAX_LENGTH}} if name == "vllm" else {}  # else its cache has to hold 32,768
    chosen, model = RolloutEngineConfig(name=name, options=options), ModelConfig(path=path)
    config = RolloutConfig(engine=chosen, max_batch_size=len(requests))
    engine = rollout_engine(config, torch.bfloat16, partial(load_tokenizer, path), devices.here(), model)
    try:
        load_model(engine, model, devices.here(), torch.bfloat16)
        weights = [(each, weight.to(torch.bfloat16)) for each, weight in load_policy(path).named_parameters()]
        engine.load(iter(weights), 1)  # a server is there when this returns
        turns.ready()
        version = 1
        while True:
            made = [
                Request(str(index), tuple(prompt), SamplingParams(max_new_tokens=length), key(version, "bench", index))
                for index, (prompt, length) in enumerate(requests)
            ]
            turns.wait()
            start = time.perf_counter()
            sampled = sum(len(completion.token_ids) for completion in generate(engine, made))
            seconds = time.perf_counter() - start
            if sampled != wanted:
                raise RuntimeError(f"{name} gave {sampled} tokens, not {wanted}")
            version += 1
            engine.load(iter(weights), version)
            turns.done(seconds=seconds, load_seconds=time.perf_counter() - start - seconds, sampled_tokens=sampled)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
