# SPDX-License-Identifier: Apache-2.0
"""A served run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from server_processes import Running, Start

from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.models.load import load_policy
from whet.trainers.build import train

TrainConfigs = Callable[..., TrainConfig]
LORA = {"model.lora.rank": 4}


def length(solution_str: str, **rest: object) -> float:
    """A reward for long responses."""
    return float(len(solution_str))


class SecondIsBest:
    """A reward that pays in the second validation alone."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.num_validated = num_rows, 0

    def __call__(self, solution_str: str, data_source: str) -> float:
        if data_source != "validation":
            return float(len(solution_str))
        self.num_validated += 1
        return float(self.num_rows < self.num_validated <= 2 * self.num_rows)


def check(server: Running, checkpoint: Path, version: int, out: Path) -> None:
    """Checks that log-probs of the server equal the ones of the checkpoint's own model, and that it names the
    version."""
    prompt = [5, 9, 12]
    response = server.client().completions.create(
        model="run", prompt=prompt, max_tokens=20, logprobs=0, seed=1, extra_body={"return_token_ids": True}
    )
    assert response.system_fingerprint == f"weights-{version}"
    [choice] = response.choices
    assert choice.model_extra is not None and choice.logprobs is not None
    tokens = choice.model_extra["token_ids"]
    assert choice.model_extra["weight_versions"] == [[version, len(tokens)]]
    with torch.no_grad():
        logits = load_policy(export(checkpoint, out))(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(own, torch.tensor(choice.logprobs.token_logprobs), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, LORA], ids=["whole", "lora"])
def test_a_served_run_follows_its_training(
    train_config: TrainConfigs,
    additions: list[dict[str, str]],
    start: Start,
    tmp_path: Path,
    overrides: dict[str, Any],
) -> None:
    settings = {"trainer.save_freq": 2, "trainer.save_limit": None, **overrides}
    train(train_config({"trainer.total_steps": 2, **settings}), reward=length, data=additions)
    server, checkpoints = start(tmp_path / "run", "--follow"), tmp_path / "run" / "checkpoints"
    check(server, checkpoints / "global_step_2", 2, tmp_path / "two")
    train(train_config({"trainer.total_steps": 6, **settings}), reward=length, data=additions)
    while "global_step_6 from now on" not in "".join(server.lines):
        server.wait_for("from now on")
    check(server, checkpoints / "global_step_6", 6, tmp_path / "six")
    with server.http() as http:
        [card] = http.get("/v1/models").json()["data"]
        assert card["root"].endswith("global_step_6") and card["system_fingerprint"] == "weights-6"
        assert re.search(r"^whet_weights_version 6\.0$", http.get("/metrics").text, re.MULTILINE)
    # a checkpoint that is damaged is passed over
    damaged = checkpoints / "global_step_7"
    damaged.mkdir()
    (damaged / "trainer.json").write_text(json.dumps({"step": 7}))
    (damaged / "manifest.json").write_text("{}")
    server.wait_for(r"damaged.*global_step_7.*global_step_6|global_step_7.*damaged.*global_step_6")
    check(server, checkpoints / "global_step_6", 6, tmp_path / "again")


@pytest.mark.slow
def test_a_run_serves_its_newest_its_best_or_any_checkpoint(
    train_config: TrainConfigs, additions: list[dict[str, str]], start: Start, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"trainer.save_freq": 1, "trainer.save_limit": None, "trainer.total_steps": 3}
    rows = [{**row, "data_source": "validation"} for row in additions[:4]]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings |= {"trainer.val_freq": 1, "trainer.val_before_train": False}
    settings |= {"data.val_files": [str(tmp_path / "val.jsonl")]}
    train(train_config(settings), reward=SecondIsBest(4), data=additions)
    run = tmp_path / "run"
    for words, version in (([run], 3), ([run, "--best"], 2), ([run / "checkpoints/global_step_1"], 1)):
        server = start(*words, "--name", "run")
        check(server, run / "checkpoints" / f"global_step_{version}", version, tmp_path / str(version))


@pytest.mark.slow
def test_a_request_goes_on_under_new_weights(
    train_config: TrainConfigs, additions: list[dict[str, str]], start: Start, tmp_path: Path
) -> None:
    settings = {"trainer.save_freq": 1, "trainer.save_limit": None, "trainer.total_steps": 2}
    train(train_config(settings), reward=length, data=additions)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "global_step_2").rename(tmp_path / "kept")
    server = start(tmp_path / "run", "--follow", "--name", "run")
    extra = {"return_token_ids": True, "allowed_token_ids": [5, 6, 7]}  # and so it never ends early

    def ask_until_new(number: int) -> list[Any]:
        with server.client() as client:
            while True:
                [choice] = client.completions.create(
                    model="run", prompt=[5], max_tokens=100 + 300 * number, seed=number, extra_body=extra
                ).choices
                fields = choice.model_extra or {}
                assert len(fields["token_ids"]) == sum(count for _, count in fields["weight_versions"])
                if fields["weight_versions"][-1][0] == 2:
                    versions: list[Any] = fields["weight_versions"]
                    return versions

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask_until_new, number) for number in range(2)]
        (tmp_path / "kept").rename(checkpoints / "global_step_2")
        found = [each.result() for each in asking]
    assert any([version for version, _ in versions] == [1, 2] for versions in found), found
