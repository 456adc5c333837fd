# SPDX-License-Identifier: Apache-2.0
"""Samples answers of given lengths, by one call of `transformers.generate` or by the native engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workers.turns import Turns
from whet import devices
from whet.keyed import key
from whet.models.load import load_policy
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate

Requests = Sequence[tuple[list[int], int]]  # prompt, tokens to sample


def main() -> None:
    """Samples all requests once a turn."""
    turns = Turns()
    model, requests = turns.settings["model"], turns.settings["requests"]
    if turns.settings["engine"] == "transformers":
        sample = transformers_generate(model, requests)
    else:
        sample = native(model, requests, compiled=turns.settings["compile"])
    turns.ready()
    wanted = sum(length for _, length in requests)
    while True:
        turns.wait()
        sampled = sample()
        turns.done(tokens=wanted, sampled_tokens=sampled)


def transformers_generate(model_path: str, requests: Requests) -> Callable[[], int]:
    """One left-padded batch, everyone for as long as the longest answer: there is no limit by row."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    model.eval().to(devices.here())
    model.generation_config.eos_token_id = None  # lengths are given: no answer ends by itself
    width = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in requests], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    mask = mask.to(model.device)
    longest = max(length for _, length in requests)

    def sample() -> int:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
            )
        if out.shape[1] != width + longest:
            raise RuntimeError(f"generate gave {out.shape[1] - width} tokens, not {longest}")
        return int(out[:, width:].numel())

    return sample


def native(model_path: str, requests: Requests, *, compiled: bool) -> Callable[[], int]:
    """whet's engine: every answer for as long as its own length, log-probs included."""
    engine = NativeEngine(dtype=torch.bfloat16, compile=compiled)
    engine.adopt(load_policy(model_path).to(devices.here()))  # type: ignore[arg-type]
    made = [
        Request(str(index), tuple(prompt), SamplingParams(max_new_tokens=length), key(0, "benchmark", index))
        for index, (prompt, length) in enumerate(requests)
    ]

    def sample() -> int:
        return sum(len(completion.token_ids) for completion in generate(engine, made))

    return sample


if __name__ == "__main__":
    main()
