# SPDX-License-Identifier: Apache-2.0
"""Ground truths that a reward function cannot read are found when the data is loaded, before the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.errors import DataError
from whet.trainers import build
from whet.trainers.build import train

FOLLOWED = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
BOXES = [{"bbox_2d": [0, 0, 5, 5], "label": "cat"}]
CODE = {"inputs": ["1"], "outputs": ["1"]}


@pytest.mark.parametrize(
    ("function", "truths", "source", "found"),
    [
        (
            "code",
            [CODE, '{"inputs": ['],
            "taco",
            "reward code: ground_truth: '{\"inputs\": ['",
        ),
        (
            "code",
            [CODE, {"inputs": ["1"], "outputs": []}],
            "taco",
            "reward code: ground_truth: 1 inputs and 0",
        ),
        ("gsm8k", ["1", "many"], "sums", "reward gsm8k: ground_truth: 'many'"),
        (
            "multiple_choice",
            ["B", "both"],
            "letters",
            "reward multiple_choice: ground_truth: 'both'; expected B",
        ),
        ("auto", ["1", "many"], "openai/gsm8k", "reward auto: ground_truth: 'many'"),
        ("auto", ["1"], "openai/gsm9k", "data_source: openai/gsm9k; "),
        (
            "ifeval",
            [FOLLOWED, {**FOLLOWED, "instruction_id_list": ["keywords:nope"]}],
            "x",
            "instruction_id_list: keywords:nope; ",
        ),
        (
            "auto",
            [FOLLOWED, {**FOLLOWED, "instruction_id_list": ["keywords:nope"]}],
            "google/IFEval",
            "instruction_id_list: keywords:nope; ",
        ),
        (
            "ifeval",
            [FOLLOWED, {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["("]}]}],
            "x",
            "reward ifeval: keyword: '(' ",
        ),
        (
            "auto",
            [FOLLOWED, {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}],
            "google/IFEval",
            "language:response_language: langdetect",
        ),
        (
            "ifeval",
            [FOLLOWED, {"instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]}],
            "x",
            "change_case:english_capital: langdetect",
        ),
        ("auto", [["Paris"], []], "searchR1_nq", "reward auto: ground_truth: []; "),
        ("search_qa_f1", ["Paris", {"target": []}], "x", "ground_truth: {'target': []}; "),
        ("detection", [BOXES, [{"bbox_2d": [0, 0, 5]}]], "x", "reward detection: ground_truth: [{'bbox_2d'"),
        (["format", "gsm8k"], ["1", "many"], "sums", "reward gsm8k: ground_truth: 'many'"),
    ],
)
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_the_error_names_file_and_row(
    function: str | list[str],
    truths: list[Any],
    source: str,
    found: str,
    key: str,
    train_config: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launched(*given: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(build, "launch_roles", launched)
    monkeypatch.setitem(sys.modules, "langdetect", None)  # as if it were not installed
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    is_gsm8k = function == "auto" and truths[0] == "1"
    write(good, [truths[0]] * 3, "openai/gsm8k" if is_gsm8k else source)
    write(bad, truths, source)
    files = [str(good), str(bad)]
    sandbox = {"reward.kwargs.sandbox": "unisolated"} if function == "code" else {}
    config = train_config({"data.train_files": files, "reward.function": function, key: files, **sandbox})
    with pytest.raises(DataError) as caught:
        train(config)
    assert f"bad.jsonl, row {len(truths) - 1}: " in str(caught.value) and found in str(caught.value)


def write(path: Path, truths: list[Any], source: str) -> None:
    rows = [{"prompt": "1+1=", "answer": truth, "data_source": source} for truth in truths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
