# SPDX-License-Identifier: Apache-2.0
"""Plugins: their manifests agree with their content, and whet is whole without any of them."""

from __future__ import annotations

import ast
import csv
import re
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.parsed import tree
from tests.raising import raises
from whet import registry
from whet.cli.app import GROUPS, LOOK, PANELS
from whet.config import TrainConfig
from whet.config.compose import advice
from whet.config.section import leaf_fields
from whet.errors import RegistryError
from whet.manifests import NAMES, PLUGINS, manifests, missing_plugin, targets
from whet.moved import FORMER, new_name, today
from whet.rewards.adapter import adapt, stand_ins
from whet.rewards.worker import ScorerSpec
from whet.targets import load_target

HERE = sorted(path.parent.name for path in PLUGINS.glob("*/plugin.toml"))
KINDS = {
    each.decorator.removeprefix("register_"): each
    for each in vars(registry).values()
    if isinstance(each, registry.Registry)
}


def test_every_folder_has_a_manifest_and_a_readme_of_ten_lines() -> None:
    folders = [path for path in PLUGINS.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(path.name for path in folders) == HERE
    assert not [path.name for path in folders if len((path / "README.md").read_text().splitlines()) > 10]


@pytest.mark.parametrize("plugin", HERE)
def test_a_plugin_keeps_to_its_lines(plugin: str) -> None:
    files = (PLUGINS / plugin).rglob("*.py")
    most = tomllib.loads((PLUGINS / plugin / "plugin.toml").read_text())["most_lines"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= most


@pytest.mark.parametrize("plugin", HERE)
def test_a_manifest_names_what_its_plugin_registers(plugin: str) -> None:
    said = {kind: names for kind, names in manifests()[plugin].items() if kind not in ("recipe", "key")}
    offered = {(kind, name): target for kind, names in said.items() for name, target in names.items()}
    registered = {
        (kind, name): entry.target
        for kind, each in KINDS.items()
        for name, entry in each.shipped.items()
        if entry.target.startswith(f"whet.plugins.{plugin}.")
    }
    assert offered == registered


@pytest.mark.parametrize("plugin", HERE)
def test_a_manifest_names_the_recipes_of_its_plugin(plugin: str) -> None:
    found = {path.stem: f"recipes/{path.name}" for path in (PLUGINS / plugin / "recipes").glob("*.yaml")}
    assert manifests()[plugin].get("recipe", {}) == found


def test_every_command_of_a_plugin_has_a_place_in_the_help() -> None:
    for entry in registry.COMMANDS.shipped.values():
        group = entry.name.rpartition(" ")[0]
        assert group in {*GROUPS, "config"} and entry.marks.get("panel", LOOK) in PANELS, entry.name


@pytest.mark.shipped
def test_the_table_of_names_is_that_of_the_manifests() -> None:
    rows = [
        (kind, name, each) for each, kinds in manifests().items() for kind, names in kinds.items() for name in names
    ]
    with NAMES.open(encoding="utf-8", newline="") as file:
        written = [(row["kind"], row["name"], row["plugin"]) for row in csv.DictReader(file)]
    assert written == sorted(written) and set(written) == set(rows)


@pytest.mark.shipped
def test_manifests_name_the_keys_that_plugins_alone_read() -> None:
    """A key is read as `.name`. `migration` names keys of other systems too."""
    core = [
        file for file in PLUGINS.parent.rglob("*.py") if file.parent.name != "config" and PLUGINS not in file.parents
    ]
    read = set(re.findall(r"\.(\w+)", "".join(file.read_text() for file in core)))
    files = [*PLUGINS.glob("*/**/*.py")]
    alone = (
        set(re.findall(r"\.(\w+)", "".join(file.read_text() for file in files if "migration" not in file.parts))) - read
    )
    said = {key: target for kinds in manifests().values() for key, target in kinds.get("key", {}).items()}
    assert {key for key in leaf_fields(TrainConfig) if key.rpartition(".")[2] in alone} == {*said} - {
        "environment.tools"
    }
    for key, target in said.items():
        assert key in leaf_fields(TrainConfig)
        assert key.rpartition(".")[2] in load_target(target, is_called=False).model_fields


@pytest.mark.usefixtures("no_manifests")
def test_a_name_whose_plugin_is_gone_says_which() -> None:
    assert missing_plugin("command", "view") == "viewer" and missing_plugin("command", "vieww") == ""
    assert targets("command") == []
    with raises(RegistryError, "command view", expected=re.compile("viewer"), change=re.compile("viewer")):
        registry.Registry("command", "cli", "register_command")["view"]


@pytest.mark.usefixtures("no_manifests")
def test_without_migration_its_forms_are_errors_and_its_advice_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_batch(data: object) -> object:
        return data

    for module in ("config.compose", "rewards.adapter", "rewards.worker"):
        gone = registry.Registry("part", None, "register_part")
        monkeypatch.setattr(f"whet.{module}.PARTS", gone)
    assert advice("key", TrainConfig, "actor_rollout_ref.rollout.n") is advice("config", "ppo_trainer") is None
    with stand_ins():
        assert "verl" not in sys.modules
    missing = {"expected": re.compile("migration"), "change": re.compile("whet/plugins/migration")}
    with raises(RegistryError, "part data_proto", **missing):
        adapt(of_a_batch, kwargs={}, correct_threshold=1.0)
    with raises(RegistryError, "part reward_manager", **missing):
        ScorerSpec(SimpleNamespace, {}, 1.0).load()


def test_a_config_that_names_an_old_module_is_that_of_today() -> None:
    old = {
        "files": [{"path": "whet.data.drawn.figures:counting"}],
        "function": "whet.trainers.quickstart_pretrained:last_word",
    }
    new = {
        "files": [{"path": "whet.plugins.lessons.drawn.figures:counting"}],
        "function": "whet.plugins.lessons.quickstart_pretrained:last_word",
    }
    assert today(old) == today(new) == new
    assert today(["whet.rewards.gsm8k:compute_score", "no module", 3]) == [
        "whet.rewards.gsm8k:compute_score",
        "no module",
        3,
    ]


MODULES = {former: new for former, new in FORMER.items() if ":" not in former}
FUNCTIONS = {former: new for former, new in FORMER.items() if ":" in former}
# Of the first version, without a successor:
ENDED = set((Path(__file__).parent / "former_names_ended.txt").read_text().split())


@pytest.mark.shipped
@pytest.mark.parametrize(("former", "new"), MODULES.items())
def test_a_module_is_found_under_its_former_name(former: str, new: str) -> None:
    sys.modules.pop(former, None)
    spec = find_spec(former)
    assert spec is not None and spec.origin == new and find_spec(new) is not None
    place = PLUGINS.parents[1].joinpath(*former.split("."))
    assert not place.with_suffix(".py").exists() and not (place / "__init__.py").exists()


def test_modules_inside_a_former_folder_are_those_of_today(caplog: pytest.LogCaptureFixture) -> None:
    from whet.plugins.viewer import records as today, server

    for name in ("whet.viewer", "whet.viewer.records", "whet.viewer.server"):
        sys.modules.pop(name, None)
    assert import_module("whet.viewer.records").Records is today.Records
    assert import_module("whet.viewer.server").Site is server.Site
    assert server.__spec__ is not None and server.__spec__.name == "whet.plugins.viewer.server"
    warned = [(record.levelname, record.args) for record in caplog.records]
    assert warned == [("WARNING", ("whet.viewer", "whet.plugins.viewer"))]


@pytest.mark.parametrize(("former", "new"), FUNCTIONS.items())
def test_a_function_or_class_is_found_under_its_former_name(
    former: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, _, name = former.partition(":")
    if module in FORMER:
        sys.modules.pop(module, None)
    assert getattr(import_module(module), name) is load_target(new, is_called=False)
    assert today(former) == new
    warned = {record.args for record in caplog.records if record.levelname == "WARNING"}
    assert {(former, new)} <= warned
    assert not hasattr(import_module(module), "no_name_of_any_version")


def test_a_former_name_in_a_deleted_plugin_fails_with_the_name_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMER, "whet.once", "whet.plugins.deleted.once")
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module("whet.once")
    assert raised.value.name == "whet.plugins.deleted"


@pytest.mark.shipped
def test_every_name_of_the_first_version_is_found_or_has_ended() -> None:
    """`former_names.txt` has all modules of d55330f7, and all functions and classes as `module:name`."""
    lost = set()
    for former in (Path(__file__).parent / "former_names.txt").read_text().split():
        module, _, name = today(former).partition(":")
        place = PLUGINS.parents[1].joinpath(*new_name(module).split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.exists() or (name and name not in names_in(file)):
            lost.add(former)
    assert lost == ENDED


@cache
def names_in(file: Path) -> set[str]:
    """Returns names that a module defines or imports."""
    found = set[str]()
    for node in tree(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found
