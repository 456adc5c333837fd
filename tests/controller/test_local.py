# SPDX-License-Identifier: Apache-2.0
"""Workers in the calling process itself; test_backends.py has the tests that all backends share."""

import re

import pytest
from controller_workers import Actor, Misconfigured, check_misconfigured

from tests.raising import check_fields, raises
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.errors import ConfigError, WorkerError


def test_a_whet_error_of_a_worker_stays_what_it_is() -> None:
    with pytest.raises(ConfigError) as caught:
        launch([WorkerSpec("actor", Misconfigured, (0,))], ResourcePool(1), deadline_seconds=60)
    check_misconfigured(caught.value)
    assert caught.value.__notes__ == ["raised in actor rank 0, __init__"]


def test_an_error_here_has_its_original_as_cause_and_closes_the_group() -> None:
    actor = launch([WorkerSpec("actor", Actor)], ResourcePool(1), deadline_seconds=60)["actor"]
    with pytest.raises(WorkerError) as caught:
        actor.weak_link(0, "raise")
    check_fields(caught.value, "actor rank 0, weak_link", found=re.compile("ValueError: no such token: 7$"))
    assert isinstance(caught.value.__cause__, ValueError)
    with raises(WorkerError, "actor.add", found=re.compile(r"\(actor rank 0, weak_link: .*ValueError")):
        actor.add(1.0)
    actor.close()
