# SPDX-License-Identifier: Apache-2.0
"""How far numbers that should be equal are apart, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.workers.packing import ragged_batch
from benchmarks.workers.turns import Turns
from whet import devices
from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.engines.role import RoleSettings
from whet.keyed import key
from whet.models.load import load_policy
from whet.roles.workers import TrainWorker
from whet.rollout.batch import to_batch
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.trainers.objectives import PolicyObjective
from whet.types import Group, Prompt, Trajectory, Turn

PADDED_WHOLE = ("padded", 10**9, 1)  # what every other split is compared with
OBJECTIVE = PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None})


class GradientWorker(TrainWorker):
    """A training worker whose gradient can be read."""

    @register(Dispatch.ONE_TO_ALL)
    def gradient(self) -> torch.Tensor:
        """The gradients of the last update, all weights end to end, on the host: other processes may have no
        accelerator."""
        module = self.engine.whole_module()
        assert module is not None
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).cpu()


def main() -> None:
    """Compares once a turn."""
    turns = Turns()
    settings = turns.settings
    turns.ready()
    while True:
        turns.wait()
        turns.done(
            log_prob_gap=log_prob_gap(settings["model"], settings["requests"]),
            gradients=gradient_differences(settings["model"], settings["requests"], settings["splits"]),
            company=company(settings["model"], settings["requests"]),
        )


def make_requests(requests: Sequence[tuple[list[int], int]]) -> list[Request]:
    """Requests at temperature 1 with these prompts and lengths."""
    return [
        Request(str(index), tuple(prompt), SamplingParams(max_new_tokens=length), key(0, "benchmark", index))
        for index, (prompt, length) in enumerate(requests)
    ]


def log_prob_gap(model_path: str, requests: Sequence[tuple[list[int], int]]) -> dict[str, float]:
    """|log pi of the rollout - log pi of the trainer| over all sampled tokens."""
    made = make_requests(requests)
    engine = NativeEngine()
    engine.adopt(load_policy(model_path).to(devices.here()))  # type: ignore[arg-type]
    batch = as_batch(made, generate(engine, made))
    actor = launch([spec(model_path, packing=True, max_tokens=16_384)], ResourcePool(processes=1), 600.0)["actor"]
    trained = actor.forward(batch, ("log_probs",))["log_probs"]
    gap = (trained - batch["rollout_log_probs"]).abs()[batch["response_mask"].bool()]
    return {"mean": float(gap.mean()), "max": float(gap.max()), "tokens": gap.numel()}


def as_batch(requests: Sequence[Request], completions: Sequence[Completion]) -> Batch:
    """The batch that the loop would make of these responses."""
    groups = []
    for index, (request, done) in enumerate(zip(requests, completions, strict=True)):
        prompt = Prompt(str(index), index, (), request.prompt_ids, "benchmark", None)
        turn = Turn(request.prompt_ids, done.token_ids, done.log_probs, done.finish_reason, done.versions)
        groups.append(Group(prompt, (Trajectory(f"{index}:0", prompt, (turn,), 0, reward=0.0),)))
    return to_batch(groups, pad_token_id=0)


def gradient_differences(
    model_path: str, requests: Sequence[tuple[list[int], int]], splits: Sequence[tuple[str, int, int]]
) -> list[dict[str, object]]:
    """|g - g'| / |g'| for each split (packed or padded, tokens a micro-batch, processes), with g' of PADDED_WHOLE."""
    batch = ragged_batch(list(requests))
    reference = gradient(model_path, batch, PADDED_WHOLE)
    found: list[dict[str, object]] = []
    for layout, max_tokens, processes in splits:
        difference = gradient(model_path, batch, (layout, max_tokens, processes)) - reference
        relative = float(difference.norm() / reference.norm())
        found.append({"layout": layout, "max_tokens": max_tokens, "processes": processes, "difference": relative})
    return found


def gradient(model_path: str, batch: Batch, split: tuple[str, int, int]) -> torch.Tensor:
    """The gradient of one update."""
    layout, max_tokens, processes = split
    roles = launch(
        [spec(model_path, packing=layout == "packed", max_tokens=max_tokens)],
        ResourcePool(processes=processes),
        deadline_seconds=600.0,
    )
    try:
        roles["actor"].update(batch, OBJECTIVE)
        found: torch.Tensor = roles["actor"].gradient()[0]
        return found
    finally:
        roles["actor"].close()


def spec(model_path: str, *, packing: bool, max_tokens: int) -> WorkerSpec:
    """A float32 actor that splits its work so."""
    settings = RoleSettings(
        model_path=model_path,
        engine=EngineConfig(packing=packing),
        dtype="float32",
        max_tokens_per_micro_batch=max_tokens,
        optim=OptimConfig(lr=0.0, weight_decay=0.0),
    )
    return WorkerSpec("actor", GradientWorker, (settings,))


def company(model_path: str, requests: Sequence[tuple[list[int], int]]) -> dict[str, bool]:
    """Whether a request gives the same tokens alone, among 7 and among all others."""
    made = make_requests(requests)
    engine = NativeEngine()
    engine.adopt(load_policy(model_path).to(devices.here()))  # type: ignore[arg-type]
    among_all = [each.token_ids for each in generate(engine, made)]
    some = list(range(0, len(made), max(1, len(made) // 8)))[:8]
    among_seven = [each.token_ids for each in generate(engine, [made[index] for index in some])]
    alone = [generate(engine, [made[index]])[0].token_ids for index in some]
    expected = [among_all[index] for index in some]
    return {"among 7": among_seven == expected, "alone": alone == expected}


if __name__ == "__main__":
    main()
