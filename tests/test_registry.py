# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import is_installed
from tests.raising import raises
from whet.algorithms.calls import call
from whet.errors import ConfigError, RegistryError
from whet.registry import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    ENVIRONMENTS,
    KINDS,
    KL_FORMS,
    POLICY_LOSSES,
    REQUIRED,
    Registry,
    load_target,
)

MASK = torch.tensor([[1, 0]])
SHIPPED = [
    pytest.param(kind, entry, id=f"{kind.decorator}-{entry.name}")
    for kind in KINDS
    for entry in filter(is_installed, kind)
]


@pytest.fixture
def losses() -> Registry:
    """A registry of its own, so that nothing registered here is seen by other tests."""
    return Registry("policy loss", "algorithms", "register_policy_loss")


# ---- shipped functions


def test_the_first_algorithms_are_there() -> None:
    assert {"gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus"} <= set(ADV_ESTIMATORS.names())
    assert {"ppo_clip", "vanilla", "gspo", "reinforce"} <= set(POLICY_LOSSES.names())


def test_listing_shipped_functions_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from whet.registry import ADV_ESTIMATORS, KINDS\n"
        "names = [entry.name for entry in ADV_ESTIMATORS]\n"
        "facts = [(e.columns, e.options, e.summary, e.marks) for kind in KINDS for e in kind]\n"
        "assert 'torch' not in sys.modules and 'whet.algorithms' not in sys.modules, 'imported to be listed'\n"
        "print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ADV_ESTIMATORS.names()


@pytest.mark.parametrize(("kind", "entry"), SHIPPED)
def test_what_is_read_from_source_is_what_python_says(kind: Registry, entry: Any) -> None:
    function = entry.load()
    live = kind.entry_of(function, entry.name, entry.marks)
    if entry.alias_of is None:
        assert dict(entry.options) == dict(live.options)
    else:
        assert set(entry.options) == set(live.options)  # an alias may only change defaults that there are
        assert kind[entry.alias_of].target == entry.target
    assert (entry.parameters, entry.target, entry.doc) == (live.parameters, live.target, live.doc)
    assert entry.accepts_any_option == live.accepts_any_option
    assert entry.summary


def test_columns_options_and_marks_of_a_shipped_function() -> None:
    gspo = POLICY_LOSSES["gspo"]
    assert gspo.columns == ("log_probs", "old_log_probs", "advantages", "response_mask")
    assert gspo.options == {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "level": "sequence"}
    assert gspo.marks == {"aggregation": "seq-mean-token-mean"}
    assert AGGREGATIONS["token-mean"].options["num_tokens"] is REQUIRED


def test_an_alias_is_the_function_with_defaults_of_its_own() -> None:
    vanilla, ppo_clip = POLICY_LOSSES["vanilla"], POLICY_LOSSES["ppo_clip"]
    assert (vanilla.alias_of, vanilla.target) == ("ppo_clip", ppo_clip.target)
    assert {**ppo_clip.options, "clip_ratio_c": 3.0} == vanilla.options
    assert vanilla.resolve_options({"clip_ratio_c": 5.0}, "x")["clip_ratio_c"] == 5.0


def test_a_name_that_nobody_has() -> None:
    known = re.compile("cpo, dr_grpo, ")
    with raises(RegistryError, "advantage estimator", found="grop", expected=known, change=re.compile("'grpo'")):
        ADV_ESTIMATORS["grop"]
    assert "grop" not in ADV_ESTIMATORS
    assert "grpo" in ADV_ESTIMATORS


# ---- options


def test_options_are_checked_against_the_signature() -> None:
    ppo_clip = POLICY_LOSSES["ppo_clip"]
    assert ppo_clip.resolve_options({"clip_ratio_low": 1}, "x") == {
        "clip_ratio_low": 1,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": None,
    }
    key = "algorithm.loss_options.clip_ratio_hi"
    with raises(ConfigError, key, found=0.3, change=re.compile("'clip_ratio_high'")):
        ppo_clip.resolve_options({"clip_ratio_hi": 0.3}, "algorithm.loss_options")
    key, share = "loss_options.clip_ratio_low", "a number >= 0 and <= 1"
    with raises(ConfigError, key, found="0.1", expected=share, change=re.compile(r"default 0\.2$")):
        ppo_clip.resolve_options({"clip_ratio_low": "0.1"}, "loss_options")
    with raises(ConfigError, key, found=True, expected=share):
        ppo_clip.resolve_options({"clip_ratio_low": True}, "loss_options")
    with raises(ConfigError, "x.eps", found=1, expected=re.compile("'rloo': .*none$")):
        ADV_ESTIMATORS["rloo"].resolve_options({"eps": 1}, "x")
    with raises(ConfigError, "x.num_tokens", found=None):
        AGGREGATIONS["token-mean"].resolve_options({}, "x")


