# SPDX-License-Identifier: Apache-2.0
"""The unmodified SDK, its oldest and newest version, and loops of its cookbook, against a server on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import whet
from tests.plugins.serving.server_processes import Running
from tests.plugins.serving.tinker import rows as own
from tests.plugins.serving.tinker.hub import serving
from whet import serialization
from whet.checkpoints.export import export
from whet.plugins.lessons.init_model import init_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]
NEWEST, OLDEST = ROOT / ".venv-tinker/bin/python", ROOT / ".venv-tinker/oldest/bin/python"
HERE = Path(__file__).parent
COOKBOOK = "Qwen/Qwen3-4B-Instruct-2507"  # a name that the cookbook has a renderer for
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-me"}


class Server(Running):
    """A server for the SDK."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self.address = self.wait_for(r"on (http://\S+)")[1]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(tmp_path_factory.mktemp("tinker") / "nano", "qwen3", "nano", num_layers=2)


@contextmanager
def started(model: Path, folder: Path, *options: object) -> Iterator[Server]:
    """`whet serve --tinker` on a free port."""
    words = [sys.executable, "-m", "whet", "serve", str(model), "--tinker", "--port", "0", "--dtype", "float32"]
    words += ["--folder", str(folder), *map(str, options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def server(nano: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with started(nano, tmp_path / "ck", *getattr(request, "param", ())) as server:
        yield server


def run(python: Path, *words: str, **environment: str) -> str:
    if not python.exists():
        pytest.skip("make tinker")
    done = subprocess.run(
        [str(python), *words], env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses_of(server: Server, rows: list[Any]) -> Any:
    """Runs sdk_losses.py.  Returns the numbers that it prints."""
    script = str(HERE / "sdk_losses.py")
    return json.loads(run(NEWEST, script, server.address, json.dumps(rows), PYTHONPATH=str(ROOT)).splitlines()[-1])


@pytest.mark.parametrize("python", [OLDEST, NEWEST], ids=["0.25", "0.38"])
def test_the_sdk_trains_samples_and_resumes(server: Server, nano: Path, python: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model.path": str(nano), "model.lora.rank": 4, "model.lora.alpha": 32, "model.dtype": "float32",
        "trainer.seed": 3, "trainer.total_steps": 3, "trainer.run_dir": str(tmp_path / "sft"), "trainer.save_freq": 3,
        "trainer.logger": ["jsonl"], "optim.lr": 1e-2, "optim.betas": [0.9, 0.95], "optim.eps": 1e-8,
        "optim.weight_decay": 0.01, "grad_clip": 1.0, "data.train_batch_size": 3, "data.max_length": 64,
        "data.shuffle": False,
    }  # fmt: skip
    trained = whet.sft(data=[{"prompt": f"{each}+1=", "response": "ab" * each} for each in (1, 3, 2)], **settings)
    rows = [[each.input_ids, each.loss_mask[1:]] for each in trained.examples]
    printed = run(python, str(HERE / "sdk_script.py"), server.address, json.dumps(rows))
    told = json.loads(printed.splitlines()[-1])
    assert told["served"] == ["nano"] and told["info"] == ["nano", 4]
    # the adapter of `whet sft` after the same three steps, bit for bit
    state = serialization.load(trained.run_dir / "checkpoints" / "global_step_3" / "actor.state")
    mine = serialization.load(next((tmp_path / "ck").glob("*/weights/three/state")))
    assert state["model"].keys() == mine["model"].keys()
    assert all(torch.equal(state["model"][name], mine["model"][name]) for name in state["model"])
    means = [entry["sft/loss"] for entry in trained.history]
    assert told["losses"] == pytest.approx(means, rel=1e-5) and told["losses"] == sorted(told["losses"], reverse=True)
    # chunks come back in their order
    count, [first, same, last] = told["chunks"]
    assert count == 2100 and first == pytest.approx(same) and first == pytest.approx(last)
    assert "checkpoint" in told["exists"] and told["step"]["grad_norm"] > 0
    # samples
    assert [len(tokens) for tokens, *_ in told["samples"]] == [6, 6, 6]
    assert told["again"] == [tokens for tokens, *_ in told["samples"]]
    assert told["policy"] == pytest.approx([0.0, 0.0], abs=1e-3)
    first_likely = told["prompt"][1][1]
    assert told["prompt"][0][0] is None and told["prompt"][0][1:] == pytest.approx(told["computed"][1:], abs=1e-5)
    assert (
        len(first_likely) == 2 and first_likely[0][1] >= first_likely[1][1] >= min(told["prompt"][0][1] - 1e-4, 0) - 99
    )
    # what goes on from a saved state has the same numbers
    assert told["resumed"][0] == told["resumed"][1] < told["losses"][-1]
    assert all(
        each.startswith(("NotFoundError", "BadRequestError", "ValueError", "RequestFailedError"))
        for each in told["stranger"]
    )
    assert all(each != "none" for each in told["wrong"]) and len(set(told["beside"])) == 1
    assert told["beside"][0] < told["losses"][2]
    assert all("RequestFailedError" in each and "an image" in each for each in told["images"]), told["images"]
    # its first step is of zeros beside those of the other layers
    assert told["unembedding"] < told["losses"][1] and told["unembedding"] != pytest.approx(told["losses"][2], rel=1e-6)


def test_full_fine_tuning_has_the_bits_of_sft(server: Server, nano: Path, tmp_path: Path) -> None:
    """rank=0 trains all weights; a loss that the client computes has the gradient of the same loss by name."""
    settings: dict[str, Any] = {
        "model.path": str(nano), "model.dtype": "float32", "trainer.seed": 3, "trainer.total_steps": 2,
        "trainer.run_dir": str(tmp_path / "sft"), "trainer.save_freq": 2, "trainer.logger": ["jsonl"],
        "optim.lr": 1e-2, "optim.betas": [0.9, 0.95], "optim.eps": 1e-8, "optim.weight_decay": 0.01, "grad_clip": 1.0,
        "data.train_batch_size": 2, "data.max_length": 64, "data.shuffle": False,
    }  # fmt: skip
    trained = whet.sft(data=[{"prompt": f"{each}+1=", "response": "ab" * each} for each in (1, 3)], **settings)
    rows = [[each.input_ids, each.loss_mask[1:]] for each in trained.examples]
    told = losses_of(server, rows)
    expected = serialization.load(trained.run_dir / "checkpoints" / "global_step_2" / "actor.state")["model"]
    for name in ("full", "full-custom"):
        mine = serialization.load(next((tmp_path / "ck").glob(f"*/weights/{name}/state")))["model"]
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[each], expected[each]) for each in mine)
    named, custom = told["losses"]["lora"], told["losses"]["lora-custom"]
    assert custom["losses"] == named["losses"] and custom["metrics"]["mean"] == pytest.approx(named["losses"][0])
    assert named["losses"][-1] < named["losses"][0]
    # a loss of several tokens together, whose slope by hand is 2 (l_0 + l_1)
    assert told["squared"] == pytest.approx(told["by_hand"], rel=1e-4) and told["by_hand"] > 0
    named, custom = told["dpo"]
    assert named == pytest.approx(custom, rel=1e-4) and named[0] == pytest.approx(math.log1p(math.exp(-0.2)), rel=1e-4)
    logits = AutoModelForCausalLM.from_pretrained(nano, dtype=torch.float32)(torch.tensor([told["prompt"]])).logits
    values, tokens = logits[0].log_softmax(-1).topk(3)
    assert told["likeliest"][0] in (None, []) and len(told["likeliest"]) == len(told["prompt"]) == 5
    for place, found in enumerate(told["likeliest"][1:]):
        assert [token for token, _ in found] == tokens[place].tolist()
        assert [log_prob for _, log_prob in found] == pytest.approx(values[place].tolist(), abs=1e-4)


def test_two_ranks_have_the_numbers_of_one(nano: Path, tmp_path: Path) -> None:
    """An adapter and all weights, by the SDK, and samples of the trained model."""
    rows, found = [[[1, 2, 3, 4], [0, 1, 1]], [[5, 6, 7], [1, 1]], [[9, 8, 7, 6, 5], [0, 0, 1, 1]]], []
    for number, options in enumerate(((), ("--ranks", 2, "--train-engine", "fsdp"))):
        with started(nano, tmp_path / str(number), *options) as server:
            found.append(losses_of(server, rows))
    one, two = found
    assert two["likeliest"][1:] == one["likeliest"][1:]  # of the base, which the server itself samples
    assert two["squared"] == pytest.approx(one["squared"], rel=1e-3)
    assert two["dpo"][0] == pytest.approx(one["dpo"][0], rel=1e-3)
    for name, told in one["losses"].items():
        assert two["losses"][name]["losses"] == pytest.approx(told["losses"], rel=1e-3)
        assert two["losses"][name]["scores"] == pytest.approx(told["scores"], rel=1e-3, abs=1e-4)


def test_the_script_of_the_page(server: Server, tmp_path: Path) -> None:
    """The loss of held-out rows falls."""
    page = (ROOT / "docs" / "tinker.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0]
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert script.count("http://127.0.0.1:8000") == script.count(f'"{name}"') == 1
    script = script.replace("http://127.0.0.1:8000", server.address).replace(name, "nano")
    (tmp_path / "script.py").write_text(script)
    before, *steps, after = re.findall(
        r"(?:before:|after:|'loss:sum':) ([\d.]+)", run(NEWEST, str(tmp_path / "script.py"))
    )
    assert len(steps) == 10 and float(after) < 0.9 * float(before)  # the steps are of different rows


def test_messages_are_those_of_the_sdk() -> None:
    """Field numbers, kinds and enums of the descriptors in both wheels."""
    script = """
import json
from tinker.proto import tinker_public_pb2 as pb
names = ["ForwardBackwardRequest", "Datum", "Tensor", "SparseCsr", "Chunk", "EncodedTextChunk", "ForwardBackwardOutput",
         "ArrayRecord", "BatchedTensor", "SampleResponse", "SampledSequence"]
def fields(message): return {f.name: [f.number, f.type] for f in message.fields}
found = {name: fields(pb.DESCRIPTOR.message_types_by_name[name]) for name in names}
found["enums"] = {e.name: {v.name: v.number for v in e.values} for e in pb.DESCRIPTOR.enum_types_by_name.values()}
print(json.dumps(found))
"""
    text, number, array, message = 9, 3, 12, 11
    for python in (OLDEST, NEWEST):
        found = json.loads(run(python, "-c", script))
        enums = found.pop("enums")
        assert (
            enums["DType"] | {"DTYPE_FLOAT32": 1, "DTYPE_INT64": 2, "DTYPE_INT32": 3, "DTYPE_BFLOAT16": 4}
            == enums["DType"]
        )
        assert enums["StopReason"] == {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}
        expected = {
            "ForwardBackwardRequest": {
                "model_id": [1, text],
                "seq_id": [2, 5],
                "data": [3, message],
                "loss_fn": [4, text],
                "loss_fn_config": [5, message],
                "forward_only": [6, 8],
            },
            "Datum": {"model_input": [1, message], "loss_fn_inputs": [2, message]},
            "Tensor": {"dense": [1, array], "sparse_csr": [2, message], "dtype": [3, 14], "shape": [4, number]},
            "SparseCsr": {"values": [1, array], "crow_indices": [2, array], "col_indices": [3, array]},
            "Chunk": {"encoded_text": [1, message]},
            "EncodedTextChunk": {"tokens": [1, array]},
            "ForwardBackwardOutput": {
                "loss_fn_output_type": [1, text],
                "loss_fn_outputs": [2, message],
                "metrics": [3, message],
            },
            "ArrayRecord": {"type_tag": [1, text], "fields": [2, message], "num_datums": [3, number]},
            "BatchedTensor": {
                "data": [1, array],
                "offsets": [2, array],
                "dtype": [3, 14],
                "trailing_shape": [4, number],
            },
            "SampleResponse": {
                "sequences": [1, message],
                "prompt_logprobs": [2, array],
                "topk_prompt_logprobs": [3, message],
            },
            "SampledSequence": {"stop_reason": [1, 14], "tokens": [2, array], "logprobs": [3, array]},
        }
        for name, fields in expected.items():
            assert {key: found[name][key] for key in fields} == fields, name


@pytest.mark.parametrize("server", [("--api-key", "tml-me,tml-you", "--max-body-mib", "0.1")], indirect=True)
def test_keys_sizes_and_what_cannot_be_read(server: Server) -> None:
    """Statuses that the SDK does not repeat; the server goes on after all of them."""
    with httpx.Client(base_url=f"{server.address}/api/v1/", headers={"x-api-key": "tml-me"}, timeout=60) as client:
        assert client.get("healthz", headers={"x-api-key": ""}).json() == {"status": "ok"}
        for bad in ("", "tml-other"):
            assert client.get("get_server_capabilities", headers={"x-api-key": bad}).status_code == 401
        assert (
            client.post("create_session", content=b"{", headers={"content-type": "application/json"}).status_code == 400
        )
        assert client.post("create_session", json={"tags": ["x" * 200_000]}).status_code == 413
        assert client.post("create_session", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        opened = client.post("create_session", json={}).json()
        session = opened["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": "nano", "lora_config": {"rank": 2}}
        for bad_model in ({"base_model": "x"}, {"lora_config": {"rank": -1}}, {"optimizer_config": {"type": "dimuon"}}):
            assert client.post("create_model", json={**model, **bad_model}).status_code == 400
        promise = client.post("create_model", json=model).json()
        assert client.post("create_model", json=model).json() == promise
        name = client.post("retrieve_future", json=promise).json()["model_id"]
        you = {"x-api-key": "tml-you"}
        assert client.post("retrieve_future", json=promise, headers=you).status_code == 410
        assert client.post("get_info", json={"model_id": name}, headers=you).status_code == 404
        assert client.post("session_heartbeat", json={"session_id": session}, headers=you).status_code == 410
        proto = {"content-type": "application/x-protobuf"}
        for content, encoding in ((b"\xff" * 9, ""), (b"nothing", "zstd")):
            reply = client.post("forward_backward", content=content, headers={**proto, "content-encoding": encoding})
            assert reply.status_code == 400
        packed = pa.compress(
            own.body(name, [own.datum([1, 2], target_tokens=[2, 3])], "cross_entropy"), "zstd", asbytes=True
        )
        reply = client.post("forward_backward", content=packed, headers={**proto, "content-encoding": "zstd"})
        [log_probs], _ = own.answer(client.post("retrieve_future", json=reply.json()).content)
        assert log_probs.shape == (2,) and np.isfinite(log_probs).all()
        js = {"content-type": "application/json"}
        inflight = {"model_id": name, "seq_id": 2, "sampling_session_seq_id": 1, "kind": "inflight"}
        assert client.post("save_weights_for_sampler", json=inflight).status_code == 400
        assert client.post("save_weights", json={"model_id": name, "seq_id": 2, "path": "one"}).status_code == 200
        new = {"session_id": session, "model_seq_id": 1, "path": f"tinker://{name}/weights/one", "optimizer": False}
        client.post("retrieve_future", json={"request_id": f"{name}:2"})
        for bad_model in ({"base_model": "x"}, {"optimizer_config": {"type": "dimuon"}}):
            assert client.post("load_weights", json={**new, **bad_model}).status_code == 400
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "nano"}
        sampler = client.post("create_sampling_session", json=asked).json()["sampling_session_id"]
        wrong = [
            {"sampling_params": {name: value}}
            for name, value in (
                ("temperature", math.nan), ("temperature", -1.0), ("temperature", 1e-30), ("top_p", 0.0),
                ("top_p", math.nan), ("top_k", 2**40), ("stop", [""]), ("stop", ["x"] * 100), ("stop", [10**9]),
                ("seed", "x"), ("max_tokens", [1]),
            )
        ]  # fmt: skip
        wrong += [{"prompt": {"chunks": [{"tokens": each}]}} for each in ([], [-1], [10**9], [1.5], [1] * 33_000)]
        wrong += [{"topk_prompt_logprobs": 10**6}, {"prompt": {"chunks": [{"type": "image", "data": "x"}]}}]
        fine = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1, 2]}]}, "num_samples": 1}
        for number, each in enumerate([*wrong, {"sampling_params": {"max_tokens": 3}}]):
            content = json.dumps({**fine, "seq_id": number, **each})
            asked_for = client.post("asample", content=content, headers=js)
            result = client.post("retrieve_future", json={"request_id": asked_for.json()["request_id"]})
            assert (each not in wrong) or result.json()["category"] == "user", (each, result.text)
        assert result.headers["content-type"] == "application/x-protobuf"  # nothing of it harmed the server
        many = client.post("asample", json={**fine, "seq_id": 99, "num_samples": 10**6})
        assert many.status_code == 400
        assert (
            client.post("create_model", content=json.dumps({**model, "model_seq_id": math.inf}), headers=js).status_code
            == 400
        )
        assert client.post(f"sessions/{session}/finish", json={}).status_code == 200
        assert client.post("retrieve_future", json=reply.json()).status_code == 410
        assert client.post("session_heartbeat", json={"session_id": session}).status_code == 410


