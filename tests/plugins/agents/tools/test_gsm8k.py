# SPDX-License-Identifier: Apache-2.0
"""The recipe gsm8k_tools on published problems: a model that writes the annotated solutions uses the calculator."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import pytest
from episodes import Says
from test_families import QWEN25
from transformers import AutoTokenizer

from whet.config import TrainConfig, load_config
from whet.data.load import TRAIN, load_items
from whet.data.loader import PromptSource
from whet.environments.toolbox import with_tools
from whet.rewards.pool import scorer_of
from whet.rollout.build import open_environments, stages_of
from whet.rollout.driver import Driver
from whet.rollout.protocol import SamplingParams
from whet.rollout.rollouts import Rollouts

STEP = re.compile(r"<<([-+*/(). 0-9]+)=(-?[.0-9]+)>>")  # an annotation of GSM8K: expression and value


def call(expression: str) -> str:
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


@pytest.mark.slow
def test_annotated_solutions_are_right(shared_data: Path, qwen25_folder: Path, tmp_path: Path) -> None:
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines[:80]) if STEP.search(row["answer"])][:30]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = deepcopy(AutoTokenizer.from_pretrained(qwen25_folder))
    tokenizer.chat_template = QWEN25
    given = [f"model.path={qwen25_folder}", f"data.train_files={path}", "data.max_prompt_length=4000"]
    config = load_config(TrainConfig, "gsm8k_tools", [*given, "reward.num_workers=0", "trainer.val_freq=0"]).config
    prompts = load_items(with_tools(config.data, config.environment), tokenizer, TRAIN).items
    assert len(prompts) == len(rows) and '"calculator"' in tokenizer.decode(prompts[0].token_ids)

    scorer = scorer_of(config, None)
    assert scorer is not None
    steps_of = [STEP.findall(row["answer"]) for row in rows]
    finals = [row["answer"].partition("####")[2].strip() for row in rows]
    turns = [
        turn
        for steps, final in zip(steps_of, finals, strict=True)
        for turn in ("\n".join(call(expression) for expression, _ in steps), f"So it is {final}.\n#### {final}")
    ]
    undo = ExitStack()
    driver = Driver(Says(tokenizer, turns, "<|im_end|>"), open_environments(config.environment, undo))  # type: ignore[arg-type]
    stages, params = stages_of(config, tokenizer), SamplingParams(4000)
    rollouts = Rollouts(PromptSource(), driver, stages, scorer, tokenizer, n=1, params=params)
    for row, steps, prompt in zip(rows, steps_of, prompts, strict=True):  # one at a time: turns are said in order
        [group] = rollouts.sample([prompt], 1, SamplingParams(4000), step=0, purpose="evaluation")
        [trajectory] = group.trajectories
        results = [float(message.content) for message in trajectory.messages if message.role == "tool"]
        assert results == pytest.approx([float(value) for _, value in steps], abs=0.02), row["answer"]
        assert trajectory.failure is None and trajectory.accuracy == 1.0 and len(trajectory.turns) == 2
        assert trajectory.fields["tools/calls"] == len(steps) and trajectory.fields["tools/errors"] == 0.0
    undo.close()
    scorer.close()
