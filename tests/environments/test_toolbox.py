# SPDX-License-Identifier: Apache-2.0
"""Tools by their protocol, where the plugin that has them was deleted."""

from __future__ import annotations

import re

import pytest

from tests.raising import check_fields, raises
from whet.config.environment import tool_rule
from whet.config.schema import DataConfig, EnvironmentConfig
from whet.config.section import SectionPlace
from whet.environments.toolbox import tools_of, with_tools
from whet.errors import RegistryError
from whet.registry import PARTS


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch, no_manifests: None) -> None:
    monkeypatch.setattr(PARTS, "shipped", {})
    monkeypatch.setattr(PARTS, "_live", {})


@pytest.mark.usefixtures("without_plugins")
def test_a_run_without_tools_asks_for_no_plugin() -> None:
    data, environment = DataConfig(), EnvironmentConfig()
    assert tools_of(environment) is None and with_tools(data, environment) is data
    assert list(tool_rule(environment, SectionPlace("environment", environment))) == []


@pytest.mark.usefixtures("without_plugins")
def test_tools_are_refused_with_the_name_of_their_plugin() -> None:
    environment = EnvironmentConfig(tools=["mine.py:add", "mine.py:subtract"])
    [error] = tool_rule(environment, SectionPlace("environment", environment))
    check_fields(error, "environment.tools", expected=re.compile("agents"), change=re.compile("whet/plugins/agents"))
    with raises(RegistryError, "part tools", expected=re.compile("agents")):
        tools_of(environment)
