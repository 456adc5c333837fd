# SPDX-License-Identifier: Apache-2.0
"""Rows as the engine reads them, and losses by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugins.serving.tinker.rows import datum, request
from tests.raising import raises
from whet.errors import ConfigError, DataError, RegistryError, WhetError
from whet.plugins.serving.tinker import losses
from whet.plugins.serving.tinker.losses import DatumRows, SumObjective, objective_of
from whet.registry import AGGREGATIONS, POLICY_LOSSES


def rows(loss: str, *data: bytes) -> DatumRows:
    return DatumRows.of(request("m", data, loss).data, loss, 100, 50)


def test_rows_that_are_imitated_begin_with_one_token() -> None:
    made = rows(
        "cross_entropy",
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=np.float32([0, 0.5, 2])),
        datum([5], target_tokens=[6], weights=np.float32([1])),
    )
    assert made.batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert made.batch["response_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert made.batch["token_weights"].tolist() == [[0, 0.5, 2], [1, 0, 0]]
    assert made.with_all_places()["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    outputs = made.outputs({0: torch.tensor([-1.0, -2.0, -3.0]), 1: torch.tensor([-4.0, 0.0, 0.0])})
    assert [each.tolist() for each in outputs] == [[-1, -2, -3], [-4]]


def test_rows_of_a_policy_loss_have_their_prompts_on_the_left() -> None:
    """The cookbook's rows: targets of the prompt are 0, and so are its advantages and log-probs."""
    made = rows(
        "ppo",
        datum(
            [1, 2, 3, 7],
            target_tokens=[0, 0, 7, 8],
            logprobs=np.float32([0, 0, -1, -2]),
            advantages=np.float32([0, 0, 1, 1]),
        ),
        datum([4, 9], target_tokens=[9, 9], logprobs=np.float32([-3, 0]), advantages=np.float32([2, 2])),
    )
    assert not made.is_picked and made.starts == [-2, 0]
    assert made.batch["input_ids"].tolist() == [[1, 2, 3, 7, 8], [0, 0, 4, 9, 9]]
    assert made.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert made.batch["response_mask"].tolist() == [[1, 1], [1, 1]]
    assert made.batch["old_log_probs"].tolist() == [[-1, -2], [-3, 0]]
    outputs = made.outputs({0: torch.tensor([-1.0, -2.0])})
    assert [each.tolist() for each in outputs] == [[0, 0, -1, -2], [0, 0]]


# log-probs l = -1, -2; sampled o = -1.5, -1; A = 2, -3: rho = e^0.5 = 1.6487, e^-1 = 0.3679
BY_HAND = {
    "importance_sampling": -(math.exp(0.5) * 2 - math.exp(-1) * 3),
    "ppo": -(1.2 * 2) - min(math.exp(-1) * -3, 0.8 * -3),
    "cispo": -(1.2 * 2 * -1) - (0.8 * -3 * -2),
    "dro": -(2 * -1 - 0.5 * 0.25) - (-3 * -2 - 0.5 * 1),
}


@pytest.mark.parametrize("loss", BY_HAND)
def test_losses_by_hand(loss: str) -> None:
    made = rows(
        loss, datum([1, 2], target_tokens=[2, 3], logprobs=np.float32([-1.5, -1]), advantages=np.float32([2, -3]))
    )
    objective = objective_of(loss, {}, is_picked=made.is_picked)
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    total, _ = objective.loss({"log_probs": log_probs}, made.batch.columns(), {})
    assert float(total.detach()) == pytest.approx(BY_HAND[loss], rel=1e-5)
    assert objective.seen[0].tolist() == [-1, -2]


def plain(name: str, options: dict[str, float | str]) -> SumObjective:
    return objective_of(name, options, is_picked=False)


