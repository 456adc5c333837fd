# SPDX-License-Identifier: Apache-2.0
"""Output of `whet eval` and `whet compare`, and the benchmarks by name on their published files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.cli.app import main
from whet.config import EvalConfig, load_config
from whet.data.load import VAL, load_items
from whet.models.load import load_tokenizer
from whet.rewards.math import compute_score
from whet.tracking.console import shared_console

Whet = Callable[..., str]


@pytest.fixture
def whet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Whet:
    """Runs a command in this process, on 80 columns, and returns its output."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        shared_console.cache_clear()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        printed = capsys.readouterr()
        assert not exit_.value.code, printed.err
        return printed.out

    yield run
    shared_console.cache_clear()


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.mark.slow
def test_two_evaluations_and_their_comparison(whet: Whet, model_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "kind": "even" if a % 2 == 0 else "odd"}
        for a in range(5)
        for b in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def judge(solution_str, ground_truth):\n"
        "    return {'reward': len(solution_str) / 8, 'acc': solution_str[:1] < 'k', 'pred': solution_str[:1]}\n"
    )
    words = [f"model.path={model_folder}", f"data.val_files={tmp_path}/rows.jsonl", "data.apply_chat_template=false"]
    words += ["data.max_prompt_length=16", "data.max_response_length=6", "data.data_source_key=kind"]
    words += [f"reward.function={tmp_path}/judge.py:judge", "reward.num_workers=0", "rollout.n=4"]
    folders = [str(tmp_path / name) for name in ("cold", "hot")]
    printed = whet("eval", *words, "rollout.temperature=1", f"output={folders[0]}")
    whet("eval", *words, "rollout.temperature=5", f"output={folders[1]}")

    summary = json.loads(Path(folders[0], "summary.json").read_text())
    assert list(summary["by_data_source"]) == ["even", "odd"] and summary["num_prompts"] == 20
    table = lines(printed)
    assert ["data", "source", "prompts", "mean@4", "best@4", "maj@4", "reward"] in table
    assert ["data", "source", "of", "k", "responses", "1", "2", "4"] in table
    shown = next(line for line in table if line[0] == "all")
    percents = [f"{100 * summary['metrics'][name]['value']:.1f}" for name in ("mean@4", "best@4", "maj@4")]
    assert shown == ["all", "20", *percents, f"{summary['metrics']['reward']['value']:.3g}"]
    assert [line[:2] for line in table if line[0] in ("even", "odd")][:2] == [["even", "12"], ["odd", "8"]]
    assert f"{summary['metrics']['mean@4']['low'] * 100:.1f}–" in printed

    printed = whet("compare", *folders)
    other = json.loads(Path(folders[1], "summary.json").read_text())["metrics"]["mean@4"]["value"]
    shown = next(line for line in lines(printed) if line[0] == "all")
    difference = other - summary["metrics"]["mean@4"]["value"]
    assert shown[:5] == ["all", "20", percents[0], f"{100 * other:.1f}", f"{100 * difference:.1f}"]
    assert printed.splitlines()[-1].startswith(f"B is {100 * abs(difference):.1f} points")
    assert max(map(len, printed.splitlines()[:-1])) < 200


@pytest.mark.slow
def test_a_benchmark_is_named_and_its_reward_column_shown_only_where_it_says_more(
    whet: Whet, qwen25_folder: Path, tmp_path: Path
) -> None:
    row = {"Problem": "1 + 1", "Answer": 2, "ID": "x"}
    (tmp_path / "aime.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"model.path={qwen25_folder}", f"data.val_files={tmp_path}/aime.jsonl", "data.max_prompt_length=400"]
    printed = whet("eval", "aime", *words, "data.max_response_length=4", "rollout.n=2")
    assert ["aime", "1", "0.0", "0.0"] in [line[:4] for line in lines(printed)] and "reward" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["math500_eval", "aime_eval", "gsm8k_eval"])
def test_benchmarks_as_published(recipe: str, shared_data: Path, qwen25_folder: Path) -> None:
    """All problems of the files are asked, and a model that knew the truths would be all right."""
    gsm8k = recipe == "gsm8k_eval"
    file = shared_data / ("gsm8k/test.jsonl" if gsm8k else "math/benchmarks.jsonl")
    words = [f"model.path={qwen25_folder}", f"data.val_files={file}", "data.max_prompt_length=4000"]
    config = load_config(EvalConfig, recipe, [*words, *([] if gsm8k else ["data.data_source_key=source"])]).config
    prompts = load_items(config.data, load_tokenizer(qwen25_folder), VAL).items
    if gsm8k:
        assert len(prompts) == 1319 and str(prompts[0].messages[0].content).startswith("Janet")
        return
    sources = [prompt.data_source for prompt in prompts]
    assert {name: sources.count(name) for name in set(sources)} == {"MATH-500": 500, "aime2024": 30, "aime2025": 30}
    assert all(str(prompt.messages[0].content).endswith("within \\boxed{}.") for prompt in prompts)
    for prompt in [each for each in prompts if each.data_source != "MATH-500"]:
        number = int(prompt.ground_truth.removesuffix("^\\circ"))  # as published: one answer is in degrees
        assert compute_score(f"so \\boxed{{{number:03}}}", prompt.ground_truth)["reward"] == 1.0


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "1+1", "solution": "It is \\boxed{2}.", "answer": "2", "subject": "Algebra", "unique_id": "a"},
        {"ID": "2024-I-4", "Problem": "1+1", "Solution": "...", "Answer": 2},
        {"id": 60, "problem": "1+1", "solution": "$\\boxed{2}$", "url": "..."},
        {"question": "1+1", "answer": "2"},
        {"prompt": "1+1", "answer": "2"},
    ],
)
def test_the_names_that_fields_have_where_these_are_published(row: dict[str, object], qwen25_folder: Path) -> None:
    words = [f"model.path={qwen25_folder}"]
    config = load_config(EvalConfig, "aime_eval", words, given={"data"}).config
    (prompt,) = load_items(config.data, load_tokenizer(qwen25_folder), VAL, rows=[row]).items
    assert str(prompt.messages[0].content).startswith("1+1\n\nPlease reason")
    assert compute_score("\\boxed{2}", prompt.ground_truth)["reward"] == 1.0
    assert compute_score("\\boxed{3}", prompt.ground_truth)["reward"] == 0.0
    assert (config.rollout.n, config.rollout.temperature, config.rollout.top_p) == (32, 0.6, 0.95)
