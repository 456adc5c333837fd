# SPDX-License-Identifier: Apache-2.0
"""The names `whet` on PyPI is somebody else's, and `whet-rl` is not published: no command installs either by name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import whet

ROOT = Path(__file__).parents[1]
# A word that installs; then the rest of its command, which a backslash may lead over the end of a line.
COMMAND = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|pdm|conda|mamba)[ \t]+(?:install|add|run|pip|tool|download|wheel)\b"
    r"(?P<rest>(?:\\\n|[^;&|\n`])*)"
)
BY_NAME = re.compile(r"""(?:^|[\s'"`(])(?P<name>whet(?:[-_.][a-z-]+)?)(?=[\[<>=!~@'"`),.:\s]|$)""", re.IGNORECASE)
HISTORY = {"LOG.md", "CHANGELOG.md"}


def installed_by_name(text: str) -> list[str]:
    """Commands of a text that install a distribution of whet by its name."""
    return [
        command[0].strip()
        for command in COMMAND.finditer(text)
        if any(found["name"].lower() != "whet_environments" for found in BY_NAME.finditer(command["rest"]))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "pip install whet",
        "run `pip install 'whet[mcp]'`",
        "python -m pip install --quiet whet==0.3.0",
        "uv pip install whet-rl",
        'pip3 install "whet-rl[ray]>=0.3"',
        "uv add whet_rl",
        "RUN pip install --no-cache-dir -c constraints.txt \\\n    whet-rl[ray]",
        "pip install whet-environments",
        "pipx install Whet",
        "pip install torch whet.",
    ],
)
def test_a_command_by_name_is_found(text: str) -> None:
    assert installed_by_name(text), text


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e '.[mcp]'",
        "pip install ./examples/environments",
        "pip install '/opt/whet[mcp]'",
        "pip install -e ~/src/whet",
        "pip install dist/whet_rl-0.3.0-py3-none-any.whl",
        "pip install -c constraints.txt torch; whet quickstart",
        "pip install torch && whet train gsm8k",
    ],
)
def test_a_checkout_a_path_and_a_wheel_are_no_names(text: str) -> None:
    assert not installed_by_name(text), text


def test_no_file_installs_whet_by_name() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".ipynb", ".sh", ".js", ".html", ".cfg", ".gpu", ""}
    files = [name for name in listed.splitlines() if Path(name).suffix in kinds]
    assert {"Dockerfile", "Dockerfile.gpu", "Makefile", "README.md", "whet/errors.py"} <= set(files)
    found = {}
    for name in files:
        if name in HISTORY or name == "tests/test_distribution.py":
            continue
        if commands := installed_by_name((ROOT / name).read_text(encoding="utf-8", errors="replace")):
            found[name] = commands
    assert not found


@pytest.mark.parametrize("project", ["pyproject.toml", "examples/environments/pyproject.toml"])
def test_requirements_never_name_the_other_whet(project: str) -> None:
    table = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]
    lists = [table.get("dependencies", []), *table.get("optional-dependencies", {}).values()]
    ours = [each for wanted in lists for each in wanted if each.lower().startswith("whet")]
    assert ours and all(each.startswith("whet-rl") for each in ours)
    assert table["name"] in ("whet-rl", "whet-environments")


def test_examples_take_this_version_alone() -> None:
    table = tomllib.loads((ROOT / "examples/environments/pyproject.toml").read_text(encoding="utf-8"))["project"]
    from packaging.requirements import Requirement

    wanted = [Requirement(each) for each in (*table["dependencies"], *table["optional-dependencies"]["webshop"])]
    for each in (each for each in wanted if each.name == "whet-rl"):
        assert each.specifier.contains(whet.__version__)
        assert not each.specifier.contains("0.2.1") and not each.specifier.contains("1.0")


def test_the_wheel_is_whet_rl_and_brings_the_package_and_the_command_whet() -> None:
    """hatchling's own reader of pyproject.toml, where it is installed."""
    metadata = pytest.importorskip("hatchling.metadata.core", reason="needs hatchling: pip install hatchling")
    manager = pytest.importorskip("hatchling.plugin.manager", reason="needs hatchling: pip install hatchling")
    core = metadata.ProjectMetadata(str(ROOT), manager.PluginManager())
    assert (core.core.name, core.version) == ("whet-rl", "0.3.0")
    assert core.core.scripts == {"whet": "whet.cli.app:main"}


def test_the_command_says_the_version_of_the_package() -> None:
    ended = subprocess.run([sys.executable, "-m", "whet", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["whet", whet.__version__]
