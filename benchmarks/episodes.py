# SPDX-License-Identifier: Apache-2.0
"""Episodes of many turns: the KV cache that their turns share, steps of environments a second, and a slow one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from benchmarks.setting import Setting
from whet.data.loader import PromptSource
from whet.environments.host import open_host
from whet.environments.protocol import Answer
from whet.models.load import load_policy, load_tokenizer
from whet.plugins.lessons.init_model import init_model
from whet.rollout.codec import TemplateCodec
from whet.rollout.driver import Driver
from whet.rollout.episode import MAIN, EpisodeLimits, Stage
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Event, Finished, Request, RolloutEngine, SamplingParams, generate
from whet.rollout.rollouts import Rollouts
from whet.types import Prompt

TITLE = "Episodes of many turns"
NOTE = """\
Turns: 16 episodes of 8 turns, each of 64 sampled tokens and 16 of the environment, on the native engine with a model of
30 M parameters or more, after a prompt of 32 tokens, or of 384, of which 320 are a system prompt that all have. "Read
again" computes the whole context for every turn; both take turns, one round after the other. Steps: an engine that
costs nothing, episodes of 10 turns in an environment that costs nothing, in the trainer's process (pure) and in others,
through episodes, stream and rewards; a process is forked for each episode, which is most of their time. Rows of a
reset and a step, if measured: calls of 32 such environments together, two seconds after earlier episodes. Slow: 512
episodes of an async environment in one process, of which one waits two seconds in its step. On two cores of an Intel
with AMX, which reads contexts faster, the ratio with short prompts was 1.7x before turns shared their last block; it
was not measured there again.
"""
TURNS, SAMPLED, READ = 8, 64, 16
PROMPTS = {32: 0, 384: 320}  # tokens of a prompt, and those of them that all episodes begin with
WORLDS = """
import asyncio
from whet.environments.protocol import Observation
from whet.registry import register_environment
from whet.types import Message

MORE = Observation(False, (Message("user", "+"),))

class Counts:
    def __init__(self, prompt, *, turns=10): self.left = turns
    def step(self, answer):
        self.left -= 1
        return Observation(True, reward=1.0) if self.left == 0 else MORE

@register_environment("benchmark_pure", pure=True)
class Pure(Counts): pass

@register_environment("benchmark_slow", shared=True)
class Slow:
    def __init__(self, *, seconds=2.0): self.seconds = seconds
    def reset(self, prompt, seed):
        self.is_slow = prompt.index == 7
        return Observation(False)
    async def step(self, answer):
        if self.is_slow: await asyncio.sleep(self.seconds)
        return Observation(True, reward=1.0)
