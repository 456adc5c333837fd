# SPDX-License-Identifier: Apache-2.0
"""`whet serve` of a reward model: scores equal transformers', and a run trains on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from server_processes import Running, Start, started
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from whet.config import TrainConfig
from whet.models.load import load_reward_model, load_tokenizer
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import train

pytestmark = pytest.mark.slow
Rows = list[dict[str, str]]
TALK = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose vocabulary differs from the runs' policies'."""
    alphabet = "%0123456789+-*/=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?<>|_'\n"
    made = init_model(tmp_path_factory.mktemp("models") / "served", "llama", "nano", alphabet=alphabet)
    model = load_reward_model(made, new_head_seed=0)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(made)
    load_tokenizer(made).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with started(folder, "--name", "rm", "--dtype", "float32") as server:
        yield server


def by_hand(folder: Path, messages: list[dict[str, str]]) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


def test_scores_are_those_of_transformers(running: Running, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, expected = tokenizer.apply_chat_template(TALK, tokenize=False), by_hand(folder, TALK)
    ids = tokenizer.apply_chat_template(TALK, return_dict=False)
    with running.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/v1/models").json()["data"][0]["id"] == "rm"
        told = http.post("/pooling", json={"model": "rm", "messages": TALK}).json()
        assert told["data"] == [{"index": 0, "object": "pooling", "data": [pytest.approx(expected, abs=1e-5)]}]
        assert told["usage"]["prompt_tokens"] == len(ids)
        both = http.post("/classify", json={"input": [text, text], "add_special_tokens": False}).json()["data"]
        assert [each["probs"] for each in both] == [[pytest.approx(expected, abs=1e-5)]] * 2
        assert [each["num_classes"] for each in both] == [1, 1]
        assert http.post("/pooling", json={"input": ids}).json()["data"][0]["data"] == told["data"][0]["data"]


def test_many_clients_at_once(running: Running, folder: Path) -> None:
    talks = [[TALK[0], {"role": "assistant", "content": str(number)}] for number in range(24)]
    with running.http() as http, ThreadPoolExecutor(12) as clients:
        replies = list(clients.map(lambda talk: http.post("/pooling", json={"messages": talk}).json(), talks))
    found = [each["data"][0]["data"][0] for each in replies]
    assert found == pytest.approx([by_hand(folder, talk) for talk in talks], abs=1e-5)


REFUSED: list[tuple[Any, int]] = [
    ({"model": "another", "messages": TALK}, 404),
    ({"messages": TALK, "input": "a"}, 400),
    ({}, 400),
    ([], 400),
    ({"messages": [{"role": "user"}]}, 400),
    ({"messages": "a"}, 400),
    ({"input": [1, 10**6]}, 400),
    ({"input": {"a": 1}}, 400),
    ({"input": [1]}, 400),
    ({"messages": TALK, "use_activation": True}, 400),
]


@pytest.mark.parametrize(("body", "status"), REFUSED, ids=lambda value: str(value)[:30])
def test_bad_requests_are_refused(body: Any, status: int, running: Running) -> None:
    with running.http() as http:
        reply = http.post("/pooling", json=body)
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_a_key_and_a_signal(start: Start, folder: Path) -> None:
    server = start(folder, "--api-key", "secret", "--dtype", "float32")
    with server.http() as http:
        assert http.post("/pooling", json={"messages": TALK}).status_code == 401
        assert http.get("/health").status_code == 200
    server.process.terminate()
    assert server.ended()[0] in (0, -15)


def test_a_run_trains_on_its_scores(
    running: Running, folder: Path, train_config: Callable[..., TrainConfig], additions: Rows, tmp_path: Path
) -> None:
    """On a rank of the pool with the role `reward`, the numbers equal the reward model's as a role of the run."""
    pools = {"main": {"processes": 1}, "scores": {"processes": 1, "roles": ["reward"]}}
    served = {
        "reward.function": "reward_server",
        "reward.kwargs": {"endpoint": running.address, "model": "rm", "deadline_seconds": 20},
        "cluster.placement": pools,
    }
    own = {"reward_model.model_path": str(folder), "reward.function": None}
    runs = []
    for name, changes in (("served", served), ("own", own)):
        changes |= {"trainer.total_steps": 2, "trainer.run_dir": str(tmp_path / name), "actor.optim.lr": 1e-3}
        runs.append(train(train_config(changes), data=additions))
    for one, other in zip(*(run.history for run in runs), strict=True):
        assert one["critic/score/mean"] == pytest.approx(other["reward/reward_model"], abs=1e-4)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_follow_is_refused(start: Start, folder: Path) -> None:
    with pytest.raises(AssertionError, match=re.compile("--follow", re.DOTALL)):
        start(folder, "--follow")