def test_options_of_the_sdk() -> None:
    ppo = {"clip_ratio_low": 0.5, "clip_ratio_high": 1.0, "clip_ratio_c": None}
    assert plain("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}).options == ppo
    cispo = {"bounds": "absolute", "clip_ratio_low": 0.25, "clip_ratio_high": 4.0}
    assert plain("cispo", {"clip_low_threshold": 0.25, "clip_high_threshold": 4.0}).options == cispo
    assert plain("dro", {"beta": 0.05}).options["beta"] == 0.05
    assert plain("whet:cispo", {}).options["bounds"] == "relative" and plain("sapo", {}).loss_name == "sapo"
    for name, options in (("ppo", {"clip": 1.0}), ("cross_entropy", {"beta": 1.0}), ("stable_reinforce", {})):
        with pytest.raises(WhetError):
            plain(name, options)


def test_a_sequence_ratio_is_of_the_marked_tokens() -> None:
    """GSPO of the SDK: rows [-1, -2] - [-2, -2] have the mean 0.5 over two marked tokens."""
    mask = np.float32([0, 1, 1])
    values = np.float32([0, -2, -2]), np.float32([0, 1, 1])
    made = rows(
        "gspo",
        datum([1, 2, 3], target_tokens=[0, 3, 4], logprobs=values[0], advantages=values[1], sequence_ratio_mask=mask),
    )
    options = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    objective = objective_of("gspo", options, is_picked=made.is_picked)
    total, _ = objective.loss({"log_probs": torch.tensor([[-1.0, -2.0]])}, made.batch.columns(), {})
    assert float(total) == pytest.approx(-2 * math.exp(0.5), rel=1e-5)


def test_an_input_that_only_some_rows_have_is_refused() -> None:
    with raises(DataError, "input 'weights'"):
        rows("cross_entropy", datum([1], target_tokens=[2], weights=np.float32([2])), datum([1], target_tokens=[2]))


def test_targets_of_several_widths_are_refused() -> None:
    with pytest.raises(DataError):
        rows("cross_entropy", datum([1], target_tokens=[[1, 2]]), datum([1], target_tokens=[[1, 2, 3]]))


@pytest.mark.parametrize("place", ["timeit:timeit", "{file}:loss", "os.path:join"])
def test_a_client_names_no_code(place: str, tmp_path: Path) -> None:
    """A loss and an aggregation are registered names: a location of code is refused, and nothing is imported."""
    code = tmp_path / "code.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef loss(log_probs): return log_probs\n")
    name = place.format(file=code)
    for loss, options in ((name, {}), (f"whet:{name}", {}), ("ppo", {"aggregation": name})):
        with raises(RegistryError, found=name):
            plain(loss, options)
    assert not (tmp_path / "ran").exists()


def test_a_divisor_of_the_whole_batch_comes_from_the_client() -> None:
    """The mean over 4 tokens in two requests: each adds its share."""
    data = [datum([1, 2], target_tokens=[2, 3], weights=np.float32([1, 1])) for _ in range(2)]
    for name in AGGREGATIONS.names():
        divisors = [each for each in losses.DIVISORS if each in AGGREGATIONS[name].options]
        if divisors:
            with raises(DataError, "aggregation"):
                plain("cross_entropy", {"aggregation": name})
        options = {"aggregation": name, **dict.fromkeys(divisors, 4.0)}
        total = 0.0
        for row in data:
            made = rows("cross_entropy", row)
            objective = plain("cross_entropy", options)
            counts = objective.counts(made.batch.columns())
            own, _ = objective.loss({"log_probs": torch.tensor([[-1.0, -3.0]])}, made.batch.columns(), counts)
            total += float(own)
        # two rows of the loss 4: 8 / 4, or 8 / 4 / 4 with a length; means of rows are 2
        expected = {"token-sum": 8.0, "seq-mean-token-sum-norm": 0.5, "seq-mean-token-mean": 1.0}.get(name, 2.0)
        assert total == pytest.approx(expected), name
    for bad in (0.0, math.nan, math.inf, "many"):
        with raises(DataError, "num_tokens"):
            plain("cross_entropy", {"aggregation": "token-mean", "num_tokens": bad})
    empty = rows("cross_entropy", datum([1], target_tokens=[2], weights=np.float32([0])))
    counts = plain("cross_entropy", {"aggregation": "token-mean", "num_tokens": 4.0}).counts(empty.batch.columns())
    assert not any(counts.values())  # nothing to train on is no update


