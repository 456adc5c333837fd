# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a model that sees: rollouts name their images, a run that stopped goes on with the same bits, an export
is a model that sees."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests import pictures
from tests.first import first
from tests.raising import raises
from whet.checkpoints.export import export
from whet.config import TrainConfig, load_config
from whet.config.schema import DataConfig, RolloutConfig, SFTConfig
from whet.data.load import load_items
from whet.errors import ConfigError, EngineError
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer
from whet.models.outputs import ForwardSettings, model_outputs
from whet.plugins.lessons.drawn.figures import counting
from whet.plugins.lessons.drawn.videos import direction
from whet.plugins.lessons.init_model import MARKERS, VisionArch
from whet.rollout.batch import to_batch
from whet.rollout.build import check_media
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.trainers.build import train
from whet.trainers.run import Run
from whet.trainers.sft import train_sft
from whet.types import Group, Prompt, Trajectory, Turn

CHANGES: list[dict[str, Any]] = [{}, {"actor.engine.packing": False, "rollout.engine.name": "hf"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.seeing_folder(tmp_path_factory.mktemp("models") / "seeing", "qwen2.5_vl")


def config(folder: Path, run_dir: Path, **changes: Any) -> TrainConfig:
    overrides = {
        "model.path": str(folder),
        "data.train_files": [],
        "data.val_files": [],
        "data.train_batch_size": 4,
        "data.max_response_length": 6,
        "rollout.n": 4,
        "trainer.total_steps": 4,
        "trainer.save_freq": 2,
        "trainer.val_freq": -1,
        "trainer.log_rollouts": 1,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(run_dir),
        **changes,
    }
    return load_config(TrainConfig, "vlm_quickstart", overrides, given={"data", "reward"}).config


def score(solution_str: str) -> float:
    """Pays letters, so that random answers differ."""
    return sum(letter.isalnum() for letter in solution_str) / 10


def run_of(folder: Path, run_dir: Path, **changes: Any) -> Run:
    rows = list(counting("train", 0, num_rows=16, prompt="<image>?"))
    return train(config(folder, run_dir, **changes), reward=score, data=rows)


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES, ids=["packed, native", "padded, hf"])
def test_a_run_goes_on_with_the_same_bits(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    run_dir = tmp_path / "run"
    last = run_dir / "checkpoints" / "global_step_4"

    def results() -> tuple[str, str, dict[str, torch.Tensor]]:
        rollouts = (run_dir / "rollouts" / "step_000004.jsonl").read_text()
        out = export(run_dir, tmp_path / f"out {len(list(tmp_path.iterdir()))}")
        return (run_dir / "metrics.jsonl").read_text(), rollouts, load_policy(out).state_dict()

    run_of(folder, run_dir, **changes)
    metrics, rollouts, trained = results()
    shutil.rmtree(last)
    run_of(folder, run_dir, **changes)
    again = results()
    assert again[:2] == (metrics, rollouts)
    assert again[2].keys() == trained.keys() and all(again[2][name].equal(trained[name]) for name in trained)
    start = load_policy(folder).state_dict()
    moved = {name for name, weight in trained.items() if not weight.equal(start[name])}
    assert any(".visual." in name for name in moved) and any(".language_model." in name for name in moved)

    row = json.loads(rollouts.splitlines()[0])
    [media] = row["media"]
    assert media["kind"] == "image" and Path(media["source"]).parent == run_dir / "media"
    assert Path(media["source"]).stem == media["digest"]


@pytest.mark.slow
def test_an_export_is_a_model_that_sees(folder: Path, tmp_path: Path) -> None:
    run_of(folder, tmp_path / "run", **{"trainer.total_steps": 2, "model.freeze": ["vision"]})
    out = export(tmp_path / "run", tmp_path / "out")
    made, start = load_policy(out), load_policy(folder)
    vision, own = encoders_of(load_tokenizer(out)), encoders_of(made)
    assert vision is not None and own is not None and own.by_kind["image"].identity == vision.by_kind["image"].identity
    tower = [name for name, _ in made.named_parameters() if ".visual." in name]
    assert tower and all(made.get_parameter(name).equal(start.get_parameter(name)) for name in tower)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainers import test_images as this
from whet.trainers.run import Run

def end(run: Run, step: int, numbers: object) -> None:
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

rows = list(this.counting("train", 0, num_rows=16, prompt="<image>?"))
config = this.config(Path(sys.argv[1]), Path(sys.argv[2]), **{"trainer.callbacks": ["__main__:end"]})
this.train(config, reward=this.score, data=rows)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """kill -9 in the third step: the checkpoint of the second and the images in media/ are all that is left."""
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "killed")]
    output = tmp_path / "output"
    with output.open("w") as file:
        ended = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=file, stderr=file, timeout=400)
    assert ended.returncode == -signal.SIGKILL, output.read_text()[-2000:]
    newest = tmp_path / "killed" / "checkpoints"
    assert [each.name for each in newest.iterdir() if each.name.startswith("global_step_")] == ["global_step_2"]
    for name in ("killed", "whole"):
        run_of(folder, tmp_path / name)
    killed, whole = (
        [(tmp_path / name / "metrics.jsonl").read_text(), export(tmp_path / name, tmp_path / f"out {name}")]
        for name in ("killed", "whole")
    )
    assert killed[0] == whole[0]
    one, other = (load_policy(out).state_dict() for out in (killed[1], whole[1]))
    assert all(one[name].equal(other[name]) for name in other)
    media = [{each.name for each in (tmp_path / name / "media").iterdir()} for name in ("killed", "whole")]
    assert media[0] == media[1] and media[0]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2.5_vl", "smolvlm"])
