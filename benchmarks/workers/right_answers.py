# SPDX-License-Identifier: Apache-2.0
"""The share of problems that a model answers right, as it would greedily. Needs no whet, for any environment."""

from __future__ import annotations

from typing import Any

import torch


class Exam:
    """Problems with their answers: greedy sampling writes an answer where each of its tokens is the likeliest one."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, str]]) -> None:
        prompts = [tokenizer(row["prompt"], add_special_tokens=False).input_ids for row in rows]
        answers = [
            [*tokenizer(row["answer"], add_special_tokens=False).input_ids, tokenizer.eos_token_id] for row in rows
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        self.ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        self.mask, self.is_answer = torch.zeros_like(self.ids), torch.zeros(self.ids.shape, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            self.ids[row, :end] = torch.tensor([*prompt, *answer])
            self.mask[row, :end], self.is_answer[row, len(prompt) : end] = 1, True

    def accuracy(self, model: Any) -> float:
        """Share of problems with a right greedy answer."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            likeliest = model(input_ids=self.ids, attention_mask=self.mask).logits[:, :-1].argmax(-1)
        model.train(was_training)
        is_right = (likeliest == self.ids[:, 1:]) | ~self.is_answer[:, 1:]
        return is_right.all(1).float().mean().item()
