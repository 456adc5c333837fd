# SPDX-License-Identifier: Apache-2.0
"""The best of sampled responses: by hand, as rows that `whet sft` reads, and in rounds that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import EvalConfig, SFTConfig, load_config
from whet.data.load import load_items
from whet.errors import ConfigError, DataError, RewardError
from whet.evaluation.select import select
from whet.models.load import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "expert_iteration.sh"
COMMON = ("data.apply_chat_template=false", "model.dtype=float32")
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "data_source": "sums"} for n in range(3)]
# prompt, response, finish reason
SAMPLES = [
    *((0, "1", "stop"), (0, "1 ", "stop"), (0, "1", "stop"), (0, "7", "stop")),
    *((1, "5", "stop"), (1, "2", "length"), (1, "x", "stop"), (1, "2", "stop")),
    *((2, "9", "stop"), (2, "x", "stop"), (2, "8", "stop"), (2, "3", "length")),
]


def paid(solution_str: str, ground_truth: str) -> float:
    """1 for the answer, half of it with a space behind it; "x" cannot be scored."""
    if solution_str == "x":
        raise ValueError(solution_str)
    return 1.0 if solution_str == ground_truth else 0.5 if solution_str.strip() == ground_truth else 0.0


@pytest.fixture
def config(model_folder: Path) -> EvalConfig:
    values = {"model.path": str(model_folder), "data.apply_chat_template": False, "reward.num_workers": 0}
    return load_config(EvalConfig, None, values, given={"data", "reward"}).config


@pytest.fixture
def samples(tmp_path: Path) -> Callable[..., Path]:
    def write(found: list[tuple[int, str, str]], **more: Any) -> Path:
        lines = [{"index": at, "response": text, "finish_reason": why, **more} for at, text, why in found]
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / "samples.jsonl"

    return write


def kept(config: EvalConfig, path: Path, **options: Any) -> list[tuple[int, str, float, float]]:
    """Prompt, response, weight and score of each row."""
    done = select(config, path, path.with_name("rows.jsonl"), reward=paid, data=ROWS, **options)
    rows = [json.loads(line) for line in done.output.read_text().splitlines()]
    assert all(row["prompt"] == ROWS[row["index"]]["prompt"] and row["data_source"] == "sums" for row in rows)
    assert done.num_chosen == sum(row["example_weight"] for row in rows) and done.num_rows == len(rows)
    return [(row["index"], row["response"], row["example_weight"], row["score"]) for row in rows]


def test_the_best_of_each_so_many_samples(config: EvalConfig, samples: Callable[..., Path]) -> None:
    """Of four the first of equal ones; of two pairs the same response twice, which is a row of weight 2; of each alone
    every response that has the score. What was cut off ends nowhere, and is never kept."""
    path = samples(SAMPLES)
    assert kept(config, path) == [(0, "1", 1, 1), (1, "2", 1, 1), (2, "9", 1, 0)]
    assert kept(config, path, best_of=2) == [
        (0, "1", 2, 1),
        (1, "5", 1, 0),
        (1, "2", 1, 1),
        (2, "9", 1, 0),
        (2, "8", 1, 0),
    ]
    assert kept(config, path, best_of=1, min_score=0.5) == [(0, "1", 2, 1), (0, "1 ", 1, 0.5), (1, "2", 1, 1)]
    done = select(config, path, path.with_name("rows.jsonl"), min_score=1.0, reward=paid, data=ROWS)
    assert (done.num_samples, done.num_prompts, done.num_empty, done.num_cut, done.num_failed) == (12, 3, 1, 2, 2)


def test_scores_of_the_file_come_first(config: EvalConfig, samples: Callable[..., Path]) -> None:
    assert kept(config, samples(SAMPLES, score=3.0), best_of=4) == [(0, "1", 1, 3), (1, "5", 1, 3), (2, "9", 1, 3)]


def test_samples_of_other_prompts_and_a_file_that_would_replace_them_are_refused(
    config: EvalConfig, samples: Callable[..., Path]
) -> None:
    path = samples(SAMPLES, prompt="2+1=")
    with raises(DataError, re.compile("line 1$"), found=re.compile("2\\+1="), expected=re.compile("0\\+1=")):
        kept(config, path)
    with raises(ConfigError, "--output", found=str(path)):
        select(config, path, path, reward=paid, data=ROWS)


def test_blocks_of_two_sizes_no_least_score_and_a_reward_that_scores_nothing_are_refused(
    config: EvalConfig, samples: Callable[..., Path]
) -> None:
    path = samples(SAMPLES)
    with raises(ConfigError, "--best-of", found=3, expected=re.compile("\\b4\\b"), change=re.compile("2 or 4")):
        kept(config, path, best_of=3)
    with raises(ConfigError, "--best-of", found=5, change=re.compile("4$")):
        kept(config, path, best_of=5)
    with raises(ConfigError, "--min-score"):
        kept(config, path, min_score=float("nan"))
    nothing = [(at, "x", why) for at, _, why in SAMPLES]
    with raises(RewardError, "reward.function", found=re.compile("12 .*ValueError: x")):
        kept(config, samples(nothing))


def test_its_rows_are_examples_with_weights(
    config: EvalConfig, samples: Callable[..., Path], model_folder: Path
) -> None:
    done = select(config, samples(SAMPLES), samples(SAMPLES).with_name("rows.jsonl"), best_of=2, reward=paid, data=ROWS)
    values = {"model.path": str(model_folder), "data.apply_chat_template": False, "data.train_files": str(done.output)}
    tokenizer = load_tokenizer(model_folder)
    examples = load_items(load_config(SFTConfig, None, values).config.data, tokenizer).items
    assert [each.weight for each in examples] == [2.0, 1.0, 1.0, 1.0, 1.0]
    assert tokenizer.decode(examples[0].input_ids[:-1]) == "0+1=1"


def test_what_was_not_sampled_whole_is_refused(
    config: EvalConfig, samples: Callable[..., Path], tmp_path: Path
) -> None:
    for found in (SAMPLES[:8], SAMPLES[:-1]):
        with raises(DataError, str(tmp_path / "samples.jsonl"), found=re.compile("of 3 prompts")):
            kept(config, samples(found))
    with raises(DataError, f"{tmp_path / 'samples.jsonl'}, line 1", found=re.compile("7")):
        kept(config, samples([(7, "1", "stop"), *SAMPLES]))
    with raises(DataError, str(tmp_path / "samples.jsonl"), found=re.compile("2 cut off, 2 without")):
        kept(config, samples(SAMPLES), min_score=2.0)
    for weight in (0, -1.0, "two", float("nan")):
        rows = [{"prompt": "1", "response": "1", "example_weight": weight}]
        data = load_config(SFTConfig, None, {"model.path": "m", "data.apply_chat_template": False}, given={"data"})
        with raises(DataError, re.compile("example_weight")):
            load_items(data.config.data, load_tokenizer(str(config.model.path)), rows=rows)


def rounds(folder: Path, model: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Starts the script on a small task: a response that begins with a letter before k is right."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))
    (folder / "judge.py").write_text(
        "def judge(solution_str, ground_truth):\n    return float(solution_str[:1] < 'k')\n"
    )
    words = {
        "WHET": f"{sys.executable} -m whet",
        "MODEL": model,
        "DATA": folder / "rows.jsonl",
        "REWARD": f"{folder / 'judge.py'}:judge",
        "OUT": folder / "out",
        "ROUNDS": 2,
        "SAMPLES": 8,
        "BEST_OF": 4,
        "SAMPLING": f"{' '.join(COMMON)} data.max_prompt_length=16 data.max_response_length=6",
    }
    own = [*COMMON, "data.max_length=24", "data.train_batch_size=8"]
    own += ["optim.lr=0.003", "trainer.logger=[jsonl]", "trainer.total_epochs=4", "trainer.save_freq=1"]
    environment = {**os.environ, **{name: str(value) for name, value in words.items()}}
    return subprocess.Popen(["bash", str(SCRIPT), *own], env=environment, start_new_session=True, **options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rounds_of_expert_iteration_survive_kills(model_folder: Path, tmp_path: Path) -> None:
    """The share of right samples grows from round to round; killed twice, the script ends with the same bytes."""
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    assert rounds(tmp_path / "straight", model_folder).wait() == 0
    for place in ("round_1/sft/checkpoints/global_step_1", "round_2/rows.jsonl"):
        process = rounds(tmp_path / "killed", model_folder)
        while process.poll() is None and not (tmp_path / "killed" / "out" / place).exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert rounds(tmp_path / "killed", model_folder).wait() == 0
    for name in (
        "round_1/rows.jsonl",
        "round_1/model/model.safetensors",
        "round_2/samples.jsonl",
        "round_2/rows.jsonl",
    ):
        one, other = ((tmp_path / each / "out" / name).read_bytes() for each in ("straight", "killed"))
        assert one == other, name
    right = []
    for number in (1, 2):
        lines = (tmp_path / "straight" / "out" / f"round_{number}" / "samples.jsonl").read_text().splitlines()
        right.append(sum(json.loads(line)["response"][:1] < "k" for line in lines) / len(lines))
    assert right[1] > right[0] + 0.05
