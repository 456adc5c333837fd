# SPDX-License-Identifier: Apache-2.0
"""Workers in the calling process itself; what all backends share is in test_backends.py."""

import pytest
from controller_workers import Actor, Misconfigured

from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.errors import ConfigError, WorkerError


def test_a_whet_error_of_a_worker_stays_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^actor.mini_batch_size=3 must divide data.train_batch_size=8") as caught:
        launch([WorkerSpec("actor", Misconfigured, (0,))], ResourcePool(1), deadline_seconds=60)
    assert caught.value.__notes__ == ["raised in actor rank 0, __init__"]


def test_an_error_here_has_its_original_as_cause_and_closes_the_group() -> None:
    actor = launch([WorkerSpec("actor", Actor)], ResourcePool(1), deadline_seconds=60)["actor"]
    with pytest.raises(WorkerError, match=r"^actor rank 0: weak_link raised ValueError: no such token: 7$") as caught:
        actor.weak_link(0, "raise")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(WorkerError, match=r"actor.add: the workers are closed \(actor rank 0: weak_link raised"):
        actor.add(1.0)
    actor.close()
