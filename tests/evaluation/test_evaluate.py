# SPDX-License-Identifier: Apache-2.0
"""How good a model is: numbers by hand, greedy answers by plain transformers, and the files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.raising import raises
from whet.checkpoints.export import export
from whet.config import EvalConfig, load_config
from whet.errors import CheckpointError, ConfigError, DataError, EnvError, RewardError
from whet.evaluation import evaluate as evaluation
from whet.evaluation.answers import Record, by_prompt
from whet.evaluation.estimators import MeanEstimate
from whet.evaluation.evaluate import evaluate, summarise
from whet.rollout.rollouts import Rollouts
from whet.trainers.build import train

MakeConfig = Callable[..., EvalConfig]
Rows = list[dict[str, str]]


@pytest.fixture
def eval_config(model_folder: Path) -> MakeConfig:
    def make(**overrides: Any) -> EvalConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "data.apply_chat_template": False,
            "data.max_prompt_length": 16,
            "data.max_response_length": 6,
            "reward.num_workers": 0,
        }
        return load_config(EvalConfig, None, small | overrides, given={"reward", "data"}).config

    return make


def answer(index: int, source: str, accuracy: float | None, *, extracted: str | None = None, **changes: Any) -> Record:
    return {
        "index": index,
        "data_source": source,
        "extracted": extracted,
        "reward": accuracy,
        "accuracy": accuracy,
        "tokens": 4,
        "finish_reason": "stop",
        "failure": {"source": "reward", "message": "late"} if accuracy is None else None,
        **changes,
    }


def values(metrics: dict[str, MeanEstimate]) -> dict[str, float]:
    return {name: found.value for name, found in metrics.items()}


def test_a_summary_by_hand() -> None:
    answers = [
        *(answer(0, "a", right, extracted=text) for right, text in ((1.0, "4"), (0.0, "5"), (0.0, "5"), (1.0, "4"))),
        *(answer(1, "b", right, extracted=text) for right, text in ((0.0, "1"), (None, None), (0.0, "2"), (1.0, "3"))),
        *(answer(2, "b", 1.0, extracted="7", reward=1.25, tokens=8, finish_reason="length") for _ in range(4)),
    ]
    found = summarise(answers)
    assert (found.num_prompts, found.n, found.failures) == (3, 4, 1)
    assert (found.truncated, found.mean_response_tokens) == (4 / 12, (8 * 4 + 4 * 8) / 12)
    assert values(found.metrics) == pytest.approx(
        {
            "mean@4": (0.5 + 0.25 + 1) / 3,
            "best@4": 1.0,
            "pass@1": (0.5 + 0.25 + 1) / 3,
            "pass@2": (5 / 6 + 3 / 6 + 1) / 3,
            "pass@4": 1.0,
            "maj@2": found.metrics["maj@2"].value,  # over keyed subsets: see the estimators' tests
            "maj@4": (1 / 2 + 1 / 3 + 1) / 3,
            "reward": (0.5 + 0.25 + 1.25) / 3,
        }
    )
    assert values(found.by_data_source["a"])["mean@4"] == 0.5 == found.by_data_source["a"]["maj@4"].value
    assert values(found.by_data_source["b"])["mean@4"] == 0.625
    assert found.accuracy == found.metrics["mean@4"].value and found.answers == answers
    assert found.summary()["metrics"]["best@4"] == pytest.approx({"value": 1, "low": 0.025 ** (1 / 3), "high": 1})
    silent = summarise([{**row, "extracted": None} for row in answers])
    assert "maj@4" not in silent.metrics and silent.metrics["mean@4"] == found.metrics["mean@4"]


def test_greedy_answers_are_those_of_plain_transformers(
    eval_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    expected = []
    for row in additions[:5]:
        ids = torch.tensor([tokenizer.encode(row["prompt"])])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :]))
    config = eval_config(**{"output": str(tmp_path / "out"), "data.val_max_prompts": 5})
    found = evaluate(config, reward=lambda solution_str, ground_truth: solution_str == ground_truth, data=additions)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines] == expected
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in additions[:5]]
    assert [line["ground_truth"] for line in lines] == [row["answer"] for row in additions[:5]]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary == found.summary() and summary["num_prompts"] == 5 and summary["n"] == 1
    assert list(summary["metrics"]) == ["mean@1", "best@1", "pass@1", "reward"]
    assert lines == found.answers and not (tmp_path / "out" / "answers.partial.jsonl").exists()


def test_samples_count_each_and_best_of_them(eval_config: MakeConfig, additions: Rows) -> None:
    config = eval_config(**{"rollout.n": 4, "rollout.temperature": 1.0})
    found = evaluate(config, reward=lambda solution_str: {"score": 1, "acc": len(solution_str) > 4}, data=additions)
    right = [[float(row["accuracy"]) for row in rows] for rows in by_prompt(found.answers).values()]
    assert len(right) == 20 and all(len(each) == 4 for each in right)
    assert found.accuracy == pytest.approx(sum(map(sum, right)) / 80) and 0 < found.accuracy < 1
    assert found.metrics["pass@4"].value == pytest.approx(sum(any(each) for each in right) / 20)
    assert found.metrics["pass@4"].value > found.accuracy
    again = evaluate(config, reward=lambda solution_str: {"score": 1, "acc": len(solution_str) > 4}, data=additions)
    assert again.summary() == found.summary()
    other = eval_config(**{"rollout.n": 4, "rollout.temperature": 1.0, "seed": 1})
    sampled = evaluate(other, reward=lambda solution_str: 0.0, data=additions).answers
    assert [row["response"] for row in sampled] != [row["response"] for row in found.answers]


def test_without_output_nothing_is_written(
    eval_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(model_folder.parent.rglob("*"))
    evaluate(eval_config(), reward=lambda solution_str: 0.0, data=additions[:2])
    assert list(tmp_path.iterdir()) == [] and set(model_folder.parent.rglob("*")) == before


def test_a_judge_that_fails_is_counted(eval_config: MakeConfig, additions: Rows) -> None:
    judged = iter([1.0])
    found = evaluate(eval_config(), reward=lambda solution_str: next(judged), data=additions[:4])
    assert (found.failures, found.accuracy, found.metrics["reward"].value) == (3, 0.25, 0.25)


def test_a_judge_that_always_fails_is_an_error_after_its_answers_are_written(
    eval_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = eval_config(output=str(tmp_path / "out"))
    with pytest.raises(RewardError, match=r"'str' object has no attribute 'nothing'"):
        evaluate(config, reward=lambda solution_str: solution_str.nothing, data=additions[:3])
    written = (tmp_path / "out" / "answers.partial.jsonl").read_text().splitlines()
    assert ["nothing" in json.loads(line)["failure"]["message"] for line in written] == [True] * 3


@pytest.mark.parametrize(
    ("function", "changes", "truths", "found"),
    [
        ("gsm8k", {}, ["1", "many"], "row 1.*gsm8k: ground_truth: 'many'"),
        (
            None,
            {"reward.domains": {"sums": {"function": "gsm8k"}, "letters": {"function": "multiple_choice"}}},
            ["1", "B", "both"],
            "row 2.*multiple_choice: ground_truth: 'both'",
        ),
        (
            None,
            {"reward.domains": {"sums": {"function": "gsm8k"}}},
            ["1", "B"],
            "row 1.*letters",
        ),
    ],
    ids=["function", "domain", "no domain"],
)
def test_a_ground_truth_that_cannot_be_read_is_found_before_the_model_loads(
    function: str | None,
    changes: dict[str, Any],
    truths: list[str],
    found: str,
    eval_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(*given: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(evaluation, "open_engine", opened)
    sources = ["sums", *["letters"] * (len(truths) - 1)]
    rows = [
        {"prompt": "1+1=", "answer": truth, "data_source": source}
        for truth, source in zip(truths, sources, strict=True)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = eval_config(**{"reward.function": function, "data.val_files": [str(file)], **changes})
    with pytest.raises(DataError, match=found):
        evaluate(config)
    with pytest.raises(DataError, match=found):
        evaluate(config, data=rows)


def test_lengths_over_the_models_are_refused(eval_config: MakeConfig, additions: Rows) -> None:
    both = "data.max_prompt_length + data.max_response_length"
    with raises(ConfigError, both, expected=re.compile("512")):
        evaluate(eval_config(**{"data.max_response_length": 500}), reward=lambda solution_str: 0.0, data=additions)


@pytest.mark.slow
def test_one_that_was_cut_off_goes_on_and_ends_as_one_that_was_not(
    eval_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in the third chunk of two prompts, only the unwritten prompts are sampled again."""
    judge = tmp_path / "judge.py"
    judge.write_text(
        "from pathlib import Path\n"
        f"calls, stop = Path({str(tmp_path / 'calls')!r}), Path({str(tmp_path / 'stop')!r})\n"
        "def judge(solution_str, ground_truth):\n"
        "    done = len(calls.read_text()) if calls.exists() else 0\n"
        "    if stop.exists() and done >= 10:\n"
        "        raise KeyboardInterrupt\n"
        "    calls.write_text('x' * (done + 1))\n"
        "    return {'score': len(solution_str) / 8, 'pred': solution_str[:1]}\n"
    )
    config = eval_config(
        **{
            "reward.function": f"{judge}:judge",
            "rollout.n": 2,
            "rollout.temperature": 1.0,
            "rollout.max_batch_size": 2,
            "rollout.engine.options.kv_cache_bytes": 2**20,
            "output": str(tmp_path / "out"),
        }
    )
    whole = evaluate(config, data=additions[:8])
    (tmp_path / "calls").write_text("")
    (tmp_path / "stop").touch()
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, data=additions[:8])
    assert len((tmp_path / "out" / "answers.partial.jsonl").read_text().splitlines()) == 8
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 16  # the earlier one's is still there
    (tmp_path / "stop").unlink()
    (tmp_path / "calls").write_text("")
    again = evaluate(config, data=additions[:8])
    assert len((tmp_path / "calls").read_text()) == 8  # of 16 answers
    assert again.answers == whole.answers and again.summary() == whole.summary()
    assert (tmp_path / "out" / "config.yaml").read_text().startswith("# the weights of ")