def test_processes_of_their_own(arch: VisionArch, tmp_path: Path) -> None:
    """Two sharded actors and rollouts beside them give the numbers of one process."""
    records, folder = [], pictures.seeing_folder(tmp_path / "model", arch)
    for name, changes in (("one", {}), ("two", {"cluster.processes": 2, "actor.engine.name": "fsdp"})):
        run = run_of(folder, tmp_path / name, **{"trainer.total_steps": 2, "data.max_prompt_length": 512, **changes})
        records.append([(each["critic/score/mean"], each["actor/grad_norm"]) for each in run.history])
    assert records[1] == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in records[0]]


@pytest.mark.parametrize("arch", first(1, [*MARKERS, *pictures.BUILT], others=pytest.mark.slow))
def test_sampler_and_trainer_agree(arch: str, tmp_path: Path) -> None:
    """Rows of the data set as every family reads them, beside one of text: log-probs of two engines and of training."""
    folder = pictures.seeing_folder(tmp_path / "model", arch)
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    rows = [*counting("train", 0, num_rows=3, prompt="<image>?"), {"prompt": "hello", "answer": "1"}]
    if vision_kinds(tokenizer) > {"image"}:
        rows += direction("train", 0, num_rows=2, prompt="<video>?")
    prompts = load_items(DataConfig(max_prompt_length=4096), tokenizer, rows=rows).items
    requests = [
        Request(f"{prompt.uid}:{sample}", prompt.token_ids, SamplingParams(8), 10 * number + sample, media=prompt.media)
        for number, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    found = []
    for engine in (HFEngine(),) if arch == "gemma3" else (NativeEngine(), HFEngine()):
        engine.attach(model, 0)
        found.append(generate(engine, requests, 60.0))
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[-1]]
    answers = iter(found[0])
    groups = [
        Group(
            prompt,
            tuple(
                Trajectory(f"{prompt.uid}:{sample}", prompt, (turn(prompt, next(answers)),), sample, reward=1.0)
                for sample in range(2)
            ),
        )
        for prompt in prompts
    ]
    batch = to_batch(groups, pad_token_id=0)
    columns = {**batch.tensors(), **batch.non_tensor_batch}
    for packing in (True, False):
        with torch.no_grad():
            got = model_outputs(model, columns, frozenset({"log_probs"}), ForwardSettings(packing=packing))["log_probs"]
        torch.testing.assert_close(got, batch["rollout_log_probs"], atol=5e-6, rtol=0)


