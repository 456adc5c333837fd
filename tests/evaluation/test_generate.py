# SPDX-License-Identifier: Apache-2.0
"""Prompts in, answers out: against the engine itself, cut off at every kind of byte, and killed for real."""

from __future__ import annotations

import json
import math
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
from whet.config import GenerateConfig, load_config
from whet.errors import ConfigError, DataError, StorageError
from whet.evaluation.generate import generate
from whet.keyed import key
from whet.models.load import load_policy, load_tokenizer, stop_token_ids
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate as sample_all

MakeConfig = Callable[..., GenerateConfig]
PROMPTS = [f"{a}+{b}=" for a in range(5) for b in range(4)]
PROMPTS[6] = "6" * 40  # longer than is allowed


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def values(model_folder: Path, prompts: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.path": str(model_folder),
        "input": str(prompts),
        "output": str(tmp_path / "out" / "answers.jsonl"),
        "data.apply_chat_template": False,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "rollout.n": 2,
        "chunk_size": 4,
    }


@pytest.fixture
def config(values: dict[str, Any]) -> MakeConfig:
    return lambda **overrides: load_config(GenerateConfig, None, values | overrides).config


def test_every_line_is_the_engines_own_answer_in_the_order_of_the_prompts(
    config: MakeConfig, model_folder: Path
) -> None:
    done = generate(config(**{"rollout.stop": ["ab", "1"], "seed": 3}))
    lines = [json.loads(line) for line in done.output.read_text().splitlines()]
    kept = [index for index in range(20) if index != 6]
    assert [line["uid"] for line in lines] == [f"0:{index}:{sample}" for index in kept for sample in (0, 1)]
    tokenizer = load_tokenizer(model_folder)
    engine = NativeEngine(load_tokenizer=lambda: tokenizer)
    engine.attach(load_policy(model_folder), 0)
    params = SamplingParams(12, stop_token_ids=stop_token_ids(model_folder, tokenizer), stop=("ab", "1"))
    requests = [
        Request(f"{index}:{sample}", tuple(tokenizer.encode(PROMPTS[index])), params, key(3, "generate", index, sample))
        for index in kept
        for sample in (0, 1)
    ]
    for line, request, completion in zip(lines, requests, sample_all(engine, requests), strict=True):
        assert line == {
            "index": int(line["uid"].split(":")[1]),
            "uid": line["uid"],
            "prompt": tokenizer.decode(list(request.prompt_ids)),
            "response": tokenizer.decode(list(completion.token_ids), skip_special_tokens=True),
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
            "log_prob": pytest.approx(math.fsum(completion.log_probs), abs=1e-4),
        }
    assert {"1", None} <= {line["stop"] for line in lines}
    assert (done.num_found, done.num_written) == (0, 38)
    assert done.num_tokens == sum(line["tokens"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_cut_off_anywhere_it_ends_with_the_same_bytes(config: MakeConfig, engine: str) -> None:
    output = generate(config(**{"rollout.engine.name": engine})).output
    whole = output.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    # in the first line; behind a line and one byte on; at the end of a chunk; without the last byte; not at all
    for size in (5, ends[10] + 1, ends[7], len(whole) - 1, len(whole)):
        output.write_bytes(whole[:size])
        again = generate(config(**{"rollout.engine.name": engine}))
        found = sum(end <= size for end in ends)
        assert output.read_bytes() == whole
        assert (again.num_found, again.num_written) == (found, 38 - found)


def test_what_was_written_otherwise_is_refused(
    config: MakeConfig, prompts: Path, qwen25_folder: Path, tmp_path: Path
) -> None:
    done = generate(config())
    before = done.output.read_bytes()
    found = re.compile(r"rollout\.top_p was 1\.0 and is 0\.9; seed was 0 and is 1$")
    with raises(ConfigError, str(done.output), found=found):
        generate(config(**{"rollout.top_p": 0.9, "seed": 1}))
    with raises(ConfigError, str(done.output), found=re.compile(r": by another model \(or tokenizer\)")):
        generate(config(**{"model.path": str(qwen25_folder)}))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(prompts.read_bytes())
    assert (
        generate(config(**{"input": str(moved), "rollout.engine.options.kv_cache_bytes": 2**20})).num_written == 0
    )  # all the same
    moved.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    with raises(ConfigError, str(done.output), found=re.compile("from other prompts")):
        generate(config(input=str(moved)))
    assert done.output.read_bytes() == before
    done.output.unlink()
    assert generate(config(seed=1)).num_written == 38  # the file was deleted: nothing is left to go on with


def test_a_file_that_it_did_not_write_is_left_alone(config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "answers.jsonl"
    output.write_text("mine\n")
    with raises(ConfigError, str(output), found=re.compile(r"answers\.jsonl\.run\.json")):
        generate(config())
    output.unlink()
    generate(config(chunk_size=20))
    output.write_text("mine\n")
    with raises(DataError, f"{output}, line 1", found=re.compile("mine")):
        generate(config(chunk_size=20))
    assert output.read_text() == "mine\n"


@pytest.mark.parametrize(
    "content", ["", "{", "5", "[]", '{"model": []}', '{"model": 1, "prompts": 1, "config": 5}', "\udcff"]
)
def test_a_damaged_note_is_refused(content: str, config: MakeConfig) -> None:
    output = Path(str(config().output))
    output.parent.mkdir()
    output.write_text('{"index": 0}\n')
    output.with_name("answers.jsonl.run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with raises(ConfigError, f"{output}.run.json", change=re.compile(r"answers\.jsonl")):
        generate(config())


@pytest.mark.parametrize("there", ["full", "empty", "nothing"])
def test_an_output_that_is_a_link_is_refused(config: MakeConfig, tmp_path: Path, there: str) -> None:
    output, target = Path(str(config().output)), tmp_path / "elsewhere.jsonl"
    if there != "nothing":
        target.write_text("notes\n" if there == "full" else "")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.symlink_to(target)
    link, change = re.compile(f"^{output} .* {target}$"), re.compile(f"output={target}")
    with raises(ConfigError, "output", found=link, change=change):
        generate(config())
    assert not target.exists() if there == "nothing" else target.read_text() in ("notes\n", "")
    assert output.is_symlink() and not list(output.parent.glob("*.run.json"))


def test_the_note_is_not_written_through_a_link(config: MakeConfig, prompts: Path) -> None:
    output, before = Path(str(config().output)), prompts.read_bytes()
    output.parent.mkdir()
    for name in ("answers.jsonl.run.json", "answers.jsonl.run.json.new", ".answers.jsonl.run.json.partial"):
        (output.parent / name).symlink_to(prompts)
    generate(config(**{"data.max_response_length": 1}))
    assert prompts.read_bytes() == before


def test_a_place_that_cannot_be_written_to(config: MakeConfig, prompts: Path) -> None:
    with raises(StorageError, "output", found=re.compile(f"^{prompts / 'below.jsonl'} ")):
        generate(config(output=str(prompts / "below.jsonl")))


def test_mistakes_are_found_before_anything_is_written(config: MakeConfig, prompts: Path, tmp_path: Path) -> None:
    both = "data.max_prompt_length + data.max_response_length"
    with raises(ConfigError, both, expected=re.compile("512")):
        generate(config(**{"data.max_response_length": 500}))
    with prompts.open("a") as file:
        file.write('{"question": "1+1="}\n')
    with pytest.raises(DataError, match=r"row 20: .*prompt"):
        generate(config())
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=r"row 6.*\b40\b.*data\.max_prompt_length=16"):
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        generate(config(**{"data.overlong_prompts": "error"}))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    values: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    values |= {"rollout.engine.name": engine, "chunk_size": 1, "data.max_response_length": 200}
    undisturbed = tmp_path / "undisturbed.jsonl"

    def start(output: str) -> subprocess.Popen[str]:
        words = [f"{name}={value}" for name, value in (values | {"output": output}).items()]
        command = [sys.executable, "-m", "whet", "generate", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)

    first = start(str(undisturbed))
    said, _ = first.communicate(timeout=240)
    assert first.returncode == 0, said
    output = Path(values["output"])
    for lines in (1, 9):
        process = start(str(output))
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < lines:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
        there = output.read_bytes()
        assert len(there) < undisturbed.stat().st_size
        output.write_bytes(there[:-3])  # as if it had been in the middle of a line
    last = start(str(output))
    said, _ = last.communicate(timeout=240)
    assert last.returncode == 0, said
    assert "completions were in the file already" in said
    assert output.read_bytes() == undisturbed.read_bytes()