@pytest.mark.slow
def test_a_checkpoint_and_a_run_are_models_too(
    train_config: Callable[..., Any], eval_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    reward = lambda solution_str, ground_truth: float(solution_str[:1] == ground_truth)  # noqa: E731
    train(train_config({"trainer.save_freq": 1}), reward=reward, data=additions)
    run = tmp_path / "run"
    first, second = (str(run / "checkpoints" / f"global_step_{step}") for step in (1, 2))
    paths = {"first": first, "second": second, "run": str(run), "export": str(export(Path(second), tmp_path / "hf"))}
    found = {
        name: evaluate(eval_config(**{"model.path": path}), reward=reward, data=additions).answers
        for name, path in paths.items()
    }
    assert found["run"] == found["second"] == found["export"]
    assert [row["mean_log_prob"] for row in found["first"]] != [row["mean_log_prob"] for row in found["second"]]


def test_a_folder_that_is_no_model_is_refused(eval_config: MakeConfig, tmp_path: Path) -> None:
    with raises(ConfigError, "model.path", found=re.compile(r" config\.json$")):
        eval_config(**{"model.path": str(tmp_path)})
    (tmp_path / "checkpoints").mkdir()
    with raises(CheckpointError, expected=re.compile(r"manifest\.json")):
        evaluate(eval_config(**{"model.path": str(tmp_path)}), reward=lambda solution_str: 0.0, data=[])


def test_an_environment_that_refuses_its_options_is_named_before_anything_is_sampled(
    eval_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.py").write_text(
        "from whet.errors import ConfigError\n\n\nclass Small:\n    def __init__(self, prompt, *, size: int = 1):\n"
        "        if size > 3:\n            raise ConfigError('environment.options.size', size, 'at most 3')\n"
    )
    monkeypatch.setattr(Rollouts, "sample", None)
    name = f"{tmp_path / 'small.py'}:Small"
    config = eval_config(**{"environment.name": name, "environment.options.size": 7})
    with raises(EnvError, re.compile(r"environment\.options\.size$"), found=7, expected="at most 3"):
        evaluate(config, reward=lambda solution_str: 0.0, data=additions[:1])


def test_failed_prompts_are_answered_again(eval_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """A repaired reward scores all prompts, also the prompts whose failures were written before."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions[:3]))
    judge = tmp_path / "judge.py"
    config = eval_config(
        **{
            "data.val_files": [str(tmp_path / "rows.jsonl")],
            "reward.function": f"{judge}:score",
            "output": str(tmp_path / "out"),
        }
    )
    judge.write_text(f"def score(solution_str):\n    return float(open({str(tmp_path / 'key')!r}).read())\n")
    with pytest.raises(RewardError):
        evaluate(config)
    (tmp_path / "key").write_text("1.0")
    found = evaluate(config)
    assert (found.failures, found.accuracy, found.num_prompts) == (0, 1.0, 3)


@pytest.mark.parametrize("changes", ["nothing", "code", "answers"])
def test_an_interrupted_evaluation_goes_on_with_the_same_code_and_answers_alone(
    eval_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    judge, rows, out = (tmp_path / each for each in ("judge.py", "rows.jsonl", "out"))
    rows.write_text("".join(json.dumps(row) + "\n" for row in additions[:2]))
    judge.write_text("def score(solution_str):\n    return 1.0\n")
    names = {"data.val_files": [str(rows)], "reward.function": f"{judge}:score", "output": str(out)}
    evaluate(eval_config(**names))
    (out / "answers.jsonl").rename(out / "answers.partial.jsonl")
    if changes == "code":
        judge.write_text("def score(solution_str):\n    return 0.0\n")
    elif changes == "answers":
        rows.write_text("".join(json.dumps({**row, "answer": "none"}) + "\n" for row in additions[:2]))
    sampled, sample = list[int](), Rollouts.sample
    monkeypatch.setattr(
        Rollouts, "sample", lambda own, all_, *g, **o: sampled.append(len(all_)) or sample(own, all_, *g, **o)
    )
    assert evaluate(eval_config(**names)).num_prompts == 2
    assert sampled == ([] if changes == "nothing" else [2])


def by_length(predict: str, ground_truth: str) -> float:
    return float(len(predict) % 2)


def test_pass_rates_go_back_into_the_rows(eval_config: MakeConfig, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1), "level": {"of": a}} for a in range(3)]
    long = {"prompt": "7 + 1 = " * 40, "answer": "8"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    config = eval_config(
        **{
            "data.val_files": [f"{tmp_path / 'a.jsonl'}"] * 2,
            "data.difficulty_key": "pass_rate",
            "output": str(tmp_path / "out"),
            "rollout.n": 4,
            "rollout.temperature": 1.0,
        }
    )
    found = evaluate(config, reward=by_length)
    by_index = {at: sum(row["accuracy"] for row in of) / 4 for at, of in by_prompt(found.answers).items()}
    assert [*by_index] == [0, 1, 2, 4, 5, 6]
    written = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert written == [{**row, "pass_rate": by_index[at]} for row, at in zip([*rows, *rows], by_index, strict=True)]


def test_pass_rates_replace_older_ones_and_rows_keep_their_source(eval_config: MakeConfig, tmp_path: Path) -> None:
    """A field of `extra_info` is read before one of the row; an entry names the source of rows without one."""
    rows = [
        {"prompt": "1+1=", "answer": "2", "extra_info": {"pass_rate": 0.9, "of": 1}},
        {"prompt": "2+1=", "answer": "3"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": str(tmp_path / "a.jsonl"), "data_source": "algebra"}
    more = {"data.difficulty_key": "pass_rate", "output": str(tmp_path / "out")}
    found = evaluate(eval_config(**{"data.val_files": [entry]}, **more), reward=by_length)
    first, second = (row["accuracy"] for row in found.answers)
    written = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    old, new = ({"data_source": "algebra", **row} for row in rows)
    assert written == [
        {**old, "extra_info": {"pass_rate": first, "of": 1}, "pass_rate": first},
        {**new, "pass_rate": second},
    ]


def test_rows_of_a_function_get_no_pass_rates_and_nothing_is_sampled_first(
    eval_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.py").write_text("def rows():\n    return [{'prompt': '1+1=', 'answer': '2'}]\n")
    monkeypatch.setattr(Rollouts, "sample", lambda *given, **options: pytest.fail("it samples"))
    source = f"{tmp_path / 'rows.py'}:rows"
    config = eval_config(
        **{"data.val_files": [source], "data.difficulty_key": "pass_rate", "output": str(tmp_path / "out")}
    )
    with raises(DataError, source):
        evaluate(config, reward=by_length)
