# SPDX-License-Identifier: Apache-2.0
"""Caches in a process of tests the objects that libraries create at each call: a program creates them once, ten
thousand tests do not need them ten thousand times."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, cast

import httpx
import typer
from _pytest.logging import catching_logs
from hydra._internal import config_loader_impl
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource

Call = Callable[..., Any]


def keep() -> None:
    """Replaces these functions of libraries, once all modules of the tests are loaded."""
    names = vars(sys.modules[httpx.HTTPTransport.__init__.__module__])
    names["create_ssl_context"] = kept(names["create_ssl_context"], _certificates)
    typer.main.get_command = kept(typer.main.get_command, _commands)
    source: Any = ImportlibResourcesConfigSource
    source.load_config = kept(source.load_config, lambda own, name: (own.path, name), copy.deepcopy)
    listed = Twice(config_loader_impl.create_defaults_list)
    loader: Any = config_loader_impl.ConfigLoaderImpl
    config_loader_impl.create_defaults_list = listed.first  # type: ignore[assignment]
    loader.compute_defaults_list = listed.second(loader.compute_defaults_list)
    catching, loggers = cast(Any, catching_logs), Loggers()
    catching.__enter__ = lambda own: loggers.enter(own)  # a bound method would not get the object
    if planned := sys.modules.get("whet.plugins.planner.outline"):  # small runs estimate their checkpoints
        estimate = vars(planned.Outline)["moment_bytes"]
        estimate.func = kept(estimate.func, lambda own: (repr(replace(own.role, total_steps=1)), own.num_weights))
    if built := sys.modules.get("whet.rollout.build"):
        vars(built)["lack_at"] = kept(vars(built)["lack_at"], _model)


def kept(make: Call, key: Callable[..., Hashable], handed_out: Call = lambda made: made) -> Call:
    """The function, which makes one object for each key of its arguments."""
    found: dict[Hashable, Any] = {}

    @wraps(make)
    def call(*given: Any, **named: Any) -> Any:
        if (name := key(*given, **named)) not in found:
            found[name] = make(*given, **named)
        return handed_out(found[name])

    return call


def _certificates(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Hashable:
    """An empty context of TLS reads all certificates of the machine, also for a client that speaks without it."""
    return verify, cert, trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR"))


def _commands(app: typer.Typer) -> Hashable:
    """An application reads the signatures of all of its commands; `whet` may add one."""
    return app, *(each.name for each in app.registered_commands), len(app.registered_groups)


def _model(settings: Any) -> Hashable:
    """A run makes its model without numbers, to look for parts that whet does not compute."""
    config = Path(settings.path, "config.json")
    return settings.path, settings.trust_remote_code, config.read_bytes() if config.is_file() else b""


class Twice:
    """Hydra's list of a recipe's parts, which whet asks for right after it composed the same."""

    def __init__(self, make: Call) -> None:
        self.make = make
        self.last: tuple[object, Any] = ((), None)

    def first(self, **named: Any) -> Any:
        """Makes the list, and remembers it."""
        made = self.make(**named)
        self.last = (named["config_name"], [each.input_line for each in named["overrides_list"]]), made
        return made

    def second(self, plain: Call) -> Call:
        """Hands out the list of the composition before it, once."""

        def compute(loader: Any, config_name: str | None, overrides: list[str], run_mode: Any) -> Any:
            (name, made), self.last = self.last, ((), None)
            return made if name == (config_name, overrides) else plain(loader, config_name, overrides, run_mode)

        return compute


class Loggers:
    """pytest's way of catching logs, which goes through all loggers (transformers has a thousand) six times a test, for
    the few that do not propagate to the root."""

    def __init__(self) -> None:
        self.count, self.apart = 0, list[logging.Logger]()

    def enter(self, catching: Any) -> Any:
        """`catching_logs.__enter__`."""
        root = logging.getLogger()
        known = root.manager.loggerDict
        if len(known) != self.count:
            loggers = [each for each in known.values() if isinstance(each, logging.Logger)]
            self.count, self.apart = len(known), [each for each in loggers if not each.propagate]
        if catching.level is not None:
            catching.handler.setLevel(catching.level)
        for logger in (root, *self.apart):
            logger.addHandler(catching.handler)
            catching.attached_loggers.append(logger)
        if catching.level is not None:
            catching.orig_level = root.level
            root.setLevel(min(catching.orig_level, catching.level))
        return catching.handler
