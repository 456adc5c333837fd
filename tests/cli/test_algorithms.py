# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.cli.algorithms import CHOSEN_BY
from whet.cli.app import main
from whet.config.keys import is_known
from whet.config.schema import TrainConfig
from whet.registry import KINDS


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
    assert facts["stale error"].startswith("the error on samples of a policy whose logits are 0.3")
    assert facts["choose"] == "algorithm.policy_loss=gspo"
    assert facts["columns"].startswith("log_probs, old_log_probs, advantages")
    assert facts["algorithm.loss_options.clip_ratio_low"] == "0.0003 (a number >= 0 and <= 1)"
    assert facts["fixes aggregation"] == "seq-mean-token-mean"


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    err = printed(capsys, "show", "gppo", status=2)
    assert err.startswith("RegistryError: nothing is called 'gppo'; did you mean ") and "gspo" in err


def test_every_kind_is_chosen_by_a_key_that_exists() -> None:
    assert [kind.kind for kind in KINDS] == list(CHOSEN_BY)
    keys = {key for pair in CHOSEN_BY.values() for key in pair if key is not None}
    assert not [key for key in keys if not is_known(TrainConfig, key)]
