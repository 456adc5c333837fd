# SPDX-License-Identifier: Apache-2.0
"""Training on preferences: losses follow transformers' log-probs, any split takes the same steps, a resume has the same
bits, and every kind of reference gives the same numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.first import first
from tests.raising import raises
from whet import serialization
from whet.checkpoints.export import export
from whet.config import load_config
from whet.config.preference import PreferenceConfig
from whet.data.preferences import Comparison
from whet.engines import engine
from whet.errors import ConfigError, DataError, EngineError, StorageError
from whet.keyed import key
from whet.metrics import Metrics
from whet.plugins.lessons.drawn.figures import counting
from whet.plugins.lessons.init_model import init_model
from whet.registry import PREFERENCE_LOSSES
from whet.trainers.preference import PreferenceRun, mismatched, picked, to_batch, train_preference

MakeConfig = Callable[..., PreferenceConfig]
ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"  # of the policy
PLAIN = {"optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0}  # AdamW close to plain gradient descent


@pytest.fixture
def preference_config(model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(**overrides: Any) -> PreferenceConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "model.dtype": "float32",
            "data.apply_chat_template": False,
            "data.train_batch_size": 5,
            "data.max_length": 32,
            "optim.lr": 1e-3,
            "trainer.total_steps": 3,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return load_config(PreferenceConfig, None, small | overrides, given={"data"}).config

    return make


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The response with more of the letter a is the better."""
    good, bad = ["aab", "aaba", "baa"], ["bb", "cbacb"]
    return [{"prompt": f"say {x}=", "chosen": one, "rejected": other} for x in "xyz" for one in good for other in bad]


@pytest.fixture(scope="module")
def lists() -> list[dict[str, Any]]:
    return [
        {"prompt": f"say {x}=", "responses": ["aaa", "aab", "abb", "bbb"][:size], "scores": [3.0, 2.0, 1.0, 0.5][:size]}
        for x in "xyzuvw"
        for size in (2, 3, 4)
    ]


def weights(folder: Path, step: int, role: str = "actor") -> torch.Tensor:
    state = serialization.load(folder / "checkpoints" / f"global_step_{step}" / f"{role}.state")
    return torch.cat([weight.flatten() for weight in state["model"].values()])


def check_same(one: PreferenceRun, other: PreferenceRun, tolerance: float = 2e-5) -> None:
    """Compares all numbers but accuracies, which rounding decides where policy and reference are still equal."""
    for mine, theirs in zip(one.history, other.history, strict=True):
        counted = {name: value for name, value in mine.items() if "accuracy" not in name}
        assert counted.keys() <= theirs.keys()
        assert counted == pytest.approx({name: theirs[name] for name in counted}, rel=tolerance, abs=tolerance)


