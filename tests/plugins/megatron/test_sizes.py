# SPDX-License-Identifier: Apache-2.0
"""Settings that the engine refuses when a config is loaded, on machines without Megatron-Core too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from whet.errors import ConfigError

pytest.importorskip("whet.plugins.megatron.sizes")


@pytest.mark.parametrize(
    ("overrides", "key", "found"),
    [
        ({"engine.options.tensor": 3}, "actor.engine.options.tensor", 3),
        ({"engine.options": {"tensor": 2, "pipeline": 4}}, "actor.engine.options.pipeline", 4),
        ({"engine.options.expert": 3}, "actor.engine.options.expert", 3),
        ({"engine.options": {"pipeline": 2, "expert": 4}}, "actor.engine.options.expert", 4),
        ({"engine.options.virtual": 2}, "actor.engine.options.virtual", 2),
        ({"engine.options.context": 2}, "actor.engine.options.context_by", "transformer_engine"),
        ({"optim.name": "muon"}, "actor.engine.name", "megatron"),
    ],
)
def test_what_does_not_go_together(
    overrides: dict[str, Any],
    key: str,
    found: object,
    train_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whet.plugins.megatron.sizes.is_installed", lambda: True)
    given = {"cluster.processes": 4, "actor.engine.name": "megatron"}
    with pytest.raises(ConfigError) as caught:
        train_config({**given, **{f"actor.{name}": value for name, value in overrides.items()}})
    assert [(error.key, error.found) for error in (caught.value, *caught.value.others)] == [(key, found)]
