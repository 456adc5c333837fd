# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import whet
from whet.cli import algorithms as command
from whet.cli.algorithms import certificate, chosen_by, elsewhere, facts, legend, notation, number, summary
from whet.cli.app import main
from whet.config.preference import PreferenceConfig
from whet.config.schema import TrainConfig
from whet.config.section import is_known
from whet.plugins.proofs.certify import rows_of
from whet.registry import ADV_ESTIMATORS, KINDS, KL_FORMS, POLICY_LOSSES, Registry


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["algorithms", *arguments])
    assert exit_.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_every_registered_function_has_one_line_under_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    for kind in KINDS:
        start = next((i for i, line in enumerate(lines) if line.startswith(f"{kind.kind}  ")), None)
        assert (start is not None) == bool(kind.names())
        if start is not None:
            block = lines[start + 1 : start + 1 + len(kind.names())]
            assert [line.split()[0] for line in block] == kind.names()
            assert all(len(line.split()) > 1 for line in block), f"a {kind.kind} has no summary"


def test_an_alias_says_what_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys)
    assert next(line for line in out.splitlines() if line.startswith("  vanilla ")).split(maxsplit=1)[1].rstrip() == (
        "ppo_clip with clip_ratio_c=3.0"
    )


def test_show_prints_formula_columns_and_options_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "gspo")
    facts = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in out.splitlines() if "  " in line}
    assert out.startswith("policy loss gspo\n") and "arxiv.org/abs/2507.18071" in out
    assert "In formulas: l log_probs, o old_log_probs" in out
    assert facts["stale error"].startswith("the error on samples of a policy whose logits differ by noise of")
    assert facts["choose"] == "algorithm.policy_loss=gspo"
    assert facts["columns"].startswith("log_probs, old_log_probs, advantages")
    assert facts["algorithm.loss_options.clip_ratio_low"] == "0.0003 (a number >= 0 and <= 1)"
    assert facts["fixes aggregation"] == "seq-mean-token-mean"


@pytest.mark.parametrize("words", [("certify",), ("show", "gspo")], ids=["certificates", "formula"])
def test_certificates_are_printed_with_the_meaning_of_each_of_their_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "whet.plugins.proofs.command.certify_all", lambda _: [["policy loss", "gspo", *("0.00" for _ in legend())]]
    )
    lines = [line.rstrip() for line in printed(capsys, *words).splitlines()]
    assert len(legend()) == 8 and all(f"{title:14}{text}" in lines for title, text in legend().items())


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    err = printed(capsys, "show", "gppo", status=2)
    assert re.match("RegistryError: .*gppo; .*`whet algorithms`.* sppo or gspo or grpo", err)


def test_every_kind_is_chosen_by_a_key_that_exists() -> None:
    assert [kind.kind for kind in KINDS] == list(chosen_by())
    keys = {key for pair in chosen_by().values() for key in pair if key is not None}
    assert not [key for key in keys if not is_known(TrainConfig, key) and not is_known(PreferenceConfig, key)]


def test_facts_and_certificate_of_one() -> None:
    known = dict(facts(POLICY_LOSSES["gspo"]))
    assert known["choose"] == "algorithm.policy_loss=gspo"
    assert known["fixes aggregation"] == "seq-mean-token-mean"
    assert known["algorithm.loss_options.clip_ratio_low"] == "0.0003 (a number >= 0 and <= 1)"
    said = dict(certificate(ADV_ESTIMATORS["rloo"]))
    assert said["certificate"].startswith("exact yes, error < 1e-12, cosine 1.000")
    assert said["verdict"].startswith("unbiased:")
    assert certificate(POLICY_LOSSES["vanilla"]) == []


def test_a_verdict_says_whether_and_why_a_step_is_biased() -> None:
    """cos 48.6 degrees is 0.661; halving a gradient is no bias; a step towards a teacher points away (cosine < 0)."""
    grpo = dict(certificate(ADV_ESTIMATORS["grpo"]))["verdict"]
    assert grpo.startswith("biased by design:") and "deviation" in grpo and "49 degrees" in grpo
    half = dict(certificate(ADV_ESTIMATORS["dr_grpo"]))["verdict"]
    assert half.startswith("unbiased but for its length") and "0.50" in half
    assert "119 degrees" in dict(certificate(ADV_ESTIMATORS["on_policy_distillation"]))["verdict"]
    said = dict(certificate(KL_FORMS["k1"]))
    assert said["verdict, KL in the reward"].startswith("unbiased:") and "zero" in said["verdict, KL in the loss"]