def test_a_column_of_the_whole_batch_comes_from_the_client() -> None:
    sampled = {"logprobs": np.float32([-1, -2]), "advantages": np.float32([1, 1])}
    for loss in [entry.name for entry in POLICY_LOSSES if "before" in entry.marks]:
        objective = plain(loss, {})
        with raises(DataError, f"loss {loss!r}"):
            objective.check(rows(loss, datum([1, 2], target_tokens=[2, 3], **sampled)).batch)
        given = rows(loss, datum([1, 2], target_tokens=[2, 3], chosen=np.float32([0, 1]), **sampled))
        objective.check(given.batch)
        total, _ = objective.loss({"log_probs": torch.tensor([[-1.0, -1.5]])}, given.batch.columns(), {})
        assert math.isfinite(float(total))


def test_a_column_of_rows_is_one_number() -> None:
    """TOPR's accuracy: the wrong row has the weight min(1, e^(-3 + 4)) = 1, or e^(-5 + 4); the right row has 1."""
    sampled = {"logprobs": np.float32([0, -4]), "advantages": np.float32([0, 2])}
    data = [datum([1, 2], target_tokens=[0, 3], accuracy=np.float32([right]), **sampled) for right in (1, 0, 0)]
    made, objective = rows("topr", *data), plain("topr", {})
    objective.check(made.batch)
    assert made.batch["accuracy"].tolist() == [1, 0, 0]
    total, _ = objective.loss({"log_probs": torch.tensor([[-5.0], [-3.0], [-5.0]])}, made.batch.columns(), {})
    assert float(total) == pytest.approx(2 * (5 + 3 + 5 * math.exp(-1)), rel=1e-5)
    with raises(DataError, "datum 0: accuracy"):
        rows("topr", datum([1, 2], target_tokens=[0, 3], accuracy=np.float32([1, 1]), **sampled))


@pytest.mark.parametrize("loss", [entry.name for entry in POLICY_LOSSES])
def test_each_input_that_a_loss_reads_is_asked_for(loss: str) -> None:
    entry = POLICY_LOSSES[loss]
    inputs = {"logprobs" if "log_probs" in name else name for name in entry.columns}
    inputs -= {"response_mask", *(["logprobs"] if {*entry.columns} == {"log_probs", "advantages"} else [])}
    given: dict[str, Any] = {name: np.float32([1] if name == "accuracy" else [1, 1]) for name in inputs}
    for missing in [None, *inputs]:
        own = {name: each for name, each in given.items() if name != missing}
        made = rows(loss, datum([1, 2], target_tokens=[2, 3], weights=np.float32([1, 1]), **own))
        if missing is None:
            plain(f"whet:{loss}", {}).check(made.batch)
        else:
            with raises(DataError, f"loss {loss!r}"):
                plain(f"whet:{loss}", {}).check(made.batch)


COMPARED = [
    datum([1, 2, last], target_tokens=[2, last, 9], weights=np.float32([0, 1, 1]), ref_log_probs=np.float32([0, a, b]))
    for last, a, b in ((3, -2, -1), (4, -1, -1), (5, -3, -3), (6, -2, -2))
]
NOW = torch.tensor([[-1.0, -1.0], [-2.0, -1.0], [-3.0, -2.0], [-1.0, -1.0]])  # sums less the reference: 1, -1, 1, 2


