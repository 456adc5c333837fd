# SPDX-License-Identifier: Apache-2.0
"""whet's engines behind lm-eval's interface, against lm-eval's own transformers model on the same weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra lm-eval)")
pytestmark = pytest.mark.slow  # importing lm-eval alone takes seconds

CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """\
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["z", "the"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
ROLLING = """\
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WORDS = "the quick brown fox jumps over a lazy dog while it rains in spain and nobody knows why"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks as lm-eval reads them, over one local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": WORDS[: 7 * index + 3] + "=",
            "choices": [" cat", "dog and dog", "x"],
            "label": index % 3,
            "text": (WORDS + " ") * (1 + 3 * index),  # up to 1,900 characters: several windows of 512
        }
        for index in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
    return folder


def results(model: Any, tasks: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["tiny_choice", "tiny_generate", "tiny_rolling"]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)
    return found


@pytest.mark.parametrize("model", ["model_folder", "qwen25_folder"])
def test_whet_says_what_lm_evals_own_model_says(
    model: str, tasks: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    from whet.plugins.lm_eval.model import WhetLM

    monkeypatch.setattr("whet.plugins.lm_eval.model.BATCH_TOKENS", 100)  # several batches
    folder = str(request.getfixturevalue(model))
    own = results(HFLM(pretrained=folder, device="cpu", batch_size=1, dtype="float32"), tasks)
    ours = results(WhetLM(path=folder), tasks)
    for task in own["results"]:
        numbers = {name: value for name, value in own["results"][task].items() if isinstance(value, float)}
        assert numbers and {name: ours["results"][task][name] for name in numbers} == pytest.approx(numbers, rel=1e-4)
    compared = 0
    for task, samples in own["samples"].items():
        for theirs, mine in zip(samples, ours["samples"][task], strict=True):
            assert theirs["doc_id"] == mine["doc_id"]
            for one, other in zip(theirs["resps"], mine["resps"], strict=True):
                if task == "tiny_generate":
                    assert one == other
                elif task == "tiny_choice":
                    assert float(other[0][0]) == pytest.approx(float(one[0][0]), abs=1e-4)
                    assert str(other[0][1]) == str(one[0][1])
                else:
                    assert float(other[0]) == pytest.approx(float(one[0]), rel=1e-5)
                compared += 1
    assert compared == 8 * 3 + 8 + 8


def test_greedy_continuations_are_called_greedy_and_empty_contexts_are_served(model_folder: Path) -> None:
    from lm_eval.api.instance import Instance

    from whet.plugins.lm_eval.model import WhetLM

    model = WhetLM(path=str(model_folder))

    def ask(kind: str, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    greedy = model.generate_until([ask("generate_until", "1+1=", {"until": [], "max_gen_toks": 6})])[0]
    cut = model.generate_until([ask("generate_until", "1+1=", {"until": [greedy[3:5]], "max_gen_toks": 6})])[0]
    assert len(greedy) == 6 and cut == greedy[: greedy.index(greedy[3:5])]
    found = model.loglikelihood([ask("loglikelihood", "1+1=", greedy), ask("loglikelihood", "", "12")])
    assert found[0][1] is True and found[1][0] < 0
    worse = "a" if greedy[0] != "a" else "b"
    assert model.loglikelihood([ask("loglikelihood", "1+1=", worse + greedy[1:])])[0][1] is False
    sampled = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
    two = model.generate_until([ask("generate_until", "1+1=", sampled)] * 2)
    assert two[0] != two[1] and two == model.generate_until([ask("generate_until", "1+1=", sampled)] * 2)


def test_the_command_line_is_lm_evals(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "whet",
        "lm-eval",
        "--model_args",
        f"path={model_folder}",
        "--tasks",
        "tiny_choice",
    ]
    options = ["--include_path", str(tasks), "--limit", "4", "--output_path", str(tmp_path)]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert "|tiny_choice|" in run.stdout.replace(" ", "") and "whet" in run.stdout
    assert list(tmp_path.rglob("results_*.json"))


def test_a_task_that_cannot_be_fetched_is_an_error_of_ours(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(CHOICE.replace("json\ndataset_kwargs: {data_files: {test: FILE}}", "nobody/far"))
    asked = ["--model_args", f"path={model_folder}", "--include_path", str(tmp_path), "--tasks", "tiny_choice"]
    done = subprocess.run(
        [sys.executable, "-m", "whet", "lm-eval", *asked],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert re.match(r"DataError: data of --tasks tiny_choice: .*\(ConnectionError: ", said)
    assert "nobody/far" in said and "HF_HOME" in said and "--include_path" in said
    assert "Traceback" not in done.stderr