"""


class Instant:
    """An engine that answers at once."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        self.completion = Completion(tuple(token_ids), (-1.0,) * count, "stop", ((0, count),))
        self.events: list[Event] = []

    def submit(self, request: Request) -> bool:
        """Takes a request."""
        self.events.append(Finished(request.uid, request.attempt, self.completion))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Returns all completions."""
        events, self.events = self.events, []
        return events

    def abort(self, uids: Sequence[str]) -> None:
        """Does nothing: there is nothing left to abort."""


def turns_per_second(model: Path, prompt: int, *, keeps_cache: bool, episodes: int, turns: int) -> float:
    """Sampled tokens a second over all turns, after prompts of so many tokens."""
    engine = NativeEngine()
    engine.attach(load_policy(model).eval(), 0)
    common = PROMPTS[prompt]
    contexts = [(*range(3, 3 + common), *range(3 + n, 3 + n + prompt - common)) for n in range(episodes)]
    start = time.perf_counter()
    for turn in range(turns):
        params = SamplingParams(max_new_tokens=SAMPLED)
        requests = [
            Request(f"{number}:{turn}", context, params, 1000 * turn + number, keeps_cache=keeps_cache)
            for number, context in enumerate(contexts)
        ]
        completions = generate(cast(RolloutEngine, engine), requests)
        contexts = [
            context + completion.token_ids + tuple(range(READ))
            for context, completion in zip(contexts, completions, strict=True)
        ]
    return episodes * turns * SAMPLED / (time.perf_counter() - start)


def steps_per_second(tokenizer: PreTrainedTokenizerBase, environment: str, *, episodes: int, turns: int = 10) -> float:
    """Steps of environments a second, from prompts to scored groups."""
    rollouts = _rollouts(tokenizer, environment, {"turns": turns}, EpisodeLimits(max_turns=turns))
    params, start = SamplingParams(max_new_tokens=10_000), time.perf_counter()
    groups = rollouts.sample(_prompts(tokenizer, episodes // 8), 8, params, step=1)
    seconds = time.perf_counter() - start
    rollouts.close()
    steps = sum(len(each.turns) for group in groups for each in group.trajectories)
    assert steps == episodes * turns, f"{steps} steps, expected {episodes * turns}"
    return steps / seconds


def seconds_with_a_slow_one(tokenizer: PreTrainedTokenizerBase, environment: str, *, episodes: int) -> float:
    """Seconds until all episodes are over, of which one waits two seconds; its process is started before."""
    rollouts = _rollouts(tokenizer, environment, {}, EpisodeLimits())
    rollouts.sample(_prompts(tokenizer, 1), 1, rollouts.params, step=1, is_scored=False)
    start = time.perf_counter()
    groups = rollouts.sample(_prompts(tokenizer, episodes), 1, rollouts.params, step=2, is_scored=False)
    seconds = time.perf_counter() - start
    rollouts.close()
    assert all(each.failure is None for group in groups for each in group.trajectories)
    return seconds


def seconds_of_calls(environment: str, *, episodes: int, turns: int = 3) -> dict[str, float]:
    """Seconds of a call of an environment in processes: a reset, a step. All episodes are called together, as by an
    engine that costs nothing; two seconds pass before, as a step trains between two rollouts."""
    host, found = open_host(environment, {"turns": turns}), dict[str, float]()
    prompts = [Prompt(f"0:{index}", index, (), (3,), "benchmark", None) for index in range(episodes)]

    def timed(name: str, call: Callable[[Prompt], None]) -> None:
        start, left = time.perf_counter(), episodes
        for prompt in prompts:
            call(prompt)
        while left:
            left -= len(host.poll(1.0))
        found[name] = found.get(name, 0.0) + (time.perf_counter() - start) / episodes

    for _ in range(2):  # the processes of the first episodes are forked while these wait
        found.clear()
        timed("reset", lambda prompt: host.start(prompt.uid, prompt, 0))
        for _ in range(turns):
            timed("step", lambda prompt: host.step(prompt.uid, Answer("+", (), (3,), "stop")))
        for prompt in prompts:
            host.close(prompt.uid)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            host.poll(0.1)
    host.shutdown()
    return {"reset": found["reset"], "step": found["step"] / turns}


def _rollouts(
    tokenizer: PreTrainedTokenizerBase, environment: str, options: Mapping[str, Any], limits: EpisodeLimits
) -> Rollouts:
    driver = Driver(cast(RolloutEngine, Instant(tokenizer.encode("12"))), {MAIN: open_host(environment, options)})
    stages = {MAIN: Stage(TemplateCodec(tokenizer, apply_chat_template=False), limits)}
    return Rollouts(PromptSource(), driver, stages, None, tokenizer, n=1, params=SamplingParams(max_new_tokens=8))


def _prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Prompt]:
    ids = tuple(tokenizer.encode("1+1="))
    return [Prompt(f"0:{index}", index, (), ids, "benchmark", None) for index in range(count)]


def run(setting: Setting) -> dict[str, Any]:
    """All rounds."""
    is_full = setting.scale.is_thorough
    size, layers, episodes, turns = ("small", 10, 16, TURNS) if is_full else ("nano", 1, 2, 2)
    model = init_model(setting.scratch / "episodes", "qwen3", size, num_layers=layers)
    worlds = setting.scratch / "worlds.py"
    worlds.write_text(WORLDS)
    tokenizer = load_tokenizer(model)
    parameters = sum(weight.numel() for weight in load_policy(model).parameters())
    found: dict[str, Any] = {
        "parameters": parameters,
        "shared": {str(prompt): [] for prompt in PROMPTS},
        "again": {str(prompt): [] for prompt in PROMPTS},
        "pure": [],
        "processes": [],
        "slow": [],
        "calls": [],
    }
    names = {"pure": f"{worlds}:Pure", "processes": f"{worlds}:Counts"}
    for _ in range(3 if is_full else 1):
        for prompt, (name, keeps_cache) in product(PROMPTS, (("shared", True), ("again", False))):
            speed = turns_per_second(model, prompt, keeps_cache=keeps_cache, episodes=episodes, turns=turns)
            found[name][str(prompt)].append(speed)
        for name, environment in names.items():
            steps = steps_per_second(tokenizer, environment, episodes=512 if is_full else 16)
            found[name].append(steps)
        slow = seconds_with_a_slow_one(tokenizer, f"{worlds}:Slow", episodes=512 if is_full else 8)
        found["slow"].append(slow)
        found["calls"].append(seconds_of_calls(f"{worlds}:Counts", episodes=32 if is_full else 4))
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    found = results["episodes"]
    what = f"turns, {found['parameters'] / 1e6:.0f} M parameters"
    lines = ["| | |", "|---|---|"]
    for prompt in found["shared"]:
        shared, again = found["shared"][prompt], found["again"][prompt]
        ratio = median(one / other for one, other in zip(shared, again, strict=True))
        lines += [
            f"| {what}, prompts of {prompt} tokens, cache shared | {median(shared):.0f} tokens/s |",
            f"| {what}, prompts of {prompt} tokens, read again | {median(again):.0f} tokens/s |",
            f"| ratio (at least 2x) | {ratio:.1f}x |",
        ]
    return [
        *lines,
        f"| steps, in the trainer's process (at least 2,000) | {median(found['pure']):.0f} a second |",
        f"| steps, in processes | {median(found['processes']):.0f} a second |",
        *(
            f"| a {name} of one of 32 environments in processes (at most 10 ms) | "
            f"{1000 * median(each[name] for each in found['calls']):.1f} ms |"
            for name in ("reset", "step")
            if found.get("calls")
        ),
        f"| 512 episodes, one of which waits 2 s | {median(found['slow']):.1f} s |",
    ]