def test_every_shipped_certificate_of_a_function_has_its_verdict_and_every_text_its_certificate() -> None:
    names = yaml.safe_load((Path(whet.__file__).parent / "algorithms" / "names.yaml").read_text())["bias"]
    told = {(kind, name): command.verdict(kind, name, cells) for (kind, name), cells in command.shipped().items()}
    assert [key for key, text in told.items() if text.startswith("biased:") and key[0] != "recipe"] == []
    assert [(kind, name) for kind in names for name in names[kind] if not told[kind, name].startswith("biased")] == []
    functions = {(row.kind, row.name) for kind in KINDS for entry in kind for row in rows_of(entry)}
    assert functions <= told.keys()
    assert {name for kind, name in told.keys() - functions if kind != "recipe"} == {
        "none",
        "importance of the sequence, no cap",
    }


def test_show_computes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.plugins.proofs.certify.certify", None)
    assert "49 degrees" in printed(capsys, "show", "grpo")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.folder == "algorithms"], ids=lambda kind: kind.kind)
def test_everything_says_what_its_name_means_elsewhere(kind: Registry) -> None:
    assert [entry.name for entry in kind if len(elsewhere(entry)) < len("verl `k1`.")] == []


def test_what_is_said_beside_the_functions_is_of_functions_that_exist() -> None:
    names = yaml.safe_load((Path(whet.__file__).parent / "algorithms" / "names.yaml").read_text())
    kinds = {kind.kind: kind for kind in KINDS}
    assert not [(kind, name) for kind, texts in names["elsewhere"].items() for name in texts if name not in kinds[kind]]
    assert names["notation"].keys() <= kinds.keys()
    assert elsewhere(KL_FORMS["k3+"]) == "verl `k3+`."
    assert elsewhere(POLICY_LOSSES["gmpo"]).startswith("verl `geo_mean`")
    assert notation("KL form").startswith("l log_probs, o old_log_probs") and notation("reward") == ""


def test_an_option_shows_what_it_may_be() -> None:
    assert (
        dict(facts(POLICY_LOSSES["cispo"]))["algorithm.loss_options.bounds"]
        == "relative (one of relative, cap, absolute)"
    )


def test_the_summary_of_an_alias_says_what_it_changes() -> None:
    assert summary(POLICY_LOSSES["vanilla"]) == "ppo_clip with clip_ratio_c=3.0"
    assert summary(POLICY_LOSSES["gmpo"]) == "geo_mean"


def test_errors_of_rounding_are_shown_as_such() -> None:
    assert (number(3e-16), number(0.0521)) == ("< 1e-12", "0.05")


OWN = '''
from whet import register_adv_est


@register_adv_est("mine")
def mine(token_level_rewards, response_mask, uid, *, scale: float = 1.0):
    """Scales the summed rewards."""
    return scale * (token_level_rewards * response_mask).sum(-1).sqrt()


def plain(x):
    return x
'''


@pytest.mark.slow
def test_show_takes_the_users_own_function_by_its_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ADV_ESTIMATORS, "_live", dict(ADV_ESTIMATORS._live))
    file = tmp_path / "my_file.py"
    file.write_text(OWN)
    out = printed(capsys, "show", f"{file}:mine")
    assert out.startswith(f"advantage estimator {file}:mine\nScales the summed rewards.\n")
    assert f"algorithm.adv_estimator={file}:mine" in out and "algorithm.adv_options.scale" in out
    assert f"`whet algorithms certify {file}:mine`" in out
    out = printed(capsys, "certify", f"{file}:mine")
    assert f"{file}:mine" in out and any(line.startswith("advantage estimator  biased: ") for line in out.splitlines())
    err = printed(capsys, "show", f"{file}:plain", status=2)
    assert f"{file}:plain: " in err and "@register_adv_est, " in err


def test_on_a_terminal_of_120_columns_no_name_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    out = re.sub(r"\x1b\[[0-9;]*m", "", printed(capsys))
    assert "…" not in out and max(map(len, out.splitlines())) <= 120
    for kind in KINDS:
        assert all(f"\n  {name} " in out for name in kind.names())
