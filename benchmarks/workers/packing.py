# SPDX-License-Identifier: Apache-2.0
"""One update of a policy: rows end to end, or each padded to the longest."""

from __future__ import annotations

import torch

from benchmarks.workers.turns import Turns
from whet import devices
from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.trainers.objectives import PolicyObjective


def main() -> None:
    """One optimizer step a turn, on the same rows each time."""
    turns = Turns()
    settings = turns.settings
    engine = SingleEngine(
        RoleSettings(
            settings["model"],
            EngineConfig(packing=settings["packing"], share_prompts=settings["share_prompts"]),
            settings["dtype"],
            settings["max_tokens_per_micro_batch"],
            OptimConfig(lr=1e-6),
            grad_clip=1.0,
        ),
        device=devices.here(),
    )
    batch = ragged_batch(settings["requests"])
    objective = PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None})
    turns.ready()
    while True:
        turns.wait()
        engine.forward_backward(batch, objective)
        numbers = engine.step().reduce()
        turns.done(grad_norm=numbers["actor/grad_norm"])


def ragged_batch(requests: list[tuple[list[int], int]]) -> Batch:
    """Rows with these prompts and random answers of these lengths, left and right padded as the loop's are."""
    draw = torch.Generator().manual_seed(0)
    left = max(len(prompt) for prompt, _ in requests)
    right = max(length for _, length in requests)
    answers = torch.randint(3, 250, (len(requests), right), generator=draw)
    prompts = torch.tensor([[0] * (left - len(prompt)) + list(prompt) for prompt, _ in requests])
    prompt_mask = torch.tensor([[0] * (left - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    response_mask = (torch.arange(right) < torch.tensor([length for _, length in requests])[:, None]).long()
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    return Batch.of(
        {
            "input_ids": torch.cat([prompts, answers * response_mask], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.randn(len(requests), 1, generator=draw) * response_mask,
        }
    )


if __name__ == "__main__":
    main()