def vision_kinds(tokenizer: Any) -> frozenset[str]:
    encoders = encoders_of(tokenizer)
    assert encoders is not None
    return encoders.kinds


@pytest.mark.slow
@pytest.mark.parametrize("arch", pictures.BUILT)
def test_two_steps_and_an_export_of_families_from_configs(arch: str, tmp_path: Path) -> None:
    """The export has the trained weights, and reads images."""
    folder = pictures.seeing_folder(tmp_path / "model", arch)
    changes = {"trainer.total_steps": 2, "data.max_prompt_length": 256, "actor.optim.lr": 1e-3}
    if arch == "gemma3":
        with raises(EngineError, "row 0", change=re.compile("rollout.engine.name=hf")):
            run_of(folder, tmp_path / "native", **changes)
        changes["rollout.engine.name"] = "hf"
    run = run_of(folder, tmp_path / "run", **changes)
    assert len(run.history) == 2
    for record in run.history:
        assert record["actor/grad_norm"] > 0 and record["actor/skipped_updates"] == 0
    out = export(tmp_path / "run", tmp_path / "out")
    trained, start = load_policy(out).state_dict(), load_policy(folder).state_dict()
    moved = {name for name, weight in trained.items() if not weight.equal(start[name])}
    assert any(".vision_tower." in name for name in moved) and any(".language_model." in name for name in moved)
    assert vision_kinds(load_tokenizer(out)) >= {"image"}
    assert AutoModelForImageTextToText.from_pretrained(out).num_parameters() == load_policy(folder).num_parameters()


def turn(prompt: Prompt, completion: Completion) -> Turn:
    sampled = {name: value for name, value in vars(completion).items() if name != "likeliest"}
    return Turn(prompt.token_ids, **sampled, media=prompt.media)


def test_engines_that_cannot_are_named_with_the_row_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "no image", "answer": "1"}, *counting("train", 0, num_rows=2, prompt="<image>?")]
    engine = {"name": "fsdp", "options": {"mesh": {"context": 2}}}
    changes = {
        "model.path": str(folder),
        "actor.engine": engine,
        "cluster.placement": {"all": {"roles": ["actor", "rollout"], "processes": 2}},
        "data.train_batch_size": 2,
        "trainer.run_dir": str(tmp_path / "run"),
    }
    config = load_config(TrainConfig, "vlm_quickstart", changes, given={"data", "reward"}).config
    key = "engine.options.mesh.context"
    with raises(ConfigError, key=f"actor.{key}", found=2, expected=re.compile("^1, as row 1 ")):
        train(config, dry_run=True, reward=lambda solution_str: 0.0, data=rows, val_data=rows)
    supervised = {"model.path": str(folder), "engine": engine, "cluster.processes": 2}
    supervised["trainer.run_dir"] = str(tmp_path / "sft")
    config = load_config(SFTConfig, None, supervised, given={"data"}).config
    shown = [{"prompt": row["prompt"], "response": "2", "images": row.get("images", [])} for row in rows]
    with raises(ConfigError, key=key, found=2, expected=re.compile("^1, as example 1 ")):
        train_sft(config, data=shown)


@pytest.mark.slow
def test_a_server_that_does_not_read_the_models_images_is_named_with_the_row(tmp_path: Path) -> None:
    rows = [{"prompt": "no image", "answer": "1"}, *counting("train", 0, num_rows=1, prompt="<image>?")]
    tokenizer = load_tokenizer(pictures.seeing_folder(tmp_path / "model", "smolvlm"))
    prompts = load_items(DataConfig(train_files=["unused"]), tokenizer, rows=rows).items
    rollout = RolloutConfig(engine={"name": "sglang"})
    change = re.compile("rollout.engine.name to native")
    with raises(EngineError, key="row 1", found=re.compile("smolvlm"), change=change):
        check_media(rollout, tokenizer, prompts)
    check_media(rollout, tokenizer, prompts[:1])
    for name in ("vllm", "native"):
        check_media(RolloutConfig(engine={"name": name}), tokenizer, prompts)
