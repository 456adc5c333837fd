# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO trainer, one step a turn, with answers of given lengths. Runs in TRL's own environment."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset, Features, Image, Value
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # of another environment

from benchmarks.workers.processor import processor
from benchmarks.workers.turns import Turns
from benchmarks.workload import score

PHASES = {
    "_generate_single_turn": "rollout",
    "_calculate_rewards": "reward",
    "_generate_and_score_completions": "advantage",  # what it takes beyond the two above
    "training_step": "update",  # what it takes beyond the three above; the optimizer's step comes after it
}


class PhaseClock:
    """Seconds by phase; a phase that runs inside another is not counted in that one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block, without inner phases."""
        start = time.perf_counter()
        self._inner.append(0.0)
        yield
        whole = time.perf_counter() - start
        self.seconds[phase] += whole - self._inner.pop()
        self._inner[-1] += whole

    def wrap(self, trainer: GRPOTrainer, method: str, phase: str) -> None:
        """Measures every call of a method of the trainer."""
        original: Callable[..., Any] = getattr(trainer, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measure(phase):
                return original(*args, **kwargs)

        setattr(trainer, method, measured)


class Lengths(LogitsProcessor):
    """Ends each row at its length and not before."""

    def __init__(self, prompt_width: int, lengths: torch.Tensor, end_ids: list[int]) -> None:
        self.prompt_width, self.lengths, self.end_ids = prompt_width, lengths, end_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits with only the end token left where a row's last token is due, and without it where it is not."""
        last = self.lengths <= input_ids.shape[1] - self.prompt_width + 1
        end_scores = scores[:, self.end_ids[0]].clone()
        scores[:, self.end_ids] = float("-inf")
        scores[last] = float("-inf")
        scores[:, self.end_ids[0]] = torch.where(last, end_scores, float("-inf"))
        return scores


class OneStepATurn(TrainerCallback):
    """Waits before every step but the first, which `main` waits for."""

    def __init__(self, turns: Turns, clock: PhaseClock) -> None:
        self.turns, self.clock = turns, clock
        self.trainer: GRPOTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step's numbers."""
        lengths = self.trainer._metrics["train"]["completions/mean_length"]
        self.turns.done(tokens=lengths[-1] * len(self.turns.settings["lengths"]), phases=dict(self.clock.seconds))
        self.clock.seconds.clear()
        self.turns.wait()


def main() -> None:
    """Trains until there are no more turns."""
    turns = Turns()
    settings = turns.settings
    images = settings.get("images")
    loader = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
    model = loader.from_pretrained(settings["model"], dtype=getattr(torch, settings["weights"]))
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    clock = PhaseClock()
    callback = OneStepATurn(turns, clock)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(settings),
        train_dataset=rows(settings["texts"], images),
        processing_class=tokenizer if images is None else processor(settings["model"], tokenizer),
        callbacks=[callback],
    )
    callback.trainer = trainer
    for method, phase in PHASES.items():
        clock.wrap(trainer, method, phase)
    force_lengths(model, torch.tensor(settings["lengths"]), trainer.eos_token_ids)
    turns.ready("trl", "accelerate")
    turns.wait()
    trainer.train()


def arguments(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's defaults, except for settings of both sides, and without settings that would slow it down."""
    rows = len(settings["lengths"])
    return GRPOConfig(
        output_dir=settings["run_dir"],
        use_cpu=True,
        bf16=settings.get("dtype", "bfloat16") == "bfloat16",
        beta=0.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        num_generations=settings["n"],
        max_completion_length=max(settings["lengths"]),
        per_device_train_batch_size=rows // settings["micro_batches"],
        gradient_accumulation_steps=settings["micro_batches"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        max_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rows(texts: list[str], images: list[str] | None) -> Dataset:
    """Prompts, with an image each where there are any."""
    if images is None:
        return Dataset.from_list([{"prompt": text} for text in texts] * 1000)
    shown = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text in texts], "image": images},
        features=Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()}),
    )
    return shown


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The reward that whet is given too."""
    return [score(text if isinstance(text, str) else text[0]["content"]) for text in completions]


def force_lengths(model: Any, lengths: torch.Tensor, end_ids: list[int]) -> None:
    """Makes `model.generate` give every row its own length."""
    original = model.generate

    def generate(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        processor = Lengths(input_ids.shape[1], lengths, end_ids)
        return original(input_ids, logits_processor=LogitsProcessorList([processor]), **kwargs)

    model.generate = generate


if __name__ == "__main__":
    main()