def test_a_batch_by_hand() -> None:
    one = Comparison((5, 6), (((7, 8), (1, 1)), ((9,), (1,)), ((4, 4), (0, 1))), (2.0, 1.0, 0.0))
    other = Comparison((3,), (((4,), (1,)), ((5, 5, 5), (1, 1, 1))), (1.0, 0.0))
    batch = to_batch([one, other], 0, "pair", 4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0], [5, 6, 4, 4, 0], [0, 3, 4, 0, 0], [0, 3, 5, 5, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert (batch["uid"].tolist(), batch["label"].tolist()) == ([0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0])
    batch = to_batch([one, other], 0, "list", 3)
    assert batch["scores"].tolist() == [2.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert batch["response_mask"].any(1).tolist() == [True, True, True, True, True, False]
    assert [picked(7, 3), picked(2, 3), picked(5, 2)] == [[0, 3, 6], [0, 1], [0, 4]]


def test_every_prompt_gets_the_response_of_another_row() -> None:
    examples = [Comparison((n,), (((n, n), (1, 1)),), (1.0,)) for n in range(9)]
    made = mismatched(examples, 3, 8)
    assert list(made) == [(each.digest, 0) for each in examples]
    assert [each.prompt_ids[0] for each in made.values()] == list(range(9))
    assert sorted(each.responses[0][0][0] for each in made.values()) == list(range(9))
    assert all(each.responses[0][0][0] != each.prompt_ids[0] for each in made.values())
    assert made == mismatched(examples, 3, 8) != mismatched(examples, 4, 8)
    cut = mismatched(examples, 3, 2)
    assert [(*each.responses[0][0], each.responses[0][1]) for each in cut.values()] == [
        (each.responses[0][0][0], (1,)) for each in made.values()
    ]


def test_a_mismatched_response_is_of_another_comparison() -> None:
    """Rows without a neighbour of their own comparison keep the next response of the order."""
    sizes = [2, 2, 1, 3]
    examples = [
        Comparison((uid,), tuple(((10 * uid + n,), (1,)) for n in range(size)), (1.0, 0.5, 0.0)[:size])
        for uid, size in enumerate(sizes)
    ]
    for seed in range(9):
        given = [each.responses[0][0][0] for each in mismatched(examples, seed, 8).values()]
        own = [10 * uid + n for uid, size in enumerate(sizes) for n in range(size)]
        order = list(range(len(own)))
        Random(key(seed, "mismatched")).shuffle(order)
        following = {own[one]: own[other] for one, other in pairwise([*order, *order])}
        assert all(one // 10 != other // 10 for one, other in zip(own, given, strict=True))
        kept = [(one, other) for one, other in zip(own, given, strict=True) if following[one] // 10 != one // 10]
        assert kept and all(following[one] == other for one, other in kept)
    pair = mismatched(examples[:2], 3, 8).values()
    assert [each.responses[0][0][0] // 10 for each in pair] == [1, 1, 0, 0]


def log_prob(model: Any, tokenizer: Any, prompt: str, response: str) -> float:
    """S(l) of a response with its end token, by transformers."""
    ids, start = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id], len(tokenizer.encode(prompt))
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return float(found[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][start - 1 :].sum())


def test_the_loss_is_that_of_transformers_log_probs(
    preference_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, tmp_path: Path
) -> None:
    """A reference of its own, so that no difference is 0; for KTO also the point that rewards are compared with."""
    other = init_model(tmp_path / "other", "qwen3", "nano", alphabet=ALPHABET, num_layers=2, seed=5)
    changes = {"trainer.total_steps": 1, "data.shuffle": False, "optim.lr": 0.0, "reference.model_path": str(other)}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (model_folder, other))

    def ratio(prompt: str, response: str) -> float:
        return log_prob(policy, tokenizer, prompt, response) - log_prob(reference, tokenizer, prompt, response)

    moved = [(ratio(row["prompt"], row["chosen"]), ratio(row["prompt"], row["rejected"])) for row in rows[:5]]
    [record] = train_preference(preference_config(**changes), data=rows).history
    expected = [math.log1p(math.exp(-0.1 * (chosen - rejected))) for chosen, rejected in moved]
    assert record["preference/loss"] == pytest.approx(sum(expected) / 5, rel=1e-5)
    # A difference of sums of 20 to 60 nats in float32, whose last place is 4e-6.
    assert record["preference/chosen_moved"] == pytest.approx(sum(each for each, _ in moved) / 5, rel=1e-5, abs=1e-6)
    assert record["preference/accuracy"] == pytest.approx(sum(one > two for one, two in moved) / 5)

    changes |= {"loss": "kto", "trainer.run_dir": str(tmp_path / "kto")}
    run = train_preference(preference_config(**changes), data=rows)
    text = tokenizer.decode
    others = mismatched(run.examples, run.config.trainer.seed, run.config.data.max_length)
    pairs = [
        (text(each.prompt_ids), text(each.responses[0][0][:-1]))
        for each in (others[own.digest, number] for own in run.examples[:5] for number in (0, 1))
    ]
    point = max(0.0, 0.1 * sum(ratio(*pair) for pair in pairs) / len(pairs))
    flat = [(0.1 * value - point) * sign for both in moved for value, sign in zip(both, (1, -1), strict=True)]
    assert run.history[0]["preference/loss"] == pytest.approx(
        sum(1 - 1 / (1 + math.exp(-each)) for each in flat) / 10, rel=1e-5
    )


@pytest.mark.parametrize("loss", first(1, ["dpo", "kto", "orpo", "simpo", "bco"], others=pytest.mark.slow))
def test_it_learns_the_preference(
    loss: str, preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"trainer.total_steps": 6, "data.train_batch_size": 9, "loss": loss}
    run = train_preference(preference_config(**changes), data=rows, val_data=rows[::4])
    last = run.history[-1]
    assert last["val/accuracy"] == 1.0 and last["val/chosen_reward"] > last["val/rejected_reward"]
    out = export(tmp_path / "run", tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert log_prob(model, tokenizer, "say x=", "aab") > log_prob(model, tokenizer, "say x=", "bb")


LOSSES = ["dpo", "kto", "wpo", "plackett_luce"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "changes",
    [
        {"engine.packing": False, "max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"engine.share_prompts": False},
        {"engine.name": "fsdp"},
        {"cluster.processes": 2},
        {"cluster.processes": 2, "engine.name": "fsdp"},
    ],
    ids=str,
)
def test_any_split_of_a_batch_takes_the_same_steps(
    changes: dict[str, Any], loss: str, preference_config: MakeConfig, lists: list[dict[str, Any]], tmp_path: Path
) -> None:
    data = lists if loss == "plackett_luce" else [each for each in lists if len(each["responses"]) == 2]
    if loss == "kto":
        data = [{"prompt": e["prompt"], "completion": r, "label": r[1] == "a"} for e in lists for r in e["responses"]]
    one = train_preference(preference_config(**PLAIN, loss=loss), data=data)
    there = {"trainer.run_dir": str(tmp_path / "other")}
    other = train_preference(preference_config(**PLAIN, **changes, **there, loss=loss), data=data)
    check_same(one, other)
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(export(tmp_path / name, tmp_path / name / "out")).named_parameters())
        for name in ("run", "other")
    )
    apart = torch.cat([(before[name] - after[name]).flatten() for name in before])
    assert apart.norm() < 1e-5 * torch.cat([weight.flatten() for weight in before.values()]).norm()


def stop_at_three(run: PreferenceRun) -> None:
    if run.step == 3:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "changes",
    first(
        1,
        [
            {"loss": "bco"},
            {"loss": "kto", "model.lora.rank": 4},
            {"reference.mode": "cached"},
            {"reference.mode": "cached", "loss": "kto"},
            {"reference.update_steps": 2},
        ],
        others=pytest.mark.slow,
    ),
    ids=str,
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    changes: dict[str, Any], preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    both = {"optim.schedule": "cosine", "trainer.save_freq": 1, "trainer.total_steps": 5, **changes}
    train_preference(preference_config(**both, **{"trainer.run_dir": str(tmp_path / "straight")}), data=rows)
    with pytest.raises(KeyboardInterrupt):
        train_preference(preference_config(**both), data=rows, callbacks=[stop_at_three])
    resumed = train_preference(preference_config(**both), data=rows)
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_2"
    assert torch.equal(weights(tmp_path / "run", 5), weights(tmp_path / "straight", 5))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_cached_reference_is_the_frozen_one(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    frozen = train_preference(preference_config(), data=rows, val_data=rows[:3])
    changes = {"reference.mode": "cached", "reference.file": str(tmp_path / "kept"), "loss": "dpo"}
    there = {"trainer.run_dir": str(tmp_path / "cached")}
    cached = train_preference(preference_config(**changes, **there), data=rows, val_data=rows[:3])
    check_same(frozen, cached)
    assert list(cached.roles) == ["actor"] and set(frozen.roles) == {"actor", "ref"}
    written = (tmp_path / "kept").stat().st_mtime_ns
    again = {"trainer.run_dir": str(tmp_path / "again"), "loss": "ipo"}
    train_preference(preference_config(**changes | again), data=rows[::-1], val_data=rows[:3])
    assert (tmp_path / "kept").stat().st_mtime_ns == written  # the same rows in another order
    other = {"trainer.run_dir": str(tmp_path / "third")}
    with raises(StorageError, str(tmp_path / "kept"), found=re.compile(r"\brows\b")):
        train_preference(preference_config(**changes, **other), data=rows[:-1])
    moved = {"model.path": str(export(tmp_path / "cached", tmp_path / "out"))}
    other = {"trainer.run_dir": str(tmp_path / "fourth")}
    with raises(StorageError, str(tmp_path / "kept"), found=re.compile(r"\bmodel\b")):
        train_preference(preference_config(**changes, **other, **moved), data=rows, val_data=rows[:3])


@pytest.mark.parametrize("loss", first(1, ["dpo", "kto", "bco"], others=pytest.mark.slow))
def test_every_loss_reads_the_same_from_a_cached_reference(
    loss: str, preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Up to rounding: the file is made from other batches."""
    labelled = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    data = rows if loss == "dpo" else labelled

    def go(mode: str) -> PreferenceRun:
        changes = {"loss": loss, "reference.mode": mode, "trainer.run_dir": str(tmp_path / mode)}
        return train_preference(preference_config(**changes), data=data[5:], val_data=data[:5])

    frozen, cached = go("frozen"), go("cached")
    assert list(cached.roles) == ["actor"] and set(frozen.roles) == {"actor", "ref"}
    check_same(frozen, cached)
    assert frozen.history[-1]["preference/loss"] > 0


@pytest.mark.slow
def test_a_cached_reference_of_another_template_is_refused(
    preference_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, tmp_path: Path
) -> None:
    read = shutil.copytree(model_folder, tmp_path / "tokenizer")
    changes = {"reference.mode": "cached", "reference.file": str(tmp_path / "kept"), "trainer.total_steps": 1}
    changes |= {"data.apply_chat_template": True, "model.tokenizer_path": str(read)}

    def go(folder: str, template: str) -> PreferenceRun:
        (read / "chat_template.jinja").write_text(template)
        return train_preference(preference_config(**changes, **{"trainer.run_dir": str(tmp_path / folder)}), data=rows)

    one = "{% for message in messages %}<{{ message.content }}{% endfor %}"
    assert go("one", one).history == go("again", one).history
    with raises(StorageError, str(tmp_path / "kept"), found=re.compile(r"\brows\b")):
        go("other", one.replace("<", "("))


def test_a_lost_cache_of_a_run_is_an_error(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"reference.mode": "cached", "trainer.save_freq": 1}
    train_preference(preference_config(**changes, **{"trainer.total_steps": 1}), data=rows)
    (tmp_path / "run" / "reference.safetensors").unlink()
    with raises(StorageError, str(tmp_path / "run" / "reference.safetensors")):
        train_preference(preference_config(**changes), data=rows)


@pytest.mark.slow
def test_a_cached_reference_has_all_responses(
    preference_config: MakeConfig, lists: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A loss on pairs reads two responses of a list, a loss on lists more: both read the same file, and an earlier file
    that lacks some is refused."""
    changes = {"reference.mode": "cached", "reference.file": str(tmp_path / "kept"), "trainer.total_steps": 1}

    def go(loss: str, folder: str) -> PreferenceRun:
        there = {"trainer.run_dir": str(tmp_path / folder), "loss": loss}
        return train_preference(preference_config(**changes, **there), data=lists)

    go("dpo", "pairs")
    cached = go("plackett_luce", "lists")
    frozen = {"loss": "plackett_luce", "trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / "frozen")}
    check_same(train_preference(preference_config(**frozen), data=lists), cached)
    saved = serialization.load(tmp_path / "kept")
    keys = [[digest, int(number)] for digest, number in map(str.split, saved.pop("rows").splitlines())]
    lengths = saved["lengths"].tolist()
    earlier = {**saved, "keys": keys, "lengths": lengths}  # as earlier versions wrote it
    serialization.save(tmp_path / "kept", earlier)
    check_same(cached, go("plackett_luce", "of an earlier version"))
    parts = zip(keys, lengths, saved["log_probs"].split(lengths), strict=True)
    left = [(where, length, values) for where, length, values in parts if where[1] != 1]
    earlier |= {"keys": [each[0] for each in left], "lengths": [each[1] for each in left]}
    serialization.save(tmp_path / "kept", {**earlier, "log_probs": torch.cat([each[2] for each in left])})
    with raises(StorageError, str(tmp_path / "kept"), found=re.compile(rf"\b{len(lists)}\b")):
        go("plackett_luce", "again")


@pytest.mark.slow
def test_a_resumed_run_refuses_the_cache_of_another_model(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"reference.mode": "cached", "trainer.save_freq": 1, "reference.file": str(tmp_path / "kept")}
    run = train_preference(preference_config(**changes, **{"trainer.total_steps": 1}), data=rows)
    state = run.state()
    other = init_model(tmp_path / "other", "qwen3", "nano", alphabet=ALPHABET, seed=5)
    (tmp_path / "kept").unlink()
    there = {"model.path": str(other), "trainer.run_dir": str(tmp_path / "there"), "trainer.total_steps": 1}
    train_preference(preference_config(**changes, **there), data=rows)
    with raises(StorageError, str(tmp_path / "kept"), found=re.compile(r"\bmodel\b")):
        train_preference(preference_config(**changes), data=rows)
    del state["reference"]  # a checkpoint of an earlier version
    run.load_state(state)
    assert run.reference_inputs == {}


@pytest.mark.parametrize("changes", [{}, {"reference.mode": "cached"}], ids=str)
def test_a_reference_with_another_vocabulary_is_refused(
    changes: dict[str, Any], preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = init_model(tmp_path / "other", "qwen3", "nano", alphabet=f"!{ALPHABET}")
    with raises(ConfigError, "reference.model_path", found=str(other)):
        train_preference(preference_config(**{"reference.model_path": str(other)}, **changes), data=rows)


def test_a_moving_reference_has_the_shapes_of_the_policy(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = init_model(tmp_path / "other", "qwen3", "nano", alphabet=ALPHABET, num_layers=1)
    changes = {"reference.model_path": str(other), "reference.update_steps": 2, "trainer.total_steps": 1}
    with raises(ConfigError, "reference.model_path", found=str(other)):
        train_preference(preference_config(**changes), data=rows, dry_run=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        SimpleNamespace(),  # cannot copy
        SimpleNamespace(copy_from=print, stored=lambda: {"weight": torch.ones(2)}),  # the reference has parameters
    ],
    ids=["without the methods", "stored in another way"],
)
def test_a_moving_reference_needs_an_engine_like_the_policys(
    preference_config: MakeConfig, rows: list[dict[str, Any]], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.trainers.preference.actor_beside", lambda worker: SimpleNamespace(engine=engine))
    with raises(EngineError, "reference.update_steps"):
        train_preference(preference_config(**{"reference.update_steps": 2}), data=rows, dry_run=True)


def test_a_moving_reference_is_the_policy_of_some_steps_ago(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    changes = {"reference.update_steps": 2, "trainer.total_steps": 5, "trainer.save_freq": 1}
    run = train_preference(preference_config(**changes), data=rows)
    moved = [abs(record["preference/chosen_moved"]) for record in run.history]
    assert moved[0] < 1e-5 and moved[2] < 1e-5 and moved[4] < 1e-5 and min(moved[1], moved[3]) > 1e-3
    assert torch.equal(weights(tmp_path / "run", 5, "ref"), weights(tmp_path / "run", 4))


@pytest.mark.slow
def test_an_adapter_is_its_own_reference(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    adapted = {"model.lora.rank": 4, "optim.lr": 1e-2}
    run = train_preference(preference_config(**adapted), data=rows)
    path = {"reference.model_path": run.config.model.path, "trainer.run_dir": str(tmp_path / "other")}
    check_same(run, train_preference(preference_config(**adapted, **path), data=rows))
    assert run.history[-1]["preference/chosen_moved"] > 0.1


def test_a_prompt_is_computed_once_for_its_responses(
    preference_config: MakeConfig, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair costs P + 2 (R - 1) tokens, of which micro-batches are full: nothing reads the states of last tokens."""
    computed: list[int] = []
    layout = engine.layout_of

    def counted(*given: Any) -> Any:
        computed.append(layout(*given).size)
        return layout(*given)

    monkeypatch.setattr(engine, "layout_of", counted)
    changes = {"trainer.total_steps": 1, "engine.packing": True, "loss": "simpo", "max_tokens_per_micro_batch": 1}
    run = train_preference(preference_config(**changes), data=rows)
    sizes = {len(each.prompt_ids) + sum(len(ids) - 1 for ids, _ in each.responses) for each in run.examples}
    twice = {size + len(run.examples[0].prompt_ids) for size in sizes}
    assert len(computed) == 5 + 1  # the last is a row for the check of the weights
    assert sizes.isdisjoint(twice) and set(computed[:5]) <= sizes


@pytest.mark.slow
def test_an_image_of_the_prompt_is_read_for_every_response(preference_config: MakeConfig, tmp_path: Path) -> None:
    """Without its image the prompt gives other log-probs; the rows of a pair share the image."""
    seeing = init_model(
        tmp_path / "seeing", "qwen2.5_vl", "nano", num_layers=1, patch_size=8, max_position_embeddings=64
    )
    pictures = [
        {"prompt": "<image>?", "images": row["images"], "chosen": "1", "rejected": "22"}
        for row in counting("train", 0, num_rows=4)
    ]
    changes = {"model.path": str(seeing), "data.apply_chat_template": True, "trainer.total_steps": 1}
    seen = train_preference(preference_config(**changes, **{"data.max_length": 64}), data=pictures)
    assert all(len(each.media) == 1 for each in seen.examples)
    same = [{**row, "images": pictures[0]["images"]} for row in pictures]
    there = {"trainer.run_dir": str(tmp_path / "same"), "data.max_length": 64}
    other = train_preference(preference_config(**changes, **there), data=same)
    name = "preference/chosen_log_probs"
    assert math.isfinite(seen.history[0][name]) and seen.history[0][name] != other.history[0][name]


def test_without_a_reference_its_log_probs_are_zero(preference_config: MakeConfig, rows: list[dict[str, Any]]) -> None:
    run = train_preference(preference_config(**{"reference.mode": "none", "trainer.total_steps": 1}), data=rows)
    [record] = run.history
    assert record["preference/chosen_moved"] == record["preference/chosen_log_probs"] < -5
    assert run.warned == set()  # no response has moved from a reference


def test_each_rule_warns_once_in_a_run(
    preference_config: MakeConfig, rows: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    run = train_preference(preference_config(**{"trainer.total_steps": 1}), data=rows)
    assert (run.warned, run.state()["warned"]) == (set(), [])
    run.history.clear()
    for moved in (-0.4,) * 9 + (-2.0,) * 20:
        run.history.append(
            {"preference/chosen_moved": moved, "preference/chosen_log_probs": -10.0 + moved}
            | {"preference/rejected_moved": -9.0, "preference/chosen_length": 4.0, "preference/rejected_length": 7.0}
        )
        run.check_health(run.batch(run.examples[:1]), Metrics())
    assert run.warned == {"chosen", "length"}
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [re.findall(r"\d+\.\d", each) for each in warned] == [["4.0", "7.0"], ["1.0", "9.0"]]
    state = run.state()
    run.warned = set()
    run.load_state(state)
    assert run.warned == {"chosen", "length"}
    run.check_health(run.batch(run.examples[:1]), Metrics())
    assert len(warned) == len([each for each in caplog.records if each.levelname == "WARNING"])


def test_what_cannot_be(preference_config: MakeConfig, rows: list[dict[str, Any]]) -> None:
    with raises(DataError, "comparison 0", expected=re.compile("loss=dpo")):
        train_preference(preference_config(), data=[{"prompt": "a", "completion": "b", "label": True}])
    scored = [{"prompt": "a", "responses": ["b", "c", "d"], "scores": [0.1, 0.2, 0.3]}]
    with raises(DataError, "comparison 0", expected=re.compile("loss=kto")):
        train_preference(preference_config(loss="kto"), data=scored)
    with raises(ConfigError, "reference.mode", found="cached"):
        preference_config(**{"reference.mode": "cached", "reference.update_steps": 3})
    with raises(ConfigError, "reference.update_steps", found=3):
        preference_config(**{"reference.update_steps": 3, "model.lora.rank": 4})
    for name, value in (("mode", "cached"), ("model_path", "m"), ("file", "f"), ("update_steps", 3)):
        with raises(ConfigError, f"reference.{name}", found=value):
            preference_config(**{f"reference.{name}": value, "loss": "simpo"})
    for data, held_out in ((rows[:1], rows), (rows, rows[:1])):
        with raises(DataError, "number of comparisons", found=1):
            train_preference(preference_config(loss="kto"), data=data, val_data=held_out)
    with raises(ConfigError, "loss_options.bta", found=1.0):
        preference_config(**{"loss_options.bta": 1.0})


def test_a_loss_of_ones_own(
    preference_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PREFERENCE_LOSSES, "_live", dict(PREFERENCE_LOSSES._live))  # gone after the test
    (tmp_path / "mine.py").write_text(
        "from whet import register_preference_loss\n"
        "@register_preference_loss('squared', of='pair')\n"
        "def squared(log_probs, response_mask, *, margin=2.0):\n"
        "    sums = (log_probs * response_mask).sum(1)\n"
        "    return (sums[::2] - sums[1::2] - margin).square(), sums\n"
    )
    changes = {"loss": f"{tmp_path / 'mine.py'}:squared", "loss_options.margin": 1.0, "trainer.total_steps": 8}
    run = train_preference(preference_config(**changes), data=rows)
    losses = [record["preference/loss"] for record in run.history]
    assert losses[-1] < 0.3 * losses[0] and list(run.roles) == ["actor"]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["preference/loss"] == losses[0]


def test_every_loss_says_what_it_compares() -> None:
    assert {each.marks["of"] for each in PREFERENCE_LOSSES} == {"pair", "label", "list"}