def boxes_digits(nano: Path, folder: Path) -> Path:
    """A model that answers any question with one of four digits, in the form that the reward of rl_loop reads."""
    rows = [{"prompt": f"{a}+1", "response": rf"\boxed{{{b + 1}}}"} for a in range(4) for b in range(4)]
    settings: dict[str, Any] = {
        "model.path": str(nano), "model.dtype": "float32", "data.train_batch_size": 16, "optim.lr": 3e-3,
        "trainer.total_steps": 80, "trainer.run_dir": str(folder / "sft"), "trainer.logger": ["jsonl"],
    }  # fmt: skip
    return export(whet.sft(data=rows, **settings).run_dir, folder / "model")


def test_the_loops_of_the_cookbook(nano: Path, tmp_path: Path) -> None:
    """sl_loop and rl_loop as they are; data and tokenizer from a hub on this machine."""
    nano = boxes_digits(nano, tmp_path)
    chats = [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(4) for b in range(4)
    ]  # fmt: skip
    no_robots, gsm8k = tmp_path / "no_robots", tmp_path / "gsm8k"
    for folder, rows, config in (
        (no_robots, {"messages": [each["messages"] for each in chats]}, "default"),
        (gsm8k, {"question": [f"{a}+1" for a in range(4)], "answer": [f"#### {a + 1}" for a in range(4)]}, "main"),
    ):
        (folder / "data").mkdir(parents=True)
        pq.write_table(pa.table(rows), folder / "data" / "train.parquet")
        card = f"configs:\n- config_name: {config}\n  data_files:\n  - split: train\n    path: data/train.parquet\n"
        (folder / "README.md").write_text(f"---\n{card}---\n")
    repos = {f"models/{COOKBOOK}": nano, "datasets/HuggingFaceH4/no_robots": no_robots, "datasets/openai/gsm8k": gsm8k}
    with serving(repos) as hub, started(nano, tmp_path / "ck", "--name", COOKBOOK) as server:
        hub_settings = {
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        shared = [f"base_url={server.address}", f"model_name={COOKBOOK}", "lora_rank=4", "save_every=2"]
        sl = [*shared, f"log_path={tmp_path / 'sl'}", "batch_size=4", "learning_rate=0.01"]
        for steps in ("3", "4"):  # the second resumes from the first's state
            run(NEWEST, "-m", "tinker_cookbook.recipes.sl_loop", *sl, f"max_steps={steps}", **hub_settings)
        rl = [*shared, f"log_path={tmp_path / 'rl'}", "batch_size=2", "group_size=16", "max_tokens=16", "max_steps=2"]
        run(NEWEST, "-m", "tinker_cookbook.recipes.rl_loop", *rl, "loss_fn=importance_sampling", **hub_settings)
    losses = [
        json.loads(line)["train_mean_nll"] for line in (tmp_path / "sl" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) >= 3 and losses[2] < 0.9 * losses[0]
    rewards = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert len(rewards) == 2 and all(0 < each["reward/total"] < 1 and each["grad_norm"] > 0 for each in rewards)
    kinds = {path.parts[-3] for path in (tmp_path / "ck").glob("*/*/*/meta.json")}
    assert kinds == {"weights", "sampler_weights"}


def test_a_client_that_dies_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Killed while it samples: its session ends without heartbeats, and its snapshots are removed."""
    script = f"""
import tinker, sys, time
from tinker import types
service = tinker.ServiceClient(base_url={server.address!r}, api_key="tml-me")
model = service.create_lora_training_client(base_model="nano", rank=2).result()
sampler = model.save_weights_and_get_sampling_client().result()
prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=4000, stop=[])
futures = [sampler.sample(prompt, 4, params) for _ in range(4)]
print(model.model_id, flush=True)
time.sleep(1000)
"""
    if not NEWEST.exists():
        pytest.skip("make tinker")
    with subprocess.Popen([str(NEWEST), "-c", script], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as client:
        assert client.stdout is not None
        name = client.stdout.readline().strip()
        snapshots = tmp_path / "ck" / name / "sampler_weights"
        assert [*snapshots.iterdir()]
        client.kill()
    server.wait_for("session .* ended: no heartbeat")
    until = time.monotonic() + 30
    while [*snapshots.iterdir()]:
        assert time.monotonic() < until
        time.sleep(0.2)
    with httpx.Client(base_url=f"{server.address}/api/v1/", headers={"x-api-key": "tml-me"}, timeout=60) as other:
        assert other.post("get_info", json={"model_id": name}).status_code == 404
        assert other.get("checkpoints").json()["checkpoints"] == []
