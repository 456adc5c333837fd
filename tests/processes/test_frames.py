# SPDX-License-Identifier: Apache-2.0
import socket
import threading

import pytest

from whet.processes import frames


def test_messages_are_cut_at_any_place() -> None:
    data = frames.pack(7, b"seven") + frames.pack(8, b"") + frames.pack(2**63, b"x" * 1000)
    for step in (1, 3, 36, len(data)):
        reader, got = frames.FrameReader(), []
        for start in range(0, len(data), step):
            got += reader.feed(data[start : start + step])
        assert got == [(7, b"seven"), (8, b""), (2**63, b"x" * 1000)]


@pytest.mark.parametrize("place", [0, 4, 12, 16, 24, 28, 32, 35])
def test_a_bit_that_changed_is_no_message(place: int) -> None:
    """In the magic, the number, the count, the size, both checksums, and the content."""
    reader, data = frames.FrameReader(), bytearray(frames.pack(7, b"seven"))
    data[place] ^= 1
    got = []
    with pytest.raises(frames.BrokenMessageError):
        got += reader.feed(frames.pack(6, b"six"))
        got += reader.feed(bytes(data))
    assert got == [(6, b"six")]


def test_a_message_before_foreign_bytes_arrives() -> None:
    stream = frames.FrameReader().feed(frames.pack(6, b"six") + b"x" * 40)
    assert next(stream) == (6, b"six")
    with pytest.raises(frames.BrokenMessageError):
        next(stream)


def test_buffers_travel_beside_the_content() -> None:
    left, right = socket.socketpair()
    with left, right:
        sent = [b"content", b"", bytes(10**6), memoryview(b"last")]
        sender = threading.Thread(target=frames.send, args=(left, 5, sent))
        sender.start()
        number, got = frames.receive(right, lambda size: memoryview(bytearray(size)))
        sender.join()
        assert (number, [bytes(frame) for frame in got]) == (5, [bytes(frame) for frame in sent])
        left.close()
        with pytest.raises(EOFError, match="the other side closed"):
            frames.receive(right, lambda size: memoryview(bytearray(size)))
