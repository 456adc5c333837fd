# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.config.schema import TrainConfig
from whet.config.section import describe_type, field_at, is_known, leaf_fields, meaning, nearest_key
from whet.config.trainer import LOGGER


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rollot.n", "rollout.n"),
        ("lr", "actor.optim.lr"),
        ("actor.lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "actor.mini_batch_size"),
        ("algorithm.adv_option.gamma", "algorithm.adv_options.gamma"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef"),
        ("trainer.val_before_training", "trainer.val_before_train"),
        ("rewards.function", "reward.function"),
        ("rollot", "rollout"),
        ("nothing_like_it", None),
    ],
)
def test_the_nearest_key_is_the_one_that_was_meant(typed: str, meant: str | None) -> None:
    assert nearest_key(TrainConfig, typed) == meant


@pytest.mark.slow
def test_a_valid_key_is_nearest_to_itself() -> None:
    some = list(leaf_fields(TrainConfig))[::6]
    assert [nearest_key(TrainConfig, key) for key in some] == some


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("rollout.n", True),
        ("rollout", True),
        ("actor.optim", True),
        ("algorithm.adv_options.anything.at.all", True),
        ("extra.mine", True),
        ("rollout.n.more", False),
        ("roll", False),
        ("algorithm.adv_optionsx", False),
    ],
)
def test_known_are_values_sections_and_what_lies_in_free_mappings(key: str, known: bool) -> None:
    assert is_known(TrainConfig, key) is known


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.n", "a whole number > 0"),
        ("rollout.top_p", "a number > 0 and <= 1.0"),
        ("trainer.val_freq", "a whole number >= -1"),
        ("actor.grad_clip", "a number > 0 or null"),
        ("model.dtype", "one of auto, float32, bfloat16"),
        ("reward.function", "text or a list, each text or null"),
        ("trainer.logger", "a list, each text"),
        ("actor.optim.betas", "a list of 2, each a number >= 0 and < 1"),
        ("data.shuffle", "true or false"),
        ("extra", "a mapping"),
    ],
)
def test_types_are_said_in_words(key: str, words: str) -> None:
    field = leaf_fields(TrainConfig)[key]
    assert describe_type(field.annotation, tuple(field.metadata)) == words


def test_a_path_that_goes_below_a_value_stops_at_the_value() -> None:
    key, field = field_at(TrainConfig, ["trainer", "logger", "1"])
    assert (key, field.description) == ("trainer.logger", LOGGER)


def test_the_meaning_of_an_option_is_that_of_its_mapping() -> None:
    assert meaning(TrainConfig, "rollout.n") == "responses a prompt"
    assert meaning(TrainConfig, "algorithm.adv_options.gamma") == "options of the estimator"
