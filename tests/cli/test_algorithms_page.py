# SPDX-License-Identifier: Apache-2.0
"""docs/algorithms.md is what the functions say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from whet.cli.algorithms_page import (
    CHOSEN_BY,
    LEGEND,
    certificate,
    certify_all,
    elsewhere,
    facts,
    notation,
    number,
    page,
    summary,
    table,
)
from whet.registry import ADV_ESTIMATORS, KINDS, KL_FORMS, POLICY_LOSSES, Registry

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ADVICE = "docs/algorithms.md is not what the functions say; write it with `whet algorithms page`"


@pytest.fixture
def written() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_is_current_but_for_the_certificates(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.cli.algorithms_page.table", lambda _: "")
    assert page_without_table(written) == page_without_table(page({})), ADVICE


def page_without_table(text: str) -> str:
    return text.split("|  |  | exact |")[0].rstrip()


@pytest.mark.slow
def test_the_certificates_are_current(written: str) -> None:
    assert written.split("|  |  | exact |")[1] == table(certify_all()).split("|  |  | exact |")[1], ADVICE


def test_every_kind_says_where_it_is_chosen() -> None:
    assert CHOSEN_BY.keys() == {kind.kind for kind in KINDS}


def test_facts_and_certificate_of_one() -> None:
    known = dict(facts(POLICY_LOSSES["gspo"]))
    assert known["choose"] == "algorithm.policy_loss=gspo"
    assert known["fixes aggregation"] == "seq-mean-token-mean"
    assert known["algorithm.loss_options.clip_ratio_low"] == "0.0003 (a number >= 0 and <= 1)"
    [(title, said)] = certificate(ADV_ESTIMATORS["rloo"])
    assert title == "certificate" and said.startswith("exact yes, error < 1e-12, cosine 1.000")
    assert certificate(POLICY_LOSSES["vanilla"]) == []
    [_, (title, said)] = certificate(KL_FORMS["k3_ratio"])
    assert title == "certificate, KL in the loss" and said.endswith("stale KL < 1e-12")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.folder == "algorithms"], ids=lambda kind: kind.kind)
def test_everything_says_what_its_name_means_elsewhere(kind: Registry) -> None:
    assert [entry.name for entry in kind if len(elsewhere(entry)) < len("verl `k1`.")] == []


def test_what_is_said_beside_the_functions_is_of_functions_that_exist() -> None:
    names = yaml.safe_load((PAGE.parents[1] / "whet" / "algorithms" / "names.yaml").read_text())
    kinds = {kind.kind: kind for kind in KINDS}
    assert not [(kind, name) for kind, texts in names["elsewhere"].items() for name in texts if name not in kinds[kind]]
    assert names["notation"].keys() <= kinds.keys()
    assert elsewhere(KL_FORMS["k3+"]) == "verl `k3+`." and elsewhere(POLICY_LOSSES["gmpo"]).startswith(
        "verl `geo_mean`"
    )
    assert notation("KL form").startswith("l log_probs, o old_log_probs") and notation("reward") == ""


def test_the_page_says_what_each_column_of_a_certificate_means() -> None:
    text = page({})
    assert all(f"- {title}: {meaning}." in text for title, meaning in LEGEND.items())
    assert f"In formulas: {notation('policy loss')}." in text


def test_an_option_shows_what_it_may_be() -> None:
    assert (
        dict(facts(POLICY_LOSSES["cispo"]))["algorithm.loss_options.bounds"]
        == "relative (one of relative, cap, absolute)"
    )
    assert dict(facts(POLICY_LOSSES["vanilla"]))["algorithm.loss_options.clip_ratio_c"] == "3.0 (a number > 1 or null)"
    assert dict(facts(ADV_ESTIMATORS["grpo"]))["algorithm.adv_options.std_norm"] == "True"


def test_an_alias_says_what_it_changes() -> None:
    assert summary(POLICY_LOSSES["vanilla"]) == "ppo_clip with clip_ratio_c=3.0"
    assert summary(POLICY_LOSSES["gmpo"]) == "geo_mean"


def test_errors_of_rounding_are_shown_as_such() -> None:
    assert (number(3e-16), number(0.0521)) == ("< 1e-12", "0.05")