# ---- functions of users


def test_a_registered_function_is_found_by_name_and_by_object(losses: Registry) -> None:
    @losses.register("mine", aliases={"mine_hard": {"scale": 9.0}}, aggregation="token-sum")
    def mine(log_probs: Tensor, *, scale: float = 2.0) -> Tensor:
        """Mine."""
        return scale * log_probs

    assert losses["mine"] == losses[mine]
    assert losses[mine].marks == {"aggregation": "token-sum"}
    assert "mine_hard" in losses.names()
    batch = {"log_probs": torch.tensor([[1.0, torch.nan]]), "response_mask": MASK}
    assert call(losses["mine"], batch, {}).tolist() == [[2.0, 0.0]]
    assert call(losses["mine_hard"], batch, {}).tolist() == [[9.0, 0.0]]  # its own default, resolved or not
    assert call(losses["mine_hard"], batch, {"scale": 3.0}).tolist() == [[3.0, 0.0]]


def test_a_name_is_given_once(losses: Registry) -> None:
    def other(log_probs: Tensor) -> Tensor:
        return log_probs

    for name in ("ppo_clip", "vanilla"):
        taken = re.compile("whet.algorithms.policy_losses:ppo_clip$")
        with raises(RegistryError, f"policy loss '{name}'", found=taken):
            losses.register(name)(other)
    losses.register("other")(other)
    losses.register("other")(other)  # a module that is loaded again


USER_FILE = """
from whet.registry import register_kl


def twice(log_probs, ref_log_probs, factor=2.0):
    "Two d."
    return factor * (log_probs - ref_log_probs)


@register_kl("from_a_file", note="kept")
def named(log_probs, ref_log_probs):
    return log_probs
"""


def test_functions_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KL_FORMS, "_live", dict(KL_FORMS._live))  # what the file registers is gone after the test
    (tmp_path / "my_kl.py").write_text(USER_FILE)
    by_file = KL_FORMS[f"{tmp_path}/my_kl.py:twice"]
    assert (by_file.columns, by_file.options) == (("log_probs", "ref_log_probs"), {"factor": 2.0})
    assert by_file.name == by_file.target == f"{tmp_path}/my_kl.py:twice"
    columns = {"log_probs": torch.tensor([3.0]), "ref_log_probs": torch.tensor([1.0])}
    assert call(by_file, columns, {}).tolist() == [4.0]
    assert KL_FORMS[f"{tmp_path}/my_kl.py:named"].marks == {"note": "kept"}
    assert KL_FORMS["from_a_file"].name == "from_a_file"

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_module.py").write_text("def once(log_probs):\n    return log_probs\n")
    assert KL_FORMS["my_module:once"].columns == ("log_probs",)


def test_a_wrong_name_is_answered_with_what_the_file_defines_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\nfrom pathlib import Path\ndef fit_mine(run): pass\nclass Other: pass\n")
    with pytest.raises(RegistryError) as raised:
        load_target(f"{file}:fit_mnie")
    assert raised.value.key == f"{file}:fit_mnie" and raised.value.change == "did you mean fit_mine?"
    assert "Other" in raised.value.expected and "Path" not in raised.value.expected


@pytest.mark.parametrize("name", ["json", "LIMIT", "LIMIT.real", "Other.made"])
def test_what_cannot_be_called_is_no_function(name: str, tmp_path: Path) -> None:
    """A number may be data (`is_called` is false there), and a method of a class is a function."""
    file = tmp_path / "mine.py"
    file.write_text("import json\nLIMIT = 3\nclass Other:\n    @classmethod\n    def made(cls): return cls()\n")
    if name == "Other.made":
        assert type(load_target(f"{file}:{name}")()).__name__ == "Other"
        return
    with pytest.raises(RegistryError) as raised:
        load_target(f"{file}:{name}")
    assert {"json": "module"}.get(name, "int") in str(raised.value.found) and "Other" in raised.value.expected
    assert load_target(f"{file}:LIMIT", is_called=False) == 3


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.py").write_text("def something():\n    pass\n")
    with raises(RegistryError, f"{tmp_path}/missing.py"):
        KL_FORMS[f"{tmp_path}/missing.py:f"]
    with raises(RegistryError, f"{tmp_path}/empty.py:f", expected=re.compile("something")):
        KL_FORMS[f"{tmp_path}/empty.py:f"]
    monkeypatch.setitem(sys.modules, "whet_environments", None)
    found = re.compile("'whet_environments")
    with raises(
        RegistryError, "whet_environments.never_imported:Sokoban", found=found, change=re.compile("pip install")
    ):
        ENVIRONMENTS["whet_environments.never_imported:Sokoban"]
    found = re.compile("'no_such_package'")
    with raises(RegistryError, "no_such_package.inside:f", found=found, change="set PYTHONPATH"):
        KL_FORMS["no_such_package.inside:f"]


