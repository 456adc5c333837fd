# SPDX-License-Identifier: Apache-2.0
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from whet.batch import Batch
from whet.controller import wire
from whet.processes.frames import send


@dataclass
class Holder:
    tensor: torch.Tensor


def test_tensors_wherever_they_stand_travel_out_of_band_and_are_the_same() -> None:
    big = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    value: dict[str, Any] = {
        "holder": Holder(big),
        "again": big,
        "view": big[:, 3],
        "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "bool": torch.tensor([[True], [False]]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "array": np.arange(5),
        "batch": Batch.of({"x": torch.arange(4)}, {"name": list("abcd")}, {"step": 1}),
        "text": ["a", ("b", None)],
    }
    frames = wire.encode(value)
    assert len(frames[0]) < 5000  # of more than 400,000 bytes
    assert sum(len(frame) for frame in frames) < 400_000 + 10_000  # `again` travels once, `view` without its base
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=send, args=(left, 3, frames))
        sender.start()
        number, received = wire.receive(right)
        got = wire.decode(received)
        sender.join()
    assert number == 3
    assert torch.equal(got["holder"].tensor, big)
    assert got["again"] is got["holder"].tensor
    for name in ("view", "bfloat16", "bool", "scalar", "empty"):
        assert got[name].dtype == value[name].dtype
        assert torch.equal(got[name], value[name])
    got["view"] += 1  # received memory is the receiver's own
    assert np.array_equal(got["array"], np.arange(5))
    assert got["batch"]["x"].tolist() == [0, 1, 2, 3]
    assert got["batch"]["name"].tolist() == list("abcd")
    assert got["text"] == ["a", ("b", None)]


def test_a_closed_connection_ends_a_message() -> None:
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall((3).to_bytes(8, "little"))
        with pytest.raises(EOFError, match="the other side closed"):
            wire.receive(right)
