# SPDX-License-Identifier: Apache-2.0
"""Samples responses of given lengths to new images in each turn, by `transformers.generate` or the native engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from benchmarks.workers.processor import processor
from benchmarks.workers.turns import Turns
from whet import devices
from whet.config.schema import DataConfig
from whet.data.prompts import PromptFormat, build_prompts
from whet.keyed import key
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate

QUESTION = "How many figures are there?"
Sampler = Callable[[Sequence[str], Sequence[int], int], int]  # image files, lengths, responses a prompt -> tokens


def main() -> None:
    """Samples all responses once a turn."""
    turns = Turns()
    lengths, n = turns.settings["lengths"], turns.settings["n"]
    samplers = {"transformers": transformers_generate, "native": native}
    sample = samplers[turns.settings["engine"]](turns.settings["model"])
    images, prompts = turns.settings["images"], len(lengths) // n
    turns.ready()
    start = 0
    while True:
        turns.wait()
        sampled = sample(images[start : start + prompts], lengths, n)
        turns.done(tokens=sum(lengths), sampled_tokens=sampled)
        start += prompts


def transformers_generate(path: str) -> Sampler:
    """The batch of prompts, all for as long as the longest response: there is no limit by row."""
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    model.eval().to(devices.here())
    model.generation_config.eos_token_id = None  # lengths are given: no response ends by itself
    tokenizer: Any = load_tokenizer(path)
    tokenizer.padding_side = "left"
    prepare: Any = processor(path, tokenizer)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )

    def sample(files: Sequence[str], lengths: Sequence[int], n: int) -> int:
        shown = [[Image.open(file)] for file in files]
        inputs = prepare(images=shown, text=[text] * len(files), padding=True, return_tensors="pt").to(model.device)
        width, longest = inputs["input_ids"].shape[1], max(lengths)
        with torch.no_grad():
            out = model.generate(
                **inputs,
                max_new_tokens=longest,
                num_return_sequences=n,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        if out.shape != (len(lengths), width + longest):
            raise RuntimeError(f"generate gave {tuple(out.shape)}, not {(len(lengths), width + longest)}")
        return int(out[:, width:].numel())

    return sample


def native(path: str) -> Sampler:
    """whet's engine: each response for as long as its own length, log-probs included."""
    engine = NativeEngine(dtype=torch.bfloat16)
    engine.adopt(load_policy(path).to(devices.here()))  # type: ignore[arg-type]
    data = DataConfig()
    prompt_format = PromptFormat.of(load_tokenizer(path), data)

    def sample(files: Sequence[str], lengths: Sequence[int], n: int) -> int:
        rows = [{"prompt": f"<image>{QUESTION}", "images": [file]} for file in files]
        prompts = build_prompts(rows, prompt_format, data, with_answers=False)
        requests = [
            Request(
                str(number),
                prompts[number // n].token_ids,
                SamplingParams(max_new_tokens=length),
                key(0, "benchmark", number),
                media=prompts[number // n].media,
            )
            for number, length in enumerate(lengths)
        ]
        return sum(len(completion.token_ids) for completion in generate(engine, requests))

    return sample


if __name__ == "__main__":
    main()