def test_what_a_users_file_raises_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    for _ in range(2):  # a half-loaded module is not taken for a loaded one
        with raises(RegistryError, f"{tmp_path}/broken.py", found=re.compile("no_such_dependency")):
            KL_FORMS[f"{tmp_path}/broken.py:f"]
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        KL_FORMS[f"{tmp_path}/raises.py:f"]


def test_a_file_written_for_verl_is_told_where_its_imports_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)  # absent, whatever is installed
    (tmp_path / "theirs.py").write_text("from verl import DataProto\n")
    change = re.compile(r"`from whet\.plugins\.migration\.protocol import DataProto`")
    with raises(RegistryError, f"{tmp_path}/theirs.py", found=re.compile("verl"), change=change):
        KL_FORMS[f"{tmp_path}/theirs.py:f"]


# ---- call


def foreign(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    return index, epsilon, config, kwargs


def test_the_foreign_form() -> None:
    entry = ADV_ESTIMATORS[foreign]
    assert entry.columns == ("token_level_rewards", "response_mask", "uid")
    assert entry.options == {"epsilon": 1e-6, "config": None}
    assert entry.accepts_any_option
    batch = {"token_level_rewards": torch.zeros(1, 2), "response_mask": MASK, "uid": torch.tensor([2**40])}
    options = entry.resolve_options({"anything": 1}, "x")
    index, epsilon, config, kwargs = call(entry, batch, options, {"config": "the config"})
    assert {index[0]: "found"}[2**40] == "found"  # an element of a tensor would be no key
    assert (epsilon, config, kwargs) == (1e-6, "the config", {"anything": 1})
    # what the user gives comes before what is supplied, and the function's own default after it
    assert call(entry, batch, {"config": "mine"}, {"config": "the config"})[2] == "mine"
    assert call(entry, batch, {})[2] is None


def test_what_is_not_given_is_named() -> None:
    def needs(batch: Any, log_prob: Tensor) -> Tensor:
        return log_prob

    key = re.compile("'.*needs'$")
    with raises(RegistryError, key, found=re.compile("'batch'"), expected=re.compile("config")):
        call(POLICY_LOSSES[needs], {"log_probs": torch.zeros(1, 2)}, {}, {"config": None})
    with raises(RegistryError, key, found=re.compile("'log_probs'"), expected=re.compile("uid")):
        call(POLICY_LOSSES[needs], {"uid": torch.zeros(1)}, {}, {"batch": None})
    values = {"values": torch.ones(1, 2), "response_mask": MASK}
    with raises(RegistryError, "aggregation 'token-mean'", found=re.compile("'num_tokens'")):
        call(AGGREGATIONS["token-mean"], values, {})


def test_only_columns_per_token_are_masked() -> None:
    def see(log_probs: Tensor, turn_ids: Tensor, reward_parts: Tensor, response_mask: Tensor) -> tuple[Tensor, ...]:
        return log_probs, turn_ids, reward_parts, response_mask

    batch = {
        "log_probs": torch.tensor([[-1.0, torch.nan]], requires_grad=True),
        "turn_ids": torch.tensor([[0, -1]]),
        "reward_parts": torch.tensor([[1.0, 2.0, 3.0]]),
        "response_mask": MASK,
    }
    log_probs, *others = call(POLICY_LOSSES[see], batch, {})
    assert log_probs.tolist() == [[-1.0, 0.0]]
    assert all(passed is column for passed, column in zip(others, list(batch.values())[1:], strict=True))
    log_probs.square().sum().backward()
    assert batch["log_probs"].grad is not None
    assert batch["log_probs"].grad.tolist() == [[-2.0, 0.0]]
    assert batch["log_probs"].isnan().any()  # the batch itself stays as it was
