# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from whet.cli.app import CONSOLE, main
from whet.planning.machine import FreeMemory
from whet.plugins.planner import fit, forecast

# The shape of Qwen2.5-7B, of two layers; without weights.
SEVEN_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 2,
}
LAYER = 3584 * 3584 * 2 + 3584 * 512 * 2 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
SMALL = ["data.max_prompt_length=32", "data.max_response_length=32", "data.train_batch_size=2", "rollout.n=2"]


def whet(*arguments: str) -> int:
    """Runs the command and returns its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def write_config(folder: Path, layers: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SEVEN_BILLION, "num_hidden_layers": layers}))
    return folder


@pytest.mark.slow
def test_a_model_that_is_a_config_alone_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda: FreeMemory(2**40, "the machine's memory"))
    monkeypatch.setattr(forecast, "free_disk", lambda _: 2**40)
    folder = write_config(tmp_path / "model", layers=2)
    given = [f"model.path={folder}", f"trainer.run_dir={tmp_path / 'run'}", "rollout.dtype=bfloat16", *SMALL]
    assert whet("plan", "quickstart", *given, "actor.optim.name=adamw", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    weights = 2 * LAYER + 2 * 152064 * 3584 + 3584
    assert made["parameters"] == {"actor": weights}
    memory = made["pools"]["main"]["memory"]
    assert memory["actor: weights"]["rollout"] == 4 * weights
    assert memory["rollout: weights"]["rollout"] == 2 * weights
    assert made["checkpoint_bytes"] == pytest.approx(12 * weights, rel=1e-6)
    assert made["tokens_per_step"] == {"prompt": 64, "response": 128}
    assert set(made["seconds_per_step"]) == {"rollout", "actor update"}
    assert any("data.train_files is empty" in note for note in made["notes"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tables_and_what_train_would_refuse(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "10+10=", "answer": "20"}\n')
    given = [f"model.path={model_folder}", f"data.train_files={rows}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert whet("plan", "quickstart", *given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("actor: 402 k parameters") for line in lines)
    assert any(line.startswith("actor: weights ") and line.count("1.5 MiB") == 2 for line in lines)
    assert any(line.startswith("memory: about ") and line.endswith("it fits") for line in lines)
    assert "2 prompts of 5 tokens on average, the longest has 6" in lines
    assert "`whet train` would refuse this config:" in lines and any(
        "data.val_files is empty" in line for line in lines
    )


@pytest.mark.slow
def test_an_earlier_run_in_the_folder_says_how_long_a_step_took(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timings.jsonl").write_text('{"step": 1, "time/step": 3.0}\n{"step": 2, "time/step": 2.0}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "response_length/mean": 3.0}\n')
    dtypes = ["model.dtype=float32", "rollout.dtype=float32"]
    given = ["quickstart", f"model.path={model_folder}", f"trainer.run_dir={tmp_path}", *dtypes, *SMALL]
    assert whet("config", "train", *given) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert whet("plan", *given, "trainer.total_steps=7", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["measured_seconds_per_step"] == {"time/step": 2.5}
    assert made["tokens_per_step"] == {"prompt": 64, "response": 12}

    other = ["rollout.n=4", "model.dtype=bfloat16", "data.max_response_length=64", "actor.engine.packing=false"]
    assert whet("plan", *given, *other, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["measured_seconds_per_step"] == {} and made["tokens_per_step"] == {"prompt": 64, "response": 512}
    (note,) = (note for note in made["notes"] if "earlier run" in note)
    assert [each.partition("=")[0] for each in other if each.partition("=")[0] not in note] == [], note


@pytest.mark.slow
def test_supervised_runs_too(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model.path={model_folder}", f"trainer.run_dir={tmp_path / 'run'}"]
    assert whet("plan", "quickstart_sft", *given, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made["pools"]["main"]["phases"]) == ["actor update"] and made["tokens_per_step"] == {"all": 128 * 16}


@pytest.mark.slow
def test_doctor_ends_with_1_where_a_run_has_a_problem(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run = [f"model.path={model_folder}", f"trainer.run_dir={tmp_path / 'run'}", "trainer.val_freq=-1"]
    missing = f"data.train_files={tmp_path / 'no.jsonl'}"
    assert whet("doctor", "quickstart", *run, missing) == 1
    out = capsys.readouterr().out
    assert "  problem  config " in out and "no.jsonl does not exist" in out
    (line,) = (line for line in out.splitlines() if " rollout.engine.name=native " in line)
    assert line.startswith(("  ok ", "  note "))
    assert whet("doctor", "quickstart", *run, f"data.train_files={rows}") == 0
    this_run = capsys.readouterr().out.partition("this run\n")[2].splitlines()[:-1]
    assert [line.split()[:2] for line in this_run] == [["ok", "memory"], ["ok", "disk"], ["ok", "time"]]


@pytest.mark.slow
def test_an_accelerator_is_planned_for_that_is_not_here(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"model.path={model_folder}", f"trainer.run_dir={tmp_path / 'run'}", *SMALL]
    assert whet("plan", "quickstart", *given, "--device-memory", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "accelerator memory of one process" in lines and "host memory of one process" in lines
    assert any("and an accelerator of 8 GiB has 8.0 GiB free: it fits" in line for line in lines)
    assert any("kv_cache_bytes=auto" in line and " 1.0 GiB" in line for line in lines)
    assert whet("plan", "quickstart", *given, "--device-memory", "1.0", "--json") == 1
    made = json.loads(capsys.readouterr().out)
    host, device = made["rooms"]
    assert host["fits"] and not device["fits"] and device["needed_bytes"] > device["free_bytes"] == 2**30


@pytest.mark.slow
def test_seven_billion_parameters_do_not_fit_and_what_to_do_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "model", layers=28)
    status = whet("plan", "gsm8k", f"model.path={folder}", f"trainer.run_dir={tmp_path / 'run'}", "--json")
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"]["actor"] == 7_615_616_512  # as published
    [room] = made["rooms"]
    assert made["fits"] is room["fits"] is (room["needed_bytes"] <= room["free_bytes"])
    assert status == int(not made["fits"])
    if not made["fits"]:
        saved = [change["saved_bytes"] for change in made["changes"]]
        assert saved[:-1] == sorted(saved[:-1], reverse=True) and saved[-1] == max(saved)


BY_SIZE = {  # published shapes, and their numbers of parameters
    "qwen2_5_0_5b_gsm8k_grpo": (
        {
            **SEVEN_BILLION,
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
    "qwen2_5_7b_math_grpo": ({**SEVEN_BILLION, "num_hidden_layers": 28}, 7_615_616_512),
    "qwen2_5_32b_math_dapo": (
        {
            **SEVEN_BILLION,
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
        32_763_876_352,
    ),
    "qwen3_30b_a3b_math_gspo": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "tie_word_embeddings": False,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
        30_532_122_624,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BY_SIZE)
def test_a_recipe_fits_the_machines_that_it_names(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, weights = BY_SIZE[recipe]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    device = "24" if recipe == "qwen2_5_0_5b_gsm8k_grpo" else "80"
    given = [f"model.path={tmp_path}", "data.train_files=[]", "data.val_files=[]"]
    assert whet("plan", recipe, *given, "--device-memory", device, "--host-memory", "512", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"]["actor"] == weights and made["fits"] and not made["changes"]
    assert made["free_disk_bytes"] is made["seconds_per_step"] is None  # of that machine, which is not here


@pytest.mark.slow
def test_a_model_of_seven_billion_that_sees_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-VL-7B in its recipe: the tower saves for the backward pass, and the reference is sharded too."""
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    shape = {
        **SEVEN_BILLION,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "num_hidden_layers": 28,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {**tower, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**processor, "temporal_patch_size": 2}))
    given = ["qwen2_5_vl_7b_geo3k_grpo", f"model.path={tmp_path}", "data.train_files=[]", "data.val_files=[]"]
    assert whet("plan", *given, "--device-memory", "80", "--host-memory", "512", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"]["actor"] == 8_292_166_656 and made["fits"]  # as published
    memory = made["pools"]["main"]["device_memory"]
    assert memory["ref: weights"]["actor update"] == pytest.approx(4 * 8_292_166_656 / 8, rel=1e-3)
    assert memory["actor: vision activations"]["actor update"] > 2**31
    assert any("images" in note and "assumed" in note for note in made["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BY_SIZE)
def test_a_recipe_is_checked_where_its_machines_are_not(
    recipe: str, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A published config without weights, a small tokenizer, and rows with the recipe's fields."""
    if recipe in ("qwen2_5_32b_math_dapo", "qwen3_30b_a3b_math_gspo"):
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    model = shutil.copytree(model_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    (model / "config.json").write_text(json.dumps(BY_SIZE[recipe][0]))
    row = {"question": "1+1=", "answer": "so 2\n#### 2"} if "gsm8k" in recipe else {"problem": "1+1=", "answer": "2"}
    row |= {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}} if "dapo" in recipe else {}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 512)
    given = [f"model.path={model}", f"data.train_files={rows}", f"data.val_files={rows}", "data.format_prompt=null"]
    given += ["data.apply_chat_template=false", f"trainer.run_dir={tmp_path / 'run'}", "--dry-run"]
    with caplog.at_level("INFO"):
        assert whet("train", recipe, *given, "--device-memory", "80", "--host-memory", "512") == 0
    assert "the first prompt:\n" in caplog.text
    assert [record for record in caplog.records if record.args and str(record.args[0]).startswith("1, ")]
    assert "; roles actor, ref, rollout; " in caplog.text or "; roles actor, rollout; " in caplog.text
    assert "not checked here: " in caplog.text and not (tmp_path / "run").exists()
    assert whet("train", recipe, *given, "--device-memory", "4", "--host-memory", "512") != 0  # too small


def test_a_stated_machine_is_one_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("train", "quickstart", "--device-memory", "80") == 2
    assert "add --dry-run" in capsys.readouterr().err
    assert whet("train", "quickstart", "--dry-run", "--device-memory", "80", "-m") == 2


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_stated_size_is_above_0(size: str, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("plan", "quickstart", f"model.path={model_folder}", "--host-memory", size) == 2
    assert f"ConfigError: memory of a node: {float(size):g} GiB; " in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_elsewhere_scores_rows(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward reads prompts of 4 characters, and responses of a token or none; the model folder has no weights."""
    model = shutil.copytree(model_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    reward = tmp_path / "reads.py"
    reward.write_text("def f(reward_input): return len(reward_input['prompt']) + reward_input['response_length']\n")
    rows = f"data.train_files={tmp_path / 'rows.jsonl'}"
    given = ["quickstart", f"model.path={model}", rows, "trainer.val_freq=-1", f"reward.function={reward}:f", *SMALL]
    there = ["--dry-run", "--host-memory", "64"]
    with caplog.at_level("INFO", "whet"):
        assert whet("train", *given, "cluster.processes=4", *there) == 0
    assert ("5, 5", "4, 4") in [record.args for record in caplog.records]
    assert "not checked here: 1 node with room for 4 processes, " in caplog.text
    (tmp_path / "fails.py").write_text("def f(solution_str): raise ValueError('none')\n")
    assert whet("train", *given, f"reward.function={tmp_path / 'fails.py'}:f", *there) == 2
    assert re.match("RewardError: reward.function: .*ValueError: none", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_command_that_trains_nothing_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("plan", "--for", command) == 2
    assert re.match(f"ConfigError: --for: {command}; .*train, .*sft", capsys.readouterr().err)


def test_what_is_logged_beside_json_goes_to_the_other_stream(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("whet", logging.WARNING, "", 0, "seen", (), None)
    for is_beside_json in (True, False):
        CONSOLE.is_beside_json = is_beside_json
        CONSOLE.emit(record)
        out, err = capsys.readouterr()
        assert (out, err) == (("", "seen\n") if is_beside_json else ("seen\n", ""))