def test_a_preference_loss_compares_adjacent_rows() -> None:
    """DPO: differences of 2 beta and -beta. The divisor is of the whole batch; without it, the sum."""
    made = rows("dpo", *COMPARED)
    for options, divisor in ({}, 1), ({"num_comparisons": 4.0}, 4):
        objective = objective_of("dpo", {"beta": 0.5, **options}, is_picked=made.is_picked)
        objective.check(made.batch)
        total, _ = objective.loss({"log_probs": NOW}, made.batch.columns(), objective.counts(made.batch.columns()))
        assert float(total) == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(0.5))) / divisor)
    assert objective.block == 2 and objective.seen[3].tolist() == [-1, -1]
    empty = rows("dpo", *(datum([1], target_tokens=[2], weights=np.float32([0])) for _ in range(2)))
    assert not any(objective.counts(empty.batch.columns()).values())


def test_a_request_that_cuts_a_comparison_is_refused() -> None:
    for loss, options in (("dpo", {}), ("whet:simpo", {}), ("plackett_luce", {"list_size": 2.0})):
        scored = [datum([1], target_tokens=[2], weights=np.float32([1]), ref_log_probs=np.float32([-1]),
                        scores=np.float32([1]))] * 3  # fmt: skip
        with raises(DataError, "data"):
            plain(loss, options).check(rows(loss, *scored).batch)
        plain(loss, options).check(rows(loss, *scored[:2]).batch)


def test_a_preference_loss_refuses_other_rows() -> None:
    reference = {"ref_log_probs": np.float32([-1])}
    for inputs in ({}, {"weights": np.float32([0.5])}):
        with raises(DataError, "weights"):
            plain("dpo", {}).check(rows("dpo", *[datum([1], target_tokens=[2], **reference, **inputs)] * 2).batch)
    with raises(DataError, "loss 'dpo'"):
        plain("dpo", {}).check(rows("dpo", *[datum([1], target_tokens=[2], weights=np.float32([1]))] * 2).batch)
    with raises(DataError, "target_tokens"):
        objective_of("dpo", {}, is_picked=True)
    with raises(DataError, "datum 0: label"):
        rows("kto", datum([1, 2], target_tokens=[2, 3], label=np.float32([1, 1])))
    for key, bad in (
        ("list_size", {}),
        ("list_size", {"list_size": 0.0}),
        ("num_comparisons", {"num_comparisons": 0.0}),
    ):
        with raises(DataError, key):
            plain("plackett_luce", {"list_size": 2.0, **bad} if bad else {})
    with pytest.raises(ConfigError):
        plain("dpo", {"aggregation": "token-mean"})
    assert plain("ipo", {"per_token": 0.0}).options["per_token"] is False
    assert plain("cpo", {"sft_coef": 0.5}).options["sft_coef"] == 0.5


def test_options_that_are_no_numbers_are_refused() -> None:
    for name in ("clip_low_threshold", "clip_high_threshold"):
        with raises(DataError, name, found="abc"):
            plain("ppo", {name: "abc"})
        with pytest.raises(ConfigError):
            plain("ppo", {name: math.nan})


@pytest.mark.parametrize("name", sorted(losses.RESERVED))
def test_an_input_replaces_no_column_of_the_server(name: str) -> None:
    with raises(DataError, f"input {name!r}"):
        rows("ppo", datum([1], target_tokens=[2], **{name: np.float32([1])}))


def test_few_rows_do_not_become_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row makes short ones as wide, and targets of its own need log-probs of the whole vocabulary."""
    monkeypatch.setattr(losses, "MOST_PADDED", 100)
    short = [datum([1], target_tokens=[2])] * 9
    with raises(DataError, "data"):
        rows("cross_entropy", *short, datum([1] * 20, target_tokens=[1] * 20))
    monkeypatch.setattr(losses, "MOST_TABLE", 100)
    with raises(DataError, "target_tokens"):
        rows("cross_entropy", datum([1, 2], target_tokens=[9, 9]))
    rows("cross_entropy", datum([1, 2], target_tokens=[2, 9]))
