# SPDX-License-Identifier: Apache-2.0
"""examples/games.py and its recipes."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image
from transformers import AutoTokenizer
from whet_environments.frozen_lake import FrozenLake
from whet_environments.sokoban import TILES, Sokoban
from whet_environments.tiles import draw_tiles

from whet.config import TrainConfig, load_config
from whet.environments.running import EnvironmentSpec
from whet.plugins.lessons.init_model import END_OF_TURN, init_model

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "games.py"
CALCULATOR = "calculator_quickstart"


@pytest.fixture(scope="module")
def games() -> ModuleType:
    spec = importlib.util.spec_from_file_location("games_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["games_example"] = module
    spec.loader.exec_module(module)
    return module


def lake(prompt: object) -> FrozenLake:
    return FrozenLake(size=2, max_steps=4, encoding="compact", context="append")


def test_perfect_play_and_what_the_model_reads(games: ModuleType) -> None:
    played = games.turns(lake, {"prompt": ">", "seed": 5}, 0.0, random.Random(0))
    assert 1 <= len(played) <= 2 and all(row["response"] in "udlr" for row in played)
    first, *rest = played
    assert len(first["prompt"]) == 5 and set(first["prompt"]) <= set("PG_O>")
    for row in rest:  # the context is appended
        assert row["prompt"].startswith(f"{first['prompt']}{first['response']}{END_OF_TURN}")


def test_random_play_differs_from_perfect_play(games: ModuleType) -> None:
    rows = [{"prompt": ">", "seed": seed} for seed in range(100)]

    def first_moves(noise: float) -> list[str]:
        draws = random.Random(1)
        return [games.turns(lake, row, noise, draws)[0]["response"] for row in rows]

    agreed = sum(a == b for a, b in zip(first_moves(0.0), first_moves(1.0), strict=True))
    assert 10 < agreed < 40  # a quarter by chance


@pytest.mark.parametrize("name", ["frozen_lake", "number_game", "sokoban_grpo", "tree_game"])
def test_held_out_games_begin_in_states_of_their_own(
    games: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(games, "NUM_TRAINED", 200)
    monkeypatch.setattr(games, "NUM_SHOWN", 100)
    config = recipe(name, tmp_path)
    make = EnvironmentSpec(config.environment.name, config.environment.options).load()
    plan = games.PLANS[name]
    trained, held_out, shown = games.game_rows(make, plan.noise, random.Random(0))
    begins = [{games.begin(make, row) for row in rows} for rows in (trained, held_out)]
    assert (len(trained), len(held_out), len(shown)) == (200, 256, 100) and not begins[0] & begins[1]
    used = set("".join(row["prompt"] + row["response"] for row in shown))
    assert used <= set(plan.alphabet)
    assert max(len(row["prompt"]) for row in shown) <= config.data.max_prompt_length
    assert max(len(row["response"]) for row in shown) < config.data.max_response_length


def test_a_room_that_is_seen_is_shown_as_a_picture(games: ModuleType, tmp_path: Path) -> None:
    config = recipe("sokoban_vision", tmp_path)
    assert config.data.apply_chat_template and games.PLANS["sokoban_vision"].arch == "qwen3_vl"
    make = EnvironmentSpec(config.environment.name, config.environment.options).load()
    row = {"prompt": ">", "seed": 5}
    played = games.turns(make, row, 0.0, random.Random(0))
    rooms = games.turns(
        lambda _: Sokoban(**{**config.environment.options, "render": "text"}), row, 0.0, random.Random(0)
    )
    assert [turn["response"] for turn in played] == [turn["response"] for turn in rooms]
    assert {turn["prompt"] for turn in played} == {"<image>>"} and "images" not in rooms[0]
    for turn, room in zip(played, rooms, strict=True):
        [png] = turn["images"]
        picture = Image.open(io.BytesIO(png))
        assert picture.size == (64, 48)
        cells = [[room["prompt"][4 * y + x] for x in range(4)] for y in range(3)]
        assert picture.tobytes() == draw_tiles(cells, TILES, 16).tobytes()


@pytest.mark.slow
def test_the_shop_is_read_in_words_of_its_tokenizer(
    games: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(games, "NUM_TRAINED", 200)
    monkeypatch.setattr(games, "NUM_SHOWN", 300)
    config, plan = recipe("webshop_grpo", tmp_path), games.PLANS["webshop_grpo"]
    make = EnvironmentSpec(config.environment.name, config.environment.options).load()
    trained, held_out, shown = games.game_rows(make, plan.noise, random.Random(0))
    begins = [{games.begin(make, row) for row in rows} for rows in (trained, held_out)]
    assert not begins[0] & begins[1] and len(begins[1]) > 240  # goals of their own
    init_model(tmp_path / "model", size="nano", texts=plan.texts(), vocab_size=games.MAX_WORDS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    lengths = [(len(tokenizer(row["prompt"]).input_ids), len(tokenizer(row["response"]).input_ids)) for row in shown]
    assert 30 < sum(prompt for prompt, _ in lengths) / len(lengths) < 80  # a word is a token, or two
    assert max(prompt for prompt, _ in lengths) <= config.data.max_prompt_length
    assert max(response for _, response in lengths) < config.data.max_response_length
    assert games.interval(0.5) == pytest.approx(0.06125)


def test_the_calculator_is_shown_in_a_share_of_the_play(games: ModuleType, tmp_path: Path) -> None:
    trained, held_out, shown = games.product_rows(0.7, random.Random(0))
    products = {row["prompt"]: row["answer"] for row in (*trained, *held_out)}
    assert len(products) == sum(a * b >= 1000 for a in range(10, 100) for b in range(10, 100))
    assert all(str(eval(question)) == answer for question, answer in products.items())
    assert not {row["prompt"] for row in held_out} & {row["prompt"].partition("<")[0] for row in shown}
    direct = [row for row in shown if row["response"][0] == "=" and "<" not in row["prompt"]]
    assert 0.65 < len(direct) / len(shown) < 0.75
    after = next(row for row in shown if "<" in row["prompt"])
    question = after["prompt"].partition("<")[0]
    assert after["prompt"] == f"{question}<calc>{question}</calc>{END_OF_TURN}{products[question]}"
    assert after["response"] == f"={products[question]}"
    config = recipe(CALCULATOR, tmp_path)
    assert config.reward.kwargs == {"after": "="} and config.environment.name == "calculator"


def recipe(name: str, tmp_path: Path) -> TrainConfig:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": ">", "seed": 0}) + "\n")
    rows = tmp_path / "rows.jsonl"
    given = [f"model.path={tmp_path}", f"data.train_files={rows}", f"data.val_files={rows}"]
    return load_config(TrainConfig, name, given).config


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(CALCULATOR, "number_game", "nim_one_side", "nim_self_play", "tree_game", "frozen_lake"),
        *("sokoban_grpo", "sokoban_ppo", "webshop_grpo"),
    ],
)
def test_two_steps_of_each(
    games: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(games, "NUM_TRAINED", 64)
    monkeypatch.setattr(games, "NUM_SHOWN", 256)
    monkeypatch.setitem(games.PLANS, name, replace(games.PLANS[name], warm_up_steps=2))
    changes = ["trainer.total_steps=2", "data.train_batch_size=8", "rollout.n=4", "trainer.logger=[jsonl]"]
    few = [*changes, "critic.warmup_steps=0"] if name == "sokoban_ppo" else changes
    monkeypatch.setattr(sys, "argv", ["games.py", name, "--run-dir", str(tmp_path / "run"), *few])
    assert games.main() == 0
    assert f"{name}: held-out {games.PLANS[name].label} " in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "run" / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    held_out = [[record["step"], record[games.PLANS[name].metric]] for record in records if "val/accuracy" in record]
    assert summary["curve"] == held_out and len(held_out) == 2
    assert records[-1]["val/failures"] == 0.0
